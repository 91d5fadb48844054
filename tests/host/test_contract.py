"""The one table: what is derived from it agrees, and the sizes it gives are enough and not wasteful (recipe B02)."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbverify as nv
from nbverify import contract, reference

ROOT = Path(__file__).parents[2]
LIMITS = {"max_requests": 4, "max_nodes": 33, "max_kv_len": 1024, "sm_scale": 0.1, "kernel": "simt"}
SPECS = {
    "gqa": nv.VerifySpec.gqa(8, 2, 64, **LIMITS),
    "mla": nv.VerifySpec.mla(8, **LIMITS),
    "fp8": nv.VerifySpec.mla(8, kv_dtype="float8_e4m3fn", dtype="float16", **LIMITS),
    "packed": nv.VerifySpec.gqa(8, 8, 128, mask="packed", split="fixed", reduction="two_launch", **LIMITS),
    "none": nv.VerifySpec.gqa(8, 8, 128, mask="none", **LIMITS),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


# ---- one table


def test_names_are_unique():
    names = [b.name for b in contract.BUFFERS] + [s.name for s in contract.SCALARS]
    assert len(names) == len(set(names))
    assert set(contract.BUFFER) == {b.name for b in contract.BUFFERS}


@each_spec
def test_args_class_has_the_parameters_in_order(spec):
    names = [p.name for p in contract.parameters(spec)]
    assert len(names) == len(set(names))
    assert list(contract.args_class()._fields) == names


@each_spec
def test_parameters_follow_the_table(spec):
    """Buffer by buffer: array, strides, width; scalars last."""
    parameters = iter(contract.parameters(spec))
    for buffer in contract.BUFFERS:
        array = next(parameters)
        assert (array.name, array.dtype, array.is_array) == (buffer.name, contract.storage_dtype(buffer, spec), True)
        wanted = [f"{buffer.name}_stride_{axis}" for axis in buffer.free_strides]
        wanted += [f"{buffer.name}_words"] if buffer.kind == "index" else []
        for name in wanted:
            field = next(parameters)
            assert (field.name, field.dtype, field.is_array) == (name, "int64", False)
    assert [(p.name, p.dtype, p.is_array) for p in parameters] == [(s.name, s.dtype, False) for s in contract.SCALARS]


def test_args_class_does_not_depend_on_the_spec():
    assert len({tuple(p.name for p in contract.parameters(spec)) for spec in SPECS.values()}) == 1


@each_spec
def test_storage_is_as_wide_as_what_bind_accepts(spec):
    """The kernel sees raw bits: of the same width for all accepted dtypes, of index buffers as 32-bit words."""
    widths = {"bfloat16": 2, "float8_e4m3fn": 1, "bool": 1}
    for buffer in contract.BUFFERS:
        stored = np.dtype(contract.storage_dtype(buffer, spec)).itemsize
        accepted = contract.accepted_dtypes(buffer, spec)
        assert len(accepted) == len(set(accepted))
        for dtype in accepted:
            width = widths.get(dtype) or np.dtype(dtype).itemsize
            assert width == stored or (buffer.kind == "index" and width % stored == 0 and stored == 4)
        assert contract.alignment_bytes(buffer, spec) % stored == 0 or buffer.kind == "mask"


def test_storage_by_spec():
    of = contract.storage_dtype
    k, q, mask = (contract.BUFFER[n] for n in ("k_cache", "q", "custom_mask"))
    assert [of(k, SPECS[n]) for n in ("gqa", "fp8")] == ["uint16", "uint8"]
    assert of(q, SPECS["fp8"]) == "uint16"
    assert [of(mask, SPECS[n]) for n in ("gqa", "packed")] == ["uint8", "uint32"]


def test_callers_buffers_are_the_parameters_of_bind_and_its_likes():
    scalars = ["k_scale", "v_scale"]
    for function in (nv.VerifyPlan.bind, nv.verify_attention):
        names = [n for n in inspect.signature(function).parameters if n not in ("self", "spec", "device", "stream")]
        assert names == [*contract.CALLER_BUFFERS, *scalars]
    rebind = set(inspect.signature(nv.BoundVerify.rebind).parameters) - {"self"}
    assert rebind == {b.name for b in contract.BUFFERS if b.kind in ("rows", "float")} | set(scalars)
    taken = set(inspect.signature(reference.verify_attention).parameters)
    assert {n for n in contract.CALLER_BUFFERS if n not in ("out", "lse")} | set(scalars) <= taken


def test_needed_buffers():
    def needed(spec):
        return {n: contract.is_needed(contract.BUFFER[n], spec) for n in contract.CALLER_BUFFERS}

    optional = {name for name, value in needed(SPECS["gqa"]).items() if value is None}
    assert optional == {"lse"}
    assert {n for n, value in needed(SPECS["gqa"]).items() if value is False} == set()
    assert {n for n, value in needed(SPECS["mla"]).items() if value is False} == {"v_cache"}
    assert {n for n, value in needed(SPECS["none"]).items() if value is False} == {"custom_mask", "mask_indptr"}
    for layout in nv.Mask:
        assert needed(replace(SPECS["gqa"], mask=layout))["custom_mask"] is layout.reads_buffer


def test_table_in_the_docs():
    page = ROOT / "docs" / "contract.md"
    if page.exists():
        assert contract.markdown_table() in page.read_text(encoding="utf-8")


def test_markdown_table_has_every_row_and_is_a_table():
    text = contract.markdown_table()
    buffers, scalars = text.split("\n\n")
    for table, rows, columns in ((buffers, contract.BUFFERS, 5), (scalars, contract.SCALARS, 3)):
        lines = table.strip().splitlines()
        assert len(lines) == 2 + len(rows)
        for line in lines:
            assert line.count("|") == columns + 1, line
        assert [re.match(r"\| `(\w+)`", line)[1] for line in lines[2:]] == [row.name for row in rows]


# ---- sizes


def need(spec, prefix_lens, node_counts):
    """Elements of each buffer for one batch, by the definition of each layout."""
    c, n = np.asarray(prefix_lens, np.int64), np.asarray(node_counts, np.int64)
    mask = {
        nv.Mask.FULL: (n * (c + n)).sum(),
        nv.Mask.TREE: (n * n).sum(),
        nv.Mask.PACKED: (n * -(-n // 32)).sum(),
    }.get(spec.mask, 0)
    return {
        "q": n.sum() * spec.num_q_heads * spec.head_dim_qk,
        "kv_indptr": c.size + 1,
        "kv_indices": c.sum(),
        "qo_indptr": c.size + 1,
        "out_cache_loc": n.sum(),
        "custom_mask": mask,
        "mask_indptr": c.size + 1 if spec.mask.reads_buffer else 0,
        "out": n.sum() * spec.num_q_heads * spec.head_dim_v,
        "lse": n.sum() * spec.num_q_heads,
    }


def test_capacity_covers_what_the_caller_allocates_per_token_or_request():
    pools = {"k_cache", "v_cache"}
    assert set(contract.capacity_elements(SPECS["gqa"])) == set(contract.CALLER_BUFFERS) - pools


def test_capacity_of_recipe_b02():
    spec = nv.VerifySpec.gqa(12, 3, 128, max_requests=4, max_nodes=8, max_kv_len=64 + 8, sm_scale=0.1)
    capacity = contract.capacity_elements(spec)
    assert capacity["custom_mask"] == 4 * 8 * (64 + 8) == 2304  # not 2048, without draft columns, nor 2560, with two
    assert capacity["kv_indices"] == 4 * 72 == 288
    assert capacity["custom_mask"] <= 1.1 * need(spec, [64] * 4, [8] * 4)["custom_mask"]
    assert contract.capacity_elements(replace(spec, mask="tree"))["custom_mask"] == 4 * 8 * 8
    assert contract.capacity_elements(replace(spec, mask="packed"))["custom_mask"] == 4 * 8 * 1
    assert contract.capacity_elements(replace(spec, mask="none"))["custom_mask"] == 0


def test_workspace_of_recipe_b02():
    """32 rows, 12 heads, 7 splits, Dv 512: as many partials as there are, not one a head and group."""
    spec = nv.VerifySpec.mla(12, max_requests=1, max_nodes=32, max_kv_len=7 * 256, sm_scale=0.1, split="fixed")
    report = nv.VerifyPlan(spec, device="emulator").report()
    assert report.max_splits == 7
    output, one_value = 5_505_024, 10_752
    assert report.workspace_bytes == output + 2 * one_value  # a maximum and a sum in place of a log-sum-exp


specs = st.builds(
    lambda kv_heads, group, dims, limits, mask: nv.VerifySpec.gqa(
        kv_heads * group, kv_heads, 16 * dims, **limits, mask=mask, sm_scale=1.0
    ),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(1, 36),
    st.tuples(st.integers(1, 8), st.integers(1, 70), st.integers(0, 3000)).map(
        lambda t: {"max_requests": t[0], "max_nodes": t[1], "max_kv_len": t[1] + t[2]}
    ),
    st.sampled_from(list(nv.Mask)),
)


def up_to(most):
    return st.one_of(st.just(most), st.integers(0, most))


@st.composite
def batches_inside(draw):
    spec = draw(specs)
    count = draw(up_to(spec.max_requests))
    nodes = draw(st.lists(up_to(spec.max_nodes), min_size=count, max_size=count))
    prefixes = [draw(up_to(spec.max_kv_len - n)) for n in nodes]
    return spec, prefixes, nodes


@settings(max_examples=300, deadline=None)
@given(batches_inside())
def test_capacity_is_enough_for_every_batch_inside(case):
    spec, prefixes, nodes = case
    capacity = contract.capacity_elements(spec)
    for name, elements in need(spec, prefixes, nodes).items():
        assert capacity[name] >= elements, name


@settings(max_examples=300, deadline=None)
@given(specs)
def test_capacity_is_at_most_a_tenth_more_than_some_batch_needs(spec):
    """Every request at the maximum: of its nodes, or of its prefix (a request without nodes may have the longest)."""
    everyone = [spec.max_requests * [x] for x in (spec.max_kv_len - spec.max_nodes, spec.max_nodes)]
    most = need(spec, *everyone)
    most["kv_indices"] = max(
        most["kv_indices"], need(spec, spec.max_requests * [spec.max_kv_len], spec.max_requests * [0])["kv_indices"]
    )
    capacity = contract.capacity_elements(spec)
    assert set(capacity) == set(most)
    for name, elements in most.items():
        assert elements <= capacity[name] <= 1.1 * elements, name
