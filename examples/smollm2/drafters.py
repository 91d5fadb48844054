"""Drafters: for each of the next positions, a distribution over its most probable tokens.

That is all that a draft tree is built from (DDTree), so a drafter is anything with ``depth``, ``top_k`` and

    propose(texts, hidden) -> for each text, for each position, {token: probability}

``texts`` are the tokens so far.  ``hidden`` is, for each, the target's residual stream [E] at the last token but one:
the last token, the root of the next tree, has not been through the target yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from examples.smollm2.model import rms_norm
from nbverify.errors import ArgumentError

Distribution = dict[int, float]

LOOKUP_DEPTH, LONGEST_SUFFIX = 16, 4
WEIGHT_A_TOKEN = 8.0  # a suffix longer by a token is believed that many times as much
TRUSTED = WEIGHT_A_TOKEN**2  # weight of matches that makes lookup count half in the mixture: one of two tokens
NEWEST = 64  # occurrences of a suffix that are looked at
EMBED_SCALE = 10.0  # brings embeddings to the size of normed hidden states
TOP_K = 8
LEAST = 1e-30  # what is less probable is no candidate: a logarithm must be finite


class Drafter(Protocol):
    """What the loop asks of a drafter."""

    depth: int
    top_k: int

    def propose(self, texts: Sequence[Sequence[int]], hidden: Any) -> list[list[Distribution]]:
        """Distributions of each text's next positions; fewer than ``depth`` where it knows no more."""


def pack(proposed: list[list[Distribution]], depth: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 and log-probabilities float32 ``[texts, depth, top_k]`` by falling probability, -inf where none."""
    tokens = np.zeros((len(proposed), depth, top_k), np.int64)
    probabilities = np.zeros(tokens.shape, np.float32)
    for b, positions in enumerate(proposed):
        for d, distribution in enumerate(positions[:depth]):
            best = sorted(sorted(distribution), key=distribution.__getitem__, reverse=True)[:top_k]
            tokens[b, d, : len(best)], probabilities[b, d, : len(best)] = best, [distribution[token] for token in best]
    known, logprobs = probabilities > LEAST, np.full(tokens.shape, -np.inf, np.float32)
    np.log(probabilities, out=logprobs, where=known)
    # A vectorised logarithm may turn two close numbers round, and a tree is not built from ranks out of order.
    return np.where(known, tokens, 0), np.minimum.accumulate(logprobs, axis=-1)


class PromptLookup:
    """What followed earlier occurrences of the text's last 1 to 4 tokens, longer ones weighing more."""

    def __init__(self, depth: int = LOOKUP_DEPTH, top_k: int = TOP_K):
        self.depth, self.top_k = depth, top_k

    def propose(self, texts: Sequence[Sequence[int]], hidden: Any) -> list[list[Distribution]]:
        """See :class:`Drafter`; ``hidden`` is not used."""
        return [[normed(weights) for weights in self.weights(text)] for text in texts]

    def weights(self, text: Sequence[int]) -> list[dict[int, float]]:
        """For each position, {token: how strongly the text so far speaks for it}."""
        ids = np.asarray(text)
        believed: dict[int, float] = defaultdict(float)  # by where the occurrence ends
        hit = np.ones(len(ids) - 1, bool)  # hit[i]: the last `length` tokens also end before i + 1
        for length in range(1, min(LONGEST_SUFFIX, len(ids) - 1) + 1):
            hit[: length - 1] = False
            hit[length - 1 :] &= ids[: len(ids) - length] == ids[-length]
            for i in np.flatnonzero(hit)[-NEWEST:].tolist():
                believed[i] += WEIGHT_A_TOKEN**length
        found: list[dict[int, float]] = [defaultdict(float) for _ in range(self.depth)]
        for i, weight in believed.items():
            for at_position, token in zip(found, text[i + 1 : i + 1 + self.depth], strict=False):
                at_position[token] += weight
        return found


class RidgeHeads:
    """Linear maps from [norm(hidden), embedding of the root] to norm(hidden) some positions on, then the target's head.

    ``heads`` ``[depth, 2 E, E]`` were fitted in closed form to the target's own text (fit.py).  One product gives all
    positions: the distributions of a block drafter.  ``model`` is the target, on a GPU or not.
    """

    def __init__(self, heads: np.ndarray, model: Any, top_k: int = TOP_K):
        vocab_size, width = model.embed.shape
        if heads.ndim != 3 or heads.shape[1:] != (2 * width, width):
            raise ArgumentError("heads", f"shape [depth, {2 * width}, {width}]", list(heads.shape))
        if not 1 <= top_k <= vocab_size:
            raise ArgumentError("top_k", f"1 to {vocab_size}, the tokens there are", top_k)
        self.depth, self.top_k, self.model = len(heads), top_k, model
        self._start = model.open_heads(heads, top_k)

    def start(self, texts: Sequence[Sequence[int]], hidden: Any) -> Callable[[], list[list[Distribution]]]:
        """:meth:`propose` in two: what this gives waits for the result."""
        normed_hidden = rms_norm(np.stack(hidden), self.model.norm, self.model.config.epsilon)
        roots = self.model.embed[[text[-1] for text in texts]] * np.float32(EMBED_SCALE)
        wait = self._start(np.hstack([normed_hidden, roots]))

        def result() -> list[list[Distribution]]:
            rows = zip(*(array.tolist() for array in wait()), strict=True)
            return [[dict(zip(*position, strict=True)) for position in zip(*row, strict=True)] for row in rows]

        return result

    def propose(self, texts: Sequence[Sequence[int]], hidden: Any) -> list[list[Distribution]]:
        """See :class:`Drafter`."""
        return self.start(texts, hidden)()


class Mixture:
    """Both: at each position lookup counts by how much it found there, and heads have the rest."""

    def __init__(self, lookup: PromptLookup, heads: RidgeHeads):
        self.lookup, self.heads = lookup, heads
        self.depth, self.top_k = max(lookup.depth, heads.depth), max(lookup.top_k, heads.top_k)

    def propose(self, texts: Sequence[Sequence[int]], hidden: Any) -> list[list[Distribution]]:
        """See :class:`Drafter`."""
        wait = self.heads.start(texts, hidden)  # a GPU works on that while the host looks up
        found = [self.lookup.weights(text) for text in texts]
        return [self._mixed(*both) for both in zip(found, wait(), strict=True)]

    def _mixed(self, found: list[dict[int, float]], fitted: list[Distribution]) -> list[Distribution]:
        out = []
        for d in range(self.depth):
            weights = found[d] if d < len(found) else {}
            predicted = fitted[d] if d < len(fitted) else {}
            total = sum(weights.values())
            share = total / (total + TRUSTED) if predicted else 1.0
            mixed = {token: (1 - share) * probability for token, probability in predicted.items()}
            for token, weight in weights.items():
                mixed[token] = mixed.get(token, 0.0) + share * weight / total
            out.append(mixed)
        return out


def normed(weights: dict[int, float]) -> Distribution:
    """Weights as probabilities; empty stays empty."""
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
