"""Trees to buffers, on the CPU."""

import numpy as np
import pytest
from support.devices import EmulatorDevice
from support.tree_masks import *  # noqa: F403
from support.tree_masks import LAYOUTS, Step, random_trees


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_order_of_threads_does_not_matter(seed):
    """A barrier that is missing shows in some orders only; in each, with other garbage in shared memory."""
    rng = np.random.default_rng(seed)
    step = Step(EmulatorDevice(seed=seed), 5, 12, **LAYOUTS["packed"])
    parents, num_nodes, prefix_lens = random_trees(rng, 5, 12, empty=0)
    parents[1, 0], prefix_lens[1] = 0, -1
    parents[2, :3], num_nodes[2] = [-1, 2, 1], 3
    parents[3], num_nodes[3] = -1, 12  # nothing to jump over, so no round of jumps, and no barrier of theirs
    got = step.check(rng, parents, num_nodes, prefix_lens)
    assert got["flags"].tolist() == [0, 7, 1, 4, 0]
