"""Acceptance on a device against its definition, bit for bit.  Collected by the emulated and the gpu tier."""

import ml_dtypes
import numpy as np
import pytest

from nbverify.arrays import stream_handle
from nbverify.errors import ArgumentError
from nbverify.stages import open_runner
from nbverify.tree.accept import AcceptFlag, AcceptPlan, accept_greedy, accept_sampled, draw_token, kept_weights
from nbverify.tree.trees import MAX_NODES
from support import draw_probe

B19 = {
    "parents": [-1, 0, 0, 1, 1, 2, 5],
    "tokens": [100, 11, 12, 21, 22, 23, 31],
    "targets": [12, 21, 23, 50, 51, 31, 77],
}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
OUTPUTS = ("accept_nodes", "accept_lens", "bonus_tokens", "flags", "accept_index", "predict")
POISON = -0x5A5A5A5A
SLOW = pytest.mark.slow
_plans: dict = {}


def random_parents(rng, n):
    """A tree in any order, root first; half of them deep."""
    parents = np.full(n, -1, np.int32)
    for j in range(1, n):
        parents[j] = j - 1 if rng.random() < 0.4 else rng.integers(0, j)
    order = np.concatenate([[0], 1 + rng.permutation(n - 1)]) if rng.random() < 0.5 else np.arange(n)
    shuffled = np.full(n, -1, np.int32)
    shuffled[order[1:]] = order[parents[1:]]
    return shuffled


def random_request(rng, n, alphabet=3):
    """(parents, node_tokens, target tokens by node); many drafts are right, and some siblings are the same token."""
    parents = random_parents(rng, n)
    targets = rng.integers(0, alphabet, n)
    tokens = rng.integers(0, alphabet, n)
    right = (rng.random(n) < 0.6) & (parents >= 0)
    tokens[right] = targets[parents[right]]
    return parents, tokens.astype(np.int64), targets.astype(np.int64)


class Batch:
    """Static buffers of a batch: B requests of at most N nodes; row ``qo_indptr[b] + j`` is node j of request b."""

    def __init__(self, rng, sizes, max_nodes, *, padded=False, index_dtype=np.int32):
        batch = len(sizes)
        self.num_nodes = np.array(sizes, np.int32)
        self.parents = np.full((batch, max_nodes), -1, np.int32)
        self.node_tokens = rng.integers(0, 3, (batch, max_nodes))
        steps = np.full(batch, max_nodes) if padded else self.num_nodes
        self.qo_indptr = np.concatenate([[0], np.cumsum(steps)]).astype(index_dtype)
        self.target_tokens = rng.integers(0, 3, max(int(self.qo_indptr[-1]), 1)).astype(index_dtype)
        for b, n in enumerate(sizes):
            if n > 0:
                parents, tokens, targets = random_request(rng, n)
                self.parents[b, :n], self.node_tokens[b, :n] = parents, tokens
                self.target_tokens[self.qo_indptr[b] : self.qo_indptr[b] + n] = targets

    @property
    def tree(self):
        return {name: getattr(self, name) for name in ("parents", "node_tokens", "num_nodes", "qo_indptr")}

    def logits(self, rng, vocab, dtype):
        """Logits whose largest are the target tokens: few distinct values, so there are equals behind them."""
        rows = np.round(rng.normal(0, 2, (len(self.target_tokens), vocab)), 1).astype(np.float32)
        tokens = self.target_tokens % vocab
        rows[np.arange(len(rows)), tokens] = rows.max(1) + 1
        return rows.astype(DTYPES[dtype])

    def sampling(self, rng, **fixed):
        """Parameters of every kind, one a request."""
        batch = len(self.num_nodes)
        settings = {
            "temperatures": rng.choice([0, 0.5, 1, 3], batch).astype(np.float32),
            "top_ks": rng.choice([-1, 0, 1, 2, 3, 1000], batch).astype(np.int32),
            "top_ps": rng.choice([0.2, 0.8, 1], batch).astype(np.float32),
            "seeds": rng.integers(-(1 << 62), 1 << 62, batch),
            "prefix_lens": rng.integers(0, 1 << 40, batch),
        }
        return settings | {name: np.full(batch, value, settings[name].dtype) for name, value in fixed.items()}


def plan_for(dev, **sizes):
    """A plan, made once."""
    key = dev.name, tuple(sorted(sizes.items()))
    if key not in _plans:
        _plans[key] = AcceptPlan(**sizes, device=dev.device)
    return _plans[key]


