"""The end of a segment: teams that shared rows are merged, and rows go out as results or as partial states."""

from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.scores import FRAG_BYTES
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO, log_sum_exp, weight
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.weights import LANES_PER_ROW, ROWS_PER_LANE, finish_row_sum, make_pack

STATE_BYTES = 8
FACTOR_BYTES = 4


def make_write_states(spec, geometry):
    """``write_states(args, shared, record, row, maximum, total)``: the final state of a row of the unit, by one lane.

    A row whose keys were all seen here: its lse, and to shared memory the factor of its outputs.  Else (m, l) to the
    workspace.  A barrier publishes the factor to those that write the outputs.
    """
    rows_per_tile, group, finals_offset = geometry.rows_per_tile, spec.group, geometry.finals_offset

    @cuda.jit(device=True, forceinline=True)
    def write_states(args, shared, record, row, maximum, total):
        segment = load_segment(record)
        head_row = uint32(int32(segment.first_row) + row)
        if head_row < uint32(segment.request.num_nodes * group):
            if segment.direct:
                factor = ZERO  # of a row that saw nothing
                if total != ZERO:
                    factor = libdevice.fdiv_rn(args.v_scale, total)
                ptx.store_shared_f32(shared + uint32(finals_offset + row * FACTOR_BYTES), factor)
                if args.lse.size > 0:
                    token = segment.request.token_start + int64(head_row // uint32(group))
                    head = segment.kv_head * group + int64(head_row % uint32(group))
                    args.lse[uint64(token * args.lse_stride_token + head)] = log_sum_exp(maximum, total)
            else:
                state_row = segment.state * rows_per_tile + row
                ptx.store_global_v2_f32(ptx.global_address(args.partial_ml, 2 * state_row), (maximum, total))

    return write_states


def make_finish_rows(spec, geometry):
    """``finish_rows(me, args, shared, record, maxima, sums)``: the states of a warp's rows, which are final."""
    write_states = make_write_states(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def finish_rows(me, args, shared, record, maxima, sums):
        ptx.unroll_loops()
        lane, first_row = int32(me.lane), int32(int32(me.warp) * FRAG_ROWS)
        for r in range(ROWS_PER_LANE):
            total = finish_row_sum(sums[r])
            if lane % LANES_PER_ROW == 0:
                row = int32(first_row + 8 * r + lane // LANES_PER_ROW)
                write_states(args, shared, record, row, maxima[r], total)

    return finish_rows


def make_join_teams(spec, geometry):
    """Teams that share rows, at the end of a segment: ``leave(me, shared, maxima, sums, o)`` by all but the first,

    and ``join(me, args, shared, record, maxima, sums, o)`` by the first of them, which adds the outputs of the others
    to its own, in the order of the key teams, and finishes the rows.  What is left lies in the ring, which is empty
    then: a block barrier before ``leave``, and one between the two.
    """
    row_teams, key_teams, shared_warps = geometry.row_teams, geometry.key_teams, geometry.shared_warps
    value_frags, states_offset, first_shared = geometry.value_frags, geometry.states_offset, row_teams - shared_warps
    rows, warp_bytes, num_weights = ROWS_PER_LANE, value_frags * FRAG_BYTES, ROWS_PER_LANE * key_teams
    write_states = make_write_states(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def warp_of(warp, team):
        """The warp that shares the rows of ``warp``, their first one, as team ``team`` > 0."""
        return int32(row_teams + (team - 1) * shared_warps + (warp - first_shared))

    @cuda.jit(device=True, forceinline=True)
    def state_address(shared, warp, row):
        return uint32(shared + uint32(states_offset + (warp * FRAG_ROWS + row) * STATE_BYTES))

    @cuda.jit(device=True, forceinline=True)
    def leave(me, shared, maxima, sums, o):
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        for r in range(rows):
            total = finish_row_sum(sums[r])
            if lane % LANES_PER_ROW == 0:
                target = state_address(shared, warp, 8 * r + lane // LANES_PER_ROW)
                ptx.store_shared_f32(target, maxima[r])
                ptx.store_shared_f32(target + uint32(4), total)
        target = uint32(shared + uint32((warp - row_teams) * warp_bytes + lane * 16))
        for f in range(value_frags):
            at = 4 * f
            ptx.store_shared_v4_f32(target + uint32(f * FRAG_BYTES), (o[at], o[at + 1], o[at + 2], o[at + 3]))

    @cuda.jit(device=True, forceinline=True)
    def join(me, args, shared, record, maxima, sums, o):
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        w = cuda.local.array(num_weights, float32)
        for r in range(rows):
            row = int32(lane // LANES_PER_ROW + 8 * r)
            own_total = finish_row_sum(sums[r])
            highest = maxima[r]
            for team in range(1, key_teams):
                w[team * rows + r] = ptx.load_shared_f32(state_address(shared, warp_of(warp, team), row))
                highest = max(highest, w[team * rows + r])
            w[r] = weight(maxima[r], highest)
            total = libdevice.fmul_rn(w[r], own_total)
            for team in range(1, key_teams):
                w[team * rows + r] = weight(w[team * rows + r], highest)
                x = ptx.load_shared_f32(state_address(shared, warp_of(warp, team), row) + uint32(4))
                total = cuda.fma(w[team * rows + r], x, total)
            if lane % LANES_PER_ROW == 0:
                write_states(args, shared, record, int32(warp * FRAG_ROWS + row), highest, total)
        for f in range(value_frags):
            for i in range(4):
                o[4 * f + i] = libdevice.fmul_rn(o[4 * f + i], w[i // 2])
            for team in range(1, key_teams):
                source = (warp_of(warp, team) - row_teams) * warp_bytes + f * FRAG_BYTES + lane * 16
                x = ptx.load_shared_v4_f32(shared + uint32(source))
                for i in range(4):
                    o[4 * f + i] = cuda.fma(w[team * rows + i // 2], x[i], o[4 * f + i])

    return leave, join


def make_write_outputs(spec, geometry):
    """``write_outputs(me, args, shared, record, o)``: the warp's rows and columns, as results or as partial states."""
    row_frags, value_frags, has_roles = geometry.row_frags, geometry.value_frags, geometry.has_roles
    rows_per_tile, head_dim_v, group = geometry.rows_per_tile, spec.head_dim_v, spec.group
    score_warps, finals_offset, rows = geometry.score_warps, geometry.finals_offset, 2 * row_frags
    pack = make_pack(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def write_outputs(me, args, shared, record, o):
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        row, column = int32(lane // LANES_PER_ROW), int32(2 * (lane % LANES_PER_ROW))
        if has_roles:
            column = int32(column + (warp - score_warps) * (value_frags * 8))
        else:
            row = int32(row + warp * FRAG_ROWS)
        segment = load_segment(record)
        first = int32(int32(segment.first_row) + row)
        left = int32(int32(segment.request.num_nodes * group) - first)  # rows of the request from this one on
        if segment.direct:
            finals = uint32(shared + uint32(finals_offset + row * FACTOR_BYTES))
            for r in range(rows):
                if 8 * r < left:
                    head_row = uint32(first + 8 * r)
                    token = segment.request.token_start + int64(head_row // uint32(group))
                    head = segment.kv_head * group + int64(head_row % uint32(group))
                    target = ptx.global_address(
                        args.out, token * args.out_stride_token + head * args.out_stride_head + column
                    )
                    factor = ptx.load_shared_f32(finals + uint32(8 * r * FACTOR_BYTES))
                    for j in range(value_frags):
                        at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
                        even, odd = libdevice.fmul_rn(o[at], factor), libdevice.fmul_rn(o[at + 1], factor)
                        ptx.store_global_u32(target + uint64(16 * j), pack(even, odd))
        else:
            # A lane's four columns of 16 side by side (merge.py): two fragments in one store, lines half as often.
            first_place = (
                (segment.state * rows_per_tile + row) * head_dim_v + column // 8 * 8 + lane % LANES_PER_ROW * 4
            )
            target = ptx.global_address(args.partial_o, first_place)
            for r in range(rows):
                if 8 * r < left:
                    for j in range(0, value_frags, 2):
                        at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
                        place = target + uint64(4 * (8 * r * head_dim_v + 8 * j))
                        ptx.store_global_v4_f32(place, (o[at], o[at + 1], o[at + 4], o[at + 5]))

    return write_outputs
