"""A block's share walked in two roles: score warps make the weights, value warps the outputs; these also fetch keys.

    score warp w    products of tile i, for the fragments and columns that it has a part in (scores.py), and among them
                    the weights of tile i - 1 for fragment w (two chains that do not wait for each other); P, factors
                    and a flag of tile i - 1 to shared memory, and to other score warps their parts of the products
    value warp v    columns of its slice, all rows: outputs of tile i - 1, and before them the fetch of a tile to come

Publications   A segment of n tiles has n + 1 of them, numbered downwards: number i brings P of the tile after which i
               more come, and number n nothing: with it the loop over the tiles has no first round of its own.  P lies
               in one of two places, by the parity of its number.

Who waits for whom, and why that is enough
    queries there      named barriers from QUERIES on, once a segment: warps that share fragments read each other's rows
    queries read       QFREE, once a segment: the score warps arrive when their queries have left the ring, value warps
                       wait for it before they fetch into the slots where those lay
    tile there         both roles, on the ring's mbarrier ``full``, before they read the tile           (kv_ring.py)
    READY[parity]      score warps arrive when a publication is written, value warps wait for it
    DONE[parity]       value warps arrive when a publication is read, if there is another in its place (and twice at the
                       start: both places are free); score warps wait for it before they write to the place.  All of
                       them come to it in each round, so it is their barrier as well: after it each adds what the
                       others sent it in the round before, and what was sent two rounds ago, where they now send
                       again, has been added by all
    tile free          value warps fetch into the slot of tile i - 1 when they have come to READY of tile i: that
                       barrier waits for all of them, so all have read that tile's V, and the score warps had read its K
                       before they published its P
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
from nbverify.kernels.outputs import make_finish_rows, make_write_outputs
from nbverify.kernels.scores import make_exchange, make_load_queries, make_multiply_keys, step_registers_of
from nbverify.kernels.segments import (
    NEXT_POSITION,
    RECORD_BYTES,
    SHARE_END,
    load_segment,
    make_open_segment,
)
from nbverify.kernels.softmax import NEG_INF, ZERO
from nbverify.kernels.threads import find_place_again, uniform
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.values import make_clean_values, make_multiply_values
from nbverify.kernels.weights import ONE, ROWS_PER_LANE, make_publish_weights, make_rescale_by_flags, make_weigh

READY, DONE, QFREE = 1, 3, 5  # named barriers; the first two have one for each parity


def make_walk(spec, geometry, schedule, ring):
    """``walk_share(me, args, shared, table, position, share_end)``: all segments of the block's share."""
    score_warps = geometry.row_frags
    first_record = geometry.segments_offset
    open_segment = make_open_segment(spec, schedule, may_be_there=spec.schedule == "step")
    walk_scores, walk_values = _make_walk_scores(spec, geometry, ring), _make_walk_values(spec, geometry, ring)
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


