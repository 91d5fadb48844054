"""CUDA graphs: captured by every library in its strictest mode, replayed over static buffers that change."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.batches import assert_close, random_batch
from support.devices import BoundBatch
from support.kernels import KERNELS, on_each_kernel, parametrize_specs
from support.streams import (
    LIBRARIES,
    DriverStream,
    StaticBatch,
    abandoned_on_error,
    batch_over,
    begin_capture,
    capture,
    check,
    end_captures,
    free_bytes,
    make_pool,
    run_python,
    wait_for_device,
)

import nbverify as nv
from nbverify.launch import driver

# The compiled kernels of support/basic.py: but for max_nodes, which fills the row tile, sizes are no part of them.
LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 600, "kernel": "simt"}


def gqa(**options):
    return nv.VerifySpec.gqa(4, 2, 16, sm_scale=0.25, **{**LIMITS, **options})


BALANCED = gqa()
FIXED = gqa(split="fixed")
TWO_LAUNCH = gqa(reduction="two_launch")
MLA = nv.VerifySpec.mla(2, sm_scale=0.144680, **LIMITS)
NUM_SLOTS = 3000
NEW_BATCHES = 1000
COMPARED_WITH_FLOAT64 = 50  # every so many
ONE_KERNEL = Counter(KERNEL=1)


def small_batch(spec, seed=50):
    return random_batch(np.random.default_rng(seed), spec, [300, 0, 77], [5, 1, 3])


# ------------------------------------------------------------------------------------------------------------ capture


@pytest.mark.parametrize("library", LIBRARIES)
@parametrize_specs({"balanced": BALANCED, "two_launch": TWO_LAUNCH})
def test_the_first_launch_of_a_plan_is_captured(dev, library, spec):
    bound = BoundBatch(dev, dev.plan(spec, fresh=True), small_batch(spec))
    untouched = bound.result().bits
    captured = capture(library, bound.bound.launch)
    launches = 2 if spec.reduction == "two_launch" else 1
    assert captured.nodes == Counter(KERNEL=launches), "kernels only: no copy, fill or allocation"
    assert bound.result().bits == untouched, "a capture launches nothing"
    captured.replay()
    first = bound.result()
    assert_close(bound.batch, first.out, first.lse)
    bound.poison()
    wait_for_device()
    captured.replay(3)
    assert bound.result().bits == first.bits == bound.run().bits


@parametrize_specs({"balanced": BALANCED, "two_launch": TWO_LAUNCH})
def test_debug_adds_one_kernel_and_checks_every_replay(dev, spec):
    plan = dev.plan(spec, fresh=True, debug=True)
    rng = np.random.default_rng(51)
    pool, live = make_pool(rng, spec, NUM_SLOTS)
    static = StaticBatch(dev, plan, pool, num_requests=2)
    captured = capture("driver", static.bound.launch)
    assert captured.nodes == Counter(KERNEL=3 if spec.reduction == "two_launch" else 2)

    batch = batch_over(rng, pool, live, [40, 7], [3, 2])
    static.load(batch)
    check(batch, static.replayed(captured))
    plan.check()
    wrong = np.array(batch.kv_indices)
    wrong[42] = NUM_SLOTS
    dev.write(static.arrays["kv_indices"][: len(wrong)], wrong.astype(np.int32))
    static.settle()
    captured.replay()
    with pytest.raises(nv.DeviceInputError, match=rf"kv_indices\[42\].*{NUM_SLOTS}"):
        plan.check()
    plan.check()


FRESH_PROCESS = """
import sys
import numpy as np
from support.batches import assert_close, random_batch
from support.devices import BoundBatch, GpuDevice
from support.streams import capture
import nbverify as nv

