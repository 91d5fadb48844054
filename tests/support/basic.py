"""Values of every feature against float64.  Collected by tests/emulated/test_verify.py and tests/gpu/test_verify.py.

Specs are named here once: they share a compiled kernel wherever they can.  A test runs its specs on every kernel that
serves them (support/kernels.py), so the ``kernel`` of a spec named here is nobody's.
"""

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numba import float32

import nbverify as nv
from support.batches import allowed_error, assert_close, pick, random_batch, unused_slots
from support.devices import BoundBatch, raw_bits, run
from support.kernels import on_each_kernel, parametrize_specs

LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 1300, "kernel": "simt"}
CAP = {"max_blocks": 2}  # where the number of blocks is not the point: the emulator runs them one after the other


def gqa(*heads_and_dim, **options):
    return nv.VerifySpec.gqa(*heads_and_dim, **{"sm_scale": 0.25, **LIMITS, **options})


def mla(num_q_heads, **options):
    return nv.VerifySpec.mla(num_q_heads, **{"sm_scale": 0.144680, **LIMITS, **options})


BASE = gqa(4, 2, 16)
FIXED = gqa(4, 2, 16, split="fixed")
PREFIX_BYTES = gqa(4, 2, 16, prefix_visible=False)
MLA = mla(2)  # the widths of DeepSeek and Kimi: 576 and 512
SMALL_MLA = mla(2, head_dim_qk=48, head_dim_v=32)
WIDE_MLA = mla(2, head_dim_qk=288, head_dim_v=64)  # the narrowest that mma shares among warps as it does 576 and 512
WIDE_MLA_FP8 = replace(WIDE_MLA, kv_dtype="float8_e4m3fn")
FP8 = gqa(4, 2, 16, kv_dtype="float8_e4m3fn")
BY_MASK = {mask: gqa(4, 2, 16, mask=mask) for mask in nv.Mask}
VARIANTS = {
    **{f"{mask.value}": spec for mask, spec in BY_MASK.items()},
    "fixed": FIXED,
    "fixed-packed": gqa(4, 2, 16, split="fixed", mask="packed"),
    "two_launch": gqa(4, 2, 16, reduction="two_launch"),
    "fixed-two_launch": gqa(4, 2, 16, split="fixed", reduction="two_launch"),
}
HEADS = {f"{q}x{kv}": gqa(q, kv, 16, max_requests=2, max_nodes=8) for q, kv in [(9, 3), (20, 4), (12, 1), (127, 1)]}
WIDTHS = {
    "48-80": gqa(2, 1, 48, head_dim_v=80),  # neither is a multiple of a warp's 64 columns
    "192-128": gqa(2, 1, 192, head_dim_v=128),
    "mla-576-512": MLA,
    "mla-288-64": WIDE_MLA,
    **{f"{width}": gqa(2, 1, width) for width in (64, 96, 128, 256)},
}
DTYPES = {
    "fp16": gqa(4, 2, 16, dtype="float16"),
    "bf16-fp8": FP8,
    "fp16-fp8": gqa(4, 2, 16, dtype="float16", kv_dtype="float8_e4m3fn"),
    "mla-fp8": replace(SMALL_MLA, kv_dtype="float8_e4m3fn"),
    "wide-mla-fp8": WIDE_MLA_FP8,
    "wide-mla-fp16-fp8": replace(WIDE_MLA_FP8, dtype="float16"),
    "mla-fp16": replace(WIDE_MLA, dtype="float16", kv_dtype="float16"),
    "bf16": BASE,
}


def soft_cap(score, request, head, node, key):
    return float32(5.0) * math.tanh(score * float32(0.2))


def distance_bias(score, request, head, node, key):
    return score - float32(0.125) * float32(head + 1) * float32(40 + node - key)


def hide_some(score, request, head, node, key):
    if request == 1 and node == 0:
        return float32(-math.inf)
    if key == 2 or (key + head) % 3 == 0:
        return float32(-math.inf)
    return score


SCORE_MODS = {f.__name__: gqa(4, 2, 16, score_mod=f) for f in (soft_cap, distance_bias, hide_some)}
SCORE_MODS["mla-soft_cap"] = replace(WIDE_MLA, score_mod=soft_cap)


def tile_keys(dev, spec):
    """Keys of a tile: what prefix lengths are counted in where a test is about tiles or splits."""
    return dev.plan(spec).geometry.keys_per_tile


