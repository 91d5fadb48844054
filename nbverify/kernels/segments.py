"""The segment that a block works on, as a record in shared memory.

All threads of a block work on the same segment, and need its fields rarely: when a tile is fetched, when a score is
masked, when rows are written.  Kept in registers, some thirty of them a thread would be missing to the accumulators.
So one warp looks the segment up and writes it down, and each use reads the fields that it needs, a few cycles away.

There are two records.  The next segment is written into the one that the current segment does not use, and the block
barrier that publishes it tells that everybody is done with the other.
"""

from numba import cuda, int32, int64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import SEGMENT_FIELDS, WARP
from nbverify.kernels.requests import Request
from nbverify.kernels.schedule import Segment

NEXT_POSITION, SHARE_END = 12, 13
INDEX_LISTS = 14  # and the next one: in 16 aligned bytes
STEP_START = 16  # step_schedule.py


def make_open_segment(schedule, *, may_be_there=False):
    """``open_segment(args, table, position, share_end, record)``: fill it.  Called by one warp of the block.

    A block barrier has to follow, which publishes the record.  ``may_be_there``: the record may hold this segment
    already (step_schedule.py).
    """
    segment_at = schedule.segment_at

    @cuda.jit(device=True)
    def open_segment(args, table, position, share_end, record):
        if may_be_there and int32(record[STEP_START]) == position:
            return
        segment = segment_at(args, table, position, share_end)
        request = segment.request
        if cuda.threadIdx.x % WARP == 0:
            record[0], record[1], record[2] = request.number, request.prefix_start, request.prefix_len
            record[3], record[4], record[5] = request.token_start, request.num_nodes, request.num_keys
            record[6], record[7] = segment.kv_head, segment.first_row
            record[8], record[9], record[10] = segment.first_tile, segment.end_tile, int64(segment.direct)
            record[11], record[NEXT_POSITION], record[SHARE_END] = segment.state, segment.next_position, share_end
            # Addresses of the request's first entries in the two index lists: an index is then a few instructions away.
            first_prefix = request.prefix_start * args.kv_indices_words
            first_draft = request.token_start * args.out_cache_loc_words
            record[INDEX_LISTS] = int64(ptx.global_address(args.kv_indices, first_prefix))
            record[INDEX_LISTS + 1] = int64(ptx.global_address(args.out_cache_loc, first_draft))

    return open_segment


RECORD_BYTES = 8 * SEGMENT_FIELDS


@cuda.jit(device=True, forceinline=True)
def load_segment(record):
    """The fields of a record.  What is not used is not loaded."""
    request = Request(record[0], record[1], record[2], record[3], record[4], record[5])
    return Segment(request, record[6], record[7], record[8], record[9], record[10] != 0, record[11], record[12])
