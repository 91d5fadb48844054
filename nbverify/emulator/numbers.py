"""Twins of numba's types as casts, of ``math`` and ``libdevice``, of max and min, and of the bit operations.

Values in a kernel are: signed integers: Python ints, which ``int32(x)`` and its kin wrap to a width; unsigned integers:
numpy scalars, so that shifts and sums wrap; float32: ``np.float32``, rounded after each operation as on the GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

Twin = Callable[..., Any]
F32 = np.float32
HALF_NAN = 0x7FFF  # the NaN that the GPU's conversion gives


# ---------------------------------------------------------------------------------------------------------- casts


def _rounding_to(name: str) -> Twin:
    """A cast to a float or unsigned type by way of a one-element array: three times as fast as numpy's constructor."""
    cell = np.zeros(1, name)
    scalar = cell.dtype.type
    bits = (1 << 8 * cell.itemsize) - 1
    unsigned = cell.dtype.kind == "u"

    def cast(value: Any) -> Any:
        if type(value) is scalar:
            return value
        cell[0] = int(value) & bits if unsigned else value
        return cell[0]

    return cast


def _wrapping_to(bits: int) -> Twin:
    half, span = 1 << (bits - 1), 1 << bits

    def cast(value: Any) -> int:
        number = int(value)  # truncates; NaN and inf raise, as their conversion is undefined
        return number if -half <= number < half else (number + half) % span - half

    return cast


def _casts() -> dict[str, Twin]:
    casts = {f"int{bits}": _wrapping_to(bits) for bits in (8, 16, 32, 64)}
    casts |= {name: _rounding_to(name) for name in ("uint8", "uint16", "uint32", "uint64")}
    casts |= {name: _rounding_to(name) for name in ("float16", "float32", "float64")}
    casts["bool"] = lambda value: bool(value)
    for name, cast in casts.items():
        cast.__name__ = name
        cast.dtype = np.dtype(name)  # type: ignore[attr-defined]  # what shared.array and view look for
    return casts


CASTS = _casts()
float32 = CASTS["float32"]


# ----------------------------------------------------------------------------------------------------- arithmetic


def maximum(a: Any, b: Any = None, *more: Any, **options: Any) -> Any:
    """``max`` as numba compiles it: a NaN loses against a number."""
    if b is None:
        return max(a, **options)
    result = b if b > a or a != a else a
    return maximum(result, *more) if more else result


def minimum(a: Any, b: Any = None, *more: Any, **options: Any) -> Any:
    """``min`` as numba compiles it: a NaN loses against a number."""
    if b is None:
        return min(a, **options)
    result = b if b < a or a != a else a
    return minimum(result, *more) if more else result


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once."""
    if not (type(a) is F32 and type(b) is F32 and type(c) is F32):
        numbers = [float(a), float(b), float(c)]
        if not all(map(math.isfinite, numbers)):
            return np.float64(numbers[0]) * numbers[1] + numbers[2]
        product = Fraction(numbers[0]) * Fraction(numbers[1])
        return np.float64(float(product + Fraction(numbers[2])))
    exact, addend = float(a) * float(b), float(c)  # 24 + 24 bits fit float64's 53
    total = exact + addend
    # Rounding to float64 and then to float32 would be two roundings.  So the first one is made "to odd": if it was
    # not exact and gave an even last bit, the neighbour on the side of the error is taken; that can be no tie later.
    back = total - exact
    error = (exact - (total - back)) + (addend - back)
    if error and error == error and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
        total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return float32(total)


def _rounded(function: Twin) -> Twin:
    """float32 in, float32 out: computed in float64 and rounded; anything else in float64."""

    def twin(*values: Any) -> Any:
        result = function(*map(float, values))
        return float32(result) if type(values[0]) is F32 else result

    return twin


def _in_float32(function: Twin) -> Twin:
    def twin(*values: Any) -> Any:
        return float32(function(*[float(float32(value)) for value in values]))

    return twin


# numpy's functions on Python floats give inf and nan where Python's raise.
FLOAT_FUNCTIONS: dict[str, Twin] = {
    **{
        name: getattr(np, name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "fabs", "floor", "ceil", "trunc"),
            *("sin", "cos", "tan", "sinh", "cosh", "tanh", "fmod", "copysign", "hypot"),
        )
    },
    **{"asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2, "pow": np.power},
    **{"erf": math.erf, "erfc": math.erfc},
}
MATH_TWINS: dict[str, Twin] = {
    **{name: _rounded(function) for name, function in FLOAT_FUNCTIONS.items()},
    "isnan": lambda x: bool(x != x),
    "isinf": lambda x: bool(np.isinf(x)),
    "isfinite": lambda x: bool(np.isfinite(x)),
}


def half2float(bits: Any) -> Any:
    """float16 bits to float32."""
    return _half_values()[int(bits) & 0xFFFF]


@cache
def _half_values() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(F32)


def float2half_rn(value: Any) -> int:
    """float32 to float16 bits as an int16, ties to even."""
    half = np.array([float32(value)]).astype(np.float16)
    return HALF_NAN if value != value else int(half.view(np.int16)[0])


LIBDEVICE_TWINS: dict[str, Twin] = {
    "fmul_rn": lambda a, b: float32(a) * float32(b),
    "fadd_rn": lambda a, b: float32(a) + float32(b),
    "fsub_rn": lambda a, b: float32(a) - float32(b),
    "fdiv_rn": lambda a, b: float32(a) / float32(b),
    "fmaf_rn": lambda a, b, c: fma(float32(a), float32(b), float32(c)),
    "fsqrt_rn": _in_float32(np.sqrt),
    "float_as_int": lambda x: int(float32(x).view(np.int32)),
    "int_as_float": lambda bits: np.int32(bits).view(np.float32),
    "half2float": half2float,
    "float2half_rn": float2half_rn,
    **{
        f"{name}f": _in_float32(FLOAT_FUNCTIONS[name])
        for name in ("exp", "exp2", "log", "log2", "sqrt", "floor", "ceil", "tanh")
    },
    "fabsf": _in_float32(np.fabs),
    "fmaxf": lambda a, b: maximum(float32(a), float32(b)),
    "fminf": lambda a, b: minimum(float32(a), float32(b)),
}


# ----------------------------------------------------------------------------------------------------------- bits


def _bits_of(value: Any, operation: str) -> tuple[int, int]:
    """The bits and their number.  A Python int is signed and does not say which width it has on the GPU."""
    if isinstance(value, np.unsignedinteger):
        return int(value), 8 * value.itemsize
    raise TypeError(
        f"cuda.{operation}: write cuda.{operation}(uint32(x)) or uint64(x): an int's width is not known here"
    )


def popc(value: Any) -> int:
    """How many bits are set.  A negative int counts as 32 bits if it fits, like the result of ballot_sync."""
    number = int(value)
    return bin(number & (0xFFFFFFFF if number >= -(1 << 31) else (1 << 64) - 1) if number < 0 else number).count("1")


def clz(value: Any) -> int:
    """How many bits above the highest set one."""
    bits, width = _bits_of(value, "clz")
    return width - bits.bit_length()


def ffs(value: Any) -> int:
    """1 + the position of the lowest set bit; 0 for 0."""
    number = int(value)
    return (number & -number).bit_length()


def brev(value: Any) -> Any:
    """The bits in reverse order."""
    bits, width = _bits_of(value, "brev")
    return type(value)(int(f"{bits:0{width}b}"[::-1], 2))
