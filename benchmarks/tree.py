"""The parts of a tree step, and the whole step, beside numpy on the host; and which tree budget pays.

    python -m benchmarks.tree [--json [FILE]] [--plot FILE.png] [--batch 16] [--budget 64] [--depth 16] [--top-k 8]

Parts      graph replays, beside what each must take on an H200.  "us" is with a warm L2 cache: replays of the part
           alone, after each other.  "cold us" is with nothing in the cache, code and arguments included.  What a part
           must take is meant warm.  Parts that read logits, and whole steps, are measured and judged cold.
           "numpy" is the definition of the same part on the host, on the same data: for trees the heap of DDTree
           (docs/tree.md).  It has the data on the host already: copies to and fro, and the wait for them, come on top
           in a program that works like that.
Budgets    tokens a second = tokens a step / (layers * verify + step + other), from measured times of verify (Kimi K2.6,
           8 heads, one request) and of the step.  Tokens a step are what the drafter's own probabilities promise: 1 for
           the bonus token, and for each drafted node the probability of its path.  ``--other-us`` is what else a step
           takes (weights, the drafter): with 0 the table is the attention's alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import nbverify as nv
from benchmarks.device import Gpu
from benchmarks.timing import head_line, save
from nbverify.compile import tree_source_hash
from nbverify.errors import NbverifyError
from nbverify.presets import preset
from nbverify.tree import accept, build, masks
from nbverify.tree.planes import Plane
from nbverify.tree.step import VerifyStep

LAYERS, ROW_BYTES = 61, 1152  # Kimi K2.6: 576 columns of 16 bits
VOCAB = 163_840
ACCEPTED = 6  # tokens a request that are moved
PREFIX = 32_768
BUDGETS = (0, 7, 15, 31, 63, 127)
REPEATS = 30
# Probability of the first candidate at the first position, and what it falls by from position to position.
CURVES = {"easy": (0.95, 0.98), "medium": (0.80, 0.95), "hard": (0.55, 0.90)}
TO_RESULTS = ""


@dataclass(frozen=True)
class Sizes:
    """Of the step that is measured."""

    batch: int = 16
    budget: int = 64
    depth: int = 16
    top_k: int = 8

    @property
    def nodes(self) -> int:
        """With the root."""
        return self.budget + 1


def drafts(curve: tuple[float, float], sizes: Sizes) -> np.ndarray:
    """Log-probabilities ``[depth, top_k]``: the best candidate's from the curve, each other half of what is left."""
    first, fall = curve
    best = first * fall ** np.arange(sizes.depth)
    rest = (1 - best)[:, None] * 0.5 ** np.arange(1, sizes.top_k)
    probabilities = np.concatenate([best[:, None], rest], axis=1)
    return np.log(np.sort(probabilities, axis=1)[:, ::-1]).astype(np.float32)


def tokens_a_step(curve: tuple[float, float], sizes: Sizes) -> float:
    """What a tree of this budget yields, if the drafter's probabilities are those of the target."""
    logprobs = drafts(curve, sizes)
    tokens = np.arange(logprobs.size, dtype=np.int64).reshape(logprobs.shape)
    tree = build.build_tree(tokens, logprobs, 0, sizes.budget)
    return float(np.exp(tree.scores.astype(np.float64)).sum())  # the root's score is 0: the bonus token


def budget_rows(verify_us: dict[int, float], step_us: dict[int, float], sizes: Sizes, other_us: float) -> list[dict]:
    """A row a budget: times, and tokens a step and a second for each curve."""
    rows = []
    for budget in sorted(verify_us):
        total = LAYERS * verify_us[budget] + step_us[budget] + other_us
        row: dict[str, Any] = {"budget": budget, "verify_us": verify_us[budget], "step_us": total}
        for name, curve in CURVES.items():
            tokens = tokens_a_step(curve, replace(sizes, budget=budget))
            row[name] = {"tokens": round(tokens, 3), "tokens_s": round(1e6 * tokens / total, 1)}
        rows.append(row)
    return rows


def best_budgets(rows: Sequence[dict]) -> dict[str, int]:
    """Of each curve: from the next larger budget on, tokens a second fall."""
    return {name: max(rows, key=lambda row: row[name]["tokens_s"])["budget"] for name in CURVES}


