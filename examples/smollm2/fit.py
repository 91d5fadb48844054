"""Fitting the block heads of drafters.RidgeHeads: ``nbverify generate --fit``.

The model answers some questions greedily.  Of its own text, head d learns by ridge regression

    [norm(h_t), embedding of token t + 1] @ W_d  ~  norm(h_{t + d})           d = 1 .. DEPTH

with h the residual stream behind the last layer.  Sums of products are all that is kept of a text, and the heads are
the solution of one linear system.  No gradients, and no text but the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import EMBED_SCALE
from examples.smollm2.model import SCRATCH_PAGE, rms_norm
from examples.smollm2.weights import SHA256
from nbverify.compile import cache_directory
from nbverify.errors import NbverifyError

DEPTH = 6
STRENGTH = 0.1  # of the regularisation, as a share of the mean diagonal; from 0.01 to 0.3 it hardly matters
HELD_OUT = 6  # texts that only measure
ANSWER = 120  # tokens of an answer at most
TOPICS = ("the ocean", "a bakery", "sorting numbers", "a robot", "the moon", "chess", "a school", "trees",
          "a bank account", "music")  # fmt: skip
FORMS = ("Write a short story about {}.", "Explain {} to a child.", "List ten facts about {}, one per line.",
         "Write a Python function about {}.", "Write a Python class that models {}.", "Write a poem about {}.",
         "Give a JSON object that describes {}.", "Write an email about {}.", "What are the pros and cons of {}?",
         "Write step by step instructions involving {}.")  # fmt: skip


def questions(count: int) -> list[str]:
    """So many of all forms and topics, in a fixed shuffled order."""
    every = [form.format(topic) for form in FORMS for topic in TOPICS]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))[:count]]


def cache_path() -> Path:
    """Where fitted heads are kept: outside the repository, and named for the weights that they belong to."""
    return cache_directory() / f"smollm2-heads-{SHA256[:12]}.npz"


def load_heads(path: Path | None = None) -> np.ndarray:
    """``[DEPTH, 2 E, E]`` float32; NbverifyError with what to type where there are none."""
    path = path or cache_path()
    if not path.is_file():
        raise NbverifyError(f"{path}: no fitted heads yet; this drafter needs them once: nbverify generate --fit")
    return np.load(path)["heads"].astype(np.float32)


def save_heads(heads: np.ndarray, path: Path | None = None) -> Path:
    """In float16, 8 MB; where to."""
    path = path or cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, heads=heads.astype(np.float16))
    return path


def fit(
    model: Any,
    prompts: list[list[int]],
    *,
    end_token: int | None,
    answer: int = ANSWER,
    depth: int = DEPTH,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Heads ``[depth, 2 E, E]``, and on held-out texts how often each one's best token was right, ``[depth]``.

    ``progress(what, done, total)`` is called after each token of answers, and after each text.
    """
    texts, decoder = [list(prompt) for prompt in prompts], Decoder(model, end_token=end_token)
    for grown in decoder.run(prompts, answer):
        texts[grown.text] += grown.tokens
        written = sum(map(len, texts)) - sum(map(len, prompts))
        progress("answers, tokens at most", written, answer * len(prompts))
    held_out = min(HELD_OUT, len(texts) // 2)
    embed, width = model.embed, model.embed.shape[1]
    gram, cross = np.zeros((2 * width, 2 * width)), np.zeros((depth, 2 * width, width))
    measured = []
    for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        x, y = pairs(model, text, len(prompt), depth)
        if len(x):
            if i < held_out:
                measured.append((x, y))
            else:
                gram, cross = gram + x.T @ x, cross + x.T @ y
        progress("texts read again", i + 1, len(texts))
    if not gram.any() or not measured:
        raise NbverifyError("fit: the answers are too short to learn from; give more questions")
    gram += STRENGTH * np.trace(gram) / len(gram) * np.eye(len(gram))
    heads = np.linalg.solve(gram, cross).astype(np.float32)
    x, y = np.vstack([x for x, _ in measured]), np.concatenate([y for _, y in measured], axis=1)
    return heads, np.array([_agreement(x @ heads[d] @ embed.T, y[d] @ embed.T) for d in range(depth)])


def pairs(model: Any, text: list[int], prompt_len: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """What heads see of an answer, ``[n, 2 E]``, and what they are to say, ``[depth, n, E]``: float64.

    Row i is about the answer's token i as the root; n is what leaves ``depth`` tokens behind it.
    """
    model.set_slots(0, np.arange(len(text)) + (SCRATCH_PAGE + 1) * model.page_size)
    stream = rms_norm(model.prefill(0, text), model.norm, model.config.epsilon).astype(np.float64)
    begin, end = prompt_len - 1, max(prompt_len - 1, len(text) - depth)
    roots = model.embed[text[begin + 1 : end + 1]].astype(np.float64) * EMBED_SCALE
    ahead = [stream[begin + d : end + d] for d in range(1, depth + 1)]
    return np.hstack([stream[begin:end], roots]), np.stack(ahead)


def _agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Share of rows whose largest logit is the same token's."""
    return float(np.mean(one.argmax(-1) == other.argmax(-1)))
