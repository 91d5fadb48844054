"""The contract: ONE table of everything a kernel is given.

A kernel body has a single parameter, ``args``: a ``VerifyArgs`` named tuple whose fields are generated here, in
table order.  The kernels' signature (compile.py), the order in which the launcher packs parameters (launch.py),
every check in ``bind`` (plan.py) and the table in docs/contract.md are derived from the same rows, so they cannot
drift apart.

How a buffer reaches a kernel
    ``name``               flat 1-D array over its storage, raw bits (bf16 is uint16), extent = last element + 1
    ``name_stride_axis``   int64, elements between neighbours along that axis, for each axis with a free stride
    ``name_words``         int64, index buffers only: 1 for int32, 2 for int64.  Index buffers are arrays of 32-bit
                           words, so that one compiled kernel takes either width for each of them (kernels/indices.py)
An absent buffer is a null pointer of extent 0.  Scalars follow the buffers.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import cache

from nbverify.spec import Mask, VerifySpec

INDEX = ("int32", "int64")
ROW_ALIGNMENT_BYTES = 16  # K, V, q and out rows start on such an address, so that copies of 16 bytes are legal


@dataclass(frozen=True)
class Buffer:
    """One row of the table.

    ``dtypes``, ``storage`` and ``needed`` may depend on the spec: they are the names of entries in the
    functions below.  ``axes`` are symbolic extents (see :func:`dims_of`); an axis written ``">=x"`` is a lower
    bound, because a static buffer may be larger than today's batch needs.
    """

    name: str
    kind: str  # "rows": 16-bit or fp8 matrix rows; "index"; "mask"; "float": float32; the others are the plan's own
    axes: tuple[str, ...]
    access: str  # "read", "write", or "read, write" for scratch
    note: str
    free_strides: tuple[str, ...] = ()  # names of the leading axes whose stride is a runtime parameter
    optional: bool = False


@dataclass(frozen=True)
class Scalar:
    """A number passed by value."""

    name: str
    dtype: str
    note: str


BUFFERS: tuple[Buffer, ...] = (
    Buffer(
        "q", "rows", ("num_tokens", "num_q_heads", "head_dim_qk"), "read",
        "query rows, all nodes of all requests", ("token", "head"),
    ),
    Buffer(
        "k_cache", "rows", ("num_slots", "num_kv_heads", "head_dim_qk"), "read",
        "K pool; MLA: V is its first head_dim_v columns", ("slot", "head"),
    ),
    Buffer(
        "v_cache", "rows", ("num_slots", "num_kv_heads", "head_dim_v"), "read",
        "V pool; absent (and refused) for MLA", ("slot", "head"),
    ),
    Buffer("kv_indptr", "index", ("num_requests+1",), "read", "prefix sums of prefix lengths"),
    Buffer(
        "kv_indices", "index", (">=0",), "read",
        "prefix slots; at least kv_indptr[B] of them, what stands past the end is never dereferenced",
    ),
    Buffer("qo_indptr", "index", ("num_requests+1",), "read", "prefix sums of node counts, may be ragged"),
    Buffer(
        "out_cache_loc", "index", (">=num_tokens",), "read",
        "draft slots in node order; their K and V are already stored",
    ),
    Buffer(
        "custom_mask", "mask", (">=0",), "read",
        "nonzero (or bit set) = visible; positions outside the buffer count as hidden; absent for CAUSAL and NONE",
    ),
    Buffer(
        "mask_indptr", "index", ("num_requests+1",), "read",
        "start of each request's block, in elements of custom_mask; only starts are read; absent for CAUSAL and NONE",
    ),
    Buffer(
        "out", "rows", ("num_tokens", "num_q_heads", "head_dim_v"), "write",
        "rows below qo_indptr[B] are all written, later rows are not touched", ("token", "head"),
    ),
    Buffer(
        "lse", "float", ("num_tokens", "num_q_heads"), "write",
        "natural log of the sum of exponentials; -inf for a row that sees nothing", ("token",), optional=True,
    ),
    Buffer(
        "partial_o", "scratch", ("num_partials", "rows_per_tile", "head_dim_v"), "read, write",
        "unnormalised output of a segment; the plan's workspace",
    ),
    Buffer(
        "partial_ml", "scratch", ("num_partials", "rows_per_tile", "2"), "read, write",
        "running maximum (base 2) and sum of a segment's rows; the plan's workspace",
    ),
    Buffer(
        "arrivals", "counter", ("1",), "read, write",
        "the grid's barrier (reduce/grid_sync.py); the plan's workspace",
    ),
    Buffer(
        "step_table", "table", ("2*(max_requests+1)",), "read, write",
        "schedule='step': the work table (kernels/schedule.py); the plan's workspace",
    ),
    Buffer(
        "step_segments", "segments", ("grid", "18"), "read, write",
        "schedule='step': each block's first segment (kernels/segments.py); the plan's workspace",
    ),
    Buffer(
        "findings", "findings", ("num_checks", "3"), "read, write",
        "what debug=True found: count, position, value per check; absent otherwise",
    ),
)  # fmt: skip

SCALARS: tuple[Scalar, ...] = (
    Scalar("num_tokens", "int64", "T: rows of q and out"),
    Scalar("num_requests", "int64", "B: requests in this launch, padded ones included"),
    Scalar("num_slots", "int64", "rows of the KV pool"),
    Scalar("max_nodes", "int64", "nodes of one request are clamped to this"),
    Scalar("max_kv_len", "int64", "prefix + nodes of one request are clamped to this"),
    Scalar("max_chunks", "int64", "split='fixed': most chunks of a request, or one for each of its row units"),
    Scalar("score_scale", "float32", "sm_scale * k_scale"),
    Scalar("v_scale", "float32", "factor of the output, applied once, at the end"),
)

BUFFER: dict[str, Buffer] = {b.name: b for b in BUFFERS}
OWN_KINDS = ("scratch", "counter", "table", "segments", "findings")  # of the plan
CALLER_BUFFERS: tuple[str, ...] = tuple(b.name for b in BUFFERS if b.kind not in OWN_KINDS)


def is_needed(buffer: Buffer, spec: VerifySpec) -> bool | None:
    """True: must be given.  False: must not be.  None: may be."""
    if buffer.name == "v_cache":
        return not spec.shared_kv
    if buffer.name in ("custom_mask", "mask_indptr"):
        return spec.mask.reads_buffer
    return None if buffer.optional else True


def accepted_dtypes(buffer: Buffer, spec: VerifySpec) -> tuple[str, ...]:
    """Dtype names ``bind`` takes for a buffer: the exact one first, then what stands for its raw bits."""
    if buffer.kind == "index":
        return INDEX
    if buffer.kind == "mask":
        return ("uint32", "int32") if spec.mask is Mask.PACKED else ("bool", "uint8")
    if buffer.kind in ("float", "scratch"):
        return ("float32",)
    if buffer.kind == "counter":
        return ("uint32",)
    if buffer.kind == "table":
        return ("int32",)
    if buffer.kind in ("segments", "findings"):
        return ("int64",)
    if buffer.name in ("k_cache", "v_cache") and spec.is_fp8:
        return ("float8_e4m3fn", "uint8")
    return (spec.dtype, "uint16", "int16")


def storage_dtype(buffer: Buffer, spec: VerifySpec) -> str:
    """Element type of the flat array that the kernel sees."""
    return {
        "index": "int32",
        "mask": "uint32" if spec.mask is Mask.PACKED else "uint8",
        "float": "float32",
        "scratch": "float32",
        "counter": "uint32",
        "table": "int32",
        "segments": "int64",
        "findings": "int64",
        "rows": "uint8" if spec.is_fp8 and buffer.name in ("k_cache", "v_cache") else "uint16",
    }[buffer.kind]


def alignment_bytes(buffer: Buffer, spec: VerifySpec) -> int:
    """Alignment of the pointer and, in bytes, of every free stride."""
    if buffer.kind == "rows":
        return ROW_ALIGNMENT_BYTES
    mask = 4 if spec.mask is Mask.PACKED else 1
    return {
        "index": 4,
        "mask": mask,
        "float": 4,
        "scratch": 16,
        "counter": 4,
        "table": 4,
        "segments": 8,
        "findings": 8,
    }[buffer.kind]


def dims_of(spec: VerifySpec) -> dict[str, int]:
    """The extents that the spec fixes; num_tokens, num_requests and num_slots come from the arrays."""
    return {
        "num_q_heads": spec.num_q_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
    }


def capacity_elements(spec: VerifySpec) -> dict[str, int]:
    """Elements that a static buffer needs to serve every batch the spec allows.

    SGLang's capture-time buffers are sized like this.  FULL needs ``max_nodes`` rows of ``max_kv_len`` columns a
    request: draft columns counted once, neither left out nor twice.
    """
    tokens = spec.max_requests * spec.max_nodes
    mask_row = {
        Mask.FULL: spec.max_kv_len,
        Mask.TREE: spec.max_nodes,
        Mask.PACKED: -(-spec.max_nodes // 32),
    }.get(spec.mask, 0)
    return {
        "q": tokens * spec.num_q_heads * spec.head_dim_qk,
        "kv_indptr": spec.max_requests + 1,
        "kv_indices": spec.max_requests * spec.max_kv_len,
        "qo_indptr": spec.max_requests + 1,
        "out_cache_loc": tokens,
        "custom_mask": tokens * mask_row,
        "mask_indptr": spec.max_requests + 1 if spec.mask.reads_buffer else 0,
        "out": tokens * spec.num_q_heads * spec.head_dim_v,
        "lse": tokens * spec.num_q_heads,
    }


@dataclass(frozen=True)
class Parameter:
    """One field of ``VerifyArgs``: ``dtype`` of the scalar, or of the elements of a flat array."""

    name: str
    dtype: str
    is_array: bool


def layout_fields(buffer: Buffer) -> tuple[str, ...]:
    """Names of the int64 fields that follow a buffer: its free strides, or the width of an index buffer."""
    if buffer.kind == "index":
        return (f"{buffer.name}_words",)
    return tuple(f"{buffer.name}_stride_{axis}" for axis in buffer.free_strides)


def parameters(spec: VerifySpec) -> tuple[Parameter, ...]:
    """The fields of ``VerifyArgs``, in order, with the types this spec's kernels are compiled for."""
    fields = []
    for buffer in BUFFERS:
        fields.append(Parameter(buffer.name, storage_dtype(buffer, spec), True))
        fields += [Parameter(name, "int64", False) for name in layout_fields(buffer)]
    return tuple(fields) + tuple(Parameter(s.name, s.dtype, False) for s in SCALARS)


