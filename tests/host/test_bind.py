"""``bind``, ``rebind``, ``launch`` and ``VerifyPlan`` refuse every wrong argument, by name, and change nothing.

The plans are emulated ones: numpy arrays, and ``Emulator.launch`` replaced by a recorder, so that nothing is computed.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from support.batches import NUMPY_DTYPE, random_batch

import nbverify as nv
from nbverify import contract, reference
from nbverify import plan as plan_module
from nbverify.errors import ArgumentError

FUZZED_BINDS = 10_000
FUZZED_REBINDS = 2_000
FP8 = "float8_e4m3fn"
LIMITS = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 64, "sm_scale": 0.25, "kernel": "simt"}
SPECS = {
    "gqa full bf16": nv.VerifySpec.gqa(4, 2, 16, head_dim_v=32, **LIMITS),
    "gqa tree fp16": nv.VerifySpec.gqa(4, 4, 32, head_dim_v=16, dtype="float16", mask="tree", **LIMITS),
    "mla full bf16": nv.VerifySpec.mla(8, head_dim_qk=48, head_dim_v=32, **LIMITS),
    "mla packed fp8": nv.VerifySpec.mla(8, head_dim_qk=48, head_dim_v=32, kv_dtype=FP8, mask="packed", **LIMITS),
    "gqa causal fp8": nv.VerifySpec.gqa(4, 2, 16, kv_dtype=FP8, mask="causal", **LIMITS),
    "gqa none": nv.VerifySpec.gqa(6, 2, 16, mask="none", **LIMITS),
}
PREFIX_LENS, NODE_COUNTS = [9, 0, 5], [3, 1, 4]

INDEX_NAMES = ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc", "mask_indptr")
INDPTR_NAMES = ("kv_indptr", "qo_indptr", "mask_indptr")
ROW_NAMES = ("q", "k_cache", "v_cache", "out")
WRITTEN = ("out", "lse")
DTYPES = [
    *map(np.dtype, ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
    *map(np.dtype, ("float16", "float32", "float64", "complex64", ">i4", ">f4", ">u2", "O", "U3", "S2", "M8[s]")),
    np.dtype([("a", "i4")]),
    np.dtype(ml_dtypes.bfloat16),
    *(np.dtype(getattr(ml_dtypes, f"float8_{name}")) for name in ("e4m3fn", "e4m3fnuz", "e4m3", "e5m2", "e5m2fnuz")),
]


def accepted_dtypes(name, spec):
    """DESIGN.md section 2, written down a second time: the contract's own table is under test."""
    if name in INDEX_NAMES:
        return {"int32", "int64"}
    if name == "lse":
        return {"float32"}
    if name == "custom_mask":
        return {"uint32", "int32"} if spec.mask is nv.Mask.PACKED else {"bool", "uint8"}
    if name in ("k_cache", "v_cache") and spec.kv_dtype == FP8:
        return {FP8, "uint8"}
    return {spec.dtype, "uint16", "int16"}


class Call:
    """A plan and valid arguments of its ``bind``.  Mutations replace entries of ``args``, never contents of arrays."""

    def __init__(self, spec_name, num_requests=3):
        self.spec = SPECS[spec_name]
        self.plan = nv.VerifyPlan(self.spec, device="emulator")
        prefix_lens, node_counts = (
            list(itertools.islice(itertools.cycle(x), num_requests)) for x in (PREFIX_LENS, NODE_COUNTS)
        )
        batch = random_batch(np.random.default_rng(1), self.spec, prefix_lens, node_counts)
        tokens = batch.num_tokens
        self.args = {name: aligned(a.shape, a.dtype, a) for name, a in batch.inputs().items()}
        shape = (tokens, self.spec.num_q_heads)
        self.args["out"] = aligned((*shape, self.spec.head_dim_v), NUMPY_DTYPE[self.spec.dtype])
        self.args["lse"] = aligned(shape, np.float32)
        self.args |= {"k_scale": 1.0, "v_scale": None}

    @property
    def arrays(self):
        return [name for name, value in self.args.items() if isinstance(value, np.ndarray)]

    def with_args(self, **changes):
        other = object.__new__(Call)
        other.spec, other.plan, other.args = self.spec, self.plan, {**self.args, **changes}
        return other


