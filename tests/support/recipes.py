"""Public faults of this kind of software, as small inputs.  Collected by tests/*/test_recipes.py.

Each number is a recipe of docs/bug-recipes.md; beside its exact numbers stands a test of its whole class.
"""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import nbverify as nv
from nbverify.reference import ancestor_mask
from support.basic import (
    BASE,
    BY_MASK,
    CAP,
    FIXED,
    FP8,
    MLA,
    PREFIX_BYTES,
    WIDE_MLA,
    gqa,
    mla,
    several_chunks,
    tile_keys,
)
from support.batches import (
    assert_close,
    batch_of,
    mask_buffers,
    mask_elements,
    pad,
    pick,
    random_batch,
    shuffled_tree,
    unused_slots,
)
from support.devices import BoundBatch, raw_bits, run
from support.kernels import on_each_kernel, on_kernels, parametrize_specs
from support.probes import EPS, assert_bits, assert_needles, bit_probe, needle_probe, visible_slots

LAYOUTS = {mask.value: BY_MASK[mask] for mask in (nv.Mask.FULL, nv.Mask.TREE, nv.Mask.PACKED)}
NEEDLE = gqa(4, 2, 48, sm_scale=1.0)
SIX_NODES = [-1, 0, 0, 1, 1, 2]


def chain(n):
    return np.tri(n, dtype=bool)


def guarded_tail(dev, array, tail):
    """A device array, and right behind it ``tail`` elements of the same buffer."""
    whole = dev.upload(np.concatenate([array, np.asarray(tail, array.dtype)]))
    return whole[: len(array)]


# ------------------------------------------------------------------------------------------ B01: mask of a padded batch


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
@pytest.mark.parametrize("padded_len", [0, 1])
def test_b01_mask_of_the_live_requests_only(dev, spec, padded_len):
    live = random_batch(np.random.default_rng(101), spec, [5, 2, 7], [3, 3, 3])
    assert list(live.mask_indptr) == [0, 24, 39, 69] and len(live.custom_mask) == 69
    live = bit_probe(live)
    slot = int(unused_slots(live)[0])
    v = np.array(live.v_cache)
    v[slot] = 0.5
    k = np.array(live.k_cache)
    k[slot] = 0
    padded = pad(np.random.default_rng(1), replace(live, v_cache=v, k_cache=k), padded_len, 3, slot=slot)
    padded = replace(padded, q=np.zeros_like(padded.q))
    want = run(dev, live, **CAP)
    assert_bits(live, want)
    for beyond in (0, 1):
        mask = guarded_tail(dev, live.custom_mask, [beyond] * 64)
        result = BoundBatch(dev, dev.plan(spec, **CAP), padded, custom_mask=mask).run()
        assert_bits(live, result, slice(0, 9))
        if spec.split == "fixed":
            assert result.rows(slice(0, 9)) == want.bits
        pads = result.out[9:].astype(float), result.lse[9:]
        if padded_len:
            assert (pads[0] == 0.5).all() and (pads[1] == 0).all(), "the prefix is visible, the mask beyond is not"
        else:
            assert (pads[0] == 0).all() and (pads[1] == -np.inf).all()


@parametrize_specs(LAYOUTS, slow=("tree", "packed"))
def test_b01_bytes_outside_the_segments(dev, spec):
    """Segments in any order, with gaps, in a buffer that is longer: what stands between them is not read."""
    rng = np.random.default_rng(102)
    batch = random_batch(rng, spec, [5, 0, 33], [3, 6, 2])
    want = run(dev, batch, **CAP)
    assert_close(batch, want.out, want.lse)
    sizes = np.diff(batch.mask_indptr)
    starts = np.array([sizes[1] + sizes[2] + 9, 2, sizes[1] + 5])
    for _ in range(2):
        buffer = rng.integers(0, 256, sizes.sum() + 20).astype(batch.custom_mask.dtype)
        for b, start in enumerate(starts):
            buffer[start : start + sizes[b]] = batch.custom_mask[batch.mask_indptr[b] :][: sizes[b]]
        moved = replace(batch, custom_mask=buffer, mask_indptr=np.append(starts, -77))  # only starts are read
        assert run(dev, moved, **CAP).bits == want.bits


@pytest.mark.parametrize("start", [-2, 10**6, -(2**40), 2**40], ids=str)
@parametrize_specs(LAYOUTS, slow=("tree",))
def test_b01_positions_outside_the_buffer_are_hidden(dev, spec, start):
    batch = random_batch(np.random.default_rng(103), spec, [2, 3], [2, 3])
    indptr = batch.mask_indptr.copy()
    indptr[1] = start
    moved = replace(batch, mask_indptr=indptr)
    result = run(dev, moved, **CAP)
    assert_close(moved, result.out, result.lse)


# --------------------------------------------------------------------------------------------------- B02: buffer sizes


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
def test_b02_every_request_at_the_maximum(dev, spec):
    """Buffers of exactly the size that the helper gives, everything full.  Its numbers: tests/host/test_geometry.py."""
    from nbverify.contract import capacity_elements

    spec = replace(spec, max_requests=4, max_nodes=8, max_kv_len=72)
    batch = random_batch(np.random.default_rng(201), spec, [64] * 4, [8] * 4, spare_slots=0)
    need = capacity_elements(spec)
    for name, array in batch.inputs().items():
        if name == "kv_indices":  # sized for requests of max_kv_len prefix tokens and no node
            assert array.size == need[name] - batch.num_tokens
        elif name in need:
            assert array.size == need[name], name
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)


@on_each_kernel(replace(BASE, max_requests=2, max_nodes=4, max_kv_len=40))
def test_b02_one_over_the_maximum(dev, spec):
    """What the host can see is refused; what only the device knows is clamped, and overruns nothing."""
    plan = dev.plan(spec, **CAP)
    batch = random_batch(np.random.default_rng(202), spec, [3, 3, 3], [1, 1, 1])
    with pytest.raises(nv.ArgumentError, match="max_requests=2"):
        BoundBatch(dev, plan, batch)
    short = random_batch(np.random.default_rng(203), spec, [3, 3], [2, 2])
    with pytest.raises(nv.ArgumentError, match="out_cache_loc"):
        BoundBatch(dev, plan, short, out_cache_loc=dev.upload(short.out_cache_loc[:-1]))
    over = random_batch(np.random.default_rng(204), spec, [37, 60], [5, 2])  # 42 keys, 5 nodes
    BoundBatch(dev, plan, over).run()  # checks the canaries

    spec = replace(spec, mask=nv.Mask.NONE)
    over = bit_probe(random_batch(np.random.default_rng(205), spec, [60], [1]))
    result = run(dev, over, **CAP)
    np.testing.assert_allclose(result.lse, np.log(40), rtol=3 * EPS, err_msg="the prefix is cut, the drafts are kept")


