"""What the tests of the launch path share: streams and captures of every library, static buffers, child processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbverify import contract
from nbverify.launch import call, driver
from support.batches import NUMPY_DTYPE, Batch, assert_close, mask_buffers, shuffled_tree
from support.devices import BoundBatch, Result

ROOT = Path(__file__).parents[2]
LIBRARIES = ("driver", "cupy", "torch", "cuda.core")
NOWHERE = 2**31 - 1  # a slot that no pool has: following it would fault
NO_LEGACY_SYNC = 1  # CU_STREAM_NON_BLOCKING


# ---- streams


class DriverStream:
    """A stream made with the driver; it does not wait for the legacy default stream."""

    def __init__(self):
        self.handle = int(call("cuStreamCreate", driver().cuStreamCreate(NO_LEGACY_SYNC)))

    def synchronize(self) -> None:
        call("cuStreamSynchronize", driver().cuStreamSynchronize(self.handle))

    def is_idle(self) -> bool:
        drv = driver()
        (code,) = drv.cuStreamQuery(self.handle)
        if code == drv.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call("cuStreamQuery", (code,))
        return True

    def __del__(self):
        with contextlib.suppress(Exception):
            driver().cuStreamDestroy(self.handle)


@contextlib.contextmanager
def held(stream: DriverStream) -> Iterator[None]:
    """Nothing that is queued on the stream inside the block starts before its end."""
    import cupy

    drv = driver()
    memory = cupy.cuda.alloc_pinned_memory(4)
    word = np.frombuffer(memory, np.uint32, 1)
    word[0] = 0
    at_least = int(drv.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    (code,) = drv.cuStreamWaitValue32(stream.handle, memory.ptr, 1, at_least)
    if code == drv.CUresult.CUDA_ERROR_NOT_SUPPORTED:
        pytest.skip("cuStreamWaitValue32 is not supported here")
    call("cuStreamWaitValue32", (code,))
    try:
        yield
    finally:
        word[0] = 1
        stream.synchronize()


def wait_for_device() -> None:
    """For everything that was queued, by anyone, in the current context."""
    call("cuCtxSynchronize", driver().cuCtxSynchronize())


def free_bytes() -> int:
    """Device memory that nobody has, as the driver counts it."""
    free, _ = call("cuMemGetInfo", driver().cuMemGetInfo())
    return int(free)


# ---- captures


@dataclass
class Captured:
    """An executable graph, on the stream that it was captured on."""

    nodes: Counter  # by kind: {"KERNEL": 1}
    queue: Callable[[], None]
    wait: Callable[[], None]
    keep_alive: list[Any] = field(default_factory=list)

    def replay(self, times: int = 1) -> None:
        """Queue, and wait for the last one."""
        for _ in range(times):
            self.queue()
        self.wait()


def node_kinds(stream: int) -> Counter:
    """What a capturing stream has recorded so far; the same question for every library."""
    drv = driver()
    status, _, graph = call("cuStreamGetCaptureInfo", drv.cuStreamGetCaptureInfo(stream))[:3]
    assert status == drv.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE, f"the stream is not capturing: {status}"
    _, count = call("cuGraphGetNodes", drv.cuGraphGetNodes(graph))
    if count == 0:
        return Counter()
    nodes, _ = call("cuGraphGetNodes", drv.cuGraphGetNodes(graph, count))
    kinds = [call("cuGraphNodeGetType", drv.cuGraphNodeGetType(node)) for node in nodes[:count]]
    return Counter(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in kinds)


def begin_capture(stream: int) -> None:
    """In the strictest mode: a call of any thread that might allocate or wait fails, and spoils the capture."""
    drv = driver()
    mode = drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    call("cuStreamBeginCapture", drv.cuStreamBeginCapture(stream, mode))


def end_captures(streams: Sequence[DriverStream]) -> list[Captured]:
    """End all, then instantiate all: instantiating while another capture is open is forbidden in the strictest mode."""
    ended = [take_graph(stream.handle) for stream in streams]
    return [instantiate(*graph, s.handle, s.synchronize) for graph, s in zip(ended, streams, strict=True)]


def end_capture(stream: int, wait: Callable[[], None]) -> Captured:
    return instantiate(*take_graph(stream), stream, wait)


def take_graph(stream: int) -> tuple[Counter, Any]:
    """The kinds of nodes, and the graph."""
    nodes = node_kinds(stream)
    return nodes, call("cuStreamEndCapture", driver().cuStreamEndCapture(stream))


def instantiate(nodes: Counter, graph: Any, stream: int, wait: Callable[[], None]) -> Captured:
    drv = driver()
    executable = call("cuGraphInstantiate", drv.cuGraphInstantiate(graph, 0))
    call("cuGraphDestroy", drv.cuGraphDestroy(graph))

    def queue() -> None:
        call("cuGraphLaunch", drv.cuGraphLaunch(executable, stream))

    return Captured(nodes, queue, wait, [_Executable(executable)])


class _Executable:
    def __init__(self, handle: Any):
        self._handle = handle

    def __del__(self):
        with contextlib.suppress(Exception):
            driver().cuGraphExecDestroy(self._handle)


@contextlib.contextmanager
def abandoned_on_error(end: Callable[[], object]) -> Iterator[None]:
    """A capture left open would make every later test of this process fail."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            end()
        raise


