"""B23: caches, processes, threads, devices; and the barrier, on every (toolkit, driver, device) that this runs on."""

import json
import threading

import numpy as np
import pytest
from support.batches import assert_close, random_batch
from support.devices import BoundBatch, GpuDevice
from support.kernels import KERNELS, on_each_kernel, parametrize_specs
from support.streams import DriverStream, run_python, wait_for_device

import nbverify as nv
from nbverify import compile
from nbverify.launch import call, driver

# The compiled kernels of support/basic.py: but for max_nodes, which fills the row tile, sizes are no part of them.
LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 200_000, "sm_scale": 0.25, "kernel": "simt"}
BALANCED = nv.VerifySpec.gqa(4, 2, 16, **LIMITS)
FIXED = nv.VerifySpec.gqa(4, 2, 16, split="fixed", **LIMITS)
MLA = nv.VerifySpec.mla(2, **LIMITS)
LAUNCHES = 1000


@pytest.fixture(autouse=True)
def versions(record_property):
    """Which triple a result belongs to."""
    drv = driver()
    call("cuInit", drv.cuInit(0))
    record_property("driver", call("cuDriverGetVersion", drv.cuDriverGetVersion()))
    device = call("cuDeviceGet", drv.cuDeviceGet(0))
    name = call("cuDeviceGetName", drv.cuDeviceGetName(256, device))
    record_property("device", name.split(b"\0")[0].decode())
    record_property("toolkit", json.dumps(compile.toolkit_versions()))


# ------------------------------------------------------------------------------------------------- processes and cache

CHILD = """
import sys
import numpy as np
import nbverify as nv

limits = dict(sm_scale=0.25, max_requests=4, max_nodes=8, max_kv_len=3000)
spec = nv.VerifySpec.gqa(4, 2, 16, **limits, kernel=sys.argv[1])
plan = nv.VerifyPlan(spec, device=0)
compiled = "numba" in sys.modules

from support.batches import assert_close, random_batch
from support.devices import BoundBatch, GpuDevice

dev = GpuDevice()
bound = BoundBatch(dev, plan, random_batch(np.random.default_rng(90), spec, [2900, 0, 77], [5, 1, 3]))
first = bound.run()
assert_close(bound.batch, first.out, first.lse)
for _ in range(1000):
    bound.poison()
    assert bound.run().bits == first.bits
print("compiled" if compiled else "loaded", hash(first.bits))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_process_compiles_and_the_next_loads(tmp_path, kernel):
    """The second does not even import the compiler; a damaged file is compiled again; all have the same bits."""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "0"}
    first = run_python("-c", CHILD, kernel, **environment).split()
    second = run_python("-c", CHILD, kernel, **environment).split()
    (cached,) = (tmp_path / "nbverify").glob("*.json")
    cached.write_text(cached.read_text()[:-1000])
    third = run_python("-c", CHILD, kernel, **environment).split()
    assert [first[0], second[0], third[0]] == ["compiled", "loaded", "compiled"]
    assert first[1] == second[1] == third[1]


THREADS = """
import sys
import threading
import cupy
import numpy as np
import nbverify as nv
from support.batches import assert_close, random_batch
from support.devices import BoundBatch, GpuDevice
from support.streams import DriverStream, wait_for_device

LIMITS = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 600, "sm_scale": 0.25, "kernel": sys.argv[1]}
specs = [nv.VerifySpec.gqa(4, 2, 16, **LIMITS)] * 2 + [nv.VerifySpec.gqa(4, 2, 16, split="fixed", **LIMITS)] * 2
start, errors, bits = threading.Barrier(len(specs)), [], [None] * len(specs)


def first_call(index, spec):
    try:
        start.wait()
        plan = nv.VerifyPlan(spec, device=0)
        dev = GpuDevice()
        dev.cupy.cuda.Device(0).use()
        bound = BoundBatch(dev, plan, random_batch(np.random.default_rng(91), spec, [500, 0, 77], [5, 1, 3]))
        stream = DriverStream()
        wait_for_device()
        for _ in range(100):
            bound.bound.launch(stream)
        stream.synchronize()
        result = bound.result()
        assert_close(bound.batch, result.out, result.lse)
        bits[index] = result.bits
    except BaseException as error:
        errors.append(repr(error))


