"""Number formats: 16-bit and fp8 bits to float32 and back, without inline PTX.

bfloat16 is the upper half of a float32, so widening is a shift and narrowing a round to nearest even on the bits.
float16 goes through libdevice, which has one instruction for each direction.
fp8 e4m3 (bias 7, no infinities, 0x7F and 0xFF are NaN) has the layout of a float16 (bias 15) shifted by seven bits:
the value read that way is too small by 2^8, subnormals included, so one exact multiplication decodes it.
"""

import numpy as np
from numba import cuda, float32, int16, uint32
from numba.cuda import libdevice

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


def make_widen(dtype):
    """``widen(bits) -> float32`` of the low 16 bits, for "bfloat16" or "float16"."""
    return bfloat16_to_float32 if dtype == "bfloat16" else float16_to_float32


def make_narrow(dtype):
    """``narrow(float32) -> bits`` (uint32, low 16), rounding to nearest even."""
    return float32_to_bfloat16 if dtype == "bfloat16" else float32_to_float16
