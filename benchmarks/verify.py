"""The kernels' device time, beside what the hardware allows and what others reach.

    python -m benchmarks.verify                                   Kimi K2.6 on 8 GPUs, a few trees and prefixes
    python -m benchmarks.verify --preset qwen3-8b --nodes 8,33 --prefix 4k,32k
    python -m benchmarks.verify --heads 8 --nodes 8 --prefix 4641,45118 --ragged
    python -m benchmarks.verify --kernel mma --schedule step --launches 61     a model's step in one graph
    python -m benchmarks.verify --suite must --peers --json       the tables the kernel is judged by; other kernels too
    python -m benchmarks.verify --suite neighbours,claims --json  what it promises beside them, a line each

Lists multiply out.  Every time is that of a graph replay with a cold L2 cache, shuffled slots at page size 1 and a
random tree, on a result that was compared with float64.  ``nbverify bench`` is the same.  The columns: measure.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import peers as peers_module
from benchmarks import shapes, table
from benchmarks.measure import Session, judge, judge_waste, timed
from benchmarks.shapes import Case, Claim, Goal, Shape
from benchmarks.timing import RESULTS, head_line, record_name
from nbverify import presets
from nbverify.errors import ArgumentError, NbverifyError
from nbverify.kernels.planner import limits_of
from nbverify.spec import DTYPES, KERNELS, KV_DTYPE_FP8, REDUCTIONS, SCHEDULES, SPLITS, Mask

SUITES = ("must", "neighbours", "claims")
DEFAULT_NODES, DEFAULT_PREFIX, DEFAULT_BATCH = (8, 33), (4096, 32768), (1,)
REPEATS = 30
PEER_BUDGET_US = 200_000  # a slow peer takes 20 ms a launch
PEER_SECONDS = 600  # some compile first
GOALS_ARE_FOR = "H200"
TO_RESULTS = ""  # --json without a file
INTERRUPTED = 130


def build_parser(prog: str = "python -m benchmarks.verify") -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--suite",
        type=_suites,
        metavar="NAME[,NAME]",
        help="must: the tables of goals; neighbours: one node more, one head less, 10 %% longer than those; "
        "claims: tree tax, shuffled slots, ragged batches, fp8, fixed splits, one schedule a step, rows "
        "wasted ...",
    )
    what.add_argument("--preset", type=_presets, metavar="NAME[,NAME]", help=f"of {', '.join(presets.PRESETS)}")
    what.add_argument("--heads", type=_sizes, metavar="N[,N]", help="query heads: a shape of your own")
    what.add_argument("--kv-heads", type=_sizes, metavar="N[,N]", help="K and V apart; without it MLA")
    what.add_argument("--head-dim", type=_head_dims, metavar="D[/DV]", help="576/512 for MLA, else 128")
    what.add_argument("--batch", type=_sizes, metavar="N[,N]", help="requests (1)")
    what.add_argument("--nodes", type=_sizes, metavar="N[,N]", help="nodes of each tree (8,33)")
    what.add_argument("--prefix", type=_sizes, metavar="N[,N]", help="prefix tokens, 4k = 4096 (4k,32k)")
    what.add_argument("--ragged", action="store_true", help="--prefix and --nodes are one batch, not a product")
    how = parser.add_argument_group("how it is computed")
    how.add_argument("--kernel", choices=KERNELS, help="default: the spec's")
    how.add_argument("--split", choices=SPLITS, default="balanced")
    how.add_argument("--reduction", choices=REDUCTIONS, default="grid_sync")
    how.add_argument("--schedule", choices=SCHEDULES, default="launch", help="step: once, before the launches")
    how.add_argument("--launches", type=_count, default=1, help="of one graph, as the layers of a model (1)")
    how.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    how.add_argument("--kv-dtype", choices=(*DTYPES, KV_DTYPE_FP8), help="default: --dtype")
    how.add_argument("--mask", choices=[mask.value for mask in Mask], default="full")
    how.add_argument("--repeats", type=_count, default=REPEATS, help=f"timed replays a case ({REPEATS})")
    how.add_argument("--seed", type=_count, default=0, help="of values, slots and trees (0)")
    out = parser.add_argument_group("beside it, and where it goes")
    out.add_argument(
        "--peers", nargs="?", const="", metavar="DIR",
        help=f"other kernels too; DIR of benchmarks/peers/stage.sh (or {peers_module.FOLDER_VARIABLE}, .peers)",
    )  # fmt: skip
    out.add_argument("--no-numpy", action="store_true", help="leave out the reference in numpy")
    out.add_argument("--csv", type=Path, metavar="FILE", help="a line a case")
    out.add_argument(
        "--json", nargs="?", const=TO_RESULTS, metavar="FILE",
        help="the record, written after every case; without FILE: benchmarks/results/",
    )  # fmt: skip
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="roofline, and time against prefix length")
    out.add_argument("--commit", metavar="SHA", help="for the record, where the sources are a copy without git")
    return parser


def main(
    argv: Sequence[str] | None = None, *, prog: str = "python -m benchmarks.verify", make_device: Any = None
) -> int:
    """Measure and print; 0 if every result was right and every goal and claim was met, else 1.

    ``make_device``: a stand-in for ``device.Gpu``, for tests.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = build_parser(prog).parse_args(arguments)
    try:
        return run(options, arguments, make_device or _gpu)
    except ArgumentError as error:
        return _fail(str(error), 2)
    except NbverifyError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _gpu() -> Any:
    from benchmarks.device import Gpu  # imports numba

    return Gpu()


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


