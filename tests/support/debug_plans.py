"""``debug=True``: wrong device contents are named, and overrun nothing even when they are not."""

from dataclasses import replace

import numpy as np
import pytest

import nbverify as nv
from support.basic import BY_MASK, FIXED
from support.batches import pick, random_batch
from support.devices import BoundBatch, run
from support.kernels import on_each_kernel, parametrize_specs

DEBUG_PLANS = True  # for tests/gpu/conftest.py


def slow(value):
    """Left to ``make test-all`` and to the GPU."""
    return pytest.param(value, marks=pytest.mark.slow)


DEBUG = replace(FIXED, max_nodes=6, max_kv_len=60)
DEBUG_PACKED = replace(BY_MASK[nv.Mask.PACKED], max_nodes=40)


def clean_batch(spec):
    return random_batch(np.random.default_rng(41), spec, [5, 33, 4], [2, 3, 1])


def changed(batch, **entries):
    """Other values at some positions: ``kv_indices=(3, 999)``."""
    arrays = {}
    for name, (position, value) in entries.items():
        arrays[name] = getattr(batch, name).copy()
        arrays[name][position] = value
    return replace(batch, **arrays)


def launch_and_check(dev, batch, launches=1, **arrays):
    """The text of the report, or None.  Then the plan is clean again."""
    plan = dev.plan(batch.spec, debug=True, max_blocks=2)
    plan.check()
    bound = BoundBatch(dev, plan, batch, **arrays)
    for _ in range(launches):
        result = bound.run()  # checks the canaries
    try:
        plan.check()
    except nv.DeviceInputError as error:
        assert plan.check() is None, "reading clears the findings"
        return str(error), result
    return None, result


@parametrize_specs({"full": DEBUG, "packed": DEBUG_PACKED})
def test_a_clean_batch(dev, spec):
    batch = clean_batch(spec)
    text, result = launch_and_check(dev, batch)
    assert text is None
    assert result.bits == run(dev, batch, max_blocks=2).bits


@pytest.mark.parametrize("slot", [-1, 2**31 - 1, *map(slow, (999, "one past"))], ids=str)
@pytest.mark.parametrize("buffer, position", [("kv_indices", 7), ("kv_indices", 0), ("out_cache_loc", 4)])
@on_each_kernel(DEBUG)
def test_slots_outside_the_pool(dev, spec, buffer, position, slot):
    batch = clean_batch(spec)
    slot = len(batch.k_cache) if slot == "one past" else slot
    text, result = launch_and_check(dev, changed(batch, **{buffer: (position, slot)}))
    assert text == f"{buffer}[{position}]: expected a row of the pool, got slot {slot}"
    assert_neighbours_unharmed(dev, batch, result, [0] if position == 0 else [1])


def assert_neighbours_unharmed(dev, batch, result, spoilt):
    """``fixed``: the other requests have the bits of the clean batch."""
    want = run(dev, batch, max_blocks=2)
    for b in set(range(3)) - set(spoilt):
        rows = slice(batch.qo_indptr[b], batch.qo_indptr[b + 1])
        assert result.rows(rows) == want.rows(rows), f"request {b}"


@on_each_kernel(DEBUG)
def test_several_findings_count_and_the_first_is_named(dev, spec):
    batch = clean_batch(spec)
    bad = changed(batch, kv_indices=([3, 9, 20], [777, -5, 888]), out_cache_loc=([1, 2], [-7, 555]))
    text, _ = launch_and_check(dev, bad)
    assert text.splitlines() == [
        "kv_indices[3]: expected a row of the pool, got slot 777 (and 2 more)",
        "out_cache_loc[1]: expected a row of the pool, got slot -7 (and 1 more)",
    ]
    text, _ = launch_and_check(dev, bad, launches=3)
    assert "kv_indices[3]" in text and "slot 777 (and 8 more)" in text, "findings add up over launches"


@on_each_kernel(DEBUG)
def test_prefix_entries_past_the_end_of_kv_indices(dev, spec):
    batch = clean_batch(spec)  # 42 entries
    text, result = launch_and_check(dev, changed(batch, kv_indptr=(3, 45)))
    assert text.startswith("kv_indptr[3]: expected an entry range inside kv_indices, got value 45")
    assert_neighbours_unharmed(dev, batch, result, [2])


@on_each_kernel(DEBUG)
def test_prefix_entries_before_the_start(dev, spec):
    batch = clean_batch(spec)
    text, result = launch_and_check(dev, changed(batch, kv_indptr=(0, -2)))
    assert text.startswith("kv_indptr[0]: expected an entry range inside kv_indices, got value -2")
    assert_neighbours_unharmed(dev, batch, result, [0])


