"""nbverify: tree-verify attention for speculative decoding, in Python that is read, edited and captured in a graph.

    spec = nbverify.VerifySpec.mla(num_q_heads=8, ...)      what to compute, and the limits
    plan = nbverify.VerifyPlan(spec)                        compile, allocate: once
    bound = plan.bind(q=q, k_cache=kv, ...)                 check, pack: once per set of buffers
    bound.launch(stream)                                    one driver call

Importing this package needs no GPU, no driver and no compiler; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbverify import reference
    from nbverify.emulator import Emulator
    from nbverify.errors import (
        ArgumentError,
        CompileError,
        DeadlockError,
        DeviceInputError,
        DriverError,
        MemoryAccessError,
        NbverifyError,
    )
    from nbverify.plan import BoundVerify, PlanReport, VerifyPlan, verify_attention
    from nbverify.spec import Mask, VerifySpec

__version__ = "0.1.0"

_HOME = {
    "ArgumentError": "errors",
    "BoundVerify": "plan",
    "CompileError": "errors",
    "DeadlockError": "errors",
    "DeviceInputError": "errors",
    "DriverError": "errors",
    "Emulator": "emulator",
    "Mask": "spec",
    "MemoryAccessError": "errors",
    "NbverifyError": "errors",
    "PlanReport": "plan",
    "VerifyPlan": "plan",
    "VerifySpec": "spec",
    "reference": "",
    "verify_attention": "plan",
}

__all__ = [
    "ArgumentError",
    "BoundVerify",
    "CompileError",
    "DeadlockError",
    "DeviceInputError",
    "DriverError",
    "Emulator",
    "Mask",
    "MemoryAccessError",
    "NbverifyError",
    "PlanReport",
    "VerifyPlan",
    "VerifySpec",
    "reference",
    "verify_attention",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'nbverify' has no attribute {name!r}")
    home = _HOME[name]
    value = getattr(import_module(f"nbverify.{home}"), name) if home else import_module(f"nbverify.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
