"""How rows of keys, values and queries lie in shared memory, in chunks of 16 bytes.

An ldmatrix reads the same chunk of 8 rows, so these must lie in different banks; a copy writes 8 chunks of a row, a
line of 128 bytes, and is done in one access if they stay in one line of the banks.

    swizzled   rows of whole lines: byte b of row r lies at ``r * pitch + (b ^ (r % 8 * 16))``, which is both
    padded     other widths: 16 bytes after each row.  A line of a row is then cut in two: 10.5 accesses a copy of four
               lines were measured where 4 would do, 16 % of all accesses to shared memory

The pitch (``tiles.row_pitch``) says which: padded rows are never whole lines.  Where row 0 lies is a multiple of 128.
"""

from numba import cuda, uint32

from nbverify.kernels.tiles import LINE_BYTES, PAD_BYTES

ROWS_OF_MATRIX = 8


def make_swizzle(pitch):
    """``swizzle(row)``: what byte offsets in this row are combined with, by exclusive or; 0 if rows are padded."""
    is_swizzled = pitch % LINE_BYTES == 0

    @cuda.jit(device=True, forceinline=True)
    def swizzle(row):
        if is_swizzled:
            return uint32(uint32(row) % uint32(ROWS_OF_MATRIX) * uint32(PAD_BYTES))
        return uint32(0)

    return swizzle


def make_advance(pitch):
    """``advance(address, distance)``: the chunk ``distance`` bytes further in the same row, a constant.

    Without a carry: ``distance`` counts in steps of more than what the first chunk lies behind the start of its slice.
    """
    is_swizzled = pitch % LINE_BYTES == 0

    @cuda.jit(device=True, forceinline=True)
    def advance(address, distance):
        if is_swizzled:
            inside = distance % LINE_BYTES
            return uint32(uint32(address ^ uint32(inside)) + uint32(distance - inside))
        return uint32(address + uint32(distance))

    return advance
