"""Stores to index buffers of either width (nbverify/kernels/indices.py has the loads)."""

import numpy as np
from numba import cuda, int32, int64


@cuda.jit(device=True)
def store_index(array, words, i, value):
    """Entry ``i`` of an index buffer becomes ``value``, which fits its width; one store, so that none is ever torn."""
    if words == 1:
        array[i] = int32(value)
    else:
        array.view(np.int64)[i] = int64(value)
