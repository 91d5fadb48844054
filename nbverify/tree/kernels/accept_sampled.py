"""Sampled acceptance: the target draws a token at the node reached, and the walk goes to the child that has it.

    path[0] = 0        t[i] ~ target's distribution after path[i]  (sampling.py)
    path[i + 1] = min { j : p[j] = path[i], x[j] = t[i] }          while there is such a j

The bonus token is the last t.  Every token that leaves here was drawn from the target's own distribution given what
precedes it, whatever the drafter proposed: the tree only decides how many draws fit in one step.  The draw at node
path[i] uses the random bits of (seed, prefix_len + i), so a request's tokens depend on its seed and the logits, and on
nothing else: neither on the tree nor on the batch.

Arguments: those of accept.py without target_tokens and partials, and
    logits        [R, V]  float32 or 16 bits  read    row stride free, in elements
    temperatures  [B]     float32             read    0: the largest logit
    top_ks        [B]     int32               read    below 1, or V and more: off;  1: the largest logit
    top_ps        [B]     float32             read    in (0, 1]; 1: off
    seeds         [B]     int64               read
    prefix_lens   [B]     int32 or int64      read    the position of the root
    row_stride, vocab     int64

Launch   a block a request, which goes from node to node; the threads' 16 sums each in dynamic shared memory.
Traffic  passes over the rows on the path only; the other nodes' logits are not read.
"""

from numba import cuda, int32, int64

from nbverify.kernels.indices import load_index
from nbverify.tree.kernels.accept import BAD_LOGITS, make_open_tree, make_write_path, store_predict
from nbverify.tree.kernels.accept_rules import NO_TOKEN, AcceptFlag
from nbverify.tree.kernels.sampling import is_valid, make_draw, random_bits

SAMPLING = int(AcceptFlag.SAMPLING)


def make_body(*, max_nodes, max_depth, threads, logits_dtype):
    """``accept_sampled(args)``."""
    load_tree, check_tree = make_open_tree(max_nodes, threads)
    write_path = make_write_path(max_depth, threads)
    draw, width = make_draw(logits_dtype, threads), max_depth + 1

    def accept_sampled(args):
        parents = cuda.shared.array(max_nodes, int32)
        tokens = cuda.shared.array(max_nodes, int64)
        path = cuda.shared.array(width, int32)
        child = cuda.shared.array(1, int32)
        b, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)

        flag, count, first_row = load_tree(args, b, parents, tokens)
        flag, count = check_tree(flag, count, parents)
        temperature, top_p = args.temperatures[b], args.top_ps[b]
        if count > 0 and not is_valid(temperature, top_p):
            flag, count = int32(SAMPLING), int32(0)
        position = load_index(args.prefix_lens, args.prefix_lens_words, b)
        # The whole block is at the same node: all it branches on comes from shared memory behind a barrier.
        node, length, bonus = int32(0), int32(0), int64(NO_TOKEN)
        if count == 0:
            node = int32(max_nodes)
        while node < max_nodes and length <= max_depth:
            if thread == 0:
                path[length] = node
                child[0] = int32(max_nodes)
            bits = random_bits(args.seeds[b], position + length)
            row = int64(first_row + node)
            # Its barriers also publish that there is no child yet.
            bonus, is_bad = draw(args, row, temperature, args.top_ks[b], top_p, bits)
            if is_bad:
                flag = int32(BAD_LOGITS)
            if thread == 0:
                store_predict(args, row, bonus)
            length = int32(length + 1)
            j = thread
            while j < count:
                if j > 0 and parents[j] == node:
                    if tokens[j] == bonus:
                        cuda.atomic.min(child, 0, j)
                j = int32(j + threads)
            cuda.syncthreads()  # publishes the child
            node = child[0]
            cuda.syncthreads()  # ends the reads of it
        if thread == 0:
            args.bonus_tokens[b] = bonus
            args.flags[b] = flag
        write_path(args, b, path, length, first_row)

    return accept_sampled
