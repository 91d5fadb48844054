"""The example on a GPU: its small kernels, and the random model with all drafters, batches and page sizes."""

import numpy as np
import pytest
from support.example_kernels import *  # noqa: F403
from support.example_kernels import kernel_model
from support.real_llama import check_lossless
from support.tiny_llama import CONFIG, PROMPTS, decoded

import nbverify as nv
from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import Mixture, PromptLookup, RidgeHeads
from examples.smollm2.kernel_model import verify_spec

BUDGETS = (8, 16, 32, 64)
TINY_NEW = 24
NODES = {nv.Mask.TREE: (1, 2, 6, 9, 13, 17, 33, 65), nv.Mask.CAUSAL: (4, 8)}  # of steps, and of parts of prompts
ALSO_COMPILED = [
    verify_spec(CONFIG, mask, kernel, max_requests=1, max_nodes=nodes, max_kv_len=96)
    for mask in NODES
    for nodes in NODES[mask]
    for kernel in nv.spec.KERNELS
]


def heads(model, depth=3):
    width = model.embed.shape[1]
    made = np.random.default_rng(1).standard_normal((depth, 2 * width, width)).astype(np.float32) / width
    return RidgeHeads(made, model)


DRAFTERS = {
    "lookup": lambda model: PromptLookup(),
    "ridge": heads,
    "mixture": lambda model: Mixture(PromptLookup(), heads(model)),
}


@pytest.mark.parametrize("budget", [1, *BUDGETS])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_and_budget(dev, drafter, budget):
    model = kernel_model(dev, max_len=128, kernel="mma", prefill_rows=8)
    plain, _ = decoded(Decoder(model), PROMPTS, TINY_NEW)
    check_lossless(model, DRAFTERS[drafter](model), budget, PROMPTS, None, plain, TINY_NEW)


@pytest.mark.parametrize("max_requests, page_size", [(1, 1), (3, 16), (5, 64)])
def test_every_batch_and_page_size(dev, max_requests, page_size):
    model = kernel_model(dev, max_requests=max_requests, max_len=96, page_size=page_size, kernel="mma")
    plain, _ = decoded(Decoder(model), PROMPTS, TINY_NEW)
    check_lossless(model, PromptLookup(), 12, PROMPTS, None, plain, TINY_NEW)


def test_the_host_has_no_part_in_a_step(dev):
    model = kernel_model(dev, kernel="mma")
    kinds = Decoder(model, PromptLookup(), 8).step.graph_nodes()
    assert kinds["KERNEL"] > 20 and not {"MEMCPY", "HOST"} & set(kinds), kinds


def test_attention_is_timed_by_itself(dev):
    model = kernel_model(dev, kernel="mma")
    decoder = Decoder(model, PromptLookup(), 8)
    assert model.attention_s(decoder.step, 0) == 0 < model.attention_s(decoder.step, 10) < 1
