"""The ring of key tiles: rows of the pool on their way into shared memory while earlier ones are multiplied.

The fetching warps (the value warps, or as many teams as there are rows for) fetch their own rows of every tile.  Tile
number i of a block, counted over all its segments, lies in slot i % stages, and each slot has two mbarriers:

    full[slot]    completes when all rows of the tile have landed.  Who waits: every warp, before it reads the tile.
                  One arrival a fetching thread, made by the hardware when that thread's copies are complete.
    empty[slot]   completes when all warps have released the tile, one arrival each.  Who waits: every fetching warp,
                  before it fetches the tile that comes into the slot next.  Roles have a named barrier that says the
                  same (walk_roles.py) and do without.

No row is read before it is there, none is overwritten while anybody may still read it.  No warp waits for itself: the
tile that its fetch must find released is one that it has released already, and the others can release it, since its
rows and those of all earlier tiles were requested before.

Where the ring stands is one number, the *turn*: 2 * slot + parity of how often the slot was used before.  Full of a
turn is waited for with its parity; who fetches into a slot waits for empty of the turn before, whose parity is the
other one, and on a fresh mbarrier that passes.

Indices    Which pool rows a tile consists of is read from the index lists a whole round of the ring before the rows
           are fetched, by cp.async as well: no thread waits for an index, and none keeps one in a register.  They lie
           in a ring of their own, each read by the warp that asked for it, once full of the tile that it fetched at the
           same time has been waited for.  Only the first tiles of a segment wait for theirs.

fp8        Rows wait in raw slots, as the pool has them, and each lane widens into the ring the 16 bytes that it has
           copied itself: nobody else waits for a raw row.  Full then counts plain arrivals.

Rows past the end of a request are not fetched.  With roles their place holds what it held: the mask hides it, and
values.py lets no NaN of it through.  With teams it is filled with zeros, so that a tile rarely has a NaN.

Copies are cp.async, 16 bytes a lane, with up to 8 lanes side by side in a row: a lane's addresses are one register and
constants.  Bulk copies (sm_90) were tried: one lane then issues a row at a time, and the others wait for it.
"""

from typing import NamedTuple

from numba import cuda, int32, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.kv_tiles import pool_row
from nbverify.kernels.row_copies import make_copy_row, make_widen_row
from nbverify.kernels.segments import INDEX_LISTS, load_segment

BARRIER_BYTES = 8
INDEX_BYTES = 4


class Ring(NamedTuple):
    """The device functions of a ring."""

    init: object
    find_first_rows: object
    fetch: object
    wait_full: object
    release: object
    tile_address: object
    next_turn: object
    turn_before: object


