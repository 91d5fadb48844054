"""The example's small kernels, as compiled."""

import pytest

from examples.smollm2.stages import PARAMETERS, stage
from nbverify.compile import compile_stage, target_of


@pytest.mark.parametrize("cc", ["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_everything_stays_in_registers_and_in_float32(name, cc):
    kernel = compile_stage(stage(name), target_of(cc))
    need = kernel.resources
    assert (need.local_bytes, need.stack_bytes, need.spill_bytes) == (0, 0, 0)
    assert ".f64" not in kernel.ptx and ".local" not in kernel.ptx
