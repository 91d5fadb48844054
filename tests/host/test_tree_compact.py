"""Compaction's definition against what a reader would write down by hand, and the refusals of its plan."""

import numpy as np
import pytest
from support.pool_model import PoolModel
from support.tree_compact import make_pool, random_steps

from nbverify.errors import ArgumentError
from nbverify.tree.compact import CompactPlan, compact
from nbverify.tree.indices import prefix_indices
from nbverify.tree.kernels.records import CompactFlag
from nbverify.tree.planes import Plane, place

# ------------------------------------------------------------------------------------------------------- by hand


def rows_of(plane):
    """slot -> bytes of its row, read one element at a time by the layout's words."""
    if plane.layout == "token":
        return {slot: plane.array[slot].tobytes() for slot in range(plane.array.shape[0])}
    pages, heads, page_size = plane.array.shape[:3]
    return {
        page * page_size + at: b"".join(plane.array[page, head, at].tobytes() for head in range(heads))
        for page in range(pages)
        for at in range(page_size)
    }


def move_one_by_one(cells, window, path):
    """Recursively: a cell is written only after everyone that needs what is in it has read it."""
    if not path:
        return
    (*others, last) = path
    incoming = cells[window[last]]
    move_one_by_one(cells, window, others)
    cells[window[len(others)]] = incoming


def test_b18():
    slot = np.arange(30.0)
    planes = [Plane(1000 * layer + slot.copy()) for layer in range(3)]
    made = compact(
        planes,
        out_cache_loc=np.array([*range(10, 16), *range(20, 26)]),
        qo_indptr=np.array([0, 6, 12]),
        accept_nodes=np.array([[0, 2, 5, -1], [0, -1, -1, -1]], np.int32),
        accept_lens=np.array([3, 1], np.int32),
        num_nodes=np.array([6, 6], np.int32),
        prefix_lens=np.array([0, 0]),
    )
    for layer, plane in enumerate(planes):
        moved = slot.copy()
        moved[10:16] = [10, 12, 15, 13, 14, 15]
        np.testing.assert_array_equal(plane.array, 1000 * layer + moved)
    assert made.new_prefix_lens.tolist() == [3, 1]
    assert made.freed_slots[made.freed_slots >= 0].tolist() == [13, 14, 15, 21, 22, 23, 24, 25]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_random_steps_one_row_at_a_time(page_size):
    rng = np.random.default_rng(page_size)
    for turn in range(60):
        pool = make_pool(rng, 192, page_size)
        step = random_steps(rng, requests=4, max_nodes=12, max_depth=7, num_slots=192, padded=turn % 2 == 1)
        planes = pool.planes(pool.storages)
        before = [rows_of(plane) for plane in planes]
        table = step["req_to_token"].copy()
        made = compact(planes, **step)
        for b, n in enumerate(step["num_nodes"]):
            first = step["qo_indptr"][b]
            window = step["out_cache_loc"][first : first + n].tolist()
            path = step["accept_nodes"][b, : step["accept_lens"][b]].tolist()
            for cells in before:
                move_one_by_one(cells, window, path)
            length = step["prefix_lens"][b]
            table[step["req_pool_indices"][b], length : length + len(path)] = window[: len(path)]
            assert made.new_prefix_lens[b] == length + len(path)
            assert made.freed_slots[first : first + made.freed_counts[b]].tolist() == window[len(path) :]
        assert [rows_of(plane) for plane in planes] == before
        np.testing.assert_array_equal(step["req_to_token"], table)
        assert (made.freed_slots >= 0).sum() == made.freed_counts.sum() and not made.flags.any()


def test_a_kept_path():
    table = np.full((2, 8), -5, np.int32)
    made = compact(
        (),
        out_cache_loc=np.array([10, 11, 12, 13, 14, 15]),
        qo_indptr=np.array([0, 6]),
        accept_nodes=np.array([[0, 5, 2, -1]], np.int32),
        accept_lens=np.array([3], np.int32),
        num_nodes=np.array([6], np.int32),
        prefix_lens=np.array([4]),
        req_to_token=table,
        req_pool_indices=np.array([1]),
        convention="keep",
    )
    assert table.tolist() == [[-5] * 8, [-5, -5, -5, -5, 10, 15, 12, -5]]
    assert made.freed_slots.tolist() == [11, 13, 14, -1, -1, -1] and made.new_prefix_lens.tolist() == [7]


def test_a_chain_is_not_touched():
    """A tree of width 1, all or part of it accepted: every row stays where it is."""
    rng = np.random.default_rng(3)
    pool = make_pool(rng, 64, 4)
    before = pool.copy()
    for m in range(1, 6):
        compact(
            pool.planes(pool.storages),
            out_cache_loc=np.arange(20, 25),
            qo_indptr=np.array([0, 5]),
            accept_nodes=np.arange(5, dtype=np.int32)[None],
            accept_lens=np.array([m], np.int32),
            num_nodes=np.array([5], np.int32),
            prefix_lens=np.array([0]),
        )
    assert all((pool.storages[name] == before[name]).all() for name in before)


