"""Twins of numba's CUDA functions, and the table of everything that has a twin."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from greenlet import getcurrent

from nbverify.emulator import numbers
from nbverify.emulator.machine import FULL_MASK, WARP
from nbverify.emulator.memory import CheckedArray, numpy_dtype
from nbverify.emulator.numbers import CASTS, Twin

_registered: dict[int, tuple[Any, Any]] = {}  # id of what kernels refer to -> (it, its twin)


def register_twin(function: Any, twin: Twin) -> None:
    """Give the emulator a twin of an intrinsic or device function.

    Parameters
    ----------
    function
        The object that kernels refer to, for example what ``@intrinsic`` returned.
    twin
        A plain Python function of the same parameters, run as it stands.  For an instruction that a whole warp
        executes together, it ends in ``return warp_collective(value, work)``.  Arrays reach it as checked arrays:
        ``array[i]``, ``array.view(dtype)``, or unchecked ``array.data`` (numpy) and ``array.address``.
    """
    _registered[id(function)] = function, twin


def twins_by_id() -> dict[int, Any]:
    """All twins, by ``id`` of what they stand for."""
    return {**_builtin_twins(), **{key: twin for key, (_, twin) in _registered.items()}}


# --------------------------------------------------------------------------------------------- indices and barriers


def _dimensions(read: Callable[[Any], int], rest: int) -> Any:
    """Launches are 1-D: y and z are constants."""
    return type("Dimensions", (), {"x": property(lambda self: read(getcurrent())), "y": rest, "z": rest})()


def _one_dimension(ndim: int) -> None:
    if ndim != 1:
        raise NotImplementedError(f"launches of the emulator are 1-D, got cuda.grid or gridsize of {ndim}")


def grid(ndim: int) -> int:
    """Index of the thread in the grid."""
    _one_dimension(ndim)
    me = getcurrent()
    return me.block.index * me.launch.block_size + me.index


def gridsize(ndim: int) -> int:
    """Threads of the grid."""
    _one_dimension(ndim)
    launch = getcurrent().launch
    return launch.grid * launch.block_size


def syncthreads() -> None:
    """Wait for all threads of the block."""
    me = getcurrent()
    me.block.barrier.meet(me)


def syncthreads_count(predicate: Any) -> int:
    """Wait for the block; for how many threads the predicate held."""
    me = getcurrent()
    return me.block.barrier.meet(me, 1 if predicate else 0)


def syncthreads_and(predicate: Any) -> int:
    """Wait for the block; whether it held for all."""
    return int(syncthreads_count(predicate) == getcurrent().launch.block_size)


def syncthreads_or(predicate: Any) -> int:
    """Wait for the block; whether it held for any."""
    return int(syncthreads_count(predicate) > 0)


class GridGroup:
    """What ``cg.this_grid()`` gives."""

    def sync(self) -> None:
        """Wait for all threads of the grid."""
        me = getcurrent()
        me.launch.grid_barrier.meet(me)


def interrupt() -> None:
    """A fence: memory is in order here anyway, but others may run first."""
    getcurrent().interrupt()


def nanosleep(nanoseconds: Any) -> None:
    """Let all others run first."""
    getcurrent().spin()


# ---------------------------------------------------------------------------------------------------------- warps


def syncwarp(mask: Any = FULL_MASK) -> None:
    """Wait for the lanes in the mask."""
    me = getcurrent()
    me.warp.meet(me, "syncwarp", mask, None)


def _shuffle(name: str, source_lane: Callable[[int, int], int]) -> Twin:
    """``source_lane(lane, b & 31)`` as in PTX; a source outside the warp, or that takes no part: one's own value."""

    def shuffle(mask: Any, value: Any, b: Any) -> Any:
        me = getcurrent()
        values = me.warp.meet(me, name, mask, value)
        source = source_lane(me.lane, int(b) & (WARP - 1))
        other = values[source] if 0 <= source < WARP else None
        return value if other is None else other

    return shuffle


def _vote(name: str, result: Callable[[list[bool]], Any]) -> Twin:
    def vote(mask: Any, predicate: Any) -> Any:
        me = getcurrent()
        return result([value for value in me.warp.meet(me, name, mask, bool(predicate)) if value is not None])

    return vote


def ballot_sync(mask: Any, predicate: Any) -> int:
    """A bit for each lane whose predicate holds, as an int32."""
    me = getcurrent()
    votes = me.warp.meet(me, "ballot_sync", mask, bool(predicate))
    return CASTS["int32"](sum(1 << lane for lane, vote in enumerate(votes) if vote))


def activemask() -> Any:
    """All lanes of the warp, as in code that has not diverged: here no two lanes are ever in the same place."""
    return CASTS["uint32"](getcurrent().warp.present)


# --------------------------------------------------------------------------------------------------------- memory


def _count(shape: Any) -> int:
    if isinstance(shape, tuple):
        if len(shape) != 1:
            raise NotImplementedError(f"the emulator has 1-D arrays only, got the shape {shape}")
        shape = shape[0]
    return int(shape)