threads = [threading.Thread(target=first_call, args=item) for item in enumerate(specs)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert bits[0] == bits[1] and bits[2] == bits[3]
print("right")
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_four_threads_make_the_first_call(tmp_path, kernel):
    """Two specs, two threads each, nothing cached, the driver not yet initialised."""
    assert run_python("-c", THREADS, kernel, XDG_CACHE_HOME=str(tmp_path)).split() == ["right"]


# --------------------------------------------------------------------------------------------- contexts and devices


@on_each_kernel(BALANCED)
def test_a_thread_without_a_context(dev, spec):
    """It launches right, or it is told what is missing; it never returns as if it had."""
    bound = BoundBatch(dev, dev.plan(spec), random_batch(np.random.default_rng(92), spec, [300, 7], [5, 1]))
    want = bound.run().bits
    bound.poison()
    wait_for_device()
    seen = []

    def launch():
        try:
            bound.bound.launch()
            seen.append("launched")
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    (outcome,) = seen
    if outcome == "launched":
        assert bound.result().bits == want
    else:
        assert isinstance(outcome, nv.DriverError) and f"device {dev.ordinal}" in str(outcome)
    assert bound.run().bits == want


@on_each_kernel(BALANCED)
def test_devices_in_turn(dev, spec):
    """Devices 0, 1, 0: a plan each; and a plan launched while the other device is current is right or refused."""
    cupy = dev.cupy
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    results = []
    plans = []
    for ordinal in (0, 1, 0):
        with cupy.cuda.Device(ordinal):
            on = GpuDevice(ordinal)
            plan = on.plan(spec, fresh=True)
            batch = random_batch(np.random.default_rng(93), spec, [3000, 0, 77], [5, 1, 3])
            bound = BoundBatch(on, plan, batch)
            result = bound.run()
            assert_close(batch, result.out, result.lse)
            results.append(result.bits)
            plans.append((ordinal, bound))
    assert results[0] == results[2]
    for ordinal, bound in plans:
        with cupy.cuda.Device(ordinal):
            bound.poison()
            cupy.cuda.Device().synchronize()
        with cupy.cuda.Device(1 - ordinal):
            try:
                bound.bound.launch()
            except nv.DriverError as error:
                assert f"device {ordinal}" in str(error)
                continue
            cupy.cuda.Device().synchronize()
        with cupy.cuda.Device(ordinal):
            cupy.cuda.Device().synchronize()
            assert bound.result().bits == results[0 if ordinal == 0 else 1]


# ---------------------------------------------------------------------------------------------------------- the barrier


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED, "mla": MLA})
def test_every_block_contributes_to_every_row(dev, spec):
    """One request of one node, split over the whole grid, a thousand times, two different queries in turn.

    A block that passed the barrier early would merge a state of the launch before, whose query was the other one, or
    the NaN that the workspace is filled with between launches.
    """
    plan = dev.plan(spec, fresh=True)
    units, geometry = spec.num_kv_heads, plan.geometry
    # Blocks stay idle where the merge of one more state takes longer than its tiles (balanced, kernels/schedule.py).
    tiles = max(2, plan.grid * geometry.split_cost // 1024 + 1)  # of a block
    keys = plan.grid * geometry.keys_per_tile * tiles // units
    assert keys < spec.max_kv_len
    batches = [random_batch(np.random.default_rng(seed), spec, [keys], [1]) for seed in (94, 95)]
    bounds = [BoundBatch(dev, plan, batch) for batch in batches]
    firsts = [bound.run() for bound in bounds]
    for batch, first in zip(batches, firsts, strict=True):
        assert_close(batch, first.out, first.lse)
    assert firsts[0].bits != firsts[1].bits
    stream = DriverStream()
    buffers = [plan._backend._workspace[name] for name in ("partial_o", "partial_ml")]
    for i in range(LAUNCHES):
        bound, first = bounds[i % 2], firsts[i % 2]
        bound.poison()
        wait_for_device()
        if i % 4 < 2:
            for buffer in buffers:
                fill = driver().cuMemsetD8Async(buffer.pointer, 0xFF, buffer.num_bytes, stream.handle)
                call("cuMemsetD8Async", fill)
        bound.bound.launch(stream)
        stream.synchronize()
        assert bound.result().bits == first.bits, f"launch {i}"
