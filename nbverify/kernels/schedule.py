"""How work is split: the one place to edit for another split policy.

    head row   one of the n * group query rows that read a KV head of a request: (node, head in group), node major.
    row unit   (request, KV head, tile of head rows), the KV head varying fastest.
    item       the quantum of work of a row unit: one tile of keys (balanced) or one chunk of tiles (fixed).
    line       all items of all row units, request after request, unit after unit.  Block k of a grid of G takes the
               items [k * I / G, (k + 1) * I / G) of the I items: no block has more than one item above the average.
    segment    what a block works on at a time: a row unit x a range of key tiles.
                 balanced   consecutive items of one unit that fall to one block
                 fixed      exactly one item, whoever runs it
    direct     a segment that has all items of its unit writes the result; any other writes a partial state.

Bits: a partial state depends on where its unit was cut.  With balanced the cuts depend on the whole batch and the
grid; with fixed they depend on the request's own c and n (and the spec), so its bits do too, and on nothing else.

Numbers of partial states, which are their places in the workspace
    balanced   block + unit.  Along the line every further segment has a larger block or a larger unit, so no two
               segments share a number and there are fewer than G + units of them.
    fixed      the item's position on the line.

The work table in shared memory: ``table[0, b]`` items and ``table[1, b]`` units before request b, for b in [0, B].
Every block makes its own copy: B loads of lengths, one warp scan.  Positions are int64, items can exceed 2^31.

Lengths are signed, and clamped so that no buffer and no workspace is overrun whatever the device buffers hold:
    prefix length < 0   a padding row of a graph: its nodes see nothing (out = 0, lse = -inf), no key is read
    prefix length 0     an ordinary request without prefix
    node count <= 0     no work and no output
"""

from typing import NamedTuple

from numba import cuda, int64, uint32

from nbverify.kernels.geometry import FULL_WARP, MIN_CHUNK_TILES, WARP
from nbverify.kernels.indices import index_count, load_index


class Request(NamedTuple):
    """One request's lengths, clamped."""

    number: int  # b
    prefix_start: int  # first entry in kv_indices
    prefix_len: int  # c
    token_start: int  # first row of q and out, first entry in out_cache_loc
    num_nodes: int  # n
    num_keys: int  # c + n; 0 for padding


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


@cuda.jit(device=True)
def load_request(args, b):
    """Lengths of request ``b``."""
    prefix_start = load_index(args.kv_indptr, args.kv_indptr_words, b)
    prefix_len = load_index(args.kv_indptr, args.kv_indptr_words, b + 1) - prefix_start
    token_start = load_index(args.qo_indptr, args.qo_indptr_words, b)
    num_nodes = load_index(args.qo_indptr, args.qo_indptr_words, b + 1) - token_start
    is_padding = prefix_len < 0

    num_nodes = min(num_nodes, args.max_nodes, args.num_tokens - token_start)
    if token_start < 0:
        num_nodes = int64(0)
    num_nodes = max(num_nodes, int64(0))
    prefix_len = min(
        prefix_len,
        args.max_kv_len - num_nodes,
        index_count(args.kv_indices, args.kv_indices_words) - prefix_start,
    )
    if prefix_start < 0:
        prefix_len = int64(0)
    prefix_len = max(prefix_len, int64(0))
    num_keys = prefix_len + num_nodes
    if is_padding:
        num_keys = int64(0)
    return Request(int64(b), prefix_start, prefix_len, token_start, num_nodes, num_keys)


@cuda.jit(device=True)
def block_begin(num_items, num_blocks, block):
    """First item of a block's share."""
    return block * num_items // num_blocks


@cuda.jit(device=True)
def block_of(num_items, num_blocks, position):
    """The block whose share holds an item: the largest k with ``k * num_items < (position + 1) * num_blocks``."""
    return ((position + 1) * num_blocks - 1) // num_items


