"""Compile the kernels of many specs at once, into the cache on disk: one takes seconds, and a GPU machine has cores."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import nbverify as nv
from nbverify import compile
from nbverify.kernels.tiles import DeviceLimits, geometry_of, limits_of
from support.kernels import on_kernels


def specs_in(value: object) -> list[nv.VerifySpec]:
    """The specs in a module's names, and in what its tests are parametrized with."""
    if isinstance(value, nv.VerifySpec):
        return [value]
    if isinstance(value, ModuleType):
        names = vars(value).values()
        marks = [mark.args for function in names for mark in getattr(function, "pytestmark", ())]
        return [spec for item in (*names, *marks) if not isinstance(item, ModuleType) for spec in specs_in(item)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) or type(value).__name__ == "dict_values":
        return [spec for item in value for spec in specs_in(item)]
    return []


def _cache_file(spec: nv.VerifySpec, cc: tuple, limits: DeviceLimits) -> Path:
    geometry = geometry_of(spec, limits)
    return compile.cache_directory() / f"{compile._cache_key(spec, compile.target_of(cc), geometry, False)}.json"


def _compile(spec: nv.VerifySpec, cc: tuple, limits: DeviceLimits) -> None:
    compile.compile_spec(spec, compile.target_of(cc), geometry_of(spec, limits))


def compile_ahead(specs: Iterable[nv.VerifySpec], cc: tuple, shared_bytes: int) -> int:
    """Compile, for every kernel that serves them, what the cache has not, in processes of their own.

    Of several test processes one does it and the others wait: each would compile the same.  A failure is left to the
    test that needs the kernel.
    """
    limits = limits_of(cc, shared_bytes)
    compile.cache_directory().mkdir(parents=True, exist_ok=True)
    with open(compile.cache_directory() / "ahead.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = {_cache_file(each, cc, limits): each for spec in specs for each in on_kernels(spec)}
        missing = [spec for path, spec in wanted.items() if not path.exists()]
        if not missing:
            return 0
        missing.sort(key=lambda spec: spec.kernel != "mma")  # what takes longest comes first
        workers = min(len(missing), max(1, (os.cpu_count() or 1) - 1), 16)
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for done in [pool.submit(_compile, spec, cc, limits) for spec in missing]:
                done.exception()
    return len(missing)
