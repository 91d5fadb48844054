"""The lengths of one request, as the kernels see them.

Lengths are signed, and clamped so that no buffer and no workspace is overrun whatever the device buffers hold:
    prefix length < 0   a padding row of a graph: its nodes see nothing (out = 0, lse = -inf), no key is read
    prefix length 0     an ordinary request without prefix
    node count <= 0     no work and no output
"""

from typing import NamedTuple

from numba import cuda, int64

from nbverify.kernels.indices import index_count, load_index


class Request(NamedTuple):
    """One request's lengths, clamped."""

    number: int  # b
    prefix_start: int  # first entry in kv_indices
    prefix_len: int  # c
    token_start: int  # first row of q and out, first entry in out_cache_loc
    num_nodes: int  # n
    num_keys: int  # c + n; 0 for padding


@cuda.jit(device=True)
def load_request(args, b):
    """Lengths of request ``b``."""
    prefix_start = load_index(args.kv_indptr, args.kv_indptr_words, b)
    prefix_len = load_index(args.kv_indptr, args.kv_indptr_words, b + 1) - prefix_start
    token_start = load_index(args.qo_indptr, args.qo_indptr_words, b)
    num_nodes = load_index(args.qo_indptr, args.qo_indptr_words, b + 1) - token_start
    is_padding = prefix_len < 0

    num_nodes = min(num_nodes, args.max_nodes, args.num_tokens - token_start)
    if token_start < 0:
        num_nodes = int64(0)
    num_nodes = max(num_nodes, int64(0))
    prefix_len = min(
        prefix_len,
        args.max_kv_len - num_nodes,
        index_count(args.kv_indices, args.kv_indices_words) - prefix_start,
    )
    if prefix_start < 0:
        prefix_len = int64(0)
    prefix_len = max(prefix_len, int64(0))
    num_keys = prefix_len + num_nodes
    if is_padding:
        num_keys = int64(0)
    return Request(int64(b), prefix_start, prefix_len, token_start, num_nodes, num_keys)
