"""A token drawn from a row of logits by one block: temperature, then top-k, then top-p, exactly as the definition does.

    w[t]  = 2^((logit[t] - largest) / temperature * log2 e)     an integer in units of 2^-40, 0 below 2^-40
    top-k   keeps t with  #{s : logit[s] > logit[t]} < k                                  (equals stay together)
    top-p   keeps of those t with  sum of w[s] over kept s with logit[s] > logit[t]  <  p * sum of w over kept
    r     = floor(u / 2^64 * sum of w over kept)                u: 64 bits of Philox4x32-10 (seed; position)
    token = the lowest t with  sum of w[s] over kept s <= t  >  r

Bits     w is made of float32 products and sums that are each rounded (no fma, no ex2.approx), so that numpy has the
         same; all sums are of integers, so their order does not matter, between threads or between devices.

Finding where the kept tokens end (``descend``)
    Both filters keep the tokens with a key (logit_rows.key_of) of at least a threshold: the largest at which the number
    of tokens, or the sum of weights, reaches a target.  Four bits of it a pass over the row, highest first: a thread
    adds each element whose higher bits are the threshold's to one of 16 sums of its own, then the block adds up.  Own
    sums, in shared memory at ``bin * threads + thread``, need no atomics, and real logits would have most of their
    upper bits in two or three bins.  A 16-bit logit has its order in its upper bits: fewer passes.

Finding the token
    Each warp sums the kept weights of its part of the row; the part that r falls into is divided among the warps again,
    until it is one window.

Passes over a row: 1 for the largest, DIGITS each for top-k and top-p, 1 between them, 1 and a bit for the token.  The
row comes from L2 after the first.
"""

from collections import namedtuple

from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.tree.kernels.accept_argmax import best_of_warp, better, pack, token_of
from nbverify.tree.kernels.accept_rules import (
    ALL_BITS,
    BINS,
    DIGIT_BITS,
    EXP2,
    LEAST_EXPONENT,
    LOG2_E,
    MANTISSA_BITS,
    PHILOX_INCREMENTS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    TOP_P_BITS,
    WEIGHT_BITS,
)
from nbverify.tree.kernels.logit_rows import (
    MINUS_INF,
    NOTHING,
    Best,
    key_of,
    make_open_row,
    make_scan,
    value_of,
    visit_best,
)

# Passes: a bfloat16 is the upper 16 bits of its float32, a float16 has 10 bits of mantissa after 9 of a float32's.
DIGITS = {"float32": 8, "bfloat16": 4, "float16": 5}
E0, E1, E2, E3, E4, E5, E6 = (float32(c) for c in EXP2)
LOG2_E_F32, LEAST_EXPONENT_F32 = float32(LOG2_E), float32(LEAST_EXPONENT)
MANTISSA, TOP_P_ONE = float32(1 << MANTISSA_BITS), float32(1 << TOP_P_BITS)
LARGEST_FLOAT = float32(3.4028234663852886e38)
ZERO, ONE = float32(0.0), float32(1.0)
LOW_WORD, WORD = uint64(ALL_BITS), uint64(32)
MULTIPLIER_0, MULTIPLIER_1 = (uint64(m) for m in PHILOX_MULTIPLIERS)
INCREMENT_0, INCREMENT_1 = (uint64(i) for i in PHILOX_INCREMENTS)

Kept = namedtuple("Kept", "threshold largest scale")
Pick = namedtuple("Pick", "left token")
Digit = namedtuple("Digit", "prefix shift by_weight threshold largest scale")


@cuda.jit(device=True)
def is_valid(temperature, top_p):
    """Whether these are the parameters of a distribution; comparisons with NaN are false."""
    return temperature >= ZERO and temperature <= LARGEST_FLOAT and top_p > ZERO and top_p <= ONE


@cuda.jit(device=True)
def random_bits(seed, position):
    """64 bits of Philox4x32-10, as uint64: the key is the seed, the counter the position, both of 64 bits."""
    key_0, key_1 = uint64(seed) & LOW_WORD, uint64(seed) >> WORD
    a, b, c, d = uint64(position) & LOW_WORD, uint64(position) >> WORD, uint64(0), uint64(0)
    for _ in range(PHILOX_ROUNDS):
        first, second = a * MULTIPLIER_0, c * MULTIPLIER_1
        a, b, c, d = (second >> WORD) ^ b ^ key_0, second & LOW_WORD, (first >> WORD) ^ d ^ key_1, first & LOW_WORD
        key_0, key_1 = (key_0 + INCREMENT_0) & LOW_WORD, (key_1 + INCREMENT_1) & LOW_WORD
    return (b << WORD) | a


