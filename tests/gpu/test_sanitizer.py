"""compute-sanitizer on a small matrix of launches: no access outside a buffer, no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernels import KERNELS
from support.streams import ROOT, run_python

SCRIPT = str(Path(__file__).with_name("sanitizer_case.py"))
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
FOUND_SOMETHING = 9
CANNOT_RUN_HERE = ("Device not supported", "is not supported on this", "ERR_NVGPUCTRPERM")
# Failed API calls are no findings here: the bindings ask old drivers for functions that only newer ones have.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}


@pytest.fixture(scope="module")
def sanitizer():
    path = shutil.which("compute-sanitizer") or next((p for p in PLACES if os.access(p, os.X_OK)), None)
    if path is None:
        pytest.skip("compute-sanitizer was not found")
    return path


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return request.param


@pytest.fixture(scope="module")
def names(kernel):
    """The cases, run without the tool: they must be right by themselves, and the cache is warm afterwards."""
    return run_python(SCRIPT, kernel, timeout=200)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(sanitizer, kernel, names, tool):
    options = ["--tool", tool, "--error-exitcode", str(FOUND_SOMETHING), *TOOLS[tool]]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sanitizer, *options, sys.executable, SCRIPT, kernel],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = done.stdout + done.stderr
    for reason in CANNOT_RUN_HERE:
        if reason in output and "right" not in done.stdout:
            pytest.skip(f"compute-sanitizer cannot run here: {reason}")
    assert done.returncode == 0, output[-8000:]
    assert [line for line in done.stdout.splitlines() if line.endswith("right")] == names.splitlines(), output[-4000:]
