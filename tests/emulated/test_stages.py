"""Stages in the emulator: any small kernel with a table of its own."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import nbverify as nv
from nbverify import stages
from nbverify.errors import ArgumentError, MemoryAccessError
from nbverify.stages import Stage, open_runner, scalar
from tests.support.scale_stage import stage


def buffers(runner, index_dtype="int32"):
    x = runner.empty((100,), "float32")
    x.set(np.arange(100))
    index = runner.empty((100,), index_dtype)
    index.set(np.arange(100)[::-1])
    memory = runner.empty((2,), "uint32")
    memory.set([41, 0])
    table = runner.empty((1,), "int64")
    return {"x": x, "slots": index, "y": runner.empty((100,), "float32", fill=0xFF), "table": table}, memory


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_a_stage_gets_arrays_scalars_and_memory_by_address(index_dtype):
    runner = open_runner(nv.Emulator(blocks=2, seed=1))
    arrays, memory = buffers(runner, index_dtype)
    arrays["table"].set([memory.__array_interface__["data"][0]])
    call = runner.bind(stage(plus=1), 2, arrays, {"num": 100, "factor": 0.5}, {"memory": memory})
    call(0)
    np.testing.assert_array_equal(arrays["y"].get(), 0.5 * np.arange(100)[::-1] + 1)
    assert memory.get().tolist() == [41, 42]


def test_memory_that_was_not_named_is_out_of_reach():
    runner = open_runner("emulator")
    arrays, memory = buffers(runner)
    arrays["table"].set([memory.__array_interface__["data"][0]])
    with pytest.raises(MemoryAccessError, match=r"(load|store)_global_u32"):
        runner.bind(stage(), 2, arrays, {"num": 100, "factor": 0.5})(0)


def test_an_absent_array_has_no_elements():
    runner = open_runner("emulator")
    arrays, _ = buffers(runner)
    runner.bind(stage(), 2, {**arrays, "table": None}, {"num": 100, "factor": 1.0})(0)
    np.testing.assert_array_equal(arrays["y"].get(), np.arange(100.0)[::-1])


def test_wrong_dtypes_and_devices_are_refused_by_name():
    runner = open_runner("emulator")
    arrays, _ = buffers(runner)
    with pytest.raises(ArgumentError, match="x: expected dtype float32, got float64"):
        runner.bind(stage(), 1, {**arrays, "x": np.zeros(100)}, {"num": 1, "factor": 1.0})
    with pytest.raises(ArgumentError, match="slots: expected dtype int32 or int64, got int16"):
        runner.bind(stage(), 1, {**arrays, "slots": np.zeros(100, np.int16)}, {"num": 1, "factor": 1.0})
    with pytest.raises(ArgumentError, match="device: expected"):
        open_runner("gpu")
    with pytest.raises(ArgumentError, match=r"values: expected shape \[100\], got \[3\]"):
        arrays["x"].set([1, 2, 3])


def test_a_field_must_not_have_the_name_of_a_method():
    with pytest.raises(ArgumentError, match="parameters: expected names that are no methods of a tuple, got count"):
        Stage("wrong", "tests.support.scale_stage", (scalar("count"),), threads=32)


def test_one_kernel_is_loaded_for_each_size_of_shared_memory(monkeypatch):
    """Of two plans of one runner, the second with larger trees: its blocks must not get what the first's need."""
    loaded = []
    monkeypatch.setattr(stages.launch, "Device", lambda ordinal: SimpleNamespace(name="GPU", num_sms=132, cc=(9, 0)))
    monkeypatch.setattr(stages.compile, "compile_stage", lambda stage, target: stage.name)
    monkeypatch.setattr(stages.launch, "LoadedKernel", lambda device, kernel, **sizes: loaded.append(sizes) or sizes)
    runner, small, large = stages.GpuRunner(0), replace(stage(), shared_bytes=64), replace(stage(), shared_bytes=640)
    assert [runner.load(one)["shared_bytes"] for one in (small, large, small)] == [64, 640, 64] and len(loaded) == 2
