"""Trees to buffers, on the GPU."""

from collections import Counter

import numpy as np
from support.streams import capture, wait_for_device
from support.tree_masks import *  # noqa: F403
from support.tree_masks import LAYOUTS, Step, random_trees


def test_replays_serve_new_trees(dev):
    """One kernel and nothing else; the first launch of the plan is the captured one."""
    rng = np.random.default_rng(20)
    step = Step(dev, 16, 65, **LAYOUTS["full"])
    captured = capture("driver", step.bound.launch)
    assert captured.nodes == Counter(KERNEL=1), "no copy, fill or allocation"

    def replay():
        wait_for_device()  # for what was written into the buffers: the graph is on a stream of its own
        captured.replay()

    step.launch = replay
    for _ in range(100):
        step.check(rng, *random_trees(rng, 16, 65))
    step.check(rng, *random_trees(rng, 16, 65, empty=1))
