"""Whether a result is right: float64 where the arrays are, and numpy's reference beside it.

Every figure's result is compared with float64 before its time counts.  That is the definition, computed in chunks of
keys (``attend``) on the GPU, where all rows of a large shape take milliseconds.  One node of each shape is computed by
``nbverify.reference`` too, which says whether ``attend`` itself is right, and what numpy takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.problem import Problem, to_float
from benchmarks.shapes import Shape
from nbverify import reference
from nbverify.errors import NbverifyError

CHUNK_KEYS = 4096
# Beyond this many operations some rows are checked, not all: float64 runs at 2 to 60 TFLOP/s.
CHECK_FLOP = 4e11
REFERENCE_KEYS = 8192  # numpy takes seconds for a node of 128k keys: at most these, and the time is scaled
ORACLES_AGREE = 1e-10  # two orders of summation in float64

# ||got - float64|| / ||float64|| of a row.  Rounding P and out to the type, half an ulp each (2^-8 and 2^-11), gives
# about 0.4 of the bound on random rows; a wrong key, or a wrong bit of the mask, some tens of it.
ROW_ERROR = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
# Scores: products of head_dim terms of order 1, summed in float32, also by an adder that truncates.
LSE_ERROR = 1e-3


class WrongResult(NbverifyError):
    """A result that rounding does not explain."""


@dataclass(frozen=True)
class Accuracy:
    """Errors against float64 over the rows that were checked."""

    relative: float  # ||got - want|| / ||want|| over all of them
    worst_row: float  # the largest of that, row by row
    rows: int
    of_rows: int
    lse: float | None = None  # the largest error of a log-sum-exp

    def record(self) -> dict[str, Any]:
        return {
            "relative": self.relative, "worst_row": self.worst_row, "lse": self.lse,
            "rows": self.rows, "of_rows": self.of_rows,
        }  # fmt: skip

    def require(self, dtype: str) -> None:
        """Raises WrongResult.  The comparisons are false for NaN."""
        if not self.worst_row <= ROW_ERROR[dtype]:
            raise WrongResult(f"out: a row is off by {self.worst_row:.2g} of its length, over {ROW_ERROR[dtype]:.2g}")
        if self.lse is not None and not self.lse <= LSE_ERROR:
            raise WrongResult(f"lse: off by {self.lse:.2g}, over {LSE_ERROR:.2g}")


def attend(problem: Problem, request: int, nodes: np.ndarray, *, drafts: bool = True) -> tuple[Any, Any]:
    """float64 (out [nodes, heads, head_dim_v], lse [nodes, heads]) of some nodes; without ``drafts``, prefix alone."""
    slots, tree = problem.prefix_slots[request], problem.trees[request][nodes]
    prefix = len(slots)
    if drafts:
        slots = np.concatenate([slots, problem.draft_slots[request]])
    seen = np.concatenate([np.ones((len(nodes), prefix), bool), tree], axis=1)[:, : len(slots)]
    return _attend(problem, problem.first_rows[request] + nodes, slots, seen)


def _attend(problem: Problem, rows: np.ndarray, slots: np.ndarray, seen: np.ndarray) -> tuple[Any, Any]:
    """Rows of q over the keys in ``slots`` that each sees (bool [rows, slots]): out and lse."""
    xp, shape, arrays = problem.xp, problem.case.shape, problem.arrays
    kv_dtype = problem.spec.kv_dtype or problem.spec.dtype
    group, kv_heads = problem.spec.group, shape.num_kv_heads
    count = len(rows)
    q = to_float(xp, arrays["q"][xp.asarray(rows)], problem.spec.dtype)
    # [KV heads, rows x group, width]: what shares keys is one product
    q = q.reshape(count, kv_heads, group, -1).transpose(1, 0, 2, 3).reshape(kv_heads, count * group, -1)
    largest = xp.full((kv_heads, count * group), -xp.inf)
    total = xp.zeros((kv_heads, count * group))
    out = xp.zeros((kv_heads, count * group, shape.head_dim_v))
    for first in range(0, len(slots), CHUNK_KEYS):
        chunk = xp.asarray(slots[first : first + CHUNK_KEYS])
        visible = xp.asarray(seen[:, first : first + CHUNK_KEYS].repeat(group, axis=0))[None]
        k = to_float(xp, arrays["k_cache"][chunk], kv_dtype)  # [keys, KV heads, width]
        v = k[..., : shape.head_dim_v] if shape.shared_kv else to_float(xp, arrays["v_cache"][chunk], kv_dtype)
        scores = problem.spec.sm_scale * (q @ k.transpose(1, 2, 0))
        scores = xp.where(visible, scores, -xp.inf)
        higher = xp.maximum(largest, scores.max(-1))
        shift = xp.where(higher == -xp.inf, 0.0, higher)  # a row that has seen nothing yet: no inf - inf
        weights, fade = xp.exp(scores - shift[..., None]), xp.exp(largest - shift)
        total = total * fade + weights.sum(-1)
        out = out * fade[..., None] + weights @ v.transpose(1, 0, 2)
        largest = higher
    out = out / xp.where(total == 0, 1.0, total)[..., None]
    lse = largest + xp.log(xp.where(total == 0, 1.0, total))  # -inf where nothing was seen
    by_row = (kv_heads, count, group)
    heads = kv_heads * group
    return (
        out.reshape(*by_row, -1).transpose(1, 0, 2, 3).reshape(count, heads, -1),
        lse.reshape(by_row).transpose(1, 0, 2).reshape(count, heads),
    )


def rows_to_check(shape: Shape, budget_flop: float = CHECK_FLOP) -> list[tuple[int, np.ndarray]]:
    """(request, nodes): all of them, or, beyond the budget, some that lie evenly from the first to the last."""
    requests = _evenly(shape.requests, shape.requests * budget_flop / shape.flop)
    share = budget_flop / sum(shape.flop_of(request) for request in requests)
    return [(int(r), _evenly(shape.nodes[r], shape.nodes[r] * share)) for r in requests]


def _evenly(count: int, wanted: float) -> np.ndarray:
    """About ``wanted`` of 0 .. count - 1, at least the last one: it sees most of the tree."""
    picked = min(count, max(1, int(wanted)))
    return np.unique(np.linspace(count - 1, 0, picked).round().astype(np.int64))


class Expected:
    """float64 for the rows that are checked, computed once for whoever is compared."""

    def __init__(self, problem: Problem, *, drafts: bool = True):
        self._problem = problem
        self._parts = []
        for request, nodes in rows_to_check(problem.case.shape):
            rows = problem.first_rows[request] + nodes
            self._parts.append((rows, *attend(problem, request, nodes, drafts=drafts)))

    def compare(self, out: Any, lse: Any = None) -> Accuracy:
        """``out`` [tokens, heads, head_dim_v]: an array of the module's floats, or raw bits of the spec's dtype."""
        xp, dtype = self._problem.xp, self._problem.spec.dtype
        wrong = right = worst = worst_lse = 0.0
        count = 0
        for rows, want, want_lse in self._parts:
            got = out[xp.asarray(rows)]
            got = to_float(xp, got, dtype) if got.dtype == xp.uint16 else got.astype(xp.float64)
            error, size = ((got - want) ** 2).sum(-1), (want**2).sum(-1)
            wrong, right = wrong + float(error.sum()), right + float(size.sum())
            worst = _larger(worst, float(xp.sqrt(error / xp.where(size == 0, 1.0, size)).max()))
            count += error.size
            if lse is not None:
                worst_lse = _larger(worst_lse, float(abs(lse[xp.asarray(rows)] - want_lse).max()))
        relative = float(np.sqrt(wrong / right)) if right else 0.0
        return Accuracy(relative, worst, count, self._problem.case.shape.rows, None if lse is None else worst_lse)


def _larger(a: float, b: float) -> float:
    """The maximum, or the NaN among them, which ``max`` would lose."""
    return b if b != b or b > a else a


def numpy_reference(problem: Problem) -> dict[str, float]:
    """One node by ``nbverify.reference``: what numpy takes for the whole shape, and the two oracles' difference.

    A node's keys in any order are the same sum, so it is a request of its own: what it sees of prefix and drafts as
    prefix, itself as the only node, no mask.  At most REFERENCE_KEYS of them; the time is scaled.
    """
    shape, spec, xp = problem.case.shape, problem.spec, problem.xp
    node = shape.nodes[0] - 1
    others = problem.trees[0][node].copy()
    others[node] = False
    drafts = problem.draft_slots[0]
    seen = np.concatenate([problem.prefix_slots[0], drafts[others]])[-REFERENCE_KEYS:]
    slots = np.concatenate([seen, drafts[node : node + 1]])
    rows = problem.first_rows[:1] + node
    names = ("k_cache",) if shape.shared_kv else ("k_cache", "v_cache")
    bits = {name: _to_host(problem.arrays[name][xp.asarray(slots)]) for name in names}
    kv_dtype = spec.kv_dtype or spec.dtype
    inputs = {name: to_float(np, array, kv_dtype, np.float32) for name, array in bits.items()}
    q = to_float(np, _to_host(problem.arrays["q"][xp.asarray(rows)]), spec.dtype, np.float32)
    begin = time.perf_counter()
    want, _ = reference.verify_attention(
        q=q,
        **inputs,
        kv_indptr=[0, len(seen)],
        kv_indices=np.arange(len(seen)),
        qo_indptr=[0, 1],
        out_cache_loc=[len(seen)],
        sm_scale=spec.sm_scale,
        mask="none",
        head_dim_v=shape.head_dim_v,
    )
    seconds = time.perf_counter() - begin
    got = _to_host(_attend(problem, rows, slots, np.ones((1, len(slots)), bool))[0])
    difference = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not difference <= ORACLES_AGREE:
        raise WrongResult(f"float64 on the device and in numpy differ by {difference:.2g}: no error can be trusted")
    all_keys = sum(n * (c + n) for n, c in zip(shape.nodes, shape.prefixes, strict=True))
    return {"ms": 1e3 * seconds * all_keys / len(slots), "keys_timed": len(slots), "oracles_differ": difference}


def _to_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array
