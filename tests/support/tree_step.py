"""VerifyStep against plain greedy decoding.  Collected by the emulated and the gpu tier.

The target is a function of the sequence, so that what it says of each node can be written before a step.  Keys and
values of a token are a function of the token and its position, so that after a step it is seen whether each slot of a
request holds what stands at its position.
"""

from dataclasses import replace

import numpy as np
import pytest

import nbverify as nv
from nbverify.errors import ArgumentError
from nbverify.stages import open_runner
from nbverify.tree.build import build_tree, build_trees
from nbverify.tree.masks import tree_buffers
from nbverify.tree.planes import Plane
from nbverify.tree.step import VerifyStep
from nbverify.tree.trees import MAX_NODES

REQUESTS, DEPTH, TOP_K, NODES, MAX_LEN, SLOTS, WIDTH, VOCAB = 3, 3, 3, 7, 48, 160, 16, 31
SPEC = nv.VerifySpec.gqa(
    2, 1, WIDTH, max_requests=REQUESTS, max_nodes=NODES, max_kv_len=MAX_LEN, sm_scale=0.25, dtype="float16",
    kernel="simt", mask=nv.Mask.TREE,
)  # fmt: skip
ALSO_COMPILED = [replace(SPEC, mask=mask) for mask in (nv.Mask.TREE, nv.Mask.FULL, nv.Mask.PACKED)]
SIZES = {"max_requests": REQUESTS, "depth": DEPTH, "top_k": TOP_K, "max_nodes": NODES, "max_kv_len": MAX_LEN}


def next_token(sequence):
    """The target, greedily."""
    a, b, c = [0, 0, *sequence][-3:]
    return (7 * a + 5 * b * b + 3 * c + len(sequence)) % VOCAB


def row_of(token, position, salt):
    return np.random.default_rng([int(token), int(position), salt]).standard_normal(WIDTH).astype(np.float16)


