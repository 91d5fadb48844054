"""Best-first draft trees, one block a request.  The maths and the order of nodes: nbverify/tree/build.py.

Arguments  (B = requests, D = positions, K = candidates a position, N = nodes of a tree at most)
    tokens       [B, D, K]  int32 or int64  read    candidates, best first
    logprobs     [B, D, K]  float32         read    not increasing along K; -inf: no such candidate
    root_tokens  [B]        int32 or int64  read
    budgets      [B]        int32           read    drafted nodes at most; negative: the request does not exist
    num_nodes    [B]        int32           write   with the root; 0 for a request that does not exist
    parents      [B, N]     int32           write   -1 for the root and for padding
    node_tokens  [B, N]     int64           write   0 for padding
    depths       [B, N]     int32           write   0 for padding
    scores       [B, N]     float32         write   0 for the root, -inf for padding
    flags        [B]        int32           write   of BuildFlag; a flagged request gets its root alone

Launch      grid = B blocks; threads: one for each entry of the table, whole warps, 128 to 1024;
            static shared memory: 4 (D + 1) (K + 1) + 16 N bytes, 25 KB at most.
Work        all threads load and check the log-probabilities; warp 0 takes the nodes; all threads write them out.
Frontier    The candidates are the next untaken child of every taken node, at most one each: so the candidate of node p
            lies in slot p, and taking it leaves its next sibling there; the new node brings a slot with its first
            child.  Slot p belongs to lane p % 32, which alone reads and writes it.  A lane knows the best of its slots,
            and the warp finds the best of the lanes in the order of build.py:

                larger score, then smaller tie = position << 18 | rank << 11 | parent

            by one reduction of the score, as a whole number that orders alike.  Mostly one lane holds that score and
            hands its tie on; of several, one more reduction finds the smallest tie.  Then the lane of slot p looks
            through its slots again, N / 32 at most, and the lane of the new slot compares it with its best.
Table       Log-probabilities lie in shared memory as [D + 1, K + 1] with a border of -inf: the sibling after the last
            rank, and the child below the last position, are found there like any other and never taken.
Time        N - 1 rounds, each of one or two reductions and N / 32 slots, whatever the values.  Each round waits for the
            one before, so the time is that of a round times the budget: 20 us for 64 on an H200 with a warm L2, launch
            included.
            A binary heap of one thread would make two sifts of 6 levels a round, each level a trip to shared memory and
            a comparison.
Numerics    Scores are float32, one rounded sum for each edge.  No score is -0 (the root's is +0), none is NaN (a sum
            that is not above -inf becomes -inf), so comparisons are those of the definition.
"""

import math

from numba import cuda, float32, int32, int64, uint32
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.indices import load_index
from nbverify.kernels.softmax import NEG_INF, ZERO

RANK_SHIFT = 11  # parents up to 1024 below it
POSITION_SHIFT = 18  # ranks up to 64: one more than exists
PARENT_MASK = (1 << RANK_SHIFT) - 1
RANK_MASK = (1 << (POSITION_SHIFT - RANK_SHIFT)) - 1
LANE_MASK = WARP - 1
LAST_TIE = int32(0x7FFFFFFF)
SIGN = -(2**31)
POS_INF = float32(math.inf)
NO_PARENT = int32(-1)


@cuda.jit(device=True, forceinline=True)
def extend(score, logprob):
    """Score of a path with one more edge; -inf: no candidate."""
    total = libdevice.fadd_rn(score, logprob)
    return total if total > NEG_INF else NEG_INF


@cuda.jit(device=True, forceinline=True)
def better(score, tie, other_score, other_tie):
    """The first of two candidates.  Without branches: the lanes would part at each and have to meet again."""
    is_other = (other_score > score) | ((other_score == score) & (other_tie < tie))
    return cuda.selp(is_other, other_score, score), cuda.selp(is_other, other_tie, tie)


@cuda.jit(device=True, forceinline=True)
def order_of(score):
    """A u32 that orders as the scores do: of negative ones all bits turn round, of others the sign."""
    bits = libdevice.float_as_int(score)
    return uint32(bits ^ (bits >> 31 | int32(SIGN)))


@cuda.jit(device=True, forceinline=True)
def score_of(order):
    """The score that :func:`order_of` made this of."""
    bits = int32(order)
    return libdevice.int_as_float(int32(bits ^ (~(bits >> 31) | int32(SIGN))))


@cuda.jit(device=True, forceinline=True)
def best_of_warp(score, tie):
    """The first candidate of all lanes, in every lane; its tie is of no use if no lane has one (-inf)."""
    order = order_of(score)
    top = ptx.warp_max_u32(order)
    holders = uint32(cuda.ballot_sync(uint32(FULL_WARP), order == top))
    if holders & uint32(holders - uint32(1)) == uint32(0):
        return score_of(top), cuda.shfl_sync(uint32(FULL_WARP), tie, int32(cuda.ffs(holders) - 1))
    first = tie if order == top else LAST_TIE
    return score_of(top), int32(ptx.warp_min_u32(uint32(first)))


