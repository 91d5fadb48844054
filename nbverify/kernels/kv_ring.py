"""The ring of key tiles: rows of the pool on their way into shared memory while earlier ones are multiplied.

The fetching warps (all of them, or the value warps) fetch their own rows of every tile.  Tile number i of a block,
counted over all its segments, lies in slot i % stages, and each slot has two mbarriers:

    full[slot]    completes when all rows of the tile have landed.  Who waits: every warp, before it reads the tile.
                  One arrival a fetching thread, made by the hardware when that thread's copies are complete.
    empty[slot]   completes when all fetching warps have released the tile, one arrival each.  Who waits: every fetching
                  warp, before it fetches the tile that comes into the slot next.

No row is read before it is there, none is overwritten while anybody may still read it.  No warp waits for itself: the
tile that its fetch must find released is one that it has released already, and the others can release it, since its
rows and those of all earlier tiles were requested before.

Where the ring stands is one number, the *turn*: 2 * slot + parity of how often the slot was used before.  Full of a
turn is waited for with its parity; who fetches into a slot waits for empty of the turn before, whose parity is the
other one, and on a fresh mbarrier that passes.

Rows past the end of a request are not fetched: what their place holds is hidden by the mask, and values.py lets no
NaN of it through.

Copies are cp.async, 16 bytes a lane, with up to 8 lanes side by side in a row: a lane's addresses are one register and
constants.  Bulk copies (sm_90) were tried: one lane then issues a row at a time, and the others wait for it.
"""

from typing import NamedTuple

from numba import cuda, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.kv_tiles import index_of, pool_row
from nbverify.kernels.segments import PREFIX_INDICES, load_segment

BARRIER_BYTES = 8
CHUNK_BYTES = 16  # of a cp.async


class Ring(NamedTuple):
    """The device functions of a ring."""

    init: object
    fill: object
    next_indices: object
    load_index_of: object
    fetch: object
    wait_full: object
    release: object
    tile_address: object
    next_turn: object
    turn_before: object


