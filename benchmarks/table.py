"""Rows as text for a terminal, and as CSV.  A row is a dict as measure.py makes it, and as a record holds it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """``text(row)`` in ``width`` characters; a bar stands before the first column of a group."""

    title: str
    width: int
    text: Callable[[Row], str]
    left: bool = False
    bar: bool = False

    def fit(self, text: str) -> str:
        padded = text.ljust(self.width) if self.left else text.rjust(self.width)
        return ("| " if self.bar else "") + padded


def number(value: float, digits: int = 3) -> str:
    """About ``digits`` digits: ``9.86``, ``34.1``, ``20,492``."""
    size = abs(value)
    decimals = 0 if size >= 10 ** (digits - 1) else digits - 1 if size < 10 else digits - 2
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def spread(times: dict[str, float]) -> str:
    """``31.6-32.4``"""
    return f"{number(times['p10'])}-{number(times['p90'])}"


def verdict(row: Row) -> str:
    """``aim``, ``must`` or ``MISS``: what the time reaches."""
    goal = row.get("goal")
    if not goal or "us" not in row:
        return ""
    us = row["us"]["p50"]
    return "aim" if us <= goal["aim_us"] else "must" if us <= goal["must_us"] else "MISS"


LABEL = 44
COLUMNS: tuple[Column, ...] = (
    Column("requests x nodes x heads, prefix", LABEL, lambda r: r["label"], left=True),
    Column("us", 7, lambda r: number(r["us"]["p50"]), bar=True),
    Column("p10-p90", 13, lambda r: spread(r["us"])),
    Column("GB/s", 6, lambda r: f"{r['gb_s']:,.0f}", bar=True),
    Column("%read", 5, lambda r: percent(r["read_share"])),
    Column("TFLOP/s", 7, lambda r: number(r["tflop_s"])),
    Column("%mma", 5, lambda r: percent(r["mma_share"])),
    Column("%limit", 6, lambda r: percent(r["limit_share"])),
    Column("host us", 7, lambda r: f"{r['host_us']['p50']:.1f}", bar=True),
    Column("replay us", 9, lambda r: f"{r['replay_us']['p50']:.1f}"),
    Column("error", 7, lambda r: f"{r['error']['relative']:.1e}", bar=True),
    Column("numpy ms", 9, lambda r: f"{r['numpy_ms']['ms']:,.0f}" if r.get("numpy_ms") else ""),
)
GOAL_COLUMNS: tuple[Column, ...] = (
    Column("must", 5, lambda r: f"{r['goal']['must_us']:g}" if r.get("goal") else "", bar=True),
    Column("aim", 4, lambda r: f"{r['goal']['aim_us']:g}" if r.get("goal") else ""),
    Column("reached", 7, verdict),
)


def columns_for(rows: Sequence[Row], *, goals: bool) -> tuple[Column, ...]:
    """The first column as wide as its widest label; the goals' columns where there are goals."""
    width = max([len(COLUMNS[0].title), *(len(row["label"]) for row in rows)])
    first = Column(COLUMNS[0].title, width, COLUMNS[0].text, left=True)
    return (first, *COLUMNS[1:], *(GOAL_COLUMNS if goals else ()))


def header(columns: Sequence[Column]) -> str:
    return "  ".join(column.fit(column.title) for column in columns)


def line(columns: Sequence[Column], row: Row) -> str:
    """A row; one that failed says why."""
    if "failed" in row:
        return f"{columns[0].fit(columns[0].text(row))}  | {row['failed']}"
    return "  ".join(column.fit(column.text(row)) for column in columns)


# ---- peers


