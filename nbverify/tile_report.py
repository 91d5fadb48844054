"""Every tile of the tensor-core kernel on a target: what it needs, and how long Kimi K2.6's shapes should take with it.

    nbverify compile --cc 12.0 --report

Needs no GPU: the tiles are compiled for the target (and come from the cache when they were before), and times are those
of ``model.py``, for the capabilities of the chips that it knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbverify import compile, configurations, model
from nbverify.configurations import Configuration
from nbverify.errors import ArgumentError
from nbverify.kernels.planner import choose_tiles, limits_of
from nbverify.kernels.tiles import MmaGeometry
from nbverify.model import Batch
from nbverify.report import kernel_reports
from nbverify.spec import VerifySpec
from nbverify.tile_counts import copy_counts, copy_instructions, counts_of, ptx_counts

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]
K = 1024
KIMI_KIND = "mla"
# Of a tile's fields and of a kernel's report: what a row says otherwise, or what another run may find different.  (A
# cubin's size depends on what the process compiled before it.)
NOT_IN_A_ROW = ("shared_kv", "can_suspend", "name", "target", "from_cache", "seconds", "cubin_bytes")
# Query heads on a GPU, and the batch: the MLA shapes that the kernel is judged by.  A test compares them with
# benchmarks/shapes.py.
KIMI_SHAPES: tuple[tuple[int, Batch], ...] = (
    (8, Batch(1, 8, 4 * K)),
    (8, Batch(1, 8, 5700)),
    (8, Batch(1, 8, 32 * K)),
    (8, Batch(1, 9, 32 * K)),
    (8, Batch(1, 8, 128 * K)),
    (8, Batch(1, 33, 32 * K)),
    (8, Batch(1, 65, 128 * K)),
    (16, Batch(1, 64, 32 * K)),
    (8, Batch(8, 8, 32 * K)),
    (8, Batch(16, 17, 8 * K)),
    (8, Batch(32, 8, 4 * K)),
    (8, Batch(1, 1, 128 * K)),
)


def kimi_spec(heads: int, batch: Batch) -> VerifySpec:
    """The spec of a shape: no larger than it, as the benchmark makes it."""
    return VerifySpec.mla(
        heads,
        max_requests=batch.requests,
        max_nodes=batch.nodes,
        max_kv_len=batch.prefix + batch.nodes,
        sm_scale=configurations.KIMI_SM_SCALE,
        kernel="mma",
    )


def row_of(configuration: Configuration, progress: Callable[[str], None] | None = None) -> Row:
    """A tile compiled: its shape, what it needs, and its instructions, as they are and as they should be."""
    spec, tiles, target = configuration.spec, configuration.tiles, compile.target_of(configuration.cc)
    kernels = compile.compile_spec(spec, target, tiles, progress=progress)
    cc = (target.major, target.minor)
    (report,) = kernel_reports(spec, tiles, kernels, cc, debug=False, cached=True, seconds=0.0)
    counts = counts_of(tiles)
    mma, ldmatrix = ptx_counts(tiles)
    copies = copy_instructions(kernels[0].ptx)
    expected = copy_counts(tiles, copies["index copies"], copies["waits for copies"])
    shape = {name: value for name, value in dataclasses.asdict(tiles).items() if name not in NOT_IN_A_ROW}
    kept = {name: value for name, value in report.items() if name not in NOT_IN_A_ROW}
    return {
        "name": configuration.name,
        "kind": configuration.kind,
        "target": target.name,
        "rows_per_tile": tiles.rows_per_tile,
        "keys_per_tile": tiles.keys_per_tile,
        **shape,
        "shared_limit_bytes": limits_of(cc).shared_bytes,
        "mma_per_tile": counts.mma,
        "ldmatrix_per_tile": counts.ldmatrix,
        "shared_bytes_per_tile": counts.shared_bytes,
        "pool_bytes_per_tile": counts.pool_bytes,
        "expected": {
            "mma": mma,
            "ldmatrix": ldmatrix,
            **expected,
            "dynamic_shared_bytes": tiles.shared_bytes(spec.max_requests),
        },
        **kept,
        "instructions": {**report["instructions"], **copies},
    }


def make_report(cc: str, kinds: Sequence[str], progress: Callable[[str], None] | None = None) -> Row:
    """The tiles of some kinds, and modelled times where they include Kimi's and the chip is known."""
    unknown = [kind for kind in kinds if kind not in configurations.SPECS]
    if unknown:
        raise ArgumentError("--report", f"kinds of {tuple(configurations.SPECS)}", unknown[0])
    target = compile.target_of(cc)
    number = f"{target.major}.{target.minor}"
    chosen = [one for one in configurations.configurations(number) if one.kind in kinds]
    rows = []
    for i, one in enumerate(chosen, 1):
        say = f"{one.name} for {target.name}, {i} of {len(chosen)}"
        rows.append(row_of(one, None if progress is None else lambda line, say=say: progress(say)))  # type: ignore[misc]
    blocks = {one.tiles: row["blocks_per_sm"] or 1 for one, row in zip(chosen, rows, strict=True)}
    chip = model.CHIPS.get(number)
    times = modelled_times(chip, blocks) if chip is not None and KIMI_KIND in kinds else []
    return {
        "target": target.name,
        "sources": compile.source_hash(),
        "toolkit": compile.toolkit_versions(),
        "chip": None if chip is None else dataclasses.asdict(chip),
        "latency": dataclasses.asdict(model.LATENCY),
        "tiles": rows,
        "times": times,
    }


