"""The barrier-free twin of grid_sync: the end of the first launch is the barrier.

Same cuts, same order of merging, same bits.  It is for places where a cooperative launch is refused (MPS, MIG), where
the error says to ask for it; it is never chosen silently.  It is also the oracle that the barrier is tested against.
"""

from numba import cuda, int64

from nbverify.kernels.geometry import merge_scratch_bytes

MERGE_TABLE_OFFSET = merge_scratch_bytes() // 8  # in int64: behind the merge's scratch


def make_bodies(prepare, split_phase, merge_phase, table_offset):
    """Two kernel bodies, to be launched with the same grid one after the other.

    ``table_offset`` is where the work table starts in the first one, in int64.
    """

    def verify_split(args):
        table = cuda.shared.array(0, int64, 16)[table_offset:]
        prepare(args, table)
        split_phase(args, table)

    def verify_merge(args):
        table = cuda.shared.array(0, int64, 16)[MERGE_TABLE_OFFSET:]  # this kernel has no tiles
        prepare(args, table)
        merge_phase(args, table)

    return (verify_split, verify_merge)