def several_chunks(dev, spec):
    """A prefix that ``fixed`` cuts in two, the second chunk inside its second tile; 4 blocks share its tiles."""
    return 9 * tile_keys(dev, spec) + 2


def ragged(dev, spec, seed=1, **options):
    """A prefix that ends inside a tile, an empty one, and one of several blocks; larger on a GPU."""
    rng = np.random.default_rng(seed)
    if dev.is_gpu:
        return random_batch(rng, replace(spec, max_kv_len=5000), [300, 0, 4097, 31], [24, 3, 9, 1], **options)
    long = several_chunks(dev, spec) if spec.split == "fixed" else 290
    return random_batch(rng, spec, [37, 0, long], [5, 3, 1], **options)


@parametrize_specs(VARIANTS, slow=("tree", "none", "fixed", "fixed-packed", "two_launch"))
def test_masks_splits_reductions(dev, spec):
    batch = ragged(dev, spec)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)


@parametrize_specs(HEADS)
def test_head_groups(dev, spec):
    lens, counts = ([200, 0], [8, 1]) if dev.is_gpu else ([9, 0], [2, 1]) if spec.num_q_heads < 100 else ([5], [1])
    batch = random_batch(np.random.default_rng(2), spec, lens, counts)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)


@parametrize_specs(WIDTHS, slow=("64", "96", "128"), slow_simt=("64", "96", "128", "256", "mla-288-64"))
def test_head_widths(dev, spec):
    lens, counts = ([500, 77, 0], [5, 3, 1]) if dev.is_gpu else ([40], [2])
    batch = random_batch(np.random.default_rng(3), spec, lens, counts)
    result = run(dev, batch, **({} if dev.is_gpu else CAP))
    assert_close(batch, result.out, result.lse)


@parametrize_specs(DTYPES, slow_simt=("wide-mla-fp8", "wide-mla-fp16-fp8"))
def test_dtypes_and_scales(dev, spec):
    batch = random_batch(np.random.default_rng(4), spec, [40, 3], [3, 2])
    batch = replace(batch, k_scale=0.375, v_scale=None if spec.shared_kv else 2.5)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)


@parametrize_specs({"fp16": DTYPES["fp16"], "bf16": BASE})
def test_results_beyond_the_type(dev, spec):
    batch = random_batch(np.random.default_rng(5), spec, [3], [2])
    batch = replace(batch, v_scale=3e38 if spec.dtype == "bfloat16" else 1e5)  # some products overflow, most do not
    result = run(dev, batch, **CAP)
    want, lse = batch.reference()
    allowed, _ = allowed_error(batch, want, lse)
    largest = float((np.finfo if spec.dtype == "float16" else ml_dtypes.finfo)(result.out.dtype).max)
    got, beyond = result.out.astype(np.float64), np.abs(want) > largest
    assert beyond.any() and not beyond.all()
    sure = np.abs(np.abs(want) - largest) > allowed
    assert sure.mean() > 0.95
    np.testing.assert_array_equal(got[sure & beyond], np.sign(want[sure & beyond]) * np.inf)
    assert (np.abs(got - want) <= allowed)[sure & ~beyond].all()
    np.testing.assert_allclose(result.lse, lse, rtol=1e-5)


@on_each_kernel(DTYPES["fp16"])
def test_subnormal_float16(dev, spec):
    batch = random_batch(np.random.default_rng(6), spec, [3], [2])
    batch = replace(batch, k_cache=batch.k_cache * np.float16(2.0**-16), v_cache=batch.v_cache * np.float16(2.0**-16))
    batch = replace(batch, k_scale=2.0**16)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)
    assert (result.out != 0).any()


@parametrize_specs({"bf16": BASE, "fp16": DTYPES["fp16"]})
def test_ties_round_to_even(dev, spec):
    """The mean of two neighbours lies halfway between them."""
    batch = random_batch(np.random.default_rng(6), spec, [2, 2, 2], [1, 1, 1], trees=[np.zeros((1, 1), bool)] * 3)
    ulp = 2.0**-7 if spec.dtype == "bfloat16" else 2.0**-10
    v = np.array(batch.v_cache)
    for low in range(3):
        slots = batch.kv_indices[2 * low : 2 * low + 2]
        v[slots] = np.array([1 + low * ulp, 1 + (low + 1) * ulp])[:, None, None]
        v[slots, :, 1::2] *= v.dtype.type(-1)
    batch = replace(batch, q=np.zeros_like(batch.q), v_cache=v)
    for blocks in (1, 2):
        result = run(dev, batch, max_blocks=blocks)
        want = 1 + np.array([0, 2, 2]) * ulp
        np.testing.assert_array_equal(
            np.abs(result.out.astype(float)), np.broadcast_to(want[:, None, None], (3, 4, 16))
        )


