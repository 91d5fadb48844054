"""The output of a tile: O = O * factor + P V on tensor cores.

A warp owns rows and a slice of the columns (teams: all of them): ``o[(m * value_frags + j) * 4 + i]`` is the mma result
of row fragment m and columns 8 j to 8 j + 7 of the slice (rows g and g + 8, columns 2 t and 2 t + 1).

A weight of 0 must not let a value through, but 0 times NaN is NaN in an mma.  Where every row sees every key that does
not matter: a NaN then belongs to all rows.  In a *checked* tile, where keys may be hidden (the draft part, and what
stands behind the last key), values that are not finite are taken out: with roles in shared memory, where only one warp
reads a value and the scores of the tile are done with; with teams out of the operand, by a second program, but only if
``find_non_finite`` has found one.  The usual tile so runs through instructions that are there already: fetching others
from memory takes longer than what they do.

    shared K/V   and nothing more: V is part of the K row, so a row that sees the key has a score that is not finite,
                 and with it a sum that is not: it is spoiled already, in all columns.
    separate V   and added as what they are, inf, -inf or NaN, to the columns of the rows that see the key: two mma of
                 zeros and ones count who sees one (a weight that the 16-bit type rounds to 0 does not).  No row of a
                 healthy cache goes there.
"""

import math

from numba import cuda, float32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.rows import make_advance, make_swizzle
from nbverify.kernels.scores import FRAG_BYTES, make_multiply
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.team_places import make_find_first_key

INF = float32(math.inf)
LOW, HIGH = 0x0000FFFF, 0xFFFF0000
# Of the low half: exponent bits, which are all set in infinities and NaN; the number 1.
EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
ONE = {"bfloat16": 0x3F80, "float16": 0x3C00}
SIGN, MAGNITUDE = 0x8000, 0x7FFF


def make_rescale(geometry):
    """``rescale(o, factors)``: the rows' outputs times their factors (teams)."""
    value_frags = geometry.value_frags

    @cuda.jit(device=True, forceinline=True)
    def rescale(o, factors):
        ptx.unroll_loops()
        for j in range(value_frags):
            at = 4 * j
            o[at], o[at + 1] = o[at] * factors[0], o[at + 1] * factors[0]
            o[at + 2], o[at + 3] = o[at + 2] * factors[1], o[at + 3] * factors[1]

    return rescale


