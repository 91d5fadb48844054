"""The same model through nbverify's kernels: on a GPU, or in the emulator.

Weights, keys, values and the inputs of matrix products are float16; the residual stream, sums and logits are float32.
A step is one CUDA graph: trees, windows, all layers, acceptance and compaction.  So is a part of a prompt, and what
block heads say.  Nothing in them allocates: products.py.  Everything runs on the legacy default stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbverify as nv
from examples.smollm2.model import SCRATCH_PAGE, Config, HeadsResult, Pool, StartHeads, layers_of, rope_table
from examples.smollm2.products import CublasProducts, NumpyProducts
from examples.smollm2.stages import PARAMETERS, stage
from nbverify.graphs import Graph
from nbverify.launch import call, driver
from nbverify.stages import GpuRunner, Runner, Stage, open_runner
from nbverify.tree import Plane, VerifyStep
from nbverify.tree.step import stages_of_step

ATTENTION_REPLAYS = 20
PREFILL_ROWS = 64
Call = Callable[[int], None]  # of a stream handle
StepSizes = tuple[int, int, int]  # max_nodes, depth, top_k


class KernelModel(Pool):
    """Arguments as those of :class:`examples.smollm2.model.NumpyModel`.

    Parameters
    ----------
    device
        None: the current GPU, which needs cuBLAS.  "emulator" or an Emulator: the CPU.
    kernel
        Of the verify plans, as in ``VerifySpec``.
    prefill_rows
        Tokens of a prompt that go through the model at once.
    """

    def __init__(
        self, tensors: dict[str, np.ndarray], config: Config, *, max_requests: int, max_len: int, page_size: int = 16,
        device: int | str | nv.Emulator | None = None, kernel: str = "mma", prefill_rows: int = PREFILL_ROWS,
    ):  # fmt: skip
        super().__init__(max_requests=max_requests, max_len=max_len, page_size=page_size)
        self.config, self.kernel, self.device = config, kernel, device
        self.prefill_rows = prefill_rows = min(prefill_rows, max_len)
        self.runner = open_runner(device)
        self.products = CublasProducts(self.runner.device) if isinstance(self.runner, GpuRunner) else NumpyProducts()
        self.layers = [
            {name: self._upload(array, "float32" if "norm" in name else "float16") for name, array in vars(one).items()}
            for one in layers_of(tensors)
        ]
        self.embed, self.norm = tensors["token_embd.weight"], tensors["output_norm.weight"]
        self.head, self._norm = self._upload(self.embed, "float16"), self._upload(self.norm, "float32")
        self._angles = self._upload(rope_table(config, max_len), "float32")
        pool = (self.num_slots, config.num_kv_heads, config.head_dim)
        self.keys = [self.runner.empty(pool, "float16") for _ in self.layers]
        self.values = [self.runner.empty(pool, "float16") for _ in self.layers]
        self.table = self.runner.empty((max_requests, max_len), "int32", SCRATCH_PAGE)
        self._prompt = _Rows(self, prefill_rows, self._prompt_buffers(), nv.Mask.CAUSAL, 1, prefill_rows)
        self._prompt_launch = captured(self.runner, self._prompt.launch)

    def set_slots(self, request: int, slots: np.ndarray) -> None:
        """The slots of a request by position; what is beyond them is scratch."""
        table = self.table.get()
        table[request] = SCRATCH_PAGE
        table[request, : len(slots)] = slots
        self.table.set(table)

    def prefill(self, request: int, tokens: list[int]) -> np.ndarray:
        """Store the keys and values of a text's first tokens, some rows at a time; their residual stream ``[n, E]``."""
        rows, most, slots, hidden = self._prompt, self.prefill_rows, self.table.get()[request], []
        for start in range(0, len(tokens), most):
            n = min(most, len(tokens) - start)
            fill = [SCRATCH_PAGE * self.page_size] * (most - n)
            values = {
                "tokens": [*tokens[start : start + n], *([0] * len(fill))],
                "positions": np.arange(start, start + most),
                "out_cache_loc": [*slots[start : start + n], *fill], "qo_indptr": [0, n], "kv_indptr": [0, start],
                "kv_indices": slots,
            }  # fmt: skip
            for name, value in values.items():
                rows.buffers[name].set(value)
            self._prompt_launch(0)
            hidden.append(rows.x.get()[:n])
        return np.concatenate(hidden) if hidden else self.embed[:0]

    def open_step(self, *, max_nodes: int, depth: int, top_k: int) -> _Step:
        """A step for trees of these sizes, captured."""
        return _Step(self, max_nodes, depth, top_k)

    def open_heads(self, heads: np.ndarray, top_k: int) -> StartHeads:
        """As :meth:`examples.smollm2.model.NumpyModel.open_heads`; they run while the host does something else."""
        return _Heads(self, heads, top_k)

    def attention_s(self, step: _Step, steps: int) -> float:
        """Seconds that so many steps spend in attention: launches of all layers timed by themselves."""
        if steps == 0 or self.runner.emulated:
            return 0.0
        launch = captured(self.runner, step.rows.attend_all)
        launch(0)
        self.runner.synchronize()
        start = time.perf_counter()
        for _ in range(ATTENTION_REPLAYS):
            launch(0)
        self.runner.synchronize()
        return (time.perf_counter() - start) / ATTENTION_REPLAYS * steps

    def _upload(self, array: np.ndarray, dtype: str) -> Any:
        made = self.runner.empty(array.shape, dtype)
        made.set(array)
        return made

    def _prompt_buffers(self) -> dict[str, Any]:
        """Of rows that are the next tokens of one text."""
        sizes = {"qo_indptr": 2, "kv_indptr": 2, "kv_indices": self.max_len}
        sizes |= dict.fromkeys(("tokens", "positions", "out_cache_loc"), self.prefill_rows)
        return {name: self.runner.empty((size,), "int64") for name, size in sizes.items()}


