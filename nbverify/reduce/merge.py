"""Phase 2: merge the partial states of rows that several blocks shared.

For a row with states (m_s, l_s, o_s), s < S (kernels/softmax.py), in the order of its keys:

    M = max_s m_s      l = sum_s 2^(m_s - M) l_s      out = sum_s 2^(m_s - M) o_s / l * v_scale
    lse = M ln 2 + log(l)

(-inf, 0, 0) is neutral: a state that saw nothing weighs exactly 0.  If all are, out = 0 and lse = -inf.

Layout    A row's columns lie in blocks of 16, in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15: what a lane has of
          two mma results of 8 columns is 16 bytes.
Work      A chunk is (row unit, row, 128 columns): 512 bytes of each of the row's states, a load of a warp.  Its states
          are cut into runs, and a run's loads are all on the way before the first is needed.  With few chunks several
          warps, a group, take the runs of one side by side; with many, a warp takes a chunk alone, run after run.  The
          runs' sums pass through shared memory, where one warp of the group adds them up.  Chunks go round the blocks,
          two or four of a row at a time where parts and groups are even: so a unit with many states, which take long,
          is not the work of a few blocks.  Units that were written directly in phase 1 are skipped.  One warp looks
          the block's first chunks up while another one opens the first segment of phase 1: after the walk that would
          take time of all.
Traffic   Each partial output is read once, from L2; (m, l) once for each 128 columns.
Numerics  float32.  A run adds its states in order, and the runs are added in order; where a run ends depends on S
          alone.  So reruns, both reductions, and a group or a warp at work, give the same bits.
"""

from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.formats import make_narrow
from nbverify.kernels.geometry import (
    FULL_WARP,
    MERGE_CHUNK_FIELDS,
    MERGE_COLUMNS,
    MERGE_RUN_BYTES,
    MERGE_RUNS,
    WARP,
)
from nbverify.kernels.requests import load_request
from nbverify.kernels.schedule import quotient
from nbverify.kernels.softmax import NEG_INF, ZERO, log_sum_exp, warp_max, warp_sum, weight

IN_FLIGHT = 12  # states that a lane requests at once
COLUMNS_PER_LANE = 4
NUM_LOADED, NUM_STATES = COLUMNS_PER_LANE * IN_FLIGHT, 2 * IN_FLIGHT


