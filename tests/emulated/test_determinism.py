"""Which launches must give the same bits; and the schedules of the emulator, which must not matter."""

from dataclasses import replace

import numpy as np
from support.basic import BASE, FP8, SMALL_MLA, VARIANTS, WIDE_MLA, WIDE_MLA_FP8, several_chunks
from support.batches import assert_close, random_batch
from support.debug_plans import DEBUG, changed, clean_batch, launch_and_check
from support.determinism import *  # noqa: F403
from support.devices import EmulatorDevice, run
from support.kernels import on_each_kernel, parametrize_specs

SEEDS = range(1, 5)
ORDERED = {
    "balanced": BASE,
    "fixed-two_launch": VARIANTS["fixed-two_launch"],
    "fp8": FP8,
    "mla": SMALL_MLA,
    "wide-mla": WIDE_MLA,
    "wide-mla-fp8": WIDE_MLA_FP8,
}


@parametrize_specs(ORDERED, slow=("fixed-two_launch", "mla"), slow_simt=("wide-mla", "wide-mla-fp8"))
def test_order_of_threads_does_not_matter(spec):
    """A missing barrier shows as a wrong result under some seed."""
    lens = [several_chunks(EmulatorDevice(3), spec), 3] if spec.split == "fixed" else [66, 3]
    batch = random_batch(np.random.default_rng(51), spec, lens, [2, 4])
    want = run(EmulatorDevice(3), batch)
    assert_close(batch, want.out, want.lse)
    for seed in SEEDS:
        assert run(EmulatorDevice(3, seed), batch).bits == want.bits


@on_each_kernel(replace(DEBUG, max_nodes=2), slow=True)
def test_order_of_threads_in_checks(spec):
    batch = changed(clean_batch(spec), kv_indices=([3, 9], [777, -5]))
    texts = {launch_and_check(EmulatorDevice(2, seed), batch)[0] for seed in range(5)}
    assert len(texts) == 1 and "kv_indices[3]" in texts.pop()
