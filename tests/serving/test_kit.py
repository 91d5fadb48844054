"""SGLang's own attention tests against the plugin, on the CPU: its real backend, loader, hooks, pools and batches.

The kernels are stood in for by numpy's reference: what is tested is which buffers they get.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = ("torch", "triton", "sglang")
CASES = 12
LEGS = 24  # each case verifies twice
FAULTS = ("a causal mask", "a mask offset", "a prefix offset", "another scale", "other draft slots")

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Everything in one process of its own: importing SGLang takes most of the time."""
    # An entry point without an installation: a folder of metadata on the path.
    site = tmp_path_factory.mktemp("site")
    info = site / "nbverify-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nbverify\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnbverify = nbverify.integrations.sglang:activate\n")
    path = os.pathsep.join([str(ROOT), str(site), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("NBVERIFY_SGLANG", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "kit.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_control_passes(outcomes):
    assert (outcomes["triton"]["run"], outcomes["triton"]["wrong"]) == (CASES, 0), outcomes["triton"]["first"]
    assert outcomes["triton"]["launches"] == 0


@pytest.mark.parametrize("backend", ["nbverify", "hooked triton"])
def test_the_plugin_passes_and_every_call_went_through_it(outcomes, backend):
    assert (outcomes[backend]["run"], outcomes[backend]["wrong"]) == (CASES, 0), outcomes[backend]["first"]
    assert outcomes[backend]["launches"] == LEGS


def test_replays_with_full_and_compact_masks_and_with_none(outcomes):
    """A replay whose batch has no mask, of a graph captured with one, is a chain, whatever was in the buffer."""
    found = outcomes["replays"]
    for kind in ("full", "compact"):
        for case in ("trees", "no mask"):
            assert found[f"{kind}, {case}"] <= 1
    assert found["full, mask bytes"] == 4 * 4 * (64 + 4) and found["compact, mask bytes"] == 4 * 4 * 5


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(outcomes, fault):
    """A chain cannot tell a causal mask from its own; every other fault shows in every case."""
    assert outcomes[fault]["wrong"] == (CASES - 4 if fault == "a causal mask" else CASES)
    assert outcomes[fault]["errors"] == 0, "found by comparing numbers, not by a crash"
