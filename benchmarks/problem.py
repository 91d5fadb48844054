"""The buffers of a case, on the device or, for tests, in numpy: random rows in shuffled slots, a random tree each.

Rows are normal.  Queries share a direction, and the rows of drafts lean that way, so far that all drafts would weigh
about as much as the prefix: otherwise 33 drafts among 32k equals would weigh nothing, and a wrong mask would not show.

Pools are large, so they are made where they are used: element i is a sample of a table, chosen by a hash of i and the
seed, which numpy and CuPy compute alike.  ``xp`` is one of these two modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.shapes import Case
from nbverify import reference
from nbverify.spec import KV_DTYPE_FP8, VerifySpec

TYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    KV_DTYPE_FP8: np.dtype(ml_dtypes.float8_e4m3fn),
}
TABLE_BITS = 16  # 65,536 samples of the normal distribution
CHUNK = 1 << 24  # elements of a pool that are made at once: hashes are 8 bytes each
# Steele, Lea and Flood's SplitMix64: a counter times the golden ratio, and a finaliser by David Stafford.
GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
WORD = 1 << 64
K_STREAM, V_STREAM = 1, 2  # so that K and V of a seed differ
POISON = 0xFF  # NaN in every float type


@dataclass
class Problem:
    """``arrays`` are what ``bind`` takes.  The rest says the same on the host, a list entry for each request."""

    xp: Any
    case: Case
    spec: VerifySpec
    arrays: dict[str, Any]
    prefix_slots: list[np.ndarray]
    draft_slots: list[np.ndarray]
    trees: list[np.ndarray]  # bool [n, n]: what each node sees of the drafts

    @property
    def first_rows(self) -> np.ndarray:
        """Row of q and out where each request begins."""
        return np.cumsum([0, *self.case.shape.nodes])[:-1]

    def set_lengths(self, prefixes: Sequence[int]) -> None:
        """Other prefix lengths, as a server writes them before a replay."""
        self.arrays["kv_indptr"][...] = self.xp.asarray(_indptr(prefixes).astype(np.int32))

    def poison(self) -> None:
        """NaN in out and lse."""
        for name in ("out", "lse"):
            self.arrays[name].view(self.xp.uint8)[...] = POISON


class Pools:
    """K and V pools by kind of row, each made once, as long as the longest of some cases, and lent from the front."""

    def __init__(self, xp: Any, cases: Sequence[Case], seed: int):
        self._xp, self._seed = xp, seed
        self._longest: dict[tuple, int] = {}
        self._pools: dict[tuple, Any] = {}
        for case in cases:
            for key in _kinds(case):
                self._longest[key] = max(self._longest.get(key, 0), case.shape.keys)

    def rows(self, case: Case) -> dict[str, Any]:
        """``k_cache`` and, where V is apart, ``v_cache``: as many slots as the case has keys."""
        found = {}
        for name, key in zip(("k_cache", "v_cache"), _kinds(case), strict=False):
            stream, heads, width, dtype = key
            if key not in self._pools:
                count = self._longest[key] * heads * width
                bits = normal_bits(self._xp, count, dtype, self._seed + stream * GOLDEN)
                self._pools[key] = bits.reshape(self._longest[key], heads, width)
            found[name] = self._pools[key][: case.shape.keys]
        return found


def _kinds(case: Case) -> list[tuple[int, int, int, str]]:
    """(stream, heads, width, dtype) of K, and of V where it is apart."""
    shape, dtype = case.shape, case.kv_dtype or case.dtype
    kinds = [(K_STREAM, shape.num_kv_heads, shape.head_dim_qk, dtype)]
    return kinds if shape.shared_kv else [*kinds, (V_STREAM, shape.num_kv_heads, shape.head_dim_v, dtype)]


@contextmanager
def make_problem(xp: Any, pools: Pools, case: Case, spec: VerifySpec, seed: int) -> Iterator[Problem]:
    """The case's buffers.  The rows of its drafts are written into the pools, and taken back at the end."""
    shape = case.shape
    rng = np.random.default_rng([seed, *shape.nodes, *shape.prefixes])
    shuffled = rng.permutation(shape.keys)  # drawn in any case: the trees are the same with contiguous slots
    order = np.arange(shape.keys) if case.contiguous else shuffled
    bounds = np.cumsum([*shape.prefixes, *shape.nodes])[:-1]
    parts = np.split(order, bounds)
    prefix_slots, draft_slots = parts[: shape.requests], parts[shape.requests :]
    trees = [_tree(rng, case.mask, n) for n in shape.nodes]
    caches = pools.rows(case)
    drafts = np.concatenate(draft_slots)
    direction = rng.standard_normal((shape.num_kv_heads, shape.head_dim_qk), np.float32)
    lean = np.concatenate([np.full(n, _lean(case, c, n)) for n, c in zip(shape.nodes, shape.prefixes, strict=True)])
    k_rows = rng.standard_normal((len(drafts), *direction.shape), np.float32) + lean[:, None, None] * direction
    own = rng.standard_normal((shape.tokens, shape.num_q_heads, shape.head_dim_qk), np.float32)
    q = (direction.repeat(spec.group, axis=0) + own) / 2

    mask, mask_indptr = _mask(spec, shape.prefixes, trees)
    capacity = (case.capture_prefix or 0) * shape.requests  # of kv_indices, and of the mask's columns, while capturing
    indices = np.concatenate([*prefix_slots, np.zeros(max(0, capacity - sum(shape.prefixes)), np.int64)])
    host: dict[str, np.ndarray] = {
        "q": to_bits(q, case.dtype),
        "kv_indptr": _indptr(shape.prefixes).astype(np.int32),
        "kv_indices": indices.astype(np.int64),
        "qo_indptr": _indptr(shape.nodes).astype(np.int32),
        "out_cache_loc": drafts.astype(np.int64),
        "out": np.zeros((shape.tokens, shape.num_q_heads, shape.head_dim_v), np.uint16),
        "lse": np.zeros((shape.tokens, shape.num_q_heads), np.float32),
    }
    if mask is not None and mask_indptr is not None:
        room = np.zeros(capacity * max(shape.nodes) if spec.mask == "full" else 0, mask.dtype)
        host |= {"custom_mask": np.concatenate([mask, room]), "mask_indptr": mask_indptr}
    arrays = {**caches, **{name: xp.asarray(array) for name, array in host.items()}}
    problem = Problem(xp, case, spec, arrays, prefix_slots, draft_slots, trees)
    problem.poison()
    where = xp.asarray(drafts)
    before = caches["k_cache"][where]
    caches["k_cache"][where] = xp.asarray(to_bits(k_rows, case.kv_dtype or case.dtype))
    try:
        yield problem
    finally:
        caches["k_cache"][where] = before


