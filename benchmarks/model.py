"""The model of nbverify/model.py beside what was measured: its errors, and its two constants.

    python -m benchmarks.model            the errors on the H200's record; rewrites the tables in docs/model.md
    python -m benchmarks.model --fit      the two constants that make the largest error smallest, all shapes at once

The rates are the record's own ceilings, measured in the same process as its times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import compiled, readme
from benchmarks.table import number
from benchmarks.timing import ROOT
from nbverify import model, tile_report
from nbverify.compile import target_of
from nbverify.configurations import configurations
from nbverify.kernels.planner import choose_tiles, limits_of
from nbverify.kernels.tiles import MmaGeometry
from nbverify.model import Batch, Chip, Estimate, Latency
from nbverify.spec import VerifySpec

Row = dict[str, Any]
PAGE = ROOT / "docs" / "model.md"
BEGIN = "<!-- python -m benchmarks.model: begin -->"
END = "<!-- python -m benchmarks.model: end -->"
FORECAST_BEGIN = "<!-- python -m benchmarks.model: forecast begin -->"
FORECAST_END = "<!-- python -m benchmarks.model: forecast end -->"
FORECAST_CHIP = model.CHIPS["12.0"]
NOTHING_YET = "No record of the chip yet.\n"
CHIP = model.CHIPS["9.0"]
BOUND = 0.10  # of any shape of the record: |modelled / measured - 1|
# What --fit looks through.
TILE_CLOCKS = range(0, 4001, 25)
FIXED_US = [us / 10 for us in range(0, 401)]


def record_of_chip() -> dict[str, Any] | None:
    """The kept record of the H200."""
    return next((record for record in readme.kept().values() if record["head"]["gpu"] == CHIP.name), None)


def chip_of(record: dict[str, Any]) -> Chip:
    """The chip with the rates that were measured beside the record's times."""
    ceilings = record["ceilings"]
    return replace(
        CHIP, sms=record["head"]["sms"], read_gb_s=ceilings["read_gb_s"], mma_tflop_s=ceilings["mma_tflop_s"]
    )


def spec_of(row: Row) -> VerifySpec:
    """What a row of the record was measured with."""
    return VerifySpec(
        num_q_heads=row["heads"], num_kv_heads=row["kv_heads"],
        head_dim_qk=row["head_dims"][0], head_dim_v=row["head_dims"][1], shared_kv=row["mla"],
        max_requests=row["requests"], max_nodes=row["nodes"], max_kv_len=row["prefix"] + row["nodes"],
        sm_scale=row["sm_scale"], dtype=row["dtype"], kv_dtype=row["kv_dtype"], mask=row["mask"], kernel=row["kernel"],
    )  # fmt: skip


def tiles_of(row: Row) -> MmaGeometry:
    """The tile of a row.  Raises ValueError if it was measured with another one, or with what the model is not of."""
    if row.get("failed") or row["kernel"] != "mma" or row["split"] != "balanced":
        raise ValueError(f"{row['label']}: the model is of the tensor-core kernel with balanced splits")
    tiles = choose_tiles(spec_of(row), limits_of((9, 0)))
    measured, planned = (
        (row["row_tile"], row["key_tile"], row["threads"]),
        (tiles.rows_per_tile, tiles.keys_per_tile, tiles.threads),
    )
    # The work table of the plan's max_requests comes on top of the tile, and is smaller than a stage more would be.
    if measured != planned or not 0 <= row["shared_bytes"] - tiles.tile_bytes < tiles.slot_bytes:
        raise ValueError(
            f"{row['label']}: measured with tiles of (rows, keys, threads) {measured}, {row['shared_bytes']} bytes; "
            f"the planner now has {planned}, {tiles.tile_bytes} bytes and the work table"
        )
    return tiles


def modelled(row: Row, chip: Chip, latency: Latency = model.LATENCY) -> Estimate:
    """The estimate of a row of the record."""
    batch = Batch(row["requests"], row["nodes"], row["prefix"])
    return model.estimate(
        spec_of(row), tiles_of(row), batch, chip, blocks_per_sm=row["grid"] // chip.sms, latency=latency
    )


def rows_of(record: dict[str, Any]) -> list[Row]:
    """All shapes that have a goal."""
    return [row for row in record["rows"] if row.get("goal")]


def errors(record: dict[str, Any], latency: Latency = model.LATENCY) -> dict[str, float]:
    """Label of every shape -> modelled / measured - 1."""
    chip = chip_of(record)
    return {row["label"]: modelled(row, chip, latency).us / row["us"]["p50"] - 1 for row in rows_of(record)}


