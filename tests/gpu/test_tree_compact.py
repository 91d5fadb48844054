"""Compaction of accepted KV; and the same in a graph."""

from collections import Counter

import numpy as np
import pytest
from support.streams import capture, wait_for_device
from support.tree_compact import *  # noqa: F403
from support.tree_compact import OnDevice, make_pool, random_steps


@pytest.mark.parametrize("convention", ["move", "keep"])
def test_a_captured_launch_serves_other_steps(dev, convention):
    rng = np.random.default_rng(1810)
    sizes = {"requests": 16, "max_nodes": 33, "max_depth": 8, "num_slots": 1024}
    device = OnDevice(dev, make_pool(rng, 1024, 16), random_steps(rng, **sizes), convention=convention, max_nodes=33)
    captured = capture("driver", device.bound.launch)
    assert captured.nodes == Counter(KERNEL=1), "no copy, fill or allocation"

    def replay():
        wait_for_device()  # what the test wrote, on another stream
        captured.replay()

    for _ in range(50):
        device.step(random_steps(rng, **sizes), replay)
