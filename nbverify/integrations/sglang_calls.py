"""One verify call of SGLang's Triton backend: its arguments by name, and whether nbverify can take it.

The backend calls ``self.extend_attention_fwd(...)`` once a layer.  Its parameters have grown from version to version,
so they are looked up by name in the signature that is there.  The kernel gets the drafts' K and V as activations and
not where they were stored: that is known in the ``forward_extend`` around it (:class:`Surroundings`).

What is taken: TARGET_VERIFY with a mask, drafts stored by the same call, 16-bit queries, a pool of the same type or of
fp8 e4m3.  Everything else is SGLang's own, and :func:`take` says in a few words what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

FP8 = "float8_e4m3fn"
QUERY_DTYPES = ("bfloat16", "float16")

# Parameters that a call is made of, or whose value does not matter to a launch on the pool.
TAKEN = (
    "q_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr", "kv_indptr", "kv_indices", "custom_mask",
    "mask_indptr", "max_len_extend", "k_scale", "v_scale", "sm_scale",
)  # fmt: skip
WITHOUT_MEANING_HERE = {
    "k_extend": "drafts are read where the same call stored them",
    "v_extend": "as k_extend",
    "page_size": "kv_indices are slots of tokens at every page size",
    "extend_seq_lens_cpu": "lengths are read on the device",
}
# Parameters that nbverify does not compute, with the values that mean "not used".
UNUSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "is_causal": ("attention that is not causal", lambda value: value is True),
    "logit_cap": ("a logit cap", lambda value: not value),
    "skip_prefix_custom_mask": ("prefix bytes of the mask that count", lambda value: value is True),
    "sliding_window_size": ("a sliding window", lambda value: value is None or value < 0),
    "sinks": ("attention sinks", lambda value: value is None),
    "window_kv_offsets": ("a sliding window", lambda value: value is None),
    "xai_temperature_len": ("a temperature by length", lambda value: value is None or value <= 0),
    "lse_extend": ("log-sum-exps of parts (DCP)", lambda value: value is None),
    "skip_prefix": ("a part of the keys (DCP)", lambda value: not value),
    "skip_extend": ("a part of the keys (DCP)", lambda value: not value),
    "score_mod": ("a score modifier", lambda value: value is None),
    "aux_tensors": ("tensors for a score modifier", lambda value: value is None),
    "identity_kv_indices": ("K and V that are not the pool's", lambda value: not value),
}
READ = frozenset((*TAKEN, *WITHOUT_MEANING_HERE))

# The order of all versions: what differs from layer to layer comes first, then the buffers of a forward.
OF_A_LAYER = ("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer")
OF_A_FORWARD = ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")
PLAIN = (bool, int, float, str)


class Signature(NamedTuple):
    """The parameters of the stock function that is there."""

    names: tuple[str, ...]
    defaults: Mapping[str, Any]


def signature_of(function: Callable) -> Signature:
    """Names in order and defaults, of a function or of what a decorator made of one."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(tuple(p.name for p in named), {p.name: p.default for p in named if p.default is not p.empty})


def missing_parameters(signature: Signature) -> list[str]:
    """Those that no call can be taken without; 0.5.9 has no scales, which are then 1."""
    return [name for name in TAKEN if name not in signature.names and name not in ("k_scale", "v_scale")]


@dataclass(slots=True)
class Surroundings:
    """What the ``forward_extend`` around a verify call knows, and whether the call came."""

    out_cache_loc: Any
    is_stored: bool  # the drafts' K and V are in their slots: this call stores them, or stock reads them there
    layer_scales: tuple[Any, Any] = (None, None)  # k_scale, v_scale of the layer; None: it has none
    was_called: bool = False


class Call(NamedTuple):
    """What a launch takes, under nbverify's names."""

    q: Any
    k_cache: Any
    v_cache: Any
    out: Any
    kv_indptr: Any
    kv_indices: Any
    qo_indptr: Any
    out_cache_loc: Any
    custom_mask: Any
    mask_indptr: Any
    nodes: int
    sm_scale: float
    k_scale: float
    v_scale: float
    is_shared: bool  # MLA: V is the front of the K row


