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


# e4m3 in the low byte of each half -> the 16-bit type: how far the magnitude moves, and the pair of what is missing.
MOVES = {"bfloat16": 4, "float16": 7}
MAGNITUDES = {"bfloat16": 0x07F007F0, "float16": 0x3F803F80}
GAPS = {"bfloat16": 0x7B807B80, "float16": 0x5C005C00}  # 2^120; 2^8
FIRST_TWO, LAST_TWO = 0x4140, 0x4342  # bytes of a word into the low bytes of two halves


def make_widen_e4m3x4(dtype):
    """``widen_e4m3x4(four) -> pair, pair``: four e4m3 bytes as 16-bit numbers, exactly; NaN is 0x7FFF or 0xFFFF."""
    move, magnitudes, gaps = MOVES[dtype], MAGNITUDES[dtype], GAPS[dtype]
    multiply = ptx.multiply_bf16x2 if dtype == "bfloat16" else ptx.multiply_f16x2

    @cuda.jit(device=True, forceinline=True)
    def widen_pair(x):
        moved = uint32(uint32(x << uint32(move)) & uint32(magnitudes)) | uint32(
            uint32(x << uint32(8)) & uint32(0x80008000)
        )
        return multiply(moved, uint32(gaps))

    @cuda.jit(device=True, forceinline=True)
    def widen_e4m3x4(four):
        first = widen_pair(ptx.permute_bytes(four, uint32(0), uint32(FIRST_TWO)))
        last = widen_pair(ptx.permute_bytes(four, uint32(0), uint32(LAST_TWO)))
        nan = uint32(uint32(four & uint32(0x7F7F7F7F)) + uint32(0x01010101)) & uint32(0x80808080)
        if nan != uint32(0):
            first |= uint32(uint32(ptx.permute_bytes(nan, uint32(0), uint32(FIRST_TWO)) >> uint32(7)) * uint32(0x7FFF))
            last |= uint32(uint32(ptx.permute_bytes(nan, uint32(0), uint32(LAST_TWO)) >> uint32(7)) * uint32(0x7FFF))
        return uint32(first), uint32(last)

    return widen_e4m3x4


def make_widen(dtype):
    """``widen(bits) -> float32`` of the low 16 bits, for "bfloat16" or "float16"."""
    return bfloat16_to_float32 if dtype == "bfloat16" else float16_to_float32


def make_narrow(dtype):
    """``narrow(float32) -> bits`` (uint32, low 16), rounding to nearest even."""
    return float32_to_bfloat16 if dtype == "bfloat16" else float32_to_float16
