"""What the plans of the tree step refuse alike: numbers out of range, and written arrays that share memory."""

import re

import numpy as np
import pytest

from nbverify.errors import ArgumentError
from nbverify.tree import AcceptPlan, BuildPlan, CompactPlan, IndicesPlan, MaskPlan
from nbverify.tree.binding import check_int

B, N, D, K, R, V = 2, 4, 3, 2, 8, 5
INT, LONG, FLOAT = np.int32, np.int64, np.float32
SIZES = {"max_requests": B, "device": "emulator"}
NUM_NODES, QO_INDPTR, FLAGS = {"num_nodes": (INT, B)}, {"qo_indptr": (LONG, B + 1)}, {"flags": (INT, B)}
TREE = {**NUM_NODES, "parents": (INT, B, N)}
NODES = {**TREE, "node_tokens": (LONG, B, N)}
DEPTHS = {"depths": (INT, B, N)}
ACCEPTED = {"accept_nodes": (INT, B, D + 1), "accept_lens": (INT, B)}
RESULTS = {
    **ACCEPTED, **FLAGS, "bonus_tokens": (LONG, B), "accept_index": (INT, B, D + 1), "predict": (LONG, R),
}  # fmt: skip
PREFIX_LENS, TABLE = {"prefix_lens": (LONG, B)}, {"req_to_token": (INT, 3, 10)}
TABLE_ROWS = {"req_pool_indices": (LONG, B)}
PLANS = {  # the plan; its arrays that are read, and those that are written
    "build": (
        lambda: BuildPlan(depth=D, top_k=K, max_nodes=N, **SIZES),
        {"tokens": (LONG, B, D, K), "logprobs": (FLOAT, B, D, K), "root_tokens": (LONG, B), "budgets": (INT, B)},
        {**NODES, **DEPTHS, **FLAGS, "scores": (FLOAT, B, N)},
    ),
    "masks": (
        lambda: MaskPlan(max_nodes=N, max_kv_len=20, mask="tree", **SIZES),
        {**TREE, **PREFIX_LENS},
        {
            **QO_INDPTR, **DEPTHS, **FLAGS, "custom_mask": (np.uint8, B * N * N), "mask_indptr": (LONG, B + 1),
            "positions": (LONG, R), "retrieve_index": (LONG, B, N), "retrieve_next_token": (LONG, B, N),
            "retrieve_next_sibling": (LONG, B, N),
        },
    ),
    "accept, from tokens": (
        lambda: AcceptPlan(max_nodes=N, max_depth=D, **SIZES),
        {**NODES, **QO_INDPTR, "target_tokens": (LONG, R)},
        RESULTS,
    ),
    "accept, sampled": (
        lambda: AcceptPlan(max_nodes=N, max_depth=D, vocab_size=V, sampled=True, **SIZES),
        {
            **NODES, **QO_INDPTR, **PREFIX_LENS, "logits": (FLOAT, R, V), "temperatures": (FLOAT, B),
            "top_ks": (INT, B), "top_ps": (FLOAT, B), "seeds": (LONG, B),
        },
        RESULTS,
    ),
    "compact": (
        lambda: CompactPlan(max_nodes=N, max_depth=D, convention="keep", **SIZES),
        {**NUM_NODES, **QO_INDPTR, **PREFIX_LENS, **ACCEPTED, **TABLE_ROWS, "out_cache_loc": (LONG, R)},
        {
            **TABLE, **FLAGS, "new_prefix_lens": (LONG, B), "freed_slots": (LONG, R), "freed_counts": (INT, B),
        },
    ),
    "indices": (
        lambda: IndicesPlan(**SIZES),
        {**TABLE, **TABLE_ROWS, **PREFIX_LENS},
        {**FLAGS, "kv_indptr": (LONG, B + 1), "kv_indices": (LONG, 20)},
    ),
}  # fmt: skip
ON_ALL_PLANS = pytest.mark.parametrize("plan, read, written", PLANS.values(), ids=PLANS)
WORD = 8  # bytes, whole ones in every array


def make(arrays, **starts):
    """Arrays of these dtypes and shapes; those with a start begin at that byte of one storage."""
    made = {name: np.zeros(shape, dtype) for name, (dtype, *shape) in arrays.items()}
    storage = np.zeros(1000, np.uint8)
    for name, start in starts.items():
        one = made[name]
        made[name] = storage[start : start + one.nbytes].view(one.dtype).reshape(one.shape)
    return made


@pytest.mark.parametrize("value", [1, 4, 7])
def test_a_number_in_its_range(value):
    assert check_int("depth", value, 1, 7) == value


@pytest.mark.parametrize("value", [0, 8, -(2**70), 2**70, 4.0, True, None, "4", np.int64(4)])
def test_a_number_out_of_its_range(value):
    with pytest.raises(ArgumentError, match=rf"^depth: expected an int, 1 to 7, got {re.escape(repr(value))}$"):
        check_int("depth", value, 1, 7)


@ON_ALL_PLANS
def test_what_is_written_has_memory_of_its_own(plan, read, written):
    """Each written array against each other one, which has its last or its first word, or begins behind it."""
    plan, arrays = plan(), read | written
    for name in written:
        end = make(arrays)[name].nbytes
        for other in arrays.keys() - {name}:
            named = name if other in read else f"({name}|{other})"
            used = other if other in read else f"({name}|{other})"
            message = rf"^{named}: expected memory of its own \(it is written while {used} is used\), got an overlap$"
            starts = [{name: 0, other: end - WORD}]
            if {name, other} != {"prefix_lens", "new_prefix_lens"}:  # lengths may advance in place
                starts.append({name: 0, other: 0})
            for start in starts:
                with pytest.raises(ArgumentError, match=message):
                    plan.bind(**make(arrays, **start))
            plan.bind(**make(arrays, **{name: 0, other: end}))


@ON_ALL_PLANS
def test_what_is_written_may_be_written(plan, read, written):
    plan = plan()
    for name in written:
        made = make(read | written)
        made[name].flags.writeable = False
        with pytest.raises(ArgumentError, match=f"^{name}: expected an array that may be written, got a read-only one"):
            plan.bind(**made)


@ON_ALL_PLANS
def test_what_is_only_read_may_be_shared(plan, read, written):
    plan().bind(**make(read | written, **dict.fromkeys(read, 0)))
