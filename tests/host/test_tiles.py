"""The tile planner of the tensor-core kernel: what it chooses fits every device, wastes few rows, and is a function of
the spec's shape; no two regions of it share a byte.  What it does not serve is refused by name, and served by the plain
kernel.

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
from nbverify.kernels.planner import MOST_SMS, SHARED_BYTES, column_parts_of, geometry_of, limits_of
from nbverify.kernels.segments import INDEX_LISTS, RECORD_BYTES
from nbverify.kernels.tiles import row_pitch

CAPABILITIES = ((8, 0), (8, 6), (9, 0), (12, 0))
BUDGETS = (65_536, 101_376, 232_448)  # B16: an older card, sm_120, sm_90
FP8 = "float8_e4m3fn"
DTYPES = [("bfloat16", None), ("float16", None), ("bfloat16", FP8), ("float16", FP8)]
WIDTHS = DTYPES[::2]  # of the cache: all that tells the tiles of two dtypes apart
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


CHUNK = 16  # bytes: of a cp.async, of a row that ldmatrix reads, of a vector access
LINE = 128  # bytes: of all banks of shared memory
LANES = 32
FRAGMENT = 16 * LANES  # bytes of an mma operand of 16 x 16


def pitch_by_hand(columns, slice_columns):
    """Bytes from a row to the next: 16-bit numbers, and 16 bytes more unless rows are whole lines (swizzled).

    A reader's slice is whole lines too then, or they are whole slices.
    """
    is_swizzled = columns % 64 == 0 and (slice_columns % 64 == 0 or 64 % slice_columns == 0)
    return 2 * columns + (0 if is_swizzled else 16)


def regions_of(tile):
    """(name, offset, bytes, alignment) of shared memory, by the table in ``MmaGeometry``, sizes written out."""
    keys, rows, roles = tile.keys_per_tile, tile.rows_per_tile, tile.has_roles
    v_width = 0 if tile.shared_kv else tile.head_dim_v
    v_slice = tile.head_dim_v // max(1, tile.value_warps)  # columns of a warp, in a K row if V is part of it
    pitches = pitch_by_hand(tile.head_dim_qk, v_slice if tile.shared_kv else 64)
    pitches += pitch_by_hand(v_width, 64) if v_width else 0
    ring = tile.stages * keys * pitches
    raw = tile.raw_stages * keys * (tile.head_dim_qk + v_width)
    score_warps = max(tile.row_frags, tile.column_parts) if roles else tile.warps
    shared = min(tile.row_frags, tile.column_parts)  # row fragments that a warp multiplies
    steps_left = tile.head_dim_qk // 16 // tile.column_parts * shared - tile.query_steps_kept
    slots = tile.raw_stages or tile.stages  # of indices
    exchanged = tile.row_frags * (tile.column_parts - 1) * (tile.team_keys // 8) * LANES * 4 * 4
    chunks = 8 * 8 * tile.warps
    return [
        ("ring", 0, ring, CHUNK),
        ("raw", tile.raw_offset, raw, CHUNK),
        ("weights", tile.weights_offset, 2 * tile.team_keys // 16 * tile.row_frags * FRAGMENT * roles, CHUNK),
        ("factors", tile.factors_offset, 2 * rows * 4 * roles, 4),
        ("flags", tile.flags_offset, 2 * 4 * 4 * roles, CHUNK),
        ("indices", tile.indices_offset, slots * keys * 4, 4),
        ("exchange", tile.exchange_offset, 2 * exchanged, CHUNK),
        ("states", tile.states_offset, tile.warps * 16 * 8 * (tile.key_teams > 1), 4),
        ("finals", tile.finals_offset, rows * 4, 4),
        ("queries", tile.queries_offset, score_warps * steps_left * FRAGMENT, CHUNK),
        ("barriers", tile.barriers_offset, 2 * tile.stages * 8, 8),
        ("segments", tile.segments_offset, 2 * RECORD_BYTES, CHUNK),
        ("chunks", tile.tile_bytes - chunks, chunks, CHUNK),
        ("table", 4 * tile.table_offset, 0, CHUNK),
    ]


def layout_problems(tile):
    """All that is wrong with what lies where, as text."""
    found = []
    for (name, offset, size, alignment), (following, next_offset, *_) in itertools.pairwise(regions_of(tile)):
        if offset + size > next_offset:
            found.append(f"{name} ends at {offset + size}, {following} begins at {next_offset}")
        if offset % alignment:
            found.append(f"{name} at {offset}: no multiple of {alignment}")
    slot, lanes = tile.slot_bytes, tile.copy_lanes
    raw_v, raw_rows = tile.keys_per_tile * tile.k_row_bytes, (tile.k_row_bytes, tile.v_row_bytes)
    distances = {"slot": slot, "k_pitch": tile.k_pitch, "v_pitch": tile.v_pitch, "v_offset": tile.v_offset}
    distances |= {"raw slot": tile.raw_slot_bytes, "raw K row": raw_rows[0], "raw V row": raw_rows[1], "raw V": raw_v}
    distances |= {"staging_pitch": tile.staging_pitch, "a record": RECORD_BYTES, "index lists": 8 * INDEX_LISTS}
    found += [f"{name}: {value} is no multiple of {CHUNK}" for name, value in distances.items() if value % CHUNK]
    # A swizzled row's place in a line says which number it has: its rows begin at a line.
    starts = {"K": (tile.k_pitch, slot), "V": (tile.v_pitch, slot), "V rows": (tile.v_pitch, tile.v_offset)}
    starts |= {"queries": (tile.staging_pitch, slot), "a warp's": (tile.staging_pitch, 16 * tile.staging_pitch)}
    found += [
        f"{name}: swizzled rows at {place}"
        for name, (pitch, place) in starts.items()
        if pitch % LINE == 0 and place % LINE
    ]

    # Rows are fetched in whole passes of a warp, by lanes side by side; all rows of a tile by somebody.
    per_pass = LANES // lanes
    # 16 bytes a lane; in the last step of a row one lane in eight may have nothing to do.
    idle = {n: -(-n // (CHUNK * lanes)) * CHUNK * lanes - n for n in raw_rows}
    columns = tile.head_dim_qk // tile.staging_parts  # of the queries, at a time
    checks = {
        f"{lanes} lanes for rows of {raw_rows} bytes": all(8 * rest <= rest + n for n, rest in idle.items()),
        f"rows of {raw_rows} bytes in pieces": all(n % CHUNK == 0 for n in raw_rows),
        f"{tile.copy_passes} passes": tile.copied_rows == per_pass * tile.copy_passes,
        f"{tile.copied_rows} rows a warp": tile.copied_rows * tile.fetching_warps >= tile.keys_per_tile,
        f"{tile.staging_parts} parts of the queries": tile.query_steps % (tile.staging_parts * tile.column_parts) == 0,
        # One group of warps for all fragments, or groups of as many warps as fragments.
        f"{tile.column_parts} column parts of {tile.row_frags} fragments": (
            tile.row_frags <= tile.column_parts or tile.row_frags % tile.column_parts == 0
        ),
        f"{tile.row_frags} fragments without roles": tile.has_roles or tile.row_frags == 1,
        f"{tile.part_steps} steps of a part": tile.part_steps * tile.column_parts == tile.query_steps,
        f"{tile.part_steps} steps in runs of {tile.run_steps}": tile.part_steps % tile.run_steps == 0,
        f"{tile.column_parts} column parts without roles": tile.has_roles or tile.column_parts == 1,
        f"{tile.staging_lanes} lanes for {columns} columns": (
            tile.staging_lanes >= 2 and columns % 16 == 0 and 2 * columns % (CHUNK * tile.staging_lanes) == 0
        ),
        f"{columns} columns at a pitch of {tile.staging_pitch}": 2 * columns <= tile.staging_pitch,
        "query rows leave their slot": tile.staging_warps * 16 * tile.staging_pitch <= slot,
        f"{tile.staging_slots} slots for queries": (
            tile.staging_slots * tile.staging_warps >= (tile.row_frags if tile.has_roles else tile.warps)
        ),
        f"{tile.staging_slots} slots for queries, of {tile.stages}": tile.staging_slots <= tile.stages,
        f"{tile.team_merge_bytes} bytes of teams": tile.team_merge_bytes <= tile.stages * slot,
        # The ring: one tile multiplied, one weighted, one that is on its way or is widened.
        f"{tile.stages} stages, {tile.raw_stages} raw": tile.stages >= 3 and tile.raw_stages != 1,
        f"{tile.index_slots} slots of indices": tile.index_slots >= (tile.raw_stages or tile.stages),
    }
    return found + [text for text, holds in checks.items() if not holds]


def problems_of(spec, limits):
    """All that is wrong with the tile of a spec, as text."""
    tile = geometry_of(spec, limits)
    need, table = tile.shared_bytes(spec.max_requests), 4 * tile.table_offset
    merge = tile.warps * 12 * (4 * 128 + 16)  # 12 runs of a warp, each 128 columns and (m, l)
    checks = {
        f"{need} bytes of shared memory, of {limits.shared_bytes}": need <= limits.shared_bytes,
        "bytes of the work table": need - table == geo.table_bytes(spec.max_requests),
        "no room for the merge": table - 8 * 8 * tile.warps >= merge == geo.merge_scratch_bytes(tile.warps),
        f"{tile.threads} threads, {tile.warps} warps": tile.threads == 32 * tile.warps and 1 <= tile.warps <= 32,
        f"{tile.rows_per_tile} rows": tile.rows_per_tile % 16 == 0 and tile.rows_per_tile > 0,
        f"{tile.keys_per_tile} keys": tile.keys_per_tile % 16 == 0 and tile.keys_per_tile > 0,
        "raw slots of an fp8 cache": (tile.raw_stages > 0) == spec.is_fp8,
    }
    return [text for text, holds in checks.items() if not holds] + layout_problems(tile)


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


def test_more_shared_memory_never_serves_less():
    """And the tile that is chosen keeps to the limit, for every limit from the smallest that serves."""
    for dims, nodes, (_, kv_dtype) in itertools.product(SERVED.values(), (1, 9, 33, 130), WIDTHS):
        spec = spec_of(dims, heads=8, max_nodes=nodes, kv_dtype=kv_dtype)
        fits = []
        for budget in range(16_384, 232_449, 4096):
            tile = geometry_of(spec, limits_of((9, 0), budget))
            fits.append(tile.shared_bytes(spec.max_requests) <= budget)
            if fits[-1]:
                assert layout_problems(tile) == [], (dims, nodes, kv_dtype, budget)
        assert fits == sorted(fits) and fits[-1], (dims, nodes)


def test_queries_pass_in_parts_where_the_ring_is_small():
    """This file and others rely on it: a whole row of four score warps has no room in three slots of 16 keys."""
    for kv_dtype, small, stages, parts, fragments in (
        (None, (8, 6), 3, 3, 4), (None, (12, 0), 3, 3, 4), (FP8, (8, 0), 4, 1, 4), (FP8, (12, 0), 3, 1, 2),
    ):  # fmt: skip
        tile = geometry_for(spec_of(SERVED["mla-576-512"], heads=8, max_nodes=8, kv_dtype=kv_dtype), small)
        assert (tile.stages, tile.keys_per_tile, tile.staging_parts) == (stages, 16, parts)
        assert tile.row_frags == fragments, "else there is room for fewer rows only"
        assert geometry_for(spec_of(SERVED["mla-576-512"], heads=8, max_nodes=8, kv_dtype=kv_dtype)).staging_parts == 1


# ------------------------------------------------------------------------------------- rows of shared memory, and parts


def parts_of(fragments, head_dim_qk):
    """``column_parts`` of the tile of so many row fragments."""
    spec = spec_of((head_dim_qk, 256, True), heads=16, max_nodes=fragments)
    tile = geometry_for(spec)
    assert tile.has_roles and tile.row_frags == fragments
    assert tile.column_parts == column_parts_of(fragments, head_dim_qk // 16)
    return tile.column_parts


def test_score_warps_share_their_fragments():
    """Two and two of four, three of three, four of one or two; alone where the columns do not divide."""
    assert [parts_of(fragments, 576) for fragments in (1, 2, 3, 4)] == [4, 4, 3, 2]
    assert [parts_of(fragments, 544) for fragments in (1, 2, 3, 4)] == [2, 2, 1, 2]  # 34 steps: halves, no thirds
    assert [parts_of(fragments, 272) for fragments in (1, 2, 3, 4)] == [1, 1, 1, 1]  # 17 steps
    # Thirds are runs of four steps, a line: 18 steps are three times six, but not whole runs.
    assert [parts_of(3, columns) for columns in (288, 384, 480, 576)] == [1, 3, 1, 3]
    assert geometry_for(spec_of(SERVED["128"], heads=8)).column_parts == 1, "teams multiply all columns"


def test_every_step_of_the_scores_is_one_part_s():
    """Parts take turns of ``run_steps``: by the formula of kernels/scores.py, each step once."""
    for fragments in (1, 2, 3, 4):
        tile = geometry_for(spec_of(SERVED["mla-576-512"], heads=16, max_nodes=fragments))
        parts, run = tile.column_parts, tile.run_steps
        assert run == {2: 1, 3: 4, 4: 1}[parts]
        steps = [part * run + k // run * parts * run + k % run for part in range(parts) for k in range(tile.part_steps)]
        assert sorted(steps) == list(range(36))
        assert tile.exchange_bytes == fragments * (parts - 1) * tile.team_keys // 8 * FRAGMENT


def test_rows_of_whole_lines_are_swizzled_and_others_padded():
    assert [row_pitch(width) for width in (32, 128, 192, 256, 1152, 1184)] == [48, 128, 208, 256, 1152, 1200]
    # Where a reader's slice is no part of a line and no whole lines: the first chunk of a slice would carry.
    pitches = [row_pitch(1152, columns) for columns in (32, 64, 96, 128, 192, 256, 384)]
    assert pitches == [1152, 1152, 1168, 1152, 1168, 1152, 1152]


def test_pitches_of_tiles():
    def pitches(dims):
        tile = geometry_for(spec_of(dims, heads=8, max_nodes=8))
        return tile.k_pitch, tile.v_pitch

    assert pitches((576, 512, True)) == (1152, 1152)  # value warps have 64 columns: a line
    assert pitches((576, 384, True)) == (1168, 1168)  # 48 columns
    assert pitches((576, 256, True)) == (1152, 1152)  # 32 columns: half a line
    assert pitches((288, 256, True)) == (592, 592)  # 4.5 lines
    assert pitches((128, 128, False)) == (256, 256)
    assert pitches((96, 64, False)) == (208, 128)
    assert pitches((64, 96, False)) == (128, 208)


# --------------------------------------------------------------------------------------------------------------- widths


def all_widths():
    for qk, v, is_mla in itertools.product(range(16, 577, 16), range(16, 577, 16), (False, True)):
        if v <= qk or not is_mla:
            yield qk, v, is_mla


@pytest.mark.parametrize(
    "cc, nodes",
    [((9, 0), 1), ((9, 0), 8), ((9, 0), 33), ((8, 0), 64), ((12, 0), 64), ((12, 0), 8)],
    ids=lambda value: str(value).replace(", ", ".").strip("()"),
)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["16-bit", "fp8"])
def test_any_width_is_served_or_refused_by_name(cc, nodes, kv_dtype):
    """Refused for its width: the error names 'simt'.  Served: it fits, or only the largest device has room."""
    refused, wrong = 0, []
    for dims in all_widths():
        spec = spec_of(dims, heads=2, max_nodes=nodes, kv_dtype=kv_dtype)
        try:
            tile = geometry_for(spec, cc)
            if cc != (9, 0):
                geo.check_shared_memory(spec, tile, limits_of(cc).shared_bytes)
        except nv.ArgumentError as error:
            if error.argument == "kernel":
                refused += 1
                assert re.search(rf"'simt'.*head_dim_qk={dims[0]}, head_dim_v={dims[1]}", str(error))
                assert max(dims[:2]) > 256, "widths up to 256 are served"
            continue
        if found := problems_of(spec, limits_of(cc)):
            wrong.append((dims, found))
    assert refused, "this test needs a width that is refused"
    assert not wrong, f"{len(wrong)} widths, the first ones {wrong[:3]}"


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
    many = replace(spec, max_requests=40_000)
    table = geo.table_bytes(40_000)
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
    for nodes, (_, kv_dtype) in itertools.product((1, 8, 33), WIDTHS):
        spec = spec_of(dims, heads=8, max_nodes=nodes, kv_dtype=kv_dtype)
        tile = geometry_for(spec, cc)
        for changes in (
            *({"max_requests": n} for n in (1, 2, 37, 63)),
            *({"max_kv_len": n} for n in (nodes, 2**31 - 128)),
            *({"mask": m, "split": s} for m, s in (("tree", "fixed"), ("none", "balanced"))),
            {"reduction": "two_launch"},
            {"sm_scale": 0.5},
            {"dtype": "float16", "kv_dtype": kv_dtype or "float16"},
        ):
            assert geometry_for(replace(spec, **changes), cc) == tile, changes


def test_capabilities():
    assert [limits_of(cc).can_suspend for cc in ((8, 0), (8, 9), (9, 0), (12, 0))] == [False, False, True, True]
    assert limits_of((9, 9)).shared_bytes == min(SHARED_BYTES.values()), "an unknown one is taken for a small one"
    assert limits_of((9, 0), 50_000).shared_bytes == 50_000
    assert MOST_SMS.keys() == SHARED_BYTES.keys()
    assert [limits_of(cc).max_chunks for cc in ((8, 0), (9, 0), (12, 0), (9, 9))] == [108, 132, 188, 132]
