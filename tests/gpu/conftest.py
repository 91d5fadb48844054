"""The device of this tier: GPU 0.  Tests that come from ``support`` take it as ``dev``."""

import pytest
from support.devices import GpuDevice


@pytest.fixture
def dev():
    return GpuDevice()
