"""Move the accepted nodes' KV to the front of the window, for all planes, and keep the books: one launch.

For request b, with window W (slots), path a_0 .. a_(m-1) and each plane's rows:

    row[W[i]] = old row[W[a_i]]    i < m        "move" (moves=True)
    kept_i    = i  ("move")   or   a_i  ("keep": nothing moves)
    req_to_token[req_pool_indices[b], prefix + i] = W[kept_i]        where there is a table
    new_prefix_lens[b] = prefix + m;   freed = the other slots of the window, in order

Why there is no hazard
    A thread owns a column: the same 16, 4 or 1 bytes of all m rows.  It loads its column of all m sources into
    registers, then stores it to all m targets.  No other thread touches these bytes, and a thread's own loads and
    stores keep their order (ptx.py: volatile, with a memory clobber).  So this is gather, then scatter, for any
    permutation, cycles included, without a barrier or shared memory; and columns may be cut into blocks anywhere.
    Rows that stay where they are (a_i == i: the chain prefix of most paths) are neither loaded nor stored; no other row
    goes to them, since the nodes of a path differ.

Who does what
    Block (record, request), the request running fastest.  A record is up to COMPACT_THREADS columns of one plane
    (records.py); in "keep" there is one block a request.  Every block finds out by itself whether its request is
    sound, from buffers that this launch does not write: all come to the same verdict, or nothing would be all or
    nothing.  The block of record 0 also keeps the books.  It alone reads prefix_lens, for new_prefix_lens may be the
    same memory: so a bad prefix (BAD_PREFIX) does not stop the moves inside the request's own window.

Arguments (B = max_requests, N = max_nodes, rows = max_depth + 1; index: int32 or int64)
    records            [records, RECORD_FIELDS]  int64   read    planes, see records.py
    out_cache_loc      [num_rows]                index   read    W of request b starts at qo_indptr[b]
    qo_indptr          [B + 1]                   index   read
    accept_nodes       [B, rows]                 int32   read    beyond accept_lens not read
    accept_lens        [B]                       int32   read
    num_nodes          [B]                       int32   read    0: padding
    prefix_lens        [B]                       index   read
    new_prefix_lens    [B]                       index   write   may be prefix_lens
    freed_slots        [num_rows] or absent      index   write   all of it: -1 where no slot is freed
    freed_counts       [B] or absent             int32   write
    flags              [B]                       int32   write   CompactFlag
    req_to_token       [R, max_context] or absent int32  write
    req_pool_indices   [B] or absent             index   read

Launch      grid = max(1, records) * B blocks of COMPACT_THREADS threads, N words of dynamic shared memory.
Traffic     2 * m * row bytes a request and plane, less the rows that stay; latency bound at serving sizes.
Registers   4 * rows for the columns, so the loads of a whole path are in flight at once.
Offsets     64-bit.  Slots are below 2^31 once they are checked, and are kept as int32.
"""

from numba import cuda, int32, int64, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.indices import load_index
from nbverify.tree.kernels.memory import store_index
from nbverify.tree.kernels.records import (
    BASE,
    COMPACT_THREADS,
    END_UNIT,
    FIRST_UNIT,
    HEAD_STRIDE,
    HEAD_UNITS,
    PAGE_SIZE,
    PAGE_STRIDE,
    RECORD_FIELDS,
    SLOT_STRIDE,
    UNIT_BYTES,
    CompactFlag,
)

OK, BAD_WINDOW, BAD_LENGTH = int(CompactFlag.OK), int(CompactFlag.BAD_WINDOW), int(CompactFlag.BAD_LENGTH)
BAD_SLOT, BAD_NODE = int(CompactFlag.BAD_SLOT), int(CompactFlag.BAD_NODE)
DUPLICATE_NODE, BAD_PREFIX = int(CompactFlag.DUPLICATE_NODE), int(CompactFlag.BAD_PREFIX)
NOTHING_FREED = -1
WIDE_BYTES, WORD_BYTES = 16, 4


