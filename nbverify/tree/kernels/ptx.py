"""Instructions that only the tree step needs, beside those of ``nbverify/kernels/ptx.py``, and in its manner.

They stand here because the verify kernels' records (benchmarks/results) belong to a hash of all files in ``kernels/``.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from nbverify.kernels.ptx import _emit, u32, u64


@intrinsic
def load_global_u8(typingctx, address):
    """1 byte: global -> u32, the upper bits 0.  "ld"."""
    return _emit("ld.global.u8 $0, [$1];", u32, (address, u64))


@intrinsic
def store_global_u8(typingctx, address, value):
    """1 byte: global, the low bits of a u32.  "st"."""
    return _emit("st.global.u8 [$0], $1;", types.void, (address, u64), (value, u32))


@intrinsic
def warp_max_u32(typingctx, value):
    """u32: the largest of all lanes, in each.  sm_80.  "redux.sync"."""
    return _emit("redux.sync.max.u32 $0, $1, 0xffffffff;", u32, (value, u32))


@intrinsic
def warp_min_u32(typingctx, value):
    """u32: the smallest of all lanes, in each.  sm_80.  "redux.sync"."""
    return _emit("redux.sync.min.u32 $0, $1, 0xffffffff;", u32, (value, u32))
