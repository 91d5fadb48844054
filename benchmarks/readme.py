"""The README's tables of speed, made from the records that are kept.

    python -m benchmarks.readme               rewrite the section from benchmarks/results/
    python -m benchmarks.readme FILE.json     keep a record first: copy it there under its own name
    python -m benchmarks.readme --check       1 if the README or a record is out of date; nothing is written

A record that is kept is a complete ``--suite must`` on the kernel sources as they are: its hash must be theirs.  A
newer one of the same GPU replaces an older one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import number
from benchmarks.timing import RESULTS, ROOT, record_name
from nbverify.compile import source_hash

README = ROOT / "README.md"
BEGIN = "<!-- python -m benchmarks.readme: begin -->"
END = "<!-- python -m benchmarks.readme: end -->"
NAME = "verify-must"
NOTHING_YET = "No record yet: `python -m benchmarks.verify --suite must --json` makes one, on a GPU.\n"

Record = dict[str, Any]


def kept() -> dict[Path, Record]:
    """The records, by GPU."""
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob(f"{NAME}_*.json")}
    return dict(sorted(found.items(), key=lambda item: (item[1]["head"]["gpu"], item[0].name)))


def keep(source: Path) -> Path:
    """Store a record, in the place of an older one of the same GPU.  Raises ValueError if it is none to keep."""
    record = json.loads(source.read_text(encoding="utf-8"))
    why = why_not(record)
    if why:
        raise ValueError(f"{source}: {why}")
    target = RESULTS / record_name(NAME, record)
    for path, other in kept().items():
        if other["head"]["gpu"] == record["head"]["gpu"] and path != source:
            path.unlink()
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


def why_not(record: Record) -> str:
    """Why a record cannot be kept; empty if it can."""
    if record.get("benchmark") != "verify" or "must" not in record["suite"].split(","):
        return "not a record of benchmarks.verify --suite must"
    if not record["complete"]:
        return "the run did not come to its end"
    if record["head"]["source_hash"] != source_hash():
        return f"measured on kernel sources {record['head']['source_hash']}, these are {source_hash()}: measure again"
    return ""


# ---- the section


def section(records: dict[Path, Record]) -> str:
    """What stands between the markers."""
    return "\n".join(_of_gpu(path, record) for path, record in records.items()) if records else NOTHING_YET


def _of_gpu(path: Path, record: Record) -> str:
    head, ceilings = record["head"], record["ceilings"]
    rows = [row for row in record["rows"] if row.get("goal")]
    example = next((row for row in rows if "us" in row), rows[0])
    lines = [
        f"{head['gpu']}, driver {head['driver']}, numba-cuda {head['numba-cuda']}, {head['date']}: median of "
        f"{example.get('us', {}).get('repeats', 0)} graph replays with a cold L2 cache, shuffled slots, page size 1, a "
        f"random tree in every figure, {example['kv_dtype']}, kernel `{example.get('kernel', '')}`, split "
        f"`{example['split']}`. Measured in the same process: read {ceilings['read_gb_s']:,.0f} GB/s, mma.sync "
        f"{ceilings['mma_tflop_s']:,.0f} TFLOP/s. Record: [`{_link(path)}`]({_link(path)}), kernel sources "
        f"`{head['source_hash']}`, commit `{head['commit']}`.",
        "",
    ]
    for title, mla in (
        ("MLA (Kimi K2.6, DeepSeek-V3: 576 / 512 wide)", True),
        ("Grouped-query attention", False),
    ):
        members = [row for row in rows if row["mla"] is mla]
        if members:
            lines += [f"**{title}**", "", *_table(members, record.get("peers", {}).get("titles", {})), ""]
    notes = _notes(rows)
    return "\n".join(lines + ([notes] if notes else []))


def _table(rows: Sequence[dict[str, Any]], titles: dict[str, str]) -> list[str]:
    shown = {name: title for name, title in titles.items() if any(name in row.get("peers", {}) for row in rows)}
    names = ["requests x nodes x heads, prefix", "us (p10-p90)", "of the limit", *shown.values()]
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for row in rows:
        if "failed" in row:
            cells = [row["label"], f"failed: {row['failed']}", *[""] * (len(names) - 2)]
        else:
            us = row["us"]
            time = f"**{number(us['p50'])}** ({number(us['p10'])}-{number(us['p90'])})"
            cells = [row["label"], time, f"{100 * row['limit_share']:.0f} %, {row['bound']}"]
            cells += [_times(row.get("peers", {}).get(name, {}), us["p50"]) for name in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _times(peer: dict[str, Any], ours_us: float) -> str:
    """A peer's time, and how many of ours it is."""
    if "us" not in peer:
        return "-"
    us = peer["us"]["p50"]
    return f"{number(us)} ({number(us / ours_us, 2)}x)"


def _notes(rows: Sequence[dict[str, Any]]) -> str:
    texts = ["The limit is the larger of two times at the measured rates: to read each key once, and to multiply it."]
    errors = [row["error"]["relative"] for row in rows if "error" in row]
    if errors:
        texts.append(f"Largest error against float64, relative: {max(errors):.1e}.")
    if any("us" in entry for row in rows for entry in row.get("peers", {}).values()):
        texts.append("Other kernels: microseconds, and how many times ours that is.")
    entries = [entry for row in rows for entry in row.get("peers", {}).values()]
    if any(not entry.get("whole_tree", True) for entry in entries):
        texts.append('Those marked "prefix" know no tree: they are timed without drafts and merge, which favours them.')
    return " ".join(texts) + "\n"


def _link(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def replaced(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with another text between its two markers.  Raises ValueError without them."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one {begin} and, after it, one {end}")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{new}\n{end}{rest.partition(end)[2]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite, or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="*", type=Path, help="a record to keep first")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is out of date")
    options = parser.parse_args(argv)
    try:
        for path in options.record:
            print(f"kept as {keep(path)}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    records = kept()
    stale = [f"{path.name}: {why_not(record)}" for path, record in records.items() if why_not(record)]
    for line in stale:
        print(line, file=sys.stderr)
    old = README.read_text(encoding="utf-8")
    new = replaced(old, section(records))
    if options.check:
        if new != old:
            print("README.md is not what its records say: run python -m benchmarks.readme", file=sys.stderr)
        return 1 if stale or new != old else 0
    README.write_text(new, encoding="utf-8")
    print(f"README.md: {len(records)} record(s)" + (", unchanged" if new == old else ""))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
