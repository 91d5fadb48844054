"""Foreign arrays: whatever the caller has -> address, shape, strides and dtype.  Nothing is read, copied or waited for.

Which producer is read how (:func:`describe`)
    numpy             its attributes; host memory, for the emulator only
    torch.Tensor      its attributes (``data_ptr()``, ``stride()``, ...), exactly this class and ``Parameter``
    cupy.ndarray      its attributes (``data.ptr``, ``strides``, ...), exactly this class
    ``__dlpack__``    the DLTensor in the capsule, ``stream=-1``: no synchronisation
    ``__cuda_array_interface__``    the dictionary, if there is no DLPack or its export raises

Torch and CuPy are read directly because that is what a framework passes on every layer: a DLPack export costs several
microseconds a call, the attributes cost one or two, and both come from the same tensor object.  Subclasses may wrap
other storage and go through DLPack.  DLPack goes before the array interface because its type is the true one: some
torch versions label bfloat16 as float16 ("<f2") or as raw bytes ("<V2") in the array interface.

The capsule is read here, with ctypes, and not by cuda.core's StridedMemoryView: that view ignores ``byte_offset``
before 1.2 (measured on 0.5.1 to 1.1.0: a wrong address, without an error), has no fp8 type, has bfloat16 only where
ml_dtypes is installed, and does not tell pinned host memory from device memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Hashable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nbverify import contract
from nbverify.errors import ArgumentError
from nbverify.spec import VerifySpec

LEGACY_DEFAULT_STREAM = 1  # CU_STREAM_LEGACY
NO_SYNC = -1  # __dlpack__(stream=-1): the producer must not make any stream wait
DLPACK_VERSION = (1, 1)  # the newest layout that _read_dlpack knows; producers answer with it or an older one
READ_ONLY_FLAG = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
OVERLAP_WORK = 100_000  # candidates that numpy.shares_memory tries, a few ms; interleaved K and V take a handful

# DLDeviceType
DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED = 1, 2, 3, 13
# CUmemorytype
MEMORY_UNKNOWN, MEMORY_HOST = 0, 1

# DLDataTypeCode and bits; the names are numpy's and ml_dtypes'.
DLPACK_NAMES: dict[tuple[int, int], str] = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}
ITEMSIZE: dict[str, int] = {name: bits // 8 for (_, bits), name in DLPACK_NAMES.items()}
BEYOND_NUMPY = frozenset(name for name in ITEMSIZE if name.startswith(("bfloat", "float8")))

DEVICE_ARRAY = "a device array (torch, CuPy, numba, or anything with __dlpack__ or __cuda_array_interface__)"
HOST_ARRAY = "a numpy array (the emulator works on host memory)"
RAW_BITS = "pass its raw bits: .view(torch.uint8), or .view(torch.int16) for 16-bit elements"


class ArrayInfo(NamedTuple):
    """What is known of an array.  (A tuple, because it is made on every ``rebind``: a frozen dataclass costs 1 us.)

    Attributes
    ----------
    pointer
        Address of element ``[0, ..., 0]``; 0 for an array without elements.
    shape, strides
        One entry an axis, strides in elements (C order where the producer leaves them out).  They may be negative.
    dtype
        A name of numpy's or ml_dtypes', such as "bfloat16", "float8_e4m3fn", "uint8", "bool".
    device
        CUDA ordinal.  None for host memory, and where neither the producer nor a driver can tell: an empty array,
        or no driver on this machine.
    readonly
        The producer forbids writing.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    readonly: bool


def describe(name: str, array: object, *, host: bool = False) -> ArrayInfo:
    """Address, shape, strides and dtype of any device array; with ``host=True`` of a numpy array, and of no other.

    Raises
    ------
    ArgumentError
        No array, the wrong memory, or a producer that contradicts its protocol.
    """
    cls = type(array)
    origin = (cls.__module__, cls.__name__)
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        if not host:
            raise ArgumentError(name, DEVICE_ARRAY, "a numpy array, in host memory")
        return _from_numpy(name, array)
    if host:
        raise ArgumentError(name, HOST_ARRAY, _class_name(array))
    if origin == ("torch", "Tensor") or origin == ("torch.nn.parameter", "Parameter"):
        return _from_torch(name, array)
    if origin == ("cupy", "ndarray"):
        return _from_cupy(name, array)
    return _from_protocols(name, array)


