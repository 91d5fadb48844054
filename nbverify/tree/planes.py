"""Planes: the arrays of a KV pool, and where in them the bytes of a slot lie.

A pool is any number of planes that share slot numbers: an MLA pool a layer, K and V a layer, scales beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from nbverify import arrays
from nbverify.arrays import ITEMSIZE, ArrayInfo
from nbverify.errors import ArgumentError
from nbverify.spec import INT32_MAX
from nbverify.tree.kernels.records import COMPACT_THREADS

LAYOUTS = ("token", "page")
UNIT_SIZES = (16, 4, 1)  # bytes that one thread moves at once, widest first


@dataclass(frozen=True, eq=False)
class Plane:
    """One array of a KV pool.

    Attributes
    ----------
    array
        Any dtype, in device memory (numpy for the emulator and for :func:`nbverify.tree.compact.compact`).

        ``layout="token"``: ``[slots, ...]``.  A slot's row is contiguous, the stride from slot to slot is free, so that
        K and V may lie interleaved in one allocation.  Pages of such a pool are runs of slots and need no mention.

        ``layout="page"``: ``[pages, heads, page_size, ...]``.  Slot ``s`` is place ``s % page_size`` of page
        ``s // page_size``.  Its heads lie apart; what comes behind ``page_size`` (nothing, for scales) is contiguous.
    layout
        "token" or "page".
    page_size
        Of the page layout; None takes it from the array, anything else must agree with it.
    """

    array: Any
    layout: str = "token"
    page_size: int | None = None

    def read(self, slots: Sequence[int]) -> np.ndarray:
        """Copies of the rows of some slots, of a numpy plane."""
        return self.array[self._index(slots)].copy()

    def write(self, slots: Sequence[int], rows: np.ndarray) -> None:
        """Overwrite the rows of some slots, of a numpy plane."""
        self.array[self._index(slots)] = rows

    def _index(self, slots: Sequence[int]) -> tuple:
        wanted = np.asarray(slots, np.int64)
        if self.layout == "token":
            return (wanted,)
        pages, places = np.divmod(wanted, self.array.shape[2])
        return pages, slice(None), places


@dataclass(frozen=True)
class Placement:
    """Where the bytes of a plane lie, in bytes, and the unit that threads move."""

    info: ArrayInfo
    num_slots: int
    page_size: int
    page_stride: int
    slot_stride: int
    num_heads: int  # runs of contiguous bytes that a row consists of
    head_stride: int
    head_bytes: int

    @property
    def unit_bytes(self) -> int:
        """The widest access that every address of the plane is a multiple of."""
        strides = (self.page_stride, self.slot_stride, self.head_stride, self.head_bytes)
        return next(n for n in UNIT_SIZES if all(x % n == 0 for x in (self.info.pointer, *strides)))

    def records(self) -> Iterator[tuple[int, ...]]:
        """What the kernel's blocks are told: see tree/kernels/records.py."""
        unit = self.unit_bytes
        head_units = self.head_bytes // unit
        end = self.num_heads * head_units
        layout = (self.page_size, self.page_stride, self.slot_stride, self.head_stride, head_units, unit)
        for first in range(0, end, COMPACT_THREADS):
            yield self.info.pointer, *layout, first, end


def place(name: str, plane: Plane, *, host: bool) -> Placement:
    """Check a plane and find its strides.

    Raises
    ------
    ArgumentError
        No Plane, a layout of another name, wrong memory, axes that do not fit the layout, rows that are not
        contiguous, elements that overlap, no elements, or 2^31 slots or more.
    """
    if not isinstance(plane, Plane):
        raise ArgumentError(name, "a Plane", type(plane).__name__)
    if plane.layout not in LAYOUTS:
        raise ArgumentError(f"{name}.layout", " or ".join(map(repr, LAYOUTS)), repr(plane.layout))
    paged = plane.layout == "page"
    info = arrays.describe(f"{name}.array", plane.array, host=host)
    num_free = 3 if paged else 1
    if len(info.shape) < num_free or 0 in info.shape:
        axes = "[pages, heads, page_size, ...]" if paged else "[slots, ...]"
        raise ArgumentError(f"{name}.array", f"{axes} with elements", list(info.shape))
    page_size = info.shape[2] if paged else 1
    if plane.page_size not in (None, page_size):
        raise ArgumentError(f"{name}.page_size", f"{page_size}, as the array has it, or None", repr(plane.page_size))

    itemsize = ITEMSIZE[info.dtype]
    # A stride counts only where the axis has a second element.
    strides = [s * itemsize if n > 1 else 0 for s, n in zip(info.strides, info.shape, strict=True)]
    run_bytes = itemsize * prod(info.shape[num_free:])
    _check_run(name, info, num_free)
    span = run_bytes
    for stride, extent in sorted(zip(strides[:num_free], info.shape[:num_free], strict=True)):
        if extent > 1 and stride < span:
            raise ArgumentError(
                f"{name}.array",
                "elements that do not overlap",
                f"shape {list(info.shape)}, strides {list(info.strides)}",
            )
        span += (extent - 1) * stride
    num_slots = info.shape[0] * page_size
    if num_slots > INT32_MAX:
        raise ArgumentError(f"{name}.array", f"at most {INT32_MAX} slots", num_slots)
    if paged:
        return Placement(info, num_slots, page_size, strides[0], strides[2], info.shape[1], strides[1], run_bytes)
    return Placement(info, num_slots, 1, strides[0], 0, 1, 0, run_bytes)


def _check_run(name: str, info: ArrayInfo, first_axis: int) -> None:
    stride = 1
    for extent, found in zip(reversed(info.shape[first_axis:]), reversed(info.strides[first_axis:]), strict=True):
        if extent > 1 and found != stride:
            raise ArgumentError(f"{name}.array", "contiguous rows", f"strides {list(info.strides)}")
        stride *= extent