def aligned(shape, dtype, values=None, offset_bytes=0):
    """A new C-contiguous array whose address is a multiple of 256, plus ``offset_bytes``."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    storage = np.zeros(size + 512, np.uint8)
    start = -storage.ctypes.data % 256 + offset_bytes
    array = storage[start : start + size].view(dtype).reshape(shape)
    if values is not None:
        array[...] = values
    return array


def with_strides(array, strides, extra_elements=0):
    """A new array of this shape and dtype with these strides in elements, its first element aligned."""
    span = 1 + sum((e - 1) * abs(s) for e, s in zip(array.shape, strides, strict=True)) + extra_elements
    below = -sum((e - 1) * s for e, s in zip(array.shape, strides, strict=True) if s < 0)
    step = 256 // array.itemsize
    start = -(-below // step) * step
    storage = aligned((start + span,), array.dtype)
    return as_strided(storage[start:], array.shape, [s * array.itemsize for s in strides])


def c_strides(shape):
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


class FakeDeviceArray:
    """Speaks the array interface, as a CuPy array would: device memory, which the emulator must not touch."""

    def __init__(self, like):
        self.shape, self.dtype, self.strides = like.shape, like.dtype, like.strides
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": like.shape,
            "typestr": "<u2",
            "data": (0x7F0000001000, False),
        }


@pytest.fixture
def launches(monkeypatch):
    """What reaches the emulator: a list of ``args``."""
    calls = []
    monkeypatch.setattr(nv.Emulator, "launch", lambda self, body, args, **options: calls.append(args))
    return calls


@pytest.fixture(params=SPECS)
def call(request, launches):
    return Call(request.param)


def refused(action, names):
    """None if ``action`` raises the right error, else what happened instead."""
    try:
        action()
    except ArgumentError as error:
        if error.argument in names and str(error).startswith(f"{error.argument}: expected "):
            return None
        return f"named {error.argument}, not {' or '.join(sorted(names))}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# ---- mutations: ``mutation(rng, call) -> (changes, names)``, or None where it does not apply.  ``names`` are the
# arguments that the error may be about: more than one only where two buffers contradict each other.

MUTATIONS = {}
SCALAR_JUNK = [
    *(math.nan, math.inf, -math.inf, 0, 0.0, -0.0, -1.0, 1e39, 10**400, np.float64("nan")),
    *("1.0", b"1", True, False, np.bool_(True), 1j, [1.0], (1.0,), {}, np.ones(1), np.array(1.0), object()),
]
ARRAY_JUNK = [
    lambda a: a.tolist(),
    lambda a: a.tobytes(),
    lambda a: memoryview(a.view(np.uint8)),
    lambda a: a.ctypes.data,
    lambda a: 1.0,
    lambda a: "array",
    lambda a: True,
    lambda a: object(),
    lambda a: type(a),
    lambda a: {"data": a},
    lambda a: (a,),
    lambda a: a.dtype.type(0),
    FakeDeviceArray,
]


def mutation(function):
    MUTATIONS[function.__name__] = function
    return function


def choice(rng, options):
    options = list(options)
    return options[int(rng.integers(len(options)))] if options else None


@mutation
def dtype(rng, call):
    name = choice(rng, call.arrays)
    wrong = [d for d in DTYPES if d.name not in accepted_dtypes(name, call.spec) or not d.isnative]
    return {name: np.zeros(call.args[name].shape, choice(rng, wrong))}, {name}


@mutation
def number_of_axes(rng, call):
    name = choice(rng, call.arrays)
    a = call.args[name]
    shapes = [(1, *a.shape), (*a.shape, 1), ()]
    if a.ndim > 1:
        shapes += [(a.size,), a[0].shape, (a.shape[0], a[0].size)]
    shape = choice(rng, [s for s in shapes if len(s) != a.ndim])
    return {name: aligned(shape, a.dtype)}, {name}


@mutation
def inner_extent(rng, call):
    """An extent that the spec fixes."""
    name = choice(rng, [n for n in call.arrays if call.args[n].ndim > 1])
    shape = list(call.args[name].shape)
    axis = int(rng.integers(1, len(shape)))
    shape[axis] = choice(rng, {0, 1, shape[axis] - 1, shape[axis] + 1, 2 * shape[axis]} - {shape[axis]})
    return {name: aligned(shape, call.args[name].dtype)}, {name}


@mutation
def number_of_tokens(rng, call):
    name = choice(rng, ["q", "out", "lse", "out_cache_loc"])
    a = call.args[name]
    extents = {0, 1, a.shape[0] - 1} | ({a.shape[0] + 1, 2 * a.shape[0]} if name != "out_cache_loc" else set())
    extent = choice(rng, extents - {a.shape[0]})
    # q says how many tokens there are, so the others are blamed for differing from it.
    blamed = {"out", "lse", "out_cache_loc"} if name == "q" else {name}
    return {name: aligned((extent, *a.shape[1:]), a.dtype)}, blamed


@mutation
def number_of_slots(rng, call):
    changes = {}
    for name in ("k_cache", "v_cache"):
        if name in call.args:
            changes[name] = aligned((0, *call.args[name].shape[1:]), call.args[name].dtype)
    if rng.random() < 0.5 or "v_cache" not in call.args:
        return changes, {"k_cache"}
    name = choice(rng, ["k_cache", "v_cache"])
    a = call.args[name]
    return {name: aligned((a.shape[0] + choice(rng, (-1, 1, 10)), *a.shape[1:]), a.dtype)}, {"v_cache"}


@mutation
def number_of_requests(rng, call):
    """One of the prefix sums is of another batch; kv_indptr says how large it is, so the others are blamed."""
    name = choice(rng, [n for n in INDPTR_NAMES if n in call.args])
    a = call.args[name]
    extent = choice(rng, {0, 1, a.shape[0] - 1, a.shape[0] + 1} - {a.shape[0]})
    blamed = {"kv_indptr", "qo_indptr", "mask_indptr"} if name == "kv_indptr" else {name}
    return {name: aligned((extent,), a.dtype)}, blamed


@mutation
def too_many_requests(rng, call):
    extent = call.spec.max_requests + 1 + int(rng.integers(1, 5))
    return {n: aligned((extent,), call.args[n].dtype) for n in INDPTR_NAMES if n in call.args}, {"kv_indptr"}


@mutation
def contiguous_axis(rng, call):
    """Steps, reversed or repeated elements along an axis that has no free stride."""
    name = choice(rng, [n for n in call.arrays if call.args[n].size > 1])
    a = call.args[name]
    strides = c_strides(a.shape)
    first_fixed = {"q": 2, "k_cache": 2, "v_cache": 2, "out": 2, "lse": 1}.get(name, 0)
    axis = choice(rng, [i for i in range(first_fixed, a.ndim) if a.shape[i] > 1])
    strides[axis] = choice(rng, (2, 0, -1, 8))
    for outer in range(axis):
        strides[outer] *= 16  # so that this is all that is wrong
    return {name: with_strides(a, strides)}, {name}


@mutation
def negative_free_stride(rng, call):
    name = choice(rng, [n for n in (*ROW_NAMES, "lse") if n in call.args])
    a = call.args[name]
    strides = c_strides(a.shape)
    axis = choice(rng, [i for i in range(1 if name == "lse" else 2) if a.shape[i] > 1])
    strides[axis] = -strides[axis]
    return {name: with_strides(a, strides)}, {name}


@mutation
def misaligned_free_stride(rng, call):
    name = choice(rng, [n for n in ROW_NAMES if n in call.args])
    a = call.args[name]
    strides = c_strides(a.shape)
    axis = choice(rng, [i for i in range(2) if a.shape[i] > 1])
    for outer in range(axis + 1):
        strides[outer] *= 4
    strides[axis] += int(rng.integers(1, 16 // a.itemsize))
    return {name: with_strides(a, strides)}, {name}


@mutation
def misaligned_address(rng, call):
    alignment = {name: 16 for name in ROW_NAMES} | {name: 4 for name in (*INDEX_NAMES, "lse")}
    if call.spec.mask is nv.Mask.PACKED:
        alignment["custom_mask"] = 4
    name = choice(rng, [n for n in call.arrays if n in alignment and call.args[n].size])
    a = call.args[name]
    return {name: aligned(a.shape, a.dtype, offset_bytes=int(rng.integers(1, alignment[name])))}, {name}


@mutation
def written_elements_overlap(rng, call):
    name = choice(rng, WRITTEN)
    a = call.args[name]
    strides = c_strides(a.shape)
    axis = choice(rng, range(a.ndim - 1))
    smaller = 16 if name == "out" else 1
    strides[axis] = choice(rng, {0, strides[axis + 1], strides[axis] - smaller} - {strides[axis]})
    return {name: with_strides(a, strides)}, {name}


@mutation
def missing(rng, call):
    name = choice(rng, [n for n in call.arrays if n != "lse"])
    return {name: None}, {name}


@mutation
def superfluous(rng, call):
    options = {
        "v_cache": call.args["k_cache"][..., : call.spec.head_dim_v],
        "custom_mask": np.ones(64, np.uint8),
        "mask_indptr": np.zeros(len(PREFIX_LENS) + 1, np.int64),
    }
    name = choice(rng, [n for n in options if n not in call.args])
    return None if name is None else ({name: options[name]}, {name})


@mutation
def read_only(rng, call):
    name = choice(rng, WRITTEN)
    view = call.args[name].view()
    view.flags.writeable = False
    return {name: view}, {name}


@mutation
def scale(rng, call):
    name = choice(rng, ("k_scale", "v_scale"))
    return {name: choice(rng, [*SCALAR_JUNK, None] if name == "k_scale" else SCALAR_JUNK)}, {name}


@mutation
def v_scale_of_shared_kv(rng, call):
    k_scale, v_scale = rng.uniform(0.1, 4, 2).tolist()
    return ({"k_scale": k_scale, "v_scale": v_scale}, {"v_scale"}) if call.spec.shared_kv else None


@mutation
def no_array(rng, call):
    name = choice(rng, [n for n in call.arrays])
    return {name: choice(rng, ARRAY_JUNK)(call.args[name])}, {name}


@mutation
def written_over_another(rng, call):
    """``out`` or ``lse`` shares at least one byte with any other buffer."""
    written = choice(rng, WRITTEN)
    other = choice(rng, [n for n in call.arrays if n != written and call.args[n].nbytes])
    a, b = call.args[written], call.args[other]
    # Both in one piece of memory: the later one starts at a multiple of 16 bytes inside the earlier one.
    first, second = choice(rng, ((a, b), (b, a)))
    offset = 16 * int(rng.integers(0, -(-first.nbytes // 16)))
    storage = aligned((offset + first.nbytes + second.nbytes,), np.uint8)
    start = {id(first): 0, id(second): offset}
    changes = {
        name: storage[start[id(x)] : start[id(x)] + x.nbytes].view(x.dtype).reshape(x.shape)
        for name, x in ((written, a), (other, b))
    }
    return changes, {"out", "lse"} if other in WRITTEN else {written}


# ---- bind


def test_the_unchanged_arguments_are_accepted(call, launches):
    call.plan.bind(**call.args).launch()
    assert len(launches) == 1


def test_fuzzed_wrong_arguments(call, launches):
    rng = np.random.default_rng(list(SPECS.values()).index(call.spec))
    original = {name: call.args[name].copy() for name in call.arrays}
    failures, counts = {}, dict.fromkeys(MUTATIONS, 0)
    share = -(-FUZZED_BINDS // len(SPECS))
    for index in itertools.count():
        mutation = list(MUTATIONS)[index % len(MUTATIONS)]
        mutated = MUTATIONS[mutation](rng, call)
        if mutated is None:
            continue
        changes, names = mutated
        wrong = refused(lambda changes=changes: call.plan.bind(**{**call.args, **changes}), names)
        if wrong is not None:
            what = ", ".join(f"{n}={describe(v)}" for n, v in changes.items())
            failures.setdefault((mutation, wrong[:60]), f"{mutation} #{index}: {what}: {wrong[:300]}")
        counts[mutation] += 1
        if sum(counts.values()) == share:
            break
    assert not failures, "\n".join(failures.values())
    assert launches == []
    for name, before in original.items():
        assert call.args[name].tobytes() == before.tobytes()
    assert min(n for name, n in counts.items() if name not in ("superfluous", "v_scale_of_shared_kv")) > 50


def describe(value):
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:60]


def test_no_element_of_a_buffer_is_looked_at(launches):
    """Wrong contents are the device's business: shapes and dtypes are all that ``bind`` can tell."""
    call = Call("gqa full bf16")
    changes = {n: np.full_like(call.args[n], -(2**31)) for n in INDEX_NAMES}
    call.plan.bind(**{**call.args, **changes})


