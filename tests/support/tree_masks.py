"""The device stage of nbverify.tree.masks against its definition, bit for bit.  For the emulated and the gpu tier.

Every buffer starts with garbage and has canary bytes behind it; the definition starts from the same garbage, so that
what must not be written is compared as well.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import nbverify as nv
from nbverify.tree.masks import MaskPlan, TreeFault, ancestor_matrix, mask_elements, tree_buffers, write_tree_buffers
from nbverify.tree.trees import MAX_NODES
from support.basic import BASE
from support.batches import assert_close, mask_buffers, random_batch, random_parents
from support.devices import BoundBatch, Guarded

LAYOUTS = {
    "full": {"mask": nv.Mask.FULL},
    "full-prefix": {"mask": nv.Mask.FULL, "fill_prefix": True},
    "tree": {"mask": nv.Mask.TREE},
    "packed": {"mask": nv.Mask.PACKED},
    "none": {"mask": nv.Mask.NONE},
    "full-padded": {"mask": nv.Mask.FULL, "padded": True},
    "full-padded-prefix": {"mask": nv.Mask.FULL, "padded": True, "fill_prefix": True},
    "tree-padded": {"mask": nv.Mask.TREE, "padded": True},
    "packed-padded": {"mask": nv.Mask.PACKED, "padded": True},
    "causal-padded": {"mask": nv.Mask.CAUSAL, "padded": True},
}
WITH_MASK = {name: options for name, options in LAYOUTS.items() if options["mask"].reads_buffer}
MAX_KV_LEN = 96
RETRIEVE = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")


def shuffled_parents(rng: np.random.Generator, n: int) -> list[int]:
    """A random tree, flat, deep or between, whose root is node 0 and whose other nodes are listed in any order."""
    reach = int(rng.choice([1, 2, 5, n]))  # how far above its child in the first listing a parent may be
    first = [-1] + [int(rng.integers(max(0, i - reach), i)) for i in range(1, n)]
    if rng.random() < 0.1:
        first = [-1] + [0] * (n - 1)
    place = [0, *(1 + rng.permutation(n - 1)).tolist()]
    parents = [-1] * n
    for node in range(1, n):
        parents[place[node]] = place[first[node]]
    return parents


def random_trees(rng: np.random.Generator, requests: int, max_nodes: int, *, empty: float = 0.15):
    """parents [B, N], num_nodes and prefix lengths; entries past a tree's nodes are garbage."""
    num_nodes = rng.integers(1, max_nodes + 1, requests).astype(np.int32)
    num_nodes[rng.random(requests) < empty] = 0
    parents = rng.integers(-5, 2 * max_nodes, (requests, max_nodes)).astype(np.int32)
    for request, count in enumerate(num_nodes):
        if count:
            parents[request, :count] = shuffled_parents(rng, int(count))
    return parents, num_nodes, rng.integers(0, 20, requests).astype(np.int64)