# ---- what is measured


def usual_case(options: argparse.Namespace) -> Case:
    """The flags that say how; the shape is to be replaced.  Raises ArgumentError."""
    if options.launches < 1:
        raise ArgumentError("--launches", ">= 1", options.launches)
    if options.launches > 1 and options.peers is not None:
        raise ArgumentError("--launches", "1 beside --peers, which are launched once", options.launches)
    kv_dtype = None if options.kv_dtype == options.dtype else options.kv_dtype
    return Case(
        shapes.MUST[0].shape, dtype=options.dtype, kv_dtype=kv_dtype, mask=options.mask, split=options.split,
        reduction=options.reduction, schedule=options.schedule, kernel=options.kernel, launches=options.launches,
    )  # fmt: skip


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """The shapes that the flags describe; none for a suite alone.  Raises ArgumentError."""
    own = {"--heads": options.heads, "--kv-heads": options.kv_heads, "--head-dim": options.head_dim}
    given = [flag for flag, value in own.items() if value is not None]
    sized = options.batch or options.nodes or options.prefix or options.ragged
    if options.preset and given:
        raise ArgumentError(given[0], "no heads beside --preset, which has its own", "both")
    if given and options.heads is None:
        raise ArgumentError("--heads", "a number of query heads", None)
    if options.suite and not (options.preset or given or sized):
        return []
    if options.heads is None:
        models = [presets.preset(name) for name in options.preset or (shapes.KIMI,)]
    else:
        kv_heads: Sequence[int | None] = options.kv_heads or (None,)
        models = [shapes.model_of_flags(h, kv, options.head_dim) for h in options.heads for kv in kv_heads]
    batches = shapes.batches(
        options.batch or DEFAULT_BATCH, options.nodes or DEFAULT_NODES[: 1 if options.ragged else None],
        options.prefix or DEFAULT_PREFIX, ragged=options.ragged,
    )  # fmt: skip
    return [shapes.of_model(model, nodes, prefixes) for model in models for nodes, prefixes in batches]


@dataclass(frozen=True)
class Work:
    """What a run measures: shapes by flag, the cases that have goals, and the claims."""

    own: list[Case]
    goals: dict[Case, Goal]
    claims: list[Claim]

    @property
    def cases(self) -> list[Case]:
        """Those that get a row, each once."""
        return list(dict.fromkeys([*self.own, *self.goals, *shapes.cases_of(self.claims)]))

    @property
    def with_peers(self) -> list[Case]:
        """Those that other kernels are measured on."""
        claimed = [claim.measured for claim in self.claims if isinstance(claim.against, str)]
        return list(dict.fromkeys([*self.own, *self.goals, *claimed]))


def work_of(options: argparse.Namespace) -> Work:
    """What the flags ask for.  Raises ArgumentError."""
    usual, suites = usual_case(options), options.suite or ()
    goals = {replace(usual, shape=goal.shape): goal for goal in shapes.MUST} if "must" in suites else {}
    claims = shapes.neighbour_claims(usual) if "neighbours" in suites else []
    if "claims" in suites:
        claims += shapes.side_claims(usual, peers=options.peers is not None)
    work = Work([replace(usual, shape=shape) for shape in shapes_of(options)], goals, claims)
    for case in work.cases:
        case.spec()  # wrong flags are errors before anything is measured
    return work


# ---- the run


