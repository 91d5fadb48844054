"""FlashInfer at page size 1: its MLA kernel in two builds, and its prefill kernel with a custom mask.

They are compiled when first used (nvcc, some 20 s each), for this GPU alone, into our cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import Peer, TorchProblem, Unavailable, scratch

LATENT, ROPE = 512, 64  # the widths the MLA kernel is made for
WORKSPACE_BYTES = 256 << 20


def _flashinfer() -> Any:
    """The module; where it compiles to, and for what, is said before it is imported."""
    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(scratch("flashinfer")))
    import flashinfer

    return flashinfer


def _workspace(problem: TorchProblem) -> Any:
    return problem.torch.empty(WORKSPACE_BYTES, dtype=problem.torch.uint8, device=problem.device)


class MlaPrefix(Peer):
    """BatchMLAPagedAttentionWrapper over the prefix, with log-sum-exps: what a merge with the drafts starts from."""

    whole_tree = False
    backend = ""

    def __init__(self, folder: Path | None):
        _flashinfer()
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._wrapper = BatchMLAPagedAttentionWrapper

    def serves(self, problem: TorchProblem) -> bool:
        shape = problem.shape
        has_dims = shape.shared_kv and (shape.head_dim_qk, shape.head_dim_v) == (LATENT + ROPE, LATENT)
        return has_dims and not problem.spec.is_fp8 and min(shape.prefixes) > 0

    def prepare(self, problem: TorchProblem) -> Callable[[], Any]:
        p = problem
        wrapper = self._wrapper(_workspace(p), backend=self.backend)
        lengths = p.tensor(np.array(p.shape.prefixes, np.int32))
        wrapper.plan(
            p.qo_indptr, p.kv_indptr, p.prefix_slots.int(), lengths, p.shape.num_q_heads, LATENT, ROPE, 1, False,
            p.spec.sm_scale, p.dtype, p.dtype,
        )  # fmt: skip
        q_latent, q_rope = p.q[..., :LATENT].contiguous(), p.q[..., LATENT:].contiguous()
        latents, ropes = p.k_pool[..., :LATENT], p.k_pool[..., LATENT:]
        return lambda: wrapper.run(q_latent, q_rope, latents, ropes, return_lse=True)[0]


class MlaFa2(MlaPrefix):
    name, title, backend = "fa2", "FlashInfer fa2, prefix", "fa2"


class MlaFa3(MlaPrefix):
    name, title, backend = "fa3", "FlashInfer fa3, prefix", "fa3"

    def __init__(self, folder: Path | None):
        import torch

        if torch.cuda.get_device_capability()[0] != 9:
            raise Unavailable("wgmma is an instruction of sm_90")
        super().__init__(folder)


class MaskedPrefill(Peer):
    """BatchPrefillWithPagedKVCacheWrapper, fa2, over prefix and drafts with the tree as its mask."""

    name, title = "fa2_mask", "FlashInfer fa2, mask"

    def __init__(self, folder: Path | None):
        _flashinfer()
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper = BatchPrefillWithPagedKVCacheWrapper

    def serves(self, problem: TorchProblem) -> bool:
        shape = problem.shape
        return not shape.shared_kv and shape.head_dim_qk in (64, 128, 256) and not problem.spec.is_fp8

    def prepare(self, problem: TorchProblem) -> Callable[[], Any]:
        torch, p = problem.torch, problem
        shape = p.shape
        wrapper = self._wrapper(_workspace(p), "NHD", backend="fa2")
        lengths = [c + n for c, n in zip(shape.prefixes, shape.nodes, strict=True)]
        last_page = torch.ones(shape.requests, dtype=torch.int32, device=p.device)
        wrapper.plan(
            p.qo_indptr, p.indptr(lengths), torch.cat(p.all_slots()).int(), last_page,
            shape.num_q_heads, shape.num_kv_heads, shape.head_dim_qk, 1, head_dim_vo=shape.head_dim_v,
            custom_mask=torch.cat([mask.flatten() for mask in p.full_masks()]), sm_scale=p.spec.sm_scale,
            q_data_type=p.dtype, kv_data_type=p.dtype,
        )  # fmt: skip
        pages = (p.k_pool.unsqueeze(1), p.v_pool.unsqueeze(1))
        return lambda: wrapper.run(p.q, pages)


PEERS = (MlaFa2, MlaFa3, MaskedPrefill)
