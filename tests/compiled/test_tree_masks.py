"""The mask stage compiles without a GPU, and keeps everything in registers."""

import pytest
from support.tree_masks import LAYOUTS

from nbverify.compile import compile_stage, target_of
from nbverify.tree.masks import mask_stage

# `make test` takes each layout once and one layout for each target, `make test-all` more.
CASES = [("9.0", name) for name in LAYOUTS] + [("8.0", "tree"), ("12.0", "tree")]
CASES += [
    pytest.param(cc, name, marks=pytest.mark.slow)
    for cc in ("8.0", "12.0")
    for name in ("full-padded-prefix", "packed")
]


@pytest.mark.parametrize(("cc", "name"), CASES)
def test_it_compiles(cc, name):
    options = {"padded": False, "fill_prefix": False, **LAYOUTS[name]}
    kernel = compile_stage(mask_stage(**options, max_nodes=65), target_of(cc))
    need = kernel.resources
    assert (need.spill_bytes, need.local_bytes) == (0, 0)
    assert need.static_shared_bytes <= 32  # where rows and blocks start, and the fault
    assert ".f64" not in kernel.ptx
    assert need.registers <= 64
