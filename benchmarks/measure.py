"""From cases to rows: plan, bind, capture, check against float64, time.  A row is a plain dict, as the JSON has it.

us          device time of a graph replay with a cold L2 cache: p10, p50, p90, min, repeats.  The graph holds the
            launches of the case, one if it does not say, behind the schedule of a step where the spec has one
gb_s        the least bytes of the shape, for each launch / us;  read_share: of the read measured in the same process
tflop_s     the least FLOP of each launch / us;  mma_share: of the mma.sync loop measured in the same process
limit_us    the larger of the two times that those ceilings allow (bound: "memory" or "tensor");  limit_share
host_us, replay_us    what the host pays for a launch, and for a replay of the graph
error       against float64: see check.Accuracy;  numpy_ms: see check.numpy_reference
fragments   16 rows each, of all requests and KV heads: what the rows need;  row_tiles: of the plan's height
padding     share of the row tiles' rows that no node needs
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import nbverify as nv
from benchmarks.check import Expected, WrongResult, numpy_reference
from benchmarks.problem import Pools, Problem, make_problem
from benchmarks.shapes import NEW_TILE_LIMIT, Case, Claim, Shape
from nbverify.errors import NbverifyError
from nbverify.kernels.planner import DeviceLimits, choose_tiles
from nbverify.kernels.tiles import FRAG_ROWS
from nbverify.spec import VerifySpec
from nbverify.tile_counts import wasted_mma

PLANS_KEPT = 8  # workspaces of split="fixed" are hundreds of MB
BUDGET_US = 500_000  # of device time for the repeats of one case: the plain kernel takes 30 ms a launch
HOST_BUDGET_US = 100_000
LEAST_REPEATS, LEAST_HOST_REPEATS, HOST_REPEATS = 5, 20, 300

Progress = Callable[[str], None]


class Session:
    """The cases of one run on one device, with the plans and pools that they share.

    ``ceilings``: "read_gb_s" and "mma_tflop_s".
    """

    def __init__(
        self,
        device: Any,
        cases: Sequence[Case],
        *,
        seed: int,
        repeats: int,
        ceilings: dict[str, float],
        with_numpy: bool = True,
    ):
        self.device, self.seed, self.repeats, self.ceilings = device, seed, repeats, ceilings
        self._with_numpy = with_numpy
        self._pools = Pools(device.xp, cases, seed)
        self._plans: OrderedDict[VerifySpec, nv.VerifyPlan] = OrderedDict()
        self._specs, self._refused = specs_of(cases)
        self._rows: dict[Case, dict[str, Any]] = {}

    def precompile(self, progress: Progress) -> None:
        """Compile what all cases need, in parallel, before anything is timed."""
        self.device.precompile(list(dict.fromkeys(self._specs.values())), progress)

    def row(self, case: Case) -> dict[str, Any]:
        """Measure a case, once.  A case that cannot run, or whose result is wrong, gives a row with ``failed``."""
        if case not in self._rows:
            try:
                self._rows[case] = self._measure(case)
            except (NbverifyError, MemoryError) as error:  # CuPy's lack of memory is a MemoryError
                first, _, _ = str(error).partition("\n")
                self._rows[case] = {**describe(case), "failed": f"{type(error).__name__}: {first}"}
        return self._rows[case]

    def problem(self, case: Case) -> Any:
        """The case's buffers, as a context."""
        return make_problem(self.device.xp, self._pools, case, self._spec(case), self.seed)

    def _spec(self, case: Case) -> VerifySpec:
        if case in self._refused:
            raise self._refused[case]
        return self._specs[case]

    def _plan(self, spec: VerifySpec) -> nv.VerifyPlan:
        if spec not in self._plans:
            while len(self._plans) >= PLANS_KEPT:
                self._plans.popitem(last=False)
            self._plans[spec] = self.device.plan(spec)
        self._plans.move_to_end(spec)
        return self._plans[spec]

    def _measure(self, case: Case) -> dict[str, Any]:
        device, plan = self.device, self._plan(self._spec(case))
        with self.problem(case) as problem:
            bound = plan.bind(**problem.arrays)
            graph = self._captured(problem, bound)
            device.replay(graph)
            accuracy = Expected(problem).compare(problem.arrays["out"], problem.arrays["lse"])
            accuracy.require(case.dtype)
            first = problem.arrays["out"].copy()
            device.synchronize()
            us = timed(lambda repeats: device.replay_times(graph, repeats), self.repeats)
            device.synchronize()
            if not bool((problem.arrays["out"] == first).all()):
                raise WrongResult("out: replays of one graph on the same buffers differ in their bits")
            calls = min(HOST_REPEATS, max(LEAST_HOST_REPEATS, int(HOST_BUDGET_US / us["p50"])))
            host = device.launch_times(bound, calls).summary()
            replay = device.graph_launch_times(graph, calls).summary()
            numpy_ms = numpy_reference(problem) if self._with_numpy else None
        return {
            **describe(case),
            "kernel": plan.spec.kernel,
            "us": us,
            **rates(case, us["p50"], self.ceilings),
            "host_us": host,
            "replay_us": replay,
            "error": accuracy.record(),
            "numpy_ms": numpy_ms,
            **tiling(case.shape, plan),
        }

    def _captured(self, problem: Problem, bound: nv.BoundVerify) -> Any:
        """The launches as a graph, captured and run once at other lengths where the case says so."""
        case, shape = problem.case, problem.case.shape

        def step(stream: Any) -> None:
            if case.schedule == "step":
                bound.schedule(stream)
            for _ in range(case.launches):
                bound.launch(stream)

        if case.capture_prefix is not None:
            problem.set_lengths((case.capture_prefix,) * shape.requests)
        graph = self.device.capture(step)
        if case.capture_prefix is not None:
            self.device.replay(graph)
            problem.set_lengths(shape.prefixes)
            problem.poison()
        return graph


