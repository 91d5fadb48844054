"""Acceptance on the device, and captured in a graph."""

from collections import Counter

import numpy as np
import pytest
from support import tree_accept
from support.streams import capture, wait_for_device
from support.tree_accept import *  # noqa: F403

from nbverify.tree.accept import AcceptPlan, accept_greedy, accept_sampled


@pytest.mark.parametrize("kind, kernels", [("tokens", 1), ("logits", 2), ("sampled", 1)])
def test_a_graph_of_kernels_only_serves_new_batches(dev, kind, kernels):
    """The first launch of a plan is captured; replays see what stands in the static buffers then."""
    vocab, rng = 1000, np.random.default_rng(20)
    sizes = {"max_requests": 4, "max_nodes": 24, "max_depth": 6, "device": dev.device}
    plan = AcceptPlan(**sizes, vocab_size=None if kind == "tokens" else vocab, sampled=kind == "sampled")

    def batch_of(sizes):
        batch = tree_accept.Batch(rng, sizes, 24, padded=True)
        inputs = dict(batch.tree)
        if kind == "tokens":
            inputs["target_tokens"] = batch.target_tokens
        else:
            inputs["logits"] = batch.logits(rng, vocab, "float32")
        if kind == "sampled":
            inputs |= batch.sampling(rng)
        return batch, inputs

    batch, inputs = batch_of([24, 3, 7, 1])
    on_device = tree_accept.OnDevice(dev, plan, inputs, 96, np.int32)
    captured = capture("cupy", on_device.bound.launch)
    assert captured.nodes == Counter(KERNEL=kernels), "no copy, fill or allocation"
    for _ in range(50):
        batch, inputs = batch_of(rng.integers(0, 25, 4))
        for name, values in inputs.items():
            dev.write(on_device.inputs[name], values)
        dev.write(on_device.outputs["predict"], np.full(96, tree_accept.POISON, np.int32))
        wait_for_device()
        captured.replay()
        wait_for_device()
        got = {name: dev.download(array) for name, array in on_device.outputs.items()}
        accept = accept_sampled if kind == "sampled" else accept_greedy
        tree_accept.check(got, accept(**inputs, max_depth=6), batch.qo_indptr)
