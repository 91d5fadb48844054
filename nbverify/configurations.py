"""Which tiles of the tensor-core kernel ship: representative specs, and what the planner makes of them on a target.

A tile follows from the head dims, from nodes x heads of a group, and from the device (``choose_tiles``).  ``SPECS``
names a spec for each kind of tile; ``configurations(cc)`` asks the planner and leaves out what comes twice.  Nothing
here knows what the planner answers: after a change to it, the list is still the list.

Used by the gates of the compiled tests, by ``python -m benchmarks.compiled`` and by ``nbverify compile --report``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbverify.kernels.planner import choose_tiles, limits_of
from nbverify.kernels.tiles import MmaGeometry
from nbverify.spec import KV_DTYPE_FP8, VerifySpec

TARGETS = ("8.0", "9.0", "12.0")  # sm_80, sm_90a, sm_120a
KIMI_SM_SCALE = 0.144680  # presets.py says from what; runtime parameters do not change a tile
SIZES: dict[str, Any] = {"max_requests": 16, "max_kv_len": 262_144, "kernel": "mma"}


def _mla(nodes: int, **options: Any) -> VerifySpec:
    """Kimi K2.6 on 8 GPUs: 8 heads."""
    return VerifySpec.mla(8, max_nodes=nodes, sm_scale=KIMI_SM_SCALE, **{**SIZES, **options})


def _gqa(heads: int, kv_heads: int, head_dim: int, nodes: int, **options: Any) -> VerifySpec:
    return VerifySpec.gqa(heads, kv_heads, head_dim, max_nodes=nodes, sm_scale=head_dim**-0.5, **{**SIZES, **options})


# Kind -> name -> spec.  A name is the kind and the number of nodes: with the heads, it decides the rows.
SPECS: dict[str, dict[str, VerifySpec]] = {
    "mla": {f"mla-{nodes}": _mla(nodes) for nodes in (1, 4, 6, 33)},
    "mla288": {"mla288-8": _mla(8, head_dim_qk=288, head_dim_v=256)},
    "gqa64": {f"gqa64-{nodes}": _gqa(9, 3, 64, nodes) for nodes in (17, 33, 64)},
    "gqa96": {f"gqa96-{nodes}": _gqa(32, 8, 96, nodes) for nodes in (8, 33)},
    "gqa128": {f"gqa128-{nodes}": _gqa(32, 8, 128, nodes) for nodes in (1, 8, 17, 33)},
    "mha192": {f"mha192-{nodes}": _gqa(16, 16, 192, nodes, head_dim_v=128) for nodes in (8, 65)},
    "gqa256": {f"gqa256-{nodes}": _gqa(8, 4, 256, nodes) for nodes in (8, 33)},
    "mla-fp8": {f"mla-fp8-{nodes}": _mla(nodes, kv_dtype=KV_DTYPE_FP8) for nodes in (1, 4, 6, 33)},
    "gqa128-fp8": {f"gqa128-fp8-{nodes}": _gqa(32, 8, 128, nodes, kv_dtype=KV_DTYPE_FP8) for nodes in (8, 33)},
}


@dataclass(frozen=True)
class Configuration:
    """A tile, and the spec that it was chosen for."""

    kind: str
    name: str
    spec: VerifySpec
    cc: str
    tiles: MmaGeometry


def configurations(cc: str) -> list[Configuration]:
    """The tiles of a compute capability such as ``"12.0"``, each once, in the order of SPECS."""
    major, _, minor = cc.partition(".")
    limits = limits_of((int(major), int(minor)))
    found: dict[MmaGeometry, Configuration] = {}
    for kind, specs in SPECS.items():
        for name, spec in specs.items():
            tiles = choose_tiles(spec, limits)
            found.setdefault(tiles, Configuration(kind, name, spec, cc, tiles))
    return list(found.values())
