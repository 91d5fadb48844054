"""`nbverify demo`: verify a real draft tree, and check every number.

1. The packaged fixture: one attention layer of SmolLM2-135M verifying a tree of drafts, in float16.  On a GPU the
   launch is captured in a CUDA graph and replayed; without one the same kernel bodies run in the emulator.  The result
   is compared with float64 on the same inputs, and with what the model itself computed in float32.
2. On a GPU also the shape of Kimi K2.6 at 32k tokens, on random values: checked in some rows, and timed.

Computing (``run_fixture``, ``run_kimi``) and printing (``show_*``) are apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import nbverify as nv
from nbverify import compile, doctor, presets, reference
from nbverify.doctor import Facts
from nbverify.errors import ArgumentError, NbverifyError
from nbverify.fixture import SmolLM2Layer
from nbverify.tree import draw
from nbverify.tree.build import tree_from_parents
from nbverify.tree.draw import unicode_or

if TYPE_CHECKING:
    from nbverify.plan import BoundVerify, PlanReport
    from nbverify.spec import VerifySpec

# Five blocks do not divide the 12 row units of the fixture: some are split, so that partial states are merged.
EMULATOR_BLOCKS = 5

KIMI_PREFIX = 32_768
KIMI_NODES = (0, 1, 16, 32)  # rows that are compared with float64: root, its child, and two further down
KIMI_HEADS = (0, 7)
KIMI_LEAN = 0.25  # raises the scores of drafts by about 10: beside 32k keys they take 0.1 to 90 % of a row's softmax
TIMED_REPLAYS = 20
WARM_REPLAYS = 3
# Written before every timed replay: more than the L2 of any GPU, so that KV comes from memory.
FLUSH_BYTES = 512 * 2**20

EPS32 = float(np.finfo(np.float32).eps)
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of rounding to the type
FP16_SUBNORMAL_STEP = 2.0**-24

PROMPT_SHOWN = 60  # characters
INDEX = np.int64
POISON = 0xFF  # NaN in every float type


@dataclass(frozen=True)
class Check:
    """One comparison."""

    against: str
    bound: str  # in words
    values: int
    max_error: float
    worst: float  # largest error / its bound; at most 1 to pass
    passed: bool


@dataclass(frozen=True)
class Timing:
    """Time of a graph replay on the GPU."""

    median_us: float
    low_us: float
    high_us: float
    kv_bytes: int  # K and V of all visible keys, once

    @property
    def gb_per_s(self) -> float:
        """Bandwidth if every key is read once."""
        return self.kv_bytes / self.median_us / 1e3


@dataclass(frozen=True)
class Run:
    """What ran, and how it compared."""

    title: str
    ran: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]
    timing: Timing | None = None

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    def record(self) -> dict[str, Any]:
        """For --json."""
        timing = None if self.timing is None else {**dataclasses.asdict(self.timing), "gb_per_s": self.timing.gb_per_s}
        checks = [dataclasses.asdict(check) for check in self.checks]
        return {"title": self.title, "ran": dict(self.ran), "checks": checks, "timing": timing, "passed": self.passed}


# --- where it runs ---------------------------------------------------------------------------------------------------


def choose_device(requested: str, facts: Facts) -> tuple[str, str]:
    """("gpu" or "emulator", why).

    ``auto`` takes the emulator only where there is no GPU.  A GPU that cannot be used is an error, with the doctor's
    findings: who has one does not want to hear that the emulator passed.
    """
    if requested == "emulator":
        return "emulator", "asked for"
    findings = doctor.examine(facts)
    broken = [f"{f.name}: {f.detail}\n    to fix: {f.fix}" for f in findings if f.status == doctor.FAIL]
    if broken:
        hint = "" if requested == "gpu" else "\nOr, without the GPU: nbverify demo --device emulator"
        raise NbverifyError("this machine is not ready:\n  " + "\n  ".join(broken) + hint)
    if facts.gpus:
        if not facts.cupy_packages:
            raise NbverifyError(
                f"cupy: the demo puts its arrays on the GPU with CuPy, which is not installed: "
                f"pip install 'nbverify[{facts.extra}]'   (or nbverify demo --device emulator)"
            )
        return "gpu", facts.gpus[0].name
    no_gpu = doctor.check_driver(facts).detail
    if requested == "gpu":
        raise NbverifyError(f"--device gpu: {no_gpu}")
    return "emulator", no_gpu


# --- bounds ----------------------------------------------------------------------------------------------------------


def compare(against: str, bound: str, got: np.ndarray, want: np.ndarray, allowed: np.ndarray | float) -> Check:
    """Every element: ``|got - want| <= allowed``.  NaN fails."""
    error = np.abs(np.asarray(got, np.float64) - want)
    ratio = error / allowed
    passed = bool((ratio <= 1).all())
    return Check(against, bound, error.size, float(error.max()), float(ratio.max()), passed)


def score_rounding(spec: VerifySpec, q: np.ndarray, k: np.ndarray) -> float:
    """What float32 arithmetic does to a score, at most: a few eps32 of sm_scale * |q| |k| (random signs)."""
    longest = [float(np.sqrt((x.astype(np.float64) ** 2).sum(-1).max())) for x in (q, k)]
    return 4 * EPS32 * (1 + spec.sm_scale * longest[0] * longest[1])


def rounding_bound(
    spec: VerifySpec, q: np.ndarray, k: np.ndarray, v: np.ndarray, want: np.ndarray, spread: np.ndarray | float = 0.0
) -> np.ndarray:
    """Bound of ``|out - float64|`` on the same inputs, element by element: float32 arithmetic and the last rounding.

    An error of a score moves its weight by that times itself.  out, a convex combination of V, then moves by at most
    2 * score_error * max |V|; the exponential, the sum and the division add some ulps; storing rounds by half an ulp
    of the 16-bit type.

    The tensor-core kernel also rounds its weights, by u = half an ulp of themselves: with ``|d_j| <= u`` out moves by
    ``sum_j d_j p_j v_j / l``.  Equal weights are rounded alike, which moves out by ``u |out|`` at most.  Others are
    rounded independently: a deviation of ``u / sqrt(3)`` times ``spread`` (see :func:`weight_spread`), five of which
    are allowed.  A float16 weight below 2^-14, beside one of at least 1, is off by 2^-25 instead.
    """
    score_error = score_rounding(spec, q, k)
    v_max = float(np.abs(v.astype(np.float64)).max())
    bound = (2 * score_error + 16 * EPS32) * v_max + 1.01 * HALF_ULP[spec.dtype] * np.abs(want)
    if spec.dtype == "float16":
        bound = bound + FP16_SUBNORMAL_STEP
    if spec.kernel == "mma":
        of_weights = HALF_ULP[spec.dtype] * spread
        if spec.dtype == "float16":
            of_weights = of_weights + FP16_SUBNORMAL_STEP / 2 * np.sqrt(len(k)) * v_max
        bound = bound + HALF_ULP[spec.dtype] * np.abs(want) + 5 / np.sqrt(3) * of_weights
    return bound


def weight_spread(spec: VerifySpec, inputs: dict[str, Any], want_lse: np.ndarray) -> np.ndarray | float:
    """``sqrt(sum_j (p_j v_j / l)^2)`` of every element of out, for :func:`rounding_bound`; 0 if it is not needed.

    ``inputs`` are the arguments of ``reference.verify_attention`` that gave ``want_lse``, without score_mod and scales.
    ``exp(2 s)`` weighs what p^2 weighs: the sum is the mean of v^2 under doubled scores, times ``l(2 s) / l(s)^2``.
    """
    if spec.kernel != "mma":
        return 0.0
    v = inputs["k_cache"][..., : spec.head_dim_v] if spec.shared_kv else inputs["v_cache"]
    squares = v.astype(np.float64) ** 2
    doubled = {**inputs, "v_cache": squares, "sm_scale": 2 * spec.sm_scale, "head_dim_v": None}
    mean, lse_of_squares = reference.verify_attention(**doubled)
    return np.sqrt(mean * np.exp(lse_of_squares - 2 * want_lse)[..., None])


def bound_in_words(spec: VerifySpec) -> str:
    """What :func:`rounding_bound` allows for."""
    half_ulp = f"half a {spec.dtype} ulp"
    return f"float32 arithmetic, {half_ulp}" + (" of out and of the weights" if spec.kernel == "mma" else "")


def input_rounding_bound(
    sm_scale: float, q: np.ndarray, k: np.ndarray, mean_abs_v: np.ndarray, half_ulp: float
) -> np.ndarray:
    """Bound of what rounding q, K and V to 16 bits can do to out, [n, heads, head_dim].

    Rounding moves q and K by at most u = half_ulp of each element, so a score by d = sm_scale * (2u + u^2) * |q| |k|
    (Cauchy-Schwarz) at most, and a weight p by p * (exp(2d) - 1).  With V rounded too, out moves by at most
    ``(exp(2d) (1 + u) - 1) * sum_j p_j |v_j|``, plus u of itself for storing it; ``mean_abs_v`` is that sum.
    """
    num_q_heads, num_kv_heads = q.shape[1], k.shape[1]
    longest_key = np.sqrt((k.astype(np.float64) ** 2).sum(-1).max(0)).repeat(num_q_heads // num_kv_heads)  # [heads]
    lengths = np.sqrt((q.astype(np.float64) ** 2).sum(-1))  # [n, heads]
    moved = sm_scale * (2 * half_ulp + half_ulp**2) * lengths * longest_key
    return (np.exp(2 * moved)[..., None] * (1 + half_ulp) ** 2 - 1) * mean_abs_v


# --- the fixture -----------------------------------------------------------------------------------------------------


def first_nodes(layer: SmolLM2Layer, nodes: int | None) -> SmolLM2Layer:
    """The tree cut to its first nodes: parents come first, so that is a tree, and no node sees a later one."""
    total = len(layer.q)
    if nodes is None or nodes == total:
        return layer
    if not 1 <= nodes <= total:
        raise ArgumentError("--nodes", f"1 to {total}, the nodes of the packaged tree", nodes)
    per_node = ("q", "draft_slots", "parents", "tokens", "logprobs", "pieces", "target", "attention_out")
    cut = {name: getattr(layer, name)[:nodes] for name in per_node}
    return dataclasses.replace(layer, **cut, accepted=layer.accepted[layer.accepted < nodes])


def run_fixture(
    layer: SmolLM2Layer, device: str, *, seed: int = 0, reduction: str = "grid_sync", console: Console | None = None
) -> Run:
    """Verify the layer's tree on ``device`` ("gpu" or "emulator") in float16, and compare."""
    nodes, prefix_len = len(layer.q), len(layer.prefix_slots)
    spec = nv.VerifySpec.gqa(
        layer.q.shape[1],
        layer.k.shape[1],
        layer.q.shape[2],
        max_requests=1,
        max_nodes=nodes,
        max_kv_len=prefix_len + nodes,
        sm_scale=layer.sm_scale,
        dtype="float16",
        mask=nv.Mask.FULL,
        reduction=reduction,
    )
    mask = reference.full_mask(prefix_len, reference.ancestor_mask(layer.parents.tolist()))
    inputs: dict[str, Any] = {
        "q": layer.q.astype(np.float16),
        "k_cache": layer.k.astype(np.float16),
        "v_cache": layer.v.astype(np.float16),
        "kv_indptr": np.array([0, prefix_len], np.int32),
        "kv_indices": layer.prefix_slots.astype(INDEX),
        "qo_indptr": np.array([0, nodes], np.int32),
        "out_cache_loc": layer.draft_slots.astype(INDEX),
        "custom_mask": mask.astype(np.uint8).ravel(),
        "mask_indptr": np.array([0, mask.size], np.int64),
    }
    if device == "gpu":
        gpu = _Gpu(spec, inputs, seed)
        gpu.replay()
        out, lse, report = gpu.out(), gpu.lse(), gpu.report
    else:
        out, lse, report = _emulate(spec, inputs, seed, console)

    want, want_lse = reference.verify_attention(**inputs, sm_scale=spec.sm_scale)
    used = np.concatenate([layer.prefix_slots, layer.draft_slots])
    q16, k16, v16 = inputs["q"], inputs["k_cache"][used], inputs["v_cache"][used]
    spread = weight_spread(spec, {**inputs, "sm_scale": spec.sm_scale}, want_lse)
    allowed = rounding_bound(spec, q16, k16, v16, want, spread)
    mean_abs_v, _ = reference.verify_attention(
        **{**inputs, "q": layer.q, "k_cache": layer.k, "v_cache": np.abs(layer.v)}, sm_scale=spec.sm_scale
    )
    from_inputs = input_rounding_bound(spec.sm_scale, layer.q, layer.k[used], mean_abs_v, HALF_ULP["float16"])
    lse_allowed = score_rounding(spec, q16, k16) + 8 * EPS32 + 4 * EPS32 * np.abs(want_lse)
    checks = (
        compare("out, float64 on the same inputs", bound_in_words(spec), out, want, allowed),
        compare("lse, float64 on the same inputs", "float32 arithmetic", lse, want_lse, lse_allowed),
        # The kernel's own arithmetic and the model's (float32, another 1e-5 of its largest value) come on top.
        compare(
            "out, the model's own float32",
            "q, K, V rounded to float16 (worst case), and the above",
            out,
            layer.attention_out.astype(np.float64),
            from_inputs + allowed + 1e-5 * np.abs(layer.attention_out).max(),
        ),
    )
    title = f"SmolLM2-135M, layer 15: {nodes} nodes, {prefix_len} prefix tokens, float16"
    return Run(title, _what_ran(spec, report, device, seed), checks)


