"""Trees to buffers: masks, positions, row numbers and child links of a batch of draft trees.

A tree is a list of parents: ``parents[i]`` is the node above node ``i``, and -1 for the root, which is node 0.  The
other nodes may be listed in any order, a child before its parent too.  From that list, everything that the verify
kernel and the acceptance read is made here:

* plain functions, which define it: :func:`ancestor_matrix`, :func:`node_depths`, :func:`first_children`,
  :func:`next_siblings` for one tree, :func:`write_tree_buffers` and :func:`tree_buffers` for a batch;
* :class:`MaskPlan`, which makes the same bits on the device in one launch, into buffers that stay where they are.

Two layouts of rows.  Packed: request ``b`` has ``num_nodes[b]`` rows.  Padded: every request has ``max_nodes`` rows and
its mask block is that of ``max_nodes`` nodes, as in SGLang, whose graphs have a fixed number of rows a request; the
rows from ``num_nodes[b]`` on are padding, and see no draft.

The layouts of ``custom_mask`` are those of :class:`nbverify.Mask`.  ``retrieve_index``, ``retrieve_next_token`` and
``retrieve_next_sibling`` are those of SGLang's ``build_tree_kernel_efficient``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from nbverify import reference
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError
from nbverify.kernels.geometry import WARP
from nbverify.spec import INT32_MAX, Mask
from nbverify.stages import Runner, Stage, array, check_array, index_array, open_runner, scalar
from nbverify.tree.binding import BoundStage, check_int, refuse_overlaps
from nbverify.tree.trees import MAX_NODES

THREADS = 128
SHARED_BYTES_PER_NODE = 12  # the parent, and two copies of the jump
COLUMNS_PER_WALK = WARP * reference.WORD_BITS  # of a mask row: a lane holds a word of them
ROWS_PER_WARP = 2
MAX_BLOCKS_PER_REQUEST = 32  # each looks at the whole tree: for a large one, longer turns are better than more blocks
INDEX_DTYPES = ("int32", "int64")
WRITTEN = (
    "custom_mask", "mask_indptr", "qo_indptr", "positions", "depths", "retrieve_index", "retrieve_next_token",
    "retrieve_next_sibling", "flags",
)  # fmt: skip


class TreeFault(IntEnum):
    """What ``flags[b]`` says of a request; 0 is none of these.  Where several apply, it is the highest number."""

    CYCLE = 1  # a node that is its own ancestor, or is below one
    ORPHAN = 2  # a parent in [num_nodes, max_nodes): the tree has no such node
    PARENT_RANGE = 3  # a parent outside [-1, max_nodes)
    SECOND_ROOT = 4  # parent -1 of a node other than 0
    ROOT = 5  # parents[0] is not -1
    CAPACITY = 6  # the request's rows do not fit into positions, or its block not into custom_mask
    PREFIX_LEN = 7  # a negative prefix length, or prefix + rows above max_kv_len
    NUM_NODES = 8  # outside [0, max_nodes]: taken as 0


EXPECTED = {
    TreeFault.CYCLE: "a path that ends at node 0",
    TreeFault.ORPHAN: "a node of the tree, in [0, num_nodes={num_nodes})",
    TreeFault.PARENT_RANGE: "a node, in [0, max_nodes={max_nodes})",
    TreeFault.SECOND_ROOT: "a node: -1 is the parent of node 0 alone",
    TreeFault.ROOT: "-1: node 0 is the root",
}


# ---- one tree


def find_fault(parents: np.ndarray, num_nodes: int) -> tuple[TreeFault, int] | None:
    """The fault of a tree with the highest number, and the first node that has it; None for a tree.

    ``parents`` is [max_nodes]; entries from ``num_nodes`` on are not looked at.
    """
    max_nodes, found = len(parents), []
    for node in range(num_nodes):
        parent = int(parents[node])
        if node == 0:
            if parent != -1:
                found.append((TreeFault.ROOT, node))
        elif parent == -1:
            found.append((TreeFault.SECOND_ROOT, node))
        elif not 0 <= parent < max_nodes:
            found.append((TreeFault.PARENT_RANGE, node))
        elif parent >= num_nodes:
            found.append((TreeFault.ORPHAN, node))
    if not found:  # every path goes on inside the tree, or ends at node 0
        steps = [_steps_up(parents, node) for node in range(num_nodes)]
        found = [(TreeFault.CYCLE, node) for node in range(num_nodes) if steps[node] is None]
    return max(found, key=lambda fault: (fault[0], -fault[1]), default=None)


def _steps_up(parents: np.ndarray, node: int) -> int | None:
    """Steps from a node to the root; None if it takes more than there are nodes."""
    for steps in range(len(parents)):
        if parents[node] < 0:
            return steps
        node = int(parents[node])
    return None


def ancestor_matrix(parents: Any, num_nodes: int | None = None) -> np.ndarray:
    """Bool [n, n] of a tree: node i sees itself and its ancestors.

    Raises ArgumentError if ``parents`` [>= n] int is no tree.  ``num_nodes`` None: all of them.
    """
    return reference.ancestor_mask(_one_tree(parents, num_nodes).tolist())


def node_depths(parents: Any, num_nodes: int | None = None) -> np.ndarray:
    """Int32 [n]: steps from each node up to the root, whose depth is 0.  Raises as :func:`ancestor_matrix`."""
    return ancestor_matrix(parents, num_nodes).sum(1, dtype=np.int32) - np.int32(1)


def first_children(parents: Any, num_nodes: int | None = None) -> np.ndarray:
    """Int64 [n]: the child with the lowest number, or -1.  Raises as :func:`ancestor_matrix`."""
    tree = _one_tree(parents, num_nodes)
    return np.array([_first(tree, node, after=0) for node in range(len(tree))], np.int64)


def next_siblings(parents: Any, num_nodes: int | None = None) -> np.ndarray:
    """Int64 [n]: the next higher number with the same parent, or -1.  Raises as :func:`ancestor_matrix`."""
    tree = _one_tree(parents, num_nodes)
    return np.array([_first(tree, tree[node], after=node) if node else -1 for node in range(len(tree))], np.int64)


def _first(parents: np.ndarray, parent: int, *, after: int) -> int:
    """The first node above number ``after`` with this parent, or -1."""
    return next((node for node in range(after + 1, len(parents)) if parents[node] == parent), -1)


def _one_tree(parents: Any, num_nodes: int | None) -> np.ndarray:
    given = _integers("parents", parents, 1)
    num_nodes = len(given) if num_nodes is None else num_nodes
    check_trees(given[None], np.array([num_nodes]))
    return given[:num_nodes]


# ---- a batch


def check_trees(parents: Any, num_nodes: Any) -> None:
    """Refuse a batch that holds anything but trees: ``parents`` [B, N] and ``num_nodes`` [B], integers.

    Raises
    ------
    ArgumentError
        Names the first wrong entry, ``parents[b, i]`` or ``num_nodes[b]``, what was expected and what came.
    """
    parents, num_nodes = _integers("parents", parents, 2), _integers("num_nodes", num_nodes, 1)
    if len(num_nodes) != len(parents):
        raise ArgumentError("num_nodes", f"shape [{len(parents)}]", list(num_nodes.shape))
    max_nodes = parents.shape[1]
    for request, count in enumerate(num_nodes.tolist()):
        if not 0 <= count <= max_nodes:
            raise ArgumentError(f"num_nodes[{request}]", f"a number in [0, max_nodes={max_nodes}]", count)
        found = find_fault(parents[request], count)
        if found:
            fault, node = found
            expected = EXPECTED[fault].format(num_nodes=count, max_nodes=max_nodes)
            raise ArgumentError(f"parents[{request}, {node}]", expected, parents[request, node])


def _integers(name: str, value: Any, ndim: int) -> np.ndarray:
    made = np.asarray(value)
    if made.dtype.kind not in "iu" or made.ndim != ndim:
        raise ArgumentError(name, f"integers in {ndim} dimension(s)", f"{made.dtype} {list(made.shape)}")
    return made


def mask_elements(mask: Mask, rows: int, prefix_len: int) -> int:
    """Elements of one request's block in ``custom_mask``: bytes, or 32-bit words for PACKED."""
    return {
        Mask.FULL: rows * (prefix_len + rows),
        Mask.TREE: rows * rows,
        Mask.PACKED: rows * -(-rows // reference.WORD_BITS),
    }.get(mask, 0)


@dataclass(frozen=True)
class TreeBuffers:
    """What :func:`tree_buffers` makes of a batch of B requests; T is the number of rows.

    Attributes
    ----------
    custom_mask, mask_indptr
        Flat uint8, for PACKED uint32, and int64 [B + 1]; None for a mask without a buffer.
    qo_indptr, positions
        Int64 [B + 1] and int64 [T].
    depths, retrieve_index, retrieve_next_token, retrieve_next_sibling
        Int32 and three times int64, [B, N].
    """

    custom_mask: np.ndarray | None
    mask_indptr: np.ndarray | None
    qo_indptr: np.ndarray
    positions: np.ndarray
    depths: np.ndarray
    retrieve_index: np.ndarray
    retrieve_next_token: np.ndarray
    retrieve_next_sibling: np.ndarray


def tree_buffers(
    parents: Any, num_nodes: Any, prefix_lens: Any, *, mask: Mask | str = Mask.TREE, padded: bool = False
) -> TreeBuffers:
    """The buffers of a batch in arrays of exactly their size; the prefix columns of FULL are filled.

    ``parents`` [B, N], ``num_nodes`` [B] and ``prefix_lens`` [B] are integers.  Raises ArgumentError for what
    :func:`check_trees` refuses and for negative prefix lengths.
    """
    mask = _mask("mask", mask)
    check_trees(parents, num_nodes)
    parents, num_nodes = np.asarray(parents, np.int32), np.asarray(num_nodes, np.int32)
    prefix_lens = _integers("prefix_lens", prefix_lens, 1)
    if prefix_lens.shape != num_nodes.shape or prefix_lens.min(initial=0) < 0:
        raise ArgumentError("prefix_lens", f"{len(num_nodes)} lengths >= 0", prefix_lens.tolist())
    requests, max_nodes = parents.shape
    rows = [max_nodes if padded else n for n in num_nodes.tolist()]
    elements = sum(mask_elements(mask, r, c) for r, c in zip(rows, prefix_lens.tolist(), strict=True))
    made = TreeBuffers(
        custom_mask=np.zeros(elements, np.uint32 if mask is Mask.PACKED else np.uint8) if mask.reads_buffer else None,
        mask_indptr=np.zeros(requests + 1, np.int64) if mask.reads_buffer else None,
        qo_indptr=np.zeros(requests + 1, np.int64),
        positions=np.zeros(sum(rows), np.int64),
        depths=np.zeros((requests, max_nodes), np.int32),
        retrieve_index=np.zeros((requests, max_nodes), np.int64),
        retrieve_next_token=np.zeros((requests, max_nodes), np.int64),
        retrieve_next_sibling=np.zeros((requests, max_nodes), np.int64),
    )
    write_tree_buffers(
        parents=parents, num_nodes=num_nodes, prefix_lens=prefix_lens, mask=mask, padded=padded, fill_prefix=True,
        max_kv_len=max_nodes + int(prefix_lens.max(initial=0)), flags=np.zeros(requests, np.int32), **vars(made),
    )  # fmt: skip
    return made


def write_tree_buffers(
    *,
    parents: np.ndarray,
    num_nodes: np.ndarray,
    prefix_lens: np.ndarray,
    mask: Mask,
    padded: bool,
    fill_prefix: bool,
    max_kv_len: int,
    custom_mask: np.ndarray | None,
    mask_indptr: np.ndarray | None,
    qo_indptr: np.ndarray,
    positions: np.ndarray,
    depths: np.ndarray,
    retrieve_index: np.ndarray | None,
    retrieve_next_token: np.ndarray | None,
    retrieve_next_sibling: np.ndarray | None,
    flags: np.ndarray,
) -> None:
    """The definition of the device stage: what a launch of :class:`MaskPlan` writes into these arrays, bit for bit.

    Arguments and shapes are those of :meth:`MaskPlan.bind`.  Nothing in the arrays raises: a request whose data is
    wrong gets its :class:`TreeFault` in ``flags``, and its nodes are hidden.
    """
    max_nodes = parents.shape[1]
    row_start, mask_start = 0, 0
    for request in range(len(num_nodes)):
        flag, nodes = 0, int(num_nodes[request])
        if not 0 <= nodes <= max_nodes:
            flag, nodes = int(TreeFault.NUM_NODES), 0
        rows = max_nodes if padded else nodes
        prefix_len = min(max(int(prefix_lens[request]), 0), max_kv_len - rows)
        elements = mask_elements(mask, rows, prefix_len)
        row_end, mask_end = row_start + rows, mask_start + elements
        if nodes > 0:
            fits = row_end <= len(positions) and (custom_mask is None or mask_end <= len(custom_mask))
            tree_fault = find_fault(parents[request], nodes)
            if prefix_len != prefix_lens[request]:
                flag = int(TreeFault.PREFIX_LEN)
            elif not fits:
                flag = int(TreeFault.CAPACITY)
            elif tree_fault:
                flag = int(tree_fault[0])
        shown = nodes if flag == 0 else 0  # the other nodes are hidden
        tree = parents[request, :shown]

        flags[request] = flag
        qo_indptr[request], qo_indptr[request + 1] = row_start, row_end
        depth = np.zeros(max_nodes, np.int32)
        depth[:shown] = node_depths(tree)
        depths[request] = depth
        _write(positions, row_start + np.arange(rows), prefix_len + depth[:rows].astype(np.int64))
        if retrieve_index is not None:
            retrieve_index[request] = -1
            retrieve_index[request, :rows] = np.arange(row_start, row_end)
        if retrieve_next_token is not None:
            retrieve_next_token[request] = -1
            retrieve_next_token[request, :shown] = first_children(tree)
        if retrieve_next_sibling is not None:
            retrieve_next_sibling[request] = -1
            retrieve_next_sibling[request, :shown] = next_siblings(tree)
        if custom_mask is not None and mask_indptr is not None:
            mask_indptr[request], mask_indptr[request + 1] = mask_start, mask_end
            visible = np.zeros((rows, rows), bool)
            visible[:shown, :shown] = ancestor_matrix(tree)
            _write_mask(custom_mask, mask_start, visible, prefix_len, mask, fill_prefix, shown)
        row_start, mask_start = row_end, mask_end


def _write_mask(
    custom_mask: np.ndarray, start: int, visible: np.ndarray, prefix_len: int, mask: Mask, fill_prefix: bool, shown: int
) -> None:
    """One request's block; ``visible`` is bool [rows, rows]."""
    rows = len(visible)
    if mask is Mask.PACKED:
        words = reference.pack_mask(visible).ravel()
        _write(custom_mask.view(np.uint32), start + np.arange(words.size), words)
        return
    row_length = prefix_len + rows if mask is Mask.FULL else rows
    row_starts = start + np.arange(rows)[:, None] * row_length
    _write(custom_mask, row_starts + row_length - rows + np.arange(rows), visible)
    if mask is Mask.FULL and fill_prefix:
        of_nodes = np.broadcast_to(np.arange(rows)[:, None] < shown, (rows, prefix_len))
        _write(custom_mask, row_starts + np.arange(prefix_len), of_nodes)


def _write(target: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    """``target[at] = values``, without what lies past its end."""
    inside = at < len(target)
    target[at[inside]] = values[inside]


# ---- on the device


class MaskPlan:
    """One launch that writes the buffers of a batch of trees, in place.

    Parameters
    ----------
    max_requests
        Requests of a batch at most; ``max_requests * max_nodes`` is below 2^31.
    max_nodes
        N: nodes of a request at most, the root included; up to 1025.  The width of ``parents``.
    max_kv_len
        Bound of prefix + rows of a request, as in ``VerifySpec``.
    mask
        Layout of ``custom_mask``.  CAUSAL and NONE have no buffer: the verify kernel does not look at the tree then, so
        CAUSAL is right for chains in order only.
    padded
        False: a request has ``num_nodes`` rows.  True: ``max_nodes``, the rest of them padding.
    fill_prefix
        FULL only: write the prefix columns too, 1 in the rows of nodes and 0 in padding.  Not needed where the verify
        kernel does not read them (``prefix_visible=True``, the default).
    device
        None (the current GPU), an ordinal, "emulator", an ``nv.Emulator``, or a runner of ``stages.open_runner``.

    Raises
    ------
    ArgumentError
        A wrong argument, by name.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_nodes: int,
        max_kv_len: int,
        mask: Mask | str,
        padded: bool = False,
        fill_prefix: bool = False,
        device: int | str | Emulator | Runner | None = None,
    ):
        self.max_nodes = check_int("max_nodes", max_nodes, 1, MAX_NODES)
        self.max_requests = check_int("max_requests", max_requests, 1, INT32_MAX // max_nodes)  # rows in 32 bits
        self.max_kv_len = check_int("max_kv_len", max_kv_len, max_nodes, INT32_MAX)
        self.mask = _mask("mask", mask)
        self.padded = _bool("padded", padded)
        self.fill_prefix = _bool("fill_prefix", fill_prefix)
        if fill_prefix and self.mask is not Mask.FULL:
            raise ArgumentError(
                "fill_prefix", f"False with mask={self.mask.value!r}: only FULL has prefix columns", True
            )
        self._runner = open_runner(device)
        self.stage = mask_stage(self.mask, padded=padded, fill_prefix=fill_prefix, max_nodes=max_nodes)

    @property
    def max_rows(self) -> int:
        """Rows of a batch at most: the size of ``positions`` that no batch overflows."""
        return self.max_requests * self.max_nodes

    @property
    def max_mask_elements(self) -> int:
        """The size of ``custom_mask`` that no batch overflows, in elements; 0 for CAUSAL and NONE."""
        return self.max_requests * mask_elements(self.mask, self.max_nodes, self.max_kv_len - self.max_nodes)

    def bind(
        self,
        *,
        parents: Any,
        num_nodes: Any,
        prefix_lens: Any,
        custom_mask: Any = None,
        mask_indptr: Any = None,
        qo_indptr: Any,
        positions: Any,
        depths: Any,
        retrieve_index: Any = None,
        retrieve_next_token: Any = None,
        retrieve_next_sibling: Any = None,
        flags: Any,
    ) -> BoundStage:
        """Check the arrays of a batch of B <= max_requests requests and keep their addresses.

        All are in C order.  They are written by every launch, the first three only read; what is read may change
        between launches.

        Parameters
        ----------
        parents : int32 [B, N]
            -1 for node 0; entries from ``num_nodes[b]`` on mean nothing.
        num_nodes : int32 [B]
            0: there is no such request.
        prefix_lens : int32 or int64 [B]
            Keys of a request in the pool, root not included.
        custom_mask : uint8 or bool, PACKED: uint32 or int32, [*]
            ``max_mask_elements`` fit every batch.  A request whose block does not fit gets a flag.
        mask_indptr : int64 [B + 1]
            With ``custom_mask``.
        qo_indptr : int32 or int64 [B + 1]
        positions : int64 [*]
            ``max_rows`` fit every batch.  A request whose rows do not fit gets a flag.
        depths : int32 [B, N]
        retrieve_index, retrieve_next_token, retrieve_next_sibling : int64 [B, N], optional
        flags : int32 [B]
            0, or a :class:`TreeFault`.

        Raises
        ------
        ArgumentError
            Names the argument, what was expected and what came: a wrong dtype, shape, layout or device, a read-only
            array that would be written, a written array that shares memory with another one.
        """
        host = self._runner.emulated
        requests = check_array("num_nodes", num_nodes, ("int32",), (None,), host=host).shape[0]
        if not 1 <= requests <= self.max_requests:
            raise ArgumentError("num_nodes", f"1 to max_requests={self.max_requests} requests", requests)
        of_nodes = requests, self.max_nodes
        wanted: dict[str, tuple[Any, tuple[str, ...], tuple[int | None, ...]]] = {
            "num_nodes": (num_nodes, ("int32",), (requests,)),
            "parents": (parents, ("int32",), of_nodes),
            "prefix_lens": (prefix_lens, INDEX_DTYPES, (requests,)),
            "custom_mask": (custom_mask, self._mask_dtypes, (None,)),
            "mask_indptr": (mask_indptr, ("int64",), (requests + 1,)),
            "qo_indptr": (qo_indptr, INDEX_DTYPES, (requests + 1,)),
            "positions": (positions, ("int64",), (None,)),
            "depths": (depths, ("int32",), of_nodes),
            "retrieve_index": (retrieve_index, ("int64",), of_nodes),
            "retrieve_next_token": (retrieve_next_token, ("int64",), of_nodes),
            "retrieve_next_sibling": (retrieve_next_sibling, ("int64",), of_nodes),
            "flags": (flags, ("int32",), (requests,)),
        }
        absent = {name for name in wanted if name.startswith("retrieve") and wanted[name][0] is None}
        if not self.mask.reads_buffer:
            for name in ("custom_mask", "mask_indptr"):
                if wanted[name][0] is not None:
                    raise ArgumentError(name, f"None with mask={self.mask.value!r}, which has no buffer", "an array")
                absent.add(name)
        infos = {
            name: check_array(name, value, dtypes, shape, host=host)
            for name, (value, dtypes, shape) in wanted.items()
            if name not in absent
        }
        refuse_overlaps(infos, WRITTEN)
        blocks = blocks_per_request(self.max_nodes)
        sizes = {"max_nodes": self.max_nodes, "max_kv_len": self.max_kv_len, "blocks_per_request": blocks}
        buffers = {name: value for name, (value, _, _) in wanted.items()}
        return BoundStage(self._runner.bind(self.stage, requests * blocks, buffers, sizes))

    @property
    def _mask_dtypes(self) -> tuple[str, ...]:
        return ("uint32", "int32") if self.mask is Mask.PACKED else ("uint8", "bool")


def mask_stage(mask: Mask, *, padded: bool, fill_prefix: bool, max_nodes: int) -> Stage:
    """The device stage; its body is ``make_body`` of ``nbverify.tree.kernels.masks``."""
    return Stage(
        "tree_masks",
        "nbverify.tree.kernels.masks",
        (
            array("parents", "int32"),
            array("num_nodes", "int32"),
            *index_array("prefix_lens"),
            array("custom_mask", "uint32" if mask is Mask.PACKED else "uint8"),
            array("mask_indptr", "int64"),
            *index_array("qo_indptr"),
            array("positions", "int64"),
            array("depths", "int32"),
            array("retrieve_index", "int64"),
            array("retrieve_next_token", "int64"),
            array("retrieve_next_sibling", "int64"),
            array("flags", "int32"),
            scalar("max_nodes"),
            scalar("max_kv_len"),
            scalar("blocks_per_request"),
        ),
        threads=THREADS,
        shared_bytes=SHARED_BYTES_PER_NODE * max_nodes,
        constants={
            "mask": mask,
            "padded": padded,
            "fill_prefix": fill_prefix,
            "walks": -(-max_nodes // COLUMNS_PER_WALK),
            "threads": THREADS,
            "faults": tuple(TreeFault),
        },
    )


def blocks_per_request(max_nodes: int) -> int:
    """Blocks that share the rows of a request."""
    return min(-(-max_nodes // (ROWS_PER_WARP * THREADS // WARP)), MAX_BLOCKS_PER_REQUEST)


def _mask(name: str, value: Any) -> Mask:
    try:
        return Mask(value)
    except ValueError:
        raise ArgumentError(name, f"one of {[m.value for m in Mask]}", repr(value)) from None


def _bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ArgumentError(name, "a bool", repr(value))
    return value
