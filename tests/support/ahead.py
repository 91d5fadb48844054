"""Compile the kernels of many specs at once, into the cache on disk: one takes seconds, and a GPU machine has cores."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import nbverify as nv
from nbverify import compile
from nbverify.ahead import run_in_processes
from nbverify.kernels.planner import geometry_of, limits_of


class Job(NamedTuple):
    """A kernel, and the device that it is for."""

    spec: nv.VerifySpec
    cc: tuple[int, int]
    shared_bytes: int
    debug: bool = False

    @property
    def cache_file(self) -> Path:
        geometry = geometry_of(self.spec, limits_of(self.cc, self.shared_bytes))
        return compile.cache_file(self.spec, compile.target_of(self.cc), geometry, debug=self.debug)

    def run(self) -> None:
        geometry = geometry_of(self.spec, limits_of(self.cc, self.shared_bytes))
        compile.compile_spec(self.spec, compile.target_of(self.cc), geometry, debug=self.debug)


def compile_ahead(jobs: Iterable[Job]) -> int:
    """Compile what the cache has not, in processes of their own.

    Of several test processes one does it and the others wait: each would compile the same.  A failure is left to the
    test that needs the kernel.
    """
    compile.cache_directory().mkdir(parents=True, exist_ok=True)
    with open(compile.cache_directory() / "ahead.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [job for path, job in {job.cache_file: job for job in jobs}.items() if not path.exists()]
        if not missing:
            return 0
        missing.sort(key=lambda job: job.spec.kernel != "mma")  # what takes longest comes first
        run_in_processes([job.run for job in missing])
    return len(missing)
