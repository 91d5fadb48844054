"""A segment walked by teams: every warp makes scores, weights and outputs of its own rows and keys.

What a warp does with a tile is in team_tiles.py.

Who waits for whom, and why that is enough
    tile there, tile free     the ring's two mbarriers a slot (kv_ring.py)
    end of the segment        teams that share rows: a block barrier after the last tile (nobody reads the ring any
                              more: outputs may go there), one after outputs and states are written, one after they are
                              read.  Teams that do not: each reads only what it wrote.
A warp without rows (the last row tile of a request), or whose tile it is not, waits for it and releases it like the
others.
All branches around barriers, shuffles and mma are the same for the whole warp.
"""

from numba import cuda, float32, int32, int64, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import SEGMENT_FIELDS
from nbverify.kernels.masking import checks_every_tile, make_mask, make_prefetch_mask
from nbverify.kernels.outputs import make_finish_rows, make_join_teams, make_write_outputs
from nbverify.kernels.queries import make_load_queries
from nbverify.kernels.segments import NEXT_POSITION, RECORD_BYTES, load_segment, make_open_segment
from nbverify.kernels.softmax import NEG_INF, ZERO
from nbverify.kernels.team_places import make_find_first_key, make_find_team, make_takes_tile
from nbverify.kernels.team_tiles import make_walk_tile
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.kernels.weights import ROWS_PER_LANE


def make_walk(spec, geometry, schedule, ring):
    """``walk_share(me, args, shared, table, position, share_end)``: all segments of the block's share."""
    first_record, last_warp = geometry.segments_offset, geometry.warps - 1
    open_segment = make_open_segment(schedule, may_be_there=spec.schedule == "step")
    walk_segment = _make_walk_segment(spec, geometry, ring)

    @cuda.jit(device=True, forceinline=True)
    def walk_share(me, args, shared, table, position, share_end):
        turn, offset = int32(0), uint32(first_record)
        opener = uint32(0)  # the last warp looks up what is merged first, meanwhile
        while position < share_end:
            record = ptx.shared_int64(shared + offset, SEGMENT_FIELDS)
            if me.warp == opener:
                open_segment(args, table, position, share_end, record)
            cuda.syncthreads()  # publishes the record; nobody uses the other one, or the ring, any more
            turn = walk_segment(me, args, shared, record, turn)
            position = int32(record[NEXT_POSITION])
            offset = uint32(uint32(2 * first_record + RECORD_BYTES) - offset)  # the other one
            opener = uint32(last_warp)  # it has the least to do at the end

    return walk_share


