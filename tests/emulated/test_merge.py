"""The merge of partial states, alone: states are made up here, and the schedule that names them is a list.

What the two kernels leave to it is tested with them; here are more states than they make in an emulator, in any
mixture.  A state is (m, total, o), as in kernels/softmax.py; total is its l.  A chunk (row, 128 columns) is merged by a
warp alone, or by several of a block: which, depends on how many warps the grid has for how many chunks.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, int32, int64
from support.batches import HALF_ULP, NUMPY_DTYPE

import nbverify as nv
from nbverify import contract
from nbverify.kernels import geometry
from nbverify.kernels.geometry import chunk_bytes, merge_scratch_bytes, table_bytes
from nbverify.kernels.schedule import UnitStates
from nbverify.reduce import merge as merge_module

EPS = float(np.finfo(np.float32).eps)
ROWS = 2  # of a row tile (of the kernels: 16 and more), so that most chunks have a row
NODES = 2
RUNS, IN_FLIGHT, COLUMNS = 12, 12, 128  # by the head of reduce/merge.py
V_SCALE = 0.75
WIDTHS = (16, 80, 128, 256, 512, 576)
# One run, several of 12 states, the last one short; from 145 states on 12 runs and no more, of 13 states and more.
COUNTS = (1, 2, 3, 5, 11, 12, 13, 23, 24, 25, 36, 37, 131, 132, 133, 143, 144, 145, 156, 157, 300)
# The members of a group: a warp of the block alone, two of four and so on; 3 warps have no even halves.
GROUPS = {"warp": (4, 1), "group of 2": (2, 64), "group of 4": (4, 64), "group of 3": (3, 64), "group of 12": (12, 64)}
each_group = pytest.mark.parametrize("group", ["warp", "group of 4"])


def spec_of(head_dim_v, **options):
    limits = {"max_requests": 64, "max_nodes": NODES, "max_kv_len": 4096, "sm_scale": 1.0, "split": "fixed"}
    return nv.VerifySpec.gqa(1, 1, 16, head_dim_v=head_dim_v, **{**limits, **options})


class States:
    """Partial states of requests of one row unit each: request b has ``counts[b]`` of them, in any place."""

    def __init__(self, rng, counts, head_dim_v, rows=ROWS):
        self.counts = np.array(counts)
        total = int(self.counts.sum())
        self.firsts = np.concatenate([[0], np.cumsum(self.counts)[:-1]]) + 3  # three that nobody asks for
        self.m = rng.normal(0, 4, (total + 5, rows)).astype(np.float32)
        self.total = rng.uniform(0.5, 40, (total + 5, rows)).astype(np.float32)
        self.o = rng.standard_normal((total + 5, rows, head_dim_v), dtype=np.float32) * self.total[..., None]
        used = np.zeros(total + 5, bool)
        used[3 : 3 + total] = True
        for values in (self.m, self.total, self.o):  # what is no state
            values[~used] = np.nan

    def of(self, b):
        """m, total and o of a request's states, views."""
        part = slice(self.firsts[b], self.firsts[b] + self.counts[b])
        return self.m[part], self.total[part], self.o[part]

    def expected(self, b):
        """out [rows, D], lse [rows] and the sum of the weighted |o| / l, in float64."""
        m, totals, o = (x.astype(np.float64) for x in self.of(b))
        largest = np.fmax.reduce(m, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            w = np.exp2(m - np.where(np.isneginf(largest), 0, largest))
            total = (w * totals).sum(0)
            out, size = (w[..., None] * o).sum(0), (w[..., None] * np.abs(o)).sum(0)
            seen = (total != 0)[:, None]
            out, size = (np.where(seen, x / total[:, None] * V_SCALE, 0) for x in (out, size))
            return out, np.where(total != 0, largest * np.log(2) + np.log(total), -np.inf), size


def laid_out(o):
    """The columns in the order of the workspace (the head of reduce/merge.py)."""
    width = o.shape[-1]
    order = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    return np.ascontiguousarray(o[..., (np.arange(0, width, 16)[:, None] + order).reshape(-1)])


def share_of(warps, grid, chunks):
    """Warps that take a chunk together, by the rule in reduce/merge.py: as many as the grid has for each chunk."""
    share = warps
    while share > 1 and chunks * share > grid * warps:
        share //= 2
    return share


def merge(spec, states, *, group="warp", warps=None, grid=None, nodes=NODES, rows=ROWS, with_lse=True, seed=0):
    """Bits of out [requests, nodes, D], and lse.  ``group``: the name of a number of warps and a grid."""
    named_warps, named_grid = GROUPS[group]
    warps, grid = warps or named_warps, grid or named_grid
    requests, width = len(states.counts), spec.head_dim_v
    geometry = SimpleNamespace(rows_per_tile=rows, warps=warps, threads=32 * warps)
    if group != "warp":  # as many blocks as the group needs
        chunks = requests * rows * -(-width // COLUMNS)
        grid = min(grid, chunks)
        assert share_of(warps, grid, chunks) == warps, "the name of this case"

    def unit_states(args, table, unit):
        return UnitStates(int32(unit), 0, 0, int32(states.firsts[unit]), int32(states.counts[unit]))

    phase = merge_module.make_merge(spec, geometry, SimpleNamespace(unit_states=unit_states))
    first_chunk = merge_scratch_bytes(warps) // 8
    first_entry = (merge_scratch_bytes(warps) + chunk_bytes(warps)) // 4

    def body(args):
        table = cuda.shared.array(0, int32, 16)[first_entry:]
        if cuda.threadIdx.x == 0:
            table[requests], table[2 * requests + 1] = int(states.counts.sum()), requests
        cuda.syncthreads()
        chunks = cuda.shared.array(0, int64, 16)[first_chunk:]
        if cuda.threadIdx.x < 32:
            phase.look_up(args, table, chunks)
        cuda.syncthreads()
        phase.run(args, table, chunks)

    token_sums = np.arange(requests + 1, dtype=np.int32) * nodes
    out = np.full(requests * nodes * width, 0xFFFF, np.uint16)
    lse = np.full(requests * nodes if with_lse else 0, np.nan, np.float32)
    fields = dict.fromkeys(contract.args_class()._fields) | {
        "partial_ml": np.stack([states.m, states.total], -1).reshape(-1), "partial_o": laid_out(states.o).reshape(-1),
        "kv_indptr": np.zeros(requests + 1, np.int32), "kv_indptr_words": 1,
        "kv_indices": np.zeros(0, np.int32), "kv_indices_words": 1,
        "qo_indptr": token_sums, "qo_indptr_words": 1,
        "num_requests": requests, "num_tokens": requests * nodes, "max_nodes": nodes, "max_kv_len": 4096,
        "max_chunks": 64, "out": out, "out_stride_token": width, "out_stride_head": width,
        "lse": lse, "lse_stride_token": 1, "v_scale": np.float32(V_SCALE),
    }  # fmt: skip
    shared = merge_scratch_bytes(warps) + chunk_bytes(warps) + table_bytes(requests)
    args = contract.args_class()(**fields)
    emulator = nv.Emulator(grid, seed)
    emulator.launch(body, args, grid=grid, block=32 * warps, shared_bytes=shared, name="merge")
    return out.view(NUMPY_DTYPE[spec.dtype]).reshape(requests, nodes, width), lse.reshape(-1, nodes)


def test_numbers_of_the_merge():
    """Those that the cases of this file are chosen by."""
    assert (geometry.MERGE_RUNS, merge_module.IN_FLIGHT, geometry.MERGE_COLUMNS) == (RUNS, IN_FLIGHT, COLUMNS)
    assert merge_scratch_bytes(1) == RUNS * (4 * COLUMNS + 16)
    assert merge_scratch_bytes(12) == 12 * merge_scratch_bytes(1)


def check(spec, states, out, lse):
    for b, count in enumerate(states.counts):
        if count == 1:  # written by phase 1 already
            assert (out[b].view(np.uint16) == 0xFFFF).all() and np.isnan(lse[b]).all()
            continue
        want, want_lse, size = (x[: out.shape[1]] for x in states.expected(b))
        # A sum of S float32 terms, in runs of 12 or S / 12, which are added up; the rest adds some ulps.
        allowed = (max(IN_FLIGHT, count / RUNS) + RUNS + 8) * EPS * size + 1.01 * HALF_ULP[spec.dtype] * np.abs(want)
        got = out[b].astype(np.float64)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{count} states")
        assert (np.isnan(want) | (np.abs(got - want) <= allowed)).all(), f"{count} states"
        np.testing.assert_allclose(lse[b], want_lse, rtol=4 * EPS, atol=16 * EPS, err_msg=f"{count} states")


def test_every_chunk_is_taken_once():
    """By one group of the blocks in one of its turns; a block goes on while its first group has one."""
    number = merge_module.chunk_number.py_func
    for groups, parts, blocks in itertools.product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 5), (1, 2, 5, 132)):
        most_shift = (parts & -parts).bit_length() - 1
        for num_chunks in (1, parts, 7 * parts, 64 * parts, groups * blocks * parts + 3 * parts):
            taken = []
            for block in range(blocks):
                turn = 0
                while number(groups, 0, turn, block, blocks, most_shift) < num_chunks:
                    taken += [number(groups, g, turn, block, blocks, most_shift) for g in range(groups)]
                    turn += 1
            assert sorted(n for n in taken if n < num_chunks) == list(range(num_chunks)), (groups, parts, blocks)