def fit(record: dict[str, Any]) -> tuple[float, Latency]:
    """(Largest error, the constants that make it smallest)."""
    chip, rows = chip_of(record), rows_of(record)
    found = []
    for clocks in TILE_CLOCKS:
        without = [modelled(row, chip, Latency(clocks, 0.0)).us for row in rows]
        for fixed_us in FIXED_US:
            worst = max(abs((us + fixed_us) / row["us"]["p50"] - 1) for us, row in zip(without, rows, strict=True))
            found.append((worst, clocks, fixed_us))
    worst, clocks, fixed_us = min(found)
    return worst, Latency(clocks, fixed_us)


def section(record: dict[str, Any] | None) -> str:
    """The table in docs/model.md."""
    if record is None:
        return NOTHING_YET
    chip, ceilings = chip_of(record), record["ceilings"]
    latency, found = model.LATENCY, errors(record)
    lines = [
        f"{chip.name}, kernel sources `{record['head']['source_hash']}`, read {ceilings['read_gb_s']:,.0f} GB/s, "
        f"mma.sync {ceilings['mma_tflop_s']:,.0f} TFLOP/s; latency {latency.tile_clocks:,.0f} clocks a tile, fixed "
        f"{latency.fixed_us:g} us. Largest error {100 * max(map(abs, found.values())):.1f} %, mean "
        f"{100 * sum(map(abs, found.values())) / len(found):.1f} %.",
        "",
        "| requests x nodes x heads, prefix | measured us | modelled us | error | tiles of a block | memory us a tile "
        "| tensor | shared | partial states us | waits for |",
        "| --- " * 10 + "|",
    ]
    for row in rows_of(record):
        one = modelled(row, chip)
        label = row["label"].partition(", kernel")[0]
        lines.append(
            f"| {label} | {number(row['us']['p50'])} | {number(one.us)} | {100 * found[row['label']]:+.0f} % "
            f"| {one.tiles} | {one.memory_us:.2f} | {one.tensor_us:.2f} | {one.shared_us:.2f} | {one.partials_us:.1f} "
            f"| {one.bound} |"
        )
    return "\n".join(lines) + "\n"


def forecast(record: dict[str, Any] | None) -> str:
    """Kimi's shapes on a chip that is not here, with the blocks per SM of the record of the compiled tiles."""
    if record is None:
        return compiled.NOTHING_YET
    target = target_of(FORECAST_CHIP.cc).name
    found = {row["name"]: row["blocks_per_sm"] for row in record["rows"] if row["target"] == target}
    blocks = {one.tiles: found[one.name] for one in configurations(FORECAST_CHIP.cc) if one.name in found}
    lines = [
        "| requests x nodes x heads, prefix | rows x keys | modelled us | of it partial states "
        "| least us: read or multiply once | a tile waits for |",
        "| --- " * 6 + "|",
    ]
    for row in tile_report.modelled_times(FORECAST_CHIP, blocks):
        lines.append(
            f"| {tile_report.label_of(row)} | {row['rows_per_tile']} x {row['keys_per_tile']} | {number(row['us'])} "
            f"| {number(row['partials_us'])} | {number(row['limit_us'])} | {row['bound']} |"
        )
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/model.md, with its two tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    text = readme.replaced(text, section(record_of_chip()), BEGIN, END)
    return readme.replaced(text, forecast(compiled.kept()), FORECAST_BEGIN, FORECAST_END)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and rewrite the docs; or fit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fit", action="store_true", help="print the best two constants, for LATENCY in nbverify/model.py"
    )
    options = parser.parse_args(argv)
    record = record_of_chip()
    if record is None:
        print(f"no record of the {CHIP.name} in benchmarks/results: see python -m benchmarks.readme", file=sys.stderr)
        if not options.fit:
            PAGE.write_text(page(), encoding="utf-8")
        return 1
    if options.fit:
        worst, latency = fit(record)
        print(f"{latency}: largest error {100 * worst:.1f} %")
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    found = errors(record)
    for label, error in found.items():
        print(f"{label:44} {100 * error:+5.1f} %")
    worst = max(map(abs, found.values()))
    print(f"largest error {100 * worst:.1f} %, bound {100 * BOUND:.0f} %; {PAGE.relative_to(ROOT)} rewritten")
    return 1 if worst > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