@on_each_kernel(PREFIX_BYTES)
def test_prefix_bytes(dev, spec):
    rng = np.random.default_rng(7)
    batch = ragged(dev, spec)
    mask = rng.choice(np.array([0, 0, 1, 2, 128, 255], np.uint8), len(batch.custom_mask))
    batch = replace(batch, custom_mask=mask)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)

    ignored = replace(batch, spec=replace(batch.spec, prefix_visible=True))
    result = run(dev, ignored)
    assert_close(ignored, result.out, result.lse)


INDEX_DTYPES = list(itertools.product(("int32", "int64"), repeat=5))


@on_each_kernel(BASE)
def test_index_dtypes_on_one_plan(dev, spec):
    plan = dev.plan(spec, **CAP)
    cases = INDEX_DTYPES if dev.is_gpu else [INDEX_DTYPES[i] for i in (0, 31, 1, 2, 4, 8, 16)]
    lens = [5, tile_keys(dev, spec) + 2]  # indices of a whole tile of prefix, and of tiles that end sooner
    batches = [random_batch(np.random.default_rng(8), spec, lens, [2, 3], index_dtypes=d) for d in cases]
    results = [BoundBatch(dev, plan, batch).run() for batch in batches]
    assert_close(batches[0], results[0].out, results[0].lse)
    assert len({r.bits for r in results}) == 1


@parametrize_specs({"balanced": BASE, "fixed": FIXED})
@pytest.mark.parametrize("counts", [[3, 0, 1, 2], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [2, 1, 3, -1]], ids=str)
def test_requests_without_nodes(dev, spec, counts):
    batch = random_batch(np.random.default_rng(9), spec, [5, 37, 0, 40], counts)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)


@on_each_kernel(BASE)
def test_an_empty_batch(dev, spec):
    batch = pick(random_batch(np.random.default_rng(9), spec, [5], [2]), [])
    assert run(dev, batch).bits == b""


@on_each_kernel(BASE)
def test_without_lse(dev, spec):
    # Request 0 is shared by several blocks, request 1 is not: both writers of lse.
    batch = random_batch(np.random.default_rng(10), spec, [300, 3], [3, 1])
    plan = dev.plan(spec)
    bound = BoundBatch(dev, plan, batch, with_lse=False)
    result = bound.run()
    assert result.out.tobytes() == BoundBatch(dev, plan, batch).run().out.tobytes()
    assert np.isnan(result.lse).all()


class Strided:
    """A host array as a view into a wider device buffer; the gaps hold 0xFFFF or 0xFF, NaN in all types."""

    def __init__(self, dev, array, *, order=(0, 1, 2), gaps=(0, 0, 0)):
        """``order``: axes from the outermost in memory to the innermost.  ``gaps``: unused elements after an axis."""
        self.dev, self.array = dev, raw_bits(array)
        shape = [self.array.shape[axis] + gaps[axis] for axis in order]
        host = np.full(shape, np.iinfo(self.array.dtype).max, self.array.dtype)
        self._back = tuple(np.argsort(order))
        self._inside = tuple(slice(0, extent) for extent in self.array.shape)
        host.transpose(self._back)[self._inside] = self.array
        self._host, self._device = host, dev.upload(host)

    @property
    def view(self):
        return self._device.transpose(self._back)[self._inside]

    def contents(self):
        """(the array, whether the gaps are as they were)."""
        now = self.dev.download(self._device)
        inside = np.zeros(now.shape, bool)
        inside.transpose(self._back)[self._inside] = True
        return np.array(now.transpose(self._back)[self._inside]), (now[~inside] == self._host[~inside]).all()


