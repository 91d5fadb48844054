"""What only the tensor-core kernel does."""

import pytest
from support import tensor_core
from support.ahead import compile_ahead, specs_in
from support.tensor_core import *  # noqa: F403

from nbverify.launch import Device


@pytest.fixture(scope="module", autouse=True)
def kernels_in_the_cache():
    device = Device(0)
    compile_ahead(specs_in(tensor_core), device.cc, device.shared_limit)