class World:
    """Host side of a server: sequences, slots, drafts; and one step on a device."""

    def __init__(self, dev, *, mask="tree", padded=False, moves=True, seed=0):
        self.dev, self.padded, self.moves, self.mask = dev, padded, moves, mask
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(SLOTS))
        self.sequences = {}  # row -> tokens, the last one being the root: not in the pool yet
        self.slots = {row: [] for row in range(REQUESTS)}
        self.pools = [dev.upload(np.full((SLOTS, 1, WIDTH), np.nan, np.float16).view(np.uint16)) for _ in range(2)]
        self.table = dev.upload(np.full((REQUESTS + 1, MAX_LEN), -1, np.int32))
        planes = [Plane(pool) for pool in self.pools] if moves else []
        self.step = VerifyStep(
            **SIZES, req_to_token=self.table, planes=planes, mask=nv.Mask(mask), padded=padded, device=dev.device
        )
        self.step.req_pool_indices.set(np.arange(REQUESTS)[::-1])
        rows = REQUESTS * NODES
        plan = dev.plan(replace(SPEC, mask=nv.Mask(mask)))
        self.q = dev.upload(self.rng.standard_normal((rows, 2, WIDTH)).astype(np.float16))
        self.out = dev.upload(np.zeros((rows, 2, WIDTH), np.uint16))
        self.bound = plan.bind(
            q=self.q, k_cache=self.pools[0], v_cache=self.pools[1], out=self.out, **self.step.verify_buffers()
        )

    def model(self, stream):
        self.bound.launch(stream)

    def table_row(self, request):
        return REQUESTS - 1 - request

    def pool(self, i):
        return self.dev.download(self.pools[i]).view(np.float16)

    def enter(self, request, prompt):
        """A new request: its prompt but the last token is in the pool."""
        self.sequences[request] = list(prompt)
        self.slots[request] = [self.free.pop() for _ in prompt[:-1]]
        table = self.dev.download(self.table)
        table[self.table_row(request), : len(prompt) - 1] = self.slots[request]
        self.dev.write(self.table, table)
        self.store(list(enumerate(prompt[:-1])), self.slots[request])
        self.change("prefix_lens", request, len(prompt) - 1)
        self.change("root_tokens", request, prompt[-1])
        self.change("budgets", request, NODES - 1)

    def leave(self, request):
        self.free += self.slots[request]
        self.slots[request] = []
        del self.sequences[request]
        self.change("budgets", request, -1)
        self.change("prefix_lens", request, 0)

    def change(self, name, request, value):
        buffer = getattr(self.step, name)
        values = buffer.get()
        values[request] = value
        buffer.set(values)

    def store(self, tokens_at, slots):
        for i in range(2):
            pool = self.pool(i).copy()
            for (position, token), slot in zip(tokens_at, slots, strict=True):
                pool[slot, 0] = row_of(token, position, i)
            self.dev.write(self.pools[i], pool.view(np.uint16))

    def draft(self):
        """Drafts that are right more often than not, at a rank that varies."""
        tokens = self.rng.integers(0, VOCAB, (REQUESTS, DEPTH, TOP_K))
        for b, sequence in self.sequences.items():
            ahead = list(sequence)
            for d in range(DEPTH):
                ahead.append(next_token(ahead))
                if self.rng.random() < 0.8:
                    tokens[b, d, self.rng.integers(0, TOP_K)] = ahead[-1]
        logprobs = -np.sort(self.rng.random((REQUESTS, DEPTH, TOP_K)).astype(np.float32) * 3, axis=-1)
        self.step.tokens.set(tokens)
        self.step.logprobs.set(logprobs)
        roots = np.array([self.sequences.get(b, [0])[-1] for b in range(REQUESTS)])
        return build_trees(tokens, logprobs, roots, self.step.budgets.get(), NODES)

    def prepare(self, trees):
        """Slots, keys and values of the nodes, and what the target says of each: by row."""
        counts = np.full(REQUESTS, NODES) if self.padded else trees.num_nodes
        first = np.concatenate([[0], np.cumsum(counts)])
        slots, targets = np.zeros(REQUESTS * NODES, np.int64), np.zeros(REQUESTS * NODES, np.int64)
        windows, stored = {}, []
        for b, sequence in self.sequences.items():
            tree = trees.tree(b)
            windows[b] = [self.free.pop() for _ in range(tree.num_nodes)]
            for j in range(tree.num_nodes):
                path, node = [], j
                while node != -1:
                    path.append(int(tree.node_tokens[node]))
                    node = int(tree.parents[node])
                text = sequence[:-1] + path[::-1]
                slots[first[b] + j] = windows[b][j]
                targets[first[b] + j] = next_token(text)
                stored.append(((len(text) - 1, text[-1]), windows[b][j]))
        self.store([at for at, _ in stored], [slot for _, slot in stored])
        self.step.out_cache_loc.set(slots)
        self.step.target_tokens.set(targets)
        return windows, first

    def check_attention(self, trees, first, windows, pools):
        """Against the reference, on lists that the world made itself: nothing of what the step wrote is believed."""
        rows = np.concatenate([first[b] + np.arange(trees.num_nodes[b]) for b in self.sequences])
        prefixes = [self.slots[b] for b in self.sequences]
        counts = [trees.num_nodes[b] for b in self.sequences]
        masks = [nv.reference.ancestor_mask(trees.parents[b, :n]) for b, n in zip(self.sequences, counts, strict=True)]
        want, _ = nv.reference.verify_attention(
            q=self.dev.download(self.q).view(np.float16)[rows], k_cache=pools[0], v_cache=pools[1],
            kv_indptr=np.cumsum([0, *map(len, prefixes)]), kv_indices=np.concatenate(prefixes).astype(np.int64),
            qo_indptr=np.cumsum([0, *counts]), out_cache_loc=np.concatenate([windows[b] for b in self.sequences]),
            custom_mask=np.concatenate([mask.ravel() for mask in masks]),
            mask_indptr=np.cumsum([0, *(n * n for n in counts)]),
            sm_scale=SPEC.sm_scale, mask="tree", head_dim_v=WIDTH,
        )  # fmt: skip
        got = self.dev.download(self.out).view(np.float16)[rows]
        np.testing.assert_allclose(got, want, atol=4e-3)

    def one_step(self, run):
        """Draft, step, and compare everything with what plain decoding says."""
        trees = self.draft()
        windows, first = self.prepare(trees)
        pools = [self.pool(i).copy() for i in range(2)]
        run()
        step = self.step
        assert step.problems() == []
        np.testing.assert_array_equal(step.parents.get(), trees.parents)
        self.check_attention(trees, first, windows, pools)
        lens, roots, prefix_lens = step.accept_lens.get(), step.root_tokens.get(), step.prefix_lens.get()
        table, freed, counts = self.dev.download(self.table), step.freed_slots.get(), step.freed_counts.get()
        for b, sequence in self.sequences.items():
            grown = list(sequence)
            for _ in range(lens[b]):
                grown.append(next_token(grown))
            path = step.accept_nodes.get()[b, : lens[b]]
            assert trees.node_tokens[b, path].tolist() == grown[len(sequence) - 1 : -1]
            assert roots[b] == grown[-1]
            if lens[b] <= DEPTH:  # it stopped since no child has that token
                children = trees.parents[b] == path[-1]
                assert roots[b] not in trees.node_tokens[b][children]
            assert prefix_lens[b] == len(grown) - 1
            back = freed[first[b] : first[b] + counts[b]].tolist()
            assert set(back) <= set(windows[b]) and len(back) == len(windows[b]) - lens[b]
            self.slots[b] += table[self.table_row(b), len(sequence) - 1 : len(grown) - 1].tolist()
            assert sorted(self.slots[b][len(sequence) - 1 :] + back) == sorted(windows[b])
            if self.moves:
                assert self.slots[b][len(sequence) - 1 :] == windows[b][: lens[b]]
            for i in range(2):
                pool = self.pool(i)
                for position, slot in enumerate(self.slots[b]):
                    np.testing.assert_array_equal(pool[slot, 0], row_of(grown[position], position, i))
            self.free += back
            self.sequences[b] = grown
        absent = [b for b in range(REQUESTS) if b not in self.sequences]
        assert (lens[absent] == 0).all() and (prefix_lens[absent] == 0).all()
        return lens


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": "full", "padded": True}, {"mask": "packed", "moves": False}, {"padded": True, "moves": False}],
    ids=["tree", "full padded", "packed in place", "tree padded in place"],
)
def test_steps_decode_what_plain_decoding_does(dev, options):
    """Captured once, for an empty batch; requests come, end, and their slots are used again."""
    world = World(dev, **options)
    step = world.step
    step.launch(world.model)  # nobody there; and libraries are ready
    assert step.problems() == [] and not step.accept_lens.get().any()
    step.capture(world.model)
    world.enter(0, [1, 2, 3, 4, 5])
    world.enter(2, [9])
    accepted = [world.one_step(step.replay)]
    world.enter(1, [3, 1])
    accepted.append(world.one_step(step.replay))
    world.leave(0)
    accepted.append(world.one_step(step.replay))
    world.enter(0, [8, 8, 8])
    for _ in range(6 if dev.is_gpu else 1):
        accepted.append(world.one_step(step.replay))
    if dev.is_gpu:
        assert step.graph_nodes() == {"KERNEL": 6}
    assert max(lens.max() for lens in accepted) > 1  # else nothing was accepted, and nothing shown