# ----------------------------------------------------------------------------------------------------- B03: mask layout


@parametrize_specs(LAYOUTS)
def test_b03_layouts(dev, spec):
    requests = [(range(40, 45), [7, 3, 9, 1, 8, 2], ancestor_mask(SIX_NODES))]
    batch = bit_probe(batch_of(np.random.default_rng(301), spec, requests, 48))
    assert len(batch.custom_mask) == {"full": 66, "tree": 36, "packed": 6}[spec.mask]
    result = run(dev, batch)
    assert_bits(batch, result)
    counts = [6, 7, 7, 8, 8, 8]
    np.testing.assert_allclose(result.lse[:, 0], np.log(counts), rtol=3 * EPS)
    np.testing.assert_allclose(
        result.lse[:, 0], [1.791759, 1.945910, 1.945910, 2.079442, 2.079442, 2.079442], atol=1e-6
    )
    sums = {0: [3, 3, 2, 5, 0, 5], 3: [5, 4, 2, 5, 0, 5], 5: [4, 4, 2, 6, 0, 5]}
    for row, want in sums.items():
        got = result.out[row, 0, :6].astype(float) * counts[row]
        np.testing.assert_allclose(got, want, rtol=2.0**-8)


@on_each_kernel(BASE)
def test_b03_a_mask_of_the_wrong_size(dev, spec):
    """``bind`` cannot know today's lengths; the one-call form reads them, and refuses."""
    tree = ancestor_mask(SIX_NODES)
    for prefix, declared, other in ((5, nv.Mask.TREE, nv.Mask.FULL), (5, nv.Mask.FULL, nv.Mask.TREE)):
        spec = replace(spec, mask=declared)
        batch = random_batch(np.random.default_rng(302), spec, [prefix], [6], trees=[tree])
        wrong, _ = mask_buffers(BY_MASK[other], [prefix], [tree])
        out = dev.upload(np.zeros(batch.q.shape, np.uint16))
        arrays = {name: dev.upload(a) for name, a in batch.inputs().items()}
        arrays["custom_mask"] = dev.upload(wrong)
        with pytest.raises(nv.ArgumentError, match="custom_mask"):
            nv.verify_attention(batch.spec, **arrays, out=out, device=dev.device)
        arrays["custom_mask"] = dev.upload(np.ones((1, 11, 11), np.uint8))  # a padded cube
        with pytest.raises(nv.ArgumentError, match="custom_mask"):
            dev.plan(batch.spec, **CAP).bind(**arrays, out=out)


@on_each_kernel(BASE)
def test_b03_layouts_agree_on_random_trees(dev, spec):
    rng = np.random.default_rng(303)
    for prefix_lens, counts in (([0, 7], [6, 3]), ([33], [5])):
        batch = random_batch(rng, spec, prefix_lens, counts)
        results = [run(dev, batch.with_spec(mask=mask), max_blocks=3) for mask in LAYOUTS]
        assert_close(batch, results[0].out, results[0].lse)
        assert len({r.bits for r in results}) == 1


# ---------------------------------------------------------------------------------------------------- B04: packed masks


@parametrize_specs({mask: replace(spec, max_nodes=40) for mask, spec in LAYOUTS.items()}, slow=("tree",))
def test_b04_chains(dev, spec):
    batch = random_batch(np.random.default_rng(401), spec, [4, 1, 2], [3, 5, 33], trees=[chain(n) for n in (3, 5, 33)])
    batch = bit_probe(batch)
    if spec.mask is nv.Mask.FULL:
        assert list(np.diff(batch.mask_indptr)) == [21, 30, 1155]
    if spec.mask is nv.Mask.PACKED:
        assert list(batch.mask_indptr) == [0, 3, 8, 74]
    result = run(dev, batch)
    assert_bits(batch, result)
    want = np.log([c + i + 1 for c, n in ((4, 3), (1, 5), (2, 33)) for i in range(n)])
    np.testing.assert_allclose(result.lse[:, 1], want, rtol=3 * EPS, atol=EPS)


WORD_EDGES = (1, 7, 8, 9, 31, 32, 33, 63, 64, 65)
SLOW_EDGES = [pytest.param(n, marks=pytest.mark.slow) for n in WORD_EDGES if n not in (1, 31, 32, 33)]


@pytest.mark.parametrize("n", [1, 31, 32, 33, *SLOW_EDGES])
@on_each_kernel(replace(BY_MASK[nv.Mask.PACKED], max_nodes=65))
def test_b04_packed_equals_unpacked_and_ignores_tail_bits(dev, spec, n):
    rng = np.random.default_rng(402)
    batch = bit_probe(random_batch(rng, spec, [1], [n], trees=[rng.random((n, n)) < 0.6]))
    tail = np.uint32(2**32 - 1) << np.uint32(n % 32) if n % 32 else np.uint32(0)
    words = batch.custom_mask.reshape(n, -1).copy()
    words[:, -1] |= tail
    packed = run(dev, batch, **CAP)
    assert_bits(batch, packed)
    assert run(dev, replace(batch, custom_mask=words.ravel()), **CAP).bits == packed.bits
    if dev.is_gpu or n in (1, 33):
        assert run(dev, batch.with_spec(mask=nv.Mask.TREE), **CAP).bits == packed.bits


# ---------------------------------------------------------------------------------------- B05: masks below the diagonal


