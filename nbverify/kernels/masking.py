"""From a dot product to the score that the softmax takes: scale, mask, score_mod.

Which keys a node sees is decided here alone: the one place to edit when a mask layout changes.

For a request with prefix length c and n nodes, key j is a prefix token for j < c and draft j - c otherwise.
A position past the end of ``custom_mask`` counts as hidden: a padded request's block may lie there.  So does all of a
row that would begin before the buffer.

A node's row of the mask is opened once, and then each key of it is one load that depends on nothing else and stands
behind no branch: so all loads of a lane are on their way at the same time.  One after the other, each behind the
comparison of the one before, those of a tile of drafts took longer than its products.
"""

from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.indices import load_index
from nbverify.kernels.softmax import LOG2_E, NEG_INF
from nbverify.spec import Mask

BITS_PER_WORD = 32


def checks_every_tile(spec):
    """Whether a key before the drafts may be hidden too, or its score changed.  Else prefix tiles do not ask."""
    return spec.score_mod is not None or not spec.prefix_visible


class MaskRow(NamedTuple):
    """What is needed to say which keys a node sees.  One that is not of the request sees none."""

    node: int  # int32; negative: none
    prefix_len: int  # int32
    num_keys: int  # int32
    address: int  # of its entries in custom_mask, from the first key that the mask decides about on
    num_entries: int  # uint32, of these, inside the buffer: bytes, or words of bits (PACKED)


def make_mask(spec):
    """``find_mask(args, request) -> mask_start``, the request's entry of ``mask_indptr``; with it
    ``open_row(args, mask_start, request, head_row) -> MaskRow``; and with that ``sees(row, key) -> bool``.

    ``head_row`` counts (node, head in group) pairs of the request, node major, ``key`` (int32) from 0.
    """
    # Plain bools: numba drops the branches of a constant that is false.
    is_full, is_packed, is_causal = (spec.mask is layout for layout in (Mask.FULL, Mask.PACKED, Mask.CAUSAL))
    reads_buffer, prefix_visible, group = spec.mask.reads_buffer, spec.prefix_visible, spec.group

    @cuda.jit(device=True, forceinline=True)
    def find_mask(args, request):
        if reads_buffer:
            return load_index(args.mask_indptr, args.mask_indptr_words, request.number)
        return int64(0)

    @cuda.jit(device=True, forceinline=True)
    def open_row(args, mask_start, request, head_row):
        node, prefix_len = int32(uint32(head_row) // uint32(group)), int32(request.prefix_len)
        num_nodes = int32(request.num_nodes)
        if head_row >= num_nodes * group:
            node = int32(-1)
        address, num_entries = uint64(0), uint32(0)
        if reads_buffer:
            length = int64(num_nodes)
            if is_full:
                length = request.prefix_len + request.num_nodes
            if is_packed:
                length = int64(uint32(num_nodes + (BITS_PER_WORD - 1)) // uint32(BITS_PER_WORD))
            first = mask_start + int64(max(int32(0), node)) * length  # 64-bit: FULL blocks add up past 2^31
            if is_full and prefix_visible:
                first, length = first + request.prefix_len, int64(num_nodes)
            if first >= 0:
                num_entries = uint32(max(int64(0), min(length, int64(args.custom_mask.size) - first)))
            address = ptx.global_address(args.custom_mask, first)
        return MaskRow(node, prefix_len, int32(request.num_keys), address, num_entries)

    @cuda.jit(device=True, forceinline=True)
    def sees(row, key):
        draft = int32(key - row.prefix_len)
        seen = True
        if is_packed:
            entry = int32(draft >> 5)
            is_there = uint32(entry) < row.num_entries
            word = ptx.load_global_u32_if(row.address + uint64(int64(entry) * 4), uint32(is_there))
            seen = (word >> (uint32(draft) % uint32(BITS_PER_WORD))) & uint32(1) != uint32(0)
        elif reads_buffer:
            entry = int32(key) if is_full and not prefix_visible else draft
            is_there = uint32(entry) < row.num_entries
            seen = ptx.load_global_u8_if(row.address + uint64(int64(entry)), uint32(is_there)) != uint32(0)
        elif is_causal:
            seen = draft <= row.node
        if prefix_visible:
            seen = seen | (draft < int32(0))
        return seen & (key < row.num_keys) & (row.node >= int32(0))

    return find_mask, open_row, sees


def make_prefetch_mask(spec, num_rows):
    """``prefetch_mask(args, mask_start, request, head_row, lane)``: the first line of ``num_rows`` rows' masks to L2.

    ``mask_start`` is ``find_mask``'s, which the caller asks for before other work: it comes from memory.  A warp
    together.  They are read for the last tiles of a request alone, where the other blocks wait already; where
    every tile reads them, the first does it soon enough.
    """
    reads_buffer = spec.mask.reads_buffer and spec.prefix_visible
    _, open_row, _ = make_mask(spec)

    @cuda.jit(device=True, forceinline=True)
    def prefetch_mask(args, mask_start, request, head_row, lane):
        if reads_buffer:
            row = int32(lane)
            while row < num_rows:
                mask_row = open_row(args, mask_start, request, int32(head_row + row))
                if mask_row.node >= 0 and mask_row.num_entries > 0:
                    ptx.prefetch_l2(mask_row.address)
                row = int32(row + WARP)

    return prefetch_mask


def make_finish_score(spec):
    """``finish_score(args, request, kv_head, head_row, key, seen, product)``: times log2(e), or -inf if not seen."""
    group = spec.group
    change_score = _make_change_score(spec.score_mod)
    has_score_mod = spec.score_mod is not None

    @cuda.jit(device=True, forceinline=True)
    def finish_score(args, request, kv_head, head_row, key, seen, product):
        if has_score_mod:
            score = NEG_INF
            if seen:
                node, head = head_row // group, kv_head * group + head_row % group
                scaled = libdevice.fmul_rn(product, args.score_scale)
                score = libdevice.fmul_rn(change_score(scaled, request.number, head, node, key), LOG2_E)
            return score
        return scale_score(args, product) if seen else NEG_INF

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
