"""Best-first trees against an exhaustive search over all paths, and the checks of trees from elsewhere."""

import itertools
from functools import cmp_to_key

import numpy as np
import pytest
from support.tree_build import random_drafts

import nbverify as nv
from nbverify.tree.build import build_from_children, build_tree, build_trees, tree_from_parents
from nbverify.tree.trees import check_parents

INF = np.inf
ZERO = np.float32(0)


# --- exhaustive search -----------------------------------------------------------------------------------------------


def all_paths(logprobs, path=(), score=ZERO):
    """Every path below one with its score, as (ranks, score), by recursion; those of score -inf have no descendants."""
    if len(path) == len(logprobs):
        return []
    found = []
    for rank, logprob in enumerate(logprobs[len(path)]):
        total = np.float32(score + logprob)
        if total > -INF:
            found += [((*path, rank), total), *all_paths(logprobs, (*path, rank), total)]
    return found


def precedes(logprobs, a, b):
    """Negative if path a is taken before path b: the order in the words of build.py."""
    (path_a, score_a), (path_b, score_b) = a, b
    for left, right in ((score_b, score_a), (len(path_a), len(path_b)), (path_a[-1], path_b[-1])):
        if left != right:
            return -1 if left < right else 1
    if path_a == path_b:
        return 0
    scored = [(path, sum_of(logprobs, path)) for path in (path_a[:-1], path_b[:-1])]
    return precedes(logprobs, *scored)  # the parents, of equal depth: their numbers are their order


def sum_of(logprobs, path):
    score = np.float32(0)
    for depth, rank in enumerate(path):
        score = np.float32(score + logprobs[depth, rank])
    return score


def exhaustive(tokens, logprobs, root_token, budget):
    """(tokens, parents, depths, scores): the first ``budget`` of all paths."""
    order = sorted(all_paths(logprobs), key=cmp_to_key(lambda a, b: precedes(logprobs, a, b)))[:budget]
    number = {(): 0} | {path: i + 1 for i, (path, _) in enumerate(order)}
    parents = [-1] + [number[path[:-1]] for path, _ in order]
    drafted = [int(tokens[len(path) - 1, path[-1]]) for path, _ in order]
    return [root_token, *drafted], parents, [0] + [len(path) for path, _ in order], [0.0] + [s for _, s in order]


def assert_is(tree, want):
    for name, values in zip(("node_tokens", "parents", "depths", "scores"), want, strict=True):
        np.testing.assert_array_equal(getattr(tree, name), values, err_msg=name)


@pytest.mark.parametrize("part", range(10))
def test_best_first_is_exhaustive_search(part):
    """10,000 random trees, most of them full of ties."""
    rng = np.random.default_rng(part)
    for _ in range(1000):
        depth, top_k = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        tokens, logprobs = random_drafts(rng, (depth, top_k))
        budget = int(rng.integers(0, 30))
        assert_is(build_tree(tokens, logprobs, 7, budget), exhaustive(tokens, logprobs, 7, budget))


def test_ties_go_to_the_lower_depth_then_rank_then_parent():
    """All paths weigh the same: level by level, rank by rank, parent by parent."""
    tokens = np.array([[10, 11], [20, 21]])
    tree = build_tree(tokens, np.zeros((2, 2), np.float32), 1, budget=6)
    assert tree.node_tokens.tolist() == [1, 10, 11, 20, 20, 21, 21]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 1, 2]


@pytest.mark.parametrize("top_k", [1, 3])
def test_width_1_is_the_chain(top_k):
    """One candidate a position, whether K is 1 or the others are -inf."""
    logprobs = np.full((5, top_k), -INF, np.float32)
    logprobs[:, 0] = [-0.5, -3.0, -0.1, -7.0, -0.2]
    tokens = np.arange(5 * top_k).reshape(5, top_k)
    for budget in range(8):
        tree = build_tree(tokens, logprobs, 9, budget)
        n = min(budget, 5) + 1
        assert tree.parents.tolist() == list(range(-1, n - 1))
        assert tree.node_tokens.tolist() == [9, *tokens[: n - 1, 0]]
        np.testing.assert_array_equal(tree.scores, np.cumsum([0, *logprobs[: n - 1, 0]], dtype=np.float32))


def test_scores_are_rounded_at_each_edge():
    """1 + 2^-24 is 1 in float32: summed in another order, or in float64, the last score would differ."""
    logprobs = np.array([[-1.0], [-(2.0**-24)], [-(2.0**-24)]], np.float32)
    assert build_tree(np.zeros((3, 1), int), logprobs, 0, 3).scores.tolist() == [0, -1, -1, -1]


