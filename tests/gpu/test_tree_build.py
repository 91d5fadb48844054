"""Best-first trees: the kernel on the GPU, and captured in a graph."""

from collections import Counter

import numpy as np
from support.streams import capture, wait_for_device
from support.tree_build import *  # noqa: F403
from support.tree_build import assert_same_bits, random_buffers, random_drafts


def test_a_captured_build_serves_changing_drafts(dev):
    rng = np.random.default_rng(8)
    buffers = random_buffers(dev, rng, 16, 16, 8, 65)
    before = buffers.outputs()
    captured = capture("driver", buffers.bound.launch)
    assert captured.nodes == Counter(KERNEL=1), "kernels only: no copy, fill or allocation"
    assert_same_bits(buffers.outputs(), before)  # a capture launches nothing
    for _ in range(100):
        tokens, logprobs = random_drafts(rng, (16, 16, 8))
        buffers.write(tokens=tokens, logprobs=logprobs, budgets=rng.integers(-1, 65, 16).astype(np.int32))
        wait_for_device()
        captured.replay()
        assert_same_bits(buffers.outputs(), buffers.want())
