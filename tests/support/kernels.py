"""On which kernels a test runs: the one place that knows what each of them serves.

@parametrize_specs(SPECS)       a case for every spec and every kernel that serves it: ``name-mma``, ``name-simt``
@on_each_kernel(SPEC)           the same for one spec: ``mma``, ``simt``
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

import nbverify as nv
from nbverify import compile
from nbverify.kernels.geometry import Geometry
from nbverify.kernels.planner import geometry_of, limits_of
from nbverify.spec import KERNELS

H200 = (9, 0)


def kernels_of(spec: nv.VerifySpec) -> tuple[str, ...]:
    """The kernels that serve a spec, whatever its own ``kernel`` says."""
    return tuple(kernel for kernel in KERNELS if _serves(kernel, spec))


def _serves(kernel: str, spec: nv.VerifySpec) -> bool:
    """Of head widths; that what is refused is refused rightly is tested in tests/host/test_tiles.py."""
    try:
        geometry_for(replace(spec, kernel=kernel))
    except nv.ArgumentError:
        return False
    return True


def on_kernels(spec: nv.VerifySpec) -> list[nv.VerifySpec]:
    """The spec, once for each kernel that serves it."""
    return [replace(spec, kernel=kernel) for kernel in kernels_of(spec)]


def parametrize_specs(
    specs: Mapping[str, nv.VerifySpec],
    *,
    slow: Collection[str] = (),
    slow_simt: Collection[str] = (),
    rare: Collection[str] = (),
) -> pytest.MarkDecorator:
    """A parameter ``spec``: every spec on every kernel that serves it.

    ``slow``: names whose case on mma is left to ``make test-all`` and to the GPU (``"*"``: all of them), because the
    emulator takes long and the other cases walk the same lines.  ``slow_simt``: the same of simt; ``rare``: of both.
    """
    cases = []
    for name, given in specs.items():
        for spec in on_kernels(given):
            left_out = (*rare, *(slow if spec.kernel == "mma" else slow_simt))
            is_slow = name in left_out or "*" in left_out
            marks = (pytest.mark.slow,) if is_slow else ()
            cases.append(pytest.param(spec, id=f"{name}-{spec.kernel}" if name else spec.kernel, marks=marks))
    return pytest.mark.parametrize("spec", cases)


def on_each_kernel(spec: nv.VerifySpec, *, slow: bool = False) -> pytest.MarkDecorator:
    """A parameter ``spec``: this one on every kernel that serves it."""
    return parametrize_specs({"": spec}, slow=("*",) if slow else ())


def geometry_for(spec: nv.VerifySpec, cc: tuple[int, int] = H200, shared_bytes: int | None = None) -> Geometry:
    """Tiles of a spec on a device of this capability."""
    return geometry_of(spec, limits_of(cc, shared_bytes))


def compile_for(spec: nv.VerifySpec, target: compile.Target, **options) -> tuple[compile.CompiledKernel, ...]:
    """``compile_spec`` with the tiles of the target's own capability."""
    return compile.compile_spec(spec, target, geometry_for(spec, (target.major, target.minor)), **options)