@pytest.mark.parametrize("prefix_len", [0, 1, 13, 15, 16, 17, 31, 32, 33])
@parametrize_specs(LAYOUTS, slow=("tree",))
def test_b05_siblings_are_not_ancestors(dev, spec, prefix_len):
    tree = ancestor_mask([-1, 0, 1, 0, 3])
    batch = bit_probe(random_batch(np.random.default_rng(501), spec, [prefix_len], [5], trees=[tree]))
    result = run(dev, batch, **CAP)
    assert_bits(batch, result)
    want = prefix_len + np.array([1, 2, 3, 2, 3])
    np.testing.assert_allclose(result.lse[:, 3], np.log(want), rtol=3 * EPS, atol=EPS)


@parametrize_specs(LAYOUTS, slow=("tree", "packed"))
def test_b05_every_bit_matters(dev, spec):
    """Flip one mask bit: exactly one row changes."""
    rng = np.random.default_rng(502)
    n, prefix_len = 5, tile_keys(dev, spec) - 2  # the drafts lie in two tiles
    tree = shuffled_tree(rng, n)
    batch = bit_probe(random_batch(rng, spec, [prefix_len], [n], trees=[tree]))
    plan = dev.plan(spec, **CAP)
    bound = BoundBatch(dev, plan, batch)
    before = bound.run()
    flips = [(i, j) for i in range(n) for j in range(n)] if dev.is_gpu else [(0, 1), (1, 2), (2, 1), (3, 3), (4, 0)]
    for i, j in flips:
        other = tree.copy()
        other[i, j] ^= True
        mask, _ = mask_buffers(spec, [prefix_len], [other])
        dev.write(bound.arrays["custom_mask"], mask)
        after = bound.run()
        changed = [row for row in range(n) if after.rows(slice(row, row + 1)) != before.rows(slice(row, row + 1))]
        assert changed == [i]
        assert_bits(batch, after, visible=visible_slots(replace(batch, trees=[other])))


@on_each_kernel(BASE)
def test_b05_no_causal_shortcut(dev, spec):
    """Children listed before their parents."""
    tree = chain(6)[::-1, ::-1].copy()
    for prefix_len in (0, 30):
        batch = bit_probe(random_batch(np.random.default_rng(503), spec, [prefix_len], [6], trees=[tree]))
        assert_bits(batch, run(dev, batch, **CAP))


# ------------------------------------------------------------------------------------------ B06, B07: offsets past 2^31


def in_vast_pools(dev, batch, slots, num_slots, slot_stride):
    """Move the batch's keys to ``slots`` (one for each key) of vast pools: arrays to bind, for both widths of index."""
    listed = np.concatenate([batch.kv_indices, batch.out_cache_loc]).astype(np.int64)
    arrays = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(batch, name)
        if cache is None:
            continue
        heads, width = cache.shape[1:]
        storage = dev.vast((num_slots - 1) * slot_stride + heads * width, "uint8" if batch.spec.is_fp8 else "uint16")
        pool = as_rows(dev, storage, (num_slots, heads, width), (slot_stride, width, 1))
        for source, target in zip(listed, slots, strict=True):
            dev.write(storage[target * slot_stride :][: heads * width], raw_bits(cache[source]).ravel())
        arrays[name] = pool
    slots = np.asarray(slots, np.int64)
    split = len(batch.kv_indices)
    for dtype in ("int32", "int64"):
        arrays["kv_indices"] = dev.upload(slots[:split].astype(dtype))
        arrays["out_cache_loc"] = dev.upload(slots[split:].astype(dtype))
        yield arrays


def as_rows(dev, storage, shape, strides):
    """A view of flat storage; strides in elements."""
    lib = dev.cupy if dev.is_gpu else np
    return lib.lib.stride_tricks.as_strided(storage, shape, tuple(s * storage.dtype.itemsize for s in strides))


