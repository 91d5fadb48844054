"""The device of this tier: the emulator.  Tests that come from ``support`` take it as ``dev``."""

import pytest
from support.devices import EmulatorDevice


@pytest.fixture
def dev():
    return EmulatorDevice()
