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
    sizes = {"max_requests": 40, "max_nodes": 40, "max_depth": 4, "device": dev.device}
    tree_accept.check_greedy(dev, tree_accept.Batch(rng, [40, 5], 40), AcceptPlan(**sizes))
    batch = tree_accept.Batch(rng, [0] * 38 + [4, 1], 40)  # more requests than lanes
    plan = AcceptPlan(**sizes, vocab_size=300)
    tree_accept.check_greedy(dev, batch, plan, batch.logits(rng, 300, "float32"))
    batch = tree_accept.Batch(rng, [1, 1, 1, 5], 40)
    batch.parents[3, :5], batch.node_tokens[3, :5] = [-1, 0, 0, 1, 1], [0, 5, 5, 7, 7]
    batch.target_tokens[3:] = [5, 7, 7, 7, 7]
    logits = batch.logits(rng, 300, "float32")
    logits[:3] = rng.normal(0, 0.1, (3, 300))  # flat: of other candidates another is drawn
    settings = batch.sampling(rng, temperatures=1, top_ks=9, top_ps=0.6)
    settings["temperatures"][3] = 0
    tree_accept.check_sampled(dev, batch, AcceptPlan(**sizes, vocab_size=300, sampled=True), logits, settings)