def specs_of(cases: Sequence[Case]) -> tuple[dict[Case, VerifySpec], dict[Case, NbverifyError]]:
    """The spec of each case, or why there is none.

    A plan per model and number of nodes: the tile may depend on the nodes.  ``max_requests`` and ``max_kv_len`` are the
    largest of its cases, as a server's are; they size the workspace, and for "fixed" the cuts, so a case that is about
    the plan's limits (``capture_prefix``) shares its plan with no shorter one.
    """
    specs, refused = {}, {}
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(_group(case), []).append(case)
    for members in groups.values():
        requests, longest = max(case.shape.requests for case in members), max(case.longest for case in members)
        for case in members:
            try:
                specs[case] = case.spec(max_requests=requests, max_kv_len=longest)
            except NbverifyError as error:
                refused[case] = error
    return specs, refused


def _group(case: Case) -> Case:
    """The same for cases that share a plan."""
    heads = replace(case.shape, nodes=(max(case.shape.nodes),), prefixes=(0,))
    return replace(case, shape=heads, contiguous=False, launches=1)


def describe(case: Case) -> dict[str, Any]:
    """What is measured, for the record and for labels."""
    shape = case.shape
    return {
        "label": case.label,
        "requests": shape.requests,
        "nodes": _one_or_list(shape.nodes),
        "heads": shape.num_q_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dims": [shape.head_dim_qk, shape.head_dim_v],
        "mla": shape.shared_kv,
        "prefix": _one_or_list(shape.prefixes),
        "sm_scale": shape.sm_scale,
        "dtype": case.dtype,
        "kv_dtype": case.kv_dtype or case.dtype,
        "mask": case.mask,
        "split": case.split,
        "reduction": case.reduction,
        "schedule": case.schedule,
        "contiguous": case.contiguous,
        "captured_at": case.capture_prefix,
        "launches": case.launches,
        "flop": case.flop,
        "bytes": case.num_bytes,
    }