@cuda.jit(device=True, forceinline=True)
def run_length(num_states):
    """States of a run."""
    return max(int32(IN_FLIGHT), int32(uint32(num_states + (MERGE_RUNS - 1)) // uint32(MERGE_RUNS)))


@cuda.jit(device=True, forceinline=True)
def place_of_pair(pair):
    """Where columns ``2 * pair`` and the next one lie in a row."""
    inside = uint32(pair) % uint32(8)
    return int32(
        uint32(pair) // uint32(8) * uint32(16) + inside % uint32(4) * uint32(4) + inside // uint32(4) * uint32(2)
    )


@cuda.jit(device=True, forceinline=True)
def chunk_number(groups, group_number, turn, block, blocks, most_shift):
    """The chunk that a group of a block takes in its turn ``turn``, or a number past the last one.

    ``groups`` are those of a block.  Of its numbers in a turn the first group's is the smallest.
    """
    shift = int32(0)  # 2^shift chunks side by side: as many as divide both a row's chunks and the groups
    while shift < most_shift and groups >> shift & 1 == 0:
        shift = int32(shift + 1)
    slot = int32(turn * (groups >> shift) + (group_number >> shift))
    return int32(((slot * blocks + block) << shift) + (group_number & ((1 << shift) - 1)))


class Chunk(NamedTuple):
    """What a group merges, and where the result goes.  The fields of a record in shared memory, int64."""

    num_runs: int  # 0: nothing
    first_state: int
    num_states: int
    row: int  # of the row unit
    column: int  # first of its place in a row of the workspace
    target: int  # in ``out``: the row's first column
    lse_place: int


class Merge(NamedTuple):
    """The device functions of the merge."""

    look_up: object  # look_up(args, table, chunks): one warp leaves the first chunk of each warp of its block
    run: object  # run(args, table, chunks): all threads, after every partial is written


def make_merge(spec, geometry, schedule):
    """A ``Merge``.  ``chunks`` is an array of ``MERGE_CHUNK_FIELDS`` int64 a warp in shared memory.

    A barrier lies between the two.  The scratch of ``run`` is the start of the block's shared memory, which phase 1 no
    longer uses.
    """
    rows_per_tile, warps = geometry.rows_per_tile, geometry.warps
    head_dim_v, group = spec.head_dim_v, spec.group
    parts = (head_dim_v + MERGE_COLUMNS - 1) // MERGE_COLUMNS
    chunks_per_unit = rows_per_tile * parts
    most_shift = (parts & -parts).bit_length() - 1  # how often 2 divides it
    output_bytes, state_bytes = 4 * rows_per_tile * head_dim_v, 8 * rows_per_tile
    unit_states = schedule.unit_states
    narrow, add_runs = make_narrow(spec.dtype), make_add_runs(spec.kernel)

    @cuda.jit(device=True, forceinline=True)
    def add_run(args, chunk, lane, run, sums):
        """``sums`` = weighted outputs of a run, of a lane's columns; gives its (m, l)."""
        ptx.unroll_loops()
        length, column = run_length(chunk.num_states), int32(chunk.column + COLUMNS_PER_LANE * lane)
        begin = int32(run * length)
        left = min(length, int32(chunk.num_states - begin))
        first = (int64(chunk.first_state) + begin) * rows_per_tile + chunk.row
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
    def write_chunk(args, chunk, lane, maximum, total, sums):
        """A lane's columns of the result."""
        factor, place = ZERO, int32(chunk.column + COLUMNS_PER_LANE * lane)  # 0 of a row that saw nothing
        if total != ZERO:
            factor = libdevice.fdiv_rn(args.v_scale, total)
        if place < head_dim_v:
            block, inside = uint32(place) // uint32(16), uint32(place) % uint32(16) // uint32(4)
            target = uint64(chunk.target // 2) + uint64(block * uint32(8) + inside)
            words = args.out.view(np.uint32)
            for i in range(2):
                low = narrow(libdevice.fmul_rn(sums[2 * i], factor))
                high = narrow(libdevice.fmul_rn(sums[2 * i + 1], factor))
                words[target + uint64(4 * i)] = low | uint32(high << uint32(16))
        if place == 0 and args.lse.size > 0:
            args.lse[uint64(chunk.lse_place)] = log_sum_exp(maximum, total)

    @cuda.jit(device=True, forceinline=True)
    def num_chunks_of(args, table):
        return int32(table[uint32(2 * args.num_requests + 1)] * chunks_per_unit)

    @cuda.jit(device=True, forceinline=True)
    def share_of(num_chunks):
        """Warps that take a chunk together."""
        share = int32(warps)
        while share > 1 and int64(num_chunks) * share > int64(cuda.gridDim.x) * warps:
            share = int32(share >> 1)
        return share

    @cuda.jit(device=True, forceinline=True)
    def number_of(groups, group_number, turn):
        return chunk_number(groups, group_number, turn, int32(cuda.blockIdx.x), int32(cuda.gridDim.x), most_shift)

    @cuda.jit(device=True)
    def find_chunk(args, table, number, record):
        """Chunk ``number`` of the batch, which has it."""
        unit = int32(uint32(number) // uint32(chunks_per_unit))
        inside = uint32(number - unit * chunks_per_unit)
        row, column = int32(inside // uint32(parts)), int32(inside % uint32(parts)) * MERGE_COLUMNS
        states = unit_states(args, table, unit)
        request = load_request(args, states.request)
        head_row = uint32(states.first_row + row)
        token = request.token_start + int64(head_row // uint32(group))
        head = states.kv_head * group + int64(head_row % uint32(group))
        if states.num_states > 1 and states.first_row + row < request.num_nodes * group:
            length = run_length(int32(states.num_states))
            record[0] = quotient(states.num_states + length - 1, length)
            record[1], record[2], record[3], record[4] = states.first_state, states.num_states, row, column
            record[5] = token * args.out_stride_token + head * args.out_stride_head
            record[6] = token * args.lse_stride_token + head

    @cuda.jit(device=True)
    def look_up(args, table, chunks):
        num_chunks, lane = num_chunks_of(args, table), int32(cuda.threadIdx.x % WARP)
        share = share_of(num_chunks)
        groups, group_number = quotient(int32(warps), share), quotient(lane, share)
        number = number_of(groups, group_number, int32(0))
        if lane < warps:
            record = chunks[uint32(lane * MERGE_CHUNK_FIELDS) :]
            record[0] = 0
            if group_number < groups and number < num_chunks:
                find_chunk(args, table, number, record)

    @cuda.jit(device=True)
    def run(args, table, chunks):
        ptx.unroll_loops()
        warp, lane = int32(cuda.threadIdx.x // WARP), int32(cuda.threadIdx.x % WARP)
        num_chunks = num_chunks_of(args, table)
        share = share_of(num_chunks)
        groups, group_number = quotient(int32(warps), share), quotient(warp, share)
        member = int32(warp - group_number * share)
        scratch = ptx.shared_address(cuda.shared.array(0, float32, 16), 0)
        scratch = uint32(scratch + uint32(group_number) * uint32(MERGE_RUNS * MERGE_RUN_BYTES))
        sums, others = cuda.local.array(COLUMNS_PER_LANE, float32), cuda.local.array(COLUMNS_PER_LANE, float32)

        record = chunks[uint32(warp * MERGE_CHUNK_FIELDS) :]
        turn, is_left = int32(0), number_of(groups, int32(0), int32(0)) < num_chunks
        while is_left:
            chunk = Chunk(
                int32(record[0]), int32(record[1]), int32(record[2]), int32(record[3]), int32(record[4]),
                record[5], record[6],
            )  # fmt: skip
            number = member
            while number < chunk.num_runs:
                m, t = add_run(args, chunk, lane, number, others)
                place = uint32(scratch + uint32(number) * uint32(MERGE_RUN_BYTES))
                ptx.store_shared_v4_f32(place + uint32(16 * lane), (others[0], others[1], others[2], others[3]))
                ptx.store_shared_f32(place + uint32(4 * MERGE_COLUMNS), m)
                ptx.store_shared_f32(place + uint32(4 * MERGE_COLUMNS + 4), t)
                number = int32(number + share)
            sync_group(share)  # publishes the runs to the group
            if member == 0 and chunk.num_runs > 0:
                maximum, total = add_runs(scratch, chunk.num_runs, lane, sums)
                write_chunk(args, chunk, lane, maximum, total, sums)
            turn = int32(turn + 1)
            is_left = number_of(groups, int32(0), turn) < num_chunks
            if is_left:
                number = number_of(groups, group_number, turn)
                if lane == 0:
                    record[0] = 0
                    if group_number < groups and number < num_chunks:
                        find_chunk(args, table, number, record)
                # Publishes the record; the runs have been read: those of this chunk may overwrite them.
                sync_group(share)

    return Merge(look_up, run)


@cuda.jit(device=True, forceinline=True)
def sync_group(share):
    """The warps of a group, or all of the block."""
    if share > 1:
        cuda.syncthreads()
    else:
        cuda.syncwarp()


def make_add_runs(kernel):
    """``add_runs(scratch, num_runs, lane, sums)``: ``sums`` = a lane's columns of all runs, in order; gives (m, l).

    One warp; lane r has the state of run r.  It runs once a chunk, and fetching an unrolled loop takes longer than what
    it does.  But in the plain kernel, whose loops have no hints, the assembler then gives the others more registers
    than they need, and it takes 842 us instead of 605 (1 x 8 x 8 at 32k): there it is unrolled.
    """
    is_kept = kernel == "mma"
    hint = ptx.keep_loops if is_kept else ptx.unroll_loops

    @cuda.jit(device=True, forceinline=True)
    def turns_of(num_runs):
        return num_runs if is_kept else int32(MERGE_RUNS)

    @cuda.jit(device=True, forceinline=True)
    def add_runs(scratch, num_runs, lane, sums):
        hint()
        mine = uint32(scratch + uint32(lane) * uint32(MERGE_RUN_BYTES) + uint32(4 * MERGE_COLUMNS))
        m, t = NEG_INF, ZERO
        if lane < num_runs:
            m, t = ptx.load_shared_f32(mine), ptx.load_shared_f32(mine + uint32(4))
        maximum = warp_max(m)
        w = weight(m, maximum)
        place = uint32(scratch + uint32(16 * lane))
        clear(sums)
        for run in range(turns_of(num_runs)):
            if is_kept or run < num_runs:
                add_weighted(sums, cuda.shfl_sync(uint32(FULL_WARP), w, run), ptx.load_shared_v4_f32(place))
            place = uint32(place + uint32(MERGE_RUN_BYTES))
        return maximum, warp_sum(libdevice.fmul_rn(w, t))

    return add_runs


@cuda.jit(device=True, forceinline=True)
def clear(sums):
    """A lane's columns of nothing."""
    ptx.unroll_loops()
    for i in range(COLUMNS_PER_LANE):
        sums[i] = ZERO


@cuda.jit(device=True, forceinline=True)
def add_weighted(sums, factor, x):
    """``sums`` += factor * x, a lane's columns."""
    ptx.unroll_loops()
    for i in range(COLUMNS_PER_LANE):
        sums[i] = cuda.fma(factor, x[i], sums[i])
