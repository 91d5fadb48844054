"""The real model on a GPU: six prompts, four budgets, 64 tokens."""

import functools

import pytest
from support.real_llama import NEW, check_lossless, needs_weights, real
from support.tiny_llama import decoded

import nbverify as nv
from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import PromptLookup
from examples.smollm2.generate import BUDGETS
from examples.smollm2.kernel_model import KernelModel, verify_spec
from examples.smollm2.model import Config

pytestmark = [*needs_weights, pytest.mark.timeout(600)]
CONFIG = Config(num_q_heads=9, num_kv_heads=3, head_dim=64, rope_base=1e5, epsilon=1e-5)
NODES = {nv.Mask.TREE: (1, *(budget + 1 for budget in BUDGETS)), nv.Mask.CAUSAL: (64,)}  # of steps, parts of prompts
ALSO_COMPILED = [
    verify_spec(CONFIG, mask, "mma", max_requests=1, max_nodes=nodes, max_kv_len=384)
    for mask in NODES
    for nodes in NODES[mask]
]


@functools.cache
def real_model_and_plain():
    weights, tokenizer, prompts = real()
    model = KernelModel(weights.tensors, Config.of(weights.fields), max_requests=1, max_len=384)
    return model, decoded(Decoder(model, end_token=tokenizer.end), prompts, NEW)[0]


@pytest.mark.parametrize("budget", BUDGETS)
def test_trees_give_what_plain_decoding_gives(dev, budget):
    model, want = real_model_and_plain()
    _, tokenizer, prompts = real()
    assert check_lossless(model, PromptLookup(), budget, prompts, tokenizer.end, want) > 1


def test_six_requests_at_once(dev):
    weights, tokenizer, prompts = real()
    model = KernelModel(weights.tensors, Config.of(weights.fields), max_requests=4, max_len=384)
    want, _ = decoded(Decoder(model, end_token=tokenizer.end), prompts, NEW)
    check_lossless(model, PromptLookup(), 16, prompts, tokenizer.end, want)