def what_compiles(
    config: Config, vocab_size: int, steps: Iterable[StepSizes], *, max_requests: int, max_len: int
) -> list[nv.VerifySpec | Stage]:
    """All kernels of a model, block heads included, and of its steps."""
    prompt = verify_spec(
        config, nv.Mask.CAUSAL, "mma", max_requests=1, max_nodes=min(PREFILL_ROWS, max_len), max_kv_len=max_len
    )
    specs: list[nv.VerifySpec | Stage] = [prompt]
    stages: list[Stage] = [stage(name) for name in PARAMETERS]
    for max_nodes, depth, top_k in steps:
        sizes: dict[str, Any] = {"max_requests": max_requests, "max_nodes": max_nodes, "max_kv_len": max_len}
        specs.append(verify_spec(config, nv.Mask.TREE, "mma", **sizes))
        stages += stages_of_step(**sizes, depth=depth, top_k=top_k, moves=True, padded=True, vocab_size=vocab_size)
    return specs + stages  # what takes longest comes first


def captured(runner: Runner, launch: Call) -> Call:
    """The same launches as one CUDA graph; in the emulator as they are."""
    if not isinstance(runner, GpuRunner):
        return launch
    launch(0)  # libraries load and make what they must not in a capture
    runner.synchronize()
    return _Replay(launch, Graph(runner.device, launch))


@dataclass(frozen=True)
class _Replay:
    """A graph; it knows addresses only, and what it was captured from keeps alive what is there."""

    captured: Call
    graph: Graph

    def __call__(self, stream: int) -> None:
        self.graph.launch(stream)


def verify_spec(
    config: Config, mask: nv.Mask, kernel: str, *, max_requests: int, max_nodes: int, max_kv_len: int
) -> nv.VerifySpec:
    """The attention of every layer."""
    return nv.VerifySpec.gqa(
        config.num_q_heads, config.num_kv_heads, config.head_dim, max_requests=max_requests, max_nodes=max_nodes,
        max_kv_len=max_kv_len, sm_scale=config.head_dim**-0.5, dtype="float16", mask=mask, kernel=kernel,
        schedule="step" if kernel == "mma" else "launch",
    )  # fmt: skip


class _Step(VerifyStep):
    """VerifyStep with the model in it; ``hidden`` and ``logits`` are by row, request b's from b * max_nodes on."""

    def __init__(self, model: KernelModel, max_nodes: int, depth: int, top_k: int):
        runner, num_rows = model.runner, model.max_requests * max_nodes
        vocab_size = len(model.embed)
        self.logits = runner.empty((num_rows, vocab_size), "float32")
        planes = [Plane(array) for pair in zip(model.keys, model.values, strict=True) for array in pair]
        super().__init__(
            max_requests=model.max_requests, depth=depth, top_k=top_k, max_nodes=max_nodes, max_kv_len=model.max_len,
            req_to_token=model.table, planes=planes, padded=True, vocab_size=vocab_size, logits=self.logits,
            device=runner,
        )  # fmt: skip
        self.req_pool_indices.set(np.arange(model.max_requests))
        take_slots = runner.bind(
            stage("take_slots"), model.max_requests,
            {"req_to_token": model.table, "prefix_lens": self.prefix_lens, "out_cache_loc": self.out_cache_loc},
            {"max_len": model.max_len, "num_nodes": max_nodes},
        )  # fmt: skip
        buffers = {**self.verify_buffers(), "tokens": self.node_tokens, "positions": self.positions}
        self.rows = rows = _Rows(model, num_rows, buffers, nv.Mask.TREE, model.max_requests, max_nodes, self.logits)
        self.hidden = rows.x if isinstance(rows.x, np.ndarray) else _DeviceRows(rows.x)

        def launch(stream: int) -> None:
            take_slots(stream)
            rows.launch(stream)

        if not runner.emulated:  # as in captured(); nobody is there yet
            self.launch(launch)
        self.capture(launch)


