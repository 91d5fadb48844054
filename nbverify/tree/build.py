"""Drafts to trees: DDTree's best-first construction under a node budget, and trees from given parents.

A block-diffusion drafter gives, in one pass, a distribution for each of the next D positions.  DDTree (Ringel and
Romano, arXiv 2604.12989, "Accelerating Speculative Decoding with Block Diffusion Draft Trees") treats the positions
as independent: its surrogate for the target's probability of a path is the product of the drafter's probabilities
along it, so

    score(root) = 0        score(child) = float32(score(parent) + logprob[depth(parent), rank(child)])

A node is reached by verification if its whole path is what the target says.  Under the surrogate, then, the expected
number of accepted drafts is the sum of exp(score) over the tree's nodes, and the best tree of a given number of nodes
consists of the paths with the largest scores.  The paper's Algorithm 1 finds them with a heap: take the best path,
put in its next sibling (same parent, next rank) and its first child (next position, rank 0).

The order in which nodes are taken, which is also their numbering, is total:

    1. larger score                      float32; -inf is never taken
    2. on ties, lower depth
    3. on ties, lower rank
    4. on ties, the parent with the lower node number

With log-probabilities, which are at most 0, a parent precedes its children in it and a sibling its next one (rounding
is monotone): best-first takes exactly the first ``budget`` paths of all in this order.

Ranks are in order: log-probabilities of a position do not increase with the rank.  -inf ends a position early.  NaN,
+inf and ranks out of order are errors.  A slightly positive number, as rounding makes of log 1, is taken as it is.
Two siblings with the same token are both nodes: acceptance follows the lower node number, so the other one is wasted
and nothing is wrong.

The functions here define what kernels/build.py does on the device, bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from math import inf
from typing import Any

import numpy as np

from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError
from nbverify.kernels.geometry import WARP
from nbverify.stages import Runner, Stage, array, check_array, index_array, open_runner
from nbverify.tree.binding import BoundStage, check_int, refuse_overlaps
from nbverify.tree.trees import MAX_NODES, NO_PARENT, Tree, TreeBatch, check_parents

MAX_REQUESTS = 65_535
MAX_DEPTH = 32
MAX_TOP_K = 64
LEAST_THREADS, MOST_THREADS = 128, 1024

Path = tuple[int, ...]  # tokens below the root


class BuildFlag(IntEnum):
    """What the kernel found wrong with a request.  Such a request gets a tree of its root alone.

    So a step still decodes it, one token at a time, and its neighbours do not notice.
    """

    OK = 0
    BUDGET = 1
    """budget + 1 nodes are more than the plan's ``max_nodes``."""
    NOT_A_LOGPROB = 2
    """A log-probability is NaN or +inf."""
    RANK_ORDER = 3
    """A log-probability is larger than that of the rank before."""


def build_from_children(children: Callable[[Path], Iterable[tuple[int, float]]], root_token: int, budget: int) -> Tree:
    """The general form: scores of children depend on the path.  On the host only.

    Parameters
    ----------
    children
        ``children(path)`` gives pairs (token, log-probability) of what may follow, best first; ``path`` are the tokens
        from the root's child on, ``()`` for the root itself.  Called once for each node that is taken while there is
        budget left, and read no further than needed, so it may go on forever.  Log-probabilities become float32.
    root_token
        Token of node 0.
    budget
        Drafted nodes at most.  The tree is smaller if there are no more paths.

    Raises
    ------
    ArgumentError
        A negative budget; a log-probability that is NaN, +inf or larger than the one before.
    """
    _check_budget("budget", budget)
    tokens, parents, depths, scores = [int(root_token)], [NO_PARENT], [0], [np.float32(0)]
    paths: list[Path] = [()]
    # (-score, depth, rank, parent) is the order, and no two entries agree in it; the rest is cargo.
    frontier: list[tuple[float, int, int, int, int, np.float32, Iterator]] = []

    def offer(parent: int, rank: int, before: np.float32, rest: Iterator[tuple[int, float]]) -> None:
        """Put the next child of a node in, if there is one."""
        for token, value in rest:
            logprob = np.float32(value)
            _check_logprob(f"children({paths[parent]})[{rank}]", logprob, before)
            with np.errstate(over="ignore", invalid="ignore"):
                score = scores[parent] + logprob
            if score > -inf:
                cargo = int(token), logprob, rest
                heapq.heappush(frontier, (-float(score), depths[parent] + 1, rank, parent, *cargo))
            return

    while len(parents) <= budget:
        newest = len(parents) - 1
        offer(newest, 0, np.float32(inf), iter(children(paths[newest])))
        if not frontier:
            break
        negative, depth, rank, parent, token, logprob, rest = heapq.heappop(frontier)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        scores.append(np.float32(-negative))
        paths.append((*paths[parent], token))
        offer(parent, rank + 1, logprob, rest)
    return Tree(
        node_tokens=np.array(tokens, np.int64),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int32),
        scores=np.array(scores, np.float32),
    )


