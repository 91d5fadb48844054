"""How long a launch should take: a model of the tensor-core kernel, from instruction counts and a chip's rates.

It is part of the package, and not of the benchmarks, because ``nbverify compile --report`` uses it where there is no
GPU to measure.  ``docs/model.md`` has it in words, with its errors against the H200's record.

    tile   = max(memory, max(tensor, shared) + latency)
    launch = fixed + max over blocks (sum of their tiles) + partial states, written and read

    memory    bytes of the tile's rows / the SM's share of the read bandwidth; a row that several row tiles of a request
              walk comes from memory once, and from L2 after that
    tensor    mma of the busiest quarter of the SM x clocks of an mma there
    shared    bytes through shared memory / 128 bytes a clock
    latency   what the warps of a block wait for each other and for their operands, in clocks: as long as the chain of
              products of a warp, which is one for each 16 columns of a row fragment, and the same for each tile but
              where warps without a fragment take some of them (column parts: a quarter with 16 rows, half with 32)
    fixed     launch, cold instruction and index reads, first rows, grid barrier, merge of one state: microseconds

Memory stands outside of the sum because tiles are fetched some stages ahead; the pipes of the SM stand inside, because
the chain that waits is the chain that uses them.  Of B blocks on an SM one waits while another works: B tiles take
max(B x memory, B x max(tensor, shared), max(tensor, shared) + latency).

``LATENCY`` holds the only two numbers that are fitted, once, to all shapes of a run on an H200 (``benchmarks.model``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbverify.kernels.tiles import FRAG_ROWS, MmaGeometry
from nbverify.spec import VerifySpec
from nbverify.tile_counts import SM_QUARTERS, counts_of

MMA_FLOP = 2 * 16 * 8 * 16  # m16n8k16
SHARED_BYTES_A_CLOCK = 128  # of an SM


@dataclass(frozen=True)
class Chip:
    """Rates that a kernel can reach."""

    name: str
    cc: str
    sms: int
    clock_ghz: float
    read_gb_s: float
    mma_tflop_s: float  # mma.sync m16n8k16, 16-bit operands, float32 sums
    source: str

    @property
    def mma_clocks(self) -> float:
        """Clocks of an mma in a quarter of an SM."""
        return MMA_FLOP * self.sms * SM_QUARTERS * self.clock_ghz / (1e3 * self.mma_tflop_s)


CHIPS = {
    chip.cc: chip
    for chip in (
        Chip(
            "NVIDIA H200", "9.0", 132, 1.75, 4650.0, 650.0,
            "rates: ceilings of the benchmark's record, which the check against it replaces by the record's own; "
            "clock: while the kernel runs (docs/kernel-fast.md); boost is 1.98",
        ),
        # 16 clocks an mma in a quarter (1,024 FLOP a clock and SM, measured in public) at the boost clock.
        Chip(
            "RTX PRO 6000 Blackwell", "12.0", 188, 2.617, 0.92 * 1792, 503.8,
            "nothing measured by us: 92 % of the data sheet's 1,792 GB/s; an mma.sync every 16 clocks at boost",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Latency:
    """The two fitted constants, of the kernels as they are."""

    tile_clocks: float
    fixed_us: float


LATENCY = Latency(tile_clocks=1025, fixed_us=15.2)


@dataclass(frozen=True)
class Batch:
    """An even batch: ``requests`` of ``nodes`` nodes behind ``prefix`` tokens."""

    requests: int
    nodes: int
    prefix: int


@dataclass(frozen=True)
class Estimate:
    """A modelled launch.  Microseconds; the tile's parts are those of a full tile, on an SM with all its blocks."""

    us: float
    walk_us: float
    partials_us: float
    tiles: int  # of the block with the most work
    memory_us: float
    tensor_us: float
    shared_us: float
    latency_us: float

    @property
    def bound(self) -> str:
        """What a full tile waits for."""
        pipes = {"tensor": self.tensor_us, "shared memory": self.shared_us}
        pipe = max(pipes, key=lambda name: pipes[name])
        if self.memory_us >= pipes[pipe] + self.latency_us:
            return "memory"
        return pipe if pipes[pipe] >= self.latency_us else "latency"


