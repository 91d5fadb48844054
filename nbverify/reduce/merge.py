"""Phase 2: merge the partial states of rows that several blocks shared.

For a row with states (m_s, l_s, o_s), s < S (kernels/softmax.py), in the order of its keys:

    M = max_s m_s      l = sum_s 2^(m_s - M) l_s      out = sum_s 2^(m_s - M) o_s / l * v_scale
    lse = M ln 2 + log(l)

(-inf, 0, 0) is neutral: a state that saw nothing weighs exactly 0.  If all are, out = 0 and lse = -inf.

Work      A chunk is (row unit, row, 128 columns): 512 bytes of each of the row's states, a load of a warp.  Its states
          are cut into runs, and a run's loads are all on the way before the first is needed.  With many chunks a warp
          takes one alone, run after run; with few, the warps of a group take runs of one chunk side by side and one of
          them adds the runs up.  Units that were written directly in phase 1 are skipped.
Traffic   Each partial output is read once, from L2; (m, l) once for each 128 columns.
Numerics  float32.  A run adds its states in order, and the runs are added in order; where a run ends depends on S
          alone.  So reruns, both reductions, and a group or a warp at work, give the same bits.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.formats import make_narrow
from nbverify.kernels.geometry import MERGE_COLUMNS, MERGE_RUN_BYTES, MERGE_RUNS, WARP
from nbverify.kernels.schedule import load_request, quotient
from nbverify.kernels.softmax import NEG_INF, ZERO, log_sum_exp, weight

IN_FLIGHT = 12  # states that a lane requests at once
COLUMNS_PER_LANE = 4
NUM_LOADED, NUM_STATES = COLUMNS_PER_LANE * IN_FLIGHT, 2 * IN_FLIGHT


@cuda.jit(device=True, forceinline=True)
def run_length(num_states):
    """States of a run."""
    return max(int32(IN_FLIGHT), int32(uint32(num_states + (MERGE_RUNS - 1)) // uint32(MERGE_RUNS)))


@cuda.jit(device=True, forceinline=True)
def add_state(maximum, total, sums, other_maximum, other_total, others):
    """Add a state to (maximum, total, sums); gives the new maximum and total.  Columns are updated in place."""
    ptx.unroll_loops()
    highest = max(maximum, other_maximum)
    mine, theirs = weight(maximum, highest), weight(other_maximum, highest)
    for i in range(COLUMNS_PER_LANE):
        sums[i] = cuda.fma(theirs, others[i], libdevice.fmul_rn(mine, sums[i]))
    return highest, cuda.fma(theirs, other_total, libdevice.fmul_rn(mine, total))


def make_merge_phase(spec, geometry, schedule):
    """``merge_phase(args, table)``: all threads of all blocks call it once, after every partial is written.

    Its scratch is the start of the block's shared memory, which phase 1 no longer uses.
    """
    rows_per_tile, warps = geometry.rows_per_tile, geometry.warps
    head_dim_v, group = spec.head_dim_v, spec.group
    parts = (head_dim_v + MERGE_COLUMNS - 1) // MERGE_COLUMNS
    chunks_per_unit = rows_per_tile * parts
    output_bytes, state_bytes = 4 * rows_per_tile * head_dim_v, 8 * rows_per_tile
    unit_states = schedule.unit_states
    narrow = make_narrow(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def add_run(args, states, row, column, run, sums):
        """``sums`` = weighted outputs of a run, of a lane's columns; gives its (m, l)."""
        ptx.unroll_loops()
        length = run_length(int32(states.num_states))
        begin = int32(run * length)
        left = min(length, int32(int32(states.num_states) - begin))
        first = (int64(states.first_state) + begin) * rows_per_tile + row
        state = ptx.global_address(args.partial_ml, 2 * first)
        output = ptx.global_address(args.partial_o, first * head_dim_v + column)
        loaded, these = cuda.local.array(NUM_LOADED, float32), cuda.local.array(NUM_STATES, float32)
        maximum, total = NEG_INF, ZERO
        for i in range(COLUMNS_PER_LANE):
            sums[i] = ZERO
        while left > 0:
            for j in range(IN_FLIGHT):
                is_there = uint32(j < left)
                x = ptx.load_global_v2_f32_if(state + uint64(j * state_bytes), is_there)
                these[2 * j], these[2 * j + 1] = x[0] if j < left else NEG_INF, x[1]
                y = ptx.load_global_v4_f32_if(
                    output + uint64(j * output_bytes), uint32(j < left and column < head_dim_v)
                )
                for i in range(COLUMNS_PER_LANE):
                    loaded[COLUMNS_PER_LANE * j + i] = y[i]
            highest = maximum
            for j in range(IN_FLIGHT):
                highest = max(highest, these[2 * j])
            factor = weight(maximum, highest)
            total = libdevice.fmul_rn(total, factor)
            for i in range(COLUMNS_PER_LANE):
                sums[i] = libdevice.fmul_rn(sums[i], factor)
            for j in range(IN_FLIGHT):  # past the end: 0 times 0
                w = weight(these[2 * j], highest)
                total = cuda.fma(w, these[2 * j + 1], total)
                for i in range(COLUMNS_PER_LANE):
                    sums[i] = cuda.fma(w, loaded[COLUMNS_PER_LANE * j + i], sums[i])
            maximum = highest
            state += uint64(IN_FLIGHT * state_bytes)
            output += uint64(IN_FLIGHT * output_bytes)
            left = int32(left - IN_FLIGHT)
        return maximum, total

    @cuda.jit(device=True, forceinline=True)
    def write_chunk(args, states, row, column, maximum, total, sums):
        """A lane's columns of the result."""
        request = load_request(args, states.request)
        head_row = uint32(states.first_row + row)
        token = request.token_start + int64(head_row // uint32(group))
        head = states.kv_head * group + int64(head_row % uint32(group))
        factor = ZERO  # of a row that saw nothing
        if total != ZERO:
            factor = libdevice.fdiv_rn(args.v_scale, total)
        if column < head_dim_v:
            target = uint64((token * args.out_stride_token + head * args.out_stride_head + column) // 2)
            words = args.out.view(np.uint32)
            for i in range(2):
                low = narrow(libdevice.fmul_rn(sums[2 * i], factor))
                high = narrow(libdevice.fmul_rn(sums[2 * i + 1], factor))
                words[target + uint64(i)] = low | uint32(high << uint32(16))
        if column == 0 and args.lse.size > 0:
            args.lse[token * args.lse_stride_token + head] = log_sum_exp(maximum, total)

    @cuda.jit(device=True, forceinline=True)
    def has_row(args, states, row):
        request = load_request(args, states.request)
        return states.num_states > 1 and states.first_row + row < request.num_nodes * group

    @cuda.jit(device=True)
    def merge_phase(args, table):
        ptx.unroll_loops()
        warp, lane, blocks = int32(cuda.threadIdx.x // WARP), int32(cuda.threadIdx.x % WARP), int32(cuda.gridDim.x)
        num_chunks = int32(table[uint32(2 * args.num_requests + 1)] * chunks_per_unit)
        share = int32(warps)  # warps that take a chunk together
        while share > 1 and int64(num_chunks) * share > int64(blocks) * warps:
            share = int32(share >> 1)
        groups = quotient(int32(warps), share)
        group_number = quotient(warp, share)
        member = int32(warp - group_number * share)
        scratch = ptx.shared_address(cuda.shared.array(0, float32, 16), 0)
        scratch = uint32(scratch + uint32(group_number) * uint32(MERGE_RUNS * MERGE_RUN_BYTES))
        sums, others = cuda.local.array(COLUMNS_PER_LANE, float32), cuda.local.array(COLUMNS_PER_LANE, float32)

        begin = int32(int32(cuda.blockIdx.x) * groups)
        while begin < num_chunks:
            chunk = int32(begin + group_number)
            is_busy = group_number < groups and chunk < num_chunks
            unit = int32(uint32(min(chunk, int32(num_chunks - 1))) // uint32(chunks_per_unit))
            inside = uint32(chunk - unit * chunks_per_unit)
            row, column = int32(inside // uint32(parts)), int32(inside % uint32(parts)) * MERGE_COLUMNS
            column = int32(column + COLUMNS_PER_LANE * lane)
            states = unit_states(args, table, unit)
            is_busy = is_busy and has_row(args, states, row)
            num_runs = int32(0)
            if is_busy:
                length = run_length(int32(states.num_states))
                num_runs = quotient(states.num_states + length - 1, length)
            maximum, total = NEG_INF, ZERO
            for i in range(COLUMNS_PER_LANE):
                sums[i] = ZERO
            run = member
            while run < num_runs:
                m, t = add_run(args, states, row, column, run, others)
                if share == 1:
                    maximum, total = add_state(maximum, total, sums, m, t, others)
                else:
                    place = uint32(scratch + uint32(run) * uint32(MERGE_RUN_BYTES))
                    ptx.store_shared_v4_f32(place + uint32(16 * lane), (others[0], others[1], others[2], others[3]))
                    ptx.store_shared_f32(place + uint32(4 * MERGE_COLUMNS), m)
                    ptx.store_shared_f32(place + uint32(4 * MERGE_COLUMNS + 4), t)
                run = int32(run + share)
            if share > 1:
                cuda.syncthreads()  # publishes the runs to the group
                run = int32(0) if member == 0 else num_runs
                while run < num_runs:
                    place = uint32(scratch + uint32(run) * uint32(MERGE_RUN_BYTES))
                    x = ptx.load_shared_v4_f32(place + uint32(16 * lane))
                    others[0], others[1], others[2], others[3] = x[0], x[1], x[2], x[3]
                    m = ptx.load_shared_f32(place + uint32(4 * MERGE_COLUMNS))
                    t = ptx.load_shared_f32(place + uint32(4 * MERGE_COLUMNS + 4))
                    maximum, total = add_state(maximum, total, sums, m, t, others)
                    run = int32(run + 1)
            if is_busy and member == 0:
                write_chunk(args, states, row, column, maximum, total, sums)
            if share > 1:
                cuda.syncthreads()  # the runs have been read: the next chunk may overwrite them
            begin = int32(begin + blocks * groups)

    return merge_phase
