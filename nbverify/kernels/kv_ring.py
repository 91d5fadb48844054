"""The ring of key tiles: rows of the pool on their way into shared memory while earlier ones are multiplied.

Every warp fetches its own rows of every tile, ``stages - 1`` tiles ahead.  Tile number i of a block (counted over all
its segments) lies in slot i % stages, and each slot has two mbarriers:

    full[slot]    completes when all rows of the tile have landed.  Who waits: every warp, before it reads the tile.
                  bulk copies: one arrival a warp, with the bytes that its rows will bring; the copies do the rest.
                  cp.async: one arrival a thread, made by the hardware when that thread's copies are complete.
    empty[slot]   completes when all warps have released the tile.  Who waits: every warp, before it fetches tile
                  i + stages into the slot.  One arrival a warp.

Both are enough, because a warp reads a tile only between its own wait on full and its own arrival at empty: no row is
read before it is there, none is overwritten while anybody may still read it.  No warp waits for itself: the tile that a
warp's fetch must find released is one that it has released already, and the other warps can release it, since its rows
and those of all earlier tiles were requested before.  Parities: tile i is use i // stages of its slot; full of it has
parity (i // stages) % 2, and the fetch waits for empty of the use before; on a fresh mbarrier that passes.

Rows past the end of a request are not fetched: what their place holds is hidden by the mask, and values.py lets no
NaN of it through.
"""

from numba import cuda, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.kv_tiles import index_of, pool_row
from nbverify.kernels.segments import load_segment
from nbverify.kernels.threads import lane_and_warp, signed_lane_and_warp

BARRIER_BYTES = 8
SOURCE_BYTES = 16  # addresses of a row of K and of V
CHUNK_BYTES = 16  # of a cp.async


