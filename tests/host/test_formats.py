"""Number formats, in the emulator: every 16-bit and 8-bit pattern to float32, and float32 to both 16-bit types.

The oracles are numpy's float16 and ml_dtypes' bfloat16 and float8_e4m3fn.
"""

import math
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, uint32

import nbverify as nv
from nbverify.kernels import formats

ORACLE = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
each_type = pytest.mark.parametrize("dtype", ORACLE)
THREADS = 32
Args = namedtuple("Args", "source target")


def run(function, source, target_dtype):
    """``function`` of every element, one at a time, as a kernel calls it."""

    def convert(args):
        for i in range(cuda.threadIdx.x, args.source.size, cuda.blockDim.x):
            args.target[i] = function(args.source[i])

    target = np.zeros(source.size, target_dtype)
    nv.Emulator().launch(
        convert, Args(source, target), grid=1, block=THREADS, shared_bytes=0, name=function.py_func.__name__
    )
    return target


def assert_same_values(got, want):
    """Bit by bit, so that -0 is not 0; NaN for NaN, whichever."""
    assert got.dtype == want.dtype
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    as_bits = f"u{want.itemsize}"
    wrong = np.flatnonzero((got.view(as_bits) != want.view(as_bits)) & ~nan)
    assert wrong.size == 0, [(int(i), got[i], want[i]) for i in wrong[:5]]


# ---- to float32


@each_type
def test_every_16_bit_pattern_widens_exactly(dtype):
    bits = np.arange(1 << 16, dtype=np.uint32)
    want = bits.astype(np.uint16).view(ORACLE[dtype]).astype(np.float32)
    assert_same_values(run(formats.make_widen(dtype), bits, np.float32), want)


@each_type
def test_widening_takes_the_low_16_bits(dtype):
    """Of a word that holds two elements: the upper one must not show."""
    low = np.random.default_rng(0).integers(0, 1 << 16, 2000, dtype=np.uint32)
    high = np.random.default_rng(1).integers(0, 1 << 16, 2000, dtype=np.uint32) << 16
    widen = formats.make_widen(dtype)
    assert_same_values(run(widen, low | high, np.float32), run(widen, low, np.float32))
    upper = high >> 16
    want = upper.astype(np.uint16).view(ORACLE[dtype]).astype(np.float32)
    assert_same_values(run(widen, (low | high) >> np.uint32(16), np.float32), want)


def test_every_fp8_byte_widens_exactly():
    want = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
    assert np.isnan(want).sum() == 2 and np.nanmax(want) == 448 and np.nanmin(np.abs(want[want != 0])) == 2.0**-9
    for dtype in (np.uint8, np.uint32):
        assert_same_values(run(formats.fp8_e4m3_to_float32, np.arange(256, dtype=dtype), np.float32), want)


def test_fp8_takes_the_low_byte():
    """Of a word that holds four elements."""
    byte = np.arange(256, dtype=np.uint32)
    rest = np.random.default_rng(2).integers(0, 1 << 24, 256, dtype=np.uint32) << 8
    got = run(formats.fp8_e4m3_to_float32, byte | rest, np.float32)
    assert_same_values(got, run(formats.fp8_e4m3_to_float32, byte, np.float32))


@each_type
def test_every_fp8_byte_is_exact_in_both_16_bit_types(dtype):
    """Why the cache may be widened to 16 bits before the products."""
    values = run(formats.fp8_e4m3_to_float32, np.arange(256, dtype=np.uint8), np.float32)
    narrowed = run(formats.make_narrow(dtype), values, np.uint32)
    assert_same_values(run(formats.make_widen(dtype), narrowed, np.float32), values)


# ---- from float32


