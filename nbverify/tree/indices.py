"""The next step's prefix: ``kv_indptr`` and ``kv_indices`` from the table of slots and the new lengths.

After compaction request ``b`` has ``prefix_lens[b]`` tokens, whose slots stand at the start of its row of
``req_to_token``.  A verify kernel reads all of them as one list: request ``b``'s are
``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``.  :func:`prefix_indices` is the definition; :class:`IndicesPlan` does
the same in one launch, into static buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nbverify.emulator import Emulator
from nbverify.spec import INT32_MAX
from nbverify.stages import Runner, Stage, array, check_array, index_array, open_runner, scalar
from nbverify.tree.binding import BoundStage, check_int, refuse_overlaps
from nbverify.tree.kernels.records import INDICES_THREADS, IndexFlag

INDEX = ("int32", "int64")
BLOCKS_PER_SM = 4
WRITTEN = ("kv_indptr", "kv_indices", "flags")
MIN_PARTS = 8  # blocks a request at least: one long request among many short ones is still shared out

PARAMETERS = (
    array("req_to_token", "int32"),
    *index_array("req_pool_indices"),
    *index_array("prefix_lens"),
    *index_array("kv_indptr"),
    *index_array("kv_indices"),
    array("flags", "int32"),
    scalar("max_requests"),
    scalar("num_table_rows"),
    scalar("max_context"),
    scalar("capacity"),
    scalar("num_parts"),
)


class PrefixIndices(NamedTuple):
    """The ragged list of prefix slots.

    Attributes
    ----------
    kv_indptr
        ``[B + 1] int32``: starts, never beyond the capacity.
    kv_indices
        ``[kv_indptr[B]] int32``.
    flags
        ``[B] int32``, an :class:`IndexFlag`.
    """

    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    flags: np.ndarray


def prefix_indices(
    *, req_to_token: np.ndarray, req_pool_indices: np.ndarray, prefix_lens: np.ndarray, capacity: int
) -> PrefixIndices:
    """The definition, in numpy.

    Parameters
    ----------
    req_to_token
        ``[R, max_context] int32``.
    req_pool_indices
        ``[B]`` int32 or int64: each request's row.
    prefix_lens
        ``[B]`` int32 or int64.
    capacity
        Entries that the list may have: of a request that reaches beyond it, what fits is listed.

    Returns
    -------
    PrefixIndices
        A request with BAD_ROW or BAD_LENGTH has no entries, one with CUT fewer than its length; others are not
        affected, except that the capacity is shared.
    """
    num_rows, max_context = req_to_token.shape
    flags = np.zeros(len(prefix_lens), np.int32)
    starts, slots = [0], [np.empty(0, np.int32)]
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), prefix_lens.tolist(), strict=True)):
        if not 0 <= row < num_rows:
            flags[b] = IndexFlag.BAD_ROW
        elif not 0 <= length <= max_context:
            flags[b] = IndexFlag.BAD_LENGTH
        taken = 0 if flags[b] else min(length, capacity - starts[-1])
        if not flags[b] and taken < length:
            flags[b] = IndexFlag.CUT
        starts.append(starts[-1] + taken)
        if taken:
            slots.append(req_to_token[row, :taken])
    return PrefixIndices(np.array(starts, np.int32), np.concatenate(slots), flags)


class IndicesPlan:
    """:func:`prefix_indices` on the device: one launch.

    Parameters
    ----------
    max_requests
        B: rows of the static buffers.
    device
        None, an ordinal, "emulator", an ``nv.Emulator``, or a runner of :func:`nbverify.stages.open_runner`.

    Raises
    ------
    ArgumentError
        Either of them out of its range.
    """

    def __init__(self, *, max_requests: int, device: int | str | Emulator | Runner | None = None):
        self.max_requests = check_int("max_requests", max_requests, 1, INT32_MAX)
        self.runner = open_runner(device)

    @property
    def stage(self) -> Stage:
        """The kernel, as it is compiled."""
        return Stage("prefix_indices", "nbverify.tree.kernels.indices", PARAMETERS, threads=INDICES_THREADS)

    def bind(
        self,
        *,
        req_to_token: Any,
        req_pool_indices: Any,
        prefix_lens: Any,
        kv_indptr: Any,
        kv_indices: Any,
        flags: Any,
    ) -> BoundStage:
        """Check the arrays and pack the parameters: once.

        Parameters
        ----------
        req_to_token, req_pool_indices, prefix_lens
            As in :func:`prefix_indices`, with ``B = max_requests``, in C order.
        kv_indptr, kv_indices
            Written: ``[B + 1]`` and ``[capacity]``, int32 or int64.  What lies beyond ``kv_indptr[B]`` is not touched.
        flags
            Written: ``[B] int32``.

        Raises
        ------
        ArgumentError
            A wrong dtype, shape, layout or device, or a written array that shares memory with another one.
        """
        requests, host = self.max_requests, self.runner.emulated
        buffers = {
            "req_to_token": req_to_token,
            "req_pool_indices": req_pool_indices,
            "prefix_lens": prefix_lens,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "flags": flags,
        }
        infos = {
            "req_to_token": check_array("req_to_token", req_to_token, ("int32",), (None, None), host=host),
            "req_pool_indices": check_array("req_pool_indices", req_pool_indices, INDEX, (requests,), host=host),
            "prefix_lens": check_array("prefix_lens", prefix_lens, INDEX, (requests,), host=host),
            "kv_indptr": check_array("kv_indptr", kv_indptr, INDEX, (requests + 1,), host=host),
            "kv_indices": check_array("kv_indices", kv_indices, INDEX, (None,), host=host),
            "flags": check_array("flags", flags, ("int32",), (requests,), host=host),
        }
        refuse_overlaps(infos, WRITTEN)
        num_rows, max_context = infos["req_to_token"].shape
        num_parts = max(MIN_PARTS, -(-BLOCKS_PER_SM * self.runner.num_sms // requests))
        scalars = {
            "max_requests": requests,
            "num_table_rows": num_rows,
            "max_context": max_context,
            "capacity": min(infos["kv_indices"].shape[0], INT32_MAX),
            "num_parts": num_parts,
        }
        return BoundStage(self.runner.bind(self.stage, requests * num_parts, buffers, scalars))