@pytest.mark.parametrize("convention", ["move", "keep"])
def test_rounds_against_a_plain_model(convention):
    rng = np.random.default_rng(64)
    model = PoolModel(rng, requests=8, max_nodes=17, depth=6, max_prefix=60)
    storage, table = np.zeros(model.num_slots, np.int64), np.zeros((8, 60), np.int32)
    for _ in range(256):
        step = model.draft() | {"req_to_token": table}
        storage[:] = model.contents
        made = compact([Plane(storage)] if convention == "move" else (), convention=convention, **step)
        model.accept(step, made, convention)
        np.testing.assert_array_equal(storage, model.contents)
        listed = prefix_indices(
            req_to_token=table,
            req_pool_indices=step["req_pool_indices"],
            prefix_lens=made.new_prefix_lens,
            capacity=8 * 60,
        )
        for b in range(8):
            start, end = listed.kv_indptr[b : b + 2]
            model.check_prefix(b, listed.kv_indices[start:end].tolist())


# ------------------------------------------------------------------------------------------------------- refusals


def arguments(**changes):
    given = {
        "planes": [Plane(np.zeros((40, 8), np.uint16))],
        "out_cache_loc": np.zeros(12, np.int64),
        "qo_indptr": np.zeros(3, np.int32),
        "accept_nodes": np.zeros((2, 4), np.int32),
        "accept_lens": np.zeros(2, np.int32),
        "num_nodes": np.zeros(2, np.int32),
        "prefix_lens": np.zeros(2, np.int64),
        "new_prefix_lens": np.zeros(2, np.int64),
        "flags": np.zeros(2, np.int32),
        "freed_slots": np.zeros(12, np.int32),
        "freed_counts": np.zeros(2, np.int32),
        "req_to_token": np.zeros((5, 50), np.int32),
        "req_pool_indices": np.zeros(2, np.int64),
    }
    return given | changes


def frozen(array):
    array.flags.writeable = False
    return array


SHARED = np.zeros((40, 16), np.uint16)
LENGTHS = np.zeros(2, np.int32)
WINDOW = np.zeros(12, np.int64)
REFUSED = {
    "planes: expected at least one plane, got none": {"planes": ()},
    r"planes\[0\]: expected a Plane, got ndarray": {"planes": [SHARED]},
    r"planes\[0\].layout: expected 'token' or 'page', got 'NHD'": {"planes": [Plane(SHARED, "NHD")]},
    r"planes\[0\].array: expected \[pages, heads, page_size, ...\] with elements": {"planes": [Plane(SHARED, "page")]},
    r"planes\[0\].array: expected \[slots, ...\] with elements, got \[0, 8\]": {"planes": [Plane(np.zeros((0, 8)))]},
    r"planes\[0\].page_size: expected 4, as the array has it, or None, got 16": {
        "planes": [Plane(np.zeros((2, 1, 4, 8)), "page", 16)]
    },
    r"planes\[0\].array: expected contiguous rows": {"planes": [Plane(SHARED[:, ::2])]},
    r"planes\[0\].array: expected elements that do not overlap": {
        "planes": [Plane(np.lib.stride_tricks.sliding_window_view(np.zeros(47, np.uint16), 8, writeable=True))]
    },
    r"planes\[0\].array: expected an array that may be written": {"planes": [Plane(frozen(np.zeros((4, 8))))]},
    r"planes\[0\].array: expected memory of its own \(it is written while planes\[1\].array is used\)": {
        "planes": [Plane(SHARED), Plane(SHARED[:, :8])]
    },
    r"planes\[1\].array: expected memory of its own \(it is written while accept_lens is used\)": {
        "planes": [Plane(SHARED), Plane(LENGTHS)], "accept_lens": LENGTHS
    },
    r"out_cache_loc: expected dtype int32 or int64, got int16": {"out_cache_loc": np.zeros(12, np.int16)},
    r"qo_indptr: expected shape \[3\], got \[4\]": {"qo_indptr": np.zeros(4, np.int32)},
    r"accept_nodes: expected shape \[2, 4\], got \[2, 6\]": {"accept_nodes": np.zeros((2, 6), np.int32)},
    r"accept_lens: expected dtype int32, got int64": {"accept_lens": np.zeros(2, np.int64)},
    r"freed_slots: expected shape \[12\], got \[11\]": {"freed_slots": np.zeros(11, np.int32)},
    r"req_to_token: expected an array in C order": {"req_to_token": np.zeros((50, 5), np.int32).T},
    r"req_to_token: expected rows and columns, got \[5, 0\]": {"req_to_token": np.zeros((5, 0), np.int32)},
    "freed_slots, freed_counts: expected both or neither, got only freed_counts": {"freed_slots": None},
    "req_to_token, req_pool_indices: expected both or neither, got only req_to_token": {"req_pool_indices": None},
    r"freed_slots: expected memory of its own \(it is written while out_cache_loc is used\)": {
        "out_cache_loc": WINDOW, "freed_slots": WINDOW
    },
    "flags: expected an array that may be written": {"flags": frozen(np.zeros(2, np.int32))},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_bind_refuses(message):
    plan = CompactPlan(max_requests=2, max_nodes=6, max_depth=3, device="emulator")
    plan.bind(**arguments())
    with pytest.raises(ArgumentError, match=message):
        plan.bind(**arguments(**REFUSED[message]))


def test_keep_has_a_table_and_no_planes():
    plan = CompactPlan(max_requests=2, max_nodes=6, max_depth=3, convention="keep", device="emulator")
    plan.bind(**arguments(planes=()))
    with pytest.raises(ArgumentError, match='planes: expected none with convention="keep"'):
        plan.bind(**arguments())
    with pytest.raises(ArgumentError, match='req_to_token: expected an array with convention="keep"'):
        plan.bind(**arguments(planes=(), req_to_token=None, req_pool_indices=None))


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("max_requests", 0, "an int, 1 to"),
        ("max_nodes", 1026, "an int, 1 to 1025"),
        ("max_depth", 33, "an int, 1 to 32"),
        ("max_depth", 2.0, "an int, 1 to 32"),
        ("convention", "copy", "'move' or 'keep'"),
        ("device", "gpu", "None, an ordinal"),
    ],
)
def test_a_plan_refuses(name, value, expected):
    good = {"max_requests": 2, "max_nodes": 6, "max_depth": 3, "device": "emulator"}
    with pytest.raises(ArgumentError, match=f"{name}: expected {expected}"):
        CompactPlan(**{**good, name: value})


