"""The device of this tier: GPU 0.  Tests that come from ``support`` take it as ``dev``."""

import sys
from pathlib import Path

import pytest
from support.ahead import Job, compile_ahead
from support.devices import GpuDevice

import nbverify as nv

HERE = Path(__file__).parent


@pytest.fixture
def dev():
    return GpuDevice()


def pytest_collection_finish(session):
    """Compile what the selected tests will ask for, in parallel and before the clock of any test runs.

    That is what they are parametrized with, and what their module says in ``ALSO_COMPILED``: specs that tests make of
    those.  With ``DEBUG_PLANS`` the module's tests make plans with debug=True, too.
    """
    items = [item for item in session.items if HERE in item.path.parents and not item.get_closest_marker("skip")]
    if session.config.option.collectonly or not items:
        return
    from nbverify.launch import Device

    device, jobs = Device(0), []
    modules = {sys.modules[item.function.__module__] for item in items}
    specs = [(spec, False) for module in modules for spec in getattr(module, "ALSO_COMPILED", ())]
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_debug = getattr(sys.modules[item.function.__module__], "DEBUG_PLANS", False)
        specs += [(value, debug) for value in values if isinstance(value, nv.VerifySpec) for debug in {False, is_debug}]
    jobs += [Job(spec, device.cc, device.shared_limit, debug) for spec, debug in specs]
    compile_ahead(jobs)