def _make_walk_segment(spec, geometry, ring):
    """``walk_segment(me, args, shared, record, turn)``, from turn ``turn`` of the ring; gives its turn then."""
    stages, first_fetching_warp = geometry.stages, geometry.first_fetching_warp
    row_teams, key_teams, shared_warps = geometry.row_teams, geometry.key_teams, geometry.shared_warps
    team_keys, keys_per_tile = geometry.team_keys, geometry.keys_per_tile
    num_queries, num_outputs = max(1, 4 * geometry.query_steps_kept), 4 * geometry.value_frags
    group = spec.group
    before_queries = stages - geometry.staging_slots  # tiles that go to slots where no queries are
    always_checked = checks_every_tile(spec)

    find_first_rows, fetch, wait_full, release = ring.find_first_rows, ring.fetch, ring.wait_full, ring.release
    tile_address, next_turn, turn_before = ring.tile_address, ring.next_turn, ring.turn_before
    request_queries, load_queries = make_load_queries(spec, geometry)
    walk_tile, prefetch_mask = make_walk_tile(spec, geometry), make_prefetch_mask(spec, FRAG_ROWS)
    find_mask, _, _ = make_mask(spec)
    finish_rows = make_finish_rows(spec, geometry)
    leave, join = make_join_teams(spec, geometry)
    find_first_row, _ = make_find_team(geometry)
    find_first_key, takes_tile = make_find_first_key(geometry), make_takes_tile(geometry)
    write_outputs = make_write_outputs(spec, geometry)

    @cuda.jit(device=True, forceinline=True)
    def start(me, args, shared, record, turn, first_row, queries):
        """Request the queries, by way of the last slots, and the first tiles, as many as there are slots.

        Where masks are read, they come to L2 meanwhile.
        """
        segment = load_segment(record)
        wants_masks, mask_start = reads_masks(segment, first_row), int64(0)
        if wants_masks:
            mask_start = find_mask(args, segment.request)  # long before it is used: it comes from memory
        request_queries(me, args, shared, record, turn, first_row)
        fetches = me.warp >= uint32(first_fetching_warp)
        if fetches:
            find_first_rows(me, args, shared, record)
        tile = int32(segment.first_tile)
        end = min(int32(tile + stages), int32(segment.end_tile))
        left = int32(before_queries)
        while left >= 0 or tile < end:
            if left == 0:
                if wants_masks:
                    head_row = int32(int32(segment.first_row) + first_row)
                    prefetch_mask(args, mask_start, segment.request, head_row, me.lane)
                load_queries(me, args, shared, record, start_of_ring(turn), first_row, queries)
                cuda.syncthreads()  # all queries have left the ring
            if tile < end and fetches:
                fetch(me, args, shared, record, tile, int32(turn ^ 1))
            turn = next_turn(turn)
            left, tile = int32(left - 1), int32(tile + 1)

    @cuda.jit(device=True, forceinline=True)
    def reads_masks(segment, first_row):
        """Whether there are drafts among the segment's keys, and a row of this warp's that may see them."""
        request = segment.request
        return segment.end_tile * keys_per_tile > request.prefix_len and (
            segment.first_row + first_row < request.num_nodes * group
        )

    @cuda.jit(device=True, forceinline=True)
    def start_of_ring(turn):
        """The turn ``before_queries`` tiles ago."""
        return int32((turn + 2 * (2 * stages - before_queries)) % (2 * stages))

    @cuda.jit(device=True, forceinline=True)
    def walk_segment(me, args, shared, record, turn):
        ptx.unroll_loops()
        segment, warp = load_segment(record), int32(me.warp)
        first_row, first_key = int32(find_first_row(me.warp)), int32(find_first_key(me.warp))
        has_rows = segment.first_row + first_row < segment.request.num_nodes * group
        first_tile, end_tile = int32(segment.first_tile), int32(segment.end_tile)
        # Tiles from here on hide keys of this team from some row, or may do so.
        first_checked = int32(0)
        if not always_checked:
            whole = int32(int32(segment.request.prefix_len) - first_key - team_keys)
            first_checked = int32(whole // keys_per_tile + 1)  # Python's division: 0 or less if no tile is whole

        queries = cuda.local.array(num_queries, uint32)
        start(me, args, shared, record, turn, first_row, queries)
        o = cuda.local.array(num_outputs, float32)
        maxima, sums = cuda.local.array(ROWS_PER_LANE, float32), cuda.local.array(ROWS_PER_LANE, float32)
        for i in range(num_outputs):
            o[i] = ZERO
        for r in range(ROWS_PER_LANE):
            maxima[r], sums[r] = NEG_INF, ZERO

        tile = first_tile
        while tile < end_tile:
            wait_full(shared, turn)
            if has_rows and takes_tile(me.warp, int32(tile - first_tile)):
                key, checked = int32(tile * keys_per_tile + first_key), tile >= first_checked
                place = tile_address(shared, turn)
                walk_tile(me, args, shared, record, place, first_row, key, checked, queries, o, maxima, sums)
            release(me, shared, turn)
            if tile > first_tile and tile + (stages - 1) < end_tile and warp >= first_fetching_warp:
                # Into the slot of the tile before this one, which the other warps will have left soon.
                fetch(me, args, shared, record, int32(tile + stages - 1), turn_before(turn))
            turn = next_turn(turn)
            tile = int32(tile + 1)

        if key_teams > 1:
            cuda.syncthreads()  # no warp reads the ring any more: outputs may go there
            if warp >= row_teams:
                leave(me, shared, maxima, sums, o)
            cuda.syncthreads()  # publishes states and outputs to the block
            if warp < row_teams - shared_warps:
                finish_rows(me, args, shared, record, maxima, sums)
            elif warp < row_teams:
                join(me, args, shared, record, maxima, sums, o)
        else:
            finish_rows(me, args, shared, record, maxima, sums)
        cuda.syncwarp()  # publishes the rows' factors to the warp
        if warp < row_teams and has_rows:
            write_outputs(me, args, shared, record, o)
        return turn

    return walk_segment
