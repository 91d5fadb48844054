"""The fast kernel: tree-verify attention on tensor cores, by inline PTX from Python.

The maths, the work and the merge are those of simt.py, which is the place to start reading; here a tile of keys flows
through the block like this (names as in kernels/tiles.py):

    kv_ring.py   pool rows --bulk copy or cp.async--> ring in shared memory, stages - 1 tiles ahead
    scores.py    S = Q K^T by mma: queries in registers, keys by ldmatrix; slices of head_dim added over the team
    weights.py   scale, mask, score_mod, lazy running maximum; P = 2^(s - m) in 16 bits, to the team
    values.py    O += P V by mma: each warp its columns, accumulators in registers
    outputs.py   at the end of a segment: merge the teams, write results, or partial states for reduce/

Arguments  one named tuple, ``args``; contract.py is its table (shapes, dtypes, strides).
Launch     grid = co-resident blocks, fixed when the plan is made; threads and shared memory: kernels/tiles.py.
Numerics   products exact, sums of mma in float32, P rounded to the 16-bit type, l of the unrounded weights.

Who waits for whom, and why that is enough
    tile there         every warp, on the slot's mbarrier ``full``, before it reads the tile     (kv_ring.py)
    tile free          every warp, on the slot's mbarrier ``empty``, before it fetches into it   (kv_ring.py)
    inside a team of several warps, two barriers a tile, each met by all warps of the team and by no other:
      exchange         slices of the scores were written   |  before it: all reads of the last tile's P and factors
      publish          P, factors, flags were written      |  before it: all reads of this tile's slices
    Each region is written before one barrier and read after it, and its next write comes after the other one: a single
    copy of each is enough.  A team of one warp has neither.
    A team without rows (the last tile of a request) fetches and releases like the others, and meets no team barrier.
    teams that share rows: block barriers in outputs.py, once a segment.
All branches around barriers and mma are the same for the whole warp; around team barriers for the whole team.
"""

from numba import cuda, float32, int32, int64, uint8, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.kv_ring import make_ring
from nbverify.kernels.outputs import make_finish_segment
from nbverify.kernels.schedule import make_schedule
from nbverify.kernels.scores import make_exchange_scores, make_load_queries, make_multiply_keys
from nbverify.kernels.segments import NEXT_POSITION, SHARE_END, load_segment, make_open_segment
from nbverify.kernels.softmax import NEG_INF, ZERO
from nbverify.kernels.tiles import SEGMENT_FIELDS
from nbverify.kernels.values import make_multiply_values, make_rescale
from nbverify.kernels.weights import make_publish_weights, make_read_factors, make_weigh
from nbverify.reduce import grid_sync, two_launch
from nbverify.reduce.merge import make_merge_phase


