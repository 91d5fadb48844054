"""Pictures of a draft tree: in the terminal beside its mask, and as PNG.

``nbverify tree FILE`` reads JSON, one object:

    "parents"   list of integers, -1 for node 0 and no other; the other nodes in any order
    "tokens"    list of integers, one a node
    "labels"    list of texts, one a node, shown instead of the tokens          may be left out
    "scores"    list of numbers: log-probabilities of the paths                 may be left out
    "accepted"  list of nodes: the accepted path from the root down             may be left out

Reading and making (``read_drawing``, ``random_drawing``) and drawing (``draw_*``, ``show``, ``save_png``) are apart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Branches

from nbverify import reference
from nbverify.errors import ArgumentError, NbverifyError
from nbverify.tree.binding import check_int
from nbverify.tree.build import build_tree, tree_from_parents
from nbverify.tree.trees import NO_PARENT, Tree

KEYS = ("parents", "tokens", "labels", "scores", "accepted")
VOCABULARY = 1000  # of random drafts
SHARPNESS = 4.0  # of random drafts: scales logits so that the best token of a position has a few tenths

INCHES_A_LEVEL, INCHES_A_LEAF, INCHES_A_COLUMN, DPI = 1.9, 0.32, 0.17, 130
LARGEST_INCHES = 60
GREEN, INK, PALE = "#009E73", "#333333", "#CCCCCC"


@dataclass(frozen=True)
class Drawing:
    """A tree with what is written at its nodes."""

    tree: Tree
    labels: tuple[str, ...]
    """Of each node, printable."""
    accepted: tuple[int, ...] = ()
    """Nodes of the accepted path from the root down."""

    def __post_init__(self) -> None:
        n = self.tree.num_nodes
        if len(self.labels) != n:
            raise ArgumentError("labels", f"{n} texts, one a node", len(self.labels))
        before = NO_PARENT
        for i, node in enumerate(self.accepted):
            if not (0 <= node < n and self.tree.parents[node] == before):
                after = "the root, 0" if i == 0 else f"a child of node {before}"
                raise ArgumentError(f"accepted[{i}]", after, node)
            before = node

    def score(self, node: int) -> str:
        """Of the path; empty if it is not known."""
        value = self.tree.scores[node]
        return "root" if node == 0 else "" if np.isnan(value) else f"{value:.2f}"


def read_drawing(path: Path) -> Drawing:
    """From a file of the format above.

    Raises OSError; ArgumentError for what is not of the format, or no tree, or an accepted path that is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(str(path), "JSON", error) from error
    if not isinstance(record, dict) or not {"parents", "tokens"} <= set(record) <= set(KEYS):
        got = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise ArgumentError(str(path), f"an object with parents and tokens, of {', '.join(KEYS)}", got)
    lists = {key: record[key] for key in KEYS if key in record}
    kinds: dict[str, tuple[type, ...]] = {"labels": (str,), "scores": (int, float)}
    for key, values in lists.items():
        kind = kinds.get(key, (int,))
        if not isinstance(values, list) or not all(type(value) in kind for value in values):
            raise ArgumentError(key, f"a list of {' or '.join(k.__name__ for k in kind)}", json.dumps(values)[:60])
    tree = tree_from_parents(lists["parents"], lists["tokens"], lists.get("scores"))
    labels = map(ascii, lists["labels"]) if "labels" in lists else map(str, lists["tokens"])
    return Drawing(tree, tuple(labels), tuple(lists.get("accepted", ())))


def random_drawing(seed: int, depth: int, top_k: int, budget: int) -> Drawing:
    """DDTree's tree of random drafts.  What is accepted is drawn from the drafter's own probabilities.

    Raises ArgumentError for sizes below 1, ``top_k`` above the vocabulary, a negative budget.
    """
    check_int("depth", depth, 1, VOCABULARY)
    check_int("top_k", top_k, 1, VOCABULARY)
    rng = np.random.default_rng(seed)
    logits = SHARPNESS * rng.normal(size=(depth, VOCABULARY))
    logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    tokens = np.argsort(-logprobs, axis=-1, kind="stable")[:, :top_k]
    tree = build_tree(tokens, np.take_along_axis(logprobs, tokens, -1), int(rng.integers(VOCABULARY)), budget)
    accepted = [0]
    for position in range(depth):
        target = int((logits[position] + rng.gumbel(size=VOCABULARY)).argmax())
        children = np.flatnonzero((tree.parents == accepted[-1]) & (tree.node_tokens == target))
        if not len(children):
            break
        accepted.append(int(children[0]))
    return Drawing(tree, tuple(map(str, tree.node_tokens.tolist())), tuple(accepted))


# --- in the terminal -------------------------------------------------------------------------------------------------


def unicode_or(console: Console, fancy: str, plain: str) -> str:
    """``fancy`` where the terminal can show it."""
    return fancy if (console.encoding or "").lower().startswith("utf") else plain


def draw_tree(drawing: Drawing) -> Branches:
    """Node, label, log-probability of its path; what is accepted in green."""
    tree, accepted, width = drawing.tree, set(drawing.accepted), _digits(drawing)

    def text(node: int) -> Text:
        style = "bold green" if node in accepted else ""
        return Text.assemble(
            (f"{node:{width}d} ", "dim"), (drawing.labels[node], style), (f"  {drawing.score(node)}", "dim")
        )

    branches = {0: Branches(text(0), guide_style="dim")}
    for node in _parents_first(tree)[1:]:
        branches[node] = branches[int(tree.parents[node])].add(text(node))
    return branches[0]