def build_tree(tokens: np.ndarray, logprobs: np.ndarray, root_token: int, budget: int) -> Tree:
    """DDTree's tree of one request.

    Parameters
    ----------
    tokens
        ``[D, K]`` integers: candidates for position d + 1 after the root, best first.
    logprobs
        ``[D, K]`` float32: their log-probabilities, not increasing along K.
    root_token
        Token of node 0: the last accepted one.
    budget
        Drafted nodes at most.  ``D * K`` candidates make up to ``K + K^2 + ... + K^D`` paths.

    Raises
    ------
    ArgumentError
        Wrong shapes or dtypes, a negative budget, NaN or +inf, ranks out of order; anywhere in ``logprobs``, whether
        the tree would get there or not.
    """
    _check_drafts(tokens, logprobs, 2)
    _check_budget("budget", budget)
    _check_values("logprobs[", logprobs)
    return _build(tokens, logprobs, root_token, budget)


def build_trees(
    tokens: np.ndarray, logprobs: np.ndarray, root_tokens: np.ndarray, budgets: np.ndarray, max_nodes: int
) -> TreeBatch:
    """DDTree's trees of a batch, in buffers of fixed capacity.  This is what the kernel does.

    Parameters
    ----------
    tokens, logprobs
        ``[B, D, K]``, each request's as in :func:`build_tree`.
    root_tokens
        ``[B]`` integers.
    budgets
        ``[B]`` int32: drafted nodes at most, below ``max_nodes``; a negative one means that the request does not exist,
        and nothing else of it is looked at.
    max_nodes
        N, capacity of a row, root included.

    Raises
    ------
    ArgumentError
        As :func:`build_tree`, naming the request.  The kernel gives it a flag instead (:class:`BuildFlag`).
    """
    _check_drafts(tokens, logprobs, 3)
    num_requests = len(tokens)
    for name, value in (("root_tokens", root_tokens), ("budgets", budgets)):
        if np.shape(value) != (num_requests,) or not _fit_int64(np.asarray(value)):
            raise ArgumentError(name, f"{num_requests} integers", _kind_of(np.asarray(value)))
    batch = TreeBatch.padding(num_requests, max_nodes)
    for b in range(num_requests):
        budget = int(budgets[b])
        if budget < 0:
            continue
        if budget >= max_nodes:
            raise ArgumentError(f"budgets[{b}]", f"below max_nodes={max_nodes}", budget)
        _check_values(f"logprobs[{b}, ", logprobs[b])
        batch.put(b, _build(tokens[b], logprobs[b], int(root_tokens[b]), budget))
    return batch


