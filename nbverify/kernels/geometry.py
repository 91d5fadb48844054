"""Tile shapes, shared memory and workspace, in closed form.  No numba here: a plan from the cache needs only this.

Every quantity that the launcher must know before a kernel is compiled is computed here from the spec, and the
kernels take their constants from the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nbverify.errors import ArgumentError
from nbverify.spec import VerifySpec

WARP = 32
FULL_WARP = 0xFFFFFFFF  # all lanes, as the mask of a warp operation

# The plain kernel.  A lane owns one key of a tile (so a row's softmax is five shuffles) and a warp owns four rows
# (so that a key word read from shared memory serves four rows: below four the loads bind, above it the registers do).
SIMT_WARPS = 4
SIMT_ROWS_PER_WARP = 4
SIMT_KEYS_PER_TILE = WARP

# The merge (reduce/merge.py): a row's states are added in at most so many runs, a warp so many columns of it at a time.
MERGE_RUNS = 12
MERGE_COLUMNS = 4 * WARP
MERGE_CHUNK_FIELDS = 8  # int64 of a chunk's record
MERGE_RUN_BYTES = 4 * MERGE_COLUMNS + 16  # what a run adds up to: columns, m and l

SEGMENT_FIELDS = 18  # int64, of a segment's record (kernels/segments.py), in whole pieces of 16 bytes

MAX_ITEMS = 2**31 - 1  # of a launch: the work table counts in int32

CHECK_THREADS = 256  # the input checks of debug=True: one block

# split="fixed": a chunk shorter than 8 tiles costs more in partials (written and read once, float32) than its keys.
MIN_CHUNK_TILES = 8


class Geometry(Protocol):
    """What the schedule, the merge and the launcher need to know of a kernel."""

    @property
    def rows_per_tile(self) -> int:
        """Query rows of a row unit."""

    @property
    def keys_per_tile(self) -> int:
        """Keys of a tile: the quantum in which work is cut."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def warps(self) -> int:
        """Warps of a block."""

    @property
    def split_cost(self) -> int:
        """What each partial state of a row unit costs the launch, in 1/1024 of what a tile costs a block."""

    @property
    def segment_cost(self) -> int:
        """How many tiles a block could walk in the time that it takes to begin and end a segment."""

    @property
    def table_offset(self) -> int:
        """Where the work table starts in shared memory, in 4-byte words."""

    def shared_bytes(self, max_requests: int) -> int:
        """Dynamic shared memory of a block that walks keys."""


def table_bytes(max_requests: int) -> int:
    """The work table, see kernels/schedule.py."""
    return _round_up(2 * 4 * (max_requests + 1), 16)


def merge_scratch_bytes(warps: int) -> int:
    """Scratch of the merge, at the start of a block's shared memory: all runs of a chunk for each warp."""
    return warps * MERGE_RUNS * MERGE_RUN_BYTES


def chunk_bytes(warps: int) -> int:
    """The block's chunks (reduce/merge.py), which lie before the work table."""
    return 8 * MERGE_CHUNK_FIELDS * warps


@dataclass(frozen=True)
class SimtGeometry:
    """Constants of one plain kernel.  Offsets and sizes of the shared arrays are in 4-byte words.

    Shared memory of a block, in order (widths: W = head_dim / 2 words of two 16-bit elements):

        q_tile   [rows, Wqk]           32-bit words
        k_tile   [keys, Wqk + 1]       one word of padding: lanes read one row each, an odd stride has no bank conflict
        v_tile   [keys, Wv]            separate V only; MLA reads V out of k_tile
        weights  [rows, keys]          float32, P of this tile
        states   [rows, 2]             float32, (m, l) of a finished row
        o_tile   [rows, head_dim_v]    float32 accumulators, even columns then odd ones
        chunks   [warps, 8]            int64, see reduce/merge.py
        table    [2, max_requests + 1] int32, see kernels/schedule.py
    """

    rows_per_tile: int
    keys_per_tile: int
    rows_per_warp: int
    threads: int
    qk_words: int
    v_words: int
    q_offset: int
    k_offset: int
    k_stride: int
    v_offset: int
    v_stride: int
    weights_offset: int
    states_offset: int
    o_offset: int
    table_offset: int

    @property
    def split_cost(self) -> int:
        """As in ``tiles.MmaGeometry``: next to nothing, as long as a tile takes here."""
        return 0

    @property
    def segment_cost(self) -> int:
        """As in ``tiles.MmaGeometry``."""
        return 0

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // WARP

    def shared_bytes(self, max_requests: int) -> int:
        """Dynamic shared memory of a block that walks keys."""
        return 4 * self.table_offset + table_bytes(max_requests)


