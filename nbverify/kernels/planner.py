"""The choice of a tile: rows, keys and stages of the tensor-core kernel, from a spec and a device's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbverify.errors import ArgumentError
from nbverify.kernels.geometry import WARP, SimtGeometry, simt_geometry, table_bytes
from nbverify.kernels.tiles import FRAG_KEYS, FRAG_ROWS, SM_QUARTERS, MmaGeometry, run_steps_of
from nbverify.spec import VerifySpec

MAX_TILE_KEYS, MAX_ROLE_TILE_KEYS = 64, 32
MAX_SLOT_BYTES = 40 * 1024  # of a tile in the ring
MAX_WARPS = 8  # 255 registers a thread
MAX_ROLE_FRAGS = 4  # 64 rows
MAX_LEAN_WARPS = 12  # 168 registers a thread
MAX_STAGES = 8
MIN_STAGES = 3  # two tiles in use, one on its way
MIN_RAW_STAGES = 2
ONE_WARP_MAX_DIM = 256  # accumulators of 16 rows x 256 columns: 128 registers
TABLE_RESERVE = 1024  # bytes kept free for the work table, so that the tile does not depend on max_requests below 63
# Registers beside a warp's large arrays: fragments in flight, addresses, row states.  Found by compiling: less spills.
TEAM_REGISTERS, LEAN_TEAM_REGISTERS = 64, 80  # up to MAX_WARPS, and more
ROLE_REGISTERS = 24  # and the operands of two steps
SHORT_PRODUCT_STEPS, SHORT_PRODUCT_REGISTERS = 12, 16  # roles: weights stand closer together among fewer steps
WIDEN_REGISTERS = 8  # fp8: a second ring


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan depends on."""

    shared_bytes: int  # that a block may use (opt-in)
    can_suspend: bool  # a thread that waits at an mbarrier: compute capability 9.0 and up
    max_chunks: int  # of a request, with split="fixed": bits depend on them


