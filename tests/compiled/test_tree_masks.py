"""The mask stage compiles without a GPU, and keeps everything in registers."""

import pytest

from nbverify.compile import compile_stage, target_of
from nbverify.tree.masks import mask_stage
from support.tree_masks import LAYOUTS


@pytest.mark.parametrize("cc", ["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_compiles(cc, layout):
    options = {"padded": False, "fill_prefix": False, **layout}
    kernel = compile_stage(mask_stage(**options, max_nodes=65), target_of(cc))
    need = kernel.resources
    assert (need.spill_bytes, need.local_bytes) == (0, 0)
    assert need.static_shared_bytes <= 32  # where rows and blocks start, and the fault
    assert ".f64" not in kernel.ptx
    assert need.registers <= 64