def address_and_layout(array: Any) -> tuple[int, tuple] | None:
    """``(address, everything else)`` of a CuPy array or a torch tensor, as the library keeps it; None for others.

    Two arrays of equal layout differ in their address only.  Comparing layouts is what makes ``rebind`` cheap: nothing
    is converted or checked that was checked when the first of them was bound.  None also for arrays that have no
    address or no strides: ``describe`` says what is wrong with them.
    """
    library = _library_of(type(array))  # type: ignore[arg-type]  # mypy: a class is not Hashable
    layout: tuple
    if library == "cupy":
        memory = array.data
        address, layout = memory.ptr, (library, array.shape, array.strides, array.dtype, memory.device_id)
    elif library == "torch":
        try:
            address = array.data_ptr()
            layout = (library, array.shape, array.stride(), array.dtype, array.device, array.requires_grad)
        except Exception:  # sparse tensors have no strides
            return None
    else:
        return None
    return (address, layout) if address else None


@cache
def _library_of(cls: Hashable) -> str:
    """The library whose plain array class this is, or ""."""
    origin = (getattr(cls, "__module__", ""), getattr(cls, "__name__", ""))
    return {("torch", "Tensor"): "torch", ("cupy", "ndarray"): "cupy"}.get(origin, "")


def _from_numpy(name: str, array: np.ndarray) -> ArrayInfo:
    dtype = _dtype_name(array.dtype)
    strides = _elements(name, array.strides, dtype)
    return _checked(name, array.ctypes.data, array.shape, strides, dtype, None, not array.flags.writeable)


def _from_torch(name: str, array: Any) -> ArrayInfo:
    """Refuses what ``Tensor.__dlpack__`` refuses: ``stride()`` raises for a layout that has none (sparse)."""
    if array.requires_grad:
        raise ArgumentError(name, "a tensor outside autograd: pass .detach()", "one with requires_grad=True")
    if not array.is_cuda:
        raise ArgumentError(name, DEVICE_ARRAY, f"a torch tensor on {array.device}")
    try:
        pointer, strides = array.data_ptr(), array.stride()
    except Exception as error:
        raise ArgumentError(name, "a plain strided tensor", f"{_class_name(array)}: {error}") from error
    return _checked(name, pointer, tuple(array.shape), strides, _dtype_name(array.dtype), array.device.index, False)


def _from_cupy(name: str, array: Any) -> ArrayInfo:
    dtype = _dtype_name(array.dtype)
    memory = array.data
    return _checked(
        name, memory.ptr, array.shape, _elements(name, array.strides, dtype), dtype, memory.device_id, False
    )


def _from_protocols(name: str, array: Any) -> ArrayInfo:
    """DLPack first, for its dtype; the array interface if there is none or its export raises."""
    failures = []
    if hasattr(array, "__dlpack__"):
        try:
            device_type, ordinal = (int(part) for part in array.__dlpack_device__())  # torch: an enum
            capsule = _export(array) if device_type in (DL_CUDA, DL_CUDA_MANAGED) else None
        except Exception as error:  # a producer may raise anything; torch does for fp8
            failures.append(f"__dlpack__: {error}")
        else:
            _check_device_type(name, array, device_type)
            return _read_dlpack(name, capsule, ordinal)
    try:
        interface = array.__cuda_array_interface__
    except AttributeError as error:
        if failures:
            failures.append(f"__cuda_array_interface__: {error}")
    except Exception as error:
        failures.append(f"__cuda_array_interface__: {error}")
    else:
        return _read_array_interface(name, array, interface)

    if getattr(array, "requires_grad", False) is True:
        raise ArgumentError(name, "a tensor outside autograd: pass .detach()", "one with requires_grad=True")
    if not failures:
        raise ArgumentError(name, DEVICE_ARRAY, _class_name(array))
    hint = f" ({RAW_BITS})" if _own_dtype(array) in BEYOND_NUMPY else ""
    raise ArgumentError(name, f"an array that can be exported{hint}", f"{_class_name(array)} ({'; '.join(failures)})")


def _export(array: Any) -> object:
    try:
        return array.__dlpack__(stream=NO_SYNC, max_version=DLPACK_VERSION)
    except TypeError:  # a producer from before DLPack 1.0 does not know max_version
        return array.__dlpack__(stream=NO_SYNC)


