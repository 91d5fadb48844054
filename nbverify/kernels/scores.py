"""Scores of a tile: S = Q K^T on tensor cores.

A warp holds the queries of a row fragment (with two slices: half of their columns) as mma operands and reads the keys
from shared memory, 16 keys x 16 columns an ldmatrix.

Layout of scores in a lane: ``s[(r * key_frags + j) * 2 + i]`` is row ``8 r + g`` of the fragment, key ``8 j + 2 t + i``,
with g = lane // 4 and t = lane % 4: what mma gives, sorted by row.

With two slices the warps of a fragment are partners: slice 0 finishes rows 0 to 7, slice 1 rows 8 to 15.  Each sends the
other half of its partial sums and adds what it gets to its own.  A sum of two does not depend on its order, so the rows'
bits do not depend on who finishes them.
"""

import numpy as np
from numba import cuda, float32, int32, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO

FRAG_BYTES = 16 * WARP  # four 32-bit registers of each lane


def make_multiply(dtype):
    """The mma of a 16-bit type."""
    return ptx.mma_bf16 if dtype == "bfloat16" else ptx.mma_f16


def make_load_queries(spec, geometry):
    """``load_queries(me, args, shared, record, first_row, queries)``: a row fragment, once a segment.

    ``first_row`` is the fragment's first row in the row unit.  From global memory to fragments: each lane takes the
    words that the mma wants of it.  The first steps stay in ``queries``; the rest, for which there is no register, goes
    to shared memory, each lane's own words.  A row past the end reads the last row: it is computed and not written.
    """
    steps, kept, rest, slices = (
        geometry.query_steps, geometry.query_steps_kept, geometry.query_rest, geometry.slices,
    )  # fmt: skip
    group, queries_offset = spec.group, geometry.queries_offset

    @cuda.jit(device=True, forceinline=True)
    def row_start(args, segment, row, first_word):
        """Where a lane's words of a query row start."""
        request = segment.request
        head_row = min(segment.first_row + row, request.num_nodes * group - 1)
        token, head = request.token_start + head_row // group, segment.kv_head * group + head_row % group
        # Unsigned: of a signed index the compiler would keep Python's wraparound (see simt.py).
        return uint64((token * args.q_stride_token + head * args.q_stride_head) // 2 + first_word)

    @cuda.jit(device=True, forceinline=True)
    def load_queries(me, args, shared, record, first_row, queries):
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        segment, words = load_segment(record), args.q.view(np.uint32)
        first_word = warp % slices * (steps * 8) + lane % 4
        upper = row_start(args, segment, first_row + lane // 4, first_word)
        lower = row_start(args, segment, first_row + 8 + lane // 4, first_word)
        for k in range(steps):
            a0, a1 = words[upper + uint64(8 * k)], words[lower + uint64(8 * k)]
            a2, a3 = words[upper + uint64(8 * k + 4)], words[lower + uint64(8 * k + 4)]
            if k < kept:
                queries[4 * k], queries[4 * k + 1], queries[4 * k + 2], queries[4 * k + 3] = a0, a1, a2, a3
            else:
                at = queries_offset + (warp * rest + k - kept) * FRAG_BYTES + lane * 16
                ptx.store_shared_v4_u32(shared + uint32(at), (a0, a1, a2, a3))

    return load_queries


def make_multiply_keys(spec, geometry):
    """``multiply_keys(me, shared, tile, queries, s, begin, end)``: steps ``begin`` to ``end`` of this warp's slice of Q K^T.

    ``tile`` is the address of the tile's K rows.  A call that begins with step 0 starts the sums anew.
    """
    steps, kept, rest, slices = (
        geometry.query_steps, geometry.query_steps_kept, geometry.query_rest, geometry.slices,
    )  # fmt: skip
    key_frags, team_keys, warps_of_rows = (
        geometry.key_frags, geometry.team_keys, geometry.team_warps * geometry.row_teams,
    )  # fmt: skip
    k_pitch, queries_offset = geometry.k_pitch, geometry.queries_offset
    row_stride, key_pairs = 2 * key_frags, key_frags // 2
    multiply = make_multiply(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def multiply_keys(me, shared, tile, queries, s, begin, end):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        # Matrices of the ldmatrix: keys 0-7 and then 8-15, of each the first and then the second 8 columns.
        key, half = lane % uint32(8) + lane // uint32(16) * uint32(8), lane // uint32(8) % uint32(2)
        key = uint32(key + warp // uint32(warps_of_rows) * uint32(team_keys))
        keys = uint32(tile + key * uint32(k_pitch) + half * uint32(16) + warp % uint32(slices) * uint32(steps * 32))
        mine = uint32(shared + uint32(queries_offset) + warp * uint32(rest * FRAG_BYTES) + lane * uint32(16))
        if begin == 0:
            for i in range(2 * row_stride):
                s[i] = ZERO
        for k in range(begin, end):
            if k < kept:
                a = (queries[4 * k], queries[4 * k + 1], queries[4 * k + 2], queries[4 * k + 3])
            else:
                a = ptx.load_shared_v4_u32(mine + uint32((k - kept) * FRAG_BYTES))
            for pair in range(key_pairs):
                b = ptx.ldmatrix_x4(keys + uint32(pair * 16 * k_pitch + k * 32))
                for j in range(2):
                    up = (2 * pair + j) * 2
                    low = up + row_stride
                    c = multiply(a, (b[2 * j], b[2 * j + 1]), (s[up], s[up + 1], s[low], s[low + 1]))
                    s[up], s[up + 1], s[low], s[low + 1] = c[0], c[1], c[2], c[3]

    return multiply_keys


def make_exchange_scores(geometry):
    """``send_scores(me, shared, parity, s, own)`` and ``receive_scores(me, shared, parity, own)``, of partners.

    ``own`` gets the warp's own half of ``s``, and then the partner's part of it, laid out as ``s`` of one row per lane.
    A barrier that both meet lies between the two, and ``parity`` is the tile's.
    """
    key_pairs, values = geometry.key_frags // 2, 2 * geometry.key_frags
    exchange_offset, exchange_bytes = geometry.exchange_offset, geometry.exchange_bytes

    @cuda.jit(device=True, forceinline=True)
    def region(shared, parity, lane, warp):
        start = uint32(shared + uint32(exchange_offset) + parity * uint32(exchange_bytes))
        return uint32(start + warp * uint32(key_pairs * FRAG_BYTES) + lane * uint32(16))

    @cuda.jit(device=True, forceinline=True)
    def send_scores(me, shared, parity, s, own):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        is_second = warp % uint32(2) != uint32(0)
        other = cuda.local.array(values, float32)
        for i in range(values):
            own[i] = s[values + i] if is_second else s[i]
            other[i] = s[i] if is_second else s[values + i]
        target = region(shared, parity, lane, warp)
        for pair in range(key_pairs):
            at = 4 * pair
            ptx.store_shared_v4_f32(
                target + uint32(pair * FRAG_BYTES), (other[at], other[at + 1], other[at + 2], other[at + 3])
            )

    @cuda.jit(device=True, forceinline=True)
    def receive_scores(me, shared, parity, own):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        source = region(shared, parity, lane, warp ^ uint32(1))
        for pair in range(key_pairs):
            x = ptx.load_shared_v4_f32(source + uint32(pair * FRAG_BYTES))
            for i in range(4):
                own[4 * pair + i] = libdevice.fadd_rn(own[4 * pair + i], x[i])

    return send_scores, receive_scores
