"""From scores to weights: mask, running maximum, P = 2^(s - m), and how P reaches the warps that multiply V.

The maximum is raised lazily: while a row's scores stay within 2^8 of what its exponents are taken against, nothing is
rescaled.  Each row decides for itself (its factor is exactly 1 otherwise); a vote only skips the work when no row
needs it.  So m is within 8 of the true running maximum, and not above it: any such m gives a valid state.

P is rounded to the type of the mma; l adds the unrounded weights, each lane its own keys, and ``finish_row_sum`` adds
the four lanes of a row at the end of a segment.
"""

from numba import cuda, float32, int32, uint32
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP
from nbverify.kernels.masking import make_finish_score, make_mask
from nbverify.kernels.scores import FRAG_BYTES
from nbverify.kernels.segments import load_segment
from nbverify.kernels.softmax import LOG2_E, exponent_base

SLACK = float32(8.0)  # log2 of the largest weight
ONE = float32(1.0)
LANES_PER_ROW = 4
ROWS_PER_LANE = 2  # of a fragment's 16: g and g + 8


def make_pack(dtype):
    """Two float32 to a pair of a 16-bit type."""
    return ptx.pack_bf16x2 if dtype == "bfloat16" else ptx.pack_f16x2


def make_weigh(spec, geometry):
    """From products to weights, in four functions with no branch but the first one's, to be spread among products.

    ``scale(me, args, record, first_row, first_key, checked, own)`` makes scores: scaled, masked, with score_mod, times
    log2(e).  ``first_row`` (in the row unit) and ``first_key`` are those of the layout (scores.py).  ``checked``: some
    key of the tile may be hidden from some row, or the spec has a score_mod.

    ``find_largest(own, largest)``: the maximum of each of the lane's rows.

    ``raise_maxima(largest, maxima, sums, factors, bases)``: brings the rows' maxima up to date, gives the factors for
    what was summed so far, applies them to ``sums``, and says whether a factor of this lane is not 1.  ``bases`` are
    what exponents are taken against.

    ``weigh(own, bases, sums, p, j)``: weights of the scores of keys ``8 j`` to ``8 j + 7`` (pairs,
    ``p[r * key_frags + j]``), added to ``sums``.
    """
    rows, key_frags = ROWS_PER_LANE, geometry.key_frags
    pack, finish_score = make_pack(spec.dtype), make_finish_score(spec)
    (find_mask, open_row, sees), has_roles = make_mask(spec), geometry.has_roles

    @cuda.jit(device=True, forceinline=True)
    def scale(me, args, record, first_row, first_key, checked, own):
        ptx.unroll_loops()
        if checked:
            lane = int32(me.lane)
            if not has_roles:  # else rows and keys are kept in registers from tile to tile, which teams lack
                lane = int32(ptx.opaque_u32(me.lane))
            segment = load_segment(record)
            mask_start = find_mask(args, segment.request)
            row = int32(segment.first_row) + first_row + lane // LANES_PER_ROW
            key = int32(first_key + 2 * (lane % LANES_PER_ROW))
            seen = cuda.local.array(rows, uint32)  # bits
            for r in range(rows):  # all rows first: their loads are on their way together
                mask_row, seen[r] = open_row(args, mask_start, segment.request, row + 8 * r), uint32(0)
                for j in range(key_frags):
                    for i in range(2):
                        seen[r] = seen[r] | (uint32(sees(mask_row, int32(key + (8 * j + i)))) << uint32(2 * j + i))
            for r in range(rows):
                for j in range(key_frags):
                    for i in range(2):
                        at, is_seen = (r * key_frags + j) * 2 + i, seen[r] & uint32(1 << (2 * j + i)) != uint32(0)
                        own[at] = finish_score(
                            args, segment.request, segment.kv_head, row + 8 * r, key + (8 * j + i), is_seen, own[at]
                        )
        else:
            factor = libdevice.fmul_rn(args.score_scale, LOG2_E)
            for at in range(rows * key_frags * 2):
                own[at] = libdevice.fmul_rn(own[at], factor)

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
    def raise_maxima(largest, maxima, sums, factors, bases):
        ptx.unroll_loops()
        any_raised = False
        for r in range(rows):
            is_raised = largest[r] > libdevice.fadd_rn(maxima[r], SLACK)
            factors[r] = ptx.ex2(libdevice.fsub_rn(maxima[r], largest[r])) if is_raised else ONE
            maxima[r] = largest[r] if is_raised else maxima[r]
            any_raised = any_raised or is_raised
            bases[r] = exponent_base(maxima[r])
            sums[r] = libdevice.fmul_rn(sums[r], factors[r])
        return any_raised

    @cuda.jit(device=True, forceinline=True)
    def weigh(own, bases, sums, p, j):
        ptx.unroll_loops()
        for r in range(rows):
            at = (r * key_frags + j) * 2
            even = ptx.ex2(libdevice.fsub_rn(own[at], bases[r]))
            odd = ptx.ex2(libdevice.fsub_rn(own[at + 1], bases[r]))
            sums[r] = libdevice.fadd_rn(sums[r], libdevice.fadd_rn(even, odd))
            p[r * key_frags + j] = pack(even, odd)

    return scale, find_largest, raise_maxima, weigh


