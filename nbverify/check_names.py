"""What the checks of a ``debug=True`` plan are called: shared by the kernel that finds and the plan that reports."""

(
    CHECK_KV_INDPTR,
    CHECK_KV_LEN,
    CHECK_QO_INDPTR,
    CHECK_NODES,
    CHECK_KV_INDICES,
    CHECK_OUT_CACHE_LOC,
    CHECK_MASK_INDPTR,
) = range(7)

# check -> (buffer that the position indexes, what was expected there, what the value is)
CHECKS: dict[int, tuple[str, str, str]] = {
    CHECK_KV_INDPTR: ("kv_indptr", "an entry range inside kv_indices ({kv_indices} entries)", "value"),
    CHECK_KV_LEN: ("kv_indptr", "prefix + nodes <= max_kv_len={max_kv_len}", "prefix + nodes"),
    CHECK_QO_INDPTR: ("qo_indptr", "a row range inside q ({num_tokens} rows)", "value"),
    CHECK_NODES: ("qo_indptr", "at most max_nodes={max_nodes} nodes", "nodes"),
    CHECK_KV_INDICES: ("kv_indices", "0 <= slot < {num_slots}", "slot"),
    CHECK_OUT_CACHE_LOC: ("out_cache_loc", "0 <= slot < {num_slots}", "slot"),
    CHECK_MASK_INDPTR: ("mask_indptr", "a block inside custom_mask ({custom_mask} elements)", "start"),
}
