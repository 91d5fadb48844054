"""Which thread this is."""

from typing import NamedTuple

from numba import cuda, int32, uint32

from nbverify.kernels.geometry import FULL_WARP, WARP


class Place(NamedTuple):
    """A thread's place in its block, uint32."""

    lane: int
    warp: int


@cuda.jit(device=True, forceinline=True)
def find_place():
    """Called once, by whole warps.

    The warp comes from a shuffle, though every lane knows it: then the assembler knows as well that it is the same in
    all lanes, and computes what derives from it, most addresses, in the uniform registers beside the vector ones.
    """
    thread = uint32(cuda.threadIdx.x)
    return Place(thread % uint32(WARP), uint32(cuda.shfl_sync(uint32(FULL_WARP), int32(cuda.threadIdx.x // WARP), 0)))
