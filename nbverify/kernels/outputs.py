"""The end of a segment: teams that shared rows are merged, and rows go out as results or as partial states."""

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.scores import FRAG_BYTES
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import NEG_INF, ZERO, log_sum_exp, weight
from nbverify.kernels.weights import LANES_PER_ROW, finish_row_sum, make_pack

STATE_BYTES = 8


def make_finish_segment(spec, geometry):
    """``finish_segment(me, args, shared, record, maxima, sums, o)``.  All threads of the block call it.

    The states (m, l) of all teams' rows meet in shared memory.  Teams that share rows leave their outputs in the ring,
    which is empty now, and the first of them adds them up, in the order of the key teams.
    """
    team_warps, row_teams, key_teams = geometry.team_warps, geometry.row_teams, geometry.key_teams
    row_frags, value_frags, team_rows = geometry.row_frags, geometry.value_frags, geometry.team_rows
    rows_per_tile, head_dim_v, group = geometry.rows_per_tile, spec.head_dim_v, spec.group
    states_offset = geometry.states_offset
    rows, own_rows, has_team = 2 * row_frags, geometry.rows_per_lane, team_warps > 1
    warps_of_rows = row_teams * team_warps
    num_weights = rows * key_teams
    warp_bytes = row_frags * value_frags * FRAG_BYTES
    pack = make_pack(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def leave_states(me, shared, maxima, sums):
        """(m, l) of the rows whose softmax this warp computed."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        first_row = warp // team_warps * team_rows
        if has_team:
            first_row += warp % team_warps * 8
        for r in range(own_rows):
            total = finish_row_sum(sums[r])
            if lane % LANES_PER_ROW == 0:
                row = first_row + 8 * r + lane // LANES_PER_ROW
                target = shared + uint32(states_offset + row * STATE_BYTES)
                ptx.store_shared_f32(target, maxima[r])
                ptx.store_shared_f32(target + uint32(4), total)

    @cuda.jit(device=True, forceinline=True)
    def leave_outputs(me, shared, o):
        """This warp's outputs to the ring, as fragments."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        target = uint32(shared + uint32((warp - warps_of_rows) * warp_bytes + lane * 16))
        for f in range(row_frags * value_frags):
            at = 4 * f
            ptx.store_shared_v4_f32(target + uint32(f * FRAG_BYTES), (o[at], o[at + 1], o[at + 2], o[at + 3]))

    @cuda.jit(device=True, forceinline=True)
    def add_teams(me, shared, maxima, totals, o):
        """States and outputs of the lane's rows over all key teams."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        row = warp // team_warps * team_rows + lane // LANES_PER_ROW
        w = cuda.local.array(num_weights, float32)
        for r in range(rows):
            maximum = NEG_INF
            for team in range(key_teams):
                source = shared + uint32(states_offset + (team * rows_per_tile + row + 8 * r) * STATE_BYTES)
                w[team * rows + r] = ptx.load_shared_f32(source)
                maximum = max(maximum, w[team * rows + r])
            total = ZERO
            for team in range(key_teams):
                source = shared + uint32(states_offset + (team * rows_per_tile + row + 8 * r) * STATE_BYTES + 4)
                if key_teams > 1:
                    w[team * rows + r] = weight(w[team * rows + r], maximum)
                    total = cuda.fma(w[team * rows + r], ptx.load_shared_f32(source), total)
                else:
                    total = ptx.load_shared_f32(source)
            maxima[r], totals[r] = maximum, total
        if key_teams > 1:
            for f in range(row_frags * value_frags):
                r = 2 * (f // value_frags)
                for i in range(4):
                    o[4 * f + i] = libdevice.fmul_rn(o[4 * f + i], w[r + i // 2])
                for team in range(1, key_teams):
                    source = ((team - 1) * warps_of_rows + warp) * warp_bytes + f * FRAG_BYTES + lane * 16
                    x = ptx.load_shared_v4_f32(shared + uint32(source))
                    for i in range(4):
                        o[4 * f + i] = cuda.fma(w[team * rows + r + i // 2], x[i], o[4 * f + i])

    @cuda.jit(device=True, forceinline=True)
    def write_results(me, args, segment, first_row, column, maxima, totals, o):
        """Rows whose keys were all seen here."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        request = segment.request
        words = args.out.view(np.uint32)
        for r in range(rows):
            head_row = first_row + 8 * r
            if head_row < request.num_nodes * group:
                token, head = request.token_start + head_row // group, segment.kv_head * group + head_row % group
                target = uint64((token * args.out_stride_token + head * args.out_stride_head + column) // 2)
                factor = ZERO  # of a row that saw nothing
                if totals[r] != ZERO:
                    factor = libdevice.fdiv_rn(args.v_scale, totals[r])
                for j in range(value_frags):
                    at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
                    even, odd = libdevice.fmul_rn(o[at], factor), libdevice.fmul_rn(o[at + 1], factor)
                    words[target + uint64(4 * j)] = pack(even, odd)
                if warp % team_warps == 0 and lane % LANES_PER_ROW == 0 and args.lse.size > 0:
                    args.lse[token * args.lse_stride_token + head] = log_sum_exp(maxima[r], totals[r])

    @cuda.jit(device=True, forceinline=True)
    def write_partials(me, args, segment, first_row, column, maxima, totals, o):
        """States of rows that other blocks share."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        for r in range(rows):
            if first_row + 8 * r < segment.request.num_nodes * group:
                state_row = segment.state * rows_per_tile + first_row - segment.first_row + 8 * r
                target = ptx.global_address(args.partial_o, state_row * head_dim_v + column)
                for j in range(value_frags):
                    at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
                    ptx.store_global_v2_f32(target + uint64(32 * j), (o[at], o[at + 1]))
                if warp % team_warps == 0 and lane % LANES_PER_ROW == 0:
                    target = ptx.global_address(args.partial_ml, 2 * state_row)
                    ptx.store_global_v2_f32(target, (maxima[r], totals[r]))

    @cuda.jit(device=True, forceinline=True)
    def finish_segment(me, args, shared, record, maxima, sums, o):
        lane, warp = int32(me.lane), int32(me.warp)
        leave_states(me, shared, maxima, sums)
        if key_teams > 1:
            cuda.syncthreads()  # no warp reads the ring any more: outputs may go there
            if warp >= warps_of_rows:
                leave_outputs(me, shared, o)
            cuda.syncthreads()  # publishes states and outputs to the block
        elif has_team:
            ptx.barrier_sync(uint32(1 + warp // team_warps), uint32(team_warps * WARP))  # publishes states to the team
        else:
            cuda.syncwarp()  # publishes states to the warp
        if warp < warps_of_rows:
            row_maxima, totals = cuda.local.array(rows, float32), cuda.local.array(rows, float32)
            add_teams(me, shared, row_maxima, totals, o)
            segment = load_segment(record)
            first_row = int64(segment.first_row + warp // team_warps * team_rows + lane // LANES_PER_ROW)
            column = warp % team_warps * (value_frags * 8) + 2 * (lane % LANES_PER_ROW)
            if segment.direct:
                write_results(me, args, segment, first_row, column, row_maxima, totals, o)
            else:
                write_partials(me, args, segment, first_row, column, row_maxima, totals, o)
        if key_teams > 1:
            cuda.syncthreads()  # outputs have been read: the next segment may fill the ring
        else:
            cuda.syncwarp()  # a single warp's states have been read; in a team its next barriers say so

    return finish_segment
