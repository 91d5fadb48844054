"""Named specs of real models, with the source of every number.

    spec = nbverify.presets.preset("kimi-k2.6-tp8")
    spec = dataclasses.replace(spec, max_requests=1)                      sizes and dtypes are yours to change
    spec = dataclasses.replace(spec, dtype="float16", kv_dtype=None)      None: the cache's dtype follows

A spec that is made has its ``kv_dtype`` filled in, so a new ``dtype`` alone would leave the cache with the old one,
which is refused.

``max_requests`` and ``max_nodes`` are choices, not facts of a model: 16 requests of 33 nodes (a tree of 32 drafts and
its root) everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nbverify.errors import ArgumentError
from nbverify.spec import VerifySpec

MAX_REQUESTS = 16
MAX_NODES = 33

# DeepSeek-V3 and Kimi K2 attend in the absorbed form of MLA, 576 wide; the scale is still that of the 192-wide heads
# (128 without, 64 with rotary embedding) that the model was trained with.
MLA_TRAINED_HEAD_DIM = 192


def yarn_sm_scale(head_dim: int, factor: float, mscale_all_dim: float) -> float:
    """``head_dim ** -0.5 * mscale ** 2`` with ``mscale = 0.1 * mscale_all_dim * ln(factor) + 1``.

    YaRN as DeepSeek-V3's modelling code has it: a context stretched by ``factor`` sharpens q and k by ``mscale`` each.
    """
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1.0
    return head_dim**-0.5 * mscale**2


def kimi_k26_tp8() -> VerifySpec:
    """Kimi K2.6 on 8 GPUs, bf16: 64 heads / 8.

    Text model of Kimi K2.5 / K2.6: 64 heads, kv_lora 512, rope 64, positions 262,144; YaRN factor 64 with
    mscale_all_dim 1 gives mscale 1.41589 and sm_scale 0.144680 (SGLang ``deepseek_v2.py``, and the K2 ``config.json``).
    """
    return _mla(8, max_kv_len=262_144, yarn_factor=64.0)


def kimi_k26_tp4() -> VerifySpec:
    """Kimi K2.6 on 4 GPUs: 64 heads / 4, else as :func:`kimi_k26_tp8`."""
    return _mla(16, max_kv_len=262_144, yarn_factor=64.0)


def deepseek_v3_tp8() -> VerifySpec:
    """DeepSeek-V3 on 8 GPUs: 128 heads / 8.

    Its ``config.json``: 128 heads, kv_lora 512, rope 64, positions 163,840; YaRN factor 40, mscale_all_dim 1.0:
    sm_scale = 192^-0.5 * (0.1 * ln 40 + 1)^2 = 0.135234.
    """
    return _mla(16, max_kv_len=163_840, yarn_factor=40.0)


def qwen3_8b() -> VerifySpec:
    """Qwen3-8B on one GPU: 32 query and 8 KV heads of 128, positions 40,960 (its ``config.json``)."""
    return _gqa(32, 8, 128, max_kv_len=40_960)


def smollm2_135m() -> VerifySpec:
    """SmolLM2-135M: 9 query and 3 KV heads of 64, positions 8,192 (its ``config.json``); the fixture's model."""
    return _gqa(9, 3, 64, max_kv_len=8_192)


PRESETS: dict[str, Callable[[], VerifySpec]] = {
    "kimi-k2.6-tp8": kimi_k26_tp8,
    "kimi-k2.6-tp4": kimi_k26_tp4,
    "deepseek-v3-tp8": deepseek_v3_tp8,
    "qwen3-8b": qwen3_8b,
    "smollm2-135m": smollm2_135m,
}


def preset(name: str) -> VerifySpec:
    """The spec of that name.  Raises ArgumentError, with the names there are."""
    if name not in PRESETS:
        raise ArgumentError("preset", f"one of {tuple(PRESETS)}", repr(name))
    return PRESETS[name]()


def _mla(num_q_heads: int, *, max_kv_len: int, yarn_factor: float) -> VerifySpec:
    return VerifySpec.mla(
        num_q_heads,
        max_requests=MAX_REQUESTS,
        max_nodes=MAX_NODES,
        max_kv_len=max_kv_len,
        sm_scale=yarn_sm_scale(MLA_TRAINED_HEAD_DIM, yarn_factor, 1.0),
    )


def _gqa(num_q_heads: int, num_kv_heads: int, head_dim: int, *, max_kv_len: int) -> VerifySpec:
    return VerifySpec.gqa(
        num_q_heads,
        num_kv_heads,
        head_dim,
        max_requests=MAX_REQUESTS,
        max_nodes=MAX_NODES,
        max_kv_len=max_kv_len,
        sm_scale=head_dim**-0.5,
    )
