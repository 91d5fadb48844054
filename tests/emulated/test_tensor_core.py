"""What only the tensor-core kernel does; on the tiles of several devices, and under schedules that must not matter."""

from dataclasses import replace

import numpy as np
import pytest
from support.batches import assert_close, random_batch
from support.devices import EmulatorDevice, run
from support.tensor_core import *  # noqa: F403
from support.tensor_core import BOTH, FP8, GQA, IN_PARTS, KIMI, MLA, TAIL, limit_with_parts, slow, smallest_limit

SEEDS = range(1, 5)
SPECS = {"gqa": GQA, "tail": TAIL, "mla": MLA, "kimi": KIMI}
KIMI_FP8 = replace(KIMI, kv_dtype="float8_e4m3fn")  # of 72 rows
CAPABILITIES = [(8, 0), (9, 0), (12, 0)]
each_other_capability = pytest.mark.parametrize("cc", [(8, 0), (12, 0)], ids=["8.0", "12.0"])


@pytest.mark.parametrize("cc", CAPABILITIES, ids=["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_devices(spec, cc):
    """Their shared memory, and with it their tiles; before 9.0 waiting threads spin."""
    batch = random_batch(np.random.default_rng(81), spec, [150, 3] if spec.num_kv_heads > 1 else [40, 3], [5, 2])
    result = run(EmulatorDevice(3, 0, cc), batch)
    assert_close(batch, result.out, result.lse)


@pytest.mark.parametrize("cc", [slow((8, 0)), slow((9, 0)), (12, 0)], ids=["8.0", "9.0", "12.0"])
@pytest.mark.parametrize(
    "spec", [*map(slow, FP8.values()), KIMI_FP8, slow(replace(KIMI_FP8, max_nodes=8))], ids=[*FP8, "kimi", "kimi-64"]
)
def test_fp8_on_devices(spec, cc):
    """The same of fp8, whose raw slots and parts of queries depend on the device."""
    device = EmulatorDevice(3, 0, cc)
    batch = random_batch(np.random.default_rng(84), spec, [70, 3], [5, 2])
    result = run(device, batch)
    assert_close(batch, result.out, result.lse)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("name", ["teams 2 fp8", slow("roles 3 fp8")])
def test_order_of_threads_while_queries_pass(name, seed):
    spec, parts = IN_PARTS[name]
    limit = limit_with_parts(EmulatorDevice(1), spec, parts)
    batch = random_batch(np.random.default_rng(85), spec, [20, 1], [spec.max_nodes, 3])
    want = run(EmulatorDevice(1), batch, shared_limit=limit)
    assert_close(batch, want.out, want.lse)
    assert run(EmulatorDevice(1, seed), batch, shared_limit=limit).bits == want.bits


@each_other_capability
@pytest.mark.parametrize("spec", [*BOTH.values(), slow(TAIL)], ids=[*BOTH, "tail"])
def test_order_of_threads_on_other_devices(spec, cc):
    batch = random_batch(np.random.default_rng(82), spec, [70, 3], [2, 3])
    want = run(EmulatorDevice(2, 0, cc), batch)
    assert_close(batch, want.out, want.lse)
    for seed in SEEDS[:2]:
        assert run(EmulatorDevice(2, seed, cc), batch).bits == want.bits


@pytest.mark.parametrize("seed", [*SEEDS[:2], *map(slow, SEEDS[2:])])
@pytest.mark.parametrize("spec", [*BOTH.values(), *FP8.values()], ids=[*BOTH, *FP8])
def test_a_ring_that_goes_round_under_any_order(spec, seed):
    """Few slots, more tiles than slots, two requests: a slot filled too early, or read too early, is a wrong result."""
    plain = EmulatorDevice(1)
    limit, k = smallest_limit(plain, spec), plain.plan(spec).geometry.keys_per_tile
    batch = random_batch(np.random.default_rng(83), spec, [5 * k + 1, 3], [2, 1])
    want = run(plain, batch, shared_limit=limit)
    assert_close(batch, want.out, want.lse)
    assert run(EmulatorDevice(1, seed), batch, shared_limit=limit).bits == want.bits
