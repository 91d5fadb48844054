"""Which launches must give the same bits.  Collected by the emulated test_determinism.py and the gpu test_verify.py."""

from dataclasses import replace

import numpy as np

import nbverify as nv
from support.basic import BASE, BY_MASK, FIXED, FP8, SMALL_MLA, VARIANTS, WIDE_MLA, ragged, several_chunks
from support.batches import assert_close, pad, pick, random_batch, unused_slots
from support.devices import BoundBatch, run
from support.kernels import on_kernels, parametrize_specs

# Specs that tests make of those they are given: for tests/gpu/conftest.py.
ALSO_COMPILED = [
    spec
    for given in (BASE, FIXED, WIDE_MLA, replace(WIDE_MLA, split="fixed"))
    for spec in on_kernels(replace(given, reduction="two_launch"))
] + [spec for given in BY_MASK.values() for spec in on_kernels(given)]


def common_grid(dev, specs) -> int:
    """Balanced cuts depend on the grid, and that on a kernel's registers: one that all have."""
    return min(dev.plan(spec).grid for spec in specs)


@parametrize_specs(
    {"balanced": BASE, "fixed": FIXED, "two_launch": VARIANTS["two_launch"], "fp8": FP8, "wide-mla": WIDE_MLA},
    slow=("balanced", "two_launch", "wide-mla"),
    slow_simt=("wide-mla",),
)
def test_a_rerun_has_the_same_bits(dev, spec):
    batch = ragged(dev, spec)
    bound = BoundBatch(dev, dev.plan(batch.spec), batch)
    first = bound.run()
    for _ in range(20 if dev.is_gpu else 1):
        bound.poison()
        assert bound.run().bits == first.bits
    assert run(dev, batch).bits == first.bits  # other addresses


@parametrize_specs(
    {"balanced": BASE, "fixed": FIXED, "wide-mla": WIDE_MLA, "fixed-wide-mla": replace(WIDE_MLA, split="fixed")},
    slow=("fixed", "wide-mla"),
    slow_simt=("wide-mla",),
    rare=("fixed-wide-mla",),
)
def test_grid_sync_equals_two_launch(dev, spec):
    batch = ragged(dev, spec)
    twin = replace(batch, spec=replace(batch.spec, reduction="two_launch"))
    grid = common_grid(dev, [batch.spec, twin.spec])
    for blocks in (1, 3, grid) if dev.is_gpu else (3,):
        result = run(dev, batch, max_blocks=blocks)
        assert run(dev, twin, max_blocks=blocks).bits == result.bits
    assert_close(batch, result.out, result.lse)


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
def test_layouts_have_the_same_bits(dev, spec):
    """FULL, TREE and PACKED of random trees; CAUSAL and NONE against the masks that say the same."""
    batch = ragged(dev, spec)
    is_fixed = spec.split == "fixed"
    grid = None if is_fixed else common_grid(dev, [replace(s, kernel=spec.kernel) for s in BY_MASK.values()])
    layouts = ["full", "packed"] if is_fixed else ["full", "tree", "packed"]
    results = [run(dev, batch.with_spec(mask=nv.Mask(mask)), max_blocks=grid) for mask in layouts]
    assert len({r.bits for r in results}) == 1
    if is_fixed:
        return
    counts = np.diff(batch.qo_indptr)
    for mask, make in (("causal", np.tri), ("none", lambda n, dtype: np.ones((n, n), dtype))):
        drawn = replace(batch, trees=[make(n, dtype=bool) for n in counts]).with_spec(mask=nv.Mask.FULL)
        assert (
            run(dev, drawn, max_blocks=grid).bits == run(dev, drawn.with_spec(mask=nv.Mask(mask)), max_blocks=grid).bits
        )


@parametrize_specs(
    {"gqa": FIXED, "mla": replace(SMALL_MLA, split="fixed"), "wide-mla": replace(WIDE_MLA, split="fixed")},
    slow=("mla",),
    rare=("wide-mla",),
)
def test_fixed_bits_depend_on_the_request_alone(dev, spec):
    """Alone, in a batch, elsewhere in it, padded, on other grids, with a larger plan: the same bits."""
    rng = np.random.default_rng(31)
    if dev.is_gpu:
        spec = replace(spec, max_kv_len=5000)
        batch = random_batch(rng, spec, [4097, 40, 0, 300], [5, 2, 3, 24])
    else:
        batch = random_batch(rng, spec, [several_chunks(dev, spec), 40, 0], [2, 1, 3])
    want = run(dev, batch)
    assert_close(batch, want.out, want.lse)
    qo = batch.qo_indptr

    def same(variant, order):
        for place, b in enumerate(order):
            begin = sum(int(qo[other + 1] - qo[other]) for other in order[:place])
            rows = slice(begin, begin + int(qo[b + 1] - qo[b]))
            assert variant.rows(rows) == want.rows(slice(qo[b], qo[b + 1])), f"request {b} at place {place}"

    requests = list(range(len(batch.trees)))
    for order in ([0], [1], requests[::-1], [2, 0]):
        same(run(dev, pick(batch, order)), order)
    limit = dev.plan(spec).grid
    for blocks in (1, 2, 3, 7, limit) if dev.is_gpu else (1, 3):
        same(run(dev, batch, max_blocks=blocks), requests)
    same(run(dev, replace(batch, spec=replace(spec, max_requests=37))), requests)
    slot = int(unused_slots(batch)[0])
    for length in (0, -1):
        same(run(dev, pad(rng, pick(batch, [1, 2]), length, 2, slot=slot)), [1, 2])


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
def test_bits_do_not_depend_on_the_workspace(dev, spec):
    """NaN in a plan's first launch, then what a larger and another batch left there."""
    plan = dev.plan(spec, fresh=True)
    batch = random_batch(np.random.default_rng(32), spec, [several_chunks(dev, spec), 3], [2, 3])
    other = random_batch(np.random.default_rng(33), spec, [300, 70, 5], [5, 4, 1])
    first = BoundBatch(dev, plan, batch).run()
    BoundBatch(dev, plan, other).run()
    assert BoundBatch(dev, plan, batch).run().bits == first.bits


@parametrize_specs({"gqa": BASE, "wide-mla": WIDE_MLA}, slow_simt=("wide-mla",))
def test_hidden_keys_do_not_change_bits(dev, spec):
    """A row's bits depend on its visible keys alone: finite, infinite or NaN K and V where nothing is seen."""
    rng = np.random.default_rng(34)
    batch = random_batch(rng, spec, [33], [4], trees=[np.eye(4, dtype=bool)])
    want = run(dev, batch, max_blocks=2)
    for value in (0.0, 1e30, np.inf, np.nan):
        caches = {name: np.array(batch.inputs()[name]) for name in ("k_cache", "v_cache") if name in batch.inputs()}
        for cache in caches.values():
            cache[batch.out_cache_loc[2]] = value
        result = run(dev, replace(batch, **caches), max_blocks=2)
        for row in (0, 1, 3):
            assert result.rows(slice(row, row + 1)) == want.rows(slice(row, row + 1))
