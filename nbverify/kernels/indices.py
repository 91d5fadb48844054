"""Index buffers: one compiled kernel reads int32 and int64, each buffer its own width.

An index buffer reaches a kernel as an array of 32-bit words and a width flag, ``words``: 1 for int32, 2 for int64
(little endian).  The flag is the same for all threads, so the branch costs a predicate and no divergence.
"""

from numba import cuda, int64, uint32, uint64

LOW_WORD = 0xFFFFFFFF


@cuda.jit(device=True)
def load_index(array, words, i):
    """Entry ``i`` of an index buffer, as int64."""
    if words == 1:
        return int64(array[i])
    low = int64(array[2 * i]) & LOW_WORD
    return (int64(array[2 * i + 1]) << 32) | low


@cuda.jit(device=True, forceinline=True)
def load_low_word(array, words, i):
    """The low 32 bits of entry ``i``."""
    # Unsigned: of a signed index the compiler would keep Python's wraparound (see simt.py).
    return uint32(array[uint64(i) << uint64(words - 1)])


@cuda.jit(device=True)
def index_count(array, words):
    """Entries of an index buffer."""
    return int64(array.size) >> (words - 1)