def _lean(case: Case, prefix: int, nodes: int) -> float:
    """Factor of the shared direction in a draft's key: scores of drafts rise by ln(prefix / nodes).

    A query's share of the direction is half of it, and the direction's square is about head_dim_qk.
    """
    rise = math.log(max(prefix, nodes) / nodes)
    return rise / (case.shape.sm_scale * case.shape.head_dim_qk / 2)


def _tree(rng: np.random.Generator, mask: str, nodes: int) -> np.ndarray:
    """A random tree, parents first; what a mask without a buffer says instead."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    if mask == "causal":
        return np.tri(nodes, dtype=bool)
    return np.ones((nodes, nodes), bool) if mask == "none" else reference.ancestor_mask(parents)


def _mask(
    spec: VerifySpec, prefixes: Sequence[int], trees: list[np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """custom_mask and mask_indptr in the spec's layout."""
    if not spec.mask.reads_buffer:
        return None, None
    if spec.mask == "packed":
        parts = [reference.pack_mask(tree).ravel() for tree in trees]
    elif spec.mask == "tree":
        parts = [tree.astype(np.uint8).ravel() for tree in trees]
    else:
        parts = [reference.full_mask(c, t).astype(np.uint8).ravel() for c, t in zip(prefixes, trees, strict=True)]
    return np.concatenate(parts), _indptr([len(part) for part in parts])


def _indptr(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


# ---- numbers


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to ``dtype``, as unsigned integers: CuPy has no bfloat16, and no fp8."""
    return raw(values.astype(TYPES[dtype]))


def raw(array: np.ndarray) -> np.ndarray:
    """The bits of an array of 8- or 16-bit floats."""
    return array.view(np.uint8 if array.itemsize == 1 else np.uint16)


def to_float(xp: Any, bits: Any, dtype: str, result: Any = np.float64) -> Any:
    """The numbers that raw bits stand for, exactly."""
    if dtype == "bfloat16":
        return (bits.astype(xp.uint32) << xp.uint32(16)).view(xp.float32).astype(result)
    if dtype == "float16":
        return bits.view(xp.float16).astype(result)
    every = np.arange(256, dtype=np.uint8).view(TYPES[dtype]).astype(result)
    return xp.take(xp.asarray(every), bits.astype(xp.int32))


@cache
def _normal_table(dtype: str) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal(1 << TABLE_BITS, np.float32)
    return to_bits(samples, dtype)


def normal_bits(xp: Any, count: int, dtype: str, seed: int) -> Any:
    """``count`` normal numbers as raw bits; the same from numpy and from CuPy."""
    table = xp.asarray(_normal_table(dtype))
    bits = xp.empty(count, table.dtype)
    start_at = xp.uint64(seed * GOLDEN % WORD)
    for first in range(0, count, CHUNK):
        last = min(first + CHUNK, count)
        x = xp.arange(first, last, dtype=xp.uint64) * xp.uint64(GOLDEN) + start_at
        x = (x ^ (x >> xp.uint64(30))) * xp.uint64(MIX[0])
        x = (x ^ (x >> xp.uint64(27))) * xp.uint64(MIX[1])
        x = x ^ (x >> xp.uint64(31))
        bits[first:last] = xp.take(table, (x >> xp.uint64(64 - TABLE_BITS)).astype(xp.int64))
    return bits
