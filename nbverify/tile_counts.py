"""What a tile of keys costs a block of the tensor-core kernel: instructions and bytes, from the geometry alone.

``counts_of`` is the tile as it runs; ``ptx_counts`` is the program as it is written, where a loop's body stands once.
The compiled tests compare the second with the PTX, so a walk that multiplies more, or loads more, than is said here
does not pass.  Where a change to a walk makes them differ on purpose, this is the place to say what it does now.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbverify.kernels.geometry import WARP
from nbverify.kernels.tiles import FRAG_KEYS, MmaGeometry
from nbverify.spec import VerifySpec

SM_QUARTERS = 4  # schedulers of an SM, each with its tensor core; warp w of a block is in quarter w % 4
LDMATRIX_BYTES = WARP * 16  # ldmatrix.x4: four matrices of 8 rows of 16 bytes


@dataclass(frozen=True)
class TileCounts:
    """One tile of keys, one block, all of its warps."""

    mma: int
    busiest_mma: int  # of the SM quarter with the most
    ldmatrix: int
    shared_bytes: int  # through shared memory, both ways
    pool_bytes: int  # rows of the pool, which come from global memory


def score_ldmatrix(tiles: MmaGeometry) -> int:
    """ldmatrix of a warp for the scores of a tile: two n8 tiles of keys each, and queries that have no register."""
    return tiles.query_steps * (tiles.key_frags // 2) + tiles.query_rest


def value_ldmatrix(tiles: MmaGeometry) -> int:
    """ldmatrix of a warp for the output of a tile: 16 keys x 16 columns each, for all its row fragments."""
    return tiles.team_keys // FRAG_KEYS * (tiles.value_frags // 2)


def counts_of(tiles: MmaGeometry, frags: int | None = None) -> TileCounts:
    """A tile that every row sees.  ``frags``: row fragments that have rows, less in the last row tile of a request.

    A warp whose fragment has no rows multiplies nothing; value warps multiply all fragments.
    """
    most = tiles.row_frags * tiles.row_teams
    frags = most if frags is None else min(frags, most)
    mma, ldmatrix = [0] * SM_QUARTERS, 0
    for warp in range(tiles.warps):
        is_value_warp = tiles.has_roles and warp >= tiles.row_frags
        fragment = warp if tiles.has_roles else warp % tiles.row_teams
        if not is_value_warp and fragment < frags:
            mma[warp % SM_QUARTERS] += tiles.score_mma
            ldmatrix += score_ldmatrix(tiles)
        if is_value_warp or (not tiles.has_roles and fragment < frags):
            mma[warp % SM_QUARTERS] += tiles.value_mma
            ldmatrix += value_ldmatrix(tiles)
    pool_bytes = tiles.keys_per_tile * (tiles.k_row_bytes + tiles.v_row_bytes)
    # With roles P is written once and read by every value warp.
    weights = tiles.weights_bytes * (1 + tiles.value_warps)
    return TileCounts(sum(mma), max(mma), ldmatrix, ldmatrix * LDMATRIX_BYTES + pool_bytes + weights, pool_bytes)


def ptx_counts(spec: VerifySpec, tiles: MmaGeometry) -> tuple[int, int]:
    """(mma, ldmatrix) in the PTX of the kernel that walks keys.

    The scores stand once.  The output stands twice, for tiles that every row sees and for checked ones, unless every
    tile is checked (values.py).  With V apart, a checked tile may also have to add values that are not finite: two more
    mma where there is one.
    """
    always_checked = spec.score_mod is not None or not spec.prefix_visible
    copies = 1 if always_checked else 2
    values = tiles.value_mma * (copies + (2 if tiles.separate_v else 0))
    return tiles.score_mma + values, score_ldmatrix(tiles) + copies * value_ldmatrix(tiles)