def make_ring(spec, geometry):
    """The ring of a geometry."""
    stages, warps, first_warp = geometry.stages, geometry.fetching_warps, geometry.first_fetching_warp
    keys_per_tile, copied_rows, passes = geometry.keys_per_tile, geometry.copied_rows, geometry.copy_passes
    lanes = geometry.copy_lanes
    k_steps, v_steps = geometry.k_row_bytes // (CHUNK_BYTES * lanes), geometry.v_row_bytes // (CHUNK_BYTES * lanes)
    k_pitch, v_pitch = geometry.k_pitch, geometry.v_pitch
    slot_bytes, v_offset = geometry.slot_bytes, geometry.v_offset
    full_offset = geometry.barriers_offset
    empty_offset = full_offset + BARRIER_BYTES * stages
    separate_v, has_heads = geometry.separate_v, spec.num_kv_heads > 1
    rows_per_pass, can_suspend = WARP // lanes, geometry.can_suspend

    @cuda.jit(device=True, forceinline=True)
    def init(shared):
        """Make the mbarriers.  The whole block calls it, and syncthreads comes before their first use."""
        if cuda.threadIdx.x == 0:
            for slot in range(stages):
                ptx.mbarrier_init(shared + full_offset + BARRIER_BYTES * slot, uint32(warps * WARP))
                ptx.mbarrier_init(shared + empty_offset + BARRIER_BYTES * slot, uint32(warps))

    @cuda.jit(device=True, forceinline=True)
    def barrier_of(shared, turn, offset):
        """Address of a slot's mbarrier; the constant last, where the instruction takes it (see ``ptx.opaque_u32``)."""
        return ptx.opaque_u32(shared + uint32((turn >> 1) * BARRIER_BYTES)) + uint32(offset)

    @cuda.jit(device=True, forceinline=True)
    def wait(barrier, turn):
        if can_suspend:
            ptx.mbarrier_try_wait(barrier, uint32(turn) & uint32(1))
        else:
            ptx.mbarrier_wait(barrier, uint32(turn) & uint32(1))

    @cuda.jit(device=True, forceinline=True)
    def next_indices(me, args, record, tile, indices):
        """Entries of the index lists (uint32) for this lane's rows of a tile, one a pass; 0 where it has none.

        Nothing is done with them here: their loads have until ``fetch`` to arrive.
        """
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp) - first_warp
        for i in range(passes):
            row = int32(warp * copied_rows + i * rows_per_pass + lane // lanes)
            indices[i] = load_index_of(args, record, tile, min(row, int32(keys_per_tile - 1)))

    @cuda.jit(device=True, forceinline=True)
    def load_index_of(args, record, tile, row):
        """Entry of the index lists (uint32) for a row of a tile; 0 past the end of the request."""
        request, first_key = load_segment(record).request, int32(tile * keys_per_tile)
        if int32(first_key + keys_per_tile) <= int32(request.prefix_len):  # the way of all tiles but the last ones
            start, words = uint64(record[PREFIX_INDICES]), uint32(args.kv_indices_words)
            return ptx.load_global_u32(start + uint64(uint32(first_key + row)) * uint64(words * uint32(4)))
        if int32(first_key + row) < int32(request.num_keys):
            return index_of(args, request, int64(first_key + row))
        return uint32(0)

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
    def fetch(me, args, shared, record, tile, indices, free):
        """Request this warp's rows of a tile into the slot of turn ``free``, when that turn is over.

        ``indices`` are what ``next_indices`` gave for the tile.
        """
        ptx.unroll_loops()
        lane, warp = int32(me.lane), int32(me.warp) - first_warp
        segment = load_segment(record)
        rows = int32(min(int32(int32(segment.request.num_keys) - int32(tile * keys_per_tile)), int32(keys_per_tile)))
        wait(barrier_of(shared, free, empty_offset), free)
        base = tile_address(shared, free)
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
        ptx.cp_async_arrive(barrier_of(shared, free, full_offset))

    @cuda.jit(device=True, forceinline=True)
    def wait_full(shared, turn):
        """Until the tile is there."""
        wait(barrier_of(shared, turn, full_offset), turn)

    @cuda.jit(device=True, forceinline=True)
    def release(me, shared, turn):
        """This warp reads the tile no more."""
        cuda.syncwarp()  # all lanes have read it
        if me.lane == uint32(0):
            ptx.mbarrier_arrive(barrier_of(shared, turn, empty_offset))

    @cuda.jit(device=True, forceinline=True)
    def tile_address(shared, turn):
        """Address of a tile in the ring."""
        return uint32(shared + uint32((turn >> 1) * slot_bytes))

    @cuda.jit(device=True, forceinline=True)
    def next_turn(turn):
        """The turn of the next tile."""
        if turn >= 2 * (stages - 1):
            return int32((turn & 1) ^ 1)
        return int32(turn + 2)

    @cuda.jit(device=True, forceinline=True)
    def turn_before(turn):
        """The turn of the tile before."""
        if turn < 2:
            return int32((turn ^ 1) + 2 * (stages - 1))
        return int32(turn - 2)

    @cuda.jit(device=True, forceinline=True)
    def fill(me, args, shared, record, first_tile, end_tile, turn, indices):
        """Request the first tiles of a segment, one less than there are slots; ``indices`` is room for theirs."""
        tile = first_tile
        while tile < min(int32(first_tile + (stages - 1)), end_tile):
            next_indices(me, args, record, tile, indices)
            fetch(me, args, shared, record, tile, indices, int32(turn ^ 1))
            turn = next_turn(turn)
            tile = int32(tile + 1)

    return Ring(
        init, fill, next_indices, load_index_of, fetch, wait_full, release, tile_address, next_turn, turn_before
    )
