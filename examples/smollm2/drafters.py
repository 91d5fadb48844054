"""Drafters: for each of the next positions, a distribution over its most probable tokens.

That is all that a draft tree is built from (DDTree), so a drafter is anything with ``depth``, ``top_k`` and

    propose(texts, hidden) -> for each text, for each position, {token: probability}

``texts`` are the tokens so far.  ``hidden`` is, for each, the target's residual stream [E] at the last token but one:
the last token, the root of the next tree, has not been through the target yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from examples.smollm2.model import rms_norm

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
    logprobs = np.full(tokens.shape, -np.inf, np.float32)
    for b, positions in enumerate(proposed):
        for d, distribution in enumerate(positions[:depth]):
            best = sorted(distribution.items(), key=lambda item: (-item[1], item[0]))[:top_k]
            for k, (token, probability) in enumerate(best):
                if probability > LEAST:
                    tokens[b, d, k], logprobs[b, d, k] = token, np.log(np.float32(probability))
    return tokens, logprobs


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
        found: list[dict[int, float]] = [defaultdict(float) for _ in range(self.depth)]
        hit = np.ones(len(ids) - 1, bool)  # hit[i]: the last `length` tokens also end before i + 1
        for length in range(1, min(LONGEST_SUFFIX, len(ids) - 1) + 1):
            hit[: length - 1] = False
            hit[length - 1 :] &= ids[: len(ids) - length] == ids[-length]
            for i in np.flatnonzero(hit)[-NEWEST:].tolist():
                for d, token in enumerate(ids[i + 1 : i + 1 + self.depth].tolist()):
                    found[d][token] += WEIGHT_A_TOKEN**length
        return found


class RidgeHeads:
    """Linear maps from [norm(hidden), embedding of the root] to norm(hidden) some positions on, then the target's head.

    ``heads`` ``[depth, 2 E, E]`` were fitted in closed form to the target's own text (fit.py).  One product gives all
    positions: the distributions of a block drafter.  ``model`` is the target, on a GPU or not.
    """

    def __init__(self, heads: np.ndarray, model: Any, top_k: int = TOP_K):
        self.depth, self.top_k, self.model = len(heads), top_k, model
        by_input = heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)  # [2 E, depth * E]
        self.matrix = model.xp.asarray(by_input, np.float32)

    def propose(self, texts: Sequence[Sequence[int]], hidden: Any) -> list[list[Distribution]]:
        """See :class:`Drafter`."""
        model, xp = self.model, self.model.xp
        roots = model.embed[xp.asarray([text[-1] for text in texts])].astype(np.float32) * np.float32(EMBED_SCALE)
        features = xp.concatenate([rms_norm(xp.stack(hidden), model.norm, model.config.epsilon), roots], axis=1)
        ahead = (features @ self.matrix).reshape(len(texts) * self.depth, -1)
        logits = (ahead.astype(model.embed.dtype) @ model.embed.T).astype(np.float32)
        best = xp.argpartition(-logits, self.top_k, axis=-1)[:, : self.top_k]
        largest = logits.max(-1, keepdims=True)
        total = xp.exp(logits - largest).sum(-1, keepdims=True)
        of_best = xp.exp(xp.take_along_axis(logits, best, -1) - largest) / total
        tokens, probabilities = best.tolist(), of_best.tolist()
        made = [dict(zip(*row, strict=True)) for row in zip(tokens, probabilities, strict=True)]
        return [made[b * self.depth : (b + 1) * self.depth] for b in range(len(texts))]


class Mixture:
    """Both: at each position lookup counts by how much it found there, and heads have the rest."""

    def __init__(self, lookup: PromptLookup, heads: RidgeHeads):
        self.lookup, self.heads = lookup, heads
        self.depth, self.top_k = max(lookup.depth, heads.depth), max(lookup.top_k, heads.top_k)

    def propose(self, texts: Sequence[Sequence[int]], hidden: Any) -> list[list[Distribution]]:
        """See :class:`Drafter`."""
        return [
            self._mixed(self.lookup.weights(text), fitted)
            for text, fitted in zip(texts, self.heads.propose(texts, hidden), strict=True)
        ]

    def _mixed(self, found: list[dict[int, float]], fitted: list[Distribution]) -> list[Distribution]:
        out = []
        for d in range(self.depth):
            weights = found[d] if d < len(found) else {}
            predicted = fitted[d] if d < len(fitted) else {}
            total = sum(weights.values())
            share = total / (total + TRUSTED) if predicted else 1.0
            mixed = {token: (1 - share) * probability for token, probability in predicted.items()}
            for token, probability in normed(weights).items():
                mixed[token] = mixed.get(token, 0.0) + share * probability
            out.append(mixed)
        return out


def normed(weights: dict[int, float]) -> Distribution:
    """Weights as probabilities; empty stays empty."""
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
