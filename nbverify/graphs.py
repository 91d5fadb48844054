"""CUDA graphs by the driver: what a function launches on a stream, captured once and replayed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

from nbverify.launch import Device, call, driver


class Graph:
    """Capture ``record(stream)`` and make it ready to launch.

    The capture is thread-local: this thread must not allocate or wait for the device in ``record``, which the driver
    refuses; other threads may.  The graph keeps addresses: what it uses must stay alive as long as it is launched.

    Raises DriverError where the driver refuses something in the capture.
    """

    def __init__(self, device: Device, record: Callable[[int], None]):
        drv = driver()
        self.device = device
        self._graph = self._executable = None
        with device:
            stream = call("cuStreamCreate", drv.cuStreamCreate(drv.CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                mode = drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                collects = gc.isenabled()
                gc.disable()  # a collection may free an old plan's memory, which a capture does not survive
                try:
                    call("cuStreamBeginCapture", drv.cuStreamBeginCapture(stream, mode))
                    try:
                        record(int(stream))
                    finally:  # a capture that is left open spoils the stream for good
                        ended = drv.cuStreamEndCapture(stream)
                finally:
                    if collects:
                        gc.enable()
                self._graph = call("cuStreamEndCapture", ended)
                self._executable = call("cuGraphInstantiate", drv.cuGraphInstantiate(self._graph, 0))
                call("cuGraphUpload", drv.cuGraphUpload(self._executable, stream))
                call("cuStreamSynchronize", drv.cuStreamSynchronize(stream))
            finally:
                drv.cuStreamDestroy(stream)

    def launch(self, stream: int) -> None:
        """Queue all of it on a stream handle."""
        call("cuGraphLaunch", driver().cuGraphLaunch(self._executable, stream))

    def node_types(self) -> dict[str, int]:
        """How many nodes of each type it has: ``{"KERNEL": 7}``."""
        drv = driver()
        _, number = call("cuGraphGetNodes", drv.cuGraphGetNodes(self._graph))
        nodes: list[Any] = call("cuGraphGetNodes", drv.cuGraphGetNodes(self._graph, number))[0]
        kinds = (call("cuGraphNodeGetType", drv.cuGraphNodeGetType(node)) for node in nodes)
        return dict(Counter(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in kinds))

    def __del__(self) -> None:
        try:
            with self.device:
                if self._executable is not None:
                    driver().cuGraphExecDestroy(self._executable)
                if self._graph is not None:
                    driver().cuGraphDestroy(self._graph)
        except Exception:  # at interpreter exit the driver may be gone already
            pass