def peer_lines(rows: Sequence[Row], titles: dict[str, str]) -> list[str]:
    """Time, ours / theirs, and error of every peer, a row a shape.  ``titles``: by name, in order, of those to show."""
    with_peers = [row for row in rows if row.get("peers")]
    width = max([10, *(len(row["label"]) for row in with_peers)])
    room = {name: max(24, len(title)) for name, title in titles.items()}
    head = ["".ljust(width), "| " + "ours".rjust(8), *(f"| {title.ljust(room[n])}" for n, title in titles.items())]
    units = ["".ljust(width), "| " + "us".rjust(8), *("| " + _peer("us", "ours/it", "error", room[n]) for n in titles)]
    lines = ["  ".join(head), "  ".join(units)]
    reasons: dict[str, list[str]] = {}
    for row in with_peers:
        ours = row["us"]["p50"] if "us" in row else None
        cells = [row["label"].ljust(width), "| " + (number(ours) if ours else "failed").rjust(8)]
        for name in titles:
            entry = row["peers"].get(name)
            if entry is None or "failed" in entry:
                cells.append("| " + _peer("-", "", "", room[name]))
                if entry is not None:
                    reasons.setdefault(f"{titles[name]}: {entry['failed']}", []).append(row["label"])
            else:
                us, ratio = entry["us"]["p50"], entry["ratio"]
                ratio_text = "" if ratio is None else f"{ratio:.3f}"
                cells.append("| " + _peer(number(us), ratio_text, f"{entry['error']['relative']:.1e}", room[name]))
        lines.append("  ".join(cells))
    if any(not entry.get("whole_tree", True) for row in with_peers for entry in row["peers"].values()):
        lines.append(
            "  prefix: without drafts and merge, for it knows no tree; favours it.  ours/it below 1: ours is faster"
        )
    return lines + [f"  no time: {reason} ({'; '.join(labels)})" for reason, labels in reasons.items()]


def _peer(us: str, ratio: str, error: str, room: int) -> str:
    return f"{us:>8} {ratio:>7} {error:>7}".ljust(room)


# ---- claims

# What the two figures of a claim are, by what it is of.
FIGURES: dict[str, Callable[[float], str]] = {
    "time": lambda us: f"{number(us)} us",
    "share": lambda share: f"{percent(share)} %",  # of the time that the roofline allows
    "waste": lambda rows: f"{rows:.1f} rows",
}


def claim_lines(claims: Sequence[Row]) -> list[str]:
    """A line a claim: name, the two cases, their figures, ratio, limit, met or not."""
    wide = max([8, *(len(claim["measured"]) for claim in claims)])
    other = max([7, *(len(claim["against"]) for claim in claims)])
    lines = [
        f"{'claim':26}  {'measured':{wide}}  {'against':{other}}  | {'measured':>10}  {'against':>10}  "
        f"| {'ratio':>6}  {'limit':>7}  met"
    ]
    for claim in claims:
        what = f"{claim['claim']:26}  {claim['measured']:{wide}}  {claim['against']:{other}}  | "
        if claim["ratio"] is None:
            lines.append(what + f"{'-':>10}  {'-':>10}  | {'-':>6}  {claim['why_not']}")
            continue
        first, second = (FIGURES[claim["of"]](figure) for figure in claim["figures"])
        limit = f"{'>=' if claim['at_least'] else '<='} {claim['limit']:4.2f}"
        new_tile = ", a row tile begins" if claim.get("new_row_tile") else ""
        held = "yes" if claim["holds"] else "NO"
        lines.append(what + f"{first:>10}  {second:>10}  | {claim['ratio']:6.3f}  {limit}  {held}{new_tile}")
    judged = [claim["holds"] for claim in claims if claim["holds"] is not None]
    return [*lines, f"{judged.count(True)} of {len(claims)} claims met"]


# ---- CSV


def flatten(row: Row, prefix: str = "") -> dict[str, Any]:
    """``{"us": {"p50": 3}}`` -> ``{"us.p50": 3}``; lists become text with ``/`` between."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = "/".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return flat


def write_csv(path: str | Path, rows: Sequence[Row]) -> None:
    """A line a row, with the columns that any row has; None and what a row lacks is empty."""
    flat = [flatten(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(flat)
