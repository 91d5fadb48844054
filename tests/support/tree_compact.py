"""Compaction on a device against its definition, bit for bit.  Collected by the emulated and the gpu tier."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import nbverify as nv
from nbverify.tree.compact import CompactPlan, compact
from nbverify.tree.indices import IndicesPlan
from nbverify.tree.kernels.records import CompactFlag
from nbverify.tree.planes import Plane
from nbverify.tree.trees import MAX_NODES
from support.devices import CANARY, CANARY_BYTES
from support.pool_model import PoolModel

UNWRITTEN = -77  # in outputs before a launch


@dataclass
class Pool:
    """Storages, and how planes look into them: ``(storage, view of it, layout)`` each."""

    storages: dict[str, np.ndarray]
    views: list = field(default_factory=list)

    def planes(self, storages) -> list[Plane]:
        return [Plane(view(storages[name]), layout) for name, view, layout in self.views]

    def copy(self):
        return {name: storage.copy() for name, storage in self.storages.items()}


def whole(storage):
    return storage


def first_half(storage):
    return storage[:, 0]


def second_half(storage):
    return storage[:, 1]


def make_pool(rng, num_slots, page_size) -> Pool:
    """MLA rows, K and V interleaved, K in pages, and scales of 1, 2, 3 and 4 bytes; every width of a unit."""
    pages = -(-num_slots // page_size)

    def noise(shape, dtype):
        return rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, shape, dtype=dtype)

    storages = {
        "mla": noise((num_slots, 1, 576), "uint16"),  # 72 units of 16 bytes
        "interleaved": noise((num_slots, 2, 2, 16), "uint16"),
        "paged": noise((pages, 3, page_size, 8), "uint32"),
        "paged_odd": noise((pages, 2, page_size, 10), "uint16"),  # heads of 20 bytes: units of 4
        "paged_scales": noise((pages, 2, page_size), "uint8"),
        "byte": noise((num_slots,), "uint8"),
        "pair": noise((num_slots, 1), "uint16"),
        "three": noise((num_slots, 3), "uint8"),
        "word": noise((num_slots, 5), "uint32"),
    }
    views = [
        ("mla", whole, "token"),
        ("interleaved", first_half, "token"),
        ("interleaved", second_half, "token"),
        ("paged", whole, "page"),
        ("paged_odd", whole, "page"),
        ("paged_scales", whole, "page"),
        ("byte", whole, "token"),
        ("pair", whole, "token"),
        ("three", whole, "token"),
        ("word", whole, "token"),
    ]
    return Pool(storages, views)


def random_steps(rng, *, requests, max_nodes, max_depth, num_slots, padded=False, index="int64", context=64):
    """The arrays of a step: ragged or padded rows, some requests absent, paths in any order."""
    num_nodes = rng.integers(1, max_nodes + 1, requests).astype(np.int32)
    num_nodes[rng.random(requests) < 0.2] = 0
    sizes = np.full(requests, max_nodes) if padded else num_nodes
    qo_indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(index)
    rows = requests * max_nodes
    accept_nodes = np.full((requests, max_depth + 1), -1, np.int32)
    accept_lens = np.zeros(requests, np.int32)
    for b, n in enumerate(num_nodes):
        if n == 0:
            continue
        m = int(rng.integers(1, min(n, max_depth + 1) + 1))
        path = rng.permutation(n)[:m]
        kind = rng.integers(3)
        if kind == 1:  # as acceptance gives it: the root first, growing
            path = np.concatenate([[0], np.sort(1 + rng.permutation(n - 1)[: m - 1])])
        elif kind == 2:  # all there is to permute: cycles
            path = rng.permutation(m)
        accept_nodes[b, :m], accept_lens[b] = path, m
    return {
        "out_cache_loc": rng.permutation(num_slots)[:rows].astype(index),
        "qo_indptr": qo_indptr,
        "accept_nodes": accept_nodes,
        "accept_lens": accept_lens,
        "num_nodes": num_nodes,
        "prefix_lens": rng.integers(0, context - max_depth, requests).astype(index),
        "req_to_token": rng.integers(0, num_slots, (requests + 3, context)).astype(np.int32),
        "req_pool_indices": rng.permutation(requests + 3)[:requests].astype(index),
    }


class OnDevice:
    """Static buffers bound to a plan; ``step(arrays)`` writes new values, launches and compares with the definition."""

    def __init__(
        self, dev, pool: Pool, arrays, *, convention="move", max_nodes, in_place=False, optional=True, device=None
    ):
        self.dev, self.pool, self.convention, self.max_nodes = dev, pool, convention, max_nodes
        requests, rows = len(arrays["num_nodes"]), len(arrays["out_cache_loc"])
        self.given = {name: dev.upload(value) for name, value in arrays.items() if value is not None}
        self.storages = {name: dev.upload(storage) for name, storage in pool.storages.items()}
        lens = self.given["prefix_lens"] if in_place else dev.upload(np.full_like(arrays["prefix_lens"], UNWRITTEN))
        self.outputs = {"new_prefix_lens": lens, "flags": dev.upload(np.full(requests, UNWRITTEN, np.int32))}
        if optional:
            self.outputs["freed_slots"] = dev.upload(np.full(rows, UNWRITTEN, arrays["out_cache_loc"].dtype))
            self.outputs["freed_counts"] = dev.upload(np.full(requests, UNWRITTEN, np.int32))
        depth = arrays["accept_nodes"].shape[1] - 1
        plan = CompactPlan(
            max_requests=requests,
            max_nodes=max_nodes,
            max_depth=depth,
            convention=convention,
            device=device or dev.device,
        )
        planes = pool.planes(self.storages) if convention == "move" else ()
        self.bound = plan.bind(planes=planes, **self.given, **self.outputs)

    def step(self, arrays, launch=None):
        """Launch on new values; returns what the definition says, having found the device to agree with it."""
        arrays = {name: value for name, value in arrays.items() if value is not None}
        for name, value in arrays.items():
            self.dev.write(self.given[name], value)
        before = {name: self.dev.download(storage) for name, storage in self.storages.items()}
        (launch or self.bound.launch)()
        expected = {name: value.copy() for name, value in arrays.items()}
        planes = self.pool.planes(before) if self.convention == "move" else ()
        wanted = compact(planes, convention=self.convention, max_nodes=self.max_nodes, **expected)
        for name in self.outputs:
            got = self.dev.download(self.outputs[name])
            if name == "freed_slots" and CompactFlag.BAD_WINDOW in wanted.flags:
                got[got == UNWRITTEN] = -1  # rows that belong to no request
            np.testing.assert_array_equal(got, getattr(wanted, name), err_msg=name)
        for name, storage in self.storages.items():  # every byte, those of no one included
            assert self.dev.download(storage).tobytes() == before[name].tobytes(), name
        for name in arrays:
            if name != "prefix_lens" or self.outputs["new_prefix_lens"] is not self.given[name]:
                np.testing.assert_array_equal(self.dev.download(self.given[name]), expected[name], err_msg=name)
        return wanted


# --------------------------------------------------------------------------------------------------------------- B18


@pytest.mark.parametrize("layout", ["token", "page"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_b18_accepted_rows_go_to_the_front(dev, layout, index):
    layers, num_slots, dim = 3, 28, 4
    slot = np.arange(num_slots)
    planes, storages = [], []
    for layer in range(layers):
        for width in (dim, 1):  # K, and a scale; V is one more K
            values = np.repeat((1000 * layer + slot).astype(np.float32)[:, None], width, 1)
            if layout == "page":  # [page, head, 4, width], two heads
                values = values.reshape(-1, 1, 4, width).repeat(2, 1)
            storages.append(dev.upload(np.ascontiguousarray(values)))
            planes.append(Plane(storages[-1], layout))
    outputs = {
        "new_prefix_lens": dev.upload(np.zeros(2, index)),
        "freed_slots": dev.upload(np.zeros(12, index)),
        "freed_counts": dev.upload(np.zeros(2, np.int32)),
        "flags": dev.upload(np.full(2, UNWRITTEN, np.int32)),
    }
    plan = CompactPlan(max_requests=2, max_nodes=6, max_depth=3, device=dev.device)
    plan.bind(
        planes=planes,
        out_cache_loc=dev.upload(np.array([*range(10, 16), *range(20, 26)], index)),
        qo_indptr=dev.upload(np.array([0, 6, 12], index)),
        accept_nodes=dev.upload(np.array([[0, 2, 5, -1], [0, -1, -1, -1]], np.int32)),
        accept_lens=dev.upload(np.array([3, 1], np.int32)),
        num_nodes=dev.upload(np.array([6, 6], np.int32)),
        prefix_lens=dev.upload(np.array([0, 0], index)),
        **outputs,
    ).launch()
    moved = slot.copy()
    moved[10:16] = [10, 12, 15, 13, 14, 15]
    for number, storage in enumerate(storages):
        rows = dev.download(storage)
        if layout == "page":
            rows = rows.transpose(0, 2, 1, 3).reshape(num_slots, -1)
        np.testing.assert_array_equal(rows, np.broadcast_to(1000 * (number // 2) + moved[:, None], rows.shape))
    got = {name: dev.download(value) for name, value in outputs.items()}
    assert got["new_prefix_lens"].tolist() == [3, 1] and got["flags"].tolist() == [0, 0]
    freed = got["freed_slots"]
    assert freed[freed >= 0].tolist() == [13, 14, 15, 21, 22, 23, 24, 25] and got["freed_counts"].tolist() == [3, 5]


# ------------------------------------------------------------------------------------------- against the definition


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_moves_are_a_gather_and_a_scatter(dev, page_size, padded):
    """Any permutation, all planes at once, new values in the same buffers at each launch."""
    rng = np.random.default_rng(1800 + page_size)
    sizes = {"requests": 16 if dev.is_gpu else 3, "max_nodes": 9, "max_depth": 6, "num_slots": 192}
    index = "int32" if page_size == 4 else "int64"
    pool = make_pool(rng, sizes["num_slots"], page_size)
    device = OnDevice(dev, pool, random_steps(rng, **sizes, index=index, padded=padded), max_nodes=9)
    for _ in range(50 if dev.is_gpu else 2):
        device.step(random_steps(rng, **sizes, index=index, padded=padded))


@pytest.mark.parametrize("path", ["reversed", "one_cycle", "from_behind"])
def test_the_longest_path_in_a_wide_row(dev, path):
    """33 rows, and rows of more columns than a block has threads."""
    rng = np.random.default_rng(1801)
    n, m = (34, 33) if path == "from_behind" else (33, 33)
    pool = Pool({"wide": rng.integers(0, 1 << 16, (40, 8, 130), dtype=np.uint16)}, [("wide", whole, "token")])
    arrays = random_steps(rng, requests=1, max_nodes=n, max_depth=32, num_slots=40)
    order = {"reversed": np.arange(m)[::-1], "one_cycle": np.roll(np.arange(m), 1), "from_behind": 1 + np.arange(m)}
    arrays |= {
        "num_nodes": np.array([n], np.int32),
        "qo_indptr": np.array([0, n]),
        "accept_lens": np.array([m], np.int32),
        "accept_nodes": order[path][None].astype(np.int32),
    }
    wanted = OnDevice(dev, pool, arrays, max_nodes=n).step(arrays)
    assert wanted.flags.tolist() == [0] and wanted.freed_counts.tolist() == [n - m]


def test_the_slots_of_a_kept_path(dev):
    """The other convention: nothing moves, and the table names the slots where they are."""
    rng = np.random.default_rng(1802)
    sizes = {"requests": 24 if dev.is_gpu else 4, "max_nodes": 150, "max_depth": 8, "num_slots": 4000}
    device = OnDevice(dev, Pool({}), random_steps(rng, **sizes), convention="keep", max_nodes=150)
    for _ in range(30 if dev.is_gpu else 2):
        device.step(random_steps(rng, **sizes))


@pytest.mark.parametrize("convention", ["move", "keep"])
def test_the_largest_tree(dev, convention):
    rng = np.random.default_rng(1806)
    sizes = {"requests": 1, "max_nodes": MAX_NODES, "max_depth": 4, "num_slots": MAX_NODES + 7}
    pool = Pool({"word": rng.integers(0, 1 << 32, (MAX_NODES + 7, 1), dtype=np.uint32)}, [("word", whole, "token")])
    arrays = random_steps(rng, **sizes) | {
        "num_nodes": np.array([MAX_NODES], np.int32),
        "qo_indptr": np.array([0, MAX_NODES]),
        "accept_lens": np.array([3], np.int32),
        "accept_nodes": np.array([[0, MAX_NODES - 1, 9, -1, -1]], np.int32),
    }
    wanted = OnDevice(dev, pool, arrays, convention=convention, max_nodes=MAX_NODES).step(arrays)
    assert wanted.flags.tolist() == [0] and wanted.freed_counts.tolist() == [MAX_NODES - 3]


@pytest.mark.parametrize("convention", ["move", "keep"])
def test_lengths_advance_in_place(dev, convention):
    """Every block reads what it needs before the one that keeps the books overwrites the lengths."""
    rng = np.random.default_rng(1803)
    sizes = {"requests": 3, "max_nodes": 9, "max_depth": 6, "num_slots": 192}
    pool = make_pool(rng, 192, 16)
    arrays = random_steps(rng, **sizes)
    # Not in plain order, in which all blocks of the emulator read before the first one writes.
    device = None if dev.is_gpu else nv.Emulator(seed=7)
    OnDevice(dev, pool, arrays, convention=convention, max_nodes=9, in_place=True, device=device).step(arrays)


def test_without_a_table_and_a_free_list(dev):
    rng = np.random.default_rng(1804)
    sizes = {"requests": 3, "max_nodes": 9, "max_depth": 6, "num_slots": 192}
    pool = make_pool(rng, 192, 1)
    arrays = random_steps(rng, **sizes) | {"req_to_token": None, "req_pool_indices": None}
    OnDevice(dev, pool, arrays, max_nodes=9, optional=False).step(arrays)


# -------------------------------------------------------------------------------------------------------- bad data


def _set(name, position, value):
    def spoil(arrays):
        arrays[name][position] = value

    return spoil


FAULTS = {
    "more nodes than rows": (_set("qo_indptr", 1, 13), CompactFlag.BAD_WINDOW),
    "negative nodes": (_set("num_nodes", 1, -1), CompactFlag.BAD_WINDOW),
    "more nodes than the plan has": (_set("num_nodes", 1, 9), CompactFlag.BAD_WINDOW),
    "window past the end": (_set("qo_indptr", slice(2, 4), 100), CompactFlag.BAD_WINDOW),
    "nothing accepted": (_set("accept_lens", 1, 0), CompactFlag.BAD_LENGTH),
    "more accepted than nodes": (_set("accept_lens", 1, 7), CompactFlag.BAD_LENGTH),
    "more accepted than the depth": (_set("accept_lens", 1, 6), CompactFlag.BAD_LENGTH),
    "negative slot": (_set("out_cache_loc", 11, -1), CompactFlag.BAD_SLOT),
    "slot past the pool": (_set("out_cache_loc", 6, 40), CompactFlag.BAD_SLOT),
    "slot past 32 bits": (_set("out_cache_loc", 6, 2**32 + 3), CompactFlag.BAD_SLOT),
    "negative node": (_set("accept_nodes", (1, 2), -1), CompactFlag.BAD_NODE),
    "node past the tree": (_set("accept_nodes", (1, 2), 6), CompactFlag.BAD_NODE),
    "a node twice": (_set("accept_nodes", (1, 2), 4), CompactFlag.DUPLICATE_NODE),
    "negative prefix": (_set("prefix_lens", 1, -1), CompactFlag.BAD_PREFIX),
    "prefix at the end of 64 bits": (_set("prefix_lens", 1, 2**63 - 2), CompactFlag.BAD_PREFIX),
    "no room in the table": (_set("prefix_lens", 1, 18), CompactFlag.BAD_PREFIX),
    "no row of the table": (_set("req_pool_indices", 1, 3), CompactFlag.BAD_PREFIX),
    "negative row of the table": (_set("req_pool_indices", 1, -1), CompactFlag.BAD_PREFIX),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("convention", ["move", "keep"])
def test_a_bad_request_is_left_alone_and_so_are_its_neighbours(dev, fault, convention):
    rng = np.random.default_rng(1805)
    sound = {
        "out_cache_loc": np.arange(24)[::-1] + 2,
        "qo_indptr": np.array([0, 6, 18, 24]),  # there are rows without a node
        "accept_nodes": np.array([[0, 2, 5, -1, -1], [0, 4, 5, 1, -1], [0, 3, 1, 2, -1]], np.int32),
        "accept_lens": np.array([3, 4, 4], np.int32),
        "num_nodes": np.array([6, 6, 6], np.int32),
        "prefix_lens": np.array([5, 16, 3]),
        "req_to_token": np.zeros((3, 20), np.int32),
        "req_pool_indices": np.array([2, 0, 1]),
    }
    pool = Pool({"k": rng.integers(0, 1 << 16, (40, 16), dtype=np.uint16), "longer": np.arange(48, dtype=np.uint8)})
    pool.views = [("longer", whole, "token"), ("k", whole, "token")]
    spoil, flag = FAULTS[fault]
    arrays = {name: value.copy() for name, value in sound.items()}
    spoil(arrays)
    if convention == "keep" and fault == "slot past the pool":
        flag = CompactFlag.OK  # no plane says how many slots there are
    wanted = OnDevice(dev, pool, arrays, convention=convention, max_nodes=8).step(arrays)
    neighbours = [0, 0] if fault != "window past the end" else [0, CompactFlag.BAD_WINDOW]
    assert wanted.flags.tolist() == [neighbours[0], flag, neighbours[1]]
    if flag != CompactFlag.OK:
        assert wanted.freed_counts[1] == 0 and wanted.new_prefix_lens[1] == arrays["prefix_lens"][1]


# --------------------------------------------------------------------------------------------- 2^31, and many rounds


@pytest.mark.parametrize("direction", ["up", "down"])
def test_b06_rows_past_2_31_elements(dev, direction):
    """Slots on both sides of the limit, from high to low and back, a layer of bytes and one of 16-bit rows."""
    if not dev.is_gpu:
        pytest.skip("4.3 GB a pool")
    num_slots, limit = 3_728_400, 3_728_270  # slot 3,728,270 of 576 elements straddles 2^31
    high = np.array([limit - 1, limit, limit + 1, limit + 120])
    slots = np.concatenate([[5, 6], high] if direction == "up" else [high, [5, 6]])
    rows = np.random.default_rng(1806).integers(0, 1 << 16, (6, 576), dtype=np.uint16)
    for dtype in ("uint16", "uint8"):
        pool = dev.vast(num_slots * 576, dtype).reshape(num_slots, 576)
        for slot, row in zip(slots, rows, strict=True):
            dev.write(pool[int(slot)], row.astype(dtype))
        arrays = {
            "out_cache_loc": slots,
            "qo_indptr": np.array([0, 6]),
            "accept_nodes": np.array([[0, 3, 5, 2, 1]], np.int32),
            "accept_lens": np.array([5], np.int32),
            "num_nodes": np.array([6], np.int32),
            "prefix_lens": np.array([2**30]),
        }
        outputs = {
            "new_prefix_lens": dev.upload(np.zeros(1, np.int64)),
            "flags": dev.upload(np.full(1, UNWRITTEN, np.int32)),
        }
        plan = CompactPlan(max_requests=1, max_nodes=6, max_depth=4, device=dev.device)
        plan.bind(planes=[Plane(pool)], **{n: dev.upload(a) for n, a in arrays.items()}, **outputs).launch()
        assert dev.download(outputs["flags"]).tolist() == [0]
        for slot, source in zip(slots, [0, 3, 5, 2, 1, 5], strict=True):
            np.testing.assert_array_equal(dev.download(pool[int(slot)]), rows[source].astype(dtype))
        del pool
        dev.free()


@pytest.mark.parametrize("convention", ["move", "keep"])
def test_64_rounds_against_a_plain_model_of_the_pool(dev, convention):
    """Requests end, their slots are used again; the prefix that the next step reads is what was accepted, in order."""
    rng = np.random.default_rng(1807)
    sizes = (
        {"requests": 16, "max_nodes": 33, "depth": 8, "max_prefix": 200}
        if dev.is_gpu
        else {"requests": 3, "max_nodes": 7, "depth": 3, "max_prefix": 25}
    )
    model = PoolModel(rng, **sizes)
    requests, table = model.requests, np.zeros((model.requests, model.max_prefix), np.int32)
    pool = Pool({"latent": np.zeros((model.num_slots, 2), np.uint32)}, [("latent", whole, "token")])
    pool.storages["scale"] = np.zeros((-(-model.num_slots // 4), 1, 4), np.uint8)
    pool.views.append(("scale", whole, "page"))
    arrays = model.draft() | {"req_to_token": table}
    device = OnDevice(dev, pool, arrays, convention=convention, max_nodes=model.max_nodes)
    model = PoolModel(rng, **sizes)  # from the start again
    listed = {
        "kv_indptr": dev.upload(np.full(requests + 1, UNWRITTEN, np.int32)),
        "kv_indices": dev.upload(np.full(requests * model.max_prefix, UNWRITTEN, np.int64)),
        "flags": dev.upload(np.full(requests, UNWRITTEN, np.int32)),
    }
    read_prefix = IndicesPlan(max_requests=requests, device=dev.device).bind(
        req_to_token=device.given["req_to_token"],
        req_pool_indices=device.given["req_pool_indices"],
        prefix_lens=device.outputs["new_prefix_lens"],
        **listed,
    )

    def fill(storages):
        """What a pool holds by the model's word, the slots of no one included."""
        contents = np.array(model.contents)
        storages["latent"][:] = contents[:, None]
        storages["scale"].reshape(-1)[: model.num_slots] = contents % 251

    for turn in range(64):
        step = model.draft() | {"req_to_token": dev.download(device.given["req_to_token"])}
        storages = pool.copy()
        fill(storages)  # the forward pass has stored the drafts' KV
        for name, storage in storages.items():
            dev.write(device.storages[name], storage)
        model.accept(step, device.step(step), convention)
        fill(storages)
        for name, storage in storages.items():
            np.testing.assert_array_equal(dev.download(device.storages[name]), storage)
        if not dev.is_gpu and turn % 8:
            continue  # the emulator takes a second for it
        read_prefix.launch()
        starts, slots = dev.download(listed["kv_indptr"]), dev.download(listed["kv_indices"])
        assert not dev.download(listed["flags"]).any()
        for b in range(requests):
            model.check_prefix(b, slots[starts[b] : starts[b + 1]].tolist())