def make_body(rows, moves):
    """``compact(args)`` for paths of at most ``rows`` nodes; ``moves``: the "move" convention, else "keep"."""
    move_column = make_move_column(rows)

    def compact(args):
        window = cuda.shared.array(0, int32)
        path = cuda.shared.array(rows, int32)
        sources = cuda.shared.array(rows, int64)
        targets = cuda.shared.array(rows, int64)
        thread = int32(cuda.threadIdx.x)
        record = int32(ptx.divide_u32(cuda.blockIdx.x, args.max_requests))
        request = int32(cuda.blockIdx.x - record * args.max_requests)

        # The plane's numbers first: they are on their way while the request is looked at.
        of_plane = int64(record) * RECORD_FIELDS
        if moves:
            plane = (args.records[of_plane + PAGE_SIZE], args.records[of_plane + PAGE_STRIDE],
                     args.records[of_plane + SLOT_STRIDE])  # fmt: skip
            unit, end_unit = args.records[of_plane + FIRST_UNIT] + thread, args.records[of_plane + END_UNIT]
            head_units, unit_bytes = args.records[of_plane + HEAD_UNITS], args.records[of_plane + UNIT_BYTES]
            head = int64(ptx.divide_u32(unit, head_units))
            in_head = (unit - head * head_units) * unit_bytes
            column = args.records[of_plane + BASE] + head * args.records[of_plane + HEAD_STRIDE] + in_head

        num_nodes, kept = args.num_nodes[request], args.accept_lens[request]
        first = load_index(args.qo_indptr, args.qo_indptr_words, request)
        last = load_index(args.qo_indptr, args.qo_indptr_words, request + 1)
        has_rows = first >= 0 and first <= last and last <= args.num_rows
        verdict = int32(OK)
        if num_nodes != 0:
            if not has_rows or num_nodes < 0 or num_nodes > args.max_nodes or num_nodes > last - first:
                verdict = int32(BAD_WINDOW)
            elif kept < 1 or kept > num_nodes or kept > rows:
                verdict = int32(BAD_LENGTH)
        if num_nodes == 0 or verdict != OK:
            num_nodes, kept = int32(0), int32(0)  # nothing to look at: but all threads go to every barrier

        bad_slot, bad_node, again = False, False, False
        j = thread
        while j < num_nodes:
            slot = load_index(args.out_cache_loc, args.out_cache_loc_words, first + j)
            bad_slot = bad_slot or slot < 0 or slot >= args.num_slots
            window[j] = int32(slot)
            j = int32(j + COMPACT_THREADS)
        if thread < kept:
            node = args.accept_nodes[int64(request) * rows + thread]
            bad_node = node < 0 or node >= num_nodes
            path[thread] = node
        any_bad_slot = cuda.syncthreads_or(int32(bad_slot))  # publishes the window and the path
        any_bad_node = cuda.syncthreads_or(int32(bad_node))
        if thread < kept:
            i = int32(0)
            while i < thread:
                again = again or path[i] == path[thread]
                i = int32(i + 1)
        any_again = cuda.syncthreads_or(int32(again))
        if any_bad_slot != 0:
            verdict = int32(BAD_SLOT)
        elif any_bad_node != 0:
            verdict = int32(BAD_NODE)
        elif any_again != 0:
            verdict = int32(DUPLICATE_NODE)
        if verdict != OK:
            num_nodes, kept = int32(0), int32(0)

        if moves:
            if thread < kept:
                sources[thread] = row_offset(plane, window[path[thread]])
                targets[thread] = row_offset(plane, window[thread])
            cuda.syncthreads()  # publishes the offsets
            if unit < end_unit:
                move_column(column, unit_bytes, sources, targets, kept)

        if record == 0:
            has_table, has_freed = args.req_to_token.size > 0, args.freed_counts.size > 0
            prefix = load_index(args.prefix_lens, args.prefix_lens_words, request)
            place = int64(0)  # of the first kept slot in the table
            if kept > 0:
                has_room = prefix >= 0 and prefix <= args.max_context - kept  # no sum that could wrap
                if has_table:
                    row = load_index(args.req_pool_indices, args.req_pool_indices_words, request)
                    has_room = has_room and row >= 0 and row < args.num_table_rows
                    place = row * args.max_context + prefix
                if not has_room:
                    verdict = int32(BAD_PREFIX)
                    num_nodes, kept = int32(0), int32(0)
            if has_table and thread < kept:
                args.req_to_token[place + thread] = window[thread if moves else path[thread]]
            if has_freed:
                j = thread
                while j < num_nodes:
                    # Where slot j goes: past the slots before it that are free too.
                    before, is_kept = int32(0), False
                    if moves:
                        before, is_kept = kept, j < kept
                    else:
                        i = int32(0)
                        while i < kept:
                            before = int32(before + (1 if path[i] < j else 0))
                            is_kept = is_kept or path[i] == j
                            i = int32(i + 1)
                    if not is_kept:
                        store_index(args.freed_slots, args.freed_slots_words, first + j - before, window[j])
                    j = int32(j + COMPACT_THREADS)
                if has_rows:
                    end = args.num_rows if request == args.max_requests - 1 else last  # the last one clears the tail
                    free_row = first + num_nodes - kept + thread
                    while free_row < end:
                        store_index(args.freed_slots, args.freed_slots_words, free_row, NOTHING_FREED)
                        free_row += COMPACT_THREADS
            cuda.syncthreads()  # all threads have read the prefix length: its place may be that of the new one
            if thread == 0:
                store_index(args.new_prefix_lens, args.new_prefix_lens_words, request, prefix + kept)
                args.flags[request] = verdict
                if has_freed:
                    args.freed_counts[request] = int32(num_nodes - kept)

    return compact