def make_ring(spec, geometry):
    """``init, next_index, fetch, wait_full, release`` for a geometry."""
    stages, warps, threads = geometry.stages, geometry.warps, geometry.threads
    keys_per_tile, copied_rows = geometry.keys_per_tile, geometry.copied_rows
    k_row_bytes, v_row_bytes = geometry.k_row_bytes, geometry.v_row_bytes
    k_pitch, v_pitch = geometry.ring_k_pitch, geometry.ring_v_pitch
    slot_bytes, v_offset = geometry.slot_bytes, geometry.ring_v_offset
    sources_offset = geometry.sources_offset
    full_offset = geometry.barriers_offset
    empty_offset = full_offset + BARRIER_BYTES * stages
    separate_v, bulk, has_heads = geometry.separate_v, geometry.bulk_copies, spec.num_kv_heads > 1
    full_arrivals = warps if bulk else threads
    k_chunks, v_chunks = k_row_bytes // CHUNK_BYTES, v_row_bytes // CHUNK_BYTES

    @cuda.jit(device=True, forceinline=True)
    def init(shared):
        """Make the mbarriers.  The whole block calls it, and syncthreads comes before their first use."""
        if cuda.threadIdx.x == 0:
            for slot in range(stages):
                ptx.mbarrier_init(shared + full_offset + BARRIER_BYTES * slot, uint32(full_arrivals))
                ptx.mbarrier_init(shared + empty_offset + BARRIER_BYTES * slot, uint32(warps))
            if bulk:
                ptx.fence_mbarrier_init()

    @cuda.jit(device=True, forceinline=True)
    def row_address(pool, row, row_stride, kv_head, head_stride):
        start = int64(row) * row_stride
        if has_heads:
            start += kv_head * head_stride
        return ptx.global_address(pool, start)

    @cuda.jit(device=True, forceinline=True)
    def wait(barrier, parity):
        if bulk:
            ptx.mbarrier_try_wait(barrier, uint32(parity))
        else:
            ptx.mbarrier_wait(barrier, uint32(parity))

    @cuda.jit(device=True, forceinline=True)
    def next_index(args, record, tile):
        """Entry of the index lists (uint32) for this lane's row of a tile, 0 if it has none.

        Nothing is done with it here: its load has until ``fetch`` to arrive.
        """
        lane, warp = signed_lane_and_warp()
        request, row = load_segment(record).request, int32(warp * copied_rows + lane)
        key = int32(int32(tile * keys_per_tile) + row)
        if lane < copied_rows and row < keys_per_tile and key < int32(request.num_keys):
            return index_of(args, request, key)
        return uint32(0)

    @cuda.jit(device=True, forceinline=True)
    def fetch(args, shared, record, tile, index, slot, parity):
        """Request this warp's rows of a tile into ``slot``; ``index`` is what ``next_index`` gave for the tile."""
        ptx.unroll_loops()
        lane, warp = signed_lane_and_warp()
        segment = load_segment(record)
        first_row = int32(warp * copied_rows)
        rows = int32(min(int32(int32(segment.request.num_keys) - int32(tile * keys_per_tile)), int32(keys_per_tile)))
        rows = min(int32(rows - first_row), int32(copied_rows))
        sources = uint32(shared + uint32(sources_offset + warp * (copied_rows * SOURCE_BYTES)))
        row = pool_row(args, index)
        # 64-bit: row * stride passes 2^31 in a pool of 4 GB.
        k_source = row_address(args.k_cache, row, args.k_cache_stride_slot, segment.kv_head, args.k_cache_stride_head)
        v_source = uint64(0)
        if separate_v:
            v_source = row_address(
                args.v_cache, row, args.v_cache_stride_slot, segment.kv_head, args.v_cache_stride_head
            )
        cuda.syncwarp()  # the last tile's sources have been read
        if lane < copied_rows:
            ptx.store_shared_v2_u64(sources + uint32(lane * SOURCE_BYTES), (k_source, v_source))
        cuda.syncwarp()  # publishes the sources to the warp
        full = uint32(shared + uint32(full_offset + BARRIER_BYTES * slot))
        wait(shared + uint32(empty_offset + BARRIER_BYTES * slot), parity)
        k_target = uint32(shared + uint32(slot * slot_bytes + first_row * k_pitch))
        v_target = uint32(shared + uint32(slot * slot_bytes + v_offset + first_row * v_pitch))
        if bulk:
            if ptx.elect_one():
                ptx.mbarrier_arrive_expect_tx(full, uint32(max(rows, int32(0)) * (k_row_bytes + v_row_bytes)))
                for r in range(copied_rows):
                    if r < rows:
                        source = ptx.load_shared_v2_u64(sources + uint32(r * SOURCE_BYTES))
                        ptx.bulk_copy(k_target + uint32(r * k_pitch), source[0], uint32(k_row_bytes), full)
                        if separate_v:
                            ptx.bulk_copy(v_target + uint32(r * v_pitch), source[1], uint32(v_row_bytes), full)
            cuda.syncwarp()  # the elected lane is back: what follows is for the whole warp
        else:
            copy_chunks(sources, k_target, k_pitch, k_chunks, rows, lane, 0)
            if separate_v:
                copy_chunks(sources, v_target, v_pitch, v_chunks, rows, lane, 1)
            ptx.cp_async_arrive(full)

    @cuda.jit(device=True, forceinline=True)
    def copy_chunks(sources, target, pitch, chunks, rows, lane, which):
        """Rows of ``chunks`` 16-byte pieces by cp.async, a piece a lane at a time."""
        piece = lane
        while piece < rows * chunks:
            row, column = int32(piece // chunks), int32(piece % chunks)
            source = ptx.load_shared_v2_u64(sources + uint32(row * SOURCE_BYTES))
            ptx.cp_async_16(
                target + uint32(row * pitch + column * CHUNK_BYTES), source[which] + uint64(column * CHUNK_BYTES)
            )
            piece = int32(piece + WARP)

    @cuda.jit(device=True, forceinline=True)
    def wait_full(shared, slot, parity):
        """Until the tile in ``slot`` is there."""
        wait(shared + uint32(full_offset + BARRIER_BYTES * slot), parity)

    @cuda.jit(device=True, forceinline=True)
    def release(shared, slot):
        """This warp reads the tile in ``slot`` no more."""
        cuda.syncwarp()  # all lanes have read it
        lane, _ = lane_and_warp()
        if lane == uint32(0):
            ptx.mbarrier_arrive(shared + uint32(empty_offset + BARRIER_BYTES * slot))

    return init, next_index, fetch, wait_full, release