def run(options: argparse.Namespace, arguments: list[str], make_device: Callable[[], Any]) -> int:
    """Measure what the flags ask for."""
    work = work_of(options)
    cases, goals, claims = work.cases, work.goals, work.claims
    if options.plot is not None:
        from benchmarks import plot

        plot.require()
    folder = peers_module.folder_of(options.peers or None) if options.peers is not None else None
    device = make_device()
    record: dict[str, Any] = {
        "benchmark": "verify",
        "suite": ",".join(options.suite or ()),
        "arguments": arguments,
        "complete": False,
        "head": device.head(options.seed, options.commit),
    }
    keep = Keeper(options.json, record)
    clock = Stopwatch(record)
    show(head_line("nbverify verify", record["head"]))
    with progress_on_stderr(len(cases)) as progress:
        progress.say("compiling")
        session = Session(
            device, cases, seed=options.seed, repeats=options.repeats, ceilings={}, with_numpy=not options.no_numpy
        )
        session.precompile(progress.say)
        progress.say("measuring the ceilings")
        with device.watched():
            session.ceilings = record["ceilings"] = device.ceilings()
    show(ceilings_line(record["ceilings"], options) + f"; ready after {clock.lap('compile and ceilings'):.0f} s\n")
    judged = GOALS_ARE_FOR in record["head"]["gpu"] and goals_apply(options)
    columns = table.columns_for([{"label": case.label} for case in cases], goals=bool(goals))
    show(table.header(columns))
    record["rows"] = []
    with progress_on_stderr(len(cases)) as progress:
        for case in cases:
            progress.say(case.label)
            record["running"] = case.label  # stays in the file if the process is killed here
            keep.write()
            with device.watched():
                row = session.row(case)
            if case in goals:
                goal = goals[case]
                row["goal"] = {"must_us": goal.must_us, "aim_us": goal.aim_us, "peer": goal.peer}
                row["goal"] |= {"triton_us": goal.triton_us, "reached": table.verdict(row) if judged else ""}
            record["rows"].append(row)
            progress.step()
            show(table.line(columns, row))
    clock.lap("ours")
    if options.peers is not None:
        run_peers(session, work.with_peers, folder, record, keep)
        clock.lap("peers")
    record.pop("running", None)  # there is none where nothing was measured
    record["claims"] = [judged_claim(session, claim, record["head"]["sm"]) for claim in claims]
    if claims:
        show("")
        for text in table.claim_lines(record["claims"]):
            show(text)
    ok = conclude(record, judged=judged)
    record["complete"] = True
    keep.write()
    if options.csv is not None:
        table.write_csv(options.csv, record["rows"])
        show(f"written to {options.csv}")
    if options.plot is not None:
        plot.draw(record, options.plot)
        show(f"written to {options.plot}")
    if keep.path is not None:
        show(f"written to {keep.path}")
    show(", ".join(f"{name} {seconds:.0f} s" for name, seconds in record["seconds"].items()))
    return 0 if ok else 1


def goals_apply(options: argparse.Namespace) -> bool:
    """They are for a launch, bfloat16, balanced splits and a tree mask."""
    sixteen_bits = options.dtype == "bfloat16" and options.kv_dtype in (None, "bfloat16")
    balanced, once = options.split == "balanced", options.launches == 1
    return sixteen_bits and balanced and once and Mask(options.mask).reads_buffer


def judged_claim(session: Session, claim: Claim, cc: str) -> dict[str, Any]:
    """The row of a claim, on a device of this compute capability."""
    if claim.of == "waste":
        major, _, minor = cc.partition(".")
        return judge_waste(claim, limits_of((int(major), int(minor))))
    return judge(claim, session.row(claim.measured), against_of(session, claim))


def against_of(session: Session, claim: Claim) -> dict[str, Any] | None:
    """What a claim is compared with: another row, or a peer's entry."""
    if isinstance(claim.against, Case):
        return session.row(claim.against)
    return session.row(claim.measured).get("peers", {}).get(claim.against)