class Workload:
    """A step's buffers on the GPU with a plausible batch in them, and the same on the host."""

    def __init__(self, gpu: Gpu, sizes: Sizes, seed: int):
        xp, rng = gpu.xp, np.random.default_rng(seed)
        self.gpu, self.sizes = gpu, sizes
        rows = sizes.batch * sizes.nodes
        slots = rows + sizes.batch * 64
        self.pools = [xp.zeros((slots, ROW_BYTES // 2), xp.uint16) for _ in range(LAYERS)]
        self.table = xp.asarray(np.zeros((sizes.batch, PREFIX + sizes.nodes), np.int32))
        self.step = step = VerifyStep(
            max_requests=sizes.batch, depth=sizes.depth, top_k=sizes.top_k, max_nodes=sizes.nodes,
            max_kv_len=PREFIX + sizes.nodes, req_to_token=self.table, planes=[Plane(pool) for pool in self.pools],
        )  # fmt: skip
        shape = (sizes.batch, sizes.depth, sizes.top_k)
        self.tokens = rng.permuted(np.tile(np.arange(sizes.top_k), (*shape[:2], 1)), axis=-1) + 8
        self.logprobs = np.stack([drafts(CURVES["medium"], sizes) for _ in range(sizes.batch)])
        self.logprobs -= rng.random(shape[:2], np.float32)[..., None]  # another shape for each tree
        self.roots, self.budgets = np.arange(sizes.batch), np.full(sizes.batch, sizes.budget, np.int32)
        step.tokens.set(self.tokens)
        step.logprobs.set(self.logprobs)
        step.root_tokens.set(self.roots)
        step.budgets.set(self.budgets)
        step.req_pool_indices.set(np.arange(sizes.batch))
        step.out_cache_loc.set(rng.permutation(slots)[:rows])
        self.trees = build.build_trees(self.tokens, self.logprobs, self.roots, self.budgets, sizes.nodes)
        self.prefix_lens = np.full(sizes.batch, PREFIX // 2, np.int64)
        self.targets = self.targets_of_a_path()
        step.target_tokens.set(self.targets)
        self.reset()
        step.launch(lambda stream: None)
        gpu.synchronize()
        if problems := step.problems():
            raise NbverifyError(f"the step that is to be measured: {problems}")
        self.qo_indptr = step.qo_indptr.get()

    def reset(self) -> None:
        """Lengths and roots as they were before a step."""
        self.step.prefix_lens.set(self.prefix_lens)
        self.step.root_tokens.set(self.roots)

    def targets_of_a_path(self) -> np.ndarray:
        """What the target says so that ACCEPTED tokens are kept: the deepest path's, and then nothing that is there."""
        targets, first = np.zeros(self.sizes.batch * self.sizes.nodes, np.int64), 0
        for b in range(self.sizes.batch):
            tree = self.trees.tree(b)
            node, path = int(np.argmax(tree.depths)), []
            while node != -1:
                path.append(node)
                node = int(tree.parents[node])
            path = path[::-1][:ACCEPTED]
            for parent, child in pairwise(path):
                targets[first + parent] = tree.node_tokens[child]
            first += tree.num_nodes
        return targets


def measure_parts(gpu: Gpu, load: Workload, read_gb_s: float, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a part: us on the GPU, what it must take, ms of numpy."""
    sizes, step, xp = load.sizes, load.step, gpu.xp
    rows: list[dict[str, Any]] = []
    names = ("build", "indices", "masks"), ("accept", "compact")
    bound = dict(zip(names[0], step._before, strict=True)) | dict(zip(names[1], step._after, strict=True))

    def add(
        name: str, launch: Callable[[Any], object], must_us: float | None, host: Callable[[], object] | None = None,
        *, warm: bool = True,
    ):  # fmt: skip
        progress(name)
        graph = gpu.capture(launch)
        cold = gpu.clock.replay_times(graph, repeats=REPEATS)
        us = gpu.clock.replay_times(graph, repeats=REPEATS, warm=True).summary() if warm else None
        row = {"part": name, "us": us, "cold_us": cold.summary(), "must_us": must_us}
        if host is not None:
            row["numpy_ms"] = round(milliseconds(host), 3)
        rows.append(row)
        return cold

    trees, prefix_lens = load.trees, load.prefix_lens
    add(
        "build", bound["build"].launch, 25,
        lambda: build.build_trees(load.tokens, load.logprobs, load.roots, load.budgets, sizes.nodes),
    )  # fmt: skip
    add("masks", bound["masks"].launch, 8, lambda: masks.tree_buffers(trees.parents, trees.num_nodes, prefix_lens))
    add("indices", bound["indices"].launch, None)
    add(
        "accept, argmaxes", bound["accept"].launch, 6,
        lambda: accept.accept_greedy(
            trees.parents, trees.node_tokens, trees.num_nodes, load.qo_indptr, load.targets, max_depth=sizes.depth
        ),
    )  # fmt: skip

    load.reset()
    step.launch(lambda stream: None)  # accept_nodes as after acceptance
    accepted = step.accept_lens.get()
    add(f"compact, {LAYERS} layers", bound["compact"].launch, 60)
    rows[-1]["accepted"] = [int(accepted.min()), int(accepted.max())]
    load.reset()

    logits = xp.empty((sizes.batch * sizes.nodes, VOCAB), xp.float32)
    logits[...] = xp.arange(VOCAB, dtype=xp.float32) % 997
    nodes = {name: getattr(step, name) for name in ("parents", "node_tokens", "num_nodes", "qo_indptr")}
    out = {
        "accept_nodes": step.accept_nodes,
        "accept_lens": step.accept_lens,
        "bonus_tokens": step.runner.empty((sizes.batch,), "int64"),
        "flags": step.runner.empty((sizes.batch,), "int32"),
    }
    plan = accept.AcceptPlan(
        max_requests=sizes.batch, max_nodes=sizes.nodes, max_depth=sizes.depth, vocab_size=VOCAB, device=step.runner
    )
    gigabytes = int(load.trees.num_nodes.sum()) * VOCAB * 4 / 1e9
    must = 1e6 * gigabytes / (0.75 * read_gb_s)
    cold = add("accept, logits", plan.bind(**nodes, **out, logits=logits).launch, must, warm=False)
    rows[-1]["of_read"] = round(1e6 * gigabytes / cold.median / read_gb_s, 3)
    drawing = accept.AcceptPlan(
        max_requests=sizes.batch, max_nodes=sizes.nodes, max_depth=sizes.depth, vocab_size=VOCAB, sampled=True,
        device=step.runner,
    )  # fmt: skip
    filled = {
        "temperatures": (0.8, "float32"),
        "top_ps": (0.95, "float32"),
        "top_ks": (50, "int32"),
        "seeds": (1, "int64"),
    }
    sampling = {name: xp.full(sizes.batch, value, dtype) for name, (value, dtype) in filled.items()}
    call = drawing.bind(**nodes, **out, logits=logits, prefix_lens=step.prefix_lens, **sampling)
    add("accept, sampled", call.launch, None, warm=False)
    del logits
    return rows


def measure_step(gpu: Gpu, load: Workload, must_us: float | None) -> dict[str, Any]:
    """The captured step without a model."""
    load.reset()
    load.step.capture(lambda stream: None)
    times = gpu.clock.device_times(lambda stream: load.step.replay(stream), repeats=REPEATS)
    nodes = load.step.graph_nodes()
    return {
        "part": f"step of {load.sizes.batch}, no attention",
        "us": None,
        "cold_us": times.summary(),
        "must_us": must_us,
        "nodes": nodes,
    }


def measure_verify(gpu: Gpu, seed: int) -> dict[int, float]:
    """us of one layer's verify by budget: one request, PREFIX keys, a chain (a tree costs the same)."""
    xp, rng, found = gpu.xp, np.random.default_rng(seed), {}
    slots = rng.permutation(PREFIX + max(BUDGETS) + 1)
    pool = xp.zeros((len(slots), 1, ROW_BYTES // 2), xp.uint16)
    for budget in BUDGETS:
        n = budget + 1
        spec = replace(
            preset("kimi-k2.6-tp8"), kernel="mma", max_requests=1, max_nodes=n, max_kv_len=PREFIX + n, mask=nv.Mask.TREE
        )
        bound = gpu.plan(spec).bind(
            q=xp.zeros((n, 8, ROW_BYTES // 2), xp.uint16), k_cache=pool, out=xp.zeros((n, 8, 512), xp.uint16),
            kv_indptr=xp.asarray(np.array([0, PREFIX], np.int32)), kv_indices=xp.asarray(slots[:PREFIX]),
            qo_indptr=xp.asarray(np.array([0, n], np.int32)), out_cache_loc=xp.asarray(slots[PREFIX : PREFIX + n]),
            custom_mask=xp.asarray(np.tri(n, dtype=np.uint8).ravel()), mask_indptr=xp.asarray(np.array([0, n * n])),
        )  # fmt: skip
        found[budget] = gpu.replay_times(gpu.capture(bound.launch), REPEATS).median
    return found


def milliseconds(call: Callable[[], object]) -> float:
    """Of the fastest of three calls on the host."""
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def part_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of parts."""
    lines = [f"{'part':30} {'us':>8} {'p10-p90':>15} {'must':>7} {'cold us':>10} {'numpy ms':>9}", "-" * 86]
    for row in rows:
        warm, cold, must = row["us"], row["cold_us"], row.get("must_us")
        judged = warm or cold
        verdict = "" if must is None else f"{must:7.0f} {'ok' if judged['p50'] <= must else 'MISS'}"
        numpy_ms = f"{row['numpy_ms']:9.2f}" if "numpy_ms" in row else ""
        us, span = f"{warm['p50']:.1f}" if warm else "", f"{judged['p10']:.1f}-{judged['p90']:.1f}"
        more = f"  {100 * row['of_read']:.0f} % of the read bandwidth" if "of_read" in row else ""
        line = f"{row['part']:30} {us:>8} {span:>15} {verdict:12} {cold['p50']:5.1f} {numpy_ms:>9}{more}"
        lines.append(line.rstrip())
    return lines


def budget_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of budgets."""
    best = best_budgets(rows)
    names = "".join(f"{name:>24}" for name in CURVES)
    lines = [f"{'budget':>6} {'verify us':>10} {'step us':>9}{names}   (tokens a step, a second)", "-" * 100]
    for row in rows:
        cells = "".join(
            f"{row[name]['tokens']:12.2f} {row[name]['tokens_s']:10,.0f}{'*' if best[name] == row['budget'] else ' '}"
            for name in CURVES
        )
        lines.append(f"{row['budget']:6} {row['verify_us']:10.1f} {row['step_us']:9.0f}{cells}")
    return [*lines, "* the best budget of its column: from there on verify costs more than the tree brings"]


def draw(record: dict[str, Any], path: Path) -> None:
    """Tokens a second against the budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in CURVES:
        points = [(row["budget"] + 1, row[name]["tokens_s"]) for row in record["budgets"]]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{name}: first candidate right {CURVES[name][0]:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("nodes, root included")
    axes.set_ylabel("tokens a second, one request")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"Kimi K2.6, 8 heads a GPU, prefix {PREFIX:,}, {record['other_us']:g} us beside attention", fontsize=9
    )
    axes.legend()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree", description=__doc__.splitlines()[0])
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N")
    parser.add_argument("--other-us", type=float, default=10_000.0, help="what a step takes beside attention (10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", nargs="?", const=TO_RESULTS, metavar="FILE", help="keep the record")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--commit", metavar="SHA", help="for the record, where the sources are a copy without git")
    options = parser.parse_args(argv)
    sizes = Sizes(options.batch, options.budget, options.depth, options.top_k)
    show: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    progress: Callable[[str], None] = lambda text: print(f"  {text} ...", file=sys.stderr, flush=True)  # noqa: E731
    try:
        gpu = Gpu()
        record: dict[str, Any] = {"head": gpu.head(options.seed, options.commit), "sizes": vars(sizes)}
        record["head"]["tree_source_hash"] = tree_source_hash()
        show(head_line("tree", record["head"]))
        with gpu.watched():
            record["ceilings"] = gpu.clock.bandwidth()
            gpu.xp.get_default_memory_pool().free_all_blocks()
        with gpu.watched():
            progress("compiling")
            load = Workload(gpu, sizes, options.seed)
            record["parts"] = measure_parts(gpu, load, record["ceilings"]["read_gb_s"], progress)
            record["parts"].append(measure_step(gpu, load, 120 if sizes.batch == 16 else None))
            one = Workload(gpu, replace(sizes, batch=1), options.seed)
            record["parts"].append(measure_step(gpu, one, 60))
        show("\n".join(part_lines(record["parts"])))
        with gpu.watched(300):
            progress("verify at each budget")
            verify_us = measure_verify(gpu, options.seed)
            step_us = {budget: record["parts"][-1]["cold_us"]["p50"] for budget in verify_us}
            step_us[0] = 0.0  # plain decoding has no step
            record["other_us"] = options.other_us
            record["budgets"] = budget_rows(verify_us, step_us, sizes, options.other_us)
    except NbverifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show("\n" + "\n".join(budget_lines(record["budgets"])))
    if options.plot is not None:
        draw(record, options.plot)
        show(f"written to {options.plot}")
    if options.json is not None:
        show(f"written to {save('tree', record, options.json or None)}")
    judged = [(row, row["us"] or row["cold_us"]) for row in record["parts"] if row.get("must_us")]
    missed = [row["part"] for row, us in judged if us["p50"] > row["must_us"]]
    if missed and "H200" in record["head"]["gpu"]:
        show("slower than they must be: " + ", ".join(missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