def test_sums_that_overflow_are_never_taken():
    logprobs = np.full((2, 1), -3e38, np.float32)
    assert build_tree(np.zeros((2, 1), int), logprobs, 0, 5).num_nodes == 2


def test_siblings_may_have_the_same_token():
    tree = build_tree(np.array([[5, 5]]), np.array([[-1, -1]], np.float32), 0, 4)
    assert tree.node_tokens.tolist() == [0, 5, 5] and tree.parents.tolist() == [-1, 0, 0]


def test_path():
    tree = build_tree(np.array([[5, 6], [7, 8]]), np.array([[-1, -2], [-1, -1.5]], np.float32), 0, 6)
    assert [tree.path(node) for node in range(4)] == [[0], [0, 1], [0, 2], [0, 1, 3]]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_its_trees_and_padding():
    rng = np.random.default_rng(3)
    tokens, logprobs = random_drafts(rng, (4, 3, 3))
    budgets = np.array([5, -1, 0, 9], np.int32)
    logprobs[1] = np.nan  # of a request that does not exist: not looked at
    batch = build_trees(tokens, logprobs, np.array([1, 2, 3, 4]), budgets, max_nodes=10)
    assert batch.num_nodes[1] == 0
    for b in (0, 2, 3):
        want = build_tree(tokens[b], logprobs[b], b + 1, int(budgets[b]))
        assert_is(batch.tree(b), (want.node_tokens, want.parents, want.depths, want.scores))
    for b in range(4):
        n = batch.num_nodes[b]
        assert (batch.parents[b, n:] == -1).all() and (batch.scores[b, n:] == -INF).all()
        assert not batch.node_tokens[b, n:].any() and not batch.depths[b, n:].any()


GOOD = {
    "tokens": np.zeros((1, 2, 3), np.int64),
    "logprobs": np.zeros((1, 2, 3), np.float32),
    "root_tokens": np.zeros(1, np.int64),
    "budgets": np.array([3], np.int32),
}


@pytest.mark.parametrize("change, message", [
    ({"logprobs": np.zeros((1, 2, 3))}, r"logprobs: expected a float32 array of 3 axes, got float64 \[1, 2, 3\]"),
    ({"logprobs": np.zeros((2, 3), np.float32)}, r"logprobs: expected a float32 array of 3 axes, got float32 \[2, 3\]"),
    ({"tokens": np.zeros((1, 2, 4), int)},
     r"tokens: expected integers \[1, 2, 3\], as logprobs, got int64 \[1, 2, 4\]"),
    ({"tokens": np.zeros((1, 2, 3))}, r"tokens: expected integers \[1, 2, 3\], as logprobs, got float64"),
    ({"root_tokens": np.zeros(2, int)}, r"root_tokens: expected 1 integers, got int64 \[2\]"),
    ({"root_tokens": np.zeros(1)}, r"root_tokens: expected 1 integers, got float64 \[1\]"),
    ({"budgets": np.array([5], np.int32)}, r"budgets\[0\]: expected below max_nodes=5, got 5"),
    ({"logprobs": np.array([[[0, 0, 0], [0, -1, np.nan]]], np.float32)}, r"logprobs\[0, 1, 2\]: expected a log.*nan"),
    ({"logprobs": np.array([[[INF, 0, 0], [0, 0, 0]]], np.float32)}, r"logprobs\[0, 0, 0\]: expected a log-prob.*inf"),
    ({"logprobs": np.array([[[0, -1, -1], [-2, -1, -1]]], np.float32)},
     r"logprobs\[0, 1, 1\]: expected at most that of the rank before, -2.0, got -1.0"),
])  # fmt: skip
def test_wrong_drafts_are_named(change, message):
    with pytest.raises(nv.ArgumentError, match=message):
        build_trees(**GOOD | change, max_nodes=5)


def test_a_negative_budget_of_one_tree_is_refused():
    with pytest.raises(nv.ArgumentError, match="budget: expected >= 0 drafted nodes, got -1"):
        build_tree(GOOD["tokens"][0], GOOD["logprobs"][0], 0, -1)


# --- children(path) --------------------------------------------------------------------------------------------------


