"""Key tiles: from the index list of a request to rows in shared memory."""

import numpy as np
from numba import cuda, int64, uint32

from nbverify.kernels.formats import fp8_e4m3_to_float32, make_narrow
from nbverify.kernels.geometry import WARP
from nbverify.kernels.indices import load_low_word


@cuda.jit(device=True, forceinline=True)
def index_of(args, request, key):
    """What the index lists say of key ``key`` of a request: its prefix, then its drafts.  The low 32 bits.

    A pool has fewer than 2^32 rows (``bind`` sees to it), and ``pool_row`` makes a valid row of anything else.
    """
    if key < request.prefix_len:
        return load_low_word(args.kv_indices, args.kv_indices_words, request.prefix_start + key)
    return load_low_word(args.out_cache_loc, args.out_cache_loc_words, request.token_start + (key - request.prefix_len))


@cuda.jit(device=True, forceinline=True)
def pool_row(args, index):
    """The pool row of an index.

    An index outside the pool is the caller's error (``debug=True`` names it); it is clamped, so that it reads a
    wrong row and never memory that is not the pool's.
    """
    return min(index, uint32(args.num_slots - 1))


def make_copy_tile(spec, geometry):
    """``copy_tile(args, request, kv_head, first_key, k_tile, v_tile)``: one tile of K (and V) to shared memory.

    Whole block.  A warp takes a row at a time and its lanes consecutive 32-bit words: a 576-wide row is 9 loads of
    128 bytes.  fp8 is widened to the 16-bit type here, which is exact, so that nothing after this knows of it.
    Keys past the end of the request are not read: what their rows then hold is hidden by the mask stage.
    """
    qk_words, v_words = geometry.qk_words, geometry.v_words
    k_stride, v_stride = geometry.k_stride, geometry.v_stride
    keys_per_tile, warps = geometry.keys_per_tile, geometry.warps
    separate_v = not spec.shared_kv
    copy_row = _make_copy_fp8_row(spec.dtype) if spec.is_fp8 else _copy_row

    @cuda.jit(device=True)
    def copy_tile(args, request, kv_head, first_key, k_tile, v_tile):
        warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
        for row in range(warp, keys_per_tile, warps):
            key = first_key + row
            if key < request.num_keys:
                slot = int64(pool_row(args, index_of(args, request, key)))
                # 64-bit: slot * stride passes 2^31 in a pool of 4 GB.
                source = slot * args.k_cache_stride_slot + kv_head * args.k_cache_stride_head
                copy_row(args.k_cache[source:], k_tile[row * k_stride :], qk_words, lane)
                if separate_v:
                    source = slot * args.v_cache_stride_slot + kv_head * args.v_cache_stride_head
                    copy_row(args.v_cache[source:], v_tile[row * v_stride :], v_words, lane)

    return copy_tile


@cuda.jit(device=True)
def _copy_row(source, target, words, lane):
    source_words = source.view(np.uint32)  # rows are 16-byte aligned (contract.ROW_ALIGNMENT_BYTES)
    word = lane
    while word < words:  # not a range: see the head of simt.py
        target[word] = source_words[word]
        word += WARP


def _make_copy_fp8_row(dtype):
    narrow = make_narrow(dtype)

    @cuda.jit(device=True)
    def copy_fp8_row(source, target, words, lane):
        source_words = source.view(np.uint32)
        for pair in range(lane, words // 2, WARP):  # one word of four bytes becomes two words of two elements
            four = source_words[pair]
            for half in range(2):
                low = narrow(fp8_e4m3_to_float32(four >> uint32(16 * half)))
                high = narrow(fp8_e4m3_to_float32(four >> uint32(16 * half + 8)))
                target[2 * pair + half] = low | uint32(high << uint32(16))

    return copy_fp8_row
