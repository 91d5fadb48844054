"""What the tensor-core kernel does that the plain one does not: fragments, teams, ring slots, weights in 16 bits.

Collected by tests/emulated/test_tensor_core.py and tests/gpu/test_tensor_core.py; the oracle is float64, as everywhere.
"""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import nbverify as nv
from nbverify.kernels.planner import limits_of
from support.basic import CAP, gqa, mla, soft_cap, tile_keys
from support.batches import assert_close, random_batch
from support.devices import BoundBatch, run
from support.kernels import geometry_for
from support.probes import assert_bits, bit_probe

MMA = {"kernel": "mma"}
GQA = gqa(4, 2, 16, **MMA)
NARROW = mla(2, head_dim_qk=64, head_dim_v=32, **MMA)  # teams, and V is half of a swizzled line
MLA = mla(2, head_dim_qk=288, head_dim_v=64, **MMA)  # the narrowest whose columns are shared among warps
TAIL = gqa(12, 2, 16, **MMA)  # nine fragments: four warps take tiles of the last one in turn
KIMI = mla(8, max_nodes=9, max_requests=2, **MMA)  # 576 and 512, 72 rows
BOTH = {"gqa": GQA, "mla": MLA}
FP8 = {f"{name}-fp8": replace(spec, kv_dtype="float8_e4m3fn") for name, spec in BOTH.items()}


def slow(*values):
    """Left to ``make test-all`` and to the GPU."""
    return pytest.param(*values, marks=pytest.mark.slow)


each = pytest.mark.parametrize("spec", [*BOTH.values(), slow(TAIL)], ids=[*BOTH, "tail"])
# Specs that tests make of those they are given: for tests/gpu/conftest.py.
ALSO_COMPILED = [
    KIMI,
    *(replace(spec, prefix_visible=False, max_nodes=8) for spec in (*BOTH.values(), TAIL)),
    replace(GQA, dtype="float16", kv_dtype="float16"),
]
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
each_fp8 = pytest.mark.parametrize("spec", FP8.values(), ids=FP8)
each_bad_value = pytest.mark.parametrize(
    "value", [pytest.param(v, id=name, marks=pytest.mark.slow if name == "-inf" else ()) for name, v in BAD.items()]
)


# Both NaN of e4m3, which has no infinities; the second is the one that looks negative.
BAD_BYTES = {name: np.uint8(bits).view(ml_dtypes.float8_e4m3fn) for name, bits in (("7f", 0x7F), ("ff", 0xFF))}
each_bad_byte = pytest.mark.parametrize(
    "value", [slow(v) if name == "7f" else pytest.param(v) for name, v in BAD_BYTES.items()], ids=BAD_BYTES
)


def with_values(batch, slots, value, *, k=True, v=True):
    """The batch with ``value`` in all of K, of V, or of both, at some slots.  MLA: V is part of K."""
    caches = {"k_cache": np.array(batch.k_cache)} if k else {}
    if batch.v_cache is not None and v:
        caches["v_cache"] = np.array(batch.v_cache)
    for cache in caches.values():
        cache[slots] = value
    return replace(batch, **caches)


def smallest_limit(dev, spec):
    """The least shared memory that a plan of this spec can do with: few ring slots, that are used again soon."""
    cc = dev.device.cc if not dev.is_gpu else _capability(dev)
    for limit in range(8192, limits_of(cc).shared_bytes + 1, 1024):
        if geometry_for(spec, cc, limit).shared_bytes(spec.max_requests) <= limit:
            return limit
    raise AssertionError("no limit serves this spec")


def _capability(dev):
    from nbverify.launch import Device

    return Device(dev.ordinal).cc


# ---------------------------------------------------------------------------------------------------------------- rows


def rows_id(case):
    nodes, heads, kv_heads = case
    return f"{nodes}x{heads}" + (f"-{kv_heads}" if kv_heads > 1 else "")


QUICK_ROWS = [(9, 8, 1), (17, 3, 1), (9, 9, 3), (16, 1, 1), (17, 1, 1), (33, 1, 1), (65, 1, 1)]
SLOW_ROWS = [(33, 8, 1), (65, 8, 1), (33, 9, 3), (65, 9, 3), (8, 8, 1), (10, 8, 1), (9, 7, 1), (32, 4, 1), (33, 4, 1)]
SLOW_ROWS += [(nodes, 1, 1) for nodes in (15, 31, 32, 48, 49, 64, 97, 129, 193)]