def run_peers(session: Session, cases: list[Case], folder: Path | None, record: dict[str, Any], keep: Keeper) -> None:
    """Other kernels on some cases, after ours: what they break cannot touch our figures."""
    device = session.device
    found, missing = device.load_peers(folder)
    titles = {peer.name: peer.title for peer in found}
    record["peers"] = {"titles": titles, "missing": missing}
    show("")
    for title, reason in missing.items():
        show(f"  not measured: {title}: {reason}")
    if not found:
        return
    clock = device.peer_clock()
    with progress_on_stderr(len(cases)) as progress:
        for case in cases:
            progress.say(f"peers: {case.label}")
            record["running"] = f"peers: {case.label}"
            keep.write()
            row = session.row(case)
            ours = row["us"]["p50"] if "us" in row else None
            row["peers"] = {}
            try:
                with device.watched(PEER_SECONDS), session.problem(case) as problem:
                    for name, entry in peers_module.measure_peers(
                        found, clock, problem, ours_us=ours,
                        timed=lambda measure: timed(measure, session.repeats, PEER_BUDGET_US),
                    ):  # fmt: skip
                        row["peers"][name] = entry
            except Exception as error:  # a peer that broke the CUDA context breaks whatever comes next
                record["peers"]["stopped"] = f"{case.label}: {peers_module.one_line(error)}"
                show(f"  peers stopped at {record['peers']['stopped']}")
                break
            progress.step()
    for text in table.peer_lines([session.row(case) for case in cases], titles):
        show(text)


def conclude(record: dict[str, Any], *, judged: bool) -> bool:
    """Say what was not reached; True if everything was."""
    failed = [row["label"] for row in record["rows"] if "failed" in row]
    missed = [row["label"] for row in record["rows"] if judged and table.verdict(row) == "MISS"]
    broken = [f"{claim['claim']}: {claim['measured']}" for claim in record["claims"] if claim["holds"] is False]
    with_goal = [row for row in record["rows"] if row.get("goal")]
    if with_goal and judged:
        reached = [table.verdict(row) for row in with_goal]
        show(f"\n{reached.count('aim')} of {len(reached)} reach the aim, {reached.count('must')} more what they must")
    elif with_goal:
        show(f"\nthe goals are for a launch in bfloat16, balanced, with a tree, on an {GOALS_ARE_FOR}: not judged here")
    for title, labels in (("failed", failed), ("slower than they must be", missed), ("do not hold", broken)):
        if labels:
            show(f"{len(labels)} {title}: {'; '.join(labels)}")
    return not (failed or missed or broken)


def ceilings_line(ceilings: dict[str, float], options: argparse.Namespace) -> str:
    """What the shares are shares of."""
    return (
        f"read {ceilings['read_gb_s']:,.0f} GB/s, copy {ceilings['copy_gb_s']:,.0f} GB/s, mma.sync "
        f"{ceilings['mma_tflop_s']:,.0f} TFLOP/s, two events with nothing between {ceilings['empty_us']:.1f} us; "
        f"{options.dtype}, KV {options.kv_dtype or options.dtype}, mask {options.mask}, split {options.split}, "
        f"{options.reduction}, schedule {options.schedule}, L2 cold, {options.repeats} replays"
    )


class Stopwatch:
    """Seconds of each part of a run, into the record."""

    def __init__(self, record: dict[str, Any]):
        self._seconds: dict[str, float] = record.setdefault("seconds", {})
        self._begin = time.perf_counter()

    def lap(self, name: str) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        self._seconds[name] = round(now - self._begin, 1)
        self._begin = now
        return self._seconds[name]


class Keeper:
    """Where the record goes: written after every case, so that an interrupted run leaves what it has."""

    def __init__(self, json_option: str | None, record: dict[str, Any]):
        self._record = record
        self.path: Path | None = None
        if json_option is not None:
            suite = record["suite"].replace(",", "-") or "shapes"
            self.path = Path(json_option) if json_option else RESULTS / record_name(f"verify-{suite}", record)
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self) -> None:
        """Under another name first: a run that is killed must not leave half a file."""
        if self.path is not None:
            unfinished = self.path.with_name(self.path.name + ".part")
            unfinished.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self.path)


def show(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


class _Progress:
    """A bar, or nothing where stderr is no terminal."""

    def __init__(self, bar: Any = None, task: Any = None):
        self._bar, self._task = bar, task

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)


@contextmanager
def progress_on_stderr(total: int) -> Iterator[_Progress]:
    """What is being done, and how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Progress()
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        yield _Progress(bar, bar.add_task("", total=total))


# ---- flags


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return shapes.sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _head_dims(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected 128, or 576/512 for K/V, got {text!r}")
    return int(parts[0]), int(parts[-1])


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {name!r}")
    return names


def _suites(text: str) -> tuple[str, ...]:
    return _names(text, SUITES)


def _presets(text: str) -> tuple[str, ...]:
    return _names(text, tuple(presets.PRESETS))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
