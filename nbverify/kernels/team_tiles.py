"""What a warp of a team does with a tile: scores, weights and outputs of its rows and keys.

whole    one after the other: while this warp takes exponents, the others of its SM quarter multiply.
pieces   A warp of 32 rows has its quarter nearly for itself, so it multiplies while it takes exponents.  The keys of a
         tile are two pieces; weights of the first stand among the score products of the second, weights of the second
         among the value products of the first.  Each of these stretches is one basic block, in which the assembler
         may mix the two chains.  Outputs are rescaled between them, if any row needs it.
"""

from numba import cuda, float32, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP
from nbverify.kernels.masking import checks_every_tile
from nbverify.kernels.scores import make_multiply_keys, step_registers_of
from nbverify.kernels.values import make_find_non_finite, make_multiply_values, make_rescale
from nbverify.kernels.weights import ROWS_PER_LANE, make_multiply_and_weigh, make_weigh, make_weigh_alone


def make_walk_tile(spec, geometry):
    """``walk_tile(me, args, shared, record, tile, first_row, first_key, checked, queries, o, maxima, sums)``.

    ``tile`` is the tile's address, ``first_key`` the first of the warp's keys in it, as a number of the request.
    """
    return (_make_walk_pieces if geometry.key_pieces > 1 else _make_walk_whole)(spec, geometry)


def _make_walk_whole(spec, geometry):
    v_offset, key_frags, steps = geometry.v_offset, geometry.key_frags, geometry.query_steps
    rows = ROWS_PER_LANE * geometry.warp_frags
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    num_scores, num_weights = 2 * rows * key_frags, rows * key_frags
    always_checked = checks_every_tile(spec)
    multiply_keys, rescale = make_multiply_keys(spec, geometry), make_rescale(geometry)
    weighing = make_weigh(spec, geometry)
    scale, weigh_alone = weighing[0], make_weigh_alone(geometry, weighing)
    find_non_finite = make_find_non_finite(spec, geometry)
    (multiply_values, count), (multiply_clean_values, _) = (
        make_multiply_values(spec, geometry, cleans=cleans) for cleans in (False, True)
    )

    @cuda.jit(device=True, forceinline=True)
    def walk_tile(me, args, shared, record, tile, first_row, first_key, checked, queries, o, maxima, sums):
        fragments, s = cuda.local.array(num_fragments, uint32), cuda.local.array(num_scores, float32)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(rows, float32)
        multiply_keys(me, shared, tile, queries, fragments, s, 0, steps)
        scale(me, args, record, first_row, first_key, checked, s)
        raised = weigh_alone(s, (maxima, sums), factors, p)
        if cuda.any_sync(uint32(FULL_WARP), raised):
            rescale(o, factors)
        values = tile + uint32(v_offset)
        if (always_checked or checked) and find_non_finite(me, values):
            multiply_clean_values(me, shared, uint32(0), values, p, o, 0, count)
        else:
            multiply_values(me, shared, uint32(0), values, p, o, 0, count)

    return walk_tile


def _make_walk_pieces(spec, geometry):
    v_offset, key_frags, steps = geometry.v_offset, geometry.key_frags, geometry.query_steps
    rows, piece_keys = ROWS_PER_LANE * geometry.warp_frags, geometry.piece_keys
    k_bytes, v_bytes = piece_keys * geometry.k_pitch, piece_keys * geometry.v_pitch
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    num_scores, num_weights = 2 * rows * key_frags, rows * key_frags
    always_checked = checks_every_tile(spec)
    multiply_keys, rescale = make_multiply_keys(spec, geometry), make_rescale(geometry)
    weighing = make_weigh(spec, geometry)
    scale, weigh_alone = weighing[0], make_weigh_alone(geometry, weighing)
    find_non_finite = make_find_non_finite(spec, geometry)
    (multiply_values, count), (multiply_clean_values, _) = (
        make_multiply_values(spec, geometry, cleans=cleans) for cleans in (False, True)
    )
    multiply_keys_and_weigh = make_multiply_and_weigh(geometry, multiply_keys, steps, weighing)
    multiply_values_and_weigh = make_multiply_and_weigh(geometry, multiply_values, count, weighing)

    @cuda.jit(device=True, forceinline=True)
    def multiply_all_clean_values(me, shared, values, p, o, t, states, factors):
        """Both pieces in a loop, since this is long and rarely run: weights ``p``, then those of the scores ``t``."""
        end = ptx.opaque_u32(values + uint32(2 * v_bytes))
        while values < end:
            multiply_clean_values(me, shared, uint32(0), values, p, o, 0, count)
            values = uint32(values + uint32(v_bytes))
            if values < end:
                raised = weigh_alone(t, states, factors, p)
                if cuda.any_sync(uint32(FULL_WARP), raised):
                    rescale(o, factors)

    @cuda.jit(device=True, forceinline=True)
    def walk_tile(me, args, shared, record, tile, first_row, first_key, checked, queries, o, maxima, sums):
        fragments = cuda.local.array(num_fragments, uint32)
        s, t = cuda.local.array(num_scores, float32), cuda.local.array(num_scores, float32)
        p, q = cuda.local.array(num_weights, uint32), cuda.local.array(num_weights, uint32)
        factors, states = cuda.local.array(rows, float32), (maxima, sums)
        multiply_keys(me, shared, tile, queries, fragments, s, 0, steps)
        scale(me, args, record, first_row, first_key, checked, s)
        operands = me, shared, tile + uint32(k_bytes), queries, fragments, t
        raised = multiply_keys_and_weigh(operands, s, states, factors, p)
        if cuda.any_sync(uint32(FULL_WARP), raised):
            rescale(o, factors)
        scale(me, args, record, first_row, first_key + piece_keys, checked, t)
        values = uint32(tile + uint32(v_offset))
        if (always_checked or checked) and find_non_finite(me, values):
            multiply_all_clean_values(me, shared, values, p, o, t, states, factors)
        else:
            raised = multiply_values_and_weigh((me, shared, uint32(0), values, p, o), t, states, factors, q)
            if cuda.any_sync(uint32(FULL_WARP), raised):
                rescale(o, factors)
            multiply_values(me, shared, uint32(0), values + uint32(v_bytes), q, o, 0, count)

    return walk_tile
