"""The next step's prefix indices; and the same in a graph."""

from collections import Counter

import numpy as np
from support.streams import capture, wait_for_device
from support.tree_indices import *  # noqa: F403
from support.tree_indices import OnDevice, random_arrays


def test_a_captured_launch_serves_other_lengths(dev):
    rng = np.random.default_rng(1830)
    device = OnDevice(dev, random_arrays(rng, 16, 5000), 16 * 5000)
    captured = capture("driver", device.bound.launch)
    assert captured.nodes == Counter(KERNEL=1), "no copy, fill or allocation"

    def replay():
        wait_for_device()
        captured.replay()

    for _ in range(50):
        device.step(random_arrays(rng, 16, 5000), replay)
