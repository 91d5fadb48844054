"""A block's share walked in two roles: score warps make the weights, value warps the outputs; these also fetch keys.

    score warp w    products of tile i, for the fragments and columns that it has a part in (scores.py), and among them
                    the weights of tile i - 1 for fragment w (two chains that do not wait for each other); P, factors
                    and a flag of tile i - 1 to shared memory, and to other score warps their parts of the products.
                    Where there are more of them than fragments, the last ones only multiply, and send what they have
    value warp v    columns of its slice, all rows: outputs of tile i - 1, and before them the fetch of a tile to come

Publications   A segment of n tiles has n + 1 of them, numbered downwards: number i brings P of the tile after which i
               more come, and number n nothing: with it the loop over the tiles has no first round of its own.  P lies
               in one of two places, by the parity of its number.

Who waits for whom, and why that is enough
    queries there      QUERIES, where score warps share fragments, once for each part of the queries that passes, and
                       once more before the next: they read the rows of each other; value warps only meet them there
    queries read       QFREE, once a segment: the score warps arrive when their queries have left the ring, value warps
                       wait for it before they fetch into the slots where those lay
    tile there         both roles, on the ring's mbarrier ``full``, before they read the tile           (kv_ring.py)
    READY[parity]      score warps arrive when a publication is written, or, if they write none, when they may come to
                       the next: after DONE of it; value warps wait for it
    DONE[parity]       value warps arrive when a publication is read, if there is another in its place (and twice at the
                       start: both places are free); score warps wait for it before they write to the place.  All of
                       them come to it in each round, so it is their barrier as well: after it each adds what the
                       others sent it in the round before, and what was sent two rounds ago, where they now send
                       again, has been added by all
    tile free          value warps fetch into the slot of tile i - 1 when they have come to READY of tile i: that
                       barrier waits for all of them, so all have read that tile's V, and the score warps had read its K
                       before DONE of the round in which its P is published
Each named barrier is used again only when its last phase is over: a score warp arrives at READY of number i - 2 after
it waited at DONE of number i, for which all value warps must have passed READY of number i; a value warp arrives at
DONE of number i - 2 after READY of it, for which all score warps must have passed DONE of number i.  A segment leaves
all of them at rest: it has as many arrivals as waits.
    end of segment     a block barrier publishes what the score warps found out about the rows to the value warps
    next segment       another publishes its record
All branches around barriers, shuffles and mma are the same for the whole warp.
"""

from numba import cuda, float32, int32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import SEGMENT_FIELDS, WARP
from nbverify.kernels.outputs import make_write_outputs
from nbverify.kernels.segments import NEXT_POSITION, RECORD_BYTES, SHARE_END, make_open_segment
from nbverify.kernels.threads import find_place_again, uniform
from nbverify.kernels.walk_scores import make_walk_scores
from nbverify.kernels.walk_values import make_walk_values


def make_walk(spec, geometry, schedule, ring):
    """``walk_share(me, args, shared, table, position, share_end)``: all segments of the block's share."""
    score_warps = geometry.score_warps
    first_record = geometry.segments_offset
    open_segment = make_open_segment(schedule, may_be_there=spec.schedule == "step")
    walk_scores, walk_values = make_walk_scores(spec, geometry, ring), make_walk_values(spec, geometry, ring)
    write_outputs = make_write_outputs(spec, geometry)
    num_outputs = 4 * geometry.row_frags * geometry.value_frags

    @cuda.jit(device=True, forceinline=True)
    def score_share(me, args, shared, table, position, share_end):
        turn, offset = int32(0), uint32(first_record)
        while position < share_end:
            record = ptx.shared_int64(shared + offset, SEGMENT_FIELDS)
            if cuda.threadIdx.x < WARP:
                open_segment(args, table, position, share_end, record)
            cuda.syncthreads()  # publishes the record; nobody uses the other one any more
            turn = walk_scores(me, args, shared, record, turn)
            cuda.syncthreads()  # publishes the rows' states
            position, share_end = int32(record[NEXT_POSITION]), int32(record[SHARE_END])
            offset = uint32(uint32(2 * first_record + RECORD_BYTES) - offset)  # the other one

    @cuda.jit(device=True, forceinline=True)
    def value_share(args, shared, position, share_end):
        ptx.unroll_loops()
        turn, offset = int32(0), uint32(first_record)
        o = cuda.local.array(num_outputs, float32)
        has_more = position < share_end
        while has_more:
            cuda.syncthreads()  # the first warp has looked the segment up
            turn = walk_values(args, shared, offset, turn, o)
            cuda.syncthreads()  # the score warps have finished the rows
            record = ptx.shared_int64(shared + offset, SEGMENT_FIELDS)
            write_outputs(find_place_again(), args, shared, record, o)
            has_more = uniform(int32(int32(record[SHARE_END]) - int32(record[NEXT_POSITION]))) > 0
            offset = uint32(uint32(2 * first_record + RECORD_BYTES) - offset)  # the other one

    @cuda.jit(device=True, forceinline=True)
    def walk_share(me, args, shared, table, position, share_end):
        if me.warp < uint32(score_warps):
            score_share(me, args, shared, table, position, share_end)
        else:
            value_share(args, shared, position, share_end)

    return walk_share
