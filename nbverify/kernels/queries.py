"""Query rows on their way to the warps that multiply them, once a segment: ``make_load_queries``."""

from numba import cuda, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.named_barriers import QUERIES
from nbverify.kernels.row_copies import CHUNK_BYTES
from nbverify.kernels.rows import make_advance, make_swizzle
from nbverify.kernels.scores import FRAG_BYTES, STEP_BYTES, make_find_fragment, make_find_step
from nbverify.kernels.segments import load_segment
from nbverify.kernels.tiles import FRAG_ROWS

NONE_PENDING = 0


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
    """A score warp's fragments, once a segment: ``request(me, args, shared, record, turn, first_row)``, and then
    ``load_queries(me, args, shared, record, turn, first_row, queries)``.

    ``first_row`` is the first row, in the row unit, of the warp's own fragment.  Its rows come by cp.async into slots
    of the ring that are not used yet, the last ones from turn ``turn`` on; in parts of some columns where the ring is
    small.  ``request`` begins with the first part, before the keys are asked for: behind them it would wait.  A warp
    that owns no fragment asks for nothing.

    From there warps that share fragments take, each, their columns of all of them, as operands into ``queries``: step
    ``k`` of fragment ``j`` of those (``make_find_fragment``) is number ``k * shared_frags + j``.  Those for which there
    is no register lie in shared memory, each lane its own 16 bytes.
    A row past the end reads some other row: it is computed and not written.
    """
    steps, kept, rest = geometry.query_steps, geometry.query_steps_kept, geometry.query_rest
    stages, slot_bytes, pitch = geometry.stages, geometry.slot_bytes, geometry.staging_pitch
    first_slot, warps_per_slot, threads = stages - geometry.staging_slots, geometry.staging_warps, geometry.threads
    steps_per_pass, parts, frags = steps // geometry.staging_parts, geometry.column_parts, geometry.shared_frags
    queries_offset, lanes, has_helpers = geometry.queries_offset, geometry.staging_lanes, parts > frags
    rows_per_pass, copies = WARP // lanes, STEP_BYTES * steps_per_pass // (CHUNK_BYTES * lanes)
    swizzle, advance, row_address = make_swizzle(pitch), make_advance(pitch), _make_row_address(spec)
    (first_column, step_columns), find_fragment = make_find_step(geometry), make_find_fragment(geometry)

    @cuda.jit(device=True, forceinline=True)
    def waiting_rows(shared, turn, warp):
        """Where the query rows of a score warp wait."""
        slot = uint32(uint32(turn >> 1) + uint32(first_slot) + warp // uint32(warps_per_slot)) % uint32(stages)
        place = warp % uint32(warps_per_slot) * uint32(FRAG_ROWS * pitch)
        return uint32(shared + slot * uint32(slot_bytes) + place)

    @cuda.jit(device=True, forceinline=True)
    def sync_readers():
        """The warps that share fragments, and all others (``make_meet_readers``)."""
        if parts > 1:
            ptx.barrier_sync(uint32(QUERIES), uint32(threads))
        else:
            cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def copy_part(me, args, shared, record, turn, first_row, first_step):
        """Begin to copy the columns of some steps, of the warp's own rows."""
        if not has_helpers or me.warp < uint32(frags):
            copy_own_part(me, args, shared, record, turn, first_row, first_step)

    @cuda.jit(device=True, forceinline=True)
    def copy_own_part(me, args, shared, record, turn, first_row, first_step):
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
                sync_readers()  # the part before has been read
                copy_part(me, args, shared, record, turn, first_row, first_step)
            ptx.cp_async_wait(NONE_PENDING)
            sync_readers()  # publishes the rows to them
            for j in range(frags):
                owner = uint32(me.warp - part + find_fragment(part, j))
                fragment = uint32(waiting_rows(shared, turn, owner) + place)
                for i in range(steps_per_pass // parts):
                    x = ptx.ldmatrix_x4(advance(fragment, step_columns(i)))
                    q = (first_step // parts + i) * frags + j
                    if q < kept:
                        queries[4 * q], queries[4 * q + 1], queries[4 * q + 2], queries[4 * q + 3] = (
                            x[0], x[1], x[2], x[3],
                        )  # fmt: skip
                    else:
                        ptx.store_shared_v4_u32(mine + uint32((q - kept) * FRAG_BYTES), x)

    return request, load_queries


def make_meet_readers(geometry):
    """``meet_readers()``: once a segment, for warps with roles that load no queries: the barriers of those that do.

    They need not wait there.  They do because racecheck takes an access for a later one only if its warp has waited at
    more barriers: when just score warps waited here, it reported races of their P with its readers, who had waited at
    as many (as it did when one barrier more, of one warp by itself, was put into a kernel that it finds clean).
    """
    meetings, threads = geometry.query_barriers, geometry.threads

    @cuda.jit(device=True, forceinline=True)
    def meet_readers():
        ptx.unroll_loops()
        for _ in range(meetings):
            ptx.barrier_sync(uint32(QUERIES), uint32(threads))

    return meet_readers