dev = GpuDevice()
limits = dict(sm_scale=0.25, max_requests=4, max_nodes=24, max_kv_len=600)
spec = nv.VerifySpec.gqa(4, 2, 16, **limits, kernel=sys.argv[1])
bound = BoundBatch(dev, dev.plan(spec), random_batch(np.random.default_rng(52), spec, [300, 0, 77], [5, 1, 3]))
captured = capture("driver", bound.bound.launch)
assert captured.nodes == {"KERNEL": 1}, captured.nodes
captured.replay()
result = bound.result()
assert_close(bound.batch, result.out, result.lse)
print("right")
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_launch_of_a_process_is_captured(kernel):
    assert run_python("-c", FRESH_PROCESS, kernel).split() == ["right"]


@on_each_kernel(BALANCED)
def test_the_layers_of_a_model_in_one_graph(dev, spec):
    """Many binds of one plan: they share its workspace, one after the other."""
    plan = dev.plan(spec, fresh=True)
    layers = [BoundBatch(dev, plan, small_batch(spec, seed)) for seed in (53, 54, 55)]

    def step(stream):
        for layer in layers:
            layer.bound.launch(stream)

    captured = capture("driver", step)
    assert captured.nodes == Counter(KERNEL=len(layers))
    captured.replay(2)
    for layer in layers:
        result = layer.result()
        assert_close(layer.batch, result.out, result.lse)


@on_each_kernel(BALANCED)
def test_a_capture_keeps_the_addresses_it_was_made_with(dev, spec):
    plan = dev.plan(spec)
    bound, other = (BoundBatch(dev, plan, small_batch(spec, seed)) for seed in (56, 57))
    captured = capture("driver", bound.bound.launch)
    want = bound.run().bits
    bound.bound.rebind(**{name: other.arrays[name] for name in ("q", "k_cache", "v_cache", "out", "lse")})
    bound.poison()
    other.poison()
    wait_for_device()
    captured.replay()
    assert bound.result().bits == want
    assert np.isnan(other.result().lse).all()


@on_each_kernel(BALANCED)
def test_plans_captured_at_once_on_two_streams(dev, spec):
    """B13: two captures under way, then two graphs running, each with the whole grid and a workspace of its own."""
    streams = [DriverStream(), DriverStream()]
    bounds = [
        BoundBatch(dev, dev.plan(spec, fresh=True), random_batch(np.random.default_rng(seed), spec, lens, counts))
        for seed, lens, counts in [(58, [570, 5], [8, 3]), (59, [1, 333, 0], [1, 8, 2])]
    ]
    wait_for_device()
    with abandoned_on_error(lambda: [driver().cuStreamEndCapture(stream.handle) for stream in streams]):
        for stream in streams:
            begin_capture(stream.handle)
        for bound, stream in zip(bounds, streams, strict=True):
            bound.bound.launch(stream)
        graphs = end_captures(streams)
    assert [graph.nodes for graph in graphs] == [ONE_KERNEL, ONE_KERNEL]
    for _ in range(1000):
        for graph in graphs:
            graph.queue()
    for graph, bound in zip(graphs, bounds, strict=True):
        graph.wait()
        result = bound.result()
        assert_close(bound.batch, result.out, result.lse)
        bound.poison()
        assert bound.run().bits == result.bits


@pytest.mark.alone
@parametrize_specs({"balanced": BALANCED, "two_launch": TWO_LAUNCH})
def test_replays_do_something_and_take_no_memory(dev, spec):
    """B13: two captures of one plan alive at once; static buffers change; nothing is allocated."""
    rng = np.random.default_rng(60)
    pool, live = make_pool(rng, spec, NUM_SLOTS)
    plan = dev.plan(spec)
    statics = [StaticBatch(dev, plan, pool, num_requests=size) for size in (2, 4)]
    graphs = [capture("driver", static.bound.launch) for static in statics]
    for static, graph in zip(statics, graphs, strict=True):
        assert static.replayed(graph).bits == static.eager().bits
    before = free_bytes()
    for lens, counts in [([30, 7], [3, 8]), ([0, 555], [1, 1]), ([577, 64], [8, 2])]:
        for static, graph in zip(statics, graphs, strict=True):
            padding = [0] * (static.arrays["kv_indptr"].size - 1 - len(lens))
            batch = batch_over(rng, pool, live, lens + padding, counts + padding)
            static.load(batch)
            graph.replay(100)
            check(batch, static.result())
    wait_for_device()
    assert free_bytes() == before


