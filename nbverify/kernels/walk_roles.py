"""A segment walked in two roles: score warps make the weights, value warps the outputs; value warps also fetch keys.

    score warp w    fragment w of the rows: scores of tile i, and beside them the weights of tile i - 1 (two chains that
                    do not wait for each other); P, factors and a flag of tile i - 1 to shared memory, and the indices
                    of a tile to come, for which value warps have no register
    value warp v    columns of its slice, all rows: outputs of tile i - 1, then the fetch of a tile to come

Who waits for whom, and why that is enough
    tile there         both roles, on the ring's mbarrier ``full``, before they read the tile           (kv_ring.py)
    tile free          value warps release a tile and fetch the next one into its slot.  A score warp needs no say: it
                       has read all keys of a tile before it hands over that tile's P, which the value warp waits for
    READY[parity]      named barrier: score warps arrive when P of a tile is written, value warps wait for it
    DONE[parity]       named barrier: value warps arrive when P, and what comes with it, is read; score warps wait for
                       it before they write P of the next tile but one into the same place
Each is used again only when its last phase is over: a score warp arrives at READY of tile i + 2 after it waited at DONE
of tile i, for which all value warps must have passed READY of tile i; a value warp arrives at DONE of tile i + 2 after
READY of tile i + 2, for which all score warps must have passed DONE of tile i.  At the end of a segment the score warps
wait for the DONE that are left, so that the next segment starts with all barriers at rest.
    end of segment     a block barrier publishes the states (m, l) of the score warps to the value warps
All branches around barriers, shuffles and mma are the same for the whole warp.
"""

from numba import cuda, float32, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.outputs import make_outputs
from nbverify.kernels.scores import make_load_queries, make_multiply_keys, step_registers_of
from nbverify.kernels.segments import PREFIX_INDICES, load_segment
from nbverify.kernels.softmax import NEG_INF, ZERO
from nbverify.kernels.threads import Place
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.values import make_multiply_values
from nbverify.kernels.weights import ONE, ROWS_PER_LANE, make_publish_weights, make_rescale_by_flags, make_weigh

READY, DONE = 1, 3  # named barriers, one for each parity


def make_walk(spec, geometry, ring):
    """``walk_segment(me, args, shared, record, turn)``, from turn ``turn`` of the ring; returns its turn then."""
    score_warps = geometry.row_frags
    walk_scores, walk_values = _make_walk_scores(spec, geometry, ring), _make_walk_values(spec, geometry, ring)

    @cuda.jit(device=True, forceinline=True)
    def walk_segment(me, args, shared, record, turn):
        if me.warp < uint32(score_warps):
            return walk_scores(me, args, shared, record, turn)
        return walk_values(me, args, shared, record, turn)

    return walk_segment


