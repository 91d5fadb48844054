"""The building kernel against its definition, bit for bit.  Collected by the emulated and the gpu tier."""

import numpy as np
import pytest

import nbverify as nv
from nbverify.tree.build import WRITTEN, BuildFlag, BuildPlan, build_trees
from nbverify.tree.trees import TreeBatch

OUTPUTS = [name for name in WRITTEN if name != "flags"]
GARBAGE = 0x55  # every byte of the outputs before a launch


def random_drafts(rng, shape):
    """(tokens, logprobs) of any shape [..., D, K]: often on a coarse grid, for ties, and with -inf at the ends."""
    kind = rng.integers(3)
    logprobs = -rng.exponential(size=shape) if kind == 0 else -0.5 * rng.integers(0, 4, shape)
    if kind == 2:
        logprobs[rng.random(shape) < 0.3] = -np.inf
    logprobs = -np.sort(-logprobs, axis=-1)
    return rng.integers(0, 2**31, shape), logprobs.astype(np.float32)


class Buffers:
    """A plan with its buffers on a device."""

    def __init__(self, dev, tokens, logprobs, root_tokens, budgets, max_nodes):
        num_requests, depth, top_k = tokens.shape
        self.dev, self.max_nodes = dev, max_nodes
        plan = BuildPlan(max_requests=num_requests, depth=depth, top_k=top_k, max_nodes=max_nodes, device=dev.device)
        self.inputs = dict(tokens=tokens, logprobs=logprobs, root_tokens=root_tokens, budgets=budgets)
        outputs = vars(TreeBatch.padding(num_requests, max_nodes)) | {"flags": np.zeros(num_requests, np.int32)}
        for value in outputs.values():
            value.view(np.uint8)[...] = GARBAGE
        self.arrays = {name: dev.upload(value) for name, value in (self.inputs | outputs).items()}
        self.bound = plan.bind(**self.arrays)

    def write(self, **inputs):
        """New values in the same buffers."""
        for name, value in inputs.items():
            self.dev.write(self.arrays[name], value)
        self.inputs |= inputs

    def launch(self):
        self.bound.launch()
        return self.outputs()

    def outputs(self):
        return {name: self.dev.download(self.arrays[name]) for name in WRITTEN}

    def want(self):
        """By definition."""
        return vars(build_trees(**self.inputs, max_nodes=self.max_nodes)) | {
            "flags": np.zeros_like(self.inputs["budgets"])
        }


def assert_same_bits(got, want, requests=slice(None)):
    for name in WRITTEN:
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name][requests], want[name][requests], err_msg=name)
        assert got[name][requests].tobytes() == want[name][requests].tobytes(), name  # the sign of a zero, too


def random_buffers(dev, rng, num_requests, depth, top_k, max_nodes):
    tokens, logprobs = random_drafts(rng, (num_requests, depth, top_k))
    budgets = rng.integers(-1, max_nodes, num_requests).astype(np.int32)
    return Buffers(dev, tokens, logprobs, rng.integers(0, 2**40, num_requests), budgets, max_nodes)


# N: below, at and past a warp's 32 slots; D, K: one, few, many.
SHAPES = [(1, 1, 1), (1, 1, 2), (1, 5, 4), (4, 1, 33), (3, 2, 12), (6, 3, 16), (2, 8, 34)]


@pytest.mark.parametrize("depth, top_k, max_nodes", SHAPES)
def test_trees_are_those_of_the_definition(dev, depth, top_k, max_nodes):
    """210 trees in the emulator, 10,500 on a GPU: replays over static buffers, with new values each time."""
    rng = np.random.default_rng(depth + 100 * top_k)
    rounds, num_requests = (15, 100) if dev.is_gpu else (5, 6)
    buffers = random_buffers(dev, rng, num_requests, depth, top_k, max_nodes)
    for _ in range(rounds):
        tokens, logprobs = random_drafts(rng, (num_requests, depth, top_k))
        budgets = rng.integers(-1, max_nodes, num_requests).astype(np.int32)
        buffers.write(tokens=tokens, logprobs=logprobs, budgets=budgets)
        assert_same_bits(buffers.launch(), buffers.want())


def test_equal_scores_in_many_lanes(dev):
    """All candidates weigh the same, in every lane and in the slots of a lane: the tie decides at every node."""
    tokens, budgets = np.arange(3 * 4 * 6).reshape(3, 4, 6), np.array([100, 40, 99], np.int32)
    buffers = Buffers(dev, tokens, np.zeros((3, 4, 6), np.float32), np.arange(3), budgets, max_nodes=101)
    assert_same_bits(buffers.launch(), buffers.want())


@pytest.mark.parametrize(
    "depth, top_k, max_nodes",
    [(16, 8, 65), (8, 16, 200), (32, 64, 1025)],
    ids=["issue", "several slots a lane", "limits"],
)
def test_sizes_of_use(dev, depth, top_k, max_nodes):
    rng = np.random.default_rng(max_nodes)
    num_requests = 16 if dev.is_gpu else 2
    logits = rng.normal(size=(num_requests, depth, 4 * top_k)) * 2
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs = -np.sort(-logprobs, axis=-1)[..., :top_k].astype(np.float32)
    budgets = np.full(num_requests, max_nodes - 1, np.int32)
    tokens = rng.integers(0, 163_840, logprobs.shape).astype(np.int32)
    buffers = Buffers(
        dev, tokens, logprobs, rng.integers(0, 163_840, num_requests).astype(np.int32), budgets, max_nodes
    )
    got = buffers.launch()
    assert_same_bits(got, buffers.want())
    assert (got["num_nodes"] == max_nodes).all()


