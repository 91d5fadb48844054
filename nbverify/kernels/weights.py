"""From scores to weights: mask, running maximum, P = 2^(s - m), and how P reaches the warps that multiply V.

The maximum is raised lazily: while a row's scores stay within 2^8 of what its exponents are taken against, nothing is
rescaled.  Each row decides for itself (its factor is exactly 1 otherwise); a vote only skips the work when no row
needs it.  So m is within 8 of the true running maximum, and not above it: any such m gives a valid state.

P is rounded to the type of the mma; l adds the unrounded weights, each lane its own keys, and ``finish_row_sum`` adds
the four lanes of a row at the end of a segment.
"""

from numba import cuda, float32, int32, int64, uint32
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP
from nbverify.kernels.masking import make_finish_score, scale_score
from nbverify.kernels.scores import FRAG_BYTES
from nbverify.kernels.segments import MASK_START, load_segment
from nbverify.kernels.softmax import ZERO, exponent_base

SLACK = float32(8.0)  # log2 of the largest weight
ONE = float32(1.0)
LANES_PER_ROW = 4
ROWS_PER_LANE = 2  # of a fragment's 16: g and g + 8


def make_pack(dtype):
    """Two float32 to a pair of a 16-bit type."""
    return ptx.pack_bf16x2 if dtype == "bfloat16" else ptx.pack_f16x2


def make_weigh(spec, geometry):
    """From products to weights, in three functions with no branch but the first one's.

    ``scale(me, args, record, first_row, first_key, checked, own)`` makes scores: scaled, masked, with score_mod, times
    log2(e).  ``first_row`` (in the row unit) and ``first_key`` are those of the layout (scores.py).  ``checked``: some
    key of the tile may be hidden from some row, or the spec has a score_mod.

    ``find_largest(own, largest)``: the maximum of each of the lane's rows.

    ``weigh(own, largest, maxima, sums, factors, p)`` makes weights of the scores (pairs, ``p[r * key_frags + j]``),
    brings the rows' states up to date, and returns whether a factor of this lane is not 1.
    """
    rows, key_frags = ROWS_PER_LANE, geometry.key_frags
    pack, finish_score = make_pack(spec.dtype), make_finish_score(spec)

    @cuda.jit(device=True, forceinline=True)
    def scale(me, args, record, first_row, first_key, checked, own):
        ptx.unroll_loops()
        if checked:
            lane = int32(me.lane)
            segment, mask_start = load_segment(record), record[MASK_START]
            row = segment.first_row + first_row + lane // LANES_PER_ROW
            key = int64(first_key) + 2 * (lane % LANES_PER_ROW)
            for r in range(rows):
                for j in range(key_frags):
                    for i in range(2):
                        at = (r * key_frags + j) * 2 + i
                        own[at] = finish_score(
                            args, segment.request, segment.kv_head, mask_start, row + 8 * r, key + 8 * j + i, own[at]
                        )
        else:
            for at in range(rows * key_frags * 2):
                own[at] = scale_score(args, own[at])

    @cuda.jit(device=True, forceinline=True)
    def find_largest(own, largest):
        ptx.unroll_loops()
        for r in range(rows):
            first = r * key_frags * 2
            x = own[first]
            for i in range(1, 2 * key_frags):
                x = max(x, own[first + i])
            x = max(x, cuda.shfl_xor_sync(uint32(FULL_WARP), x, 1))
            largest[r] = max(x, cuda.shfl_xor_sync(uint32(FULL_WARP), x, 2))

    @cuda.jit(device=True, forceinline=True)
    def weigh(own, largest, maxima, sums, factors, p):
        ptx.unroll_loops()
        any_raised = False
        for r in range(rows):
            first = r * key_frags * 2
            is_raised = largest[r] > libdevice.fadd_rn(maxima[r], SLACK)
            factors[r] = ptx.ex2(libdevice.fsub_rn(maxima[r], largest[r])) if is_raised else ONE
            maxima[r] = largest[r] if is_raised else maxima[r]
            any_raised = any_raised or is_raised
            base = exponent_base(maxima[r])
            total = ZERO
            for j in range(key_frags):
                even = ptx.ex2(libdevice.fsub_rn(own[first + 2 * j], base))
                odd = ptx.ex2(libdevice.fsub_rn(own[first + 2 * j + 1], base))
                total = libdevice.fadd_rn(total, libdevice.fadd_rn(even, odd))
                p[r * key_frags + j] = pack(even, odd)
            sums[r] = cuda.fma(sums[r], factors[r], total)
        return any_raised

    return scale, find_largest, weigh