def valid_variants():
    """Name -> changes of a call that must be accepted."""

    def astype(*names, to):
        return lambda call: {n: aligned(call.args[n].shape, to) for n in names if n in call.args}

    def bits(*names, to):
        return lambda call: {n: call.args[n].view(to) for n in names if n in call.args}

    def strided(call):
        changes = {}
        for name in (*ROW_NAMES, "lse"):
            if name in call.args:
                a = call.args[name]
                strides = c_strides(a.shape)
                for axis in (0,) if name == "lse" else (1, 0):
                    strides[axis] = 2 * strides[axis + 1] * a.shape[axis + 1] + (3 if name == "lse" else 16)
                changes[name] = with_strides(a, strides)
        return changes

    def swapped_axes(call):  # heads outside tokens: both strides are free
        a = call.args["out"]
        return {"out": aligned((a.shape[1], a.shape[0], a.shape[2]), a.dtype).transpose(1, 0, 2)}

    def repeated_rows(call):  # stride 0 in what is only read
        a = call.args["q"]
        return {"q": with_strides(a, [0, 0, 1])}

    def larger_static_buffers(call):
        changes = {
            n: aligned((4 * call.args[n].size + 100,), call.args[n].dtype) for n in ("kv_indices", "out_cache_loc")
        }
        if "custom_mask" in call.args:
            changes["custom_mask"] = aligned((10_000,), call.args["custom_mask"].dtype)
        return changes

    def largest_batch(call):
        return {n: aligned((call.spec.max_requests + 1,), call.args[n].dtype) for n in INDPTR_NAMES if n in call.args}

    def no_requests(call):
        return {n: aligned((1,), call.args[n].dtype) for n in INDPTR_NAMES if n in call.args}

    def no_prefix_and_no_mask_bytes(call):
        return {n: aligned((0,), call.args[n].dtype) for n in ("kv_indices", "custom_mask") if n in call.args}

    def no_tokens(call):
        return {n: aligned((0, *call.args[n].shape[1:]), call.args[n].dtype) for n in ("q", "out", "lse")}

    def read_only_inputs(call):
        changes = {n: call.args[n].view() for n in call.arrays if n not in WRITTEN}
        for view in changes.values():
            view.flags.writeable = False
        return changes

    def interleaved_k_and_v(call):
        if "v_cache" not in call.args:
            return {}
        k, v = call.args["k_cache"], call.args["v_cache"]
        pool = aligned((k.shape[0], k.shape[1], k.shape[2] + v.shape[2]), k.dtype)
        return {"k_cache": pool[..., : k.shape[2]], "v_cache": pool[..., k.shape[2] :]}

    def one_mask_type(dtype, packed_dtype):
        def changes(call):
            if "custom_mask" not in call.args:
                return {}
            wanted = packed_dtype if call.spec.mask is nv.Mask.PACKED else dtype
            return {"custom_mask": aligned(call.args["custom_mask"].shape, wanted)}

        return changes

    return {
        "int32 indices": astype(*INDEX_NAMES, to=np.int32),
        "int64 indices": astype(*INDEX_NAMES, to=np.int64),
        "mixed indices": astype("kv_indptr", "out_cache_loc", to=np.int32),
        "int64 indices at a multiple of 4": lambda call: {
            n: aligned(call.args[n].shape, np.int64, offset_bytes=4) for n in INDEX_NAMES if n in call.args
        },
        "bool or uint32 mask": one_mask_type(bool, np.uint32),
        "uint8 or int32 mask": one_mask_type(np.uint8, np.int32),
        "uint16 bits": lambda call: bits("q", "out", *fp16_caches(call), to=np.uint16)(call),
        "int16 bits": lambda call: bits("q", "out", *fp16_caches(call), to=np.int16)(call),
        "uint8 bits": lambda call: bits(*fp8_caches(call), to=np.uint8)(call),
        "strided": strided,
        "swapped axes": swapped_axes,
        "repeated rows": repeated_rows,
        "larger static buffers": larger_static_buffers,
        "largest batch": largest_batch,
        "no requests": no_requests,
        "no tokens": no_tokens,
        "no prefix, no mask bytes": no_prefix_and_no_mask_bytes,
        "read-only inputs": read_only_inputs,
        "K and V interleaved": interleaved_k_and_v,
        "no lse": lambda call: {"lse": None},
        "int scale": lambda call: {"k_scale": 2},
        "numpy scale": lambda call: {"k_scale": np.float32(0.5), "v_scale": np.float64(0.5)},
        "fraction": lambda call: {"k_scale": Fraction(1, 2)},
        "equal scales": lambda call: {"k_scale": 0.3, "v_scale": 0.3},
        "large and small scales": lambda call: {"k_scale": 1e-30, "v_scale": 1e-30},
    }


