"""Tens of thousands of launches of plans that take turns: every one is compared, on the device, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
from support.batches import assert_close, random_batch
from support.devices import BoundBatch
from support.kernels import on_each_kernel, on_kernels, parametrize_specs
from support.streams import DriverStream, free_bytes, wait_for_device

import nbverify as nv
from nbverify.launch import call, driver

# The compiled kernels of support/basic.py: but for max_nodes, which fills the row tile, sizes are no part of them.
LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 3000, "sm_scale": 0.25, "kernel": "simt"}
SPECS = {
    "balanced": nv.VerifySpec.gqa(4, 2, 16, **LIMITS),
    "fixed": nv.VerifySpec.gqa(4, 2, 16, split="fixed", **LIMITS),
    "two_launch": nv.VerifySpec.gqa(4, 2, 16, reduction="two_launch", **LIMITS),
    "mla": nv.VerifySpec.mla(2, **LIMITS),
}
BATCHES = {
    "one": ([2900], [8]),
    "idle": ([1], [1]),
    "two": ([777, 64], [3, 8]),
    "padded": ([33, 0, -1], [8, 1, 2]),
    "four": ([1000, 0, 31, 2048], [1, 8, 5, 2]),
}
LAUNCHES = 20_000
LOOK_EVERY = 1000
POISON_WORKSPACE_EVERY = 97
NAN_BYTES = 0xFF


@pytest.fixture
def differs(dev):
    """``differs(a, b, i, counts)``: counts[i] += elements whose bits are not the same; queued, not waited for."""
    return dev.cupy.ElementwiseKernel(
        "T a, T b, int32 which",
        "raw uint32 counts",
        "if (a != b) atomicAdd(&counts[which], 1u)",
        "differs",
    )


class Configuration:
    """A bind with its first result, which was compared with float64, on the device."""

    def __init__(self, dev, plan, name, seed, lens, counts):
        self.name = name
        batch = random_batch(np.random.default_rng(seed), plan.spec, lens, counts)
        self.bound = BoundBatch(dev, plan, batch)
        result = self.bound.run()
        assert_close(batch, result.out, result.lse)
        self.out = self.bound.arrays["out"].view(np.uint16)
        self.lse = self.bound.arrays["lse"].view(np.uint32)
        self.want_out, self.want_lse = self.out.copy(), self.lse.copy()

    def queue(self, stream, index, counts, differs):
        """Fill with NaN, launch, compare; on one stream."""
        for array in (self.out, self.lse):
            array.data.memset_async(NAN_BYTES, array.nbytes, stream)
        self.bound.bound.launch(stream)
        with stream:
            differs(self.out, self.want_out, index, counts)
            differs(self.lse, self.want_lse, index, counts)


def poison_workspace(plan, stream):
    """No result may depend on what stands there; a barrier that does not hold reads it."""
    for name in ("partial_o", "partial_ml"):
        buffer = plan._backend._workspace[name]
        call("cuMemsetD8Async", driver().cuMemsetD8Async(buffer.pointer, NAN_BYTES, buffer.num_bytes, stream.ptr))


@pytest.mark.timeout(300)
def test_plans_and_batches_in_turn(dev, differs):
    plans = {f"{name}-{spec.kernel}": dev.plan(spec) for name, given in SPECS.items() for spec in on_kernels(given)}
    configurations = [
        Configuration(dev, plan, f"{name}-{batch}", 80 + i, *BATCHES[batch])
        for name, plan in plans.items()
        for i, batch in enumerate(BATCHES)
    ]
    counts = dev.cupy.zeros(len(configurations), np.uint32)
    stream = dev.cupy.cuda.Stream(non_blocking=True)
    wait_for_device()
    order = np.random.default_rng(81).integers(0, len(configurations), LAUNCHES)
    for i, index in enumerate(order.tolist()):
        if i % POISON_WORKSPACE_EVERY == 0:
            poison_workspace(configurations[index].bound.plan, stream)
        configurations[index].queue(stream, index, counts, differs)
        if i % LOOK_EVERY == LOOK_EVERY - 1:
            stream.synchronize()
            wrong = dev.download(counts)
            assert not wrong.any(), f"launch {i}: " + str(
                {c.name: int(n) for c, n in zip(configurations, wrong, strict=True) if n}
            )
    for configuration in configurations:
        configuration.bound.result()  # the canaries


@pytest.mark.timeout(300)
@parametrize_specs({"balanced": SPECS["balanced"], "mla": SPECS["mla"]})
def test_two_plans_on_two_streams(dev, spec, differs):
    """Each has the whole grid: they may never wait for one another at their barriers."""
    cupy = dev.cupy
    configurations = [
        Configuration(dev, dev.plan(each, fresh=True), each.split, seed, *BATCHES["four"])
        for each, seed in ((spec, 82), (replace(SPECS["fixed"], kernel=spec.kernel), 83))
    ]
    counts = cupy.zeros(2, np.uint32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in configurations]
    wait_for_device()
    for _ in range(LAUNCHES // 4):
        for index, (configuration, stream) in enumerate(zip(configurations, streams, strict=True)):
            configuration.queue(stream, index, counts, differs)
    for stream in streams:
        stream.synchronize()
    assert not dev.download(counts).any()


@pytest.mark.alone
@on_each_kernel(SPECS["balanced"])
def test_plans_come_and_go(dev, spec):
    """Loading, unloading and freeing: the last of many plans is as right as the first, and none leaks its workspace."""
    batch = random_batch(np.random.default_rng(84), spec, *BATCHES["two"])
    stream = DriverStream()
    want, free = None, []
    for _ in range(50):
        plan = dev.plan(spec, fresh=True)
        bound = BoundBatch(dev, plan, batch)
        wait_for_device()
        bound.bound.launch(stream)
        stream.synchronize()
        result = bound.result()
        want = want or result.bits
        assert result.bits == want
        del plan, bound
        free.append(free_bytes())
    assert free[-1] >= free[9], "device memory is lost with every plan"