class Pattern:
    """A call that was taken, without its tensors: what looks the same is taken too, and needs no second look.

    Which leaves the tensors to be compared: those of the forward are the same objects (``buffers_of``), those of the
    layer differ in nothing but their addresses (``rebind`` checks that).
    """

    __slots__ = ("_count", "_names", "_options", "_plain", "buffers_of")

    def __init__(self, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._count, self._names, self._options = len(args), tuple(kwargs), tuple(kwargs.values())
        tensors = (*OF_A_LAYER, *OF_A_FORWARD)
        self._plain = [(i, args[i]) for i, name in enumerate(signature.names[: len(args)]) if name not in tensors]
        #: Of the positional arguments, in the order of ``OF_A_FORWARD``.
        self.buffers_of = itemgetter(*map(signature.names.index, OF_A_FORWARD))

    @staticmethod
    def can_be_made(signature: Signature, args: Sequence[Any]) -> bool:
        """Whether the tensors come as in every version so far: by position, and those of a layer first."""
        last = max(map(signature.names.index, OF_A_FORWARD))
        return signature.names[: len(OF_A_LAYER)] == OF_A_LAYER and len(args) > last

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any], around: Surroundings) -> bool:
        """Whether the verdict on another call is the same.  Loops, because this comes at every layer."""
        k_scale, v_scale = around.layer_scales
        if not around.is_stored or (k_scale is None) != (v_scale is None):
            return False
        if len(args) != self._count or tuple(kwargs) != self._names:
            return False
        for i, known in self._plain:
            value = args[i]
            if value is not known and (type(value) not in PLAIN or value != known):
                return False
        for value, known in zip(kwargs.values(), self._options, strict=True):
            if value is not known and (type(value) not in PLAIN or value != known):
                return False
        return True


def by_name(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the stock function; without those that were left out."""
    return {**dict(zip(signature.names, args, strict=False)), **kwargs}


def take(given: Mapping[str, Any], around: Surroundings, signature: Signature) -> Call | str:
    """The launch that a verify call asks for, or why it stays with the stock kernel.

    Asked at every layer, so it is cheap: nothing is read from the device.
    """
    why = why_arguments(given, around, signature) or why_dtypes(given)
    if why is not None:
        return why
    call = Call(
        q=given["q_extend"],
        k_cache=given["k_buffer"],
        v_cache=given["v_buffer"],
        out=given["o_extend"],
        kv_indptr=given["kv_indptr"],
        kv_indices=given["kv_indices"],
        qo_indptr=given["qo_indptr"],
        out_cache_loc=around.out_cache_loc,
        custom_mask=given["custom_mask"],
        mask_indptr=given["mask_indptr"],
        nodes=given["max_len_extend"],
        sm_scale=given["sm_scale"],
        k_scale=given.get("k_scale", 1.0),
        v_scale=given.get("v_scale", 1.0),
        is_shared=is_mla(given["k_buffer"], given["v_buffer"]),
    )
    return why_scales(call, around) or call


def why_arguments(given: Mapping[str, Any], around: Surroundings, signature: Signature) -> str | None:
    """What the call wants that nbverify does not compute, or does not know."""
    if given.get("custom_mask") is None:
        return "no custom_mask: a chain"
    if not around.is_stored:
        return "save_kv_cache=False: whether the drafts are in the pool, and how scaled, is not known"
    defaults = signature.defaults
    for name, value in given.items():
        if name in READ or value is defaults.get(name, READ):
            continue  # most arguments are their defaults, and no default asks for anything: a test has them all
        if name in UNUSED:
            what, is_unused = UNUSED[name]
            if not is_unused(value):
                return what
        elif not _is_default(value, defaults.get(name)):
            return f"{name}={_short(value)}, which this nbverify does not know"
    if given.get("sm_scale") is None:
        return "no sm_scale"
    if around.out_cache_loc is None or around.out_cache_loc.shape[0] < given["q_extend"].shape[0]:
        return "out_cache_loc is not one slot for each row of q"
    return None


def why_dtypes(given: Mapping[str, Any]) -> str | None:
    """Types that the kernels do not have."""
    q, k, v, out = (dtype_name(given[name]) for name in ("q_extend", "k_buffer", "v_buffer", "o_extend"))
    if q not in QUERY_DTYPES or out != q:
        return f"queries of {q}, out of {out}"
    if k != v or k not in (q, FP8):
        return f"queries of {q} with a cache of {k}" + (f" and {v}" if k != v else "")
    return None


def why_scales(call: Call, around: Surroundings) -> str | None:
    """Scales with which drafts read from the pool would not be what the stock kernel reads as activations.

    SGLang divides K by the layer's ``k_scale`` before it stores a row of MLA, and an fp8 row of others, and hands the
    kernel both scales only where the layer has both.
    """
    if call.is_shared and call.k_scale != call.v_scale:
        return f"MLA with k_scale={call.k_scale} and v_scale={call.v_scale}: K and V are one row"
    if (around.layer_scales[0] is None) != (around.layer_scales[1] is None):
        return "a layer with one scale of two"
    if not call.is_shared and (call.k_scale, call.v_scale) != (1.0, 1.0) and dtype_name(call.k_cache) != FP8:
        return "scales with a cache of 16 bits, which is stored unscaled"
    return None


def is_mla(k: Any, v: Any) -> bool:
    """Whether V is the front of the K row: one KV head, narrower, the same address."""
    _, heads, width = k.shape
    return heads == 1 and v.shape[2] < width and address_of(k) == address_of(v)


def address_of(array: Any) -> int:
    """Address of a torch tensor's or a numpy array's first element."""
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


def dtype_name(array: Any) -> str:
    """``bfloat16`` of torch.bfloat16 and of ml_dtypes' type."""
    return _name_of(array.dtype)


@cache
def _name_of(dtype: Hashable) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, PLAIN) and value == default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
