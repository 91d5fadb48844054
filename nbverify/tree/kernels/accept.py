"""Greedy acceptance: how far the target agrees with a draft tree (stage 2 of 2 if the target comes as logits).

With t[j] the target's token after node j, p[j] the parent and x[j] the token of node j, the path is

    path[0] = 0        path[i + 1] = min { j : p[j] = path[i], x[j] = t[path[i]] }        while there is such a j

of at most D + 1 nodes, and the bonus token is t at its last node.  Nothing on the path waits for the walk: every node
says at once whether it is the one to go to from its parent (an atomic minimum: lowest index first), and one thread then
follows the answers.  A tree in which some parent has a higher number than its child is checked for circles first, by
jumping 1, 2, 4, .. parents up: after ceil(log2 N) rounds everyone is at the root.

Arguments (B requests, at most N nodes each, D = max_depth, R rows, S splits)
    num_nodes      [B]         int32           read    0: no request
    parents        [B, N]      int32           read    first num_nodes of each row; any order, root first
    node_tokens    [B, N]      int64           read    as parents; the root's is not looked at
    qo_indptr      [B + 1]     int32 or int64  read    first row of a request; starts only
    target_tokens  [R]         int32 or int64  read    t by row; absent if it comes as
    partials       [R, S]      int64           read    what accept_argmax.py left
    accept_nodes   [B, D + 1]  int32           write   the path, then -1
    accept_lens    [B]         int32           write   nodes on it; 0: no request, or a flag below BAD_LOGITS
    bonus_tokens   [B]         int64           write   0 where accept_lens is
    flags          [B]         int32           write   accept_rules.AcceptFlag
    accept_index   [B, D + 1]  int32           write   the path as rows, then -1; may be absent
    predict        [R]         int32 or int64  write   t at the rows of the path, others untouched; may be absent
    num_rows                   int64           R

Launch   B blocks, a thread a node up to 256; static shared memory only.
Time     bounded for any data: what is out of range is never used as an index, and a path has at most D + 1 nodes.
"""

from numba import cuda, int32, int64

from nbverify.kernels import ptx
from nbverify.kernels.indices import load_index
from nbverify.tree.kernels.accept_argmax import better, token_of
from nbverify.tree.kernels.accept_rules import NO_NODE, NO_TOKEN, AcceptFlag

OK, NUM_NODES, ROWS = int(AcceptFlag.OK), int(AcceptFlag.NUM_NODES), int(AcceptFlag.ROWS)
ROOT, PARENT, CYCLE = int(AcceptFlag.ROOT), int(AcceptFlag.PARENT), int(AcceptFlag.CYCLE)
BAD_LOGITS = int(AcceptFlag.BAD_LOGITS)


def make_open_tree(max_nodes, threads):
    """Two parts of the start, between which a caller may request what it needs of memory; the whole block calls both.

    ``load_tree(args, b, parents, tokens)`` -> (flag, number of nodes, first row): both to shared memory, requested
    before the number of nodes is known, so that one trip to memory is enough.  What lies past it is not looked at.

    ``check_tree(flag, count, parents)`` -> (flag, number of nodes): begins with a barrier, which publishes what was
    written to shared memory before.  With a flag there are no nodes.
    """
    rounds, two_rounds = (max_nodes - 1).bit_length(), 2 * max_nodes

    @cuda.jit(device=True)
    def load_tree(args, b, parents, tokens):
        ptx.keep_loops()
        n = int64(args.num_nodes[b])
        first_row = load_index(args.qo_indptr, args.qo_indptr_words, b)
        j = int32(cuda.threadIdx.x)
        while j < max_nodes:
            at = int64(b) * max_nodes + j
            parents[j], tokens[j] = args.parents[at], args.node_tokens[at]
            j = int32(j + threads)
        flag = int32(OK)
        if n < 0 or n > max_nodes:
            flag = int32(NUM_NODES)
        elif n > 0 and (first_row < 0 or first_row > args.num_rows - n):
            flag = int32(ROWS)
        return flag, int32(n) if flag == OK else int32(0), first_row

    @cuda.jit(device=True)
    def check_tree(flag, count, parents):
        ptx.keep_loops()
        jumps = cuda.shared.array(two_rounds, int32)  # of a round, and of the next
        thread = int32(cuda.threadIdx.x)
        bad_root, bad_parent, unordered, lost = int32(0), int32(0), int32(0), int32(0)
        j = thread
        while j < count:
            parent = parents[j]  # written by this thread
            if j == 0:
                jumps[j] = int32(0)
                if parent != NO_NODE:
                    bad_root = int32(1)
            else:
                jumps[j] = parent
                if parent < 0 or parent >= count or parent == j:
                    bad_parent = int32(1)
                if parent > j:
                    unordered = int32(1)
            j = int32(j + threads)
        # Barriers that also publish parents and jumps.  All threads get the same answers, so all take the same way.
        any_bad_root = cuda.syncthreads_or(bad_root)
        any_bad_parent = cuda.syncthreads_or(bad_parent)
        if any_bad_root:
            flag = int32(ROOT)
        elif any_bad_parent:
            flag = int32(PARENT)
        elif cuda.syncthreads_or(unordered):  # only then can there be a circle
            source, target = int32(0), int32(max_nodes)
            for _ in range(rounds):
                j = thread
                while j < count:
                    jumps[target + j] = jumps[source + jumps[source + j]]
                    j = int32(j + threads)
                cuda.syncthreads()  # publishes this round to the next, and ends its reads
                source, target = target, source
            j = thread
            while j < count:
                if jumps[source + j] != 0:
                    lost = int32(1)
                j = int32(j + threads)
            if cuda.syncthreads_or(lost):
                flag = int32(CYCLE)
        if flag != OK:
            count = int32(0)
        return flag, count

    return load_tree, check_tree


