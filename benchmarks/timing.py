"""Clocks that all benchmarks share, what a device can do at most, and the head line that a figure needs.

Device time   events around a graph replay, behind a read of 512 MB that evicts the L2 cache, leaves no dirty line in
              it, and keeps the GPU busy while the host queues the rest: so the events time the GPU and not Python.
Host time     one call at a time with a nanosecond clock.  The queue of launches is emptied, outside the clock, before
              it can fill: a full one makes every launch wait for a kernel.
Yardstick     read and copy bandwidth, measured in the same process.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbverify.compile import source_hash

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 512 << 20  # several times the largest L2
BANDWIDTH_BYTES = 4 << 30
SYNC_EVERY = 200  # calls; the driver's queue holds 1024 launches

READ_KERNEL = r"""
extern "C" __global__ void read_all(const float4* x, long long n, float* never) {
    // Four loads in flight a thread; n is a multiple of 4 * gridDim * blockDim.
    const long long step = (long long)gridDim.x * blockDim.x;
    float sum = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
        const float4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
        sum += (a.x + a.y + a.z + a.w) + (b.x + b.y + b.z + b.w) + (c.x + c.y + c.z + c.w) + (d.x + d.y + d.z + d.w);
    }
    if (sum == -1.5f) *never = sum;  // the compiler must not drop the loads; zeros never add up to this
}
"""
READ_THREADS = 512
READ_BLOCKS = 1024


@dataclass(frozen=True)
class Times:
    """Microseconds of many repeats."""

    samples_us: tuple[float, ...]

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.samples_us, q))

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def summary(self) -> dict[str, float]:
        """For the record: min, p10, p50, p90, and how many."""
        return {
            "min": round(min(self.samples_us), 3),
            "p10": round(self.quantile(0.1), 3),
            "p50": round(self.median, 3),
            "p90": round(self.quantile(0.9), 3),
            "repeats": len(self.samples_us),
        }


def host_times(call: Callable[[], object], sync: Callable[[], object], *, count: int = 2000) -> Times:
    """Each of ``count`` calls on the host's clock; ``sync`` empties the queue in between, unclocked."""
    clock = time.perf_counter_ns
    for _ in range(20):
        call()
    samples = []
    for i in range(count):
        if i % SYNC_EVERY == 0:
            sync()
        start = clock()
        call()
        samples.append((clock() - start) / 1e3)
    sync()
    return Times(tuple(samples))


class DeviceClock:
    """A stream, events on it, and the buffers that clear the cache."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._read = cupy.RawKernel(READ_KERNEL, "read_all")
        self._never = cupy.zeros(1, np.float32)
        self._flush = cupy.zeros(FLUSH_BYTES // 4, np.float32)
        cupy.cuda.Device().synchronize()

    def queue_read(self, array: Any) -> None:
        """A read of a whole float32 array, whose size is a multiple of 32 MB."""
        arguments = (array, np.int64(array.nbytes // 16), self._never)
        with self.stream:
            self._read((READ_BLOCKS,), (READ_THREADS,), arguments)

    def capture(self, launch: Callable[[Any], object]) -> Any:
        """``launch(stream)`` as an executable graph of CuPy's."""
        self.stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            launch(self.stream)
        except BaseException:
            with contextlib.suppress(Exception):
                self.stream.end_capture()  # else the stream stays in capture, and whatever uses it next fails
            raise
        return self.stream.end_capture()

    def device_times(self, queue: Callable[[Any], object], *, repeats: int = 30, warm: bool = False) -> Times:
        """``queue(stream)`` between two events, ``repeats`` times.  ``warm``: with the L2 cache as it was left."""
        event = self._cupy.cuda.Event
        pairs = [(event(), event()) for _ in range(repeats + 2)]
        for begin, end in pairs:
            if not warm:
                self.queue_read(self._flush)
            begin.record(self.stream)
            queue(self.stream)
            end.record(self.stream)
        self.stream.synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return Times(tuple(1e3 * elapsed(begin, end) for begin, end in pairs[2:]))

    def replay_times(self, graph: Any, **options: Any) -> Times:
        """Device time of a graph's replay."""
        return self.device_times(lambda stream: graph.launch(stream), **options)

    def bandwidth(self) -> dict[str, float]:
        """GB/s of reading, and of copying (bytes read plus bytes written): the best of ten."""
        array = self._cupy.zeros(BANDWIDTH_BYTES // 4, np.float32)
        half_bytes = array.nbytes // 2
        front, back = array[: array.size // 2].data, array[array.size // 2 :].data
        self._cupy.cuda.Device().synchronize()
        read = self.device_times(lambda stream: self.queue_read(array), repeats=10)
        copy = self.device_times(lambda stream: front.copy_from_device_async(back, half_bytes, stream), repeats=10)
        return {
            "read_gb_s": round(BANDWIDTH_BYTES / min(read.samples_us) / 1e3, 1),
            "copy_gb_s": round(2 * half_bytes / min(copy.samples_us) / 1e3, 1),
        }


# ---- the record


def head(seed: int, *, packages: Sequence[str] = (), commit: str | None = None) -> dict[str, Any]:
    """What a rerun needs to know.

    ``packages``: those whose versions count beside numba-cuda's and numpy's; the installed ones appear.  ``commit``:
    what to say where the sources are a copy without git.
    """
    from nbverify.launch import Device, call, driver

    device = Device(None)
    version = call("cuDriverGetVersion", driver().cuDriverGetVersion())
    return {
        "gpu": device.name,
        "sm": f"{device.cc[0]}.{device.cc[1]}",
        "sms": device.num_sms,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "numba-cuda": _version("numba-cuda"),
        "numpy": np.__version__,
        **{package: _version(package) for package in packages if _version(package) != "unknown"},
        "commit": commit or _commit(),
        "source_hash": source_hash(),
        "seed": seed,
        "date": datetime.date.today().isoformat(),
    }


def head_line(title: str, record: dict[str, Any]) -> str:
    """The head as one line."""
    return (
        f"{title}  {record['gpu']} sm_{record['sm'].replace('.', '')}  "
        f"driver {record['driver']} (CUDA {record['cuda']})  numba-cuda {record['numba-cuda']}  "
        f"commit {record['commit']}  sources {record['source_hash']}  seed {record['seed']}  {record['date']}"
    )


def save(name: str, record: dict[str, Any], path: str | None = None) -> Path:
    """Write a record; without a path to results/NAME_GPU_DATE.json."""
    target = Path(path) if path else RESULTS / record_name(name, record)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


def record_name(name: str, record: dict[str, Any]) -> str:
    """NAME_GPU_DATE.json."""
    slug = "".join(c if c.isalnum() else "-" for c in record["head"]["gpu"].lower())
    return f"{name}_{slug}_{record['head']['date']}.json"


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(*command: str) -> str:
    """First line of what a command prints; empty if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
        return next(iter(done.stdout.splitlines()), "").strip()
    return ""


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "unknown"