def test_bytes_behind_a_plane_are_not_touched(dev):
    """A canary after a pool whose last slot is moved to and from."""
    rng = np.random.default_rng(1808)
    contents = rng.integers(0, 256, 3 * 7, dtype=np.uint8)
    storage = dev.raw(contents.size + CANARY_BYTES)
    dev.write(storage, np.concatenate([contents, np.full(CANARY_BYTES, CANARY, np.uint8)]))
    plane = storage[: contents.size].reshape(7, 3)
    plan = CompactPlan(max_requests=1, max_nodes=3, max_depth=2, device=dev.device)
    one = {name: dev.upload(np.array([value], np.int32)) for name, value in (("accept_lens", 3), ("num_nodes", 3))}
    plan.bind(
        planes=[Plane(plane)],
        out_cache_loc=dev.upload(np.array([6, 0, 5])),
        qo_indptr=dev.upload(np.array([0, 3])),
        accept_nodes=dev.upload(np.array([[1, 2, 0]], np.int32)),
        prefix_lens=dev.upload(np.array([0])),
        new_prefix_lens=dev.upload(np.array([0])),
        flags=dev.upload(np.zeros(1, np.int32)),
        **one,
    ).launch()
    expected = contents.reshape(7, 3).copy()
    expected[[6, 0, 5]] = expected[[0, 5, 6]]
    got = dev.download(storage)
    np.testing.assert_array_equal(got[: contents.size].reshape(7, 3), expected)
    assert (got[contents.size :] == CANARY).all()