class Step:
    """A plan, its static buffers on a device full of garbage, and the same buffers for the definition."""

    def __init__(
        self,
        dev,
        requests,
        max_nodes,
        *,
        mask,
        padded=False,
        fill_prefix=False,
        mask_size=None,
        rows=None,
        index="int64",
        without=(),
        max_kv_len=MAX_KV_LEN,
    ):
        self.dev, self.limits = dev, {"mask": mask, "max_kv_len": max_kv_len}
        self.limits |= {"padded": padded, "fill_prefix": fill_prefix}
        plan = MaskPlan(max_requests=requests, max_nodes=max_nodes, device=dev.device, **self.limits)
        # Prefixes are short here, so that these fit in spite of a size far below plan.max_mask_elements.
        size = requests * mask_elements(mask, max_nodes, 20) if mask_size is None else mask_size
        of_nodes = requests, max_nodes
        shapes = {
            "custom_mask": ((size,), "uint32" if mask is nv.Mask.PACKED else "uint8"),
            "mask_indptr": ((requests + 1,), "int64"),
            "qo_indptr": ((requests + 1,), index),
            "positions": ((plan.max_rows if rows is None else rows,), "int64"),
            "depths": (of_nodes, "int32"),
            **{name: (of_nodes, "int64") for name in RETRIEVE},
            "flags": ((requests,), "int32"),
        }
        if not mask.reads_buffer:
            without = (*without, "custom_mask", "mask_indptr")
        self.names = list(shapes)
        self.guarded = {n: Guarded(dev, s, np.dtype(d)) for n, (s, d) in shapes.items() if n not in without}
        self.inputs = {
            "parents": dev.upload(np.zeros(of_nodes, np.int32)),
            "num_nodes": dev.upload(np.zeros(requests, np.int32)),
            "prefix_lens": dev.upload(np.zeros(requests, index)),
        }
        self.bound = plan.bind(**self.inputs, **{name: guarded.array for name, guarded in self.guarded.items()})
        self.launch = self.bound.launch  # or the replay of a graph that captured it

    def run(self, rng, parents, num_nodes, prefix_lens):
        """Launch on these trees; what came out, and what the definition makes of the same garbage."""
        given = {"parents": parents, "num_nodes": num_nodes, "prefix_lens": prefix_lens}
        for name, values in given.items():
            self.dev.write(self.inputs[name], np.asarray(values, self.inputs[name].dtype))
        want = dict.fromkeys(self.names)
        for name, guarded in self.guarded.items():
            held = guarded.numpy()
            want[name] = np.frombuffer(rng.bytes(held.nbytes), held.dtype).reshape(held.shape).copy()
            self.dev.write(guarded.array, want[name])
        self.launch()
        write_tree_buffers(**{name: np.asarray(values) for name, values in given.items()}, **self.limits, **want)
        got = {}
        for name, guarded in self.guarded.items():
            guarded.check()
            got[name] = guarded.numpy()
        return got, want

    def check(self, rng, *trees):
        """Launch, and compare all bytes."""
        got, want = self.run(rng, *trees)
        for name in got:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        return got


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_random_batches_equal_the_definition(dev, layout):
    """One set of static buffers, new trees in every launch.  The last launch is of padding alone."""
    rng = np.random.default_rng(len(layout))
    requests, max_nodes, launches = (50, 65, 24) if dev.is_gpu else (7, 9, 4)
    step = Step(dev, requests, max_nodes, index="int32" if "padded" in layout else "int64", **layout)
    for _ in range(launches):
        parents, num_nodes, prefix_lens = random_trees(rng, requests, max_nodes)
        got = step.check(rng, parents, num_nodes, prefix_lens)
        assert not got["flags"].any()
    step.check(rng, parents, np.zeros_like(num_nodes), prefix_lens)


@pytest.mark.parametrize("max_nodes", [1, 32, 33, 40])
def test_rows_of_one_and_two_words(dev, max_nodes):
    rng = np.random.default_rng(max_nodes)
    for layout in ("tree", "packed"):
        step = Step(dev, 1, max_nodes, **LAYOUTS[layout])
        parents = np.array([shuffled_parents(rng, max_nodes)], np.int32)
        got = step.check(rng, parents, np.array([max_nodes], np.int32), np.array([3]))
        assert got["flags"].tolist() == [0]


def test_more_requests_than_lanes(dev):
    """Lengths of the requests before are added up by a warp, more than one to a lane."""
    rng = np.random.default_rng(5)
    step = Step(dev, 70, 3, **LAYOUTS["full"])
    step.check(rng, *random_trees(rng, 70, 3))


def test_more_nodes_than_threads(dev):
    """A thread has two nodes: it forgets neither the fault of its first one nor that of the lengths."""
    rng = np.random.default_rng(12)
    step = Step(dev, 1, 140, max_kv_len=200, **LAYOUTS["packed"])
    parents, num_nodes = np.array([shuffled_parents(rng, 140)], np.int32), np.array([140], np.int32)
    assert step.check(rng, parents, num_nodes, np.array([3]))["flags"].tolist() == [0]
    assert step.check(rng, parents, num_nodes, np.array([-1]))["flags"].tolist() == [TreeFault.PREFIX_LEN]
    parents[0, 5] = -1
    assert step.check(rng, parents, num_nodes, np.array([3]))["flags"].tolist() == [TreeFault.SECOND_ROOT]