class _Rows:
    """A forward pass of a fixed number of rows: buffers, and launches bound to them."""

    def __init__(
        self, model: KernelModel, num_rows: int, buffers: dict[str, Any], mask: nv.Mask, requests: int, nodes: int,
        logits: Any = None,
    ):  # fmt: skip
        c, runner, products, self.buffers = model.config, model.runner, model.products, buffers
        width, ffn = model.embed.shape[1], model.layers[0]["down"].shape[1]
        heads = (num_rows, c.num_q_heads, c.head_dim)
        empty = runner.empty
        self.x = x = empty((num_rows, width), "float32")
        normed, q, attended = empty(x.shape, "float16"), empty(heads, "float16"), empty(heads, "float16")
        qkv = empty((num_rows, (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim), "float32")
        gate_up, activated = empty((num_rows, 2 * ffn), "float32"), empty((num_rows, ffn), "float16")
        sizes = {"max_requests": requests, "max_nodes": nodes, "max_kv_len": model.max_len}
        spec = verify_spec(c, mask, model.kernel, **sizes)
        plan = nv.VerifyPlan(spec, device=model.device)

        def small(name: str, arrays: dict[str, Any], **scalars: float) -> Call:
            return runner.bind(stage(name), num_rows, arrays, scalars)

        def norm(weight: Any) -> Call:
            return small("rms_norm", {"x": x, "weight": weight, "y": normed}, width=width, epsilon=c.epsilon)

        def product(a: Any, w: Any, out: Any, add: bool = False) -> Call:
            return lambda stream: products.multiply(a, w, out, add, stream)

        verify = {name: buffers[name] for name in ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc")}
        if mask.reads_buffer:
            verify |= {name: buffers[name] for name in ("custom_mask", "mask_indptr")}
        angles = {"positions": buffers["positions"], "slots": buffers["out_cache_loc"], "angles": model._angles}
        shape = {"num_q_heads": c.num_q_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
        tokens = {"tokens": buffers["tokens"], "table": model.head}
        self._attends: list[Call] = []
        self._calls: list[Call] = [small("embed", {**tokens, "x": x}, width=width)]
        for w, keys, values in zip(model.layers, model.keys, model.values, strict=True):
            stored = {"qkv": qkv, "q": q, "keys": keys, "values": values, **angles}
            bound = plan.bind(q=q, k_cache=keys, v_cache=values, out=attended, **verify)
            # Who does what is worked out once, for all layers.
            once = [bound.schedule] if spec.schedule == "step" and not self._attends else []
            self._attends += [*once, bound.launch]
            self._calls += [
                *once, norm(w["attn_norm"]), product(normed, w["qkv"], qkv),
                small("rope_store", stored, **shape, max_len=model.max_len), bound.launch,
                product(attended, w["out"], x, True),
                norm(w["ffn_norm"]), product(normed, w["gate_up"], gate_up),
                small("silu_mul", {"gate_up": gate_up, "y": activated}, width=ffn),
                product(activated, w["down"], x, True),
            ]  # fmt: skip
        if logits is not None:
            self._calls += [norm(model._norm), product(normed, model.head, logits)]

    def launch(self, stream: int) -> None:
        """Everything, in order."""
        for one in self._calls:
            one(stream)

    def attend_all(self, stream: int) -> None:
        """The attention of all layers, and nothing else: to time it."""
        for one in self._attends:
            one(stream)


class _DeviceRows:
    """Rows of a float32 matrix in device memory, copied to the host when they are asked for."""

    def __init__(self, matrix: Any):
        self._matrix = matrix

    def __getitem__(self, row: int) -> np.ndarray:
        matrix = self._matrix
        out = np.empty(matrix.shape[1:], np.float32)
        with matrix.device:
            address = matrix.pointer + row * out.nbytes
            call("cuMemcpyDtoH", driver().cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
        return out


class _Heads:
    """Block heads, the target's head and the best tokens of each position, as one graph for all texts at once."""

    def __init__(self, model: KernelModel, heads: np.ndarray, top_k: int):
        (depth, inputs, width), texts, runner, products = heads.shape, model.max_requests, model.runner, model.products
        head, vocab_size = model.head, len(model.embed)
        matrix = runner.empty((depth * width, inputs), "float16")
        matrix.set(heads.transpose(0, 2, 1).reshape(matrix.shape))
        self._features = features = runner.empty((texts, inputs), "float16")
        ahead = runner.empty((texts, depth * width), "float16")
        logits = runner.empty((texts * depth, vocab_size), "float32")
        self._tokens = runner.empty((texts, depth, top_k), "int64")
        self._probabilities = runner.empty((texts, depth, top_k), "float32")
        best = runner.bind(
            stage("top_tokens"), texts * depth,
            {"logits": logits, "tokens": self._tokens, "probabilities": self._probabilities},
            {"width": vocab_size, "top_k": top_k},
        )  # fmt: skip

        def launch(stream: int) -> None:
            products.multiply(features, matrix, ahead, False, stream)
            products.multiply(ahead, head, logits, False, stream)
            best(stream)

        self._launch = captured(runner, launch)

    def __call__(self, features: np.ndarray) -> HeadsResult:
        """Start; what is given back waits."""
        texts = len(features)
        self._features.set(np.concatenate([features, np.zeros((self._features.shape[0] - texts, features.shape[1]))]))
        self._launch(0)
        return lambda: (self._tokens.get()[:texts], self._probabilities.get()[:texts])
