"""HostStep: the step of :class:`nbverify.tree.VerifyStep` from the numpy definitions of its parts, without a device.

It has the same buffers under the same names, so that one loop drives both.  Rows of requests follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbverify.stages import HostArray
from nbverify.tree import Plane, accept_greedy, build_trees, compact, prefix_indices, tree_buffers

# (tokens, positions, the verify kernel's buffers) of all rows -> what the target says after each.
HostModel = Callable[[np.ndarray, np.ndarray, dict[str, Any]], np.ndarray]


class HostStep:
    """Sizes, buffers and duties are those of ``VerifyStep``; window slots are taken from ``req_to_token``.

    ``hidden`` and ``logits`` are what the model left there, by row.
    """

    def __init__(
        self, *, max_requests: int, max_nodes: int, depth: int, top_k: int, req_to_token: np.ndarray,
        planes: Sequence[Plane],
    ):  # fmt: skip
        self.max_requests, self.max_nodes, self.depth, self.top_k = max_requests, max_nodes, depth, top_k
        self.req_to_token, self.planes = req_to_token, planes
        drafts = (max_requests, depth, top_k)
        self.tokens, self.logprobs = _zeros(drafts, np.int64), _zeros(drafts, np.float32)
        self.budgets = np.full(max_requests, -1, np.int32).view(HostArray)
        self.root_tokens, self.prefix_lens = _zeros((max_requests,), np.int64), _zeros((max_requests,), np.int64)
        self.req_pool_indices = np.arange(max_requests).view(HostArray)
        self.hidden: Any = None
        self.logits: Any = None
        self._flags: dict[str, np.ndarray] = {}
        self._model: HostModel | None = None

    def capture(self, model: HostModel) -> None:
        """Keep the model for :meth:`replay`."""
        self._model = model

    def replay(self) -> None:
        """One step, with what stands in the buffers now."""
        assert self._model is not None
        trees = build_trees(self.tokens, self.logprobs, self.root_tokens, self.budgets, self.max_nodes)
        lengths: dict[str, Any] = {"req_to_token": self.req_to_token, "req_pool_indices": self.req_pool_indices}
        prefix_lens = self.prefix_lens.get()
        listed = prefix_indices(**lengths, prefix_lens=prefix_lens, capacity=self.req_to_token.size)
        made = tree_buffers(trees.parents, trees.num_nodes, prefix_lens, mask="tree")
        rows = [(b, j) for b in range(self.max_requests) for j in range(trees.num_nodes[b])]
        tokens = np.array([trees.node_tokens[row] for row in rows], np.int64)
        slots = np.array([self.req_to_token[b, prefix_lens[b] + j] for b, j in rows], np.int64)
        buffers = {
            "kv_indptr": listed.kv_indptr, "kv_indices": listed.kv_indices, "qo_indptr": made.qo_indptr,
            "out_cache_loc": slots, "custom_mask": made.custom_mask, "mask_indptr": made.mask_indptr,
        }  # fmt: skip
        target = self._model(tokens, made.positions, buffers)
        accepted = accept_greedy(
            trees.parents, trees.node_tokens, trees.num_nodes, made.qo_indptr, target, max_depth=self.depth
        )
        done = compact(
            self.planes, out_cache_loc=slots, qo_indptr=made.qo_indptr, accept_nodes=accepted.accept_nodes,
            accept_lens=accepted.accept_lens, num_nodes=trees.num_nodes, prefix_lens=prefix_lens, **lengths,
        )  # fmt: skip
        self.prefix_lens.set(done.new_prefix_lens)
        self.root_tokens.set(np.where(accepted.accept_lens > 0, accepted.bonus_tokens, self.root_tokens))
        self.num_nodes, self.node_tokens = trees.num_nodes.view(HostArray), trees.node_tokens.view(HostArray)
        self.parents, self.qo_indptr = trees.parents.view(HostArray), made.qo_indptr.view(HostArray)
        self.accept_nodes, self.accept_lens = (
            array.view(HostArray) for array in (accepted.accept_nodes, accepted.accept_lens)
        )
        self._flags = {"indices": listed.flags, "accept": accepted.flags, "compact": done.flags}

    def problems(self) -> list[str]:
        """What was wrong with the last step's data."""
        return [f"{part}: request {b}: {f[b]}" for part, f in self._flags.items() for b in np.flatnonzero(f).tolist()]


def _zeros(shape: tuple[int, ...], dtype: Any) -> HostArray:
    return np.zeros(shape, dtype).view(HostArray)