def _emulate(
    spec: VerifySpec, inputs: dict[str, Any], seed: int, console: Console | None
) -> tuple[np.ndarray, np.ndarray, PlanReport]:
    plan = nv.VerifyPlan(spec, device=nv.Emulator(EMULATOR_BLOCKS, seed))
    rows = inputs["q"].shape[0]
    out = np.full((rows, spec.num_q_heads, spec.head_dim_v), np.nan, np.float16)
    lse = np.full((rows, spec.num_q_heads), np.nan, np.float32)
    bound = plan.bind(**inputs, out=out, lse=lse)
    threads = plan.grid * plan.report().geometry.threads
    what = f"emulating {threads} CUDA threads, one at a time (10 to 30 s): rows done"
    with _progress(console, what, lse.size, lambda: int(np.count_nonzero(~np.isnan(lse)))):
        bound.launch()
    return out, lse, plan.report()


@contextlib.contextmanager
def _progress(console: Console | None, what: str, total: int, done: Callable[[], int]) -> Iterator[None]:
    """A bar on a terminal, fed by asking ``done()`` from a thread; elsewhere one line."""
    if console is None:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        console.print(f"{what} ...")
        yield
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    stop = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def follow() -> None:
            while not stop.wait(0.2):
                progress.update(task, completed=done())

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            stop.set()
            follower.join()


