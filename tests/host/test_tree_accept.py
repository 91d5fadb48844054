"""The definition of acceptance against oracles that are written as one would say it."""

import math

import ml_dtypes
import numpy as np
import pytest
from support.tree_accept import B19, random_request

from nbverify.errors import ArgumentError
from nbverify.tree.accept import (
    AcceptFlag,
    AcceptPlan,
    accept_greedy,
    accept_sampled,
    draw_token,
    kept_weights,
    largest_logit,
    philox,
    random_bits,
)
from nbverify.tree.kernels.accept_rules import LOG2_E

F32 = np.float32


def one(parents, tokens, targets, max_depth=32):
    """Greedy acceptance of one tree: (path, bonus, flag)."""
    n = len(parents)
    result = accept_greedy(np.array([parents]), np.array([tokens]), np.array([n]), np.array([0, n]),
                           np.array(targets), max_depth=max_depth)  # fmt: skip
    length = result.accept_lens[0]
    assert (result.accept_nodes[0, length:] == -1).all()
    return result.accept_nodes[0, :length].tolist(), int(result.bonus_tokens[0]), int(result.flags[0])


def follow(node, parents, tokens, targets):
    """The oracle: the path from here on."""
    for child, parent in enumerate(parents):
        if parent == node and tokens[child] == targets[node]:
            return [node, *follow(child, parents, tokens, targets)]
    return [node]


def test_recipe_b19():
    assert one(**B19) == ([0, 2, 5, 6], 77, 0)


def test_a_lone_root_and_a_first_draft_that_is_wrong():
    assert one([-1], [100], [7]) == ([0], 7, 0)
    assert one([-1, 0], [100, 11], [12, 50]) == ([0], 12, 0)


def test_of_siblings_with_one_token_the_lowest_is_taken():
    assert one([-1, 0, 0, 2], [1, 5, 5, 6], [5, 6, 6, 6]) == ([0, 1], 6, 0)


def test_ten_thousand_random_trees():
    rng = np.random.default_rng(19)
    lengths = []
    for _ in range(10_000):
        parents, tokens, targets = random_request(rng, int(rng.integers(1, 24)))
        want = follow(0, parents.tolist(), tokens.tolist(), targets.tolist())
        path, bonus, flag = one(parents, tokens, targets)
        assert (path, bonus, flag) == (want, targets[want[-1]], 0)
        lengths.append(len(path))
    assert max(lengths) > 6 and np.mean(lengths) > 2  # the trees are worth the walk


def test_a_tree_of_width_one_is_a_chain():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(1, 12))
        tokens, targets = rng.integers(0, 2, (2, n))
        agreed = 0
        while agreed + 1 < n and tokens[agreed + 1] == targets[agreed]:
            agreed += 1
        assert one(np.arange(n) - 1, tokens, targets) == (list(range(agreed + 1)), targets[agreed], 0)


def test_a_path_ends_at_max_depth():
    chain = {"parents": [-1, 0, 1, 2], "tokens": [9, 1, 2, 3], "targets": [1, 2, 3, 4]}
    assert one(**chain, max_depth=2) == ([0, 1, 2], 3, 0)
    assert one(**chain, max_depth=0) == ([0], 1, 0)


BROKEN = {
    "a_second_root": ([-1, -1, 0], AcceptFlag.PARENT),
    "root_with_parent": ([0, 0, 0], AcceptFlag.ROOT),
    "parent_too_large": ([-1, 3, 0], AcceptFlag.PARENT),
    "own_parent": ([-1, 1, 0], AcceptFlag.PARENT),
    "circle": ([-1, 2, 1], AcceptFlag.CYCLE),
}


@pytest.mark.parametrize("parents, flag", BROKEN.values(), ids=BROKEN)
def test_a_tree_that_is_none_is_flagged_and_not_followed(parents, flag):
    assert one(parents, [0, 5, 5], [5, 5, 5]) == ([], 0, flag)


def test_logits_give_the_lowest_of_equals_and_a_nan_never():
    row = np.array([1, np.nan, 3, 3, -np.inf], F32)
    assert largest_logit(row) == (2, True)
    assert largest_logit(row[2:]) == (0, False)
    assert largest_logit(np.array([np.nan, -np.inf], F32)) == (0, True)
    assert largest_logit(np.array([-np.inf, -np.inf], F32)) == (0, True)
    assert largest_logit(np.array([-0.0, 0.0], F32)) == (0, False)
    assert largest_logit(np.array([1, 2], ml_dtypes.bfloat16)) == (1, False)


# ------------------------------------------------------------------------------------------------------------- sampling


def test_philox_known_answers():
    """Random123's kat_vectors, philox 4x32 10."""
    assert philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert random_bits(0, 0) == 0xE169C58D6627E8D5
    assert random_bits(-1, 5) == random_bits((1 << 64) - 1, 5) != random_bits((1 << 32) - 1, 5)