def rows_specs():
    for shape in QUICK_ROWS + SLOW_ROWS:
        nodes, heads, kv_heads = shape
        limits = {"max_nodes": nodes, "max_requests": 2, **MMA}
        specs = {"gqa": gqa(heads, kv_heads, 16, **limits)}
        if kv_heads == 1:
            specs["mla"] = mla(heads, head_dim_qk=288, head_dim_v=64, **limits)
        marks = pytest.mark.slow if shape in SLOW_ROWS else ()
        for name, spec in specs.items():
            yield pytest.param(spec, id=f"{name}-{rows_id(shape)}", marks=marks)


@pytest.mark.parametrize("spec", list(rows_specs()))
def test_any_number_of_rows(dev, spec):
    """nodes x heads on both sides of fragments, teams and row tiles, in a tree as large as the plan allows and smaller.

    Random values, and the bit probe, whose weights are exact in 16 bits.
    """
    nodes = spec.max_nodes
    lens, counts = [tile_keys(dev, spec) - 2, 3], [nodes, max(1, nodes // 2)]
    batch = random_batch(np.random.default_rng(61), spec, lens, counts)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)
    probe = bit_probe(batch)
    assert_bits(probe, run(dev, probe, **CAP))


# --------------------------------------------------------------------------------------------------------- key tiles


@pytest.mark.parametrize(
    "spec",
    [
        *BOTH.values(),
        slow(TAIL),
        slow(replace(GQA, split="fixed")),
        slow(replace(GQA, mask=nv.Mask.CAUSAL)),
        slow(replace(MLA, score_mod=soft_cap)),
    ],
    ids=[*BOTH, "tail", "fixed", "causal", "score_mod"],
)
def test_edges_of_key_tiles(dev, spec):
    """One key in all, whole tiles of prefix and one key more or less, drafts in one tile, in two, and alone in one."""
    spec = replace(spec, max_requests=16)
    k = tile_keys(dev, spec)
    cases = [(0, 1), (1, 1), (0, 5), (k - 1, 1), (k, 1), (k + 1, 1), (k - 3, 5), (k - 5, 5), (k, 5)]
    cases += [(2 * k - 1, 2), (2 * k, 3), (2 * k + 1, 1), (3 * k - 2, 4)]
    batch = random_batch(np.random.default_rng(62), spec, *zip(*cases, strict=True))
    for blocks in (1, 3, None) if dev.is_gpu else (3,):
        result = run(dev, batch, max_blocks=blocks)
        assert_close(batch, result.out, result.lse)
    if spec.score_mod is None:
        probe = bit_probe(batch)
        assert_bits(probe, run(dev, probe, max_blocks=3))


@pytest.mark.parametrize("tiles", [1, 2, 3, slow(4), 9, slow(17)])
@pytest.mark.parametrize("spec", [*BOTH.values(), *map(slow, (TAIL, *FP8.values()))], ids=[*BOTH, "tail", *FP8])
def test_segments_of_any_length(dev, spec, tiles):
    """Shorter than the ring, as long, and going round it; by one block, and by three."""
    k, limit = tile_keys(dev, spec), smallest_limit(dev, spec)
    spec = replace(spec, max_kv_len=20 * k)
    batch = random_batch(np.random.default_rng(63), spec, [tiles * k - 3], [2])
    for blocks in (1, 3) if dev.is_gpu or tiles < 9 else (1,):
        result = run(dev, batch, max_blocks=blocks, shared_limit=limit)
        assert_close(batch, result.out, result.lse)


@pytest.mark.parametrize("spec", [*BOTH.values(), TAIL, *FP8.values()], ids=[*BOTH, "tail", *FP8])
def test_many_short_segments_of_one_block(dev, spec):
    """The ring goes on from one segment to the next; a segment of one tile follows one of several."""
    spec = replace(spec, max_requests=12)
    k, limit = tile_keys(dev, spec), smallest_limit(dev, spec)
    lens = [5, 3 * k + 1, 0, k - 2, 2 * k, 1, 1, k + 7, 0, 4]
    batch = random_batch(np.random.default_rng(64), spec, lens, [1, 2, 3, 1, 5, 1, 2, 1, 1, 3])
    result = run(dev, batch, max_blocks=1, shared_limit=limit)
    assert_close(batch, result.out, result.lse)


# ------------------------------------------------------------------------------------------- what must not come through


@each
@each_bad_value
@pytest.mark.parametrize("where", [slow("k"), "v", "both"])
def test_hidden_drafts(dev, spec, where, value):
    check_hidden_drafts(dev, spec, where, value)


@each_fp8
@each_bad_byte
@pytest.mark.parametrize("where", [slow("k"), slow("v"), "both"])
def test_hidden_drafts_of_fp8(dev, spec, where, value):
    check_hidden_drafts(dev, spec, where, value)


def check_hidden_drafts(dev, spec, where, value):
    """0 * NaN is NaN in a product of matrices.  Every other draft is hidden from all nodes: between visible ones, in a
    tile of drafts alone, and as the only one in a tile of prefix."""
    if where != "both" and spec.shared_kv:
        pytest.skip("V is part of K")
    tree = np.zeros((6, 6), bool)
    tree[:, ::2] = np.tri(6, 3, dtype=bool)
    k = tile_keys(dev, spec)
    batch = random_batch(np.random.default_rng(65), spec, [k - 3, 4, k - 1], [6] * 3, trees=[tree, tree, tree[:, ::-1]])
    want = run(dev, batch, **CAP)
    assert_close(batch, want.out, want.lse)
    hidden = batch.out_cache_loc[[1, 3, 5, 7, 9, 11, 12, 14, 16]]
    bad = with_values(batch, hidden, value, k=where != "v", v=where != "k")
    assert run(dev, bad, **CAP).bits == want.bits


@pytest.mark.parametrize("spec", [*BOTH.values(), NARROW, slow(TAIL)], ids=[*BOTH, "narrow", "tail"])
@each_bad_value
def test_bad_rows_that_some_nodes_see(dev, spec, value):
    check_bad_rows(dev, spec, value)


@each_fp8
@each_bad_byte
def test_bad_bytes_that_some_nodes_see(dev, spec, value):
    check_bad_rows(dev, spec, value)


def check_bad_rows(dev, spec, value):
    """It spoils those nodes, and of separate V their column alone; the others keep their bits."""
    batch = random_batch(np.random.default_rng(66), spec, [4], [4], trees=[np.eye(4, dtype=bool)])  # key 6, in 8 rows
    want = run(dev, batch, **CAP)
    slot = batch.out_cache_loc[2]
    name = "k_cache" if spec.shared_kv else "v_cache"
    cache = np.array(getattr(batch, name))
    cache[slot, 0, 7] = value
    bad = replace(batch, **{name: cache})
    result = run(dev, bad, **CAP)
    assert_close(bad, result.out, result.lse)
    for node in (0, 1, 3):
        assert result.rows(slice(node, node + 1)) == want.rows(slice(node, node + 1))
    seen, group = result.out[2].astype(np.float64), spec.group
    if not spec.shared_kv:
        assert not np.isfinite(seen[:group, 7]).any() and np.isfinite(np.delete(seen, 7, axis=1)).all()
        assert np.isfinite(seen[group:]).all(), "the other KV head"


@each
@each_bad_value
def test_bad_values_of_another_request_in_the_ring(dev, spec, value):
    check_bad_ring(dev, spec, value)


@each_fp8
@each_bad_byte
def test_bad_bytes_of_another_request_in_the_ring(dev, spec, value):
    """And in the raw slots, of which more are on their way than the ring has."""
    check_bad_ring(dev, spec, value)


def check_bad_ring(dev, spec, value):
    """One block: a request whose keys are all bad fills every ring slot; those that come after it end inside a tile,
    whose rest then still holds what it left."""
    k, limit = tile_keys(dev, spec), smallest_limit(dev, spec)
    lens, counts = [9 * k, 3, 0, k + 2, k - 1], [2, 2, 1, 3, 1]
    spec = replace(spec, max_requests=8)
    batch = random_batch(np.random.default_rng(67), spec, lens, counts)
    want = run(dev, batch, max_blocks=1, shared_limit=limit)
    assert_close(batch, want.out, want.lse)
    first = np.concatenate([batch.kv_indices[: lens[0]], batch.out_cache_loc[: counts[0]]])
    result = run(dev, with_values(batch, first, value), max_blocks=1, shared_limit=limit)
    assert np.isnan(result.out[:2].astype(np.float64)).all()
    assert result.rows(slice(2, None)) == want.rows(slice(2, None))


@each
def test_rows_that_see_nothing(dev, spec):
    """In the first tiles, in the last ones, at all: rows that see keys share fragments with them, and NaN is hidden."""
    spec = replace(spec, prefix_visible=False, max_nodes=8)
    k, n = tile_keys(dev, spec), 8
    c = 3 * k - 5
    batch = random_batch(np.random.default_rng(68), spec, [c], [n])
    mask = np.zeros((n, c + n), np.uint8)
    mask[1] = 1  # all
    mask[2, : k // 2] = 1  # a part of the first tile
    mask[3, 2 * k :] = 1  # the last tile
    mask[4, k : 2 * k] = 1  # the middle one
    mask[5, c + 5] = 1  # itself
    mask[6, ::16] = 1  # one key of every 16
    unseen = [0, 7]
    for blocks in (1, 3):
        full = replace(batch, custom_mask=mask.ravel())
        result = run(dev, full, max_blocks=blocks)
        assert_close(full, result.out, result.lse)
        assert (result.lse[unseen] == -np.inf).all() and not result.out[unseen].view(np.uint16).any()
        own = batch.out_cache_loc[5]
        v = batch.k_cache[own, :, : spec.head_dim_v] if spec.shared_kv else batch.v_cache[own]
        np.testing.assert_array_equal(result.out[5], v.repeat(spec.group, 0))
        mask_of_few = mask.copy()
        mask_of_few[1], mask_of_few[6] = 0, 0
        some = replace(batch, custom_mask=mask_of_few.ravel())
        listed = np.concatenate([batch.kv_indices, batch.out_cache_loc])
        poisoned = with_values(some, listed[~mask_of_few.any(0)], np.nan)
        result = run(dev, poisoned, max_blocks=blocks)
        assert_close(poisoned, result.out, result.lse)


@each
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_in_a_visible_value_of_little_weight(dev, spec, dtype):
    """A key that is seen with a small weight beside one of 1: its NaN reaches the row that sees it all the same.

    Small as far as the 16-bit type has it: a weight that it rounds to 0 lets nothing through (values.py).
    """
    if spec.shared_kv:
        pytest.skip("a NaN of K is a NaN of the score")
    spec = replace(spec, dtype=dtype, kv_dtype=dtype, sm_scale=math.log(2))
    batch = random_batch(np.random.default_rng(69), spec, [3], [2], trees=[np.tri(2, dtype=bool)])
    q, k, v = np.zeros_like(batch.q), np.zeros_like(batch.k_cache), np.array(batch.v_cache)
    q[..., 0] = 1
    k[batch.out_cache_loc[1], :, 0] = -30 if dtype == "bfloat16" else -20
    v[batch.out_cache_loc[1], :, 5] = np.nan
    batch = replace(batch, q=q, k_cache=k, v_cache=v)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)


@each
def test_a_score_of_minus_infinity_is_a_hidden_key(dev, spec):
    """Wherever it came from: an infinite K, where all nodes see it, and q of both signs."""
    if spec.shared_kv:
        pytest.skip("the infinity of K is one of V, too: of a key that all see it spoils the row, as an overflow may")
    k = tile_keys(dev, spec)
    batch = random_batch(np.random.default_rng(70), spec, [k + 5], [2])
    cache, q = np.array(batch.k_cache), np.array(batch.q)
    cache[batch.kv_indices[3], 0, 1] = np.inf  # in the first tile, which hides nothing
    q[0, :, 1], q[1, :, 1] = -1, 1
    batch = replace(batch, q=q, k_cache=cache)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)


