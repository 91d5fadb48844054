"""The barrier-free twin of grid_sync: the end of the first launch is the barrier.

Same cuts, same order of merging, same bits.  It is for places where a cooperative launch is refused (MPS, MIG), where
the error says to ask for it; it is never chosen silently.  It is also the oracle that the barrier is tested against.
"""

from numba import cuda, int32


@cuda.jit(device=True)
def no_barrier(args):
    """All is written when the second launch begins."""


def make_bodies(prepares, split_phase, merge_phase, table_offset, scratch_bytes):
    """Two kernel bodies, to be launched with the same grid one after the other.

    ``table_offset`` is where the work table starts in the first one, in int32; in the second it follows the merge's
    scratch.  ``prepares`` fill it, one for each of the two.
    """
    prepare_split, prepare_merge = prepares
    merge_table_offset = scratch_bytes // 4

    def verify_split(args):
        table = cuda.shared.array(0, int32, 16)[table_offset:]
        prepare_split(args, table)
        split_phase(args, table)

    def verify_merge(args):
        table = cuda.shared.array(0, int32, 16)[merge_table_offset:]  # this kernel has no tiles
        prepare_merge(args, table)
        merge_phase(args, table)

    return (verify_split, verify_merge)