# --- Kimi K2.6 -------------------------------------------------------------------------------------------------------


def run_kimi(*, seed: int = 0, prefix_len: int = KIMI_PREFIX, reduction: str = "grid_sync") -> Run:
    """The shape of Kimi K2.6 on 8 GPUs, one request, random values: some rows against float64, and the time."""
    nodes = presets.MAX_NODES
    spec = dataclasses.replace(
        presets.preset("kimi-k2.6-tp8"),
        max_requests=1,
        max_nodes=nodes,
        max_kv_len=prefix_len + nodes,
        reduction=reduction,
    )
    inputs, parents = kimi_inputs(spec, prefix_len, seed)
    gpu = _Gpu(spec, inputs, seed)
    gpu.replay()
    out = gpu.out()
    checks = []
    for node in KIMI_NODES:
        want, allowed = kimi_row(spec, inputs, parents, node)
        label = f"out, float64: node {node}, heads {', '.join(map(str, KIMI_HEADS))}"
        checks.append(compare(label, bound_in_words(spec), out[node, list(KIMI_HEADS)], want, allowed))
    row_bytes = 2 * spec.head_dim_qk
    timing = gpu.time((prefix_len + nodes) * row_bytes)
    title = f"Kimi K2.6, TP8: {nodes} nodes, {prefix_len:,} prefix tokens, bfloat16, random"
    return Run(title, _what_ran(spec, gpu.report, "gpu", seed), tuple(checks), timing)


