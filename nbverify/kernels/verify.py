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

Rounds     Round i multiplies the keys of tile i and makes weights and outputs of tile i - 1: two chains that do not wait
           for each other, so that the tensor cores have work while exponents are taken.  A segment of n tiles takes
           n + 1 rounds; the first one's weights and the last one's products are empty.

Who waits for whom, and why that is enough
    tile there         every warp, on the slot's mbarrier ``full``, before it reads the tile     (kv_ring.py)
    tile free          every warp, on the slot's mbarrier ``empty``, before it fetches into it   (kv_ring.py)
    inside a team      one barrier a round, met by all warps of the team and by no other.  Before it each warp has
                       written P and factors of tile i - 1 and the scores of tile i that its partner finishes;
                       after it they are read.  Each of these regions exists twice, by the parity of the round: what a
                       fast warp writes in round i + 1 is not what a slow one still reads in round i, and round i + 2
                       comes after the barrier of round i + 1, which the slow one meets when it has read.
    A team of one warp has no barrier.  A team without rows (the last tile of a request) fetches and releases tiles like
    the others, and meets no team barrier.  At the end of a segment: outputs.py.
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
from nbverify.kernels.threads import find_place
from nbverify.kernels.tiles import FRAG_ROWS, SEGMENT_FIELDS
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
    slices, row_frags, team_warps, row_teams = (
        geometry.slices, geometry.row_frags, geometry.team_warps, geometry.row_teams,
    )  # fmt: skip
    team_rows, team_keys, keys_per_tile = geometry.team_rows, geometry.team_keys, geometry.keys_per_tile
    rows_per_lane, has_team, warps_of_rows = geometry.rows_per_lane, slices > 1, team_warps * row_teams
    num_queries, num_scores = max(1, 4 * geometry.query_steps_kept), 4 * geometry.key_frags
    num_weights, num_own = rows_per_lane * geometry.key_frags, 2 * rows_per_lane * geometry.key_frags
    num_outputs, num_factors = 4 * row_frags * geometry.value_frags, 2 * row_frags
    copy_passes, group, first_record = geometry.copy_passes, spec.group, geometry.segments_offset // 8
    always_checked = spec.score_mod is not None or not spec.prefix_visible

    share, open_segment = schedule.share, make_open_segment(spec, schedule)
    init_ring, next_indices, fetch, wait_full, release = make_ring(spec, geometry)
    load_queries, multiply_keys = make_load_queries(spec, geometry), make_multiply_keys(spec, geometry)
    send_scores, receive_scores = make_exchange_scores(geometry)
    scale, find_largest, weigh = make_weigh(spec, geometry)
    query_steps = geometry.query_steps
    first_part, second_part = query_steps // 3, 2 * query_steps // 3
    publish_weights, read_factors = make_publish_weights(geometry), make_read_factors(geometry)
    rescale = make_rescale(geometry)
    multiply_values = make_multiply_values(spec, geometry, checked=False)
    multiply_checked_values = make_multiply_values(spec, geometry, checked=True)
    finish_segment = make_finish_segment(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def next_slot(slot, parity):
        """The ring slot of the next tile, and the parity of its use."""
        if slot == stages - 1:
            return int32(0), int32(parity ^ 1)
        return int32(slot + 1), parity

    @cuda.jit(device=True, forceinline=True)
    def run_segment(me, args, shared, record, slot, parity):
        """One row unit x one range of key tiles, from ring slot ``slot``.  All threads of the block call it.

        Returns where the ring stands then.
        """
        ptx.unroll_loops()
        warp = int32(me.warp)
        segment = load_segment(record)
        team_row = int32(warp // team_warps % row_teams * team_rows)  # in the row unit
        has_rows = segment.first_row + team_row < segment.request.num_nodes * group
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)

        indices = cuda.local.array(copy_passes, uint32)
        tile, ahead_slot, ahead_parity = first_tile, slot, parity
        while tile < min(first_tile + stages, end_tile):
            next_indices(me, args, record, tile, indices)
            fetch(me, args, shared, record, tile, indices, ahead_slot, ahead_parity ^ int32(1))
            ahead_slot, ahead_parity = next_slot(ahead_slot, ahead_parity)
            tile = int32(tile + 1)
        next_indices(me, args, record, tile, indices)

        frag_row = int32(team_row + warp // slices % row_frags * FRAG_ROWS)
        lane_row = int32(frag_row + warp % slices * 8)
        queries = cuda.local.array(num_queries, uint32)
        load_queries(me, args, shared, record, frag_row, queries)
        o, own = cuda.local.array(num_outputs, float32), cuda.local.array(num_own, float32)
        maxima, sums = cuda.local.array(rows_per_lane, float32), cuda.local.array(rows_per_lane, float32)
        for i in range(num_outputs):
            o[i] = ZERO
        for i in range(num_own):
            own[i] = NEG_INF
        for r in range(rows_per_lane):
            maxima[r], sums[r] = NEG_INF, ZERO
        s, p = cuda.local.array(num_scores, float32), cuda.local.array(num_weights, uint32)
        factors, largest = cuda.local.array(num_factors, float32), cuda.local.array(rows_per_lane, float32)

        # Tiles from here on hide keys of this team from some row, or may do so.
        first_checked = int32(0)
        if not always_checked:
            whole = int32(segment.request.prefix_len) - (warp // warps_of_rows + 1) * team_keys
            first_checked = int32(whole // keys_per_tile + 1)  # Python's division: 0 or less if none is whole

        # One round: products of ``tile``, weights and output of the tile before.  They do not wait for each other.
        tile, last_slot = first_tile, slot
        while tile <= end_tile:
            flip = uint32(tile & 1)
            checked = tile > first_checked
            if tile < end_tile:
                wait_full(shared, slot, parity)
            if has_rows:
                keys = uint32(shared + uint32(slot * slot_bytes))
                if tile > first_tile:
                    last_key = int32((tile - 1) * keys_per_tile + warp // warps_of_rows * team_keys)
                    scale(me, args, record, lane_row, last_key, checked, own)
                # In between the products: what takes long, and is needed only later, of the weights.
                # After the last tile this multiplies what stands in the slot, and nobody looks at the result.
                multiply_keys(me, shared, keys, queries, s, 0, first_part)
                find_largest(own, largest)
                multiply_keys(me, shared, keys, queries, s, first_part, second_part)
                raised = weigh(own, largest, maxima, sums, factors, p)
                multiply_keys(me, shared, keys, queries, s, second_part, query_steps)
                if has_team:
                    publish_weights(me, shared, flip, factors, p)
                    send_scores(me, shared, flip, s, own)
                    team = uint32(1 + warp // team_warps)
                    raised = ptx.barrier_or(team, uint32(team_warps * WARP), uint32(raised)) != uint32(0)
                    receive_scores(me, shared, flip, own)
                    if raised:
                        read_factors(me, shared, flip, factors)
                else:
                    for i in range(num_own):
                        own[i] = s[i]
                    raised = cuda.any_sync(uint32(FULL_WARP), raised)
                if tile > first_tile:
                    if raised:
                        rescale(o, factors)
                    values = uint32(shared + uint32(last_slot * slot_bytes + v_offset))
                    if checked:
                        multiply_checked_values(me, shared, flip, values, p, o)
                    else:
                        multiply_values(me, shared, flip, values, p, o)
            if tile > first_tile:
                release(me, shared, last_slot)
            if tile > first_tile + 1 and tile + (stages - 2) < end_tile:
                # Into the slot of the tile before the last one, which all teams have left by now.
                fetch(me, args, shared, record, int32(tile + stages - 2), indices, ahead_slot, ahead_parity ^ int32(1))
                ahead_slot, ahead_parity = next_slot(ahead_slot, ahead_parity)
                next_indices(me, args, record, int32(tile + stages - 1), indices)
            last_slot = slot
            if tile < end_tile:
                slot, parity = next_slot(slot, parity)
            tile = int32(tile + 1)
        finish_segment(me, args, shared, record, maxima, sums, o)
        return slot, parity

    @cuda.jit(device=True)
    def split_phase(args, table):
        # Opaque: it stays in a register, where the assembler would make it again and again out of a special one.
        shared = ptx.opaque_u32(ptx.shared_address(cuda.shared.array(0, uint8, 16), 0))
        me = find_place()
        init_ring(shared)
        slot, parity, which = int32(0), int32(0), int32(0)
        position, share_end = share(args, table)
        while position < share_end:  # an idle block skips the work, not the grid's barrier
            begin = first_record + which * SEGMENT_FIELDS
            record = cuda.shared.array(0, int64, 16)[begin : begin + SEGMENT_FIELDS]
            open_segment(args, table, position, share_end, record)  # the first one publishes the mbarriers, too
            slot, parity = run_segment(me, args, shared, record, slot, parity)
            position, share_end = record[NEXT_POSITION], record[SHARE_END]
            which = int32(which ^ 1)

    return split_phase
