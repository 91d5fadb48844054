"""VerifySpec: everything a verify kernel is specialised for, and the limits its workspace is sized by."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

from nbverify.errors import ArgumentError

MAX_HEAD_DIM = 576
HEAD_DIM_STEP = 16  # one 32-byte sector of 16-bit elements, and the k of one tensor-core product
INT32_MAX = 2**31 - 1
MAX_KV_LEN = 2**31 - 128
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126  # the smallest normal one

DTYPES = ("bfloat16", "float16")
KV_DTYPE_FP8 = "float8_e4m3fn"
SPLITS = ("balanced", "fixed")
REDUCTIONS = ("grid_sync", "two_launch")
SCHEDULES = ("launch", "step")
KERNELS = ("mma", "simt")


class Mask(str, Enum):
    """How ``custom_mask`` says which draft nodes see which keys.  Never guessed from sizes.

    For a request with prefix length ``c`` and ``n`` nodes, row = the node that looks, column = the key:

    FULL    bytes ``[n, c + n]``, nonzero = visible (SGLang's FULL_MASK)
    TREE    bytes ``[n, n]``, the draft columns only (SGLang's QLEN_ONLY)
    PACKED  TREE as bits: ``ceil(n / 32)`` 32-bit words a row, node ``j`` is bit ``j % 32`` of word ``j // 32``
    CAUSAL  no buffer: node ``i`` sees drafts ``0..i``
    NONE    no buffer: every node sees every draft
    """

    FULL = "full"
    TREE = "tree"
    PACKED = "packed"
    CAUSAL = "causal"
    NONE = "none"

    @property
    def reads_buffer(self) -> bool:
        """Whether ``custom_mask`` and ``mask_indptr`` are required (else they are refused)."""
        return self in (Mask.FULL, Mask.TREE, Mask.PACKED)


@dataclass(frozen=True)
class VerifySpec:
    """One verify attention problem.  Hashable; checked when made.  Use :meth:`mla` or :meth:`gqa`.

    Parameters
    ----------
    num_q_heads, num_kv_heads
        Heads on this GPU.  ``num_q_heads`` is any multiple of ``num_kv_heads``.
    head_dim_qk, head_dim_v
        Widths of a key and of a value, multiples of 16 up to 576.
    shared_kv
        True for MLA: V is the first ``head_dim_v`` columns of the K row, and there is no ``v_cache``.
    max_requests, max_nodes, max_kv_len
        Largest batch, nodes of one request, and ``prefix + nodes`` of one request.  They size the workspace;
        they are no part of the compiled kernel.
    sm_scale
        Factor of ``q . k`` before the softmax (Kimi K2: 0.144680, not ``head_dim ** -0.5``).
    dtype, kv_dtype
        "bfloat16" or "float16" for q and out; the cache's dtype is the same one, or "float8_e4m3fn".
    mask, prefix_visible
        Layout of ``custom_mask``, see :class:`Mask`.  ``prefix_visible=False`` honours the prefix bytes of FULL;
        the default, as in SGLang, does not read them.
    split
        "balanced": key tiles are cut evenly over the blocks, over fewer of them where more would not pay.
        "fixed": cuts depend on a request's own lengths and the compute capability, so its bits do not depend on its
        batch.
    reduction
        "grid_sync": one cooperative launch.  "two_launch": two plain ones, bitwise the same result.
    schedule
        "launch": every launch works out from the lengths who does what.  "step": a small kernel of its own does, once
        for all launches that use the same lengths, such as the layers of a model; see ``BoundVerify.schedule``.  The
        results are bitwise the same.  Only with ``kernel="mma"``.
    kernel
        "mma": tensor cores; not for every spec (head dims up to 256, or shared K/V and a ``head_dim_v`` that is a
        multiple of 128): the plan refuses the others by name.  "simt": the plain kernel, slower, for all.
    score_mod
        ``score_mod(score, request, head, node, key) -> score``: a plain function, compiled into the kernel.

    Raises
    ------
    ArgumentError
        Names the field, what was expected and what came.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    shared_kv: bool
    max_requests: int
    max_nodes: int
    max_kv_len: int
    sm_scale: float
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    mask: Mask = Mask.FULL
    prefix_visible: bool = True
    split: str = "balanced"
    reduction: str = "grid_sync"
    schedule: str = "launch"
    kernel: str = "mma"
    score_mod: Callable | None = None

    @classmethod
    def mla(
        cls,
        num_q_heads: int,
        *,
        head_dim_qk: int = 576,
        head_dim_v: int = 512,
        max_requests: int,
        max_nodes: int,
        max_kv_len: int,
        sm_scale: float,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
        mask: Mask | str = Mask.FULL,
        prefix_visible: bool = True,
        split: str = "balanced",
        reduction: str = "grid_sync",
        schedule: str = "launch",
        kernel: str = "mma",
        score_mod: Callable | None = None,
    ) -> VerifySpec:
        """Multi-head latent attention: all query heads share one latent row, V is its first ``head_dim_v`` columns."""
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=1,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_v,
            shared_kv=True,
            max_requests=max_requests,
            max_nodes=max_nodes,
            max_kv_len=max_kv_len,
            sm_scale=sm_scale,
            dtype=dtype,
            kv_dtype=kv_dtype,
            mask=mask,  # type: ignore[arg-type]  # a str is turned into a Mask in __post_init__
            prefix_visible=prefix_visible,
            split=split,
            reduction=reduction,
            schedule=schedule,
            kernel=kernel,
            score_mod=score_mod,
        )

    @classmethod
    def gqa(
        cls,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        max_requests: int,
        max_nodes: int,
        max_kv_len: int,
        sm_scale: float,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
        mask: Mask | str = Mask.FULL,
        prefix_visible: bool = True,
        split: str = "balanced",
        reduction: str = "grid_sync",
        schedule: str = "launch",
        kernel: str = "mma",
        score_mod: Callable | None = None,
    ) -> VerifySpec:
        """Grouped-query attention (multi-head with ``num_kv_heads == num_q_heads``), K and V in caches of their own."""
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            shared_kv=False,
            max_requests=max_requests,
            max_nodes=max_nodes,
            max_kv_len=max_kv_len,
            sm_scale=sm_scale,
            dtype=dtype,
            kv_dtype=kv_dtype,
            mask=mask,  # type: ignore[arg-type]
            prefix_visible=prefix_visible,
            split=split,
            reduction=reduction,
            schedule=schedule,
            kernel=kernel,
            score_mod=score_mod,
        )

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "max_requests", "max_nodes", "max_kv_len"):
            _check_int(name, getattr(self, name), 1, INT32_MAX)
        if self.num_q_heads % self.num_kv_heads:
            raise ArgumentError("num_q_heads", f"a multiple of num_kv_heads={self.num_kv_heads}", self.num_q_heads)
        for name in ("head_dim_qk", "head_dim_v"):
            width = getattr(self, name)
            _check_int(name, width, HEAD_DIM_STEP, MAX_HEAD_DIM)
            if width % HEAD_DIM_STEP:
                raise ArgumentError(name, f"a multiple of {HEAD_DIM_STEP}", width)
        if not isinstance(self.shared_kv, bool):
            raise ArgumentError("shared_kv", "a bool", repr(self.shared_kv))
        if self.shared_kv and self.head_dim_v > self.head_dim_qk:
            raise ArgumentError("head_dim_v", f"<= head_dim_qk={self.head_dim_qk} with shared K/V", self.head_dim_v)
        if self.shared_kv and self.num_kv_heads != 1:
            raise ArgumentError("num_kv_heads", "1 with shared K/V", self.num_kv_heads)
        if self.max_nodes * self.group > INT32_MAX:
            raise ArgumentError("max_nodes", f"max_nodes * group({self.group}) <= {INT32_MAX}", self.max_nodes)
        if self.max_kv_len > MAX_KV_LEN:
            raise ArgumentError(
                "max_kv_len", f"<= {MAX_KV_LEN} (keys are counted in int32, tiles to their end)", self.max_kv_len
            )
        if self.max_kv_len < self.max_nodes:
            raise ArgumentError(
                "max_kv_len", f">= max_nodes={self.max_nodes} (it bounds prefix + nodes)", self.max_kv_len
            )
        scale: Any = self.sm_scale
        if type(scale) is bool or not issubclass(type(scale), numbers.Real):
            raise ArgumentError("sm_scale", "a number", repr(scale))
        if not abs(scale) <= FLOAT32_MAX:  # NaN too
            raise ArgumentError("sm_scale", "a finite float32", scale)
        object.__setattr__(self, "sm_scale", float(scale))
        _check_choice("dtype", self.dtype, DTYPES)
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self.dtype)
        _check_choice("kv_dtype", self.kv_dtype, (self.dtype, KV_DTYPE_FP8))
        try:
            object.__setattr__(self, "mask", Mask(self.mask))
        except ValueError:
            raise ArgumentError("mask", f"one of {[m.value for m in Mask]}", repr(self.mask)) from None
        if not isinstance(self.prefix_visible, bool):
            raise ArgumentError("prefix_visible", "a bool", repr(self.prefix_visible))
        if not self.prefix_visible and self.mask is not Mask.FULL:
            raise ArgumentError(
                "prefix_visible", f"True with mask={self.mask.value!r}: only FULL has prefix bytes", False
            )
        _check_choice("split", self.split, SPLITS)
        _check_choice("reduction", self.reduction, REDUCTIONS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("kernel", self.kernel, KERNELS)
        if self.schedule == "step" and self.kernel != "mma":
            raise ArgumentError("schedule", f"'launch' with kernel={self.kernel!r}", repr(self.schedule))
        if self.score_mod is not None:
            expected = "a plain Python function of 5 parameters (score, request, head, node, key)"
            if not isinstance(self.score_mod, FunctionType):
                raise ArgumentError("score_mod", expected, repr(self.score_mod))
            code = self.score_mod.__code__
            if code.co_argcount != 5 or code.co_kwonlyargcount:
                raise ArgumentError("score_mod", expected, f"one of {code.co_argcount + code.co_kwonlyargcount}")
            if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
                raise ArgumentError("score_mod", expected, "a generator or a coroutine")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds float8 e4m3 bytes."""
        return self.kv_dtype == KV_DTYPE_FP8

    @property
    def compile_key(self) -> tuple:
        """Everything the compiled code depends on.  Sizes, scales and index widths are runtime parameters."""
        return (
            self.kernel,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.head_dim_v,
            self.shared_kv,
            self.dtype,
            self.kv_dtype,
            self.mask.value,
            self.prefix_visible,
            self.split,
            self.reduction,
            self.schedule,
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(name, "an int", repr(value))
    if not low <= value <= high:
        raise ArgumentError(name, f"{low} <= {name} <= {high}", value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(name, f"one of {choices}", repr(value))
