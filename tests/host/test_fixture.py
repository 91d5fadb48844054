"""The packaged real inputs are whole, are a tree, and give the model's own attention output."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest

from nbverify.fixture import SmolLM2Layer, load_fixture

MAX_BYTES = 500_000


@pytest.fixture(scope="module")
def layer() -> SmolLM2Layer:
    return load_fixture()


def depths(parents: np.ndarray) -> list[int]:
    """Distance from the root."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def ancestor_mask(parents: np.ndarray) -> np.ndarray:
    """[n, n]: column j is node i or above it."""
    mask = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def attention(layer: SmolLM2Layer, mask: np.ndarray) -> np.ndarray:
    """The definition in float64, one node and one head at a time; mask is [n, n]."""
    out = np.empty(layer.q.shape)
    for i in range(len(layer.q)):
        slots = np.concatenate([layer.prefix_slots, layer.draft_slots[mask[i]]])
        for head in range(9):
            keys, values = (pool[slots, head // 3].astype(np.float64) for pool in (layer.k, layer.v))
            scores = layer.sm_scale * (keys @ layer.q[i, head].astype(np.float64))
            p = np.exp(scores - scores.max())
            out[i, head] = p / p.sum() @ values
    return out


def test_file_is_small():
    assert len((files("nbverify") / "data" / "smollm2_layer.npz").read_bytes()) < MAX_BYTES


def test_shapes_and_dtypes(layer):
    c, n, num_slots = len(layer.prefix_slots), len(layer.draft_slots), len(layer.k)
    assert 90 <= c <= 120 and 9 <= n <= 17 and num_slots > c + n
    want = {
        "q": ((n, 9, 64), np.float32),
        "k": ((num_slots, 3, 64), np.float32),
        "v": ((num_slots, 3, 64), np.float32),
        "prefix_slots": ((c,), np.int64),
        "draft_slots": ((n,), np.int64),
        "parents": ((n,), np.int32),
        "tokens": ((n,), np.int32),
        "logprobs": ((n,), np.float32),
        "target": ((n,), np.int32),
        "accepted": ((len(layer.accepted),), np.int32),
        "attention_out": ((n, 9, 64), np.float32),
    }
    assert {name: (getattr(layer, name).shape, getattr(layer, name).dtype) for name in want} == want
    assert layer.pieces.shape == (n,) and layer.pieces.dtype.kind == "U"
    assert isinstance(layer.prompt, str) and isinstance(layer.sm_scale, float) and layer.sm_scale == 64**-0.5


def test_slots_are_distinct_and_shuffled(layer):
    slots = np.concatenate([layer.prefix_slots, layer.draft_slots])
    assert len(set(slots.tolist())) == len(slots)
    assert slots.min() >= 0 and slots.max() < len(layer.k)
    assert np.any(np.diff(layer.prefix_slots) < 0)


def test_used_slots_are_finite_and_the_rest_is_poison(layer):
    used = np.zeros(len(layer.k), bool)
    used[layer.prefix_slots] = used[layer.draft_slots] = True
    for pool in (layer.k, layer.v):
        assert np.isfinite(pool[used]).all() and np.isnan(pool[~used]).all()
    for array in (layer.q, layer.attention_out, layer.logprobs):
        assert np.isfinite(array).all()


def test_tree_is_a_branching_tree(layer):
    parents = layer.parents
    assert parents[0] == -1
    assert all(0 <= parent < i for i, parent in enumerate(parents[1:], 1))
    assert max(depths(parents)) >= 3
    assert np.bincount(parents[1:]).max() >= 2
    children = list(zip(parents.tolist(), layer.tokens.tolist(), strict=True))
    assert len(set(children)) == len(children), "two siblings hold the same token"


def test_logprobs_fall_best_first(layer):
    assert layer.logprobs[0] == 0
    assert np.all(np.diff(layer.logprobs) <= 0)


def test_attention_out_is_reproduced(layer):
    # The model's attention is float32, and visible scores reach |s| = 14.3: a few roundings of a score, 14.3 * 2^-24
    # each, move its weight by a few 1e-6 relative.  Measured: 6e-7.  A wrong mask moves it 1000 bounds (next test).
    bound = 1e-5 * np.abs(layer.attention_out).max()
    got = attention(layer, ancestor_mask(layer.parents))
    np.testing.assert_allclose(got, layer.attention_out, rtol=0, atol=bound)


def test_attention_out_tells_a_wrong_mask(layer):
    n = len(layer.parents)
    scale = np.abs(layer.attention_out).max()
    for wrong in (np.tri(n, dtype=bool), np.eye(n, dtype=bool), np.ones((n, n), bool)):
        assert np.abs(attention(layer, wrong) - layer.attention_out).max() > 1e-2 * scale


def test_accepted_path_follows_the_target(layer):
    path = layer.accepted.tolist()
    assert path[0] == 0 and len(path) >= 2
    for node, child in pairwise(path):
        assert layer.parents[child] == node
        assert layer.tokens[child] == layer.target[node]
    after_last = layer.tokens[layer.parents == path[-1]]
    assert layer.target[path[-1]] not in after_last, "the path could go on"
