"""The mask stage compiles without a GPU, and keeps everything in registers."""

import pytest
from support.tree_masks import LAYOUTS

from nbverify.compile import compile_stage, target_of
from nbverify.tree.masks import mask_stage

# `make test` takes each layout once and one layout for each target, `make test-all` more.
CASES = [("9.0", name, 65) for name in LAYOUTS] + [("8.0", "tree", 65), ("12.0", "tree", 1025)]
CASES += [("9.0", name, 1025) for name in ("full-prefix", "packed-padded")]
CASES += [
    pytest.param(cc, name, max_nodes, marks=pytest.mark.slow)
    for cc in ("8.0", "12.0")
    for name in ("full-padded-prefix", "packed")
    for max_nodes in (65, 1025)
]


@pytest.mark.parametrize(("cc", "name", "max_nodes"), CASES)
def test_it_compiles(cc, name, max_nodes):
    options = {"padded": False, "fill_prefix": False, **LAYOUTS[name]}
    kernel = compile_stage(mask_stage(**options, max_nodes=max_nodes), target_of(cc))
    need = kernel.resources
    assert (need.spill_bytes, need.local_bytes) == (0, 0)
    assert need.static_shared_bytes <= 32  # where rows and blocks start, and the fault
    assert ".f64" not in kernel.ptx
    assert need.registers <= 64


def test_one_kernel_for_all_trees_of_up_to_1024_nodes():
    """Their rows take one walk."""
    options = {"padded": False, "fill_prefix": False, **LAYOUTS["tree"]}
    one, two, other = (mask_stage(**options, max_nodes=n).compile_key for n in (1, 1024, 1025))
    assert one == two != other
