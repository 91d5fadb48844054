"""From a dot product to the score that the softmax takes: scale, mask, score_mod.

Which keys a node sees is decided here alone: the one place to edit when a mask layout changes.

For a request with prefix length c and n nodes, key j is a prefix token for j < c and draft j - c otherwise.
A position outside ``custom_mask`` counts as hidden: a padded request's block may lie past the end of the buffer.
"""

from numba import cuda, float32, int32, int64, uint32
from numba.cuda import libdevice

from nbverify.kernels.softmax import LOG2_E, NEG_INF
from nbverify.spec import Mask

BITS_PER_WORD = 32


@cuda.jit(device=True)
def mask_entry(custom_mask, position):
    """``custom_mask[position]`` as uint32; 0 outside the buffer.  64-bit: FULL blocks add up past 2^31."""
    if position < 0 or position >= custom_mask.size:
        return uint32(0)
    return uint32(custom_mask[position])


def make_visible(spec):
    """``visible(args, mask_start, request, node, key) -> bool`` for keys in [0, c + n)."""
    # Plain bools: numba drops the branches of a constant that is false.
    is_full, is_tree, is_packed, is_causal = (
        spec.mask is layout for layout in (Mask.FULL, Mask.TREE, Mask.PACKED, Mask.CAUSAL)
    )
    prefix_visible = spec.prefix_visible

    def visible(args, mask_start, request, node, key):
        draft = int64(key - request.prefix_len)
        if prefix_visible and draft < 0:
            return True
        if is_full:
            row_length = request.prefix_len + request.num_nodes
            return mask_entry(args.custom_mask, mask_start + node * row_length + key) != uint32(0)
        if is_tree:
            return mask_entry(args.custom_mask, mask_start + node * request.num_nodes + draft) != uint32(0)
        if is_packed:
            words_per_row = (request.num_nodes + BITS_PER_WORD - 1) // BITS_PER_WORD
            word = mask_entry(args.custom_mask, mask_start + node * words_per_row + draft // BITS_PER_WORD)
            return (word >> uint32(draft % BITS_PER_WORD)) & uint32(1) != uint32(0)
        if is_causal:
            return draft <= node
        return True

    return cuda.jit(device=True)(visible)


def make_finish_score(spec):
    """``finish_score(args, request, kv_head, mask_start, head_row, key, product)``: times log2(e), or -inf if hidden.

    ``head_row`` counts (node, head in group) pairs of the request, node major; a row past the last node, or a key past
    the last key, is hidden.  ``mask_start`` is the request's entry of ``mask_indptr``.
    """
    group = spec.group
    visible = make_visible(spec)
    change_score = _make_change_score(spec.score_mod)
    has_score_mod = spec.score_mod is not None

    @cuda.jit(device=True)
    def finish_score(args, request, kv_head, mask_start, head_row, key, product):
        if head_row >= request.num_nodes * group or key >= request.num_keys:
            return NEG_INF
        node, head = head_row // group, kv_head * group + head_row % group
        if not visible(args, mask_start, request, node, key):
            return NEG_INF
        if has_score_mod:
            scaled = libdevice.fmul_rn(product, args.score_scale)
            return libdevice.fmul_rn(change_score(scaled, request.number, head, node, key), LOG2_E)
        return scale_score(args, product)

    return finish_score


@cuda.jit(device=True, forceinline=True)
def scale_score(args, product):
    """A visible score without score_mod: the product times scale and log2(e), as one factor."""
    return libdevice.fmul_rn(product, libdevice.fmul_rn(args.score_scale, LOG2_E))


def _make_change_score(score_mod):
    """The user's ``score_mod`` as a device function; without one, the score itself."""
    if score_mod is None:

        @cuda.jit(device=True)
        def keep_score(score, request, head, node, key):
            return score

        return keep_score

    modify = cuda.jit(device=True)(score_mod)

    @cuda.jit(device=True)
    def change_score(score, request, head, node, key):
        return float32(modify(score, int32(request), int32(head), int32(node), int32(key)))

    return change_score
