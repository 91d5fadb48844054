"""Tile shapes of the tensor-core kernel: who computes what, and where it lies in shared memory.

Two ways to share a tile among the warps of a block, both in row fragments of 16 query rows:

    teams   (head dims up to 256) every warp does everything for one row fragment: scores, softmax, and all columns of
            the output.  Up to four such warps are joined by others for the same rows, ``key_teams`` in all, which take
            different keys of a tile.  Of more, only the last one or two are (``tail_warps``), where an SM quarter would
            else have a warp more than the others: these take whole tiles in turn.  Warps that share rows are merged at
            the end of a segment.
    roles   (MLA) a row's 512 output columns do not fit beside its queries, so the work is split by kind:
            ``score_warps`` score warps keep the queries, and the first ``row_frags`` of them, one a fragment, make the
            weights P; ``value_warps`` value warps, each with its slice of the columns for all rows, keep the outputs
            and also fetch the keys.  P passes through shared memory.

``choose_tiles`` in planner.py picks the shape, and its reasons stand there.

Row fragments of a warp:    ``shared_frags`` it multiplies keys with, one it makes weights of, ``row_frags`` it keeps
outputs of.  Teams: the same one.  Roles: those that score warps share, one of them or none, and all of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbverify.kernels.geometry import SEGMENT_FIELDS, WARP, chunk_bytes, merge_scratch_bytes, table_bytes

FRAG_ROWS = 16  # rows of an mma
FRAG_KEYS = 16  # keys of an mma of P and V
SM_QUARTERS = 4  # schedulers of an SM, each with its tensor core; warp w of a block is in quarter w % 4
LINE_BYTES = 128  # of all banks of shared memory
PAD_BYTES = 16  # after each row that is not of whole lines (rows.py)
LINE_STEPS = LINE_BYTES // 32  # k16 steps of a line

# Measured on an H200: partial states, written and merged, of all blocks together; of one block an mma, and pool rows.
PARTIAL_BYTES_PER_CLOCK, CLOCKS_PER_MMA, POOL_BYTES_PER_CLOCK = 1100, 2.7, 20
SEGMENT_CLOCKS = 12_000  # to look a segment up, fill the ring, and write what came out


@dataclass(frozen=True)
class MmaGeometry:
    """Constants of one tensor-core kernel.  Offsets into shared memory are in bytes; regions in this order:

        ring        [stages] of a key tile: K rows, then V rows if they are apart, as kernels/rows.py has them
        raw         [raw_stages] of a key tile as the pool has it (fp8): K rows, then V rows, not padded
        weights     [2, team_keys / 16, row_frags, lanes, 4]  P as mma fragments, 32-bit pairs (roles)
        factors     [2, rows_per_tile]  float32, rescaling of a row's output by the last tile (roles)
        flags       [2, 4]  uint32, one a row fragment: some factor is not 1 (roles)
        indices     [index_slots, keys_per_tile]  uint32, pool rows of the tiles to come
        exchange    [2, row_frags, column_parts - 1, key_frags, lanes, 4]  float32, parts of scores
        states      [warps, 16, 2]  float32, (m, l) of a warp's rows (if there are several key teams)
        finals      [rows_per_tile]  float32, factors of the rows' outputs
        queries     [score_warps, query_rest, lanes, 4]  32-bit pairs: fragments for which there is no register
        barriers    [2 stages]  8 bytes each
        segments    [2, SEGMENT_FIELDS]  int64, this segment and the last one (kernels/segments.py)
        chunks      [warps, 8]  int64, see reduce/merge.py
        table       [2, max_requests + 1]  int32, see kernels/schedule.py

    The first of two dimensions is the parity of the tile.
    """

    head_dim_qk: int
    head_dim_v: int
    shared_kv: bool
    row_frags: int  # whose outputs a warp has; teams: 1
    value_warps: int  # teams: 0
    row_teams: int  # roles: 1
    key_teams: int  # roles: 1
    team_keys: int
    tail_warps: int  # teams: of row_teams, the last, whose rows key_teams warps share by tiles; 0: all, by keys
    column_parts: int  # score warps that share fragments, each with a part of the columns; teams: 1
    cache_bytes: int  # of an element in the pool: 2, or 1 for fp8
    stages: int
    raw_stages: int  # fp8: tiles on their way; they are widened into the ring.  Else 0
    query_steps_kept: int
    can_suspend: bool

    # --- warps

    @property
    def has_roles(self) -> bool:
        """Score and value warps, not teams."""
        return self.value_warps > 0

    @property
    def warps(self) -> int:
        """Warps of a block."""
        if self.has_roles:
            return self.score_warps + self.value_warps
        return self.row_teams + (self.key_teams - 1) * self.shared_warps

    @property
    def shared_warps(self) -> int:
        """Teams: of the first ``row_teams`` warps the last, whose rows ``key_teams`` warps share."""
        return self.tail_warps or self.row_teams

    @property
    def first_fetching_warp(self) -> int:
        """The warps from here on fetch keys: of teams the last ones, which have less to multiply if any have."""
        return self.score_warps if self.has_roles else self.warps - self.fetching_warps

    @property
    def fetching_warps(self) -> int:
        """Warps that fetch keys: all value warps; of teams as many as there are rows for."""
        return self.value_warps if self.has_roles else -(-self.keys_per_tile // self.copied_rows)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def rows_per_tile(self) -> int:
        """Query rows of a block."""
        return FRAG_ROWS * self.row_frags * self.row_teams

    @property
    def keys_per_tile(self) -> int:
        """Keys of a tile."""
        return self.team_keys * (1 if self.tail_warps else self.key_teams)

    @property
    def copied_rows(self) -> int:
        """Rows of a tile that one warp fetches: whole passes."""
        rows_per_pass, warps = WARP // self.copy_lanes, self.value_warps or self.warps
        return -(-self.keys_per_tile // (warps * rows_per_pass)) * rows_per_pass

    @property
    def copy_lanes(self) -> int:
        """Lanes that fetch a row side by side: up to 8, a line of 128 bytes, if few are idle in the last step.

        36 pieces take 5 steps of 8 lanes, 90 % in use: so 8 warps have 4 rows each of 32, instead of 4 warps 8 rows.
        """
        return next(
            n for n in (8, 4, 2, 1) if all(_is_well_used(n, row) for row in (self.k_row_bytes, self.v_row_bytes))
        )

    @property
    def copy_passes(self) -> int:
        """Rows of a tile that one lane has a part in."""
        return self.copied_rows * self.copy_lanes // WARP

    # --- mma counts of one warp and tile

    @property
    def steps_ahead(self) -> int:
        """How many mma steps before its use an operand is requested from shared memory.

        Left to itself the assembler keeps one load on the way and lets each mma wait for it; but where registers are
        short (teams keep queries and outputs in one warp) it does better alone.
        """
        return 1 if self.has_roles else 0

    @property
    def query_steps(self) -> int:
        """k16 steps of the scores, all columns."""
        return self.head_dim_qk // 16

    @property
    def part_steps(self) -> int:
        """The steps of one score warp, for each of its ``shared_frags`` fragments."""
        return self.query_steps // self.column_parts

    @property
    def run_steps(self) -> int:
        """Steps side by side that are one warp's: parts take turns, so that no lane's address carries (rows.py)."""
        return run_steps_of(self.column_parts)

    @property
    def shared_frags(self) -> int:
        """Row fragments that a warp multiplies keys with."""
        return min(self.column_parts, self.row_frags)

    @property
    def warp_queries(self) -> int:
        """Query fragments of a warp, 16 rows x 16 columns."""
        return self.part_steps * self.shared_frags

    @property
    def key_frags(self) -> int:
        """n8 tiles of the scores."""
        return self.team_keys // 8

    @property
    def value_frags(self) -> int:
        """n8 tiles of the output."""
        return self.head_dim_v // 8 // max(1, self.value_warps)

    @property
    def score_mma(self) -> int:
        """mma instructions of a warp for the scores of a tile."""
        return self.warp_queries * self.key_frags

    @property
    def value_mma(self) -> int:
        """mma instructions of a warp for the output of a tile that every row sees."""
        return self.row_frags * self.value_frags * (self.team_keys // FRAG_KEYS)

    @property
    def all_mma(self) -> int:
        """mma instructions of a block for a tile that every row sees."""
        if self.has_roles:
            return self.score_warps * self.score_mma + self.value_warps * self.value_mma
        return self.row_teams * (self.keys_per_tile // self.team_keys) * (self.score_mma + self.value_mma)

    @property
    def split_cost(self) -> int:
        """What each partial state of a row unit costs the launch, in 1/1024 of what a tile costs a block."""
        partial = 4 * self.rows_per_tile * (self.head_dim_v + 2) / PARTIAL_BYTES_PER_CLOCK
        return round(1024 * partial / self._tile_clocks)

    @property
    def segment_cost(self) -> int:
        """How many tiles a block could walk in the time that it takes to begin and end a segment."""
        return round(SEGMENT_CLOCKS / self._tile_clocks)

    @property
    def _tile_clocks(self) -> float:
        row_bytes = self.keys_per_tile * (self.k_row_bytes + self.v_row_bytes)
        return max(CLOCKS_PER_MMA * self.all_mma, row_bytes / POOL_BYTES_PER_CLOCK)

    # --- bytes

    @property
    def separate_v(self) -> bool:
        """V has rows of its own."""
        return not self.shared_kv

    @property
    def k_row_bytes(self) -> int:
        """Of a row in the pool."""
        return self.cache_bytes * self.head_dim_qk

    @property
    def v_row_bytes(self) -> int:
        """Of a row in the V pool; 0 if V is part of K."""
        return self.cache_bytes * self.head_dim_v if self.separate_v else 0

    @property
    def k_pitch(self) -> int:
        """Distance of K rows in the ring."""
        return row_pitch(2 * self.head_dim_qk, LINE_BYTES if self.separate_v else 16 * self.value_frags)

    @property
    def v_pitch(self) -> int:
        """Distance of V rows in the ring."""
        return row_pitch(2 * self.head_dim_v) if self.separate_v else self.k_pitch

    @property
    def slot_bytes(self) -> int:
        """A tile in the ring."""
        return self.keys_per_tile * (self.k_pitch + (self.v_pitch if self.separate_v else 0))

    @property
    def v_offset(self) -> int:
        """First V row of a tile."""
        return self.keys_per_tile * self.k_pitch if self.separate_v else 0

    @property
    def raw_offset(self) -> int:
        """First byte of the tiles that are not widened yet."""
        return self.stages * self.slot_bytes

    @property
    def raw_slot_bytes(self) -> int:
        """One of these."""
        return self.keys_per_tile * (self.k_row_bytes + self.v_row_bytes)

    @property
    def index_slots(self) -> int:
        """Tiles whose pool rows are known: as many as there is room for on their way."""
        return self.raw_stages or self.stages

    @property
    def weights_offset(self) -> int:
        """First byte of P."""
        return self.raw_offset + self.raw_stages * self.raw_slot_bytes

    @property
    def weights_bytes(self) -> int:
        """P of a tile."""
        return self.team_keys // 16 * self.row_frags * WARP * 16 if self.has_roles else 0

    @property
    def factors_offset(self) -> int:
        """First byte of the factors."""
        return self.weights_offset + 2 * self.weights_bytes

    @property
    def flags_offset(self) -> int:
        """First byte of the flags."""
        return self.factors_offset + (2 * 4 * self.rows_per_tile if self.has_roles else 0)

    @property
    def indices_offset(self) -> int:
        """First byte of the indices."""
        return self.flags_offset + (2 * 16 if self.has_roles else 0)

    @property
    def exchange_offset(self) -> int:
        """First byte of the parts of scores."""
        return self.indices_offset + 4 * self.index_slots * self.keys_per_tile

    @property
    def exchange_bytes(self) -> int:
        """Those of a tile."""
        return self.row_frags * (self.column_parts - 1) * self.key_frags * WARP * 16

    @property
    def states_offset(self) -> int:
        """First byte of (m, l)."""
        return self.exchange_offset + 2 * self.exchange_bytes

    @property
    def finals_offset(self) -> int:
        """First byte of the rows' factors."""
        return self.states_offset + (8 * self.warps * FRAG_ROWS if self.key_teams > 1 else 0)

    @property
    def queries_offset(self) -> int:
        """First byte of the query fragments without a register."""
        return self.finals_offset + 4 * self.rows_per_tile

    @property
    def score_warps(self) -> int:
        """Warps that keep queries.  With roles those past ``row_frags`` only multiply, for the others."""
        return max(self.row_frags, self.column_parts) if self.has_roles else self.warps

    @property
    def query_rest(self) -> int:
        """Query fragments of a score warp that stay in shared memory."""
        return self.warp_queries - self.query_steps_kept

    @property
    def staging_parts(self) -> int:
        """How many times the score warps pass a part of their query columns through the ring: the fewest that fit."""
        wholes = [n for n in (1, 2, 3, 4, 6) if self.query_steps % (n * self.column_parts * self.run_steps) == 0]
        return next((n for n in wholes if self._staging_slots_of(n) <= self.stages), 1)

    @property
    def query_barriers(self) -> int:
        """How often all meet for queries in a segment: a part is there for those that share it; it is read."""
        return 2 * self.staging_parts - 1 if self.column_parts > 1 else 0

    @property
    def staging_lanes(self) -> int:
        """Lanes that fetch a part of a query row side by side: two or more, so that a pass is 16 rows at most."""
        return next(n for n in (8, 4, 2) if 2 * self.query_steps // self.staging_parts % n == 0)

    @property
    def staging_pitch(self) -> int:
        """Distance of query rows while a part of them passes."""
        return self._staging_pitch_of(self.staging_parts)

    @property
    def staging_warps(self) -> int:
        """Warps whose rows pass through one slot."""
        return self.slot_bytes // (FRAG_ROWS * self.staging_pitch)

    @property
    def staging_slots(self) -> int:
        """Slots of the ring that query rows pass through: 16 of each score warp that has some, of each team's warp."""
        return self._staging_slots_of(self.staging_parts)

    def _staging_pitch_of(self, parts: int) -> int:
        return row_pitch(2 * self.head_dim_qk // parts)

    def _staging_slots_of(self, parts: int) -> int:
        warps = self.row_frags if self.has_roles else self.warps
        return -(-warps // (self.slot_bytes // (FRAG_ROWS * self._staging_pitch_of(parts))))

    @property
    def barriers_offset(self) -> int:
        """First mbarrier: full[stages], empty[stages]."""
        return self.queries_offset + self.score_warps * self.query_rest * WARP * 16

    @property
    def num_barriers(self) -> int:
        """mbarriers of a block."""
        return 2 * self.stages

    @property
    def segments_offset(self) -> int:
        """First byte of the segment records."""
        return self.barriers_offset + 8 * self.num_barriers

    @property
    def tile_bytes(self) -> int:
        """Shared memory without the work table; the merge's scratch lies in the same place."""
        walk_end = -(-(self.segments_offset + 2 * 8 * SEGMENT_FIELDS) // 16) * 16
        return max(walk_end, self.merge_bytes) + chunk_bytes(self.warps)

    @property
    def merge_bytes(self) -> int:
        """Scratch of the merge."""
        return merge_scratch_bytes(self.warps)

    @property
    def team_merge_bytes(self) -> int:
        """Of the ring, at the end of a segment: outputs of the teams that share rows, all but the first."""
        return (self.key_teams - 1) * self.shared_warps * FRAG_ROWS * self.head_dim_v * 4

    def fits(self, shared_bytes: int) -> bool:
        """Whether a block finds room, and the ring is large enough for what passes through it beside keys."""
        passing = max(self.team_merge_bytes, self.staging_slots * self.slot_bytes)
        return self.tile_bytes <= shared_bytes and passing <= self.stages * self.slot_bytes

    @property
    def table_offset(self) -> int:
        """Where the work table starts, in 4-byte words."""
        return self.tile_bytes // 4

    def shared_bytes(self, max_requests: int) -> int:
        """Dynamic shared memory of a block that walks keys."""
        return self.tile_bytes + table_bytes(max_requests)


def row_pitch(width: int, slice_bytes: int = LINE_BYTES) -> int:
    """Distance of rows of ``width`` bytes, a multiple of 32, of which each reader takes a slice from its own on."""
    can_advance = slice_bytes % LINE_BYTES == 0 or LINE_BYTES % slice_bytes == 0
    return width if width % LINE_BYTES == 0 and can_advance else width + PAD_BYTES


def run_steps_of(column_parts: int) -> int:
    """``MmaGeometry.run_steps``: one where the number of parts divides a line's steps, else those of a line."""
    return 1 if LINE_STEPS % column_parts == 0 else LINE_STEPS


def _is_well_used(lanes: int, row_bytes: int) -> bool:
    """Whether of ``lanes`` lanes side by side in a row an eighth is idle at most, over its pieces of 16 bytes."""
    pieces = row_bytes // 16
    return 8 * pieces >= 7 * (-(-pieces // lanes) * lanes)
