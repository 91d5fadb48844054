"""The plain kernel: tree-verify attention without tensor cores and without PTX.  Start reading here.

For request b with prefix length c and n nodes, its keys are the rows of the pool at

    kv_indices[kv_indptr[b] + j]  for j < c,    then    out_cache_loc[qo_indptr[b] + i]  for i < n

and with group = num_q_heads / num_kv_heads

    s[i, h, j] = sm_scale * k_scale * dot(q[i, h], K[j, h // group])        for keys j that node i sees
    out[i, h]  = softmax_j(s[i, h, :]) @ V * v_scale                        lse[i, h] = log sum_j exp(s[i, h, j])

Arguments  one named tuple, ``args``; contract.py is its table (shapes, dtypes, strides).
Launch     grid = co-resident blocks, fixed when the plan is made; 128 threads; shared memory: kernels/geometry.py.
Work       kernels/schedule.py: blocks share the key tiles (or chunks) of all row units; 16 rows x 32 keys at a time.
Owners     a warp owns 4 rows, in scores, softmax and output alike; a lane owns one key of the tile in the score stage
           and column pairs in the value stage.  So only queries and tiles cross warps: two barriers a tile are enough.
Traffic    each row unit reads its keys once: heads of one group share them (MLA: all heads), row tiles do not.
Numerics   products and sums in float32, P kept in float32; states as in kernels/softmax.py.  A key hidden from a row
           (by the mask, or by a score_mod that returns -inf) takes no part in it, whatever K and V hold there: its
           weight is marked HIDDEN and skipped, not multiplied.
           A visible NaN reaches the rows that see it and no other.

Loops      the innermost ones are ``while`` loops over views that start at the warp's own rows.  Of a ``range`` counter,
           or an offset made from the thread index, the compiler does not know that it is not negative, and keeps
           Python's wraparound of negative indices: five 64-bit operations at every load (seen in the PTX).

The two phases are joined by ``reduce/``: in one cooperative launch with a grid-wide barrier, or in two launches.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbverify.kernels.formats import make_narrow, make_widen
from nbverify.kernels.geometry import WARP
from nbverify.kernels.kv_tiles import make_copy_tile
from nbverify.kernels.masking import make_finish_score, make_mask
from nbverify.kernels.schedule import make_schedule
from nbverify.kernels.softmax import (
    NEG_INF,
    ZERO,
    log_sum_exp,
    normalise,
    warp_max,
    warp_sum,
    weight,
)
from nbverify.reduce import grid_sync, two_launch
from nbverify.reduce.merge import make_merge, place_of_pair

HIDDEN = float32(-1.0)  # a weight is never negative


def make_bodies(spec, geometry):
    """The kernel bodies of a spec, in launch order: one for grid_sync, two for two_launch."""
    schedule = make_schedule(spec, geometry)
    split_phase = make_split_phase(spec, geometry, schedule)
    join = grid_sync if spec.reduction == "grid_sync" else two_launch
    return join.make_bodies(
        (schedule.prepare, schedule.prepare), split_phase, make_merge(spec, geometry, schedule), geometry
    )


def make_split_phase(spec, geometry, schedule):
    """Phase 1: walk this block's share of the keys; write results, or partial states."""
    rows_per_tile, keys_per_tile = geometry.rows_per_tile, geometry.keys_per_tile
    rows_per_warp, threads = geometry.rows_per_warp, geometry.threads
    qk_words, v_words, head_dim_v = geometry.qk_words, geometry.v_words, spec.head_dim_v
    k_stride, v_stride = geometry.k_stride, geometry.v_stride
    q_begin, k_begin, v_begin = geometry.q_offset, geometry.k_offset, geometry.v_offset
    weights_begin, states_begin, o_begin = geometry.weights_offset, geometry.states_offset, geometry.o_offset
    k_end, v_end = k_begin + keys_per_tile * k_stride, v_begin + keys_per_tile * v_stride
    group = spec.group
    share, segment_at = schedule.share, schedule.segment_at

    widen, narrow = make_widen(spec.dtype), make_narrow(spec.dtype)
    copy_tile = make_copy_tile(spec, geometry)
    finish_score = make_finish_score(spec)
    find_mask, open_row, sees = make_mask(spec)

    @cuda.jit(device=True)
    def copy_queries(args, request, kv_head, first_row, rows_here, q_tile):
        """Rows of the unit to shared memory, as 32-bit words.  Rows past the end are left as they are."""
        words = args.q.view(np.uint32)
        for i in range(cuda.threadIdx.x, rows_here * qk_words, threads):
            row, word = i // qk_words, i % qk_words
            node, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
            source = (request.token_start + node) * args.q_stride_token + head * args.q_stride_head
            q_tile[row * qk_words + word] = words[source // 2 + word]

    @cuda.jit(device=True)
    def dot_products(q_rows, k_tile, scores):
        """``scores[r] = q_rows[r] . k[lane]``: a key word is read once for all rows of the warp."""
        k_row = cuda.threadIdx.x % WARP * k_stride
        for r in range(rows_per_warp):
            scores[r] = ZERO
        word = 0
        while word < qk_words:
            k_pair = k_tile[k_row + word]
            k_even, k_odd = widen(k_pair), widen(k_pair >> uint32(16))
            for r in range(rows_per_warp):
                q_pair = q_rows[r * qk_words + word]
                even_sum = cuda.fma(widen(q_pair), k_even, scores[r])
                scores[r] = cuda.fma(widen(q_pair >> uint32(16)), k_odd, even_sum)
            word += 1

    @cuda.jit(device=True)
    def add_values(v_tile, p_rows, o_rows, factors):
        """``o = o * factor + P @ V`` for the warp's rows; a lane owns columns 2 w and 2 w + 1, w = lane, lane + 32.."""
        even, odd = cuda.local.array(rows_per_warp, float32), cuda.local.array(rows_per_warp, float32)
        word = cuda.threadIdx.x % WARP
        while word < v_words:
            for r in range(rows_per_warp):
                even[r] = o_rows[r * head_dim_v + word] * factors[r]
                odd[r] = o_rows[r * head_dim_v + v_words + word] * factors[r]
            key = 0
            while key < keys_per_tile:
                v_pair = v_tile[key * v_stride + word]
                v_even, v_odd = widen(v_pair), widen(v_pair >> uint32(16))
                for r in range(rows_per_warp):
                    p = p_rows[r * keys_per_tile + key]
                    if not p < ZERO:  # NaN is seen, HIDDEN is not
                        even[r] = cuda.fma(p, v_even, even[r])
                        odd[r] = cuda.fma(p, v_odd, odd[r])
                key += 1
            for r in range(rows_per_warp):
                o_rows[r * head_dim_v + word] = even[r]
                o_rows[r * head_dim_v + v_words + word] = odd[r]
            word += WARP

    @cuda.jit(device=True)
    def write_row(args, request, kv_head, head_row, o_row, maximum, total):
        """The result of a row whose keys were all seen here.  One warp."""
        lane = cuda.threadIdx.x % WARP
        token, head = request.token_start + head_row // group, kv_head * group + head_row % group
        out = args.out.view(np.uint32)
        target = (token * args.out_stride_token + head * args.out_stride_head) // 2
        for word in range(lane, v_words, WARP):
            even = normalise(o_row[word], total, args.v_scale)
            odd = normalise(o_row[v_words + word], total, args.v_scale)
            out[target + word] = narrow(even) | uint32(narrow(odd) << uint32(16))
        if lane == 0 and args.lse.size > 0:
            args.lse[token * args.lse_stride_token + head] = log_sum_exp(maximum, total)

    @cuda.jit(device=True)
    def write_partial(args, state_row, o_row, maximum, total):
        """The state of a row that other blocks share.  One warp.  Float32, in the order of reduce/merge.py."""
        lane = cuda.threadIdx.x % WARP
        for word in range(lane, v_words, WARP):
            place = state_row * head_dim_v + place_of_pair(word)
            args.partial_o[place] = o_row[word]
            args.partial_o[place + 1] = o_row[v_words + word]
        if lane == 0:
            args.partial_ml[2 * state_row] = maximum
            args.partial_ml[2 * state_row + 1] = total

    @cuda.jit(device=True)
    def run_segment(args, segment, q_tile, k_tile, v_tile, q_rows, p_rows, states, o_rows):
        """One row unit x one range of key tiles.  All threads of the block call it."""
        lane, warp_row = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP * rows_per_warp
        request, kv_head, first_row = segment.request, segment.kv_head, segment.first_row
        rows_here = min(int64(rows_per_tile), request.num_nodes * group - first_row)
        mask_start = find_mask(args, request)

        maxima, sums = cuda.local.array(rows_per_warp, float32), cuda.local.array(rows_per_warp, float32)
        scores, factors = cuda.local.array(rows_per_warp, float32), cuda.local.array(rows_per_warp, float32)
        for r in range(rows_per_warp):
            maxima[r] = NEG_INF
            sums[r] = ZERO
            for word in range(lane, v_words, WARP):  # each lane the columns it owns: no other lane may still read them
                o_rows[r * head_dim_v + word] = ZERO
                o_rows[r * head_dim_v + v_words + word] = ZERO

        copy_queries(args, request, kv_head, first_row, rows_here, q_tile)
        for tile in range(segment.first_tile, segment.end_tile):
            first_key = tile * keys_per_tile
            copy_tile(args, request, kv_head, first_key, k_tile, v_tile)
            cuda.syncthreads()  # publishes the tile, and before the first one the queries, to all warps
            if warp_row < rows_here:
                dot_products(q_rows, k_tile, scores)
                for r in range(rows_per_warp):
                    head_row, key = first_row + warp_row + r, first_key + lane
                    seen = sees(open_row(args, mask_start, request, head_row), int32(key))
                    score = finish_score(args, request, kv_head, head_row, key, seen, scores[r])
                    maximum = max(maxima[r], warp_max(score))
                    p = weight(score, maximum)
                    factors[r] = weight(maxima[r], maximum)
                    sums[r] = cuda.fma(sums[r], factors[r], warp_sum(p))
                    maxima[r] = maximum
                    p_rows[r * keys_per_tile + lane] = HIDDEN if score == NEG_INF else p
                cuda.syncwarp()  # publishes the weights to the warp that owns these rows
                add_values(v_tile, p_rows, o_rows, factors)
            # Nobody reads this tile and these weights any more, nor, after the last tile, the queries: the next copy,
            # of this segment or the next one, may overwrite them.
            cuda.syncthreads()

        # The loop below is too long to be unrolled, and an array that is indexed at run time lives in local memory:
        # the states pass through shared memory.
        for r in range(rows_per_warp):
            if lane == 0:
                states[2 * r] = maxima[r]
                states[2 * r + 1] = sums[r]
        cuda.syncwarp()  # publishes the states to the warp
        for r in range(rows_per_warp):
            if warp_row + r < rows_here:
                o_row = o_rows[r * head_dim_v : (r + 1) * head_dim_v]
                if segment.direct:
                    write_row(args, request, kv_head, first_row + warp_row + r, o_row, states[2 * r], states[2 * r + 1])
                else:
                    state_row = segment.state * rows_per_tile + warp_row + r
                    write_partial(args, state_row, o_row, states[2 * r], states[2 * r + 1])
        cuda.syncwarp()  # the states have been read: the next segment may overwrite them

    @cuda.jit(device=True)
    def split_phase(args, table):
        words, floats = cuda.shared.array(0, uint32, 16), cuda.shared.array(0, float32, 16)
        q_tile, k_tile, v_tile = words[q_begin:k_begin], words[k_begin:k_end], words[v_begin:v_end]
        # The rows that this warp owns.
        first, end = cuda.threadIdx.x // WARP * rows_per_warp, (cuda.threadIdx.x // WARP + 1) * rows_per_warp
        q_rows = q_tile[first * qk_words : end * qk_words]
        p_rows = floats[weights_begin + first * keys_per_tile : weights_begin + end * keys_per_tile]
        states = floats[states_begin + first * 2 : states_begin + end * 2]
        o_rows = floats[o_begin + first * head_dim_v : o_begin + end * head_dim_v]

        position, share_end = share(args, table)
        while position < share_end:  # an idle block skips the work, not the grid's barrier
            segment = segment_at(args, table, position, share_end)
            run_segment(args, segment, q_tile, k_tile, v_tile, q_rows, p_rows, states, o_rows)
            position = segment.next_position

    return split_phase
