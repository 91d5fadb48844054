"""Greedy decoding of several texts at once, with draft trees or without: the loop around a step.

Between two steps the host does two things: it reads the tokens that were accepted, and writes drafts.  Everything else
is in the step, on whichever device the model is (model.py, kernel_model.py).  What comes out is what plain greedy
decoding gives, whatever the drafts were: a draft is taken only where the target says the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from examples.smollm2.drafters import Drafter, pack
from examples.smollm2.model import SCRATCH_PAGE
from nbverify.errors import ArgumentError, NbverifyError

NOBODY = -1  # the budget of a row without a request


class Grown(NamedTuple):
    """What a step added to a text: ``tokens``, of which the first ``drafted`` were drafts."""

    text: int
    tokens: list[int]
    drafted: int


@dataclass
class Request:
    """A text that is being decoded."""

    text: int
    ids: list[int]
    end: int  # length at which it is finished
    pages: np.ndarray
    hidden: Any = field(repr=False)  # residual stream at the last token but one


class Decoder:
    """A model, a drafter, and the requests that are in work.

    Parameters
    ----------
    model
        NumpyModel or KernelModel; one decoder at a time uses it.
    drafter, budget
        Trees of up to ``budget`` drafted nodes.  Without a drafter: plain decoding, a token a step.
    end_token
        Ends a text; None: only its length does.
    seed
        Of the order in which pages are handed out.
    """

    def __init__(
        self, model: Any, drafter: Drafter | None = None, budget: int = 0, *, end_token: int | None = None,
        seed: int = 0,
    ):  # fmt: skip
        if type(budget) is not int or (budget < 1 if drafter else budget != 0):
            raise ArgumentError("budget", "an int >= 1" if drafter else "0 without a drafter", repr(budget))
        self.model, self.drafter, self.budget, self.end_token = model, drafter, budget, end_token
        depth, top_k = (min(drafter.depth, budget), drafter.top_k) if drafter else (1, 1)
        self.depth, self.top_k = depth, top_k
        self.step = model.open_step(max_nodes=budget + 1, depth=depth, top_k=top_k)
        self.requests: dict[int, Request] = {}  # by row of the step
        pages = np.random.default_rng(seed).permutation(model.num_pages)
        self.free_pages = pages[pages != SCRATCH_PAGE].tolist()
        self.steps = 0
        for row in range(model.max_requests):
            model.set_slots(row, np.zeros(0, np.int32))

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Grown]:
        """Decode all texts, as many at once as the model has rows: when one is finished the next enters."""
        waiting = list(enumerate(prompts))[::-1]
        while waiting or self.requests:
            while waiting and len(self.requests) < self.model.max_requests:
                text, prompt = waiting.pop()
                self.enter(text, prompt, max_tokens)
            yield from self.advance()

    def enter(self, text: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Give a text a free row and pages for all that it may become, and its prompt to the model."""
        model = self.model
        ids, most = [int(token) for token in prompt], len(prompt) + max_tokens + self.budget + 1
        if not ids or max_tokens < 1:
            raise ArgumentError("prompt, max_tokens", "a token at least, of each", f"{len(ids)}, {max_tokens}")
        if most > model.max_len:
            room = model.max_len - max_tokens - self.budget - 1
            raise ArgumentError("prompt", f"at most {room} tokens beside max_tokens and a tree", len(ids))
        row = next(row for row in range(model.max_requests) if row not in self.requests)
        pages = np.array([self.free_pages.pop() for _ in range(-(-most // model.page_size))])
        slots = (pages[:, None] * model.page_size + np.arange(model.page_size)).ravel()
        model.set_slots(row, slots[:most])
        hidden = model.prefill(row, ids[:-1])
        last = hidden[-1] if len(hidden) else 0 * model.norm  # a text of one token has nothing before it
        self.requests[row] = Request(text, ids, len(ids) + max_tokens, pages, last)
        self._write(row, prefix_lens=len(ids) - 1, root_tokens=ids[-1], budgets=self.budget)

    def advance(self) -> list[Grown]:
        """One step: every request grows by one token at least."""
        step, requests = self.step, self.requests
        if self.drafter is not None:
            self._draft(self.drafter)
        step.replay()
        self.steps += 1
        lens, paths = step.accept_lens.get(), step.accept_nodes.get()
        nodes, roots = step.node_tokens.get(), step.root_tokens.get()
        if any(lens[row] == 0 for row in requests):
            raise NbverifyError("; ".join(step.problems()) or "a step without a token")
        if self.drafter is not None:
            first = step.qo_indptr.get()
            for row, request in requests.items():  # valid until the next step, which drafting comes before
                request.hidden = step.hidden[int(first[row] + paths[row, lens[row] - 1])]
        grown = []
        for row, request in list(requests.items()):
            tokens = [*nodes[row, paths[row, 1 : lens[row]]].tolist(), int(roots[row])]
            tokens = tokens[: request.end - len(request.ids)]
            if self.end_token in tokens:
                tokens = tokens[: tokens.index(self.end_token) + 1]
            request.ids += tokens
            grown.append(Grown(request.text, tokens, min(len(tokens), int(lens[row]) - 1)))
            if len(request.ids) == request.end or tokens[-1] == self.end_token:
                self.leave(row)
        return grown

    def leave(self, row: int) -> None:
        """A text is finished: its row and its pages are free again."""
        self.free_pages += self.requests.pop(row).pages.tolist()
        self.model.set_slots(row, np.zeros(0, np.int32))
        self._write(row, prefix_lens=0, root_tokens=0, budgets=NOBODY)

    def top_two(self, ids: Sequence[int]) -> tuple[list[int], float]:
        """The target's two best tokens after a text, and how far apart their logits are; no text may be in work."""
        self.enter(0, ids, 1)
        (row,) = self.requests
        self._write(row, budgets=0)
        self.step.replay()
        logits = self.step.logits.get()[self.step.qo_indptr.get()[row]]
        self.leave(row)
        best = np.argsort(-logits, kind="stable")[:2]
        return best.tolist(), float(logits[best[0]] - logits[best[1]])

    def _draft(self, drafter: Drafter) -> None:
        present = self.requests.values()
        proposed = drafter.propose([one.ids for one in present], [one.hidden for one in present])
        of_row = dict(zip(self.requests, proposed, strict=True))
        drafts = [of_row.get(row, []) for row in range(self.model.max_requests)]
        tokens, logprobs = pack(drafts, self.depth, self.top_k)
        self.step.tokens.set(tokens)
        self.step.logprobs.set(logprobs)

    def _write(self, row: int, **values: int) -> None:
        """One request's number in some buffers of the step."""
        for name, value in values.items():
            buffer = getattr(self.step, name)
            numbers = buffer.get()
            numbers[row] = value
            buffer.set(numbers)
