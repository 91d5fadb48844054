"""The end of a segment: teams that shared rows are merged, and rows go out as results or as partial states."""

import numpy as np
from numba import cuda, float32, int32, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.scores import FRAG_BYTES
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import NEG_INF, ZERO, log_sum_exp, weight
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.weights import LANES_PER_ROW, ROWS_PER_LANE, finish_row_sum, make_pack

STATE_BYTES = 8


def make_outputs(spec, geometry):
    """For a segment's end: ``leave_states(me, shared, maxima, sums)``, ``write_outputs(me, args, shared, record, o)``.

    The states (m, l) of all rows meet in shared memory; the block's barriers stand outside, in the walks.  Teams that
    share rows leave their outputs in the ring, which is empty then, and the first of them adds them up, in the order of
    the key teams (``leave_outputs(me, shared, o)``).
    """
    row_teams, key_teams, score_warps = geometry.row_teams, geometry.key_teams, geometry.row_frags
    row_frags, value_frags, has_roles = geometry.row_frags, geometry.value_frags, geometry.has_roles
    rows_per_tile, head_dim_v, group = geometry.rows_per_tile, spec.head_dim_v, spec.group
    states_offset = geometry.states_offset
    rows = 2 * row_frags
    num_weights = rows * key_teams
    warp_bytes = row_frags * value_frags * FRAG_BYTES
    pack = make_pack(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def leave_states(me, shared, maxima, sums):
        """(m, l) of the rows whose softmax this warp computed; warp w has fragment w of [key team, row]."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        for r in range(ROWS_PER_LANE):
            total = finish_row_sum(sums[r])
            if lane % LANES_PER_ROW == 0:
                row = warp * FRAG_ROWS + 8 * r + lane // LANES_PER_ROW
                target = shared + uint32(states_offset + row * STATE_BYTES)
                ptx.store_shared_f32(target, maxima[r])
                ptx.store_shared_f32(target + uint32(4), total)

    @cuda.jit(device=True, forceinline=True)
    def leave_outputs(me, shared, o):
        """This warp's outputs to the ring, as fragments."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        target = uint32(shared + uint32((warp - row_teams) * warp_bytes + lane * 16))
        for f in range(row_frags * value_frags):
            at = 4 * f
            ptx.store_shared_v4_f32(target + uint32(f * FRAG_BYTES), (o[at], o[at + 1], o[at + 2], o[at + 3]))

    @cuda.jit(device=True, forceinline=True)
    def state_address(shared, team, row):
        return uint32(shared + uint32(states_offset + (team * rows_per_tile + row) * STATE_BYTES))

    @cuda.jit(device=True, forceinline=True)
    def add_teams(me, shared, first_row, o):
        """Outputs of the lane's rows over all key teams; their states to the place of the first team's."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        w = cuda.local.array(num_weights, float32)
        for r in range(rows):
            maximum, total = NEG_INF, ZERO
            for team in range(key_teams):
                w[team * rows + r] = ptx.load_shared_f32(state_address(shared, team, first_row + 8 * r))
                maximum = max(maximum, w[team * rows + r])
            for team in range(key_teams):
                w[team * rows + r] = weight(w[team * rows + r], maximum)
                x = ptx.load_shared_f32(state_address(shared, team, first_row + 8 * r) + uint32(4))
                total = cuda.fma(w[team * rows + r], x, total)
            cuda.syncwarp()  # all lanes of the row have read its states
            if lane % LANES_PER_ROW == 0:
                ptx.store_shared_f32(state_address(shared, 0, first_row + 8 * r), maximum)
                ptx.store_shared_f32(state_address(shared, 0, first_row + 8 * r) + uint32(4), total)
        cuda.syncwarp()  # publishes the states to the warp
        for f in range(row_frags * value_frags):
            r = 2 * (f // value_frags)
            for i in range(4):
                o[4 * f + i] = libdevice.fmul_rn(o[4 * f + i], w[r + i // 2])
            for team in range(1, key_teams):
                source = ((team - 1) * row_teams + warp) * warp_bytes + f * FRAG_BYTES + lane * 16
                x = ptx.load_shared_v4_f32(shared + uint32(source))
                for i in range(4):
                    o[4 * f + i] = cuda.fma(w[team * rows + r + i // 2], x[i], o[4 * f + i])

    @cuda.jit(device=True, forceinline=True)
    def write_result(args, segment, head_row, column, r, maximum, total, writes_state, o):
        """A row whose keys were all seen here."""
        ptx.unroll_loops()
        token, head = segment.request.token_start + head_row // group, segment.kv_head * group + head_row % group
        target = uint64((token * args.out_stride_token + head * args.out_stride_head + column) // 2)
        words, factor = args.out.view(np.uint32), ZERO  # of a row that saw nothing
        if total != ZERO:
            factor = libdevice.fdiv_rn(args.v_scale, total)
        for j in range(value_frags):
            at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
            even, odd = libdevice.fmul_rn(o[at], factor), libdevice.fmul_rn(o[at + 1], factor)
            words[target + uint64(4 * j)] = pack(even, odd)
        if writes_state and args.lse.size > 0:
            args.lse[token * args.lse_stride_token + head] = log_sum_exp(maximum, total)

    @cuda.jit(device=True, forceinline=True)
    def write_partial(args, segment, row, column, r, maximum, total, writes_state, o):
        """The state of a row that other blocks share."""
        ptx.unroll_loops()
        state_row = segment.state * rows_per_tile + row
        target = ptx.global_address(args.partial_o, state_row * head_dim_v + column)
        for j in range(value_frags):
            at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
            ptx.store_global_v2_f32(target + uint64(32 * j), (o[at], o[at + 1]))
        if writes_state:
            ptx.store_global_v2_f32(ptx.global_address(args.partial_ml, 2 * state_row), (maximum, total))

    @cuda.jit(device=True, forceinline=True)
    def write_outputs(me, args, shared, record, o):
        """The warp's rows and columns: as results, or as partial states."""
        ptx.unroll_loops()
        if key_teams > 1:
            add_teams(me, shared, int32(int32(me.warp) * FRAG_ROWS + int32(me.lane) // LANES_PER_ROW), o)
        for r in range(rows):
            # Row by row from scratch: what a row needs is not kept for the others, there is no register for it.
            lane, warp = int32(ptx.opaque_u32(me.lane)), int32(me.warp)
            row, column = int32(lane // LANES_PER_ROW + 8 * r), int32(2 * (lane % LANES_PER_ROW))
            writes_state = lane % LANES_PER_ROW == 0
            if has_roles:
                writes_state = writes_state and warp == score_warps
                column = int32(column + (warp - score_warps) * (value_frags * 8))
            else:
                row = int32(row + warp * FRAG_ROWS)
            segment = load_segment(record)
            head_row = segment.first_row + row
            if head_row < segment.request.num_nodes * group:
                maximum = ptx.load_shared_f32(state_address(shared, 0, row))
                total = ptx.load_shared_f32(state_address(shared, 0, row) + uint32(4))
                if segment.direct:
                    write_result(args, segment, head_row, column, r, maximum, total, writes_state, o)
                else:
                    write_partial(args, segment, row, column, r, maximum, total, writes_state, o)

    return leave_states, leave_outputs, write_outputs
