"""The float64 oracle against numbers worked out by hand, in probes whose answers are exact.

count   q = 0: lse = log(number of visible keys)
bit     q = 0, V[slot, d] = bit d of the slot: out * count = how many visible slots have bit d
needle  key j is 16 * e_j, head h asks for key h mod m: score 256 against 0, out = V of that key
"""

import math
from enum import Enum

import ml_dtypes
import numpy as np
import pytest

from nbverify.reference import ancestor_mask, full_mask, pack_mask, verify_attention

EPS = np.finfo(np.float64).eps
BITS = 16


class MaskLayout(str, Enum):
    """Like nbverify.Mask, which the reference must not import."""

    TREE = "tree"


def batch(prefixes, drafts):
    """The index buffers of a batch: ``prefixes`` and ``drafts`` are lists of slots per request."""
    return {
        "kv_indptr": np.cumsum([0] + [len(slots) for slots in prefixes]),
        "kv_indices": np.array([slot for slots in prefixes for slot in slots], np.int64),
        "qo_indptr": np.cumsum([0] + [len(slots) for slots in drafts]),
        "out_cache_loc": np.array([slot for slots in drafts for slot in slots], np.int64),
    }


def masks(layout, trees, prefix_lens):
    """``custom_mask`` and ``mask_indptr`` of a batch in one of the three layouts."""
    block = {
        "full": lambda tree, c: full_mask(c, tree),
        "tree": lambda tree, c: tree,
        "packed": lambda tree, c: pack_mask(tree),
    }[layout]
    blocks = [block(tree, c).reshape(-1) for tree, c in zip(trees, prefix_lens, strict=True)]
    return {
        "mask": layout,
        "custom_mask": np.concatenate(blocks),
        "mask_indptr": np.cumsum([0] + [b.size for b in blocks]),
    }


def bit_probe(num_slots, num_tokens, num_heads=1):
    """q and pools for the count and bit probes."""
    v = ((np.arange(num_slots)[:, None] >> np.arange(BITS)) & 1).astype(np.float32)
    return {
        "q": np.zeros((num_tokens, num_heads, BITS), np.float32),
        "k_cache": np.ones((num_slots, 1, BITS), np.float32),
        "v_cache": v[:, None, :],
        "sm_scale": 1.0,
    }


def random_inputs(rng, num_slots, num_tokens, num_q_heads, num_kv_heads, dim=8):
    return {
        "q": rng.standard_normal((num_tokens, num_q_heads, dim)),
        "k_cache": rng.standard_normal((num_slots, num_kv_heads, dim)),
        "v_cache": rng.standard_normal((num_slots, num_kv_heads, dim)),
        "sm_scale": 0.5,
    }


def random_tree(rng, num_nodes):
    """Parents of a random tree whose nodes are listed in random order."""
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, num_nodes)]
    order = rng.permutation(num_nodes)
    shuffled = [0] * num_nodes
    for node, parent in enumerate(parents):
        shuffled[order[node]] = -1 if parent < 0 else int(order[parent])
    return shuffled


