"""Inputs whose results are exact in every dtype, so that no tolerance can hide a fault.

count    q = 0: every visible key weighs 1, and lse = ln(how many)
bits     q = 0 and V[slot, d] = bit d of the slot: out = how many visible slots have the bit / how many there are
needle   K[key j] = 16 e_j, q = 16 e_k and sm_scale 1: scores are 256 for key k, else 0, and exp(-256) is 0 in float32,
         so out = V[key k] and lse = 256
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import nbverify as nv
from support.batches import NUMPY_DTYPE, Batch

BITS = 16
NEEDLE = 16.0
EPS = np.finfo(np.float32).eps


def visible_slots(batch: Batch) -> list[np.ndarray]:
    """The slots that each row sees, by the batch's trees (not by its mask buffer) with the whole prefix visible."""
    rows = []
    kv, qo = batch.kv_indptr.astype(int), batch.qo_indptr.astype(int)
    for b, tree in enumerate(batch.trees):
        n = qo[b + 1] - qo[b]
        prefix = batch.kv_indices[kv[b] : kv[b + 1]]
        drafts = batch.out_cache_loc[qo[b] : qo[b + 1]]
        sees = {nv.Mask.CAUSAL: np.tri(n, dtype=bool), nv.Mask.NONE: np.ones((n, n), bool)}.get(batch.spec.mask, tree)
        for node in range(n):
            rows.append(np.concatenate([prefix, drafts[sees[node]]]).astype(np.int64))
    return rows


def bit_probe(batch: Batch) -> Batch:
    """Also the count probe.  Slots that no request lists keep their NaN."""
    slots = np.concatenate([batch.kv_indices, batch.out_cache_loc]).astype(np.int64)

    def pool(cache):
        if cache is None:
            return None
        values = np.array(cache)
        values[slots] = 0
        bits = (slots[:, None] >> np.arange(BITS)) & 1
        values[slots, :, :BITS] = bits[:, None, :].astype(values.dtype)
        return values

    return replace(batch, q=np.zeros_like(batch.q), k_cache=pool(batch.k_cache), v_cache=pool(batch.v_cache))


def assert_bits(batch: Batch, result, rows=slice(None), visible=None) -> None:
    """Every (row, head) of a bit probe saw exactly these slots (their number and their bits)."""
    for row, slots in list(enumerate(visible or visible_slots(batch)))[rows]:
        if len(slots) == 0:
            assert (result.lse[row] == -np.inf).all() and (result.out[row].astype(float) == 0).all(), f"row {row}"
            continue
        count = np.float32(len(slots))
        sums = ((slots[:, None] >> np.arange(BITS)) & 1).sum(0).astype(np.float32)
        np.testing.assert_allclose(result.lse[row], np.log(len(slots)), rtol=3 * EPS, atol=EPS, err_msg=f"row {row}")
        want = np.broadcast_to((sums / count).astype(NUMPY_DTYPE[batch.spec.dtype]), (batch.spec.num_q_heads, BITS))
        np.testing.assert_array_equal(result.out[row, :, :BITS], want, err_msg=f"row {row}")
        assert (result.out[row, :, BITS:].astype(float) == 0).all(), f"row {row}"


def needle_probe(batch: Batch, needles) -> tuple[Batch, np.ndarray]:
    """``needles[row, head]``: the key, counted in its request, that the row must find.  Returns (batch, out).

    Needs c + n <= head_dim_qk, sm_scale 1, and needles that are visible.
    """
    assert batch.spec.sm_scale == 1
    needles = np.asarray(needles)
    num_tokens, heads, width = batch.q.shape
    kv, qo = batch.kv_indptr.astype(int), batch.qo_indptr.astype(int)
    q, k = np.zeros_like(batch.q), np.array(batch.k_cache)
    where = np.zeros((num_tokens, heads), np.int64)
    for b in range(len(kv) - 1):
        slots = np.concatenate([batch.kv_indices[kv[b] : kv[b + 1]], batch.out_cache_loc[qo[b] : qo[b + 1]]])
        assert len(slots) <= width
        k[slots] = (NEEDLE * np.eye(len(slots), width))[:, None, :].astype(k.dtype)
        for row in range(qo[b], qo[b + 1]):
            where[row] = slots[needles[row]]
            q[row, np.arange(heads), needles[row]] = NEEDLE
    batch = replace(batch, q=q, k_cache=k)
    values = k[..., : batch.spec.head_dim_v] if batch.v_cache is None else batch.v_cache
    out = values[where, np.arange(heads) // batch.spec.group]
    return batch, out.astype(NUMPY_DTYPE[batch.spec.dtype])


def assert_needles(out: np.ndarray, result) -> None:
    """What ``needle_probe`` said, bit for bit."""
    np.testing.assert_array_equal(result.out, out)
    np.testing.assert_allclose(result.lse, NEEDLE * NEEDLE, rtol=3 * EPS)
