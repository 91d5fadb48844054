"""A draft tree on the host: what it consists of, and whether a list of parents is one.

Node 0 is the root, the last accepted token; the others are drafts.  ``parents[i]`` is the node before node i on its
path, -1 for the root.  Apart from the root, nodes may be listed in any order, children before their parents too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbverify.errors import ArgumentError

NO_PARENT = -1
MAX_NODES = 1025  # of a tree on the device: a root, and a budget of 1024


@dataclass(frozen=True, eq=False)
class Tree:
    """The draft tree of one request, n nodes; made by the functions of build.py."""

    node_tokens: NDArray[np.int64]
    """``[n]`` int64."""
    parents: NDArray[np.int32]
    """``[n]`` int32; -1 for the root."""
    depths: NDArray[np.int32]
    """``[n]`` int32: edges to the root."""
    scores: NDArray[np.float32]
    """``[n]`` float32: log-probability of the path from the root as the drafter sees it; 0 for the root."""

    @property
    def num_nodes(self) -> int:
        """With the root."""
        return len(self.parents)

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to ``node``."""
        nodes = [node]
        while self.parents[nodes[-1]] != NO_PARENT:
            nodes.append(int(self.parents[nodes[-1]]))
        return nodes[::-1]


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The trees of a batch as static buffers hold them: B requests, at most N nodes each.

    Row b belongs to request b, and its first ``num_nodes[b]`` entries count.  The others are -1 in ``parents``, 0 in
    ``node_tokens`` and ``depths``, -inf in ``scores``.
    """

    num_nodes: NDArray[np.int32]
    """``[B]`` int32: with the root; 0 for a request that does not exist."""
    parents: NDArray[np.int32]
    """``[B, N]`` int32."""
    node_tokens: NDArray[np.int64]
    """``[B, N]`` int64."""
    depths: NDArray[np.int32]
    """``[B, N]`` int32."""
    scores: NDArray[np.float32]
    """``[B, N]`` float32."""

    @classmethod
    def padding(cls, max_requests: int, max_nodes: int) -> TreeBatch:
        """A batch without a request."""
        shape = max_requests, max_nodes
        return cls(
            num_nodes=np.zeros(max_requests, np.int32),
            parents=np.full(shape, NO_PARENT, np.int32),
            node_tokens=np.zeros(shape, np.int64),
            depths=np.zeros(shape, np.int32),
            scores=np.full(shape, -np.inf, np.float32),
        )

    def put(self, request: int, tree: Tree) -> None:
        """Write a tree into a row that is padding so far."""
        n = tree.num_nodes
        self.num_nodes[request] = n
        for name in ("parents", "node_tokens", "depths", "scores"):
            getattr(self, name)[request, :n] = getattr(tree, name)

    def tree(self, request: int) -> Tree:
        """A copy of the tree of one request that exists."""
        n = int(self.num_nodes[request])
        rows = {
            name: getattr(self, name)[request, :n].copy() for name in ("node_tokens", "parents", "depths", "scores")
        }
        return Tree(**rows)


def check_parents(
    parents: Sequence[int] | np.ndarray, num_nodes: int | None = None, name: str = "parents"
) -> NDArray[np.int32]:
    """The depths ``[num_nodes]`` int32 of a valid tree; an error for anything else, after O(num_nodes) steps.

    ``parents`` may be longer than ``num_nodes`` (default: as long): entries from there on are padding, never read.

    Raises ArgumentError, which names an entry ``name[i]``
        no root         node 0 has a parent
        two roots       another node has the parent -1
        out of range    a parent below -1, or no entry of ``parents``
        orphan          a parent in the padding: its node does not exist
        cycle           following the parents of a node never ends at the root; its own parent too is such a cycle
    """
    given = np.asarray(parents)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ArgumentError(name, "a list of integers", f"{given.dtype} {list(given.shape)}")
    n = len(given) if num_nodes is None else num_nodes
    if not 1 <= n <= len(given):
        raise ArgumentError("num_nodes", f"1 to {len(given)}, the length of {name}", n)
    links = [int(parent) for parent in given[:n]]
    for node, parent in enumerate(links):
        if (parent == NO_PARENT) != (node == 0):
            expected = f"{NO_PARENT}, as node 0 is the root" if node == 0 else f"no second root: 0 to {n - 1}"
            raise ArgumentError(f"{name}[{node}]", expected, parent)
        if node > 0 and not 0 <= parent < n:
            expected = f"a node, 0 to {n - 1}"
            is_orphan = n <= parent < len(given)
            raise ArgumentError(f"{name}[{node}]", expected, f"{parent}, which is padding" if is_orphan else parent)
    return _depths(links, name)


UNKNOWN, ON_WALK = -1, -2  # in place of a depth


def _depths(links: list[int], name: str) -> NDArray[np.int32]:
    """Depths by walking up from each node to one whose depth is known: every node is walked over once."""
    depths = [UNKNOWN] * len(links)
    depths[0] = 0
    for start in range(len(links)):
        walk, node = [], start
        while depths[node] == UNKNOWN:
            depths[node] = ON_WALK
            walk.append(node)
            node = links[node]
        if depths[node] == ON_WALK:
            raise ArgumentError(f"{name}[{node}]", "a path to the root", f"{links[node]}, which closes a cycle")
        depth = depths[node]
        for passed in reversed(walk):
            depth += 1
            depths[passed] = depth
    return np.array(depths, np.int32)
