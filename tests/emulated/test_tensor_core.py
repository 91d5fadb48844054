"""What only the tensor-core kernel does; on the tiles of several devices, and under schedules that must not matter."""

import numpy as np
import pytest
from support.batches import assert_close, random_batch
from support.devices import EmulatorDevice, run
from support.tensor_core import *  # noqa: F403
from support.tensor_core import BOTH, GQA, KIMI, MLA, smallest_limit

SEEDS = range(1, 5)
SPECS = {"gqa": GQA, "mla": MLA, "kimi": KIMI}
CAPABILITIES = [(8, 0), (9, 0), (12, 0)]
each_other_capability = pytest.mark.parametrize("cc", [(8, 0), (12, 0)], ids=["8.0", "12.0"])


@pytest.mark.parametrize("cc", CAPABILITIES, ids=["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_devices(spec, cc):
    """Their shared memory, and with it their tiles; before 9.0 waiting threads spin."""
    batch = random_batch(np.random.default_rng(81), spec, [150, 3] if spec is GQA else [40, 3], [5, 2])
    result = run(EmulatorDevice(3, 0, cc), batch)
    assert_close(batch, result.out, result.lse)


@each_other_capability
@pytest.mark.parametrize("spec", BOTH.values(), ids=BOTH)
def test_order_of_threads_on_other_devices(spec, cc):
    batch = random_batch(np.random.default_rng(82), spec, [70, 3], [2, 3])
    want = run(EmulatorDevice(2, 0, cc), batch)
    assert_close(batch, want.out, want.lse)
    for seed in SEEDS[:2]:
        assert run(EmulatorDevice(2, seed, cc), batch).bits == want.bits


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", BOTH.values(), ids=BOTH)
def test_a_ring_that_goes_round_under_any_order(spec, seed):
    """Few slots, more tiles than slots, two requests: a slot filled too early, or read too early, is a wrong result."""
    plain = EmulatorDevice(1)
    limit, k = smallest_limit(plain, spec), plain.plan(spec).geometry.keys_per_tile
    batch = random_batch(np.random.default_rng(83), spec, [5 * k + 1, 3], [2, 1])
    want = run(plain, batch, shared_limit=limit)
    assert_close(batch, want.out, want.lse)
    assert run(EmulatorDevice(1, seed), batch, shared_limit=limit).bits == want.bits
