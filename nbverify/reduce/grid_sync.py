"""Both phases in one cooperative launch, with the grid-wide barrier between them.

``cuda.cg.this_grid().sync()`` holds every thread of the grid until all have arrived, and makes what they wrote visible
to all.  Its state belongs to the driver: no counter of ours can be stale when a graph is replayed.  It needs all blocks
to be resident at once, so the launch carries the cooperative attribute and the grid comes from the occupancy query.

Every thread reaches the barrier exactly once whatever its work: idle blocks skip phase 1, and nothing returns early.
"""

from numba import cuda, int64


def make_bodies(prepare, split_phase, merge_phase, table_offset):
    """One kernel body.  ``table_offset`` is where the work table starts, in int64."""

    def verify(args):
        table = cuda.shared.array(0, int64, 16)[table_offset:]
        prepare(args, table)
        split_phase(args, table)
        cuda.cg.this_grid().sync()  # publishes all partial states to all blocks
        merge_phase(args, table)

    return (verify,)