def shared_array(shape: Any, dtype: Any, alignment: Any = None) -> CheckedArray:
    """``cuda.shared.array``; shape 0: the dynamic shared memory, from its start."""
    block = getcurrent().block
    count, kind = _count(shape), numpy_dtype(dtype)
    if count == 0:
        return block.dynamic_shared.view(kind)
    # As on the GPU, a buffer belongs to the line that asks for it: the same one for all threads, and each time.
    caller = sys._getframe(1)
    key = id(caller.f_globals), caller.f_code, caller.f_lasti, count, kind
    if key not in block.static_shared:
        memory = block.launch.garbage.shared(count * kind.itemsize)
        block.static_shared[key] = CheckedArray(memory.view(kind), f"shared array of line {caller.f_lineno}")
    return block.static_shared[key]


def local_array(shape: Any, dtype: Any, alignment: Any = None) -> CheckedArray:
    """``cuda.local.array``: garbage at each call."""
    return CheckedArray(getcurrent().launch.garbage.local(_count(shape), numpy_dtype(dtype)), "local array")


def _atomic(change: Callable[..., Any]) -> Twin:
    """``change(old, value, ...)`` is what is stored; the old value is returned."""

    def atomic(array: CheckedArray, index: Any, *values: Any) -> Any:
        me = getcurrent()
        me.interrupt()  # others may run before the access, and after it
        if isinstance(index, tuple):
            (index,) = index
        number = int if array.dtype.kind in "iu" else array.dtype.type
        old = array[index]
        array[index] = change(number(old), *map(number, values))
        if array[index] == old:
            me.spin()  # as in a loop that waits for others
        else:
            me.launch.spins = 0
            me.interrupt()
        return old

    return atomic


ATOMICS: dict[str, Twin] = {
    "add": _atomic(lambda old, value: old + value),
    "sub": _atomic(lambda old, value: old - value),
    "max": _atomic(numbers.maximum),
    "min": _atomic(numbers.minimum),
    "nanmax": _atomic(numbers.maximum),
    "nanmin": _atomic(numbers.minimum),
    "exch": _atomic(lambda old, value: value),
    "cas": _atomic(lambda old, expected, value: value if old == expected else old),
    "and_": _atomic(lambda old, value: old & value),
    "or_": _atomic(lambda old, value: old | value),
    "xor": _atomic(lambda old, value: old ^ value),
    "inc": _atomic(lambda old, limit: 0 if old >= limit else old + 1),
    "dec": _atomic(lambda old, limit: limit if old == 0 or old > limit else old - 1),
}

CUDA_TWINS: dict[str, Any] = {
    "threadIdx": _dimensions(lambda me: me.index, 0),
    "blockIdx": _dimensions(lambda me: me.block.index, 0),
    "blockDim": _dimensions(lambda me: me.launch.block_size, 1),
    "gridDim": _dimensions(lambda me: me.launch.grid, 1),
    "warpsize": WARP,
    "grid": grid,
    "gridsize": gridsize,
    "syncthreads": syncthreads,
    "syncthreads_count": syncthreads_count,
    "syncthreads_and": syncthreads_and,
    "syncthreads_or": syncthreads_or,
    "syncwarp": syncwarp,
    "shfl_sync": _shuffle("shfl_sync", lambda lane, b: b),
    "shfl_up_sync": _shuffle("shfl_up_sync", lambda lane, b: lane - b),
    "shfl_down_sync": _shuffle("shfl_down_sync", lambda lane, b: lane + b),
    "shfl_xor_sync": _shuffle("shfl_xor_sync", lambda lane, b: lane ^ b),
    "all_sync": _vote("all_sync", all),
    "any_sync": _vote("any_sync", any),
    "eq_sync": _vote("eq_sync", lambda votes: all(votes) or not any(votes)),
    "ballot_sync": ballot_sync,
    "activemask": activemask,
    "lanemask_lt": lambda: CASTS["uint32"]((1 << getcurrent().lane) - 1),
    "threadfence": interrupt,
    "threadfence_block": interrupt,
    "threadfence_system": interrupt,
    "nanosleep": nanosleep,
    "popc": numbers.popc,
    "clz": numbers.clz,
    "ffs": numbers.ffs,
    "brev": numbers.brev,
    "selp": lambda condition, a, b: a if condition else b,
    "fma": numbers.fma,
    "shared.array": shared_array,
    "local.array": local_array,
    "cg.this_grid": GridGroup,
    **{f"atomic.{name}": twin for name, twin in ATOMICS.items()},
    **{name: lambda array, i: array[i] for name in ("ldca", "ldcg", "ldcs", "ldlu", "ldcv")},
    **{name: lambda array, i, value: array.__setitem__(i, value) for name in ("stcg", "stcs", "stwb", "stwt")},
}


@cache
def _builtin_twins() -> dict[int, Any]:
    from numba import cuda, types
    from numba.cuda import cg, libdevice  # noqa: F401  # cg becomes an attribute of cuda

    from nbverify.emulator import ptx_twins
    from nbverify.kernels import ptx

    twins: dict[int, Any] = {id(builtins.max): numbers.maximum, id(builtins.min): numbers.minimum}
    for name, twin in CUDA_TWINS.items():
        real: Any = cuda
        for part in name.split("."):
            real = getattr(real, part)
        twins[id(real)] = twin
    twins |= {id(getattr(libdevice, name)): twin for name, twin in numbers.LIBDEVICE_TWINS.items()}
    twins |= {id(getattr(math, name)): twin for name, twin in numbers.MATH_TWINS.items() if hasattr(math, name)}
    twins |= ptx_twins.twins_of(ptx)
    twins |= {id(getattr(types, name if name != "bool" else "boolean")): twin for name, twin in CASTS.items()}
    return twins
