"""Which thread this is."""

from typing import NamedTuple

from numba import cuda, int32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, WARP


class Place(NamedTuple):
    """A thread's place in its block, uint32."""

    lane: int
    warp: int


@cuda.jit(device=True, forceinline=True)
def uniform(value):
    """An int32 that is the same in all lanes, by a shuffle: then the assembler knows it as well.

    It keeps what derives from it, counters, addresses and the branches on them, in the uniform registers beside the
    vector ones, of which the accumulators leave few.
    """
    return int32(cuda.shfl_sync(uint32(FULL_WARP), value, 0))


@cuda.jit(device=True, forceinline=True)
def find_place():
    """Called once, by whole warps."""
    thread = uint32(cuda.threadIdx.x)
    return Place(thread % uint32(WARP), uint32(uniform(int32(thread // uint32(WARP)))))


@cuda.jit(device=True, forceinline=True)
def find_place_again():
    """The same, from the special register: where registers are too few to keep it, and what derives from it."""
    thread = ptx.thread_id()
    return Place(thread % uint32(WARP), thread // uint32(WARP))
