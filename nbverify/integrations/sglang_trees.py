"""DDTree for SGLang: a drafter's logits by position -> the tensors that its tree verify expects.

For those who carry a DDTree patch.  SGLang's verify input (``EagleVerifyInput`` and its kin) wants, for B requests of
N = ``draft_token_num`` rows each, whatever a tree's real size:

    draft_token             [B * N] int64    row 0 of a request is its root, the last accepted token
    custom_mask             flat             FULL: [N, prefix + N] bytes a request; TREE (QLEN_ONLY): [N, N]
    positions               [B * N] int64    prefix length + depth
    retrieve_index          [B, N] int64     b * N + j
    retrieve_next_token     [B, N] int64     first child within the request, or -1
    retrieve_next_sibling   [B, N] int64     next sibling, or -1

Nodes stand in the order in which best-first takes them: parents before children, which the stock Triton kernel relies
on.  Rows without a node see nothing, have token 0 and no links, so acceptance never reaches them.

:func:`verify_input` is the numpy definition; :class:`DraftTrees` does it on a GPU in static buffers, with two launches
and torch's top-k, and no look at the host: it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError
from nbverify.spec import Mask
from nbverify.stages import GpuRunner, open_runner
from nbverify.tree import BuildPlan, MaskPlan, build_trees, tree_buffers
from nbverify.tree.binding import check_int
from nbverify.tree.trees import MAX_NODES

LAYOUTS = (Mask.FULL, Mask.TREE)
NO_REQUEST = -1  # a budget


@dataclass(frozen=True, eq=False)
class VerifyInput:
    """What SGLang's verify input is made from; see the head of this module."""

    draft_token: Any
    custom_mask: Any
    positions: Any
    retrieve_index: Any
    retrieve_next_token: Any
    retrieve_next_sibling: Any
    draft_token_num: int
    num_nodes: Any
    """[B] int32: nodes of each tree, the root included."""

    def fields(self) -> dict[str, Any]:
        """Keyword arguments of the same names for SGLang's class."""
        names = ("draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token",
                 "retrieve_next_sibling", "draft_token_num")  # fmt: skip
        return {name: getattr(self, name) for name in names}


def top_logprobs(logits: Any, top_k: int) -> tuple[Any, Any]:
    """Tokens int64 and log-probabilities float32 [B, D, top_k], best first, of logits [B, D, vocabulary].

    Numpy arrays or torch tensors.  Ties: numpy takes the lower token first, torch any.
    """
    if len(logits.shape) != 3 or not 1 <= top_k <= logits.shape[2]:
        raise ArgumentError("logits", f"[B, D, vocabulary of {top_k} or more]", list(logits.shape))
    if isinstance(logits, np.ndarray):
        wide = logits.astype(np.float64)
        tokens = np.argsort(-wide, axis=-1, kind="stable")[..., :top_k]
        largest = wide.max(-1, keepdims=True)
        total = largest + np.log(np.exp(wide - largest).sum(-1, keepdims=True))
        return tokens, (np.take_along_axis(wide, tokens, -1) - total).astype(np.float32)
    wide = logits.float()
    best = wide.topk(top_k, dim=-1)  # sorted; subtracting one number from all keeps the order
    return best.indices, best.values - wide.logsumexp(-1, keepdim=True)