def _check_device_type(name: str, array: object, device_type: int) -> None:
    if device_type in (DL_CUDA, DL_CUDA_MANAGED):
        return
    if device_type == DL_CUDA_HOST:
        # A GPU could read it, over the bus: tens of times slower, which nobody means to ask for.
        raise ArgumentError(name, "device memory", f"{_class_name(array)} in pinned host memory")
    where = "in host memory" if device_type == DL_CPU else f"on DLPack device type {device_type}"
    raise ArgumentError(name, DEVICE_ARRAY, f"{_class_name(array)} {where}")


# dlpack.h.  DLTensor is the same in all versions: data, device type, device id, ndim, type code, bits, lanes, shape,
# strides, byte offset.  In DLManagedTensorVersioned (1.x) it follows major, minor, context, deleter, flags; the older
# DLManagedTensor begins with it.  Unpacked from bytes, not as ctypes.Structure, whose every field costs 0.1 us.
_DL_TENSOR = struct.Struct("=QiiiBBHQQQ")
_DL_VERSIONED = struct.Struct("=IIQQQ" + "QiiiBBHQQQ")

# A function of our own, not the attribute of pythonapi, whose types must not be changed for others in this process.
# Raises ValueError for anything but a capsule of that name.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _read_dlpack(name: str, capsule: object, ordinal: int) -> ArrayInfo:
    """Read the DLTensor and leave the capsule unconsumed: its own destructor then gives the export back."""
    major, minor, flags = *DLPACK_VERSION, 0
    try:
        address = _capsule_pointer(capsule, b"dltensor_versioned")
        major, minor, _, _, flags, *tensor = _DL_VERSIONED.unpack(ctypes.string_at(address, _DL_VERSIONED.size))
    except ValueError:
        try:
            address = _capsule_pointer(capsule, b"dltensor")
        except ValueError:
            raise ArgumentError(name, "an unused DLPack capsule from __dlpack__", repr(capsule)) from None
        tensor = list(_DL_TENSOR.unpack(ctypes.string_at(address, _DL_TENSOR.size)))
    if major != DLPACK_VERSION[0]:  # asked for 1.x; another major version may have moved everything but its number
        raise ArgumentError(name, "DLPack 1.x", f"{major}.{minor}")
    data, _, _, ndim, code, bits, lanes, shape_at, strides_at, byte_offset = tensor
    if ndim < 0 or (ndim > 0 and not shape_at):
        raise ArgumentError(name, "a DLPack tensor with a shape", f"ndim {ndim}, shape at {shape_at:#x}")
    dtype = DLPACK_NAMES.get((code, bits))
    if dtype is None or lanes != 1:
        got = f"type code {code}, {bits} bits, {lanes} lanes"
        raise ArgumentError(name, f"a DLPack type that numpy or ml_dtypes has a name for ({RAW_BITS})", got)
    shape = _int64_at(shape_at, ndim)
    strides = _int64_at(strides_at, ndim) if strides_at else _c_strides(shape)
    _check_axes(name, shape, strides)
    pointer = data + byte_offset if data else 0
    return _checked(name, pointer, shape, strides, dtype, ordinal, bool(flags & READ_ONLY_FLAG))


def _int64_at(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"={count}q", ctypes.string_at(address, 8 * count)) if count else ()


def _read_array_interface(name: str, array: object, interface: Any) -> ArrayInfo:
    """``__cuda_array_interface__``, any version.  Its "stream" entry is not waited for."""
    try:
        pointer, readonly = interface["data"]
        pointer = int(pointer or 0)  # some say None for an array without elements
        shape = tuple(int(extent) for extent in interface["shape"])
        numpy_dtype = _numpy_dtype(interface["typestr"])
        byte_strides = interface.get("strides")
        if byte_strides is not None:
            byte_strides = tuple(int(stride) for stride in byte_strides)
        mask = interface.get("mask")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        got = f"{_class_name(array)} ({type(error).__name__}: {error})"
        raise ArgumentError(name, "a valid __cuda_array_interface__", got) from error
    if mask is not None:
        raise ArgumentError(name, "an array without a mask of valid elements", f"{_class_name(array)} with one")
    dtype = _dtype_name(numpy_dtype)
    own = _own_dtype(array)
    if own in BEYOND_NUMPY and ITEMSIZE[own] == numpy_dtype.itemsize and numpy_dtype.kind in "fV":
        dtype = own  # numpy has no such type: the label is a stand-in, whatever it says
    elif numpy_dtype.kind == "V":
        raise ArgumentError(name, f"a typestr with a number type; {RAW_BITS}", repr(interface["typestr"]))
    strides = _c_strides(shape) if byte_strides is None else _elements(name, byte_strides, dtype)
    _check_axes(name, shape, strides)
    device = _ordinal(name, array, pointer) if pointer and 0 not in shape else None
    return _checked(name, pointer, shape, strides, dtype, device, bool(readonly))