def make_write_path(max_depth, threads):
    """``write_path(args, b, path, length, first_row)``: accept_nodes, accept_index and accept_lens of a request."""
    width = max_depth + 1

    @cuda.jit(device=True)
    def write_path(args, b, path, length, first_row):
        ptx.keep_loops()
        i = int32(cuda.threadIdx.x)
        while i < width:
            node, row = int32(NO_NODE), int32(NO_NODE)
            if i < length:
                node = path[i]
                row = int32(first_row + node)
            args.accept_nodes[int64(b) * width + i] = node
            if args.accept_index.size > 0:
                args.accept_index[int64(b) * width + i] = row
            i = int32(i + threads)
        if cuda.threadIdx.x == 0:
            args.accept_lens[b] = length

    return write_path


@cuda.jit(device=True)
def store_predict(args, row, token):
    """``predict[row] = token``, if it is wanted."""
    if args.predict.size > 0:
        at = int64(row) * args.predict_words
        args.predict[at] = int32(token)
        if args.predict_words == 2:
            args.predict[at + 1] = int32(token >> int64(32))


def make_body(*, max_nodes, max_depth, threads, splits):
    """``accept_greedy(args)``; ``splits`` is 0 if the target's tokens are given."""
    load_tree, check_tree = make_open_tree(max_nodes, threads)
    write_path = make_write_path(max_depth, threads)
    width = max_depth + 1

    @cuda.jit(device=True)
    def target_of(args, row):
        """(token, whether the row is bad)."""
        ptx.unroll_loops()  # all partials are requested at once
        if splits == 0:
            return load_index(args.target_tokens, args.target_tokens_words, row), False
        packed = int64(0)
        for s in range(splits):
            packed = better(packed, args.partials[row * splits + s])
        return token_of(packed), (packed & int64(1)) == 1 or packed <= 1

    def accept_greedy(args):
        ptx.keep_loops()  # here and in what it calls: a third of the code, which comes from memory at each launch
        parents = cuda.shared.array(max_nodes, int32)
        tokens = cuda.shared.array(max_nodes, int64)
        targets = cuda.shared.array(max_nodes, int64)
        is_bad = cuda.shared.array(max_nodes, int32)
        chosen = cuda.shared.array(max_nodes, int32)  # the child to go to; max_nodes: none
        path = cuda.shared.array(width, int32)
        path_length = cuda.shared.array(1, int32)
        b, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)

        flag, count, first_row = load_tree(args, b, parents, tokens)
        j = thread
        while j < count:
            token, bad = target_of(args, first_row + j)
            targets[j] = token
            is_bad[j] = int32(1) if bad else int32(0)
            chosen[j] = int32(max_nodes)
            j = int32(j + threads)
        flag, count = check_tree(flag, count, parents)  # also publishes the targets, and that nobody is chosen yet
        j = thread
        while j < count:
            if j > 0:
                if tokens[j] == targets[parents[j]]:
                    cuda.atomic.min(chosen, parents[j], j)
            j = int32(j + threads)
        cuda.syncthreads()  # publishes who is chosen
        if thread == 0:
            node, length, bonus = int32(0), int32(0), int64(NO_TOKEN)
            if count == 0:
                node = int32(max_nodes)
            while node < max_nodes and length <= max_depth:
                path[length] = node
                length = int32(length + 1)
                bonus = targets[node]
                if is_bad[node] == 1:
                    flag = int32(BAD_LOGITS)
                node = chosen[node]
            path_length[0] = length
            args.bonus_tokens[b] = bonus
            args.flags[b] = flag
        cuda.syncthreads()  # publishes the path
        length = path_length[0]
        write_path(args, b, path, length, first_row)
        i = thread
        while i < length:
            store_predict(args, first_row + path[i], targets[path[i]])
            i = int32(i + threads)

    return accept_greedy
