"""The tile planner of the tensor-core kernel: what it chooses fits every device, wastes few rows, and is a function of
the spec's shape.  What it does not serve is refused by name, and served by the plain kernel.

CPU only and exhaustive over shapes (B16, B17); ``nbverify.kernels.tiles`` says why a tile is what it is.
"""

import itertools
import re
from dataclasses import replace

import pytest
from support.kernels import geometry_for

import nbverify as nv
from nbverify import presets
from nbverify.kernels import geometry as geo
from nbverify.kernels.tiles import SHARED_BYTES, geometry_of, limits_of

CAPABILITIES = ((8, 0), (8, 6), (9, 0), (12, 0))
BUDGETS = (65_536, 101_376, 232_448)  # B16: an older card, sm_120, sm_90
FP8 = "float8_e4m3fn"
DTYPES = [("bfloat16", None), ("float16", None)]
SERVED = {  # (head_dim_qk, head_dim_v, MLA): the shapes that issue 3 names
    "64": (64, 64, False),
    "96": (96, 96, False),
    "128": (128, 128, False),
    "192-128": (192, 128, False),
    "256": (256, 256, False),
    "mla-576-512": (576, 512, True),
}
LIMITS = {"max_requests": 16, "max_nodes": 64, "max_kv_len": 65_536, "sm_scale": 1.0, "kernel": "mma"}
# Padding of rows, from 9 nodes x 8 heads up: at most this share of the products is for rows that do not exist.
MAX_WASTE = 0.2
each_shape = pytest.mark.parametrize("dims", SERVED.values(), ids=SERVED)
each_capability = pytest.mark.parametrize("cc", CAPABILITIES, ids=lambda cc: f"{cc[0]}.{cc[1]}")


def spec_of(dims, heads=1, kv_heads=1, **options):
    qk, v, is_mla = dims
    return nv.VerifySpec(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim_qk=qk, head_dim_v=v, shared_kv=is_mla,
        **{**LIMITS, **options},
    )  # fmt: skip


def problems_of(spec, limits):
    """All that is wrong with the tile of a spec, as text."""
    tile = geometry_of(spec, limits)
    need, table = tile.shared_bytes(spec.max_requests), 4 * tile.table_offset
    checks = {
        f"{need} bytes of shared memory, of {limits.shared_bytes}": need <= limits.shared_bytes,
        "bytes of the work table": need - table == geo.table_bytes(spec.max_requests),
        "the work table is int64, and 16-byte aligned": table % 16 == 0,
        "no room for the merge": table >= geo.merge_scratch_bytes(),
        f"{tile.threads} threads, {tile.warps} warps": tile.threads == 32 * tile.warps and 1 <= tile.warps <= 32,
        f"{tile.rows_per_tile} rows": tile.rows_per_tile % 16 == 0 and tile.rows_per_tile > 0,
        f"{tile.keys_per_tile} keys": tile.keys_per_tile % 16 == 0 and tile.keys_per_tile > 0,
    }
    return [text for text, holds in checks.items() if not holds]


# ------------------------------------------------------------------------------------------------------- what it serves


@each_capability
@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_fit_with_any_number_of_nodes(name, cc):
    found = {}
    for (dtype, kv_dtype), nodes in itertools.product(DTYPES, range(1, 131)):
        spec = presets.preset(name)
        spec = replace(spec, dtype=dtype, kv_dtype=kv_dtype, max_nodes=nodes, kernel="mma")
        if problems := problems_of(spec, limits_of(cc)):
            found[dtype, kv_dtype, nodes] = problems
    assert not found


@each_capability
@each_shape
def test_b16_every_served_shape_fits(dims, cc):
    """Rows: nodes x heads of a group, which is all that the tile knows of them."""
    found = {}
    rows = [*range(1, 150), 255, 256, 257, 264, 520, 1000, 1040, 8192]
    for (dtype, kv_dtype), nodes in itertools.product(DTYPES, rows):
        spec = spec_of(dims, max_nodes=nodes, dtype=dtype, kv_dtype=kv_dtype)
        if problems := problems_of(spec, limits_of(cc)):
            found[dtype, kv_dtype, nodes] = problems
    assert not found, f"{len(found)} shapes"


