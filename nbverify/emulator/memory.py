"""Memory of the emulated device: checked 1-D arrays, and the garbage that shared and local memory start with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from greenlet import getcurrent

from nbverify.errors import MemoryAccessError

SHARED_ALIGNMENT_BYTES = 1024  # what swizzled bulk copies ask for: no kernel needs more
GARBAGE_BYTES = 1 << 16
NAN_SHARE = 0.25  # of the garbage's 32-bit words
NAN_BITS = np.uint32(0x7FFF0000)  # upper half of a float32 or float64 NaN, and a bfloat16 or float16 NaN itself


def numpy_dtype(kind: Any) -> np.dtype:
    """The numpy dtype of what a kernel passes as one: a twin of a numba type, or a numpy type."""
    return np.dtype(kind) if isinstance(kind, (type, np.dtype, str)) else kind.dtype


class CheckedArray:
    """A 1-D array as a kernel sees it: no index wraps, every access is checked, errors name the array.

    Reads give Python ints for signed integers, numpy scalars otherwise; writes convert as a C store does.
    """

    __slots__ = ("_data", "_load", "_origin", "_views", "size")

    def __init__(self, data: np.ndarray, origin: Any):
        """``origin`` is the name, or (parent array, dtype of the view or slice of the part)."""
        self.size: int = data.size
        self._data = data
        # A memoryview is the quickest way to a Python int; its floats would be float64, so floats come from numpy.
        self._load: Any = data.data if data.dtype.kind in "ib" else data
        self._origin = origin
        self._views: dict[np.dtype, CheckedArray] = {}

    # Element accesses dominate the run time.  The quick path is one comparison and one load; all else is sorted out
    # after it failed: a slice does not compare with 0, numpy refuses a float as an index.

    def __getitem__(self, index: Any) -> Any:
        try:
            if 0 <= index < self.size:
                return self._load[index]
        except (TypeError, IndexError):
            pass
        if isinstance(index, slice):
            return self._part(index)
        raise self._index_error(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            if 0 <= index < self.size:
                self._data[index] = value
                return
        except (TypeError, IndexError, ValueError, OverflowError, DeprecationWarning):
            pass
        if isinstance(index, slice):
            part = self._part(index)
            for i in range(part.size):
                part[i] = value[i] if isinstance(value, CheckedArray) else value
            return
        if not _is_index(index) or not 0 <= index < self.size:
            raise self._index_error(index)
        if not self._data.flags.writeable:
            raise MemoryAccessError(f"{self.name}[{index}]: written, but it is read-only; {place()}")
        if self.dtype.kind not in "iu":
            raise TypeError(f"{self.name}[{index}]: {value!r} cannot be stored as {self.dtype}")
        bits = int(value) & ((1 << 8 * self.itemsize) - 1)  # a C store keeps the low bits
        self._data[index : index + 1].view(f"u{self.itemsize}")[0] = bits

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        # Without this, iteration would end silently at an IndexError, and MemoryAccessError is one.
        return (self[i] for i in range(self.size))

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype}[{self.size}]>"

    @property
    def name(self) -> str:
        """Where it comes from: ``k_cache.view(uint32)[16:32]``."""
        if isinstance(self._origin, str):
            return self._origin
        parent, step = self._origin
        part = f"[{step.start}:{step.stop}]" if isinstance(step, slice) else f".view({step})"
        return parent.name + part

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        return self._data.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._data.itemsize

    @property
    def shape(self) -> tuple[int]:
        """One extent."""
        return (self.size,)

    @property
    def ndim(self) -> int:
        """Always 1."""
        return 1

    @property
    def address(self) -> int:
        """Address of the first element, in this process."""
        return self._data.__array_interface__["data"][0]

    @property
    def data(self) -> np.ndarray:
        """The memory itself, unchecked: for twins that move many elements."""
        return self._data

    def view(self, kind: Any) -> CheckedArray:
        """The same bytes as elements of another type; a last incomplete element is left out, as numba does."""
        dtype = numpy_dtype(kind)
        known = self._views.get(dtype)
        if known is not None:
            return known
        if self.size and self.address % dtype.itemsize:
            raise MemoryAccessError(
                f"{self.name}.view({dtype}): misaligned: address {self.address:#x} is no multiple of "
                f"{dtype.itemsize} bytes; {place()}"
            )
        whole = self._data.nbytes // dtype.itemsize * dtype.itemsize
        view = CheckedArray(self._data.view(np.uint8)[:whole].view(dtype), (self, dtype))
        self._views[dtype] = view
        return view

    def _part(self, part: slice) -> CheckedArray:
        start = 0 if part.start is None else int(part.start)
        stop = self.size if part.stop is None else int(part.stop)
        if part.step not in (None, 1):
            raise NotImplementedError(f"{self.name}: the emulator has slices of unit step only, got {part.step}")
        if not (0 <= start <= self.size and 0 <= stop <= self.size):  # numba would clamp: not what was meant
            raise MemoryAccessError(f"{self.name}[{start}:{stop}]: outside its {self.size} elements; {place()}")
        return CheckedArray(self._data[start:stop], (self, slice(start, max(start, stop))))

    def _index_error(self, index: Any) -> Exception:
        if not _is_index(index):
            return TypeError(f"{self.name}: an index must be an integer, got {index!r}; {place()}")
        return MemoryAccessError(f"{self.name}[{int(index)}]: outside its {self.size} elements; {place()}")


def _is_index(index: Any) -> bool:
    return hasattr(index, "__index__")


def place() -> str:
    """Which kernel, block and thread runs now, for messages."""
    return getattr(getcurrent(), "place", "outside a kernel")


class Garbage:
    """What uninitialised memory holds.  A quarter of its 32-bit words are NaN, read as any float type."""

    def __init__(self, seed: int):
        numbers = np.random.default_rng(seed)
        words = numbers.integers(0, 1 << 32, GARBAGE_BYTES // 4, dtype=np.uint32)
        words[numbers.random(words.size) < NAN_SHARE] |= NAN_BITS
        self._bytes = words.view(np.uint8)
        self._random = random.Random(seed)

    def local(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Memory of one thread."""
        size = count * dtype.itemsize
        if size > GARBAGE_BYTES // 2:
            return self.shared(size).view(dtype)
        start = self._random.randrange(0, (GARBAGE_BYTES - size) // 16 + 1) * 16
        return self._bytes[start : start + size].copy().view(dtype)

    def shared(self, size: int) -> np.ndarray:
        """Bytes that start at a multiple of SHARED_ALIGNMENT_BYTES."""
        room = np.empty(size + SHARED_ALIGNMENT_BYTES, np.uint8)
        start = -room.__array_interface__["data"][0] % SHARED_ALIGNMENT_BYTES
        memory = room[start : start + size]
        memory[:] = np.resize(np.roll(self._bytes, 4 * self._random.randrange(GARBAGE_BYTES // 4)), size)
        return memory