# ------------------------------------------------------------------------------------------------------------- replay


def random_lengths(rng, spec, num_requests: int) -> tuple[list[int], list[int]]:
    """Prefix lengths and node counts, half of them on an edge; -1 where no prefix sum becomes negative."""
    lens, counts, total = [], [], 0
    most = spec.max_kv_len - spec.max_nodes
    for _ in range(num_requests):
        edge = int(rng.choice([-1, 0, 1, 31, 32, 33, 63, 64, 65, 128, most]))
        length = edge if rng.random() < 0.5 else int(rng.integers(0, most + 1))
        length = max(length, -total)
        total += length
        lens.append(length)
        edge = int(rng.choice([0, 1, spec.max_nodes]))
        counts.append(edge if rng.random() < 0.5 else int(rng.integers(0, spec.max_nodes + 1)))
    return lens, counts


@pytest.mark.timeout(300)
@parametrize_specs({"balanced": BALANCED, "fixed": FIXED, "mla": MLA})
def test_any_batch_within_the_limits(dev, spec):
    """One capture; then lengths, slots, masks and node counts at random: a replay is a launch, bit for bit."""
    rng = np.random.default_rng(61)
    pool, live = make_pool(rng, spec, NUM_SLOTS, dead=range(0, NUM_SLOTS, 9))
    static = StaticBatch(dev, dev.plan(spec), pool, num_requests=4)
    captured = capture("driver", static.bound.launch)
    for i in range(NEW_BATCHES // 5 if spec.shared_kv else NEW_BATCHES):
        batch = batch_over(rng, pool, live, *random_lengths(rng, spec, 4))
        static.load(batch)
        captured.replay()
        replayed = static.result()
        assert replayed.bits == static.eager().bits, f"batch {i}"
        if i % COMPARED_WITH_FLOAT64 == 0:
            check(batch, replayed)


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED})
@pytest.mark.parametrize("padding", [0, 1, -1])
def test_padding_of_a_captured_batch(dev, spec, padding):
    """B11: the fourth request is no request.  Its slot 0 holds NaN, and numbers where a length of 1 makes it a key."""
    rng = np.random.default_rng(62)
    pool, live = make_pool(rng, spec, NUM_SLOTS, dead=() if padding == 1 else (0,))
    live = np.setdiff1d(live, [0])
    static = StaticBatch(dev, dev.plan(spec), pool, num_requests=4)
    captured = capture("driver", static.bound.launch)
    alive = batch_over(rng, pool, live, [9, 17, 5], [4, 4, 4])
    padded = batch_over(rng, pool, live, [9, 17, 5, padding], [4] * 4, [*alive.trees, np.zeros((4, 4), bool)])
    q = np.concatenate([alive.q, padded.q[12:]])
    slot_0 = [0] * max(padding, 0)
    padded = replace(
        padded,
        q=q,
        kv_indices=np.concatenate([alive.kv_indices, slot_0]).astype(np.int64),
        out_cache_loc=np.concatenate([alive.out_cache_loc, [0] * 4]),
    )
    static.load(padded)
    before = [dev.download(static.arrays[name]).tobytes() for name in ("k_cache", "v_cache")]
    result = static.replayed(captured)
    check(padded, result)
    assert np.isfinite(result.out[:16].astype(np.float32)).all()
    if padding < 1:
        assert (result.lse[12:16] == -np.inf).all() and not result.out[12:16].astype(np.float32).any()
    if spec.split == "fixed":
        assert result.rows(slice(12)) == BoundBatch(dev, dev.plan(spec), alive).run().bits
    assert [dev.download(static.arrays[name]).tobytes() for name in ("k_cache", "v_cache")] == before