@pytest.mark.parametrize("width, dtype", [*((width, "bfloat16") for width in WIDTHS), (80, "float16")])
@each_group
def test_any_number_of_states(width, dtype, group):
    spec = spec_of(width, dtype=dtype)
    counts = COUNTS if width == 16 else (1, 2, 13, 145)
    states = States(np.random.default_rng(width), counts, width)
    check(spec, states, *merge(spec, states, group=group))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", GROUPS)
def test_every_number_of_states(group):
    spec = spec_of(16)
    for first in range(1, 301, 30):  # 60 chunks: groups have a block each
        states = States(np.random.default_rng(first), range(first, first + 30), 16)
        check(spec, states, *merge(spec, states, group=group))


@pytest.mark.parametrize("width", [80, 576])
def test_bits_do_not_depend_on_who_adds(width):
    """A warp or a group, of any size, on any grid, in any order: the cut into runs depends on the number of states."""
    spec = spec_of(width)
    states = States(np.random.default_rng(5), (2, 9, 31, 65, 150) if width == 80 else (2, 25), width)
    want, want_lse = merge(spec, states)
    check(spec, states, want, want_lse)
    others = [dict(group="group of 4"), dict(group="group of 3"), dict(group="group of 12"), dict(group="group of 2")]
    # Groups of a part of a block: more chunks than blocks.  Then a single block, and other orders of threads.
    others += [dict(warps=12, grid=3), dict(warps=8, grid=4), dict(warps=9, grid=1), dict(seed=2)]
    others += [dict(group="group of 4", seed=1), dict(warps=8, grid=4, seed=3)]
    for other in others:
        out, lse = merge(spec, states, **other)
        assert out.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes(), other


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("warps, grid, share", [(9, 4, 4), (11, 5, 5)])
def test_groups_that_take_another_chunk(warps, grid, share, seed):
    """Where a block's warps are no power of two, some are in no group, and a group may have a second chunk: its warps
    must not write the runs of that one before those of the first are added up."""
    chunks = grid * (warps // share) + 1
    assert share_of(warps, grid, chunks) == share
    spec = spec_of(16, max_nodes=1)
    states = States(np.random.default_rng(12), [40 + b for b in range(chunks)], 16, rows=1)
    out, lse = merge(spec, states, warps=warps, grid=grid, nodes=1, rows=1, seed=seed)
    check(spec, states, out, lse)


@pytest.mark.parametrize("warps, grid", [(8, 3), (12, 2), (5, 4)])
def test_rows_and_units_in_part(warps, grid):
    """Row tiles of 16 of which requests have one row or three: chunks without a row, among those with one.

    Groups of a block's part go through their chunks at different speeds, and meet at the same barriers.
    """
    spec, counts = spec_of(144, max_nodes=16), (2, 1, 40, 13, 2)
    for nodes in (1, 3):
        states = States(np.random.default_rng(11), counts, 144, rows=16)
        for values in (states.m, states.total, states.o):
            values[:, nodes:] = np.nan
        out, lse = merge(spec, states, warps=warps, grid=grid, nodes=nodes, rows=16, seed=1)
        check(spec, states, out, lse)


@each_group
def test_empty_states_are_neutral(group):
    """(-inf, 0, 0) anywhere among the others, any number of them, changes no bit of a sum in the same runs; alone they
    give 0 and -inf."""
    counts, width = (2, 5, 32, 33, 70), 80
    spec, rng = spec_of(width), np.random.default_rng(6)
    states = States(rng, counts, width)
    for b, count in enumerate(counts):
        m, total, o = states.of(b)
        empty = rng.random(count) < 0.7
        empty[rng.integers(count)] = False
        m[empty, 0], total[empty, 0], o[empty, 0] = -np.inf, 0, 0
        m[:, 1], total[:, 1], o[:, 1] = -np.inf, 0, 0
    out, lse = merge(spec, states, group=group)
    check(spec, states, out, lse)
    assert (lse[:, 1] == -np.inf).all() and not out[:, 1].view(np.uint16).any()


@each_group
def test_one_state_among_empty_ones_is_itself(group):
    """B08: merged any number of times from either side, exactly."""
    counts, width = (2, 3, 9, 40, 65), 16
    spec, rng = spec_of(width), np.random.default_rng(7)
    states = States(rng, counts, width)
    places = [0, 1, 8, 20, 64]
    for b, place in enumerate(places):
        m, total, o = states.of(b)
        m[:], total[:], o[:] = -np.inf, 0, 0
        m[place], total[place] = -3, 2
        o[place] = rng.integers(-8, 8, o[place].shape)
    out, lse = merge(spec, states, group=group)
    for b, place in enumerate(places):
        np.testing.assert_array_equal(out[b].astype(np.float32), states.of(b)[2][place] / 2 * np.float32(V_SCALE))
        np.testing.assert_allclose(lse[b], -3 * np.log(2) + np.log(2), rtol=4 * EPS)


@each_group
def test_a_spoilt_state_spoils_its_own_row(group):
    """l is NaN after a NaN score, whatever m is; +inf after an overflow.  The other row keeps its bits."""
    counts, width = (2, 9, 33, 64, 65, 70), 80
    spec = spec_of(width)
    states = States(np.random.default_rng(8), counts, width)
    want, want_lse = merge(spec, states, group=group)
    for b, count in enumerate(counts):
        m, total, o = states.of(b)
        place = (count - 1, 0, 32, 5, 64, 40)[b]
        total[place, 0] = np.nan
        if b % 2:
            m[place, 0] = -np.inf
        o[place, 0, ::2] = np.nan
    out, lse = merge(spec, states, group=group)
    assert np.isnan(out[:, 0].astype(np.float32)).all() and np.isnan(lse[:, 0]).all()
    assert out[:, 1].tobytes() == want[:, 1].tobytes() and lse[:, 1].tobytes() == want_lse[:, 1].tobytes()


@each_group
def test_far_apart_maxima(group):
    """Up to 1e38 and differences that leave nothing of a state; nothing overflows."""
    counts, width = (2, 3, 9, 40), 16
    spec = spec_of(width)
    states = States(np.random.default_rng(9), counts, width)
    for b, largest in enumerate((1e38, -1e38, 300.0, 1e38)):
        m, _, _ = states.of(b)
        m[:] = -3e38
        m[-1] = largest
        m[0] = largest - 3 if abs(largest) < 1e6 else -largest
    out, lse = merge(spec, states, group=group)
    for b, count in enumerate(counts):
        want, want_lse, _ = states.expected(b)
        np.testing.assert_allclose(out[b].astype(float), want, rtol=2.0**-8, atol=1e-6, err_msg=f"{count} states")
        np.testing.assert_allclose(lse[b], want_lse, rtol=4 * EPS)


@each_group
def test_without_lse(group):
    spec = spec_of(80)
    states = States(np.random.default_rng(10), (2, 9, 33), 80)
    want, _ = merge(spec, states, group=group)
    out, lse = merge(spec, states, group=group, with_lse=False)
    assert lse.size == 0 and out.tobytes() == want.tobytes()