def kimi_inputs(spec: VerifySpec, prefix_len: int, seed: int) -> tuple[dict[str, Any], list[int]]:
    """Random q and KV in shuffled slots, and a random tree: the buffers, and the parents.

    All queries share a direction, and draft keys lean that way.  Else 33 drafts among 32k equals would weigh nothing,
    and a wrong mask would not show in bfloat16.
    """
    rng = np.random.default_rng(seed)
    nodes = spec.max_nodes
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]
    mask = reference.full_mask(prefix_len, reference.ancestor_mask(parents))
    slots = rng.permutation(prefix_len + nodes)
    width = spec.head_dim_qk
    shared = rng.standard_normal(width, np.float32)
    q = (shared + rng.standard_normal((nodes, spec.num_q_heads, width), np.float32)) / 2
    k = rng.standard_normal((prefix_len + nodes, 1, width), np.float32)
    k[slots[prefix_len:]] += KIMI_LEAN * shared
    inputs: dict[str, Any] = {
        "q": q.astype(ml_dtypes.bfloat16),
        "k_cache": k.astype(ml_dtypes.bfloat16),
        "kv_indptr": np.array([0, prefix_len], np.int32),
        "kv_indices": slots[:prefix_len].astype(INDEX),
        "qo_indptr": np.array([0, nodes], np.int32),
        "out_cache_loc": slots[prefix_len:].astype(INDEX),
        "custom_mask": mask.astype(np.uint8).ravel(),
        "mask_indptr": np.array([0, mask.size], np.int64),
    }
    return inputs, parents


