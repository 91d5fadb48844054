"""nbverify.tree.masks on the host: the definition against recursion over the parents, and what is refused."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tree_masks import FAULTS, shuffled_parents

import nbverify as nv
from nbverify.errors import ArgumentError
from nbverify.tree.masks import (
    MaskPlan,
    TreeFault,
    ancestor_matrix,
    check_trees,
    find_fault,
    first_children,
    mask_elements,
    next_siblings,
    node_depths,
    tree_buffers,
)

LAYOUTS = [nv.Mask.FULL, nv.Mask.TREE, nv.Mask.PACKED]


def sees(parents, node):
    """The node and its ancestors."""
    return {node} if parents[node] == -1 else {node} | sees(parents, parents[node])


def depth(parents, node):
    return 0 if parents[node] == -1 else 1 + depth(parents, parents[node])


def children(parents, node):
    return [child for child, parent in enumerate(parents) if parent == node]


def following(parents, node):
    """The sibling after this one in its parent's list of children."""
    family = children(parents, parents[node]) if node else [node]
    return [*family, -1][family.index(node) + 1]


def test_ten_thousand_trees_against_recursion():
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        n = int(rng.integers(1, 17))
        parents = shuffled_parents(rng, n)
        nodes = range(n)
        matrix = ancestor_matrix(parents)
        assert [set(np.flatnonzero(row)) for row in matrix] == [sees(parents, i) for i in nodes]
        assert node_depths(parents).tolist() == [depth(parents, i) for i in nodes]
        assert first_children(parents).tolist() == [[*children(parents, i), -1][0] for i in nodes]
        assert next_siblings(parents).tolist() == [following(parents, i) for i in nodes]


