"""What a tile of keys costs a block of the tensor-core kernel: instructions and bytes, from the geometry alone.

``counts_of`` is the tile as it runs; ``ptx_counts`` is the program as it is written, where a loop's body stands once,
and ``copy_counts`` the same of what a fetch is made of, which the compiler may repeat.  The compiled tests compare them
with the PTX, so a walk that multiplies more, or loads more, than is said here does not pass.  Where a change to a walk
makes them differ on purpose, this is the place to say what it does now.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbverify.kernels.geometry import WARP
from nbverify.kernels.tiles import FRAG_KEYS, FRAG_ROWS, SM_QUARTERS, MmaGeometry

LDMATRIX_BYTES = WARP * 16  # ldmatrix.x4: four matrices of 8 rows of 16 bytes
COPY_BYTES = 16  # of a cp.async
FRAGMENT_BYTES = WARP * 16  # a lane's four registers of an operand, as it is kept in shared memory
# What the copies of a walk are made of: class -> the PTX opcode.
COPY_CLASSES = {
    "row copies": r"cp\.async\.cg\.shared\.global",  # 16 bytes of a key, a value or a query
    "index copies": r"cp\.async\.ca\.shared\.global",  # 4 bytes of an index list
    "waits for copies": r"cp\.async\.wait_group",
    "16-byte shared loads": r"ld\.shared\.v4\.u32",
}


@dataclass(frozen=True)
class TileCounts:
    """One tile of keys, one block, all of its warps."""

    mma: int
    busiest_mma: int  # of the SM quarter with the most
    ldmatrix: int
    shared_bytes: int  # through shared memory, both ways
    pool_bytes: int  # rows of the pool, which come from global memory


def score_ldmatrix(tiles: MmaGeometry) -> int:
    """ldmatrix of a warp for the scores of a tile: 16 keys x 16 columns each, for all the fragments that it shares."""
    return tiles.part_steps * (tiles.key_frags // 2)


def value_ldmatrix(tiles: MmaGeometry) -> int:
    """ldmatrix of a warp for the output of a tile: 16 keys x 16 columns each, for all its row fragments."""
    return tiles.team_keys // FRAG_KEYS * (tiles.value_frags // 2)


def weight_loads(tiles: MmaGeometry) -> int:
    """16-byte loads of a value warp for the weights of a tile; teams keep theirs in registers."""
    return tiles.team_keys // FRAG_KEYS * tiles.row_frags if tiles.has_roles else 0


def counts_of(tiles: MmaGeometry, frags: int | None = None) -> TileCounts:
    """A tile that every row sees.  ``frags``: row fragments that have rows, less in the last row tile of a request.

    A warp whose fragments, its own and those that it shares, have no rows multiplies nothing; value warps multiply all.
    Where warps take tiles in turn, this is the mean.
    """
    most = tiles.row_frags * tiles.row_teams
    frags = most if frags is None else min(frags, most)
    mma, ldmatrix, rest_loads, exchanged = [0.0] * SM_QUARTERS, 0.0, 0.0, 0
    for warp in range(tiles.warps):
        quarter, turns = warp % SM_QUARTERS, 1
        if tiles.has_roles:
            is_score_warp, is_value_warp = warp < tiles.score_warps, warp >= tiles.score_warps
            fragment = warp // tiles.column_parts * tiles.shared_frags  # the first that it multiplies
            owns = is_score_warp and warp < tiles.row_frags
        else:
            is_score_warp, is_value_warp, owns = True, True, False
            first_shared = tiles.row_teams - tiles.shared_warps
            fragment = warp if warp < first_shared else first_shared + (warp - first_shared) % tiles.shared_warps
            turns = tiles.key_teams if tiles.tail_warps and warp >= first_shared else 1
        if is_score_warp and fragment < frags:
            mma[quarter] += tiles.score_mma / turns
            ldmatrix += score_ldmatrix(tiles) / turns
            rest_loads += tiles.query_rest / turns
            exchanged += tiles.exchange_bytes // tiles.row_frags * owns
        if is_value_warp and (tiles.has_roles or fragment < frags):
            mma[quarter] += tiles.value_mma / turns
            ldmatrix += value_ldmatrix(tiles) / turns
    pool_bytes = tiles.keys_per_tile * (tiles.k_row_bytes + tiles.v_row_bytes)
    # An fp8 tile arrives as it is in the pool, and is read once and written again twice as wide.
    arriving_bytes = pool_bytes * (4 if tiles.raw_stages else 1)
    # With roles P is written once and read by every value warp.
    weights = tiles.weights_bytes * (1 + tiles.value_warps)
    # Sums of column parts are written once and read once.
    read_bytes = round(ldmatrix) * LDMATRIX_BYTES + round(rest_loads) * FRAGMENT_BYTES
    shared_bytes = read_bytes + arriving_bytes + weights + 2 * exchanged
    return TileCounts(round(sum(mma)), round(max(mma)), round(ldmatrix), shared_bytes, pool_bytes)


def wasted_mma(tiles: MmaGeometry, rows: int) -> float:
    """Share of the mma rows that no query row needs, where ``rows`` query rows (nodes x heads of a group) share keys.

    Of all mma of the rows' tiles for a tile of keys, scores and outputs: what rounding up to fragments of 16 rows, to
    all of those that warps share, and for value warps to whole row tiles, makes of them.
    """
    full, left = divmod(rows, tiles.rows_per_tile)
    issued = full * counts_of(tiles).mma
    if left:
        issued += counts_of(tiles, -(-left // FRAG_ROWS)).mma
    return 1 - rows / tiles.rows_per_tile * counts_of(tiles).mma / issued


def ptx_counts(tiles: MmaGeometry) -> tuple[int, int]:
    """(mma, ldmatrix) in the PTX of the kernel that walks keys.

    The scores stand once, and before them the queries of a segment, which pass through the ring: all of a fragment's
    columns, or of as many fragments a part; they stand a second time for warps that only multiply.  With roles the
    output stands once: values are cleaned in place.  With teams it stands a second time, where values are not finite:
    there it takes them out, and with V apart adds them, by two more mma where there is one.
    """
    copies = 1 if tiles.has_roles else 2
    repairs = 2 if tiles.separate_v and not tiles.has_roles else 0
    products = _score_programs(tiles)
    mma = products * tiles.score_mma + (copies + repairs) * tiles.value_mma
    return mma, tiles.warp_queries + products * score_ldmatrix(tiles) + copies * value_ldmatrix(tiles)


def _score_programs(tiles: MmaGeometry) -> int:
    """How often the scores' products stand in the program: for warps that own rows, and for those that do not."""
    return 2 if tiles.column_parts > tiles.shared_frags else 1


