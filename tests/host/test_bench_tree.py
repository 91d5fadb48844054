"""The tree benchmark's arithmetic and tables; what it measures needs a GPU."""

import json

import numpy as np
import pytest

from benchmarks import tree
from benchmarks.timing import RESULTS, ROOT
from benchmarks.tree import CURVES, Sizes
from nbverify.compile import tree_source_hash


def test_drafts_are_probabilities_in_order():
    for curve in CURVES.values():
        logprobs = tree.drafts(curve, Sizes(depth=5, top_k=4))
        assert logprobs.dtype == np.float32 and logprobs.shape == (5, 4)
        assert (np.diff(logprobs, axis=1) <= 0).all()
        assert (np.exp(logprobs).sum(1) < 1).all()  # the rest is for tokens that are no candidates
    first, fall = CURVES["easy"]
    np.testing.assert_allclose(
        np.exp(tree.drafts(CURVES["easy"], Sizes()))[:3, 0], first * fall ** np.arange(3), rtol=1e-6
    )


def test_tokens_a_step_are_the_sum_of_path_probabilities():
    curve = (0.8, 0.5)  # best candidates 0.8 and 0.4, others 0.1 and 0.3
    sizes = Sizes(depth=2, top_k=2)
    assert tree.tokens_a_step(curve, Sizes(budget=0, depth=2, top_k=2)) == 1
    assert tree.tokens_a_step(curve, Sizes(budget=1, depth=2, top_k=2)) == pytest.approx(1.8)
    assert tree.tokens_a_step(curve, Sizes(budget=3, depth=2, top_k=2)) == pytest.approx(1 + 0.8 + 0.32 + 0.24)
    assert tree.tokens_a_step(curve, sizes) == pytest.approx(1 + (0.8 + 0.1) * (1 + 0.4 + 0.3))  # 64: the whole tree


def test_a_larger_budget_pays_until_verify_costs_more_than_it_brings():
    sizes = Sizes(depth=8, top_k=4)
    flat = tree.budget_rows(dict.fromkeys((0, 7, 63), 30.0), dict.fromkeys((0, 7, 63), 50.0), sizes, 0)
    assert tree.best_budgets(flat) == dict.fromkeys(CURVES, 63)
    steep = tree.budget_rows({0: 30.0, 7: 30.0, 63: 300.0}, dict.fromkeys((0, 7, 63), 50.0), sizes, 0)
    assert tree.best_budgets(steep) == dict.fromkeys(CURVES, 7)
    row = steep[1]
    assert row["step_us"] == 61 * 30 + 50
    assert row["easy"]["tokens_s"] == pytest.approx(1e6 * row["easy"]["tokens"] / row["step_us"], rel=1e-3)
    text = "\n".join(tree.budget_lines(steep))
    assert text.count("*") == 4 and "300.0" in text  # one of each column, and the explanation
    assert tree.budget_rows({7: 30.0}, {7: 50.0}, sizes, 1000.0)[0]["step_us"] == 61 * 30 + 1050


def test_a_part_that_is_too_slow_is_called_a_miss(tmp_path):
    us = {"min": 1, "p10": 8.0, "p50": 9.0, "p90": 9.5, "repeats": 30}
    lines = tree.part_lines([
        {"part": "masks", "us": us, "cold_us": us, "must_us": 8, "numpy_ms": 3.21},
        {"part": "build", "us": us, "cold_us": us | {"p50": 12.0}, "must_us": 11},
        {"part": "accept, logits", "us": None, "cold_us": us, "must_us": 8, "of_read": 0.804},
    ])  # fmt: skip
    assert "MISS" in lines[2] and "3.21" in lines[2]
    assert "MISS" not in lines[3] and "ok" in lines[3] and "12.0" in lines[3]  # cold is told, and not judged
    assert lines[4].endswith("80 % of the read bandwidth") and "MISS" in lines[4]  # judged cold if it is only that

    rows = tree.budget_rows({0: 30.0, 7: 31.0}, {0: 0.0, 7: 50.0}, Sizes(), 0)
    tree.draw({"budgets": rows, "other_us": 0}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_kept_record_is_of_these_sources_and_on_the_page():
    (path,) = RESULTS.glob("tree_*.json")
    record = json.loads(path.read_text())
    page = (ROOT / "docs" / "tree.md").read_text()
    assert record["head"]["tree_source_hash"] == tree_source_hash(), "measure again: python -m benchmarks.tree --json"
    assert f"`{tree_source_hash()}`" in page
    for row in record["parts"]:
        us, cold = f"{row['us']['p50']:.1f}" if row["us"] else "", row["cold_us"]["p50"]
        assert f"| {us} | {cold:.1f} |".replace("|  |", "| |") in page or f"| | {cold:.0f} (" in page, row["part"]
    for row in record["budgets"]:
        assert f"| {row['budget']} | {row['verify_us']:.1f} |" in page


def test_without_a_gpu_it_says_so(capsys, has_gpu):
    if has_gpu:
        pytest.skip("there is a GPU")
    assert tree.main([]) == 1
    assert capsys.readouterr().err.startswith("error: ")
