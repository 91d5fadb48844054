"""Index buffers: one compiled kernel reads int32 and int64, each buffer its own width.

An index buffer reaches a kernel as an array of 32-bit words and a width flag, ``words``: 1 for int32, 2 for int64
(little endian).  The flag is the same for all threads, so the branch costs a predicate and no divergence.
"""

from numba import cuda, int64, uint32, uint64

LOW_WORD = 0xFFFFFFFF


@cuda.jit(device=True)
def load_index(array, words, i):
    """Entry ``i``, not negative, of an index buffer, as int64.

    No branch, and an unsigned index: every block begins with these loads, and fetches their instructions cold.
    """
    shift = uint32(uint32(words) - uint32(1))
    at = uint64(i) << uint64(shift)
    low, high = int64(array[at]), int64(array[at + uint64(shift)])  # the same word of an int32
    return low if shift == uint32(0) else (high << 32) | (low & LOW_WORD)


@cuda.jit(device=True, forceinline=True)
def load_low_word(array, words, i):
    """The low 32 bits of entry ``i``."""
    # Unsigned: of a signed index the compiler would keep Python's wraparound (see simt.py).
    return uint32(array[uint64(i) << uint64(words - 1)])


@cuda.jit(device=True)
def index_count(array, words):
    """Entries of an index buffer."""
    return int64(array.size) >> (words - 1)