def simt_geometry(spec: VerifySpec) -> SimtGeometry:
    """Geometry of the plain kernel: the same tile for every spec, so that only widths differ."""
    rows = SIMT_WARPS * SIMT_ROWS_PER_WARP
    keys = SIMT_KEYS_PER_TILE
    qk_words, v_words = spec.head_dim_qk // 2, spec.head_dim_v // 2
    k_stride = qk_words + 1
    q_offset = 0
    k_offset = q_offset + rows * qk_words
    v_offset = k_offset if spec.shared_kv else k_offset + keys * k_stride
    v_stride = k_stride if spec.shared_kv else v_words
    weights_offset = v_offset + keys * v_stride
    states_offset = weights_offset + rows * keys
    o_offset = states_offset + rows * 2
    tile_end = _round_up(max(o_offset + rows * spec.head_dim_v, merge_scratch_bytes(SIMT_WARPS) // 4), 4)
    table_offset = tile_end + chunk_bytes(SIMT_WARPS) // 4
    return SimtGeometry(
        rows_per_tile=rows,
        keys_per_tile=keys,
        rows_per_warp=SIMT_ROWS_PER_WARP,
        threads=SIMT_WARPS * WARP,
        qk_words=qk_words,
        v_words=v_words,
        q_offset=q_offset,
        k_offset=k_offset,
        k_stride=k_stride,
        v_offset=v_offset,
        v_stride=v_stride,
        weights_offset=weights_offset,
        states_offset=states_offset,
        o_offset=o_offset,
        table_offset=table_offset,
    )


@dataclass(frozen=True)
class Step:
    """One kernel of a launch."""

    body: str  # name of the body
    threads: int
    shared_bytes: int  # dynamic
    one_block: bool = False  # else the plan's grid
    once_a_step: bool = False  # not part of a launch: BoundVerify.schedule


def steps(spec: VerifySpec, geometry: Geometry, *, debug: bool) -> tuple[Step, ...]:
    """The kernels of a spec, in launch order; ``kernels.bodies.make_bodies`` makes their bodies in the same order."""
    walk = geometry.shared_bytes(spec.max_requests)
    merge = merge_scratch_bytes(geometry.warps) + chunk_bytes(geometry.warps) + table_bytes(spec.max_requests)
    schedule = Step("schedule", geometry.threads, table_bytes(spec.max_requests), once_a_step=True)
    before = ((schedule,) if spec.schedule == "step" else ()) + (
        (Step("check", CHECK_THREADS, 0, one_block=True),) if debug else ()
    )
    if spec.reduction == "grid_sync":
        return (*before, Step("verify", geometry.threads, walk))
    return (
        *before,
        Step("verify_split", geometry.threads, walk),
        Step("verify_merge", geometry.threads, merge),
    )


def check_shared_memory(spec: VerifySpec, geometry: Geometry, limit_bytes: int) -> None:
    """Refuse, with both numbers, a spec whose tile and work table do not fit a block's shared memory."""
    need = geometry.shared_bytes(spec.max_requests)
    if need > limit_bytes:
        table = table_bytes(spec.max_requests)
        raise ArgumentError(
            "spec",
            f"at most {limit_bytes} bytes of shared memory a block",
            f"{need} bytes: {need - table} for tiles of head_dim_qk={spec.head_dim_qk}, head_dim_v={spec.head_dim_v}, "
            f"{table} for the work table of max_requests={spec.max_requests}",
        )


def check_items(spec: VerifySpec, geometry: Geometry) -> None:
    """Refuse limits under which a launch may have more items of work (see kernels/schedule.py) than it can count."""
    of_unit = -(-spec.max_kv_len // geometry.keys_per_tile) + geometry.segment_cost
    items = spec.max_requests * units_per_request(spec, geometry) * of_unit
    if items > MAX_ITEMS:
        raise ArgumentError(
            "spec",
            f"at most {MAX_ITEMS:,} tiles of keys in a launch",
            f"{items:,}: max_requests={spec.max_requests} x {units_per_request(spec, geometry)} row units of "
            f"max_nodes={spec.max_nodes} x max_kv_len={spec.max_kv_len} in tiles of {geometry.keys_per_tile}",
        )


def units_per_request(spec: VerifySpec, geometry: Geometry) -> int:
    """Row units (KV head x row tile) of a request with ``max_nodes`` nodes."""
    return spec.num_kv_heads * -(-spec.max_nodes * spec.group // geometry.rows_per_tile)


def max_splits(spec: VerifySpec, geometry: Geometry, max_chunks: int) -> int:
    """``split="fixed"``: most chunks of one row unit, those of a request with one row tile."""
    return max(1, min(max_chunks // spec.num_kv_heads, _most_chunks(spec, geometry)))


def _most_chunks(spec: VerifySpec, geometry: Geometry) -> int:
    """Chunks of MIN_CHUNK_TILES in ``max_kv_len`` keys."""
    return -(-spec.max_kv_len // (geometry.keys_per_tile * MIN_CHUNK_TILES))


def num_partials(spec: VerifySpec, geometry: Geometry, grid: int, max_chunks: int) -> int:
    """Partial states that one launch can leave.

    balanced: a block adds one segment, and so does a row unit's start; the state's number is block + unit.
    fixed: a request has ``max_chunks`` at most, or one for each of its row units if those are more.
    """
    units = units_per_request(spec, geometry)
    if spec.split == "fixed":
        return spec.max_requests * min(max(max_chunks, units), units * _most_chunks(spec, geometry))
    return grid + spec.max_requests * units


def workspace(spec: VerifySpec, geometry: Geometry, grid: int, max_chunks: int) -> dict[str, int]:
    """Elements of the buffers that every plan has of its own (contract.py says of which type)."""
    rows = num_partials(spec, geometry, grid, max_chunks) * geometry.rows_per_tile
    elements = {"partial_o": rows * spec.head_dim_v, "partial_ml": rows * 2, "arrivals": 1}
    if spec.schedule == "step":
        elements |= {"step_table": 2 * (spec.max_requests + 1), "step_segments": grid * SEGMENT_FIELDS}
    return elements


def workspace_bytes(spec: VerifySpec, geometry: Geometry, grid: int, max_chunks: int) -> int:
    """Device bytes of the partial states: o and (m, l), float32."""
    return 4 * num_partials(spec, geometry, grid, max_chunks) * geometry.rows_per_tile * (spec.head_dim_v + 2)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
