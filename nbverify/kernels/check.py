"""Input checks of a ``debug=True`` plan: every index, prefix sum and mask bound, on the device, without a sync.

One block, launched before the verify kernel with the same arguments.  Two passes over the same conditions: the first
counts failures and finds the smallest failing position of each check, the second notes the value that stands there.
So the report is the same whichever thread is faster.  ``findings[check] = (count, position, value)`` adds up over
launches until ``plan.check()`` reads and clears it.
"""

from numba import cuda, int64

from nbverify.findings import (
    CHECK_KV_INDICES,
    CHECK_KV_INDPTR,
    CHECK_KV_LEN,
    CHECK_MASK_INDPTR,
    CHECK_NODES,
    CHECK_OUT_CACHE_LOC,
    CHECK_QO_INDPTR,
    CHECK_QO_ORDER,
    CHECK_SCHEDULE,
)
from nbverify.kernels.geometry import CHECK_THREADS
from nbverify.kernels.indices import index_count, load_index
from nbverify.kernels.schedule import make_schedule
from nbverify.spec import Mask


@cuda.jit(device=True)
def note(findings, check, position, value, second_pass):
    """Record one failure."""
    if second_pass:
        if findings[3 * check + 1] == position:
            findings[3 * check + 2] = value
    else:
        cuda.atomic.add(findings, 3 * check, 1)
        cuda.atomic.min(findings, 3 * check + 1, int64(position))


def make_bodies(spec, geometry):
    """The one body of the check."""
    work_of, has_schedule = make_schedule(spec, geometry).work_of, spec.schedule == "step"
    is_full, is_tree, reads_mask = spec.mask is Mask.FULL, spec.mask is Mask.TREE, spec.mask.reads_buffer

    @cuda.jit(device=True)
    def check_slots(args, array, words, check, begin, count, second_pass):
        """Entries [begin, begin + count) of an index buffer are rows of the pool."""
        end = min(begin + count, index_count(array, words))
        for i in range(max(begin, int64(0)) + cuda.threadIdx.x, end, CHECK_THREADS):
            slot = load_index(array, words, i)
            if slot < 0 or slot >= args.num_slots:
                note(args.findings, check, i, slot, second_pass)

    @cuda.jit(device=True)
    def mask_elements(prefix_len, num_nodes):
        if is_full:
            return num_nodes * (prefix_len + num_nodes)
        if is_tree:
            return num_nodes * num_nodes
        return num_nodes * ((num_nodes + 31) // 32)

    @cuda.jit(device=True)
    def check_lengths(args, b, prefix_start, prefix_len, token_start, num_nodes, next_row, second_pass):
        """One thread."""
        findings = args.findings
        if has_schedule:
            items, _ = work_of(args, b)
            if args.step_table[b + 1] - args.step_table[b] != items:
                note(findings, CHECK_SCHEDULE, b, int64(items), second_pass)
        if prefix_len > 0:
            if prefix_start < 0:
                note(findings, CHECK_KV_INDPTR, b, prefix_start, second_pass)
            elif prefix_start + prefix_len > index_count(args.kv_indices, args.kv_indices_words):
                note(findings, CHECK_KV_INDPTR, b + 1, prefix_start + prefix_len, second_pass)
        if num_nodes > 0:
            if token_start < 0:
                note(findings, CHECK_QO_INDPTR, b, token_start, second_pass)
            elif token_start + num_nodes > args.num_tokens:
                note(findings, CHECK_QO_INDPTR, b + 1, token_start + num_nodes, second_pass)
            if token_start != next_row:  # rows that two requests would write, or none
                note(findings, CHECK_QO_ORDER, b, token_start, second_pass)
            if num_nodes > args.max_nodes:
                note(findings, CHECK_NODES, b + 1, num_nodes, second_pass)
            if prefix_len + num_nodes > args.max_kv_len:
                note(findings, CHECK_KV_LEN, b + 1, prefix_len + num_nodes, second_pass)
            if reads_mask and prefix_len >= 0:
                start = load_index(args.mask_indptr, args.mask_indptr_words, b)
                if start < 0 or start + mask_elements(prefix_len, num_nodes) > args.custom_mask.size:
                    note(findings, CHECK_MASK_INDPTR, b, start, second_pass)

    def check(args):
        for second_pass in range(2):
            next_row = int64(0)
            for b in range(args.num_requests):
                prefix_start = load_index(args.kv_indptr, args.kv_indptr_words, b)
                prefix_len = load_index(args.kv_indptr, args.kv_indptr_words, b + 1) - prefix_start
                token_start = load_index(args.qo_indptr, args.qo_indptr_words, b)
                num_nodes = load_index(args.qo_indptr, args.qo_indptr_words, b + 1) - token_start
                if b % CHECK_THREADS == cuda.threadIdx.x:
                    check_lengths(args, b, prefix_start, prefix_len, token_start, num_nodes, next_row, second_pass)
                if num_nodes > 0:
                    next_row = token_start + num_nodes
                if num_nodes > 0 and prefix_len >= 0:
                    check_slots(
                        args,
                        args.kv_indices,
                        args.kv_indices_words,
                        CHECK_KV_INDICES,
                        prefix_start,
                        prefix_len,
                        second_pass,
                    )
                    check_slots(
                        args, args.out_cache_loc, args.out_cache_loc_words, CHECK_OUT_CACHE_LOC, token_start, num_nodes,
                        second_pass,
                    )  # fmt: skip
            cuda.syncthreads()  # the positions found by all threads, before the pass that compares with them

    return (check,)