@cuda.jit(device=True)
def fraction_of(bits, total):
    """``floor(bits * total / 2^64)``: bits uint64, total an int64 from 1 to 2^62."""
    bits_low, bits_high = bits & LOW_WORD, bits >> WORD
    total_low, total_high = uint64(total) & LOW_WORD, uint64(total) >> WORD
    middle = bits_high * total_low + ((bits_low * total_low) >> WORD)
    carried = ((middle & LOW_WORD) + bits_low * total_high) >> WORD
    return int64(bits_high * total_high + (middle >> WORD) + carried)


@cuda.jit(device=True)
def share_of(top_p, total):
    """``top_p * total`` with top_p in units of 2^-24, rounded down, at least 1."""
    numerator = int64(int32(libdevice.fmul_rn(top_p, TOP_P_ONE)))
    low = int64(total & int64((1 << TOP_P_BITS) - 1))
    share = int64((total >> int64(TOP_P_BITS)) * numerator + ((low * numerator) >> int64(TOP_P_BITS)))
    return max(share, int64(1))


@cuda.jit(device=True)
def weight_of(value, largest, scale):
    """w of the file head; ``scale`` is log2 e / temperature.  An infinite largest logit leaves the equals only."""
    if value == largest:
        return int64(1 << WEIGHT_BITS)
    x = libdevice.fmul_rn(libdevice.fsub_rn(value, largest), scale)
    if not x > LEAST_EXPONENT_F32:  # a NaN too
        return int64(0)
    whole = libdevice.floorf(x)
    f = libdevice.fsub_rn(x, whole)
    y = libdevice.fadd_rn(libdevice.fmul_rn(E6, f), E5)
    y = libdevice.fadd_rn(libdevice.fmul_rn(y, f), E4)
    y = libdevice.fadd_rn(libdevice.fmul_rn(y, f), E3)
    y = libdevice.fadd_rn(libdevice.fmul_rn(y, f), E2)
    y = libdevice.fadd_rn(libdevice.fmul_rn(y, f), E1)
    y = libdevice.fadd_rn(libdevice.fmul_rn(y, f), E0)
    mantissa = int64(int32(libdevice.fmul_rn(y, MANTISSA)))  # 2^23 to 2^24: exact
    return int64((mantissa << int64(WEIGHT_BITS - MANTISSA_BITS)) >> int64(-int32(whole)))


@cuda.jit(device=True, forceinline=True)
def kept_weight(value, kept):
    """The weight of an element; 0 if it is filtered out, or a NaN."""
    if value != value or key_of(value) < kept.threshold:
        return int64(0)
    return weight_of(value, kept.largest, kept.scale)


@cuda.jit(device=True, forceinline=True)
def visit_weight(value, token, acc, state):
    """The sum of what is kept."""
    return int64(acc + kept_weight(value, state))


@cuda.jit(device=True, forceinline=True)
def visit_pick(value, token, acc, state):
    """The first token at which the sum of kept weights exceeds what is left."""
    left, picked = acc.left, acc.token
    if picked == NOTHING:
        weight = kept_weight(value, state)
        if left < weight:
            picked = int32(token)
        left = int64(left - weight)
    return Pick(left, picked)


@cuda.jit(device=True)
def sum_of_warp(value):
    """The sum of an int64 over the lanes, for all of them."""
    for step in range(5):
        value = int64(value + cuda.shfl_xor_sync(uint32(FULL_WARP), value, 1 << step))
    return value


