"""What measuring needs of a GPU.  Tests put a stand-in of numpy and the emulator here."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbverify as nv
from benchmarks import ceilings, peers
from benchmarks.timing import DeviceClock, Times, head, host_times
from nbverify import launch
from nbverify.ahead import compile_ahead
from nbverify.errors import NbverifyError
from nbverify.spec import VerifySpec

HANG_SECONDS = 120  # a case takes seconds
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "flashinfer-python")


class Gpu:
    """The current GPU: arrays of CuPy, plans, graphs, and the clock."""

    def __init__(self) -> None:
        launch.Device(None)  # a DriverError with advice, where CuPy has a code
        try:
            import cupy
        except ImportError as error:
            raise NbverifyError(
                f"cupy: cannot be imported ({error}); the benchmark keeps its arrays in it: pip install "
                "'nbverify[cu12]', or [cu13]"
            ) from error
        cupy.cuda.Device().use()
        self.xp = cupy
        self.clock = DeviceClock()

    def head(self, seed: int, commit: str | None) -> dict[str, Any]:
        """What a rerun needs to know."""
        return head(seed, packages=PACKAGES, commit=commit)

    @contextlib.contextmanager
    def watched(self, seconds: float = HANG_SECONDS) -> Iterator[None]:
        """End the process, with a traceback, if what is inside takes longer: a hung kernel never returns."""
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def synchronize(self) -> None:
        """Streams of different libraries do not wait for each other."""
        self.xp.cuda.Device().synchronize()

    def ceilings(self) -> dict[str, float]:
        """The yardsticks: GB/s of a read and a copy, TFLOP/s of mma.sync, and what two events cost by themselves."""
        found = dict(self.clock.bandwidth())
        self.xp.get_default_memory_pool().free_all_blocks()
        found["mma_tflop_s"] = ceilings.measure_mma(self.clock)
        found["empty_us"] = round(self.clock.device_times(lambda stream: None).median, 2)
        return found

    def precompile(self, specs: Sequence[VerifySpec], progress: Callable[[str], None]) -> None:
        """Fill the cache with the kernels of some specs, as many at a time as there are cores."""
        compile_ahead(specs, progress=progress)

    def plan(self, spec: VerifySpec) -> nv.VerifyPlan:
        return nv.VerifyPlan(spec)

    def capture(self, call: Callable[[Any], object]) -> Any:
        """``call(stream)`` as a graph."""
        self.synchronize()
        return self.clock.capture(call)

    def replay(self, graph: Any) -> None:
        """Once, to the end."""
        self.synchronize()
        graph.launch(self.clock.stream)
        self.clock.stream.synchronize()

    def replay_times(self, graph: Any, repeats: int) -> Times:
        """Device time with a cold L2 cache."""
        return self.clock.replay_times(graph, repeats=repeats)

    def launch_times(self, bound: nv.BoundVerify, count: int) -> Times:
        """Host time of a launch."""
        handle, sync = self.clock.stream.ptr, self.clock.stream.synchronize
        return host_times(lambda: bound.launch(handle), sync, count=count)

    def graph_launch_times(self, graph: Any, count: int) -> Times:
        """Host time of a replay."""
        stream = self.clock.stream
        return host_times(lambda: graph.launch(stream), stream.synchronize, count=count)

    def load_peers(self, folder: Path | None) -> tuple[list[peers.Peer], dict[str, str]]:
        """Other kernels, and why some are not there."""
        return peers.load(folder)

    def peer_clock(self) -> peers.TorchClock:
        """What times them."""
        return peers.TorchClock(self)