def test_children_may_depend_on_the_path():
    table = {
        (): [(1, -1.0), (2, -1.5)],
        (1,): [(1, -2.0)],
        (2,): [(3, -0.25), (4, -3.0)],
        (2, 3): [(5, -0.125)],
    }
    tree = build_from_children(lambda path: table.get(path, ()), 0, 10)
    assert tree.node_tokens.tolist() == [0, 1, 2, 3, 5, 1, 4]
    assert tree.parents.tolist() == [-1, 0, 0, 2, 3, 1, 2]
    assert tree.scores.tolist() == [0, -1, -1.5, -1.75, -1.875, -3, -4.5]


def test_children_are_read_no_further_than_needed():
    asked, read = [], []

    def children(path):
        asked.append(path)
        for rank in itertools.count():
            read.append((path, rank))
            yield rank, -0.5 * (rank + 1)

    assert build_from_children(children, 0, 3).parents.tolist() == [-1, 0, 0, 1]
    assert asked == [(), (0,), (1,)]
    assert len(read) == 3 + 3  # a first child of each node asked for, and what came after each that was taken


@pytest.mark.parametrize("values, message", [
    ([-1.0, -0.5], r"children\(\(\)\)\[1\]: expected at most that of the rank before, -1.0, got -0.5"),
    ([np.nan], r"children\(\(\)\)\[0\]: expected a log-probability, got nan"),
])  # fmt: skip
def test_wrong_children_are_named(values, message):
    with pytest.raises(nv.ArgumentError, match=message):
        build_from_children(lambda path: [] if path else [(0, value) for value in values], 0, 4)


# --- trees from given parents ----------------------------------------------------------------------------------------


def depth_of(parents, node):
    return 0 if parents[node] == -1 else 1 + depth_of(parents, parents[node])


def test_any_order_of_nodes_has_the_depths_of_recursion():
    rng = np.random.default_rng(5)
    for _ in range(300):
        n = int(rng.integers(1, 20))
        names = [0, *(1 + rng.permutation(n - 1))]  # children before parents, too
        parents = [-1] * n
        for node in range(1, n):
            parents[names[node]] = int(names[rng.integers(node)])
        tree = tree_from_parents(parents, list(range(n)))
        assert tree.depths.tolist() == [depth_of(parents, node) for node in range(n)]
        assert tree.parents.tolist() == parents and tree.node_tokens.tolist() == list(range(n))
        assert np.isnan(tree.scores).all()


def test_padding_is_not_read():
    assert check_parents([-1, 0, 99, -7], 2).tolist() == [0, 1]


@pytest.mark.parametrize("parents, num_nodes, message", [
    ([0, 0], None, r"parents\[0\]: expected -1, as node 0 is the root, got 0"),
    ([-1, 0, -1], None, r"parents\[2\]: expected no second root: 0 to 2, got -1"),
    ([-1, 3, 0], None, r"parents\[1\]: expected a node, 0 to 2, got 3"),
    ([-1, -2, 0], None, r"parents\[1\]: expected a node, 0 to 2, got -2"),
    ([-1, 0, 3, 0], 3, r"parents\[2\]: expected a node, 0 to 2, got 3, which is padding"),
    ([-1, 1], None, r"parents\[1\]: expected a path to the root, got 1, which closes a cycle"),
    ([-1, 3, 1, 2, 0], None, r"parents\[1\]: expected a path to the root, got 3, which closes a cycle"),
    ([-1, 0], 3, r"num_nodes: expected 1 to 2, the length of parents, got 3"),
    ([-1, 0], 0, r"num_nodes: expected 1 to 2, the length of parents, got 0"),
    ([-1.0, 0.0], None, r"parents: expected a list of integers, got float64 \[2\]"),
])  # fmt: skip
def test_what_is_no_tree_is_named(parents, num_nodes, message):
    with pytest.raises(nv.ArgumentError, match=message):
        check_parents(parents, num_nodes)


def test_the_check_takes_time_in_proportion_to_the_nodes():
    """A chain listed from its end walks up once, not once a node: that would be 5e9 steps."""
    n = 100_000
    chain = np.array([-1, *range(2, n), 0])
    assert check_parents(chain)[1] == n - 1


@pytest.mark.parametrize("arguments, message", [
    (([-1, 0], [1]), "tokens: expected 2 integers, one a node"),
    (([-1, 0], [1, 0.5]), "tokens: expected 2 integers, one a node"),
    (([-1, 0], np.array([1, 2], np.uint64)), "tokens: expected 2 integers, one a node, got uint64"),
    (([-1, 0], [1, 2], [0.0]), "scores: expected 2 numbers, one a node"),
])  # fmt: skip
def test_what_does_not_belong_to_the_nodes_is_named(arguments, message):
    with pytest.raises(nv.ArgumentError, match=message):
        tree_from_parents(*arguments)