def tree_from_parents(
    parents: Sequence[int] | np.ndarray,
    tokens: Sequence[int] | np.ndarray,
    scores: Sequence[float] | np.ndarray | None = None,
) -> Tree:
    """A tree that another drafter made: EAGLE's, an n-gram lookup's, Medusa's static one.

    Parameters
    ----------
    parents
        ``[n]`` integers, -1 for node 0 and no other.  Nodes may be listed in any order; their numbers stay.
    tokens
        ``[n]`` integers.
    scores
        ``[n]``: log-probabilities of the paths; NaN if they are not known.

    Raises
    ------
    ArgumentError
        No tree: see :func:`nbverify.tree.trees.check_parents`.
    """
    depths = check_parents(parents)
    shape = (len(depths),)
    if np.shape(tokens) != shape or not _fit_int64(np.asarray(tokens)):
        raise ArgumentError("tokens", f"{shape[0]} integers, one a node", _kind_of(np.asarray(tokens)))
    if scores is not None and np.shape(scores) != shape:
        raise ArgumentError("scores", f"{shape[0]} numbers, one a node", _kind_of(np.asarray(scores)))
    return Tree(
        node_tokens=np.array(tokens, np.int64),
        parents=np.array(parents, np.int32),
        depths=depths,
        scores=np.full(shape, np.nan, np.float32) if scores is None else np.array(scores, np.float32),
    )


def _build(tokens: np.ndarray, logprobs: np.ndarray, root_token: int, budget: int) -> Tree:
    """Of checked arguments."""

    def children(path: Path) -> Iterable[tuple[int, float]]:
        position = len(path)
        return zip(tokens[position], logprobs[position], strict=True) if position < len(tokens) else ()

    return build_from_children(children, root_token, budget)


def _check_budget(name: str, budget: int) -> None:
    if budget < 0:
        raise ArgumentError(name, ">= 0 drafted nodes", budget)


def _check_drafts(tokens: np.ndarray, logprobs: np.ndarray, ndim: int) -> None:
    if not isinstance(logprobs, np.ndarray) or logprobs.dtype != np.float32 or logprobs.ndim != ndim:
        raise ArgumentError("logprobs", f"a float32 array of {ndim} axes", _kind_of(np.asarray(logprobs)))
    if not isinstance(tokens, np.ndarray) or not _fit_int64(tokens) or tokens.shape != logprobs.shape:
        raise ArgumentError("tokens", f"integers {list(logprobs.shape)}, as logprobs", _kind_of(np.asarray(tokens)))


def _check_values(prefix: str, logprobs: np.ndarray) -> None:
    """Of one request, ``[D, K]``: NaN and +inf first, as the kernel does."""
    for d, k in np.argwhere(~(logprobs < inf)):
        _check_logprob(f"{prefix}{d}, {k}]", logprobs[d, k], np.float32(inf))
    for d, k in np.argwhere(logprobs[:, 1:] > logprobs[:, :-1]):
        _check_logprob(f"{prefix}{d}, {k + 1}]", logprobs[d, k + 1], logprobs[d, k])


def _check_logprob(name: str, value: np.float32, before: np.float32) -> None:
    if not value < inf:
        raise ArgumentError(name, "a log-probability", value)
    if value > before:
        raise ArgumentError(name, f"at most that of the rank before, {before}", value)


