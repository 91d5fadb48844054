"""What a warp of a team does with a tile: scores, weights and outputs of its rows and keys, one after the other.

While one warp takes exponents, the others of its SM quarter multiply.
"""

from numba import cuda, float32, uint32

from nbverify.kernels.geometry import FULL_WARP
from nbverify.kernels.masking import checks_every_tile
from nbverify.kernels.scores import make_multiply_keys, step_registers_of
from nbverify.kernels.values import make_find_non_finite, make_multiply_values, make_rescale
from nbverify.kernels.weights import ROWS_PER_LANE, make_weigh, make_weigh_alone


def make_walk_tile(spec, geometry):
    """``walk_tile(me, args, shared, record, tile, first_row, first_key, checked, queries, o, maxima, sums)``.

    ``tile`` is the tile's address, ``first_key`` the first of the warp's keys in it, as a number of the request.
    """
    v_offset, key_frags, steps = geometry.v_offset, geometry.key_frags, geometry.query_steps
    num_fragments = (geometry.steps_ahead + 1) * step_registers_of(geometry)
    num_scores, num_weights = 2 * ROWS_PER_LANE * key_frags, ROWS_PER_LANE * key_frags
    always_checked = checks_every_tile(spec)
    multiply_keys, rescale = make_multiply_keys(spec, geometry), make_rescale(geometry)
    weighing = make_weigh(spec, geometry)
    scale, weigh_alone = weighing[0], make_weigh_alone(geometry, weighing)
    find_non_finite = make_find_non_finite(spec, geometry)
    multiply_values, multiply_clean_values = (
        make_multiply_values(spec, geometry, cleans=cleans) for cleans in (False, True)
    )

    @cuda.jit(device=True, forceinline=True)
    def walk_tile(me, args, shared, record, tile, first_row, first_key, checked, queries, o, maxima, sums):
        fragments, s = cuda.local.array(num_fragments, uint32), cuda.local.array(num_scores, float32)
        p, factors = cuda.local.array(num_weights, uint32), cuda.local.array(ROWS_PER_LANE, float32)
        multiply_keys(me, shared, tile, queries, fragments, s, 0, steps)
        scale(me, args, record, first_row, first_key, checked, s)
        raised = weigh_alone(s, (maxima, sums), factors, p)
        if cuda.any_sync(uint32(FULL_WARP), raised):
            rescale(o, factors)
        values = tile + uint32(v_offset)
        if (always_checked or checked) and find_non_finite(me, values):
            multiply_clean_values(me, shared, uint32(0), values, p, o)
        else:
            multiply_values(me, shared, uint32(0), values, p, o)

    return walk_tile