def _make_walk_scores(spec, geometry, ring):
    """``walk_scores(me, args, shared, record, turn)``, from turn ``turn`` of the ring; gives its turn then."""
    keys_per_tile, threads, key_frags = geometry.keys_per_tile, geometry.threads, geometry.key_frags
    steps, parts, num_queries = geometry.part_steps, geometry.column_parts, max(1, 4 * geometry.query_steps_kept)
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    # Products before the weights begin, before they are raised, and among the weights of eight keys each.
    lead = steps // 9
    raised_at = 2 * lead
    last_piece = raised_at + key_frags * ((steps - raised_at) // (key_frags + 1))
    num_scores, num_weights, group = 4 * key_frags, 2 * key_frags, spec.group
    num_products = parts * num_scores
    always_checked = spec.score_mod is not None or not spec.prefix_visible
    wait_full, next_turn, tile_address = ring.wait_full, ring.next_turn, ring.tile_address
    request_queries, load_queries = make_load_queries(spec, geometry)
    multiply_keys = make_multiply_keys(spec, geometry)
    send, add = make_exchange(geometry)
    scale, find_largest, raise_maxima, weigh = make_weigh(spec, geometry)
    publish_weights = make_publish_weights(geometry)
    finish_rows = make_finish_rows(spec, geometry)
    multiply_and_weigh = _make_multiply_and_weigh(multiply_keys, weigh, raised_at, last_piece, key_frags)

    @cuda.jit(device=True, forceinline=True)
    def walk_rows(me, args, shared, record, turn):
        ptx.unroll_loops()
        segment, first_row = load_segment(record), int32(me.warp) * int32(FRAG_ROWS)
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)
        first_checked = int32(0)  # tiles from here on hide keys from some row, or may do so
        if not always_checked:
            first_checked = int32(uint32(segment.request.prefix_len) // uint32(keys_per_tile))
        queries = cuda.local.array(num_queries, uint32)
        request_queries(me, args, shared, record, turn, first_row)
        load_queries(me, args, shared, record, turn, first_row, queries)
        ptx.barrier_arrive(uint32(QFREE), uint32(threads))

        fragments = cuda.local.array(num_fragments, uint32)
        own, s = cuda.local.array(num_scores, float32), cuda.local.array(num_products, float32)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        maxima, sums = cuda.local.array(ROWS_PER_LANE, float32), cuda.local.array(ROWS_PER_LANE, float32)
        largest, bases = cuda.local.array(ROWS_PER_LANE, float32), cuda.local.array(ROWS_PER_LANE, float32)
        for i in range(num_scores):
            own[i] = NEG_INF
        for r in range(ROWS_PER_LANE):
            maxima[r], sums[r] = NEG_INF, ZERO
        tile = first_tile
        while tile < end_tile:
            parity = uint32(end_tile - tile) & uint32(1)
            wait_full(shared, turn)
            ptx.barrier_sync(uint32(DONE) + parity, uint32(threads))
            if tile > first_tile:
                add(me, shared, uint32(parity ^ uint32(1)), own)
                checked = tile > first_checked
                scale(me, args, record, first_row, int32((tile - 1) * keys_per_tile), checked, own)
            # From here to the end of the round there is no branch, so that the assembler may mix the two chains.
            keys = tile_address(shared, turn)
            multiply_keys(me, shared, keys, queries, fragments, s, 0, lead)
            find_largest(own, largest)
            multiply_keys(me, shared, keys, queries, fragments, s, lead, raised_at)
            raised = raise_maxima(largest, maxima, sums, factors, bases)
            multiply_and_weigh(me, shared, keys, queries, fragments, s, own, bases, sums, p)
            multiply_keys(me, shared, keys, queries, fragments, s, last_piece, steps)
            publish_weights(me, shared, parity, raised, factors, p)
            ptx.barrier_arrive(uint32(READY) + parity, uint32(threads))
            send(me, shared, parity, s)
            for i in range(num_scores):
                own[i] = s[i]
            turn, tile = next_turn(turn), int32(tile + 1)

        ptx.barrier_sync(uint32(DONE), uint32(threads))
        add(me, shared, uint32(1), own)
        checked = end_tile > first_checked
        scale(me, args, record, first_row, int32((end_tile - 1) * keys_per_tile), checked, own)
        find_largest(own, largest)
        raised = raise_maxima(largest, maxima, sums, factors, bases)
        for j in range(key_frags):
            weigh(own, bases, sums, p, j)
        publish_weights(me, shared, uint32(0), raised, factors, p)
        ptx.barrier_arrive(uint32(READY), uint32(threads))
        finish_rows(me, args, shared, record, maxima, sums)
        return turn

    @cuda.jit(device=True, forceinline=True)
    def walk_nothing(me, shared, record, turn):
        """Fragments without rows, in the last row unit of a request: their P is 0, and the warp meets the barriers."""
        ptx.unroll_loops()
        ptx.barrier_arrive(uint32(QFREE), uint32(threads))
        segment = load_segment(record)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        for i in range(num_weights):
            p[i] = uint32(0)
        for r in range(ROWS_PER_LANE):
            factors[r] = ONE
        tiles = int32(int32(segment.end_tile) - int32(segment.first_tile))
        left = tiles
        while left >= 0:
            parity = uint32(left) & uint32(1)
            ptx.barrier_sync(uint32(DONE) + parity, uint32(threads))
            if left >= tiles - 1:
                publish_weights(me, shared, parity, False, factors, p)
            ptx.barrier_arrive(uint32(READY) + parity, uint32(threads))
            if left > 0:
                turn = next_turn(turn)
            left = int32(left - 1)
        return turn

    @cuda.jit(device=True, forceinline=True)
    def walk_scores(me, args, shared, record, turn):
        segment = load_segment(record)
        first_row = int32(me.warp // uint32(parts)) * int32(parts * FRAG_ROWS)  # of the warps that share fragments
        if segment.first_row + first_row < segment.request.num_nodes * group:
            return walk_rows(me, args, shared, record, turn)
        return walk_nothing(me, shared, record, turn)

    return walk_scores


def _make_multiply_and_weigh(multiply_keys, weigh, begin, end, pieces):
    """Steps ``begin`` to ``end`` of the products in pieces, and after each the weights of eight keys.

    A chain of functions, so that the bounds of each piece are constants: numba unrolls no loop of loops like this one.
    """
    start = begin + (end - begin) // pieces * (pieces - 1)
    key_frag = pieces - 1
    if pieces == 1:

        @cuda.jit(device=True, forceinline=True)
        def first_piece(me, shared, keys, queries, fragments, s, own, bases, sums, p):
            multiply_keys(me, shared, keys, queries, fragments, s, start, end)
            weigh(own, bases, sums, p, key_frag)

        return first_piece

    earlier_pieces = _make_multiply_and_weigh(multiply_keys, weigh, begin, start, pieces - 1)

    @cuda.jit(device=True, forceinline=True)
    def next_piece(me, shared, keys, queries, fragments, s, own, bases, sums, p):
        earlier_pieces(me, shared, keys, queries, fragments, s, own, bases, sums, p)
        multiply_keys(me, shared, keys, queries, fragments, s, start, end)
        weigh(own, bases, sums, p, key_frag)

    return next_piece


def _make_walk_values(spec, geometry, ring):
    """``walk_values(args, shared, offset, turn, o)``: ``o`` = outputs of a segment; gives the ring's turn then.

    ``offset`` is where the segment's record lies in shared memory.
    """
    stages, v_offset, threads = geometry.stages, geometry.v_offset, geometry.threads
    keys_per_tile, num_outputs = geometry.keys_per_tile, 4 * geometry.row_frags * geometry.value_frags
    before_queries = stages - geometry.staging_slots  # tiles that go to slots where no queries are
    always_checked = spec.score_mod is not None or not spec.prefix_visible
    find_first_rows, fetch, wait_full = ring.find_first_rows, ring.fetch, ring.wait_full
    tile_address, next_turn, turn_before = ring.tile_address, ring.next_turn, ring.turn_before
    rescale_by_flags = make_rescale_by_flags(geometry)
    multiply_values = make_multiply_values(spec, geometry, checked=False)
    clean_values = make_clean_values(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def fill(me, args, shared, record, turn):
        """Request the first tiles of a segment, as many as there are slots."""
        segment = load_segment(record)
        find_first_rows(me, args, shared, record)
        first_tile = int32(segment.first_tile)
        end = min(int32(first_tile + stages), int32(segment.end_tile))
        tile = first_tile
        while tile < max(end, int32(first_tile + before_queries + 1)):
            if tile == first_tile + before_queries:
                ptx.barrier_sync(uint32(QFREE), uint32(threads))
            if tile < end:
                fetch(me, args, shared, record, tile, turn)
            turn = next_turn(turn)
            tile = int32(tile + 1)

    @cuda.jit(device=True, forceinline=True)
    def walk_values(args, shared, offset, turn, o):
        # Outputs and operands take all but a few registers.  What else is live over a tile is kept few: ``left``
        # counts the tiles, the rest comes from the record, and addresses are made anew from the lane.
        ptx.unroll_loops()
        ptx.barrier_arrive(uint32(DONE), uint32(threads))  # both places of P are free
        ptx.barrier_arrive(uint32(DONE + 1), uint32(threads))
        record = ptx.shared_int64(shared + offset, SEGMENT_FIELDS)
        fill(find_place_again(), args, shared, record, turn)
        for i in range(num_outputs):
            o[i] = ZERO
        segment = load_segment(record)
        left = uniform(int32(int32(segment.end_tile) - int32(segment.first_tile)))
        parity = uint32(left) & uint32(1)
        ptx.barrier_sync(uint32(READY) + parity, uint32(threads))  # the empty publication
        if left >= 2:
            ptx.barrier_arrive(uint32(DONE) + parity, uint32(threads))
        while left > 0:
            parity = uint32(left - 1) & uint32(1)
            wait_full(shared, turn)
            ptx.barrier_sync(uint32(READY) + parity, uint32(threads))
            here, base = find_place_again(), ptx.opaque_u32(shared)
            record = ptx.shared_int64(base + offset, SEGMENT_FIELDS)
            segment = load_segment(record)
            tile = int32(int32(segment.end_tile) - left)
            if left >= stages and tile > int32(segment.first_tile):
                # Into the slot of the tile before, which all value warps have left by now.
                fetch(here, args, base, record, int32(tile + (stages - 1)), turn_before(turn))
            rescale_by_flags(here, base, parity, o)
            values = tile_address(base, turn) + uint32(v_offset)
            keys_after = int32(int32(tile + 1) * keys_per_tile)
            if always_checked or keys_after > int32(segment.request.prefix_len):
                clean_values(here, values)
            multiply_values(here, base, parity, values, o, o)
            if left >= 3:  # there is one more but one
                ptx.barrier_arrive(uint32(DONE) + (ptx.opaque_u32(left - 1) & uint32(1)), uint32(threads))
            turn, left = next_turn(int32(ptx.opaque_u32(turn))), int32(left - 1)
        return turn

    return walk_values