def test_a_wrong_request_gets_a_flag_and_its_root_and_the_others_their_trees(dev):
    rng = np.random.default_rng(1)
    tokens, _ = random_drafts(rng, (9, 3, 4))
    logprobs = -np.sort(rng.exponential(size=(9, 3, 4)).astype(np.float32), axis=-1)
    budgets = np.array([9, 9, 9, 10, 9, 2**31 - 1, -5, 9, 0], np.int32)
    good = Buffers(dev, tokens, logprobs.copy(), np.arange(9), np.minimum(budgets, 9), max_nodes=10)
    want = good.want()
    logprobs[1, 2, 3] = np.nan
    logprobs[2, 0, 0] = np.inf
    logprobs[4, 1, 3] = logprobs[4, 1, 2] / 2  # above the rank before
    logprobs[6] = np.nan  # does not exist
    logprobs[8, 2, 1] = np.nan  # would not be reached
    flags = np.zeros(9, np.int32)
    flags[[1, 2, 8]] = BuildFlag.NOT_A_LOGPROB
    flags[[3, 5]] = BuildFlag.BUDGET
    flags[4] = BuildFlag.RANK_ORDER
    buffers = Buffers(dev, tokens, logprobs, np.arange(9), budgets, max_nodes=10)
    got = buffers.launch()
    assert got["flags"].tolist() == flags.tolist()
    assert_same_bits(got, want, flags == 0)
    for b in np.flatnonzero(flags):
        assert got["num_nodes"][b] == 1
        assert got["node_tokens"][b].tolist() == [b] + [0] * 9 and got["parents"][b].tolist() == [-1] * 10
    buffers.write(logprobs=good.inputs["logprobs"], budgets=good.inputs["budgets"])
    assert_same_bits(buffers.launch(), want)  # a flag goes with its cause


def test_scores_that_overflow(dev):
    """-inf by a sum of finite numbers is never taken; +inf, by numbers that are no log-probabilities, does no harm.

    The last sibling of the third request is inf - inf, in the lane that later has the child of node 34.
    """
    big = np.float32(3e38)
    logprobs = np.full((3, 3, 13), -np.inf, np.float32)
    logprobs[0, :, :2] = -big
    logprobs[1, :, 0] = big
    logprobs[2, :, 0] = big, big, 0
    logprobs[2, 0, 1:] = 0
    tokens, budgets = np.arange(3 * 3 * 13).reshape(3, 3, 13), np.array([9, 9, 39], np.int32)
    buffers = Buffers(dev, tokens, logprobs, np.arange(3), budgets, max_nodes=40)
    got = buffers.launch()
    assert_same_bits(got, buffers.want())
    assert got["num_nodes"].tolist() == [3, 4, 40] and got["parents"][2, 35] == 34


def test_only_its_own_buffers_are_written(dev):
    """The batch lies in the middle of larger buffers, whose other rows keep their bytes."""
    rng = np.random.default_rng(4)
    buffers = random_buffers(dev, rng, 3, 2, 3, 8)
    plan = BuildPlan(max_requests=1, depth=2, top_k=3, max_nodes=8, device=dev.device)
    before = buffers.outputs()
    plan.bind(**{name: array[1:2] for name, array in buffers.arrays.items()}).launch()
    got, want = buffers.outputs(), buffers.want()
    assert_same_bits(got, want, slice(1, 2))
    assert_same_bits(got, before, [0, 2])


@pytest.mark.parametrize("name, value", [("max_requests", 0), ("depth", 33), ("top_k", 65), ("max_nodes", 1026),
                                         ("max_nodes", 8.0)])  # fmt: skip
def test_sizes_out_of_range_are_refused(dev, name, value):
    sizes = {"max_requests": 1, "depth": 2, "top_k": 3, "max_nodes": 8} | {name: value}
    with pytest.raises(nv.ArgumentError, match=f"^{name}: expected an int, 1 to"):
        BuildPlan(**sizes, device=dev.device)


def test_wrong_buffers_are_refused(dev):
    buffers = random_buffers(dev, np.random.default_rng(2), 2, 2, 3, 8)
    plan = BuildPlan(max_requests=2, depth=2, top_k=3, max_nodes=8, device=dev.device)
    for name, wrong in (
        ("logprobs", np.zeros((2, 2, 3))),
        ("tokens", np.zeros((2, 3, 2), np.int64)),
        ("budgets", np.zeros(2, np.int64)),
        ("node_tokens", np.zeros((2, 8), np.int32)),
        ("parents", np.zeros((2, 9), np.int32)),
        ("flags", np.zeros(3, np.int32)),
    ):
        with pytest.raises(nv.ArgumentError, match=f"^{name}: expected"):
            plan.bind(**buffers.arrays | {name: dev.upload(wrong)})
    with pytest.raises(nv.ArgumentError, match=r"^scores: expected an array in C order"):
        plan.bind(**buffers.arrays | {"scores": dev.upload(np.zeros((2, 16), np.float32))[:, ::2]})
    if not dev.is_gpu:
        frozen = buffers.arrays["depths"].copy()
        frozen.flags.writeable = False
        with pytest.raises(nv.ArgumentError, match=r"^depths: expected an array that may be written"):
            plan.bind(**buffers.arrays | {"depths": frozen})
