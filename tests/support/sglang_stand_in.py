"""What SGLang's Triton backend does at a verify, on numpy arrays: the part around the kernel that the plugin meets.

Signatures and the way the kernel is called were copied from the sources of four releases; arithmetic is numpy's, in the
stock manner: the prefix from the pool, the drafts from activations.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

import nbverify as nv
from nbverify.integrations import sglang_takeover
from support.batches import HALF_ULP, NUMPY_DTYPE

VERSIONS = ("0.5.9", "0.5.12.post1", "0.5.16", "0.5.23")
GOLDEN = {page: json.loads((Path(__file__).parent / f"sglang_golden_page{page}.json").read_text()) for page in (1, 4)}


# ---- the stock kernel's signature, by version; ``calls`` notes what came


def stock_kernels(calls: list) -> dict:
    # fmt: off
    def v9(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
           is_causal, mask_indptr, max_len_extend, sm_scale=None, logit_cap=0.0, skip_prefix_custom_mask=True,
           sliding_window_size=-1, sinks=None, window_kv_offsets=None, xai_temperature_len=-1):
        calls.append(locals())
        verify(calls[-1])

    def v12(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
            is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0,
            skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, window_kv_offsets=None,
            xai_temperature_len=-1):
        calls.append(locals())
        verify(calls[-1])

    def v16(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
            is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0,
            skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, window_kv_offsets=None,
            xai_temperature_len=-1, lse_extend=None, skip_prefix=False, skip_extend=False, page_size: int = 1,
            score_mod=None, aux_tensors=None):
        calls.append(locals())
        verify(calls[-1])

    def v23(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
            is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0,
            skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, window_kv_offsets=None,
            xai_temperature_len=-1, lse_extend=None, skip_prefix=False, skip_extend=False, page_size: int = 1,
            score_mod=None, aux_tensors=None, extend_seq_lens_cpu=None, identity_kv_indices: bool = False):
        calls.append(locals())
        verify(calls[-1])
    # fmt: on

    return dict(zip(VERSIONS, (v9, v12, v16, v23), strict=True))


def verify(a: dict) -> None:
    """The stock kernel with a mask, in float64; without one it is not computed, only noted."""
    if a["custom_mask"] is None:
        return
    q, out = a["q_extend"].astype(np.float64), a["o_extend"]
    group = q.shape[1] // a["k_extend"].shape[1]
    for b in range(len(a["qo_indptr"]) - 1):
        (q0, q1), (p0, p1) = a["qo_indptr"][b : b + 2], a["kv_indptr"][b : b + 2]
        nodes, prefix = int(q1 - q0), int(p1 - p0)
        slots = a["kv_indices"][p0:p1]
        k = np.concatenate([a["k_buffer"][slots].astype(np.float64) * a.get("k_scale", 1.0), a["k_extend"][q0:q1]])
        v = np.concatenate([a["v_buffer"][slots].astype(np.float64) * a.get("v_scale", 1.0), a["v_extend"][q0:q1]])
        start = int(a["mask_indptr"][b])
        sees = np.asarray(a["custom_mask"][start : start + nodes * (prefix + nodes)]).reshape(nodes, -1) != 0
        sees = np.where(np.arange(prefix + nodes) < prefix, True, sees)
        scores = np.einsum("qhd,khd->hqk", q[q0:q1], np.repeat(k, group, 1)) * a["sm_scale"]
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[q0:q1] = np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, 1)).astype(out.dtype)


# ---- the backend around it


class Mode:
    """Of a forward."""

    def __init__(self, is_verify: bool):
        self._is_verify = is_verify

    def is_target_verify(self) -> bool:
        return self._is_verify


VERIFY, EXTEND = Mode(True), Mode(False)


class Pool:
    """One layer or more; MLA has one array a layer, others two."""

    def __init__(self, layers, num_slots, kv_heads, dim_qk, dim_v, dtype, *, is_mla):
        make = lambda dim: [np.full((num_slots, kv_heads, dim), np.nan).astype(dtype) for _ in range(layers)]  # noqa: E731
        self.k = make(dim_qk)
        self.v = [k[..., :dim_v] for k in self.k] if is_mla else make(dim_v)
        self.is_mla = is_mla

    def store(self, layer, loc, k, v):
        scale_k, scale_v = layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
        is_scaled = self.is_mla or self.k[layer.layer_id].dtype == NUMPY_DTYPE["float8_e4m3fn"]
        self.k[layer.layer_id][loc] = k.astype(np.float32) / (scale_k if is_scaled else 1.0)
        if not self.is_mla:
            self.v[layer.layer_id][loc] = v.astype(np.float32) / (scale_v if is_scaled else 1.0)


def layer_of(q_heads, dim_qk, dim_v, layer_id=0, scaling=0.2, k_scale=None, v_scale=None, **others):
    fields = {"sliding_window_size": -1, "logit_cap": 0.0, "xai_temperature_len": -1} | others
    return SimpleNamespace(
        tp_q_head_num=q_heads, qk_head_dim=dim_qk, v_head_dim=dim_v, layer_id=layer_id, scaling=scaling,
        k_scale=k_scale, v_scale=v_scale, k_scale_float=k_scale, v_scale_float=v_scale, **fields,
    )  # fmt: skip


class TritonAttnBackend:
    """The stock backend's attributes and flow, of one version."""

    def __init__(self, version: str, pool: Pool):
        self.version, self.pool, self.stock_calls = version, pool, []
        self.extend_attention_fwd = stock_kernels(self.stock_calls)[version]
        self.forward_metadata = None
        self.kernel_options: dict = {}  # what a model would add to the kernel's call

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = np.full((len(q), layer.tp_q_head_num * layer.v_head_dim), np.nan).astype(q.dtype)
        if k is None:
            k, v = (p[layer.layer_id][forward_batch.out_cache_loc[: len(q)]] for p in (self.pool.k, self.pool.v))
        elif save_kv_cache:
            self.pool.store(layer, forward_batch.out_cache_loc[: len(q)], k, v)
        m = self.forward_metadata
        has_scales = layer.k_scale is not None and layer.v_scale is not None
        scales = (layer.k_scale_float, layer.v_scale_float) if has_scales else (1.0, 1.0)
        options = dict(
            logit_cap=layer.logit_cap, sliding_window_size=layer.sliding_window_size, sinks=sinks,
            window_kv_offsets=None, xai_temperature_len=layer.xai_temperature_len,
        )  # fmt: skip
        if self.version in ("0.5.16", "0.5.23"):
            options |= dict(page_size=1, score_mod=None, aux_tensors=None)
        if self.version == "0.5.23":
            options |= dict(extend_seq_lens_cpu=None)
        self.extend_attention_fwd(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            np.ascontiguousarray(k),
            np.ascontiguousarray(v),
            out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim),
            self.pool.k[layer.layer_id],
            self.pool.v[layer.layer_id],
            m.qo_indptr,
            m.kv_indptr,
            m.kv_indices,
            m.custom_mask,
            True,
            m.mask_indptr,
            m.max_extend_len,
            *(() if self.version == "0.5.9" else scales),
            layer.scaling,
            **(options | self.kernel_options),
        )
        return out


