"""Tree verification of one TritonAttnBackend object, taken over.

Two attributes of the object are replaced, and the class is left as it is, so that every check of SGLang for the name
"triton" or for the class keeps working:

    forward_extend         notes what the kernel is not told (the drafts' slots, whether they are stored), then stock
    extend_attention_fwd   what stock's forward_extend launches: nbverify if it can, else the stock kernel

Stock keeps the store of K and V, scales, outputs that it is given, windows, parallel contexts, and its own metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nbverify.errors import ArgumentError
from nbverify.integrations.sglang_calls import (
    OF_A_LAYER,
    Call,
    Pattern,
    Surroundings,
    by_name,
    missing_parameters,
    signature_of,
    take,
)
from nbverify.integrations.sglang_plans import Limits, Place, Plans
from nbverify.spec import Mask

Say = Callable[[str], None]


class Takeover:
    """What stands in for the stock kernel in one backend object; made by :func:`take_over`."""

    def __init__(self, backend: Any, limits: Limits, place: Place, say: Say):
        self.backend, self.place = backend, place
        self.plans = Plans(limits, place, say)
        self.compact_mask: Any = None  # the buffer, if the mask is TREE; see use_compact_mask
        self._say, self._said = say, set[str]()
        self._around: Surroundings | None = None
        self._stock_forward, self._stock_kernel = backend.forward_extend, backend.extend_attention_fwd
        self._signature = signature_of(self._stock_kernel)
        missing = missing_parameters(self._signature)
        if missing:
            raise ArgumentError("extend_attention_fwd", f"a function with {missing}", list(self._signature.names))
        self._pattern: Pattern | None = None  # of the last call that was taken
        self._tree_starts: dict[tuple[int, int], Any] = {}
        self.taken = self.stock = 0  # verify calls, one a layer

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Any:
        """In place of the backend's method."""
        if not forward_batch.forward_mode.is_target_verify():
            return self._stock_forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **others)
        scales = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
        # Without K and V the stock method reads the drafts from their slots, and applies no scale to them.
        is_stored = bool(save_kv_cache) if k is not None else scales == (None, None)
        around = Surroundings(forward_batch.out_cache_loc, is_stored, scales)
        outer, self._around = self._around, around
        try:
            result = self._stock_forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **others)
        finally:
            self._around = outer
        if not around.was_called:
            self._leave(why_elsewhere(self.backend))
        return result

    def extend_attention_fwd(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the kernel: the backend's arguments, whatever they are in this version."""
        around = self._around
        if around is None:
            return self._stock_kernel(*args, **kwargs)
        around.was_called = True
        if self._launch_again(args, kwargs, around):
            self.taken += 1
            return None
        given = by_name(self._signature, args, kwargs)
        call = take(given, around, self._signature)
        if not isinstance(call, str):
            why = self._launch(call)
            if why is None:
                self.taken += 1
                can_be_made = self.compact_mask is None and Pattern.can_be_made(self._signature, args)
                self._pattern = Pattern(self._signature, args, kwargs) if can_be_made else None
                return None
            call = why
        self._leave(call, reads_mask=given.get("custom_mask") is not None)
        return self._stock_kernel(*args, **kwargs)

    def _launch_again(self, args: Sequence[Any], kwargs: Mapping[str, Any], around: Surroundings) -> bool:
        """A call like the last one that was taken, for another layer: launched, with less to look at.

        Not with a compact mask, whose starts are not the call's own.
        """
        pattern = self._pattern
        if pattern is None or self.compact_mask is not None or not pattern.fits(args, kwargs, around):
            return False
        q, _, _, out, k_cache, v_cache = args[: len(OF_A_LAYER)]
        buffers = (*pattern.buffers_of(args), around.out_cache_loc)
        return self.plans.launch_again(buffers, q, k_cache, v_cache, out)

    def _launch(self, call: Call) -> str | None:
        if self.compact_mask is None:
            return self.plans.launch(call)
        starts = self._starts_of_trees(call)
        return self.plans.launch(call._replace(mask_indptr=starts), Mask.TREE)

    def _starts_of_trees(self, call: Call) -> Any:
        """``mask_indptr`` of [nodes, nodes] blocks: SGLang's own is that of a FULL mask in every mode."""
        requests = call.mask_indptr.shape[0] - 1
        key = requests, call.nodes
        if key not in self._tree_starts:
            if self.place.is_capturing():
                raise ArgumentError("compact mask", "a warm-up forward before the capture", "none")
            self._tree_starts[key] = self.place.arange(requests + 1, call.mask_indptr) * call.nodes**2
        return self._tree_starts[key]

    def _leave(self, why: str, *, reads_mask: bool = True) -> None:
        """A verify call stays with stock: say why, once."""
        if self.compact_mask is not None and reads_mask:
            # The stock kernels read [nodes, prefix + nodes]: wrong answers, and no error.
            raise ArgumentError("compact_mask", "off: a verify call here is not nbverify's", why)
        self.stock += 1
        if why not in self._said:
            self._said.add(why)
            self._say(f"a verify call stays with the stock kernel: {why}")


def why_elsewhere(backend: Any) -> str:
    """Why a verify did not come to ``extend_attention_fwd``."""
    if getattr(backend, "dcp_size", 1) > 1:
        return "decode context parallelism"
    if getattr(backend, "enable_deterministic", False):
        return "deterministic inference, which has a kernel of its own"
    return "the backend has chosen another of its kernels"


def take_over(backend: Any, runner: Any, *, place: Place, say: Say) -> Takeover:
    """Replace the two attributes.

    Parameters
    ----------
    backend
        A TritonAttnBackend that has been constructed for ``runner``.
    place
        Where its tensors live.
    say
        Takes a line of text: what is taken over, with its memory; what is not, and why.  Each once.

    Raises
    ------
    ArgumentError
        The stock function lacks a parameter that a launch is made from.
    """
    table = runner.req_to_token_pool.req_to_token
    limits = Limits(max_requests=int(runner.req_to_token_pool.size), max_prefix=int(table.shape[1]))
    takeover = Takeover(backend, limits, place, say)
    backend.forward_extend = takeover.forward_extend
    backend.extend_attention_fwd = place.opaque(takeover.extend_attention_fwd)
    if hasattr(type(backend), "verify_mask"):  # 0.5.18 on
        _write_masks_that_replays_leave_out(backend, takeover)
    return takeover


# ---- replays without a mask


def _write_masks_that_replays_leave_out(backend: Any, takeover: Takeover) -> None:
    """A graph captured with a mask reads the buffer; a replay whose batch has none is a chain, and must say so there.

    SGLang avoids the case for its own DFLASH by the backend's class; algorithms that are plugins may come here.
    """
    stock = backend.init_forward_metadata_out_graph
    captured: set[int] = set()

    def init_forward_metadata_out_graph(forward_batch: Any, in_capture: bool = False) -> None:
        stock(forward_batch, in_capture=in_capture)
        if not forward_batch.forward_mode.is_target_verify():
            return
        requests = len(forward_batch.req_pool_indices)
        spec_info = forward_batch.spec_info
        has_mask = spec_info is not None and spec_info.custom_mask is not None
        if in_capture:
            (captured.add if has_mask else captured.discard)(requests)
        elif not has_mask and requests in captured:
            nodes = backend._target_verify_num_tokens_per_req(spec_info)
            if takeover.compact_mask is not None:
                starts, lens = takeover.place.arange(requests, backend.mask_indptr) * nodes**2, None
            else:
                starts, lens = backend.mask_indptr[:requests], forward_batch.seq_lens[:requests]
            write_chain(backend.verify_mask.buffer, starts, lens, nodes, takeover.place)

    backend.init_forward_metadata_out_graph = init_forward_metadata_out_graph


def write_chain(mask: Any, starts: Any, seq_lens: Any, nodes: int, place: Place) -> None:
    """Node i sees nodes 0..i: the draft columns of every request, in a flat FULL mask, or a TREE one (no seq_lens).

    Prefix columns are left as they are: no kernel in use here reads them.
    """
    row = place.arange(nodes, mask)
    prefix = 0 * starts if seq_lens is None else seq_lens
    first = (starts + prefix)[:, None, None]
    mask[first + row[:, None] * (prefix + nodes)[:, None, None] + row] = place.lower_triangle(nodes, mask)


# ---- the compact mask


def why_no_compact_mask(backend: Any, runner: Any) -> str | None:
    """Why the mask stays FULL although a compact one is asked for."""
    if not hasattr(type(backend), "verify_mask"):
        return "this SGLang has no verify_mask (0.5.18 and later do)"
    algorithm = getattr(runner, "spec_algorithm", None)
    if algorithm is None or not algorithm.is_eagle():
        return "only the EAGLE worker writes a mask of [nodes, nodes]"
    if getattr(backend, "dcp_size", 1) > 1 or getattr(backend, "enable_deterministic", False):
        return why_elsewhere(backend)
    if (getattr(backend, "sliding_window_size", None) or -1) > 0:
        return "layers with a sliding window stay with the stock kernel, which reads a FULL mask"
    return None


def use_compact_mask(takeover: Takeover, module: Any, mode: Any) -> None:
    """Have the backend make a mask buffer of [requests, nodes, nodes + 1] bytes, whose layout is TREE.

    Parameters
    ----------
    module
        The one that defines the backend: its ``maybe_create_verify_mask`` is what makes the buffer.
    mode
        SGLang's ``TreeMaskMode.QLEN_ONLY``.

    The capture copies a sentinel of ``requests * (nodes + 1) * nodes`` ones into the buffer, hence the one column more.
    Blocks are ``nodes * nodes`` bytes apart all the same.
    """
    backend = takeover.backend
    stock = backend.init_cuda_graph_state

    def init_cuda_graph_state(max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        with _compact(module, mode, takeover.place):
            stock(max_bs, max_num_tokens, *args, **kwargs)
        takeover.compact_mask = None if backend.verify_mask is None else backend.verify_mask.buffer

    backend.init_cuda_graph_state = init_cuda_graph_state


@contextmanager
def _compact(module: Any, mode: Any, place: Place) -> Any:
    """``maybe_create_verify_mask`` that makes a compact one; so the large one is never allocated, not for a moment."""
    stock = module.maybe_create_verify_mask

    def create(
        *, is_draft_runner: bool, skip_prefill: bool, max_bs: int, num_draft_tokens: int | None, device: Any,
        is_read: bool, **others: Any,
    ) -> Any:  # fmt: skip
        if is_draft_runner or skip_prefill or not num_draft_tokens:
            return None
        cells = max_bs * num_draft_tokens * (num_draft_tokens + 1)
        buffer = place.zeros(cells, "uint8", device)
        return module.VerifyMask(buffer=buffer, mode=mode, max_bs=max_bs, is_read=is_read)

    module.maybe_create_verify_mask = create
    try:
        yield
    finally:
        module.maybe_create_verify_mask = stock