@cache
def _numpy_dtype(typestr: str) -> np.dtype:
    return np.dtype(typestr)


def _ordinal(name: str, array: object, pointer: int) -> int | None:
    """The array's own ``device`` (torch: ``.index``, CuPy: ``.id``), else what the driver knows of the address."""
    device = getattr(array, "device", None)
    for candidate in (device, getattr(device, "index", None), getattr(device, "id", None)):
        if isinstance(candidate, int) and not isinstance(candidate, bool):
            return candidate
    known = _driver_knows(pointer)
    if known is None:
        return None
    memory_type, managed, ordinal = known
    if memory_type == MEMORY_UNKNOWN:
        raise ArgumentError(name, "device memory", f"address {pointer:#x}, unknown to the CUDA driver (freed?)")
    if memory_type == MEMORY_HOST and not managed:
        raise ArgumentError(name, "device memory", f"{_class_name(array)} in pinned host memory")
    return ordinal


def _driver_knows(pointer: int) -> tuple[int, bool, int] | None:
    """(memory type, is managed, device ordinal) of an address; None where there is no driver to ask."""
    try:
        from cuda.bindings import driver

        attribute = driver.CUpointer_attribute
        wanted = [
            attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
            attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ]
        code, values = driver.cuPointerGetAttributes(len(wanted), wanted, pointer)
    except (ImportError, RuntimeError):  # no cuda-bindings, or no driver library
        return None
    if code != driver.CUresult.CUDA_SUCCESS:  # not initialised: this process has no CUDA memory yet
        return None
    memory_type, managed, ordinal = values
    return int(memory_type), bool(managed), int(ordinal)


def _checked(
    name: str,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    device: int | None,
    readonly: bool,
) -> ArrayInfo:
    """The last step of every reader: a known dtype, and memory where there are elements."""
    if dtype not in ITEMSIZE:
        raise ArgumentError(name, "an array of numbers in native byte order", dtype)
    if 0 in shape:
        pointer = 0
    elif not pointer:
        raise ArgumentError(name, "an array with memory", f"address 0 for shape {list(shape)}")
    return ArrayInfo(pointer, shape, strides, dtype, device, readonly)


