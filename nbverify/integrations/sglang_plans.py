"""Plans for SGLang's verify calls: one for each GPU, number of nodes and types, bound to the buffers at hand.

    first call of a kind       a plan: compiled or from the cache, workspace allocated.  The warm-up forwards before a
                               capture are such calls, so nothing is made while a graph is captured
    first layer of a forward   a bind: checks all buffers (0.15 ms of host time), packs the parameters
    the other layers           a rebind: other addresses for q, K, V and out.  If the call looks like the one before
                               (:class:`~nbverify.integrations.sglang_calls.Pattern`), that is all that is checked
    a replay                   nothing: the graph has the launches, and they read SGLang's persistent buffers

A bind is kept for as long as the index buffers and the mask are the same objects, which they are for all layers of an
eager forward, and for the warm-ups and the capture of one shape.  They are held by weak references: a bind must not
keep the buffers of a forward that is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbverify.errors import ArgumentError, CompileError, DriverError
from nbverify.integrations.sglang_calls import FP8, OF_A_FORWARD, Call, address_of, dtype_name
from nbverify.kernels.planner import choose_tiles, limits_of
from nbverify.plan import BoundVerify, VerifyPlan
from nbverify.spec import Mask, VerifySpec

HELD = (*OF_A_FORWARD, "out_cache_loc")


@dataclass(frozen=True)
class Limits:
    """What a server allows, known when its backend is made."""

    max_requests: int
    max_prefix: int  # committed tokens of one request

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_prefix"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ArgumentError(name, "an int >= 1", repr(value))


class Place(Protocol):
    """Where the tensors live."""

    def make_plan(self, spec: VerifySpec, q: Any) -> VerifyPlan:
        """A plan on q's device."""

    def stream_of(self, q: Any) -> Any:
        """The stream that q is made on, for ``launch``."""

    def is_capturing(self) -> bool:
        """Whether that stream is recording a graph: nothing may be allocated now."""

    def opaque(self, function: Callable) -> Callable:
        """The function, kept out of what a compiler of models traces."""

    def arange(self, count: int, like: Any) -> Any:
        """0, 1, .. as int64, on the device of an array."""

    def zeros(self, count: int, dtype: str, like: Any) -> Any:
        """Flat, on the device of an array (or on a device)."""

    def lower_triangle(self, nodes: int, like: Any) -> Any:
        """[nodes, nodes] of an array's dtype and device: row i is 1 up to column i."""


class TorchGpu:
    """Torch tensors on CUDA devices."""

    def __init__(self) -> None:
        import torch

        # What Triton's own launcher asks; torch.cuda.current_stream() makes an object, in several times the time.
        self._current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def make_plan(self, spec: VerifySpec, q: Any) -> VerifyPlan:
        """A plan on q's device."""
        return VerifyPlan(spec, device=q.device.index)

    def stream_of(self, q: Any) -> int:
        """Torch's current stream: in a capture, SGLang's own."""
        if self._current_stream is not None:
            return self._current_stream(q.device.index)
        import torch

        return torch.cuda.current_stream(q.device).cuda_stream

    def is_capturing(self) -> bool:
        """Of the current stream."""
        import torch

        return torch.cuda.is_current_stream_capturing()

    def opaque(self, function: Callable) -> Callable:
        """As SGLang does with its own kernels."""
        import torch

        return torch.compiler.disable(function)

    def arange(self, count: int, like: Any) -> Any:
        """Int64."""
        import torch

        return torch.arange(count, device=like.device)

    def zeros(self, count: int, dtype: str, like: Any) -> Any:
        """``like`` may be a device."""
        import torch

        return torch.zeros(count, dtype=getattr(torch, dtype), device=getattr(like, "device", like))

    def lower_triangle(self, nodes: int, like: Any) -> Any:
        """In the dtype of the mask."""
        import torch

        return torch.tril(torch.ones(nodes, nodes, dtype=like.dtype, device=like.device))


def spec_of(call: Call, limits: Limits, mask: Mask) -> VerifySpec:
    """The spec of a call: the tensor-core kernel where it serves the head dims, else the plain one."""
    kv_dtype = dtype_name(call.k_cache)
    return with_kernel(
        VerifySpec(
            num_q_heads=int(call.q.shape[1]),
            num_kv_heads=int(call.k_cache.shape[1]),
            head_dim_qk=int(call.q.shape[2]),
            head_dim_v=int(call.out.shape[2]),
            shared_kv=call.is_shared,
            max_requests=limits.max_requests,
            max_nodes=call.nodes,
            max_kv_len=limits.max_prefix + call.nodes,
            sm_scale=call.sm_scale,
            dtype=dtype_name(call.q),
            kv_dtype=FP8 if kv_dtype == FP8 else None,
            mask=mask,
        )
    )


def with_kernel(spec: VerifySpec) -> VerifySpec:
    """The same with ``kernel="simt"`` if the tensor-core kernel does not serve its head dims."""
    try:
        choose_tiles(spec, limits_of((9, 0)))  # which widths are served does not depend on the device
    except ArgumentError:
        return replace(spec, kernel="simt")
    return spec


@dataclass
class Held:
    """A plan and what it is bound to."""

    plan: VerifyPlan
    bound: BoundVerify | None = None
    buffers: tuple[Callable[[], Any], ...] = ()
    rows: int = -1
    scales: tuple[float, float] = (1.0, 1.0)

    def serves(self, call: Call) -> bool:
        """Whether the bind is of this call's index buffers and mask."""
        if self.bound is None or call.q.shape[0] != self.rows:
            return False
        return self.is_of([getattr(call, name) for name in HELD])

    def is_of(self, buffers: Sequence[Any]) -> bool:
        """Whether the bind is of these, in the order of ``HELD``.  One that is gone is nobody's."""
        for held, buffer in zip(self.buffers, buffers, strict=True):  # a generator would cost 1 us more
            if buffer is None or held() is not buffer:
                return False
        return True