def test_a_graph_and_separate_launches_give_the_same(dev):
    one, other = World(dev), World(dev)
    other.step.capture(other.model)
    for world in (one, other):
        world.enter(1, [4, 4, 2])
    for _ in range(2):
        one.one_step(lambda: one.step.launch(one.model))
        other.one_step(other.step.replay)
        assert one.sequences == other.sequences and one.slots == other.slots


def test_steps_of_several_sizes_share_a_runner(dev):
    """As a server has them: a step for each budget.  The larger comes second: a GPU's runner keeps what it loaded."""
    runner = open_runner(dev.device)
    table = dev.upload(np.zeros((1, MAX_LEN), np.int32))
    for nodes, depth in ((1, 1), (33, 4)):
        step = VerifyStep(
            max_requests=1, depth=depth, top_k=8, max_nodes=nodes, max_kv_len=MAX_LEN, req_to_token=table,
            device=runner,
        )  # fmt: skip
        step.tokens.set(np.arange(depth * 8).reshape(1, depth, 8))
        step.logprobs.set(np.tile(-np.arange(1, 9, dtype=np.float32), (1, depth, 1)))
        step.budgets.set([nodes - 1])
        step.out_cache_loc.set(np.arange(nodes))
        step.launch(lambda stream: None)
        tree = build_tree(step.tokens.get()[0], step.logprobs.get()[0], 0, nodes - 1)
        assert step.problems() == [] and step.num_nodes.get().tolist() == [nodes]
        want = tree_buffers(tree.parents[None], [nodes], [0], mask="tree").custom_mask
        np.testing.assert_array_equal(step.custom_mask.get(), want)


