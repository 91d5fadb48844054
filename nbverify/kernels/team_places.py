"""Who does what among teams: which rows, which keys of a tile and which tiles are a warp's (see tiles.py).

The first ``row_teams`` warps have 16 rows each.  Every further one shares those of one of the last ``shared_warps``:
with its own keys of each tile, or, where only some rows are shared, with its own tiles.
"""

from numba import cuda, uint32

from nbverify.kernels.tiles import FRAG_ROWS


def make_find_team(geometry):
    """``find_first_row(warp)``: of its rows in the tile; ``find_team(warp)``: 0 for their first warp, then 1, 2 .."""
    row_teams, shared_warps = geometry.row_teams, geometry.shared_warps

    @cuda.jit(device=True, forceinline=True)
    def find_first_row(warp):
        owner = uint32(warp)
        if warp >= uint32(row_teams):
            owner = uint32(uint32(row_teams - shared_warps) + (warp - uint32(row_teams)) % uint32(shared_warps))
        return uint32(owner * uint32(FRAG_ROWS))

    @cuda.jit(device=True, forceinline=True)
    def find_team(warp):
        if warp < uint32(row_teams):
            return uint32(0)
        return uint32(uint32(1) + (warp - uint32(row_teams)) // uint32(shared_warps))

    return find_first_row, find_team


def make_find_first_key(geometry):
    """``find_first_key(warp)``: where in each of its tiles the ``team_keys`` keys of a warp start."""
    team_keys, by_tiles = geometry.team_keys, geometry.tail_warps > 0
    _, find_team = make_find_team(geometry)

    @cuda.jit(device=True, forceinline=True)
    def find_first_key(warp):
        if by_tiles:
            return uint32(0)
        return uint32(find_team(warp) * uint32(team_keys))

    return find_first_key


def make_takes_tile(geometry):
    """``takes_tile(warp, i)``: whether tile ``i`` of a segment, counted from 0, is one of the warp's."""
    key_teams, by_tiles = geometry.key_teams, geometry.tail_warps > 0
    first_shared = geometry.row_teams - geometry.shared_warps
    _, find_team = make_find_team(geometry)

    @cuda.jit(device=True, forceinline=True)
    def takes_tile(warp, i):
        if not by_tiles:
            return True
        return warp < uint32(first_shared) or uint32(i) % uint32(key_teams) == find_team(warp)

    return takes_tile
