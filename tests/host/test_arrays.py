"""arrays.py without a GPU: fake producers with made-up addresses, none of which is ever dereferenced."""

import ctypes
import itertools
import subprocess
import sys
from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbverify import arrays, contract
from nbverify.arrays import ArrayInfo, Rule, describe, overlaps, storage_extent, stream_handle
from nbverify.errors import ArgumentError
from nbverify.spec import VerifySpec

ADDRESS = 0x7F00_0000_1000
MLA = VerifySpec.mla(num_q_heads=8, max_requests=4, max_nodes=33, max_kv_len=1024, sm_scale=0.1)
LIMITS = {"max_requests": 4, "max_nodes": 33, "max_kv_len": 1024, "sm_scale": 0.1, "kernel": "simt"}
BUFFERS = {buffer.name: buffer for buffer in contract.BUFFERS}

# ---- fake producers


class DLTensor(ctypes.Structure):
    """dlpack.h, written down a second time: the module's own structure is what is under test."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR)(
    ("PyCapsule_New", ctypes.pythonapi)
)
capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
given_back = []  # names of the capsules that were destroyed


@DESTRUCTOR  # kept alive by the module: a capsule in a traceback outlives its producer
def give_back(capsule):
    given_back.append(capsule_name(capsule))


class DLPackArray:
    """A device array that speaks DLPack."""

    def __init__(
        self,
        shape=(3, 4, 16),
        strides=None,
        code_bits=(4, 16),
        *,
        data=ADDRESS,
        device=(2, 0),
        byte_offset=0,
        lanes=1,
        versioned=True,
        version=(1, 1),
        flags=0,
        ndim=None,
        name=None,
    ):
        self.shape_array = (ctypes.c_int64 * len(shape))(*shape)
        self.stride_array = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        tensor = DLTensor(
            data,
            device,
            len(shape) if ndim is None else ndim,
            code_bits,
            lanes,
            ctypes.addressof(self.shape_array),
            None if strides is None else ctypes.addressof(self.stride_array),
            byte_offset,
        )
        if versioned:
            self.managed = ManagedVersioned(version, None, None, flags, tensor)
        else:
            self.managed = Managed(tensor, None, None)
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self.device = device
        self.calls = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        self.calls.append(kwargs)
        return new_capsule(ctypes.addressof(self.managed), self.name, give_back)


class InterfaceArray:
    """A device array that speaks ``__cuda_array_interface__``; keyword arguments replace or (``...``) drop entries."""

    def __init__(self, shape=(3, 4, 16), typestr="<f2", *, dtype=None, device=0, **entries):
        interface = {"shape": shape, "typestr": typestr, "data": (ADDRESS, False), "version": 3} | entries
        self.__cuda_array_interface__ = {key: value for key, value in interface.items() if value is not ...}
        if dtype is not None:
            self.dtype = dtype
        if device is not None:
            self.device = device


class Raises:
    """A property that raises."""

    def __init__(self, error):
        self.error = error

    def __get__(self, instance, owner):
        raise self.error


class Value:
    """Equal if the contents are, as torch's dtypes and devices."""

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return hash(tuple(vars(self).values()))


class TorchDtype(Value):
    """``str`` is all that is used of a torch dtype."""

    def __init__(self, name):
        self.text = f"torch.{name}"

    def __str__(self):
        return self.text


class Ordinal(Value):
    def __init__(self, index):
        self.index = index

    def __str__(self):
        return "cpu" if self.index is None else f"cuda:{self.index}"


class FakeTensor:
    """What _from_torch reads of a ``torch.Tensor``."""

    requires_grad = False
    is_cuda = True

    def __init__(self, dtype="bfloat16", shape=(3, 4, 16), strides=(64, 16, 1), device=1):
        self.dtype, self.shape, self.strides, self.device = TorchDtype(dtype), shape, strides, Ordinal(device)

    def data_ptr(self):
        return ADDRESS

    def stride(self):
        return self.strides

    def __dlpack_device__(self):
        raise AssertionError("torch tensors are read without DLPack")

    __dlpack__ = __dlpack_device__


class FakeCupy:
    """What _from_cupy reads of a ``cupy.ndarray``."""

    class data:
        ptr = ADDRESS
        device_id = 1

    shape, strides, dtype = (3, 4, 16), (256, 32, 2), np.dtype("uint16")


FakeTensor.__module__, FakeTensor.__name__ = "torch", "Tensor"
FakeCupy.__module__, FakeCupy.__name__ = "cupy", "ndarray"