def largest_tree(rng: np.random.Generator) -> list[int]:
    """Three levels, so quick to emulate; about half of the rows have a bit in the last of their 33 words."""
    return [-1, *(MAX_NODES - 1) * rng.integers(0, 2, MAX_NODES - 2), 0]


def test_the_largest_tree(dev):
    """A row has one word more than a warp has lanes."""
    rng = np.random.default_rng(13)
    step = Step(dev, 1, MAX_NODES, max_kv_len=MAX_NODES, without=RETRIEVE, **LAYOUTS["packed"])
    got = step.check(rng, np.array([largest_tree(rng)], np.int32), np.array([MAX_NODES], np.int32), np.array([0]))
    assert got["flags"].tolist() == [0] and 400 < (got["custom_mask"].reshape(MAX_NODES, 33)[:, 32] == 1).sum() < 625


@pytest.mark.slow
def test_large_trees(dev):
    """In all layouts on a GPU; in the emulator, where a launch takes 15 seconds, in one of words and one of bytes."""
    rng = np.random.default_rng(0)
    sizes, layouts = [MAX_NODES], ["packed", "full-prefix"]
    if dev.is_gpu:
        sizes, layouts = [MAX_NODES - 1, MAX_NODES], list(WITH_MASK)
    for max_nodes, layout in product(sizes, layouts):
        trees = [shuffled_parents(rng, max_nodes)]
        if dev.is_gpu:
            trees += [random_parents(rng, max_nodes), [-1, *range(2, max_nodes), 0]]  # a chain, children first
        step = Step(dev, 1, max_nodes, max_kv_len=max_nodes + 20, **LAYOUTS[layout])
        for parents in trees:
            got = step.check(rng, np.array([parents], np.int32), np.array([max_nodes], np.int32), np.array([20]))
            assert got["flags"].tolist() == [0]


def test_a_chain_is_a_causal_mask(dev):
    """A tree of width 1, listed in order."""
    rng = np.random.default_rng(2)
    step = Step(dev, 2, 6, **LAYOUTS["tree"])
    chains = np.array([range(-1, 5)] * 2, np.int32)
    got = step.check(rng, chains, np.array([6, 4], np.int32), np.array([9, 0]))
    assert (got["custom_mask"][:36].reshape(6, 6) == np.tri(6)).all()
    assert (got["custom_mask"][36:52].reshape(4, 4) == np.tri(4)).all()
    assert got["positions"][:10].tolist() == [9, 10, 11, 12, 13, 14, 0, 1, 2, 3]
    assert got["mask_indptr"].tolist() == [0, 36, 52] and got["qo_indptr"].tolist() == [0, 6, 10]
    assert got["retrieve_next_token"].tolist() == [[1, 2, 3, 4, 5, -1], [1, 2, 3, -1, -1, -1]]
    assert (got["retrieve_next_sibling"] == -1).all()


def test_positions_of_a_branching_tree(dev):
    """B19 of the bug recipes: by depth, and not by place in the list."""
    rng = np.random.default_rng(3)
    step = Step(dev, 1, 7, **LAYOUTS["packed"])
    got = step.check(rng, np.array([[-1, 0, 0, 1, 1, 2, 5]], np.int32), np.array([7], np.int32), np.array([9]))
    assert (got["positions"] - 9).tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert got["retrieve_next_token"].tolist() == [[1, 3, 5, -1, -1, 6, -1]]
    assert got["retrieve_next_sibling"].tolist() == [[-1, 2, -1, 4, -1, -1, -1]]


def test_arrays_that_are_left_out(dev):
    rng = np.random.default_rng(4)
    for left_out in RETRIEVE:
        step = Step(dev, 2, 5, without=(left_out,), **LAYOUTS["tree"])
        step.check(rng, *random_trees(rng, 2, 5, empty=0))
    step = Step(dev, 2, 5, without=RETRIEVE, **LAYOUTS["tree"])
    step.check(rng, *random_trees(rng, 2, 5, empty=0))