def make_multiply_values(spec, geometry, *, cleans=False):
    """``multiply_values(me, shared, parity, tile, p, o)``: o += P V; ``tile`` is the address of its V rows.

    ``p`` are the warp's own weights (teams); with roles they are read from shared memory.  ``cleans``: takes out what
    is not finite (teams).
    """
    row_frags, value_frags, key_frags = geometry.row_frags, geometry.value_frags, geometry.key_frags
    team_keys, score_warps, find_first_key = geometry.team_keys, geometry.score_warps, make_find_first_key(geometry)
    v_pitch, weights_offset, weights_bytes = geometry.v_pitch, geometry.weights_offset, geometry.weights_bytes
    has_roles, separate_v = geometry.has_roles, geometry.separate_v
    column_pairs, num_registers = value_frags // 2, 4 * row_frags
    count = team_keys // 16 * column_pairs
    ahead = geometry.steps_ahead
    num_fragments = 4 * (ahead + 1)
    multiply, swizzle, advance = make_multiply(spec.dtype), make_swizzle(v_pitch), make_advance(v_pitch)
    without_non_finite = _make_without_non_finite(spec.dtype)
    add_non_finite = _make_add_non_finite(spec.dtype)

    @cuda.jit(device=True, forceinline=True)
    def load_weights(me, shared, parity, step, p, a):
        """P of 16 keys as the mma's first operand, for all row fragments."""
        ptx.unroll_loops()
        if has_roles:
            source = uint32(shared + uint32(weights_offset) + parity * uint32(weights_bytes) + me.lane * uint32(16))
            for m in range(row_frags):
                x = ptx.load_shared_v4_u32(source + uint32((step * row_frags + m) * FRAG_BYTES))
                a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3] = x[0], x[1], x[2], x[3]
        else:
            upper, lower = 2 * step, key_frags + 2 * step
            a[0], a[1], a[2], a[3] = p[upper], p[lower], p[upper + 1], p[lower + 1]

    @cuda.jit(device=True, forceinline=True)
    def load_piece(values, i, fragments):
        """Operand of 16 keys x 16 columns, number ``i`` of the tile."""
        x = ptx.ldmatrix_x4_trans(advance(values, i % column_pairs * 32) + uint32(i // column_pairs * 16 * v_pitch))
        at = i % (ahead + 1) * 4
        fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply_values(me, shared, parity, tile, p, o):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        # Matrices of the ldmatrix: keys 0-7 and 8-15 of the first 8 columns, then of the next 8.
        key, column = lane % uint32(16), lane // uint32(16) * uint32(16)
        if has_roles:
            column = uint32(column + (warp - uint32(score_warps)) * uint32(value_frags * 16))
        else:
            key = uint32(key + find_first_key(warp))
        values = uint32(tile + key * uint32(v_pitch) + (column ^ swizzle(key)))
        a, fragments = cuda.local.array(num_registers, uint32), cuda.local.array(num_fragments, uint32)
        for i in range(min(ahead, count)):
            load_piece(values, i, fragments)
        for i in range(count):
            step, pair, here = i // column_pairs, i % column_pairs, i % (ahead + 1) * 4
            if pair == 0:
                load_weights(me, shared, parity, step, p, a)
            if i + ahead < count:
                load_piece(values, i + ahead, fragments)
            b = (fragments[here], fragments[here + 1], fragments[here + 2], fragments[here + 3])
            if cleans:
                clean = (
                    without_non_finite(b[0]), without_non_finite(b[1]),
                    without_non_finite(b[2]), without_non_finite(b[3]),
                )  # fmt: skip
                if separate_v:
                    is_dirty = clean[0] != b[0] or clean[1] != b[1] or clean[2] != b[2] or clean[3] != b[3]
                    if cuda.any_sync(uint32(FULL_WARP), is_dirty):
                        add_non_finite(a, b, pair, o)
                b = clean
            for m in range(row_frags):
                w = (a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3])
                for j in range(2):
                    at = (m * value_frags + 2 * pair + j) * 4
                    c = multiply(w, (b[2 * j], b[2 * j + 1]), (o[at], o[at + 1], o[at + 2], o[at + 3]))
                    o[at], o[at + 1], o[at + 2], o[at + 3] = c[0], c[1], c[2], c[3]

    return multiply_values


def make_find_non_finite(spec, geometry):
    """``find_non_finite(me, tile)``: whether a value of the warp's keys is infinite or NaN (teams).

    ``tile`` is the address of its V rows.
    """
    team_keys, v_pitch, chunks = geometry.team_keys, geometry.v_pitch, geometry.value_frags  # chunks of 16 bytes a row
    exponent, find_first_key, swizzle = EXPONENT[spec.dtype], make_find_first_key(geometry), make_swizzle(v_pitch)
    lowest = (exponent & -exponent) * 0x10001  # of both exponents of a pair: added to all set, the bit above is set
    exponents, above = exponent * 0x10001, SIGN * 0x10001

    @cuda.jit(device=True, forceinline=True)
    def find_non_finite(me, tile):
        first_row, found, i = find_first_key(me.warp), uint32(0), me.lane
        # Opaque: unrolled it would be long, and it is run rarely.
        end = ptx.opaque_u32(uint32(team_keys * chunks))
        while i < end:
            row, column = uint32(first_row + i // uint32(chunks)), uint32(i % uint32(chunks) * uint32(16))
            x = ptx.load_shared_v4_u32(uint32(tile + row * uint32(v_pitch) + (column ^ swizzle(row))))
            for n in range(4):
                found = uint32(found | ((x[n] & uint32(exponents)) + uint32(lowest)))
            i = uint32(i + uint32(WARP))
        return cuda.any_sync(uint32(FULL_WARP), (found & uint32(above)) != uint32(0))

    return find_non_finite


def make_clean_values(spec, geometry):
    """``clean_values(me, tile)``: zeros for what is not finite in a value warp's columns of a tile (roles, shared K/V).

    ``tile`` is the address of its V rows.
    """
    keys_per_tile, score_warps, v_pitch = geometry.keys_per_tile, geometry.score_warps, geometry.v_pitch
    chunks = geometry.value_frags  # of 16 bytes, a row
    without_non_finite, swizzle = _make_without_non_finite(spec.dtype), make_swizzle(v_pitch)

    @cuda.jit(device=True, forceinline=True)
    def clean_values(me, tile):
        first = uint32((me.warp - uint32(score_warps)) * uint32(chunks * 16))
        i = me.lane
        while i < uint32(keys_per_tile * chunks):
            row = uint32(i // uint32(chunks))
            column = uint32(first + i % uint32(chunks) * uint32(16))
            place = uint32(tile + row * uint32(v_pitch) + (column ^ swizzle(row)))
            x = ptx.load_shared_v4_u32(place)
            clean = (
                without_non_finite(x[0]), without_non_finite(x[1]), without_non_finite(x[2]), without_non_finite(x[3]),
            )  # fmt: skip
            ptx.store_shared_v4_u32(place, clean)
            i = uint32(i + uint32(WARP))
        cuda.syncwarp()  # publishes the columns to the warp

    return clean_values


def _make_without_non_finite(dtype):
    exponent = EXPONENT[dtype]

    @cuda.jit(device=True, forceinline=True)
    def without_non_finite(pair):
        """The pair with 0 for what is infinite or NaN."""
        kept = pair
        if (pair & uint32(exponent)) == uint32(exponent):
            kept = uint32(kept & uint32(HIGH))
        if (pair & uint32(exponent << 16)) == uint32(exponent << 16):
            kept = uint32(kept & uint32(LOW))
        return kept

    return without_non_finite


def _make_add_non_finite(dtype):
    exponent, one = EXPONENT[dtype], ONE[dtype]
    multiply = make_multiply(dtype)

    @cuda.jit(device=True, forceinline=True)
    def seen(pair):
        """1 for each weight that is not 0."""
        ones = uint32(0)
        if (pair & uint32(MAGNITUDE)) != uint32(0):
            ones = uint32(ones | uint32(one))
        if (pair & uint32(MAGNITUDE << 16)) != uint32(0):
            ones = uint32(ones | uint32(one << 16))
        return ones

    @cuda.jit(device=True, forceinline=True)
    def half_is(bits, sign):
        """Whether the low half is NaN, or the infinity of this sign bit."""
        magnitude = bits & uint32(MAGNITUDE)
        return magnitude > uint32(exponent) or (bits & uint32(0xFFFF)) == uint32(exponent | sign)

    @cuda.jit(device=True, forceinline=True)
    def infinite(pair, sign):
        """1 for each value that is NaN or the infinity of this sign."""
        ones = uint32(0)
        if half_is(pair, sign):
            ones = uint32(ones | uint32(one))
        if half_is(pair >> uint32(16), sign):
            ones = uint32(ones | uint32(one << 16))
        return ones

    @cuda.jit(device=True, forceinline=True)
    def add_non_finite(a, b, pair, o):
        """Add what is not finite of 16 keys x 16 values to the outputs of the rows that see it."""
        ptx.unroll_loops()
        zeros = (ZERO, ZERO, ZERO, ZERO)
        for j in range(2):
            above = (infinite(b[2 * j], 0), infinite(b[2 * j + 1], 0))
            below = (infinite(b[2 * j], SIGN), infinite(b[2 * j + 1], SIGN))
            who = (seen(a[0]), seen(a[1]), seen(a[2]), seen(a[3]))
            ups, downs = multiply(who, above, zeros), multiply(who, below, zeros)
            at = (2 * pair + j) * 4
            for i in range(4):
                if ups[i] > ZERO:
                    o[at + i] += INF
                if downs[i] > ZERO:
                    o[at + i] -= INF

    return add_non_finite