@on_each_kernel(replace(DEBUG, max_kv_len=20))
def test_more_keys_than_max_kv_len(dev, spec):
    batch = clean_batch(spec)
    text, result = launch_and_check(dev, batch)
    assert text == "kv_indptr[2]: expected prefix + nodes <= max_kv_len=20, got prefix + nodes 36"
    others = [0, 2]
    want = run(dev, pick(batch, others), max_blocks=2)
    assert result.rows(slice(0, 2)) + result.rows(slice(5, 6)) == want.rows(slice(0, 2)) + want.rows(slice(2, 3))


@on_each_kernel(replace(DEBUG, max_nodes=2))
def test_more_nodes_than_max_nodes(dev, spec):
    batch = clean_batch(spec)
    text, result = launch_and_check(dev, batch)
    assert text == "qo_indptr[2]: expected at most max_nodes=2 nodes, got nodes 3"
    assert set(result.rows(slice(4, 5))) == {0xFF}, "the third node of request 1 is not computed"
    assert np.isfinite(np.delete(result.lse, 4, axis=0)).all()


@on_each_kernel(DEBUG)
def test_rows_past_the_end_of_q(dev, spec):
    batch = clean_batch(spec)  # 6 rows
    text, result = launch_and_check(dev, changed(batch, qo_indptr=(3, 8)))
    assert "qo_indptr[3]: expected a row range inside q, got value 8" in text
    assert_neighbours_unharmed(dev, batch, result, [2])


@on_each_kernel(DEBUG)
def test_rows_before_the_start(dev, spec):
    batch = clean_batch(spec)
    text, result = launch_and_check(dev, changed(batch, qo_indptr=(0, -1)))
    assert "qo_indptr[0]: expected a row range inside q, got value -1" in text
    assert_neighbours_unharmed(dev, batch, result, [0])


@pytest.mark.parametrize("sums, where", [([0, 2, 0, 2], 2), ([1, 2, 5, 6], 0), ([0, 2, 5, 4], None)], ids=str)
@on_each_kernel(DEBUG)
def test_rows_of_two_requests_or_of_none(dev, spec, sums, where):
    """The second request's rows again, a first row that nobody has, and a last request without nodes: legal."""
    batch = clean_batch(spec)
    text, _ = launch_and_check(dev, replace(batch, qo_indptr=np.array(sums, batch.qo_indptr.dtype)))
    if where is None:
        assert text is None
    else:
        line = f"qo_indptr[{where}]: expected to go on where the requests before it ended, got value {sums[where]}"
        assert line in text.splitlines()


@parametrize_specs({"full": DEBUG, "packed": DEBUG_PACKED})
@pytest.mark.parametrize("start", [-3, "one too far", 2**40], ids=str)
def test_mask_blocks_outside_the_buffer(dev, spec, start):
    batch = clean_batch(spec)
    start = int(batch.mask_indptr[2]) + 1 if start == "one too far" else start
    text, result = launch_and_check(dev, changed(batch, mask_indptr=(2, start)))
    assert text == f"mask_indptr[2]: expected a region inside custom_mask, got start {start}"
    if spec.split == "fixed":
        assert_neighbours_unharmed(dev, batch, result, [2])


@on_each_kernel(DEBUG)
def test_wild_lengths_overrun_nothing(dev, spec):
    """Whatever stands in the prefix sums: no canary is touched, nothing hangs, and something is reported."""
    rng = np.random.default_rng(42)
    batch = clean_batch(spec)
    for _ in range(40 if dev.is_gpu else 8):
        kv, qo = batch.kv_indptr.copy(), batch.qo_indptr.copy()
        wild = np.array([-(2**31), -1, 0, 1, 7, 1000, 2**31 - 1])
        kv[rng.integers(0, 4)] = rng.choice(wild[[0, 5, 6]])
        qo[rng.integers(0, 4)] = rng.choice(wild)
        slots = rng.integers(-(2**31), 2**31, len(batch.kv_indices)).astype(batch.kv_indices.dtype)
        wild_batch = replace(batch, kv_indptr=kv, qo_indptr=qo, kv_indices=slots)
        text, _ = launch_and_check(dev, wild_batch)
        assert text is not None


@on_each_kernel(DEBUG)
def test_indices_of_64_bits_are_not_truncated(dev, spec):
    """2^32 + 3 is no slot 3."""
    batch = clean_batch(spec)
    wide = batch.kv_indices.astype(np.int64)
    wide[3] += 2**32
    text, _ = launch_and_check(dev, replace(batch, kv_indices=wide))
    assert text.endswith(f"got slot {wide[3]}")


@on_each_kernel(FIXED)
def test_check_needs_a_debug_plan(dev, spec):
    with pytest.raises(nv.ArgumentError, match="debug"):
        dev.plan(spec).check()
