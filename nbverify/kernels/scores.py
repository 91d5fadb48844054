"""Scores of a tile: S = Q K^T on tensor cores.

A warp holds the queries of a row fragment as mma operands and reads the keys from shared memory, 16 keys x 16 columns
an ldmatrix.

Layout of scores in a lane: ``s[(r * key_frags + j) * 2 + i]`` is row ``8 r + g`` of the fragment, key
``8 j + 2 t + i``, with g = lane // 4 and t = lane % 4: what mma gives, sorted by row.
"""

from numba import cuda, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.kv_ring import CHUNK_BYTES
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.tiles import FRAG_ROWS

NONE_PENDING = 0
FRAG_BYTES = 16 * WARP  # four 32-bit registers of each lane


def make_multiply(dtype):
    """The mma of a 16-bit type."""
    return ptx.mma_bf16 if dtype == "bfloat16" else ptx.mma_f16


def make_load_queries(spec, geometry):
    """``load_queries(me, args, shared, record, turn, first_row, queries)``: a row fragment, once a segment.

    ``first_row`` is the fragment's first row in the row unit.  The rows come by cp.async into slots of the ring that
    are not used yet, the last ones from turn ``turn`` on, and from there as operands into ``queries``; in parts of some
    columns where the ring is small.  The steps for which there is no register lie as fragments in shared memory, each
    lane its own 16 bytes.  No other warp takes part.
    A row past the end reads some other row: it is computed and not written.
    """
    steps, kept, rest = geometry.query_steps, geometry.query_steps_kept, geometry.query_rest
    stages, slot_bytes, pitch = geometry.stages, geometry.slot_bytes, geometry.staging_pitch
    first_slot, warps_per_slot = stages - geometry.staging_slots, geometry.staging_warps
    steps_per_part = steps // geometry.staging_parts
    # Two lanes or more side by side in a row: a pass of the warp is 16 rows at most.
    group, queries_offset, lanes = spec.group, geometry.queries_offset, max(2, geometry.copy_lanes)
    rows_per_pass, copies = WARP // lanes, 32 * steps_per_part // (CHUNK_BYTES * lanes)

    @cuda.jit(device=True, forceinline=True)
    def waiting_rows(me, shared, turn):
        """Where this warp's query rows wait."""
        slot = uint32(uint32(turn >> 1) + uint32(first_slot) + me.warp // uint32(warps_per_slot)) % uint32(stages)
        place = me.warp % uint32(warps_per_slot) * uint32(FRAG_ROWS * pitch)
        return uint32(shared + slot * uint32(slot_bytes) + place)

    @cuda.jit(device=True, forceinline=True)
    def row_address(args, segment, row):
        """Where a query row starts."""
        request = segment.request
        head_row, num_rows = int32(int32(segment.first_row) + row), int32(request.num_nodes * group)
        if head_row >= num_rows:  # not all the same row: many blocks would ask one place in L2 for it
            here = uint32(max(int32(1), int32(num_rows - int32(segment.first_row))))
            head_row = int32(int32(segment.first_row) + int32(uint32(row) - ptx.divide_u32(row, here) * here))
        token = request.token_start + int64(uint32(head_row) // uint32(group))
        head = segment.kv_head * group + int64(uint32(head_row) % uint32(group))
        return ptx.global_address(args.q, token * args.q_stride_token + head * args.q_stride_head)

    @cuda.jit(device=True, forceinline=True)
    def load_queries(me, args, shared, record, turn, first_row, queries):
        ptx.unroll_loops()
        lane, segment, waiting = int32(me.lane), load_segment(record), waiting_rows(me, shared, turn)
        piece = uint32(lane % lanes * CHUNK_BYTES)
        # Rows 0-7 and 8-15 of the first 8 columns, then of the next 8.
        fragment = waiting + uint32(lane % 16 * pitch + lane // 16 * 16)
        mine = uint32(shared + me.warp * uint32(rest * FRAG_BYTES) + me.lane * uint32(16) + uint32(queries_offset))
        for first_step in range(0, steps, steps_per_part):
            cuda.syncwarp()  # the part before has been read
            for start in range(0, FRAG_ROWS, rows_per_pass):
                row = int32(start + lane // lanes)
                source = row_address(args, segment, int32(first_row + row)) + uint64(piece + uint32(32 * first_step))
                target = uint32(waiting + uint32(row * pitch) + piece)
                for i in range(copies):
                    at = i * lanes * CHUNK_BYTES
                    ptx.cp_async_16(target + uint32(at), source + uint64(at))
            ptx.cp_async_commit()
            ptx.cp_async_wait(NONE_PENDING)
            cuda.syncwarp()  # publishes the rows to the warp
            for i in range(steps_per_part):
                x, k = ptx.ldmatrix_x4(fragment + uint32(32 * i)), first_step + i
                if k < kept:
                    queries[4 * k], queries[4 * k + 1], queries[4 * k + 2], queries[4 * k + 3] = x[0], x[1], x[2], x[3]
                else:
                    ptx.store_shared_v4_u32(mine + uint32((k - kept) * FRAG_BYTES), x)

    return load_queries


def step_registers_of(geometry):
    """32-bit registers of the operands of a k16 step."""
    return 2 * geometry.key_frags + (4 if geometry.query_rest else 0)


def make_multiply_keys(spec, geometry):
    """``multiply_keys(me, shared, tile, queries, fragments, s, begin, end)``: steps ``begin`` to ``end`` of Q K^T.

    ``tile`` is the address of the tile's K rows.  A call that begins with step 0 starts the sums anew.
    """
    steps, kept, rest = geometry.query_steps, geometry.query_steps_kept, geometry.query_rest
    key_frags, team_keys, row_teams, has_roles = (
        geometry.key_frags, geometry.team_keys, geometry.row_teams, geometry.has_roles,
    )  # fmt: skip
    k_pitch, queries_offset = geometry.k_pitch, geometry.queries_offset
    row_stride, key_pairs = 2 * key_frags, key_frags // 2
    step_registers, ahead = step_registers_of(geometry), geometry.steps_ahead
    multiply = make_multiply(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def load_step(keys, mine, k, fragments):
        """Operands of step ``k``: keys, and queries if they have no register of their own."""
        ptx.unroll_loops()
        here = k % (ahead + 1) * step_registers
        for pair in range(key_pairs):
            x = ptx.ldmatrix_x4(keys + uint32(pair * 16 * k_pitch + k * 32))
            at = here + 4 * pair
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]
        if k >= kept:
            x = ptx.load_shared_v4_u32(mine + uint32((k - kept) * FRAG_BYTES))
            at = here + 4 * key_pairs
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply_keys(me, shared, tile, queries, fragments, s, begin, end):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        # Matrices of the ldmatrix: keys 0-7 and then 8-15, of each the first and then the second 8 columns.
        key, half = lane % uint32(8) + lane // uint32(16) * uint32(8), lane // uint32(8) % uint32(2)
        if not has_roles:
            key = uint32(key + warp // uint32(row_teams) * uint32(team_keys))
        keys = uint32(tile + key * uint32(k_pitch) + half * uint32(16))
        mine = uint32(shared + warp * uint32(rest * FRAG_BYTES) + lane * uint32(16) + uint32(queries_offset))
        if begin == 0:
            for i in range(2 * row_stride):
                s[i] = ZERO
            for k in range(min(ahead, steps)):
                load_step(keys, mine, k, fragments)
        for k in range(begin, end):
            if k + ahead < steps:
                load_step(keys, mine, k + ahead, fragments)
            here = k % (ahead + 1) * step_registers
            if k < kept:
                a = (queries[4 * k], queries[4 * k + 1], queries[4 * k + 2], queries[4 * k + 3])
            else:
                q = here + 4 * key_pairs
                a = (fragments[q], fragments[q + 1], fragments[q + 2], fragments[q + 3])
            for j in range(key_frags):
                up, b = 2 * j, here + 2 * j
                low = up + row_stride
                c = multiply(a, (fragments[b], fragments[b + 1]), (s[up], s[up + 1], s[low], s[low + 1]))
                s[up], s[up + 1], s[low], s[low + 1] = c[0], c[1], c[2], c[3]

    return multiply_keys
