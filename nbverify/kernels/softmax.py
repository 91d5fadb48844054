"""Online softmax over tiles of keys, base 2, and the algebra that its partial states obey.

A row's state is (m, l, o): the running maximum of the scores times log2(e) (-inf before the first visible key), the
sum of 2^(s - m), and the unnormalised output.  Taking in a tile with maximum t:

    m' = max(m, t)     l' = l * 2^(m - m') + sum_j 2^(s_j - m')     o' = o * 2^(m - m') + sum_j 2^(s_j - m') V_j

-inf - -inf is NaN, so exponents are taken against ``exponent_base(m')``: 0 while nothing was seen.  Then a hidden key
and an empty state weigh exactly 0, with no finite stand-in for -inf.  NaN is dropped by max but not by the sum: a NaN
score leaves l = NaN, and so spoils its own row.

Rounding is spelled out (fma, mul, add, sub as calls): left to the compiler, a product and a sum may be fused in one
kernel and not in its twin, and their bits would differ.
"""

import math

from numba import cuda, float32, uint32
from numba.cuda import libdevice

from nbverify.kernels.geometry import FULL_WARP

NEG_INF = float32(-math.inf)
ZERO = float32(0.0)
LOG2_E = float32(math.log2(math.e))
LN_2 = float32(math.log(2.0))


@cuda.jit(device=True)
def warp_max(value):
    """Maximum over the warp, in every lane; NaN is dropped."""
    for step in range(5):
        value = max(value, cuda.shfl_xor_sync(uint32(FULL_WARP), value, 1 << step))
    return value


@cuda.jit(device=True)
def warp_sum(value):
    """Sum over the warp, the same bits in every lane: each step adds the same two numbers in both partners."""
    for step in range(5):
        value = libdevice.fadd_rn(value, cuda.shfl_xor_sync(uint32(FULL_WARP), value, 1 << step))
    return value


@cuda.jit(device=True)
def exponent_base(maximum):
    """What exponents are taken against: the maximum, or 0 while it is -inf."""
    if maximum == NEG_INF:
        return ZERO
    return maximum


@cuda.jit(device=True)
def weight(score, maximum):
    """2^(score - exponent_base(maximum)): exactly 0 for -inf, exactly 1 for the maximum itself."""
    return math.exp2(libdevice.fsub_rn(score, exponent_base(maximum)))


@cuda.jit(device=True)
def normalise(o, total, v_scale):
    """``o / total * v_scale``; 0 for a row that saw nothing.  An exact division, and the scale applied once."""
    if total == ZERO:
        return ZERO
    return libdevice.fmul_rn(libdevice.fdiv_rn(o, total), v_scale)


@cuda.jit(device=True)
def log_sum_exp(maximum, total):
    """Natural log-sum-exp of a state; -inf for a row that saw nothing."""
    if total == ZERO:
        return NEG_INF
    return cuda.fma(maximum, LN_2, math.log(total))