def _check_axes(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if len(strides) != len(shape) or any(extent < 0 for extent in shape):
        raise ArgumentError(name, "extents >= 0 and one stride an axis", f"shape {shape}, strides {strides}")


@cache  # numpy builds dtype.name anew on every access: 1 us
def _dtype_name(dtype: object) -> str:
    """Name of a numpy or a torch dtype; in another byte order than this machine's a name that nothing accepts."""
    if not getattr(dtype, "isnative", True):
        return str(dtype)  # ">f4"
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _own_dtype(array: object) -> str:
    try:
        return _dtype_name(array.dtype)  # type: ignore[attr-defined]
    except Exception:  # no dtype, an unhashable one, a property that raises: nothing to learn
        return ""


def _elements(name: str, byte_strides: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Strides in elements.  A dtype without a known size is refused by :func:`_checked`, right after."""
    itemsize = ITEMSIZE.get(dtype, 1)
    for stride in byte_strides:
        if stride % itemsize:
            raise ArgumentError(name, f"strides in whole elements of {itemsize} bytes", f"{tuple(byte_strides)} bytes")
    return tuple([stride // itemsize for stride in byte_strides])


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _class_name(array: object) -> str:
    cls = type(array)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# ---- against the contract


BOUND_BY_ARRAYS = ("num_tokens", "num_requests", "num_slots")  # every other extent is known before


class _Axis(NamedTuple):
    """One entry of ``Buffer.axes``: ``name + offset``, a number (no name), or a lower bound of either."""

    text: str
    name: str
    offset: int
    is_bound: bool

    def expected(self, dims: dict[str, int]) -> str:
        """For a message: ``num_tokens=33``, ``>= 0``."""
        label = self.name + (f"+{self.offset}" if self.offset else "") if self.name else ""
        known = str(dims.get(self.name, 0) + self.offset) if not self.name or self.name in dims else ""
        return (">= " if self.is_bound else "") + "=".join(part for part in (label, known) if part)


def _parse(axis: str) -> _Axis:
    name, _, offset = axis.removeprefix(">=").partition("+")
    if name.isdecimal():
        return _Axis(axis, "", int(name), axis.startswith(">="))
    return _Axis(axis, name, int(offset or 0), axis.startswith(">="))


class Rule:
    """A row of the contract for one spec, made once for a plan, against which arrays are checked."""

    def __init__(self, buffer: contract.Buffer, spec: VerifySpec):
        self.name = buffer.name
        self._axes = tuple(_parse(axis) for axis in buffer.axes)
        self._num_free = len(buffer.free_strides)
        self._dtypes = contract.accepted_dtypes(buffer, spec)
        self._has_raw_bits = buffer.kind == "rows"
        self.alignment = contract.alignment_bytes(buffer, spec)
        self._is_written = "write" in buffer.access

    def check(self, info: ArrayInfo, dims: dict[str, int]) -> None:
        """Check an array; on success ``dims`` has learnt the extents it did not know.

        Only num_tokens, num_requests and num_slots may be unknown in ``dims``: the first buffer that has them as an
        exact extent says what they are.  An array without elements has no layout to check: no address is ever made
        from it.

        Raises
        ------
        ArgumentError
            dtype, number of axes, an extent, a layout that the kernel cannot address, or read-only memory to be
            written.
        """
        known = dims
        if len(info.shape) == len(self._axes):
            for axis, extent in zip(self._axes, info.shape, strict=True):
                if (
                    axis.name in BOUND_BY_ARRAYS
                    and not axis.is_bound
                    and axis.name not in known
                    and extent >= axis.offset
                ):
                    known = {**known, axis.name: extent - axis.offset}
        problem = self._problem(info, known)
        if problem is not None:
            expected = f"{self._dtype_text()} [{', '.join(axis.expected(known) for axis in self._axes)}]"
            raise ArgumentError(self.name, expected, f"{info.dtype} {list(info.shape)}{problem}")
        dims.update(known)

    def _problem(self, info: ArrayInfo, dims: dict[str, int]) -> str | None:
        """What is wrong with the array, as the end of a sentence; None if nothing is."""
        if len(info.shape) != len(self._axes):
            return f": {len(info.shape)} axes, not {len(self._axes)}"
        for number, (axis, extent) in enumerate(zip(self._axes, info.shape, strict=True)):
            # Still unknown here: num_requests in "num_requests+1" of extent 0.
            is_open = axis.name in BOUND_BY_ARRAYS and axis.name not in dims and not axis.is_bound
            wanted = axis.offset if is_open or not axis.name else dims[axis.name] + axis.offset
            if extent < wanted or (extent > wanted and not axis.is_bound):
                at_least = ">= " if axis.is_bound or is_open else ""
                return f": axis {number} ({axis.text}) is {extent}, not {at_least}{wanted}"
        if info.dtype not in self._dtypes:
            return ""  # the two dtypes stand side by side already
        if self._is_written and info.readonly:
            return ": read-only memory, and it is written"
        if 0 in info.shape:
            return None
        return self._layout_problem(info)

    def _layout_problem(self, info: ArrayInfo) -> str | None:
        """A stride counts only where the axis has a second element."""
        itemsize, contiguous = ITEMSIZE[info.dtype], 1
        for number in range(len(info.shape) - 1, -1, -1):
            extent, stride = info.shape[number], info.strides[number]
            if extent > 1:
                where = f": axis {number} ({self._axes[number].text}) has "
                if number >= self._num_free:
                    if stride != contiguous:
                        return where + f"stride {stride}, not {contiguous} (contiguous)"
                elif stride < 0:
                    return where + f"stride {stride}, not >= 0"
                elif stride * itemsize % self.alignment:
                    return where + f"a stride of {stride * itemsize} bytes, not a multiple of {self.alignment}"
            contiguous *= extent
        if info.pointer % self.alignment:
            return f": its address {info.pointer:#x} is not a multiple of {self.alignment} bytes"
        return self._overlap_problem(info) if self._is_written else None

    def _overlap_problem(self, info: ArrayInfo) -> str | None:
        """From the innermost stride outwards, each must step over all that lies inside.

        Layouts that interleave without touching are refused too: telling them apart is a search, and no framework
        makes them.
        """
        span = 1
        by_stride = sorted((s, e, number) for number, (s, e) in enumerate(zip(info.strides, info.shape, strict=True)))
        for stride, extent, number in by_stride:
            if extent <= 1:
                continue
            if stride < span:
                where = f"axis {number} ({self._axes[number].text})"
                return f": its elements overlap, and it is written: {where} has stride {stride}, not >= {span}"
            span += (extent - 1) * stride
        return None

    def _dtype_text(self) -> str:
        exact, *others = self._dtypes
        if self._has_raw_bits:
            return f"{exact} (or {', '.join(others)} raw bits)"
        return " or ".join([exact, *others])


# ---- extents of memory


def storage_extent(info: ArrayInfo) -> int:
    """Elements from the first to the last one in memory, both included; 0 for an empty array."""
    if 0 in info.shape:
        return 0
    return 1 + sum((extent - 1) * abs(stride) for extent, stride in zip(info.shape, info.strides, strict=True))


def overlaps(a: ArrayInfo, b: ArrayInfo) -> bool:
    """Whether two arrays share a byte of memory.

    Exact: K and V interleaved in one pool do not overlap.  Where the exact answer is too much for numpy it is True,
    which refuses a harmless pair and never lets a harmful one through.  CUDA's addresses are unique across devices
    and host.
    """
    if not ranges_meet(byte_range(a), byte_range(b)):
        return False
    try:
        # numpy's stubs know of max_work=0 and -1 only.
        return np.shares_memory(_never_read(a), _never_read(b), max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, ValueError, OverflowError):  # the latter two: beyond numpy's 2**63 bytes
        return True


def ranges_meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two byte ranges share a byte: necessary for an overlap, and cheap."""
    return a[0] < b[1] and b[0] < a[1]


def byte_range(info: ArrayInfo) -> tuple[int, int]:
    """First and last byte + 1; a plain loop, because ``rebind`` comes here for every pair."""
    if 0 in info.shape:
        return info.pointer, info.pointer
    first = last = 0
    for extent, stride in zip(info.shape, info.strides, strict=True):
        if stride >= 0:
            last += (extent - 1) * stride
        else:
            first += (extent - 1) * stride
    itemsize = ITEMSIZE[info.dtype]
    return info.pointer + first * itemsize, info.pointer + (last + 1) * itemsize


class _Claim:
    """An ``__array_interface__`` over any address; numpy takes it at its word and reads nothing."""

    def __init__(self, info: ArrayInfo):
        itemsize = ITEMSIZE[info.dtype]
        self.__array_interface__ = {
            "version": 3,
            "shape": info.shape,
            "strides": tuple(stride * itemsize for stride in info.strides),
            "typestr": f"|V{itemsize}",
            "data": (info.pointer, True),
        }


def _never_read(info: ArrayInfo) -> np.ndarray:
    """A numpy array over device memory, for arithmetic on addresses only: reading an element would crash."""
    return np.asarray(_Claim(info))


# ---- streams


def stream_handle(stream: object) -> int:
    """The driver's handle of a stream: an int, None (legacy default stream), or any library's stream object.

    Objects may have ``__cuda_stream__`` (method, or the property that early versions of the protocol had, giving
    ``(version, handle)``), ``cuda_stream`` (torch), ``ptr`` (CuPy) or ``handle`` (cuda.core, numba).  0 stays 0.
    """
    if type(stream) is int and 0 <= stream < 2**64:  # what a serving loop passes
        return stream
    if stream is None:
        return LEGACY_DEFAULT_STREAM
    try:
        handle = int(stream) if isinstance(stream, int) else _handle_of(stream)
    except Exception as error:
        raise ArgumentError("stream", "a usable stream", f"{_class_name(stream)}: {error}") from error
    if handle is not None and 0 <= handle < 2**64 and not isinstance(stream, bool):
        return handle
    expected = "None, a 64-bit handle, or an object with __cuda_stream__, cuda_stream, ptr or handle"
    raise ArgumentError("stream", expected, repr(stream))


def _handle_of(stream: Any) -> int | None:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ValueError(f"__cuda_stream__ version {version}, not 0")
        return int(handle)
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is None or isinstance(handle, bool):
            continue
        if isinstance(handle, ctypes.c_void_p):
            return handle.value or 0  # ctypes reads a null pointer as None
        return int(handle)  # an int, or cuda.bindings' CUstream
    return None