@on_each_kernel(FIXED)
def test_whatever_stands_in_the_padding(dev, spec):
    """B11: lengths, slots and mask of the padding drawn from what servers leave there; live rows keep their bits."""
    rng = np.random.default_rng(63)
    pool, live = make_pool(rng, spec, NUM_SLOTS)
    static = StaticBatch(dev, dev.plan(spec), pool, num_requests=4)
    captured = capture("driver", static.bound.launch)
    alive = batch_over(rng, pool, live, [290, 33], [8, 5])
    static.load(alive)
    names = ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc", "custom_mask", "mask_indptr")
    contents = {name: np.array(dev.download(static.arrays[name])) for name in names}
    rows, keys, mask = 13, 323, len(alive.custom_mask)
    want = None
    for _ in range(200):
        for name, value in (("kv_indptr", keys), ("qo_indptr", rows), ("mask_indptr", mask)):
            steps = rng.choice([0, 1, -1, 7], 2)
            if name == "qo_indptr":
                steps = np.abs(steps)
            contents[name][3:] = value + np.cumsum(steps)
        contents["kv_indices"][keys : keys + 20] = rng.choice([0, 1, live[0], live[-1]], 20)
        contents["out_cache_loc"][rows:] = rng.choice([0, 1, live[0], live[-1]], len(contents["out_cache_loc"]) - rows)
        contents["custom_mask"][mask : mask + 4000] = rng.choice([0, 1, 255], 4000)
        for name in names:
            dev.write(static.arrays[name], contents[name])
        result = static.replayed(captured)
        want = want or result.rows(slice(rows))
        assert result.rows(slice(rows)) == want, {name: contents[name][3:8] for name in names}
    assert want == BoundBatch(dev, dev.plan(spec), alive).run().bits


@parametrize_specs({"balanced": BALANCED, "fixed": FIXED, "two_launch": TWO_LAUNCH})
def test_captured_short_replayed_long(dev, spec):
    """B12: nothing of the lengths at capture time is frozen."""
    spec = replace(spec, max_requests=2, max_kv_len=262_200)
    rng = np.random.default_rng(64)
    pool, live = make_pool(rng, spec, 262_300)
    static = StaticBatch(dev, dev.plan(spec), pool, num_requests=2)
    static.load(batch_over(rng, pool, live, [1, 1], [4, 4]))
    captured = capture("driver", static.bound.launch)
    for lens in ([1, 1], [4097, 1], [1, 262_144], [63, 64], [1, 1]):
        batch = batch_over(rng, pool, live, lens, [4, 4])
        static.load(batch)
        captured.replay()
        replayed = static.result()
        check(batch, replayed)
        assert replayed.bits == static.eager().bits, lens


@on_each_kernel(replace(BALANCED, max_nodes=66))
def test_a_large_capture_does_not_change_a_small_one(dev, spec):
    """B12: sizes 1, 8 and 66 captured in this order on one plan, then the first again."""
    plan = dev.plan(spec, fresh=True)
    bounds = [BoundBatch(dev, plan, random_batch(np.random.default_rng(65), spec, [400], [n])) for n in (1, 8, 66)]
    graphs, firsts = [], []
    for bound in bounds:
        graphs.append(capture("driver", bound.bound.launch))
        graphs[-1].replay()
        result = bound.result()
        assert_close(bound.batch, result.out, result.lse)
        firsts.append(result.bits)
    for index in (0, 2, 1, 0):
        bounds[index].poison()
        wait_for_device()
        graphs[index].replay()
        assert bounds[index].result().bits == firsts[index]


@on_each_kernel(BALANCED)
def test_any_number_of_replays_without_waiting(dev, spec):
    bound = BoundBatch(dev, dev.plan(spec), small_batch(spec))
    captured = capture("driver", bound.bound.launch)
    captured.replay(5000)
    result = bound.result()
    assert_close(bound.batch, result.out, result.lse)
