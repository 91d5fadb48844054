"""Scores of a tile: S = Q K^T on tensor cores.

A warp holds its queries as mma operands, in registers as far as these reach, else in shared memory, and reads the keys
from shared memory, 16 keys x 16 columns an ldmatrix.

Column parts   What limits a tile is shared memory: each key row is read once for every 16 query rows, since a warp has
               room for the queries of one row fragment.  So two score warps (or three) share their two fragments: each
               keeps half of the columns of both and reads half of each key.  The products are then sums over half of
               the columns; each warp sends the other what is the other's, and adds what it gets.

Two fragments  A warp of a team that has 32 rows has no register for queries at all.  Their rows stay in shared memory
               as keys lie there, once for all warps that share them, and each step's operands come by ldmatrix, too.

Layout of scores in a lane: ``s[(r * key_frags + j) * 2 + i]`` is row ``8 r + g`` of the warp's, key ``8 j + 2 t + i``
of the piece, with g = lane // 4 and t = lane % 4: what mma gives, sorted by row.
"""

from numba import cuda, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.named_barriers import QUERIES
from nbverify.kernels.row_copies import CHUNK_BYTES
from nbverify.kernels.rows import make_advance, make_swizzle
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.team_places import make_find_first_key, make_find_team
from nbverify.kernels.tiles import FRAG_ROWS

NONE_PENDING = 0
STEP_BYTES = 32  # of a row: 16 columns
FRAG_BYTES = 16 * WARP  # four 32-bit registers of each lane


def make_multiply(dtype):
    """The mma of a 16-bit type."""
    return ptx.mma_bf16 if dtype == "bfloat16" else ptx.mma_f16