def fp8_caches(call):
    return ("k_cache", "v_cache") if call.spec.is_fp8 else ()


def fp16_caches(call):
    return () if call.spec.is_fp8 else ("k_cache", "v_cache")


@pytest.mark.parametrize("variant", valid_variants())
def test_valid_variants(call, variant, launches):
    """Accepted, and what reaches the kernel is this memory with these strides and widths."""
    args = {**call.args, **valid_variants()[variant](call)}
    call.plan.bind(**args).launch()
    (seen,) = launches
    for name in contract.CALLER_BUFFERS:
        array, flat = args.get(name), getattr(seen, name)
        if array is None or array.size == 0:
            assert flat.size == 0
            continue
        assert flat.ctypes.data == array.ctypes.data
        span = 1 + sum((e - 1) * s // array.itemsize for e, s in zip(array.shape, array.strides, strict=True))
        assert flat.nbytes == span * array.itemsize
        if name in INDEX_NAMES:
            assert flat.dtype == np.int32
            assert getattr(seen, f"{name}_words") == array.itemsize // 4
        for axis, stride in zip(contract.BUFFER[name].free_strides, array.strides, strict=False):
            assert getattr(seen, f"{name}_stride_{axis}") == stride // array.itemsize
    assert (seen.num_requests, seen.num_tokens) == (args["kv_indptr"].size - 1, args["q"].shape[0])
    assert seen.num_slots == args["k_cache"].shape[0]
    v_scale = args["v_scale"]
    if v_scale is None:
        v_scale = args["k_scale"] if call.spec.shared_kv else 1.0
    assert seen.score_scale == np.float32(call.spec.sm_scale * float(args["k_scale"]))
    assert seen.v_scale == np.float32(float(v_scale))


def test_batch_of_another_size_on_the_same_plan(launches):
    call = Call("gqa full bf16")
    for num_requests in (1, 4, 2):
        other = Call("gqa full bf16", num_requests)
        call.plan.bind(**other.args).launch()
    assert [args.num_requests for args in launches] == [1, 4, 2]


def test_scale_that_overflows_with_sm_scale():
    spec = nv.VerifySpec.gqa(4, 2, 16, **{**LIMITS, "sm_scale": 1e30})
    plan = nv.VerifyPlan(spec, device="emulator")
    args = Call("gqa full bf16").args
    args["v_cache"], args["out"] = args["v_cache"][..., :16], args["out"][..., :16]
    assert refused(lambda: plan.bind(**{**args, "k_scale": 1e10}), {"k_scale"}) is None


# ---- rebind


def rebind_mutations(call):
    """Mutations of ``bind`` that make an argument of ``rebind`` wrong too, and those of its own."""
    names = [n for n in (*ROW_NAMES, "lse") if n in call.args]

    def shape(rng, call):
        name = choice(rng, names)
        a = call.args[name]
        axis = int(rng.integers(a.ndim))
        extents = list(a.shape)
        extents[axis] += choice(rng, (1, 16, -1))
        return {name: aligned(extents, a.dtype)}, {name}

    def strides(rng, call):
        name = choice(rng, names)
        a = call.args[name]
        return {name: with_strides(a, [2 * s for s in c_strides(a.shape)[:-1]] + [1])}, {name}

    def raw_bits(rng, call):
        name = choice(rng, names)
        a = call.args[name]
        return {name: aligned(a.shape, f"u{a.itemsize}")}, {name}

    def first_is_right(rng, call):
        good, bad = rng.permutation(names)[:2]
        a, b = call.args[good], call.args[bad]
        return {good: aligned(a.shape, a.dtype), bad: aligned(b.shape, b.dtype, offset_bytes=2)}, {bad}

    own = {f.__name__: f for f in (shape, strides, raw_bits, first_is_right)}
    same = ("dtype", "number_of_axes", "inner_extent", "number_of_tokens", "contiguous_axis", "negative_free_stride",
            "misaligned_free_stride", "misaligned_address", "written_elements_overlap", "read_only", "no_array",
            "written_over_another")  # fmt: skip
    return {**own, **{name: MUTATIONS[name] for name in same}}


def test_fuzzed_wrong_rebinds(call, launches):
    rng = np.random.default_rng(10 + list(SPECS.values()).index(call.spec))
    bound = call.plan.bind(**call.args)
    bound.launch()
    rebindable = {"q", "k_cache", "v_cache", "out", "lse"}
    failures, done = {}, 0
    mutations = rebind_mutations(call)
    for index in itertools.count():
        mutation = list(mutations)[index % len(mutations)]
        changes, names = mutations[mutation](rng, call)
        if not set(changes) <= rebindable:
            continue
        wrong = refused(lambda changes=changes: bound.rebind(**changes), names | set(changes))
        if wrong is not None:
            what = ", ".join(f"{n}={describe(v)}" for n, v in changes.items())
            failures.setdefault((mutation, wrong[:60]), f"{mutation} #{index}: {what}: {wrong[:300]}")
        if index % 10 == 0:
            bound.launch()
        done += 1
        if done == FUZZED_REBINDS // len(SPECS):
            break
    assert not failures, "\n".join(failures.values())
    bound.launch()
    first = launches[0]
    for args in launches:  # a refused rebind has changed nothing
        assert args._fields == first._fields
        for name in contract.CALLER_BUFFERS:
            assert getattr(args, name).ctypes.data == getattr(first, name).ctypes.data or not getattr(args, name).size


def test_rebind_changes_addresses_and_nothing_else(call, launches):
    bound = call.plan.bind(**call.args)
    bound.launch()
    names = [n for n in (*ROW_NAMES, "lse") if n in call.args]
    for count in (1, len(names)):
        new = {n: aligned(call.args[n].shape, call.args[n].dtype) for n in names[:count]}
        bound.rebind(**new)
        bound.launch()
        before, after = launches[0]._asdict(), launches[-1]._asdict()
        for name, value in after.items():
            if name in new:
                assert value.ctypes.data == new[name].ctypes.data
                assert (value.size, value.dtype) == (before[name].size, before[name].dtype)
            elif isinstance(value, np.ndarray):
                assert value.ctypes.data == before[name].ctypes.data or not value.size
            else:
                assert value == before[name]


def test_rebind_of_nothing(call, launches):
    bound = call.plan.bind(**call.args)
    bound.rebind()
    bound.launch()
    assert len(launches) == 1


def test_rebind_of_what_was_not_bound(call):
    bound = call.plan.bind(**{**call.args, "lse": None})
    assert refused(lambda: bound.rebind(lse=call.args["lse"]), {"lse"}) is None
    if call.spec.shared_kv:
        v = call.args["k_cache"][..., : call.spec.head_dim_v]
        assert refused(lambda: bound.rebind(v_cache=v), {"v_cache"}) is None


def test_rebind_checks_against_the_buffers_of_an_earlier_rebind(call):
    """The overlap is with where ``out`` is now, not with where it was."""
    bound = call.plan.bind(**call.args)
    storage = aligned((call.args["out"].nbytes + 4096,), np.uint8)
    out = storage[: call.args["out"].nbytes].view(call.args["out"].dtype).reshape(call.args["out"].shape)
    lse = storage[: call.args["lse"].nbytes].view(np.float32).reshape(call.args["lse"].shape)
    bound.rebind(out=out)
    assert refused(lambda: bound.rebind(lse=lse), {"out", "lse"}) is None
    bound.rebind(out=call.args["out"])
    bound.rebind(lse=lse)


# ---- launch and VerifyPlan


class Raises:
    @property
    def cuda_stream(self):
        raise RuntimeError("gone")


class NoStream:
    __cuda_stream__ = "nothing to call"


@pytest.mark.parametrize(
    "stream",
    [
        *(-1, -(2**40), True, False, 1.0, 0.0, np.float64(1), "1", b"1"),
        *([1], (0, 1), {}, object(), Raises(), NoStream(), print),
    ],
    ids=lambda stream: type(stream).__name__ + str(stream)[:8],
)
def test_wrong_streams(stream, launches):
    call = Call("gqa none")
    bound = call.plan.bind(**call.args)
    assert refused(lambda: bound.launch(stream), {"stream"}) is None
    assert launches == []


@pytest.mark.parametrize(
    "options, name",
    [
        *(({"debug": x}, "debug") for x in (None, 0, 1, "yes", np.bool_(True))),
        *(({"max_blocks": x}, "max_blocks") for x in (0, -1, 1.0, "4", True, np.float32(2), 5, 2**40)),  # 4 fit
        *(({"shared_limit": x}, "shared_limit") for x in (0, -1, 1e5, "99 KB", True)),
        *(({"shared_limit": x}, "spec") for x in (1, 1000)),
        *(({"device": x}, "device") for x in ("", "cuda", "cuda:0", "Emulator")),
    ],
    ids=lambda x: x if isinstance(x, str) else str(x),
)
def test_wrong_plan_options(options, name):
    arguments = {"device": "emulator", **options}
    assert refused(lambda: nv.VerifyPlan(SPECS["gqa none"], **arguments), {name}) is None


@pytest.mark.parametrize(
    "device", [1.5, -1, True, [], (), b"emulator", np.zeros(2), nv.Emulator, object()], ids=lambda d: type(d).__name__
)
def test_wrong_device_is_refused_with_or_without_a_driver(device):
    assert refused(lambda: nv.VerifyPlan(SPECS["gqa none"], device=device), {"device"}) is None


def test_no_driver_is_an_error_of_this_package(has_gpu):
    if has_gpu:
        pytest.skip("this machine has a GPU")
    with pytest.raises(nv.DriverError):
        nv.VerifyPlan(SPECS["gqa none"])


@pytest.mark.parametrize("spec", [None, "mla", {}, nv.VerifySpec, 1])
def test_plan_of_no_spec(spec):
    assert refused(lambda: nv.VerifyPlan(spec, device="emulator"), {"spec"}) is None


@pytest.mark.parametrize(
    "blocks, seed, name", [(0, 0, "blocks"), (True, 0, "blocks"), (2.0, 0, "blocks"), (2, -1, "seed")]
)
def test_wrong_emulator(blocks, seed, name):
    assert refused(lambda: nv.Emulator(blocks, seed), {name}) is None


def test_shared_limit_is_exact_and_the_refusal_has_both_numbers():
    spec = nv.VerifySpec.mla(8, **LIMITS)
    need = nv.VerifyPlan(spec, device="emulator").report().shared_bytes
    nv.VerifyPlan(spec, device="emulator", shared_limit=need)
    with pytest.raises(ArgumentError, match=rf"^spec: expected at most {need - 1} .* got {need} bytes"):
        nv.VerifyPlan(spec, device="emulator", shared_limit=need - 1)


def test_max_blocks_is_the_grid():
    assert nv.VerifyPlan(SPECS["gqa none"], device=nv.Emulator(blocks=7), max_blocks=3).report().grid == 3
    assert nv.VerifyPlan(SPECS["gqa none"], device=nv.Emulator(blocks=7)).report().grid == 7


def test_check_without_debug():
    plan = nv.VerifyPlan(SPECS["gqa none"], device="emulator")
    assert refused(plan.check, {"debug"}) is None


# ---- verify_attention: the one-call form knows the lengths, so it knows the size of the mask (B03)


PARENTS = [-1, 0, 0, 1, 1, 2]


def b03(layout, prefix_len=5):
    """The arguments of recipe B03 with the mask of one layout."""
    n = len(PARENTS)
    tree = reference.ancestor_mask(PARENTS)
    masks = {
        "full": reference.full_mask(prefix_len, tree).astype(np.uint8).ravel(),
        "tree": tree.astype(np.uint8).ravel(),
        "packed": reference.pack_mask(tree).ravel(),
    }
    return {
        "q": np.zeros((n, 2, 16), np.uint16),
        "k_cache": np.zeros((64, 1, 16), np.uint16),
        "v_cache": np.zeros((64, 1, 16), np.uint16),
        "kv_indptr": np.array([0, prefix_len], np.int32),
        "kv_indices": np.arange(40, 40 + prefix_len),
        "qo_indptr": np.array([0, n], np.int32),
        "out_cache_loc": np.array([7, 3, 9, 1, 8, 2]),
        "custom_mask": masks[layout],
        "mask_indptr": np.array([0, masks[layout].size]),
        "out": np.zeros((n, 2, 16), np.uint16),
    }


def b03_spec(layout):
    return nv.VerifySpec.gqa(2, 1, 16, mask=layout, **LIMITS)


@pytest.mark.parametrize("declared", ["full", "tree"])
@pytest.mark.parametrize("given", ["full", "tree"])
def test_a_mask_of_the_other_layout_is_refused(declared, given, launches):
    args = b03(given)
    assert args["custom_mask"].size == {"full": 66, "tree": 36}[given]

    def action():
        nv.verify_attention(b03_spec(declared), **args, device="emulator")

    if declared == given:
        action()
    else:
        assert refused(action, {"custom_mask"}) is None
    assert len(launches) == (declared == given)


def test_without_a_prefix_both_layouts_have_one_size(launches):
    for declared in ("full", "tree"):
        nv.verify_attention(b03_spec(declared), **b03("full", prefix_len=0), device="emulator")
    assert len(launches) == 2


@pytest.mark.parametrize("layout, change", list(itertools.product(["full", "tree", "packed"], [-1, 1, 36])))
def test_a_mask_of_another_size_is_refused(layout, change, launches):
    args = b03(layout)
    args["custom_mask"] = np.ones(args["custom_mask"].size + change, args["custom_mask"].dtype)
    spec = b03_spec(layout)
    assert refused(lambda: nv.verify_attention(spec, **args, device="emulator"), {"custom_mask"}) is None
    assert launches == []


@pytest.mark.parametrize("declared", ["full", "tree"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_padded_cube_is_refused(declared, flat, launches):
    """``[bs, max, max]``, of requests with 6 and 4 nodes."""
    args = b03("tree")
    tree = reference.ancestor_mask(PARENTS)
    cube = np.zeros((2, 6, 6), np.uint8)
    cube[0], cube[1, :4, :4] = tree, tree[:4, :4]
    for name in ("q", "out", "out_cache_loc"):
        args[name] = np.zeros((10, *args[name].shape[1:]), args[name].dtype)
    args |= {
        "kv_indptr": np.array([0, 2, 5]),
        "qo_indptr": np.array([0, 6, 10]),
        "mask_indptr": np.array([0, 36, 36 + 16]),
        "custom_mask": cube.ravel() if flat else cube,
    }
    spec = b03_spec(declared)
    assert refused(lambda: nv.verify_attention(spec, **args, device="emulator"), {"custom_mask"}) is None
    if not flat:
        plan = nv.VerifyPlan(spec, device="emulator")
        assert refused(lambda: plan.bind(**args), {"custom_mask"}) is None
    assert launches == []


def test_random_trees_of_the_wrong_size_never_pass(launches):
    rng = np.random.default_rng(3)
    for index in range(150):
        given, declared = (str(x) for x in rng.permutation(["full", "tree"]))
        counts, prefixes = rng.integers(1, 9, 3), rng.integers(0, 20, 3) * rng.integers(0, 2, 3)
        prefixes[int(rng.integers(3))] += 1  # else both layouts have one size
        spec = nv.VerifySpec.gqa(2, 1, 16, mask=given, **LIMITS)
        batch = random_batch(rng, spec, prefixes, counts)
        args = {**batch.inputs(), "out": np.zeros((batch.num_tokens, 2, 16), np.uint16)}
        nv.verify_attention(spec, **args, device="emulator")
        other = nv.VerifySpec.gqa(2, 1, 16, mask=declared, **LIMITS)
        wrong = refused(lambda: nv.verify_attention(other, **args, device="emulator"), {"custom_mask"})  # noqa: B023
        assert wrong is None, f"#{index} {given} declared {declared}, prefixes {prefixes}, nodes {counts}: {wrong}"


def test_fixed_splits_are_cut_for_a_capability(launches):
    """Not for the grid, on which bits of split="fixed" must not depend."""
    args, spec = Call("gqa full bf16").args, replace(SPECS["gqa full bf16"], split="fixed")
    for emulator, cap in (nv.Emulator(), None), (nv.Emulator(7), 3), (nv.Emulator(cc=(12, 0)), None):
        nv.VerifyPlan(spec, device=emulator, max_blocks=cap).bind(**args).launch()
    assert [given.max_chunks for given in launches] == [132, 132, 188]


def test_pools_that_a_slot_number_does_not_reach_the_end_of(call, launches, monkeypatch):
    """Kernels read the low 32 bits of a slot number.  No array here has 2^32 rows: the limit comes to the array."""
    assert plan_module.MAX_SLOTS == 2**32
    monkeypatch.setattr(plan_module, "MAX_SLOTS", call.args["k_cache"].shape[0])
    assert refused(lambda: call.plan.bind(**call.args), {"k_cache"}) is None
    monkeypatch.setattr(plan_module, "MAX_SLOTS", call.args["k_cache"].shape[0] + 1)
    call.plan.bind(**call.args).launch()
    assert len(launches) == 1
