"""How work is split: every key tile of every row unit is walked once, and no two partial states share a number.

All of it runs in the emulator, whose integers are as narrow as those of the device, and which needs no keys and no
values: a kernel here only writes down what a device function gives, or the segments it would walk.
"""

import itertools
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, int32, int64
from support.kernels import geometry_for

import nbverify as nv
from nbverify import contract, presets
from nbverify.kernels import geometry as geo
from nbverify.kernels import schedule
from nbverify.spec import KERNELS

WARP = 32
MIN_CHUNK_TILES = geo.MIN_CHUNK_TILES
SMS = 132
INT32_MAX = 2**31 - 1


def ceil_div(a, b):
    return -(-a // b)


def table_of(function, rows):
    """``function`` of the int32 numbers in each row, all in one launch."""
    rows = np.array(rows, np.int64).astype(np.int32, casting="same_kind")
    count, width = rows.shape

    def fill(args):
        for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
            if width == 2:
                args.found[i] = function(args.given[2 * i], args.given[2 * i + 1])
            else:
                args.found[i] = function(args.given[3 * i], args.given[3 * i + 1], args.given[3 * i + 2])

    args = namedtuple("Filled", "given found")(rows.reshape(-1), np.full(count, -77, np.int64))
    nv.Emulator().launch(fill, args, grid=1, block=WARP, shared_bytes=0, name="fill")
    return args.found.tolist()


# ---- arithmetic


def test_blocks_share_a_line_without_gap_or_overlap():
    """For all totals <= 40 and grids <= 30 with as many items as blocks, which ``share`` sees to."""
    lines = [(total, blocks) for total in range(1, 41) for blocks in range(1, min(total, 30) + 1)]
    begins = iter(table_of(schedule.block_begin, [(*line, k) for line in lines for k in range(line[1] + 1)]))
    owners = iter(table_of(schedule.block_of, [(*line, i) for line in lines for i in range(line[0])]))
    for total, blocks in lines:
        cuts = list(itertools.islice(begins, blocks + 1))
        assert cuts[0] == 0 and cuts[-1] == total
        shares = [end - begin for begin, end in itertools.pairwise(cuts)]
        assert set(shares) <= {total // blocks, ceil_div(total, blocks)}, (total, blocks)
        expected = [k for k, share in enumerate(shares) for _ in range(share)]
        assert list(itertools.islice(owners, total)) == expected, (total, blocks)


def test_the_longest_lines_are_exact():
    """Up to as many items as a plan may have, on grids of any size, against the integers of Python."""
    rng = np.random.default_rng(4)
    totals = [geo.MAX_ITEMS, geo.MAX_ITEMS - 1, 2**30 + 1, 2**31 - 2**16, 1_000_000_007, *rng.integers(2**17, 2**31, 8)]
    cuts, places = [], []
    for total in map(int, totals):
        for blocks in (1, 2, 3, 148, 376, 1024, 65_535, 65_536):
            for k in {0, min(1, blocks - 1), blocks // 2, blocks - 1, *rng.integers(0, blocks, 4).tolist()}:
                cuts += [(total, blocks, k), (total, blocks, k + 1)]
                begin, end = (x * total // blocks for x in (k, k + 1))
                places += [(total, blocks, place, k) for place in {begin, (begin + end) // 2, end - 1}]
    assert table_of(schedule.block_begin, cuts) == [k * total // blocks for total, blocks, k in cuts]
    assert table_of(schedule.block_of, [row[:3] for row in places]) == [row[3] for row in places]


def chunk_by_hand(tiles, units, sms=SMS):
    """Tiles of a chunk: one for each SM, or for each unit, of at least MIN_CHUNK_TILES."""
    return max(MIN_CHUNK_TILES, ceil_div(tiles, max(1, sms // max(1, units))))


def test_chunks_are_one_for_each_sm_and_not_too_short():
    cases = [(tiles, units, SMS) for tiles in range(1, 1200, 7) for units in (1, 2, 5, 8, 66, 67, 132, 133)]
    cases += [(tiles, units, sms) for tiles in range(1, 70) for units in (1, 3) for sms in (1, 2, 16, 188)]
    cases += [(INT32_MAX - less, units, SMS) for less in (0, 1, 63, 64) for units in (1, 2, 45, INT32_MAX)]
    chunks = table_of(schedule.chunk_tiles_of, cases)
    assert chunks == [chunk_by_hand(*case) for case in cases]
    for (tiles, units, sms), chunk in zip(cases, chunks, strict=True):
        count = ceil_div(tiles, chunk)
        assert 1 <= count * units <= max(sms, units)
        assert tiles - (count - 1) * chunk >= 1
        if chunk > MIN_CHUNK_TILES:  # no longer than it must be
            assert ceil_div(tiles, chunk - 1) > max(1, sms // units)


def test_upper_request_is_searchsorted():
    """On prefix sums with any number of empty requests before, between and after."""
    rng = np.random.default_rng(0)
    for _ in range(80):
        counts = rng.integers(0, 5, rng.integers(1, 40)) * rng.integers(0, 2)
        counts[rng.integers(counts.size)] += 1
        if rng.random() < 0.2:
            counts *= INT32_MAX // counts.sum()
        start_items = int(rng.integers(0, 4)) if counts.sum() < 2**20 else 0
        units = np.concatenate([[0], np.cumsum(rng.integers(1, 4, counts.size) * (counts > 0))]).astype(np.int32)
        own = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        starts = own + start_items * units
        positions = np.unique([*starts[:-1], *(starts[1:] - 1), *rng.integers(0, starts[-1], 5)])
        positions = positions[(positions >= 0) & (positions < starts[-1])].astype(np.int32)

        def find(args):
            for i in range(cuda.threadIdx.x, args.positions.size, cuda.blockDim.x):
                args.found[i] = schedule.upper_request(
                    args.starts, args.units, int32(args.start_items), int64(args.starts.size - 1), args.positions[i]
                )

        found = np.full(positions.size, -77, np.int32)
        args = namedtuple("Args", "starts units start_items positions found")(own, units, start_items, positions, found)
        nv.Emulator().launch(find, args, grid=1, block=WARP, shared_bytes=0, name="find")
        np.testing.assert_array_equal(found, np.searchsorted(starts, positions, side="right") - 1)
        assert (counts[found] > 0).all()


def test_scan_of_any_length():
    """One warp, 32 values at a time; the sums may be as large as int32."""
    for count in (0, 1, 2, 31, 32, 33, 64, 65, 200):
        rng = np.random.default_rng(count)
        values = rng.integers(0, INT32_MAX // max(1, count), count + 1)
        values[0] = 5  # not part of it

        def scan(args):
            schedule.inclusive_scan(args.values, int32(args.values.size - 1), int32(cuda.threadIdx.x))

        args = namedtuple("Args", "values")(values.astype(np.int32))
        nv.Emulator(seed=1).launch(scan, args, grid=1, block=WARP, shared_bytes=0, name="scan")
        assert args.values.tolist() == [5, *np.cumsum(values[1:]).tolist()]


# ---- lengths, in the emulator


FIELDS = contract.args_class()._fields
Args = namedtuple("Args", (*FIELDS, "table_out", "shares", "found", "states", "counts"))
MAX_SEGMENTS = 4096


def args_of(spec, prefix_sums, token_sums, *, num_indices, num_tokens, dtypes=("int32", "int64"), **outputs):
    """The fields that the schedule reads; all others are None, so that a new dependency is noticed."""
    sums = [np.asarray(x).astype(d) for x, d in zip((prefix_sums, token_sums), dtypes, strict=True)]
    fields = dict.fromkeys(Args._fields)
    fields |= {
        "kv_indptr": sums[0].view(np.int32),
        "kv_indptr_words": sums[0].itemsize // 4,
        "qo_indptr": sums[1].view(np.int32),
        "qo_indptr_words": sums[1].itemsize // 4,
        "kv_indices": np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (num_indices,), (0,), writeable=False),
        "kv_indices_words": 1,
        "num_tokens": num_tokens,
        "num_requests": sums[0].size - 1,
        "max_nodes": spec.max_nodes,
        "max_kv_len": spec.max_kv_len,
        "max_chunks": SMS,
    }
    return Args(**{**fields, **outputs})


def write_requests(args):
    for b in range(cuda.blockIdx.x, args.num_requests, cuda.gridDim.x):
        request = schedule.load_request(args, b)
        for i in range(6):
            args.found[6 * b + i] = request[i]


def requests_of(args):
    found = np.full(6 * args.num_requests, -77, np.int64)
    nv.Emulator().launch(
        write_requests, args._replace(found=found), grid=1, block=1, shared_bytes=0, name="write_requests"
    )
    return [tuple(row) for row in found.reshape(-1, 6).tolist()]


def clamped(spec, start, length, token_start, nodes, num_indices, num_tokens):
    """DESIGN.md section 1: lengths are signed; clamped so that no buffer and no workspace is overrun."""
    n = 0 if token_start < 0 else max(0, min(nodes, spec.max_nodes, num_tokens - token_start))
    c = 0 if start < 0 else max(0, min(length, spec.max_kv_len - n, num_indices - start))
    return start, c, token_start, n, (0 if length < 0 else c + n)


SMALL = nv.VerifySpec.gqa(6, 2, 16, max_requests=64, max_nodes=24, max_kv_len=600, sm_scale=1.0, kernel="simt")


def test_requests_of_ordinary_lengths_are_as_they_stand():
    kv, qo = [0, 5, 5, 305, 881], [0, 3, 4, 28, 28]
    found = requests_of(args_of(SMALL, kv, qo, num_indices=881, num_tokens=28))
    assert found == [(0, 0, 5, 0, 3, 8), (1, 5, 0, 3, 1, 1), (2, 5, 300, 4, 24, 324), (3, 305, 576, 28, 0, 576)]


@pytest.mark.parametrize("dtypes", [("int32", "int64"), ("int64", "int32"), ("int64", "int64")])
def test_requests_of_any_lengths_are_clamped(dtypes):
    rng = np.random.default_rng(1)
    edges = np.array([-(2**31), -1000, -1, 0, 1, 2, 23, 24, 25, 600, 601, 1000, 2**31 - 1])
    if dtypes == ("int64", "int64"):
        edges = np.concatenate([edges, [-(2**45), 2**40, 2**33]])
    for _ in range(60):
        kv, qo = (rng.choice(edges, 65) + rng.integers(-1, 2, 65) for _ in range(2))
        info = np.iinfo(np.int32)
        kv, qo = (x.clip(info.min, info.max) if d == "int32" else x for x, d in zip((kv, qo), dtypes, strict=True))
        num_indices, num_tokens = int(rng.integers(0, 1200)), int(rng.integers(0, 60))
        args = args_of(SMALL, kv, qo, num_indices=num_indices, num_tokens=num_tokens, dtypes=dtypes)
        for b, request in enumerate(requests_of(args)):
            raw = int(kv[b]), int(kv[b + 1] - kv[b]), int(qo[b]), int(qo[b + 1] - qo[b])
            assert request == (b, *clamped(SMALL, *raw, num_indices, num_tokens)), raw
            _, start, c, token_start, n, keys = request
            # What keeps every buffer and the workspace safe, whatever the formula.
            assert 0 <= n <= SMALL.max_nodes and c >= 0 and c + n <= SMALL.max_kv_len and keys in (0, c + n)
            assert n == 0 or 0 <= token_start <= num_tokens - n
            assert c == 0 or 0 <= start <= num_indices - c
            if raw[1] <= 0:
                assert c == 0
            if raw[3] <= 0:
                assert n == 0


# ---- the split policies, in the emulator


REQUEST_VALUES, SEGMENT_VALUES, STATES_VALUES = 6, 13, 5


def make_writer(policy):
    """A kernel that writes down its work table, its share and segments, and then the partial states of all units."""

    def write_schedule(args):
        table = cuda.shared.array(0, int32)
        policy.prepare(args, table)
        if cuda.threadIdx.x == 0:
            num_requests, block = args.num_requests, int64(cuda.blockIdx.x)
            entries = 2 * (num_requests + 1)
            for i in range(entries):
                args.table_out[block * entries + i] = table[i]
            position, end = policy.share(args, table)
            args.shares[2 * block], args.shares[2 * block + 1] = position, end
            count = 0
            while position < end:
                segment = policy.segment_at(args, table, position, end)
                for i, value in enumerate((*segment.request, *segment[1:])):
                    args.found[(block * MAX_SEGMENTS + count) * SEGMENT_VALUES + i] = value
                count += 1
                position = segment.next_position
            args.counts[block] = position - end  # 0: stopped exactly at its end
            args.counts[cuda.gridDim.x + block] = count
            if block == 0:
                for unit in range(table[2 * num_requests + 1]):
                    for i, value in enumerate(policy.unit_states(args, table, unit)):
                        args.states[STATES_VALUES * unit + i] = value

    return write_schedule


Segment = namedtuple("Segment", ("block", *schedule.Segment._fields))  # request: a whole Request
Found = namedtuple("Found", "items units shares segments states")


def unit_of(segment):
    """The row unit that a segment is of: request number, KV head, head row of its first row."""
    return segment.request.number, segment.kv_head, segment.first_row


def run_schedule(spec, lengths, grid, **sizes):
    """Work table, shares, segments of every block in order, and states of every unit, for (c, n) pairs."""
    geometry = geometry_for(spec)
    small = SimpleNamespace(  # all that a schedule depends on, and fewer threads to fill the table
        rows_per_tile=geometry.rows_per_tile,
        keys_per_tile=geometry.keys_per_tile,
        threads=WARP * (1 + grid % 3),
        split_cost=geometry.split_cost,
        segment_cost=geometry.segment_cost,
    )
    kv, qo = prefix_sums_of(lengths)
    sizes = {"num_indices": int(max(kv.max(), 0)), "num_tokens": int(max(qo.max(), 0))} | sizes
    entries = 2 * (len(lengths) + 1)
    args = args_of(
        spec, kv, qo, **sizes, dtypes=("int64", "int64"),
        table_out=np.full(grid * entries, -77, np.int64),
        shares=np.full(2 * grid, -77, np.int64),
        found=np.full(grid * MAX_SEGMENTS * SEGMENT_VALUES, -77, np.int64),
        states=np.full(STATES_VALUES * 4096, -77, np.int64),
        counts=np.full(2 * grid, -77, np.int64),
    )  # fmt: skip
    body = make_writer(schedule.make_schedule(spec, small))
    nv.Emulator().launch(body, args, grid=grid, block=small.threads, shared_bytes=4 * entries, name="write_schedule")
    tables = args.table_out.reshape(grid, 2, -1)
    assert (tables == tables[0]).all(), "every block has the same table"
    assert (args.counts[:grid] == 0).all(), "a block went past the end of its share"
    rows = args.found.reshape(grid, MAX_SEGMENTS, SEGMENT_VALUES)
    segments = [
        Segment(k, schedule.Request(*row[:REQUEST_VALUES]), *row[REQUEST_VALUES:])
        for k in range(grid)
        for row in rows[k, : args.counts[grid + k]].tolist()
    ]
    num_units = int(tables[0, 1, -1])
    states = [schedule.UnitStates(*row) for row in args.states.reshape(-1, STATES_VALUES)[:num_units].tolist()]
    shares = args.shares.reshape(grid, 2).tolist()
    return Found(tables[0, 0].tolist(), tables[0, 1].tolist(), shares, segments, states)


def prefix_sums_of(lengths):
    """kv_indptr and qo_indptr of (c, n) pairs."""
    prefix, nodes = zip(*lengths, strict=True) if lengths else ((), ())
    return tuple(np.concatenate([[0], np.cumsum(x)]).astype(np.int64) for x in (prefix, nodes))


def expected_units(spec, n):
    """(KV head, first head row) of the row units of a request of n nodes, in the order of the line."""
    rows = geometry_for(spec).rows_per_tile
    return [(kv_head, row) for row in range(0, n * spec.group, rows) for kv_head in range(spec.num_kv_heads)]


def expected_tiles(spec, c, n):
    return 1 if c < 0 else ceil_div(c + n, geometry_for(spec).keys_per_tile)


def line_by_hand(spec, geometry, items_of_units, grid):
    """1 for each item of the line, and 0 for each start item."""
    start = 0
    if spec.split == "balanced":
        start = max(0, min(geometry.segment_cost, sum(items_of_units) // grid - 1))
    return [x for items in items_of_units for x in [0] * start + [1] * items]


def busy_by_hand(spec, geometry, length, grid):
    """Blocks that have a share: all, or ceil(length / k) for the first k where more would cost more than they save."""
    busy = min(grid, length)
    if spec.split == "balanced" and length < busy**2 // 1024 * geometry.split_cost:
        k = next(k for k in itertools.count(1) if k * (k + 1) * 1024 >= length * geometry.split_cost)
        busy = min(busy, ceil_div(length, k))
    return busy


def check(spec, lengths, grid):
    """Everything that must hold, by the definition of unit, item, segment and state."""
    geometry = geometry_for(spec)
    lengths = list(lengths)
    found = run_schedule(spec, lengths, grid)
    units = [expected_units(spec, n) for _, n in lengths]
    tiles = [expected_tiles(spec, c, n) for c, n in lengths]
    chunks = [chunk_by_hand(t, len(u)) for t, u in zip(tiles, units, strict=True)]
    per_unit = [ceil_div(t, k) for t, k in zip(tiles, chunks, strict=True)] if spec.split == "fixed" else tiles
    items = [len(u) * i for u, i in zip(units, per_unit, strict=True)]
    assert found.units == [0, *np.cumsum([len(u) for u in units]).tolist()][: len(lengths) + 1]
    assert found.items == [0, *np.cumsum(items).tolist()][: len(lengths) + 1]

    # Every tile of every unit once, in the order of the line; balanced to within one item, start items included.
    all_units = [(b, *unit) for b in range(len(lengths)) for unit in units[b]]
    walked = [(*unit_of(s), tile) for s in found.segments for tile in range(s.first_tile, s.end_tile)]
    assert walked == [(*unit, tile) for unit in all_units for tile in range(tiles[unit[0]])]
    kv, qo = (x.tolist() for x in prefix_sums_of(lengths))
    shares = [0] * grid
    for s in found.segments:
        b = s.request.number
        assert s.request == (b, *clamped(spec, kv[b], lengths[b][0], qo[b], lengths[b][1], kv[-1], qo[-1]))
        assert s.first_tile < s.end_tile
        shares[s.block] += 1 if spec.split == "fixed" else s.end_tile - s.first_tile
        assert bool(s.direct) == (s.end_tile - s.first_tile == tiles[b])
        if spec.split == "fixed":
            assert s.first_tile % chunks[b] == 0
            assert s.end_tile == min(tiles[b], s.first_tile + chunks[b])
    line = line_by_hand(spec, geometry, [per_unit[unit[0]] for unit in all_units], grid)
    busy = busy_by_hand(spec, geometry, len(line), grid)
    cuts = [k * len(line) // max(1, busy) for k in range(busy + 1)]
    assert found.shares == [list(cut) for cut in itertools.pairwise(cuts)] + [[0, 0]] * (grid - busy)
    assert shares == [sum(line[begin:end]) for begin, end in itertools.pairwise(cuts)] + [0] * (grid - busy)
    assert all(shares[:busy]), "a block with a share has work"

    # Numbers of states: unique, inside the workspace, and found again by the merge, in the order of the keys.
    written = set()
    for s in found.segments:
        if not s.direct:
            assert s.state not in written, "two segments share a state"
            written.add(s.state)
            assert 0 <= s.state < geo.num_partials(spec, geometry, grid, SMS)
    assert [(u.request, u.kv_head, u.first_row) for u in found.states] == all_units
    of_unit = {unit: [] for unit in all_units}
    for s in found.segments:
        of_unit[unit_of(s)].append(s.state)
    for u in found.states:
        mine = of_unit[u.request, u.kv_head, u.first_row]
        assert u.num_states == len(mine)
        if u.num_states > 1:
            assert mine == list(range(u.first_state, u.first_state + u.num_states))
    return found


def spec_of(split, *, heads=6, kv_heads=2, shared=False, **limits):
    limits = {"max_requests": 80, "max_nodes": 24, "max_kv_len": 40_000, "sm_scale": 1.0, "kernel": "simt", **limits}
    if shared:
        return nv.VerifySpec.mla(heads, split=split, **limits)
    return nv.VerifySpec.gqa(heads, kv_heads, 16, split=split, **limits)


def test_few_tiles_leave_blocks_idle():
    """Where another partial state costs more than another tile; and the start of a unit counts where there are many."""
    spec = nv.VerifySpec.mla(8, max_nodes=8, max_requests=4, max_kv_len=40_000, sm_scale=1.0, kernel="mma")
    geometry = geometry_for(spec)
    keys = geometry.keys_per_tile
    assert 10 < geometry.split_cost < 100 and 1 < geometry.segment_cost < 10
    for tiles, busy in ((129, 65), (40, 40), (1026, 132)):
        found = check(spec, [(tiles * keys - 8, 8)], 132)
        assert sum(end > begin for begin, end in found.shares) == busy
    found = check(spec, [(300 * keys - 8, 8)] * 4, 132)  # 9 tiles a block, less where a second unit begins
    tiles = [0] * 132
    for s in found.segments:
        tiles[s.block] += s.end_tile - s.first_tile
    assert min(tiles) < 9 < max(tiles)


each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def each_split(test):
    return each_kernel(pytest.mark.parametrize("split", ["balanced", "fixed"])(test))


@each_split
@pytest.mark.parametrize("case", range(40))
def test_random_batches(kernel, split, case):
    rng = np.random.default_rng(case)
    kv_heads = int(rng.choice([1, 2, 3]))
    spec = spec_of(
        split,
        kernel=kernel,
        heads=kv_heads * int(rng.integers(1, 9)),
        kv_heads=kv_heads,
        max_nodes=int(rng.integers(1, 40)),
        max_kv_len=int(rng.choice([300, 3000, 40_000])),
    )
    count = int(rng.integers(0, 12))
    longest = int(rng.choice([40, 600, spec.max_kv_len]))
    nodes = rng.integers(0, spec.max_nodes + 1, count)
    prefix = np.minimum(rng.integers(0, longest, count), spec.max_kv_len - nodes)
    prefix[rng.random(count) < 0.15] = 0
    check(spec, zip(prefix.tolist(), nodes.tolist(), strict=True), int(rng.integers(1, 14)))


@each_split
@pytest.mark.parametrize("grid", range(1, 10))
def test_one_request_cut_everywhere(kernel, split, grid):
    """More and fewer tiles and chunks than blocks."""
    spec = spec_of(split, heads=1, kv_heads=1, kernel=kernel)
    for tiles in (1, 2, 3, 7, 8, 9, 16, 17, 40):
        check(spec, [(tiles * geometry_for(spec).keys_per_tile - 1, 1)], grid)


@each_split
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [(0, 0)],
        [(500, 0)],
        [(0, 0), (0, 0), (0, 0)],
        [(0, 1)],
        [(0, 0), (700, 5), (0, 0), (3, 1), (0, 0)],
        [(1, 1)] * 70,
        [(5000, 24)] + [(1, 1)] * 66,
        [(1, 1)] * 66 + [(5000, 24)],
        [(64, 0), (64, 24), (31, 1), (32, 1), (255, 1), (256, 1), (511, 1), (512, 1)],
        [(39_976, 24), (39_976, 24)],
        [(127, 1), (128, 1), (1023, 1), (1024, 1)],
    ],
    ids=lambda lengths: f"{len(lengths)} requests, {sum(n for _, n in lengths)} nodes",
)
def test_regimes(kernel, split, lengths):
    for grid in (1, 3, 8):
        check(spec_of(split, kernel=kernel), lengths, grid)


@each_split
def test_padding_row_has_one_tile_and_is_written_by_somebody(kernel, split):
    """A negative prefix length: its zeros are work, its keys are not."""
    spec = spec_of(split, kernel=kernel)
    found = run_schedule(spec, [(700, 5), (-3, 4), (90, 2)], 3, num_indices=900, num_tokens=11)
    mine = [s for s in found.segments if s.request.number == 1]
    assert [(s.kv_head, s.first_row, s.first_tile, s.end_tile, bool(s.direct)) for s in mine] == [
        (*unit, 0, 1, True) for unit in expected_units(spec, 4)
    ]
    assert {s.request for s in mine} == {(1, 700, 0, 5, 4, 0)}


@each_kernel
def test_fixed_cuts_depend_on_nothing_but_the_request(kernel):
    """Not on its neighbours, its place, the grid, nor on max_requests."""
    spec = spec_of("fixed", kernel=kernel)

    def cuts(lengths, which, grid, spec=spec):
        found = check(spec, lengths, grid)
        mine = [s for s in found.segments if s.request.number == which]
        return [(s.kv_head, s.first_row, s.first_tile, s.end_tile, bool(s.direct)) for s in mine]

    alone = cuts([(4321, 9)], 0, 1)
    assert len(alone) > 2 * len(expected_units(spec, 9))
    assert cuts([(4321, 9)], 0, 11) == alone
    assert cuts([(7, 1), (4321, 9), (9000, 24)], 1, 5) == alone
    assert cuts([(4321, 9)], 0, 4, replace(spec, max_requests=1)) == alone


@each_kernel
def test_a_unit_that_one_block_walks_alone_still_has_its_chunks(kernel):
    """fixed: accumulation restarts at each chunk, also where no other block takes part."""
    spec = spec_of("fixed", heads=1, kv_heads=1, kernel=kernel)
    found = check(spec, [(4095, 1)], 1)
    assert len(found.segments) > 1 and not any(s.direct for s in found.segments)


@each_kernel
def test_balanced_leaves_fewer_states_than_blocks_and_units(kernel):
    spec = spec_of("balanced", kernel=kernel)
    for grid in (2, 5, 9):
        found = check(spec, [(3000, 24), (5, 1), (700, 13)], grid)
        assert sum(not s.direct for s in found.segments) < grid + found.units[-1]


@each_split
def test_more_items_than_int32_counts_are_refused(kernel, split):
    """With the numbers; by the plan, and exactly where they begin."""
    limits = {"max_nodes": 64, "max_kv_len": 2**31 - 128, "sm_scale": 1.0, "kernel": kernel, "split": split}
    spec = nv.VerifySpec.mla(128, max_requests=2**14, **limits)
    with pytest.raises(nv.ArgumentError, match=r"^spec: expected at most 2,147,483,647 tiles of keys in a launch, got"):
        nv.VerifyPlan(replace(spec, max_requests=1000), device="emulator")
    for kv_len in (2**31 - 128, 2**30, 1_000_003):
        one = replace(spec, max_requests=1, max_kv_len=kv_len, max_nodes=1)
        geometry = geometry_for(one)
        of_unit = ceil_div(kv_len, geometry.keys_per_tile) + geometry.segment_cost
        each = geo.units_per_request(one, geometry) * of_unit
        most = INT32_MAX // each
        geo.check_items(replace(one, max_requests=most), geometry)
        with pytest.raises(nv.ArgumentError, match=rf"got {(most + 1) * each:,}: max_requests={most + 1} x "):
            geo.check_items(replace(one, max_requests=most + 1), geometry)


def test_any_preset_may_have_its_longest_line():
    for name in presets.PRESETS:
        spec = presets.preset(name)
        geo.check_items(spec, geometry_for(spec))


# ---- sizes


@each_split
def test_workspace_holds_the_worst_batch_of_any_spec(kernel, split):
    """By formula, over random specs: the largest number of a state of the largest batch, and the bytes."""
    rng = np.random.default_rng(5)
    for _ in range(500):
        kv_heads = int(rng.integers(1, 9))
        spec = spec_of(
            split, heads=kv_heads * int(rng.integers(1, 17)), kv_heads=kv_heads, max_requests=int(rng.integers(1, 65)),
            max_nodes=int(rng.integers(1, 300)), max_kv_len=int(10 ** rng.uniform(2.6, 9)), kernel=kernel,
        )  # fmt: skip
        geometry, grid = geometry_for(spec), int(rng.integers(1, 800))
        sms = int(rng.integers(1, 200))
        units = [len(expected_units(spec, n)) for n in range(1, spec.max_nodes + 1)]
        tiles = ceil_div(spec.max_kv_len, geometry.keys_per_tile)
        chunks = [ceil_div(tiles, chunk_by_hand(tiles, u, sms)) for u in units]
        assert max(chunks) <= geo.max_splits(spec, geometry, sms)
        most = max(u * c for u, c in zip(units, chunks, strict=True))
        all_units = spec.max_requests * units[-1]
        largest = spec.max_requests * most - 1 if split == "fixed" else (grid - 1) + (all_units - 1)
        partials = geo.num_partials(spec, geometry, grid, sms)
        assert largest < partials
        each = max(sms, units[-1]) * spec.max_requests
        assert partials <= each if split == "fixed" else partials <= grid + all_units
        bytes_each = 4 * geometry.rows_per_tile * (spec.head_dim_v + 2)
        assert geo.workspace_bytes(spec, geometry, grid, sms) == partials * bytes_each
