"""SmolLM2 (a Llama) in numpy, with a paged KV pool and nbverify's definition as its attention.

One forward pass serves prompts, plain decoding and draft trees.  Row i is a token at a position; it stores its key and
value in slot ``out_cache_loc[i]`` and then sees what the mask shows it:

    x = embed[token]
    per layer   q, k, v = qkv(norm(x));  q, k turned by the position (RoPE);  k, v into their slots
                x += out(attend(q));     x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = norm(x) @ embed.T

Shapes: n rows, E wide; Hq query and Hkv KV heads of D; F wide in the feed-forward part; V tokens.  GGUF stores the rows
of q and k so that RoPE turns the pairs (2i, 2i + 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.smollm2.host_step import HostStep
from nbverify import reference
from nbverify.errors import ArgumentError
from nbverify.stages import HostArray
from nbverify.tree import Plane

SCRATCH_PAGE = 0  # where rows that belong to no request store their keys; never handed out


@dataclass(frozen=True)
class Config:
    """What the shapes of the weights do not say."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    epsilon: float

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Config:
        """From the fields of a GGUF file."""
        heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
        kv_heads, epsilon = fields["llama.attention.head_count_kv"], fields["llama.attention.layer_norm_rms_epsilon"]
        return cls(heads, kv_heads, width // heads, fields["llama.rope.freq_base"], epsilon)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; matrices are ``[outputs, inputs]``, and those that share an input stand as one."""

    attn_norm: Any
    qkv: Any
    out: Any
    ffn_norm: Any
    gate_up: Any
    down: Any


def layers_of(tensors: dict[str, np.ndarray]) -> list[Layer]:
    """All layers, from tensors by their GGUF names."""
    layers: list[Layer] = []
    while f"blk.{len(layers)}.attn_q.weight" in tensors:

        def part(*names: str, prefix: str = f"blk.{len(layers)}.") -> np.ndarray:
            return np.concatenate([tensors[f"{prefix}{name}.weight"] for name in names])

        norms = {"attn_norm": part("attn_norm"), "ffn_norm": part("ffn_norm")}
        attention = {"qkv": part("attn_q", "attn_k", "attn_v"), "out": part("attn_output")}
        layers.append(Layer(**norms, **attention, gate_up=part("ffn_gate", "ffn_up"), down=part("ffn_down")))
    return layers


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """Rows of ``x`` [n, E] at a root mean square of 1, times ``weight`` [E]."""
    return x * weight / ((x * x).mean(-1, keepdims=True) + np.float32(epsilon)) ** np.float32(0.5)


def rope_table(config: Config, max_len: int) -> np.ndarray:
    """``[max_len, 2, D / 2]`` float32: cosines and sines of each position; from float64, exact at long ones."""
    pairs = np.arange(0, config.head_dim, 2) / config.head_dim
    angles = np.arange(max_len)[:, None] * config.rope_base**-pairs
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class Pool:
    """What every model here has: sizes, pages of slots, and the table of each request's slots by position."""

    def __init__(self, *, max_requests: int, max_len: int, page_size: int):
        for name, value in (("max_requests", max_requests), ("max_len", max_len), ("page_size", page_size)):
            if type(value) is not int or value < 1:
                raise ArgumentError(name, "an int >= 1", repr(value))
        self.max_requests, self.max_len, self.page_size = max_requests, max_len, page_size
        self.num_pages = 1 + max_requests * -(-max_len // page_size)
        self.num_slots = self.num_pages * page_size


HeadsResult = Callable[[], tuple[np.ndarray, np.ndarray]]  # waits for tokens and probabilities, [n, depth, top_k]
StartHeads = Callable[[np.ndarray], HeadsResult]  # of features [n, 2 E]


class NumpyModel(Pool):
    """On the host, in float32.  ``embed`` and ``norm`` are for drafters.

    Parameters
    ----------
    tensors, config
        Weights by their GGUF names, and what they do not say.
    max_requests, max_len
        Texts at once, and tokens of each at most, nodes of its trees included.
    page_size
        Slots of a page.
    """

    def __init__(
        self, tensors: dict[str, np.ndarray], config: Config, *, max_requests: int, max_len: int, page_size: int = 16
    ):
        super().__init__(max_requests=max_requests, max_len=max_len, page_size=page_size)
        self.config, self.layers = config, layers_of(tensors)
        self.embed, self.norm = tensors["token_embd.weight"], tensors["output_norm.weight"]
        self.rope_table = rope_table(config, max_len)
        pool = (self.num_slots, config.num_kv_heads, config.head_dim)
        self.keys = [np.zeros(pool, np.float32) for _ in self.layers]
        self.values = [np.zeros(pool, np.float32) for _ in self.layers]
        self.table = np.zeros((max_requests, max_len), np.int32)
        self.attending_s = 0.0
        self.on_attend: Callable[..., None] | None = None  # sees layer, inputs and output of every attention

    def set_slots(self, request: int, slots: np.ndarray) -> None:
        """The slots of a request by position; what is beyond them is scratch."""
        self.table[request] = SCRATCH_PAGE
        self.table[request, : len(slots)] = slots

    def prefill(self, request: int, tokens: list[int]) -> np.ndarray:
        """Store the keys and values of a text's first tokens; their residual stream ``[n, E]``."""
        n = len(tokens)
        buffers = {
            "kv_indptr": np.zeros(2, np.int64), "kv_indices": np.zeros(0, np.int64), "qo_indptr": np.array([0, n]),
            "out_cache_loc": self.table[request, :n],
        }  # fmt: skip
        return self.forward(np.array(tokens, np.int64), np.arange(n), "causal", buffers)

    def open_step(self, *, max_nodes: int, depth: int, top_k: int) -> HostStep:
        """A step for trees of these sizes."""
        planes = [Plane(array) for pair in zip(self.keys, self.values, strict=True) for array in pair]
        step = HostStep(
            max_requests=self.max_requests, max_nodes=max_nodes, depth=depth, top_k=top_k, req_to_token=self.table,
            planes=planes,
        )  # fmt: skip

        def model(tokens: np.ndarray, positions: np.ndarray, buffers: dict[str, Any]) -> np.ndarray:
            step.hidden = self.forward(tokens, positions, "tree", buffers)
            step.logits = (rms_norm(step.hidden, self.norm, self.config.epsilon) @ self.embed.T).view(HostArray)
            return step.logits.argmax(-1)

        step.capture(model)
        return step

    def open_heads(self, heads: np.ndarray, top_k: int) -> StartHeads:
        """Linear maps ``[depth, 2 E, E]`` of features to hidden states, from where the target's head goes on."""

        def start(features: np.ndarray) -> HeadsResult:
            logits = np.swapaxes(features @ heads, 0, 1) @ self.embed.T
            best = np.argpartition(-logits, top_k - 1)[..., :top_k]
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            of_best = np.take_along_axis(weights, best, -1) / weights.sum(-1, keepdims=True)
            return lambda: (best, of_best)

        return start

    def attention_s(self, step: HostStep, steps: int) -> float:
        """Seconds in attention since this was last asked."""
        spent, self.attending_s = self.attending_s, 0.0
        return spent

    def forward(self, tokens: np.ndarray, positions: np.ndarray, mask: str, buffers: dict[str, Any]) -> np.ndarray:
        """The residual stream ``[n, E]`` behind the last layer."""
        c = self.config
        x, heads = self.embed[tokens], (len(tokens), c.num_q_heads + 2 * c.num_kv_heads, c.head_dim)
        for i, w in enumerate(self.layers):
            rows = (rms_norm(x, w.attn_norm, c.epsilon) @ w.qkv.T).reshape(heads)
            q, k, v = np.split(rows, [c.num_q_heads, c.num_q_heads + c.num_kv_heads], axis=1)
            slots = buffers["out_cache_loc"]
            self.keys[i][slots], self.values[i][slots] = self.rope(k, positions), v
            x = x + self.attend(i, self.rope(q, positions), mask, buffers) @ w.out.T
            gate, up = np.split(rms_norm(x, w.ffn_norm, c.epsilon) @ w.gate_up.T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w.down.T
        return x

    def attend(self, layer: int, q: np.ndarray, mask: str, buffers: dict[str, Any]) -> np.ndarray:
        """nbverify's contract, by its definition: q ``[n, Hq, D]`` to ``[n, Hq * D]``."""
        start = time.perf_counter()
        inputs = {"q": q, "k_cache": self.keys[layer], "v_cache": self.values[layer], **buffers}
        out, _ = reference.verify_attention(**inputs, mask=mask, sm_scale=self.config.head_dim**-0.5)
        self.attending_s += time.perf_counter() - start
        if self.on_attend is not None:
            self.on_attend(layer, mask, inputs, out)
        return out.astype(np.float32).reshape(len(q), self.config.num_q_heads * self.config.head_dim)

    def rope(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """``x`` [n, heads, D], its pairs turned by the angles of their positions."""
        cos, sin = np.moveaxis(self.rope_table[positions], 1, 0)[:, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
