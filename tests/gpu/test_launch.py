"""The launch itself: grid, shared memory, what it must not do, what it refuses, and uneven work at the grid barrier."""

import re
from dataclasses import replace

import numpy as np
import pytest
from numba import cuda
from support.batches import assert_close, random_batch
from support.devices import BoundBatch
from support.kernels import geometry_for, on_each_kernel, parametrize_specs
from support.streams import (
    DriverStream,
    StaticBatch,
    batch_over,
    capture,
    check,
    free_bytes,
    held,
    make_pool,
    wait_for_device,
)

import nbverify as nv
from nbverify import compile, contract
from nbverify.launch import Device, Launcher, LoadedKernel, ParameterBlock, ParameterLayout, driver

# The compiled kernels of support/basic.py: but for max_nodes, which fills the row tile, sizes are no part of them.
LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 66_000, "kernel": "simt"}


def gqa(**options):
    return nv.VerifySpec.gqa(4, 2, 16, sm_scale=0.25, **{**LIMITS, **options})


BALANCED = gqa()
FIXED = gqa(split="fixed")
TWO_LAUNCH = gqa(reduction="two_launch")
MLA = nv.VerifySpec.mla(2, sm_scale=0.144680, **LIMITS)
SPECS = {"balanced": BALANCED, "fixed": FIXED, "two_launch": TWO_LAUNCH, "mla": MLA}
LEGACY = 1  # CU_STREAM_LEGACY
LAUNCHES = 1000
REPLAYS = 10_000
DEFAULT_SHARED_BYTES = 49_152  # what a block gets without opting in
BYTES_PER_REQUEST = 8  # of the work table in shared memory


def small_batch(spec, seed=40):
    return random_batch(np.random.default_rng(seed), spec, [300, 0, 77], [5, 1, 3])


def parts_of(bound: BoundBatch) -> tuple[list[LoadedKernel], ParameterBlock]:
    """The loaded kernels and the parameter block behind a ``bind``."""
    return bound.plan._backend._kernels, bound.bound._call.block


def shared_bytes(dev, spec, limit=None) -> int:
    """What the plan of a spec asks for, on this device or with less shared memory."""
    device = Device(dev.ordinal)
    return geometry_for(spec, device.cc, limit or device.shared_limit).shared_bytes(spec.max_requests)


# ------------------------------------------------------------------------------------------- grid and shared memory


@parametrize_specs(SPECS)
def test_the_grid_is_what_can_be_resident(dev, spec):
    plan = dev.plan(spec)
    report, device, attribute = plan.report(), Device(dev.ordinal), driver().CUdevice_attribute
    assert plan.grid == report.grid == report.blocks_per_sm * device.num_sms
    walker = next(k for k in report.kernels if k.name in ("nbverify_verify", "nbverify_verify_split"))
    reserved = device.attribute(attribute.CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)
    block = report.shared_bytes + walker.resources.static_shared_bytes + reserved
    threads = plan.geometry.threads
    in_use = {
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: block,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: threads * walker.resources.registers,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: threads,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: 1,
    }
    for limit, each in in_use.items():
        assert report.blocks_per_sm * each <= device.attribute(limit), limit


@on_each_kernel(BALANCED)
def test_occupancy_is_asked_with_the_shared_memory_of_the_launch(dev, spec):
    """The work table of 16,000 requests takes 128 KB: one block an SM, where a small one may leave room for two."""
    many = replace(spec, max_requests=16_000, max_kv_len=64)
    few = dev.plan(spec).report().blocks_per_sm
    assert dev.plan(many).report().blocks_per_sm == 1
    assert few > 1 or spec.kernel == "mma", "mma: registers may allow one block only"
    batch = random_batch(np.random.default_rng(41), many, [40, 3], [1, 1])
    result = BoundBatch(dev, dev.plan(many), batch).run()
    assert_close(batch, result.out, result.lse)


@parametrize_specs(SPECS)
def test_one_block_more_is_refused_with_both_numbers(dev, spec):
    limit = dev.plan(spec).grid
    with pytest.raises(nv.ArgumentError, match=rf"^max_blocks: expected <= {limit}\b.*got {limit + 1}$"):
        dev.plan(spec, max_blocks=limit + 1)