@pytest.mark.parametrize("kernel", ["mma", slow("simt")])
@pytest.mark.parametrize("mask, prefix_visible", [("tree", True), ("full", True), ("full", False), ("packed", True)])
def test_mask_rows_outside_the_buffer(dev, mask, prefix_visible, kernel):
    """One that begins before it is hidden, also what of it lies inside; one that ends after it is read to the end."""
    spec = replace(GQA, mask=nv.Mask(mask), prefix_visible=prefix_visible, kernel=kernel)
    batch = random_batch(np.random.default_rng(73), spec, [3, 4, 2], [4, 5, 4])
    ones = np.full_like(batch.custom_mask, 2**32 - 1 if mask == "packed" else 1)
    indptr = batch.mask_indptr.copy()
    indptr[:3] = -1, len(ones) - 3, indptr[2]
    batch = replace(batch, custom_mask=ones, mask_indptr=indptr)
    result = run(dev, batch, **CAP)
    assert_close(batch, result.out, result.lse)


# ------------------------------------------------------------------------------------------- the maximum, raised lazily

RAMPS = {  # log2 of the weights of each tile's keys, by tile
    "rising by 5": lambda tile: 5 * tile,
    "rising by 8": lambda tile: 8 * tile,
    "rising by 9": lambda tile: 9 * tile,
    "falling by 9": lambda tile: -9 * tile,
    "up and down": lambda tile: 20 * (tile % 2),
    "late": lambda tile: 100 * (tile == 3),
    "below any float": lambda tile: 200 * (tile == 2),
}
SLOW_RAMPS = ("rising by 8", "up and down", "late", "below any float")


