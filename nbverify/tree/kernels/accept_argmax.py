"""The target's token at every node, from logits (stage 1 of 2 of greedy acceptance; accept.py reads what it leaves).

    token of row r = the lowest t with logits[r, t] = max over t of logits[r, t]

A NaN counts as -inf and is reported; a row with nothing above -inf has token 0 and is reported too.

Arguments (B requests, at most N nodes each, V = vocab, S = SPLITS, R = rows of the logits)
    num_nodes    [B]        int32           read    out of range: the request has no rows
    qo_indptr    [B + 1]    int32 or int64  read    starts only; rows that are not all there: no rows either
    logits       [R, V]     float32 or 16 bits  read    row stride free, in elements
    partials     [R, S]     int64           write   largest of a split: see ``pack``; rows of nodes only
    num_requests, num_rows, row_stride, vocab   int64

Who      A warp reads a split of a row: no barrier, and no words between blocks.  Rows of nodes that do not exist cost
         nothing: every block adds up the num_nodes, and an item of work is found in the sums by bisection.
Launch   as many blocks as are resident, 256 threads; B + 1 words of dynamic shared memory.
Traffic  the logits once, in 16-byte loads, four in flight a lane; S * 8 bytes a row of partials.
Numerics comparisons only, so any order gives the same token.
"""

from numba import cuda, int32, int64, uint32

from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.indices import load_index
from nbverify.kernels.schedule import inclusive_scan
from nbverify.tree.kernels.accept_rules import ARGMAX_THREADS as THREADS
from nbverify.tree.kernels.accept_rules import SPLITS
from nbverify.tree.kernels.logit_rows import MINUS_INF, NOTHING, Best, key_of, make_open_row, make_scan, visit_best

TOKEN_BITS = 30
LAST_TOKEN = (1 << TOKEN_BITS) - 1


@cuda.jit(device=True)
def pack(best):
    """What a thread has found as an int64: larger is better, lower tokens are larger; its last bit says NaN.

    0 for nothing above -inf and no NaN, so it is neutral under ``better``.
    """
    packed = int64(0)
    if best.token != NOTHING:
        packed = (key_of(best.value) << int64(TOKEN_BITS + 1)) | (int64(LAST_TOKEN - best.token) << int64(1))
    return packed | int64(best.has_nan)


@cuda.jit(device=True)
def better(a, b):
    """The larger of two packed ones, with a NaN noted if either has one."""
    return max(a | int64(1), b | int64(1)) - int64(1) + ((a | b) & int64(1))


@cuda.jit(device=True)
def best_of_warp(packed):
    """``better`` over the lanes of a warp, for all of them."""
    for step in range(5):
        packed = better(packed, cuda.shfl_xor_sync(uint32(FULL_WARP), packed, 1 << step))
    return packed


@cuda.jit(device=True)
def token_of(packed):
    """The token of a packed one; 0 if there is none."""
    if packed <= 1:
        return int64(0)
    return int64(LAST_TOKEN) - ((packed >> int64(1)) & int64(LAST_TOKEN))


def make_body(*, logits_dtype, max_nodes):
    """``argmax(args)``."""
    scan, open_row = make_scan(logits_dtype, visit_best), make_open_row(logits_dtype)

    @cuda.jit(device=True)
    def rows_of(args, b):
        """How many rows request b has; none if its numbers cannot be true."""
        n = int64(args.num_nodes[b])
        first = load_index(args.qo_indptr, args.qo_indptr_words, b)
        if n < 0 or n > max_nodes or first < 0 or first > args.num_rows - n:
            return int32(0)
        return int32(n)

    def argmax(args):
        rows_before = cuda.shared.array(0, int32, 16)  # [B + 1]
        thread, lane = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x % WARP)
        num_requests = int32(args.num_requests)
        if thread == 0:
            rows_before[0] = int32(0)
        b = thread
        while b < num_requests:
            rows_before[b + 1] = rows_of(args, b)
            b = int32(b + THREADS)
        cuda.syncthreads()  # publishes the numbers to warp 0
        if thread < WARP:
            inclusive_scan(rows_before, num_requests, lane)
        cuda.syncthreads()  # publishes their sums

        item = int32(cuda.grid(1) // WARP)
        while item < rows_before[num_requests] * SPLITS:
            node, split = int32(item // SPLITS), int32(item % SPLITS)
            low, high = int32(0), num_requests
            while high - low > 1:  # the request with rows_before[low] <= node < rows_before[low + 1]
                middle = int32((low + high) // 2)
                if rows_before[middle] <= node:
                    low = middle
                else:
                    high = middle
            number = load_index(args.qo_indptr, args.qo_indptr_words, low) + node - rows_before[low]
            row = open_row(args, number)
            per_split = int32((row.num_windows + SPLITS - 1) // SPLITS)
            first = int32(split * per_split)
            end = min(int32(first + per_split), row.num_windows)
            nothing = Best(MINUS_INF, NOTHING, int32(0))
            best = scan(args, row, int32(first + lane), end, int32(WARP), nothing, int32(0))
            packed = best_of_warp(pack(best))
            if lane == 0:
                args.partials[number * SPLITS + split] = packed
            item = int32(item + cuda.gridsize(1) // WARP)

    return argmax