class OnDevice:
    """A batch bound to a plan."""

    def __init__(self, dev, plan, inputs, num_rows, predict_dtype=np.int64):
        batch, width = len(inputs["num_nodes"]), plan.max_depth + 1
        self.dev, self.inputs = dev, {name: dev.upload(array) for name, array in inputs.items()}
        poisoned = {
            "accept_nodes": np.full((batch, width), POISON, np.int32), "accept_lens": np.full(batch, POISON, np.int32),
            "bonus_tokens": np.full(batch, POISON, np.int64), "flags": np.full(batch, POISON, np.int32),
            "accept_index": np.full((batch, width), POISON, np.int32),
            "predict": np.full(num_rows, POISON, predict_dtype),
        }  # fmt: skip
        self.outputs = {name: dev.upload(array) for name, array in poisoned.items()}
        self.bound = plan.bind(**self.inputs, **self.outputs)

    def run(self):
        self.dev.write(
            self.outputs["predict"], np.full(self.outputs["predict"].shape, POISON, self.outputs["predict"].dtype)
        )
        self.bound.launch()
        return {name: self.dev.download(array) for name, array in self.outputs.items()}


def check(got, want, qo_indptr):
    """What a device wrote against :class:`Accepted`."""
    for name in ("accept_nodes", "accept_lens", "bonus_tokens", "flags"):
        np.testing.assert_array_equal(got[name], getattr(want, name), err_msg=name)
    np.testing.assert_array_equal(got["accept_index"], want.accept_index(qo_indptr), err_msg="accept_index")
    predict = np.full(got["predict"].shape, POISON, np.int64)
    served = want.accept_nodes >= 0
    predict[want.accept_index(qo_indptr)[served]] = want.target_tokens[served]
    np.testing.assert_array_equal(got["predict"], predict, err_msg="predict")


def check_greedy(dev, batch, plan, logits=None):
    source = {"target_tokens": batch.target_tokens} if logits is None else {"logits": logits}
    got = OnDevice(dev, plan, {**batch.tree, **source}, len(batch.target_tokens), batch.qo_indptr.dtype).run()
    want = accept_greedy(**batch.tree, **source, max_depth=plan.max_depth)
    check(got, want, batch.qo_indptr)
    return want


# --------------------------------------------------------------------------------------------------------------- greedy


def test_recipe_b19(dev):
    plan = plan_for(dev, max_requests=8, max_nodes=12, max_depth=4)
    batch = Batch(np.random.default_rng(0), [7, 1, 0, 2], 12)
    batch.parents[0, :7], batch.node_tokens[0, :7], batch.target_tokens[:7] = B19.values()
    batch.target_tokens[7] = 42
    batch.parents[3, :2], batch.node_tokens[3, :2], batch.target_tokens[8:10] = [-1, 0], [1, 11], [12, 50]
    want = check_greedy(dev, batch, plan)
    assert want.accept_nodes[0].tolist() == [0, 2, 5, 6, -1] and want.accept_lens.tolist() == [4, 1, 0, 1]
    assert want.bonus_tokens.tolist() == [77, 42, 0, 12]


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_random_trees(dev, padded, index_dtype):
    """Four times 50 in the emulator, four times 2,500 on a GPU."""
    rng = np.random.default_rng(19)
    plan = plan_for(dev, max_requests=50, max_nodes=40, max_depth=9)
    for _ in range(50 if dev.is_gpu else 1):
        batch = Batch(rng, rng.integers(0, 41, 50), 40, padded=padded, index_dtype=index_dtype)
        want = check_greedy(dev, batch, plan)
        assert want.accept_lens.max() > 4


