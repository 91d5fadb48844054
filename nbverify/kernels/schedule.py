"""How work is split: the one place to edit for another split policy.

    head row   one of the n * group query rows that read a KV head of a request: (node, head in group), node major.
    row unit   (request, KV head, tile of head rows), the KV head varying fastest.
    item       the quantum of work of a row unit: one tile of keys (balanced) or one chunk of tiles (fixed).
    line       all items of all row units, request after request, unit after unit.  With balanced each unit begins with
               some start items, which stand for the time that a block takes to begin with a unit and have no tile
               (``start_items_of``).  Block k of a grid of G takes the items [k * I / G, (k + 1) * I / G) of the I
               items: no block has more than one item above the average.  With few items some blocks stay idle
               (``active_blocks``).
    segment    what a block works on at a time: a row unit x a range of key tiles.
                 balanced   consecutive items of one unit that fall to one block
                 fixed      exactly one item, whoever runs it
    direct     a segment that has all items of its unit writes the result; any other writes a partial state.

Bits: a partial state depends on where its unit was cut.  With balanced the cuts depend on the whole batch and the
grid; with fixed they depend on the request's own c and n (and the spec and the compute capability), so its bits do too,
and on nothing else.

Numbers of partial states, which are their places in the workspace
    balanced   block + unit.  Along the line every further segment has a larger block or a larger unit, so no two
               segments share a number and there are fewer than G + units of them.
    fixed      the item's position on the line.

The work table in shared memory: ``table[0, b]`` items, without start items, and ``table[1, b]`` units before request
b, for b in [0, B].
Every block makes its own copy: B loads of lengths, one warp scan.  Items and units are int32: a plan whose limits allow
more items is refused (geometry.check_items).  Divisions are those of ``ptx``: Python's ``//`` of two variables is a
64-bit division that rounds down, some hundred instructions, and every block begins by fetching its instructions cold.
"""

from typing import NamedTuple

from numba import cuda, int32, uint32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, MIN_CHUNK_TILES, WARP
from nbverify.kernels.requests import Request, load_request


class Segment(NamedTuple):
    """A row unit x a range of key tiles."""

    request: Request
    kv_head: int
    first_row: int  # head row of the unit's first row
    first_tile: int
    end_tile: int
    direct: bool
    state: int  # number of the partial state, unless direct
    next_position: int  # on the line


class UnitStates(NamedTuple):
    """The partial states of a row unit; one means that it was written directly."""

    request: int  # its number
    kv_head: int
    first_row: int
    first_state: int
    num_states: int


@cuda.jit(device=True, forceinline=True)
def quotient(dividend, divisor):
    """``dividend // divisor`` of numbers that are not negative and fit int32."""
    return int32(ptx.divide_u32(dividend, divisor))


@cuda.jit(device=True)
def block_begin(num_items, num_blocks, block):
    """``block * num_items // num_blocks``: first item of a block's share.

    In 32 bits: the rest of items / blocks is below the grid's size, and its product with a block's number below 2^32.
    """
    each = quotient(num_items, num_blocks)
    rest = num_items - each * num_blocks
    return int32(block * each + quotient(block * rest, num_blocks))


@cuda.jit(device=True)
def block_of(num_items, num_blocks, position):
    """The block whose share holds an item: the largest k with ``k * num_items < (position + 1) * num_blocks``."""
    dividend = uint64(position + 1) * uint64(num_blocks) - uint64(1)
    return int32(ptx.divide_u64(dividend, uint64(num_items)))


@cuda.jit(device=True)
def chunk_tiles_of(num_tiles, num_units, max_chunks):
    """Key tiles of one chunk of a request of so many row units (fixed).

    A unit has at most ``max_chunks // num_units`` of them, or one: a long request alone has about one for each of so
    many SMs.  None but the last is shorter than MIN_CHUNK_TILES.
    """
    most = max(int32(1), quotient(max_chunks, max(int32(1), num_units)))
    return max(int32(MIN_CHUNK_TILES), quotient(num_tiles + most - 1, most))


@cuda.jit(device=True)
def upper_request(starts, units, start_items, num_requests, position):
    """The request ``b`` with ``start(b) <= position < start(b + 1)``; requests without work are never returned.

    ``start(b)`` is ``starts[b] + start_items * units[b]``.
    """
    low, high = int32(0), int32(num_requests)
    while high - low > 1:
        middle = int32((low + high) >> 1)
        if starts[uint32(middle)] + start_items * units[uint32(middle)] <= position:
            low = middle
        else:
            high = middle
    return low


