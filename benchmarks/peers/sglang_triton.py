"""SGLang's Triton kernel for a draft tree, ``extend_attention_fwd``: out of an installed SGLang, or its files alone.

The files need a handful of names of SGLang's: switches that read as off, and what the platform is.  ``load_staged``
puts stand-ins for the modules that have them in place, so that none of SGLang's dependencies is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import Peer, TorchProblem, Unavailable

# Where the kernels lie, newest first (0.5.23, 0.5.10).
PACKAGES = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
# The kernel, and before it what it imports, as far as a version has them.
FILES = ("score_mod", "prefill_attention", "decode_attention", "extend_attention")
STAGED = "sgl"


class SglangTriton(Peer):
    name, title = "triton", "SGLang Triton"

    def __init__(self, folder: Path | None):
        if folder is not None and (folder / STAGED).is_dir():
            self._forward = load_staged(folder / STAGED)
        else:
            self._forward = load_installed()

    def serves(self, problem: TorchProblem) -> bool:
        return not problem.spec.is_fp8

    def prepare(self, problem: TorchProblem) -> Callable[[], Any]:
        torch, p = problem.torch, problem
        masks = p.full_masks()
        mask = torch.cat([mask.flatten() for mask in masks])
        mask_indptr = p.indptr([mask.numel() for mask in masks], np.int64)
        out = torch.empty(len(p.q), p.shape.num_q_heads, p.shape.head_dim_v, dtype=p.dtype, device=p.device)
        longest = max(p.shape.nodes)

        def launch() -> Any:
            self._forward(
                p.q, p.k_new, p.v_new, out, p.k_pool, p.v_pool, p.qo_indptr, p.kv_indptr, p.prefix_slots,
                mask, True, mask_indptr, longest, 1.0, 1.0, sm_scale=p.spec.sm_scale,
            )  # fmt: skip
            return out

        return launch


PEERS = (SglangTriton,)


def load_installed() -> Callable[..., Any]:
    """From an installed SGLang."""
    reasons = []
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}.extend_attention").extend_attention_fwd
        except ImportError as error:
            reasons.append(str(error))
    raise Unavailable(f"no SGLang ({reasons[0]}) and no {STAGED}/ in the folder of peers")


def load_staged(root: Path) -> Callable[..., Any]:
    """From its files under ``root``, which lie there as in the wheel."""
    import torch

    package = next((name for name in PACKAGES if (root / name.replace(".", "/")).is_dir()), None)
    if package is None:
        raise Unavailable(f"{root}: none of {', '.join(PACKAGES)} in it")

    def no(*arguments: Any, **options: Any) -> bool:
        return False

    def num_sms(*arguments: Any) -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1

    parts = package.split(".")
    for end in range(1, len(parts) + 1):
        _stand_in(".".join(parts[:end]))
    _stand_in("sglang.srt")
    _stand_in("sglang.srt.environ", envs=_Switches())
    _stand_in(
        "sglang.srt.utils", is_cuda=torch.cuda.is_available, is_hip=no, is_xpu=no, is_cpu=no,
        is_gfx95_supported=no, is_gfx1250_supported=no, get_device_core_count=num_sms,
    )  # fmt: skip
    for file in FILES:
        path = root / package.replace(".", "/") / f"{file}.py"
        if not path.exists():
            continue
        name = f"{package}.{file}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise Unavailable(f"{path}: cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[f"{package}.extend_attention"].extend_attention_fwd


class _Switches:
    """SGLang's environment switches, all off."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: False)


def _stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []  # a package, so that modules under it are looked up in sys.modules
    module.__dict__.update(members)
    sys.modules[name] = module