@parametrize_specs({"gqa": BASE, "mla": SMALL_MLA, "wide-mla": WIDE_MLA, "fp8": FP8}, slow_simt=("wide-mla",))
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["token-major", "head-major"])
def test_strides(dev, spec, order):
    batch = random_batch(np.random.default_rng(11), spec, [5, 36], [3, 2])
    step = 8  # elements: 16 bytes
    arrays = {"q": Strided(dev, batch.q, order=order, gaps=(0, 3, step))}
    for name in ("k_cache", "v_cache"):
        if getattr(batch, name) is not None:
            gap = 2 * step if name == "k_cache" else 4 * step
            arrays[name] = Strided(dev, getattr(batch, name), order=order, gaps=(1, 1, gap))
    nan = np.full((batch.num_tokens, spec.num_q_heads, spec.head_dim_v), 0xFFFF, np.uint16)
    out = Strided(dev, nan, order=order, gaps=(2, 1, 3 * step))
    lse = dev.upload(np.full((batch.num_tokens, spec.num_q_heads + 3), np.nan, np.float32))
    views = {name: strided.view for name, strided in arrays.items()}
    dense = run(dev, batch, **CAP)
    bound = BoundBatch(dev, dev.plan(spec, **CAP), batch, **views, out=out.view, lse=lse[:, : spec.num_q_heads])
    bound.bound.launch()
    values, gaps_kept = out.contents()
    assert values.tobytes() == dense.out.tobytes() and gaps_kept
    lse = dev.download(lse)
    assert np.array(lse[:, : spec.num_q_heads]).tobytes() == dense.lse.tobytes()
    assert np.isnan(lse[:, spec.num_q_heads :]).all()


@parametrize_specs(SCORE_MODS, slow=("soft_cap", "distance_bias"), slow_simt=("mla-soft_cap",))
def test_score_mods(dev, spec):
    batch = random_batch(np.random.default_rng(12), spec, [37, 5, 300], [3, 2, 1])
    if spec.score_mod is hide_some:  # key 2 is hidden from all: what it holds does not matter
        k, v = np.array(batch.k_cache), np.array(batch.v_cache)
        k[batch.kv_indices[2]], v[batch.kv_indices[2]] = np.nan, np.nan
        batch = replace(batch, k_cache=k, v_cache=v)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)
    if spec.score_mod is hide_some:
        first_of_request_1 = 3
        assert (result.lse[first_of_request_1] == -np.inf).all()


@pytest.mark.parametrize("value", [1, 2, 128, 255])
@on_each_kernel(BASE)
def test_any_nonzero_mask_byte_is_visible(dev, spec, value):
    batch = random_batch(np.random.default_rng(13), spec, [5], [6])
    plan = dev.plan(spec, **CAP)
    want = BoundBatch(dev, plan, batch, custom_mask=dev.upload(batch.custom_mask.astype(bool))).run()
    assert_close(batch, want.out, want.lse)
    assert run(dev, replace(batch, custom_mask=batch.custom_mask * np.uint8(value)), **CAP).bits == want.bits


@on_each_kernel(replace(BY_MASK[nv.Mask.PACKED], max_nodes=40), slow=True)
def test_packed_words_of_either_sign(dev, spec):
    tree = np.tri(33, dtype=bool)  # bit 31 is set: negative as int32
    batch = random_batch(np.random.default_rng(14), spec, [2], [33], trees=[tree])
    plan = dev.plan(spec, **CAP)
    want = BoundBatch(dev, plan, batch).run()
    assert BoundBatch(dev, plan, replace(batch, custom_mask=batch.custom_mask.view(np.int32))).run().bits == want.bits


@parametrize_specs({"bf16": BASE, "fp16": DTYPES["fp16"], "fp8": FP8})
def test_raw_bits(dev, spec):
    batch = random_batch(np.random.default_rng(15), spec, [5], [3])
    plan = dev.plan(spec, **CAP)
    want = run(dev, batch, **CAP)
    for bits in ("uint16", "int16"):
        arrays = {"q": dev.upload(batch.q.view(bits))}
        for name in ("k_cache", "v_cache"):
            arrays[name] = dev.upload(getattr(batch, name).view("uint8" if spec.is_fp8 else bits))
        out = dev.upload(np.zeros(want.out.shape, bits))
        BoundBatch(dev, plan, batch, **arrays, out=out).bound.launch()
        assert dev.download(out).tobytes() == want.out.tobytes()


@on_each_kernel(BASE, slow=True)
def test_batch_sizes_on_one_plan(dev, spec):
    plan = dev.plan(spec, fresh=True)
    batches = [
        random_batch(np.random.default_rng(16), spec, lens, counts)
        for lens, counts in [
            ([300], [4]), ([5], [1]), ([0, 33, 31], [2, 1, 3]), ([1, 0, 32, 64], [1, 1, 1, 1]), ([2, 2], [2, 2]),
        ]
    ]  # fmt: skip
    bound = [BoundBatch(dev, plan, batch) for batch in batches]
    results = [b.run() for b in bound]
    for batch, result in zip(batches, results, strict=True):
        assert_close(batch, result.out, result.lse)
    for b, result in zip(bound, results, strict=True):  # again, over what the others left in the workspace
        b.poison()
        assert b.run().bits == result.bits