def probabilities(logits, temperature, top_k, top_p):
    """The oracle: float64, by sorting, one token at a time."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
        p /= p.sum()
    order, mass, kept = np.argsort(-p), 0.0, np.zeros(len(p), bool)
    for token in order:
        if mass < top_p:
            kept[token] = True
        mass += p[token]
    p[~kept] = 0
    return p / p.sum()


@pytest.mark.parametrize("top_k", [0, 2, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_weights_are_the_probabilities(temperature, top_p, top_k):
    logits = np.random.default_rng(3).normal(0, 3, 50).astype(F32)
    amounts = kept_weights(logits, F32(temperature), top_k, F32(top_p))
    want = probabilities(logits, temperature, top_k, top_p)
    assert ((amounts > 0) == (want > 2.0**-40)).all()
    # x has up to 6 bits before the point, so 18 behind it, times ln 2; three more roundings of 2^-24; a unit of 2^-40.
    np.testing.assert_allclose(amounts / amounts.sum(), want, rtol=8e-6, atol=2.0**-39)


def test_what_top_k_and_top_p_keep_of_equals_and_in_which_order():
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.2], F32))
    assert np.flatnonzero(kept_weights(logits, F32(1), 2, F32(1))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(kept_weights(logits, F32(1), 0, F32(0.3))).tolist() == [0]
    logits = np.log(np.array([0.45, 0.25, 0.2, 0.1], F32))
    # Of all, 0.45 + 0.25 is not 0.75; of the first two, 0.45 is less than 0.75 of 0.7 and 0.7 is not.
    assert np.flatnonzero(kept_weights(logits, F32(1), 0, F32(0.75))).tolist() == [0, 1, 2]
    assert np.flatnonzero(kept_weights(logits, F32(1), 2, F32(0.75))).tolist() == [0, 1]
    assert np.flatnonzero(kept_weights(logits, F32(1), 2, F32(0.6))).tolist() == [0]


def test_draws_and_top_p_at_exact_bounds():
    equal = np.zeros(4, F32)
    assert [draw_token(equal, F32(1), 0, F32(1), k << 62)[0] for k in range(4)] == [0, 1, 2, 3]
    assert [draw_token(equal, F32(1), 0, F32(1), (k << 62) - 1)[0] for k in range(1, 5)] == [0, 1, 2, 3]
    halves = np.array([0, -1, -1], F32), F32(LOG2_E), 0  # weights 1, 1/2, 1/2: at this temperature a power of 2
    assert (kept_weights(*halves, F32(1)) == np.array([2, 1, 1]) << 39).all()
    assert np.flatnonzero(kept_weights(*halves, F32(0.5))).tolist() == [0]
    assert np.flatnonzero(kept_weights(*halves, np.nextafter(F32(0.5), F32(1)))).tolist() == [0, 1, 2]


def test_no_draw_where_there_is_no_choice():
    row = np.array([1, 3, 3, np.nan], F32)
    for temperature, top_k in ((0, 0), (1, 1)):
        for bits in (0, (1 << 64) - 1):
            assert draw_token(row, F32(temperature), top_k, F32(1), bits) == (1, True)
    infinite = np.array([np.inf, 0, np.inf, -np.inf], F32)
    assert [draw_token(infinite, F32(1), 0, F32(1), bits)[0] for bits in (0, (1 << 64) - 1)] == [0, 2]


def chi_square_bound(freedom):
    """What a chi-square of that many degrees of freedom exceeds once in about 30,000 (Wilson and Hilferty, z = 4)."""
    c = 2 / (9 * freedom)
    return freedom * (1 - c + 4 * math.sqrt(c)) ** 3


def check_counts(counts, want):
    draws = counts.sum()
    assert counts[want == 0].sum() == 0
    expected = want[want > 0] * draws
    assert expected.min() >= 5  # else the statistic is none
    statistic = ((counts[want > 0] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound(len(expected) - 1)


TREES = {
    "two_children": ([-1, 0, 0], [0, 3, 1]),
    "children_with_one_token": ([-1, 0, 0, 0, 1, 2], [0, 3, 3, 1, 2, 2]),
    "chain": ([-1, 0, 1], [0, 3, 4]),
    "nothing": ([-1], [0]),
}
FILTERS = {"all": (1.0, 0, 1.0), "top_k": (0.7, 4, 1.0), "top_p": (1.5, 0, 0.8), "both": (1.0, 5, 0.9)}


CASES = [(tree, "both") for tree in TREES] + [("children_with_one_token", name) for name in FILTERS if name != "both"]


@pytest.mark.parametrize("tree, filters", CASES)
def test_the_first_two_tokens_are_distributed_as_the_target_s(tree, filters):
    """20,000 requests; the second token of those whose first one is 3 is on the tree, or drawn in the next step."""
    (parents, tokens), (temperature, top_k, top_p) = TREES[tree], FILTERS[filters]
    draws, vocab, n = 20_000, 8, len(parents)
    rng = np.random.default_rng(5)
    after_root, after_3 = rng.normal(0, 1, (2, vocab)).astype(F32)
    after_root[3] += 1  # so that the second token is drawn often enough
    logits = rng.normal(0, 5, (n, vocab)).astype(F32)  # of other nodes: to be told from these
    logits[0] = after_root
    for node in range(1, n):
        if parents[node] == 0 and tokens[node] == 3:
            logits[node] = after_3
    settings = {
        "temperatures": np.full(draws, temperature), "top_ks": np.full(draws, top_k), "top_ps": np.full(draws, top_p),
        "seeds": np.arange(draws), "max_depth": 4,
    }  # fmt: skip
    result = accept_sampled(
        np.tile(parents, (draws, 1)), np.tile(tokens, (draws, 1)), np.full(draws, n), np.zeros(draws + 1, int),
        logits, **settings, prefix_lens=np.full(draws, 40),
    )  # fmt: skip
    first, second = result.target_tokens[:, 0], result.target_tokens[:, 1].copy()
    check_counts(np.bincount(first, minlength=vocab), probabilities(after_root, temperature, top_k, top_p))

    ended = np.flatnonzero((first == 3) & (second == -1))
    for b in ended:  # the tree had no such child: the next step draws after it
        second[b], _ = draw_token(after_3, F32(temperature), top_k, F32(top_p), random_bits(int(b), 41))
    check_counts(np.bincount(second[first == 3], minlength=vocab), probabilities(after_3, temperature, top_k, top_p))
    if 3 in tokens:
        assert len(ended) == 0


def test_a_text_does_not_depend_on_the_trees():
    """Steps with random trees give the tokens that one draw after the other gives."""
    vocab, rng = 6, np.random.default_rng(8)

    def logits_after(text):
        return np.random.default_rng([9, *text]).normal(0, 1, vocab).astype(F32)

    def step(text, parents, tokens):
        paths = {0: text}
        for node in range(1, len(parents)):
            paths[node] = (*paths[parents[node]], tokens[node])
        result = accept_sampled(
            np.array([parents]), np.array([tokens]), np.array([len(parents)]), np.array([0, len(parents)]),
            np.stack([logits_after(paths[node]) for node in range(len(parents))]),
            temperatures=np.ones(1), top_ks=np.zeros(1, int), top_ps=np.ones(1), seeds=np.array([77]),
            prefix_lens=np.array([len(text)]), max_depth=16,
        )  # fmt: skip
        return (*text, *result.target_tokens[0, : result.accept_lens[0]].tolist())

    plain, trees, steps = (0,), (0,), 0
    while len(plain) < 60:
        plain = step(plain, [-1], [0])
    while len(trees) < 60:
        n = 12
        trees = step(trees, [-1, *(int(rng.integers(0, j)) for j in range(1, n))], rng.integers(0, vocab, n).tolist())
        steps += 1
    assert trees[:60] == plain[:60] and steps < 45


def test_wrong_arguments_are_named():
    tree = np.array([[-1]]), np.array([[0]]), np.array([1]), np.array([0, 1])
    with pytest.raises(ArgumentError, match="target_tokens: expected either"):
        accept_greedy(*tree, max_depth=1)
    with pytest.raises(ArgumentError, match="target_tokens: expected dtype int32 or int64, got float64"):
        accept_greedy(*tree, np.zeros(1), max_depth=1)
    with pytest.raises(ArgumentError, match=r"logits: expected 2 dimensions, got \[1\]"):
        accept_greedy(*tree, logits=np.zeros(1, F32), max_depth=1)
    with pytest.raises(ArgumentError, match=r"qo_indptr: expected shape \[2\], got \[1\]"):
        accept_greedy(*tree[:3], np.zeros(1, int), np.zeros(1, int), max_depth=1)
    with pytest.raises(ArgumentError, match=r"parents: expected shape \[B, N\]"):
        accept_greedy(np.array([-1]), *tree[1:], np.zeros(1, int), max_depth=1)
    sizes = {"max_requests": 2, "max_nodes": 4, "max_depth": 2, "device": "emulator"}
    for changes, message in (
        ({"max_nodes": 1026}, "max_nodes: expected an int, 1 to 1025, got 1026"),
        ({"max_requests": 0}, "max_requests: expected an int, 1 to 8192, got 0"),
        ({"max_depth": -1}, "max_depth: expected an int, 0 to 1024, got -1"),
        ({"sampled": True}, "vocab_size: expected a number"),
        ({"vocab_size": 1 << 23}, "vocab_size: expected an int, 1 to 4194304, got 8388608"),
        ({"logits_dtype": "float64"}, "logits_dtype: expected one of"),
    ):
        with pytest.raises(ArgumentError, match=message):
            AcceptPlan(**{**sizes, **changes})