def make_find_step(geometry):
    """``first_column(part)`` and ``step_columns(k)``: where step ``k`` of a column part lies in a row, in bytes.

    Parts take turns of ``run_steps`` steps; the sum of the two is that place.
    """
    parts, run = geometry.column_parts, geometry.run_steps

    @cuda.jit(device=True, forceinline=True)
    def first_column(part):
        return uint32(part * uint32(run * STEP_BYTES))

    @cuda.jit(device=True, forceinline=True)
    def step_columns(k):
        return (k // run * parts * run + k % run) * STEP_BYTES

    return first_column, step_columns


def _make_row_address(spec):
    """``row_address(args, segment, row)``: where a query row of the row unit starts; past the end, another one."""
    group = spec.group

    @cuda.jit(device=True, forceinline=True)
    def row_address(args, segment, row):
        request = segment.request
        head_row, num_rows = int32(int32(segment.first_row) + row), int32(request.num_nodes * group)
        if head_row >= num_rows:  # not all the same row: many blocks would ask one place in L2 for it
            here = uint32(max(int32(1), int32(num_rows - int32(segment.first_row))))
            head_row = int32(int32(segment.first_row) + int32(uint32(row) - ptx.divide_u32(row, here) * here))
        token = request.token_start + int64(uint32(head_row) // uint32(group))
        head = segment.kv_head * group + int64(uint32(head_row) % uint32(group))
        return ptx.global_address(args.q, token * args.q_stride_token + head * args.q_stride_head)

    return row_address


def make_load_queries(spec, geometry):
    """A score warp's queries, once a segment: ``request(me, args, shared, record, turn, first_row)``, and then
    ``load_queries(me, args, shared, record, turn, first_row, queries)``.

    A row past the end reads some other row: it is computed and not written.
    """
    return (_make_load_query_rows if geometry.keeps_query_rows else _make_load_query_fragments)(spec, geometry)


def _make_load_query_rows(spec, geometry):
    """Rows that stay as they are: all warps copy some.  A block barrier after ``load_queries`` publishes them, and one
    before ``request`` says that nobody reads those of the segment before."""
    warps, rows_per_tile, pitch, offset = (
        geometry.warps, geometry.rows_per_tile, geometry.query_pitch, geometry.query_rows_offset,
    )  # fmt: skip
    lanes = geometry.copy_lanes
    rows_per_pass, copies = WARP // lanes, 2 * geometry.head_dim_qk // (CHUNK_BYTES * lanes)
    swizzle, advance, row_address = make_swizzle(pitch), make_advance(pitch), _make_row_address(spec)

    @cuda.jit(device=True, forceinline=True)
    def request(me, args, shared, record, turn, first_row):
        ptx.unroll_loops()
        segment, piece = load_segment(record), uint32(me.lane % uint32(lanes) * uint32(CHUNK_BYTES))
        row = uint32(me.warp * uint32(rows_per_pass) + me.lane // uint32(lanes))
        end = ptx.opaque_u32(uint32(rows_per_tile))  # else the loop is unrolled
        while row < end:
            source = row_address(args, segment, int32(row)) + uint64(piece)
            target = uint32(shared + uint32(offset) + row * uint32(pitch) + (piece ^ swizzle(row)))
            for i in range(copies):
                at = i * lanes * CHUNK_BYTES
                ptx.cp_async_16(advance(target, at), source + uint64(at))
            row = uint32(row + uint32(warps * rows_per_pass))
        ptx.cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def load_queries(me, args, shared, record, turn, first_row, queries):
        ptx.cp_async_wait(NONE_PENDING)

    return request, load_queries


def _make_load_query_fragments(spec, geometry):
    """Fragments in registers, or in shared memory of the warp's own.

    ``first_row`` is the first row, in the row unit, of the warp's own fragment.  Its rows come by cp.async into slots
    of the ring that are not used yet, the last ones from turn ``turn`` on; in parts of some columns where the ring is
    small.  ``request`` begins with the first part, before the keys are asked for: behind them it would wait.

    From there warps that share fragments take, each, their columns of all of them, as operands into ``queries``: the
    fragment of warp ``part + j`` of those is number ``k * column_parts + j``.  Those for which there is no register lie
    in shared memory, each lane its own 16 bytes.
    """
    steps, kept, rest = geometry.query_steps, geometry.query_steps_kept, geometry.query_rest
    stages, slot_bytes, pitch = geometry.stages, geometry.slot_bytes, geometry.staging_pitch
    first_slot, warps_per_slot = stages - geometry.staging_slots, geometry.staging_warps
    steps_per_pass, parts = steps // geometry.staging_parts, geometry.column_parts
    # Two lanes or more side by side in a row: a pass of the warp is 16 rows at most.
    queries_offset, lanes = geometry.queries_offset, max(2, geometry.copy_lanes)
    rows_per_pass, copies = WARP // lanes, STEP_BYTES * steps_per_pass // (CHUNK_BYTES * lanes)
    swizzle, advance, row_address = make_swizzle(pitch), make_advance(pitch), _make_row_address(spec)
    first_column, step_columns = make_find_step(geometry)

    @cuda.jit(device=True, forceinline=True)
    def waiting_rows(shared, turn, warp):
        """Where the query rows of a score warp wait."""
        slot = uint32(uint32(turn >> 1) + uint32(first_slot) + warp // uint32(warps_per_slot)) % uint32(stages)
        place = warp % uint32(warps_per_slot) * uint32(FRAG_ROWS * pitch)
        return uint32(shared + slot * uint32(slot_bytes) + place)

    @cuda.jit(device=True, forceinline=True)
    def sync_readers(me):
        """The warps that share fragments."""
        if parts > 1:
            ptx.barrier_sync(uint32(uint32(QUERIES) + me.warp // uint32(parts)), uint32(parts * WARP))
        else:
            cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def copy_part(me, args, shared, record, turn, first_row, first_step):
        """Begin to copy the columns of some steps."""
        ptx.unroll_loops()
        lane, segment, waiting = int32(me.lane), load_segment(record), waiting_rows(shared, turn, me.warp)
        piece = uint32(lane % lanes * CHUNK_BYTES)
        for start in range(0, FRAG_ROWS, rows_per_pass):
            row = int32(start + lane // lanes)
            source = row_address(args, segment, int32(first_row + row))
            source += uint64(piece + uint32(STEP_BYTES * first_step))
            target = uint32(waiting + uint32(row * pitch) + (piece ^ swizzle(row)))
            for i in range(copies):
                at = i * lanes * CHUNK_BYTES
                ptx.cp_async_16(advance(target, at), source + uint64(at))
        ptx.cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def request(me, args, shared, record, turn, first_row):
        copy_part(me, args, shared, record, turn, first_row, 0)

    @cuda.jit(device=True, forceinline=True)
    def load_queries(me, args, shared, record, turn, first_row, queries):
        ptx.unroll_loops()
        lane, part = int32(me.lane), uint32(me.warp % uint32(parts))
        # Rows 0-7 and 8-15 of the first 8 columns, then of the next 8.
        row, column = uint32(lane % 16), uint32(uint32(lane // 16 * CHUNK_BYTES) + first_column(part))
        place = uint32(row * uint32(pitch) + (column ^ swizzle(row)))
        mine = uint32(shared + me.warp * uint32(rest * FRAG_BYTES) + me.lane * uint32(16) + uint32(queries_offset))
        for first_step in range(0, steps, steps_per_pass):
            if first_step > 0:
                sync_readers(me)  # the part before has been read
                copy_part(me, args, shared, record, turn, first_row, first_step)
            ptx.cp_async_wait(NONE_PENDING)
            sync_readers(me)  # publishes the rows to them
            for j in range(parts):
                owner = uint32(me.warp - part + (part + uint32(j)) % uint32(parts))
                fragment = uint32(waiting_rows(shared, turn, owner) + place)
                for i in range(steps_per_pass // parts):
                    x, q = ptx.ldmatrix_x4(advance(fragment, step_columns(i))), first_step + i * parts + j
                    if q < kept:
                        queries[4 * q], queries[4 * q + 1], queries[4 * q + 2], queries[4 * q + 3] = (
                            x[0], x[1], x[2], x[3],
                        )  # fmt: skip
                    else:
                        ptx.store_shared_v4_u32(mine + uint32((q - kept) * FRAG_BYTES), x)

    return request, load_queries


def step_registers_of(geometry):
    """32-bit registers of the operands of a k16 step."""
    loads_queries = geometry.keeps_query_rows or geometry.query_rest > 0
    return 2 * geometry.key_frags + (4 * geometry.score_frags if loads_queries else 0)


def make_multiply_keys(spec, geometry):
    """``multiply_keys(me, shared, tile, queries, fragments, s, begin, end)``: steps ``begin`` to ``end`` of Q K^T.

    ``tile`` is the address of the K rows of the tile, or of a piece of it.  A call that begins with step 0 starts the
    sums anew.  ``s`` has the scores of all fragments of the warp one after the other, its own first; with several
    column parts they are sums over the warp's columns alone (``make_exchange``).
    """
    steps, kept, rest = geometry.part_steps, geometry.query_steps_kept, geometry.query_rest
    key_frags, has_roles, find_first_key = geometry.key_frags, geometry.has_roles, make_find_first_key(geometry)
    k_pitch, queries_offset, parts = geometry.k_pitch, geometry.queries_offset, geometry.column_parts
    frags, keeps_rows, find_first_row = geometry.score_frags, geometry.keeps_query_rows, make_find_team(geometry)[0]
    query_pitch, query_rows_offset = geometry.query_pitch, geometry.query_rows_offset
    query_swizzle, query_advance = make_swizzle(query_pitch), make_advance(query_pitch)
    row_stride, key_pairs = 2 * key_frags, key_frags // 2
    step_registers, ahead = step_registers_of(geometry), geometry.steps_ahead
    multiply, swizzle, advance = make_multiply(spec.dtype), make_swizzle(k_pitch), make_advance(k_pitch)
    first_column, step_columns = make_find_step(geometry)

    @cuda.jit(device=True, forceinline=True)
    def load_step(keys, mine, k, fragments):
        """Operands of step ``k``: keys, and queries that have no register of their own (``mine``: where they lie)."""
        ptx.unroll_loops()
        here = k % (ahead + 1) * step_registers
        for pair in range(key_pairs):
            x = ptx.ldmatrix_x4(advance(keys, step_columns(k)) + uint32(pair * 16 * k_pitch))
            at = here + 4 * pair
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]
        for j in range(frags):
            q, at = k * frags + j, here + 4 * key_pairs + 4 * j
            if q >= kept:
                if keeps_rows:
                    x = ptx.ldmatrix_x4(query_advance(mine, k * STEP_BYTES) + uint32(j * FRAG_ROWS * query_pitch))
                else:
                    x = ptx.load_shared_v4_u32(mine + uint32((q - kept) * FRAG_BYTES))
                fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply_keys(me, shared, tile, queries, fragments, s, begin, end):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        # Matrices of the ldmatrix: keys 0-7 and then 8-15, of each the first and then the second 8 columns.
        key, half = lane % uint32(8) + lane // uint32(16) * uint32(8), lane // uint32(8) % uint32(2)
        column = uint32(half * uint32(CHUNK_BYTES))
        if has_roles:
            column = uint32(column + first_column(warp % uint32(parts)))
        else:
            key = uint32(key + find_first_key(warp))
        keys = uint32(tile + key * uint32(k_pitch) + (column ^ swizzle(key)))
        if keeps_rows:  # rows 0-7 and 8-15 of the first 8 columns, then of the next 8
            row = uint32(find_first_row(warp) + lane % uint32(16))
            chunk = uint32(lane // uint32(16) * uint32(CHUNK_BYTES))
            mine = uint32(shared + row * uint32(query_pitch) + (chunk ^ query_swizzle(row)) + uint32(query_rows_offset))
        else:
            mine = uint32(shared + warp * uint32(rest * FRAG_BYTES) + lane * uint32(16) + uint32(queries_offset))
        if begin == 0:
            for i in range(2 * row_stride * frags):
                s[i] = ZERO
            for k in range(min(ahead, steps)):
                load_step(keys, mine, k, fragments)
        for k in range(begin, end):
            if k + ahead < steps:
                load_step(keys, mine, k + ahead, fragments)
            here = k % (ahead + 1) * step_registers
            for j in range(frags):
                q, at = k * frags + j, here + 4 * key_pairs + 4 * j
                if q < kept:
                    a = (queries[4 * q], queries[4 * q + 1], queries[4 * q + 2], queries[4 * q + 3])
                else:
                    a = (fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3])
                for n in range(key_frags):
                    up, b = 2 * row_stride * j + 2 * n, here + 2 * n
                    low = up + row_stride
                    c = multiply(a, (fragments[b], fragments[b + 1]), (s[up], s[up + 1], s[low], s[low + 1]))
                    s[up], s[up + 1], s[low], s[low + 1] = c[0], c[1], c[2], c[3]

    return multiply_keys


def make_exchange(geometry):
    """Sums over the columns of one warp become scores.

    ``send(me, shared, parity, s)`` gives the others of the warps that share fragments what belongs to theirs, and
    ``add(me, shared, parity, own)`` adds what they gave to ``own``, in a fixed order.  A barrier of these warps lies
    between the two, and another one between an ``add`` and the next ``send`` of its parity.
    """
    parts, key_frags = geometry.column_parts, geometry.key_frags
    exchange_offset, exchange_bytes = geometry.exchange_offset, geometry.exchange_bytes
    num_scores = 4 * key_frags
    warp_bytes = (parts - 1) * key_frags * FRAG_BYTES

    @cuda.jit(device=True, forceinline=True)
    def place_of(me, shared, parity, warp):
        start = uint32(parity * uint32(exchange_bytes) + warp * uint32(warp_bytes) + me.lane * uint32(16))
        return uint32(uint32(shared + start) + uint32(exchange_offset))

    @cuda.jit(device=True, forceinline=True)
    def send(me, shared, parity, s):
        ptx.unroll_loops()
        part = uint32(me.warp % uint32(parts))
        for j in range(1, parts):
            owner = uint32(me.warp - part + (part + uint32(j)) % uint32(parts))
            target = place_of(me, shared, parity, owner)
            for f in range(key_frags):
                at = num_scores * j + 4 * f
                ptx.store_shared_v4_f32(
                    target + uint32(((j - 1) * key_frags + f) * FRAG_BYTES), (s[at], s[at + 1], s[at + 2], s[at + 3])
                )

    @cuda.jit(device=True, forceinline=True)
    def add(me, shared, parity, own):
        ptx.unroll_loops()
        if parts > 1:
            source = place_of(me, shared, parity, me.warp)
            for j in range(1, parts):
                for f in range(key_frags):
                    x = ptx.load_shared_v4_f32(source + uint32(((j - 1) * key_frags + f) * FRAG_BYTES))
                    for i in range(4):
                        own[4 * f + i] = libdevice.fadd_rn(own[4 * f + i], x[i])

    return send, add