@on_each_kernel(BALANCED)
def test_the_driver_agrees_and_its_refusal_names_the_way_out(dev, spec):
    plan = dev.plan(spec)
    bound = BoundBatch(dev, plan, small_batch(spec))
    kernels, block = parts_of(bound)
    with pytest.raises(nv.DriverError, match=r"COOPERATIVE_LAUNCH_TOO_LARGE.*two_launch"):
        Launcher(kernels, [plan.grid + 1], block)(LEGACY)
    result = bound.run()
    assert_close(bound.batch, result.out, result.lse)


@on_each_kernel(replace(FIXED, max_requests=60, max_kv_len=2100))
def test_more_work_than_blocks_on_any_grid(dev, spec):
    """B14: 60 requests, thousands of chunks; with ``fixed`` no bit depends on the grid, nor on the reduction."""
    rng = np.random.default_rng(42)
    batch = random_batch(rng, spec, rng.integers(0, 2000, 60), rng.integers(1, 17, 60))
    twin = replace(spec, reduction="two_launch")
    limit, twin_limit = dev.plan(spec).grid, dev.plan(twin).grid
    cases = [(spec, grid) for grid in (1, 2, 7, limit // 2 + 1, limit)] + [(twin, 7), (twin, twin_limit)]
    results = [BoundBatch(dev, dev.plan(each, max_blocks=grid), batch).run() for each, grid in cases]
    assert_close(batch, results[0].out, results[0].lse)
    assert len({r.bits for r in results}) == 1


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED, "mla": MLA})
def test_the_barrier_and_two_launches_agree(dev, spec):
    """The same cuts and the same order of merging.  The reductions may differ in occupancy, so the grid is named."""
    spec = replace(spec, max_kv_len=9000)
    twin = replace(spec, reduction="two_launch")
    grids = {1, 7, min(dev.plan(spec).grid, dev.plan(twin).grid)}
    batch = random_batch(np.random.default_rng(43), spec, [8200, 0, 33, 1], [24, 1, 7, 3])
    for grid in grids:
        one = BoundBatch(dev, dev.plan(spec, max_blocks=grid), batch).run()
        two = BoundBatch(dev, dev.plan(twin, max_blocks=grid), batch).run()
        assert one.bits == two.bits, f"grid {grid}"
    assert_close(batch, one.out, one.lse)


@on_each_kernel(BALANCED)
def test_shared_limit_is_exact(dev, spec):
    need = dev.plan(spec).report().shared_bytes
    if spec.kernel == "simt":  # one tile, which fits or not
        assert dev.plan(spec, shared_limit=need).grid == dev.plan(spec).grid
        with pytest.raises(nv.ArgumentError, match=rf"^spec: expected at most {need - 1} bytes.*got {need} bytes"):
            dev.plan(spec, shared_limit=need - 1)
    else:  # a smaller tile, or fewer stages
        plan = dev.plan(spec, shared_limit=need - 1)
        assert plan.report().shared_bytes <= need - 1
        batch = small_batch(spec)
        result = BoundBatch(dev, plan, batch).run()
        assert_close(batch, result.out, result.lse)