def draw_mask(drawing: Drawing, console: Console) -> Text:
    """One row a node, one column a node: filled where the row's node sees the column's."""
    seen, hidden = unicode_or(console, "█", "#"), unicode_or(console, "·", ".")
    accepted, width = set(drawing.accepted), _digits(drawing)
    text = Text(no_wrap=True)
    for node, row in enumerate(reference.ancestor_mask(drawing.tree.parents.tolist())):
        text.append(f"{node:{width}d} ", "dim")
        for visible in row:
            style = "dim" if not visible else "green" if node in accepted else ""  # its ancestors are accepted, too
            text.append(seen if visible else hidden, style)
        text.append("\n")
    return text


def show(console: Console, drawing: Drawing, mask_note: str) -> None:
    """Tree and mask side by side; ``mask_note`` says what a row of the mask sees besides."""
    both = Table(box=None, padding=(0, 3, 0, 0))
    both.add_column("draft tree\n[dim]node, token, log-probability; [green]accepted[/green][/dim]")
    both.add_column(f"mask\n[dim]{mask_note}[/dim]")
    cells: list[RenderableType] = [draw_tree(drawing), draw_mask(drawing, console)]
    both.add_row(*cells)
    console.print(both)


def _digits(drawing: Drawing) -> int:
    return max(2, len(str(drawing.tree.num_nodes - 1)))


def _parents_first(tree: Tree) -> list[int]:
    """All nodes, each subtree in one piece, siblings by their numbers."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for node in range(1, tree.num_nodes):
        children[tree.parents[node]].append(node)
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children[order[-1]])
    return order


# --- as PNG ----------------------------------------------------------------------------------------------------------


def save_png(drawing: Drawing, path: Path) -> None:
    """Tree and mask side by side.

    Raises NbverifyError without matplotlib, OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NbverifyError(f"--png needs matplotlib ({error}): pip install 'nbverify[bench]'") from error
    n, heights = drawing.tree.num_nodes, _heights(drawing.tree)
    mask_inches = 1 + INCHES_A_COLUMN * n
    tree_inches = INCHES_A_LEVEL * (1 + int(drawing.tree.depths.max()))
    height = max(2.5, mask_inches, 1 + INCHES_A_LEAF * max(heights))
    size = min(tree_inches + mask_inches, LARGEST_INCHES), min(height, LARGEST_INCHES)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(tree_inches, mask_inches))
    _plot_tree(left, drawing, heights)
    _plot_mask(right, drawing)
    figure.savefig(path, format="png")


def _heights(tree: Tree) -> list[float]:
    """Where each node stands: leaves one below the other, a parent in the middle of its children."""
    order = _parents_first(tree)
    inner = set(tree.parents.tolist())
    leaves = [node for node in order if node not in inner]
    height = dict(zip(leaves, map(float, range(len(leaves))), strict=True))
    reached: dict[int, list[float]] = {node: [] for node in order}
    for node in reversed(order):
        if node in inner:
            height[node] = (reached[node][0] + reached[node][-1]) / 2
        if node != 0:
            reached[int(tree.parents[node])].append(height[node])
    return [height[node] for node in range(tree.num_nodes)]


def _plot_tree(axes: Any, drawing: Drawing, heights: list[float]) -> None:
    tree, accepted = drawing.tree, set(drawing.accepted)
    for node in range(tree.num_nodes):
        depth, colour = int(tree.depths[node]), GREEN if node in accepted else INK
        if node != 0:
            parent = int(tree.parents[node])
            axes.plot([depth - 1, depth], [heights[parent], heights[node]], zorder=1,
                      color=GREEN if node in accepted else PALE, linewidth=2 if node in accepted else 1)  # fmt: skip
        axes.text(depth, heights[node], f"{node}: {drawing.labels[node]}  {drawing.score(node)}".rstrip(), color=colour,
                  ha="center", va="center", fontsize=8, parse_math=False,
                  bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour})  # fmt: skip
    axes.set_xlim(-0.6, int(tree.depths.max()) + 0.6)
    axes.set_ylim(max(heights) + 0.6, -0.6)
    axes.set_title("draft tree: node, token, log-probability; green: accepted", fontsize=9, color=INK)
    axes.set_axis_off()


def _plot_mask(axes: Any, drawing: Drawing) -> None:
    from matplotlib.colors import ListedColormap

    n = drawing.tree.num_nodes
    shade = reference.ancestor_mask(drawing.tree.parents.tolist()).astype(int)
    shade[list(drawing.accepted)] *= 2
    axes.imshow(shade, cmap=ListedColormap(["white", INK, GREEN]), vmin=0, vmax=2, interpolation="nearest")
    axes.set_title("mask: rows see columns", fontsize=9, color=INK)
    step = max(1, n // 16)
    axes.set_xticks(range(0, n, step))
    axes.set_yticks(range(0, n, step))
    axes.tick_params(labelsize=7, colors=INK)
