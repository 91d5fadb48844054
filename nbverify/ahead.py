"""Compile many kernels at once, into the cache on disk: one takes seconds, and a GPU machine has cores."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from nbverify import compile, launch
from nbverify.errors import NbverifyError
from nbverify.kernels.planner import geometry_of, limits_of
from nbverify.spec import VerifySpec
from nbverify.stages import Stage

Progress = Callable[[str], None]
MOST_WORKERS = 32  # a worker takes half a gigabyte


def compile_ahead(
    wanted: Iterable[VerifySpec | Stage], *, device: int | None = None, progress: Progress | None = None
) -> int:
    """Fill the cache with the kernels of specs and stages that it does not have; how many were missing.

    Parameters
    ----------
    wanted
        Specs of verify plans, and stages, such as ``nbverify.tree.step.stages_of_step`` names.  A ``score_mod`` must
        be a function of a module, since other processes compile.
    device
        Ordinal of the GPU that they are for; None: the current one.
    progress
        Called with a line of text after each kernel.

    What does not compile here is left to the plan that needs it, whose error is the one to see.
    """
    gpu = launch.Device(device)
    target = compile.target_of(compile.override_cc() or gpu.cc)
    limits = limits_of((target.major, target.minor), gpu.shared_limit)
    jobs: dict[Path, Callable[[], object]] = {}
    for one in wanted:
        if isinstance(one, Stage):
            jobs[compile.cache_file_of_stage(one, target)] = partial(compile.compile_stage, one, target)
            continue
        try:
            geometry = geometry_of(one, limits)
        except NbverifyError:
            continue
        jobs[compile.cache_file(one, target, geometry)] = partial(compile.compile_spec, one, target, geometry)
    missing = [job for path, job in jobs.items() if not path.exists()]
    run_in_processes(missing, progress)
    return len(missing)


def run_in_processes(jobs: Sequence[Callable[[], object]], progress: Progress | None = None) -> None:
    """Run jobs that can be pickled, as many at a time as this process has cores; what they return or raise is dropped.

    A single one is run here: a process for it would only take longer.
    """
    if len(jobs) == 1:
        with contextlib.suppress(Exception):
            jobs[0]()
        return
    if not jobs:
        return
    workers = min(len(jobs), _num_cores(), MOST_WORKERS)
    context = multiprocessing.get_context("spawn")  # a forked child could not use CUDA, nor numba's threads
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures, made = [pool.submit(_run, job) for job in jobs], 0
        for future in as_completed(futures):
            made += future.exception() is None
            if progress is not None:
                progress(f"compiled {made} of {len(futures)} kernels")


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(job: Callable[[], object]) -> None:
    """In the child; what a job returns does not travel back."""
    job()
