"""Batches of draft trees as the buffers of the contract, on the host, and what float64 says about them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

import nbverify as nv
from nbverify import reference

HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # of 8 and 11 significant bits
NUMPY_DTYPE = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass
class Batch:
    """Host copies of every input buffer.  Tests change fields and send the result to a device."""

    spec: nv.VerifySpec
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray | None
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    qo_indptr: np.ndarray
    out_cache_loc: np.ndarray
    custom_mask: np.ndarray | None
    mask_indptr: np.ndarray | None
    k_scale: float = 1.0
    v_scale: float | None = None
    trees: list[np.ndarray] = field(default_factory=list)

    def inputs(self) -> dict[str, np.ndarray]:
        """The buffers that ``bind`` takes, without out and lse."""
        names = (
            "q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc",
            "custom_mask", "mask_indptr",
        )  # fmt: skip
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def scale_of_v(self) -> float:
        """``v_scale``, or what its None means."""
        if self.v_scale is not None:
            return self.v_scale
        return self.k_scale if self.spec.shared_kv else 1.0

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64."""
        spec = self.spec
        return reference.verify_attention(
            **self.inputs(),
            sm_scale=spec.sm_scale,
            mask=spec.mask,
            prefix_visible=spec.prefix_visible,
            head_dim_v=spec.head_dim_v,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            score_mod=spec.score_mod,
        )

    def with_spec(self, **changes) -> Batch:
        """The same tensors and trees under another spec; the mask buffers are made again."""
        spec = replace(self.spec, **changes)
        mask, indptr = mask_buffers(spec, np.diff(self.kv_indptr), self.trees)
        return replace(self, spec=spec, custom_mask=mask, mask_indptr=indptr)


def random_parents(rng: np.random.Generator, n: int) -> list[int]:
    """A random tree in random listing order of its non-root nodes' siblings; parents come first."""
    return [-1] + [int(rng.integers(0, i)) for i in range(1, n)]


def shuffled_tree(rng: np.random.Generator, n: int) -> np.ndarray:
    """Ancestor mask [n, n] of a random tree whose nodes are listed in any order: a parent may come after its child."""
    mask = reference.ancestor_mask(random_parents(rng, n)) if n else np.zeros((0, 0), bool)
    order = rng.permutation(n)
    return mask[np.ix_(order, order)]


def mask_buffers(spec: nv.VerifySpec, prefix_lens, trees) -> tuple[np.ndarray | None, np.ndarray | None]:
    """custom_mask and mask_indptr of a spec's layout; prefix columns of FULL are all visible."""
    if not spec.mask.reads_buffer:
        return None, None
    parts = []
    for c, tree in zip(prefix_lens, trees, strict=True):
        if spec.mask is nv.Mask.FULL:
            parts.append(reference.full_mask(max(int(c), 0), tree).astype(np.uint8).ravel())
        elif spec.mask is nv.Mask.TREE:
            parts.append(tree.astype(np.uint8).ravel())
        else:
            parts.append(reference.pack_mask(tree).ravel())
    empty = np.zeros(0, np.uint32 if spec.mask is nv.Mask.PACKED else np.uint8)
    indptr = np.concatenate([[0], np.cumsum([p.size for p in parts])]).astype(np.int64)
    return np.concatenate([empty, *parts]), indptr


