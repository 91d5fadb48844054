"""``schedule="step"``: one schedule for all launches of a step.  Collected by the emulated and the gpu tier."""

from dataclasses import replace

import numpy as np
import pytest

import nbverify as nv
from support.basic import BASE, FIXED, WIDE_MLA, ragged
from support.batches import assert_close, random_batch
from support.devices import BoundBatch, run

SPECS = {
    "teams": replace(BASE, kernel="mma"),
    "fixed": replace(FIXED, kernel="mma"),
    "roles": replace(WIDE_MLA, kernel="mma"),
    "two_launch": replace(WIDE_MLA, kernel="mma", reduction="two_launch"),
}
ALSO_COMPILED = [replace(spec, schedule="step") for spec in SPECS.values()]


def of_step(batch, **changes):
    return replace(batch, spec=replace(batch.spec, schedule="step", **changes))


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=name, marks=() if name in ("fixed", "roles") else pytest.mark.slow)
        for name, spec in SPECS.items()
    ],
)
def test_bits_are_those_of_a_schedule_of_each_launch(dev, spec):
    """For every launch of the step, and for the next step with other lengths in the same buffers."""
    batch = ragged(dev, spec)
    step = of_step(batch)
    grid = min(dev.plan(batch.spec).grid, dev.plan(step.spec).grid)
    want = run(dev, batch, max_blocks=grid)
    assert_close(batch, want.out, want.lse)
    bound = BoundBatch(dev, dev.plan(step.spec, max_blocks=grid), step)
    bound.bound.schedule()
    for _ in range(2):
        bound.poison()
        assert bound.run().bits == want.bits

    shorter = batch.kv_indptr.copy()
    shorter[1:] -= shorter[1] // 2  # the first prefix is half as long, and starts later in the list
    other = replace(batch, kv_indptr=shorter)
    for name, array in other.inputs().items():
        if name in ("kv_indptr", "custom_mask", "mask_indptr") and array is not None:
            dev.write(bound.arrays[name], array)
    bound.bound.schedule()
    assert bound.run().bits == run(dev, other, max_blocks=grid).bits


def test_binds_of_a_plan_share_it(dev):
    """Other layers: another pool, q and out, the same lengths."""
    batch = of_step(ragged(dev, SPECS["roles"]))
    first = BoundBatch(dev, dev.plan(batch.spec, fresh=True), batch)
    shared = {n: first.arrays[n] for n in ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc", "mask_indptr")}
    second = BoundBatch(dev, first.plan, batch, **shared)
    first.bound.schedule()
    assert first.run().bits == second.run().bits

    stranger = BoundBatch(dev, first.plan, batch)
    with pytest.raises(nv.ArgumentError, match=r"^schedule: expected one made with this kv_indptr, int32 \[\d\] at 0x"):
        stranger.bound.launch()


def test_the_one_call_form_makes_its_own(dev):
    if dev.is_gpu:
        pytest.skip("the arrays of this test are numpy's")
    spec = of_step(ragged(dev, SPECS["roles"])).spec
    q, cache = (
        np.full((3, spec.num_q_heads, spec.head_dim_qk), 0x3C00, np.uint16),
        np.full((8, 1, spec.head_dim_qk), 0x3C00, np.uint16),
    )
    outs = []
    for schedule in ("launch", "step"):
        out, _ = nv.verify_attention(
            replace(spec, schedule=schedule, mask="causal"), q=q, k_cache=cache, v_cache=None,
            kv_indptr=np.array([0, 4], np.int32), kv_indices=np.arange(4, dtype=np.int32),
            qo_indptr=np.array([0, 3], np.int32), out_cache_loc=np.arange(4, 7, dtype=np.int32),
            out=np.full((3, spec.num_q_heads, spec.head_dim_v), 0xFFFF, np.uint16), device="emulator",
        )  # fmt: skip
        outs.append(out)
    assert (outs[0] == outs[1]).all() and not (outs[0] == 0xFFFF).any()


def test_wrong_use_is_refused(dev):
    batch = ragged(dev, SPECS["teams"])
    bound = BoundBatch(dev, dev.plan(of_step(batch).spec, fresh=True), of_step(batch))
    with pytest.raises(nv.ArgumentError, match=r"^schedule: expected bound.schedule\(\) before the first launch"):
        bound.bound.launch()
    plain = BoundBatch(dev, dev.plan(batch.spec), batch)
    with pytest.raises(nv.ArgumentError, match=r"^schedule: expected 'step' in the plan's spec, got 'launch'"):
        plain.bound.schedule()
    with pytest.raises(nv.ArgumentError, match=r"^schedule: expected 'launch' with kernel='simt', got 'step'"):
        replace(BASE, kernel="simt", schedule="step")
    with pytest.raises(nv.ArgumentError, match=r"^schedule: expected one of"):
        replace(BASE, kernel="mma", schedule="layer")


def test_debug_finds_lengths_that_have_changed(dev):
    batch = of_step(random_batch(np.random.default_rng(3), SPECS["roles"], [70, 9], [3, 2]))
    plan = dev.plan(batch.spec, debug=True, fresh=True)
    bound = BoundBatch(dev, plan, batch)
    bound.bound.schedule()
    bound.run()
    plan.check()
    lengths = batch.kv_indptr.copy()
    lengths[1:] -= 64
    dev.write(bound.arrays["kv_indptr"], lengths)
    bound.run()
    with pytest.raises(nv.DeviceInputError, match=r"kv_indptr, qo_indptr\[0\]: expected the lengths that schedule"):
        plan.check()