def visible_pairs(made, mask, request, rows, prefix_len):
    """(node, draft) pairs of a request's block, read as docs/contract.md says, and its prefix bytes."""
    start, pairs, prefix = int(made.mask_indptr[request]), set(), []
    for i in range(rows):
        for j in range(rows):
            if mask is nv.Mask.FULL:
                bit = made.custom_mask[start + i * (prefix_len + rows) + prefix_len + j]
            elif mask is nv.Mask.TREE:
                bit = made.custom_mask[start + i * rows + j]
            else:
                bit = int(made.custom_mask[start + i * ((rows + 31) // 32) + j // 32]) >> (j % 32) & 1
            if bit:
                pairs.add((i, j))
        if mask is nv.Mask.FULL:
            row = start + i * (prefix_len + rows)
            prefix.append(made.custom_mask[row : row + prefix_len].tolist())
    return pairs, prefix


@pytest.mark.parametrize("mask", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_batches_against_recursion(mask, padded):
    rng = np.random.default_rng(1)
    for max_nodes in (1, 5, 32, 33):
        num_nodes = [max_nodes, 0, int(rng.integers(1, max_nodes + 1)), max_nodes]
        prefix_lens = [3, 1, 0, 12]
        trees = [shuffled_parents(rng, n) if n else [] for n in num_nodes]
        parents = np.full((4, max_nodes), 77, np.int32)
        for request, tree in enumerate(trees):
            parents[request, : len(tree)] = tree
        made = tree_buffers(parents, num_nodes, prefix_lens, mask=mask, padded=padded)
        row, element = 0, 0
        for request, (tree, n, c) in enumerate(zip(trees, num_nodes, prefix_lens, strict=True)):
            rows = max_nodes if padded else n
            assert made.qo_indptr[request] == row and made.mask_indptr[request] == element
            pairs, prefix = visible_pairs(made, mask, request, rows, c)
            assert pairs == {(i, j) for i in range(n) for j in sees(tree, i)}
            if mask is nv.Mask.FULL:
                assert prefix == [[1] * c] * n + [[0] * c] * (rows - n)
            depths = [depth(tree, i) for i in range(n)] + [0] * (max_nodes - n)
            assert made.depths[request].tolist() == depths
            assert made.positions[row : row + rows].tolist() == [c + d for d in depths[:rows]]
            none = [-1] * (max_nodes - n)
            assert made.retrieve_index[request].tolist() == [*range(row, row + rows)] + [-1] * (max_nodes - rows)
            assert made.retrieve_next_token[request].tolist() == [[*children(tree, i), -1][0] for i in range(n)] + none
            assert made.retrieve_next_sibling[request].tolist() == [following(tree, i) for i in range(n)] + none
            row += rows
            element += {"full": rows * (c + rows), "tree": rows * rows, "packed": rows * ((rows + 31) // 32)}[mask]
        assert made.qo_indptr[4] == row == len(made.positions)
        assert made.mask_indptr[4] == element == len(made.custom_mask)


def naive_faults(parents, num_nodes):
    """All faults of a tree.  A walk that comes twice to a node is on a cycle; one that leaves the tree is not."""
    faults = {TreeFault.ROOT} if num_nodes and parents[0] != -1 else set()
    for node in range(1, num_nodes):
        if parents[node] == -1:
            faults.add(TreeFault.SECOND_ROOT)
        elif not -1 <= parents[node] < len(parents):
            faults.add(TreeFault.PARENT_RANGE)
        elif parents[node] >= num_nodes:
            faults.add(TreeFault.ORPHAN)
        met, at = set(), node
        while 0 < at < num_nodes and at not in met:
            met.add(at)
            at = parents[at]
        if at in met:
            faults.add(TreeFault.CYCLE)
    return faults


def test_faults_of_random_lists_of_parents():
    rng = np.random.default_rng(2)
    met = set()
    for _ in range(3000):
        max_nodes = int(rng.integers(1, 7))
        num_nodes = int(rng.integers(0, max_nodes + 1))
        parents = shuffled_parents(rng, max_nodes)
        for _ in range(int(rng.integers(0, 3))):
            parents[int(rng.integers(0, max_nodes))] = int(rng.integers(-3, max_nodes + 2))
        want = max(naive_faults(parents, num_nodes), default=None)
        found = find_fault(np.array(parents), num_nodes)
        assert (found and found[0]) == want
        met.add(want)
    assert met == {None, *TreeFault} - {TreeFault.CAPACITY, TreeFault.PREFIX_LEN, TreeFault.NUM_NODES}


MESSAGES = {
    "cycle of one": r"parents\[1, 2\]: expected a path that ends at node 0, got 2",
    "below a cycle": r"parents\[1, 2\]: expected a path that ends at node 0, got 3",
    "orphan": r"parents\[1, 2\]: expected a node of the tree, in \[0, num_nodes=6\), got 6",
    "parent past the end": r"parents\[1, 2\]: expected a node, in \[0, max_nodes=8\), got 8",
    "two roots": r"parents\[1, 2\]: expected a node: -1 is the parent of node 0 alone, got -1",
    "root elsewhere": r"parents\[1, 0\]: expected -1: node 0 is the root, got 1",
    "several": r"parents\[1, 1\]: expected a node: -1 is the parent of node 0 alone, got -1",
    "negative count": r"num_nodes\[1\]: expected a number in \[0, max_nodes=8\], got -1",
    "too many nodes": r"num_nodes\[1\]: expected a number in \[0, max_nodes=8\], got 9",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_no_tree_is_refused_by_name(name):
    _, bad, bad_count, _ = FAULTS[name]
    parents = np.zeros((3, 8), np.int32)
    parents[[0, 2], 0] = -1
    parents[1, : len(bad)] = bad
    with pytest.raises(ArgumentError, match=f"^{MESSAGES[name]}$"):
        check_trees(parents, np.array([8, bad_count, 2]))
    with pytest.raises(ArgumentError, match=f"^{MESSAGES[name]}$"):
        tree_buffers(parents, np.array([8, bad_count, 2]), np.array([1, 2, 3]))


def test_wrong_arrays_are_refused_by_name():
    parents, num_nodes, lens = np.array([[-1, 0]]), np.array([2]), np.array([3])
    with pytest.raises(ArgumentError, match=r"^parents: expected integers in 2 dimension\(s\), got float64 \[1, 2\]"):
        check_trees(parents * 1.0, num_nodes)
    with pytest.raises(ArgumentError, match=r"^parents: expected integers in 1 dimension\(s\), got int64 \[1, 2\]"):
        ancestor_matrix(parents)
    with pytest.raises(ArgumentError, match=r"^num_nodes: expected shape \[1\], got \[2\]"):
        check_trees(parents, np.array([2, 2]))
    with pytest.raises(ArgumentError, match=r"^prefix_lens: expected 1 lengths >= 0, got \[-3\]"):
        tree_buffers(parents, num_nodes, -lens)
    with pytest.raises(ArgumentError, match=r"^prefix_lens: expected 1 lengths >= 0, got \[3, 4\]"):
        tree_buffers(parents, num_nodes, np.array([3, 4]))
    with pytest.raises(ArgumentError, match=r"^mask: expected one of \['full', .*, got 'dense'"):
        tree_buffers(parents, num_nodes, lens, mask="dense")
    with pytest.raises(ArgumentError, match=r"^parents\[0, 1\]: expected a path that ends at node 0, got 1"):
        node_depths([-1, 1])


PLAN = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 64, "mask": "tree", "device": "emulator"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_requests": 0}, "max_requests: expected an int, 1 to 268435455, got 0"),
        ({"max_requests": 2.0}, "max_requests: expected an int, 1 to 268435455, got 2.0"),
        ({"max_requests": 2**29}, "max_requests: expected an int, 1 to 268435455, got 536870912"),
        ({"max_nodes": 1026}, "max_nodes: expected an int, 1 to 1025, got 1026"),
        ({"max_kv_len": 7}, "max_kv_len: expected an int, 8 to 2147483647, got 7"),
        ({"mask": "dense"}, r"mask: expected one of \['full', 'tree', 'packed', 'causal', 'none'\], got 'dense'"),
        ({"padded": 1}, r"padded: expected a bool, got 1"),
        ({"fill_prefix": None}, r"fill_prefix: expected a bool, got None"),
        ({"fill_prefix": True}, r"fill_prefix: expected False with mask='tree': only FULL has prefix .*, got True"),
        ({"device": "gpu"}, r"device: expected None, an ordinal, \"emulator\" or an Emulator, got 'gpu'"),
    ],
)  # fmt: skip
def test_wrong_plans_are_refused(change, message):
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        MaskPlan(**{**PLAN, **change})


def arrays(requests=2):
    made = {name: np.zeros((requests, 8), np.int32) for name in ("parents", "depths")}
    made |= {name: np.zeros(requests, np.int32) for name in ("num_nodes", "prefix_lens", "flags")}
    made |= {"qo_indptr": np.zeros(requests + 1, np.int32), "mask_indptr": np.zeros(requests + 1, np.int64)}
    made |= {"custom_mask": np.zeros(99, np.uint8), "positions": np.zeros(16, np.int64)}
    return made | {"retrieve_index": np.zeros((requests, 8), np.int64)}


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": np.zeros((2, 8), np.int64)}, "parents: expected dtype int32, got int64"),
        ({"parents": np.zeros((2, 7), np.int32)}, r"parents: expected shape \[2, 8\], got \[2, 7\]"),
        ({"parents": np.zeros((8, 2), np.int32).T}, r"parents: expected an array in C order, got .*"),
        ({"num_nodes": np.zeros(0, np.int32)}, "num_nodes: expected 1 to max_requests=4 requests, got 0"),
        ({"num_nodes": np.zeros(5, np.int32)}, "num_nodes: expected 1 to max_requests=4 requests, got 5"),
        ({"prefix_lens": np.zeros(2, np.uint32)}, "prefix_lens: expected dtype int32 or int64, got uint32"),
        ({"custom_mask": np.zeros(99, np.uint32)}, "custom_mask: expected dtype uint8 or bool, got uint32"),
        ({"custom_mask": np.zeros((9, 11), np.uint8)}, r"custom_mask: expected shape \[\*\], got \[9, 11\]"),
        ({"custom_mask": None}, "custom_mask: expected a numpy array .*"),
        ({"mask_indptr": None}, "mask_indptr: expected a numpy array .*"),
        ({"mask_indptr": np.zeros(3, np.int32)}, "mask_indptr: expected dtype int64, got int32"),
        ({"qo_indptr": np.zeros(2, np.int32)}, r"qo_indptr: expected shape \[3\], got \[2\]"),
        ({"positions": np.zeros(16, np.int32)}, "positions: expected dtype int64, got int32"),
        ({"depths": np.zeros((2, 8), np.int64)}, "depths: expected dtype int32, got int64"),
        ({"retrieve_index": np.zeros(16, np.int64)}, r"retrieve_index: expected shape \[2, 8\], got \[16\]"),
        ({"retrieve_next_token": np.zeros((2, 8), np.int32)}, "retrieve_next_token: expected dtype int64, got int32"),
        ({"flags": np.zeros(3, np.int32)}, r"flags: expected shape \[2\], got \[3\]"),
        (
            {"flags": read_only(np.zeros(2, np.int32))},
            "flags: expected an array that may be written, got a read-only one",
        ),
    ],
)  # fmt: skip
def test_wrong_buffers_are_refused(change, message):
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        MaskPlan(**PLAN).bind(**{**arrays(), **change})


def test_a_mask_without_a_buffer_takes_none():
    given = arrays()
    for name in ("custom_mask", "mask_indptr"):
        others = {key: value for key, value in given.items() if key not in ("custom_mask", "mask_indptr")}
        with pytest.raises(ArgumentError, match=f"^{name}: expected None with mask='causal', which has no buffer, got"):
            MaskPlan(**{**PLAN, "mask": "causal"}).bind(**others, **{name: given[name]})


def test_capacities_are_those_of_the_largest_batch():
    rng = np.random.default_rng(3)
    for mask in nv.Mask:
        plan = MaskPlan(**{**PLAN, "mask": mask})
        largest = [mask_elements(mask, 8, 64 - 8)] * 4
        assert plan.max_mask_elements == sum(largest) and plan.max_rows == 32
        for _ in range(100):
            rows = rng.integers(0, 9, 4).tolist()
            batch = sum(mask_elements(mask, n, int(rng.integers(0, 64 - n + 1))) for n in rows)
            assert batch <= plan.max_mask_elements


def test_import_without_numba():
    code = "import sys, nbverify.tree.masks; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
