"""Number formats: 16-bit and fp8 bits to float32 and back, and fp8 to 16 bits.

bfloat16 is the upper half of a float32, so widening is a shift and narrowing a round to nearest even on the bits.
float16 goes through libdevice, which has one instruction for each direction.
fp8 e4m3 (bias 7, no infinities, 0x7F and 0xFF are NaN) has the layout of a float16 (bias 15) shifted by seven bits:
the value read that way is too small by 2^8, subnormals included, so one exact multiplication decodes it.  A bfloat16
(bias 127) shifted by four bits has it as well, and is too small by 2^120.
"""

import numpy as np
from numba import cuda, float32, int16, uint32
from numba.cuda import libdevice

from nbverify.kernels import ptx

FP8_EXPONENT_GAP = float32(256.0)  # 2 ** (15 - 7)
NAN = float32(float("nan"))


@cuda.jit(device=True)
def bfloat16_to_float32(bits):
    """Value of the low 16 bits."""
    return uint32(uint32(bits) << uint32(16)).view(np.float32)


@cuda.jit(device=True)
def float16_to_float32(bits):
    """Value of the low 16 bits."""
    return libdevice.half2float(int16(bits & uint32(0xFFFF)))


@cuda.jit(device=True)
def float32_to_bfloat16(x):
    """Bits of the nearest bfloat16, ties to even, as uint32; every NaN becomes the canonical one."""
    bits = float32(x).view(np.uint32)
    rounded = uint32(uint32(bits + uint32(0x7FFF)) + uint32(uint32(bits >> uint32(16)) & uint32(1)))
    if x != x:  # the carry of the rounding could turn a NaN into an infinity
        return uint32(0x7FC0)
    return uint32(rounded >> uint32(16))


@cuda.jit(device=True)
def float32_to_float16(x):
    """Bits of the nearest float16, ties to even, as uint32; beyond 65504 they are infinity."""
    return uint32(libdevice.float2half_rn(x)) & uint32(0xFFFF)


@cuda.jit(device=True)
def fp8_e4m3_to_float32(byte):
    """Value of an e4m3 byte.  Exact in float32, and in bfloat16 and float16 too."""
    magnitude = uint32(byte) & uint32(0x7F)
    if magnitude == uint32(0x7F):
        return NAN
    value = libdevice.fmul_rn(libdevice.half2float(int16(magnitude << uint32(7))), FP8_EXPONENT_GAP)
    if uint32(byte) & uint32(0x80):
        return -value
    return value


# e4m3 in the low byte of each half, its sign in all of the high one -> the 16-bit type: how far it moves, what of it is
# sign or magnitude then, and the pair of what is missing.
MOVES = {"bfloat16": 4, "float16": 7}
KEPT = {"bfloat16": 0x87F087F0, "float16": 0xBF80BF80}
GAPS = {"bfloat16": 0x7B807B80, "float16": 0x5C005C00}  # 2^120; 2^8
# Two bytes of a word to two halves: as they are, and above each its sign (or nothing).
FIRST_SIGNED, LAST_SIGNED = 0x9180, 0xB3A2
FIRST_TWO, LAST_TWO = 0x4140, 0x4342


def make_widen_e4m3x16(dtype):
    """``widen_e4m3x16(x) -> four pairs, four pairs``: sixteen e4m3 bytes, four words, as 16-bit numbers, exactly.

    NaN is 0x7FFF or 0xFFFF.  It is looked for in all sixteen at once, and no usual row has one.
    """
    move, kept, gaps = MOVES[dtype], KEPT[dtype], GAPS[dtype]
    multiply = ptx.multiply_bf16x2 if dtype == "bfloat16" else ptx.multiply_f16x2

    @cuda.jit(device=True, forceinline=True)
    def widen_two(four, which):
        signed = ptx.permute_bytes(four, uint32(0), uint32(which))
        return multiply(uint32(signed << uint32(move)) & uint32(kept), uint32(gaps))

    @cuda.jit(device=True, forceinline=True)
    def find_nan(four):
        """The top bit of each byte that is NaN; the others are not looked at."""
        return uint32(uint32(four & uint32(0x7F7F7F7F)) + uint32(0x01010101))

    @cuda.jit(device=True, forceinline=True)
    def with_nan(pair, nan, which):
        """The pair with all bits but the sign set where ``nan`` has a bit."""
        return uint32(
            pair | uint32(uint32(ptx.permute_bytes(nan, uint32(0), uint32(which)) >> uint32(7)) * uint32(0x7FFF))
        )

    @cuda.jit(device=True, forceinline=True)
    def widen_e4m3x16(x):
        a, b = widen_two(x[0], FIRST_SIGNED), widen_two(x[0], LAST_SIGNED)
        c, d = widen_two(x[1], FIRST_SIGNED), widen_two(x[1], LAST_SIGNED)
        e, f = widen_two(x[2], FIRST_SIGNED), widen_two(x[2], LAST_SIGNED)
        g, h = widen_two(x[3], FIRST_SIGNED), widen_two(x[3], LAST_SIGNED)
        tops = uint32(0x80808080)
        if (find_nan(x[0]) | find_nan(x[1]) | find_nan(x[2]) | find_nan(x[3])) & tops != uint32(0):
            n = find_nan(x[0]) & tops
            a, b = with_nan(a, n, FIRST_TWO), with_nan(b, n, LAST_TWO)
            n = find_nan(x[1]) & tops
            c, d = with_nan(c, n, FIRST_TWO), with_nan(d, n, LAST_TWO)
            n = find_nan(x[2]) & tops
            e, f = with_nan(e, n, FIRST_TWO), with_nan(f, n, LAST_TWO)
            n = find_nan(x[3]) & tops
            g, h = with_nan(g, n, FIRST_TWO), with_nan(h, n, LAST_TWO)
        return (uint32(a), uint32(b), uint32(c), uint32(d)), (uint32(e), uint32(f), uint32(g), uint32(h))

    return widen_e4m3x16


def make_widen(dtype):
    """``widen(bits) -> float32`` of the low 16 bits, for "bfloat16" or "float16"."""
    return bfloat16_to_float32 if dtype == "bfloat16" else float16_to_float32


def make_narrow(dtype):
    """``narrow(float32) -> bits`` (uint32, low 16), rounding to nearest even."""
    return float32_to_bfloat16 if dtype == "bfloat16" else float32_to_float16
