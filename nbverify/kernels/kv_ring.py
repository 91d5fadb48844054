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
from nbverify.kernels.segments import PREFIX_INDICES, load_segment

BARRIER_BYTES = 8
CHUNK_BYTES = 16  # of a cp.async


def make_ring(spec, geometry):
    """``init, next_indices, fetch, wait_full, release`` for a geometry."""
    stages, warps, threads = geometry.stages, geometry.warps, geometry.threads
    keys_per_tile, copied_rows, passes = geometry.keys_per_tile, geometry.copied_rows, geometry.copy_passes
    lanes = geometry.copy_lanes
    k_steps, v_steps = geometry.k_row_bytes // (CHUNK_BYTES * lanes), geometry.v_row_bytes // (CHUNK_BYTES * lanes)
    k_pitch, v_pitch = geometry.ring_k_pitch, geometry.ring_v_pitch
    slot_bytes, v_offset = geometry.slot_bytes, geometry.ring_v_offset
    full_offset = geometry.barriers_offset
    empty_offset = full_offset + BARRIER_BYTES * stages
    separate_v, has_heads = geometry.separate_v, spec.num_kv_heads > 1
    rows_per_pass, can_suspend = WARP // lanes, geometry.can_suspend

    @cuda.jit(device=True, forceinline=True)
    def init(shared):
        """Make the mbarriers.  The whole block calls it, and syncthreads comes before their first use."""
        if cuda.threadIdx.x == 0:
            for slot in range(stages):
                ptx.mbarrier_init(shared + full_offset + BARRIER_BYTES * slot, uint32(threads))
                ptx.mbarrier_init(shared + empty_offset + BARRIER_BYTES * slot, uint32(warps))

    @cuda.jit(device=True, forceinline=True)
    def wait(barrier, parity):
        if can_suspend:
            ptx.mbarrier_try_wait(barrier, uint32(parity))
        else:
            ptx.mbarrier_wait(barrier, uint32(parity))

    @cuda.jit(device=True, forceinline=True)
    def next_indices(me, args, record, tile, indices):
        """Entries of the index lists (uint32) for this lane's rows of a tile, one a pass; 0 where it has none.

        Nothing is done with them here: their loads have until ``fetch`` to arrive.
        """
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        request, first_key = load_segment(record).request, int32(tile * keys_per_tile)
        if int32(first_key + keys_per_tile) <= int32(request.prefix_len):  # the way of all tiles but the last ones
            start, words = uint64(record[PREFIX_INDICES]), uint32(args.kv_indices_words)
            for i in range(passes):
                row = int32(warp * copied_rows + i * rows_per_pass + lane // lanes)
                row = min(row, int32(keys_per_tile - 1))
                indices[i] = ptx.load_global_u32(start + uint64(uint32(first_key + row)) * uint64(words * uint32(4)))
        else:
            for i in range(passes):
                row = int32(warp * copied_rows + i * rows_per_pass + lane // lanes)
                indices[i] = uint32(0)
                if row < keys_per_tile and int32(first_key + row) < int32(request.num_keys):
                    indices[i] = index_of(args, request, int64(first_key + row))

    @cuda.jit(device=True, forceinline=True)
    def copy_row(pool, row, row_stride, kv_head, head_stride, target, piece, steps):
        """This lane's pieces of a row: 16 bytes each, ``lanes`` lanes side by side."""
        ptx.unroll_loops()
        start = int64(row) * row_stride  # 64-bit: it passes 2^31 in a pool of 4 GB
        if has_heads:
            start += kv_head * head_stride
        source = ptx.global_address(pool, start) + uint64(piece * CHUNK_BYTES)
        target = uint32(target + uint32(piece * CHUNK_BYTES))
        for step in range(steps):
            at = step * lanes * CHUNK_BYTES
            ptx.cp_async_16(target + uint32(at), source + uint64(at))

    @cuda.jit(device=True, forceinline=True)
    def fetch(me, args, shared, record, tile, indices, slot, parity):
        """Request this warp's rows of a tile into ``slot``; ``indices`` are what ``next_indices`` gave for the tile."""
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp)
        segment = load_segment(record)
        rows = int32(min(int32(int32(segment.request.num_keys) - int32(tile * keys_per_tile)), int32(keys_per_tile)))
        wait(shared + uint32(empty_offset + BARRIER_BYTES * slot), parity)
        base = uint32(shared + uint32(slot * slot_bytes))
        for i in range(passes):
            row = int32(warp * copied_rows + i * rows_per_pass + lane // lanes)
            if row < rows:
                pool = pool_row(args, indices[i])
                copy_row(
                    args.k_cache, pool, args.k_cache_stride_slot, segment.kv_head, args.k_cache_stride_head,
                    base + uint32(row * k_pitch), lane % lanes, k_steps,
                )  # fmt: skip
                if separate_v:
                    copy_row(
                        args.v_cache, pool, args.v_cache_stride_slot, segment.kv_head, args.v_cache_stride_head,
                        base + uint32(v_offset + row * v_pitch), lane % lanes, v_steps,
                    )  # fmt: skip
        ptx.cp_async_arrive(shared + uint32(full_offset + BARRIER_BYTES * slot))

    @cuda.jit(device=True, forceinline=True)
    def wait_full(shared, slot, parity):
        """Until the tile in ``slot`` is there."""
        wait(shared + uint32(full_offset + BARRIER_BYTES * slot), parity)

    @cuda.jit(device=True, forceinline=True)
    def release(me, shared, slot):
        """This warp reads the tile in ``slot`` no more."""
        cuda.syncwarp()  # all lanes have read it
        lane = me.lane
        if lane == uint32(0):
            ptx.mbarrier_arrive(shared + uint32(empty_offset + BARRIER_BYTES * slot))

    return init, next_indices, fetch, wait_full, release