GOOD = [-1, 0, 0, 1, 1, 3]
FAULTS = {
    "cycle of one": (TreeFault.CYCLE, [-1, 0, 2, 1, 1, 3], 6, 4),
    "cycle of all but the root": (TreeFault.CYCLE, [-1, 2, 3, 4, 5, 1], 6, 4),
    "below a cycle": (TreeFault.CYCLE, [-1, 0, 3, 2, 2, 4], 6, 4),
    "orphan": (TreeFault.ORPHAN, [-1, 0, 6, 1, 1, 3], 6, 4),
    "orphan, though it is listed": (TreeFault.ORPHAN, [-1, 0, 5, 1, 1, 3], 5, 4),
    "parent past the end": (TreeFault.PARENT_RANGE, [-1, 0, 8, 1, 1, 3], 6, 4),
    "parent far past the end": (TreeFault.PARENT_RANGE, [-1, 0, 2**31 - 1, 1, 1, 3], 6, 4),
    "parent below -1": (TreeFault.PARENT_RANGE, [-1, 0, -(2**31), 1, 1, 3], 6, 4),
    "two roots": (TreeFault.SECOND_ROOT, [-1, 0, -1, 1, 1, 3], 6, 4),
    "root elsewhere": (TreeFault.ROOT, [1, -1, 0, 1, 1, 3], 6, 4),
    "root in the cycle": (TreeFault.ROOT, [5, 0, 0, 1, 1, 3], 6, 4),
    "several": (TreeFault.SECOND_ROOT, [-1, -1, 9, 7, 4, 3], 6, 4),
    "negative prefix": (TreeFault.PREFIX_LEN, GOOD, 6, -1),
    "prefix too long": (TreeFault.PREFIX_LEN, GOOD, 6, MAX_KV_LEN - 3),
    "prefix beyond 32 bits": (TreeFault.PREFIX_LEN, GOOD, 6, 2**40),
    "negative count": (TreeFault.NUM_NODES, GOOD, -1, 4),
    "too many nodes": (TreeFault.NUM_NODES, GOOD, 9, 4),
}
ROOMY = 40 * MAX_KV_LEN


