"""The kernels of compaction and of the next step's indices, as compiled."""

import pytest

from nbverify.compile import compile_stage, target_of
from nbverify.tree.compact import CompactPlan
from nbverify.tree.indices import IndicesPlan

SIZES = {"max_requests": 16, "max_nodes": 65, "device": "emulator"}
STAGES = {
    "move": CompactPlan(**SIZES, max_depth=16).stage,
    "move, 33 rows": CompactPlan(**SIZES, max_depth=32).stage,
    "keep": CompactPlan(**SIZES, max_depth=32, convention="keep").stage,
    "indices": IndicesPlan(max_requests=16, device="emulator").stage,
}


# `make test` takes one target of each kernel, `make test-all` all.
CASES = [
    pytest.param(name, cc, marks=() if cc == "9.0" or name == "move" else pytest.mark.slow)
    for name in STAGES
    for cc in ("8.0", "9.0", "12.0")
]


@pytest.mark.parametrize(("name", "cc"), CASES)
def test_everything_stays_in_registers(name, cc):
    kernel = compile_stage(STAGES[name], target_of(cc))
    need = kernel.resources
    assert (need.local_bytes, need.stack_bytes, need.spill_bytes) == (0, 0, 0)
    assert ".f64" not in kernel.ptx and ".local" not in kernel.ptx


@pytest.mark.parametrize("depth", [3, 32])
def test_a_path_is_loaded_at_once(depth):
    """One load and one store of each width a row: the loops over rows are unrolled, and loads come first."""
    ptx = compile_stage(CompactPlan(**SIZES, max_depth=depth).stage, target_of("9.0")).ptx
    for text in ("ld.global.cg.v4.u32", "st.global.v4.u32"):
        assert ptx.count(text) == depth + 1
    assert ptx.rindex("ld.global.cg.v4.u32") < ptx.index("st.global.v4.u32")


def test_sizes_of_the_batch_are_no_part_of_the_key():
    keys = {CompactPlan(max_requests=b, max_nodes=n, max_depth=5, device="emulator").stage.compile_key
            for b, n in ((1, 8), (256, 1025))}  # fmt: skip
    assert len(keys) == 1
