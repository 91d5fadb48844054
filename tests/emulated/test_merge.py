"""The merge of partial states, alone: states are made up here, and the schedule that names them is a list.

What the two kernels leave to it is tested with them; here are more states than they make in an emulator, in any
mixture.  A state is (m, total, o), as in kernels/softmax.py; total is its l.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from numba import cuda, int64
from support.batches import HALF_ULP, NUMPY_DTYPE

import nbverify as nv
from nbverify import contract
from nbverify.kernels.geometry import merge_scratch_bytes, table_bytes
from nbverify.kernels.schedule import UnitStates
from nbverify.reduce import merge as merge_module

EPS = float(np.finfo(np.float32).eps)
ROWS = 16  # of a row tile; requests have fewer
NODES = 2
V_SCALE = 0.75
WIDTHS = (16, 80, 128, 256, 512, 576)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)


def spec_of(head_dim_v, **options):
    limits = {"max_requests": 64, "max_nodes": NODES, "max_kv_len": 4096, "sm_scale": 1.0, "split": "fixed"}
    return nv.VerifySpec.gqa(1, 1, 16, head_dim_v=head_dim_v, **{**limits, **options})


class States:
    """Partial states of requests of one row unit each: request b has ``counts[b]`` of them, in any place."""

    def __init__(self, rng, counts, head_dim_v):
        self.counts = np.array(counts)
        total = int(self.counts.sum())
        self.firsts = np.concatenate([[0], np.cumsum(self.counts)[:-1]]) + 3  # three that nobody asks for
        self.m = rng.normal(0, 4, (total + 5, ROWS)).astype(np.float32)
        self.total = rng.uniform(0.5, 40, (total + 5, ROWS)).astype(np.float32)
        self.o = rng.standard_normal((total + 5, ROWS, head_dim_v), dtype=np.float32) * self.total[..., None]
        used = np.zeros(total + 5, bool)
        used[3 : 3 + total] = True
        for values in (self.m, self.total, self.o):  # what is no state, and rows of no node
            values[~used], values[:, NODES:] = np.nan, np.nan

    def of(self, b):
        """m, total and o of a request's states, views."""
        part = slice(self.firsts[b], self.firsts[b] + self.counts[b])
        return self.m[part, :NODES], self.total[part, :NODES], self.o[part, :NODES]

    def expected(self, b):
        """out [NODES, D], lse [NODES] and the sum of the weighted |o| / l, in float64."""
        m, totals, o = (x.astype(np.float64) for x in self.of(b))
        largest = np.fmax.reduce(m, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            w = np.exp2(m - np.where(np.isneginf(largest), 0, largest))
            total = (w * totals).sum(0)
            out, size = (w[..., None] * o).sum(0), (w[..., None] * np.abs(o)).sum(0)
            seen = (total != 0)[:, None]
            out, size = (np.where(seen, x / total[:, None] * V_SCALE, 0) for x in (out, size))
            return out, np.where(total != 0, largest * np.log(2) + np.log(total), -np.inf), size


def merge(spec, states, *, by_block, warps=4, grid=2, with_lse=True, seed=0):
    """Bits of out [requests, NODES, D], and lse."""
    requests, width = len(states.counts), spec.head_dim_v
    geometry = SimpleNamespace(rows_per_tile=ROWS, warps=warps, threads=32 * warps)

    def unit_states(args, table, unit):
        return UnitStates(unit, 0, 0, int(states.firsts[unit]), int(states.counts[unit]))

    phase = merge_module.make_merge_phase(spec, geometry, SimpleNamespace(unit_states=unit_states))
    first_entry = merge_scratch_bytes() // 8

    def body(args):
        table = cuda.shared.array(0, int64, 16)[first_entry:]
        if cuda.threadIdx.x == 0:
            table[requests], table[2 * requests + 1] = int(states.counts.sum()), requests
        cuda.syncthreads()
        phase(args, table)

    token_sums = np.arange(requests + 1, dtype=np.int32) * NODES
    out = np.full(requests * NODES * width, 0xFFFF, np.uint16)
    lse = np.full(requests * NODES if with_lse else 0, np.nan, np.float32)
    fields = dict.fromkeys(contract.args_class()._fields) | {
        "partial_ml": np.stack([states.m, states.total], -1).reshape(-1), "partial_o": states.o.reshape(-1).copy(),
        "kv_indptr": np.zeros(requests + 1, np.int32), "kv_indptr_words": 1,
        "kv_indices": np.zeros(0, np.int32), "kv_indices_words": 1,
        "qo_indptr": token_sums, "qo_indptr_words": 1,
        "num_requests": requests, "num_tokens": requests * NODES, "max_nodes": NODES, "max_kv_len": 4096,
        "max_splits": 64, "out": out, "out_stride_token": width, "out_stride_head": width,
        "lse": lse, "lse_stride_token": 1, "v_scale": np.float32(V_SCALE),
    }  # fmt: skip
    shared = merge_scratch_bytes() + table_bytes(requests)
    args = contract.args_class()(**fields)
    emulator = nv.Emulator(grid, seed)
    with mock.patch.object(merge_module, "ITEMS_FOR_A_BLOCK", 2**31 if by_block else 0):
        emulator.launch(body, args, grid=grid, block=32 * warps, shared_bytes=shared, name="merge")
    return out.view(NUMPY_DTYPE[spec.dtype]).reshape(requests, NODES, width), lse.reshape(-1, NODES)


def check(spec, states, out, lse):
    for b, count in enumerate(states.counts):
        if count == 1:  # written by phase 1 already
            assert (out[b].view(np.uint16) == 0xFFFF).all() and np.isnan(lse[b]).all()
            continue
        want, want_lse, size = states.expected(b)
        # A sum of S float32 terms, in runs of S / 8 and those added up; weights, division and scale add some ulps.
        allowed = (count / 8 + 8 + 8) * EPS * size + 1.01 * HALF_ULP[spec.dtype] * np.abs(want)
        got = out[b].astype(np.float64)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{count} states")
        assert (np.isnan(want) | (np.abs(got - want) <= allowed)).all(), f"{count} states"
        np.testing.assert_allclose(lse[b], want_lse, rtol=4 * EPS, atol=16 * EPS, err_msg=f"{count} states")


@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
@pytest.mark.parametrize("width, dtype", [*((width, "bfloat16") for width in WIDTHS), (80, "float16")])
def test_any_number_of_states(width, dtype, by_block):
    spec = spec_of(width, dtype=dtype)
    counts = COUNTS if width == 16 else (1, 2, 9, 33, 65, 257)
    states = States(np.random.default_rng(width), counts, width)
    check(spec, states, *merge(spec, states, by_block=by_block))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
def test_every_number_of_states(by_block):
    spec = spec_of(16)
    for first in range(1, 301, 60):
        states = States(np.random.default_rng(first), range(first, first + 60), 16)
        check(spec, states, *merge(spec, states, by_block=by_block))


@pytest.mark.parametrize("width", [80, 576])
def test_bits_do_not_depend_on_who_adds(width):
    """A warp or a block, of any size, on any grid, in any order: the cut into runs depends on the number of states."""
    spec = spec_of(width)
    states = States(np.random.default_rng(5), (2, 9, 31, 65) if width == 80 else (2, 9), width)
    want, want_lse = merge(spec, states, by_block=False)
    check(spec, states, want, want_lse)
    others = [dict(by_block=True), dict(by_block=True, warps=8, grid=1), dict(by_block=True, warps=9, grid=3)]
    others += [dict(by_block=False, warps=12, grid=1), dict(by_block=True, seed=1), dict(by_block=False, seed=2)]
    for other in others:
        out, lse = merge(spec, states, **other)
        assert out.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes(), other


@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
def test_empty_states_are_neutral(by_block):
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
    out, lse = merge(spec, states, by_block=by_block)
    check(spec, states, out, lse)
    assert (lse[:, 1] == -np.inf).all() and not out[:, 1].view(np.uint16).any()


@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
def test_one_state_among_empty_ones_is_itself(by_block):
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
    out, lse = merge(spec, states, by_block=by_block)
    for b, place in enumerate(places):
        np.testing.assert_array_equal(out[b].astype(np.float32), states.of(b)[2][place] / 2 * np.float32(V_SCALE))
        np.testing.assert_allclose(lse[b], -3 * np.log(2) + np.log(2), rtol=4 * EPS)


@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
def test_a_spoilt_state_spoils_its_own_row(by_block):
    """l is NaN after a NaN score, whatever m is; +inf after an overflow.  The other row keeps its bits."""
    counts, width = (2, 9, 33, 64, 65, 70), 80
    spec = spec_of(width)
    states = States(np.random.default_rng(8), counts, width)
    want, want_lse = merge(spec, states, by_block=by_block)
    for b, count in enumerate(counts):
        m, total, o = states.of(b)
        place = (count - 1, 0, 32, 5, 64, 40)[b]
        total[place, 0] = np.nan
        if b % 2:
            m[place, 0] = -np.inf
        o[place, 0, ::2] = np.nan
    out, lse = merge(spec, states, by_block=by_block)
    assert np.isnan(out[:, 0].astype(np.float32)).all() and np.isnan(lse[:, 0]).all()
    assert out[:, 1].tobytes() == want[:, 1].tobytes() and lse[:, 1].tobytes() == want_lse[:, 1].tobytes()


@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
def test_far_apart_maxima(by_block):
    """Up to 1e38 and differences that leave nothing of a state; nothing overflows."""
    counts, width = (2, 3, 9, 40), 16
    spec = spec_of(width)
    states = States(np.random.default_rng(9), counts, width)
    for b, largest in enumerate((1e38, -1e38, 300.0, 1e38)):
        m, _, _ = states.of(b)
        m[:] = -3e38
        m[-1] = largest
        m[0] = largest - 3 if abs(largest) < 1e6 else -largest
    out, lse = merge(spec, states, by_block=by_block)
    for b, count in enumerate(counts):
        want, want_lse, _ = states.expected(b)
        np.testing.assert_allclose(out[b].astype(float), want, rtol=2.0**-8, atol=1e-6, err_msg=f"{count} states")
        np.testing.assert_allclose(lse[b], want_lse, rtol=4 * EPS)


@pytest.mark.parametrize("by_block", [False, True], ids=["warp", "block"])
def test_without_lse(by_block):
    spec = spec_of(80)
    states = States(np.random.default_rng(10), (2, 9, 33), 80)
    want, _ = merge(spec, states, by_block=by_block)
    out, lse = merge(spec, states, by_block=by_block, with_lse=False)
    assert lse.size == 0 and out.tobytes() == want.tobytes()
