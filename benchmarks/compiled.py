"""Every tile of the tensor-core kernel, compiled for the targets it ships for, and checked.  Needs no GPU.

    python -m benchmarks.compiled                          all: rewrites results/compiled.json, docs/tiles.md
    python -m benchmarks.compiled --cc 12.0 --kinds mla    a look at some: nothing is written
    python -m benchmarks.compiled --docs                   compiles nothing; rewrites docs/tiles.md from the record
    python -m benchmarks.compiled --check                  compiles nothing; 1 if the record or the table is out of date

What was compiled before comes from the cache.  The checks are those of the compiled tests, which import them from here:

    no spills, no local memory, no float64            but for FAULTS, to the byte
    mma, ldmatrix, copies, wide loads in the PTX      exactly as many as nbverify/tile_counts.py says
    registers                                         under the cap of a block an SM, which is what is planned
    shared memory                                     as the geometry's formula says, within the device's limit
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.readme import replaced
from benchmarks.timing import RESULTS, ROOT
from nbverify.compile import source_hash, toolkit_versions
from nbverify.configurations import SPECS, TARGETS, Configuration, configurations
from nbverify.errors import NbverifyError
from nbverify.tile_report import row_of

Row = dict[str, Any]
RECORD = RESULTS / "compiled.json"
PAGE = ROOT / "docs" / "tiles.md"
BEGIN = "<!-- python -m benchmarks.compiled: begin -->"
END = "<!-- python -m benchmarks.compiled: end -->"
NOTHING_YET = "No record yet: `python -m benchmarks.compiled` makes one.\n"

SM_REGISTERS = 65_536
MAX_REGISTERS = 255  # of a thread
REGISTERS_STEP = 8  # of a thread: given out eight at a time
GROUP_THREADS = 128  # four warps, one in each quarter of an SM: a group that is not full takes registers all the same


@dataclass(frozen=True)
class Fault:
    """What a kernel keeps in memory though it should be in registers: bytes."""

    spill_bytes: int
    local_bytes: int


SOUND = Fault(0, 0)
# The faults that are known, to the byte: (name in configurations.py, target).  A test fails if one gets worse, and if
# one gets better: then its line must change or go.  LINKER is the nvJitLink they were seen with; another one gives out
# registers in another way, so under another one these configurations, and only these, may spill as they like.
LINKER = "12.9.86"
FAULTS: dict[tuple[str, str], Fault] = {
    ("gqa64-64", "sm_120a"): Fault(40, 8),
    ("gqa128-33", "sm_80"): Fault(16, 8),
}


def linker_of(versions: dict[str, str]) -> str:
    """Version of nvJitLink, of either major version of the toolkit."""
    return versions.get("nvidia-nvjitlink-cu12") or versions.get("nvidia-nvjitlink") or "unknown"


# ---- checks


def resource_problems(row: Row, fault: Fault = SOUND, *, linker: str | None = None) -> list[str]:
    """What is wrong with a kernel's registers and memory.  ``row``: of ``nbverify.report.kernel_reports``."""
    linker = linker_of(toolkit_versions()) if linker is None else linker
    is_exempt = fault != SOUND and linker != LINKER
    threads = -(-row["threads"] // GROUP_THREADS) * GROUP_THREADS
    cap = min(MAX_REGISTERS, SM_REGISTERS // threads // REGISTERS_STEP * REGISTERS_STEP)
    checks = {
        f"{row['spill_bytes']} bytes spilled, expected {fault.spill_bytes}": (
            is_exempt or row["spill_bytes"] == fault.spill_bytes
        ),
        f"{row['local_bytes']} bytes of local memory, expected {fault.local_bytes}": (
            is_exempt or row["local_bytes"] == fault.local_bytes
        ),
        f"{row['stack_bytes']} bytes of stack, expected up to {fault.local_bytes}": (  # nothing is called
            is_exempt or row["stack_bytes"] <= fault.local_bytes
        ),
        f"{row['registers']} registers, expected up to {cap} with {row['threads']} threads": (
            0 < row["registers"] <= cap
        ),
        f"{row['static_shared_bytes']} bytes of static shared memory": row["static_shared_bytes"] == 0,
        f"{row['instructions']['f64']} float64 instructions": row["instructions"]["f64"] == 0,
        f"{row['instructions']['local memory']} accesses to arrays in local memory": (
            row["instructions"]["local memory"] == 0
        ),
        f"no block fits an SM: {row['blocks_limited_by']}": row["blocks_per_sm"] != 0,
    }
    return [f"{row['name']}: {text}" for text, holds in checks.items() if not holds]


def tile_problems(row: Row) -> list[str]:
    """What is wrong with a tile's instructions and shared memory.  ``row``: of ``nbverify.tile_report.row_of``."""
    expected, found = row["expected"], {**row["instructions"], "dynamic_shared_bytes": row["dynamic_shared_bytes"]}
    problems = [f"{name}: {found[name]}, expected {count}" for name, count in expected.items() if found[name] != count]
    if row["dynamic_shared_bytes"] > row["shared_limit_bytes"]:
        problems.append(
            f"{row['dynamic_shared_bytes']:,} bytes of shared memory, the limit is {row['shared_limit_bytes']:,}"
        )
    return [f"{row['name']}: {text}" for text in problems]


def problems_of(row: Row, *, linker: str | None = None) -> list[str]:
    """All that is wrong with a tile, known faults apart."""
    return resource_problems(row, fault_of(row), linker=linker) + tile_problems(row)


def fault_of(row: Row) -> Fault:
    """The known fault of a tile."""
    return FAULTS.get((row["name"], row["target"]), SOUND)


# ---- the record


def kept() -> dict[str, Any] | None:
    """The record, if there is one."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else None


def why_not(record: dict[str, Any]) -> str:
    """Why a record cannot be kept; empty if it can."""
    if not record["complete"]:
        return "the run did not come to its end"
    if record["source_hash"] != source_hash():
        return f"compiled from kernel sources {record['source_hash']}, these are {source_hash()}: compile again"
    if linker_of(record["toolkit"]) != LINKER:
        return f"linked with nvJitLink {linker_of(record['toolkit'])}, the known faults are those of {LINKER}"
    return ""


def section(record: dict[str, Any] | None) -> str:
    """The table in docs/tiles.md."""
    if record is None:
        return NOTHING_YET
    versions = record["toolkit"]
    lines = [
        f"Kernel sources `{record['source_hash']}`, numba-cuda {versions['numba-cuda']}, nvJitLink "
        f"{linker_of(versions)}. Record: `benchmarks/results/{RECORD.name}`.",
        "",
        "| tile | target | rows x keys | warps | stages | registers | spills, bytes | shared memory, bytes "
        "| blocks an SM | mma a tile | ldmatrix a tile |",
        "| --- " * 11 + "|",
    ]
    for row in record["rows"]:
        spills = f"**{row['spill_bytes']}**" if row["spill_bytes"] else "0"
        lines.append(
            f"| {row['name']} | {row['target']} | {row['rows_per_tile']} x {row['keys_per_tile']} "
            f"| {row['threads'] // 32} | {row['stages']} | {row['registers']} | {spills} "
            f"| {row['dynamic_shared_bytes']:,} | {row['blocks_per_sm']} | {row['mma_per_tile']:,} "
            f"| {row['ldmatrix_per_tile']:,} |"
        )
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/tiles.md, with its table made anew from the record."""
    return replaced(PAGE.read_text(encoding="utf-8"), section(kept()), BEGIN, END)


def compile_all(chosen: Sequence[Configuration], jobs: int) -> Iterator[Row]:
    """Their rows, in order."""
    if jobs < 2:
        yield from map(row_of, chosen)
        return
    # As in device.py; each process keeps what it compiles in the cache.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(row_of, chosen)


# ---- the command


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cc", action="append", metavar="X.Y", choices=TARGETS, help=f"of {', '.join(TARGETS)} (all)")
    parser.add_argument("--kinds", metavar="KIND[,KIND]", help=f"of {', '.join(SPECS)} (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time (one a core)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--docs", action="store_true", help="compile nothing; rewrite the docs from the record")
    only.add_argument("--check", action="store_true", help="compile nothing; 1 if the record or the docs are stale")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, check, keep."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.check:
        return check()
    if options.docs:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    kinds = tuple(options.kinds.split(",")) if options.kinds else tuple(SPECS)
    if unknown := [kind for kind in kinds if kind not in SPECS]:
        parser.error(f"--kinds: expected some of {', '.join(SPECS)}, got {unknown[0]}")
    chosen = [one for cc in options.cc or TARGETS for one in configurations(cc) if one.kind in kinds]
    is_all = options.cc is None and options.kinds is None
    record: dict[str, Any] = {
        "benchmark": "compiled", "complete": False, "source_hash": source_hash(), "toolkit": toolkit_versions(),
        "rows": [],
    }  # fmt: skip
    problems: list[str] = []
    print(f"{len(chosen)} tiles, 10 to 60 s each where they are not in the cache", flush=True)
    start = time.perf_counter()
    try:
        for number, row in enumerate(compile_all(chosen, options.jobs), 1):
            found = problems_of(row)
            verdict = "; ".join(found) or ("known fault" if fault_of(row) != SOUND else "ok")
            print(
                f"[{number:2}/{len(chosen)}] {row['target']:8} {row['name']:13} {row['registers']:3} registers "
                f"{row['spill_bytes']:4} B spilled  {time.perf_counter() - start:5.0f} s  {verdict}",
                flush=True,
            )
            record["rows"].append(row)
            problems += [f"{row['target']} {text}" for text in found]
    except NbverifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in problems:
        print(line, file=sys.stderr)
    record["complete"] = True
    if is_all:
        if why := why_not(record):
            print(f"not kept: {why}", file=sys.stderr)
            return 1
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(), encoding="utf-8")
        print(f"{RECORD.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}: {len(record['rows'])} tiles")
    return 1 if problems else 0


def check() -> int:
    """1 if the record or the table is not of these sources."""
    record = kept()
    stale = [f"{RECORD.name}: {why_not(record)}"] if record is not None and why_not(record) else []
    if page() != PAGE.read_text(encoding="utf-8"):
        stale.append(f"{PAGE.name} is not what the record says: run python -m benchmarks.compiled")
    for line in stale:
        print(line, file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
