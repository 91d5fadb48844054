"""Compile the kernels of many specs at once, into the cache on disk: one takes seconds, and a GPU machine has cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import nbverify as nv


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


def _compile(spec: nv.VerifySpec, cc: tuple) -> None:
    from nbverify.compile import compile_spec, target_of

    compile_spec(spec, target_of(cc))


def compile_ahead(specs: Iterable[nv.VerifySpec], cc: tuple) -> int:
    """Compile each distinct kernel once, in processes of their own.  A failure is left to the test that needs it."""
    distinct = {(spec.compile_key, spec.score_mod): spec for spec in specs}
    workers = min(len(distinct), max(1, (os.cpu_count() or 1) - 1), 16)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_compile, spec, cc) for spec in distinct.values()]:
            done.exception()
    return len(distinct)