def make_bodies(spec, geometry):
    """The kernel bodies of a spec, in launch order: one for grid_sync, two for two_launch."""
    schedule = make_schedule(spec, geometry)
    split_phase = make_split_phase(spec, geometry, schedule)
    merge_phase = make_merge_phase(spec, geometry, schedule)
    join = grid_sync if spec.reduction == "grid_sync" else two_launch
    return join.make_bodies(schedule.prepare, split_phase, merge_phase, geometry.table_offset // 2)


def make_split_phase(spec, geometry, schedule):
    """Phase 1: walk this block's share of the keys; write results, or partial states."""
    stages, slot_bytes, v_offset = geometry.stages, geometry.slot_bytes, geometry.v_offset
    team_warps, row_teams, row_frags = geometry.team_warps, geometry.row_teams, geometry.row_frags
    team_rows, team_keys, keys_per_tile = geometry.team_rows, geometry.team_keys, geometry.keys_per_tile
    rows_per_lane, has_team, own_warps = geometry.rows_per_lane, team_warps > 1, 2 * row_frags
    num_queries = max(1, 4 * row_frags * geometry.query_steps_kept)
    num_scores = 4 * row_frags * geometry.key_frags
    num_own = 2 * rows_per_lane * geometry.key_frags
    num_weights, num_outputs = rows_per_lane * geometry.key_frags, 4 * row_frags * geometry.value_frags
    group = spec.group
    always_checked = spec.score_mod is not None or not spec.prefix_visible
    share, open_segment = schedule.share, make_open_segment(spec, schedule)
    first_record = geometry.segments_offset // 8

    init_ring, next_index, fetch, wait_full, release = make_ring(geometry)
    load_queries, multiply_keys = make_load_queries(spec, geometry), make_multiply_keys(spec, geometry)
    exchange_scores, weigh = make_exchange_scores(geometry), make_weigh(spec, geometry)
    publish_weights, read_factors = make_publish_weights(geometry), make_read_factors(geometry)
    rescale = make_rescale(geometry)
    multiply_values = make_multiply_values(spec, geometry, checked=False)
    multiply_checked_values = make_multiply_values(spec, geometry, checked=True)
    finish_segment = make_finish_segment(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def run_segment(args, shared, record, slot, parity):
        """One row unit x one range of key tiles, from ring slot ``slot``.  All threads of the block call it.

        Returns where the ring stands then.
        """
        ptx.unroll_loops()
        warp = int32(cuda.threadIdx.x // WARP)
        team_row = int32(warp // team_warps % row_teams * team_rows)  # of the unit's
        lane_row = team_row
        if has_team:
            lane_row = int32(team_row + warp % team_warps * 8)
        owns_rows = not has_team or warp % team_warps < own_warps
        segment = load_segment(record)
        has_rows = segment.first_row + team_row < segment.request.num_nodes * group
        tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)

        # Tiles ahead: all but one slot.
        ahead = int32(min(tile + stages - 1, end_tile))
        ahead_slot, ahead_parity = slot, parity
        while tile < ahead:
            index = next_index(args, record, tile)
            fetch(args, shared, record, tile, index, ahead_slot, ahead_parity ^ int32(1))
            ahead_slot = int32(ahead_slot + 1)
            if ahead_slot == stages:
                ahead_slot, ahead_parity = int32(0), int32(ahead_parity ^ 1)
            tile = int32(tile + 1)
        index = next_index(args, record, tile)

        queries = cuda.local.array(num_queries, uint32)
        load_queries(args, shared, record, team_row, queries)
        o = cuda.local.array(num_outputs, float32)
        for i in range(num_outputs):
            o[i] = ZERO
        maxima, sums = cuda.local.array(rows_per_lane, float32), cuda.local.array(rows_per_lane, float32)
        for r in range(rows_per_lane):
            maxima[r], sums[r] = NEG_INF, ZERO
        s, own = cuda.local.array(num_scores, float32), cuda.local.array(num_own, float32)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(own_warps, float32)

        tile = int32(load_segment(record).first_tile)
        while tile < end_tile:
            keys = uint32(shared + uint32(slot * slot_bytes))
            first_key = int32(tile * keys_per_tile + warp // (team_warps * row_teams) * team_keys)
            checked = always_checked or first_key + team_keys > load_segment(record).request.prefix_len
            wait_full(shared, slot, parity)
            if has_rows:
                multiply_keys(shared, keys, queries, s)
            if has_rows:
                raised = False
                if has_team:
                    exchange_scores(shared, s, own)
                    if owns_rows:
                        raised = weigh(args, record, lane_row, first_key, checked, own, maxima, sums, factors, p)
                    publish_weights(shared, raised, factors, p)
                    raised = read_factors(shared, factors)
                else:
                    raised = weigh(args, record, lane_row, first_key, checked, s, maxima, sums, factors, p)
                    raised = cuda.any_sync(uint32(FULL_WARP), raised)
                if raised:
                    rescale(o, factors)
                if checked:
                    multiply_checked_values(shared, keys + uint32(v_offset), p, o)
                else:
                    multiply_values(shared, keys + uint32(v_offset), p, o)
            release(shared, slot)
            if tile + (stages - 1) < end_tile:  # into the slot of the tile before, which all teams have left by now
                fetch(args, shared, record, int32(tile + stages - 1), index, ahead_slot, ahead_parity ^ int32(1))
                ahead_slot = int32(ahead_slot + 1)
                if ahead_slot == stages:
                    ahead_slot, ahead_parity = int32(0), int32(ahead_parity ^ 1)
                index = next_index(args, record, int32(tile + stages))
            slot = int32(slot + 1)
            if slot == stages:
                slot, parity = int32(0), int32(parity ^ 1)
            tile = int32(tile + 1)
        finish_segment(args, shared, record, maxima, sums, o)
        return slot, parity

    @cuda.jit(device=True)
    def split_phase(args, table):
        # Opaque: it stays in a register, where the assembler would make it again and again out of a special one.
        shared = ptx.opaque_u32(ptx.shared_address(cuda.shared.array(0, uint8, 16), 0))
        init_ring(shared)
        slot, parity, which = int32(0), int32(0), int32(0)
        position, share_end = share(args, table)
        while position < share_end:  # an idle block skips the work, not the grid's barrier
            begin = first_record + which * SEGMENT_FIELDS
            record = cuda.shared.array(0, int64, 16)[begin : begin + SEGMENT_FIELDS]
            open_segment(args, table, position, share_end, record)  # the first one publishes the mbarriers, too
            slot, parity = run_segment(args, shared, record, slot, parity)
            position, share_end = record[NEXT_POSITION], record[SHARE_END]
            which = int32(which ^ 1)

    return split_phase