def make_ring(spec, geometry):
    """The ring of a geometry."""
    stages, warps, first_warp = geometry.stages, geometry.fetching_warps, geometry.first_fetching_warp
    all_warps, keys_per_tile, copied_rows, passes = (
        geometry.warps,
        geometry.keys_per_tile,
        geometry.copied_rows,
        geometry.copy_passes,
    )
    lanes = geometry.copy_lanes
    k_pitch, v_pitch = geometry.k_pitch, geometry.v_pitch
    slot_bytes, v_offset, indices_offset = geometry.slot_bytes, geometry.v_offset, geometry.indices_offset
    index_slot_bytes = INDEX_BYTES * keys_per_tile
    full_offset = geometry.barriers_offset
    empty_offset = full_offset + BARRIER_BYTES * stages
    separate_v, has_heads, has_roles = geometry.separate_v, spec.num_kv_heads > 1, geometry.has_roles
    rows_per_pass, can_suspend = WARP // lanes, geometry.can_suspend
    index_slots, raw_stages, is_fp8 = geometry.index_slots, geometry.raw_stages, geometry.raw_stages > 0
    raw_offset, raw_slot_bytes = geometry.raw_offset, geometry.raw_slot_bytes
    k_row_bytes, v_row_bytes = geometry.k_row_bytes, geometry.v_row_bytes
    raw_v_offset, newer_groups = keys_per_tile * k_row_bytes, max(0, raw_stages - 1)
    num_first_rows = index_slots * passes
    k_distance, v_distance = (k_row_bytes, v_row_bytes) if is_fp8 else (k_pitch, v_pitch)  # where rows are copied to
    first_v = raw_v_offset if is_fp8 else v_offset
    copy_k_row, copy_v_row = (
        make_copy_row(distance, lanes, row_bytes, has_heads=has_heads, fills=not has_roles)
        for distance, row_bytes in ((k_distance, k_row_bytes), (v_distance, v_row_bytes))
    )
    widen_k_row, widen_v_row = (
        make_widen_row(spec.dtype, row_bytes, pitch, lanes)
        for row_bytes, pitch in ((k_row_bytes, k_pitch), (v_row_bytes, v_pitch))
    )

    @cuda.jit(device=True, forceinline=True)
    def init(shared):
        """Make the mbarriers.  The whole block calls it, and syncthreads comes before their first use."""
        if cuda.threadIdx.x == 0:
            for slot in range(stages):
                ptx.mbarrier_init(shared + full_offset + BARRIER_BYTES * slot, uint32(warps * WARP))
                ptx.mbarrier_init(shared + empty_offset + BARRIER_BYTES * slot, uint32(all_warps))

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
    def my_row(me, i):
        """The row of a tile that this lane has a part in, in pass ``i``; some are past the tile's last."""
        return int32(
            (me.warp - uint32(first_warp)) * uint32(copied_rows) + me.lane // uint32(lanes) + i * rows_per_pass
        )

    @cuda.jit(device=True, forceinline=True)
    def index_address(args, record, key):
        """Global address of the low word of a key's entry in the index lists."""
        prefix_list, draft_list = ptx.load_shared_v2_u64(ptx.shared_address(record, INDEX_LISTS))
        draft = int32(key - int32(load_segment(record).request.prefix_len))
        if draft < 0:
            return prefix_list + uint64(uint32(key)) * uint64(args.kv_indices_words * INDEX_BYTES)
        return draft_list + uint64(uint32(draft)) * uint64(args.out_cache_loc_words * INDEX_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def index_place(shared, tile, row):
        """Shared address of the index of a row of a tile."""
        slot = uint32(tile) % uint32(index_slots)
        return uint32(shared + slot * uint32(index_slot_bytes) + uint32(row * INDEX_BYTES + indices_offset))

    @cuda.jit(device=True, forceinline=True)
    def find_first_rows(me, args, shared, record):
        """The indices of the first tiles of a segment, all loads side by side; of fp8, begin to copy their rows."""
        ptx.unroll_loops()
        segment = load_segment(record)
        first_key, last_key = int32(segment.first_tile * keys_per_tile), int32(int32(segment.request.num_keys) - 1)
        indices = cuda.local.array(num_first_rows, uint32)
        if last_key >= 0:  # else a padding row, which has no key
            for d in range(index_slots):
                for i in range(passes):
                    key = min(int32(first_key + d * keys_per_tile + my_row(me, i)), last_key)
                    indices[d * passes + i] = ptx.load_global_u32(index_address(args, record, key))
            for d in range(index_slots):
                for i in range(passes):
                    row = my_row(me, i)
                    if me.lane % uint32(lanes) == uint32(0) and row < keys_per_tile:
                        place = index_place(shared, int32(segment.first_tile + d), row)
                        ptx.store_shared_u32(place, indices[d * passes + i])
        cuda.syncwarp()  # publishes them to the warp
        if is_fp8:
            tile = int32(segment.first_tile)
            while tile < segment.first_tile + raw_stages:
                copy_raw_rows(me, args, shared, record, tile)
                tile = int32(tile + 1)

    @cuda.jit(device=True, forceinline=True)
    def rows_from(record, tile):
        """Rows of the request from the tile's first one on."""
        return int32(int32(load_segment(record).request.num_keys) - int32(tile * keys_per_tile))

    @cuda.jit(device=True, forceinline=True)
    def fetched_rows(rows):
        """Of a tile from which on the request has so many rows: those, or all if the others become zeros."""
        return rows if has_roles else int32(keys_per_tile)

    @cuda.jit(device=True, forceinline=True)
    def copy_rows(me, args, shared, record, tile, target):
        """Begin to copy this warp's rows of a tile, and the indices of the tile that follows in its index slot."""
        ptx.unroll_loops()
        piece, segment, rows = me.lane % uint32(lanes), load_segment(record), rows_from(record, tile)
        pool_rows = cuda.local.array(passes, uint32)
        for i in range(passes):
            row, pool_rows[i] = my_row(me, i), uint32(0)
            if row < min(rows, int32(keys_per_tile)):
                pool_rows[i] = ptx.load_shared_u32(index_place(shared, tile, row))
        cuda.syncwarp()  # all lanes have read the index of their row: it may be overwritten
        # Before the rows: what is read from shared memory here would queue behind their copies.
        for i in range(passes):
            row = my_row(me, i)
            later = int32(row + index_slots * keys_per_tile)
            if piece == uint32(0) and row < keys_per_tile and later < rows:
                source = index_address(args, record, int32(tile * keys_per_tile + later))
                ptx.cp_async_4(index_place(shared, tile, row), source)
        for i in range(passes):
            row = my_row(me, i)
            if row < min(fetched_rows(rows), int32(keys_per_tile)):
                pool, is_there = pool_row(args, pool_rows[i]), row < rows
                copy_k_row(
                    args.k_cache, pool, args.k_cache_stride_slot, segment.kv_head, args.k_cache_stride_head, target,
                    row, piece, is_there,
                )  # fmt: skip
                if separate_v:
                    copy_v_row(
                        args.v_cache, pool, args.v_cache_stride_slot, segment.kv_head, args.v_cache_stride_head,
                        target + uint32(first_v), row, piece, is_there,
                    )  # fmt: skip

    @cuda.jit(device=True, forceinline=True)
    def raw_address(shared, tile):
        """Where a tile waits to be widened."""
        slot = uint32(tile) % uint32(max(1, raw_stages))
        return uint32(shared + slot * uint32(raw_slot_bytes) + uint32(raw_offset))

    @cuda.jit(device=True, forceinline=True)
    def copy_raw_rows(me, args, shared, record, tile):
        """Begin to copy this warp's rows of a tile to where they wait, if the segment has this tile."""
        if tile < load_segment(record).end_tile:
            copy_rows(me, args, shared, record, tile, raw_address(shared, tile))
        ptx.cp_async_commit()  # without rows, too: groups are counted

    @cuda.jit(device=True, forceinline=True)
    def widen_rows(me, shared, record, tile, target):
        """This warp's rows of a tile from their raw slot to the ring, when they are there."""
        ptx.unroll_loops()
        ptx.cp_async_wait(newer_groups)
        cuda.syncwarp()  # and so are the indices that came with them, for the warp
        piece, rows, source = me.lane % uint32(lanes), rows_from(record, tile), raw_address(shared, tile)
        for i in range(passes):
            row = my_row(me, i)
            if row < min(fetched_rows(rows), int32(keys_per_tile)):
                widen_k_row(source, target, row, piece)
                if separate_v:
                    widen_v_row(source + uint32(raw_v_offset), target + uint32(v_offset), row, piece)

    @cuda.jit(device=True, forceinline=True)
    def fetch(me, args, shared, record, tile, free):
        """Fill this warp's rows of a tile into the slot of turn ``free``, when that turn is over."""
        if not has_roles:
            wait(barrier_of(shared, free, empty_offset), free)
        target = tile_address(shared, free)
        if is_fp8:
            widen_rows(me, shared, record, tile, target)
            copy_raw_rows(me, args, shared, record, int32(tile + raw_stages))
            ptx.mbarrier_arrive(barrier_of(shared, free, full_offset))
        else:
            copy_rows(me, args, shared, record, tile, target)
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

    return Ring(init, find_first_rows, fetch, wait_full, release, tile_address, next_turn, turn_before)