@cuda.jit(device=True)
def chunk_tiles_of(num_tiles, max_splits):
    """Key tiles of one chunk (fixed): at most ``max_splits`` chunks, none but the last under MIN_CHUNK_TILES."""
    return max(int64(MIN_CHUNK_TILES), (num_tiles + max_splits - 1) // max_splits)


@cuda.jit(device=True)
def upper_request(starts, num_requests, position):
    """The request ``b`` with ``starts[b] <= position < starts[b + 1]``; requests without work are never returned."""
    low, high = int64(0), int64(num_requests)
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


class Schedule(NamedTuple):
    """The device functions of a split policy."""

    prepare: object  # prepare(args, table): all threads of a block fill the work table
    share: object  # share(args, table) -> (position, end) of this block on the line; empty for an idle block
    segment_at: object  # segment_at(args, table, position, end) -> Segment
    unit_states: object  # unit_states(args, table, unit) -> UnitStates, for a unit of the whole batch


def make_schedule(spec, geometry):
    """Device functions for ``spec.split``."""
    rows_per_tile, keys_per_tile = geometry.rows_per_tile, geometry.keys_per_tile
    group, num_kv_heads = spec.group, spec.num_kv_heads
    threads = geometry.threads
    is_fixed = spec.split == "fixed"

    @cuda.jit(device=True)
    def num_units(request):
        return num_kv_heads * ((request.num_nodes * group + rows_per_tile - 1) // rows_per_tile)

    @cuda.jit(device=True)
    def num_tiles(request):
        # A padding row has no key, but one tile: somebody must write its zeros.
        return max(int64(1), (request.num_keys + keys_per_tile - 1) // keys_per_tile)

    @cuda.jit(device=True)
    def items_per_unit(request, max_splits):
        """The same for all units of a request: ``unit_states`` relies on it."""
        tiles = num_tiles(request)
        if is_fixed:
            chunk = chunk_tiles_of(tiles, max_splits)
            return (tiles + chunk - 1) // chunk
        return tiles

    @cuda.jit(device=True)
    def prepare(args, table):
        """Fill the work table.  All threads of a block call it."""
        num_requests = args.num_requests
        items, units = table[: num_requests + 1], table[num_requests + 1 :]
        thread = cuda.threadIdx.x
        if thread == 0:
            items[0] = 0
            units[0] = 0
        b = int64(thread)
        while b < num_requests:
            request = load_request(args, b)
            units[b + 1] = num_units(request)
            items[b + 1] = units[b + 1] * items_per_unit(request, args.max_splits)
            b += threads
        cuda.syncthreads()  # publishes the counts to the scanning warp
        if thread < WARP:
            inclusive_scan(items, num_requests, thread)
            inclusive_scan(units, num_requests, thread)
        cuda.syncthreads()  # publishes the sums to the block

    @cuda.jit(device=True)
    def num_active_blocks(args, table):
        """Blocks that share the line: with fewer items than blocks, one item each, and the others idle."""
        return min(int64(cuda.gridDim.x), table[args.num_requests])

    @cuda.jit(device=True)
    def share(args, table):
        block, blocks, num_items = int64(cuda.blockIdx.x), num_active_blocks(args, table), table[args.num_requests]
        if block >= blocks:
            return int64(0), int64(0)
        return block_begin(num_items, blocks, block), block_begin(num_items, blocks, block + 1)

    @cuda.jit(device=True)
    def segment_at(args, table, position, end):
        """The segment that starts at ``position`` of the line, for a block whose share ends at ``end``."""
        num_requests = args.num_requests
        items, units = table[: num_requests + 1], table[num_requests + 1 :]
        b = upper_request(items, num_requests, position)
        request = load_request(args, b)
        tiles = num_tiles(request)
        per_unit = items_per_unit(request, args.max_splits)
        unit = (position - items[b]) // per_unit
        item = (position - items[b]) - unit * per_unit
        if is_fixed:
            chunk = chunk_tiles_of(tiles, args.max_splits)
            first_tile = item * chunk
            end_tile = min(tiles, first_tile + chunk)
            state = position
            next_position = position + 1
        else:
            first_tile = item
            end_tile = min(tiles, item + (end - position))
            state = cuda.blockIdx.x + units[b] + unit
            next_position = position + (end_tile - first_tile)
        direct = end_tile - first_tile == tiles
        kv_head, first_row = unit % num_kv_heads, unit // num_kv_heads * rows_per_tile
        return Segment(request, kv_head, first_row, first_tile, end_tile, direct, state, next_position)

    @cuda.jit(device=True)
    def unit_states(args, table, unit_index):
        """The states of the row unit with this index among all units of the batch, in the order of its keys."""
        num_requests = args.num_requests
        items, units = table[: num_requests + 1], table[num_requests + 1 :]
        b = upper_request(units, num_requests, unit_index)
        unit = unit_index - units[b]
        kv_head, first_row = unit % num_kv_heads, unit // num_kv_heads * rows_per_tile
        # Units of one request have equally many items: no lengths are read here.
        per_unit = (items[b + 1] - items[b]) // (units[b + 1] - units[b])
        first_item = items[b] + unit * per_unit
        if is_fixed:
            return UnitStates(b, kv_head, first_row, first_item, per_unit)
        blocks = num_active_blocks(args, table)
        first_block = block_of(items[num_requests], blocks, first_item)
        last_block = block_of(items[num_requests], blocks, first_item + per_unit - 1)
        return UnitStates(b, kv_head, first_row, first_block + unit_index, last_block - first_block + 1)

    return Schedule(prepare, share, segment_at, unit_states)


@cuda.jit(device=True)
def inclusive_scan(values, count, lane):
    """``values[1 : count + 1]`` become their running sums.  One whole warp calls it, 32 values at a time."""
    carry, base = int64(0), int64(0)
    while base < count:
        value = int64(0)
        if base + lane < count:
            value = values[base + lane + 1]
        for step in range(5):
            below = cuda.shfl_up_sync(uint32(FULL_WARP), value, 1 << step)
            if lane >= 1 << step:
                value += below
        value += carry
        if base + lane < count:
            values[base + lane + 1] = value
        carry = cuda.shfl_sync(uint32(FULL_WARP), value, WARP - 1)
        base += WARP
