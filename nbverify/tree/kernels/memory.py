"""Loads and stores that only the tree step needs, beside those of ``kernels/ptx.py`` and ``kernels/indices.py``.

They stand here because the verify kernels' records (benchmarks/results) belong to a hash of all files in ``kernels/``.
"""

import numpy as np
from numba import cuda, int32, int64
from numba.cuda import types
from numba.cuda.extending import intrinsic

from nbverify.kernels.ptx import _emit, u32, u64


@intrinsic
def load_global_u8(typingctx, address):
    """1 byte: global -> u32, the upper bits 0.  PTX ISA, "ld"."""
    return _emit("ld.global.u8 $0, [$1];", u32, (address, u64))


@intrinsic
def store_global_u8(typingctx, address, value):
    """1 byte: global, the low bits of a u32.  PTX ISA, "st"."""
    return _emit("st.global.u8 [$0], $1;", types.void, (address, u64), (value, u32))


@cuda.jit(device=True)
def store_index(array, words, i, value):
    """Entry ``i`` of an index buffer becomes ``value``, which fits its width; one store, so that none is ever torn."""
    if words == 1:
        array[i] = int32(value)
    else:
        array.view(np.int64)[i] = int64(value)
