"""The building kernel compiles for every target: no local memory, no spills, no float64, two block-wide votes."""

import pytest

from nbverify.compile import compile_stage, target_of
from nbverify.tree.build import stage

SIZES = {"issue": (16, 8, 65), "limits": (32, 64, 1025), "smallest": (1, 1, 1)}
STATIC_SHARED_LIMIT = 48 * 1024


@pytest.mark.parametrize("cc", ["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_it_compiles_as_its_head_says(tmp_path, monkeypatch, sizes, cc):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = compile_stage(stage(*sizes), target_of(cc))
    resources, (depth, top_k, max_nodes) = kernel.resources, sizes
    assert (resources.local_bytes, resources.spill_bytes, resources.stack_bytes) == (0, 0, 0)
    assert ".f64" not in kernel.ptx
    expected = 4 * (depth + 1) * (top_k + 1) + 16 * max_nodes + 4
    assert expected <= resources.static_shared_bytes <= min(expected + 64, STATIC_SHARED_LIMIT)
    # A round: the best score, its tie from the lane that has it, or the smallest tie of those that do.
    counts = [
        resources.instructions[name] for name in ("redux.sync.max.u32", "redux.sync.min.u32", "shfl.sync.idx.b32")
    ]
    assert counts == [1, 1, 1] and "shfl.sync.bfly.b32" not in resources.instructions