def test_the_flags_of_the_definition():
    step = {
        "out_cache_loc": np.array([3, 4, 5]),
        "qo_indptr": np.array([0, 3]),
        "accept_nodes": np.array([[0, 2]], np.int32),
        "accept_lens": np.array([2], np.int32),
        "num_nodes": np.array([3], np.int32),
        "prefix_lens": np.array([7]),
    }
    for name, value, flag in [
        ("num_nodes", [4], CompactFlag.BAD_WINDOW),
        ("accept_lens", [3], CompactFlag.BAD_LENGTH),
        ("out_cache_loc", [3, 9, 5], CompactFlag.BAD_SLOT),
        ("accept_nodes", [[0, 3]], CompactFlag.BAD_NODE),
        ("accept_nodes", [[2, 2]], CompactFlag.DUPLICATE_NODE),
        ("prefix_lens", [-1], CompactFlag.BAD_PREFIX),
    ]:
        plane = Plane(np.arange(9))
        made = compact([plane], **{**step, name: np.array(value, step[name].dtype)})
        assert made.flags.tolist() == [flag] and made.freed_counts.tolist() == [0], name
        if flag != CompactFlag.BAD_PREFIX:
            assert plane.array.tolist() == list(range(9))


# --------------------------------------------------------------------------------------------------------- planes


@pytest.mark.parametrize(
    "array, layout, unit",
    [
        (np.zeros((8, 1, 576), np.uint16), "token", 16),
        (np.zeros((8, 2, 2, 16), np.uint16)[:, 1], "token", 16),
        (np.zeros((8, 20), np.uint8), "token", 4),
        (np.zeros((8, 3), np.uint16), "token", 1),
        (np.zeros(8, np.uint8), "token", 1),
        (np.zeros(8, np.float32), "token", 4),
        (np.zeros((1, 1, 1, 16), np.uint8), "page", 16),
        (np.zeros((8, 17), np.uint8)[:, 1:], "token", 1),
        (np.zeros((8, 32), np.uint8)[:, :20], "token", 4),
        (np.zeros((8, 32), np.uint8)[:, 4:20], "token", 4),
    ],
)
def test_the_widest_unit_that_fits_is_taken(array, layout, unit):
    assert place("plane", Plane(array, layout), host=True).unit_bytes == unit


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_records_name_every_byte_of_a_row_once(page_size):
    """By the formula in tree/kernels/records.py, for a slot in the second page."""
    array = np.zeros((3, 5, page_size, 130), np.uint32)
    slot, start = page_size + page_size // 2, array.__array_interface__["data"][0]
    seen = []
    for base, size, page, stride, head, head_units, unit, first, end in place(
        "plane", Plane(array, "page"), host=True
    ).records():
        for u in range(first, min(end, first + 128)):
            at = slot // size * page + slot % size * stride + u // head_units * head + u % head_units * unit
            seen += range(base + at - start, base + at - start + unit)
    array[1, :, page_size // 2] = 0xFFFFFFFF
    assert seen == np.flatnonzero(array.reshape(-1).view(np.uint8)).tolist()