def patterns(dtype):
    """float32 bits: random ones of every exponent, both sides of every rounding boundary, and all special values."""
    rng = np.random.default_rng(3)
    dropped = 16 if dtype == "bfloat16" else 13  # bits of the mantissa that are rounded away
    anything = rng.integers(0, 1 << 32, 60_000, dtype=np.uint32)
    kept = rng.integers(0, 1 << (32 - dropped), 4000, dtype=np.uint32) << np.uint32(dropped)
    half = np.uint32(1 << (dropped - 1))
    ties = np.concatenate([kept, kept | half, (kept | half) - np.uint32(1), (kept | half) + np.uint32(1)])
    every_exponent = (np.arange(512, dtype=np.uint32) << 23)[:, None] | np.array([0, 1, 0x400000, 0x7FFFFF], np.uint32)
    narrow = ORACLE[dtype]
    all_values = np.arange(1 << 16, dtype=np.uint16)[::7].view(narrow).astype(np.float32)
    # Around the largest finite value, and halfway between it and the next one that would be: overflow starts there.
    largest = float(ml_dtypes.finfo(narrow).max)
    spacing = largest - float(np.nextafter(np.array(largest, narrow), np.array(0, narrow)))
    border = np.float32(min(largest + spacing / 2, float(np.finfo(np.float32).max)))
    edges = [border, np.nextafter(border, np.float32(0)), np.nextafter(border, np.float32(math.inf)), largest]
    # float16's subnormals are not float32's: multiples of 2^-24, and halves of them.
    steps = rng.integers(0, 4096, 4000) * 2.0**-25
    tiny = [0.0, 2.0**-149, 2.0**-126, 2.0**-133, 2.0**-134, 2.0**-24, 2.0**-25, 2.0**-14]
    numbers = np.array([*edges, *tiny, *steps, math.inf, math.nan], np.float32)
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7FBFFFFF, 0x7F808000, 0x7F807FFF, 0x7F80FFFF], np.uint32)
    found = np.concatenate(
        [anything, ties, every_exponent.ravel(), all_values.view(np.uint32), numbers.view(np.uint32), nans]
    )
    return np.concatenate([found, found ^ np.uint32(1 << 31)])


@each_type
def test_narrowing_rounds_to_nearest_even(dtype):
    bits = patterns(dtype)
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        want = values.astype(ORACLE[dtype])
    got = run(formats.make_narrow(dtype), values, np.uint32)
    assert (got >> 16 == 0).all(), "two results are packed into a word by or: no bit above the 16"
    assert_same_values(got.astype(np.uint16).view(ORACLE[dtype]), want)
    assert np.isinf(want).sum() > np.isinf(values).sum(), "some must overflow"


@each_type
def test_narrowing_undoes_widening(dtype):
    bits = np.arange(1 << 16, dtype=np.uint32)
    values = bits.astype(np.uint16).view(ORACLE[dtype]).astype(np.float32)
    got = run(formats.make_narrow(dtype), values, np.uint32)
    number = ~np.isnan(values)
    assert (got[number] == bits[number]).all()


def test_every_nan_becomes_the_canonical_bfloat16():
    """The carry of the rounding would make an infinity, or a zero, of some."""
    payloads = np.array([1, 0x7FFF, 0x8000, 0xFFFF, 0x7F8000, 0x7FFFFF, 0x400000], np.uint32)
    nans = np.concatenate([payloads | np.uint32(0x7F800000), payloads | np.uint32(0xFF800000)])
    assert np.isnan(nans.view(np.float32)).all()
    assert (run(formats.float32_to_bfloat16, nans.view(np.float32), np.uint32) == 0x7FC0).all()


@each_type
def test_two_results_in_a_word(dtype):
    """The way kernels store a pair: low element first."""
    narrow = formats.make_narrow(dtype)

    def pack(args):
        args.target[0] = narrow(args.source[0]) | uint32(narrow(args.source[1]) << uint32(16))

    source, target = np.array([-1.5, 3.25], np.float32), np.zeros(1, np.uint32)
    nv.Emulator().launch(pack, Args(source, target), grid=1, block=1, shared_bytes=0, name="pack")
    assert target.view(ORACLE[dtype]).astype(np.float32).tolist() == [-1.5, 3.25]
