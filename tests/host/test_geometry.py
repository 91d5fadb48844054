"""Sizes in closed form: shared memory against every budget, buffers and workspace against every batch.

Numbers written out by hand are the plain kernel's; what the tensor-core kernel's planner does: test_tiles.py.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import geometry_for, parametrize_specs

import nbverify as nv
from nbverify.contract import capacity_elements
from nbverify.kernels import geometry
from nbverify.spec import KERNELS

BUDGETS = (65_536, 101_376, 232_448)  # an older card, sm_120, sm_90
SHAPES = {  # (head_dim_qk, head_dim_v, MLA)
    "mla-576-512": (576, 512, True),
    "192-128": (192, 128, False),
    "128-128": (128, 128, False),
    "256-256": (256, 256, False),
    "576-576": (576, 576, False),
    "16-16": (16, 16, False),
    "mla-16-16": (16, 16, True),
}
LIMITS = {"max_requests": 16, "max_nodes": 64, "max_kv_len": 65_536, "sm_scale": 1.0, "kernel": "simt"}
PLAIN = {"kernel": "simt"}


def spec_of(dims, heads=8, **options):
    head_dim_qk, head_dim_v, is_mla = dims
    options = {**LIMITS, **options}
    if is_mla:
        return nv.VerifySpec.mla(heads, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, **options)
    return nv.VerifySpec.gqa(heads, heads, head_dim_qk, head_dim_v=head_dim_v, **options)


def shared_bytes_by_hand(spec):
    """16 query rows, 32 keys, their weights, states and float32 outputs, and the work table: bytes, written out.

    The merge has the place of the tiles: for each of four warps 12 runs of 128 columns, and of (m, l) that take a place
    of 16 bytes.  Behind both lie the chunks, 8 int64 a warp.
    """
    rows, keys = 16, 32
    q = rows * 2 * spec.head_dim_qk
    k = keys * (2 * spec.head_dim_qk + 4)  # a word of padding; fp8 is widened on the way in
    v = 0 if spec.shared_kv else keys * 2 * spec.head_dim_v
    weights, states, out = 4 * rows * keys, 4 * rows * 2, 4 * rows * spec.head_dim_v
    merge, chunks = 4 * 12 * 4 * (128 + 4), 4 * 8 * 8
    table = 2 * 4 * (spec.max_requests + 1)
    return up_to_16(max(q + k + v + weights + states + out, merge)) + chunks + up_to_16(table)


def up_to_16(num_bytes):
    return -(-num_bytes // 16) * 16


@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"], ids=["16-bit", "fp8"])
def test_b16_shared_memory_by_hand(dims, kv_dtype):
    for dtype, max_requests, max_nodes in itertools.product(("bfloat16", "float16"), (1, 16, 257), (1, 16, 64)):
        spec = spec_of(dims, dtype=dtype, kv_dtype=kv_dtype, max_requests=max_requests, max_nodes=max_nodes)
        assert geometry.simt_geometry(spec).shared_bytes(max_requests) == shared_bytes_by_hand(spec)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES.keys())
def test_b16_a_plan_fits_or_is_refused_with_both_numbers(dims, budget):
    for kv_dtype, max_nodes in itertools.product((None, "float8_e4m3fn"), (1, 16, 64)):
        spec = spec_of(dims, kv_dtype=kv_dtype, max_nodes=max_nodes, **PLAIN)
        need = shared_bytes_by_hand(spec)
        if need <= budget:
            plan = nv.VerifyPlan(spec, device="emulator", shared_limit=budget)
            assert plan.report().shared_bytes == need
        else:
            with pytest.raises(nv.ArgumentError, match=f"(?s){budget}.*{need}.*head_dim_qk={dims[0]}"):
                nv.VerifyPlan(spec, device="emulator", shared_limit=budget)


def test_b16_the_limit_itself_is_allowed():
    spec = spec_of(SHAPES["128-128"], **PLAIN)
    need = shared_bytes_by_hand(spec)
    nv.VerifyPlan(spec, device="emulator", shared_limit=need)
    with pytest.raises(nv.ArgumentError, match="shared memory"):
        nv.VerifyPlan(spec, device="emulator", shared_limit=need - 1)


@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES.keys())
def test_shared_arrays_do_not_overlap(dims):
    spec = spec_of(dims)
    g = geometry.simt_geometry(spec)
    ends = [
        (g.q_offset, 16 * g.qk_words),
        (g.k_offset, 32 * g.k_stride),
        *([] if spec.shared_kv else [(g.v_offset, 32 * g.v_stride)]),
        (g.weights_offset, 16 * 32),
        (g.states_offset, 16 * 2),
        (g.o_offset, 16 * spec.head_dim_v),
        (g.table_offset - 4 * 16, 4 * 16),  # chunks: 8 int64 a warp
        (g.table_offset, 0),
    ]
    for (begin, size), (following, _) in itertools.pairwise(ends):
        assert begin + size <= following
    assert g.table_offset % 4 == 0, "the merge's scratch, and after it the table, are 16-byte aligned"
    assert 4 * g.table_offset >= geometry.merge_scratch_bytes(g.warps) + geometry.chunk_bytes(g.warps)
    assert g.k_stride % 2 == 1 or spec.head_dim_qk % 4, "an odd stride has no bank conflicts"


@pytest.mark.parametrize("kernel", KERNELS)
def test_b17_all_head_counts(kernel):
    """MLA with 1 .. 130 heads; GQA with every pair that divides."""
    for heads in range(1, 131):
        spec = spec_of(SHAPES["mla-576-512"], heads=heads, kernel=kernel)
        assert spec.group == heads
        tile = geometry_for(spec)
        assert geometry.units_per_request(spec, tile) == -(-64 * heads // tile.rows_per_tile)
    for kv_heads, q_heads in itertools.product(range(1, 17), range(1, 131)):
        if q_heads % kv_heads:
            with pytest.raises(nv.ArgumentError, match="num_q_heads"):
                nv.VerifySpec.gqa(q_heads, kv_heads, 64, **LIMITS)
        else:
            spec = nv.VerifySpec.gqa(q_heads, kv_heads, 64, **{**LIMITS, "kernel": kernel})
            tile = geometry_for(spec)
            rows = tile.rows_per_tile
            assert geometry.units_per_request(spec, tile) == kv_heads * -(-64 * (q_heads // kv_heads) // rows)


# --------------------------------------------------------------------------------------------------- B02: buffer sizes


def test_b02_sizes_of_the_recipe():
    """4 requests of 8 nodes over at most 64 prefix tokens."""
    sizes = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 64 + 8, "sm_scale": 1.0, "kernel": "simt"}
    need = capacity_elements(nv.VerifySpec.gqa(4, 2, 16, **sizes))
    assert need["custom_mask"] == 2304, "2048 leaves out the draft columns, 2560 counts them twice"
    assert need["kv_indices"] == 288
    assert need["out_cache_loc"] == 32
    assert capacity_elements(nv.VerifySpec.gqa(4, 2, 16, mask="tree", **sizes))["custom_mask"] == 256
    assert capacity_elements(nv.VerifySpec.gqa(4, 2, 16, mask="packed", **sizes))["custom_mask"] == 32
    assert capacity_elements(nv.VerifySpec.gqa(4, 2, 16, mask="none", **sizes))["custom_mask"] == 0


def test_b02_workspace_is_a_formula_of_the_spec():
    """A partial state is 16 rows of head_dim_v + 2 floats; fixed: row units x splits; balanced: row units + blocks."""
    sizes = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 2000, "sm_scale": 1.0, **PLAIN}
    state = 4 * 16 * (512 + 2)
    units = 4 * (8 * 12 // 16)
    fixed = nv.VerifySpec.mla(12, split="fixed", **sizes)
    splits = geometry.max_splits(fixed, geometry.simt_geometry(fixed), 132)
    assert splits == -(-63 // 8), "63 tiles in chunks of at least 8"
    for blocks in (1, 4):
        emulator = nv.Emulator(blocks)
        assert nv.VerifyPlan(fixed, device=emulator).workspace_bytes == units * splits * state
        plan = nv.VerifyPlan(nv.VerifySpec.mla(12, **sizes), device=emulator)
        assert plan.workspace_bytes == (units + blocks) * state


@st.composite
def specs_and_batches(draw):
    mask = draw(st.sampled_from(list(nv.Mask)))
    max_nodes = draw(st.integers(1, 70))
    max_kv_len = max_nodes + draw(st.integers(0, 300))
    kv_heads = draw(st.integers(1, 4))
    spec = nv.VerifySpec.gqa(
        kv_heads * draw(st.integers(1, 16)),
        kv_heads,
        16,
        max_requests=draw(st.integers(1, 6)),
        max_nodes=max_nodes,
        max_kv_len=max_kv_len,
        sm_scale=1.0,
        mask=mask,
        split=draw(st.sampled_from(["balanced", "fixed"])),
        kernel=draw(st.sampled_from(KERNELS)),
    )
    counts = draw(st.lists(st.integers(0, max_nodes), min_size=1, max_size=spec.max_requests))
    lens = [draw(st.integers(0, max_kv_len - n)) for n in counts]
    return spec, np.array(lens), np.array(counts), draw(st.integers(1, 500))


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(specs_and_batches())
def test_b02_sizes_serve_every_batch_of_the_spec(case):
    spec, lens, counts, blocks = case
    have = capacity_elements(spec)
    assert have["kv_indices"] >= lens.sum()
    assert have["out_cache_loc"] >= counts.sum()
    assert have["q"] >= counts.sum() * spec.num_q_heads * spec.head_dim_qk
    rows = {nv.Mask.FULL: lens + counts, nv.Mask.TREE: counts, nv.Mask.PACKED: -(-counts // 32)}
    assert have["custom_mask"] >= (counts * rows.get(spec.mask, 0)).sum()

    # Partial states, by the words of kernels/schedule.py: fewer than blocks + units, or one for each chunk.
    tile = geometry_for(spec)
    units = spec.num_kv_heads * -(-counts * spec.group // tile.rows_per_tile)
    tiles = np.maximum(1, -(-(lens + counts) // tile.keys_per_tile))
    room = geometry.num_partials(spec, tile, blocks, 132)
    if spec.split == "balanced":
        assert units.sum() + blocks <= room
    else:
        chunk = np.maximum(8, -(-tiles // np.maximum(1, 132 // np.maximum(1, units))))
        assert (units * -(-tiles // chunk)).sum() <= room


@parametrize_specs(
    {
        f"{max_nodes}x{heads}": spec_of(SHAPES["mla-576-512"], heads=heads, max_nodes=max_nodes, split="fixed")
        for max_nodes, heads in [(1, 1), (8, 8), (33, 8), (64, 128)]
    }
)
def test_chunks_of_a_fixed_split_are_a_bounded_number(spec):
    for max_kv_len in (64, 256, 257, 4096, 262_144, 2**20, 2**31 - 128):
        spec = replace(spec, max_kv_len=max_kv_len)
        tile = geometry_for(spec)
        splits = geometry.max_splits(spec, tile, 132)
        assert 1 <= splits <= 132
        lengths = {1, 32, 256, 257, max_kv_len // 3 + 1, max_kv_len - 1, max_kv_len}
        for num_keys in (length for length in lengths if length <= max_kv_len):
            tiles = -(-num_keys // tile.keys_per_tile)
            chunk = max(geometry.MIN_CHUNK_TILES, -(-tiles // 132))  # of a request with one row unit
            assert -(-tiles // chunk) <= splits
