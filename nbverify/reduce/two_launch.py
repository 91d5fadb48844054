"""The barrier-free twin of grid_sync: the end of the first launch is the barrier.

Same cuts, same order of merging, same bits.  It is for places where a cooperative launch is refused (MPS, MIG), where
the error says to ask for it; it is never chosen silently.  It is also the oracle that the barrier is tested against.
"""

from numba import cuda, int32, int64

from nbverify.kernels.geometry import WARP, chunk_bytes, merge_scratch_bytes


def make_bodies(prepares, split_phase, merge, geometry):
    """Two kernel bodies, to be launched with the same grid one after the other.

    The second one has no tiles: its chunks and its work table follow the merge's scratch.  ``prepares`` fill the
    tables, one for each of the two.
    """
    prepare_split, prepare_merge = prepares
    table_offset, scratch_bytes = geometry.table_offset, merge_scratch_bytes(geometry.warps)
    chunks_offset = scratch_bytes // 8
    merge_table_offset = (scratch_bytes + chunk_bytes(geometry.warps)) // 4
    look_up, merge_phase = merge.look_up, merge.run

    def verify_split(args):
        table = cuda.shared.array(0, int32, 16)[table_offset:]
        prepare_split(args, table)
        split_phase(args, table)

    def verify_merge(args):
        table = cuda.shared.array(0, int32, 16)[merge_table_offset:]
        chunks = cuda.shared.array(0, int64, 16)[chunks_offset:]
        prepare_merge(args, table)
        if cuda.threadIdx.x < WARP:
            look_up(args, table, chunks)
        cuda.syncthreads()  # publishes the chunks to the block
        merge_phase(args, table, chunks)

    return (verify_split, verify_merge)
