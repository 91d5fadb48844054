"""Acceptance on the device."""

import numpy as np
import pytest
from support import tree_accept
from support.devices import EmulatorDevice
from support.tree_accept import *  # noqa: F403

from nbverify.tree.accept import AcceptPlan


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_threads_gives_the_same(seed):
    """A missing barrier shows under some order."""
    dev, rng = EmulatorDevice(blocks=2, seed=seed), np.random.default_rng(seed)
    sizes = {"max_requests": 3, "max_nodes": 40, "max_depth": 4, "device": dev.device}
    batch = tree_accept.Batch(rng, [40, 5], 40)
    tree_accept.check_greedy(dev, batch, AcceptPlan(**sizes))
    batch = tree_accept.Batch(rng, [4, 1], 40)
    logits = batch.logits(rng, 300, "float32")
    tree_accept.check_greedy(dev, batch, AcceptPlan(**sizes, vocab_size=300), logits)
    settings = batch.sampling(rng, temperatures=0.7, top_ks=30, top_ps=0.9)
    tree_accept.check_sampled(dev, batch, AcceptPlan(**sizes, vocab_size=300, sampled=True), logits, settings)