@pytest.mark.parametrize("layout", ["packed", "full-padded-prefix"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_stays_in_its_request(dev, fault, layout):
    """The neighbours have, byte for byte, what they have beside a request without a fault, of the same lengths."""
    rng = np.random.default_rng(6)
    code, bad, bad_count, bad_prefix = fault
    max_nodes = 8
    step = Step(dev, 3, max_nodes, mask_size=ROOMY, **LAYOUTS[layout])
    parents, num_nodes, prefix_lens = random_trees(rng, 3, max_nodes, empty=0)
    parents[1] = -1
    parents[1, : len(bad)] = bad
    num_nodes[1], prefix_lens[1] = bad_count, bad_prefix
    got = step.check(rng, parents, num_nodes, prefix_lens)
    assert got["flags"].tolist() == [0, code, 0]

    rows, elements = got["qo_indptr"], got["mask_indptr"]
    own = slice(rows[1], rows[2])
    held = int(
        np.clip(bad_prefix, 0, MAX_KV_LEN - (rows[2] - rows[1]))
    )  # what the verify kernel makes of such a length
    assert not got["custom_mask"][elements[1] : elements[2]].any(), "hidden from each other, and from the prefix"
    assert (got["positions"][own] == held).all() and not got["depths"][1].any()
    assert (got["retrieve_next_token"][1] == -1).all() and (got["retrieve_next_sibling"][1] == -1).all()

    count = bad_count if 0 <= bad_count <= max_nodes else 0
    parents[1, :6], num_nodes[1], prefix_lens[1] = [-1, 0, 0, 1, 1, 3], count, held
    fine, _ = step.run(rng, parents, num_nodes, prefix_lens)
    assert not fine["flags"].any()
    for name in ("qo_indptr", "mask_indptr"):
        np.testing.assert_array_equal(got[name], fine[name])
    for name in ("depths", *RETRIEVE):
        np.testing.assert_array_equal(got[name][[0, 2]], fine[name][[0, 2]])
    for name, starts in (("positions", rows), ("custom_mask", elements)):
        for request in (0, 2):
            mine = slice(starts[request], starts[request + 1])
            np.testing.assert_array_equal(got[name][mine], fine[name][mine])


def test_padding_has_no_faults(dev):
    """The lengths and parents of a request that does not exist are stale, and so may be anything."""
    rng = np.random.default_rng(11)
    for layout in ("full-padded-prefix", "packed"):
        step = Step(dev, 4, 5, mask_size=ROOMY, **LAYOUTS[layout])
        parents, num_nodes, prefix_lens = random_trees(rng, 4, 5, empty=0)
        num_nodes[:3], prefix_lens[:3] = 0, [-1, 2**40, MAX_KV_LEN]
        got = step.check(rng, parents, num_nodes, prefix_lens)
        assert not got["flags"].any()


@pytest.mark.parametrize("layout", WITH_MASK.values(), ids=WITH_MASK)
def test_a_mask_that_is_too_small(dev, layout):
    """The request that does not fit is flagged, and hidden as far as the buffer goes; Step looks behind its end."""
    rng = np.random.default_rng(7)
    parents, num_nodes, prefix_lens = np.array([GOOD] * 3, np.int32), np.array([6, 5, 3], np.int32), np.array([4, 7, 0])
    starts = tree_buffers(parents, num_nodes, prefix_lens, mask=layout["mask"], padded=layout.get("padded", False))
    for size, codes in [
        (starts.mask_indptr[3], [0, 0, 0]),
        (starts.mask_indptr[3] - 1, [0, 0, 6]),
        (starts.mask_indptr[1] + 1, [0, 6, 6]),
        (0, [6, 6, 6]),
    ]:
        step = Step(dev, 3, 6, mask_size=int(size), **layout)
        got = step.check(rng, parents, num_nodes, prefix_lens)
        assert got["flags"].tolist() == codes
        np.testing.assert_array_equal(got["mask_indptr"], starts.mask_indptr)


@pytest.mark.parametrize("layout", ["none", "tree", "tree-padded"])
def test_positions_that_are_too_few(dev, layout):
    rng = np.random.default_rng(8)
    parents, num_nodes, prefix_lens = np.array([GOOD] * 3, np.int32), np.array([6, 0, 3], np.int32), np.array([4, 7, 0])
    need = [18, 18] if "padded" in layout else [9, 9]
    for rows, codes in [(need[0], [0, 0, 0]), (need[1] - 1, [0, 0, 6]), (6, [0, 0, 6]), (5, [6, 0, 6])]:
        got = Step(dev, 3, 6, rows=rows, **LAYOUTS[layout]).check(rng, parents, num_nodes, prefix_lens)
        assert got["flags"].tolist() == codes


def test_masks_of_more_than_two_gigabytes(dev):
    """B07 of the bug recipes: the second request starts at byte 2^31, and the first one's rows are 2^30 apart."""
    far, requests = 2**30, 2
    plan = MaskPlan(max_requests=2, max_nodes=3, max_kv_len=2**31 - 1, mask="full", device=dev.device)
    custom_mask = dev.vast(2 * far + 64, "uint8")
    given = {
        "parents": np.array([[-1, 0, 7], [-1, 2, 0]], np.int32),
        "num_nodes": np.array([2, 3], np.int32),
        "prefix_lens": np.array([far - 2, 4]),
    }
    written = {
        "mask_indptr": np.zeros(requests + 1, np.int64), "qo_indptr": np.zeros(requests + 1, np.int32),
        "positions": np.zeros(6, np.int64), "depths": np.zeros((2, 3), np.int32), "flags": np.zeros(2, np.int32),
    }  # fmt: skip
    on_device = {name: dev.upload(array) for name, array in (given | written).items()}
    plan.bind(**on_device, custom_mask=custom_mask).launch()
    assert dev.download(on_device["flags"]).tolist() == [0, 0]
    assert dev.download(on_device["mask_indptr"]).tolist() == [0, 2 * far, 2 * far + 21]
    assert dev.download(on_device["positions"])[:5].tolist() == [far - 2, far - 1, 4, 6, 5]
    assert dev.download(custom_mask[far - 3 : far]).tolist() == [0, 1, 0]
    assert dev.download(custom_mask[2 * far - 3 : 2 * far]).tolist() == [0, 1, 1]
    block = dev.download(custom_mask[2 * far : 2 * far + 21]).reshape(3, 7)
    assert block[:, 4:].tolist() == [[1, 0, 0], [1, 1, 1], [1, 0, 1]] and not block[:, :4].any()
    del custom_mask, on_device
    dev.free()


def masks_on_device(dev, trees, prefix_lens, layout):
    """custom_mask, mask_indptr and qo_indptr as the device stage leaves them."""
    parents, num_nodes = trees
    step = Step(dev, *parents.shape, **layout)
    step.check(np.random.default_rng(0), parents, num_nodes, prefix_lens)
    return {name: step.guarded[name].array for name in ("custom_mask", "mask_indptr", "qo_indptr")}


def test_the_three_layouts_give_the_same_attention(dev):
    """Bit for bit, through the verify kernel; and it is the attention of the reference."""
    rng = np.random.default_rng(9)
    parents, num_nodes, _ = random_trees(rng, 4, 24 if dev.is_gpu else 10, empty=0)
    num_nodes[2] = 0
    prefix_lens = np.array([0, 9, 3, 5])
    trees = [ancestor_matrix(p, int(n)) for p, n in zip(parents, num_nodes, strict=True) if n]
    trees.insert(2, np.zeros((0, 0), bool))
    batch = random_batch(rng, BASE, prefix_lens, num_nodes, trees=trees)
    bits = []
    for layout in ("full", "tree", "packed"):
        spec = replace(BASE, mask=nv.Mask(layout))
        custom_mask, mask_indptr = mask_buffers(spec, prefix_lens, trees)
        of_layout = replace(batch, spec=spec, custom_mask=custom_mask, mask_indptr=mask_indptr)
        made = masks_on_device(dev, (parents, num_nodes), prefix_lens, LAYOUTS[layout])
        result = BoundBatch(dev, dev.plan(spec, max_blocks=2), of_layout, **made).run()
        assert_close(of_layout, result.out, result.lse)
        bits.append(result.bits)
    assert bits[0] == bits[1] == bits[2]


@pytest.mark.parametrize("prefix_visible", [True, False])
def test_what_a_verify_kernel_gives_for_padding_rows(dev, prefix_visible):
    """Attention over the prefix alone; with the prefix bytes honoured nothing: out 0, lse -inf."""
    rng = np.random.default_rng(10)
    spec = replace(BASE, prefix_visible=prefix_visible)
    parents, num_nodes, _ = random_trees(rng, 3, 6, empty=0)
    num_nodes[:] = 4, 0, 6
    parents[0, :4], parents[2] = [-1, 0, 0, 2], GOOD
    prefix_lens = np.array([5, 1, 2])
    host = tree_buffers(parents, num_nodes, prefix_lens, mask="full", padded=True)
    batch = replace(
        random_batch(rng, spec, prefix_lens, [6, 6, 6]), custom_mask=host.custom_mask, mask_indptr=host.mask_indptr
    )
    made = masks_on_device(dev, (parents, num_nodes), prefix_lens, LAYOUTS["full-padded-prefix"])
    result = BoundBatch(dev, dev.plan(spec, max_blocks=2), batch, **made).run()
    assert_close(batch, result.out, result.lse)
    padding = [4, 5, *range(6, 12)]
    assert np.isfinite(result.lse[padding]).all() if prefix_visible else (result.lse[padding] == -np.inf).all()
