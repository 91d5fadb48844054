"""Shared by all tiers: whether there is a GPU, and the ``gpu`` mark."""

from functools import cache
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


@cache
def why_no_gpu() -> str:
    """Empty where a CUDA device can be used, else the reason."""
    try:
        from cuda.bindings import driver

        (code,) = driver.cuInit(0)
        if code != driver.CUresult.CUDA_SUCCESS:
            return f"no GPU: cuInit gave {code.name}"
        code, count = driver.cuDeviceGetCount()
        if code != driver.CUresult.CUDA_SUCCESS or count == 0:
            return f"no GPU: cuDeviceGetCount gave {code.name}, {count} devices"
    except Exception as error:  # the bindings raise RuntimeError or their own types where libcuda is missing
        return f"no GPU: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail instead of skipping gpu tests without a GPU")


def pytest_configure(config):
    if config.getoption("--require-gpu") and why_no_gpu():
        raise pytest.UsageError(f"--require-gpu: {why_no_gpu()}")


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and why_no_gpu():
            item.add_marker(pytest.mark.skip(reason=why_no_gpu()))


@pytest.fixture(scope="session")
def has_gpu() -> bool:
    return not why_no_gpu()