@on_each_kernel(BALANCED)
def test_a_spec_that_does_not_fit_is_refused_with_both_numbers(dev, spec):
    limit = Device(dev.ordinal).shared_limit
    spec = replace(spec, max_requests=limit // BYTES_PER_REQUEST, max_kv_len=64)  # and the tiles besides
    with pytest.raises(nv.ArgumentError, match=rf"{limit} bytes.*{shared_bytes(dev, spec)} bytes"):
        dev.plan(spec)


@pytest.mark.parametrize("more", [-1, 0, 1])
@on_each_kernel(replace(BALANCED, max_kv_len=64))
def test_around_the_default_shared_memory(dev, spec, more):
    """B16: at exactly 48 KiB nobody opts in by accident: two requests less, that, and two more."""
    wanted = DEFAULT_SHARED_BYTES + more * 2 * BYTES_PER_REQUEST  # the table comes in 16 bytes
    limit = DEFAULT_SHARED_BYTES + 4096  # so that mma leaves room for the table
    sized = (replace(spec, max_requests=n) for n in range(1, DEFAULT_SHARED_BYTES // BYTES_PER_REQUEST))
    spec = next(each for each in sized if shared_bytes(dev, each, limit) == wanted)
    plan = dev.plan(spec, shared_limit=limit)
    assert plan.report().shared_bytes == wanted
    batch = random_batch(np.random.default_rng(44), spec, [40, 3], [2, 1])
    result = BoundBatch(dev, plan, batch).run()
    assert_close(batch, result.out, result.lse)


# -------------------------------------------------------------------------------------------- what a launch must not do


@pytest.mark.alone
@parametrize_specs(SPECS)
def test_launches_allocate_nothing(dev, spec):
    bound, stream = BoundBatch(dev, dev.plan(spec), small_batch(spec)), DriverStream()
    first = bound.run()
    bound.bound.launch(stream.handle)
    pool = dev.cupy.get_default_memory_pool()
    wait_for_device()
    before = free_bytes(), pool.used_bytes(), pool.total_bytes()
    for _ in range(LAUNCHES):
        bound.bound.launch(stream.handle)
    stream.synchronize()
    assert (free_bytes(), pool.used_bytes(), pool.total_bytes()) == before
    assert bound.result().bits == first.bits


@parametrize_specs(SPECS)
def test_launches_do_not_wait(dev, spec):
    """On a stream that cannot run anything; a launch that waited for it would never come back."""
    bound, stream = BoundBatch(dev, dev.plan(spec), small_batch(spec)), DriverStream()
    untouched = bound.result().bits
    wait_for_device()
    with held(stream):
        for _ in range(100):
            bound.bound.launch(stream)
        assert not stream.is_idle()
    result = bound.result()
    assert result.bits != untouched
    assert_close(bound.batch, result.out, result.lse)


# ----------------------------------------------------------------------------------------------------- what is refused


class Elsewhere:
    """A device array that says it lies on another GPU."""

    def __init__(self, array, ordinal):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.device = ordinal


def test_arrays_of_another_device(dev):
    plan = dev.plan(BALANCED)
    arrays = BoundBatch(dev, plan, small_batch(BALANCED)).arrays
    for name, array in arrays.items():
        expected = rf"^{name}: expected an array on device {dev.ordinal}, the plan's, got device {dev.ordinal + 1}$"
        with pytest.raises(nv.ArgumentError, match=expected):
            plan.bind(**{**arrays, name: Elsewhere(array, dev.ordinal + 1)})
        plan.bind(**{**arrays, name: Elsewhere(array, dev.ordinal)})


def test_arrays_of_a_second_gpu(dev):
    if dev.cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    plan = dev.plan(BALANCED)
    bound = BoundBatch(dev, plan, small_batch(BALANCED))
    for name, array in bound.arrays.items():
        with dev.cupy.cuda.Device(1):
            moved = dev.cupy.asarray(dev.download(array))
        with pytest.raises(nv.ArgumentError, match=rf"^{name}: expected an array on device 0.*got device 1"):
            plan.bind(**{**bound.arrays, name: moved})
    with dev.cupy.cuda.Device(1):
        moved = dev.cupy.asarray(dev.download(bound.arrays["q"]))
    with pytest.raises(nv.ArgumentError, match=r"^q: "):
        bound.bound.rebind(q=moved)


def test_host_arrays(dev):
    plan = dev.plan(BALANCED)
    bound = BoundBatch(dev, plan, small_batch(BALANCED))
    for name, array in bound.arrays.items():
        host = dev.download(array)
        with pytest.raises(nv.ArgumentError, match=rf"^{name}: expected a device array .*got a numpy array"):
            plan.bind(**{**bound.arrays, name: host})
    with pytest.raises(nv.ArgumentError, match=r"^out: "):
        bound.bound.rebind(out=dev.download(bound.arrays["out"]))


def do_nothing(args):
    cuda.syncthreads()


FIRST, SECOND, *_, LAST = TABLE = contract.parameters(BALANCED)
OTHER_TABLES = {
    "order": ((SECOND, FIRST, *TABLE[2:]), "parameter 0: .*'q'.*'q_stride_token'"),
    "name": ((replace(FIRST, name="query"), *TABLE[1:]), "parameter 0: .*'q'.*'query'"),
    "one less": (TABLE[:-1], f"expected {len(TABLE)} parameters, the kernel has {len(TABLE) - 1}"),
    "one more": ((*TABLE, replace(LAST, name="extra")), f"expected {len(TABLE)} parameters, .* {len(TABLE) + 1}"),
    "dtype of a number": ((*TABLE[:-1], replace(LAST, dtype="int64")), f"parameter {len(TABLE) - 1}: .*float32.*int64"),
    "dtype of an array": ((replace(FIRST, dtype="uint8"), *TABLE[1:]), "parameter 0: .*uint16.*uint8"),
}


def load(dev, table):
    device = Device(dev.ordinal)
    target = compile.target_of(device.cc)
    compiled = compile.compile_body(do_nothing, table, target, launch_bounds=(32, 1), cooperative=False)
    return LoadedKernel(device, compiled, threads=32, shared_bytes=0)


@pytest.mark.parametrize("change", OTHER_TABLES)
def test_a_kernel_of_another_contract_never_launches(dev, change):
    table, difference = OTHER_TABLES[change]
    kernel = load(dev, table)
    with pytest.raises(nv.CompileError, match=rf"^nbverify_do_nothing: .*{difference}"):
        Launcher([kernel], [1], ParameterBlock(ParameterLayout(TABLE)))


def test_a_kernel_of_this_contract_launches(dev):
    bound = BoundBatch(dev, dev.plan(BALANCED), small_batch(BALANCED))
    untouched = bound.result().bits
    _, block = parts_of(bound)
    Launcher([load(dev, TABLE)], [1], block)(LEGACY)
    assert bound.result().bits == untouched


def test_the_plan_of_another_device_is_named(dev):
    with pytest.raises(nv.ArgumentError, match=re.escape("device: expected an ordinal below")):
        nv.VerifyPlan(BALANCED, device=dev.cupy.cuda.runtime.getDeviceCount())


# ------------------------------------------------------------------------------------- B15: uneven work at the barrier


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED, "mla": MLA})
def test_nearly_all_blocks_idle(dev, spec):
    batch = random_batch(np.random.default_rng(45), spec, [1], [1])
    bound = BoundBatch(dev, dev.plan(spec), batch)
    first = bound.run()
    assert_close(batch, first.out, first.lse)
    bound.poison()
    for _ in range(LAUNCHES):
        bound.bound.launch()
    assert bound.result().bits == first.bits


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED})
def test_one_long_and_one_short_request(dev, spec):
    for lens in ([1, 65_536], [65_536, 1], [65_536, 0, 1]):
        batch = random_batch(np.random.default_rng(46), spec, lens, [2] * len(lens))
        bound = BoundBatch(dev, dev.plan(spec), batch)
        first = bound.run()
        assert_close(batch, first.out, first.lse)
        bound.poison()
        assert bound.run().bits == first.bits


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED, "two_launch": TWO_LAUNCH})
@pytest.mark.parametrize("padding", [0, -1])
def test_a_padded_graph_replayed_many_times(dev, spec, padding):
    """4 requests of 2 nodes were captured, 3 are alive; the length of the fourth is what a server pads with."""
    spec = replace(spec, max_kv_len=600)
    rng = np.random.default_rng(47)
    pool, live = make_pool(rng, spec, 1000)
    static = StaticBatch(dev, dev.plan(spec), pool, num_requests=4)
    captured = capture("driver", static.bound.launch)
    hidden = np.zeros((2, 2), bool)
    trees = [np.tri(2, dtype=bool)] * 3 + [hidden]
    batch = batch_over(rng, pool, live, [9, 500, 33, padding], [2, 2, 2, 2], trees)
    static.load(batch)
    first = static.replayed(captured)
    check(batch, first)
    assert (first.lse[6:8] == -np.inf).all() and not first.out[6:8].astype(np.float32).any()
    static.poison()
    captured.replay(REPLAYS)
    assert static.result().bits == first.bits