@cache
def args_class() -> type:
    """``VerifyArgs``: the named tuple that a verify body receives.  Its fields do not depend on the spec."""
    any_spec = VerifySpec.gqa(1, 1, 16, max_requests=1, max_nodes=1, max_kv_len=1, sm_scale=1.0)
    return args_class_of(tuple(p.name for p in parameters(any_spec)))


@cache
def args_class_of(names: tuple[str, ...]) -> type:
    """The named tuple with these fields, one class for one table: numba and the emulator compare classes."""
    return namedtuple("VerifyArgs", names)


ARRAY_CELLS = 7  # what numba flattens a 1-D array into: meminfo, parent, nitems, itemsize, data, shape, stride
DATA_CELL = 4


def cells_of(parameter: Parameter) -> int:
    """8-byte cells of the launch's parameter block that a field takes."""
    return ARRAY_CELLS if parameter.is_array else 1


def markdown_table() -> str:
    """The table of docs/contract.md; a test compares the two."""
    lines = ["| buffer | dtype | shape | access | meaning |", "| --- | --- | --- | --- | --- |"]
    dtype_text = {
        "rows": "as the spec says, or its raw bits",
        "index": "int32, int64",
        "mask": "bool, uint8; PACKED: uint32, int32",
        "float": "float32",
        "scratch": "float32",
        "counter": "uint32",
        "table": "int32",
        "segments": "int64",
        "findings": "int64",
    }
    for b in BUFFERS:
        need = " (optional)" if b.optional else ""
        axes = ", ".join(a.replace(">=", "≥ ") for a in b.axes)
        lines.append(f"| `{b.name}`{need} | {dtype_text[b.kind]} | `[{axes}]` | {b.access} | {b.note} |")
    lines += ["", "| scalar | dtype | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{s.name}` | {s.dtype} | {s.note} |" for s in SCALARS]
    return "\n".join(lines) + "\n"