def random_batch(
    rng: np.random.Generator,
    spec: nv.VerifySpec,
    prefix_lens,
    node_counts,
    *,
    trees=None,
    index_dtypes=("int32", "int64", "int64", "int32", "int64"),
    spare_slots: int = 7,
    poison: bool = True,
) -> Batch:
    """Normal q, K and V in shuffled slots; every slot that no request lists is NaN (0x7F in fp8) with ``poison``.

    ``index_dtypes``: of kv_indptr, kv_indices, qo_indptr, out_cache_loc, mask_indptr.
    """
    prefix_lens, node_counts = [int(c) for c in prefix_lens], [int(n) for n in node_counts]
    dtype, kv_dtype = NUMPY_DTYPE[spec.dtype], NUMPY_DTYPE[spec.kv_dtype]
    kv_indptr = np.concatenate([[0], np.cumsum(prefix_lens)])
    qo_indptr = np.concatenate([[0], np.cumsum(node_counts)])
    num_prefix, num_tokens = sum(max(c, 0) for c in prefix_lens), sum(max(n, 0) for n in node_counts)
    used = num_prefix + num_tokens
    slots = rng.permutation(used + spare_slots)[:used]

    def cache(width: int) -> np.ndarray:
        values = rng.standard_normal((used + spare_slots, spec.num_kv_heads, width)).astype(kv_dtype)
        if poison:
            unused = np.setdiff1d(np.arange(used + spare_slots), slots)
            values[unused] = np.nan
        return values

    if trees is None:
        trees = [shuffled_tree(rng, n) for n in node_counts]
    mask, mask_indptr = mask_buffers(spec, prefix_lens, trees)
    as_index = [np.dtype(d) for d in index_dtypes]
    return Batch(
        spec=spec,
        q=rng.standard_normal((num_tokens, spec.num_q_heads, spec.head_dim_qk)).astype(dtype),
        k_cache=cache(spec.head_dim_qk),
        v_cache=None if spec.shared_kv else cache(spec.head_dim_v),
        kv_indptr=kv_indptr.astype(as_index[0]),
        kv_indices=slots[:num_prefix].astype(as_index[1]),
        qo_indptr=qo_indptr.astype(as_index[2]),
        out_cache_loc=slots[num_prefix:].astype(as_index[3]),
        custom_mask=mask,
        mask_indptr=None if mask_indptr is None else mask_indptr.astype(as_index[4]),
        trees=list(trees),
    )


def batch_of(rng: np.random.Generator, spec: nv.VerifySpec, requests, num_slots: int, **options) -> Batch:
    """A batch with given slots: ``requests`` are (prefix slots, draft slots, tree).  Unlisted slots are NaN."""
    prefixes, drafts, trees = zip(*requests, strict=True)
    counts = [len(p) for p in prefixes], [len(d) for d in drafts]
    batch = random_batch(rng, spec, *counts, trees=list(trees), **options)
    slots = np.concatenate([np.ravel(p) for p in prefixes] + [np.ravel(d) for d in drafts]).astype(np.int64)

    def spread(cache):
        if cache is None:
            return None
        pool = np.full((num_slots, *cache.shape[1:]), np.nan, np.float32).astype(cache.dtype)
        pool[slots] = rng.standard_normal((len(slots), *cache.shape[1:])).astype(cache.dtype)
        return pool

    num_prefix = sum(counts[0])
    return replace(
        batch,
        k_cache=spread(batch.k_cache),
        v_cache=spread(batch.v_cache),
        kv_indices=slots[:num_prefix].astype(batch.kv_indices.dtype),
        out_cache_loc=slots[num_prefix:].astype(batch.out_cache_loc.dtype),
    )


