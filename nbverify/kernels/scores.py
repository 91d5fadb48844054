"""Scores of a tile: S = Q K^T on tensor cores.

A warp holds the queries of a row fragment as mma operands and reads the keys from shared memory, 16 keys x 16 columns
an ldmatrix.

Layout of scores in a lane: ``s[(r * key_frags + j) * 2 + i]`` is row ``8 r + g`` of the fragment, key
``8 j + 2 t + i``, with g = lane // 4 and t = lane % 4: what mma gives, sorted by row.
"""

import numpy as np
from numba import cuda, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.tiles import FRAG_ROWS

NONE_PENDING = 0
FRAG_BYTES = 16 * WARP  # four 32-bit registers of each lane


def make_multiply(dtype):
    """The mma of a 16-bit type."""
    return ptx.mma_bf16 if dtype == "bfloat16" else ptx.mma_f16


def make_load_queries(spec, geometry):
    """``load_queries(me, args, shared, record, first_row, queries)``: a row fragment, once a segment.

    ``first_row`` is the fragment's first row in the row unit.  The first steps go straight to ``queries``: each lane
    takes the words that the mma wants of it.  The rest, for which there is no register, goes to shared memory as rows.
    A row past the end reads some other row: it is computed and not written.
    """
    kept, rest = geometry.query_steps_kept, geometry.query_rest
    group, queries_offset, pitch = spec.group, geometry.queries_offset, geometry.queries_pitch

    @cuda.jit(device=True, forceinline=True)
    def row_start(args, segment, row):
        """Where a query row starts, in elements."""
        request = segment.request
        head_row, num_rows = segment.first_row + row, request.num_nodes * group
        if head_row >= num_rows:  # not all the same row: many blocks would ask one place in L2 for it
            head_row = segment.first_row + row % max(int64(1), num_rows - segment.first_row)
        token, head = request.token_start + head_row // group, segment.kv_head * group + head_row % group
        return token * args.q_stride_token + head * args.q_stride_head

    @cuda.jit(device=True, forceinline=True)
    def copy_rest(me, args, shared, segment, first_row):
        """Two lanes a row, 16 bytes each."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        start = row_start(args, segment, first_row + lane // 2)
        source = ptx.global_address(args.q, start + 16 * kept + lane % 2 * 8)
        target = shared + uint32(queries_offset + (warp * FRAG_ROWS + lane // 2) * pitch + lane % 2 * 16)
        for k in range(rest):
            ptx.cp_async_16(target + uint32(32 * k), source + uint64(32 * k))
        ptx.cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def load_queries(me, args, shared, record, first_row, queries):
        ptx.unroll_loops()
        lane = int32(me.lane)
        segment, words = load_segment(record), args.q.view(np.uint32)
        if rest > 0:
            copy_rest(me, args, shared, segment, first_row)
        # Unsigned: of a signed index the compiler would keep Python's wraparound (see simt.py).
        upper = uint64(row_start(args, segment, first_row + lane // 4) // 2 + lane % 4)
        lower = uint64(row_start(args, segment, first_row + 8 + lane // 4) // 2 + lane % 4)
        for k in range(kept):
            queries[4 * k], queries[4 * k + 1] = words[upper + uint64(8 * k)], words[lower + uint64(8 * k)]
            queries[4 * k + 2], queries[4 * k + 3] = words[upper + uint64(8 * k + 4)], words[lower + uint64(8 * k + 4)]
        if rest > 0:
            ptx.cp_async_wait(NONE_PENDING)
            cuda.syncwarp()  # publishes the rest to the warp

    return load_queries


def step_registers_of(geometry):
    """32-bit registers of the operands of a k16 step."""
    return 2 * geometry.key_frags + (4 if geometry.query_rest else 0)


def make_multiply_keys(spec, geometry):
    """``multiply_keys(me, shared, tile, queries, fragments, s, begin, end)``: steps ``begin`` to ``end`` of Q K^T.

    ``tile`` is the address of the tile's K rows.  A call that begins with step 0 starts the sums anew.
    """
    steps, kept = geometry.query_steps, geometry.query_steps_kept
    key_frags, team_keys, row_teams, has_roles = (
        geometry.key_frags, geometry.team_keys, geometry.row_teams, geometry.has_roles,
    )  # fmt: skip
    k_pitch, queries_offset, queries_pitch = geometry.k_pitch, geometry.queries_offset, geometry.queries_pitch
    row_stride, key_pairs = 2 * key_frags, key_frags // 2
    step_registers, ahead = step_registers_of(geometry), geometry.steps_ahead
    multiply = make_multiply(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def load_step(keys, mine, k, fragments):
        """Operands of step ``k``: keys, and queries if they have no register of their own."""
        ptx.unroll_loops()
        here = k % (ahead + 1) * step_registers
        for pair in range(key_pairs):
            x = ptx.ldmatrix_x4(keys + uint32(pair * 16 * k_pitch + k * 32))
            at = here + 4 * pair
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]
        if k >= kept:
            x = ptx.ldmatrix_x4(mine + uint32((k - kept) * 32))
            at = here + 4 * key_pairs
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply_keys(me, shared, tile, queries, fragments, s, begin, end):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        # Matrices of the ldmatrix: keys 0-7 and then 8-15, of each the first and then the second 8 columns.
        key, half = lane % uint32(8) + lane // uint32(16) * uint32(8), lane // uint32(8) % uint32(2)
        if not has_roles:
            key = uint32(key + warp // uint32(row_teams) * uint32(team_keys))
        keys = uint32(tile + key * uint32(k_pitch) + half * uint32(16))
        # Rows 0-7 and 8-15 of the first 8 columns, then of the next 8.
        mine = uint32(warp * uint32(FRAG_ROWS * queries_pitch) + lane % uint32(16) * uint32(queries_pitch))
        mine = uint32(shared + mine + uint32(queries_offset) + lane // uint32(16) * uint32(16))
        if begin == 0:
            for i in range(2 * row_stride):
                s[i] = ZERO
            for k in range(min(ahead, steps)):
                load_step(keys, mine, k, fragments)
        for k in range(begin, end):
            if k + ahead < steps:
                load_step(keys, mine, k + ahead, fragments)
            here = k % (ahead + 1) * step_registers
            if k < kept:
                a = (queries[4 * k], queries[4 * k + 1], queries[4 * k + 2], queries[4 * k + 3])
            else:
                q = here + 4 * key_pairs
                a = (fragments[q], fragments[q + 1], fragments[q + 2], fragments[q + 3])
            for j in range(key_frags):
                up, b = 2 * j, here + 2 * j
                low = up + row_stride
                c = multiply(a, (fragments[b], fragments[b + 1]), (s[up], s[up + 1], s[low], s[low + 1]))
                s[up], s[up + 1], s[low], s[low + 1] = c[0], c[1], c[2], c[3]

    return multiply_keys