@cuda.jit(device=True, forceinline=True)
def finish_row_sum(total):
    """The sum over the four lanes of a row, the same bits in each."""
    total = libdevice.fadd_rn(total, cuda.shfl_xor_sync(uint32(FULL_WARP), total, 1))
    return libdevice.fadd_rn(total, cuda.shfl_xor_sync(uint32(FULL_WARP), total, 2))


def make_publish_weights(geometry):
    """``publish_weights(me, shared, parity, raised, factors, p)``: P, factors and a flag, from a score warp.

    P lies in shared memory in fragment order, [k16 step][row fragment][lane][4 registers], so that it is written and
    read in 16 bytes a lane.
    """
    row_frags, key_frags, rows_per_tile = geometry.row_frags, geometry.key_frags, geometry.rows_per_tile
    weights_offset, weights_bytes = geometry.weights_offset, geometry.weights_bytes
    factors_offset, flags_offset = geometry.factors_offset, geometry.flags_offset

    @cuda.jit(device=True, forceinline=True)
    def publish_weights(me, shared, parity, raised, factors, p):
        ptx.unroll_loops()
        target = uint32(shared + uint32(weights_offset) + parity * uint32(weights_bytes))
        target = uint32(target + me.warp * uint32(FRAG_BYTES) + me.lane * uint32(16))
        for step in range(key_frags // 2):
            first, second = 2 * step, key_frags + 2 * step
            ptx.store_shared_v4_u32(
                target + uint32(step * row_frags * FRAG_BYTES), (p[first], p[second], p[first + 1], p[second + 1])
            )
        if me.lane % uint32(LANES_PER_ROW) == uint32(0):
            row = parity * uint32(rows_per_tile) + me.warp * uint32(16) + me.lane // uint32(LANES_PER_ROW)
            ptx.store_shared_f32(shared + uint32(factors_offset) + row * uint32(4), factors[0])
            ptx.store_shared_f32(shared + uint32(factors_offset) + row * uint32(4) + uint32(32), factors[1])
        any_raised = cuda.any_sync(uint32(FULL_WARP), raised)
        if me.lane == uint32(0):
            flag = shared + uint32(flags_offset) + parity * uint32(16) + me.warp * uint32(4)
            ptx.store_shared_u32(flag, uint32(any_raised))

    return publish_weights


def make_rescale_by_flags(geometry):
    """``rescale_by_flags(me, shared, parity, o)``: a value warp's outputs times the factors, if any is not 1."""
    row_frags, value_frags, rows_per_tile = geometry.row_frags, geometry.value_frags, geometry.rows_per_tile
    factors_offset, flags_offset = geometry.factors_offset, geometry.flags_offset

    @cuda.jit(device=True, forceinline=True)
    def rescale_by_flags(me, shared, parity, o):
        ptx.unroll_loops()
        flags = ptx.load_shared_v4_u32(ptx.opaque_u32(shared + parity * uint32(16)) + uint32(flags_offset))
        any_raised = flags[0]
        for f in range(1, row_frags):
            any_raised = any_raised | flags[f]
        if any_raised != uint32(0):
            row = uint32(parity * uint32(rows_per_tile) + me.lane // uint32(LANES_PER_ROW))
            factors = ptx.opaque_u32(shared + row * uint32(4)) + uint32(factors_offset)
            for r in range(2 * row_frags):
                factor = ptx.load_shared_f32(factors + uint32(32 * r))
                for j in range(value_frags):
                    at = (r // 2 * value_frags + j) * 4 + r % 2 * 2
                    o[at], o[at + 1] = o[at] * factor, o[at + 1] * factor

    return rescale_by_flags
