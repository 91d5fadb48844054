"""Which keys a node sees: the one place to edit when a mask layout changes.

For a request with prefix length c and n nodes, key j is a prefix token for j < c and draft j - c otherwise.
A position outside ``custom_mask`` counts as hidden: a padded request's block may lie past the end of the buffer.
"""

from numba import cuda, int64, uint32

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
