"""Values of every feature against float64, and which launches must give the same bits."""

import pytest
from support import basic, determinism
from support.ahead import compile_ahead, specs_in
from support.basic import *  # noqa: F403
from support.determinism import *  # noqa: F403

from nbverify.launch import Device


@pytest.fixture(scope="module", autouse=True)
def kernels_in_the_cache():
    device = Device(0)
    compile_ahead(specs_in(basic) + specs_in(determinism), device.cc, device.shared_limit)
