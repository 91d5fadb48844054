"""The next step's indices on a device against their definition.  Collected by the emulated and the gpu tier."""

import numpy as np
import pytest

from nbverify.tree.indices import IndicesPlan, prefix_indices
from nbverify.tree.kernels.records import IndexFlag

UNWRITTEN = -77


class OnDevice:
    """Static buffers bound to a plan; ``step(arrays)`` writes new values, launches and compares with the definition."""

    def __init__(self, dev, arrays, capacity, *, indptr="int32", indices="int64"):
        self.dev, self.capacity = dev, capacity
        requests = len(arrays["prefix_lens"])
        self.given = {name: dev.upload(value) for name, value in arrays.items()}
        self.outputs = {
            "kv_indptr": dev.upload(np.full(requests + 1, UNWRITTEN, indptr)),
            "kv_indices": dev.upload(np.full(capacity, UNWRITTEN, indices)),
            "flags": dev.upload(np.full(requests, UNWRITTEN, np.int32)),
        }
        plan = IndicesPlan(max_requests=requests, device=dev.device)
        self.bound = plan.bind(**self.given, **self.outputs)

    def step(self, arrays, launch=None):
        for name, value in arrays.items():
            self.dev.write(self.given[name], value)
        list_ = self.outputs["kv_indices"]
        self.dev.write(list_, np.full(self.capacity, UNWRITTEN, self.dev.download(list_).dtype))
        (launch or self.bound.launch)()
        wanted = prefix_indices(**arrays, capacity=self.capacity)
        got = {name: self.dev.download(value) for name, value in self.outputs.items()}
        np.testing.assert_array_equal(got["kv_indptr"], wanted.kv_indptr)
        np.testing.assert_array_equal(got["flags"], wanted.flags)
        used = len(wanted.kv_indices)
        np.testing.assert_array_equal(got["kv_indices"][:used], wanted.kv_indices)
        assert (got["kv_indices"][used:] == UNWRITTEN).all()
        return wanted


def random_arrays(rng, requests, context, index="int64"):
    return {
        "req_to_token": rng.integers(0, 1 << 20, (requests + 2, context)).astype(np.int32),
        "req_pool_indices": rng.permutation(requests + 2)[:requests].astype(index),
        "prefix_lens": rng.integers(0, context + 1, requests).astype(index),
    }


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_a_list_of_all_prefixes(dev, index):
    rng = np.random.default_rng(1820)
    requests, context = (16, 30_000) if dev.is_gpu else (2, 9300)  # more tiles than blocks a request
    other = {"int32": "int64", "int64": "int32"}[index]
    device = OnDevice(
        dev, random_arrays(rng, requests, context, index), requests * context, indptr=index, indices=other
    )
    for _ in range(20 if dev.is_gpu else 2):
        device.step(random_arrays(rng, requests, context, index))


@pytest.mark.slow
def test_more_requests_than_threads(dev):
    """A block adds up more lengths than it has threads."""
    rng = np.random.default_rng(1821)
    arrays = random_arrays(rng, 700 if dev.is_gpu else 130, 5)
    OnDevice(dev, arrays, 5000).step(arrays)


def test_the_longest_prefix(dev):
    """One request of 262,144 tokens among short ones."""
    if not dev.is_gpu:
        pytest.skip("a minute in the emulator")
    rng = np.random.default_rng(1822)
    arrays = random_arrays(rng, 16, 262_144)
    arrays["prefix_lens"][:] = [7] * 9 + [262_144] + [0] * 6
    OnDevice(dev, arrays, 300_000).step(arrays)


@pytest.mark.parametrize("capacity", [0, 1, 9, 10, 11, 14, 24, 25])
def test_nothing_is_written_beyond_the_capacity(dev, capacity):
    """Lengths 10, 0, 4, 11: cut inside the first, between two, inside the last, and not at all."""
    arrays = random_arrays(np.random.default_rng(1823), 4, 11)
    arrays["prefix_lens"][:] = [10, 0, 4, 11]
    flags = OnDevice(dev, arrays, capacity).step(arrays).flags
    assert flags.tolist() == [IndexFlag.CUT * (length > 0 and end > capacity) for length, end in
                              ((10, 10), (0, 10), (4, 14), (11, 25))]  # fmt: skip


@pytest.mark.parametrize(
    "name, value, flag",
    [
        ("prefix_lens", -1, IndexFlag.BAD_LENGTH),
        ("prefix_lens", 12, IndexFlag.BAD_LENGTH),
        ("prefix_lens", 2**32, IndexFlag.BAD_LENGTH),
        ("req_pool_indices", -1, IndexFlag.BAD_ROW),
        ("req_pool_indices", 5, IndexFlag.BAD_ROW),
        ("req_pool_indices", 2**32, IndexFlag.BAD_ROW),
    ],
)
def test_a_bad_request_has_no_entries(dev, name, value, flag):
    arrays = random_arrays(np.random.default_rng(1824), 3, 11)
    arrays["prefix_lens"][:] = [3, 5, 2]
    arrays[name][1] = value
    wanted = OnDevice(dev, arrays, 100).step(arrays)
    assert wanted.flags.tolist() == [0, flag, 0] and wanted.kv_indptr.tolist() == [0, 3, 3, 5]