def _one_or_list(values: tuple[int, ...]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else list(values)


def rates(case: Case, us: float, ceilings: dict[str, float]) -> dict[str, Any]:
    """Bandwidth and arithmetic of a time, and their shares of the ceilings."""
    num_bytes, flop = case.num_bytes, case.flop
    memory_us = num_bytes / ceilings["read_gb_s"] / 1e3
    tensor_us = flop / ceilings["mma_tflop_s"] / 1e6
    limit_us = max(memory_us, tensor_us)
    return {
        "gb_s": num_bytes / us / 1e3,
        "read_share": memory_us / us,
        "tflop_s": flop / us / 1e6,
        "mma_share": tensor_us / us,
        "bound": "memory" if memory_us >= tensor_us else "tensor",
        "limit_us": limit_us,
        "limit_share": limit_us / us,
    }


def timed(measure: Callable[[int], Any], repeats: int, budget_us: float = BUDGET_US) -> dict[str, float]:
    """Summary of ``repeats`` repeats, or of as many as the budget allows, at least five."""
    first = measure(1).median
    return measure(max(LEAST_REPEATS, min(repeats, int(budget_us / first)))).summary()


def tiling(shape: Shape, plan: nv.VerifyPlan) -> dict[str, Any]:
    """How the plan cuts the shape, and what its kernels take."""
    report = plan.report()
    rows = report.geometry.rows_per_tile
    group = shape.num_q_heads // shape.num_kv_heads
    tiles = [shape.num_kv_heads * -(-n * group // rows) for n in shape.nodes]
    return {
        "fragments": sum(shape.num_kv_heads * -(-n * group // FRAG_ROWS) for n in shape.nodes),
        "row_tile": rows,
        "key_tile": report.geometry.keys_per_tile,
        "row_tiles": sum(tiles),
        "padding": 1 - shape.rows / (sum(tiles) * rows),
        "grid": report.grid,
        "threads": report.geometry.threads,
        "shared_bytes": report.shared_bytes,
        "registers": [kernel.resources.registers for kernel in report.kernels],
        "spill_bytes": [kernel.resources.spill_bytes for kernel in report.kernels],
    }


# ---- claims


def judge(claim: Claim, measured: dict[str, Any], against: dict[str, Any] | None) -> dict[str, Any]:
    """A claim's row.  ``against``: the other case's row or a peer's entry; None or a failed one: nothing to compare."""
    other = claim.against if isinstance(claim.against, str) else claim.against.label
    found = _unjudged(claim, other)
    reason = next((row["failed"] for row in (measured, against) if row and "failed" in row), None)
    if against is None or reason is not None:
        return {**found, "why_not": reason or "not measured"}
    if claim.of == "share":
        found["figures"] = [measured["limit_share"], against["limit_share"]]
        found["new_row_tile"] = any(measured[name] > against[name] for name in ("fragments", "row_tiles"))
        if found["new_row_tile"]:
            found["limit"] = min(claim.limit, NEW_TILE_LIMIT)
    else:
        found["figures"] = [measured["us"]["p50"], against["us"]["p50"]]
    found["ratio"] = found["figures"][0] / found["figures"][1]
    found["holds"] = found["ratio"] >= found["limit"] if found["at_least"] else found["ratio"] <= found["limit"]
    return found


def judge_waste(claim: Claim, limits: DeviceLimits) -> dict[str, Any]:
    """The row of a claim of "waste": its figures are the rows of the mma, and those needed, of the worst tree.

    Each number of nodes has the tile that a plan for so many has on a device with these limits.
    """
    if isinstance(claim.against, str):
        raise TypeError(f"{claim.name}: against must be a case, got {claim.against!r}")
    shape, found = claim.measured.shape, []
    for nodes in range(shape.nodes[0], claim.against.shape.nodes[0] + 1):
        spec = replace(claim.measured, shape=replace(shape, nodes=(nodes,) * shape.requests)).spec()
        rows = nodes * spec.group
        found.append((wasted_mma(choose_tiles(spec, limits), rows), rows, nodes))
    waste, rows, nodes = max(found)
    return {
        **_unjudged(claim, f"to {found[-1][2]} nodes; worst {nodes}"),
        "figures": [rows / (1 - waste), rows],
        "ratio": waste,
        "holds": waste <= claim.limit,
    }


def _unjudged(claim: Claim, against: str) -> dict[str, Any]:
    return {
        "claim": claim.name, "measured": claim.measured.label, "against": against, "of": claim.of,
        "limit": claim.limit, "at_least": claim.at_least or claim.of == "share", "figures": None, "ratio": None,
        "holds": None,
    }  # fmt: skip