class Plans:
    """The plans of one backend object.  Not shared between backends: a plan is one launch in flight."""

    def __init__(self, limits: Limits, place: Place, say: Callable[[str], None]):
        self.limits, self.place, self._say = limits, place, say
        self._held: dict[tuple, Held] = {}
        self._refused: dict[tuple, str] = {}
        self._last: Held | None = None
        self.binds = self.rebinds = 0  # of the backend's life: for tests, and for whoever looks into a slow server

    def launch(self, call: Call, mask: Mask = Mask.FULL) -> str | None:
        """Verify; or say why not, and launch nothing."""
        self._last = None
        key = key_of(call, mask)
        held = self._held.get(key)
        if held is None:
            found = self._open(key, call, mask)
            if isinstance(found, str):
                return found
            held = found
        scales = (call.k_scale, call.v_scale)
        if held.serves(call):
            assert held.bound is not None
            v_cache = None if call.is_shared else call.v_cache
            try:
                if scales == held.scales:
                    held.bound.rebind(q=call.q, k_cache=call.k_cache, v_cache=v_cache, out=call.out)
                else:
                    held.bound.rebind(
                        q=call.q, k_cache=call.k_cache, v_cache=v_cache, out=call.out,
                        k_scale=call.k_scale, v_scale=call.v_scale,
                    )  # fmt: skip
                    held.scales = scales
                self.rebinds += 1
            except ArgumentError:  # other strides than the layer before: bind says what is wrong, if anything is
                held.bound = None
        else:
            held.bound = None
        if held.bound is None:
            try:
                held.bound = self._bind(held.plan, call)
            except ArgumentError as error:
                return str(error)
            held.buffers = tuple(weakref.ref(getattr(call, name)) for name in HELD)
            held.rows, held.scales = call.q.shape[0], scales
        held.bound.launch(self.place.stream_of(call.q))
        self._last = held
        return None

    def launch_again(self, buffers: Sequence[Any], q: Any, k_cache: Any, v_cache: Any, out: Any) -> bool:
        """The last launch, with the tensors of another layer; False, and no launch, if it is not the same otherwise.

        ``buffers`` are those of ``HELD``.  Scales, nodes and layouts of the mask are the caller's to compare.
        """
        held = self._last
        if held is None or held.bound is None or not held.is_of(buffers):
            return False
        try:
            if not held.plan.spec.shared_kv:
                held.bound.rebind(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
            elif address_of(k_cache) == address_of(v_cache) and v_cache.shape[2] == held.plan.spec.head_dim_v:
                held.bound.rebind(q=q, k_cache=k_cache, out=out)
            else:
                return False
        except ArgumentError:  # other shapes, types or strides: to be looked at anew
            return False
        self.rebinds += 1
        held.bound.launch(self.place.stream_of(q))
        return True

    def workspace_bytes(self) -> int:
        """Of all plans."""
        return sum(held.plan.workspace_bytes for held in self._held.values())

    def _open(self, key: tuple, call: Call, mask: Mask) -> Held | str:
        if key in self._refused:
            return self._refused[key]
        if self.place.is_capturing():
            return "no warm-up forward before the capture: a plan cannot be made in it"
        try:
            spec = spec_of(call, self.limits, mask)
            plan = self.place.make_plan(spec, call.q)
        except (ArgumentError, CompileError, DriverError) as error:
            self._refused[key] = str(error)
            return str(error)
        self._held[key] = Held(plan)
        self._say(describe(spec, plan))
        return self._held[key]

    def _bind(self, plan: VerifyPlan, call: Call) -> BoundVerify:
        self.binds += 1
        return plan.bind(
            q=call.q,
            k_cache=call.k_cache,
            v_cache=None if call.is_shared else call.v_cache,
            kv_indptr=call.kv_indptr,
            kv_indices=call.kv_indices,
            qo_indptr=call.qo_indptr,
            out_cache_loc=call.out_cache_loc,
            custom_mask=call.custom_mask,
            mask_indptr=call.mask_indptr,
            out=call.out,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )


def key_of(call: Call, mask: Mask) -> tuple:
    """What a plan depends on, of objects as the call has them: names are made once a plan, not once a layer."""
    q, k = call.q, call.k_cache
    _, heads, width = q.shape
    return (
        getattr(q, "device", None), call.nodes, q.dtype, k.dtype, heads, k.shape[1], width, call.out.shape[2],
        call.is_shared, call.sm_scale, mask,
    )  # fmt: skip


def describe(spec: VerifySpec, plan: VerifyPlan) -> str:
    """The line at start-up: what is taken over, and what it costs in memory."""
    heads = f"{spec.num_q_heads} heads" + ("" if spec.shared_kv else f" over {spec.num_kv_heads}")
    kind = "MLA" if spec.shared_kv else "GQA"
    return (
        f"tree verification of {spec.max_nodes} nodes is taken over: {kind} {spec.head_dim_qk}/{spec.head_dim_v}, "
        f"{heads}, {spec.dtype}, cache {spec.kv_dtype}, mask {spec.mask.value}, kernel {spec.kernel}, "
        f"up to {spec.max_requests} requests of {spec.max_kv_len:,} keys; workspace {plan.workspace_bytes:,} bytes"
    )