def capture(library: str, work: Callable[[Any], None]) -> Captured:
    """Capture ``work(stream)``, called once, on a new stream of the library, in its strictest mode.

    Waits for the device first: these streams do not wait for the default one, on which tests fill their arrays.
    """
    wait_for_device()
    how = {"driver": _with_driver, "cupy": _with_cupy, "torch": _with_torch, "cuda.core": _with_cuda_core}
    return how[library](work)


def _with_driver(work: Callable[[Any], None]) -> Captured:
    stream = DriverStream()
    begin_capture(stream.handle)
    with abandoned_on_error(lambda: driver().cuStreamEndCapture(stream.handle)):
        work(stream.handle)
        captured = end_capture(stream.handle, stream.synchronize)
    captured.keep_alive.append(stream)
    return captured


def _with_cupy(work: Callable[[Any], None]) -> Captured:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        with abandoned_on_error(stream.end_capture):
            work(stream)
            nodes = node_kinds(stream.ptr)
            graph = stream.end_capture()
    return Captured(nodes, lambda: graph.launch(stream), stream.synchronize)


def _with_torch(work: Callable[[Any], None]) -> Captured:
    torch = torch_with_gpu()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        work(torch.cuda.current_stream())
        nodes = node_kinds(stream.cuda_stream)

    def queue() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return Captured(nodes, queue, stream.synchronize, [graph])


def _with_cuda_core(work: Callable[[Any], None]) -> Captured:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    builder = stream.create_graph_builder()
    builder.begin_building(mode="global")
    with abandoned_on_error(builder.end_building):
        work(builder)
        nodes = node_kinds(builder.__cuda_stream__()[1])
        builder.end_building()
    graph = builder.complete()
    return Captured(nodes, lambda: graph.launch(stream), stream.sync, [graph, builder])


