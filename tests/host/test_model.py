"""Counts of a tile, the model of a launch's time, and the report made of both: without a compiler, without a GPU."""

from dataclasses import replace
from itertools import pairwise

import pytest

import nbverify as nv
from benchmarks import model as checked
from benchmarks import shapes
from benchmarks.measure import rates
from nbverify import model, tile_report
from nbverify.configurations import SPECS, TARGETS, configurations
from nbverify.kernels.planner import SHARED_BYTES, choose_tiles, limits_of
from nbverify.model import Batch, Latency
from nbverify.tile_counts import (
    copy_counts,
    copy_instructions,
    counts_of,
    ptx_counts,
    score_ldmatrix,
    value_ldmatrix,
    wasted_mma,
)

H200, RTX = model.CHIPS["9.0"], model.CHIPS["12.0"]
ALL = [pytest.param(one, id=f"{one.name} {one.cc}") for cc in TARGETS for one in configurations(cc)]
NO_LATENCY = Latency(0.0, 0.0)


# ---- counts


@pytest.mark.parametrize("configuration", ALL)
def test_a_tile_has_the_products_that_its_shape_needs(configuration):
    """rows x keys x (head_dim_qk + head_dim_v), 16 x 8 x 16 of them an mma: no product is made twice, none left out."""
    tiles = configuration.tiles
    products = tiles.rows_per_tile * tiles.keys_per_tile * (tiles.head_dim_qk + tiles.head_dim_v)
    assert counts_of(tiles).mma * 16 * 8 * 16 == products
    assert counts_of(tiles).mma / 4 <= counts_of(tiles).busiest_mma <= counts_of(tiles).mma