def mask_elements(spec: nv.VerifySpec, prefix_len: int, num_nodes: int) -> int:
    """Entries of one request's block in ``custom_mask``."""
    c, n = max(prefix_len, 0), max(num_nodes, 0)
    return {nv.Mask.FULL: n * (c + n), nv.Mask.TREE: n * n, nv.Mask.PACKED: n * -(-n // 32)}.get(spec.mask, 0)


def pick(batch: Batch, order) -> Batch:
    """Some requests of a batch, in any order, over the same pool."""
    kv, qo = batch.kv_indptr.astype(np.int64), batch.qo_indptr.astype(np.int64)
    lens, counts = np.diff(kv)[list(order)], np.diff(qo)[list(order)]

    def gather(array, starts, sizes):
        parts = [array[starts[b] : starts[b] + max(size, 0)] for b, size in zip(order, sizes, strict=True)]
        return np.concatenate([array[:0], *parts])

    def sums(values, like):
        return np.concatenate([[0], np.cumsum(values)]).astype(like.dtype)

    mask, mask_indptr = batch.custom_mask, batch.mask_indptr
    if mask is not None:
        sizes = [mask_elements(batch.spec, c, n) for c, n in zip(lens, counts, strict=True)]
        mask, mask_indptr = gather(mask, mask_indptr.astype(np.int64), sizes), sums(sizes, mask_indptr)
    return replace(
        batch,
        q=gather(batch.q, qo, counts),
        kv_indptr=sums(lens, batch.kv_indptr),
        kv_indices=gather(batch.kv_indices, kv, lens),
        qo_indptr=sums(counts, batch.qo_indptr),
        out_cache_loc=gather(batch.out_cache_loc, qo, counts),
        custom_mask=mask,
        mask_indptr=mask_indptr,
        trees=[batch.trees[b] for b in order],
    )


def unused_slots(batch: Batch) -> np.ndarray:
    """Slots that no request lists."""
    return np.setdiff1d(np.arange(len(batch.k_cache)), np.concatenate([batch.kv_indices, batch.out_cache_loc]))


def pad(rng: np.random.Generator, batch: Batch, prefix_len: int, num_nodes: int, *, slot: int) -> Batch:
    """One padding request more, as a captured graph has them: its keys are all ``slot``, its mask block is missing."""
    last_mask = None
    if batch.mask_indptr is not None:
        size = mask_elements(batch.spec, prefix_len, num_nodes)
        last_mask = np.append(batch.mask_indptr, batch.mask_indptr[-1] + size).astype(batch.mask_indptr.dtype)
    q = rng.standard_normal((num_nodes, *batch.q.shape[1:])).astype(batch.q.dtype)
    return replace(
        batch,
        q=np.concatenate([batch.q, q]),
        kv_indptr=np.append(batch.kv_indptr, batch.kv_indptr[-1] + prefix_len).astype(batch.kv_indptr.dtype),
        kv_indices=np.append(batch.kv_indices, [slot] * max(prefix_len, 0)).astype(batch.kv_indices.dtype),
        qo_indptr=np.append(batch.qo_indptr, batch.qo_indptr[-1] + num_nodes).astype(batch.qo_indptr.dtype),
        out_cache_loc=np.append(batch.out_cache_loc, [slot] * num_nodes).astype(batch.out_cache_loc.dtype),
        mask_indptr=last_mask,
        trees=[*batch.trees, np.zeros((num_nodes, num_nodes), bool)],
    )


def assert_close(batch: Batch, out: np.ndarray, lse: np.ndarray | None, *, rows=slice(None)) -> None:
    """Every element against float64, NaN and infinities in exactly the same places."""
    want_out, want_lse = batch.reference()
    of_out, of_lse = allowed_error(batch, want_out, want_lse)
    assert_within(np.asarray(out, np.float64)[rows], want_out[rows], of_out[rows], "out")
    if lse is not None:
        assert_within(np.asarray(lse, np.float64)[rows], want_lse[rows], of_lse[rows], "lse")


def allowed_error(batch: Batch, want_out: np.ndarray, want_lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far out and lse may be from float64, element by element.

    The inputs are the same numbers, so what differs is float32 arithmetic and the final rounding.
    A score is a sum of head_dim_qk products: relative to sum |q k| <= |q| |k|, its error is a few eps32 * sqrt(D)
    (random signs), which moves a weight by that times itself.  Then out, a convex combination of V, moves by at most
    2 * score_error * max |V|; the exponential, sum and division add some ulps; storing rounds by half an ulp of the
    16-bit type, of the value itself.  The tensor-core kernel also rounds its weights: see ``weight_rounding``.
    """
    spec = batch.spec
    eps32, half_ulp = np.finfo(np.float32).eps, HALF_ULP[spec.dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.abs(np.asarray(batch.q, np.float64))
        k = np.abs(np.nan_to_num(np.asarray(batch.k_cache, np.float64), posinf=0, neginf=0))
        q = np.nan_to_num(q, posinf=0)
        score_bound = (
            abs(spec.sm_scale) * batch.k_scale * np.sqrt((q**2).sum(-1).max(initial=0) * (k**2).sum(-1).max(initial=0))
        )
        v = k[..., : spec.head_dim_v] if batch.v_cache is None else np.abs(np.asarray(batch.v_cache, np.float64))
        v_max = np.nan_to_num(v, posinf=0).max(initial=0) * batch.scale_of_v
        score_error = 4 * eps32 * (1 + score_bound)
        # A float16 result below 2^-14 is subnormal: its absolute spacing is 2^-24.
        atol = (2 * score_error + 16 * eps32) * v_max + (2.0**-24 if spec.dtype == "float16" else 0)
        of_out = atol + 1.01 * half_ulp * np.abs(want_out)
        of_lse = score_error + 8 * eps32 + 4 * eps32 * np.abs(want_lse)
        if spec.kernel == "mma":
            of_out = of_out + weight_rounding(batch, want_out, want_lse, v_max)
    return of_out, of_lse


def weight_rounding(batch: Batch, want_out: np.ndarray, want_lse: np.ndarray, v_max: float) -> np.ndarray:
    """What rounding the weights to 16 bits may do to out on top, [T, heads, D] (``kernel="mma"``).

    The tensor cores take P = 2^(s - m) in the type of q, while l adds the weights as they were: out moves by

        sum_j d_j p_j v_j / l      |d_j| <= u, half an ulp: at most  u sum_j p_j |v_j| / l

    Weights that are equal are rounded alike, which moves out by u |out| at most.  Those that differ are rounded
    independently, d_j evenly over +-u at worst, so their sum has a deviation of u / sqrt(3) * S with
    S^2 = sum_j (p_j v_j / l)^2, and 5 of those are allowed.  That is never tighter than the sum above for up to 8 keys
    (S >= sum / sqrt(8)), and for many keys it is narrow enough to tell whether one of them took part.

    A float16 below 2^-14 has a spacing of its own, 2^-24: |d_j p_j| <= 2^-25.  Such weights are beside a maximum
    that weighs 1 or more, so l >= 1.
    """
    spec = batch.spec
    u = HALF_ULP[spec.dtype]
    values = batch.k_cache[..., : spec.head_dim_v] if batch.v_cache is None else batch.v_cache
    squares = (np.asarray(values, np.float64) * batch.scale_of_v) ** 2
    modify = spec.score_mod
    twice = modify and (lambda score, *where: 2 * modify(score / 2, *where))
    # exp(2 s) weighs what p^2 weighs: sum_j p_j^2 v_j^2 over sum_j p_j^2, and l of both.
    mean, lse_of_squares = reference.verify_attention(
        **{**batch.inputs(), "v_cache": squares},
        sm_scale=2 * spec.sm_scale, k_scale=batch.k_scale, v_scale=1.0,
        mask=spec.mask, prefix_visible=spec.prefix_visible, score_mod=twice,
    )  # fmt: skip
    seen = want_lse != -np.inf
    with np.errstate(invalid="ignore"):
        spread = np.sqrt(mean * np.where(seen, np.exp(lse_of_squares - 2 * want_lse), 0)[..., None])
    subnormal = 0.0
    if spec.dtype == "float16":
        most_keys = np.diff(batch.kv_indptr.astype(np.int64)).max(initial=0) + np.diff(batch.qo_indptr).max(initial=0)
        subnormal = 2.0**-25 * np.sqrt(max(most_keys, 0)) * v_max
    return u * np.abs(want_out) + 5 / np.sqrt(3) * (u * spread + subnormal)


def assert_within(got: np.ndarray, want: np.ndarray, allowed: np.ndarray, name: str) -> None:
    """``|got - want| <= allowed``, element by element; NaN and infinities only where they are wanted."""
    got, want, allowed = np.broadcast_arrays(got, want, allowed)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{name}: places of NaN")
    infinite = np.isinf(want) | np.isinf(got)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=f"{name}: infinities")
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(want) & ~infinite, np.abs(got - want), 0)
        bad = np.isfinite(want) & ~(error <= allowed)  # also where the bound itself is NaN
    if bad.any():
        excess = np.where(bad, np.nan_to_num(error / allowed, nan=np.inf), 0)
        worst = np.unravel_index(excess.argmax(), excess.shape)
        place = [int(i) for i in worst]
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} elements are off (rows {np.unique(np.nonzero(bad)[0])}); the worst is "
            f"{name}{place}: {got[worst]:.9g} instead of {want[worst]:.9g}, "
            f"{error[worst]:.3g} away, {excess[worst]:.3g} times what is allowed"
        )