@parametrize_specs(
    {"gqa": BASE, "mla": SMALL_MLA, "wide-mla": WIDE_MLA}, slow=("gqa", "wide-mla"), slow_simt=("wide-mla",)
)
def test_rebind(dev, spec):
    """The layers of a model: other caches, q and outputs at other addresses."""
    plan = dev.plan(spec, **CAP)
    layers = [random_batch(np.random.default_rng(17), spec, [5, 34], [2, 3]) for _ in range(3)]
    rng = np.random.default_rng(18)
    for i, layer in enumerate(layers[1:], 1):
        names = ["q", "k_cache"] + ([] if spec.shared_kv else ["v_cache"])
        changed = {n: rng.standard_normal(getattr(layer, n).shape).astype(getattr(layer, n).dtype) for n in names}
        layers[i] = replace(layer, **changed)
    bound = [BoundBatch(dev, plan, layer) for layer in layers]
    want = [b.run() for b in bound]
    assert_close(layers[1], want[1].out, want[1].lse)
    first = bound[0]
    for layer, result in zip(bound, want, strict=True):
        layer.poison()
        fields = ("q", "k_cache", "v_cache", "out", "lse")
        first.bound.rebind(**{name: layer.arrays[name] for name in fields if name in layer.arrays})
        first.bound.launch()
        assert layer.result().bits == result.bits
    first.poison()
    first.bound.rebind(out=first.arrays["out"], lse=first.arrays["lse"])  # alone: inputs stay those of the last layer
    first.bound.launch()
    assert first.result().bits == want[-1].bits
    with pytest.raises(nv.ArgumentError):
        first.bound.rebind(q=dev.upload(layers[0].q[:1]))


@parametrize_specs({"gqa-fp8": FP8, "mla": SMALL_MLA}, slow_simt=("mla",))
def test_rebind_of_scales(dev, spec):
    """Layers of an fp8 pool have scales of their own: the bits are those of a bind with them."""
    plan = dev.plan(spec, **CAP)
    scales = {"k_scale": 0.5} if spec.shared_kv else {"k_scale": 0.5, "v_scale": 3.0}
    batch = random_batch(np.random.default_rng(21), spec, [5], [3])
    scaled = BoundBatch(dev, plan, replace(batch, **scales)).run()
    bound = BoundBatch(dev, plan, batch)
    plain = bound.run()
    assert plain.bits != scaled.bits
    for changed, want in ((scales, scaled), ({}, scaled), ({"k_scale": 1.0}, plain)):
        bound.poison()
        bound.bound.rebind(**changed)
        bound.bound.launch()
        assert bound.result().bits == want.bits
    elsewhere = BoundBatch(dev, plan, batch).arrays["out"]
    for wrong in ({"v_scale": 2.0}, {"k_scale": 0.0}, {"k_scale": 1e38, "v_scale": -1.0}):
        with pytest.raises(nv.ArgumentError, match="scale"):
            bound.bound.rebind(**wrong, out=elsewhere)
    bound.poison()
    bound.bound.launch()
    assert bound.result().bits == plain.bits, "a refused rebind has changed something"


@parametrize_specs({"balanced": BASE, "fixed": FIXED, "two_launch": VARIANTS["two_launch"]}, slow=("two_launch",))
def test_any_grid(dev, spec):
    batch = random_batch(np.random.default_rng(19), spec, [several_chunks(dev, spec), 3], [2, 1])
    limit = dev.plan(spec).grid
    grids = [1, 2, 3, 7, limit // 2, limit - 1, limit] if dev.is_gpu else range(1, limit + 1)
    results = [run(dev, batch, max_blocks=grid) for grid in grids]
    for result in results:
        assert_close(batch, result.out, result.lse)
    if spec.split == "fixed":
        assert len({r.bits for r in results}) == 1
    with pytest.raises(nv.ArgumentError, match="max_blocks"):
        dev.plan(spec, max_blocks=limit + 1)


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("fixed",))
def test_rows_past_the_last_request(dev, spec):
    """Static buffers: q, out and the index lists are longer than today's batch."""
    rng = np.random.default_rng(20)
    batch = random_batch(rng, spec, [300, 5], [3, 1])
    nan_slot = unused_slots(batch)[0]
    extra = 3
    longer = replace(
        batch,
        q=np.concatenate([batch.q, np.full((extra, *batch.q.shape[1:]), np.nan, batch.q.dtype)]),
        out_cache_loc=np.append(batch.out_cache_loc, [nan_slot, -1, 2**31 - 1]).astype(batch.out_cache_loc.dtype),
        kv_indices=np.append(batch.kv_indices, [nan_slot, -1, 2**31 - 1]).astype(batch.kv_indices.dtype),
    )
    result = run(dev, longer)
    assert_close(batch, result.out[:-extra], result.lse[:-extra])
    assert set(result.rows(slice(-extra, None))) == {0xFF}, "as it was filled"
    assert result.rows(slice(-extra)) == run(dev, batch).bits


