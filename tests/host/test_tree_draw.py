"""``nbverify tree``: the drawing in the terminal and as PNG, from random drafts and from a file."""

import json
import re
import sys

import numpy as np
import pytest

import nbverify as nv
from nbverify.cli import main
from nbverify.tree import draw
from nbverify.tree.build import tree_from_parents
from nbverify.tree.draw import Drawing, random_drawing

GOOD = {
    "parents": [-1, 3, 3, 0],  # children before their parent
    "tokens": [10, 11, 12, 13],
    "labels": ["The", " cat", "\n", " $_$"],
    "scores": [0, -1.5, -2.25, -0.5],
    "accepted": [0, 3, 2],
}
PICTURE = """
 0 'The'  root      0 █···
└──  3 ' $_$'  -0.50   1 ██·█
    ├──  1 ' cat'  -1.50   2 █·██
    └──  2 '\\n'  -2.25   3 █··█
"""


@pytest.fixture(autouse=True)
def wide_utf8(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def written(tmp_path, **changes):
    path = tmp_path / "tree.json"
    record = {key: value for key, value in (GOOD | changes).items() if value is not None}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def words(text):
    return [line.split() for line in text.strip().splitlines() if line.split()]


def test_a_file_is_drawn_with_its_mask(tmp_path, capsys):
    assert main(["tree", str(written(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert "draft tree" in printed and "the prefix, and:" in printed
    assert words(printed)[-4:] == words(PICTURE)


def test_a_terminal_without_unicode_gets_ascii(tmp_path):
    """And rich draws its branches so too."""
    import io

    from rich.console import Console

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw.show(Console(file=stream, width=120), draw.read_drawing(written(tmp_path)), "")
    stream.seek(0)
    printed = stream.read()
    assert printed.isascii() and "##.#" in printed and "#.##" in printed


def test_the_accepted_path_is_green_in_tree_and_mask(tmp_path):
    from rich.console import Console

    drawing = draw.read_drawing(written(tmp_path))
    console = Console(width=120, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as capture:
        console.print(draw.draw_tree(drawing))
    lines = capture.get().splitlines()
    green = [bool(re.search(r"\x1b\[1;32m'", line)) for line in lines]
    assert green == [True, True, False, True]  # nodes 0, 3, 1, 2
    spans = [(span.start, span.end) for span in draw.draw_mask(drawing, console).spans if span.style == "green"]
    text = draw.draw_mask(drawing, console).plain
    row = len(text) // 4
    assert [(start // row, start % row - 3) for start, _ in spans] == [(0, 0), (2, 0), (2, 2), (2, 3), (3, 0), (3, 3)]


def test_what_may_be_left_out(tmp_path, capsys):
    assert main(["tree", str(written(tmp_path, labels=None, scores=None, accepted=None))]) == 0
    assert [line[-3:-2] for line in words(capsys.readouterr().out)[-3:]] == [["13"], ["11"], ["12"]]


def test_more_than_a_hundred_nodes_stay_in_line(tmp_path):
    from rich.console import Console

    chain = Drawing(tree_from_parents(list(range(-1, 100)), list(range(101))), tuple(map(str, range(101))))
    rows = draw.draw_mask(chain, Console()).plain.splitlines()
    assert rows[7].startswith("  7 ") and rows[100].startswith("100 ") and len({len(row) for row in rows}) == 1


@pytest.mark.parametrize("changes, message", [
    ({"parents": None}, r"tree.json: expected an object with parents and tokens, of parents, .*got tokens, labels"),
    ({"probs": [1]}, r"tree.json: expected an object with parents and tokens.*, accepted, probs"),
    ({"parents": [-1, 0, 0, 3]}, r"parents\[3\]: expected a path to the root, got 3, which closes a cycle"),
    ({"parents": [-1, 0, 0, 0.5]}, r"parents: expected a list of int, got \[-1, 0, 0, 0.5\]"),
    ({"tokens": [1, 2, 3]}, "tokens: expected 4 integers, one a node, got int64 .3."),
    ({"tokens": [1, 2, 3, True]}, "tokens: expected a list of int"),
    ({"tokens": [1, 2, 3, 2**63]}, "tokens: expected 4 integers, one a node, got float64"),
    ({"labels": ["a"]}, "labels: expected 4 texts, one a node, got 1"),
    ({"labels": "abcd"}, 'labels: expected a list of str, got "abcd"'),
    ({"scores": [0, 1]}, "scores: expected 4 numbers, one a node, got int64 .2."),
    ({"accepted": [3]}, r"accepted\[0\]: expected the root, 0, got 3"),
    ({"accepted": [0, 2]}, r"accepted\[1\]: expected a child of node 0, got 2"),
    ({"accepted": [0, 9]}, r"accepted\[1\]: expected a child of node 0, got 9"),
])  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, changes, message):
    with pytest.raises(nv.ArgumentError, match=message):
        draw.read_drawing(written(tmp_path, **changes))


@pytest.mark.parametrize("text, message", [("{", "bad.json: expected JSON, got "), ("[1]", "bad.json: .*, got list")])
def test_what_is_no_object_is_named(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(nv.ArgumentError, match=message):
        draw.read_drawing(path)


def test_wrong_usage(tmp_path, capsys):
    assert main(["tree", str(tmp_path / "none.json")]) == 1
    assert "none.json: No such file" in capsys.readouterr().err.replace("\n", "")
    assert main(["tree", str(written(tmp_path)), "--top-k", "3"]) == 2
    assert "--top-k: expected no FILE beside it" in capsys.readouterr().err
    assert main(["tree", "--depth", "0"]) == 2
    assert "depth: expected an int, 1 to 1000, got 0" in capsys.readouterr().err
    assert main(["tree", "--png", str(tmp_path / "no" / "where.png")]) == 2
    assert "--png: expected a file in a directory that exists" in capsys.readouterr().err


def test_random_drafts_are_those_of_their_seed_and_follow_the_flags(capsys):
    flags = ["--seed", "3", "--depth", "2", "--top-k", "2", "--budget", "9"]
    assert main(["tree", *flags]) == 0
    first = capsys.readouterr().out
    assert main(["tree", *flags]) == 0
    assert capsys.readouterr().out == first
    drawing = random_drawing(seed=3, depth=2, top_k=2, budget=9)
    assert drawing.tree.num_nodes == 1 + 2 + 4 and drawing.tree.depths.max() == 2
    assert main(["tree"]) == 0
    default = words(capsys.readouterr().out)
    assert len(default) == 2 + 13 and default[2][0] == "0"


def test_the_accepted_path_of_random_drafts_follows_the_drafter():
    """A first draft is accepted as often as the drafter says: its children's probabilities, on average."""
    drawings = [random_drawing(seed, 1, 3, 3) for seed in range(400)]
    expected = np.mean([np.exp(d.tree.scores[1:]).sum() for d in drawings])
    accepted = np.mean([len(d.accepted) == 2 for d in drawings])
    assert abs(accepted - expected) < 4 * 0.5 / np.sqrt(400)  # four deviations of a share


def test_png(tmp_path):
    path = tmp_path / "tree.png"
    assert main(["tree", str(written(tmp_path)), "--png", str(path)]) == 0
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    green = np.array([0x00, 0x9E, 0x73]) / 255
    mask = pixels[:, int(0.8 * pixels.shape[1]) :]
    assert (np.abs(mask - green).max(-1) < 0.02).sum() > 6 * 500  # six cells
    assert min(pixels.shape[:2]) > 200


def test_the_accepted_path_is_green_in_the_png(tmp_path):
    from matplotlib.figure import Figure

    axes, drawing = Figure().subplots(), draw.read_drawing(written(tmp_path))
    draw._plot_tree(axes, drawing, draw._heights(drawing.tree))
    assert [line.get_color() == draw.GREEN for line in axes.lines] == [False, True, True]  # above nodes 1, 2, 3
    assert [text.get_color() == draw.GREEN for text in axes.texts] == [True, False, True, True]


def test_nodes_stand_between_their_children():
    tree = tree_from_parents([-1, 0, 0, 1, 1, 4], [0] * 6)
    assert draw._heights(tree) == [1.25, 0.5, 2.0, 0.0, 1.0, 1.0]


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["tree", "--png", str(tmp_path / "tree.png")]) == 1
    assert "pip install 'nbverify[bench]'" in capsys.readouterr().err.replace("\n", "")
