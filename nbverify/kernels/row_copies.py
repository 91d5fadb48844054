"""A row of the pool on its way to shared memory: copied, and of an fp8 cache widened."""

from numba import cuda, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.formats import make_widen_e4m3x16
from nbverify.kernels.rows import make_advance, make_swizzle

CHUNK_BYTES = 16  # of a cp.async


def make_copy_row(pitch, lanes, row_bytes, *, has_heads, fills):
    """``copy_row(pool, pool_row, row_stride, kv_head, head_stride, target, row, piece, is_there)``: begin to copy.

    Of a row of ``row_bytes`` the pieces of 16 bytes that are this lane's, ``lanes`` lanes side by side; in the last
    step there may be fewer pieces than lanes.  ``target`` is where row 0 lies.
    ``fills``: a row that is not there becomes zeros, else it is not asked for.
    """
    swizzle, advance = make_swizzle(pitch), make_advance(pitch)
    pieces = row_bytes // CHUNK_BYTES
    whole_steps, rest = pieces // lanes, pieces % lanes

    @cuda.jit(device=True, forceinline=True)
    def copy_piece(target, source, is_there):
        if fills:
            ptx.cp_async_16_zfill(target, source, uint32(CHUNK_BYTES) if is_there else uint32(0))
        else:
            ptx.cp_async_16(target, source)

    @cuda.jit(device=True, forceinline=True)
    def copy_row(pool, pool_row, row_stride, kv_head, head_stride, target, row, piece, is_there):
        ptx.unroll_loops()
        # 64-bit: it passes 2^31 in a pool of 4 GB.  Opaque: else the stride's bytes are kept over the whole walk.
        start = ptx.opaque_u64(uint64(pool_row) * uint64(row_stride))
        if has_heads:
            start += uint64(kv_head * head_stride)
        mine = uint32(piece * uint32(CHUNK_BYTES))
        source = ptx.global_address(pool, start) + uint64(mine)
        place = uint32(target + uint32(row * pitch) + (mine ^ swizzle(row)))
        for step in range(whole_steps):
            at = step * lanes * CHUNK_BYTES
            copy_piece(advance(place, at), source + uint64(at), is_there)
        if rest > 0 and piece < uint32(rest):
            at = whole_steps * lanes * CHUNK_BYTES
            copy_piece(advance(place, at), source + uint64(at), is_there)

    return copy_row


def make_widen_row(dtype, row_bytes, pitch, lanes):
    """``widen_row(source, target, row, piece)``: what this lane has copied of a row of ``row_bytes``, to the ring.

    The bound is opaque: unrolled, it takes registers that are not there.
    """
    raw_swizzle, swizzle, widen_e4m3x16 = make_swizzle(row_bytes), make_swizzle(pitch), make_widen_e4m3x16(dtype)

    @cuda.jit(device=True, forceinline=True)
    def widen_row(source, target, row, piece):
        raw_row, wide_row = uint32(source + uint32(row * row_bytes)), uint32(target + uint32(row * pitch))
        at, end = uint32(piece * uint32(CHUNK_BYTES)), ptx.opaque_u32(uint32(row_bytes))
        x = ptx.load_shared_v4_u32(uint32(raw_row + (at ^ raw_swizzle(row))))
        while at < end:
            # The next piece is requested before this one is converted; past the last one, the first once more.
            later = uint32(at + uint32(lanes * CHUNK_BYTES))
            wanted = later if later < end else uint32(piece * uint32(CHUNK_BYTES))
            following = ptx.load_shared_v4_u32(uint32(raw_row + (wanted ^ raw_swizzle(row))))
            first, second = widen_e4m3x16(x)
            wide = uint32(at * uint32(2))
            ptx.store_shared_v4_u32(uint32(wide_row + (wide ^ swizzle(row))), first)
            wide = uint32(wide + uint32(CHUNK_BYTES))
            ptx.store_shared_v4_u32(uint32(wide_row + (wide ^ swizzle(row))), second)
            x, at = following, later

    return widen_row
