"""Tree-verify attention in numpy float64, written as the definition.

For request b with prefix length c = kv_indptr[b+1] - kv_indptr[b] and n = qo_indptr[b+1] - qo_indptr[b] nodes:

    keys of b   = [pool[kv_indices[kv_indptr[b] + j]] for j < c] ++ [pool[out_cache_loc[qo_indptr[b] + i]] for i < n]
    s[i, h, j]  = sm_scale * k_scale * dot(q[i, h], K[j, h // group])       visible j only
    out[i, h]   = softmax_j(s[i, h, :]) @ V * v_scale
    lse[i, h]   = log sum_j exp(s[i, h, j])                                 natural log

This is what the kernels are tested against, so it imports nothing of nbverify and shares no algorithm with them: loops
over requests, nodes and heads; numpy for the keys of one row.  It is slow, and meant to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LAYOUTS_WITH_BUFFER = ("full", "tree", "packed")
LAYOUTS = (*LAYOUTS_WITH_BUFFER, "causal", "none")
WORD_BITS = 32  # of the PACKED layout


def verify_attention(
    *,
    q: Any,
    k_cache: Any,
    v_cache: Any = None,
    kv_indptr: Any,
    kv_indices: Any,
    qo_indptr: Any,
    out_cache_loc: Any,
    custom_mask: Any = None,
    mask_indptr: Any = None,
    sm_scale: float,
    mask: str = "full",
    prefix_visible: bool = True,
    head_dim_v: int | None = None,
    k_scale: float = 1.0,
    v_scale: float | None = None,
    score_mod: Callable | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of every draft node over its prefix and the draft nodes it may see.

    T = query rows, B = requests, Hq and Hkv = query and KV heads, D and Dv = widths of a key and of a value.

    Parameters
    ----------
    q : [T, Hq, D]
        Real values, not raw bits: float16, float32, float64, or an ml_dtypes type (bfloat16, float8_e4m3fn).
    k_cache : [slots, Hkv, D]
        The K pool, same dtypes.  ``Hq`` is a multiple of ``Hkv``; query head h reads KV head ``h // (Hq // Hkv)``.
    v_cache : [slots, Hkv, Dv], optional
        The V pool.  None means MLA: V is ``k_cache[..., :head_dim_v]``, and ``head_dim_v`` must be given.
    kv_indptr : [B + 1]
        Prefix sums of prefix lengths.  Length 0: no prefix.  Length < 0: a padding request, its rows see nothing.
    kv_indices : [>= kv_indptr[B]]
        Slots of the prefixes.
    qo_indptr : [B + 1]
        Prefix sums of node counts.  A request of n <= 0 nodes writes nothing.
    out_cache_loc : [>= T]
        Slot of each draft node, in node order.
    custom_mask, mask_indptr
        Flat mask buffer and [B + 1] starts of the requests' blocks in it (only starts are read), see ``mask``.
        A position outside the buffer, before its start or past its end, counts as hidden.
    sm_scale : float
        Factor of the products.
    mask : str
        Layout of a request's block; row = the node that looks, column = the key:
        "full" nonzero = visible, ``[n, c + n]``; "tree" the draft columns only, ``[n, n]``; "packed" tree as bits,
        ``ceil(n / 32)`` 32-bit words a row, node j is bit ``j % 32`` of word ``j // 32``.
        Without a buffer: "causal" node i sees drafts 0..i; "none" every node sees every draft.
    prefix_visible : bool
        True: the whole prefix is visible, prefix bytes of "full" are not read.  False ("full" only): they count.
    k_scale, v_scale : float
        What stored K and V are multiplied by.  ``v_scale`` None: k_scale for MLA, else 1.
    score_mod : callable, optional
        ``score_mod(score, request, head, node, key) -> score`` for each visible key, after the scales, natural log;
        node counts within the request, key in [0, c + n), head is the query head.  -inf hides the key.

    Returns
    -------
    out : float64 [T, Hq, Dv]
    lse : float64 [T, Hq]
        Rows that belong to no request (from ``qo_indptr[B]`` on) are NaN: nothing defines them.

    Notes
    -----
    A hidden key has exactly zero weight, whatever its K and V hold: it is never read.  A score of -inf is a hidden key
    as well, wherever it came from.  A row that sees nothing gives out = 0 and lse = -inf.  A visible score that is NaN
    or +inf makes its own row (this node and head) NaN, out and lse.
    """
    q, k_cache = _real("q", q), _real("k_cache", k_cache)
    is_mla = v_cache is None
    if is_mla:
        if head_dim_v is None:
            raise ValueError(
                "head_dim_v: expected an int without v_cache (MLA: V is k_cache[..., :head_dim_v]), got None"
            )
        if v_scale is not None and v_scale != k_scale:
            raise ValueError(f"v_scale: expected None or k_scale={k_scale} without v_cache, got {v_scale}")
        v_cache = k_cache[..., :head_dim_v]
        v_scale = k_scale
    else:
        v_cache = _real("v_cache", v_cache)
        v_scale = 1.0 if v_scale is None else v_scale
    if mask not in LAYOUTS:
        raise ValueError(f"mask: expected one of {LAYOUTS}, got {mask!r}")
    if mask in LAYOUTS_WITH_BUFFER and (custom_mask is None or mask_indptr is None):
        raise ValueError(f"custom_mask, mask_indptr: expected both with mask={mask!r}, got None")
    if not prefix_visible and mask != "full":
        raise ValueError(f"prefix_visible: expected True with mask={mask!r}, got False")

    num_tokens, num_q_heads, _ = q.shape
    num_slots, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    kv_starts, qo_starts = _integers(kv_indptr), _integers(qo_indptr)
    kv_indices, out_cache_loc = np.asarray(kv_indices, np.int64), np.asarray(out_cache_loc, np.int64)

    out = np.full((num_tokens, num_q_heads, v_cache.shape[-1]), np.nan)
    lse = np.full((num_tokens, num_q_heads), np.nan)

    for request in range(len(kv_starts) - 1):
        prefix_len = kv_starts[request + 1] - kv_starts[request]
        num_nodes = qo_starts[request + 1] - qo_starts[request]
        for node in range(num_nodes):
            row = qo_starts[request] + node
            out[row], lse[row] = 0.0, -np.inf
            if prefix_len < 0:
                continue

            # Which keys this node sees, as positions in [0, c + n), and the slots they lie in.
            visible = np.ones(prefix_len + num_nodes, bool)
            if mask in LAYOUTS_WITH_BUFFER:
                start = int(mask_indptr[request])
                first = prefix_len if prefix_visible else 0
                visible = _visible_from_buffer(custom_mask, start, node, prefix_len, num_nodes, mask, first)
            elif mask == "causal":
                visible[prefix_len + node + 1 :] = False
            if prefix_visible:
                visible[:prefix_len] = True
            keys = np.flatnonzero(visible)
            from_prefix = keys[keys < prefix_len]
            from_draft = keys[keys >= prefix_len] - prefix_len
            slots = np.concatenate(
                [kv_indices[kv_starts[request] + from_prefix], out_cache_loc[qo_starts[request] + from_draft]]
            )
            if np.any((slots < 0) | (slots >= num_slots)):
                raise IndexError(f"request {request}, node {node}: expected slots in [0, {num_slots}), got {slots}")

            for kv_head in range(num_kv_heads):
                k = k_cache[slots, kv_head].astype(np.float64)  # [visible keys, D]
                v = v_cache[slots, kv_head].astype(np.float64)  # [visible keys, Dv]
                for head in range(kv_head * group, (kv_head + 1) * group):
                    with np.errstate(all="ignore"):  # NaN and inf in visible keys are legal
                        scores = sm_scale * k_scale * (k @ q[row, head].astype(np.float64))
                        if score_mod is not None:
                            scores = np.array(
                                [
                                    score_mod(s, request, head, node, int(key))
                                    for s, key in zip(scores, keys, strict=True)
                                ],
                                np.float64,
                            )
                        out[row, head], lse[row, head] = _attend(scores, v)
                        out[row, head] *= v_scale
    return out, lse