def make_body(depth, top_k, max_nodes, threads, bad_budget, bad_logprob, bad_order):
    """``build(args)`` for D = depth, K = top_k, N = max_nodes."""
    D, K, N = depth, top_k, max_nodes
    columns = K + 1
    table_size = (D + 1) * columns

    def build(args):
        ptx.keep_loops()  # a third of the code, which comes from memory at each launch
        table = cuda.shared.array(table_size, float32)
        slot_scores = cuda.shared.array(N, float32)
        slot_ties = cuda.shared.array(N, int32)
        taken_scores = cuda.shared.array(N, float32)
        taken_ties = cuda.shared.array(N, int32)
        taken = cuda.shared.array(1, int32)
        request = int32(cuda.blockIdx.x)
        thread = int32(cuda.threadIdx.x)
        budget = int32(args.budgets[uint32(request)])

        is_bad = False
        i = thread
        while i < table_size:
            position, rank = i // columns, i % columns
            value = NEG_INF
            if position < D and rank < K:
                value = args.logprobs[uint32((request * D + position) * K + rank)]
                is_bad = is_bad or not value < POS_INF  # NaN or +inf
            table[uint32(i)] = value
            i = int32(i + threads)
        any_bad = cuda.syncthreads_or(int32(is_bad))  # publishes the table
        is_unordered = False
        i = thread
        while i < table_size:
            if i % columns < K:
                is_unordered = is_unordered or table[uint32(i)] < table[uint32(i + 1)]
            i = int32(i + threads)
        any_unordered = cuda.syncthreads_or(int32(is_unordered))

        flag = int32(0)
        if budget >= N:
            flag = int32(bad_budget)
        elif any_bad != 0:
            flag = int32(bad_logprob)
        elif any_unordered != 0:
            flag = int32(bad_order)
        if budget < 0:
            flag = int32(0)  # nothing of it is looked at
        room = budget if flag == 0 else int32(0)

        if thread < WARP:
            best, best_tie = NEG_INF, LAST_TIE  # of this lane's slots
            if thread == 0:
                best, best_tie = extend(ZERO, table[0]), int32(0)
                slot_scores[0], slot_ties[0] = best, best_tie
                taken_scores[0] = ZERO
            num = int32(1)
            while num <= room:
                score, tie = best_of_warp(best, best_tie)
                if score == NEG_INF:
                    break  # in all lanes alike: no candidate is left
                position = int32(tie >> POSITION_SHIFT)
                rank = int32((tie >> RANK_SHIFT) & RANK_MASK)
                parent = int32(tie & PARENT_MASK)
                at = int32(position * columns + rank)
                sibling = table[uint32(at + 1)]
                child = table[uint32((position + 1) * columns)]
                if thread == int32(parent & LANE_MASK):
                    best = extend(taken_scores[uint32(parent)], sibling)
                    best_tie = int32(tie + (1 << RANK_SHIFT))
                    slot_scores[uint32(parent)], slot_ties[uint32(parent)] = best, best_tie
                    slot = thread
                    while slot < num:
                        best, best_tie = better(best, best_tie, slot_scores[uint32(slot)], slot_ties[uint32(slot)])
                        slot = int32(slot + WARP)
                if thread == int32(num & LANE_MASK):
                    first = extend(score, child)
                    first_tie = int32((position + 1) << POSITION_SHIFT | num)
                    slot_scores[uint32(num)], slot_ties[uint32(num)] = first, first_tie
                    taken_scores[uint32(num)], taken_ties[uint32(num)] = score, tie
                    best, best_tie = better(best, best_tie, first, first_tie)
                num = int32(num + 1)
            if thread == 0:
                taken[0] = num
        cuda.syncthreads()  # publishes the nodes

        num = taken[0] if budget >= 0 else int32(0)
        node = thread
        while node < N:
            parent, node_depth, score, token = NO_PARENT, int32(0), NEG_INF, int64(0)
            if node < num:
                score = taken_scores[uint32(node)]
                if node == 0:
                    token = load_index(args.root_tokens, args.root_tokens_words, request)
                else:
                    tie = taken_ties[uint32(node)]
                    position = int32(tie >> POSITION_SHIFT)
                    rank = int32((tie >> RANK_SHIFT) & RANK_MASK)
                    parent = int32(tie & PARENT_MASK)
                    node_depth = int32(position + 1)
                    token = load_index(args.tokens, args.tokens_words, (request * D + position) * K + rank)
            out = uint32(request * N + node)
            args.parents[out] = parent
            args.node_tokens[out] = token
            args.depths[out] = node_depth
            args.scores[out] = score
            node = int32(node + threads)
        if thread == 0:
            args.num_nodes[uint32(request)] = num
            args.flags[uint32(request)] = flag

    return build