def _fit_int64(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu" and np.can_cast(value.dtype, np.int64)


def _kind_of(value: np.ndarray) -> str:
    return f"{value.dtype} {list(value.shape)}"


# --- on the device ---------------------------------------------------------------------------------------------------

PARAMETERS = (
    *index_array("tokens"),
    array("logprobs", "float32"),
    *index_array("root_tokens"),
    array("budgets", "int32"),
    array("num_nodes", "int32"),
    array("parents", "int32"),
    array("node_tokens", "int64"),
    array("depths", "int32"),
    array("scores", "float32"),
    array("flags", "int32"),
)
WRITTEN = ("num_nodes", "parents", "node_tokens", "depths", "scores", "flags")


class BuildPlan:
    """:func:`build_trees` on a device, in static buffers.

    Parameters
    ----------
    max_requests
        B, rows of every buffer; requests that do not exist have a negative budget.
    depth
        D, positions that the drafter gives: up to 32.  A request with fewer has -inf in the others.
    top_k
        K, candidates a position: up to 64.
    max_nodes
        N, nodes of a tree at most, root included: up to 1025.
    device
        None is the current GPU, an int an ordinal, "emulator" or an Emulator the CPU; or a runner.

    Raises
    ------
    ArgumentError
        A size out of its range.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        depth: int,
        top_k: int,
        max_nodes: int,
        device: int | str | Emulator | Runner | None = None,
    ):
        self.max_requests = check_int("max_requests", max_requests, 1, MAX_REQUESTS)
        self.depth = check_int("depth", depth, 1, MAX_DEPTH)
        self.top_k = check_int("top_k", top_k, 1, MAX_TOP_K)
        self.max_nodes = check_int("max_nodes", max_nodes, 1, MAX_NODES)
        self.runner = open_runner(device)

    @property
    def stage(self) -> Stage:
        """The kernel."""
        return stage(self.depth, self.top_k, self.max_nodes)

    def bind(
        self,
        *,
        tokens: Any,
        logprobs: Any,
        root_tokens: Any,
        budgets: Any,
        num_nodes: Any,
        parents: Any,
        node_tokens: Any,
        depths: Any,
        scores: Any,
        flags: Any,
    ) -> BoundStage:
        """Check the buffers, compile, pack; nothing is launched.

        Parameters
        ----------
        tokens, root_tokens, budgets, logprobs
            Read: ``[B, D, K]`` and ``[B]`` int32 or int64, ``[B]`` int32, ``[B, D, K]`` float32.
        num_nodes, parents, node_tokens, depths, scores
            Written, padding too: as in :class:`nbverify.tree.trees.TreeBatch`.
        flags
            Written: ``[B]`` int32, of :class:`BuildFlag`.

        Raises
        ------
        ArgumentError
            A wrong dtype, shape, layout or device, or a written buffer that is read-only or shares memory with
            another one.
        """
        rows = (self.max_requests,)
        drafts, nodes = (*rows, self.depth, self.top_k), (*rows, self.max_nodes)
        integers = ("int32", "int64")
        buffers = {
            "tokens": (tokens, integers, drafts),
            "logprobs": (logprobs, ("float32",), drafts),
            "root_tokens": (root_tokens, integers, rows),
            "budgets": (budgets, ("int32",), rows),
            "num_nodes": (num_nodes, ("int32",), rows),
            "parents": (parents, ("int32",), nodes),
            "node_tokens": (node_tokens, ("int64",), nodes),
            "depths": (depths, ("int32",), nodes),
            "scores": (scores, ("float32",), nodes),
            "flags": (flags, ("int32",), rows),
        }
        infos = {
            name: check_array(name, value, dtypes, shape, host=self.runner.emulated)
            for name, (value, dtypes, shape) in buffers.items()
        }
        refuse_overlaps(infos, WRITTEN)
        given = {name: value for name, (value, _, _) in buffers.items()}
        return BoundStage(self.runner.bind(self.stage, self.max_requests, given, {}))


def stage(depth: int, top_k: int, max_nodes: int) -> Stage:
    """The kernel for these sizes: a thread for each entry of the table, up to 1024, so that one trip fetches it."""
    entries = (depth + 1) * (top_k + 1)
    threads = min(max(LEAST_THREADS, -(-entries // WARP) * WARP), MOST_THREADS)
    return Stage(
        "build",
        "nbverify.tree.kernels.build",
        PARAMETERS,
        threads=threads,
        constants={
            "depth": depth,
            "top_k": top_k,
            "max_nodes": max_nodes,
            "threads": threads,
            "bad_budget": int(BuildFlag.BUDGET),
            "bad_logprob": int(BuildFlag.NOT_A_LOGPROB),
            "bad_order": int(BuildFlag.RANK_ORDER),
        },
    )
