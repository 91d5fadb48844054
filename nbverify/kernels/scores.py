"""Scores of a tile: S = Q K^T on tensor cores.

A warp holds its rows' queries as mma fragments and reads the keys from shared memory, 16 keys x 16 columns an ldmatrix;
each such fragment serves all row fragments of the warp.  In a team of several warps each multiplies its own slice of the
columns, and ``exchange_scores`` adds the slices up, always in the order of the columns: a row's bits do not depend on
where in the tile it stands.

Layout of scores in a lane: ``s[(r * key_frags + j) * 2 + i]`` is row ``8 r + g`` of the warp's rows, key
``8 j + 2 t + i``, with g = lane // 4 and t = lane % 4: what mma gives, sorted by row.
"""

import numpy as np
from numba import cuda, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.threads import lane_and_warp, signed_lane_and_warp

FRAG_BYTES = 16 * WARP  # four 32-bit registers of each lane


def make_multiply(dtype):
    """The mma of a 16-bit type."""
    return ptx.mma_bf16 if dtype == "bfloat16" else ptx.mma_f16


def make_load_queries(spec, geometry):
    """``load_queries(args, shared, record, first_row, queries)``: the rows of a team, once a segment.

    From global memory to fragments: each lane takes the words that the mma wants of it.  The first steps stay in
    ``queries``; the rest, for which there is no register, goes to shared memory, each lane's own words, 16 bytes apart.
    A row past the end reads the last row instead: it is computed and not written.
    """
    row_frags, steps, kept, rest = (
        geometry.row_frags, geometry.query_steps, geometry.query_steps_kept, geometry.query_rest,
    )  # fmt: skip
    team_warps, group = geometry.team_warps, spec.group
    queries_offset = geometry.queries_offset

    @cuda.jit(device=True, forceinline=True)
    def row_start(args, request, kv_head, head_row, words_in):
        """Where a lane's words of a query row start."""
        head_row = min(head_row, request.num_nodes * group - 1)
        token, head = request.token_start + head_row // group, kv_head * group + head_row % group
        # Unsigned: of a signed index the compiler would keep Python's wraparound (see simt.py).
        return uint64((token * args.q_stride_token + head * args.q_stride_head) // 2 + words_in)

    @cuda.jit(device=True, forceinline=True)
    def load_queries(args, shared, record, first_row, queries):
        ptx.unroll_loops()
        segment = load_segment(record)
        request, kv_head, first_row = segment.request, segment.kv_head, segment.first_row + first_row
        lane, warp = signed_lane_and_warp()
        words = args.q.view(np.uint32)
        words_in = warp % team_warps * (steps * 8) + lane % 4
        for m in range(row_frags):
            upper = row_start(args, request, kv_head, first_row + 16 * m + lane // 4, words_in)
            lower = row_start(args, request, kv_head, first_row + 16 * m + 8 + lane // 4, words_in)
            for k in range(steps):
                a0, a1 = words[upper + uint64(8 * k)], words[lower + uint64(8 * k)]
                a2, a3 = words[upper + uint64(8 * k + 4)], words[lower + uint64(8 * k + 4)]
                if k < kept:
                    at = (m * kept + k) * 4
                    queries[at], queries[at + 1], queries[at + 2], queries[at + 3] = a0, a1, a2, a3
                else:
                    at = queries_offset + ((warp * row_frags + m) * rest + k - kept) * FRAG_BYTES + lane * 16
                    ptx.store_shared_v4_u32(shared + uint32(at), (a0, a1, a2, a3))

    return load_queries


def make_multiply_keys(spec, geometry):
    """``multiply_keys(shared, tile, queries, s)``: this warp's slice of Q K^T; ``tile`` is the address of its K rows."""
    row_frags, steps, kept, rest = (
        geometry.row_frags, geometry.query_steps, geometry.query_steps_kept, geometry.query_rest,
    )  # fmt: skip
    key_frags, team_keys, team_warps, row_teams = (
        geometry.key_frags, geometry.team_keys, geometry.team_warps, geometry.row_teams,
    )  # fmt: skip
    k_pitch, queries_offset = geometry.k_pitch, geometry.queries_offset
    row_stride, key_pairs, num_registers = 2 * key_frags, key_frags // 2, 4 * row_frags
    multiply = make_multiply(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def multiply_keys(shared, tile, queries, s):
        ptx.unroll_loops()
        lane, warp = lane_and_warp()
        # Matrices of the ldmatrix: keys 0-7 and then 8-15, of each the first and then the second 8 columns.
        key, half = lane % uint32(8) + lane // uint32(16) * uint32(8), lane // uint32(8) % uint32(2)
        first_key = warp // uint32(team_warps * row_teams) * uint32(team_keys)
        keys = uint32(tile + (first_key + key) * uint32(k_pitch) + half * uint32(16))
        keys = uint32(keys + warp % uint32(team_warps) * uint32(steps * 32))
        mine = uint32(shared + uint32(queries_offset) + warp * uint32(row_frags * rest * FRAG_BYTES))
        mine = uint32(mine + lane * uint32(16))
        for i in range(2 * row_frags * row_stride):
            s[i] = ZERO
        a = cuda.local.array(num_registers, uint32)
        for k in range(steps):
            for m in range(row_frags):
                if k < kept:
                    at = (m * kept + k) * 4
                    a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3] = (
                        queries[at], queries[at + 1], queries[at + 2], queries[at + 3],
                    )  # fmt: skip
                else:
                    x = ptx.load_shared_v4_u32(mine + uint32((m * rest + k - kept) * FRAG_BYTES))
                    a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3] = x[0], x[1], x[2], x[3]
            for pair in range(key_pairs):
                b = ptx.ldmatrix_x4(keys + uint32(pair * 16 * k_pitch + k * 32))
                for m in range(row_frags):
                    q = (a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3])
                    for j in range(2):
                        up = (2 * m * key_frags + 2 * pair + j) * 2
                        low = up + row_stride
                        c = multiply(q, (b[2 * j], b[2 * j + 1]), (s[up], s[up + 1], s[low], s[low + 1]))
                        s[up], s[up + 1], s[low], s[low + 1] = c[0], c[1], c[2], c[3]

    return multiply_keys


def make_exchange_scores(geometry):
    """``exchange_scores(shared, s, own)``: from slices of all rows to the full scores of the warp's own eight rows.

    Warp w of the team gets rows 8 w to 8 w + 7 (none if the team has fewer), in ``own``, laid out as ``s`` of one row
    per lane.  All warps of the team call it; a team barrier is inside.  The next call may follow once every warp of the
    team has passed another team barrier: ``publish_weights`` has it.
    """
    rows, key_pairs, key_frags = 2 * geometry.row_frags, geometry.key_frags // 2, geometry.key_frags
    team_warps, team_bytes, exchange_offset = (
        geometry.team_warps, geometry.team_exchange_bytes, geometry.exchange_offset,
    )  # fmt: skip

    @cuda.jit(device=True, forceinline=True)
    def exchange_scores(shared, s, own):
        ptx.unroll_loops()
        lane, warp = lane_and_warp()
        team, slice_number = warp // uint32(team_warps), warp % uint32(team_warps)
        region = uint32(shared + uint32(exchange_offset) + team * uint32(team_bytes) + lane * uint32(16))
        # [row of the lane][slice][pair of key fragments]
        mine = uint32(region + slice_number * uint32(key_pairs * FRAG_BYTES))
        for r in range(rows):
            for pair in range(key_pairs):
                at = (r * key_frags + 2 * pair) * 2
                target = mine + uint32((r * team_warps * key_pairs + pair) * FRAG_BYTES)
                ptx.store_shared_v4_f32(target, (s[at], s[at + 1], s[at + 2], s[at + 3]))
        ptx.barrier_sync(uint32(1) + team, uint32(team_warps * WARP))  # publishes the slices to the team
        if slice_number < uint32(rows):
            source = uint32(region + slice_number * uint32(team_warps * key_pairs * FRAG_BYTES))
            for pair in range(key_pairs):
                x = ptx.load_shared_v4_f32(source + uint32(pair * FRAG_BYTES))
                own[4 * pair], own[4 * pair + 1], own[4 * pair + 2], own[4 * pair + 3] = x[0], x[1], x[2], x[3]
            for w in range(1, team_warps):
                for pair in range(key_pairs):
                    x = ptx.load_shared_v4_f32(source + uint32((w * key_pairs + pair) * FRAG_BYTES))
                    for i in range(4):
                        own[4 * pair + i] = libdevice.fadd_rn(own[4 * pair + i], x[i])

    return exchange_scores