@cuda.jit(device=True)
def row_offset(plane, slot):
    """Bytes from the plane's base to the row of a slot, int64."""
    page_size, page_stride, slot_stride = plane
    page = int64(ptx.divide_u32(slot, page_size))
    return page * page_stride + (int64(slot) - page * page_size) * slot_stride


def make_move_column(rows):
    """``move_column(column, unit_bytes, sources, targets, num_moves)``: one thread's bytes of every row of a path."""
    words = 4 * rows

    @cuda.jit(device=True)
    def move_wide(column, sources, targets, num_moves):
        ptx.unroll_loops()  # constant indices, or ``held`` would be in local memory
        held = cuda.local.array(words, uint32)
        for i in range(rows):
            if i < num_moves and sources[i] != targets[i]:
                a, b, c, d = ptx.load_global_v4_u32(uint64(column + sources[i]))
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = a, b, c, d
        for i in range(rows):
            if i < num_moves and sources[i] != targets[i]:
                four = held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]
                ptx.store_global_v4_u32(uint64(column + targets[i]), four)

    @cuda.jit(device=True)
    def move_narrow(column, unit_bytes, sources, targets, num_moves):
        ptx.unroll_loops()
        held = cuda.local.array(rows, uint32)
        for i in range(rows):
            if i < num_moves and sources[i] != targets[i]:
                source = uint64(column + sources[i])
                if unit_bytes == WORD_BYTES:
                    held[i] = ptx.load_global_u32(source)
                else:
                    held[i] = ptx.load_global_u8(source)
        for i in range(rows):
            if i < num_moves and sources[i] != targets[i]:
                target = uint64(column + targets[i])
                if unit_bytes == WORD_BYTES:
                    ptx.store_global_u32(target, held[i])
                else:
                    ptx.store_global_u8(target, held[i])

    @cuda.jit(device=True)
    def move_column(column, unit_bytes, sources, targets, num_moves):
        if unit_bytes == WIDE_BYTES:
            move_wide(column, sources, targets, num_moves)
        else:
            move_narrow(column, unit_bytes, sources, targets, num_moves)

    return move_column