@pytest.mark.slow
def test_a_step_with_the_largest_tree(dev):
    """Its last node is accepted.  A quarter of a minute in the emulator."""
    n, first_slot = MAX_NODES, 100
    tokens, logprobs = np.arange(64).reshape(2, 32), np.full((2, 32), -4, np.float32)
    tree = build_tree(tokens, logprobs, 0, n - 1)
    table = dev.upload(np.zeros((1, n), np.int32))
    pool = dev.upload(np.arange(first_slot + n, dtype=np.float32)[:, None])
    step = VerifyStep(
        max_requests=1, depth=2, top_k=32, max_nodes=n, max_kv_len=n, req_to_token=table, planes=[Plane(pool)],
        mask=nv.Mask.PACKED, device=dev.device,
    )  # fmt: skip
    step.tokens.set(tokens[None])
    step.logprobs.set(logprobs[None])
    step.budgets.set([n - 1])
    step.out_cache_loc.set(first_slot + np.arange(n))
    path, targets = tree.path(n - 1), np.full(n, -1)
    targets[path[:-1]] = tree.node_tokens[path[1:]]
    step.target_tokens.set(targets)
    step.launch(lambda stream: None)
    assert step.problems() == [] and step.num_nodes.get().tolist() == [n]
    mask = tree_buffers(tree.parents[None], [n], [0], mask="packed").custom_mask
    np.testing.assert_array_equal(step.custom_mask.get(), mask)
    assert step.accept_nodes.get().tolist() == [path] and path[-1] == n - 1
    assert dev.download(pool)[first_slot:][:3, 0].tolist() == [first_slot + node for node in path]
    assert dev.download(table)[0, :3].tolist() == [first_slot, first_slot + 1, first_slot + 2]
    assert step.prefix_lens.get().tolist() == [3] and step.freed_counts.get().tolist() == [n - 3]


def test_what_is_wrong_with_one_request_is_said_and_the_others_go_on(dev):
    world = World(dev)
    for b, prompt in enumerate(([1, 2], [3, 4, 5], [6])):
        world.enter(b, prompt)
    trees = world.draft()
    world.prepare(trees)
    logprobs = world.step.logprobs.get()
    logprobs[1, 0, 1] = np.nan
    world.step.logprobs.set(logprobs)
    slots = world.step.out_cache_loc.get()
    last = world.step
    slots[trees.num_nodes[0] + 1] = SLOTS + 5  # a row of request 2: request 1 has its root alone
    last.out_cache_loc.set(slots)
    before = last.prefix_lens.get()
    last.launch(world.model)
    assert last.problems() == ["build: request 1: NOT_A_LOGPROB", "compact: request 2: BAD_SLOT"]
    grown = last.prefix_lens.get() - before
    assert grown[0] == last.accept_lens.get()[0] > 0 and grown[1] == 1 and grown[2] == 0


def test_wrong_arguments_are_refused_by_name(dev):
    table = dev.upload(np.zeros((2, MAX_LEN), np.int32))
    sizes = {**SIZES, "device": dev.device, "req_to_token": table}
    with pytest.raises(ArgumentError, match="mask: expected a mask with a buffer"):
        VerifyStep(**{**sizes, "mask": nv.Mask.CAUSAL})
    with pytest.raises(ArgumentError, match="logits: expected given if and only if vocab_size is"):
        VerifyStep(**sizes, vocab_size=8)
    with pytest.raises(ArgumentError, match=r"req_to_token: expected max_kv_len = 48 columns or more, got \[2, 7\]"):
        VerifyStep(**{**sizes, "req_to_token": dev.upload(np.zeros((2, 7), np.int32))})
    with pytest.raises(ArgumentError, match="max_nodes: expected"):
        VerifyStep(**{**sizes, "max_nodes": 0})
    step = VerifyStep(**sizes)
    with pytest.raises(ArgumentError, match=r"replay: expected capture\(\) before it, got nothing captured"):
        step.replay()
    if not dev.is_gpu:
        with pytest.raises(ArgumentError, match="graph_nodes: expected a step captured on a GPU"):
            step.graph_nodes()
