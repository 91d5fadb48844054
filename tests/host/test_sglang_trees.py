"""DDTree's trees as SGLang's verify input: the numpy definition, against SGLang's walk and against the device form."""

import numpy as np
import pytest

import nbverify as nv
from nbverify.integrations import sglang_trees
from nbverify.integrations.sglang_trees import DraftTrees, top_logprobs, verify_input

VOCABULARY, DEPTH = 50, 4


def drafts(requests=3, seed=7):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((requests, DEPTH, VOCABULARY)).astype(np.float32)
    return logits, rng.integers(0, VOCABULARY, requests), rng.integers(0, 20, requests)


def walk(made, request, says):
    """SGLang's greedy verify: from a node to the child, or its sibling, whose token is what the target says."""
    n = made.draft_token_num
    tokens = made.draft_token.reshape(-1, n)[request]
    node, path = 0, [0]
    while True:
        child = made.retrieve_next_token[request, node]
        while child != -1 and tokens[child] != says(path):
            child = made.retrieve_next_sibling[request, child]
        if child == -1:
            return path
        path.append(int(child))
        node = child


def test_shapes_and_types():
    logits, roots, lens = drafts()
    made = verify_input(logits, roots, lens, budget=8, top_k=4)
    n = made.draft_token_num
    assert n == 9 and made.draft_token.shape == made.positions.shape == (27,)
    assert made.custom_mask.shape == (sum(n * (c + n) for c in lens),)
    for links in (made.retrieve_index, made.retrieve_next_token, made.retrieve_next_sibling):
        assert links.shape == (3, n) and links.dtype == np.int64
    assert made.draft_token.dtype == made.positions.dtype == np.int64
    assert (made.retrieve_index.ravel() == np.arange(27)).all(), "b * N + j"
    assert (made.draft_token.reshape(3, n)[:, 0] == roots).all()
    assert (made.positions.reshape(3, n)[:, 0] == lens).all()
    assert set(made.fields()) == {
        "draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
        "draft_token_num",
    }  # fmt: skip


def test_the_walk_and_the_mask_agree():
    """Every node can be reached by a target that wants it, and sees exactly the path that leads to it."""
    logits, roots, lens = drafts()
    made = verify_input(logits, roots, lens, budget=12, top_k=4)
    n = made.draft_token_num
    starts = np.concatenate([[0], np.cumsum(n * (lens + n))])
    tokens = made.draft_token.reshape(-1, n)
    for b in range(3):
        block = made.custom_mask[starts[b] : starts[b + 1]].reshape(n, lens[b] + n)
        assert (block[:, : lens[b]] == 1).all(), "stock kernels of other kinds read the prefix columns"
        sees = block[:, lens[b] :]
        assert (np.triu(sees, 1) == 0).all(), "parents stand before children"
        for node in range(n):
            path = np.flatnonzero(sees[node])
            want = [*tokens[b, path[1:]], None]
            assert walk(made, b, lambda taken, want=want: want[len(taken) - 1]) == path.tolist()
            assert made.positions.reshape(-1, n)[b, node] == lens[b] + len(path) - 1


def test_trees_are_the_most_likely_paths():
    logits, roots, lens = drafts(1)
    made = verify_input(logits, roots, lens, budget=6, top_k=3)
    logprobs = logits[0].astype(np.float64)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    tree = nv.tree.build_tree(*(x[0] for x in top_logprobs(logits, 3)), int(roots[0]), 6)
    for node in range(1, 7):
        path = tree.path(node)[1:]
        score = sum(logprobs[d, tree.node_tokens[i]] for d, i in enumerate(path))
        assert score == pytest.approx(float(tree.scores[node]), abs=1e-5)
    assert (made.draft_token == tree.node_tokens).all()


def test_top_logprobs():
    logits = np.array([[[0.0, 2.0, 1.0, 2.0]]], np.float32)
    tokens, logprobs = top_logprobs(logits, 3)
    assert tokens.tolist() == [[[1, 3, 2]]], "best first; of equal ones the lower token"
    total = np.log(1 + 2 * np.exp(2) + np.exp(1))
    np.testing.assert_allclose(logprobs, [[[2 - total, 2 - total, 1 - total]]], rtol=1e-6)
    assert logprobs.dtype == np.float32
    far, _ = top_logprobs(logits + 3e4, 3)
    assert (far == tokens).all(), "no overflow"


def test_small_trees_are_padded():
    """Fewer paths than the budget: the rows that are left over see nothing and are linked to nothing."""
    logits, roots, lens = drafts(2)
    made = verify_input(logits[:, :1], roots, lens, budget=8, top_k=3)
    assert (made.num_nodes == 4).all()
    starts = np.concatenate([[0], np.cumsum(9 * (lens + 9))])
    for b in range(2):
        block = made.custom_mask[starts[b] : starts[b + 1]].reshape(9, -1)
        assert (block[4:] == 0).all() and block[3].any()
    assert (made.retrieve_next_token[:, 4:] == -1).all() and (made.retrieve_next_sibling[:, 4:] == -1).all()
    assert (made.draft_token.reshape(2, 9)[:, 4:] == 0).all()


