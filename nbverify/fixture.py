"""Real inputs: one attention layer of SmolLM2-135M-Instruct verifying a real draft tree.  See data/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SmolLM2Layer:
    """One request: ``c`` prefix tokens in a paged KV pool, ``n`` tree nodes, 9 query and 3 KV heads of 64.

    Query head ``h`` reads KV head ``h // 3``.  Node ``i`` sees the prefix, itself and its ancestors.
    """

    q: NDArray[np.float32]
    """``[n, 9, 64]`` float32: queries of the nodes, after rotary embedding."""
    k: NDArray[np.float32]
    """``[num_slots, 3, 64]`` float32: key pool, after rotary embedding; NaN in unused slots."""
    v: NDArray[np.float32]
    """``[num_slots, 3, 64]`` float32: value pool; NaN in unused slots."""
    prefix_slots: NDArray[np.int64]
    """``[c]`` int64: pool slots of the prefix, in the order of the text."""
    draft_slots: NDArray[np.int64]
    """``[n]`` int64: pool slots of the nodes."""
    parents: NDArray[np.int32]
    """``[n]`` int32: parent of each node, always an earlier one; -1 for the root, node 0."""
    tokens: NDArray[np.int32]
    """``[n]`` int32: token ids; the root is the last token already decided, the others are drafts."""
    logprobs: NDArray[np.float32]
    """``[n]`` float32: the drafter's natural-log probability of the path from the root; 0 for the root."""
    pieces: NDArray[np.str_]
    """``[n]`` str: text of each node's token."""
    prompt: str
    """Text of the prefix: chat format, question and the answer so far, without the root."""
    target: NDArray[np.int32]
    """``[n]`` int32: the token that the whole model, decoding greedily, puts after each node."""
    accepted: NDArray[np.int32]
    """``[a]`` int32: the nodes that greedy verification accepts, from the root down."""
    attention_out: NDArray[np.float32]
    """``[n, 9, 64]`` float32: the layer's attention output, before its projection, from plain causal passes."""
    sm_scale: float
    """Factor of the scores, 1 / 8."""


def load_fixture() -> SmolLM2Layer:
    """Read the packaged file.  Every call returns new arrays."""
    with (files("nbverify") / "data" / "smollm2_layer.npz").open("rb") as file, np.load(file) as arrays:
        fields = {name: arrays[name] for name in arrays.files}
    return SmolLM2Layer(**fields | {"prompt": fields["prompt"].item(), "sm_scale": fields["sm_scale"].item()})
