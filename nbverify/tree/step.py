"""VerifyStep: a step of tree decoding on static buffers, from drafts to the next step's lengths, as one CUDA graph.

    build      drafts -> trees                                    tokens, logprobs, budgets, root_tokens
    indices    prefix_lens, req_to_token -> kv_indptr, kv_indices
    masks      trees -> qo_indptr, positions, mask, retrieve arrays
    (model)    the caller's: queries of all rows, verify attention of each layer, and what the target says of each row
    accept     trees, target_tokens or logits -> the accepted path, its length, the next root
    compact    the accepted KV to the front of the window, lengths and req_to_token advanced

What the host does between two steps is to write drafts, and slots for the rows of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from nbverify.arrays import ArrayInfo, stream_handle
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError
from nbverify.graphs import Graph
from nbverify.spec import Mask
from nbverify.stages import GpuRunner, Runner, Stage, check_array, open_runner
from nbverify.tree.accept import AcceptFlag, AcceptPlan
from nbverify.tree.binding import BoundStage
from nbverify.tree.build import BuildFlag, BuildPlan
from nbverify.tree.compact import CompactPlan
from nbverify.tree.indices import IndicesPlan
from nbverify.tree.kernels.records import CompactFlag, IndexFlag
from nbverify.tree.masks import MaskPlan, TreeFault
from nbverify.tree.planes import Plane

Model = Callable[[int], None]  # launches the target model on a stream handle

FLAGS: dict[str, type[IntEnum]] = {
    "build": BuildFlag,
    "indices": IndexFlag,
    "masks": TreeFault,
    "accept": AcceptFlag,
    "compact": CompactFlag,
}


class VerifyStep:
    """The plans and the static buffers of a step.

    Parameters
    ----------
    max_requests, depth, top_k, max_nodes
        B requests; drafts of D positions with K candidates; trees of up to N nodes, root included (up to 1025).
    max_kv_len
        Keys of a request at most, its nodes included.
    req_to_token
        ``[R, max_context]`` int32, the caller's: the slots of each request by position.  Read for the prefix, written
        for what was accepted.
    planes
        The KV pool (:class:`nbverify.tree.planes.Plane`), all layers: accepted rows move to the front of the window.
        Empty: nothing moves, ``req_to_token`` takes the slots where the accepted rows are.
    mask
        TREE, FULL or PACKED: what the verify plan's spec says.  With FULL the prefix columns are not written: use
        ``prefix_visible=True`` there, the default.
    padded
        Rows of request b start at b * N, as in SGLang; else requests follow each other without gaps.
    vocab_size, sampled, logits_dtype
        As in :class:`nbverify.tree.accept.AcceptPlan`.  Without ``vocab_size`` the model writes ``target_tokens``,
        with it ``logits``, which are then given here.
    logits
        ``[B * N, vocab_size]``, the caller's, in device memory.
    device
        None is the current GPU, an int an ordinal, "emulator" or an Emulator the CPU; or a runner.

    Attributes
    ----------
    Buffers, all the step's own.  ``x.get()`` and ``x.set(values)`` are for the host; torch and CuPy take them as they
    are.  The host writes, before a step:

    tokens, logprobs : int64, float32 [B, D, K]
    budgets : int32 [B], drafted nodes at most; negative: there is no such request
    root_tokens : int64 [B], which acceptance overwrites with the next step's
    prefix_lens : int64 [B], which compaction advances
    req_pool_indices : int64 [B], rows of ``req_to_token``
    out_cache_loc : int64 [B * N], a free slot for each row
    temperatures, top_ps : float32 [B]; top_ks : int32 [B]; seeds : int64 [B], if ``sampled``

    Written by the step: ``num_nodes, parents, node_tokens, depths, scores`` (build), ``kv_indptr, kv_indices``,
    ``qo_indptr, positions, custom_mask, mask_indptr, retrieve_index, retrieve_next_token, retrieve_next_sibling``,
    ``accept_nodes, accept_lens`` and, of the slots that are free again, ``freed_slots, freed_counts`` (of the nodes
    that a tree had: slots of rows without a node were never used).

    Raises
    ------
    ArgumentError
        As the plans of the parts do.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        depth: int,
        top_k: int,
        max_nodes: int,
        max_kv_len: int,
        req_to_token: Any,
        planes: Sequence[Plane] = (),
        mask: Mask = Mask.TREE,
        padded: bool = False,
        vocab_size: int | None = None,
        logits: Any = None,
        sampled: bool = False,
        logits_dtype: str = "float32",
        device: int | str | Emulator | Runner | None = None,
    ):
        self.runner = runner = open_runner(device)
        if (logits is None) != (vocab_size is None):
            raise ArgumentError("logits", "given if and only if vocab_size is", "only one of them")
        building, listing, masking, accepting, compacting = _plans(
            max_requests=max_requests, depth=depth, top_k=top_k, max_nodes=max_nodes, max_kv_len=max_kv_len,
            moves=bool(planes), mask=mask, padded=padded, vocab_size=vocab_size, sampled=sampled,
            logits_dtype=logits_dtype, device=runner,
        )  # fmt: skip
        self.max_requests, self.max_nodes, self.max_kv_len = max_requests, max_nodes, max_kv_len
        table: ArrayInfo = check_array("req_to_token", req_to_token, ("int32",), (None, None), host=runner.emulated)
        if table.shape[1] < max_kv_len:
            raise ArgumentError("req_to_token", f"max_kv_len = {max_kv_len} columns or more", list(table.shape))

        rows, of_nodes, drafts = max_requests * max_nodes, (max_requests, max_nodes), (max_requests, depth, top_k)
        empty = runner.empty
        self.tokens, self.logprobs = empty(drafts, "int64"), empty(drafts, "float32")
        self.budgets, self.root_tokens = empty((max_requests,), "int32", 0xFF), empty((max_requests,), "int64")
        self.num_nodes, self.parents = empty((max_requests,), "int32"), empty(of_nodes, "int32")
        self.node_tokens, self.depths = empty(of_nodes, "int64"), empty(of_nodes, "int32")
        self.scores = empty(of_nodes, "float32")
        self.prefix_lens, self.req_pool_indices = empty((max_requests,), "int64"), empty((max_requests,), "int64")
        self.kv_indptr = empty((max_requests + 1,), "int32")
        self.kv_indices = empty((max_requests * max_kv_len,), "int32")
        self.qo_indptr, self.positions = empty((max_requests + 1,), "int32"), empty((rows,), "int64")
        mask_dtype = "uint32" if mask is Mask.PACKED else "uint8"
        self.custom_mask = empty((masking.max_mask_elements,), mask_dtype)
        self.mask_indptr = empty((max_requests + 1,), "int64")
        self.retrieve_index, self.retrieve_next_token = empty(of_nodes, "int64"), empty(of_nodes, "int64")
        self.retrieve_next_sibling = empty(of_nodes, "int64")
        self.out_cache_loc = empty((rows,), "int64")
        self.target_tokens = None if vocab_size is not None else empty((rows,), "int64")
        self.accept_nodes = empty((max_requests, depth + 1), "int32")
        self.accept_lens = empty((max_requests,), "int32")
        self.freed_slots, self.freed_counts = empty((rows,), "int64"), empty((max_requests,), "int32")
        self._flags = {name: empty((max_requests,), "int32") for name in FLAGS}
        sampling: dict[str, Any] = {}
        if sampled:
            self.temperatures, self.top_ps = empty((max_requests,), "float32"), empty((max_requests,), "float32")
            self.top_ks, self.seeds = empty((max_requests,), "int32"), empty((max_requests,), "int64")
            sampling = {name: getattr(self, name) for name in ("temperatures", "top_ps", "top_ks", "seeds")}
            sampling["prefix_lens"] = self.prefix_lens

        tree = {"parents": self.parents, "num_nodes": self.num_nodes}
        nodes = {**tree, "node_tokens": self.node_tokens}
        lengths = {"prefix_lens": self.prefix_lens, "req_pool_indices": self.req_pool_indices}
        accepted = {"accept_nodes": self.accept_nodes, "accept_lens": self.accept_lens}
        self._before: tuple[BoundStage, ...] = (
            building.bind(
                **nodes, tokens=self.tokens, logprobs=self.logprobs, root_tokens=self.root_tokens,
                budgets=self.budgets, depths=self.depths, scores=self.scores, flags=self._flags["build"],
            ),
            listing.bind(
                **lengths, req_to_token=req_to_token, kv_indptr=self.kv_indptr, kv_indices=self.kv_indices,
                flags=self._flags["indices"],
            ),
            masking.bind(
                **tree, prefix_lens=self.prefix_lens, custom_mask=self.custom_mask, mask_indptr=self.mask_indptr,
                qo_indptr=self.qo_indptr, positions=self.positions, depths=self.depths,
                retrieve_index=self.retrieve_index, retrieve_next_token=self.retrieve_next_token,
                retrieve_next_sibling=self.retrieve_next_sibling, flags=self._flags["masks"],
            ),
        )  # fmt: skip
        self._after: tuple[BoundStage, ...] = (
            accepting.bind(
                **nodes, **accepted, qo_indptr=self.qo_indptr, bonus_tokens=self.root_tokens,
                target_tokens=self.target_tokens, logits=logits, flags=self._flags["accept"], **sampling,
            ),
            compacting.bind(
                **lengths, **accepted, planes=planes, out_cache_loc=self.out_cache_loc, qo_indptr=self.qo_indptr,
                num_nodes=self.num_nodes, new_prefix_lens=self.prefix_lens, freed_slots=self.freed_slots,
                freed_counts=self.freed_counts, req_to_token=req_to_token, flags=self._flags["compact"],
            ),
        )  # fmt: skip
        self._graph: Graph | None = None
        self._model: Model | None = None

    def verify_buffers(self) -> dict[str, Any]:
        """What ``VerifyPlan.bind`` takes of the step, by name.

        The spec: ``max_requests`` and ``max_nodes`` of this step and its ``mask``; q and out have B * N rows.
        """
        names = ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc", "custom_mask", "mask_indptr")
        return {name: getattr(self, name) for name in names}

    def launch(self, model: Model, stream: Any = None) -> None:
        """All of it, part after part: what a captured graph does, without the graph.

        ``model(handle)`` launches the target on the stream of that handle: it stores K and V of the rows in the slots
        of ``out_cache_loc``, verifies, and leaves ``target_tokens`` or ``logits``, by row (``qo_indptr``).
        """
        handle = stream_handle(stream)
        for part in self._before:
            part.launch(handle)
        model(handle)
        for part in self._after:
            part.launch(handle)

    def capture(self, model: Model) -> None:
        """Capture :meth:`launch` in a CUDA graph, for :meth:`replay`.  In the emulator: keep ``model`` for it.

        ``model`` must be ready to be captured: run it once before, so that libraries have made what they need.

        Raises DriverError where it does something that a capture does not allow.
        """
        if isinstance(self.runner, GpuRunner):
            self.runner.synchronize()
            self._graph = Graph(self.runner.device, lambda handle: self.launch(model, handle))
        self._model = model

    def replay(self, stream: Any = None) -> None:
        """The captured step again, with what stands in the buffers now; ArgumentError before :meth:`capture`."""
        if self._model is None:
            raise ArgumentError("replay", "capture() before it", "nothing captured")
        if self._graph is not None:
            self._graph.launch(stream_handle(stream))
        else:
            self.launch(self._model, stream)

    def graph_nodes(self) -> dict[str, int]:
        """Nodes of the captured graph by type, such as ``{"KERNEL": 7}``: no copy, no allocation, no host function."""
        if self._graph is None:
            raise ArgumentError("graph_nodes", "a step captured on a GPU", "none")
        return self._graph.node_types()

    def problems(self) -> list[str]:
        """What the parts found wrong with the last step's data, a line for each part and request; waits for the device.

        A request with a problem is left as it was from there on, and the others are not affected.
        """
        found = []
        for part, kind in FLAGS.items():
            flags = self._flags[part].get()
            found += [f"{part}: request {b}: {kind(int(flags[b])).name}" for b in np.flatnonzero(flags).tolist()]
        return found