class Schedule(NamedTuple):
    """The device functions of a split policy."""

    prepare: object  # prepare(args, table): all threads of a block fill the work table
    work_of: object  # work_of(args, b) -> items and units of request b
    share: object  # share(args, table) -> (position, end) of this block on the line; empty for an idle block
    segment_at: object  # segment_at(args, table, position, end) -> Segment
    unit_states: object  # unit_states(args, table, unit) -> UnitStates, for a unit of the whole batch


def make_schedule(spec, geometry):
    """Device functions for ``spec.split``."""
    rows_per_tile, keys_per_tile = geometry.rows_per_tile, geometry.keys_per_tile
    group, num_kv_heads = spec.group, spec.num_kv_heads
    threads = geometry.threads
    is_fixed, split_cost, segment_cost = spec.split == "fixed", geometry.split_cost, geometry.segment_cost

    @cuda.jit(device=True)
    def num_units(request):
        return int32(num_kv_heads * (uint32(request.num_nodes * group + rows_per_tile - 1) // uint32(rows_per_tile)))

    @cuda.jit(device=True)
    def num_tiles(request):
        # A padding row has no key, but one tile: somebody must write its zeros.
        return int32(max(uint32(1), uint32(request.num_keys + keys_per_tile - 1) // uint32(keys_per_tile)))

    @cuda.jit(device=True)
    def items_per_unit(args, request):
        """The same for all units of a request: ``unit_states`` relies on it."""
        tiles = num_tiles(request)
        if is_fixed:
            chunk = chunk_tiles_of(tiles, num_units(request), args.max_chunks)
            return quotient(tiles + chunk - 1, chunk)
        return tiles

    @cuda.jit(device=True)
    def work_of(args, b):
        """Items and row units of request ``b``."""
        request = load_request(args, b)
        units = num_units(request)
        return int32(units * items_per_unit(args, request)), units

    @cuda.jit(device=True)
    def prepare(args, table):
        """Fill the work table.  All threads of a block call it."""
        num_requests, thread = int32(args.num_requests), int32(cuda.threadIdx.x)
        if thread == 0:
            table[0] = int32(0)
            table[uint32(num_requests + 1)] = int32(0)
        b = thread
        while b < num_requests:
            table[uint32(b + 1)], table[uint32(num_requests + b + 2)] = work_of(args, b)
            b = int32(b + threads)
        cuda.syncthreads()  # publishes the counts to the scanning warps
        row = int32(thread // WARP)  # one warp the items, one the units; a block of one warp both
        while row < 2:
            inclusive_scan(table[uint32(row * (num_requests + 1)) :], num_requests, int32(thread % WARP))
            row = int32(row + threads // WARP)
        cuda.syncthreads()  # publishes the sums to the block

    @cuda.jit(device=True)
    def active_blocks(num_items):
        """Blocks that share the line; the others idle.

        All, or as many as have ``k`` items each, the k at which one more would cost more time than it saves: k items to
        walk, and num_items / k partial states to write and merge, which all blocks do at the speed of one L2.
        """
        blocks = min(int32(cuda.gridDim.x), num_items)
        # In int32: few items are fewer than blocks^2 * split_cost / 1024, and split_cost is below 1024.
        if not is_fixed and num_items < int32(uint32(blocks * blocks) // uint32(1024) * uint32(split_cost)):
            each = int32(1)
            while each * (each + 1) * 1024 < num_items * split_cost:
                each = int32(each + 1)
            blocks = min(blocks, quotient(num_items + each - 1, each))
        return blocks

    @cuda.jit(device=True)
    def start_items_of(table, num_requests):
        """Start items of each unit: as many tiles as its start takes time, but fewer than a block's share has tiles.

        So every share has a tile, and blocks between two of a unit have it, too.
        """
        if is_fixed or segment_cost == 0:
            return int32(0)
        return max(int32(0), min(int32(segment_cost), int32(quotient(table[uint32(num_requests)], cuda.gridDim.x) - 1)))

    @cuda.jit(device=True)
    def line_length(table, num_requests):
        """Items of all units, start items included."""
        return int32(table[num_requests] + start_items_of(table, num_requests) * table[uint32(2 * num_requests + 1)])

    @cuda.jit(device=True)
    def share(args, table):
        # Opaque: else its address is kept for the merge, in a register that the walk lacks.
        num_items = line_length(table, ptx.opaque_u32(args.num_requests))
        block, blocks = int32(cuda.blockIdx.x), active_blocks(num_items)
        if block >= blocks:
            return int32(0), int32(0)
        return block_begin(num_items, blocks, block), block_begin(num_items, blocks, block + 1)

    @cuda.jit(device=True, forceinline=True)
    def place_of(unit):
        """KV head and first head row of a unit of a request."""
        tile = int32(uint32(unit) // uint32(num_kv_heads))
        return int32(unit - tile * num_kv_heads), int32(tile * rows_per_tile)

    @cuda.jit(device=True)
    def segment_at(args, table, position, end):
        """The segment that starts at ``position`` of the line, for a block whose share ends at ``end``."""
        num_requests = args.num_requests
        units, start_items = table[uint32(num_requests + 1) :], start_items_of(table, num_requests)
        b = upper_request(table, units, start_items, num_requests, position)
        request = load_request(args, b)
        tiles = num_tiles(request)
        per_unit = int32(items_per_unit(args, request) + start_items)
        inside = int32(position - table[uint32(b)] - start_items * units[uint32(b)])
        unit = quotient(inside, per_unit)
        item = int32(inside - unit * per_unit)
        if is_fixed:
            chunk = chunk_tiles_of(tiles, num_units(request), args.max_chunks)
            first_tile = int32(item * chunk)
            end_tile = min(tiles, int32(first_tile + chunk))
            state = position
            next_position = int32(position + 1)
        else:
            first_tile = max(int32(0), int32(item - start_items))
            first_position = int32(position + max(int32(0), int32(start_items - item)))
            end_tile = min(tiles, int32(first_tile + (end - first_position)))
            state = int32(cuda.blockIdx.x + units[uint32(b)] + unit)
            next_position = int32(first_position + (end_tile - first_tile))
            if end - next_position <= start_items:  # no tile of the next unit is left in the share
                next_position = int32(end)
        direct = end_tile - first_tile == tiles
        kv_head, first_row = place_of(unit)
        return Segment(request, kv_head, first_row, first_tile, end_tile, direct, state, next_position)

    @cuda.jit(device=True)
    def unit_states(args, table, unit_index):
        """The states of the row unit with this index among all units of the batch, in the order of its keys."""
        num_requests = args.num_requests
        units = table[uint32(num_requests + 1) :]
        b = upper_request(units, units, int32(0), num_requests, unit_index)
        unit = int32(unit_index - units[uint32(b)])
        kv_head, first_row = place_of(unit)
        # Units of one request have equally many items: no lengths are read here.
        before = table[uint32(b)]
        units_here = max(int32(1), units[uint32(b + 1)] - units[uint32(b)])  # 0 if the batch has no unit at all
        per_unit = quotient(table[uint32(b + 1)] - before, units_here)
        first_item = int32(before + unit * per_unit)
        if is_fixed:
            return UnitStates(b, kv_head, first_row, first_item, per_unit)
        first_item = int32(first_item + start_items_of(table, num_requests) * (unit_index + 1))
        num_items = line_length(table, uint32(num_requests))
        blocks = active_blocks(num_items)
        first_block = block_of(num_items, blocks, first_item)
        last_block = block_of(num_items, blocks, int32(first_item + per_unit - 1))
        return UnitStates(b, kv_head, first_row, int32(first_block + unit_index), int32(last_block - first_block + 1))

    return Schedule(prepare, work_of, share, segment_at, unit_states)


@cuda.jit(device=True)
def inclusive_scan(values, count, lane):
    """``values[1 : count + 1]`` become their running sums.  One whole warp calls it, 32 values at a time."""
    carry, base = int32(0), int32(0)
    while base < count:
        value = int32(0)
        if base + lane < count:
            value = values[uint32(base + lane + 1)]
        for step in range(5):
            below = cuda.shfl_up_sync(uint32(FULL_WARP), value, 1 << step)
            if lane >= 1 << step:
                value = int32(value + below)
        value = int32(value + carry)
        if base + lane < count:
            values[uint32(base + lane + 1)] = value
        carry = cuda.shfl_sync(uint32(FULL_WARP), value, WARP - 1)
        base = int32(base + WARP)