def estimate(
    spec: VerifySpec,
    tiles: MmaGeometry,
    batch: Batch,
    chip: Chip,
    *,
    blocks_per_sm: int = 1,
    latency: Latency = LATENCY,
) -> Estimate:
    """The launch of a batch with ``split="balanced"``."""
    head_rows = batch.nodes * spec.group
    row_tiles = -(-head_rows // tiles.rows_per_tile)
    grid = chip.sms * blocks_per_sm

    def parts(frags: int) -> tuple[float, float, float]:
        """Microseconds of a tile: memory, tensor, shared."""
        counts = counts_of(tiles, frags)
        memory_us = counts.pool_bytes / row_tiles * chip.sms / (1e3 * chip.read_gb_s)
        tensor_us = counts.busiest_mma * chip.mma_clocks / (1e3 * chip.clock_ghz)
        return memory_us, tensor_us, counts.shared_bytes / SHARED_BYTES_A_CLOCK / (1e3 * chip.clock_ghz)

    chain = tiles.shared_frags / tiles.column_parts  # of the products of a whole fragment
    latency_us = chain * latency.tile_clocks / (1e3 * chip.clock_ghz)

    def tile_us(frags: int) -> float:
        memory_us, tensor_us, shared_us = parts(frags)
        pipe_us = max(tensor_us, shared_us)
        return max(blocks_per_sm * memory_us, blocks_per_sm * pipe_us, pipe_us + latency_us)

    longest_us, most_tiles, partials = 0.0, 0, 0
    for block in shares(spec, tiles, batch, grid):
        longest_us = max(longest_us, sum(count * tile_us(frags) for frags, count, _ in block))
        most_tiles = max(most_tiles, sum(count for _, count, _ in block))
        partials += sum(not direct for _, _, direct in block)
    state_bytes = 4 * tiles.rows_per_tile * (spec.head_dim_v + 2)
    partials_us = 2 * partials * state_bytes / (1e3 * chip.read_gb_s)
    memory_us, tensor_us, shared_us = (blocks_per_sm * us for us in parts(tiles.rows_per_tile // FRAG_ROWS))
    return Estimate(
        us=latency.fixed_us + longest_us + partials_us,
        walk_us=longest_us,
        partials_us=partials_us,
        tiles=most_tiles,
        memory_us=memory_us,
        tensor_us=tensor_us,
        shared_us=shared_us,
        latency_us=latency_us,
    )


def limit_us(spec: VerifySpec, batch: Batch, chip: Chip) -> float:
    """The least a launch can take: each key read once, or every product made once, whatever is longer."""
    keys, widths = batch.prefix + batch.nodes, spec.head_dim_qk + spec.head_dim_v
    rows = batch.requests * batch.nodes * spec.num_q_heads
    flop = 2 * rows * keys * widths
    row_elements = spec.num_kv_heads * (spec.head_dim_qk if spec.shared_kv else widths)
    kv_itemsize = 1 if spec.is_fp8 else 2
    num_bytes = batch.requests * keys * row_elements * kv_itemsize + 2 * rows * widths
    return max(num_bytes / (1e3 * chip.read_gb_s), flop / (1e6 * chip.mma_tflop_s))


def shares(spec: VerifySpec, tiles: MmaGeometry, batch: Batch, grid: int) -> Iterator[list[tuple[int, int, bool]]]:
    """For each block that has work, its segments: (row fragments with rows, tiles of keys, is the whole row unit).

    The cuts of kernels/schedule.py: key tiles of all row units in one line, start items before those of each unit, cut
    evenly among the blocks that do not idle.
    """
    head_rows = batch.nodes * spec.group
    unit_tiles = -(-(batch.prefix + batch.nodes) // tiles.keys_per_tile)
    row_tiles = -(-head_rows // tiles.rows_per_tile)
    units = batch.requests * spec.num_kv_heads * row_tiles
    start_items = max(0, min(tiles.segment_cost, units * unit_tiles // grid - 1))
    num_items = units * (unit_tiles + start_items)
    blocks = _active_blocks(num_items, grid, tiles.split_cost)
    for block in range(blocks):
        position, end = block * num_items // blocks, (block + 1) * num_items // blocks
        segments = []
        while end > position:
            unit, item = divmod(position, unit_tiles + start_items)
            position += max(0, start_items - item)
            first = max(0, item - start_items)
            count = min(end - position, unit_tiles - first)
            if count <= 0:  # no tile of the next unit is left in the share
                break
            row_tile = unit // spec.num_kv_heads % row_tiles  # the KV head varies fastest
            rows = min(tiles.rows_per_tile, head_rows - row_tile * tiles.rows_per_tile)
            segments.append((-(-rows // FRAG_ROWS), count, count == unit_tiles))
            position += count
        yield segments


def _active_blocks(num_items: int, grid: int, split_cost: int) -> int:
    """As in kernels/schedule.py."""
    blocks = min(grid, num_items)
    if num_items < blocks**2 // 1024 * split_cost:
        each = 1
        while each * (each + 1) * 1024 < num_items * split_cost:
            each += 1
        blocks = min(blocks, -(-num_items // each))
    return blocks
