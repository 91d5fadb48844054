"""Acceptance compiles for every target: no local memory, no spills, no float64."""

import pytest

from nbverify.compile import compile_stage, target_of
from nbverify.tree.accept import AcceptPlan

SIZES = {"max_requests": 16, "max_nodes": 65, "max_depth": 16, "device": "emulator"}
PLANS = {
    "from_tokens": {},
    "from_logits": {"vocab_size": 163_840},
    "from_bfloat16": {"vocab_size": 163_840, "logits_dtype": "bfloat16"},
    "from_float16": {"vocab_size": 163_840, "logits_dtype": "float16"},
    "sampled": {"vocab_size": 163_840, "sampled": True},
    "sampled_bfloat16": {"vocab_size": 163_840, "sampled": True, "logits_dtype": "bfloat16"},
    "from_tokens_largest": {"max_nodes": 1025, "max_depth": 1024},
    "sampled_largest": {"vocab_size": 163_840, "sampled": True, "logits_dtype": "float16", "max_nodes": 1025},
}
SHARED_BYTES = 99 * 1024  # of a block on sm_120, the least of the targets


def in_make_test(target, name):
    """One target a kind; the compilations of sampling take seconds."""
    return target == "9.0" or name in ("from_tokens", "from_tokens_largest", "from_logits")


CASES = [
    pytest.param(target, name, marks=() if in_make_test(target, name) else pytest.mark.slow)
    for target in ("8.0", "9.0", "12.0")
    for name in PLANS
]


@pytest.mark.parametrize("target, name", CASES)
def test_kernels_keep_to_registers_and_float32(target, name):
    plan = AcceptPlan(**{**SIZES, **PLANS[name]})
    for stage, _ in plan._stages(plan.max_requests, from_logits=plan.vocab_size is not None):
        kernel = compile_stage(stage, target_of(target))
        resources = kernel.resources
        assert (resources.local_bytes, resources.spill_bytes, resources.stack_bytes) == (0, 0, 0)
        assert ".f64" not in kernel.ptx and "fma.rn.f32" not in resources.instructions  # bits as numpy's
        assert resources.static_shared_bytes + stage.shared_bytes <= SHARED_BYTES


def test_argmax_has_its_loads_in_flight():
    """Four loads of 16 bytes in a row, before anything is done with the first."""
    plan = AcceptPlan(**{**SIZES, **PLANS["from_logits"]})
    argmax = plan._stages(16, from_logits=True)[0][0]
    ptx = compile_stage(argmax, target_of("9.0")).ptx
    lines = [line for line in ptx.splitlines() if "ld.global.cg.v4.u32" in line or "setp" in line]
    loads = [("ld.global" in line) for line in lines]
    assert any(loads[i : i + 4] == [True] * 4 for i in range(len(loads)))