@pytest.mark.parametrize("configuration", ALL)
def test_a_tile_reads_each_operand_from_shared_memory_once_a_warp(configuration):
    """K once for the score warps that share fragments, each with its queries' rest, V's columns once a value warp.

    With roles P goes through, and so do the sums that warps with shared fragments exchange: all but their own.
    An fp8 tile goes through twice more: read as it came, and written as 16-bit numbers.
    """
    tiles = configuration.tiles
    k_bytes = tiles.team_keys * 2 * tiles.head_dim_qk
    v_bytes = tiles.team_keys * 2 * tiles.head_dim_v
    rest_bytes = 16 * 32 * tiles.query_rest
    if tiles.has_roles:
        p_bytes = 2 * tiles.rows_per_tile * tiles.keys_per_tile
        through = tiles.score_warps * (k_bytes // tiles.column_parts + rest_bytes) + v_bytes
        through += p_bytes * (1 + tiles.value_warps)
        through += 2 * 4 * tiles.rows_per_tile * tiles.keys_per_tile * (tiles.column_parts - 1)
    else:
        warps_of_tile = tiles.row_teams * (tiles.keys_per_tile // tiles.team_keys)
        through = warps_of_tile * (k_bytes + v_bytes + rest_bytes)
    fill = tiles.keys_per_tile * (tiles.k_row_bytes + tiles.v_row_bytes)
    assert counts_of(tiles).pool_bytes == fill
    widened = fill + 2 * fill if tiles.cache_bytes == 1 else 0
    assert counts_of(tiles).shared_bytes == through + fill + widened


@pytest.mark.parametrize("configuration", ALL)
def test_fragments_without_rows_multiply_no_scores(configuration):
    """But for those that share warps with one that has rows."""
    tiles = configuration.tiles
    most, shared = tiles.rows_per_tile // 16, min(tiles.column_parts, tiles.row_frags)
    one, full = counts_of(tiles, 1), counts_of(tiles, most)
    assert full == counts_of(tiles) == counts_of(tiles, most + 1)
    parts_of_tile = tiles.keys_per_tile // tiles.team_keys
    a_fragment = tiles.score_mma if tiles.has_roles else parts_of_tile * (tiles.score_mma + tiles.value_mma)
    for frags in range(1, most + 1):
        assert full.mma - counts_of(tiles, frags).mma == (most - -(-frags // shared) * shared) * a_fragment
    if tiles.has_roles:
        of_a_warp = tiles.team_keys * 2 * tiles.head_dim_qk // tiles.column_parts + 512 * tiles.query_rest
        of_a_warp += 2 * (tiles.column_parts - 1) * 4 * 16 * tiles.team_keys  # exchanged
        assert full.shared_bytes - one.shared_bytes == (most - shared) * of_a_warp


def test_ptx_counts():
    """Queries, scores, and output: once with roles, twice with teams and there with repairs where V is apart.

    A score warp of two that share fragments: half of the 36 steps, 16 keys x 16 columns at once.
    """
    limits = limits_of((12, 0))
    tiles = choose_tiles(SPECS["mla"]["mla-33"], limits)
    assert tiles.has_roles and (tiles.column_parts, tiles.team_keys, score_ldmatrix(tiles)) == (2, 16, 18)
    once = tiles.score_mma + tiles.value_mma, 36 + score_ldmatrix(tiles) + value_ldmatrix(tiles)
    assert ptx_counts(tiles) == once
    tiles = choose_tiles(SPECS["gqa128"]["gqa128-8"], limits)
    ldmatrix = 8 + score_ldmatrix(tiles) + 2 * value_ldmatrix(tiles)
    assert not tiles.has_roles and ptx_counts(tiles) == (tiles.score_mma + 4 * tiles.value_mma, ldmatrix)
    narrow = replace(SPECS["mla"]["mla-33"], head_dim_qk=192, head_dim_v=128)
    tiles = choose_tiles(narrow, limits)
    assert not tiles.has_roles and ptx_counts(tiles)[0] == tiles.score_mma + 2 * tiles.value_mma


def test_copies_by_hand():
    """Kimi on sm_90: 36 query copies, 9 of a key row a lane; 20 of queries, 8 fragments of P, flags, cleaning."""
    tiles = choose_tiles(SPECS["mla"]["mla-33"], limits_of((9, 0)))
    assert (tiles.query_rest, tiles.copy_lanes, tiles.copy_passes) == (20, 8, 1)
    assert copy_counts(tiles, 2, 1) == {"row copies": 36 + 2 * 9, "16-byte shared loads": 20 + 8 + 2}
    assert copy_counts(tiles, 5, 1)["row copies"] == 36 + 5 * 9
    # Grouped queries, fp8: a row of K and one of V are 128 bytes; two fetches of two passes, each widens both, with two
    # loads, the second ahead; one load looks for values that are not finite.
    tiles = choose_tiles(SPECS["gqa128-fp8"]["gqa128-fp8-8"], limits_of((9, 0)))
    assert (tiles.query_rest, tiles.copy_passes, tiles.staging_parts) == (0, 2, 1)
    assert copy_counts(tiles, 6, 3) == {"row copies": 8 + 6 * 2, "16-byte shared loads": 2 * 2 * 2 * 2 + 1}


def test_copies_are_found_in_ptx():
    ptx = """
\tcp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;
\tcp.async.cg.shared.global [%r1], [%rd1], 16;
\tcp.async.ca.shared.global [%r1], [%rd1], 4;
\tcp.async.commit_group;
cp.async.wait_group 0;
\tcp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
\tld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r5];
\tld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r5];
\t// ld.shared.v4.u32
"""
    assert copy_instructions(ptx) == {
        "row copies": 2, "index copies": 1, "waits for copies": 1, "16-byte shared loads": 1,
    }  # fmt: skip


@pytest.mark.parametrize("configuration", ALL)
def test_rows_that_are_wasted(configuration):
    """None where tiles are full; else what is left of fragments, and what is multiplied for all or for some of them."""
    tiles, full = configuration.tiles, configuration.tiles.rows_per_tile
    assert wasted_mma(tiles, full) == wasted_mma(tiles, 3 * full) == 0
    one = counts_of(tiles, 1).mma / counts_of(tiles).mma
    assert wasted_mma(tiles, 1) == pytest.approx(1 - 1 / full / one)
    assert wasted_mma(tiles, full + 1) == pytest.approx(1 - (1 + 1 / full) / (1 + one))


@pytest.mark.parametrize("chip", model.CHIPS.values(), ids=lambda chip: chip.name)
def test_rates(chip):
    """An mma every so many clocks in each quarter is the rate that the chip is given."""
    per_second = chip.sms * 4 * chip.clock_ghz * 1e9 / chip.mma_clocks
    assert per_second * 4096 == pytest.approx(chip.mma_tflop_s * 1e12)
    assert model.CHIPS[chip.cc] is chip
    if chip is RTX:
        assert chip.mma_clocks == pytest.approx(16, rel=1e-3)


@pytest.mark.parametrize("grid", [1, 3, 132, 188, 100_000])
@pytest.mark.parametrize("batch", [Batch(1, 1, 0), Batch(1, 9, 700), Batch(3, 33, 4096), Batch(16, 17, 8192)], ids=str)
def test_every_tile_of_every_row_is_walked_once(batch, grid):
    spec = nv.VerifySpec.gqa(8, 2, 128, max_requests=16, max_nodes=33, max_kv_len=10_000, sm_scale=1.0, kernel="mma")
    tiles = choose_tiles(spec, limits_of((9, 0)))
    blocks = list(model.shares(spec, tiles, batch, grid))
    unit_tiles = -(-(batch.prefix + batch.nodes) // tiles.keys_per_tile)
    units = batch.requests * 2 * -(-batch.nodes * 4 // tiles.rows_per_tile)
    counts = [sum(count for _, count, _ in block) for block in blocks]
    assert sum(counts) == units * unit_tiles
    # Start items stand before the tiles of each unit, fewer than a block's share has tiles; then cut evenly.
    assert tiles.segment_cost > 1
    start = max(0, min(tiles.segment_cost, units * unit_tiles // grid - 1))
    line = ([0] * start + [1] * unit_tiles) * units
    assert len(blocks) <= min(grid, len(line)) and all(counts)
    cuts = [k * len(line) // len(blocks) for k in range(len(blocks) + 1)]
    assert counts == [sum(line[begin:end]) for begin, end in pairwise(cuts)]
    fragments = sum(frags * count for block in blocks for frags, count, _ in block)
    rows, full = batch.nodes * 4, tiles.rows_per_tile
    a_head = sum(-(-min(full, rows - first) // 16) for first in range(0, rows, full))
    assert fragments == batch.requests * 2 * a_head * unit_tiles
    assert all(direct == (count == unit_tiles) for block in blocks for _, count, direct in block)


def test_few_tiles_leave_blocks_idle():
    """As in tests/host/test_schedule.py: one tile a block, and then the merge of that many states, takes longer."""
    spec, limits = SPECS["mla"]["mla-33"], limits_of((9, 0))
    tiles = choose_tiles(replace(spec, max_nodes=8), limits)
    for num_tiles, busy in ((129, 65), (40, 40), (1026, 132)):
        batch = Batch(1, 8, num_tiles * tiles.keys_per_tile - 8)
        assert len(list(model.shares(spec, tiles, batch, 132))) == busy


def test_units_lie_on_the_line_as_in_the_schedule():
    """The KV head varies fastest: 260 rows of two heads are two full row tiles, then two of 116 rows."""
    spec = nv.VerifySpec.gqa(8, 2, 128, max_requests=1, max_nodes=65, max_kv_len=10_000, sm_scale=1.0, kernel="mma")
    tiles = choose_tiles(spec, limits_of((9, 0)))
    assert tiles.rows_per_tile == 144
    blocks = list(model.shares(spec, tiles, Batch(1, 65, 4096), 4))
    assert [[(frags, direct) for frags, _, direct in block] for block in blocks] == [
        [(9, True)], [(9, True)], [(8, True)], [(8, True)],
    ]  # fmt: skip


def estimate(chip=H200, *, latency=model.LATENCY, blocks_per_sm=1, nodes=33, prefix=32_768):
    spec = SPECS["mla"]["mla-33"]
    major, _, minor = chip.cc.partition(".")
    tiles = choose_tiles(spec, limits_of((int(major), int(minor))))
    batch = Batch(1, nodes, prefix)
    return model.estimate(spec, tiles, batch, chip, blocks_per_sm=blocks_per_sm, latency=latency)


def test_without_latency_a_launch_is_its_slowest_pipe():
    for chip in (H200, RTX):
        one = estimate(chip, latency=NO_LATENCY)
        assert one.walk_us == pytest.approx(one.tiles * max(one.memory_us, one.tensor_us, one.shared_us))
        assert one.us == one.walk_us + one.partials_us
    slow_memory = replace(H200, read_gb_s=10.0)
    one = estimate(slow_memory, latency=NO_LATENCY)
    assert one.bound == "memory" and one.walk_us == pytest.approx(one.tiles * one.memory_us)


def test_latency_and_fixed_cost_are_added():
    base, more = estimate(latency=NO_LATENCY), estimate(latency=Latency(1750, 5.0))
    assert more.us - base.us == pytest.approx(5.0 + more.tiles * 1.0)  # 1750 clocks at 1.75 GHz


def test_latency_shrinks_with_the_chain_of_products():
    """Four warps share the products of one row fragment or of two, and three or two those of as many."""
    for name, share in (("mla-1", 1 / 4), ("mla-4", 1 / 2), ("mla-6", 1), ("mla-33", 1)):
        spec = SPECS["mla"][name]
        tiles = choose_tiles(spec, limits_of((9, 0)))
        one = model.estimate(spec, tiles, Batch(1, 1, 1024), H200, latency=Latency(1750, 0.0))
        assert one.latency_us == pytest.approx(share), name


def test_memory_hides_latency():
    """Tiles are fetched ahead: what waits for memory does not wait for the warps too."""
    slow_memory = replace(H200, read_gb_s=10.0)
    assert estimate(slow_memory).us - estimate(slow_memory, latency=NO_LATENCY).us == pytest.approx(
        model.LATENCY.fixed_us
    )


def test_blocks_on_an_sm_hide_each_others_latency():
    one, two = estimate(), estimate(blocks_per_sm=2)
    assert two.tiles == pytest.approx(one.tiles / 2, abs=1)
    assert two.tensor_us == pytest.approx(2 * one.tensor_us)
    assert one.walk_us / 2 <= two.walk_us < one.walk_us
    many = estimate(blocks_per_sm=8)  # eight at a time leave no latency to hide, only the pipe that all of them need
    assert many.walk_us == pytest.approx(many.tiles * max(many.tensor_us, many.shared_us))


def test_what_a_tile_waits_for():
    assert estimate(replace(H200, mma_tflop_s=1.0)).bound == "tensor"
    assert estimate(latency=Latency(1e6, 0.0)).bound == "latency"
    short = Latency(1000, 0.0)  # less than the tile's reads of shared memory
    one = estimate(replace(H200, read_gb_s=100.0), latency=short)
    chain_us = max(one.tensor_us, one.shared_us) + one.latency_us
    for share, bound in ((1.01, "memory"), (0.99, "shared memory")):  # of what the chain takes
        chip = replace(H200, read_gb_s=100.0 * one.memory_us / (share * chain_us))
        assert estimate(chip, latency=short).bound == bound


@pytest.mark.parametrize("goal", shapes.MUST, ids=lambda goal: goal.shape.label)
def test_the_limit_is_the_benchmarks(goal):
    shape = goal.shape
    ceilings = {"read_gb_s": RTX.read_gb_s, "mma_tflop_s": RTX.mma_tflop_s}
    spec = nv.VerifySpec(
        num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_v, shared_kv=shape.shared_kv, max_requests=1, max_nodes=1, max_kv_len=1, sm_scale=1.0,
    )  # fmt: skip
    batch = Batch(shape.requests, shape.nodes[0], shape.prefixes[0])
    want = rates(shapes.Case(shape), 1.0, ceilings)["limit_us"]
    assert model.limit_us(spec, batch, RTX) == pytest.approx(want)


# ---- against what was measured


@pytest.fixture(scope="module")
def record():
    found = checked.record_of_chip()
    if found is None:
        pytest.skip(f"no record of the {checked.CHIP.name} is kept in benchmarks/results")
    return found


def test_the_model_reproduces_the_record(record):
    """Every shape of it: none is left out, and two constants serve them all."""
    errors = checked.errors(record)
    assert len(errors) == len([row for row in record["rows"] if row.get("goal")]) == len(shapes.MUST)
    too_far = {label: f"{100 * error:+.1f} %" for label, error in errors.items() if abs(error) > checked.BOUND}
    assert not too_far, "refit with python -m benchmarks.model --fit"


def test_the_constants_are_those_of_the_fit(record, monkeypatch):
    """Of all in their neighbourhood: the whole grid takes a quarter of a minute."""
    step = checked.TILE_CLOCKS.step
    here = int(model.LATENCY.tile_clocks)
    monkeypatch.setattr(checked, "TILE_CLOCKS", range(here - 4 * step, here + 5 * step, step))
    worst, latency = checked.fit(record)
    assert latency == model.LATENCY
    assert worst == max(map(abs, checked.errors(record).values()))


def test_the_tables_in_the_docs_are_of_the_records():
    """Mend with ``python -m benchmarks.model``."""
    assert checked.page() == checked.PAGE.read_text(encoding="utf-8")


def test_the_chip_has_the_rates_of_the_record(record):
    """What ``compile --report`` uses without a record; single measurements move by some per cent."""
    chip = checked.chip_of(record)
    assert chip.read_gb_s == pytest.approx(H200.read_gb_s, rel=0.05)
    assert chip.mma_tflop_s == pytest.approx(H200.mma_tflop_s, rel=0.05)
    assert chip.sms == H200.sms


def test_a_record_of_other_tiles_is_refused(record):
    row = checked.rows_of(record)[0]
    for changes in ({"key_tile": 8}, {"threads": 32}, {"shared_bytes": 10**6}, {"split": "fixed"}, {"failed": "no"}):
        with pytest.raises(ValueError, match=r"^1 x 8 x 8, 4k"):
            checked.tiles_of({**row, **changes})


# ---- the report


def test_kimis_shapes_are_those_of_the_goals():
    goals = [(g.shape.num_q_heads, g.shape.requests, g.shape.nodes[0], g.shape.prefixes[0]) for g in shapes.MUST
             if g.shape.shared_kv]  # fmt: skip
    assert [(heads, b.requests, b.nodes, b.prefix) for heads, b in tile_report.KIMI_SHAPES] == goals
    labels = [g.shape.label for g in shapes.MUST if g.shape.shared_kv]
    rows = [{"heads": heads, **vars(batch)} for heads, batch in tile_report.KIMI_SHAPES]
    assert [tile_report.label_of(row) for row in rows] == labels


@pytest.mark.parametrize("cc", SHARED_BYTES, ids=str)
def test_the_tiles_of_kimis_shapes_are_among_those_that_ship(cc):
    """Their blocks per SM come from there."""
    shipped = {one.tiles for one in configurations(f"{cc[0]}.{cc[1]}") if one.kind == tile_report.KIMI_KIND}
    for heads, batch in tile_report.KIMI_SHAPES:
        assert choose_tiles(tile_report.kimi_spec(heads, batch), limits_of(cc)) in shipped


def test_configurations_are_each_another_tile():
    for cc in TARGETS:
        found = configurations(cc)
        assert len({one.tiles for one in found}) == len(found)
        assert {one.kind for one in found} == set(SPECS)
        limits = limits_of((int(cc[:-2]), 0))
        every = {choose_tiles(spec, limits) for specs in SPECS.values() for spec in specs.values()}
        assert {one.tiles for one in found} == every
    names = [name for specs in SPECS.values() for name in specs]
    assert len(set(names)) == len(names)


def test_a_tile_that_two_specs_have_is_listed_once(monkeypatch):
    same = {"first": SPECS["mla"]["mla-33"], "second": replace(SPECS["mla"]["mla-33"], max_nodes=65)}
    monkeypatch.setattr("nbverify.configurations.SPECS", {"mla": same})
    assert [one.name for one in configurations("12.0")] == ["first"]


def test_chips_are_of_capabilities_that_the_planner_knows():
    assert set(model.CHIPS) <= {f"{major}.{minor}" for major, minor in SHARED_BYTES}
