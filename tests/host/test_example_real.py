"""The real model on the CPU, with the definition as its attention: minutes."""

import functools

import pytest
from support.real_llama import NEW, check_lossless, needs_weights, real
from support.tiny_llama import decoded

from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import PromptLookup
from examples.smollm2.model import Config, NumpyModel
from examples.smollm2.tokenizer import SYSTEM, TEMPLATE

pytestmark = [*needs_weights, pytest.mark.slow, pytest.mark.timeout(7200)]


@functools.cache
def model_and_plain():
    weights, tokenizer, prompts = real()
    model = NumpyModel(weights.tensors, Config.of(weights.fields), max_requests=len(prompts), max_len=384)
    return model, decoded(Decoder(model, end_token=tokenizer.end), prompts, NEW)[0]


def test_the_tokenizer_gives_back_what_it_was_given():
    _, tokenizer, _ = real()
    text = "Ünïcödé 12345 3.14\t\n\n  x  =\t1 \u4f60\u597d \U0001f642 don't I'LL"
    ids = tokenizer.chat(text)
    assert tokenizer.decode(ids, special=True) == TEMPLATE.format(system=SYSTEM, prompt=text)
    assert tokenizer.encode("1234") == [tokenizer.encode(digit)[0] for digit in "1234"]
    assert tokenizer.decode([tokenizer.end]) == "" and tokenizer.decode([tokenizer.end], special=True) == "<|im_end|>"


def test_it_knows_the_capital_of_france():
    weights, tokenizer, _ = real()
    model = NumpyModel(weights.tensors, Config.of(weights.fields), max_requests=1, max_len=128)
    texts, _ = decoded(Decoder(model, end_token=tokenizer.end), [tokenizer.chat("What is the capital of France?")], 24)
    assert tokenizer.decode(texts[0]) == "The capital of France is Paris."


@pytest.mark.parametrize("budget", [8, 16, 32, 64])
def test_trees_give_what_plain_decoding_gives(budget):
    """All six prompts at once."""
    model, want = model_and_plain()
    _, tokenizer, prompts = real()
    assert check_lossless(model, PromptLookup(), budget, prompts, tokenizer.end, want) > 1