def copy_instructions(ptx: str) -> dict[str, int]:
    """PTX instructions of COPY_CLASSES by class."""
    return {name: len(re.findall(rf"^\s*{pattern}\b", ptx, re.M)) for name, pattern in COPY_CLASSES.items()}


def copy_counts(tiles: MmaGeometry, index_copies: int, waits: int) -> dict[str, int]:
    """Row copies and 16-byte shared loads in the PTX, for so many index copies and waits.

    A fetch stands in the program twice, or more often where the compiler unrolls the loop that fills the ring; each
    has an index copy a pass, and of fp8 a wait, as each part of the queries has one.  Row copies: the queries', and all
    of K and V beside each index copy.  Loads: queries without a register, the weights, the flags and what is cleaned
    (roles), the search for values that are not finite (teams), and rows that are widened (fp8), twice.
    """
    steps = sum(-(-row // (COPY_BYTES * tiles.copy_lanes)) for row in (tiles.k_row_bytes, tiles.v_row_bytes))
    widened = waits - tiles.staging_parts if tiles.raw_stages else 0
    wide_rows = 2 * widened * tiles.copy_passes * (2 if tiles.separate_v else 1)  # the first piece, and the next one
    for_values = weight_loads(tiles) + 2 if tiles.has_roles else 1
    return {
        "row copies": tiles.query_steps + index_copies * steps,
        "16-byte shared loads": _score_programs(tiles) * tiles.query_rest + for_values + wide_rows,
    }
