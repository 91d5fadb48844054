"""SmolLM2's architecture with random weights: two layers, 9 query and 3 KV heads, and 61 tokens."""

import numpy as np

from examples.smollm2.decode import Decoder
from examples.smollm2.model import Config, NumpyModel

CONFIG = Config(num_q_heads=9, num_kv_heads=3, head_dim=16, rope_base=10_000.0, epsilon=1e-5)
LAYERS, FFN, VOCAB = 2, 48, 61
WIDTH = CONFIG.num_q_heads * CONFIG.head_dim
# Of different lengths, some repeating themselves, so that lookup finds something.
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 7, 7], [4, 9, 4, 9, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11]]


class Oracle:
    """Knows the texts; its candidate for each position is right but for every third, which is wrong at rank 0.

    Of those in ``silent`` it says nothing, so that trees of a batch differ in size.
    """

    depth, top_k = 4, 3

    def __init__(self, texts, silent=()):
        self.texts, self.silent = texts, silent

    def propose(self, texts, hidden):
        return [self.ahead(list(text)) for text in texts]

    def ahead(self, text):
        known = next(i for i, one in enumerate(self.texts) if one[: len(text)] == text)
        if known in self.silent:
            return []
        positions = []
        for at, token in enumerate(self.texts[known][len(text) : len(text) + self.depth], start=len(text)):
            right, other = (0.4, 0.5) if at % 3 == 0 else (0.7, 0.2)
            positions.append({token: right, (token + 1) % VOCAB: other})
        return positions


def tiny_tensors(seed=0):
    """Weights by their GGUF names; matrices spread the values enough that texts do not settle on one token."""
    rng, kv_width = np.random.default_rng(seed), CONFIG.num_kv_heads * CONFIG.head_dim
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,), f"blk.{i}.attn_q": (WIDTH, WIDTH), f"blk.{i}.attn_k": (kv_width, WIDTH),
            f"blk.{i}.attn_v": (kv_width, WIDTH), f"blk.{i}.attn_output": (WIDTH, WIDTH), f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.ffn_gate": (FFN, WIDTH), f"blk.{i}.ffn_up": (FFN, WIDTH), f"blk.{i}.ffn_down": (WIDTH, FFN),
        }  # fmt: skip

    def draw(shape):
        normal = rng.standard_normal(shape)
        return (2 * normal / np.sqrt(shape[-1]) if len(shape) == 2 else 1 + normal / 10).astype(np.float32)

    return {f"{name}.weight": draw(shape) for name, shape in shapes.items()}


def tiny_model(*, max_requests=1, max_len=96, page_size=16, seed=0):
    sizes = {"max_requests": max_requests, "max_len": max_len, "page_size": page_size}
    return NumpyModel(tiny_tensors(seed), CONFIG, **sizes)


def decoded(decoder, prompts, max_tokens):
    """The new tokens of each prompt, and how many of all were drafts."""
    texts, drafted = [[] for _ in prompts], 0
    for grown in decoder.run(prompts, max_tokens):
        texts[grown.text] += grown.tokens
        drafted += grown.drafted
    return texts, drafted


def plain(prompts, max_tokens, **options):
    """What plain greedy decoding gives, each text alone."""
    return [decoded(Decoder(tiny_model(), **options), [prompt], max_tokens)[0][0] for prompt in prompts]