def stages_of_step(
    *, max_requests: int, depth: int, top_k: int, max_nodes: int, max_kv_len: int, moves: bool,
    mask: Mask = Mask.TREE, padded: bool = False, vocab_size: int | None = None, sampled: bool = False,
    logits_dtype: str = "float32",
) -> list[Stage]:  # fmt: skip
    """The kernels of a :class:`VerifyStep` of these sizes, for :func:`nbverify.ahead.compile_ahead`.

    ``moves``: it has planes.  The others are its own arguments.  Raises ArgumentError as it does.
    """
    building, listing, masking, accepting, compacting = _plans(
        max_requests=max_requests, depth=depth, top_k=top_k, max_nodes=max_nodes, max_kv_len=max_kv_len, moves=moves,
        mask=mask, padded=padded, vocab_size=vocab_size, sampled=sampled, logits_dtype=logits_dtype, device="emulator",
    )  # fmt: skip
    return [building.stage, listing.stage, masking.stage, *accepting.stages, compacting.stage]


def _plans(
    *, max_requests: int, depth: int, top_k: int, max_nodes: int, max_kv_len: int, moves: bool, mask: Mask,
    padded: bool, vocab_size: int | None, sampled: bool, logits_dtype: str, device: str | Runner,
) -> tuple[BuildPlan, IndicesPlan, MaskPlan, AcceptPlan, CompactPlan]:  # fmt: skip
    """The parts of a step."""
    if not Mask(mask).reads_buffer:
        raise ArgumentError("mask", "a mask with a buffer: the rows are trees", repr(Mask(mask).value))
    batch: dict[str, Any] = {"max_requests": max_requests, "device": device}
    sizes: dict[str, Any] = {**batch, "max_nodes": max_nodes}
    return (
        BuildPlan(**sizes, depth=depth, top_k=top_k),
        IndicesPlan(**batch),
        MaskPlan(**sizes, max_kv_len=max_kv_len, mask=mask, padded=padded),
        AcceptPlan(**sizes, max_depth=depth, vocab_size=vocab_size, sampled=sampled, logits_dtype=logits_dtype),
        CompactPlan(**sizes, max_depth=depth, convention="move" if moves else "keep"),
    )
