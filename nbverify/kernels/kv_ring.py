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
from nbverify.kernels.kv_tiles import slot_of
from nbverify.kernels.segments import load_segment

BARRIER_BYTES = 8
CHUNK_BYTES = 16  # of a cp.async


def make_ring(geometry):
    """``init, next_source, fetch, wait_full, release`` for a geometry."""
    stages, warps, threads = geometry.stages, geometry.warps, geometry.threads
    keys_per_tile, copied_rows = geometry.keys_per_tile, geometry.copied_rows
    k_row_bytes, v_row_bytes = geometry.k_row_bytes, geometry.v_row_bytes
    k_pitch, v_pitch = geometry.ring_k_pitch, geometry.ring_v_pitch
    slot_bytes, v_offset = geometry.slot_bytes, geometry.ring_v_offset
    itemsize = geometry.kv_itemsize
    sources_offset = geometry.sources_offset
    full_offset = geometry.barriers_offset
    empty_offset = full_offset + BARRIER_BYTES * stages
    separate_v, bulk = geometry.separate_v, geometry.bulk_copies
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
    def wait(barrier, parity):
        if bulk:
            ptx.mbarrier_try_wait(barrier, uint32(parity))
        else:
            ptx.mbarrier_wait(barrier, uint32(parity))

    @cuda.jit(device=True, forceinline=True)
    def next_source(args, record, tile):
        """Pool row of this lane's row of a tile, 0 if it has none.  Its load has until ``fetch`` to arrive."""
        request = load_segment(record).request
        row = cuda.threadIdx.x // WARP * copied_rows + cuda.threadIdx.x % WARP
        key = tile * keys_per_tile + row
        if cuda.threadIdx.x % WARP < copied_rows and row < keys_per_tile and key < request.num_keys:
            return slot_of(args, request, key)
        return int64(0)

    @cuda.jit(device=True, forceinline=True)
    def fetch(args, shared, record, tile, source, slot, parity):
        """Request this warp's rows of a tile into ``slot``; ``source`` is what ``next_source`` gave for the tile."""
        segment = load_segment(record)
        num_keys, kv_head = segment.request.num_keys, segment.kv_head
        warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
        sources = cuda.shared.array(0, int64, 16)[sources_offset // 8 + warp * copied_rows :]
        first_row = warp * copied_rows
        rows = min(int64(keys_per_tile), num_keys - tile * keys_per_tile) - first_row
        rows = int32(max(min(rows, int64(copied_rows)), int64(0)))
        cuda.syncwarp()  # the last tile's sources have been read
        if lane < copied_rows:
            sources[lane] = source
        cuda.syncwarp()  # publishes the sources to the warp
        full = uint32(shared + uint32(full_offset + BARRIER_BYTES * slot))
        wait(shared + uint32(empty_offset + BARRIER_BYTES * slot), parity)
        k_target = uint32(shared + uint32(slot * slot_bytes + first_row * k_pitch))
        v_target = uint32(shared + uint32(slot * slot_bytes + v_offset + first_row * v_pitch))
        k_pool = ptx.global_address(args.k_cache, kv_head * args.k_cache_stride_head)
        v_pool = uint64(0)
        if separate_v:
            v_pool = ptx.global_address(args.v_cache, kv_head * args.v_cache_stride_head)
        if bulk:
            if ptx.elect_one():
                ptx.mbarrier_arrive_expect_tx(full, uint32(rows * (k_row_bytes + v_row_bytes)))
                row = int32(0)
                while row < rows:
                    pool_row = sources[row]
                    # 64-bit: slot * stride passes 2^31 in a pool of 4 GB.
                    k_source = k_pool + uint64(pool_row * args.k_cache_stride_slot * itemsize)
                    ptx.bulk_copy(k_target + uint32(row * k_pitch), k_source, uint32(k_row_bytes), full)
                    if separate_v:
                        v_source = v_pool + uint64(pool_row * args.v_cache_stride_slot * itemsize)
                        ptx.bulk_copy(v_target + uint32(row * v_pitch), v_source, uint32(v_row_bytes), full)
                    row = int32(row + 1)
            cuda.syncwarp()  # the elected lane is back: what follows is for the whole warp
        else:
            chunk = int32(lane)
            while chunk < rows * k_chunks:
                row, column = chunk // k_chunks, chunk % k_chunks
                k_source = k_pool + uint64(sources[row] * args.k_cache_stride_slot * itemsize + column * CHUNK_BYTES)
                ptx.cp_async_16(k_target + uint32(row * k_pitch + column * CHUNK_BYTES), k_source)
                chunk = int32(chunk + WARP)
            if separate_v:
                chunk = int32(lane)
                while chunk < rows * v_chunks:
                    row, column = chunk // v_chunks, chunk % v_chunks
                    v_source = v_pool + uint64(
                        sources[row] * args.v_cache_stride_slot * itemsize + column * CHUNK_BYTES
                    )
                    ptx.cp_async_16(v_target + uint32(row * v_pitch + column * CHUNK_BYTES), v_source)
                    chunk = int32(chunk + WARP)
            ptx.cp_async_arrive(full)

    @cuda.jit(device=True, forceinline=True)
    def wait_full(shared, slot, parity):
        """Until the tile in ``slot`` is there."""
        wait(shared + uint32(full_offset + BARRIER_BYTES * slot), parity)

    @cuda.jit(device=True, forceinline=True)
    def release(shared, slot):
        """This warp reads the tile in ``slot`` no more."""
        cuda.syncwarp()  # all lanes have read it
        if cuda.threadIdx.x % WARP == 0:
            ptx.mbarrier_arrive(shared + uint32(empty_offset + BARRIER_BYTES * slot))

    return init, next_source, fetch, wait_full, release
