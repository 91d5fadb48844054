"""Which thread this is."""

from numba import cuda, int32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP


@cuda.jit(device=True, forceinline=True)
def lane_and_warp():
    """Lane and warp (uint32, for addresses), computed here and not earlier: see ``ptx.opaque_u32``."""
    thread = ptx.opaque_u32(cuda.threadIdx.x)
    return thread % uint32(WARP), thread // uint32(WARP)


@cuda.jit(device=True, forceinline=True)
def signed_lane_and_warp():
    """The same as int32, for rows and keys."""
    lane, warp = lane_and_warp()
    return int32(lane), int32(warp)
