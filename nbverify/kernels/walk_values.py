"""What a value warp does with a segment.  Who waits for whom is at the head of walk_roles.py."""

from numba import cuda, int32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import SEGMENT_FIELDS
from nbverify.kernels.masking import checks_every_tile
from nbverify.kernels.named_barriers import DONE, QFREE, READY
from nbverify.kernels.queries import make_meet_readers
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.threads import find_place_again, uniform
from nbverify.kernels.values import make_clean_values, make_multiply_values
from nbverify.kernels.weights import make_rescale_by_flags


def make_walk_values(spec, geometry, ring):
    """``walk_values(args, shared, offset, turn, o)``: ``o`` = outputs of a segment; gives the ring's turn then.

    ``offset`` is where the segment's record lies in shared memory.
    """
    stages, v_offset, threads = geometry.stages, geometry.v_offset, geometry.threads
    keys_per_tile, num_outputs = geometry.keys_per_tile, 4 * geometry.row_frags * geometry.value_frags
    before_queries = stages - geometry.staging_slots  # tiles that go to slots where no queries are
    always_checked = checks_every_tile(spec)
    find_first_rows, fetch, wait_full = ring.find_first_rows, ring.fetch, ring.wait_full
    tile_address, next_turn, turn_before = ring.tile_address, ring.next_turn, ring.turn_before
    rescale_by_flags = make_rescale_by_flags(geometry)
    multiply_values = make_multiply_values(spec, geometry)
    clean_values, meet_readers = make_clean_values(spec, geometry), make_meet_readers(geometry)

    @cuda.jit(device=True, forceinline=True)
    def fill(me, args, shared, record, turn):
        """Request the first tiles of a segment, as many as there are slots."""
        segment = load_segment(record)
        find_first_rows(me, args, shared, record)
        first_tile = int32(segment.first_tile)
        end = min(int32(first_tile + stages), int32(segment.end_tile))
        tile = first_tile
        while tile < max(end, int32(first_tile + before_queries + 1)):
            if tile == first_tile + before_queries:
                meet_readers()
                ptx.barrier_sync(uint32(QFREE), uint32(threads))
            if tile < end:
                fetch(me, args, shared, record, tile, turn)
            turn = next_turn(turn)
            tile = int32(tile + 1)

    @cuda.jit(device=True, forceinline=True)
    def walk_values(args, shared, offset, turn, o):
        # Outputs and operands take all but a few registers.  What else is live over a tile is kept few: ``left``
        # counts the tiles, the rest comes from the record, and addresses are made anew from the lane.
        ptx.unroll_loops()
        ptx.barrier_arrive(uint32(DONE), uint32(threads))  # both places of P are free
        ptx.barrier_arrive(uint32(DONE + 1), uint32(threads))
        record = ptx.shared_int64(shared + offset, SEGMENT_FIELDS)
        fill(find_place_again(), args, shared, record, turn)
        for i in range(num_outputs):
            o[i] = ZERO
        segment = load_segment(record)
        left = uniform(int32(int32(segment.end_tile) - int32(segment.first_tile)))
        parity = uint32(left) & uint32(1)
        ptx.barrier_sync(uint32(READY) + parity, uint32(threads))  # the empty publication
        if left >= 2:
            ptx.barrier_arrive(uint32(DONE) + parity, uint32(threads))
        while left > 0:
            parity = uint32(left - 1) & uint32(1)
            wait_full(shared, turn)
            ptx.barrier_sync(uint32(READY) + parity, uint32(threads))
            here, base = find_place_again(), ptx.opaque_u32(shared)
            record = ptx.shared_int64(base + offset, SEGMENT_FIELDS)
            segment = load_segment(record)
            tile = int32(int32(segment.end_tile) - left)
            if left >= stages and tile > int32(segment.first_tile):
                # Into the slot of the tile before, which all value warps have left by now.
                fetch(here, args, base, record, int32(tile + (stages - 1)), turn_before(turn))
            rescale_by_flags(here, base, parity, o)
            values = tile_address(base, turn) + uint32(v_offset)
            keys_after = int32(int32(tile + 1) * keys_per_tile)
            if always_checked or keys_after > int32(segment.request.prefix_len):
                clean_values(here, values)
            multiply_values(here, base, parity, values, o, o)
            if left >= 3:  # there is one more but one
                ptx.barrier_arrive(uint32(DONE) + (ptx.opaque_u32(left - 1) & uint32(1)), uint32(threads))
            turn, left = next_turn(int32(ptx.opaque_u32(turn))), int32(left - 1)
        return turn

    return walk_values
