"""Both phases in one cooperative launch, with a grid-wide barrier between them.

The barrier is one counter in the plan's workspace.  Every block adds 1 to it when all its threads have arrived; block 0
adds 2^31 less the others instead.  So each round adds 2^31 in all: bit 31 flips when the last block has arrived, which
is what the blocks wait for, and the other bits are 0 again.  Nothing is ever reset, no launch number is needed, and a
replay of a graph finds the counter as the launch before left it.

All blocks must be resident at once, or those that wait keep the others out for ever: the launch carries the
cooperative attribute, and the grid comes from the occupancy query.  Every block comes to the barrier exactly once
whatever its work: idle blocks skip phase 1, and nothing returns early.

Why not ``cuda.cg.this_grid().sync()``, which does the same: it is an external call, and beside one the assembler
ignores ``setmaxnreg``, which the walk in roles lives on, and gives every kernel a stack.
"""

from numba import cuda, int32, uint32

from nbverify.kernels import ptx

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


def make_bodies(prepares, split_phase, merge_phase, table_offset, scratch_bytes):
    """One kernel body.  ``table_offset`` is where the work table starts, in int32.

    ``prepares`` fill the table for a kernel that begins with the split phase, and for one that begins with the merge.
    """
    prepare, _ = prepares

    def verify(args):
        table = cuda.shared.array(0, int32, 16)[table_offset:]
        prepare(args, table)
        split_phase(args, table)
        merge_phase(args, table)  # waits at the barrier, which publishes all partial states to all blocks

    return (verify,)