def torch_with_gpu() -> Any:
    """The torch module; skips the test where there is none, or one without CUDA."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


# ---- static buffers


def make_pool(rng: np.random.Generator, spec, num_slots: int, *, dead=(0,)) -> tuple[Batch, np.ndarray]:
    """An empty batch over K and V caches, and the slots that may be used.  Slots in ``dead`` hold NaN."""
    live = np.setdiff1d(np.arange(num_slots), dead)

    def cache(width: int) -> np.ndarray:
        values = rng.standard_normal((num_slots, spec.num_kv_heads, width), dtype=np.float32)
        values[list(dead)] = np.nan
        return values.astype(NUMPY_DTYPE[spec.kv_dtype])

    batch = Batch(
        spec=spec,
        q=np.zeros((0, spec.num_q_heads, spec.head_dim_qk), NUMPY_DTYPE[spec.dtype]),
        k_cache=cache(spec.head_dim_qk),
        v_cache=None if spec.shared_kv else cache(spec.head_dim_v),
        kv_indptr=np.zeros(1, np.int32),
        kv_indices=np.zeros(0, np.int64),
        qo_indptr=np.zeros(1, np.int32),
        out_cache_loc=np.zeros(0, np.int64),
        custom_mask=None,
        mask_indptr=None,
    )
    return batch, live


def batch_over(rng: np.random.Generator, pool: Batch, live: np.ndarray, prefix_lens, node_counts, trees=None) -> Batch:
    """Random q, slots and trees over the caches of ``pool``.

    A prefix length may be -1, which moves the start of the next prefix back by one, as a padded batch does.
    """
    spec = pool.spec
    kv_indptr = np.concatenate([[0], np.cumsum(prefix_lens)])
    assert kv_indptr.min() >= 0, "a negative start belongs to no padded batch"
    num_prefix, num_tokens = sum(max(int(c), 0) for c in prefix_lens), int(np.sum(node_counts))
    slots = rng.choice(live, num_prefix + num_tokens, replace=False)
    trees = [shuffled_tree(rng, int(n)) for n in node_counts] if trees is None else list(trees)
    mask, mask_indptr = mask_buffers(spec, prefix_lens, trees)
    q = rng.standard_normal((num_tokens, spec.num_q_heads, spec.head_dim_qk), dtype=np.float32)
    return replace(
        pool,
        q=q.astype(NUMPY_DTYPE[spec.dtype]),
        kv_indptr=kv_indptr,
        kv_indices=slots[:num_prefix],
        qo_indptr=np.concatenate([[0], np.cumsum(node_counts)]),
        out_cache_loc=slots[num_prefix:],
        custom_mask=mask,
        mask_indptr=mask_indptr,
        trees=trees,
    )


class StaticBatch(BoundBatch):
    """Buffers for the largest batch, bound once; ``load`` puts a batch into them, as a server does before a replay.

    What stands behind a batch in its buffers is the rest of the one before it; at first, entries that would fault.
    """

    def __init__(self, dev, plan, pool: Batch, num_requests: int):
        spec = replace(plan.spec, max_requests=num_requests)
        size = contract.capacity_elements(spec)
        num_tokens = num_requests * spec.max_nodes
        reads_mask = spec.mask.reads_buffer
        mask_dtype = np.uint32 if spec.mask.value == "packed" else np.uint8
        empty = replace(
            pool,
            q=np.full((num_tokens, spec.num_q_heads, spec.head_dim_qk), np.nan, NUMPY_DTYPE[spec.dtype]),
            kv_indptr=np.zeros(num_requests + 1, np.int32),
            kv_indices=np.full(size["kv_indices"], NOWHERE, np.int32),
            qo_indptr=np.zeros(num_requests + 1, np.int32),
            out_cache_loc=np.full(num_tokens, NOWHERE, np.int64),
            custom_mask=np.full(size["custom_mask"], 255, mask_dtype) if reads_mask else None,
            mask_indptr=np.zeros(num_requests + 1, np.int64) if reads_mask else None,
        )
        super().__init__(dev, plan, empty)

    def load(self, batch: Batch) -> None:
        """Overwrite the beginning of every buffer but the caches, fill out and lse with NaN, and wait."""
        for name, values in batch.inputs().items():
            if name not in ("k_cache", "v_cache") and values.size:
                static = getattr(self.batch, name)
                self.dev.write(self.arrays[name][: len(values)], values.astype(static.dtype))
        self.poison()

    def poison(self) -> None:
        super().poison()
        self.settle()

    def settle(self) -> None:
        """Wait for the default stream, on which arrays are written: streams of captures do not."""
        wait_for_device()

    def eager(self) -> Result:
        """A launch on the default stream, over NaN."""
        self.poison()
        return self.run()

    def replayed(self, captured: Captured) -> Result:
        """A replay, over NaN."""
        self.poison()
        captured.replay()
        return self.result()


def check(batch: Batch, result: Result) -> None:
    """The rows of a batch against float64; the rows behind it as they were filled."""
    rows = batch.num_tokens
    assert_close(batch, result.out[:rows], result.lse[:rows])
    assert set(result.out[rows:].tobytes()) <= {0xFF}, "rows of no request were written"
    assert np.isnan(result.lse[rows:]).all(), "rows of no request were written"


# ---- child processes


def run_python(*arguments: str, timeout: float = 110, **environment: str) -> str:
    """What a new interpreter prints; ``nbverify`` and ``support`` can be imported there."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
