"""The next step's indices: the definition against a list built token by token, and the refusals of its plan."""

import numpy as np
import pytest
from support.tree_indices import random_arrays

from nbverify.errors import ArgumentError
from nbverify.tree.indices import IndicesPlan, prefix_indices
from nbverify.tree.kernels.records import IndexFlag


def token_by_token(table, rows, lengths, capacity):
    """A list of lists, cut when it is full."""
    lists, used = [], 0
    for row, length in zip(rows, lengths, strict=True):
        mine = []
        while 0 <= row < len(table) and len(mine) < length <= len(table[0]) and used < capacity:
            mine.append(table[row][len(mine)])
            used += 1
        lists.append(mine)
    return lists


def test_random_prefixes():
    rng = np.random.default_rng(1)
    for _ in range(300):
        arrays = random_arrays(rng, 5, 9)
        spoiled = rng.random(5) < 0.2
        arrays["prefix_lens"][spoiled] = rng.choice([-3, 10, 2**40], spoiled.sum())
        arrays["req_pool_indices"][rng.random(5) < 0.1] = 7
        capacity = int(rng.integers(0, 60))
        made = prefix_indices(**arrays, capacity=capacity)
        lists = token_by_token(*(value.tolist() for value in arrays.values()), capacity)
        assert made.kv_indices.tolist() == [slot for one in lists for slot in one]
        assert np.diff(made.kv_indptr).tolist() == [len(one) for one in lists] and made.kv_indptr[0] == 0
        whole = np.diff(made.kv_indptr) == arrays["prefix_lens"]
        assert ((made.flags == IndexFlag.OK) == whole)[arrays["req_pool_indices"] < 7].all()


@pytest.mark.parametrize(
    "message, changes",
    [
        (r"kv_indptr: expected shape \[3\], got \[2\]", {"kv_indptr": np.zeros(2, np.int32)}),
        (r"kv_indices: expected dtype int32 or int64, got uint32", {"kv_indices": np.zeros(9, np.uint32)}),
        (r"req_to_token: expected shape \[\*, \*\], got \[9\]", {"req_to_token": np.zeros(9, np.int32)}),
        (r"prefix_lens: expected dtype int32 or int64, got float64", {"prefix_lens": np.zeros(2)}),
        (r"flags: expected dtype int32, got bool", {"flags": np.zeros(2, bool)}),
        (r"kv_indices: expected memory of its own", {"kv_indices": np.zeros(9, np.int32), "req_to_token": None}),
    ],
)
def test_bind_refuses(message, changes):
    given = {
        "req_to_token": np.zeros((3, 4), np.int32),
        "req_pool_indices": np.zeros(2, np.int64),
        "prefix_lens": np.zeros(2, np.int64),
        "kv_indptr": np.zeros(3, np.int32),
        "kv_indices": np.zeros(9, np.int32),
        "flags": np.zeros(2, np.int32),
    }
    plan = IndicesPlan(max_requests=2, device="emulator")
    plan.bind(**given)
    given |= changes
    if given["req_to_token"] is None:
        given["req_to_token"] = given["kv_indices"].reshape(3, 3)
    with pytest.raises(ArgumentError, match=message):
        plan.bind(**given)