def _attend(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """(softmax(scores) @ v, log sum exp(scores)) of one row: scores [keys], v [keys, Dv]."""
    seen = scores != -np.inf  # zero weight: dropped, so that an inf or NaN in its V stays out
    scores, v = scores[seen], v[seen]
    if len(scores) == 0:
        return np.zeros(v.shape[-1]), -np.inf
    largest = scores.max()
    weights = np.exp(scores - largest)
    return weights @ v / weights.sum(), largest + np.log(weights.sum())


def _visible_from_buffer(
    custom_mask: Any, start: int, node: int, prefix_len: int, num_nodes: int, mask: str, first: int
) -> np.ndarray:
    """Row ``node`` of a request's mask block as bool [c + n]; True before ``first``, and where the layout has none."""
    buffer = np.asarray(custom_mask).reshape(-1)
    visible = np.ones(prefix_len + num_nodes, bool)
    columns = np.arange(num_nodes)
    if mask == "full":
        row_start = start + node * (prefix_len + num_nodes)
        visible[first:] = _read(buffer, row_start + np.arange(first, prefix_len + num_nodes)) != 0
    elif mask == "tree":
        visible[prefix_len:] = _read(buffer, start + node * num_nodes + columns) != 0
    else:
        words_per_row = -(-num_nodes // WORD_BITS)
        words = _read(buffer, start + node * words_per_row + columns // WORD_BITS)
        visible[prefix_len:] = (words >> (columns % WORD_BITS)) & 1 != 0
    return visible


def _read(buffer: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``buffer[positions]`` as int64, 0 past the end of the buffer, and 0 for a row that begins before it."""
    values = np.zeros(len(positions), np.int64)
    inside = (positions[:1] >= 0) & (positions < len(buffer))
    values[inside] = buffer[positions[inside]]
    return values


def _real(name: str, array: Any) -> np.ndarray:
    """``array`` as numpy; integers are refused, because they are raw bits that would be taken for values."""
    array = np.asarray(array)
    if array.dtype.kind in "iub":
        raise TypeError(
            f"{name}: expected real values (raw bits: view them as their ml_dtypes type), got {array.dtype}"
        )
    return array


def _integers(indptr: Any) -> list[int]:
    """Python integers: they do not overflow."""
    return [int(value) for value in np.asarray(indptr)]


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """Bool [n, n]: node i sees itself and all its ancestors.

    ``parents[i]`` is the index of i's parent, anything outside [0, n) for a root.  Nodes may be listed in any order; a
    cycle, which no tree has, ends where it closes.
    """
    num_nodes = len(parents)
    tree = np.zeros((num_nodes, num_nodes), bool)
    for node in range(num_nodes):
        ancestor = node
        while 0 <= ancestor < num_nodes and not tree[node, ancestor]:
            tree[node, ancestor] = True
            ancestor = int(parents[ancestor])
    return tree


def full_mask(prefix_len: int, tree: np.ndarray) -> np.ndarray:
    """Bool [n, prefix_len + n]: the FULL form of ``tree`` [n, n], the whole prefix visible."""
    return np.concatenate([np.ones((len(tree), prefix_len), bool), np.asarray(tree, bool)], axis=1)


def pack_mask(tree: np.ndarray) -> np.ndarray:
    """Uint32 [n, ceil(n / 32)]: the PACKED form of ``tree`` [n, n]; bits from n on are 0."""
    num_nodes = len(tree)
    words = np.zeros((num_nodes, -(-num_nodes // WORD_BITS)), np.uint32)
    for node in range(num_nodes):
        bit = np.uint32(1 << (node % WORD_BITS))
        words[:, node // WORD_BITS] |= np.where(tree[:, node], bit, np.uint32(0))
    return words
