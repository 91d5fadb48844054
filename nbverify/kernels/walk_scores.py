"""What a score warp does with a segment.  Who waits for whom is at the head of walk_roles.py."""

from numba import cuda, float32, int32, int64, uint32

from nbverify.kernels import ptx
from nbverify.kernels.masking import checks_every_tile, make_mask, make_prefetch_mask
from nbverify.kernels.named_barriers import DONE, QFREE, READY
from nbverify.kernels.outputs import make_finish_rows
from nbverify.kernels.queries import make_load_queries, make_meet_readers
from nbverify.kernels.scores import make_exchange, make_multiply_keys, step_registers_of
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import NEG_INF, ZERO
from nbverify.kernels.threads import uniform
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.weights import (
    ONE,
    ROWS_PER_LANE,
    make_multiply_and_weigh,
    make_publish_weights,
    make_weigh,
    make_weigh_alone,
)


def make_walk_scores(spec, geometry, ring):
    """``walk_scores(me, args, shared, record, turn)``, from turn ``turn`` of the ring; gives its turn then."""
    keys_per_tile, threads, key_frags = geometry.keys_per_tile, geometry.threads, geometry.key_frags
    parts, frags, num_queries = geometry.column_parts, geometry.shared_frags, max(1, 4 * geometry.query_steps_kept)
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    num_scores, num_weights, group = 4 * key_frags, 2 * key_frags, spec.group
    num_products, steps = frags * num_scores, geometry.part_steps
    has_helpers, has_groups = parts > frags, geometry.row_frags > frags
    always_checked = checks_every_tile(spec)
    wait_full, next_turn, tile_address = ring.wait_full, ring.next_turn, ring.tile_address
    request_queries, load_queries = make_load_queries(spec, geometry)
    meet_readers = make_meet_readers(geometry)
    multiply_keys = make_multiply_keys(spec, geometry)
    send_others, send_all, add = make_exchange(geometry)
    weighing = make_weigh(spec, geometry)
    scale, weigh_alone = weighing[0], make_weigh_alone(geometry, weighing)
    publish_weights, prefetch_mask = make_publish_weights(geometry), make_prefetch_mask(spec, FRAG_ROWS)
    find_mask, _, _ = make_mask(spec)
    finish_rows = make_finish_rows(spec, geometry)
    multiply_and_weigh = make_multiply_and_weigh(geometry, multiply_keys, weighing)

    @cuda.jit(device=True, forceinline=True)
    def walk_rows(me, args, shared, record, turn):
        ptx.unroll_loops()
        segment, first_row = load_segment(record), int32(me.warp) * int32(FRAG_ROWS)
        first_checked = int32(0)  # tiles from here on hide keys from some row, or may do so
        if not always_checked:
            first_checked = int32(uint32(segment.request.prefix_len) // uint32(keys_per_tile))
        queries = cuda.local.array(num_queries, uint32)
        has_drafts, mask_start = int32(segment.end_tile) * keys_per_tile > segment.request.prefix_len, int64(0)
        if has_drafts:
            mask_start = find_mask(args, segment.request)  # before it is used: it comes from memory
        request_queries(me, args, shared, record, turn, first_row)
        if has_drafts:
            head_row = int32(int32(segment.first_row) + first_row)
            prefetch_mask(args, mask_start, segment.request, head_row, me.lane)
        load_queries(me, args, shared, record, turn, first_row, queries)
        ptx.barrier_arrive(uint32(QFREE), uint32(threads))
        if has_helpers and me.warp >= uint32(frags):
            return multiply_for_others(me, shared, record, turn, queries)
        return multiply_and_weigh_rows(me, args, shared, record, turn, first_row, first_checked, queries)

    @cuda.jit(device=True, forceinline=True)
    def multiply_for_others(me, shared, record, turn, queries):
        """The tiles of a warp that owns no rows: its columns of the products, for those that do."""
        ptx.unroll_loops()
        fragments, s = cuda.local.array(num_fragments, uint32), cuda.local.array(num_products, float32)
        segment = load_segment(record)
        left = uniform(int32(int32(segment.end_tile) - int32(segment.first_tile)))
        while left > 0:
            parity = uint32(left) & uint32(1)
            wait_full(shared, turn)
            ptx.barrier_sync(uint32(DONE) + parity, uint32(threads))
            ptx.barrier_arrive(uint32(READY) + parity, uint32(threads))  # of a publication that is not its own
            multiply_keys(me, shared, tile_address(shared, turn), queries, fragments, s, 0, steps)
            send_all(me, shared, parity, s)
            turn, left = next_turn(turn), int32(left - 1)
        ptx.barrier_sync(uint32(DONE), uint32(threads))
        ptx.barrier_arrive(uint32(READY), uint32(threads))
        return turn

    @cuda.jit(device=True, forceinline=True)
    def multiply_and_weigh_rows(me, args, shared, record, turn, first_row, first_checked, queries):
        """The tiles of a warp that owns rows: the products of each, and the weights of the one before."""
        ptx.unroll_loops()
        segment = load_segment(record)
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)
        fragments = cuda.local.array(num_fragments, uint32)
        own, s = cuda.local.array(num_scores, float32), cuda.local.array(num_products, float32)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        maxima, sums = cuda.local.array(ROWS_PER_LANE, float32), cuda.local.array(ROWS_PER_LANE, float32)
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
            # From here to the end of the round there is no branch.
            operands = me, shared, tile_address(shared, turn), queries, fragments, s
            raised = multiply_and_weigh(operands, own, (maxima, sums), factors, p)
            publish_weights(me, shared, parity, raised, factors, p)
            ptx.barrier_arrive(uint32(READY) + parity, uint32(threads))
            send_others(me, shared, parity, s)
            for i in range(num_scores):
                own[i] = s[i]
            turn, tile = next_turn(turn), int32(tile + 1)

        ptx.barrier_sync(uint32(DONE), uint32(threads))
        add(me, shared, uint32(1), own)
        checked = end_tile > first_checked
        scale(me, args, record, first_row, int32((end_tile - 1) * keys_per_tile), checked, own)
        raised = weigh_alone(own, (maxima, sums), factors, p)
        publish_weights(me, shared, uint32(0), raised, factors, p)
        ptx.barrier_arrive(uint32(READY), uint32(threads))
        finish_rows(me, args, shared, record, maxima, sums)
        return turn

    @cuda.jit(device=True, forceinline=True)
    def walk_nothing(me, shared, record, turn):
        """Fragments without rows, in the last row unit of a request: their P is 0, and the warp meets the barriers."""
        ptx.unroll_loops()
        meet_readers()
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
        first_row = int32(me.warp // uint32(parts)) * int32(frags * FRAG_ROWS)  # of the warps that share fragments
        if not has_groups or segment.first_row + first_row < segment.request.num_nodes * group:
            return walk_rows(me, args, shared, record, turn)
        return walk_nothing(me, shared, record, turn)

    return walk_scores
