"""The small kernels between the matrix products; 16-bit values are float16.  Their parameters: stages.py.

    take_slots   out_cache_loc[b * N + j] = req_to_token[b, prefix_lens[b] + j]           the windows of a step
    embed        x[r, :] = embed[tokens[r], :]                                            float16 to float32
    rms_norm     y[r, :] = x[r, :] * weight / sqrt(mean(x[r, :]^2) + epsilon)             float32 to float16
    rope_store   q, k turned by the row's position, q for attention, k and v into the row's slot of the pool
    silu_mul     y[r, f] = silu(gate_up[r, f]) * gate_up[r, F + f]                        float32 to float16
    top_tokens   tokens[r, :] = the K columns with the largest logits[r, :], and their part in softmax(logits[r, :])

Launch      a block of THREADS threads for each row r, take_slots one for each request, top_tokens TOP_THREADS;
            E, F and N are any numbers, K at most the vocabulary's.
Numerics    float32, sums in a fixed order: the same row gives the same bits in any batch.
"""

import math

from numba import cuda, float32, int32, int64, uint16

from examples.smollm2.stages import THREADS, TOP_THREADS
from nbverify.kernels.formats import float16_to_float32, float32_to_float16
from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.softmax import warp_sum

WARPS, TOP_WARPS = THREADS // WARP, TOP_THREADS // WARP
ZERO, ONE, INFINITY = float32(0.0), float32(1.0), float32(math.inf)


def make_body(name: str):
    """``body(args)`` of the kernel of that name."""
    return {"take_slots": take_slots, "embed": embed, "rms_norm": rms_norm, "rope_store": rope_store,
            "silu_mul": silu_mul, "top_tokens": top_tokens}[name]  # fmt: skip


def take_slots(args):
    """See the head; a step never reaches beyond what its request has slots for."""
    request, j = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    while j < args.num_nodes:
        position = min(args.prefix_lens[request] + j, args.max_len - 1)
        args.out_cache_loc[request * args.num_nodes + j] = args.req_to_token[request * args.max_len + position]
        j += THREADS


def embed(args):
    """See the head."""
    row, e = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    token = args.tokens[row]
    while e < args.width:
        args.x[row * args.width + e] = float16_to_float32(args.table[token * args.width + e])
        e += THREADS


def rms_norm(args):
    """See the head; each thread adds up its own columns, then warps, then the block."""
    row, thread = int64(cuda.blockIdx.x), int32(cuda.threadIdx.x)
    of_warps = cuda.shared.array(WARPS, float32)
    squares = ZERO
    e = int64(thread)
    while e < args.width:
        value = args.x[row * args.width + e]
        squares += value * value
        e += THREADS
    squares = warp_sum(squares)
    if thread % WARP == 0:
        of_warps[thread // WARP] = squares
    cuda.syncthreads()  # publishes the warps' sums
    total = ZERO
    for warp in range(WARPS):
        total += of_warps[warp]
    factor = ONE / math.sqrt(total / float32(args.width) + args.epsilon)
    e = int64(thread)
    while e < args.width:
        value = args.x[row * args.width + e] * args.weight[e] * factor
        args.y[row * args.width + e] = uint16(float32_to_float16(value))
        e += THREADS


def rope_store(args):
    """See the head; a thread has a pair of neighbours at a time."""
    row, pair = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    position, slot = min(args.positions[row], args.max_len - 1), args.slots[row]
    half = args.head_dim // 2
    first_k, first_v = args.num_q_heads * half, (args.num_q_heads + args.num_kv_heads) * half
    end = first_v + args.num_kv_heads * half
    while pair < end:
        even, odd = args.qkv[2 * (row * end + pair)], args.qkv[2 * (row * end + pair) + 1]
        if pair < first_v:  # v is not turned
            at = position * args.head_dim + pair % half
            cos, sin = args.angles[at], args.angles[at + half]
            even, odd = even * cos - odd * sin, even * sin + odd * cos
        low, high = uint16(float32_to_float16(even)), uint16(float32_to_float16(odd))
        if pair < first_k:
            to = 2 * (row * first_k + pair)
            args.q[to], args.q[to + 1] = low, high
        elif pair < first_v:
            to = 2 * (slot * args.num_kv_heads * half + pair - first_k)
            args.keys[to], args.keys[to + 1] = low, high
        else:
            to = 2 * (slot * args.num_kv_heads * half + pair - first_v)
            args.values[to], args.values[to + 1] = low, high
        pair += THREADS


def silu_mul(args):
    """See the head."""
    row, f = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    while f < args.width:
        gate, up = args.gate_up[2 * row * args.width + f], args.gate_up[(2 * row + 1) * args.width + f]
        args.y[row * args.width + f] = uint16(float32_to_float16(gate / (ONE + math.exp(-gate)) * up))
        f += THREADS


def top_tokens(args):
    """See the head; equal logits rank by column.

    A thread has the best two of its own columns ready, and the block takes the best of what all offer.  A thread whose
    two were taken, which is rare, scans its columns again for the best that come behind what was taken.
    """
    row, thread = int64(cuda.blockIdx.x), int32(cuda.threadIdx.x)
    values = cuda.shared.array(TOP_WARPS, float32)
    columns = cuda.shared.array(TOP_WARPS, int32)
    width, first, end = int32(args.width), row * args.width, int32(args.top_k)
    taken, taken_column, largest = INFINITY, int32(-1), ZERO
    offer, offer_column, spare, spare_column = -INFINITY, width, -INFINITY, width
    ready = int32(0)
    for rank in range(end):
        if ready == 0:
            offer, offer_column, spare, spare_column = -INFINITY, width, -INFINITY, width
            e = thread
            while e < width:
                logit = args.logits[first + e]
                if logit < taken or (logit == taken and e > taken_column):
                    if logit > offer:
                        spare, spare_column = offer, offer_column
                        offer, offer_column = logit, e
                    elif logit > spare:
                        spare, spare_column = logit, e
                e += TOP_THREADS
            ready = int32(2)
        taken, taken_column = offer, offer_column
        for step in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL_WARP, taken, step)
            column = cuda.shfl_xor_sync(FULL_WARP, taken_column, step)
            if other > taken or (other == taken and column < taken_column):
                taken, taken_column = other, column
        if thread % WARP == 0:
            values[thread // WARP], columns[thread // WARP] = taken, taken_column
        cuda.syncthreads()  # publishes the warps' best
        for warp in range(TOP_WARPS):
            if values[warp] > taken or (values[warp] == taken and columns[warp] < taken_column):
                taken, taken_column = values[warp], columns[warp]
        cuda.syncthreads()  # all have read: the next rank may write
        if taken_column == offer_column:
            offer, offer_column, ready = spare, spare_column, int32(ready - 1)
        if rank == 0:
            largest = taken
        if thread == 0:  # a row of NaN has no best column, and may not name one that does not exist
            args.tokens[row * end + rank] = min(taken_column, width - 1)
            args.probabilities[row * end + rank] = math.exp(taken - largest)
    total = ZERO
    e = thread
    while e < width:
        total += math.exp(args.logits[first + e] - largest)
        e += TOP_THREADS
    total = warp_sum(total)
    if thread % WARP == 0:
        values[thread // WARP] = total
    cuda.syncthreads()  # publishes the warps' sums
    if thread == 0:
        total = ZERO
        for warp in range(TOP_WARPS):
            total += values[warp]
        for rank in range(end):
            args.probabilities[row * end + rank] /= total