def kimi_row(
    spec: VerifySpec, inputs: dict[str, np.ndarray], parents: list[int], node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Some heads of one node in float64, and the bound: a request of one node whose prefix is all that the node sees.

    Its ancestors join the prefix, so this says what is right without the mask, and costs one row instead of 33.
    """
    ancestors = []
    ancestor = parents[node]
    while ancestor >= 0:
        ancestors.append(inputs["out_cache_loc"][ancestor])
        ancestor = parents[ancestor]
    seen = np.concatenate([inputs["kv_indices"], np.array(ancestors, INDEX)])
    q, k = inputs["q"][node : node + 1, list(KIMI_HEADS)], inputs["k_cache"]
    row: dict[str, Any] = {
        "q": q,
        "k_cache": k,
        "kv_indptr": [0, len(seen)],
        "kv_indices": seen,
        "qo_indptr": [0, 1],
        "out_cache_loc": inputs["out_cache_loc"][node : node + 1],
        "sm_scale": spec.sm_scale,
        "mask": "none",
        "head_dim_v": spec.head_dim_v,
    }
    want, want_lse = reference.verify_attention(**row)
    spread = weight_spread(spec, row, want_lse)
    return want[0], rounding_bound(spec, q, k, k[..., : spec.head_dim_v], want, spread)[0]


# --- on the GPU ------------------------------------------------------------------------------------------------------


class _Gpu:
    """Inputs on the GPU, a plan, and its launch captured in a CUDA graph."""

    def __init__(self, spec: VerifySpec, inputs: dict[str, np.ndarray], seed: int):
        try:
            import cupy
        except ImportError as error:
            raise NbverifyError(
                f"cupy: cannot be imported ({doctor.one_line(error)}): pip install 'nbverify[cu12]', or [cu13]"
            ) from error
        self._cupy, self._spec = cupy, spec
        rows, width = inputs["q"].shape[0], spec.head_dim_v
        self._arrays: dict[str, Any] = {name: cupy.asarray(_raw_bits(array)) for name, array in inputs.items()}
        self._arrays["out"] = cupy.empty((rows, spec.num_q_heads, width), np.uint16)
        self._arrays["lse"] = cupy.empty((rows, spec.num_q_heads), np.float32)
        for name in ("out", "lse"):
            self._arrays[name].view(np.uint8).fill(POISON)
        plan = nv.VerifyPlan(spec)
        self.report = plan.report()
        bound: BoundVerify = plan.bind(**self._arrays)
        self._keep_alive = bound
        cupy.cuda.runtime.deviceSynchronize()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        # The strictest mode: anything but a launch, from any thread, would spoil the capture.
        self._stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
        bound.launch(self._stream)
        self._graph = self._stream.end_capture()

    def replay(self) -> None:
        """Launch the graph, and wait."""
        self._graph.launch(self._stream)
        self._stream.synchronize()

    def out(self) -> np.ndarray:
        """What was written, as the spec's dtype."""
        dtype = np.float16 if self._spec.dtype == "float16" else ml_dtypes.bfloat16
        return self._cupy.asnumpy(self._arrays["out"]).view(dtype)

    def lse(self) -> np.ndarray:
        """What was written."""
        return self._cupy.asnumpy(self._arrays["lse"])

    def time(self, kv_bytes: int) -> Timing:
        """Replays between events, each after a large write: it evicts L2, and hides the host's time to submit."""
        cupy, stream = self._cupy, self._stream
        flush = cupy.empty(FLUSH_BYTES, np.uint8)
        times_us = []
        with stream:
            for _ in range(WARM_REPLAYS + TIMED_REPLAYS):
                before, after = cupy.cuda.Event(), cupy.cuda.Event()
                flush.fill(0)
                before.record(stream)
                self._graph.launch(stream)
                after.record(stream)
                after.synchronize()
                times_us.append(1e3 * cupy.cuda.get_elapsed_time(before, after))
        low, median, high = np.percentile(times_us[WARM_REPLAYS:], [10, 50, 90])
        return Timing(float(median), float(low), float(high), kv_bytes)


def _raw_bits(array: np.ndarray) -> np.ndarray:
    """CuPy has no bfloat16; 16-bit values travel as bits."""
    return array.view(np.uint16) if array.dtype in (np.float16, ml_dtypes.bfloat16) else array


def _what_ran(spec: VerifySpec, report: PlanReport, device: str, seed: int) -> tuple[tuple[str, str], ...]:
    geometry = report.geometry
    lines = [
        ("device", f"{report.device} ({report.target})" if device == "gpu" else report.device),
        ("heads", f"{spec.num_q_heads} / {spec.num_kv_heads} KV, {spec.head_dim_qk} / {spec.head_dim_v} wide"),
        ("kernel", f"{spec.kernel}, split {spec.split}, reduction {spec.reduction}, mask {spec.mask.value}"),
        (
            "grid",
            f"{report.grid} blocks of {geometry.threads} threads, at most {report.max_splits} splits of a row unit",
        ),
        (
            "tile",
            f"{geometry.rows_per_tile} rows x {geometry.keys_per_tile} keys, {report.shared_bytes:,} bytes shared",
        ),
    ]
    if device == "gpu":
        lines.append(("launch", "captured in a CUDA graph (global mode), replayed"))
        lines += [
            (k.name, f"{k.resources.registers} registers, {k.resources.local_bytes} B local") for k in report.kernels
        ]
    versions = compile.toolkit_versions()
    names = [name for name in ("numba-cuda", "numba") if name in versions]
    text = ", ".join([f"nbverify {nv.__version__}", *(f"{name} {versions[name]}" for name in names)])
    lines.append(("versions", f"{text}, numpy {np.__version__}, Python {platform.python_version()}"))
    lines.append(("sources", f"{compile.source_hash()}, seed {seed}"))
    return tuple(lines)


# --- printing --------------------------------------------------------------------------------------------------------


def show_tree(console: Console, layer: SmolLM2Layer) -> None:
    """Tree and mask side by side."""
    console.print(Text.assemble(("prompt ", "dim"), ascii("..." + layer.prompt[-PROMPT_SHOWN:])))
    drawing = draw.Drawing(
        tree_from_parents(layer.parents, layer.tokens, layer.logprobs),
        labels=tuple(ascii(str(piece)) for piece in layer.pieces),
        accepted=tuple(layer.accepted.tolist()),
    )
    draw.show(console, drawing, f"all {len(layer.prefix_slots)} prefix tokens, and:")


def show_run(console: Console, run: Run) -> None:
    """What ran, the table of errors, the time."""
    console.rule(Text(run.title, style="bold"), align="left", characters=unicode_or(console, "─", "-"))
    ran = Table.grid(padding=(0, 2))
    for name, value in run.ran:
        ran.add_row(Text(name, style="dim"), Text(value))
    console.print(ran)
    table = Table(box=box.SIMPLE_HEAD if unicode_or(console, "y", "") else box.ASCII2)
    table.add_column("compared with\n[dim]what may differ[/dim]")
    for name in ("max abs\nerror", "of its\nbound", "\nvalues", ""):
        table.add_column(name, justify="right")
    for check in run.checks:
        verdict = Text("PASS", "bold green") if check.passed else Text("FAIL", "bold red")
        numbers = (f"{check.max_error:.2e}", f"{check.worst:.2f}", f"{check.values:,}")
        table.add_row(Text.assemble(check.against, "\n", (check.bound, "dim")), *numbers, verdict)
    console.print(table)
    if run.timing is not None:
        t = run.timing
        console.print(
            f"graph replay [bold]{t.median_us:.1f} us[/bold] (p10-p90 {t.low_us:.1f}-{t.high_us:.1f}, median of "
            f"{TIMED_REPLAYS}, L2 flushed): {t.gb_per_s:,.0f} GB/s of {t.kv_bytes / 1e6:.1f} MB of KV, read once",
            highlight=False,
        )
