"""Public faults of this kind of software, as small inputs; and what ``debug=True`` finds."""

import pytest
from support import debug_plans, recipes
from support.ahead import compile_ahead, specs_in
from support.debug_plans import *  # noqa: F403
from support.recipes import *  # noqa: F403

from nbverify.launch import Device


@pytest.fixture(scope="module", autouse=True)
def kernels_in_the_cache():
    device = Device(0)
    compile_ahead(specs_in(debug_plans) + specs_in(recipes), device.cc, device.shared_limit)
