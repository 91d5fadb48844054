"""A row of the pool on its way to shared memory: copied, and of an fp8 cache widened."""

from numba import cuda, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.formats import make_widen_e4m3x4
from nbverify.kernels.rows import make_advance, make_swizzle

CHUNK_BYTES = 16  # of a cp.async


def make_copy_row(pitch, lanes, steps, *, has_heads, fills):
    """``copy_row(pool, pool_row, row_stride, kv_head, head_stride, target, row, piece, is_there)``: begin to copy.

    Of a row the pieces of 16 bytes that are this lane's, ``lanes`` lanes side by side.  ``target`` is where row 0 lies.
    ``fills``: a row that is not there becomes zeros, else it is not asked for.
    """
    swizzle, advance = make_swizzle(pitch), make_advance(pitch)

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
        for step in range(steps):
            at = step * lanes * CHUNK_BYTES
            if fills:
                source_bytes = uint32(CHUNK_BYTES) if is_there else uint32(0)
                ptx.cp_async_16_zfill(advance(place, at), source + uint64(at), source_bytes)
            else:
                ptx.cp_async_16(advance(place, at), source + uint64(at))

    return copy_row


def make_widen_row(dtype, raw_pitch, pitch, lanes, steps):
    """``widen_row(source, target, row, piece)``: what this lane has copied of a row, to the ring.

    The bound is opaque: unrolled, it takes registers that are not there.
    """
    raw_swizzle, swizzle, widen_e4m3x4 = make_swizzle(raw_pitch), make_swizzle(pitch), make_widen_e4m3x4(dtype)

    @cuda.jit(device=True, forceinline=True)
    def widen_row(source, target, row, piece):
        raw_row, wide_row = uint32(source + uint32(row * raw_pitch)), uint32(target + uint32(row * pitch))
        at, end = uint32(piece * uint32(CHUNK_BYTES)), ptx.opaque_u32(uint32(steps * lanes * CHUNK_BYTES))
        while at < end:
            x = ptx.load_shared_v4_u32(uint32(raw_row + (at ^ raw_swizzle(row))))
            wide = uint32(at * uint32(2))
            a, b = widen_e4m3x4(x[0]), widen_e4m3x4(x[1])
            ptx.store_shared_v4_u32(uint32(wide_row + (wide ^ swizzle(row))), (a[0], a[1], b[0], b[1]))
            c, d = widen_e4m3x4(x[2]), widen_e4m3x4(x[3])
            wide = uint32(wide + uint32(CHUNK_BYTES))
            ptx.store_shared_v4_u32(uint32(wide_row + (wide ^ swizzle(row))), (c[0], c[1], d[0], d[1]))
            at = uint32(at + uint32(lanes * CHUNK_BYTES))

    return widen_row
