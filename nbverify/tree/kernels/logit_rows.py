"""Rows of logits: their numbers in order, as keys, and a walk over them in 16-byte loads.

A row starts anywhere (the row stride is free), so its *windows* are the aligned 16 bytes that hold a part of it: 4
elements of float32, 8 of a 16-bit type.  Window w holds elements ``w * per_window - lead`` and on, where ``lead`` is
how many elements the first window has before the row.  A window that lies in the row as a whole is one load, and four
are in flight at once; of the two at the ends the elements are loaded one by one, so that nothing outside the row is
read.

What is done with an element is the factory's argument: ``visit(value, token, acc, state) -> acc``.  Values come as
float32 (widening is exact), a NaN as what it is.
"""

import math
from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.formats import bfloat16_to_float32, float16_to_float32
from nbverify.tree.kernels.accept_rules import ALL_BITS, SIGN

WINDOW_BYTES = 16
IN_FLIGHT = 4  # loads of a thread
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MINUS_INF = float32(-math.inf)
NOTHING = int32(-1)  # the token of a thread that has seen nothing above -inf

Row = namedtuple("Row", "start lead num_windows vocab")
Best = namedtuple("Best", "value token has_nan")


@cuda.jit(device=True)
def key_of(value):
    """A number (no NaN) as an int64 from 0 to 2^32 - 1 in the same order; -0 and +0 are one."""
    bits = int64(float32(value).view(np.uint32))
    if bits > SIGN:
        return int64(ALL_BITS - bits)
    return int64(bits | SIGN)  # of -0 too


@cuda.jit(device=True)
def value_of(key):
    """The number of a key; 0 for both zeros."""
    bits = int64(key - SIGN)
    if key < SIGN:
        bits = int64(ALL_BITS - key)
    return uint32(bits).view(np.float32)


@cuda.jit(device=True, forceinline=True)
def visit_best(value, token, acc, state):
    """The largest so far.  A thread comes to lower tokens first, so equals lose; so does a NaN, which is noted."""
    best, at, has_nan = acc.value, acc.token, acc.has_nan
    if value > best:
        best, at = value, int32(token)
    if value != value:
        has_nan = int32(1)
    return Best(best, at, has_nan)


def make_open_row(logits_dtype):
    """``open_row(args, row)`` -> Row."""
    item_bytes = ITEM_BYTES[logits_dtype]
    per_window = WINDOW_BYTES // item_bytes

    @cuda.jit(device=True)
    def open_row(args, row):
        start = int64(row) * args.row_stride
        before = uint64(ptx.global_address(args.logits, start)) & uint64(WINDOW_BYTES - 1)
        lead = int32(int32(before) // item_bytes)
        vocab = int32(args.vocab)
        return Row(start, lead, int32((vocab + lead + per_window - 1) // per_window), vocab)

    return open_row


def make_scan(logits_dtype, visit):
    """``scan(args, row, first, end, step, acc, state)`` -> acc, after windows first, first + step, .. below end."""
    item_bytes = ITEM_BYTES[logits_dtype]
    per_window = WINDOW_BYTES // item_bytes
    wide = logits_dtype == "float32"
    to_float32 = float16_to_float32 if logits_dtype == "float16" else bfloat16_to_float32

    @cuda.jit(device=True, forceinline=True)
    def visit_word(word, token, acc, state):
        if wide:
            return visit(uint32(word).view(np.float32), token, acc, state)
        acc = visit(to_float32(uint32(word) & uint32(0xFFFF)), token, acc, state)
        return visit(to_float32(uint32(word) >> uint32(16)), int32(token + 1), acc, state)

    @cuda.jit(device=True, forceinline=True)
    def visit_window(words, token, acc, state):
        acc = visit_word(words[0], token, acc, state)
        acc = visit_word(words[1], int32(token + per_window // 4), acc, state)
        acc = visit_word(words[2], int32(token + per_window // 2), acc, state)
        return visit_word(words[3], int32(token + 3 * per_window // 4), acc, state)

    @cuda.jit(device=True)
    def scan(args, row, first, end, step, acc, state):
        whole_from = int32(1) if row.lead > 0 else int32(0)
        whole_end = int32((row.vocab + row.lead) // per_window)
        window = int32(first)
        while window < end:
            last = int32(window + (IN_FLIGHT - 1) * step)
            token = int32(window * per_window - row.lead)
            if window >= whole_from and last < whole_end and last < end:
                address = uint64(ptx.global_address(args.logits, row.start + token))
                stride = uint64(step * WINDOW_BYTES)
                a = ptx.load_global_v4_u32(address)
                b = ptx.load_global_v4_u32(address + stride)
                c = ptx.load_global_v4_u32(address + uint64(2) * stride)
                d = ptx.load_global_v4_u32(address + uint64(3) * stride)
                acc = visit_window(a, token, acc, state)
                acc = visit_window(b, int32(token + step * per_window), acc, state)
                acc = visit_window(c, int32(token + 2 * step * per_window), acc, state)
                acc = visit_window(d, int32(token + 3 * step * per_window), acc, state)
                window = int32(window + IN_FLIGHT * step)
            else:
                for i in range(per_window):
                    if token + i >= 0 and token + i < row.vocab:
                        acc = visit(load_element(args, row.start + token + i), int32(token + i), acc, state)
                window = int32(window + step)
        return acc

    @cuda.jit(device=True)
    def load_element(args, at):
        if wide:
            return args.logits[at]
        return to_float32(uint32(args.logits[at]))

    return scan
