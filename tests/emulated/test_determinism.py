"""Which launches must give the same bits; and the schedules of the emulator, which must not matter."""

from dataclasses import replace

import numpy as np
import pytest
from support.basic import BASE, VARIANTS
from support.batches import assert_close, random_batch
from support.determinism import *  # noqa: F403
from support.devices import EmulatorDevice, run

SEEDS = range(1, 5)


@pytest.mark.parametrize("name", ["balanced", "fixed-two_launch", "fp8", "mla"])
def test_order_of_threads_does_not_matter(name):
    """A missing barrier shows as a wrong result under some seed."""
    from support.basic import FP8, mla

    spec = {"balanced": BASE, "fp8": FP8, "mla": mla(2, head_dim_qk=48, head_dim_v=32)}.get(name) or VARIANTS[name]
    lens = [290, 3] if spec.split == "fixed" else [66, 3]
    batch = random_batch(np.random.default_rng(51), spec, lens, [2, 4])
    want = run(EmulatorDevice(3), batch)
    assert_close(batch, want.out, want.lse)
    for seed in SEEDS:
        assert run(EmulatorDevice(3, seed), batch).bits == want.bits


def test_order_of_threads_in_checks():
    from support.debug_plans import DEBUG, changed, clean_batch, launch_and_check

    batch = changed(clean_batch(replace(DEBUG, max_nodes=2)), kv_indices=([3, 9], [777, -5]))
    texts = {launch_and_check(EmulatorDevice(2, seed), batch)[0] for seed in range(5)}
    assert len(texts) == 1 and "kv_indices[3]" in texts.pop()