def make_draw(logits_dtype, threads):
    """``draw(args, number, temperature, top_k, top_p, bits)`` -> (token, whether the row is bad).

    ``bits`` are 64 random ones; temperature 0 and top_k 1 take the largest logit, the lowest token of equals.  The
    whole block calls it, and all threads get the same.  It has a barrier inside, and needs one before the next draw.
    """
    warps = threads // WARP
    num_totals = max(BINS, warps)
    digits = DIGITS[logits_dtype]
    open_row = make_open_row(logits_dtype)
    scan_best, scan_weight = make_scan(logits_dtype, visit_best), make_scan(logits_dtype, visit_weight)
    scan_pick = make_scan(logits_dtype, visit_pick)

    @cuda.jit(device=True, forceinline=True)
    def visit_digit(value, token, acc, state):
        """Add an element to this thread's sum of its digit, if it agrees in the digits before."""
        if value == value:
            key = key_of(value)
            if key >> int64(state.shift + DIGIT_BITS) == state.prefix >> int64(state.shift + DIGIT_BITS):
                amount = int64(1)
                if state.by_weight == 1:
                    amount = kept_weight(value, Kept(state.threshold, state.largest, state.scale))
                sums = cuda.shared.array(0, int64, 16)
                at = int32(int32((key >> int64(state.shift)) & int64(BINS - 1)) * threads + int32(cuda.threadIdx.x))
                sums[at] = int64(sums[at] + amount)
        return acc

    scan_digit = make_scan(logits_dtype, visit_digit)

    @cuda.jit(device=True)
    def descend(args, row, target, by_weight, kept, totals):
        """The largest threshold at which what is kept reaches the target (at least 1), or the lowest of all."""
        sums = cuda.shared.array(0, int64, 16)  # [BINS, threads]
        thread = int32(cuda.threadIdx.x)
        prefix, above, shift = int64(0), int64(0), int32(32 - DIGIT_BITS)
        searching = int32(digits)
        while searching > 0:
            for i in range(BINS):
                sums[i * threads + thread] = int64(0)
            state = Digit(prefix, shift, by_weight, kept.threshold, kept.largest, kept.scale)
            scan_digit(args, row, thread, row.num_windows, int32(threads), int32(0), state)
            cuda.syncthreads()  # publishes the threads' sums, and ends the reads of earlier totals
            i = int32(thread // WARP)
            while i < BINS:
                total, j = int64(0), int32(thread % WARP)
                while j < threads:
                    total = int64(total + sums[i * threads + j])
                    j = int32(j + WARP)
                total = sum_of_warp(total)
                if thread % WARP == 0:
                    totals[i] = total
                i = int32(i + warps)
            cuda.syncthreads()  # publishes the block's, and ends the reads of the threads'
            digit = int32(BINS - 1)
            while digit > 0 and above + totals[digit] < target:
                above = int64(above + totals[digit])
                digit = int32(digit - 1)
            prefix = int64(prefix | (int64(digit) << int64(shift)))
            searching, shift = int32(searching - 1), int32(shift - DIGIT_BITS)
            if above + totals[digit] == target:
                searching = int32(0)  # all of this bin is kept: its lowest key will do
        return prefix

    @cuda.jit(device=True)
    def total_weight(args, row, first, end, kept, totals):
        """Sum of the kept weights of windows first to end - 1: of each warp's part in totals, and of all of them."""
        thread = int32(cuda.threadIdx.x)
        part = int32((end - first + warps - 1) // warps)
        part_first = int32(first + thread // WARP * part)
        part_end = min(int32(part_first + part), end)
        acc = scan_weight(args, row, int32(part_first + thread % WARP), part_end, int32(WARP), int64(0), kept)
        acc = sum_of_warp(acc)
        cuda.syncthreads()  # ends the reads of earlier totals
        if thread % WARP == 0:
            totals[thread // WARP] = acc
        cuda.syncthreads()  # publishes the totals
        total = int64(0)
        for i in range(warps):
            total = int64(total + totals[i])
        return total

    @cuda.jit(device=True)
    def draw(args, number, temperature, top_k, top_p, bits):
        totals = cuda.shared.array(num_totals, int64)
        thread = int32(cuda.threadIdx.x)
        row = open_row(args, number)
        nothing = Best(MINUS_INF, NOTHING, int32(0))
        best = scan_best(args, row, thread, row.num_windows, int32(threads), nothing, int32(0))
        packed = best_of_warp(pack(best))
        if thread % WARP == 0:
            totals[thread // WARP] = packed
        cuda.syncthreads()  # publishes the warps' best
        for i in range(warps):
            packed = better(packed, totals[i])
        token = token_of(packed)
        is_bad = (packed & int64(1)) == 1 or packed <= 1
        if temperature > ZERO and top_k != 1 and packed > 1:
            key = packed >> int64(31)
            scale = libdevice.fdiv_rn(LOG2_E_F32, temperature)
            kept = Kept(int64(0), value_of(key), scale)
            if top_k > 0 and top_k < row.vocab:
                kept = Kept(descend(args, row, int64(top_k), int32(0), kept, totals), kept.largest, kept.scale)
            if top_p < ONE:
                target = share_of(top_p, total_weight(args, row, int32(0), row.num_windows, kept, totals))
                kept = Kept(descend(args, row, target, int32(1), kept, totals), kept.largest, kept.scale)
            first, end = int32(0), row.num_windows
            total = total_weight(args, row, first, end, kept, totals)
            left = fraction_of(bits, total)
            while end - first > 1:
                part, i = int32((end - first + warps - 1) // warps), int32(0)
                while left >= totals[i]:  # ends: left is less than the sum of all totals
                    left = int64(left - totals[i])
                    i = int32(i + 1)
                first = int32(first + i * part)
                end = min(int32(first + part), end)
                if end - first > 1:
                    total_weight(args, row, first, end, kept, totals)
            picked = scan_pick(args, row, first, end, int32(1), Pick(left, NOTHING), kept)  # by every thread
            token = int64(picked.token)
        return token, is_bad

    return draw