def modelled_times(chip: model.Chip, blocks_per_sm: dict[MmaGeometry, int]) -> list[Row]:
    """Kimi's shapes on a chip."""
    rows = []
    for heads, batch in KIMI_SHAPES:
        spec = kimi_spec(heads, batch)
        major, _, minor = chip.cc.partition(".")
        tiles = choose_tiles(spec, limits_of((int(major), int(minor))))
        found = model.estimate(spec, tiles, batch, chip, blocks_per_sm=max(1, blocks_per_sm[tiles]))
        rows.append(
            {
                "heads": heads,
                **dataclasses.asdict(batch),
                "rows_per_tile": tiles.rows_per_tile,
                "keys_per_tile": tiles.keys_per_tile,
                **dataclasses.asdict(found),
                "bound": found.bound,
                "limit_us": model.limit_us(spec, batch, chip),
            }
        )
    return rows


def show_report(console: Console, record: Row) -> None:
    """Two tables: the tiles, and the times."""
    from rich.table import Table
    from rich.text import Text

    console.print(
        f"Tiles of the tensor-core kernel for {record['target']}, sources {record['sources']}", highlight=False
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("tile", "rows", "keys", "warps", "stages", "registers", "spills B", "shared B", "blocks per SM",
                  "mma a tile", "ldmatrix a tile"):  # fmt: skip
        table.add_column(title, justify="left" if title == "tile" else "right")
    for row in record["tiles"]:
        table.add_row(
            row["name"], str(row["rows_per_tile"]), str(row["keys_per_tile"]), str(row["threads"] // 32),
            str(row["stages"]), str(row["registers"]),
            Text(f"{row['spill_bytes']}", "bold red" if row["spill_bytes"] else ""),
            f"{row['dynamic_shared_bytes']:,}", "?" if row["blocks_per_sm"] is None else str(row["blocks_per_sm"]),
            f"{row['mma_per_tile']:,}", f"{row['ldmatrix_per_tile']:,}",
        )  # fmt: skip
    console.print(table)
    if not record["times"]:
        reason = "no rates of such a chip in model.py" if record["chip"] is None else f"only with the kind {KIMI_KIND}"
        console.print(f"No modelled times: {reason}.", highlight=False)
        return
    chip = record["chip"]
    console.print(
        f"\nModelled, {chip['name']}: {chip['sms']} SMs, {chip['clock_ghz']:g} GHz, "
        f"read {chip['read_gb_s']:,.0f} GB/s, mma.sync {chip['mma_tflop_s']:,.0f} TFLOP/s ({chip['source']})",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("requests x nodes x heads, prefix", "tile", "tiles a block", "memory us", "tensor us", "shared us",
                  "latency us", "waits for", "partials us", "us", "limit us"):  # fmt: skip
        table.add_column(
            title, justify="left" if title in ("requests x nodes x heads, prefix", "waits for") else "right"
        )
    for row in record["times"]:
        table.add_row(
            label_of(row), f"{row['rows_per_tile']} x {row['keys_per_tile']}", str(row["tiles"]),
            *(f"{row[name]:.2f}" for name in ("memory_us", "tensor_us", "shared_us", "latency_us")),
            row["bound"], f"{row['partials_us']:.0f}", f"{row['us']:.0f}", f"{row['limit_us']:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "memory, tensor, shared and latency are of one tile; what the model leaves out, and its errors against "
        "measured times: docs/model.md",
        highlight=False,
    )


def label_of(row: Row) -> str:
    """``1 x 8 x 8, 32k``, as the benchmark writes it."""
    prefix = row["prefix"]
    text = f"{prefix // K}k" if prefix % K == 0 else f"{prefix:,}"
    return f"{row['requests']} x {row['nodes']} x {row['heads']}, {text}"
