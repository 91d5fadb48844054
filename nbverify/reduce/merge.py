"""Phase 2: merge the partial states of rows that several blocks shared.

For a row with states (m_s, l_s, o_s), s < S (kernels/softmax.py), in the order of its keys:

    M = max_s m_s      l = sum_s 2^(m_s - M) l_s      out = sum_s 2^(m_s - M) o_s / l * v_scale
    lse = M ln 2 + log(l)

(-inf, 0, 0) is neutral: a state that saw nothing weighs exactly 0.  If all are, out = 0 and lse = -inf.

Work      an item is (row unit, row, 256 columns).  With few items to a block, the block takes an item together, each
          warp some of its runs, and shared memory adds the runs up; with many, a warp takes an item alone.  Units that
          were written directly in phase 1 are skipped.
Traffic   each partial output is read once, in 16-byte pieces, 8 states of a lane in flight; (m, l) twice an item.
Numerics  float32.  The S states are cut into at most 8 runs of equal length; a run adds its states in order, and the
          sums of the runs are added in order.  The cut depends on S alone: reruns, both reductions, and a block or a
          warp at work, give the same bits.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.formats import make_narrow
from nbverify.kernels.geometry import FULL_WARP, MERGE_COLUMNS, MERGE_RUNS, WARP
from nbverify.kernels.schedule import load_request
from nbverify.kernels.softmax import NEG_INF, ZERO, log_sum_exp, normalise, warp_max, weight

COLUMNS_PER_LOAD = 4 * WARP
IN_FLIGHT = 8  # states whose outputs a lane requests before it needs the first
# Up to so many items a block, a block takes an item together: its warps then wait for memory side by side.
ITEMS_FOR_A_BLOCK = 3


@cuda.jit(device=True, forceinline=True)
def run_length(num_states):
    """States of a run."""
    return max(int32(IN_FLIGHT), (num_states + int32(MERGE_RUNS - 1)) // int32(MERGE_RUNS))


def make_merge_phase(spec, geometry, schedule):
    """``merge_phase(args, table)``: all threads of all blocks call it once, after every partial is written.

    Its scratch is the start of the block's shared memory, which phase 1 no longer uses.
    """
    rows_per_tile, warps, threads = geometry.rows_per_tile, geometry.warps, geometry.threads
    head_dim_v, group = spec.head_dim_v, spec.group
    vectors = 1 if head_dim_v <= COLUMNS_PER_LOAD else 2  # 16-byte pieces a lane has of a row
    num_sums, num_loaded = 4 * vectors, 4 * vectors * IN_FLIGHT
    columns_per_item = vectors * COLUMNS_PER_LOAD
    parts = (head_dim_v + columns_per_item - 1) // columns_per_item
    items_per_unit = rows_per_tile * parts
    totals_begin = MERGE_RUNS * MERGE_COLUMNS  # in the scratch: behind the columns
    state_bytes, ml_words = 4 * rows_per_tile * head_dim_v, 2 * rows_per_tile
    unit_states = schedule.unit_states
    narrow = make_narrow(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def row_maximum(args, states, row):
        """Largest m of a row, in every lane."""
        maximum = NEG_INF
        first, s = uint64(states.first_state * ml_words + 2 * row), int32(cuda.threadIdx.x % WARP)
        while s < int32(states.num_states):
            maximum = max(maximum, args.partial_ml[first + uint64(s * ml_words)])
            s = int32(s + WARP)
        return warp_max(maximum)

    @cuda.jit(device=True, forceinline=True)
    def add_run(args, states, row, column, run, maximum, sums):
        """``sums`` = weighted outputs of a run, for a lane's columns ``column + 128 v``; returns its weighted l."""
        ptx.unroll_loops()
        lane, num_states = int32(cuda.threadIdx.x % WARP), int32(states.num_states)
        length = run_length(num_states)
        base = int32(run * length)
        end = min(num_states, int32(base + length))
        ml = uint64(states.first_state * ml_words + 2 * row)
        source = ptx.global_address(args.partial_o, (states.first_state * rows_per_tile + row) * head_dim_v + column)
        source += uint64(base) * uint64(state_bytes)
        for i in range(num_sums):
            sums[i] = ZERO
        total = ZERO
        loaded = cuda.local.array(num_loaded, float32)
        while base < end:  # a lane looks after one state's weight, of 32
            my_weight, my_total = ZERO, ZERO
            if base + lane < end:
                mine = ml + uint64((base + lane) * ml_words)
                my_weight = weight(args.partial_ml[mine], maximum)
                my_total = args.partial_ml[mine + uint64(1)]
            s = int32(0)
            while s < min(int32(WARP), int32(end - base)):
                for j in range(IN_FLIGHT):
                    for v in range(vectors):
                        is_there = base + s + j < end and column + v * COLUMNS_PER_LOAD < head_dim_v
                        address = source + uint64(j * state_bytes + v * COLUMNS_PER_LOAD * 4)
                        x = ptx.load_global_v4_f32_if(address, uint32(is_there))
                        for i in range(4):
                            loaded[(j * vectors + v) * 4 + i] = x[i]
                for j in range(IN_FLIGHT):  # past the end: 0 times 0
                    w = cuda.shfl_sync(uint32(FULL_WARP), my_weight, s + j)
                    total = cuda.fma(w, cuda.shfl_sync(uint32(FULL_WARP), my_total, s + j), total)
                    for i in range(num_sums):
                        sums[i] = cuda.fma(w, loaded[j * num_sums + i], sums[i])
                source += uint64(IN_FLIGHT * state_bytes)
                s = int32(s + IN_FLIGHT)
            base = int32(base + WARP)
        return total

    @cuda.jit(device=True)
    def write_pair(args, states, request, row, column, even, odd, total):
        """Two columns of a row of the result."""
        head_row = states.first_row + row
        token, head = request.token_start + head_row // group, states.kv_head * group + head_row % group
        target = (token * args.out_stride_token + head * args.out_stride_head + column) // 2
        low = narrow(normalise(even, total, args.v_scale))
        high = narrow(normalise(odd, total, args.v_scale))
        args.out.view(np.uint32)[target] = low | uint32(high << uint32(16))

    @cuda.jit(device=True)
    def write_lse(args, states, request, row, maximum, total):
        head_row = states.first_row + row
        token, head = request.token_start + head_row // group, states.kv_head * group + head_row % group
        args.lse[token * args.lse_stride_token + head] = log_sum_exp(maximum, total)

    @cuda.jit(device=True)
    def merge_by_warp(args, states, request, row, part):
        """One item, one warp."""
        ptx.unroll_loops()
        lane = cuda.threadIdx.x % WARP
        column = part * columns_per_item + 4 * lane
        maximum, total = row_maximum(args, states, row), ZERO
        sums, run_sums = cuda.local.array(num_sums, float32), cuda.local.array(num_sums, float32)
        for i in range(num_sums):
            sums[i] = ZERO
        run = int32(0)
        while run * run_length(int32(states.num_states)) < states.num_states:
            total += add_run(args, states, row, column, run, maximum, run_sums)
            for i in range(num_sums):
                sums[i] += run_sums[i]
            run = int32(run + 1)
        for v in range(vectors):
            for i in range(0, 4, 2):
                c = column + v * COLUMNS_PER_LOAD + i
                if c < head_dim_v:
                    write_pair(args, states, request, row, c, sums[4 * v + i], sums[4 * v + i + 1], total)
        if part == 0 and lane == 0 and args.lse.size > 0:
            write_lse(args, states, request, row, maximum, total)

    @cuda.jit(device=True)
    def merge_by_block(args, states, request, row, part, scratch):
        """One item, all warps of the block."""
        ptx.unroll_loops()
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        column = part * columns_per_item + 4 * lane
        maximum = row_maximum(args, states, row)
        run_sums = cuda.local.array(num_sums, float32)
        run = int32(warp)
        while run < MERGE_RUNS:
            total = add_run(args, states, row, column, run, maximum, run_sums)
            for v in range(vectors):
                at = run * MERGE_COLUMNS + v * COLUMNS_PER_LOAD + 4 * lane
                for i in range(4):
                    scratch[at + i] = run_sums[4 * v + i]
            if lane == 0:
                scratch[totals_begin + run] = total
            run = int32(run + warps)
        cuda.syncthreads()  # publishes the runs to the block
        total = ZERO
        for run in range(MERGE_RUNS):
            total += scratch[totals_begin + run]
        pair = int64(cuda.threadIdx.x)
        while 2 * pair < min(int64(columns_per_item), head_dim_v - part * columns_per_item):
            even, odd = ZERO, ZERO
            for run in range(MERGE_RUNS):
                even += scratch[run * MERGE_COLUMNS + 2 * pair]
                odd += scratch[run * MERGE_COLUMNS + 2 * pair + 1]
            write_pair(args, states, request, row, part * columns_per_item + 2 * pair, even, odd, total)
            pair += threads
        if part == 0 and cuda.threadIdx.x == 0 and args.lse.size > 0:
            write_lse(args, states, request, row, maximum, total)
        cuda.syncthreads()  # the runs have been read: the next item may overwrite them

    @cuda.jit(device=True)
    def merge_phase(args, table):
        scratch = cuda.shared.array(0, float32, 16)
        num_units = table[2 * args.num_requests + 1]
        worker, workers = int64(cuda.blockIdx.x), int64(cuda.gridDim.x)
        by_block = num_units * items_per_unit <= ITEMS_FOR_A_BLOCK * workers
        if not by_block:
            worker, workers = worker * warps + cuda.threadIdx.x // WARP, workers * warps
        # Neighbouring items go to one worker: it looks up a unit's states once.
        item, end = (
            worker * (num_units * items_per_unit) // workers,
            (worker + 1) * (num_units * items_per_unit) // workers,
        )
        while item < end:
            unit = item // items_per_unit
            states = unit_states(args, table, unit)
            request = load_request(args, states.request)
            stop = min(end, (unit + 1) * items_per_unit)
            if states.num_states > 1:
                while item < stop:
                    inside = item - unit * items_per_unit
                    row, part = inside // parts, inside % parts
                    if states.first_row + row < request.num_nodes * group:
                        if by_block:
                            merge_by_block(args, states, request, row, part, scratch)
                        else:
                            merge_by_warp(args, states, request, row, part)
                    item += 1
            item = stop

    return merge_phase
