"""After acceptance: the accepted nodes' KV to the front of the window, new lengths, and the slots that are free again.

Request ``b`` has ``n = num_nodes[b]`` nodes, node ``j`` with its KV in slot ``W[j] = out_cache_loc[qo_indptr[b] + j]``:
its window.  The nodes accepted are ``a_i = accept_nodes[b, i]`` for ``i < m = accept_lens[b]``, the root first.  Two
conventions, and a serving system has one of them:

"move"
    Slot ``W[i]`` gets what slot ``W[a_i]`` held before, for all ``i < m`` at once and on every plane of the pool.  Kept
    are ``W[0..m-1]``, free are ``W[m..n-1]``.  SGLang does this (its ``move_accept_tokens_to_target_kvcache``): pages
    stay whole, since the prefix grows by the slots next in the window.
"keep"
    Nothing moves.  Kept are ``W[a_0] .. W[a_(m-1)]``, free all others, in the window's order.  Costs a few int32 a
    request, and scatters prefixes over the pool: for page size 1.

Either way ``prefix + i`` of the request's row of ``req_to_token`` becomes the ``i``-th kept slot (where such a table is
given), the length becomes ``prefix + m``, and paths may be listed in any order: the definition is that of a gather into
a copy and a scatter from it, also where the moves form cycles.

:func:`compact` is that definition in numpy; :class:`CompactPlan` does the same, bit for bit, in one launch.  Why the
kernel needs no barrier between its loads and its stores stands in tree/kernels/compact.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nbverify.backends import flat_storage
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError
from nbverify.spec import INT32_MAX
from nbverify.stages import EmulatorRunner, Runner, Stage, array, check_array, index_array, open_runner, scalar
from nbverify.tree.binding import BoundStage, check_int, refuse_overlaps
from nbverify.tree.kernels.records import COMPACT_THREADS, RECORD_FIELDS, CompactFlag
from nbverify.tree.planes import Placement, Plane, place
from nbverify.tree.trees import MAX_NODES

CONVENTIONS = ("move", "keep")
MAX_DEPTH = 32  # a path of 33 rows in registers, 132 of them
INDEX = ("int32", "int64")
WORD_BYTES = 4
WRITTEN = ("new_prefix_lens", "freed_slots", "freed_counts", "flags", "req_to_token")

PARAMETERS = (
    array("records", "int64"),
    *index_array("out_cache_loc"),
    *index_array("qo_indptr"),
    array("accept_nodes", "int32"),
    array("accept_lens", "int32"),
    array("num_nodes", "int32"),
    *index_array("prefix_lens"),
    *index_array("new_prefix_lens"),
    *index_array("freed_slots"),
    array("freed_counts", "int32"),
    array("flags", "int32"),
    array("req_to_token", "int32"),
    *index_array("req_pool_indices"),
    scalar("max_requests"),
    scalar("max_nodes"),
    scalar("num_rows"),
    scalar("num_slots"),
    scalar("num_table_rows"),
    scalar("max_context"),
)


class Compaction(NamedTuple):
    """What compaction says beside what it moves.

    Attributes
    ----------
    new_prefix_lens
        ``[B]``, dtype of ``prefix_lens``: ``prefix + m``.  Unchanged for padding and for flagged requests.
    freed_slots
        ``[rows]``, dtype of ``out_cache_loc``: those of request ``b`` from row ``qo_indptr[b]`` on, in the window's
        order.  -1 in all other rows, so that ``freed_slots[freed_slots >= 0]`` is the free list of the batch.  Where a
        broken ``qo_indptr`` leaves rows to no request, the device leaves them as they were: go by the counts then.
    freed_counts
        ``[B] int32``.  0 for padding and for flagged requests.
    flags
        ``[B] int32``, a :class:`CompactFlag`.
    """

    new_prefix_lens: np.ndarray
    freed_slots: np.ndarray
    freed_counts: np.ndarray
    flags: np.ndarray


def compact(
    planes: Sequence[Plane],
    *,
    out_cache_loc: np.ndarray,
    qo_indptr: np.ndarray,
    accept_nodes: np.ndarray,
    accept_lens: np.ndarray,
    num_nodes: np.ndarray,
    prefix_lens: np.ndarray,
    req_to_token: np.ndarray | None = None,
    req_pool_indices: np.ndarray | None = None,
    convention: str = "move",
    max_nodes: int = MAX_NODES,
) -> Compaction:
    """The definition, in numpy.  Overwrites the planes and ``req_to_token``; everything else is only read.

    Parameters
    ----------
    planes
        Numpy planes of one pool; none for "keep".
    out_cache_loc
        ``[rows]`` int32 or int64: the slot of each node, in node order.
    qo_indptr
        ``[B + 1]`` int32 or int64: the first row of each request; ``qo_indptr[b + 1]`` is at least ``num_nodes[b]`` on.
    accept_nodes
        ``[B, D + 1] int32``: node numbers along the path.  Entries at and beyond ``accept_lens`` are not read.
    accept_lens
        ``[B] int32``: nodes on the path, root included.
    num_nodes
        ``[B] int32``; 0: padding, of which nothing else is read but the prefix length.
    prefix_lens
        ``[B]`` int32 or int64: tokens in the pool before this step.
    req_to_token, req_pool_indices
        ``[R, max_context] int32`` and ``[B]`` int32 or int64: the table of slots and each request's row of it.  Both,
        or neither ("move" only).
    convention
        "move" or "keep".
    max_nodes
        A request with more nodes has BAD_WINDOW.

    Returns
    -------
    Compaction
        A request with a flag is as if it were not there: nothing moves, nothing is freed, its length stays.  One
        exception: BAD_PREFIX of the "move" convention, where the rows inside its own window have been moved.  (On the
        device the blocks that move must not read lengths that the same launch overwrites.)

    Raises
    ------
    ArgumentError
        ``convention``, planes for "keep", none for "move", a table without rows or the reverse.

    Notes
    -----
    What is not found out, because no request can see it by itself: a slot twice in a window, windows that overlap, a
    row of ``req_to_token`` that two requests share.  They are the caller's errors.
    """
    _check_convention(convention, planes, req_to_token, req_pool_indices)
    num_slots = min((_num_slots(plane) for plane in planes), default=INT32_MAX)
    num_requests, num_rows = len(num_nodes), len(out_cache_loc)
    made = Compaction(
        np.array(prefix_lens),
        np.full(num_rows, -1, out_cache_loc.dtype),
        np.zeros(num_requests, np.int32),
        np.zeros(num_requests, np.int32),
    )
    for b in range(num_requests):
        first, last = int(qo_indptr[b]), int(qo_indptr[b + 1])
        n, m, prefix = int(num_nodes[b]), int(accept_lens[b]), int(prefix_lens[b])
        if n == 0:
            continue
        if not (0 <= first <= last <= num_rows and 0 < n <= min(last - first, max_nodes)):
            made.flags[b] = CompactFlag.BAD_WINDOW
            continue
        if not 1 <= m <= min(n, accept_nodes.shape[1]):
            made.flags[b] = CompactFlag.BAD_LENGTH
            continue
        window = [int(slot) for slot in out_cache_loc[first : first + n]]
        path = [int(node) for node in accept_nodes[b, :m]]
        made.flags[b] = _judge(window, path, num_slots)
        if made.flags[b]:
            continue

        kept = list(range(m)) if convention == "move" else path
        for plane in planes:
            plane.write(window[:m], plane.read([window[a] for a in path]))

        row, max_context = 0, INT32_MAX
        if req_to_token is not None and req_pool_indices is not None:
            row, max_context = int(req_pool_indices[b]), req_to_token.shape[1]
        if prefix < 0 or prefix + m > max_context or not 0 <= row < (1 if req_to_token is None else len(req_to_token)):
            made.flags[b] = CompactFlag.BAD_PREFIX
            continue
        if req_to_token is not None:
            req_to_token[row, prefix : prefix + m] = [window[i] for i in kept]
        freed = [slot for j, slot in enumerate(window) if j not in kept]
        made.new_prefix_lens[b] = prefix + m
        made.freed_slots[first : first + len(freed)] = freed
        made.freed_counts[b] = len(freed)
    return made


def _judge(window: list[int], path: list[int], num_slots: int) -> CompactFlag:
    if not all(0 <= slot < num_slots for slot in window):
        return CompactFlag.BAD_SLOT
    if not all(0 <= node < len(window) for node in path):
        return CompactFlag.BAD_NODE
    return CompactFlag.OK if len(set(path)) == len(path) else CompactFlag.DUPLICATE_NODE


def _num_slots(plane: Plane) -> int:
    shape = plane.array.shape
    return shape[0] if plane.layout == "token" else shape[0] * shape[2]


def _check_convention(convention: object, planes: Sequence, req_to_token: object, req_pool_indices: object) -> None:
    if convention not in CONVENTIONS:
        raise ArgumentError("convention", " or ".join(map(repr, CONVENTIONS)), repr(convention))
    if convention == "keep" and len(planes):
        raise ArgumentError("planes", 'none with convention="keep", which moves nothing', f"{len(planes)} planes")
    if convention == "move" and not len(planes):
        raise ArgumentError("planes", "at least one plane", "none")
    if convention == "keep" and req_to_token is None:
        raise ArgumentError("req_to_token", 'an array with convention="keep", which is nothing without it', None)
    if (req_to_token is None) != (req_pool_indices is None):
        given = "req_pool_indices" if req_to_token is None else "req_to_token"
        raise ArgumentError("req_to_token, req_pool_indices", "both or neither", f"only {given}")


class CompactPlan:
    """:func:`compact` on the device: one launch for all planes, layers and requests.

    Parameters
    ----------
    max_requests
        B: rows of the static buffers.
    max_nodes
        Nodes of the largest tree, root included, up to 1025.
    max_depth
        D, up to 32: a path has at most D + 1 nodes.  The kernel is compiled for it.
    convention
        "move" or "keep".
    device
        None, an ordinal, "emulator", an ``nv.Emulator``, or a runner of :func:`nbverify.stages.open_runner`.

    Raises
    ------
    ArgumentError
        Any of them out of its range.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_nodes: int,
        max_depth: int,
        convention: str = "move",
        device: int | str | Emulator | Runner | None = None,
    ):
        self.max_requests = check_int("max_requests", max_requests, 1, INT32_MAX)
        self.max_nodes = check_int("max_nodes", max_nodes, 1, MAX_NODES)
        self.max_depth = check_int("max_depth", max_depth, 1, MAX_DEPTH)
        if convention not in CONVENTIONS:
            raise ArgumentError("convention", " or ".join(map(repr, CONVENTIONS)), repr(convention))
        self.convention = convention
        self.runner = open_runner(device)

    @property
    def stage(self) -> Stage:
        """The kernel, as it is compiled."""
        return Stage(
            f"compact_{self.convention}",
            "nbverify.tree.kernels.compact",
            PARAMETERS,
            threads=COMPACT_THREADS,
            shared_bytes=WORD_BYTES * self.max_nodes,
            constants={"rows": self.max_depth + 1, "moves": self.convention == "move"},
        )

    def bind(
        self,
        *,
        planes: Sequence[Plane] = (),
        out_cache_loc: Any,
        qo_indptr: Any,
        accept_nodes: Any,
        accept_lens: Any,
        num_nodes: Any,
        prefix_lens: Any,
        new_prefix_lens: Any,
        flags: Any,
        freed_slots: Any = None,
        freed_counts: Any = None,
        req_to_token: Any = None,
        req_pool_indices: Any = None,
    ) -> BoundStage:
        """Check the arrays, upload the table of planes, and pack the parameters: once.  Nothing of it is at launch.

        Parameters
        ----------
        planes, out_cache_loc, qo_indptr, accept_nodes, accept_lens, num_nodes, prefix_lens
            As in :func:`compact`, with ``B = max_requests`` and ``D = max_depth``, in C order.
        req_to_token, req_pool_indices
            As in :func:`compact`.
        new_prefix_lens, flags, freed_slots, freed_counts
            Written as :class:`Compaction` says, ``new_prefix_lens`` and ``freed_slots`` int32 or int64 as you like.
            ``new_prefix_lens`` may be ``prefix_lens`` itself: lengths then advance in place.  The freed slots are
            optional, both or neither.

        Raises
        ------
        ArgumentError
            A wrong dtype, shape, layout or device; a written array, such as a plane, that is read-only or shares memory
            with another one.
        """
        planes = tuple(planes)
        _check_convention(self.convention, planes, req_to_token, req_pool_indices)
        if (freed_slots is None) != (freed_counts is None):
            given = "freed_counts" if freed_slots is None else "freed_slots"
            raise ArgumentError("freed_slots, freed_counts", "both or neither", f"only {given}")
        requests, host = self.max_requests, self.runner.emulated
        shapes: dict[str, tuple[Any, tuple[str, ...], tuple[int | None, ...]]] = {
            "out_cache_loc": (out_cache_loc, INDEX, (None,)),
            "qo_indptr": (qo_indptr, INDEX, (requests + 1,)),
            "accept_nodes": (accept_nodes, ("int32",), (requests, self.max_depth + 1)),
            "accept_lens": (accept_lens, ("int32",), (requests,)),
            "num_nodes": (num_nodes, ("int32",), (requests,)),
            "prefix_lens": (prefix_lens, INDEX, (requests,)),
            "new_prefix_lens": (new_prefix_lens, INDEX, (requests,)),
            "freed_counts": (freed_counts, ("int32",), (requests,)),
            "flags": (flags, ("int32",), (requests,)),
            "req_to_token": (req_to_token, ("int32",), (None, None)),
            "req_pool_indices": (req_pool_indices, INDEX, (requests,)),
        }
        infos = {
            name: check_array(name, value, dtypes, shape, host=host)
            for name, (value, dtypes, shape) in shapes.items()
            if value is not None
        }
        if "req_to_token" in infos and 0 in infos["req_to_token"].shape:
            raise ArgumentError("req_to_token", "rows and columns", list(infos["req_to_token"].shape))
        num_rows = infos["out_cache_loc"].shape[0]
        if freed_slots is not None:
            infos["freed_slots"] = check_array("freed_slots", freed_slots, INDEX, (num_rows,), host=host)

        placements = [place(f"planes[{i}]", plane, host=host) for i, plane in enumerate(planes)]
        of_planes = {f"planes[{i}].array": placement.info for i, placement in enumerate(placements)}
        used = infos | of_planes
        if infos["new_prefix_lens"] == infos["prefix_lens"]:
            del used["prefix_lens"]  # in place
        refuse_overlaps(used, {*WRITTEN, *of_planes})  # an MLA pool given as K and again as V would be moved twice
        self._check_devices(placements)
        rows = [record for placement in placements for record in placement.records()]
        records = self.runner.empty((len(rows), RECORD_FIELDS), "int64")
        records.set(np.array(rows, np.int64).reshape(-1, RECORD_FIELDS))

        buffers = {name: value for name, (value, _, _) in shapes.items()}
        buffers |= {"freed_slots": freed_slots, "records": records}
        table = infos["req_to_token"].shape if "req_to_token" in infos else (1, INT32_MAX)
        scalars = {
            "max_requests": requests,
            "max_nodes": self.max_nodes,
            "num_rows": num_rows,
            "num_slots": min((placement.num_slots for placement in placements), default=INT32_MAX),
            "num_table_rows": table[0],
            "max_context": min(table[1], INT32_MAX),
        }
        memory = {f"planes[{i}]": plane.array for i, plane in enumerate(planes)}
        if host:
            memory = {
                name: flat_storage(plane, placement.info, "uint8")
                for (name, plane), placement in zip(memory.items(), placements, strict=True)
            }
        return BoundStage(self.runner.bind(self.stage, max(1, len(rows)) * requests, buffers, scalars, memory))

    def _check_devices(self, placements: Sequence[Placement]) -> None:
        if isinstance(self.runner, EmulatorRunner):
            return
        ordinal = self.runner.device.ordinal
        for i, placement in enumerate(placements):
            if placement.info.device not in (None, ordinal):
                raise ArgumentError(
                    f"planes[{i}].array", f"an array on device {ordinal}", f"device {placement.info.device}"
                )