def make_weigh_alone(geometry, weighing):
    """``weigh_alone(own, states, factors, p)``: from scaled scores ``own`` to weights ``p``, as multiply_and_weigh."""
    _, find_largest, raise_maxima, weigh = weighing
    key_frags, rows = geometry.key_frags, ROWS_PER_LANE

    @cuda.jit(device=True, forceinline=True)
    def weigh_alone(own, states, factors, p):
        ptx.unroll_loops()
        largest, bases = cuda.local.array(rows, float32), cuda.local.array(rows, float32)
        find_largest(own, largest)
        raised = raise_maxima(largest, states[0], states[1], factors, bases)
        for j in range(key_frags):
            weigh(own, bases, states[1], p, j)
        return raised

    return weigh_alone


def make_multiply_and_weigh(geometry, multiply_keys, weighing):
    """``multiply_and_weigh(operands, own, states, factors, p)``: the score products of a tile, and among them from the
    scores ``own`` of another one, which are scaled, to its weights ``p``; says whether a factor is not 1 (roles).

    ``operands`` are those of multiply_keys but for the steps; ``weighing`` is what make_weigh gives, ``states`` are
    ``(maxima, sums)``.  There is no branch, so that the assembler may mix the two chains.
    """
    _, find_largest, raise_maxima, weigh = weighing
    key_frags, rows, steps = geometry.key_frags, ROWS_PER_LANE, geometry.part_steps
    # Products before the weights begin, before they are raised, and among the weights of eight keys each.
    lead = max(1, steps // 9)
    raised_at = 2 * lead
    last_piece = raised_at + key_frags * ((steps - raised_at) // (key_frags + 1))

    @cuda.jit(device=True, forceinline=True)
    def multiply_steps(operands, begin, end):
        multiply_keys(operands[0], operands[1], operands[2], operands[3], operands[4], operands[5], begin, end)

    weigh_all = _make_weigh_all(multiply_steps, weigh, raised_at, last_piece, key_frags)

    @cuda.jit(device=True, forceinline=True)
    def multiply_and_weigh(operands, own, states, factors, p):
        ptx.unroll_loops()
        maxima, sums = states
        largest, bases = cuda.local.array(rows, float32), cuda.local.array(rows, float32)
        multiply_steps(operands, 0, lead)
        find_largest(own, largest)
        multiply_steps(operands, lead, raised_at)
        raised = raise_maxima(largest, maxima, sums, factors, bases)
        weigh_all(operands, own, bases, sums, p)
        multiply_steps(operands, last_piece, steps)
        return raised

    return multiply_and_weigh


def _make_weigh_all(multiply_steps, weigh, begin, end, pieces):
    """Steps ``begin`` to ``end`` of the products in pieces, and after each the weights of eight keys.

    A chain of functions, so that the bounds of each piece are constants: numba unrolls no loop of loops like this one.
    """
    start = begin + (end - begin) // pieces * (pieces - 1)
    key_frag = pieces - 1
    if pieces == 1:

        @cuda.jit(device=True, forceinline=True)
        def first_piece(operands, own, bases, sums, p):
            multiply_steps(operands, start, end)
            weigh(own, bases, sums, p, key_frag)

        return first_piece

    earlier_pieces = _make_weigh_all(multiply_steps, weigh, begin, start, pieces - 1)

    @cuda.jit(device=True, forceinline=True)
    def next_piece(operands, own, bases, sums, p):
        earlier_pieces(operands, own, bases, sums, p)
        multiply_steps(operands, start, end)
        weigh(own, bases, sums, p, key_frag)

    return next_piece


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