@pytest.mark.parametrize("budget", BUDGETS)
@each_shape
def test_b16_budgets(dims, budget):
    """A budget is a number of bytes, not an architecture: the tile fits it, or both numbers are named."""
    for (dtype, kv_dtype), nodes in itertools.product(DTYPES, (1, 16, 64)):
        spec = spec_of(dims, heads=8, max_nodes=nodes, dtype=dtype, kv_dtype=kv_dtype)
        for cc in CAPABILITIES:
            limits = limits_of(cc, budget)
            tile = geometry_of(spec, limits)
            need = tile.shared_bytes(spec.max_requests)
            if need <= budget:
                assert problems_of(spec, limits) == []
                geo.check_shared_memory(spec, tile, budget)
            else:
                assert budget < min(SHARED_BYTES.values()), "every device that there is has more"
                with pytest.raises(nv.ArgumentError, match=f"(?s){budget}.*{need}.*head_dim_qk={dims[0]}"):
                    geo.check_shared_memory(spec, tile, budget)


def test_fp8_caches_are_refused_by_name():
    spec = spec_of(SERVED["mla-576-512"], heads=8, max_nodes=8, kv_dtype=FP8)
    with pytest.raises(nv.ArgumentError, match=r"^kernel: expected 'simt' with an fp8 cache"):
        nv.VerifyPlan(spec, device="emulator")


def test_more_shared_memory_never_serves_less():
    """And the tile that is chosen keeps to the limit, for every limit from the smallest that serves."""
    for dims, nodes in itertools.product(SERVED.values(), (1, 9, 33, 130)):
        spec = spec_of(dims, heads=8, max_nodes=nodes)
        fits = []
        for budget in range(16_384, 232_449, 4096):
            tile = geometry_of(spec, limits_of((9, 0), budget))
            fits.append(tile.shared_bytes(spec.max_requests) <= budget)
        assert fits == sorted(fits) and fits[-1], (dims, nodes)


# --------------------------------------------------------------------------------------------------------------- widths


def all_widths():
    for qk, v, is_mla in itertools.product(range(16, 577, 16), range(16, 577, 16), (False, True)):
        if v <= qk or not is_mla:
            yield qk, v, is_mla


@pytest.mark.parametrize("nodes", [1, 8, 33])
def test_any_width_is_served_or_refused_by_name(nodes):
    """Refused for its width: the error names 'simt'.  Served: it fits the largest device."""
    refused, too_large = 0, []
    for dims in all_widths():
        spec = spec_of(dims, heads=2, max_nodes=nodes)
        try:
            found = problems_of(spec, limits_of((9, 0)))
        except nv.ArgumentError as error:
            refused += 1
            assert error.argument == "kernel"
            assert re.search(rf"'simt'.*head_dim_qk={dims[0]}, head_dim_v={dims[1]}", str(error))
            assert max(dims[:2]) > 256, "widths up to 256 are served"
            continue
        if found:
            too_large.append((dims, found))
    assert refused, "this test needs a width that is refused"
    assert not too_large, f"{len(too_large)} widths, the first ones {too_large[:3]}"


def test_a_refused_width_is_refused_by_the_plan_and_served_by_simt():
    spec = spec_of((16, 272, False), heads=2, max_nodes=3)
    with pytest.raises(nv.ArgumentError, match=r"^kernel: .*'simt' takes all.*head_dim_qk=16, head_dim_v=272"):
        nv.VerifyPlan(spec, device="emulator")
    nv.VerifyPlan(replace(spec, kernel="simt"), device="emulator")


def test_nothing_fits():
    """Each of a tile and a work table that are too large is refused by the plan, with both numbers and its reason."""
    spec = spec_of(SERVED["mla-576-512"], heads=8)
    with pytest.raises(
        nv.ArgumentError, match=r"^spec: expected at most 30000 bytes.*got \d+ bytes: .*head_dim_qk=576"
    ):
        nv.VerifyPlan(spec, device="emulator", shared_limit=30_000)
    many = replace(spec, max_requests=20_000)
    table = geo.table_bytes(20_000)
    with pytest.raises(nv.ArgumentError, match=rf"^spec: expected at most 232448 bytes.*{table} for the work table"):
        nv.VerifyPlan(many, device="emulator")