@pytest.mark.parametrize("max_nodes", [1, 33, 300, MAX_NODES])
def test_sizes_of_trees(dev, max_nodes):
    """One node; more than a warp; more than a thread each."""
    plan = plan_for(dev, max_requests=3, max_nodes=max_nodes, max_depth=32)
    rng = np.random.default_rng(4)
    for _ in range(20 if dev.is_gpu else 1):
        check_greedy(dev, Batch(rng, [max_nodes, max(1, max_nodes // 2), 1], max_nodes), plan)


def test_a_chain_is_a_tree_and_ends_at_max_depth(dev):
    plan = plan_for(dev, max_requests=8, max_nodes=12, max_depth=4)
    batch = Batch(np.random.default_rng(6), [12, 12, 12], 12)
    batch.parents[:] = np.arange(12) - 1
    batch.node_tokens[:, 1:] = batch.target_tokens.reshape(3, 12)[:, :-1]
    batch.node_tokens[1, 2] = 9
    want = check_greedy(dev, batch, plan)
    assert want.accept_lens.tolist() == [5, 2, 5]


@pytest.mark.parametrize("n", [34, MAX_NODES])
def test_a_chain_listed_backwards_is_no_circle(dev, n):
    """34 nodes need every round of jumps; and the longest path there is."""
    plan = plan_for(dev, max_requests=1, max_nodes=n, max_depth=n - 1)
    batch = Batch(np.random.default_rng(6), [n], n)
    batch.parents[0] = [-1, *range(2, n), 0]
    batch.node_tokens[:], batch.target_tokens[:] = 1, 1
    assert check_greedy(dev, batch, plan).accept_lens.tolist() == [n]


def test_static_buffers_serve_changing_batches(dev):
    plan = plan_for(dev, max_requests=8, max_nodes=12, max_depth=4)
    rng = np.random.default_rng(7)
    first = Batch(rng, [12, 3, 7], 12)
    on_device = OnDevice(dev, plan, {**first.tree, "target_tokens": np.zeros(36, np.int64)}, 36)
    for sizes in ([12, 3, 7], [0, 12, 1], [5, 0, 0], [12, 12, 12]):
        batch = Batch(rng, sizes, 12)
        targets = np.resize(batch.target_tokens, 36).astype(np.int64)
        for name, values in {**batch.tree, "target_tokens": targets}.items():
            dev.write(on_device.inputs[name], values)
        check(on_device.run(), accept_greedy(**batch.tree, target_tokens=targets, max_depth=4), batch.qo_indptr)


def broken_batch(rng):
    """Every fault once, and a healthy request after each of them."""
    batch = Batch(rng, [8] * 20, 12)
    faults = [
        lambda b: batch.num_nodes.__setitem__(b, 13),
        lambda b: batch.num_nodes.__setitem__(b, -5),
        lambda b: batch.num_nodes.__setitem__(b, 2**31 - 1),
        lambda b: batch.parents.__setitem__((b, 0), 0),
        lambda b: batch.parents.__setitem__((b, 5), -1),
        lambda b: batch.parents.__setitem__((b, 5), 8),
        lambda b: batch.parents.__setitem__((b, 5), -(2**31)),
        lambda b: batch.parents.__setitem__((b, 5), 5),
        lambda b: batch.parents.__setitem__((b, slice(0, 8)), [-1, 0, 7, 2, 3, 4, 5, 6]),
        lambda b: batch.parents.__setitem__((b, slice(0, 8)), [-1, 0, 0, 4, 3, 0, 0, 0]),
    ]
    for i, fault in enumerate(faults):
        fault(2 * i)
    return batch


def test_bad_trees_are_flagged_and_neighbours_are_not(dev):
    plan = plan_for(dev, max_requests=20, max_nodes=12, max_depth=4)
    want = check_greedy(dev, broken_batch(np.random.default_rng(2)), plan)
    flags = AcceptFlag.NUM_NODES, AcceptFlag.ROOT, AcceptFlag.PARENT, AcceptFlag.CYCLE
    assert want.flags[::2].tolist() == np.repeat(flags, [3, 1, 4, 2]).tolist()
    assert (want.flags[1::2] == 0).all() and (want.accept_lens[1::2] > 0).all()


@pytest.mark.parametrize("first_row", [-1, 9, 2**40, -(2**62), 2**63 - 1])
def test_rows_that_are_not_there_are_flagged(dev, first_row):
    plan = plan_for(dev, max_requests=8, max_nodes=12, max_depth=4)
    batch = Batch(np.random.default_rng(2), [8, 8], 12, index_dtype=np.int64)
    batch.qo_indptr[1] = first_row
    want = check_greedy(dev, batch, plan)
    assert want.flags.tolist() == [0, AcceptFlag.ROWS]


# --------------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("vocab", [1, 7, 333])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_dtype_and_length(dev, dtype, vocab):
    plan = plan_for(dev, max_requests=4, max_nodes=6, max_depth=4, vocab_size=vocab, logits_dtype=dtype)
    rng = np.random.default_rng(vocab)
    for padded in (False, True):
        batch = Batch(rng, [6, 0, 3, 1], 6, padded=padded)
        check_greedy(dev, batch, plan, batch.logits(rng, vocab, dtype))


def check_strided(dev, batch, plan, logits, stride, offset):
    """Rows that far apart; what lies between and around them is larger than any logit, or NaN."""
    num_rows, vocab = logits.shape
    storage = np.full(offset + num_rows * stride, np.inf, logits.dtype)
    rows = storage[offset:].reshape(num_rows, stride)
    rows[:, :vocab], rows[:, -1] = logits, np.nan
    on_device = dev.upload(storage)[offset:].reshape(num_rows, stride)[:, :vocab]
    inputs = {name: dev.upload(array) for name, array in batch.tree.items()}
    outputs = OnDevice(dev, plan, {**batch.tree, "logits": logits}, num_rows).outputs
    plan.bind(**inputs, logits=on_device, **outputs).launch()
    got = {name: dev.download(array) for name, array in outputs.items()}
    check(got, accept_greedy(**batch.tree, logits=logits, max_depth=plan.max_depth), batch.qo_indptr)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_stride_and_start(dev, dtype):
    vocab, rng = 77, np.random.default_rng(3)
    plan = plan_for(dev, max_requests=4, max_nodes=6, max_depth=4, vocab_size=vocab, logits_dtype=dtype)
    batch = Batch(rng, [4, 1], 6)
    logits = batch.logits(rng, vocab, dtype)
    for stride, offset in ((79, 0), (80, 1), (85, 3)):
        check_strided(dev, batch, plan, logits, stride, offset)


@pytest.mark.parametrize("place", [0, 1, 5_000, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_with_their_loads_in_flight(dev, dtype, place):
    """Long enough for four whole windows a lane in a split; the largest logit at the ends, and between."""
    # 2,048 windows, so 128 in a split, and the last one, of the last lane, is one element short.
    vocab, rng = {"float32": 8_188}.get(dtype, 16_380), np.random.default_rng(3)
    plan = plan_for(dev, max_requests=1, max_nodes=1, max_depth=1, vocab_size=vocab, logits_dtype=dtype)
    logits = np.round(rng.normal(0, 1, (1, vocab)), 1).astype(np.float32)
    logits[0, place] = 20
    check_strided(dev, Batch(rng, [1], 1), plan, logits.astype(DTYPES[dtype]), vocab + 7, 3)


def special_rows(vocab, dtype):
    """Equals, NaN, infinities, zeros of both signs, in places that belong to different lanes and splits."""
    rows = np.zeros((12, vocab), np.float32)
    rows[0] = 1.5
    rows[1, [vocab - 1, vocab // 2]] = 2
    rows[2, 0], rows[2, 3] = np.nan, 1
    rows[3] = np.nan
    rows[4] = -np.inf
    rows[5], rows[5, 4] = -np.inf, np.nan
    rows[6, [5, 9]] = np.inf
    rows[7, 0] = -0.0
    rows[8] = -3.0
    rows[8, 11] = -2.5
    rows[9], rows[9, -1] = -np.inf, -60000.0
    rows[10] = np.linspace(-5, 5, vocab)
    rows[11] = np.linspace(5, -5, vocab)
    return rows.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_logits(dev, dtype):
    vocab = 150
    plan = plan_for(dev, max_requests=12, max_nodes=6, max_depth=4, vocab_size=vocab, logits_dtype=dtype)
    batch = Batch(np.random.default_rng(1), [1] * 12, 6)
    want = check_greedy(dev, batch, plan, special_rows(vocab, dtype))
    assert want.bonus_tokens.tolist() == [0, 75, 3, 0, 0, 0, 5, 0, 11, 149, 149, 0]
    bad = AcceptFlag.BAD_LOGITS
    assert want.flags.tolist() == [0, 0, bad, bad, bad, bad, 0, 0, 0, 0, 0, 0]


def test_logits_of_rows_that_are_not_there_are_not_read(dev):
    vocab, rng = 9, np.random.default_rng(2)
    plan = plan_for(dev, max_requests=12, max_nodes=6, max_depth=4, vocab_size=vocab)
    batch = Batch(rng, [1, 2, 1, 2, 1, 2], 6, index_dtype=np.int64)
    batch.num_nodes[[0, 2]], batch.qo_indptr[4] = [-9, 7], 2**40
    want = check_greedy(dev, batch, plan, batch.logits(rng, vocab, "float32"))
    assert want.flags.tolist() == [AcceptFlag.NUM_NODES, 0, AcceptFlag.NUM_NODES, 0, AcceptFlag.ROWS, 0]


# ------------------------------------------------------------------------------------------------------------- sampling


def check_sampled(dev, batch, plan, logits, settings):
    got = OnDevice(dev, plan, {**batch.tree, "logits": logits, **settings}, len(logits)).run()
    want = accept_sampled(**batch.tree, logits=logits, **settings, max_depth=plan.max_depth)
    check(got, want, batch.qo_indptr)
    return want


DRAWN = [("float32", 40), ("bfloat16", 40), ("float16", 40), ("float32", 3)]


@pytest.mark.parametrize("dtype, vocab", [DRAWN[0], DRAWN[1], *(pytest.param(*one, marks=SLOW) for one in DRAWN[2:])])
def test_draws_are_those_of_the_definition(dev, dtype, vocab):
    rng = np.random.default_rng(11)
    plan = plan_for(dev, max_requests=12, max_nodes=9, max_depth=4, vocab_size=vocab, logits_dtype=dtype, sampled=True)
    accepted = 0
    for _ in range(400 if dev.is_gpu else 1):
        batch = Batch(rng, rng.integers(0, 10, 12), 9)
        want = check_sampled(dev, batch, plan, batch.logits(rng, vocab, dtype), batch.sampling(rng))
        accepted += int(want.accept_lens.sum() - (want.accept_lens > 0).sum())
    assert accepted > 4


def test_draws_in_the_largest_tree(dev):
    """The node with the highest number is on the path; the rows of nodes beside it, which are not read, are NaN."""
    vocab, rng = 3, np.random.default_rng(18)
    plan = plan_for(dev, max_requests=1, max_nodes=MAX_NODES, max_depth=4, vocab_size=vocab, sampled=True)
    batch = Batch(rng, [MAX_NODES], MAX_NODES)
    last, tokens = MAX_NODES - 1, rng.integers(0, vocab, 3)
    batch.parents[0] = 1
    batch.parents[0, [0, 1, last, 7]] = -1, 0, 0, last
    batch.node_tokens[0, [last, 7]], batch.node_tokens[0, 1] = tokens[:2], tokens[0] + 1
    logits = np.full((MAX_NODES, vocab), np.nan, np.float32)
    logits[[0, last, 7], tokens] = 1
    want = check_sampled(dev, batch, plan, logits, batch.sampling(rng, temperatures=0.5))
    assert want.accept_nodes[0].tolist() == [0, last, 7, -1, -1]


EXACT = [
    pytest.param("float32", 3, 0, 1.0, marks=SLOW),
    pytest.param("float32", 3, 9, 1.0, marks=SLOW),
    pytest.param("float32", 3, 0, 0.7, marks=SLOW),
    ("float32", 3, 12, 0.8),
    pytest.param("bfloat16", 0.3, 9, 0.9, marks=SLOW),
    pytest.param("float16", 0.01, 5, 0.9, marks=SLOW),
]


@pytest.mark.parametrize("dtype, spread, top_k, top_p", EXACT)
def test_draws_change_at_exactly_the_bits_where_the_definition_s_do(dev, dtype, spread, top_k, top_p):
    """For each token the lowest bits that give it, and those just below: any wrong unit of a weight or sum shows."""
    logits = np.random.default_rng(16).normal(3, spread, (1, 23)).astype(DTYPES[dtype])
    logits[0, [4, 9, 15]] = np.nan, -np.inf, -np.nan
    temperature, top_p = np.float32(1.3), np.float32(top_p)
    amounts = kept_weights(logits[0], temperature, top_k, top_p)
    total = int(amounts.sum())
    firsts = [-(-(int(before) << 64) // total) for before in np.unique(np.cumsum(amounts) - amounts)]
    bits = sorted({(first - below) % (1 << 64) for first in firsts for below in (0, 1)})
    want = [draw_token(logits[0], temperature, top_k, top_p, bit)[0] for bit in bits]
    assert len(set(want)) == np.count_nonzero(amounts) > 2

    tokens = dev.upload(np.full(len(bits), -1))
    buffers = {"logits": dev.upload(logits), "bits": dev.upload(np.array(bits, np.uint64).view(np.int64)),
               "tokens": tokens}  # fmt: skip
    numbers = {"row_stride": 23, "vocab": 23, "top_k": top_k, "temperature": temperature, "top_p": top_p}
    open_runner(dev.device).bind(draw_probe.stage(dtype), len(bits), buffers, numbers)(stream_handle(None))
    assert dev.download(tokens).tolist() == want


def test_draws_from_long_rows(dev):
    """Long enough for four whole windows a thread; a real vocabulary on a GPU."""
    vocab = 163_840 if dev.is_gpu else 9_001
    rng = np.random.default_rng(12)
    plan = plan_for(dev, max_requests=12, max_nodes=9, max_depth=4, vocab_size=vocab, sampled=True)
    batch = Batch(rng, [9] * 12 if dev.is_gpu else [1], 9)
    logits = (rng.normal(0, 2, (len(batch.target_tokens), vocab))).astype(np.float32)
    settings = batch.sampling(rng, temperatures=0.8, top_ks=vocab // 3, top_ps=0.9)
    check_sampled(dev, batch, plan, logits, settings)


FIXED = {"all": {}, "one": {"top_ks": 1}, "filtered": {"top_ks": 4, "top_ps": 0.7}}


@pytest.mark.parametrize("fixed", [pytest.param(FIXED["filtered"], marks=SLOW), FIXED["one"], FIXED["all"]])
def test_draws_from_special_rows(dev, fixed):
    vocab, rng = 64, np.random.default_rng(5)
    plan = plan_for(dev, max_requests=12, max_nodes=6, max_depth=4, vocab_size=vocab, sampled=True)
    batch = Batch(rng, [1] * 12, 6)
    settings = batch.sampling(rng, **{"temperatures": 1, "top_ks": 0, "top_ps": 1, **fixed})
    want = check_sampled(dev, batch, plan, special_rows(vocab, "float32"), settings)
    bad = AcceptFlag.BAD_LOGITS
    assert want.flags.tolist() == [0, 0, bad, bad, bad, bad, 0, 0, 0, 0, 0, 0]


def test_temperature_0_is_greedy_and_wrong_parameters_are_flagged(dev):
    vocab, rng = 40, np.random.default_rng(13)
    sizes = {"max_requests": 12, "max_nodes": 9, "max_depth": 4, "vocab_size": vocab}
    plan = plan_for(dev, **sizes, logits_dtype="float32", sampled=True)
    batch = Batch(rng, [9] * 10, 9)
    logits = batch.logits(rng, vocab, "float32")
    settings = batch.sampling(rng, temperatures=0, top_ks=0)
    greedy = accept_greedy(**batch.tree, logits=logits, max_depth=4)
    np.testing.assert_array_equal(check_sampled(dev, batch, plan, logits, settings).accept_nodes, greedy.accept_nodes)

    settings["temperatures"][:8] = -1, np.nan, np.inf, 1e-40, 1, 1, 1, 1
    settings["top_ps"][4:8] = 0, np.nan, 1.5, 1e-30
    want = check_sampled(dev, batch, plan, logits, settings)
    assert want.flags.tolist() == [AcceptFlag.SAMPLING] * 3 + [0] + [AcceptFlag.SAMPLING] * 3 + [0, 0, 0]


def test_replays_draw_anew_as_the_text_grows_and_alone_as_in_a_batch(dev):
    vocab, rng = 40, np.random.default_rng(14)
    plan = plan_for(dev, max_requests=12, max_nodes=9, max_depth=4, vocab_size=vocab, logits_dtype="float32",
                    sampled=True)  # fmt: skip
    batch = Batch(rng, [1] * 6, 9)
    logits = np.zeros((6, vocab), np.float32)
    settings = batch.sampling(rng, temperatures=1, top_ks=0, top_ps=1, seeds=5, prefix_lens=9)
    on_device = OnDevice(dev, plan, {**batch.tree, "logits": logits, **settings}, 6)
    seen = []
    for step in range(3):
        dev.write(on_device.inputs["prefix_lens"], settings["prefix_lens"] + step)
        tokens = on_device.run()["bonus_tokens"]
        assert (tokens == tokens[0]).all()  # one seed, one position: one draw, wherever it is in the batch
        seen.append(int(tokens[0]))
    assert len(set(seen)) == 3


@pytest.mark.slow
def test_the_distribution_of_a_device(dev):
    """Chi-square of the first token: 7 degrees of freedom, a bound that is passed once in 30,000."""
    draws, vocab = (8_000, 8) if dev.is_gpu else (250, 8)
    rng = np.random.default_rng(15)
    plan = plan_for(dev, max_requests=draws, max_nodes=1, max_depth=0, vocab_size=vocab, sampled=True)
    batch = Batch(rng, [1] * draws, 1)
    row = rng.normal(0, 0.5, vocab).astype(np.float32)
    settings = batch.sampling(rng, temperatures=1, top_ks=0, top_ps=1)
    tokens = OnDevice(dev, plan, {**batch.tree, "logits": np.tile(row, (draws, 1)), **settings}, draws).run()
    expected = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum() * draws
    assert (((np.bincount(tokens["bonus_tokens"], minlength=vocab) - expected) ** 2) / expected).sum() < 33


# ------------------------------------------------------------------------------------------------------------ arguments


def test_wrong_arguments_are_named_before_a_launch(dev):
    plan = plan_for(dev, max_requests=8, max_nodes=12, max_depth=4)
    batch = Batch(np.random.default_rng(0), [7, 1], 12)
    good = OnDevice(dev, plan, {**batch.tree, "target_tokens": batch.target_tokens}, 8)
    given = {**good.inputs, **good.outputs}
    wrong = {
        "parents": (np.zeros((2, 11), np.int32), r"shape \[\*, 12\], got \[2, 11\]"),
        "node_tokens": (np.zeros((2, 12), np.int32), "dtype int64, got int32"),
        "num_nodes": (np.zeros(3, np.int32), r"shape \[2\], got \[3\]"),
        "qo_indptr": (np.zeros(2, np.int32), r"shape \[3\], got \[2\]"),
        "target_tokens": (np.zeros(8, np.float32), "dtype int32 or int64, got float32"),
        "accept_nodes": (np.zeros((2, 4), np.int32), r"shape \[2, 5\], got \[2, 4\]"),
        "accept_lens": (np.zeros(2, np.int64), "dtype int32, got int64"),
        "bonus_tokens": (np.zeros(2, np.int32), "dtype int64, got int32"),
        "flags": (np.zeros(1, np.int32), r"shape \[2\], got \[1\]"),
        "accept_index": (np.zeros((5, 2), np.int32), r"shape \[2, 5\], got \[5, 2\]"),
        "predict": (np.zeros(7, np.int32), r"shape \[8\], got \[7\]"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected {message}"):
            plan.bind(**{**given, name: dev.upload(value)})
    with pytest.raises(ArgumentError, match=r"^parents: expected at most max_requests = 8 rows, got 9"):
        plan.bind(**{**given, "parents": dev.upload(np.zeros((9, 12), np.int32))})
    for extra, message in (
        ({"target_tokens": None}, "^logits: expected either target_tokens or logits, got neither"),
        ({"logits": given["flags"], "target_tokens": None}, "^logits: expected vocab_size in the plan"),
        ({"seeds": given["bonus_tokens"]}, "^seeds: expected nothing in a plan that does not sample"),
    ):
        with pytest.raises(ArgumentError, match=message):
            plan.bind(**{**given, **extra})


def test_wrong_logits_are_named(dev):
    plan = plan_for(dev, max_requests=2, max_nodes=4, max_depth=4, vocab_size=8, logits_dtype="float16")
    batch = Batch(np.random.default_rng(0), [3, 1], 4)
    good = OnDevice(dev, plan, {**batch.tree, "logits": np.zeros((4, 8), np.float16)}, 4)
    given = {**good.inputs, **good.outputs}
    wide = dev.upload(np.zeros((4, 16), np.float16))
    for logits, message in (
        (dev.upload(np.zeros((4, 8), np.float32)), "dtype float16 or uint16 or int16, got float32"),
        (dev.upload(np.zeros((4, 9), np.float16)), r"shape \[\*, 8\], got \[4, 9\]"),
        (dev.upload(np.zeros((9, 8), np.float16)), r"at most max_requests \* max_nodes = 8 rows, got 9"),
        (wide[:, ::2], "rows that do not overlap, of neighbouring elements"),
    ):
        with pytest.raises(ArgumentError, match=f"^logits: expected {message}"):
            plan.bind(**{**given, "logits": logits})
    if not dev.is_gpu:
        frozen = np.zeros(2, np.int32)
        frozen.flags.writeable = False
        with pytest.raises(ArgumentError, match=r"^flags: expected an array that may be written"):
            plan.bind(**{**given, "flags": frozen})