def verify_input(
    logits: np.ndarray,
    root_tokens: np.ndarray,
    prefix_lens: np.ndarray,
    *,
    budget: int,
    top_k: int,
    mask: Mask | str = Mask.FULL,
) -> VerifyInput:
    """The definition, in numpy: trees of up to ``budget`` drafts from logits [B, D, vocabulary].

    Raises ArgumentError for wrong shapes, a budget below 1, NaN among the logits, or a mask but FULL and TREE.
    """
    layout = _layout(mask)
    if budget < 1:
        raise ArgumentError("budget", ">= 1 drafted nodes", budget)
    nodes = budget + 1
    tokens, logprobs = top_logprobs(logits, top_k)
    budgets = np.full(len(tokens), budget, np.int32)
    trees = build_trees(tokens, logprobs, np.asarray(root_tokens), budgets, nodes)
    made = tree_buffers(trees.parents, trees.num_nodes, np.asarray(prefix_lens), mask=layout, padded=True)
    return VerifyInput(
        draft_token=trees.node_tokens.ravel(),
        custom_mask=made.custom_mask,
        positions=made.positions,
        retrieve_index=made.retrieve_index,
        retrieve_next_token=made.retrieve_next_token,
        retrieve_next_sibling=made.retrieve_next_sibling,
        draft_token_num=nodes,
        num_nodes=trees.num_nodes,
    )