@on_each_kernel(BASE)
def test_a_view_of_the_pool(dev, spec):
    """One pool for K and V, interleaved: the caches are views with strides."""
    batch = random_batch(np.random.default_rng(21), spec, [5, 33], [2, 1])
    pool = dev.upload(np.stack([raw_bits(batch.k_cache), raw_bits(batch.v_cache)], axis=1))
    bound = BoundBatch(dev, dev.plan(spec, **CAP), batch, k_cache=pool[:, 0], v_cache=pool[:, 1])
    assert bound.run().bits == run(dev, batch, **CAP).bits


@on_each_kernel(replace(BASE, sm_scale=1.0))
def test_extreme_scores(dev, spec):
    """|s| up to 1e38; two keys far ahead, one far behind."""
    batch = random_batch(np.random.default_rng(22), spec, [34], [2])
    q, k = np.zeros_like(batch.q), np.zeros_like(batch.k_cache)
    q[..., 0] = 1e19
    k[batch.kv_indices, :, 0] = -1e18
    for key, value in ((3, 8e18), (33, 8e18), (7, -9e18)):
        k[batch.kv_indices[key], :, 0] = value
    batch = replace(batch, q=q, k_cache=k)
    result = run(dev, batch)
    v = batch.v_cache[batch.kv_indices[[3, 33]]].astype(np.float64).mean(0)  # [kv heads, D]
    want = np.tile(v.repeat(2, 0), (2, 1, 1))
    np.testing.assert_allclose(result.out.astype(np.float64), want, rtol=2.0**-8, atol=1e-7)
    np.testing.assert_allclose(result.lse, np.float64(q[0, 0, 0]) * np.float64(ml_dtypes.bfloat16(8e18)), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@on_each_kernel(BASE)
def test_a_bad_visible_key_spoils_only_rows_that_see_it(dev, spec, value):
    batch = random_batch(np.random.default_rng(23), spec, [33, 4], [3, 1], trees=[np.eye(3, dtype=bool), np.eye(1)])
    k = np.array(batch.k_cache)
    k[batch.out_cache_loc[1], 0, 3] = value  # seen by node 1 alone, heads 0 and 1
    batch = replace(batch, k_cache=k)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)
    if np.isnan(value):
        assert np.isnan(result.lse[1, :2]).all() and np.isfinite(result.lse[1, 2:]).all()
    assert np.isfinite(np.delete(result.lse, 1, axis=0)).all()


@on_each_kernel(BASE)
def test_a_bad_visible_value_spoils_its_column(dev, spec):
    batch = random_batch(np.random.default_rng(24), spec, [33], [3], trees=[np.eye(3, dtype=bool)])
    v = np.array(batch.v_cache)
    v[batch.out_cache_loc[1], 1, 5] = np.nan
    batch = replace(batch, v_cache=v)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)
    assert np.isnan(result.out.astype(np.float32)).sum() == 2  # node 1, heads 2 and 3


@pytest.mark.slow
@parametrize_specs({"balanced": BASE, "fixed": FIXED})
def test_more_requests_than_a_warp(dev, spec):
    """The work table is scanned 32 requests at a time."""
    spec = replace(spec, max_requests=70, max_nodes=4)
    rng = np.random.default_rng(25)
    lens = rng.integers(-1, 40, 67)
    lens[0] = 5  # a length of -1 before any token would put the next request's start at -1
    batch = random_batch(rng, spec, lens, rng.integers(0, 3, 67))
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)


@on_each_kernel(gqa(4, 2, 16, max_requests=70, max_nodes=4))
def test_more_requests_than_a_scan_step(dev, spec):
    counts = np.zeros(67, int)
    counts[[0, 31, 32, 33, 63, 64, 66]] = 1
    batch = random_batch(np.random.default_rng(26), spec, np.arange(67) % 3, counts)
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)