def test_the_plan_takes_the_limit_that_it_is_given():
    spec = spec_of(SERVED["128"], heads=4, max_nodes=8)
    sizes = []
    for limit in (*BUDGETS[1:], None):
        plan = nv.VerifyPlan(spec, device="emulator", shared_limit=limit)
        sizes.append(plan.report().shared_bytes)
        assert sizes[-1] <= (limit or SHARED_BYTES[9, 0])
    assert sizes[-1] == sizes[-2], "what the emulated device has, and the same as a limit"
    for cc in CAPABILITIES:
        plan = nv.VerifyPlan(spec, device=nv.Emulator(cc=cc))
        assert plan.geometry == geometry_of(spec, limits_of(cc))


# ----------------------------------------------------------------------------------------------------------------- rows


def rows_multiplied(tile, rows):
    """Rows that take part in the products of the scores: fragments without a row of the request do nothing.

    (In the walk by roles the output is multiplied for whole tiles.)
    """
    step = 16
    full, rest = divmod(rows, tile.rows_per_tile)
    return full * tile.rows_per_tile + -(-rest // step) * step


@each_capability
@each_shape
def test_few_rows_are_wasted(dims, cc):
    """9, 17, 33, 65 nodes; 1 to 16 heads a group.  The plan knows the largest tree, and requests are that large."""
    wasted = {}
    for nodes, group in itertools.product((9, 17, 33, 65, 8, 16, 32, 64, 10, 11, 48), range(1, 17)):
        rows = nodes * group
        tile = geometry_for(spec_of(dims, heads=group, max_nodes=nodes), cc)
        multiplied = rows_multiplied(tile, rows)
        assert multiplied >= rows
        if rows < 72:
            if multiplied - rows >= 32:
                wasted[nodes, group] = multiplied
        elif multiplied - rows > MAX_WASTE * multiplied:
            wasted[nodes, group] = multiplied
    assert not wasted, "(nodes, group): rows multiplied"


@each_shape
def test_small_trees_have_small_tiles(dims):
    """A tile is no higher than the tree needs: its rows are registers, partial states and products."""
    for rows in (1, 8, 16, 17, 24, 32):
        tile = geometry_for(spec_of(dims, max_nodes=rows))
        assert tile.rows_per_tile == -(-rows // 16) * 16, rows


def test_b17_the_rows_of_any_heads():
    """MLA with 1 .. 130 heads, all divisor pairs of GQA: the tile knows nodes x heads of a group, and nothing else."""
    for dims in (SERVED["mla-576-512"], SERVED["128"]):
        for heads, nodes in itertools.product(range(1, 131), (1, 3, 17)):
            one = geometry_for(spec_of(dims, heads=heads, max_nodes=nodes))
            assert one == geometry_for(spec_of(dims, max_nodes=nodes * heads)), (heads, nodes)
    for kv_heads, group in itertools.product(range(1, 17), range(1, 17)):
        spec = spec_of(SERVED["64"], heads=kv_heads * group, kv_heads=kv_heads, max_nodes=3)
        tile = geometry_for(spec)
        assert tile == geometry_for(spec_of(SERVED["64"], heads=group, max_nodes=3))
        assert geo.units_per_request(spec, tile) == kv_heads * -(-3 * group // tile.rows_per_tile)


# ---------------------------------------------------------------------------------------- what it must not depend on


@each_capability
@each_shape
def test_the_tile_is_of_the_shape_and_the_device(dims, cc):
    """Bits of ``fixed`` must not depend on how large a batch the plan is for, nor on its longest request."""
    for nodes in (1, 8, 33):
        spec = spec_of(dims, heads=8, max_nodes=nodes)
        tile = geometry_for(spec, cc)
        for changes in (
            *({"max_requests": n} for n in (1, 2, 37, 63)),
            *({"max_kv_len": n} for n in (nodes, 2**31 - 1)),
            *({"mask": m, "split": s} for m, s in (("tree", "fixed"), ("none", "balanced"))),
            {"reduction": "two_launch"},
            {"sm_scale": 0.5},
            {"dtype": "float16", "kv_dtype": "float16"},
        ):
            assert geometry_for(replace(spec, **changes), cc) == tile, changes


def test_capabilities():
    assert [limits_of(cc).can_suspend for cc in ((8, 0), (8, 9), (9, 0), (12, 0))] == [False, False, True, True]
    assert limits_of((9, 9)).shared_bytes == min(SHARED_BYTES.values()), "an unknown one is taken for a small one"
    assert limits_of((9, 0), 50_000).shared_bytes == 50_000
