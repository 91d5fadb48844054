"""Both phases in one cooperative launch, with a grid-wide barrier between them.

The barrier is one counter in the plan's workspace.  Every block adds 1 to it when all its threads have arrived; block 0
adds 2^31 less the others instead.  So each round adds 2^31 in all: bit 31 flips when the last block has arrived, which
is what the blocks wait for, and the other bits are 0 again.  Nothing is ever reset, no launch number is needed, and a
replay of a graph finds the counter as the launch before left it.  A plan makes it 0.

All blocks must be resident at once, or those that wait keep the others out for ever: the launch carries the
cooperative attribute, and the grid comes from the occupancy query.  Every block comes to the barrier exactly once
whatever its work: idle blocks skip phase 1, and nothing returns early.

Why not ``cuda.cg.this_grid().sync()``, which does the same: it is an external call, which gives every kernel a stack,
and whose library must then be found and linked.
"""

from numba import cuda, int32, int64, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP, chunk_bytes

SIGN = 0x80000000


@cuda.jit(device=True)
def grid_barrier(args):
    """Wait for all threads of the grid; what they wrote is visible after it."""
    cuda.syncthreads()  # all threads of the block have written
    if cuda.threadIdx.x == 0:
        counter, blocks = ptx.global_address(args.arrivals, 0), uint32(cuda.gridDim.x)
        share = uint32(1)
        if cuda.blockIdx.x == 0:
            share = uint32(uint32(SIGN) - (blocks - uint32(1)))
        before = ptx.atomic_add_u32(counter, share)
        ptx.wait_sign_flip(counter, before)
    cuda.syncthreads()  # publishes to the block that all others have arrived


def make_bodies(prepares, split_phase, merge, geometry):
    """One kernel body.

    ``prepares`` fill the work table for a kernel that begins with the split phase, and for one that begins with the
    merge.
    """
    prepare, _ = prepares
    table_offset, last_warp = geometry.table_offset, geometry.warps - 1
    chunks_offset = (4 * table_offset - chunk_bytes(geometry.warps)) // 8
    look_up, merge_phase = merge.look_up, merge.run

    def verify(args):
        table = cuda.shared.array(0, int32, 16)[table_offset:]
        chunks = cuda.shared.array(0, int64, 16)[chunks_offset:]
        prepare(args, table)
        if cuda.threadIdx.x // WARP == last_warp:  # while the first one opens a segment
            look_up(args, table, chunks)
        split_phase(args, table)
        grid_barrier(args)  # publishes all partial states to all blocks, and the chunks to the block
        merge_phase(args, table, chunks)

    return (verify,)