def assert_same(got, want):
    """(out, lse) of two calls, bit for bit."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


class TestRecipes:
    """The numbers of the bug recipes."""

    @pytest.mark.parametrize("layout", ["full", "tree", "packed"])
    def test_b03_layouts_agree(self, layout):
        tree = ancestor_mask([-1, 0, 0, 1, 1, 2])
        buffers = batch([[40, 41, 42, 43, 44]], [[7, 3, 9, 1, 8, 2]])
        mask = masks(layout, [tree], [5])
        assert mask["custom_mask"].size == {"full": 66, "tree": 36, "packed": 6}[layout]

        out, lse = verify_attention(**bit_probe(64, 6), **buffers, **mask)

        np.testing.assert_allclose(lse[:, 0], [1.791759, 1.945910, 1.945910, 2.079442, 2.079442, 2.079442], atol=5e-7)
        sums = out[:, 0, :6] * np.exp(lse)
        np.testing.assert_allclose(sums[[0, 3, 5]], [[3, 3, 2, 5, 0, 5], [5, 4, 2, 5, 0, 5], [4, 4, 2, 6, 0, 5]])

    @pytest.mark.parametrize("layout", ["full", "tree", "packed", "causal"])
    def test_b04_chains_past_bit_31(self, layout):
        n, c = [3, 5, 33], [4, 1, 2]
        trees = [ancestor_mask(list(range(-1, num - 1))) for num in n]
        buffers = batch([range(x) for x in c], [range(10, 10 + num) for num in n])
        mask = {"mask": "causal"} if layout == "causal" else masks(layout, trees, c)
        if layout == "full":
            assert list(np.diff(mask["mask_indptr"])) == [21, 30, 1155]
        if layout == "packed":
            assert list(mask["mask_indptr"]) == [0, 3, 8, 74]

        _, lse = verify_attention(**bit_probe(64, sum(n)), **buffers, **mask)

        want = [math.log(x + i + 1) for num, x in zip(n, c, strict=True) for i in range(num)]
        np.testing.assert_allclose(lse[:, 0], want, rtol=4 * EPS)

    @pytest.mark.parametrize("c", [0, 1, 13, 15, 16, 17, 31, 32, 33])
    def test_b05_no_causal_shortcut(self, c):
        tree = ancestor_mask([-1, 0, 1, 0, 3])
        out, lse = verify_attention(
            **bit_probe(128, 5), **batch([range(c)], [[64, 65, 66, 67, 68]]), **masks("tree", [tree], [c])
        )
        np.testing.assert_allclose(np.exp(lse[:, 0]), [c + 1, c + 2, c + 3, c + 2, c + 3])
        if c == 13:
            assert lse[4, 0] == pytest.approx(2.772589, abs=5e-7)
        # Row 4 sees drafts {0, 3, 4}: slots 64, 67 and 68.
        bits = [sum((slot >> d) & 1 for slot in (*range(c), 64, 67, 68)) for d in range(BITS)]
        np.testing.assert_allclose(out[4, 0] * np.exp(lse[4]), bits, atol=1e-12)

    def test_b08_empty_row(self):
        inputs = random_inputs(np.random.default_rng(8), 8, 2, 2, 1)
        mask = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], np.uint8)
        out, lse = verify_attention(
            **inputs,
            **batch([[0, 1, 2]], [[3, 4]]),
            custom_mask=mask.reshape(-1),
            mask_indptr=[0, 10],
            prefix_visible=False,
        )
        assert np.all(out[0] == 0) and np.all(lse[0] == -np.inf)
        np.testing.assert_array_equal(out[1], [inputs["v_cache"][4, 0]] * 2)
        np.testing.assert_allclose(lse[1], 0.5 * inputs["q"][1] @ inputs["k_cache"][4, 0], rtol=4 * EPS)

    def test_b20_scales(self):
        q = np.zeros((1, 1, 16), ml_dtypes.bfloat16)
        q[0, 0, 0] = 4
        k = np.zeros((3, 1, 16), ml_dtypes.float8_e4m3fn)
        k[:, 0, 0] = [0, 1, 2]
        v = np.eye(3, 16, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn)[:, None, :]
        common = {"q": q, "k_cache": k, "sm_scale": 1.0, "mask": "none", "k_scale": 0.25, **batch([[0, 1]], [[2]])}

        out, lse = verify_attention(**common, v_cache=v, v_scale=2.0)
        np.testing.assert_allclose(out[0, 0, :3], [0.180061, 0.489457, 1.330482], atol=5e-7)
        assert lse[0, 0] == pytest.approx(2.407606, abs=5e-7)

        out, _ = verify_attention(**common, v_cache=v)
        np.testing.assert_allclose(out[0, 0, :3], [0.0900305, 0.2447285, 0.665241], atol=5e-7)  # v_scale is 1

        out, lse = verify_attention(**common, head_dim_v=8)  # MLA: k_scale scales V too
        weights = np.array([0.180061, 0.489457, 1.330482]) / 2
        assert out.shape == (1, 1, 8)
        np.testing.assert_allclose(out[0, 0], [0.25 * weights @ [0, 1, 2]] + [0] * 7, atol=5e-7)
        assert lse[0, 0] == pytest.approx(2.407606, abs=5e-7)


@pytest.mark.parametrize("num_q_heads, num_kv_heads", [(12, 4), (7, 1), (5, 5)])
def test_needle_finds_the_right_head_and_key(num_q_heads, num_kv_heads):
    num_keys = 8
    k = np.zeros((num_keys, num_kv_heads, 16), np.float16)
    k[np.arange(num_keys), :, np.arange(num_keys)] = 16
    v = np.random.default_rng(1).standard_normal((num_keys, num_kv_heads, 16))
    q = np.zeros((3, num_q_heads, 16), np.float16)
    q[:, np.arange(num_q_heads), np.arange(num_q_heads) % num_keys] = 16
    slots = [5, 2, 7, 0, 1]  # the pool's order is not the request's
    out, lse = verify_attention(q=q, k_cache=k, v_cache=v, sm_scale=1.0, mask="none", **batch([slots], [[3, 6, 4]]))
    heads = np.arange(num_q_heads)
    np.testing.assert_allclose(out, [v[heads % num_keys, heads // (num_q_heads // num_kv_heads)]] * 3, rtol=4 * EPS)
    np.testing.assert_array_equal(lse, 256.0)


def test_one_row_by_hand():
    """Two visible keys, all arithmetic spelled out."""
    out, lse = verify_attention(
        q=np.array([[[1.0, 2.0]]]),
        k_cache=np.array([[[3.0, 0.5]], [[-1.0, 1.0]]]),
        v_cache=np.array([[[10.0]], [[20.0]]]),
        sm_scale=0.25,
        mask="causal",
        **batch([[1]], [[0]]),
    )
    a, b = math.exp(0.25 * (3 + 1)), math.exp(0.25 * (-1 + 2))
    assert out[0, 0, 0] == pytest.approx((10 * a + 20 * b) / (a + b), rel=1e-15)
    assert lse[0, 0] == pytest.approx(math.log(a + b), rel=1e-15)


@pytest.mark.parametrize("num_nodes", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65])
def test_layouts_are_equal_and_every_bit_counts(num_nodes):
    rng = np.random.default_rng(num_nodes)
    trees = [ancestor_mask(random_tree(rng, num_nodes)), ancestor_mask(random_tree(rng, 3))]
    buffers = batch([range(5), []], [range(8, 8 + num_nodes), [100, 101, 102]])
    inputs = random_inputs(rng, 128, num_nodes + 3, 2, 1)
    want = verify_attention(**inputs, **buffers, **masks("full", trees, [5, 0]))
    for layout in ("tree", "packed"):
        mask = masks(layout, trees, [5, 0])
        assert_same(verify_attention(**inputs, **buffers, **mask), want)

    mask = masks("packed", trees, [5, 0])
    used = np.uint32((1 << (num_nodes % 32 or 32)) - 1)
    last_words = np.arange(1, num_nodes + 1) * -(-num_nodes // 32) - 1
    mask["custom_mask"][last_words] |= ~used  # bits past the last node mean nothing
    mask["custom_mask"] = mask["custom_mask"].view(np.int32)
    assert_same(verify_attention(**inputs, **buffers, **mask), want)

    mask = masks("tree", trees, [5, 0])
    row, column = rng.integers(0, num_nodes, 2)
    mask["custom_mask"][row * num_nodes + column] ^= True
    _, lse = verify_attention(**inputs, **buffers, **mask)
    assert list(np.flatnonzero(np.any(lse != want[1], axis=1))) == [row]


def test_causal_and_none():
    for mask, counts in (("causal", [3, 4, 5]), ("none", [5, 5, 5])):
        _, lse = verify_attention(**bit_probe(8, 3), **batch([[0, 1]], [[2, 3, 4]]), mask=mask)
        np.testing.assert_allclose(np.exp(lse[:, 0]), counts)


def test_prefix_bytes_count_only_when_asked():
    mask = np.array([1, 0, 1, 0, 0, 0, 1, 1], np.uint8)
    common = {**bit_probe(8, 2), **batch([[0, 1]], [[2, 3]]), "custom_mask": mask, "mask_indptr": [0, 8]}
    _, lse = verify_attention(**common)
    np.testing.assert_allclose(np.exp(lse[:, 0]), [3, 4])
    _, lse = verify_attention(**common, prefix_visible=False)
    np.testing.assert_allclose(np.exp(lse[:, 0]), [2, 2])


def test_padding_requests_and_uncovered_rows():
    """Prefix lengths 2, -1 (padding), 0 (no prefix), and a request without nodes; T is larger than qo_indptr[B]."""
    out, lse = verify_attention(
        **bit_probe(8, 6),
        kv_indptr=[0, 2, 1, 1, 3],
        kv_indices=[0, 1, 2],
        qo_indptr=[0, 1, 3, 5, 5],
        out_cache_loc=[3, -1, 99, 4, 5],  # the padding request's slots are not even valid
        mask="causal",
    )
    np.testing.assert_allclose(np.exp(lse[[0, 3, 4], 0]), [3, 1, 2])
    assert np.all(out[1:3] == 0) and np.all(lse[1:3] == -np.inf)
    assert np.all(np.isnan(out[5])) and np.all(np.isnan(lse[5]))


def test_negative_node_count_writes_nothing():
    out, lse = verify_attention(
        **bit_probe(8, 2),
        kv_indptr=[0, 1, 2],
        kv_indices=[0, 1],
        qo_indptr=[0, 2, 1],
        out_cache_loc=[2, 3],
        mask="causal",
    )
    np.testing.assert_allclose(np.exp(lse[:, 0]), [2, 3])
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("layout", ["full", "tree", "packed"])
@pytest.mark.parametrize(
    "start, counts", [(-1000, [2, 2]), (1000, [2, 2]), (None, [3, 2])], ids=["before", "past", "cut"]
)
def test_mask_positions_outside_the_buffer_are_hidden(layout, start, counts):
    mask = masks(layout, [ancestor_mask([-1, 0])], [2])
    row_elements = mask["custom_mask"].size // 2
    if start is None:  # the second row's bytes are missing
        mask["custom_mask"] = mask["custom_mask"][:row_elements]
    else:
        mask["mask_indptr"] = [start, start]
    _, lse = verify_attention(**bit_probe(8, 2), **batch([[0, 1]], [[2, 3]]), **mask)
    np.testing.assert_allclose(np.exp(lse[:, 0]), counts)


def test_hidden_keys_are_never_read():
    """NaN everywhere except in visible rows; indices past the end point nowhere."""
    rng = np.random.default_rng(3)
    inputs = random_inputs(rng, 16, 2, 2, 1)
    buffers = batch([[4, 5]], [[6, 7]])
    tree = np.eye(2, dtype=bool)
    want = verify_attention(**inputs, **buffers, **masks("tree", [tree], [2]))
    for name in ("k_cache", "v_cache"):
        inputs[name][[s for s in range(16) if s not in (4, 5, 6)]] = np.nan
    buffers["kv_indices"] = np.append(buffers["kv_indices"], [2**31 - 1, -1])
    got = verify_attention(**inputs, **buffers, **masks("tree", [tree], [2]))
    np.testing.assert_array_equal(got[0][0], want[0][0])
    np.testing.assert_array_equal(got[1][0], want[1][0])
    assert np.all(np.isnan(got[0][1]))  # row 1 sees slot 7


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_visible_score_spoils_its_own_row_silently(bad):
    inputs = random_inputs(np.random.default_rng(4), 8, 2, 2, 1)
    inputs["k_cache"] = np.abs(inputs["k_cache"])
    inputs["q"] = np.abs(inputs["q"])
    inputs["q"][0, 1, 0] = bad
    out, lse = verify_attention(**inputs, **batch([[0]], [[1, 2]]), mask="causal")
    assert np.all(np.isnan(out[0, 1])) and np.isnan(lse[0, 1])
    assert np.all(np.isfinite(out[[0, 1, 1], [0, 0, 1]])) and np.all(np.isfinite(lse[[0, 1, 1], [0, 0, 1]]))


def test_huge_scores_are_legal():
    q, k = np.full((1, 1, 1), 1e38), np.array([1.0, 0.5]).reshape(2, 1, 1)
    out, lse = verify_attention(q=q, k_cache=k, v_cache=k, sm_scale=1.0, mask="none", **batch([[0]], [[1]]))
    assert out[0, 0, 0] == 1 and lse[0, 0] == 1e38


def test_score_mod_sees_its_arguments_and_can_hide():
    calls = []

    def watch(score, request, head, node, key):
        calls.append((request, head, node, key))
        return -math.inf if key == 1 else score + 2.0

    inputs = bit_probe(8, 3, num_heads=2)
    inputs["v_cache"][1] = np.nan  # hidden by the function: zero weight all the same
    buffers = batch([[], [0, 1]], [[2], [3, 4]])
    out, lse = verify_attention(**inputs, **buffers, mask="causal", score_mod=watch)
    assert sorted(calls) == [
        (b, h, i, j) for b, c, n in ((0, 0, 1), (1, 2, 2)) for h in (0, 1) for i in range(n) for j in range(c + i + 1)
    ]
    np.testing.assert_allclose(lse, np.log([[1, 1], [2, 2], [3, 3]]) + 2.0)
    assert np.all(np.isfinite(out))

    out, lse = verify_attention(**inputs, **buffers, mask="causal", score_mod=lambda *_: -math.inf)
    assert np.all(out == 0) and np.all(lse == -np.inf)


def test_score_mod_gets_the_scaled_score():
    out, _ = verify_attention(
        q=np.full((1, 1, 2), 3.0),
        k_cache=np.full((1, 1, 2), 5.0),
        v_cache=np.ones((1, 1, 2)),
        sm_scale=0.5,
        k_scale=0.25,
        mask="none",
        score_mod=lambda score, *_: score if score == 0.5 * 0.25 * 30 else -math.inf,
        **batch([[]], [[0]]),
    )
    np.testing.assert_array_equal(out, 1.0)


def test_mask_may_be_a_str_enum():
    mask = masks("tree", [ancestor_mask([-1, 0])], [1])
    mask["mask"] = MaskLayout.TREE
    _, lse = verify_attention(**bit_probe(4, 2), **batch([[0]], [[1, 2]]), **mask)
    np.testing.assert_allclose(np.exp(lse[:, 0]), [2, 3])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_inputs_are_taken_at_their_value(dtype):
    inputs = random_inputs(np.random.default_rng(5), 8, 2, 2, 1)
    low = {name: inputs[name].astype(dtype) for name in ("q", "k_cache", "v_cache")}
    exact = {name: array.astype(np.float64) for name, array in low.items()}
    buffers = {**batch([[0, 1]], [[2, 3]]), "mask": "causal", "sm_scale": 0.5}
    assert_same(verify_attention(**low, **buffers), verify_attention(**exact, **buffers))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": "ring"}, "mask: expected one of"),
        ({"mask": "full"}, "expected both with mask='full'"),
        ({"v_cache": None}, "head_dim_v: expected an int"),
        ({"v_cache": None, "head_dim_v": 4, "v_scale": 2.0}, "v_scale: expected None or k_scale=1.0"),
        ({"prefix_visible": False}, "prefix_visible: expected True"),
        ({"q": np.zeros((1, 1, 8), np.uint16)}, "q: expected real values"),
        ({"out_cache_loc": [8]}, r"expected slots in \[0, 8\)"),
        ({"out_cache_loc": [-1]}, r"expected slots in \[0, 8\)"),
    ],
)
def test_refusals_name_the_argument(change, message):
    arguments = {**random_inputs(np.random.default_rng(6), 8, 1, 1, 1), **batch([[0]], [[1]]), "mask": "causal"}
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        verify_attention(**{**arguments, **change})


class TestTreeHelpers:
    """ancestor_mask, full_mask, pack_mask."""

    def test_ancestors_in_any_listing_order(self):
        # 3 is the root, 0 its child, 2 the child of 0, 1 another child of 3.
        want = [[1, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 1], [0, 0, 0, 1]]
        np.testing.assert_array_equal(ancestor_mask([3, 3, 0, -1]), np.array(want, bool))

    @pytest.mark.timeout(10)
    def test_a_cycle_ends(self):
        np.testing.assert_array_equal(
            ancestor_mask([1, 0, 2, 9]), [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
        )

    def test_full_mask_prepends_the_prefix(self):
        np.testing.assert_array_equal(full_mask(2, np.eye(2, dtype=bool)), [[1, 1, 1, 0], [1, 1, 0, 1]])

    @pytest.mark.parametrize("num_nodes", [0, 1, 31, 32, 33, 64, 65])
    def test_pack_mask_places_bit_j(self, num_nodes):
        tree = np.random.default_rng(num_nodes).random((num_nodes, num_nodes)) < 0.5
        words = pack_mask(tree)
        assert words.dtype == np.uint32 and words.shape == (num_nodes, -(-num_nodes // 32))
        for i in range(num_nodes):
            value = sum(int(word) << (32 * k) for k, word in enumerate(words[i]))
            assert value == sum(int(tree[i, j]) << j for j in range(num_nodes))