def info_of(shape, strides=None, dtype="bfloat16", pointer=ADDRESS, readonly=False):
    if strides is None:
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ArrayInfo(pointer, tuple(shape), tuple(strides), dtype, 0, readonly)


def refuses(array, *words, host=False):
    with pytest.raises(ArgumentError) as caught:
        describe("q", array, host=host)
    assert caught.value.argument == "q"
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


# ---- describe: DLPack


@pytest.mark.parametrize("versioned", [True, False], ids=["dlpack1", "dlpack0"])
@pytest.mark.parametrize(
    "code_bits, dtype",
    [
        ((4, 16), "bfloat16"),
        ((2, 16), "float16"),
        ((2, 32), "float32"),
        ((10, 8), "float8_e4m3fn"),
        ((11, 8), "float8_e4m3fnuz"),
        ((12, 8), "float8_e5m2"),
        ((1, 8), "uint8"),
        ((1, 16), "uint16"),
        ((0, 8), "int8"),
        ((0, 64), "int64"),
        ((6, 8), "bool"),
    ],
)
def test_dlpack_dtype(code_bits, dtype, versioned):
    array = DLPackArray((3, 4, 16), (128, 32, 1), code_bits, versioned=versioned, device=(2, 1))
    assert describe("q", array) == ArrayInfo(ADDRESS, (3, 4, 16), (128, 32, 1), dtype, 1, False)


def test_dlpack_asks_for_no_sync_and_leaves_the_capsule_to_its_producer():
    array = DLPackArray()
    given_back.clear()
    describe("q", array)
    assert array.calls == [{"stream": -1, "max_version": (1, 1)}]
    assert given_back == [b"dltensor_versioned"]  # renamed, it would be ours to delete


def test_dlpack_byte_offset_is_part_of_the_address():
    assert describe("q", DLPackArray(byte_offset=64)).pointer == ADDRESS + 64


def test_dlpack_without_strides_is_in_c_order():
    assert describe("q", DLPackArray((3, 4, 16))).strides == (64, 16, 1)


def test_dlpack_managed_memory_is_device_memory():
    assert describe("q", DLPackArray(device=(13, 2))).device == 2


def test_dlpack_read_only_flag():
    assert describe("q", DLPackArray(flags=1)).readonly
    assert not describe("q", DLPackArray(flags=2)).readonly  # is a copy


def test_dlpack_scalar_and_empty():
    assert describe("q", DLPackArray(())).shape == ()
    empty = describe("q", DLPackArray((0, 4), data=None, byte_offset=64))
    assert (empty.pointer, empty.shape) == (0, (0, 4))
    assert describe("q", DLPackArray((0, 4))).pointer == 0


def test_dlpack_of_before_version_1_does_not_know_max_version():
    class Old(DLPackArray):
        def __dlpack__(self, stream=None):
            return super().__dlpack__(stream=stream)

    array = Old(versioned=False)
    assert describe("q", array).dtype == "bfloat16"
    assert array.calls == [{"stream": -1}]


@pytest.mark.parametrize(
    "device, words",
    [((1, 0), "in host memory"), ((3, 0), "pinned host memory"), ((10, 0), "DLPack device type 10")],
)
def test_dlpack_of_other_memory_is_refused_without_an_export(device, words):
    array = DLPackArray(device=device)
    refuses(array, words)
    assert array.calls == []


