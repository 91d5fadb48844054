"""A segment walked by teams: every warp makes scores, weights and outputs of its own rows and keys.

Rounds     Round i multiplies the keys of tile i and makes weights and outputs of tile i - 1: two chains that do not
           wait for each other, so that the tensor cores have work while exponents are taken.  A segment of n tiles
           takes n + 1 rounds; the first one's weights and the last one's products are empty.

Who waits for whom, and why that is enough
    tile there, tile free     the ring's two mbarriers a slot (kv_ring.py)
    end of the segment        teams that share rows: a block barrier after the last tile (nobody reads the ring any
                              more: outputs may go there), one after outputs and states are written, one after they are
                              read.  Teams that do not: each reads only what it wrote.
A warp without rows (the last tile of a request) fetches and releases tiles like the others.
All branches around barriers, shuffles and mma are the same for the whole warp.
"""

from numba import cuda, float32, int32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP
from nbverify.kernels.outputs import make_outputs
from nbverify.kernels.scores import make_load_queries, make_multiply_keys, step_registers_of
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import NEG_INF, ZERO
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.values import make_multiply_values, make_rescale
from nbverify.kernels.weights import ROWS_PER_LANE, make_weigh


def make_walk(spec, geometry, ring):
    """``walk_segment(me, args, shared, record, turn)``, from turn ``turn`` of the ring; returns its turn then."""
    stages, v_offset = geometry.stages, geometry.v_offset
    row_teams, key_teams = geometry.row_teams, geometry.key_teams
    team_keys, keys_per_tile = geometry.team_keys, geometry.keys_per_tile
    query_steps, num_queries = geometry.query_steps, max(1, 4 * geometry.query_steps_kept)
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    first_part, second_part = query_steps // 3, 2 * query_steps // 3
    num_scores, num_weights = 4 * geometry.key_frags, 2 * geometry.key_frags
    num_outputs, copy_passes, group = 4 * geometry.value_frags, geometry.copy_passes, spec.group
    always_checked = spec.score_mod is not None or not spec.prefix_visible

    fill, next_indices, _, fetch, wait_full, release, tile_address, next_turn, turn_before = ring[1:]
    load_queries, multiply_keys = make_load_queries(spec, geometry), make_multiply_keys(spec, geometry)
    scale, find_largest, weigh = make_weigh(spec, geometry)
    rescale = make_rescale(geometry)
    multiply_values = make_multiply_values(spec, geometry, checked=False)
    multiply_checked_values = make_multiply_values(spec, geometry, checked=True)
    leave_states, leave_outputs, write_outputs = make_outputs(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def walk_segment(me, args, shared, record, turn):
        ptx.unroll_loops()
        segment, warp = load_segment(record), int32(me.warp)
        first_row, first_key = int32(warp % row_teams * FRAG_ROWS), int32(warp // row_teams * team_keys)
        has_rows = segment.first_row + first_row < segment.request.num_nodes * group
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)
        # Tiles from here on hide keys of this team from some row, or may do so.
        first_checked = int32(0)
        if not always_checked:
            whole = int32(int32(segment.request.prefix_len) - first_key - team_keys)
            first_checked = int32(whole // keys_per_tile + 1)  # Python's division: 0 or less if no tile is whole

        indices = cuda.local.array(copy_passes, uint32)
        fill(me, args, shared, record, first_tile, end_tile, turn, indices)
        next_indices(me, args, record, int32(first_tile + (stages - 1)), indices)
        queries = cuda.local.array(num_queries, uint32)
        load_queries(me, args, shared, record, first_row, queries)
        fragments = cuda.local.array(num_fragments, uint32)
        o, own, s = (
            cuda.local.array(num_outputs, float32),
            cuda.local.array(num_scores, float32),
            cuda.local.array(num_scores, float32),
        )
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        maxima, sums = cuda.local.array(ROWS_PER_LANE, float32), cuda.local.array(ROWS_PER_LANE, float32)
        largest = cuda.local.array(ROWS_PER_LANE, float32)
        for i in range(num_outputs):
            o[i] = ZERO
        for i in range(num_scores):
            own[i] = NEG_INF
        for r in range(ROWS_PER_LANE):
            maxima[r], sums[r] = NEG_INF, ZERO

        tile, last_turn = first_tile, turn
        while tile <= end_tile:
            if tile < end_tile:
                wait_full(shared, turn)
            if has_rows:
                keys, checked = tile_address(shared, turn), tile > first_checked
                if tile > first_tile:
                    scale(me, args, record, first_row, int32((tile - 1) * keys_per_tile + first_key), checked, own)
                # In between the products: what takes long, and is needed only later, of the weights.
                # After the last tile this multiplies what stands in the slot, and nobody looks at the result.
                multiply_keys(me, shared, keys, queries, fragments, s, 0, first_part)
                find_largest(own, largest)
                multiply_keys(me, shared, keys, queries, fragments, s, first_part, second_part)
                raised = weigh(own, largest, maxima, sums, factors, p)
                multiply_keys(me, shared, keys, queries, fragments, s, second_part, query_steps)
                for i in range(num_scores):
                    own[i] = s[i]
                if cuda.any_sync(uint32(FULL_WARP), raised):
                    rescale(o, factors)
                if tile > first_tile:
                    values = tile_address(shared, last_turn) + uint32(v_offset)
                    if checked:
                        multiply_checked_values(me, shared, uint32(0), values, p, o)
                    else:
                        multiply_values(me, shared, uint32(0), values, p, o)
            if tile > first_tile:
                release(me, shared, last_turn)
            if tile > first_tile and tile + (stages - 2) < end_tile:
                # Into the slot of the tile before the last one, which all warps have left by now.
                free = turn_before(turn_before(turn))
                fetch(me, args, shared, record, int32(tile + stages - 2), indices, free)
                next_indices(me, args, record, int32(tile + stages - 1), indices)
            last_turn = turn
            if tile < end_tile:
                turn = next_turn(turn)
            tile = int32(tile + 1)

        leave_states(me, shared, maxima, sums)
        if key_teams > 1:
            cuda.syncthreads()  # no warp reads the ring any more: outputs may go there
            if warp >= row_teams:
                leave_outputs(me, shared, o)
            cuda.syncthreads()  # publishes states and outputs to the block
        else:
            cuda.syncwarp()  # publishes states to the warp
        if warp < row_teams and has_rows:
            write_outputs(me, args, shared, record, o)
        if key_teams > 1:
            cuda.syncthreads()  # outputs have been read: the next segment may fill the ring
        return turn

    return walk_segment
