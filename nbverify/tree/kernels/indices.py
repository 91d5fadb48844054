"""The next step's ``kv_indptr`` and ``kv_indices``: a ragged gather from the table of slots.

With len[b] = prefix_lens[b], or 0 where that or the request's row of the table is impossible:

    S[b]        = sum(len[:b])
    kv_indptr   = min(S, capacity)
    kv_indices[S[b] + i] = req_to_token[req_pool_indices[b], i]      i < len[b] and S[b] + i < capacity

Who does what
    num_parts blocks a request.  Each adds up the lengths of the requests before its own, thread by thread and then over
    the block: B numbers, most often one a thread, are quicker read by every block than handed over by one.  Then the
    parts of a request take its tiles of INDICES_THREADS * ENTRIES_PER_THREAD entries in turn, all loads of a tile in
    flight at once; a part without a tile leaves at once.  Part 0 writes the request's end in kv_indptr, and its flag.

Arguments (B = max_requests; index: int32 or int64)
    req_to_token       [num_table_rows, max_context]  int32   read
    req_pool_indices   [B]                            index   read
    prefix_lens        [B]                            index   read
    kv_indptr          [B + 1]                        index   write
    kv_indices         [capacity]                     index   write   below kv_indptr[B]
    flags              [B]                            int32   write   IndexFlag

Launch      grid = num_parts * B blocks of INDICES_THREADS threads; its warps' sums in static shared memory.
Traffic     4 bytes read and 4 or 8 written an entry: bandwidth bound when prefixes are long.
Offsets     64-bit in the table and in the sums; entries of a request and of the list are below 2^31.
"""

from numba import cuda, int32, int64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.indices import load_index
from nbverify.tree.kernels.memory import store_index
from nbverify.tree.kernels.records import ENTRIES_PER_THREAD, INDICES_THREADS, IndexFlag

OK, BAD_ROW, BAD_LENGTH, CUT = (int(flag) for flag in IndexFlag)
WARPS = INDICES_THREADS // WARP
TILE = INDICES_THREADS * ENTRIES_PER_THREAD


def make_body():
    """``prefix_indices(args)``."""

    def prefix_indices(args):
        thread = int32(cuda.threadIdx.x)
        request = int32(ptx.divide_u32(cuda.blockIdx.x, args.num_parts))
        part = int32(cuda.blockIdx.x - request * args.num_parts)

        verdict, length = verdict_of(args, request), length_of(args, request)
        if part == 0 or int64(part) * TILE < length:  # the same for the whole block, which has a barrier ahead
            start = int64(0)
            b = thread
            while b < request:
                start += length_of(args, b)
                b = int32(b + INDICES_THREADS)
            start = add_over_block(start, thread)

            room = max(int64(0), min(length, args.capacity - start))
            if part == 0 and thread == 0:
                if request == 0:
                    store_index(args.kv_indptr, args.kv_indptr_words, 0, 0)
                store_index(args.kv_indptr, args.kv_indptr_words, request + 1, min(start + length, args.capacity))
                args.flags[request] = int32(CUT) if room < length else int32(verdict)

            row = load_index(args.req_pool_indices, args.req_pool_indices_words, request) * args.max_context
            slots = cuda.local.array(ENTRIES_PER_THREAD, int32)
            first = int64(part) * TILE + thread
            while first < room:
                copy_entries(args, slots, row, start, first, room)
                first += args.num_parts * TILE

    return prefix_indices


@cuda.jit(device=True)
def copy_entries(args, slots, row, start, first, room):
    """This thread's entries of a tile: all loads before the first store."""
    ptx.unroll_loops()
    for k in range(ENTRIES_PER_THREAD):
        if first + k * INDICES_THREADS < room:
            slots[k] = args.req_to_token[row + first + k * INDICES_THREADS]
    for k in range(ENTRIES_PER_THREAD):
        if first + k * INDICES_THREADS < room:
            at = start + first + k * INDICES_THREADS
            store_index(args.kv_indices, args.kv_indices_words, at, slots[k])


@cuda.jit(device=True)
def verdict_of(args, request):
    """The flag of a request, as far as it depends on its own numbers."""
    row = load_index(args.req_pool_indices, args.req_pool_indices_words, request)
    if row < 0 or row >= args.num_table_rows:
        return int32(BAD_ROW)
    length = load_index(args.prefix_lens, args.prefix_lens_words, request)
    if length < 0 or length > args.max_context:
        return int32(BAD_LENGTH)
    return int32(OK)


@cuda.jit(device=True)
def length_of(args, request):
    """Entries of a request, int64."""
    if verdict_of(args, request) != OK:
        return int64(0)
    return load_index(args.prefix_lens, args.prefix_lens_words, request)


@cuda.jit(device=True)
def add_over_block(value, thread):
    """The sum of ``value`` over all threads of the block, to each of them."""
    of_warps = cuda.shared.array(WARPS, int64)
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL_WARP, value, step)
    if thread % WARP == 0:
        of_warps[thread // WARP] = value
    cuda.syncthreads()  # publishes the warps' sums
    total = int64(0)
    for warp in range(WARPS):
        total += of_warps[warp]
    return total
