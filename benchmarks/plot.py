"""A picture of a record: the roofline, and time against prefix length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbverify.errors import NbverifyError

Row = dict[str, Any]
INCHES_A_PANEL, HEIGHT_INCHES, DPI = 6.2, 5.8, 130
# Okabe and Ito's colours, told apart by colour-blind readers too, in an order that separates neighbours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>P*X"
INK, PALE = "#333333", "#999999"


def require() -> None:
    """Raises NbverifyError where matplotlib is missing: before minutes are spent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NbverifyError(f"--plot needs matplotlib ({error}): pip install 'nbverify[bench]'") from error


def draw(record: dict[str, Any], path: str | Path) -> None:
    """Write the PNG of a record, as ``benchmarks.verify --json`` writes them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in record["rows"] if "us" in row]
    titles = record.get("peers", {}).get("titles", {})
    compared = [row for row in rows if any("us" in entry for entry in row.get("peers", {}).values())]
    panels = 3 if compared else 2
    figure = Figure(figsize=(INCHES_A_PANEL * panels, HEIGHT_INCHES), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    styles = _styles(rows)
    _roofline(axes[0], rows, record["ceilings"], styles)
    _against_prefix(axes[1], rows, styles)
    if compared:
        _against_peers(axes[2], compared, titles)
    handles = [
        axes[0].plot([], [], color=colour, marker=marker, linestyle="none", label=label)[0]
        for label, (colour, marker) in styles.items()
    ]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower left", ncols=min(6, len(handles)), fontsize=8, frameon=False,
            title="requests x nodes x heads", title_fontsize=8,
        )  # fmt: skip
    head = record["head"]
    figure.suptitle(
        f"Tree-verify attention on {head['gpu']}, {head['date']}: graph replay, cold L2, shuffled slots, "
        f"kernel sources {head['source_hash']}",
        fontsize=10, color=INK,
    )  # fmt: skip
    figure.savefig(path)


def series_of(row: Row) -> str:
    """The shape without its prefix, and what differs from the usual: what a curve is drawn for."""
    parts = row["label"].split(", ")
    return ", ".join([parts[0], *parts[2:]])


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    names = list(dict.fromkeys(series_of(row) for row in rows))
    return {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def _roofline(axes: Any, rows: Sequence[Row], ceilings: dict[str, float], styles: dict[str, tuple[str, str]]) -> None:
    """TFLOP/s over FLOP a byte, under the two measured ceilings."""
    read, mma = ceilings["read_gb_s"] / 1e3, ceilings["mma_tflop_s"]  # TB/s and TFLOP/s
    ridge = mma / read
    intensities = [row["flop"] / row["bytes"] for row in rows] or [ridge]
    low, high = min([ridge / 4, *intensities]) / 1.5, max([ridge * 4, *intensities]) * 1.5
    axes.plot([low, ridge, high], [low * read, mma, mma], color=INK, linewidth=1.5)
    middle = (low * ridge) ** 0.5
    axes.annotate(f"read {read:.2f} TB/s", (middle, middle * read), fontsize=8, color=INK, xytext=(-8, 4),
                  textcoords="offset points", ha="right")  # fmt: skip
    axes.annotate(f"mma.sync {mma:.0f} TFLOP/s", (high, mma), fontsize=8, color=INK, xytext=(-4, 5),
                  textcoords="offset points", ha="right")  # fmt: skip
    for row, intensity in zip(rows, intensities, strict=False):
        colour, marker = styles[series_of(row)]
        axes.plot(intensity, row["tflop_s"], color=colour, marker=marker, markersize=6, alpha=0.9)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP a byte, keys read once", ylabel="TFLOP/s")
    axes.set_title("under the measured ceilings", fontsize=9, color=INK)
    _plain(axes)


def _against_prefix(axes: Any, rows: Sequence[Row], styles: dict[str, tuple[str, str]]) -> None:
    """Microseconds over the prefix tokens of a request, with the limit of each shape below."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if not isinstance(row["prefix"], list) and row["prefix"] > 0:
            curves.setdefault(series_of(row), []).append(row)
    for name, members in curves.items():
        colour, marker = styles[name]
        members.sort(key=lambda row: row["prefix"])
        prefixes = [row["prefix"] for row in members]
        low, mid, high = ([row["us"][q] for row in members] for q in ("p10", "p50", "p90"))
        axes.plot(prefixes, mid, color=colour, marker=marker, markersize=5, linewidth=1.4)
        axes.fill_between(prefixes, low, high, color=colour, alpha=0.2, linewidth=0)
        limits = [row["limit_us"] for row in members]
        axes.plot(prefixes, limits, color=colour, linewidth=1, linestyle=":", marker="_", markersize=7)
    axes.set(xlabel="prefix tokens of a request", ylabel="us", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("time, p10 to p90; dotted: the least that the ceilings allow", fontsize=9, color=INK)
    _plain(axes)


def _against_peers(axes: Any, rows: Sequence[Row], titles: dict[str, str]) -> None:
    """How many times ours each peer takes, a line a shape."""
    for i, (name, title) in enumerate(titles.items()):
        points = [
            (row["peers"][name]["us"]["p50"] / row["us"]["p50"], line)
            for line, row in enumerate(rows)
            if "us" in row["peers"].get(name, {})
        ]
        if points:
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            axes.plot(
                *zip(*points, strict=True), color=colour, marker=marker, linestyle="none", markersize=5, label=title
            )
    axes.axvline(1, color=INK, linewidth=1)
    axes.set(xscale="log", xlabel="their time / ours")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