def _make_walk_scores(spec, geometry, ring):
    keys_per_tile, threads = geometry.keys_per_tile, geometry.threads
    query_steps, num_queries = geometry.query_steps, max(1, 4 * geometry.query_steps_kept)
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    first_part, second_part = query_steps // 3, 2 * query_steps // 3
    num_scores, num_weights, group = 4 * geometry.key_frags, 2 * geometry.key_frags, spec.group
    always_checked = spec.score_mod is not None or not spec.prefix_visible
    wait_full, next_turn, load_index_of = ring.wait_full, ring.next_turn, ring.load_index_of
    tile_address = ring.tile_address
    stages, indices_offset = geometry.stages, geometry.indices_offset
    load_queries, multiply_keys = make_load_queries(spec, geometry), make_multiply_keys(spec, geometry)
    scale, find_largest, weigh = make_weigh(spec, geometry)
    publish_weights = make_publish_weights(geometry)
    leave_states, _, _ = make_outputs(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def walk_scores(me, args, shared, record, turn):
        ptx.unroll_loops()
        segment, first_row = load_segment(record), int32(me.warp) * int32(FRAG_ROWS)
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)
        first_checked = int32(0)  # tiles from here on hide keys from some row, or may do so
        if not always_checked:
            first_checked = int32(int32(segment.request.prefix_len) // keys_per_tile)

        my_key = min(int32(me.lane), int32(keys_per_tile - 1))
        my_index = uint32(shared + uint32(indices_offset + 4 * my_key))
        # Where that index stands while all keys of its tile are in the prefix.
        index_address = uint64(record[PREFIX_INDICES]) + uint64(
            (int64(first_tile + (stages - 1)) * keys_per_tile + my_key) * args.kv_indices_words * 4
        )
        queries = cuda.local.array(num_queries, uint32)
        load_queries(me, args, shared, record, first_row, queries)
        fragments = cuda.local.array(num_fragments, uint32)
        own, s = cuda.local.array(num_scores, float32), cuda.local.array(num_scores, float32)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        maxima, sums = cuda.local.array(ROWS_PER_LANE, float32), cuda.local.array(ROWS_PER_LANE, float32)
        largest = cuda.local.array(ROWS_PER_LANE, float32)
        for i in range(num_scores):
            own[i] = NEG_INF
        for r in range(ROWS_PER_LANE):
            maxima[r], sums[r] = NEG_INF, ZERO

        tile = first_tile
        index = uint32(0)
        while tile <= end_tile:
            flip = uint32(end_tile - tile + 1) & uint32(1)  # of the tile before: parity of the tiles that are left
            if tile < end_tile:
                wait_full(shared, turn)
            keys = tile_address(shared, turn)
            if tile > first_tile:
                checked = tile > first_checked
                scale(me, args, record, first_row, int32((tile - 1) * keys_per_tile), checked, own)
            # In between the products: what takes long, and is needed only later, of the weights.
            if tile < end_tile:
                multiply_keys(me, shared, keys, queries, fragments, s, 0, first_part)
            find_largest(own, largest)
            if tile < end_tile:
                multiply_keys(me, shared, keys, queries, fragments, s, first_part, second_part)
            raised = weigh(own, largest, maxima, sums, factors, p)
            if tile > first_tile:
                if tile > first_tile + 2:
                    ptx.barrier_sync(uint32(DONE) + flip, uint32(threads))
                publish_weights(me, shared, flip, raised, factors, p)
                if me.warp == uint32(0):
                    ptx.store_shared_u32(my_index + flip * uint32(4 * keys_per_tile), index)
                ptx.barrier_arrive(uint32(READY) + flip, uint32(threads))
            if me.warp == uint32(0) and tile + (stages - 1) < end_tile:
                if tile + stages <= first_checked:
                    index = ptx.load_global_u32(index_address)
                else:
                    index = load_index_of(args, record, int32(tile + (stages - 1)), my_key)
            index_address += uint64(args.kv_indices_words * (4 * keys_per_tile))
            if tile < end_tile:
                multiply_keys(me, shared, keys, queries, fragments, s, second_part, query_steps)
                for i in range(num_scores):
                    own[i] = s[i]
            if tile < end_tile:
                turn = next_turn(turn)
            tile = int32(tile + 1)

        wait_for_readers(int32(end_tile - first_tile))
        leave_states(me, shared, maxima, sums)
        cuda.syncthreads()  # publishes the states to the value warps
        return turn

    @cuda.jit(device=True, forceinline=True)
    def wait_for_readers(tiles):
        """Until P of the last two tiles has been read."""
        left = min(tiles, int32(2))
        while left > 0:
            ptx.barrier_sync(uint32(DONE) + (uint32(left) & uint32(1)), uint32(threads))
            left = int32(left - 1)

    @cuda.jit(device=True, forceinline=True)
    def walk_nothing(me, shared, record, turn):
        """A fragment without rows, in the last tile of a request: its P is 0, and it meets the barriers."""
        ptx.unroll_loops()
        segment = load_segment(record)
        left = int32(int32(segment.end_tile) - int32(segment.first_tile))
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        for i in range(num_weights):
            p[i] = uint32(0)
        for r in range(ROWS_PER_LANE):
            factors[r] = ONE
        publish_weights(me, shared, uint32(0), False, factors, p)
        publish_weights(me, shared, uint32(1), False, factors, p)
        tiles = left
        while left > 0:
            flip = uint32(left) & uint32(1)
            if left < tiles - 1:
                ptx.barrier_sync(uint32(DONE) + flip, uint32(threads))
            ptx.barrier_arrive(uint32(READY) + flip, uint32(threads))
            turn = next_turn(turn)
            left = int32(left - 1)
        wait_for_readers(tiles)
        cuda.syncthreads()  # the others publish states here
        return turn

    @cuda.jit(device=True, forceinline=True)
    def walk_fragment(me, args, shared, record, turn):
        segment = load_segment(record)
        if segment.first_row + int32(me.warp) * FRAG_ROWS < segment.request.num_nodes * group:
            return walk_scores(me, args, shared, record, turn)
        return walk_nothing(me, shared, record, turn)

    return walk_fragment


def _make_walk_values(spec, geometry, ring):
    stages, v_offset, threads = geometry.stages, geometry.v_offset, geometry.threads
    keys_per_tile, copy_passes = geometry.keys_per_tile, geometry.copy_passes
    num_outputs = 4 * geometry.row_frags * geometry.value_frags
    always_checked = spec.score_mod is not None or not spec.prefix_visible
    fill, _, _, fetch, wait_full, release, tile_address, next_turn, turn_before = ring[1:]
    first_warp, copied_rows, copy_lanes = geometry.first_fetching_warp, geometry.copied_rows, geometry.copy_lanes
    rows_per_pass, indices_offset = WARP // copy_lanes, geometry.indices_offset
    rescale_by_flags = make_rescale_by_flags(geometry)
    multiply_values = make_multiply_values(spec, geometry, checked=False)
    multiply_checked_values = make_multiply_values(spec, geometry, checked=True)
    _, _, write_outputs = make_outputs(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def take_indices(me, shared, flip, indices):
        """What the score warps have looked up, for this lane's rows."""
        ptx.unroll_loops()
        for i in range(copy_passes):
            row = (me.warp - uint32(first_warp)) * uint32(copied_rows) + me.lane // uint32(copy_lanes)
            row = min(uint32(row + uint32(i * rows_per_pass)), uint32(keys_per_tile - 1))
            at = ptx.opaque_u32(shared + row * uint32(4) + flip * uint32(4 * keys_per_tile))
            indices[i] = ptx.load_shared_u32(at + uint32(indices_offset))

    @cuda.jit(device=True, forceinline=True)
    def walk_values(me, args, shared, record, turn):
        # Outputs and operands take 152 of the 168 registers.  What else is live over a tile is kept few: ``left``
        # counts the tiles, the rest comes from the record, and addresses are made anew from the lane.
        ptx.unroll_loops()
        segment = load_segment(record)
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)
        indices = cuda.local.array(copy_passes, uint32)
        fill(me, args, shared, record, first_tile, end_tile, turn, indices)
        o = cuda.local.array(num_outputs, float32)
        for i in range(num_outputs):
            o[i] = ZERO

        left = int32(end_tile - first_tile)
        while left > 0:
            flip = uint32(left) & uint32(1)
            here = Place(ptx.lane_id(), me.warp)
            wait_full(shared, turn)
            ptx.barrier_sync(uint32(READY) + flip, uint32(threads))
            rescale_by_flags(here, shared, flip, o)
            values = tile_address(shared, turn) + uint32(v_offset)
            segment = load_segment(record)
            keys_after = int32(int32(int32(segment.end_tile) - left + 1) * keys_per_tile)
            if always_checked or keys_after > int32(segment.request.prefix_len):
                multiply_checked_values(here, shared, flip, values, indices, o)
            else:
                multiply_values(here, shared, flip, values, indices, o)
            here = Place(ptx.lane_id(), me.warp)
            take_indices(here, shared, flip, indices)
            ptx.barrier_arrive(uint32(DONE) + flip, uint32(threads))
            release(here, shared, turn)
            if left >= stages:
                # Into the slot of the tile before, which all value warps have left by now.
                ahead = int32(int32(load_segment(record).end_tile) - left + (stages - 1))
                fetch(here, args, shared, record, ahead, indices, turn_before(turn))
            turn = next_turn(turn)
            left = int32(left - 1)

        cuda.syncthreads()  # publishes the states
        write_outputs(me, args, shared, record, o)
        return turn

    return walk_values