@pytest.mark.parametrize(
    "broken, words",
    [
        ({"ndim": -1}, "ndim -1"),
        ({"shape": (3, -4)}, "extents >= 0"),
        ({"data": None}, "address 0"),
        ({"lanes": 4}, "4 lanes"),
        ({"code_bits": (17, 4)}, "type code 17, 4 bits"),
        ({"code_bits": (3, 64)}, "type code 3"),
        ({"version": (2, 0)}, "expected DLPack 1.x, got 2.0"),
        ({"name": b"used_dltensor_versioned"}, "unused DLPack capsule"),
        ({"name": b"something else"}, "unused DLPack capsule"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_dlpack_broken(broken, words):
    refuses(DLPackArray(**broken), words)


def test_dlpack_null_shape():
    array = DLPackArray()
    array.managed.tensor.shape = None
    refuses(array, "ndim 3, shape at 0x0")


def test_dlpack_that_returns_no_capsule():
    class NoCapsule(DLPackArray):
        def __dlpack__(self, **kwargs):
            return "capsule"

    refuses(NoCapsule(), "an unused DLPack capsule", "'capsule'")


# ---- describe: the array interface, alone and as the way out


def test_interface():
    array = InterfaceArray(strides=(256, 64, 2), data=(ADDRESS, True), device=3)
    assert describe("q", array) == ArrayInfo(ADDRESS, (3, 4, 16), (128, 32, 1), "float16", 3, True)


def test_interface_without_strides_is_in_c_order():
    assert describe("q", InterfaceArray()).strides == (64, 16, 1)
    assert describe("q", InterfaceArray(strides=None)).strides == (64, 16, 1)


@pytest.mark.parametrize(
    "typestr, own, dtype",
    [
        ("<f2", TorchDtype("bfloat16"), "bfloat16"),
        ("<f2", TorchDtype("float16"), "float16"),
        ("<f2", None, "float16"),
        ("<V2", TorchDtype("bfloat16"), "bfloat16"),
        ("<V2", np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        ("|V1", np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        ("<u2", TorchDtype("bfloat16"), "uint16"),  # raw bits, said to be raw bits
        ("<f4", TorchDtype("bfloat16"), "float32"),  # another size: the label describes the memory
        ("|b1", None, "bool"),
        ("|u1", None, "uint8"),
        ("<i8", None, "int64"),
    ],
)
def test_interface_dtype(typestr, own, dtype):
    assert describe("q", InterfaceArray(typestr=typestr, dtype=own)).dtype == dtype


@pytest.mark.parametrize(
    "broken, words",
    [
        ({"typestr": "|V2"}, ".view(torch.int16)"),
        ({"typestr": ">f2"}, "native byte order, got >f2"),
        ({"typestr": "<f3"}, "valid __cuda_array_interface__"),
        ({"typestr": "|O"}, "an array of numbers"),
        ({"typestr": "<M8[s]"}, "an array of numbers"),
        ({"mask": "any mask"}, "mask"),
        ({"strides": (256, 64, 1)}, "whole elements of 2 bytes"),
        ({"strides": (64, 2)}, "one stride an axis"),
        ({"strides": 5}, "valid __cuda_array_interface__"),
        ({"shape": (3, -4, 16)}, "extents >= 0"),
        ({"shape": 3}, "valid __cuda_array_interface__"),
        ({"shape": ...}, "KeyError: 'shape'"),
        ({"data": ...}, "KeyError: 'data'"),
        ({"data": (0, False)}, "address 0"),
        ({"data": ADDRESS}, "valid __cuda_array_interface__"),
    ],
    ids=str,
)
def test_interface_broken(broken, words):
    refuses(InterfaceArray(**broken), words)


def test_interface_that_is_no_dictionary():
    class Broken:
        __cuda_array_interface__ = None

    refuses(Broken(), "valid __cuda_array_interface__")


@pytest.mark.parametrize("pointer", [0, None, ADDRESS])
def test_interface_of_an_empty_array(pointer, monkeypatch):
    monkeypatch.setattr(arrays, "_driver_knows", lambda pointer: pytest.fail("asked the driver"))
    empty = describe("q", InterfaceArray((0, 16), data=(pointer, False), device=None))
    assert empty == ArrayInfo(0, (0, 16), (16, 1), "float16", None, False)


@pytest.mark.parametrize("device", [2, Ordinal(2), type("CupyDevice", (), {"id": 2})()], ids=["int", "index", "id"])
def test_interface_device_is_the_objects_own(device, monkeypatch):
    monkeypatch.setattr(arrays, "_driver_knows", lambda pointer: pytest.fail("asked the driver"))
    assert describe("q", InterfaceArray(device=device)).device == 2


@pytest.mark.parametrize("device", [None, "cuda", True, Ordinal(None)], ids=str)
def test_interface_device_is_asked_of_the_driver(device, monkeypatch):
    asked = []
    monkeypatch.setattr(arrays, "_driver_knows", lambda pointer: asked.append(pointer) or (2, False, 5))
    assert describe("q", InterfaceArray(device=device)).device == 5
    assert asked == [ADDRESS]


def test_interface_memory_that_the_driver_knows(monkeypatch):
    def driver_says(*answer):
        monkeypatch.setattr(arrays, "_driver_knows", lambda pointer: answer)

    driver_says(1, True, 0)
    assert describe("q", InterfaceArray(device=None)).device == 0  # managed memory that lives on the host just now
    driver_says(1, False, 0)
    refuses(InterfaceArray(device=None), "pinned host memory")
    driver_says(0, False, -2)
    refuses(InterfaceArray(device=None), f"{ADDRESS:#x}", "unknown to the CUDA driver")
    monkeypatch.setattr(arrays, "_driver_knows", lambda pointer: None)
    assert describe("q", InterfaceArray(device=None)).device is None


class Both(DLPackArray, InterfaceArray):
    """Speaks both; the array interface labels bfloat16 as float16, as some torch versions do."""

    def __init__(self, typestr="<f2", **kwargs):
        InterfaceArray.__init__(self, typestr=typestr, dtype=TorchDtype("bfloat16"))
        DLPackArray.__init__(self, **kwargs)


class ExportRaises(Both):
    def __dlpack__(self, **kwargs):
        raise RuntimeError("float8 types are not supported by dlpack")


def test_dlpack_wins_over_the_array_interface():
    assert describe("q", Both()).dtype == "bfloat16"
    assert describe("q", Both(code_bits=(1, 8))).dtype == "uint8"


def test_array_interface_if_the_export_raises():
    array = ExportRaises()
    array.device = (2, 0)
    array.__cuda_array_interface__["data"] = (ADDRESS + 16, False)
    assert describe("q", array)[:4] == (ADDRESS + 16, (3, 4, 16), (64, 16, 1), "bfloat16")


def test_neither_works():
    class Neither(DLPackArray):
        dtype = TorchDtype("float8_e4m3fn")
        __cuda_array_interface__ = Raises(TypeError("no typestr for float8_e4m3fn"))

        def __dlpack__(self, **kwargs):
            raise RuntimeError("float8 types are not supported by dlpack")

    refuses(Neither(), ".view(torch.uint8)", "not supported by dlpack", "no typestr", "Neither")

    class Gradient(Neither):
        requires_grad = True

    refuses(Gradient(), ".detach()", "requires_grad=True")

    class Unknown(DLPackArray):
        __dlpack_device__ = Raises(RuntimeError("no device"))

    message = refuses(Unknown(), "no device", "__cuda_array_interface__")
    assert ".view" not in message


# ---- describe: frameworks, numpy, and what is no array


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "uint8", "bool", "int64"])
def test_torch_tensor(dtype):
    assert describe("q", FakeTensor(dtype)) == ArrayInfo(ADDRESS, (3, 4, 16), (64, 16, 1), dtype, 1, False)


def test_torch_tensor_refused():
    tensor = FakeTensor()
    tensor.requires_grad = True
    refuses(tensor, ".detach()")
    tensor = FakeTensor(device=None)
    tensor.is_cuda = False
    refuses(tensor, "a torch tensor on cpu")
    tensor = FakeTensor()
    tensor.stride = lambda: (_ for _ in ()).throw(RuntimeError("sparse tensors do not have strides"))
    refuses(tensor, "strided", "sparse tensors do not have strides")
    tensor = FakeTensor()
    tensor.data_ptr = lambda: 0  # meta and fake tensors
    refuses(tensor, "address 0")


def test_cupy_array():
    assert describe("q", FakeCupy()) == ArrayInfo(ADDRESS, (3, 4, 16), (128, 16, 1), "uint16", 1, False)


def test_layouts_of_torch_tensors():
    """Equal for what ``rebind`` may swap; another for whatever ``describe`` would see."""
    address, layout = arrays.address_and_layout(FakeTensor())
    assert address == ADDRESS
    moved = FakeTensor()
    moved.data_ptr = lambda: ADDRESS + 64
    assert arrays.address_and_layout(moved) == (ADDRESS + 64, layout)
    others = [
        FakeTensor("float16"),
        FakeTensor(shape=(2, 4, 16)),
        FakeTensor(strides=(128, 16, 1)),
        FakeTensor(device=0),
    ]
    grad = FakeTensor()
    grad.requires_grad = True
    for other in (*others, grad):
        assert arrays.address_and_layout(other)[1] != layout


def test_layouts_of_cupy_arrays():
    address, layout = arrays.address_and_layout(FakeCupy())
    assert (address, layout) == arrays.address_and_layout(FakeCupy())
    memory = type("memory", (), {"ptr": ADDRESS, "device_id": 0})
    changes = {"shape": (2, 4, 16), "strides": (512, 32, 2), "dtype": np.dtype("int16"), "data": memory}
    for name, value in changes.items():
        other = FakeCupy()
        setattr(other, name, value)
        assert arrays.address_and_layout(other)[1] != layout, name


def test_arrays_whose_layout_is_left_to_describe():
    sparse, meta = FakeTensor(), FakeTensor()
    sparse.stride = lambda: (_ for _ in ()).throw(RuntimeError("sparse tensors do not have strides"))
    meta.data_ptr = lambda: 0
    for array in (sparse, meta, np.zeros(3), object()):
        assert arrays.address_and_layout(array) is None


@pytest.mark.parametrize("name", ["QuantizedTensor", "Tensor"])
def test_tensor_subclasses_go_through_the_protocol(name):
    class Subclass(FakeTensor):
        __dlpack_device__ = DLPackArray.__dlpack_device__
        __dlpack__ = DLPackArray.__dlpack__
        __init__ = DLPackArray.__init__

    Subclass.__name__ = name
    Subclass.__module__ = "torchao.tensors"
    assert describe("q", Subclass(byte_offset=32)).pointer == ADDRESS + 32


def test_numpy_arrays_for_the_emulator():
    rows = np.zeros((5, 4, 16), ml_dtypes.bfloat16)
    assert describe("q", rows[1:, ::2], host=True) == ArrayInfo(
        rows[1:].ctypes.data, (4, 2, 16), (64, 32, 1), "bfloat16", None, False
    )
    backwards = np.zeros(4, ml_dtypes.float8_e4m3fn)[::-1]
    assert describe("q", backwards, host=True)[1:4] == ((4,), (-1,), "float8_e4m3fn")
    rows.flags.writeable = False
    assert describe("q", rows, host=True).readonly
    assert describe("q", np.zeros((0, 3), np.int64), host=True)[:2] == (0, (0, 3))


@pytest.mark.parametrize("array", [np.zeros(3, ">i4"), np.zeros(3, object), np.zeros(3, "S0"), np.zeros(3, "i4, i4")])
def test_numpy_dtypes_refused(array):
    refuses(array, "numbers", host=True)


def test_field_of_a_packed_record_is_refused():
    refuses(np.zeros(3, "u1, i4")["f1"], "whole elements of 4 bytes", host=True)


def test_the_wrong_memory_is_refused():
    refuses(np.zeros(3), "a device array", "numpy array, in host memory")
    for device_array in (DLPackArray(), InterfaceArray(), FakeTensor(), FakeCupy()):
        refuses(device_array, "a numpy array", type(device_array).__qualname__, host=True)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("value", [None, [1, 2], 3, "array", object()])
def test_no_array(value, host):
    refuses(value, "a numpy array" if host else "a device array", f"got {type(value).__name__}", host=host)


def test_module_imports_no_cuda_package():
    """They cost a second, and `import nbverify` must work where there is none."""
    code = "import sys, nbverify.arrays; print(sys.modules.keys() & {'cuda.bindings', 'cuda.core', 'numba', 'torch'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ---- check


def refusal(buffer, info, spec=MLA, dims=None):
    dims = contract.dims_of(spec) if dims is None else dims
    before = dict(dims)
    with pytest.raises(ArgumentError) as caught:
        Rule(BUFFERS[buffer], spec).check(info, dims)
    assert dims == before  # a refused array teaches nothing
    return str(caught.value)


Q_EXPECTED = "q: expected bfloat16 (or uint16, int16 raw bits) [num_tokens=33, num_q_heads=8, head_dim_qk=576], got "


@pytest.mark.parametrize(
    "info, got",
    [
        (info_of((33, 8, 576), dtype="float32"), "float32 [33, 8, 576]"),
        (info_of((33, 7, 576)), "bfloat16 [33, 7, 576]: axis 1 (num_q_heads) is 7, not 8"),
        (info_of((33, 8, 512)), "bfloat16 [33, 8, 512]: axis 2 (head_dim_qk) is 512, not 576"),
        (
            info_of((33, 8, 576), (8 * 1152, 1152, 2)),
            "bfloat16 [33, 8, 576]: axis 2 (head_dim_qk) has stride 2, not 1 (contiguous)",
        ),
        (
            info_of((33, 8, 576), (-4608, 576, 1)),
            "bfloat16 [33, 8, 576]: axis 0 (num_tokens) has stride -4608, not >= 0",
        ),
        (
            info_of((33, 8, 576), (4612, 576, 1)),
            "bfloat16 [33, 8, 576]: axis 0 (num_tokens) has a stride of 9224 bytes, not a multiple of 16",
        ),
        (
            info_of((33, 8, 576), pointer=ADDRESS + 8),
            "bfloat16 [33, 8, 576]: its address 0x7f0000001008 is not a multiple of 16 bytes",
        ),
    ],
    ids=["dtype", "heads", "width", "columns", "negative", "stride", "address"],
)
def test_message(info, got):
    assert refusal("q", info) == Q_EXPECTED + got


def test_message_of_other_rows():
    fp8 = VerifySpec.gqa(8, 2, 128, kv_dtype="float8_e4m3fn", mask="packed", **LIMITS)
    assert refusal("k_cache", info_of((9, 128), dtype="uint8"), fp8) == (
        "k_cache: expected float8_e4m3fn (or uint8 raw bits) [num_slots, num_kv_heads=2, head_dim_qk=128], "
        "got uint8 [9, 128]: 2 axes, not 3"
    )
    assert refusal("k_cache", info_of((9, 2, 128), dtype="float8_e5m2"), fp8).endswith("got float8_e5m2 [9, 2, 128]")
    assert refusal("k_cache", info_of((9, 2, 128), dtype="int8"), fp8).endswith("got int8 [9, 2, 128]")
    assert refusal("kv_indptr", info_of((4,), dtype="int64"), dims={"num_requests": 4}) == (
        "kv_indptr: expected int32 or int64 [num_requests+1=5], got int64 [4]: axis 0 (num_requests+1) is 4, not 5"
    )
    assert refusal("kv_indptr", info_of((0,), dtype="int64")) == (
        "kv_indptr: expected int32 or int64 [num_requests+1], got int64 [0]: axis 0 (num_requests+1) is 0, not >= 1"
    )
    assert refusal("out_cache_loc", info_of((4,), dtype="int32"), dims={"num_tokens": 5}) == (
        "out_cache_loc: expected int32 or int64 [>= num_tokens=5], got int32 [4]: axis 0 (>=num_tokens) is 4, not >= 5"
    )
    assert "uint32 or int32 [>= 0]" in refusal("custom_mask", info_of((4,), dtype="uint8"), fp8)
    assert refusal("findings", info_of((4, 2), dtype="int64"), dims={"num_checks": 4}) == (
        "findings: expected int64 [num_checks=4, 3], got int64 [4, 2]: axis 1 (3) is 2, not 3"
    )


def test_read_only_memory():
    dims = contract.dims_of(MLA)
    Rule(BUFFERS["q"], MLA).check(info_of((3, 8, 576), readonly=True), dims)
    assert "read-only memory" in refusal("out", info_of((3, 8, 512), readonly=True))


def test_elements_of_a_written_buffer_must_not_overlap():
    broadcast = info_of((3, 8, 512), (0, 512, 1))
    assert "axis 0 (num_tokens) has stride 0, not >= 1" in refusal("out", broadcast)
    assert "axis 0 (num_tokens) has stride 1024, not >= 4096" in refusal("out", info_of((3, 8, 512), (1024, 512, 1)))
    Rule(BUFFERS["out"], MLA).check(info_of((3, 8, 512), (512, 3 * 512, 1)), contract.dims_of(MLA))  # heads outermost
    Rule(BUFFERS["q"], MLA).check(
        info_of((3, 8, 576), (0, 576, 1)), contract.dims_of(MLA)
    )  # read: one row for all tokens


def test_lse_rows_have_a_free_stride_and_contiguous_heads():
    Rule(BUFFERS["lse"], MLA).check(info_of((3, 8), (12, 1), "float32"), contract.dims_of(MLA))
    assert "axis 1 (num_q_heads) has stride 3" in refusal("lse", info_of((3, 8), (1, 3), "float32"))


def test_the_first_array_binds_what_the_spec_leaves_open():
    dims = contract.dims_of(MLA)
    Rule(BUFFERS["q"], MLA).check(info_of((33, 8, 576)), dims)
    Rule(BUFFERS["k_cache"], MLA).check(info_of((100, 1, 576)), dims)
    Rule(BUFFERS["kv_indptr"], MLA).check(info_of((5,), dtype="int32"), dims)
    Rule(BUFFERS["kv_indices"], MLA).check(info_of((0,), dtype="int32", pointer=0), dims)
    assert dims == contract.dims_of(MLA) | {"num_tokens": 33, "num_slots": 100, "num_requests": 4}
    assert "is 6, not 5" in refusal("qo_indptr", info_of((6,), dtype="int64"), dims=dims)
    assert "is 32, not 33" in refusal("out", info_of((32, 8, 512)), dims=dims)


def test_a_lower_bound_binds_nothing():
    with pytest.raises(KeyError):
        Rule(BUFFERS["out_cache_loc"], MLA).check(info_of((4,), dtype="int32"), contract.dims_of(MLA))


def test_an_array_without_elements_has_no_layout():
    Rule(BUFFERS["q"], MLA).check(info_of((0, 8, 576), (7, -3, 5), pointer=0), contract.dims_of(MLA))


GQA_FP8 = VerifySpec.gqa(2, 2, 16, kv_dtype="float8_e4m3fn", **LIMITS)
PROPERTY_DIMS = contract.dims_of(GQA_FP8) | {"num_tokens": 3, "num_requests": 2, "num_slots": 3}
# name -> extents, is lower bound, number of free strides, dtypes, alignment, is written
RULES = {
    "q": ((3, 2, 16), False, 2, ("bfloat16", "uint16", "int16"), 16, False),
    "k_cache": ((3, 2, 16), False, 2, ("float8_e4m3fn", "uint8"), 16, False),
    "kv_indptr": ((3,), False, 0, ("int32", "int64"), 4, False),
    "out_cache_loc": ((3,), True, 0, ("int32", "int64"), 4, False),
    "custom_mask": ((0,), True, 0, ("bool", "uint8"), 1, False),
    "out": ((3, 2, 16), False, 2, ("bfloat16", "uint16", "int16"), 16, True),
    "lse": ((3, 2), False, 1, ("float32",), 4, True),
}
BYTES = {"bool": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float32": 4, "int32": 4, "int64": 8}


@st.composite
def nearly_right(draw):
    """(buffer, info): a right array with, usually, one or two things changed."""
    name = draw(st.sampled_from(sorted(RULES)))
    extents, is_bound, _, dtypes, _, _ = RULES[name]
    shape = [extent + (draw(st.integers(0, 2)) if is_bound else 0) for extent in extents]
    dtype = draw(st.sampled_from(dtypes))
    pointer, readonly = ADDRESS, False
    changes = draw(st.lists(st.sampled_from(["shape", "ndim", "dtype", "pointer", "readonly"]), max_size=1))
    if "shape" in changes:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 4))
    if "ndim" in changes:
        shape = shape[1:] if draw(st.booleans()) else [1, *shape]
    if "dtype" in changes:
        dtype = draw(st.sampled_from(["bfloat16", "float16", "uint16", "int32", *BYTES]))
    if "pointer" in changes:
        pointer += draw(st.sampled_from([1, 2, 4, 8, 16]))
    if "readonly" in changes:
        readonly = True
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for axis in range(len(shape)):
        if draw(st.integers(0, 4)) == 0:
            near = [0, 1, 2, 3, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, -16]
            strides[axis] = draw(st.sampled_from(near))
    return name, info_of(shape, strides, dtype, pointer, readonly)


def offsets(info):
    """Element offsets, one for each index, as the definition says."""
    indices = itertools.product(*(range(extent) for extent in info.shape))
    return [sum(i * s for i, s in zip(index, info.strides, strict=True)) for index in indices]


def obeys_the_rules(name, info):
    """The rules of the contract in terms of addresses, not of strides."""
    extents, is_bound, num_free, dtypes, alignment, is_written = RULES[name]
    if info.dtype not in dtypes or len(info.shape) != len(extents) or (is_written and info.readonly):
        return False
    if any(got != want and not (is_bound and got > want) for got, want in zip(info.shape, extents, strict=True)):
        return False
    if 0 in info.shape:
        return True
    rows = info._replace(shape=info.shape[:num_free], strides=info.strides[:num_free])
    inner = info._replace(shape=info.shape[num_free:], strides=info.strides[num_free:])
    if offsets(inner) != list(range(prod(inner.shape))):
        return False
    itemsize = BYTES.get(info.dtype, 2)
    if any(offset < 0 or (info.pointer + offset * itemsize) % alignment for offset in offsets(rows)):
        return False
    if not is_written:
        return True
    # Nested: in some order of the axes, a step is never shorter than everything inside it.
    axes = [(e, s) for e, s in zip(info.shape, info.strides, strict=True) if e > 1]
    return any(
        all(stride >= 1 + sum((e - 1) * s for e, s in order[:k]) for k, (_, stride) in enumerate(order))
        for order in itertools.permutations(axes)
    )


@settings(max_examples=1500, deadline=None)
@given(nearly_right())
@example(("out", info_of((3, 2, 16), (16, 48, 1))))
@example(("out", info_of((3, 2, 16), (32, 8, 1))))
@example(("lse", info_of((3, 2), (1, 1), "float32")))
def test_check_accepts_exactly_what_obeys_the_rules(case):
    name, info = case
    try:
        Rule(BUFFERS[name], GQA_FP8).check(info, dict(PROPERTY_DIMS))
        accepted = True
    except ArgumentError:
        accepted = False
    assert accepted == obeys_the_rules(name, info)
    if accepted and RULES[name][-1]:
        assert len(set(offsets(info))) == prod(info.shape)  # what the rule about strides is for


def test_the_properties_rules_are_the_contracts():
    for name, (extents, is_bound, num_free, dtypes, alignment, is_written) in RULES.items():
        buffer = BUFFERS[name]
        assert dtypes == contract.accepted_dtypes(buffer, GQA_FP8)
        assert alignment == contract.alignment_bytes(buffer, GQA_FP8)
        assert (len(extents), num_free) == (len(buffer.axes), len(buffer.free_strides))
        assert (is_bound, is_written) == (buffer.axes[0].startswith(">="), buffer.access == "write")


# ---- extents of memory

small_arrays = st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=3).flatmap(
    lambda axes: st.builds(
        info_of,
        st.just([extent for extent, _ in axes]),
        st.just([stride for _, stride in axes]),
        st.sampled_from(["uint8", "bfloat16", "float32"]),
        st.integers(ADDRESS, ADDRESS + 40),
    )
)


@given(small_arrays)
def test_storage_extent(info):
    where = offsets(info)
    assert storage_extent(info) == (max(where) - min(where) + 1 if where else 0)


@settings(max_examples=500)
@given(small_arrays, small_arrays)
def test_overlaps_is_exact(a, b):
    def touched(info):
        size = BYTES.get(info.dtype, 2)
        return {info.pointer + offset * size + byte for offset in offsets(info) for byte in range(size)}

    assert overlaps(a, b) == overlaps(b, a) == bool(touched(a) & touched(b))


def test_overlaps_of_pools():
    """K and V interleaved slot by slot in one pool of 65 million slots, 256 GiB: the answer is arithmetic."""
    k = info_of((65_000_000, 8, 128), (2048, 128, 1))
    assert not overlaps(k, k._replace(pointer=ADDRESS + 1024 * 2))
    assert overlaps(k, k._replace(pointer=ADDRESS + 1024 * 2 - 2))
    assert overlaps(k, k)
    assert not overlaps(k, info_of((4, 8, 128), pointer=ADDRESS - 4 * 2048))


def test_overlaps_if_it_is_too_hard(monkeypatch):
    """Bytes that never meet, which takes a search to find out.  Unknown counts as overlap."""
    a = info_of((7, 3, 4, 3), (15, 1620, 992, 105), "uint8")
    b = info_of((10, 4, 29, 3), (60, 363, 840, 1140), "uint8", ADDRESS + 37)
    assert not overlaps(a, b)
    monkeypatch.setattr(arrays, "OVERLAP_WORK", 3)
    assert overlaps(a, b)


def test_overlaps_beyond_64_bits():
    huge = info_of((2**31, 2**31, 4), (0, 8, 1), "uint8")
    assert overlaps(huge, huge._replace(pointer=ADDRESS + 4))


# ---- streams


class Stream:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class WithMethod:
    def __cuda_stream__(self):
        return (0, 77)


class WithProperty:
    __cuda_stream__ = (0, 77)
    ptr = 5  # the protocol wins


class CUstream:
    def __int__(self):
        return 77


@pytest.mark.parametrize(
    "stream, handle",
    [
        (None, 1),
        (0, 0),
        (2, 2),
        (77, 77),
        (WithMethod(), 77),
        (WithProperty(), 77),
        (Stream(cuda_stream=77), 77),
        (Stream(ptr=0), 0),  # CuPy's null stream
        (Stream(ptr=77), 77),
        (Stream(handle=77), 77),
        (Stream(handle=CUstream()), 77),
        (Stream(handle=ctypes.c_void_p(77)), 77),
        (Stream(handle=ctypes.c_void_p(None)), 0),
    ],
)
def test_stream_handle(stream, handle):
    assert stream_handle(stream) == handle
    assert type(stream_handle(stream)) is int


class Broken:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "stream, words",
    [
        (True, "True"),
        (False, "False"),
        (-1, "-1"),
        (1.0, "1.0"),
        ("0", "'0'"),
        (object(), "object"),
        (Stream(handle=True), "Stream"),
        (Stream(ptr=None), "Stream"),
        (Stream(ptr=-5), "Stream"),
        (Stream(ptr="x"), "Stream"),
        (Broken((1, 77)), "version 1"),
        (Broken(77), "Broken"),
        (Broken((0, None)), "Broken"),
        (Broken(RuntimeError("closed")), "closed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_no_stream(stream, words):
    with pytest.raises(ArgumentError, match=r"^stream: expected ") as caught:
        stream_handle(stream)
    assert words in str(caught.value)
