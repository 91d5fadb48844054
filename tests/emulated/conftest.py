"""The device of this tier: the emulator.  Tests that come from ``support`` take it as ``dev``."""

from pathlib import Path

import pytest
from support.devices import EmulatorDevice

import nbverify as nv

HERE = Path(__file__).parent
ON_THE_DEFAULT_KERNEL = {"test_recipes.py", "test_determinism.py"}  # in `make test`; on both in `make test-all`


@pytest.fixture
def dev():
    return EmulatorDevice()


def pytest_collection_modifyitems(items):
    """An emulated launch takes a second: what both kernels share is tried on one of them in `make test`."""
    for item in items:
        if item.path.parent == HERE and item.path.name in ON_THE_DEFAULT_KERNEL and hasattr(item, "callspec"):
            values = item.callspec.params.values()
            kernels = [value.kernel if isinstance(value, nv.VerifySpec) else value for value in values]
            if "simt" in kernels:
                item.add_marker(pytest.mark.slow)