# Opt-in shared memory of a block by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_BYTES = {
    (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376,
    (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448, (12, 0): 101_376, (12, 1): 101_376,
}  # fmt: skip
SMALLEST_SHARED_BYTES = min(SHARED_BYTES.values())
# SMs of a capability's largest GPU.  With split="fixed" a request alone is cut for so many, however many this GPU
# has: bits may depend on the capability, as tiles do, but not on the number of SMs.
MOST_SMS = {
    (8, 0): 108, (8, 6): 84, (8, 7): 16, (8, 9): 142, (9, 0): 132,
    (10, 0): 148, (10, 3): 160, (12, 0): 188, (12, 1): 48,
}  # fmt: skip
USUAL_SMS = MOST_SMS[9, 0]


def limits_of(cc: tuple[int, int], shared_bytes: int | None = None) -> DeviceLimits:
    """Limits of a compute capability; ``shared_bytes`` where a device or a user says it."""
    if shared_bytes is None:
        shared_bytes = SHARED_BYTES.get(cc, SMALLEST_SHARED_BYTES)
    return DeviceLimits(shared_bytes, can_suspend=cc >= (9, 0), max_chunks=MOST_SMS.get(cc, USUAL_SMS))


def choose_tiles(spec: VerifySpec, limits: DeviceLimits) -> MmaGeometry:
    """The tile of a spec on a device.  Its reasons:

    Teams or roles
        Teams while a row's output fits a warp's registers (head dims up to 256): nothing is exchanged.
    Rows
        As few as the spec's nodes x heads fill, in steps of 16: an unused row costs as much as a used one.  If they do
        not fit one tile, tiles of equal height.  Roles stop at 64 rows, whose outputs take half the register file.
        Where shared memory is small: the tallest tiles whose queries have room.
    Keys
        Tiles of 64 keys, and of 32 for MLA and for wide heads, make 16 to 40 KB a step; less where the device's shared
        memory is small.  With more a step there are too few on their way: 4 x 33 x 4/1 x 256 at 16k took 102 us with
        three tiles of 64 KB on an H200, and 81 with six of 32.
    Teams
        Eight warps at least: memory latency wants them.  Those that the rows leave over take keys of their own.  From
        five fragments on a block has one warp for each, and the slowest SM quarter sets the pace: nine warps would have
        three in one quarter and two in the others.  So the one or two fragments past a multiple of four are shared by
        four warps, one in each quarter, which take tiles in turn (1 x 33 x 32/8 x 128 at 32k: 94 instead of 105 us).
    Stages
        All that fit.  Two tiles are in use at a time, the others are on their way.  An fp8 tile is on its way in its
        own, smaller slots, and the ring has just what is in use and the tile that is being widened; with roles, where
        there is room, one more, so that the score warps need not wait for what the value warps widen meanwhile.

    Raises ArgumentError for widths that neither serves.
    """
    frags = -(-spec.max_nodes * spec.group // FRAG_ROWS)
    has_roles = max(spec.head_dim_qk, spec.head_dim_v) > ONE_WARP_MAX_DIM
    if has_roles:
        value_warps = next((n for n in (8, 4, 2) if spec.head_dim_v % (16 * n) == 0), 0)
        most = MAX_ROLE_FRAGS
        columns = spec.head_dim_v // max(1, value_warps)
        if not spec.shared_kv or value_warps == 0 or min(frags, most) * columns // 2 > 128:
            raise ArgumentError(
                "kernel",
                "head dims up to 256, or shared K/V and a head_dim_v that is a multiple of 128, for 'mma'; "
                "'simt' takes all",
                f"head_dim_qk={spec.head_dim_qk}, head_dim_v={spec.head_dim_v}, shared_kv={spec.shared_kv}",
            )
    else:
        most = MAX_LEAN_WARPS if spec.head_dim_v // 2 + spec.head_dim_qk // 4 <= 96 else MAX_WARPS
    shapes: list[dict[str, int]] = []
    for height in dict.fromkeys(-(-frags // n) for n in range(-(-frags // most), frags + 1)):  # from the tallest down
        if has_roles:
            shapes += [_roles(height, value_warps, keys) for keys in (MAX_ROLE_TILE_KEYS, FRAG_KEYS)]
        else:
            shapes += _teams(height)
    for shape in shapes:
        tiles = MmaGeometry(
            head_dim_qk=spec.head_dim_qk,
            head_dim_v=spec.head_dim_v,
            shared_kv=spec.shared_kv,
            **shape,
            column_parts=column_parts_of(shape["row_frags"], spec.head_dim_qk // 16) if has_roles else 1,
            cache_bytes=1 if spec.is_fp8 else 2,
            stages=MIN_STAGES,
            raw_stages=MIN_RAW_STAGES if spec.is_fp8 else 0,
            query_steps_kept=0,
            can_suspend=limits.can_suspend,
        )
        tiles = replace(tiles, query_steps_kept=query_steps_in_registers(tiles))
        room = limits.shared_bytes - max(TABLE_RESERVE, table_bytes(spec.max_requests))
        fitting = [one for one in deeper_rings(tiles) if one.fits(room)]
        if fitting and (tiles.slot_bytes <= MAX_SLOT_BYTES or tiles.team_keys == FRAG_KEYS):
            return fitting[-1]
    return tiles  # check_shared_memory says by how much it does not fit


def _roles(row_frags: int, value_warps: int, keys: int) -> dict[str, int]:
    return {
        "row_frags": row_frags, "value_warps": value_warps,
        "row_teams": 1, "key_teams": 1, "team_keys": keys, "tail_warps": 0,
    }  # fmt: skip


def _teams(height: int) -> list[dict[str, int]]:
    """Tiles of ``height`` fragments, a warp each and those that share them: from the one with the most keys down."""
    shapes = []
    if height > SM_QUARTERS:
        # Those past a multiple of four are shared, if they are one or two.
        tail = height % SM_QUARTERS if height % SM_QUARTERS <= SM_QUARTERS // 2 else 0
        teams = SM_QUARTERS // tail if tail else 1
        shapes = [(teams, MAX_TILE_KEYS // n, tail) for n in (1, 2, 4)]
    else:
        teams = MAX_WARPS // height
        while teams > 0:
            keys = [max(FRAG_KEYS, MAX_TILE_KEYS // teams // n // FRAG_KEYS * FRAG_KEYS) for n in (1, 2, 4)]
            shapes += [(teams, n, 0) for n in dict.fromkeys(keys)]
            teams //= 2
    return [
        {
            "row_frags": 1, "value_warps": 0, "row_teams": height, "key_teams": key_teams, "team_keys": keys,
            "tail_warps": tail,
        }
        for key_teams, keys, tail in shapes
    ]  # fmt: skip


def deeper_rings(tiles: MmaGeometry) -> list[MmaGeometry]:
    """With more and more tiles in use or on their way: in the ring, or of fp8 in the raw slots."""
    if not tiles.raw_stages:
        return [replace(tiles, stages=n) for n in range(MIN_STAGES, MAX_STAGES + 1)]
    most = MAX_STAGES - MIN_STAGES + MIN_RAW_STAGES
    rings = [replace(tiles, raw_stages=n) for n in range(MIN_RAW_STAGES, most + 1)]
    if tiles.has_roles:
        rings += [replace(tiles, stages=MIN_STAGES + 1, raw_stages=n) for n in range(MIN_RAW_STAGES + 1, most + 1)]
    return rings


def column_parts_of(row_frags: int, query_steps: int) -> int:
    """Score warps that share row fragments: four for one or two, three for three, two and two for four.

    Each reads its part of the columns of a key for all these fragments, and they exchange sums.  Two read half of the
    keys from shared memory that two by themselves would: for four fragments and 32 keys of 576 columns 72 KB instead of
    144, and 16 KB for the exchange; four would exchange what they save.  With one or two fragments the other warps only
    help, one in each quarter of the SM, with registers that are handed out anyway: one tensor core of four would else
    do all scores of a tile, and that chain was what a tile of 16 rows took (1 x 1 x 8 at 128k: 55.5 us, and so 48.3).
    Three fragments do better with a warp each, which leaves room for a stage more (16 x 17 x 8 at 8k: 179 us, with four
    warps 217).
    """
    choices = {1: (4, 2), 2: (4, 2), 3: (3,), 4: (2,)}[row_frags]
    return next((n for n in choices if query_steps % (n * run_steps_of(n)) == 0), 1)


def query_steps_in_registers(tiles: MmaGeometry) -> int:
    """How many fragments of the queries a warp keeps; the rest it reads from shared memory for each tile."""
    # Of this tile; with roles also of the last one, and of this one for all fragments that are shared.
    scores = (1 + tiles.shared_frags if tiles.has_roles else 1) * 4 * tiles.key_frags
    outputs = 0 if tiles.has_roles else 4 * tiles.value_frags
    whole_groups = -(-tiles.warps // 4) * 4  # registers are handed out to four warps at a time
    registers = min(255, 65536 // (whole_groups * WARP) // 8 * 8)
    operands = 2 * (2 * tiles.key_frags + 4 * tiles.shared_frags)
    of_teams = TEAM_REGISTERS if tiles.warps <= MAX_WARPS else LEAN_TEAM_REGISTERS
    others = ROLE_REGISTERS + operands if tiles.has_roles else of_teams
    others += WIDEN_REGISTERS if tiles.raw_stages else 0
    others += SHORT_PRODUCT_REGISTERS if tiles.has_roles and tiles.part_steps < SHORT_PRODUCT_STEPS else 0
    return max(0, min(tiles.warp_queries, (registers - scores - outputs - others) // 4))


def geometry_of(spec: VerifySpec, limits: DeviceLimits) -> SimtGeometry | MmaGeometry:
    """Geometry of the spec's kernel on a device."""
    return choose_tiles(spec, limits) if spec.kernel == "mma" else simt_geometry(spec)