def test_the_compact_layout():
    logits, roots, lens = drafts()
    full = verify_input(logits, roots, lens, budget=8, top_k=4)
    tree = verify_input(logits, roots, lens, budget=8, top_k=4, mask="tree")
    assert tree.custom_mask.shape == (3 * 81,)
    starts = np.concatenate([[0], np.cumsum(9 * (lens + 9))])
    for b in range(3):
        block = full.custom_mask[starts[b] : starts[b + 1]].reshape(9, -1)[:, lens[b] :]
        assert (tree.custom_mask.reshape(3, 9, 9)[b] == block).all()


@pytest.mark.parametrize(
    "changes, name",
    [
        (dict(budget=0), "budget"),
        (dict(mask="packed"), "mask"),
        (dict(mask="square"), "mask"),
        (dict(top_k=0), "logits"),
        (dict(top_k=VOCABULARY + 1), "logits"),
        (dict(logits=np.zeros((2, VOCABULARY), np.float32)), "logits"),
        (dict(logits=np.full((3, DEPTH, VOCABULARY), np.nan, np.float32)), "logprobs"),
        (dict(root_tokens=np.zeros(2, np.int64)), "root_tokens"),
        (dict(prefix_lens=np.array([1, 2, -1])), "prefix_lens"),
    ],
)
def test_wrong_arguments_are_named(changes, name):
    logits, roots, lens = drafts()
    given = dict(logits=logits, root_tokens=roots, prefix_lens=lens, budget=4, top_k=4) | changes
    with pytest.raises(nv.ArgumentError, match=name):
        verify_input(**given)


# ---- on a device


def equal(made, want):
    for name in want.fields():
        a, b = np.asarray(getattr(made, name)), np.asarray(getattr(want, name))
        assert (a[: len(b)] == b).all() if name == "custom_mask" else (a == b).all(), name


@pytest.mark.parametrize("mask", ["full", "tree"])
def test_the_device_form_is_the_definition(mask):
    sizes = dict(max_requests=3, depth=DEPTH, top_k=4, budget=8, max_prefix=20, mask=mask)
    trees = DraftTrees(**sizes, fill_prefix=mask == "full", device="emulator")
    for requests, seed in ((3, 1), (1, 2), (2, 3)):
        logits, roots, lens = drafts(requests, seed)
        made = trees.make(logits, roots, lens)
        equal(made, verify_input(logits, roots, lens, budget=8, top_k=4, mask=mask))
        assert trees.problems() == []
        assert (trees._own["num_nodes"][requests:] == 0).all(), "requests that are no more are not built"


def test_the_device_form_writes_the_backends_own_mask():
    buffer = np.full(3 * 9 * 29, 7, np.uint8)
    trees = DraftTrees(
        max_requests=3, depth=DEPTH, top_k=4, budget=8, max_prefix=20, custom_mask=buffer, device="emulator"
    )
    logits, roots, lens = drafts(2)
    made = trees.make(logits, roots, lens)
    assert np.shares_memory(made.custom_mask, buffer)
    want = verify_input(logits, roots, lens, budget=8, top_k=4)
    block, n = buffer[: 9 * (lens[0] + 9)].reshape(9, -1), lens[0]
    assert (block[:, n:] == want.custom_mask[: block.size].reshape(9, -1)[:, n:]).all()
    assert (block[:, :n] == 7).all(), "prefix columns, which are not read"


def test_the_device_form_refuses_by_name():
    sizes = dict(max_requests=2, depth=DEPTH, top_k=4, budget=8, max_prefix=20, device="emulator")
    trees = DraftTrees(**sizes)
    logits, roots, lens = drafts(3)
    with pytest.raises(nv.ArgumentError, match="logits: expected at most 2 requests of 4 positions"):
        trees.make(logits, roots, lens)
    with pytest.raises(nv.ArgumentError, match="logits"):
        trees.make(logits[:2, :3], roots[:2], lens[:2])
    with pytest.raises(nv.ArgumentError, match="prefix_lens"):
        trees.make(logits[:2], roots[:2], lens)
    for name, wrong in (
        ("mask", "causal"), ("top_k", 65), ("depth", 33), ("budget", 0), ("budget", 1025), ("custom_mask", np.zeros(4)),
    ):  # fmt: skip
        with pytest.raises(nv.ArgumentError, match=f"^{name}: expected"):
            DraftTrees(**(sizes | {name: wrong}))


def test_wrong_data_is_told_and_leaves_the_others_alone():
    trees = DraftTrees(max_requests=2, depth=DEPTH, top_k=4, budget=8, max_prefix=20, device="emulator")
    logits, roots, lens = drafts(2)
    want = verify_input(logits, roots, lens, budget=8, top_k=4)
    broken = logits.copy()
    broken[0] = np.nan
    made = trees.make(broken, roots, lens)
    assert trees.problems() == ["request 0: NOT_A_LOGPROB"]
    assert made.num_nodes.tolist() == [1, 9], "a root alone: the step decodes one token"
    assert (made.draft_token[9:] == want.draft_token[9:]).all()
    assert sglang_trees.NO_REQUEST < 0
