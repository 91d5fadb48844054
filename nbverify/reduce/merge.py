"""Phase 2: merge the partial states of rows that several blocks shared.

For a row with states (m_s, l_s, o_s), s < S (kernels/softmax.py), in the order of its keys:

    M = max_s m_s      l = sum_s 2^(m_s - M) l_s      out = sum_s 2^(m_s - M) o_s / l * v_scale
    lse = M ln 2 + log(l)

(-inf, 0, 0) is neutral: a state that saw nothing weighs exactly 0.  If all are, out = 0 and lse = -inf.

Work      warps of the whole grid share (row unit, row, 64 columns) triples; a lane owns two columns.  Units that were
          written directly in phase 1 are skipped.
Traffic   each partial output is read once, each (m, l) twice per 64 columns.
Numerics  float32; s runs in a fixed order, so that reruns, and both reductions, have the same bits.
"""

import numpy as np
from numba import cuda, int64, uint32

from nbverify.kernels.formats import make_narrow
from nbverify.kernels.geometry import WARP
from nbverify.kernels.schedule import load_request
from nbverify.kernels.softmax import NEG_INF, ZERO, log_sum_exp, normalise, warp_max, weight

COLUMNS_PER_WARP = 2 * WARP


def make_merge_phase(spec, geometry, schedule):
    """``merge_phase(args, table)``: all threads of all blocks call it once, after every partial is written."""
    rows_per_tile, warps = geometry.rows_per_tile, geometry.warps
    head_dim_v, v_words = spec.head_dim_v, geometry.v_words
    group = spec.group
    column_parts = (head_dim_v + COLUMNS_PER_WARP - 1) // COLUMNS_PER_WARP
    work_per_unit = rows_per_tile * column_parts
    unit_states = schedule.unit_states
    narrow = make_narrow(spec.dtype)

    @cuda.jit(device=True)
    def merge_row(args, states, row, part):
        """``row`` of a unit, 64 of its columns.  One warp."""
        lane = cuda.threadIdx.x % WARP
        request = load_request(args, states.request)
        head_row = states.first_row + row
        if head_row < request.num_nodes * group:
            maximum = NEG_INF
            for s in range(lane, states.num_states, WARP):
                maximum = max(maximum, args.partial_ml[2 * ((states.first_state + s) * rows_per_tile + row)])
            maximum = warp_max(maximum)

            word = part * WARP + lane
            column = min(word, v_words - 1) * 2  # lanes past the last column read a valid one and write nothing
            total, even, odd = ZERO, ZERO, ZERO
            for s in range(states.num_states):
                state_row = (states.first_state + s) * rows_per_tile + row
                w = weight(args.partial_ml[2 * state_row], maximum)
                total = cuda.fma(w, args.partial_ml[2 * state_row + 1], total)
                even = cuda.fma(w, args.partial_o[state_row * head_dim_v + column], even)
                odd = cuda.fma(w, args.partial_o[state_row * head_dim_v + column + 1], odd)

            token = request.token_start + head_row // group
            head = states.kv_head * group + head_row % group
            if word < v_words:
                low = narrow(normalise(even, total, args.v_scale))
                high = narrow(normalise(odd, total, args.v_scale))
                target = (token * args.out_stride_token + head * args.out_stride_head) // 2
                args.out.view(np.uint32)[target + word] = low | uint32(high << uint32(16))
            if word == 0 and args.lse.size > 0:
                args.lse[token * args.lse_stride_token + head] = log_sum_exp(maximum, total)

    @cuda.jit(device=True)
    def merge_phase(args, table):
        num_units = table[2 * args.num_requests + 1]
        worker = int64(cuda.blockIdx.x) * warps + cuda.threadIdx.x // WARP
        for work in range(worker, num_units * work_per_unit, int64(cuda.gridDim.x) * warps):
            states = unit_states(args, table, work // work_per_unit)
            if states.num_states > 1:
                merge_row(args, states, work % work_per_unit // column_parts, work % column_parts)

    return merge_phase