@each
@pytest.mark.parametrize("ramp", ["rising by 5", "rising by 9", "falling by 9", *map(slow, SLOW_RAMPS)])
def test_the_running_maximum(dev, spec, ramp):
    """Weights are powers of two, exact in 16 bits, so that the bound is that of float32 arithmetic.

    Odd heads and the first fragment's nodes see the negative of what the others see: of one fragment all rows fall
    while some of the next one's rise, or the other way round.
    """
    spec = replace(spec, sm_scale=math.log(2))
    k = tile_keys(dev, spec)
    c, n = 4 * k - 3, 11  # two heads: 22 rows
    batch = random_batch(np.random.default_rng(71), spec, [c], [n], trees=[np.tri(n, dtype=bool)])
    listed = np.concatenate([batch.kv_indices, batch.out_cache_loc])
    # MLA: the columns of the score lie behind those of V.
    column = spec.head_dim_v if spec.shared_kv else 0
    q, keys = np.zeros_like(batch.q), np.array(batch.k_cache)
    q[..., column] = -1
    q[8:, ::2, column] = 1
    rng = np.random.default_rng(72)
    for position, slot in enumerate(listed):
        keys[slot, :, column] = RAMPS[ramp](position // k) + rng.integers(-3, 1)
    batch = replace(batch, q=q, k_cache=keys)
    for blocks in (1, 3):
        result = run(dev, batch, max_blocks=blocks)
        assert_close(replace(batch, spec=replace(spec, kernel="simt")), result.out, result.lse)


# ---------------------------------------------------------------------------------------------------------- fp8 caches

WIDE_MLA = {"head_dim_qk": 288, "head_dim_v": 256}  # eight value warps: with four score warps they shift registers
FP8_CASES = {
    "mla 1 row": mla(1, max_nodes=1, **WIDE_MLA),
    "mla 4 rows": mla(2, max_nodes=2, **WIDE_MLA),
    "mla 64 rows": mla(8, max_nodes=8, **WIDE_MLA),
    "mla 72 rows": mla(8, max_nodes=9, **WIDE_MLA),
    "gqa 1 row": gqa(2, 2, 64, max_nodes=1),
    "gqa 24 rows": gqa(8, 2, 32, max_nodes=6),
    "gqa 4 x 9 rows": gqa(4, 1, 128, max_nodes=9),
    "gqa 132 rows": gqa(8, 2, 64, max_nodes=33),
    "gqa 192-128": gqa(2, 1, 192, head_dim_v=128, max_nodes=4),
    "mla-576-512": mla(2, max_nodes=2),
    "gqa 256": gqa(2, 1, 256, max_nodes=4),
}
QUICK_FP8_CASES = ("mla 1 row", "mla 4 rows", "gqa 24 rows")


def fp8_specs():
    for name, given in FP8_CASES.items():
        for dtype in ("bfloat16", "float16"):
            is_slow = name not in QUICK_FP8_CASES or (dtype == "float16") != (name in ("mla 4 rows", "gqa 24 rows"))
            marks = pytest.mark.slow if is_slow else ()
            spec = replace(given, dtype=dtype, kv_dtype="float8_e4m3fn", max_requests=2, **MMA)
            yield pytest.param(spec, id=f"{name} {dtype}", marks=marks)


@pytest.mark.parametrize("spec", list(fp8_specs()))
def test_fp8(dev, spec):
    """A prefix of several tiles, that ends inside one; scales; and the bit probe, whose weights are exact.

    (Of separate V its values are exact too; MLA's are as exact as the probe's K.)
    """
    n, k = spec.max_nodes, tile_keys(dev, spec)
    batch = random_batch(np.random.default_rng(74), spec, [3 * k - 2, 3], [n, max(1, n // 2)])
    scaled = replace(batch, k_scale=0.375, v_scale=None if spec.shared_kv else 2.5)
    result = run(dev, scaled, **CAP)
    assert_close(scaled, result.out, result.lse)
    probe = bit_probe(batch)
    assert_bits(probe, run(dev, probe, **CAP))


@each_fp8
def test_every_byte_of_a_shared_row(dev, spec):
    """All finite bytes as K and as V, in every place of a 16-byte piece, of both 16-bit types."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    finite = codes[np.isfinite(codes.astype(np.float32))]
    for dtype in ("bfloat16", "float16"):
        one = replace(spec, dtype=dtype, sm_scale=0.001)
        batch = random_batch(np.random.default_rng(75), one, [70], [2])
        caches = {"k_cache": batch.k_cache} if spec.shared_kv else {"k_cache": batch.k_cache, "v_cache": batch.v_cache}
        for name, cache in caches.items():
            places = np.arange(cache.size).reshape(cache.shape)
            caches[name] = finite[(places + 3 * places // cache.shape[-1]) % finite.size]
        batch = replace(batch, **caches)
        result = run(dev, batch, **CAP)
        assert_close(batch, result.out, result.lse)


# ------------------------------------------------------------------------- queries that pass through the ring in parts

_IN_PARTS = {  # spec, how many parts, for the smallest limit of shared memory that has them
    "teams 2": (gqa(2, 1, 160, head_dim_v=16, max_nodes=32), 2),
    "teams 2 fp8": (gqa(2, 1, 96, head_dim_v=16, max_nodes=32, kv_dtype="float8_e4m3fn"), 2),
    "teams 3": (gqa(2, 1, 192, head_dim_v=64, max_nodes=64), 3),
    "roles 3": (mla(8, head_dim_qk=288, head_dim_v=64, max_nodes=8), 3),
    "roles 3 fp8": (mla(8, head_dim_qk=288, head_dim_v=64, max_nodes=8, kv_dtype="float8_e4m3fn"), 3),
    "kimi fp8": (replace(KIMI, max_nodes=8, kv_dtype="float8_e4m3fn"), 3),  # some queries have no register
}
IN_PARTS = {name: (replace(spec, max_requests=3, **MMA), parts) for name, (spec, parts) in _IN_PARTS.items()}
QUICK_PARTS = ("teams 2 fp8", "roles 3 fp8")


def limit_with_parts(dev, spec, parts):
    """The least shared memory with which a plan passes queries in so many parts."""
    cc = dev.device.cc if not dev.is_gpu else _capability(dev)
    for limit in range(8192, limits_of(cc).shared_bytes + 1, 1024):
        tile = geometry_for(spec, cc, limit)
        if tile.fits(limit - tile.shared_bytes(spec.max_requests) + tile.tile_bytes) and tile.staging_parts == parts:
            return limit
    assert dev.is_gpu, "the emulated device has a limit for each"
    pytest.skip(f"no limit of sm_{cc[0]}{cc[1]} has {parts} parts")


@pytest.mark.parametrize(
    "spec, parts",
    [
        pytest.param(*case, id=name, marks=() if name in QUICK_PARTS else pytest.mark.slow)
        for name, case in IN_PARTS.items()
    ],
)
def test_queries_in_parts(dev, spec, parts):
    """Every score warp's queries come in several pieces of columns, through a slot that it shares with others."""
    limit, k = limit_with_parts(dev, spec, parts), tile_keys(dev, spec)
    n = spec.max_nodes
    batch = random_batch(np.random.default_rng(76), spec, [k + 3, 2, 0], [n, 1, n - 1])
    result = run(dev, batch, max_blocks=2, shared_limit=limit)
    assert dev.plan(spec, max_blocks=2, shared_limit=limit).geometry.staging_parts == parts
    assert_close(batch, result.out, result.lse)


# -------------------------------------------------------------------------------------------------------- model shapes


@pytest.mark.slow
def test_kimi(dev):
    """72 rows of the real widths, ragged, on more blocks than units."""
    lens = [700, 3] if dev.is_gpu else [tile_keys(dev, KIMI) + 5, 2]
    batch = random_batch(np.random.default_rng(73), KIMI, lens, [9, 4])
    bound = BoundBatch(dev, dev.plan(KIMI, max_blocks=3), batch)
    result = bound.run()
    assert_close(batch, result.out, result.lse)
    bound.poison()
    assert bound.run().bits == result.bits
