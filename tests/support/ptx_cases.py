"""Kernels that use the instructions of kernels/ptx.py, what goes in and what must come out: shared by three tiers.

Bodies keep to the rule of all kernels: one parameter, ``args``, whose fields are 1-D arrays.  Expected values are
written as definitions, element by element where the question is which lane holds what.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numba import cuda, float32, int32, uint16, uint32, uint64

from nbverify import compile as nbc
from nbverify.contract import Parameter
from nbverify.emulator import Emulator
from nbverify.kernels import formats, ptx

EPS = float(np.finfo(np.float32).eps)
CANONICAL_NAN = 0x7FFF  # of both 16-bit types
BF16, F16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(ml_dtypes.float8_e4m3fn)
ROW_WORDS = 8  # of a 16 x 16 tile of 16-bit elements


@dataclass(frozen=True)
class Case:
    """``check(before, after)``: both are dicts of arrays by field; ``instructions``: text -> how often in the PTX."""

    name: str
    body: Callable
    arrays: Callable[[np.random.Generator], dict[str, np.ndarray]]
    check: Callable[[dict, dict], None]
    instructions: dict[str, int]
    min_cc: tuple[int, int] = (8, 0)
    threads: int = 32
    shared_bytes: int = 0
    blocks: int = 1  # more than one: they wait for each other

    def before(self) -> dict[str, np.ndarray]:
        return self.arrays(np.random.default_rng(40))

    def emulate(self, seed: int = 0) -> None:
        arrays = self.before()
        after = {name: array.copy() for name, array in arrays.items()}
        args = namedtuple("Args", after)(**after)
        emulator = Emulator(seed=seed)
        emulator.launch(
            self.body,
            args,
            grid=self.blocks,
            block=self.threads,
            shared_bytes=self.shared_bytes,
            name=self.body.__name__,
        )
        self.check(arrays, after)


def parameters_of(arrays: dict[str, np.ndarray]) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, array.dtype.name, True) for name, array in arrays.items())


def compile_case(case: Case, target: nbc.Target) -> nbc.CompiledKernel:
    """As ``compile_body``, for the case's own parameters instead of the contract's."""
    return link_case(case, target)[0]


def link_case(case: Case, target: nbc.Target) -> tuple[nbc.CompiledKernel, str]:
    """The kernel of a case, and the linker's report."""
    from numba.cuda import types

    parameters = parameters_of(case.before())
    fields = [types.Array(getattr(types, p.dtype), 1, "C") for p in parameters]
    args_type = types.NamedTuple(fields, namedtuple("Args", [p.name for p in parameters]))
    with nbc._compile_lock, nbc._target_as_device(target):
        code, _ = cuda.compile(
            case.body,
            (args_type,),
            device=False,
            abi="numba",
            cc=target.cc,
            launch_bounds=(case.threads, 1),
            output="ltoir",
        )
    assembly, _ = nbc._link(code, target, "ptx")
    cubin, log = nbc._link(code, target, "cubin")
    text, name = assembly.decode(), f"nbverify_{case.body.__name__}"
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(", text)[1]
    text = text.replace(entry, name)
    resources = nbc._resources(name, log.replace(entry, name), text)
    kernel = nbc.CompiledKernel(name, entry, target.name, parameters, text, cubin, case.blocks > 1, resources)
    return kernel, log


def pairs(array: np.ndarray) -> np.ndarray:
    """Neighbouring 16-bit elements as words, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint32)


# ---------------------------------------------------------------------------------------------------------- tensor core


def make_mma(multiply_name):
    def fragments(args):
        """a from row-major pairs, b from column-major pairs, by the table in mma_bf16's description."""
        g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
        low, high = g * ROW_WORDS + t, (g + 8) * ROW_WORDS + t
        a = (args.a[low], args.a[high], args.a[low + 4], args.a[high + 4])
        b = (args.b[low], args.b[low + 4])
        i, j = g * 8 + 2 * t, (g + 8) * 8 + 2 * t
        c = (args.c[i], args.c[i + 1], args.c[j], args.c[j + 1])
        return a, b, c, i, j

    fragments = cuda.jit(device=True)(fragments)

    def mma_bf16(args):
        a, b, c, i, j = fragments(args)
        args.out[i], args.out[i + 1], args.out[j], args.out[j + 1] = ptx.mma_bf16(a, b, c)

    def mma_f16(args):
        a, b, c, i, j = fragments(args)
        args.out[i], args.out[i + 1], args.out[j], args.out[j + 1] = ptx.mma_f16(a, b, c)

    return {"mma_bf16": mma_bf16, "mma_f16": mma_f16}[multiply_name]


def mma_case(element, dtype):
    def arrays(rng):
        return {
            "a": pairs(rng.standard_normal((16, 16)).astype(dtype)),
            "b": pairs(rng.standard_normal((8, 16)).astype(dtype)),
            "c": rng.standard_normal(128).astype(np.float32),
            "out": np.full(128, np.nan, np.float32),
        }

    def check(before, after):
        a, b = (before[n].view(dtype).reshape(-1, 16).astype(np.float64) for n in "ab")
        c = before["c"].reshape(16, 8).astype(np.float64)
        # Products are exact; each of 16 sums may truncate at the largest magnitude met.
        bound = 17 * EPS * (abs(a) @ abs(b).T + abs(c))
        assert (abs(after["out"].reshape(16, 8) - (a @ b.T + c)) <= bound).all()

    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32"
    return Case(f"mma_{element}", make_mma(f"mma_{element}"), arrays, check, {text: 1})


def ldmatrix(args):
    tile = cuda.shared.array(0, uint16, alignment=128)
    lane = cuda.threadIdx.x
    words = tile.view(np.uint32)
    for i in range(4):
        words[lane + 32 * i] = args.tile[lane + 32 * i]
    cuda.syncthreads()
    address = ptx.shared_address(tile, 8 * args.row[lane])  # rows of eight elements
    four, two = ptx.ldmatrix_x4(address), ptx.ldmatrix_x2(address)
    four_trans, two_trans = ptx.ldmatrix_x4_trans(address), ptx.ldmatrix_x2_trans(address)
    for i in range(4):
        args.out[lane + 32 * i] = four[i]
        args.out[lane + 32 * (4 + i)] = four_trans[i]
    for i in range(2):
        args.out[lane + 32 * (8 + i)] = two[i]
        args.out[lane + 32 * (10 + i)] = two_trans[i]
    args.out[lane + 32 * 12] = ptx.ldmatrix_x1(address)
    args.out[lane + 32 * 13] = ptx.ldmatrix_x1_trans(address)


def ldmatrix_arrays(rng):
    return {
        "tile": rng.integers(0, 1 << 32, 128, dtype=np.uint32),
        "row": rng.permutation(32).astype(np.int32),
        "out": np.zeros(14 * 32, np.uint32),
    }


def check_ldmatrix(before, after):
    tile, out = before["tile"].view(np.uint16).reshape(32, 8), after["out"].view(np.uint16).reshape(14, 32, 2)

    def expected(matrix, lane, trans):
        rows = [tile[before["row"][8 * matrix + r]] for r in range(8)]
        g, t = lane // 4, lane % 4
        return [rows[2 * t][g], rows[2 * t + 1][g]] if trans else [rows[g][2 * t], rows[g][2 * t + 1]]

    for first, count, trans in [
        (0, 4, False),
        (4, 4, True),
        (8, 2, False),
        (10, 2, True),
        (12, 1, False),
        (13, 1, True),
    ]:
        for matrix in range(count):
            want = [expected(matrix, lane, trans) for lane in range(32)]
            np.testing.assert_array_equal(out[first + matrix], want, err_msg=f"result {first + matrix}")


def attention_tile(args):
    """One step of attention without its softmax: S = Q K^T, then O = bf16(S) V, from row-major tiles."""
    tile = cuda.shared.array(0, uint16, alignment=128)
    words = tile.view(np.uint32)
    lane = cuda.threadIdx.x
    for i in range(4):
        words[lane + 32 * i] = args.q[lane + 32 * i]
        words[128 + lane + 32 * i] = args.k[lane + 32 * i]
        words[256 + lane + 32 * i] = args.v[lane + 32 * i]
    cuda.syncthreads()
    zero = (float32(0), float32(0), float32(0), float32(0))
    row, part = lane % 16, lane // 16
    q = ptx.ldmatrix_x4(ptx.shared_address(tile, row * 16 + part * 8))
    k = ptx.ldmatrix_x4(ptx.shared_address(tile, 256 + (lane % 8 + part * 8) * 16 + lane // 8 % 2 * 8))
    s0 = ptx.mma_bf16(q, (k[0], k[1]), zero)
    s1 = ptx.mma_bf16(q, (k[2], k[3]), zero)
    p = (
        ptx.pack_bf16x2(s0[0], s0[1]),
        ptx.pack_bf16x2(s0[2], s0[3]),
        ptx.pack_bf16x2(s1[0], s1[1]),
        ptx.pack_bf16x2(s1[2], s1[3]),
    )
    for half in range(2):
        v = ptx.ldmatrix_x2_trans(ptx.shared_address(tile, 512 + row * 16 + half * 8))
        o = ptx.mma_bf16(p, v, zero)
        at = lane // 4 * 16 + half * 8 + lane % 4 * 2
        ptx.store_global_v2_f32(ptx.global_address(args.out, at), (o[0], o[1]))
        ptx.store_global_v2_f32(ptx.global_address(args.out, at + 128), (o[2], o[3]))


def attention_arrays(rng):
    tiles = {name: pairs(rng.integers(-2, 3, (16, 16)).astype(BF16)) for name in "qkv"}
    return {**tiles, "out": np.full(256, np.nan, np.float32)}


def check_attention(before, after):
    q, k, v = (before[name].view(BF16).reshape(16, 16).astype(np.float64) for name in "qkv")
    np.testing.assert_array_equal(after["out"].reshape(16, 16), q @ k.T @ v)  # small integers: all of it is exact


# ----------------------------------------------------------------------------------------------------------- arithmetic

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -10.25, 100.0, -126.0, -127.5, -200.0, 128.0, 65504.0, 65520.0, 1e-39]
FLOATS += [np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, 1e-6, 3.3e38]


def arithmetic(args):
    i = cuda.threadIdx.x
    args.powers[i] = ptx.ex2(args.x[i])
    args.inverses[i] = ptx.rcp(args.x[i])
    args.bf16[i] = ptx.pack_bf16x2(args.x[i], args.y[i])
    args.f16[i] = ptx.pack_f16x2(args.x[i], args.y[i])


def arithmetic_arrays(rng):
    x = np.concatenate([FLOATS, 8 * rng.standard_normal(64 - len(FLOATS))]).astype(np.float32)
    out = {name: np.full(64, np.nan, np.float32) for name in ("powers", "inverses")}
    words = {name: np.zeros(64, np.uint32) for name in ("bf16", "f16")}
    return {"x": x, "y": x[::-1].copy(), **out, **words}


def flushed(x):
    return np.where(abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def check_arithmetic(before, after):
    x, y = before["x"], before["y"]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(after["powers"], flushed(np.exp2(flushed(x))), rtol=2.0**-21, atol=0)
        np.testing.assert_allclose(after["inverses"], flushed(1 / flushed(x)), rtol=2.0**-22, atol=0)
        for name, dtype in (("bf16", BF16), ("f16", F16)):
            got = after[name].view(np.uint16).reshape(64, 2)
            for half, values in enumerate((x, y)):
                want = values.astype(dtype).view(np.uint16)
                want[np.isnan(values)] = 0x7FFF
                np.testing.assert_array_equal(got[:, half], want, err_msg=name)


def divisions(args):
    i = cuda.threadIdx.x
    args.quotients32[i] = ptx.divide_u32(args.dividends32[i], args.divisors32[i])
    args.quotients64[i] = ptx.divide_u64(args.dividends64[i], args.divisors64[i])


def division_arrays(rng):
    """All pairs of numbers around 0, the sign bits and the ends; random ones of every length."""
    arrays = {}
    for bits in (32, 64):
        dtype = np.dtype(f"uint{bits}")
        near = [
            0,
            1,
            2,
            3,
            5,
            1 << 31,
            (1 << 31) - 1,
            (1 << 32) - 1,
            1 << bits - 1,
            (1 << bits - 1) - 1,
            (1 << bits) - 1,
        ]
        if bits == 64:
            near += [1 << 32, (1 << 53) + 1, (1 << 64) - 2]
        edges = [(a, b) for a in dict.fromkeys(near) for b in dict.fromkeys(near) if b]
        lengths = rng.integers(1, bits, (256 - len(edges), 2))
        others = [(int(rng.integers(1 << 63)) >> 63 - a, int(rng.integers(1 << 63)) >> 63 - b or 1) for a, b in lengths]
        dividends, divisors = zip(*edges, *others, strict=True)
        arrays[f"dividends{bits}"], arrays[f"divisors{bits}"] = np.array(dividends, dtype), np.array(divisors, dtype)
        arrays[f"quotients{bits}"] = np.full(256, 77, dtype)
    return arrays


def check_divisions(before, after):
    for bits in (32, 64):
        pairs_of = zip(before[f"dividends{bits}"].tolist(), before[f"divisors{bits}"].tolist(), strict=True)
        assert after[f"quotients{bits}"].tolist() == [a // b for a, b in pairs_of]


def unpack_e4m3(args):
    i = cuda.threadIdx.x
    args.out[i] = ptx.unpack_e4m3x2(args.two_bytes[i])


def e4m3_arrays(rng):
    """Every byte once; garbage above the 16 bits that count."""
    two_bytes = np.arange(256, dtype=np.uint8).view(np.uint16).astype(np.uint32) | np.uint32(0xABCD0000)
    return {"two_bytes": two_bytes, "out": np.zeros(128, np.uint32)}


def check_e4m3(before, after):
    want = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float16).view(np.uint16)
    want[[0x7F, 0xFF]] = 0x7FFF
    np.testing.assert_array_equal(after["out"].view(np.uint16), want)


def permute(args):
    i = cuda.threadIdx.x
    args.out[i] = ptx.permute_bytes(args.low[i], args.high[i], args.selector[i])


def permute_arrays(rng):
    """Random bytes, or their signs, out of random words; of the selector only the low 16 bits count."""
    nibbles = rng.integers(0, 16, (256, 4))
    nibbles[:16] = np.arange(16)[:, None]
    selector = (nibbles << 4 * np.arange(4)).sum(1) | rng.integers(0, 1 << 16, 256) << 16
    words = {name: rng.integers(0, 1 << 32, 256, dtype=np.uint32) for name in ("low", "high")}
    return {**words, "selector": selector.astype(np.uint32), "out": np.zeros(256, np.uint32)}


def check_permute(before, after):
    eight = np.stack([before["low"], before["high"]], 1).view(np.uint8)
    for i, selector in enumerate(before["selector"].tolist()):
        nibbles = [selector >> 4 * k & 15 for k in range(4)]
        want = [0xFF * (eight[i, n - 8] >> 7) if n >= 8 else eight[i, n] for n in nibbles]
        assert after["out"][i : i + 1].view(np.uint8).tolist() == want


def pair_products(args):
    i = cuda.threadIdx.x
    args.bf16[i] = ptx.multiply_bf16x2(args.x[i], args.y[i])
    args.f16[i] = ptx.multiply_f16x2(args.x[i], args.y[i])


# Bits of both types: zeros, the smallest and largest subnormals and normals, ones, gaps of fp8, infinities, NaN.
PAIR_EDGES = {
    "bf16": [0, 1, 2, 3, 0x7F, 0x80, 0x81, 0x3F80, 0x3F81, 0x3FFF, 0x3F00, 0x7B80, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81],
    "f16": [0, 1, 2, 3, 0x3FF, 0x400, 0x401, 0x3C00, 0x3C01, 0x3FFF, 0x3800, 0x5C00, 0x7BFF, 0x7C00, 0x7E00, 0x7C01],
}


def product_arrays(rng):
    """In the low halves all pairs of edges of bf16 and of f16, both signs of the first; in the high ones anything."""
    low = []
    for edges in PAIR_EDGES.values():
        low += [(a | sign, b) for a in edges for b in edges for sign in (0, 0x8000)]
    low = np.array(low, np.uint32)
    high = rng.integers(0, 1 << 16, low.shape, dtype=np.uint32)
    x, y = (low | high << np.uint32(16)).T.copy()
    return {"x": x, "y": y, "bf16": np.zeros(x.size, np.uint32), "f16": np.zeros(x.size, np.uint32)}


def check_products(before, after):
    """The exact product, rounded once."""
    for name, dtype in (("bf16", BF16), ("f16", F16)):
        with np.errstate(all="ignore"):
            x, y = (before[n].view(dtype).astype(np.float64) for n in "xy")
            exact = x * y  # of 16 or 22 bits
            want = exact.astype(dtype).view(np.uint16)
        want[np.isnan(exact)] = CANONICAL_NAN
        np.testing.assert_array_equal(after[name].view(np.uint16), want, err_msg=name)


def widening_case(dtype):
    """Every byte at each of the sixteen places, beside others, of which some are NaN; and sixteen without a NaN."""
    widen = formats.make_widen_e4m3x16(dtype)
    plain = formats.fp8_e4m3_to_float32

    def widen_words(args):
        i = cuda.threadIdx.x
        words, pairs = args.words, args.pairs
        first, second = widen((words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]))
        for n in range(4):
            pairs[8 * i + n], pairs[8 * i + 4 + n] = first[n], second[n]
        if i < 256:
            args.plain[i] = plain(words[4 * i])

    def arrays(rng):
        order = np.arange(256)
        # Past byte 127 and 255 comes 0: a NaN has neighbours that are none, and one that is.
        steps = (0, 85, 127, 200, *rng.integers(0, 256, 11), 128)
        sixteen = np.stack([(order + step) % 256 for step in steps], 1)
        healthy = rng.permutation(np.delete(order, [0x7F, 0xFF]).repeat(9)[: 128 * 16]).reshape(128, 16)
        return {
            "words": np.concatenate([sixteen, healthy]).astype(np.uint8).view(np.uint32).reshape(-1),
            "pairs": np.zeros(384 * 8, np.uint32),
            "plain": np.zeros(256, np.float32),
        }

    def check(before, after):
        target = {"bfloat16": BF16, "float16": F16}[dtype]
        got = after["pairs"].view(np.uint16).reshape(384, 16)
        sixteen = before["words"].view(np.uint8).reshape(384, 16)
        # The values of the plain kernel's conversion, by byte: in word i the lowest byte is i.
        values = after["plain"]
        np.testing.assert_array_equal(values, np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32))
        want = values.astype(target).view(np.uint16)[sixteen]
        is_nan = (sixteen & 0x7F) == 0x7F
        assert is_nan[:256].any(0).all()
        assert not is_nan[256:].any()
        np.testing.assert_array_equal(got[~is_nan], want[~is_nan])
        assert (got[is_nan] & 0x7FFF == CANONICAL_NAN).all()

    name = {"bfloat16": "fma.rn.bf16x2", "float16": "mul.rn.f16x2"}[dtype]
    return Case(f"widen {dtype}", widen_words, arrays, check, {name: 8, "prmt.b32": 16}, threads=384)


# ----------------------------------------------------------------------------------------------------- loads and stores


def memory(args):
    """A lane's 16 bytes go round: global, shared, the next lane's registers, global."""
    room = cuda.shared.array(0, float32, alignment=128)
    i = cuda.threadIdx.x
    base = ptx.shared_address(room, 0)
    mine, next_lane = base + 16 * i, base + 16 * ((i + 1) % 32)
    words, floats = ptx.load_global_v4_u32(ptx.global_address(args.words, 4 * i)), (float32(i), float32(1))
    ptx.prefetch_l2(ptx.global_address(args.floats, 4 * i))
    ptx.store_shared_v4_u32(mine, words)
    ptx.store_shared_v4_f32(mine + 512, ptx.load_global_v4_f32(ptx.global_address(args.floats, 4 * i)))
    cuda.syncthreads()
    ptx.store_global_v4_u32(ptx.global_address(args.out_words, 4 * i), ptx.load_shared_v4_u32(next_lane))
    ptx.store_global_v4_f32(ptx.global_address(args.out_floats, 4 * i), ptx.load_shared_v4_f32(next_lane + 512))
    cuda.syncthreads()
    ptx.store_shared_u32(base + 4 * i, words[1])
    ptx.store_shared_f32(base + 128 + 4 * i, floats[0])
    ptx.store_shared_v2_u64(mine + 1024, ptx.load_shared_v2_u64(mine + 512))  # the same, as 64-bit halves
    cuda.syncthreads()
    ptx.store_global_u32(ptx.global_address(args.out_word, i), ptx.load_shared_u32(base + 4 * (31 - i)))
    pair = (ptx.load_shared_f32(base + 128 + 4 * (31 - i)), floats[1])
    ptx.store_global_v2_f32(ptx.global_address(args.out_pair, 2 * i), pair)
    swapped = ptx.load_shared_v2_u64(next_lane + 1024)
    args.out_halves[2 * i], args.out_halves[2 * i + 1] = swapped[1], swapped[0]
    args.out_plain[i] = ptx.load_global_u32(ptx.global_address(args.words, 4 * i + 3))
    # Bytes of a word change places, and the word beside them stays.
    byte = ptx.global_address(args.out_bytes, 0) + uint64(8 * (i // 4) + i % 4)
    ptx.store_global_u8(byte, ptx.load_global_u8(ptx.global_address(args.words, i // 4) + uint64(3 - i % 4)) | 0xABC00)
    two = ptx.load_global_v2_f32(ptx.global_address(args.floats, 2 * i))
    # Lanes that read nothing have an address that is far outside.
    far = ptx.global_address(args.floats, 4 * i if i % 2 else 1 << 50)
    four, pair_if = ptx.load_global_v4_f32_if(far, i % 2), ptx.load_global_v2_f32_if(far + uint64(8), i % 2 * 256)
    for e in range(4):
        args.out_if[4 * i + e] = four[e] + two[e % 2]
    for e in range(2):
        args.out_pair_if[2 * i + e] = pair_if[e]
    # Words with a high bit, and any byte of a word.
    far = ptx.global_address(args.words, 4 * i if i % 2 else 1 << 50)
    args.out_word_if[i] = ptx.load_global_u32_if(far, i % 2 << 31)
    args.out_byte_if[i] = ptx.load_global_u8_if(far + uint64(i // 2 % 4), i % 2)


def memory_arrays(rng):
    floats = {name: np.full(128, np.nan, np.float32) for name in ("out_floats", "out_if")}
    return {
        "words": rng.integers(0, 1 << 32, 128, dtype=np.uint32),
        "floats": rng.integers(-100, 100, 128).astype(np.float32),
        "out_words": np.zeros(128, np.uint32),
        "out_word": np.zeros(32, np.uint32),
        "out_plain": np.zeros(32, np.uint32),
        "out_word_if": np.full(32, 77, np.uint32),
        "out_byte_if": np.full(32, 77, np.uint32),
        "out_halves": np.zeros(64, np.uint64),
        "out_bytes": np.full(16, 0xA5A5A5A5, np.uint32),
        "out_pair": np.full(64, np.nan, np.float32),
        "out_pair_if": np.full(64, np.nan, np.float32),
        **floats,
    }


def check_memory(before, after):
    words, floats = before["words"].reshape(32, 4), before["floats"].reshape(32, 4)
    np.testing.assert_array_equal(after["out_words"].reshape(32, 4), np.roll(words, -1, 0))
    np.testing.assert_array_equal(after["out_floats"].reshape(32, 4), np.roll(floats, -1, 0))
    np.testing.assert_array_equal(after["out_word"], words[::-1, 1])
    np.testing.assert_array_equal(after["out_plain"], words[:, 3])
    halves = np.roll(before["floats"].view(np.uint64).reshape(32, 2), -1, 0)
    np.testing.assert_array_equal(after["out_halves"].reshape(32, 2), halves[:, ::-1])
    np.testing.assert_array_equal(after["out_pair"].reshape(32, 2), [(31 - i, 1) for i in range(32)])
    reversed_bytes = np.full((8, 2), 0xA5A5A5A5, np.uint32)
    reversed_bytes[:, 0] = before["words"][:8].byteswap()
    np.testing.assert_array_equal(after["out_bytes"].reshape(8, 2), reversed_bytes)
    odd = (np.arange(32) % 2)[:, None]
    np.testing.assert_array_equal(
        after["out_if"].reshape(32, 4), floats * odd + np.tile(before["floats"][:64].reshape(32, 2), 2)
    )
    np.testing.assert_array_equal(after["out_pair_if"].reshape(32, 2), floats[:, 2:] * odd)
    lanes = np.arange(32)
    np.testing.assert_array_equal(after["out_word_if"], words[:, 0] * odd[:, 0])
    np.testing.assert_array_equal(after["out_byte_if"], (words[:, 0] >> (8 * (lanes // 2 % 4)) & 255) * odd[:, 0])


RECORD = 18  # int64 of a view: a number that no access is a multiple of


def shared_views(args):
    """Two neighbouring arrays of int64 over plain shared memory, written through one name and read through others."""
    room = cuda.shared.array(0, uint32, alignment=128)
    base, i = ptx.shared_address(room, 0), cuda.threadIdx.x
    first = ptx.shared_int64(base + uint32(8), RECORD)
    second = ptx.shared_int64(base + uint32(8 + 8 * RECORD), RECORD)
    if i < RECORD:
        first[i] = args.x[i]
        second[i] = args.x[RECORD + i]
    cuda.syncthreads()
    if i < RECORD:
        args.words[2 * i], args.words[2 * i + 1] = room[2 + 2 * i], room[3 + 2 * i]
        args.last[i] = ptx.shared_int64(base + uint32(8 + 8 * (RECORD - 1)), 3)[1 + i % 2]  # second[0] and [1]
        args.sizes[i] = first.size + 100 * second.size
        room[2 + 2 * i] = uint32(i)
    cuda.syncthreads()
    if i < RECORD:
        args.out[i] = first[RECORD - 1 - i]
        args.out[RECORD + i] = second[RECORD - 1 - i]


def view_arrays(rng):
    x = rng.integers(-(1 << 63), 1 << 63, 2 * RECORD)
    x[:4] = [-1, 0, -(1 << 63), 1 << 32]
    return {
        "x": x,
        "words": np.zeros(2 * RECORD, np.uint32),
        "last": np.zeros(RECORD, np.int64),
        "sizes": np.zeros(RECORD, np.int64),
        "out": np.zeros(2 * RECORD, np.int64),
    }


def check_views(before, after):
    first, second = before["x"].reshape(2, RECORD)
    np.testing.assert_array_equal(after["words"], first.view(np.uint32))
    np.testing.assert_array_equal(after["last"], second[np.arange(RECORD) % 2])
    assert (after["sizes"] == 101 * RECORD).all()
    changed = first & -(1 << 32) | np.arange(RECORD)
    np.testing.assert_array_equal(after["out"].reshape(2, RECORD), [changed[::-1], second[::-1]])


ARRIVALS_ROUNDS = 3
ARRIVALS_BLOCKS = 4


def arrivals(args):
    """A barrier of four blocks, three times over one counter; each publishes a number and reads those of all others.

    Block 0 adds what lacks to 2^31: reduce/grid_sync.py.
    """
    counter, block = ptx.global_address(args.counter, 0), cuda.blockIdx.x
    for turn in range(ARRIVALS_ROUNDS):
        place = ARRIVALS_BLOCKS * turn
        if cuda.threadIdx.x == 0:
            ptx.store_global_u32(ptx.global_address(args.said, place + block), uint32(100 * turn + block + 1))
            share = uint32(1)
            if block == 0:
                share = uint32(uint32(0x80000000) - uint32(ARRIVALS_BLOCKS - 1))
            before = ptx.atomic_add_u32(counter, share)
            args.before[place + block] = before
            ptx.wait_sign_flip(counter, before)
        cuda.syncthreads()
        if cuda.threadIdx.x < ARRIVALS_BLOCKS:
            heard = ptx.load_global_u32(ptx.global_address(args.said, place + cuda.threadIdx.x))
            args.heard[ARRIVALS_BLOCKS * (place + block) + cuda.threadIdx.x] = heard


def arrival_arrays(rng):
    count = ARRIVALS_ROUNDS * ARRIVALS_BLOCKS
    return {
        "counter": np.array([0x80000000], np.uint32),  # as an odd number of rounds before leaves it
        "said": np.zeros(count, np.uint32),
        "before": np.zeros(count, np.uint32),
        "heard": np.zeros(count * ARRIVALS_BLOCKS, np.uint32),
    }


def check_arrivals(before, after):
    rounds, blocks = np.arange(ARRIVALS_ROUNDS)[:, None], np.arange(ARRIVALS_BLOCKS)
    said = 100 * rounds + blocks + 1
    np.testing.assert_array_equal(after["said"].reshape(ARRIVALS_ROUNDS, -1), said)
    heard = after["heard"].reshape(ARRIVALS_ROUNDS, ARRIVALS_BLOCKS, ARRIVALS_BLOCKS)
    np.testing.assert_array_equal(heard, np.broadcast_to(said[:, None], heard.shape))
    assert after["counter"].tolist() == [0]  # three flips, and nothing else is left
    # The sums in between: whoever comes first finds the bare sign, the others what those before them have added.
    found = after["before"].reshape(ARRIVALS_ROUNDS, ARRIVALS_BLOCKS)
    for turn, values in enumerate(found.tolist()):
        sign = 0x80000000 if turn % 2 == 0 else 0
        order = sorted(range(ARRIVALS_BLOCKS), key=lambda k: (values[k] - sign) % (1 << 32))
        expected = sign
        for k in order:
            assert values[k] == expected, (turn, values)
            expected = (expected + ((1 << 31) - ARRIVALS_BLOCKS + 1 if k == 0 else 1)) % (1 << 32)
        assert expected == (sign + (1 << 31)) % (1 << 32)


# --------------------------------------------------------------------------------------------------------------- copies

STAGES, TILES, TILE_WORDS = 3, 7, 128
PENDING = STAGES - 2  # the instruction holds it, so it is a constant: an expression inside the kernel would be none


def cp_async(args):
    """A ring of three tiles, two in flight while one is read; the last row of each tile is cut short."""
    ring = cuda.shared.array(0, uint32, alignment=128)
    i = cuda.threadIdx.x
    base = ptx.shared_address(ring, 0)
    for tile in range(STAGES - 1):
        ptx.cp_async_16(base + 512 * tile + 16 * i, ptx.global_address(args.tiles, TILE_WORDS * tile + 4 * i))
        ptx.cp_async_commit()
    for tile in range(TILES):
        ptx.cp_async_wait(PENDING)
        cuda.syncthreads()  # publishes this tile, and says that the slot filled next has been read
        coming = tile + STAGES - 1
        if coming < TILES:
            source = ptx.global_address(args.tiles, TILE_WORDS * coming + 4 * i)
            ptx.cp_async_16_zfill(base + 512 * (coming % STAGES) + 16 * i, source, 4 * (i % 5))
        ptx.cp_async_commit()  # also an empty one: the count of groups goes on
        for e in range(4):
            args.out[TILE_WORDS * tile + 4 * i + e] = ring[TILE_WORDS * (tile % STAGES) + 4 * (31 - i) + e]


def cp_async_words(args):
    """Words from any place to any other, two a lane."""
    room = cuda.shared.array(0, uint32, alignment=128)
    i = cuda.threadIdx.x
    base = ptx.shared_address(room, 0)
    for half in range(2):
        at = 32 * half + i
        ptx.cp_async_4(base + uint32(4 * args.target[at]), ptx.global_address(args.x, args.source[at]))
        ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    cuda.syncthreads()
    for half in range(2):
        args.out[32 * half + i] = room[32 * half + i]


def word_arrays(rng):
    return {
        "x": rng.integers(1, 1 << 32, 100, dtype=np.uint32),
        "source": rng.integers(0, 100, 64).astype(np.int32),
        "target": rng.permutation(64).astype(np.int32),
        "out": np.zeros(64, np.uint32),
    }


def check_words(before, after):
    np.testing.assert_array_equal(after["out"][before["target"]], before["x"][before["source"]])


def tile_arrays(rng):
    return {
        "tiles": rng.integers(1, 1 << 32, TILES * TILE_WORDS, dtype=np.uint32),
        "out": np.zeros(TILES * TILE_WORDS, np.uint32),
    }


def check_cp_async(before, after):
    want = before["tiles"].reshape(TILES, 32, 4).copy()
    for lane in range(32):
        want[STAGES - 1 :, lane, lane % 5 :] = 0
    np.testing.assert_array_equal(after["out"].reshape(TILES, 32, 4), want[:, ::-1])


def check_tiles(before, after):
    want = before["tiles"].reshape(TILES, 32, 4)[:, ::-1]
    np.testing.assert_array_equal(after["out"].reshape(TILES, 32, 4), want)


def cp_async_ring(args):
    """Warp 0 fills a ring for warp 1, with mbarriers only: full (32 copying threads), empty (32 reading threads)."""
    ring = cuda.shared.array(0, uint32, alignment=128)
    base = ptx.shared_address(ring, 0)
    full, empty = base + STAGES * 512, base + STAGES * 512 + STAGES * 8
    i = cuda.threadIdx.x % 32
    if cuda.threadIdx.x == 0:
        for slot in range(STAGES):
            ptx.mbarrier_init(full + 8 * slot, 32)
            ptx.mbarrier_init(empty + 8 * slot, 32)
    cuda.syncthreads()
    for tile in range(TILES):
        slot, turn = tile % STAGES, tile // STAGES
        if cuda.threadIdx.x < 32:
            ptx.mbarrier_wait(empty + 8 * slot, (turn + 1) % 2)  # the first turn passes: nobody has used the slot
            source = ptx.global_address(args.tiles, TILE_WORDS * tile + 4 * i)
            ptx.cp_async_16(base + 512 * slot + 16 * i, source)
            ptx.cp_async_arrive(full + 8 * slot)
        else:
            ptx.mbarrier_wait(full + 8 * slot, turn % 2)
            four = ptx.load_shared_v4_u32(base + 512 * slot + 16 * (31 - i))
            ptx.mbarrier_arrive(empty + 8 * slot)
            ptx.store_global_v4_u32(ptx.global_address(args.out, TILE_WORDS * tile + 4 * i), four)


def bulk_ring(args):
    """The same by bulk copies, one thread for a tile; two copies a tile; consumers are warps 1 and 2."""
    ring = cuda.shared.array(0, uint32, alignment=128)
    base = ptx.shared_address(ring, 0)
    full, empty = base + STAGES * 512, base + STAGES * 512 + STAGES * 8
    warp, i = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    if cuda.threadIdx.x == 0:
        for slot in range(STAGES):
            ptx.mbarrier_init(full + 8 * slot, 1)
            ptx.mbarrier_init(empty + 8 * slot, 64)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    for tile in range(TILES):
        slot, turn = tile % STAGES, tile // STAGES
        if warp == 0:
            ptx.mbarrier_try_wait(empty + 8 * slot, (turn + 1) % 2)
            if ptx.elect_one():
                ptx.mbarrier_arrive_expect_tx(full + 8 * slot, 512)
                for half in range(2):
                    source = ptx.global_address(args.tiles, TILE_WORDS * tile + 64 * half)
                    ptx.bulk_copy(base + 512 * slot + 256 * half, source, 256, full + 8 * slot)
        else:
            ptx.mbarrier_try_wait(full + 8 * slot, turn % 2)
            four = ptx.load_shared_v4_u32(base + 512 * slot + 16 * (31 - i))
            if warp == 1:
                ptx.store_shared_u32(base + 512 * slot + 16 * (31 - i), 0)  # a write before the next bulk copy
                ptx.store_global_v4_u32(ptx.global_address(args.out, TILE_WORDS * tile + 4 * i), four)
            ptx.fence_proxy_async()
            ptx.mbarrier_arrive(empty + 8 * slot)


# ---------------------------------------------------------------------------------------------------------------- warps

ROUNDS = 5


def named_barriers(args):
    """Warps 0, 1 write and arrive, warp 2 waits and reads; back by a second barrier.  Warp 3 takes no part."""
    room = cuda.shared.array(0, int32, alignment=128)
    i, warp = cuda.threadIdx.x, cuda.threadIdx.x // 32
    for turn in range(ROUNDS):
        if warp < 2:
            room[i] = args.x[64 * turn + i]
            ptx.barrier_arrive(1, 96)
            ptx.barrier_sync(2, 96)  # before the room is written again
        elif warp == 2:
            ptx.barrier_sync(1, 96)
            args.out[32 * turn + i - 64] = room[95 - i] + 1000 * room[127 - i]
            ptx.barrier_arrive(2, 96)


def named_arrays(rng):
    return {"x": rng.integers(0, 1000, 64 * ROUNDS).astype(np.int32), "out": np.zeros(32 * ROUNDS, np.int32)}


def check_named(before, after):
    x = before["x"].reshape(ROUNDS, 64)[:, ::-1]
    np.testing.assert_array_equal(after["out"].reshape(ROUNDS, 32), x[:, 32:] + 1000 * x[:, :32])


def voting_barriers(args):
    """Warps 0 and 1 meet at one barrier, 2 and 3 at another; a thread votes for what it finds in a row of ``votes``."""
    room = cuda.shared.array(0, int32, alignment=128)
    i, team = cuda.threadIdx.x, cuda.threadIdx.x // 64
    for turn in range(ROUNDS):
        room[i] = args.x[128 * turn + i]
        voted = ptx.barrier_or(1 + team, 64, args.votes[128 * turn + i])
        args.out[128 * turn + i] = room[64 * team + 63 - i % 64] + 1000 * int32(voted)  # the team's, published
        ptx.barrier_sync(1 + team, 64)  # before the room is written again


def voting_arrays(rng):
    """Nobody votes, one thread of each team, all of one team, one of the other with bit 31, everybody."""
    votes = np.zeros((ROUNDS, 128), np.uint32)
    votes[1, [63, 64]] = 1
    votes[2, :64] = 7
    votes[3, 127] = 1 << 31
    votes[4] = rng.integers(1, 1 << 32, 128)
    x = rng.integers(0, 1000, 128 * ROUNDS).astype(np.int32)
    return {"x": x, "votes": votes.reshape(-1), "out": np.zeros(128 * ROUNDS, np.int32)}


def check_voting(before, after):
    x = before["x"].reshape(ROUNDS, 2, 64)[..., ::-1]
    voted = before["votes"].reshape(ROUNDS, 2, 64).any(-1, keepdims=True)
    assert voted[..., 0].tolist() == [[False] * 2, [True] * 2, [True, False], [False, True], [True] * 2]
    np.testing.assert_array_equal(after["out"].reshape(ROUNDS, 2, 64), x + 1000 * voted)


def opaque(args):
    """The number itself, though the compiler could know it: without the instruction this is a store of a constant."""
    args.out[cuda.threadIdx.x] = ptx.opaque_u32(7) + 3 * ptx.opaque_u32(cuda.threadIdx.x)
    args.wide[cuda.threadIdx.x] = ptx.opaque_u64(LARGE) - ptx.opaque_u64(uint64(cuda.threadIdx.x))
    args.threads[cuda.threadIdx.x] = ptx.thread_id()


LARGE = 0xFEDCBA9876543210


def check_opaque(before, after):
    np.testing.assert_array_equal(after["out"], 7 + 3 * np.arange(64))
    assert after["wide"].tolist() == [LARGE - i for i in range(64)]
    np.testing.assert_array_equal(after["threads"], np.arange(64))


def opaque_arrays(rng):
    words = {name: np.full(64, 99, np.uint32) for name in ("out", "threads")}
    return {**words, "wide": np.zeros(64, np.uint64)}


def reductions(args):
    i = cuda.threadIdx.x
    args.largest[i] = ptx.warp_max_u32(args.words[i])
    args.smallest[i] = ptx.warp_min_u32(args.words[i])


def reductions_arrays(rng):
    """Words on both sides of 2^31: they are compared without a sign."""
    words = rng.integers(0, 1 << 32, 64, np.uint32)
    return {"words": words, "largest": np.zeros(64, np.uint32), "smallest": np.zeros(64, np.uint32)}


def check_reductions(before, after):
    warps = before["words"].reshape(2, 32)
    np.testing.assert_array_equal(after["largest"].reshape(2, 32), np.repeat(warps.max(1)[:, None], 32, 1))
    np.testing.assert_array_equal(after["smallest"].reshape(2, 32), np.repeat(warps.min(1)[:, None], 32, 1))


def elect(args):
    args.out[cuda.threadIdx.x] = 1 if ptx.elect_one() else 0
    args.again[cuda.threadIdx.x] = 1 if ptx.elect_one() else 0


def elect_arrays(rng):
    return {"out": np.full(64, 9, np.int32), "again": np.full(64, 9, np.int32)}


def check_elect(before, after):
    assert after["out"].reshape(2, 32).sum(1).tolist() == [1, 1]
    np.testing.assert_array_equal(after["out"], after["again"])


def registers(args):
    """384 threads have 168 registers each at launch; one group of four warps takes what the two others give."""
    i = cuda.threadIdx.x
    if i < 128:
        ptx.setmaxnreg_inc(184)
        args.out[i] = 1
    else:
        ptx.setmaxnreg_dec(160)
        args.out[i] = 2


def check_registers(before, after):
    np.testing.assert_array_equal(after["out"], [1] * 128 + [2] * 256)


def trap(args):
    """Where it is not met it does nothing; where it is, nothing is left to look at."""
    i = cuda.threadIdx.x
    if args.x[i] > args.limit[0]:
        ptx.trap()
    args.out[i] = args.x[i] + 1


def check_trap(before, after):
    np.testing.assert_array_equal(after["out"], before["x"] + 1)


LDMATRIX = {f"ldmatrix.sync.aligned.m8n8.x{n}{t}.shared.b16": 1 for n in (1, 2, 4) for t in ("", ".trans")}
RING_BYTES = STAGES * (512 + 16)

CASES = [
    mma_case("bf16", BF16),
    mma_case("f16", F16),
    Case("ldmatrix", ldmatrix, ldmatrix_arrays, check_ldmatrix, LDMATRIX, shared_bytes=512),
    Case(
        "attention tile",
        attention_tile,
        attention_arrays,
        check_attention,
        {"mma.sync.aligned": 4, "ldmatrix.sync.aligned": 4, "cvt.rn.bf16x2.f32": 4, "st.global.v2.f32": 4},
        shared_bytes=1536,
    ),
    Case(
        "arithmetic",
        arithmetic,
        arithmetic_arrays,
        check_arithmetic,
        {
            "ex2.approx.ftz.f32": 1,
            "rcp.approx.ftz.f32": 1,
            "cvt.rn.bf16x2.f32": 1,
            "cvt.rn.f16x2.f32": 1,
        },
        threads=64,
    ),
    Case("division", divisions, division_arrays, check_divisions, {"div.u32": 1, "div.u64": 1}, threads=256),
    Case("permute", permute, permute_arrays, check_permute, {"prmt.b32": 1}, threads=256),
    Case(
        "pair products",
        pair_products,
        product_arrays,
        check_products,
        {"fma.rn.bf16x2": 1, "mul.rn.f16x2": 1},
        threads=1024,
    ),
    *(widening_case(dtype) for dtype in ("bfloat16", "float16")),
    Case("e4m3", unpack_e4m3, e4m3_arrays, check_e4m3, {"cvt.rn.f16x2.e4m3x2": 1}, min_cc=(8, 9), threads=128),
    Case(
        "memory",
        memory,
        memory_arrays,
        check_memory,
        {
            "ld.global.cg.v4.u32": 1,
            "ld.global.cg.v4.f32": 2,
            "@yes ld.global.cg.v4.f32": 1,
            "ld.global.cg.v2.f32": 2,
            "@yes ld.global.cg.v2.f32": 1,
            "@yes ld.global.u32": 1,
            "@yes ld.global.u8": 1,
            "st.global.v4.u32": 1,
            "st.global.v4.f32": 1,
            "st.global.v2.f32": 1,
            "ld.shared.v4.u32": 1,
            "ld.shared.v4.f32": 1,
            "st.shared.v4.u32": 1,
            "st.shared.v4.f32": 1,
            "ld.shared.v2.u64": 2,
            "st.shared.v2.u64": 1,
            "ld.global.u32": 2,
            "ld.global.u8": 2,
            "st.global.u8": 1,
            "prefetch.global.L2": 1,
        },
        shared_bytes=1536,
    ),
    Case(
        "shared views",
        shared_views,
        view_arrays,
        check_views,
        {},
        shared_bytes=8 * (2 * RECORD + 2),
    ),
    Case(
        "arrivals",
        arrivals,
        arrival_arrays,
        check_arrivals,
        {"atom.acq_rel.gpu.global.add.u32": 1, "ld.acquire.gpu.global.u32": 1},
        blocks=ARRIVALS_BLOCKS,
    ),
    Case(
        "cp_async words",
        cp_async_words,
        word_arrays,
        check_words,
        {"cp.async.ca.shared.global": 1},
        shared_bytes=4 * 64,
    ),
    Case(
        "cp_async",
        cp_async,
        tile_arrays,
        check_cp_async,
        {"cp.async.wait_group 1;": 1},
        shared_bytes=512 * STAGES,
    ),
    Case(
        "cp_async ring",
        cp_async_ring,
        tile_arrays,
        check_tiles,
        {
            "cp.async.mbarrier.arrive.noinc.shared.b64": 1,
            "mbarrier.test_wait.parity.shared.b64": 2,
            "mbarrier.arrive.shared.b64": 1,
        },
        threads=64,
        shared_bytes=RING_BYTES,
    ),
    Case(
        "bulk ring",
        bulk_ring,
        tile_arrays,
        check_tiles,
        {
            "mbarrier.try_wait.parity.shared::cta.b64": 2,
            "mbarrier.arrive.expect_tx.shared::cta.b64": 1,
            "elect.sync": 1,
            "fence.proxy.async.shared::cta": 1,
            "fence.mbarrier_init.release.cluster": 1,
        },
        min_cc=(9, 0),
        threads=96,
        shared_bytes=RING_BYTES,
    ),
    Case(
        "named barriers",
        named_barriers,
        named_arrays,
        check_named,
        {"bar.arrive": 2},
        threads=128,
        shared_bytes=256,
    ),
    Case(
        "voting barriers",
        voting_barriers,
        voting_arrays,
        check_voting,
        {"barrier.red.or.pred": 1, "bar.sync": 1},
        threads=128,
        shared_bytes=512,
    ),
    Case(
        "opaque",
        opaque,
        opaque_arrays,
        check_opaque,
        {"mov.b32": 2, "mov.b64": 2, "%tid.x": 1},
        threads=64,
    ),
    Case(
        "warp reductions",
        reductions,
        reductions_arrays,
        check_reductions,
        {"redux.sync.max.u32": 1, "redux.sync.min.u32": 1},
        threads=64,
    ),
    Case("elect", elect, elect_arrays, check_elect, {"elect.sync _|chosen, 0xffffffff": 2}, min_cc=(9, 0), threads=64),
    Case(
        "setmaxnreg",
        registers,
        lambda rng: {"out": np.zeros(384, np.int32)},
        check_registers,
        {"setmaxnreg.inc.sync.aligned.u32 184": 1, "setmaxnreg.dec.sync.aligned.u32 160": 1},
        min_cc=(9, 0),
        threads=384,
    ),
    Case(
        "trap",
        trap,
        lambda rng: {
            "x": np.arange(32, dtype=np.int32),
            "limit": np.full(1, 31, np.int32),
            "out": np.zeros(32, np.int32),
        },
        check_trap,
        {"trap;": 1},
    ),
]