class EmulatorPlace:
    """Numpy arrays, and plans in the emulator: of the plain kernel unless told otherwise, which is much quicker there.

    The adapter does not know which kernel runs; that it asks for the tensor-core one is tested where the spec is made.
    """

    def __init__(self, kernel="simt"):
        self.kernel, self.capturing = kernel, False

    def make_plan(self, spec, q):
        assert spec.kernel == "mma", "all shapes here have widths that it serves"
        return nv.VerifyPlan(replace(spec, kernel=self.kernel), device=nv.Emulator(blocks=1))

    def stream_of(self, q):
        return None

    def is_capturing(self):
        return self.capturing

    def opaque(self, function):
        return function

    def arange(self, count, like):
        return np.arange(count)

    def zeros(self, count, dtype, like):
        return np.zeros(count, dtype)

    def lower_triangle(self, nodes, like):
        return np.tri(nodes, dtype=like.dtype)


def runner_of(requests=4, context=36, device="cpu", **others):
    table = np.zeros((requests + 1, context), np.int32)
    pool = SimpleNamespace(size=requests, req_to_token=table)
    return SimpleNamespace(req_to_token_pool=pool, device=device, **others)


def taken_over(backend, *, place=None, lines=None, **runner):
    """The backend with its verify taken over; what is said goes to ``lines``."""
    lines = [] if lines is None else lines
    backend.nbverify = sglang_takeover.take_over(
        backend, runner_of(**runner), place=place or EmulatorPlace(), say=lines.append
    )
    return backend


# ---- golden metadata, recorded from SGLang 0.5.23: 3 requests, padded to 4 in graphs


def metadata(page: int, which: str) -> SimpleNamespace:
    """``eager``, ``capture`` or ``replay``: arrays of the recorded types and sizes; past what counts, what hurts."""
    recorded = GOLDEN[page][which]
    made = {"max_extend_len": recorded["max_extend_len"]}
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr"):
        entry = recorded[name]
        dtype = np.dtype(entry["dtype"].removeprefix("torch."))
        stale = {"kv_indices": 1 << 40, "custom_mask": 1}.get(name, -1)
        array = np.full(entry["shape"], stale).astype(dtype)
        array[: len(entry["live"])] = entry["live"]
        made[name] = array
    return SimpleNamespace(**made)


def out_cache_loc(page: int, padded: int = 0) -> np.ndarray:
    """Slots of the 12 drafts, and slot 0 for each padded row."""
    return np.array(GOLDEN[page]["out_cache_loc"] + [0] * padded, np.int64)


def forward_batch(loc, mode=VERIFY, **others):
    return SimpleNamespace(forward_mode=mode, out_cache_loc=loc, **others)


def activations(rng, rows, q_heads, kv_heads, dim_qk, dim_v, dtype, *, is_mla):
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    q, k = normal(rows, q_heads * dim_qk), normal(rows, kv_heads, dim_qk)
    return q, k, k[..., :dim_v] if is_mla else normal(rows, kv_heads, dim_v)


def fill(rng, pool: Pool, slots) -> None:
    """The prefix keys of every layer."""
    for k, v in zip(pool.k, pool.v, strict=True):
        k[slots] = rng.standard_normal((len(slots), *k.shape[1:])).astype(np.float32)
        if not pool.is_mla:
            v[slots] = rng.standard_normal((len(slots), *v.shape[1:])).astype(np.float32)


def assert_same_as_stock(got, want, dtype, *, draft_error=0.0):
    """Per element.  Both round the output once, and the kernel rounds its weights: of values of size v, sums of at most
    a dozen keys, each weight off by half an ulp, so 2 v ulp; float32 sums are far below.  ``draft_error``: of drafts
    that are read from an fp8 pool after rounding."""
    assert np.isfinite(got.astype(np.float64)).all()
    largest = np.abs(want.astype(np.float64)).max()
    bound = 4 * HALF_ULP[dtype] * max(largest, 1.0) * (1 + draft_error) + draft_error
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=bound)


BF16 = np.dtype(ml_dtypes.bfloat16)