LIMIT = 2**31
VAST = {  # spec, slots (c = 3, n = 1), pool slots, slot stride
    "mla": (MLA, [3_728_269, 3_728_270, 3_728_271, 3_728_390], 3_728_400, 576),
    "gqa-8x128": (gqa(8, 8, 128), [2_097_151, 2_097_152, 2_097_153, 2_097_159], 2_097_160, 1024),
    "strided": (BASE, [2047, 2048, 2049, 2053], 2060, LIMIT // 2048),
    "fp8": (FP8, [2047, 2048, 2049, 2053], 2060, LIMIT // 2048),
}
assert VAST["mla"][1][1] * 576 < LIMIT < VAST["mla"][1][1] * 576 + 576


@pytest.mark.parametrize(
    "spec, slots, num_slots, slot_stride",
    [
        pytest.param(spec, *pool, id=f"{name}-{spec.kernel}", marks=pytest.mark.slow if name == "gqa-8x128" else ())
        for name, (given, *pool) in VAST.items()
        for spec in on_kernels(given)
    ],
)
def test_b06_slots_past_2_31_elements(dev, spec, slots, num_slots, slot_stride):
    batch = random_batch(np.random.default_rng(601), spec, [3], [1])
    plan = dev.plan(spec, **CAP)
    want = BoundBatch(dev, plan, batch).run()
    assert_close(batch, want.out, want.lse)
    for arrays in in_vast_pools(dev, batch, slots, num_slots, slot_stride):
        assert BoundBatch(dev, plan, batch, **arrays).run().bits == want.bits
    del arrays
    dev.free()


@on_each_kernel(BASE)
def test_b06_slots_past_2_32_elements(dev, spec):
    if not dev.is_gpu:
        slot_stride, num_slots = LIMIT // 1024, 1030  # 4.3 GB a pool: no more than addresses
        slots = [1023, 1024, 1025, 1029]
    else:
        slot_stride, num_slots = LIMIT // 1024, 2060
        slots = [1023, 1024, 2048, 2059]
    batch = random_batch(np.random.default_rng(602), spec, [3], [1])
    plan = dev.plan(spec, **CAP)
    want = BoundBatch(dev, plan, batch).run()
    for arrays in in_vast_pools(dev, batch, slots, num_slots, slot_stride):
        assert BoundBatch(dev, plan, batch, **arrays).run().bits == want.bits
    del arrays
    dev.free()


@on_each_kernel(BASE)
def test_b07_mask_past_2_31(dev, spec):
    """Segments may start anywhere: the second one beyond 2^31 bytes."""
    batch = bit_probe(random_batch(np.random.default_rng(701), spec, [4, 4], [2, 2]))
    starts = [16, LIMIT + 16]
    mask = dev.vast(LIMIT + 4096, "uint8")
    for b, start in enumerate(starts):
        dev.write(mask[start : start + 12], batch.custom_mask[12 * b : 12 * b + 12])
    indptr = dev.upload(np.array([*starts, 0], np.int64))
    result = BoundBatch(dev, dev.plan(spec, **CAP), batch, custom_mask=mask, mask_indptr=indptr).run()
    assert_bits(batch, result)
    del mask
    dev.free()


@on_each_kernel(BY_MASK[nv.Mask.TREE])
def test_b07_a_mask_segment_across_2_31(dev, spec):
    batch = bit_probe(random_batch(np.random.default_rng(702), spec, [4], [5]))
    for limit in (LIMIT, 2 * LIMIT) if dev.is_gpu else (LIMIT,):
        start = limit - 7
        mask = dev.vast(limit + 4096, "uint8")
        dev.write(mask[start : start + 25], batch.custom_mask)
        indptr = dev.upload(np.array([start, 0], np.int64))
        assert_bits(batch, BoundBatch(dev, dev.plan(spec, **CAP), batch, custom_mask=mask, mask_indptr=indptr).run())
        del mask
        dev.free()


@pytest.mark.parametrize("name", ["q", "out", "lse"])
@on_each_kernel(BASE)
def test_b07_row_strides_past_2_31(dev, spec, name):
    """Row 8 of q, out or lse begins at 2^31 elements."""
    batch = random_batch(np.random.default_rng(703), spec, [3], [10])
    plan = dev.plan(spec, **CAP)
    bound = BoundBatch(dev, plan, batch)
    want = bound.run()
    assert_close(batch, want.out, want.lse)
    stride, row = LIMIT // 8, bound.arrays[name][0].size
    storage = dev.vast(9 * stride + row, "float32" if name == "lse" else "uint16")
    shape = bound.arrays[name].shape
    view = as_rows(dev, storage, shape, (stride, *((shape[2], 1) if len(shape) == 3 else (1,))))
    if name == "q":
        for i in range(10):
            dev.write(storage[i * stride : i * stride + row], raw_bits(batch.q[i]).ravel())
    moved = BoundBatch(dev, plan, batch, **{name: view})
    moved.bound.launch()
    if name == "q":
        assert moved.result().bits == want.bits
    else:
        rows = [dev.download(storage[i * stride : i * stride + row]).tobytes() for i in range(10)]
        assert b"".join(rows) == getattr(want, name).tobytes()
    del storage, view, moved
    dev.free()


@on_each_kernel(replace(PREFIX_BYTES, max_requests=33, max_nodes=64, max_kv_len=2**20))
def test_b07_full_masks_of_64_mib(dev, spec):
    """33 requests of 2^20 keys that share one list; the last block begins at 2^31."""
    if not dev.is_gpu:
        pytest.skip("2^20 keys: on a GPU only")
    n, total, num_requests = spec.max_nodes, spec.max_kv_len, spec.max_requests
    counts = [n] + [0] * (num_requests - 2) + [n]
    batch = random_batch(
        np.random.default_rng(704), replace(spec, mask="none", prefix_visible=True), [0] * num_requests, counts
    )
    batch = replace(batch, spec=spec, q=np.zeros_like(batch.q))
    prefix = total - n
    kv_indptr = np.zeros(num_requests + 1, np.int64)
    kv_indptr[1:num_requests] = prefix
    kv_indptr[num_requests] = 2 * prefix
    batch = replace(batch, kv_indptr=kv_indptr, kv_indices=np.zeros(2 * prefix, np.int32))
    lib = dev.cupy
    mask = lib.ones(num_requests * n * total, "uint8")
    hidden = 16_000 * np.arange(n)  # node i of the last request does not see so many first keys
    for i in range(n):
        begin = LIMIT + i * total
        mask[begin : begin + hidden[i]] = 0
    k = np.zeros_like(batch.k_cache)
    indptr = lib.arange(num_requests + 1, dtype="int64") * (n * total)
    bound = BoundBatch(
        dev, dev.plan(spec), batch, custom_mask=mask, mask_indptr=indptr, k_cache=dev.upload(k), v_cache=dev.upload(k)
    )
    result = bound.run()
    want = np.log(np.concatenate([np.full(n, total), total - hidden]))
    np.testing.assert_allclose(result.lse, want[:, None].repeat(4, 1), rtol=0, atol=3e-6)
    del mask, bound
    dev.free()


@parametrize_specs(
    {
        "16-512": gqa(1, 1, 16, head_dim_v=512, split="fixed", max_requests=1, max_nodes=128, max_kv_len=4096),
        "mla-512-512": mla(1, head_dim_qk=512, split="fixed", max_requests=1, max_nodes=128, max_kv_len=4096),
    }
)
def test_b07_scratch_past_2_31_floats(dev, spec):
    """fixed: the slot of a partial state is its place on the line; on an H200 2,052 requests x 128 x 16 x 512."""
    if not dev.is_gpu:
        pytest.skip("8.6 GB of partial states: on a GPU only")
    n, tile = spec.max_nodes, dev.plan(spec).geometry
    units, tiles = n // tile.rows_per_tile, spec.max_kv_len // tile.keys_per_tile
    chunk_tiles = max(8, -(-tiles // max(1, dev.plan(spec)._backend.limits.max_chunks // units)))
    floats = units * -(-tiles // chunk_tiles) * tile.rows_per_tile * spec.head_dim_v  # of a request
    num_requests = LIMIT // floats + 4
    prefix = spec.max_kv_len - n
    small = random_batch(np.random.default_rng(705), spec, [prefix], [n])
    spec = replace(spec, max_requests=num_requests)
    tokens = num_requests * n
    batch = replace(
        small,
        spec=spec,
        q=np.tile(small.q, (num_requests, 1, 1)),
        kv_indptr=np.arange(num_requests + 1, dtype=np.int64) * prefix,
        kv_indices=np.tile(small.kv_indices, num_requests),
        qo_indptr=np.arange(num_requests + 1, dtype=np.int64) * n,
        out_cache_loc=np.tile(small.out_cache_loc, num_requests),
        mask_indptr=np.zeros(num_requests + 1, np.int64),  # all share the one block
        trees=small.trees * num_requests,
    )
    plan = dev.plan(spec, fresh=True)
    assert plan.workspace_bytes > 4 * LIMIT
    result = BoundBatch(dev, plan, batch).run()
    want = run(dev, small)
    node = 77  # one row by hand: float64 takes a while for all of them
    slots = visible_slots(small)[node]
    k, v = (small.k_cache if x is None else x for x in (small.k_cache, small.v_cache))
    scores = spec.sm_scale * k[slots, 0].astype(float) @ small.q[node, 0].astype(float)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    v = v[slots, 0, : spec.head_dim_v].astype(float)
    # mma rounds each weight by 2^-8 of itself, independently: see weight_rounding.
    atol = 1e-5 + (2.0**-7 * np.sqrt((weights**2).sum()) * np.abs(v).max() if spec.kernel == "mma" else 0)
    np.testing.assert_allclose(want.out[node, 0].astype(float), weights @ v, rtol=2.0**-8, atol=atol)
    lse = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    np.testing.assert_allclose(want.lse[node, 0], lse, rtol=1e-6)
    assert result.rows(slice(0, n)) == want.bits
    assert result.rows(slice(tokens - n, tokens)) == want.bits
    assert (result.lse.reshape(num_requests, -1) == want.lse.reshape(1, -1)).all()


# ------------------------------------------------------------------------------------------- B08, B09: empty and splits


EMPTY_ROW = np.array([[0, 0], [0, 1]], bool)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@on_each_kernel(PREFIX_BYTES)
def test_b08_a_row_without_keys(dev, spec, blocks):
    rng = np.random.default_rng(801)
    batch = random_batch(rng, spec, [3], [2], trees=[EMPTY_ROW])
    mask = np.zeros((2, 5), np.uint8)
    mask[1, 4] = 1
    batch = replace(batch, custom_mask=mask.ravel())
    result = run(dev, batch, max_blocks=blocks)
    assert_close(batch, result.out, result.lse)
    assert (result.out[0].astype(float) == 0).all() and (result.lse[0] == -np.inf).all()
    own = batch.v_cache[batch.out_cache_loc[1]].repeat(2, 0)  # [heads, D]
    np.testing.assert_array_equal(result.out[1], own)


@parametrize_specs({"balanced": PREFIX_BYTES, "fixed": replace(PREFIX_BYTES, split="fixed")}, slow=("balanced",))
@pytest.mark.parametrize("seen", [None, 0, 31, 100, -2], ids=str)
def test_b08_empty_states_are_neutral(dev, spec, seen):
    """One key in one split, none in all others, from either side: its V, exactly, however often it is merged."""
    c, n = several_chunks(dev, spec), 2
    batch = random_batch(np.random.default_rng(802), spec, [c], [n])
    mask = np.zeros((n, c + n), np.uint8)
    if seen is not None:
        seen %= c  # a key of the prefix: the last ones belong to the last split
        mask[0, seen] = 1
    batch = replace(batch, custom_mask=mask.ravel())
    for blocks in (1, 2, 4) if dev.is_gpu or seen == 100 else (4,):
        result = run(dev, batch, max_blocks=blocks)
        assert_close(batch, result.out, result.lse)
        assert (result.lse[1] == -np.inf).all() and not result.out[1].view(np.uint16).any()
        if seen is not None:
            np.testing.assert_array_equal(result.out[0], batch.v_cache[batch.kv_indices[seen]].repeat(2, 0))


@on_each_kernel(PREFIX_BYTES)
def test_b08_infinite_v_of_hidden_keys(dev, spec):
    """0 * inf is NaN: hidden keys are skipped, in tiles that others see and in splits that nobody sees."""
    batch = random_batch(np.random.default_rng(803), spec, [70], [2])
    rng = np.random.default_rng(804)
    mask = (rng.random((2, 72)) < 0.5).astype(np.uint8)
    mask[:, :33] = 0
    k, v = np.array(batch.k_cache), np.array(batch.v_cache)
    slots = np.concatenate([batch.kv_indices, batch.out_cache_loc])
    hidden = slots[~mask.any(0)]
    for bad in (np.nan, np.inf):
        k[hidden], v[hidden] = bad, bad
        poisoned = replace(batch, custom_mask=mask.ravel(), k_cache=k, v_cache=v)
        result = run(dev, poisoned)
        assert_close(poisoned, result.out, result.lse)


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_b09_more_splits_than_keys(dev, spec, blocks):
    """A short call on a fresh workspace (NaN), and after a long one (stale and finite)."""
    length = 4096 if dev.is_gpu else several_chunks(dev, spec)
    long = random_batch(np.random.default_rng(901), spec, [length], [2])
    if dev.is_gpu:
        spec = replace(spec, max_kv_len=5000)
        long = replace(long, spec=spec)
    short = bit_probe(random_batch(np.random.default_rng(902), spec, [3], [2], trees=[chain(2)]))
    plan = dev.plan(spec, fresh=True, max_blocks=blocks)
    first = BoundBatch(dev, plan, short).run()
    assert_bits(short, first)
    np.testing.assert_allclose(first.lse[:, 0], [math.log(4), math.log(5)], rtol=3 * EPS)
    result = BoundBatch(dev, plan, long).run()
    assert_close(long, result.out, result.lse)
    assert BoundBatch(dev, plan, short).run().bits == first.bits


@pytest.mark.parametrize("edge", [-1, 0, 1], ids=lambda edge: f"{edge:+d}")
@pytest.mark.parametrize("tiles", [1, 2, 8, 9])
@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
def test_b09_every_key_once(dev, spec, tiles, edge):
    """Count probe at the edges of tiles and chunks: ``fixed`` begins its second chunk with the ninth tile."""
    total = tiles * tile_keys(dev, spec) + edge
    batch = bit_probe(random_batch(np.random.default_rng(903), spec, [total - 1], [1], trees=[chain(1)]))
    assert_bits(batch, run(dev, batch))


# ----------------------------------------------------------------------------------------------------- B10, B11: ragged


RAGGED = {"balanced": NEEDLE, "fixed": replace(NEEDLE, split="fixed")}


def ragged_needles(rng, spec):
    """(batch, out): a needle of its own for each (request, row, head), among the keys it sees."""
    counts, lens = [1, 3, 7, 1], [9, 0, 33, 2]
    batch = random_batch(rng, spec, lens, counts, trees=[np.ones((n, n), bool) for n in counts])
    needles = []
    for c, n in zip(lens, counts, strict=True):
        for row in range(n):
            needles.append([(7 * row + 5 * head + n) % (c + n) for head in range(4)])
    return needle_probe(batch, needles)


@parametrize_specs(RAGGED)
def test_b10_rows_of_ragged_requests(dev, spec):
    batch, want = ragged_needles(np.random.default_rng(1001), spec)
    result = run(dev, batch)
    assert_needles(want, result)
    assert len({result.out[row].tobytes() for row in range(12)}) == 12

    lib = dev.cupy if dev.is_gpu else np
    storage = lib.full((4, 12, 48), 0xFFFF, "uint16")  # [heads, tokens, D]: a transposed out
    BoundBatch(dev, dev.plan(spec), batch, out=storage.transpose(1, 0, 2)).bound.launch()
    assert np.ascontiguousarray(dev.download(storage).transpose(1, 0, 2)).tobytes() == want.tobytes()


@parametrize_specs({"balanced": BASE, "fixed": FIXED}, slow=("balanced",))
def test_b10_together_equals_alone(dev, spec):
    lens = [9, 0, several_chunks(dev, spec), 2]
    batch = random_batch(np.random.default_rng(1002), spec, lens, [1, 3, 4, 1])
    together = run(dev, batch)
    assert_close(batch, together.out, together.lse)
    qo = batch.qo_indptr
    for b in range(4):
        alone = run(dev, pick(batch, [b]))
        if spec.split == "fixed":
            assert together.rows(slice(qo[b], qo[b + 1])) == alone.bits
        else:
            assert_close(pick(batch, [b]), alone.out, alone.lse)


@parametrize_specs(
    {"balanced": BASE, "fixed": FIXED, "tree": BY_MASK[nv.Mask.TREE], "causal": BY_MASK[nv.Mask.CAUSAL]},
    slow=("balanced", "tree"),
)
@pytest.mark.parametrize("length", [0, 1, -1])
def test_b11_padded_requests(dev, spec, length):
    """Live requests in a batch padded to 4; a length <= 0 never reads its slot, which holds NaN."""
    rng = np.random.default_rng(1101)
    live = random_batch(rng, spec, [9, 17, 5], [4, 4, 4])
    slot = int(unused_slots(live)[0])
    if length == 1:
        k, v = np.array(live.k_cache), np.array(live.v_cache)
        k[slot], v[slot] = 1, 2
        live = replace(live, k_cache=k, v_cache=v)
    padded = pad(rng, live, length, 4, slot=slot)
    bound = BoundBatch(dev, dev.plan(spec), padded)
    pool = {name: dev.download(bound.arrays[name]).tobytes() for name in ("k_cache", "v_cache")}
    result = bound.run()
    eager = run(dev, live)
    assert_close(live, eager.out, eager.lse)
    if spec.split == "fixed":
        assert result.rows(slice(0, 12)) == eager.bits
    else:
        assert_close(live, result.out[:12], result.lse[:12])
    out, lse = result.out[12:].astype(float), result.lse[12:]
    hidden = length < 0 or (length == 0 and spec.mask.reads_buffer)  # CAUSAL at length 0 sees its draft slots: NaN
    if hidden:
        assert (out == 0).all() and (lse == -np.inf).all()
    elif length == 1 and spec.mask.reads_buffer:
        assert (out == 2).all() and np.isfinite(lse).all()
    assert pool == {name: dev.download(bound.arrays[name]).tobytes() for name in ("k_cache", "v_cache")}


@parametrize_specs({"fixed": FIXED, "balanced": BASE}, slow=("balanced",))
def test_b11_any_padding_metadata(dev, spec):
    """Lengths, slots, mask starts and positions of padded requests drawn from {0, 1, -1, stale}."""
    rng = np.random.default_rng(1102)
    live = random_batch(rng, spec, [9, 40], [2, 3])
    eager = run(dev, live)
    for _ in range(24 if dev.is_gpu else 5):
        padded = live
        for _ in range(2):
            slot = int(rng.choice(unused_slots(live)))
            padded = pad(rng, padded, int(rng.choice([0, 1, -1, 13])), int(rng.choice([0, 1, 2])), slot=slot)
        indptr = padded.mask_indptr.copy()
        indptr[3:] = rng.choice([0, 1, -1, 10**9], 2)
        stale = rng.integers(0, 2, len(padded.custom_mask) + 50).astype(np.uint8)
        stale[: len(live.custom_mask)] = live.custom_mask
        result = run(dev, replace(padded, mask_indptr=indptr, custom_mask=stale))
        if spec.split == "fixed":
            assert result.rows(slice(0, 5)) == eager.bits
        else:
            assert_close(live, result.out[:5], result.lse[:5])


# --------------------------------------------------------------------------------------------------- B16: small devices


@parametrize_specs({"mla": MLA, "gqa-256": gqa(2, 1, 256), "192-128": gqa(4, 2, 192, head_dim_v=128)}, slow_simt=("*",))
def test_b16_the_plan_of_a_smaller_device(dev, spec):
    """With the shared memory of sm_120, on any device.  What fits which budget: tests/host/test_tiles.py."""
    lens = [500, 77, 0] if dev.is_gpu else [40, 0]
    batch = random_batch(np.random.default_rng(1601), spec, lens, [5, 3, 1][: len(lens)])
    plan = dev.plan(spec, shared_limit=101_376, **CAP)
    assert plan.report().shared_bytes <= 101_376
    result = BoundBatch(dev, plan, batch).run()
    assert_close(batch, result.out, result.lse)


# ------------------------------------------------------------------------------------------------------ B17: head tails


MLA_HEADS = {heads: mla(heads, head_dim_qk=32, head_dim_v=16, sm_scale=1.0) for heads in (1, 4, 12, 20, 127)}
WIDE_MLA_HEADS = {heads: replace(WIDE_MLA, num_q_heads=heads, sm_scale=1.0) for heads in MLA_HEADS}
GQA_HEADS = {
    f"{q}x{kv}": gqa(q, kv, 16, sm_scale=1.0) for q, kv in [(12, 4), (20, 4), (5, 1), (7, 1), (28, 4), (40, 8)]
}


WIDE = [f"wide-mla-{heads}" for heads in WIDE_MLA_HEADS]
EVERY_HEADS = {
    **{f"mla-{heads}": spec for heads, spec in MLA_HEADS.items()},
    **{f"wide-mla-{heads}": spec for heads, spec in WIDE_MLA_HEADS.items()},
    **GQA_HEADS,
}


@parametrize_specs(EVERY_HEADS, slow=("wide-mla-127", "40x8"), slow_simt=WIDE)
@pytest.mark.parametrize("n", [1, 3])
def test_b17_every_head_finds_its_key(dev, spec, n):
    if spec.num_q_heads * n > 100 and not dev.is_gpu:
        n = 1  # 127 heads: 8 row tiles a node
    batch = random_batch(np.random.default_rng(1701), spec, [8 - n], [n], trees=[np.ones((n, n), bool)])
    batch, want = needle_probe(batch, np.arange(spec.num_q_heads)[None].repeat(n, 0) % 8)
    assert_needles(want, run(dev, batch, **({} if dev.is_gpu else CAP)))


@parametrize_specs(
    EVERY_HEADS,
    slow=("12x4",),
    slow_simt=WIDE,
    rare=set(EVERY_HEADS) - {"mla-12", "wide-mla-12", "5x1", "12x4"},
)
def test_b17_seventeen_nodes(dev, spec):
    """Row tiles that end inside a node."""
    n = 17 if dev.is_gpu or (spec.num_kv_heads == 1 and spec.group <= 12) else 6
    batch = random_batch(np.random.default_rng(1702), spec, [8], [n], trees=[np.zeros((n, n), bool)])
    if spec.head_dim_qk < 8 + n:
        keys = np.zeros_like(batch.k_cache)
        keys[batch.kv_indices] = (16 * np.eye(8, spec.head_dim_qk))[:, None, :]
        q = np.zeros_like(batch.q)
        heads = np.arange(spec.num_q_heads)
        q[:, heads, heads % 8] = 16
        batch = replace(batch, q=q, k_cache=keys)
        v = batch.k_cache if batch.v_cache is None else batch.v_cache
        want = v[batch.kv_indices[heads % 8], heads // spec.group, : spec.head_dim_v][None].repeat(n, 0)
    else:
        batch, want = needle_probe(batch, np.arange(spec.num_q_heads)[None].repeat(n, 0) % 8)
    assert_needles(want, run(dev, batch))


@pytest.mark.parametrize("heads", [(33, 2), (3, 2)], ids=str)
def test_b17_heads_that_do_not_divide(heads):
    with pytest.raises(nv.ArgumentError, match="num_q_heads"):
        gqa(*heads, 16)


# ----------------------------------------------------------------------------------------------------------- B20: scale


@on_each_kernel(replace(FP8, sm_scale=1.0))
def test_b20_scales(dev, spec):
    batch = random_batch(np.random.default_rng(2001), spec, [2], [1], trees=[chain(1)])
    slots = np.concatenate([batch.kv_indices, batch.out_cache_loc])
    q, k, v = np.zeros_like(batch.q), np.array(batch.k_cache), np.array(batch.v_cache)
    q[..., 0] = 4
    k[slots], v[slots] = 0, 0
    for j, slot in enumerate(slots):
        k[slot, :, 0] = j
        v[slot, :, j] = 1
    batch = replace(batch, q=q, k_cache=k, v_cache=v, k_scale=0.25, v_scale=2.0)
    for blocks in (1, 3):
        result = run(dev, batch, max_blocks=blocks)
        want = np.array([0.180061, 0.489457, 1.330482])
        np.testing.assert_allclose(result.out[0, :, :3].astype(float), want[None].repeat(4, 0), rtol=2.0**-8)
        np.testing.assert_allclose(result.lse, 2.407606, atol=1e-6)
        assert_close(batch, result.out, result.lse)


@parametrize_specs({"bf16": FP8, "fp16": gqa(4, 2, 16, dtype="float16", kv_dtype="float8_e4m3fn")})
def test_b20_all_256_bytes(dev, spec):
    """Each byte as a value, and as a key, of a row that sees one key only."""
    spec = replace(spec, max_requests=16, sm_scale=1.0)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    table = codes.astype(np.float32)
    batch = random_batch(np.random.default_rng(2002), spec, [0], [16], trees=[np.eye(16, dtype=bool)], spare_slots=0)
    v, k = np.zeros_like(batch.v_cache), np.zeros_like(batch.k_cache)
    v[batch.out_cache_loc] = codes.reshape(16, 1, 16)
    plan = dev.plan(spec, **CAP)
    result = BoundBatch(dev, plan, replace(batch, k_cache=k, v_cache=v)).run()
    np.testing.assert_array_equal(result.out[:, 0].astype(np.float32).ravel(), table)
    assert (np.signbit(result.out[:, 0].astype(np.float32).ravel())[1:127] == 0).all()

    q = np.zeros_like(batch.q)
    q[..., 0], q[:, 1, 0], q[:, 1, 15] = 1, 0, 1
    for group in range(0, 256, 32) if dev.is_gpu else (0, 128):
        k[batch.out_cache_loc, :, 0] = codes[group : group + 16, None]
        k[batch.out_cache_loc, :, 15] = codes[group + 16 : group + 32, None]
        if group + 32 in (128, 256):  # NaN in a column that q weighs with 0 is NaN all the same
            k[batch.out_cache_loc[-1], :, 15] = 0
        result = BoundBatch(dev, plan, replace(batch, q=q, k_cache=k, v_cache=np.zeros_like(v))).run()
        want = np.stack([table[group : group + 16], np.nan_to_num(table[group + 16 : group + 32])], axis=1)
        np.testing.assert_allclose(result.lse[:, :2], want, rtol=3 * EPS, atol=0)


@parametrize_specs(
    {
        "gqa": FP8,
        "gqa-fp16": gqa(4, 2, 16, dtype="float16", kv_dtype="float8_e4m3fn"),
        "mla": mla(2, head_dim_qk=48, head_dim_v=32, kv_dtype="float8_e4m3fn"),
    }
)
def test_b20_scaled_fp8_equals_the_dequantised_pool(dev, spec):
    """Powers of two: the dequantised pool is exact in 16 bits, and so are the scores; only v_scale's place differs."""
    rng = np.random.default_rng(2003)
    batch = random_batch(rng, spec, [40], [2])
    k_scale, v_scale = 2.0 ** rng.integers(-3, 3), 2.0 ** rng.integers(-3, 3)
    batch = replace(batch, k_scale=k_scale, v_scale=None if spec.shared_kv else v_scale)
    dtype = batch.q.dtype
    wide = replace(
        batch,
        spec=replace(spec, kv_dtype=spec.dtype),
        k_cache=(batch.k_cache.astype(np.float32) * np.float32(k_scale)).astype(dtype),
        v_cache=None if spec.shared_kv else (batch.v_cache.astype(np.float32) * np.float32(v_scale)).astype(dtype),
        k_scale=1.0,
        v_scale=None,
    )
    scaled = run(dev, batch, **CAP)
    assert_close(batch, scaled.out, scaled.lse)
    assert_close(wide, scaled.out, scaled.lse)
    if spec.kernel == "simt":  # tiles of mma, and with them the order of sums, depend on how wide the cache is
        assert scaled.bits == run(dev, wide, **CAP).bits


# ------------------------------------------------------------------------------------------------------- B21: precision


def correctly_rounded(want, result):
    """(share of outputs that are the float64 result rounded once, relative L2 error)."""
    got = result.out.astype(np.float64)
    return (
        (result.out == want.astype(result.out.dtype)).mean(),
        np.sqrt(((got - want) ** 2).sum() / (want**2).sum()),
    )


LONG_MLA = mla(8, max_nodes=1, max_kv_len=2**20, sm_scale=576**-0.5)
SHORT_GQA = gqa(8, 1, 64, max_nodes=1, sm_scale=0.125)
POOL_ROWS = 65_536  # longer prefixes list their slots again: pools of gigabytes take minutes to draw


@pytest.mark.parametrize(
    "spec, prefix",
    [
        pytest.param(spec, prefix, id=f"{prefix}-{spec.kernel}")
        for given, prefixes in ((SHORT_GQA, [500]), (LONG_MLA, [4096, 262_144, 2**20 - 1]))
        for spec in on_kernels(given)
        for prefix in prefixes
    ],
)
def test_b21_error_does_not_grow_with_splits(dev, spec, prefix):
    """Nor with the length.

    Rounding numbers of any size to bfloat16 moves them by 1.66e-3 of their root mean square: the last rounding of out.
    Rounding the weights moves out by as much again, independently: 2.35e-3 with mma.
    """
    is_short = prefix < 1000
    if not (dev.is_gpu or is_short):
        pytest.skip("thousands of keys: on a GPU only")
    rng = np.random.default_rng(2101)
    batch = random_batch(rng, spec, [min(prefix, POOL_ROWS)], [1])
    slots = np.concatenate([batch.kv_indices, rng.choice(batch.kv_indices, max(0, prefix - POOL_ROWS))])
    batch = replace(batch, kv_indices=slots, kv_indptr=np.array([0, prefix])).with_spec()
    want, _ = batch.reference()
    shares = []
    for blocks in (1, 4) if is_short else (1, 8, 64):
        share, error = correctly_rounded(want, run(dev, batch, max_blocks=blocks))
        assert error <= 2.5e-3
        shares.append(share)
    assert min(shares) >= shares[0] - 0.03
    # float32 weights leave the last rounding alone; weights in 16 bits add errors as large as that one.
    assert shares[0] > (0.9 if spec.kernel == "simt" else 0.4)


@on_each_kernel(replace(BASE, max_kv_len=2**20))
def test_b21_a_million_keys(dev, spec):
    if not dev.is_gpu:
        pytest.skip("2^20 keys: on a GPU only")
    total = 2**20
    batch = random_batch(np.random.default_rng(2102), spec, [3], [1], trees=[chain(1)])
    zeros = np.zeros_like(batch.k_cache)
    batch = replace(
        batch,
        q=np.zeros_like(batch.q),
        k_cache=zeros,
        v_cache=zeros,
        kv_indices=np.zeros(total - 1, np.int32),
        kv_indptr=np.array([0, total - 1]),
        custom_mask=np.ones(total, np.uint8),
    )
    for blocks in (1, 8, None):
        result = run(dev, batch, max_blocks=blocks)
        np.testing.assert_allclose(result.lse, 13.862944, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- B22: poison


@parametrize_specs(
    {"bf16": BASE, "fp8": FP8, "tree": BY_MASK[nv.Mask.TREE], "packed": BY_MASK[nv.Mask.PACKED]}, slow=("packed",)
)
def test_b22_only_listed_rows_matter(dev, spec):
    """18 keys; all other pool rows, the ends of the index lists and the mask bytes past the end are poison."""
    clean = random_batch(np.random.default_rng(2201), spec, [12, 1], [4, 1], spare_slots=9, poison=False)
    want = run(dev, clean, **CAP)
    assert_close(clean, want.out, want.lse)
    unused = unused_slots(clean)
    for value, tail in ((np.nan, int(unused[0])), (448.0 if spec.is_fp8 else np.inf, -1), (np.nan, 2**31 - 1)):
        k, v = np.array(clean.k_cache), np.array(clean.v_cache)
        k[unused], v[unused] = value, value
        mask = np.concatenate([clean.custom_mask, np.full(40, 255, clean.custom_mask.dtype)])
        poisoned = replace(
            clean,
            k_cache=k,
            v_cache=v,
            custom_mask=mask,
            kv_indices=np.append(clean.kv_indices, [tail] * 40).astype(clean.kv_indices.dtype),
            out_cache_loc=np.append(clean.out_cache_loc, [tail] * 40).astype(clean.out_cache_loc.dtype),
        )
        assert run(dev, poisoned, **CAP).bits == want.bits


def test_b22_size_of_a_mask_block():
    """The helper of these tests against the buffers of the reference."""
    for mask, spec in LAYOUTS.items():
        for c, n in ((0, 0), (3, 2), (5, 33), (-1, 2)):
            buffer, _ = mask_buffers(spec, [c], [np.ones((n, n), bool)])
            assert len(buffer) == mask_elements(spec, c, n), mask