class DraftTrees:
    """:func:`verify_input` on a device, in static buffers.

    Parameters
    ----------
    max_requests, depth, top_k, budget
        Requests of a batch, positions of the drafter (up to 32), candidates of each (up to 64), drafted nodes (up to
        1024).
    max_prefix
        Committed tokens of a request at most.
    mask
        FULL, or TREE where the backend says ``QLEN_ONLY``.
    custom_mask
        A flat uint8 or bool buffer to write, such as ``backend.verify_mask.buffer``; None: one of its own.  A request
        that it has no room for is a problem of that request.
    fill_prefix
        Write the prefix columns of FULL too.  Only kernels that read them need that: SGLang's deterministic one does,
        its default Triton kernel and nbverify do not.
    device
        None is the current GPU, an int an ordinal, "emulator" or an Emulator the CPU, on numpy arrays.

    Raises
    ------
    ArgumentError
        A size out of its range, a mask but FULL and TREE, a buffer of another kind.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        depth: int,
        top_k: int,
        budget: int,
        max_prefix: int,
        mask: Mask | str = Mask.FULL,
        custom_mask: Any = None,
        fill_prefix: bool = False,
        device: int | str | Emulator | None = None,
    ):
        layout = _layout(mask)
        self.max_requests, self.depth, self.top_k = max_requests, depth, top_k
        self.budget = check_int("budget", budget, 1, MAX_NODES - 1)
        self.nodes = nodes = budget + 1
        self._runner = runner = open_runner(device)
        build = BuildPlan(max_requests=max_requests, depth=depth, top_k=top_k, max_nodes=nodes, device=runner)
        masks = MaskPlan(
            max_requests=max_requests, max_nodes=nodes, max_kv_len=max_prefix + nodes, mask=layout, padded=True,
            fill_prefix=fill_prefix, device=runner,
        )  # fmt: skip
        requests, of_nodes = (max_requests,), (max_requests, nodes)
        drafts = (max_requests, depth, top_k)
        sizes: dict[str, tuple[tuple[int, ...], str]] = {
            "tokens": (drafts, "int64"), "logprobs": (drafts, "float32"), "root_tokens": (requests, "int64"),
            "budgets": (requests, "int32"), "prefix_lens": (requests, "int64"), "num_nodes": (requests, "int32"),
            "parents": (of_nodes, "int32"), "node_tokens": (of_nodes, "int64"), "depths": (of_nodes, "int32"),
            "scores": (of_nodes, "float32"), "flags": (requests, "int32"), "mask_flags": (requests, "int32"),
            "mask_indptr": ((max_requests + 1,), "int64"), "qo_indptr": ((max_requests + 1,), "int64"),
            "positions": ((max_requests * nodes,), "int64"), "retrieve_index": (of_nodes, "int64"),
            "retrieve_next_token": (of_nodes, "int64"), "retrieve_next_sibling": (of_nodes, "int64"),
        }  # fmt: skip
        self._own = {name: runner.empty(shape, dtype) for name, (shape, dtype) in sizes.items()}
        own = self._own
        if custom_mask is None:
            custom_mask = runner.empty((masks.max_mask_elements,), "uint8")
        self._mask = custom_mask
        tree = {"num_nodes": own["num_nodes"], "parents": own["parents"], "depths": own["depths"]}
        inputs = {name: own[name] for name in ("tokens", "logprobs", "root_tokens", "budgets")}
        links = {name: own[name] for name in own if name.startswith("retrieve")}
        places = {name: own[name] for name in ("prefix_lens", "mask_indptr", "qo_indptr", "positions")}
        self._stages = (
            build.bind(**tree, **inputs, node_tokens=own["node_tokens"], scores=own["scores"], flags=own["flags"]),
            masks.bind(**tree, **links, **places, custom_mask=custom_mask, flags=own["mask_flags"]),
        )
        self._views = {name: self._view(array) for name, array in (*own.items(), ("custom_mask", custom_mask))}

    def make(self, logits: Any, root_tokens: Any, prefix_lens: Any, stream: Any = None) -> VerifyInput:
        """Write a batch of B <= max_requests requests; the result are views of the static buffers.

        On a GPU the arguments are torch tensors, and ``stream`` is torch's current one if it is None.
        Nothing waits, and no data can raise: :meth:`problems` tells afterwards.
        """
        tokens, logprobs = top_logprobs(logits, self.top_k)
        requests = tokens.shape[0]
        if requests > self.max_requests or tokens.shape[1] != self.depth:
            expected = f"at most {self.max_requests} requests of {self.depth} positions"
            raise ArgumentError("logits", expected, list(logits.shape))
        for name, value in (("root_tokens", root_tokens), ("prefix_lens", prefix_lens)):
            if tuple(value.shape) != (requests,):
                raise ArgumentError(name, f"shape [{requests}]", list(value.shape))
        views = self._views
        given = {"tokens": tokens, "logprobs": logprobs, "root_tokens": root_tokens, "prefix_lens": prefix_lens}
        for name, value in given.items():
            views[name][:requests] = value
        views["budgets"][:requests] = self.budget
        views["budgets"][requests:] = NO_REQUEST
        if stream is None and not self._runner.emulated:
            import torch

            stream = torch.cuda.current_stream()
        for stage in self._stages:
            stage.launch(stream)
        rows = requests * self.nodes
        return VerifyInput(
            draft_token=views["node_tokens"].reshape(-1)[:rows],
            custom_mask=views["custom_mask"],
            positions=views["positions"][:rows],
            retrieve_index=views["retrieve_index"][:requests],
            retrieve_next_token=views["retrieve_next_token"][:requests],
            retrieve_next_sibling=views["retrieve_next_sibling"][:requests],
            draft_token_num=self.nodes,
            num_nodes=views["num_nodes"][:requests],
        )

    def problems(self) -> list[str]:
        """What was wrong with the data of the last batch, a line for each request; waits for the device."""
        from nbverify.tree.build import BuildFlag
        from nbverify.tree.masks import TreeFault

        found = []
        for name, kind in (("flags", BuildFlag), ("mask_flags", TreeFault)):
            flags = self._own[name].get()
            found += [f"request {b}: {kind(int(flags[b])).name}" for b in np.flatnonzero(flags).tolist()]
        return found

    def _view(self, array: Any) -> Any:
        """The array as what the caller has: numpy in the emulator, else a torch tensor of the same memory."""
        if not isinstance(self._runner, GpuRunner):
            return np.asarray(array)
        import torch

        if isinstance(array, torch.Tensor):
            return array
        return torch.as_tensor(array, device=f"cuda:{self._runner.device.ordinal}")


def _layout(mask: Mask | str) -> Mask:
    try:
        layout = Mask(mask)
    except ValueError:
        layout = Mask.NONE
    if layout not in LAYOUTS:
        raise ArgumentError("mask", f"one of {[one.value for one in LAYOUTS]}", repr(mask))
    return layout
