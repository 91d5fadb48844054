"""The command line: ``nbverify demo | doctor | compile | tree | generate | bench``.

Exit codes: 0 it worked; 1 it did not (a check failed, something is broken, an error); 2 wrong usage; 130 interrupted.
Whatever is heavy is imported inside a command, so that ``--help`` is quick and ``doctor`` runs on a broken machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbverify
from nbverify import presets
from nbverify.configurations import SPECS
from nbverify.errors import ArgumentError, NbverifyError
from nbverify.kernels.planner import geometry_of, limits_of
from nbverify.spec import DTYPES, KERNELS, KV_DTYPE_FP8, REDUCTIONS, SCHEDULES, SPLITS, Mask, VerifySpec

if TYPE_CHECKING:
    from nbverify.compile import CompiledKernel

DEFAULT_PRESET = "kimi-k2.6-tp8"
ALL_KINDS = "all"  # of --report
FAILED = 1
WRONG_USAGE = 2  # as argparse has it
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ArgumentError as error:
        return fail(str(error), WRONG_USAGE)
    except NbverifyError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except ImportError as error:  # numba says in many lines which numpy it would have liked
        reason = str(error).strip().partition("\n")[0]
        return fail(f"{reason} (type `nbverify doctor` to see what is wrong with this installation)")
    except KeyboardInterrupt:
        return INTERRUPTED


def fail(message: str, code: int = FAILED) -> int:
    """Say it in red on stderr; the exit code."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), (message, "red")))
    return code


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="nbverify", description="Tree-verify attention for speculative decoding, in readable Numba-CUDA Python."
    )
    parser.add_argument("--version", action="version", version=f"nbverify {nbverify.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_demo(commands)
    add_doctor(commands)
    add_compile(commands)
    add_tree(commands)
    add_generate(commands)
    add_bench(commands)
    return parser


# --- demo ------------------------------------------------------------------------------------------------------------


def add_demo(commands: Any) -> None:
    """Flags of ``demo``."""
    parser = commands.add_parser(
        "demo",
        help="verify a real draft tree, and check every number",
        description="Verify a real draft tree (SmolLM2-135M) on the GPU, or without one in the emulator, and compare "
        "with float64 and with the model's own output.  On a GPU also the shape of Kimi K2.6 at 32k tokens, timed.",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "gpu", "emulator"),
        default="auto",
        help="auto: the GPU; the emulator only where there is none (default)",
    )
    parser.add_argument("--seed", type=_not_negative, default=0, help="of the emulator's schedule and of random values")
    parser.add_argument("--nodes", type=int, metavar="N", help="only the first N nodes of the tree: quicker to emulate")
    parser.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        default="grid_sync",
        help="two_launch: for a GPU, or a share of one, that refuses cooperative launches",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run_demo)


def run_demo(arguments: argparse.Namespace) -> int:
    """``nbverify demo``."""
    from rich.console import Console
    from rich.text import Text

    from nbverify import demo, doctor
    from nbverify.fixture import load_fixture

    console, status = Console(), Console(stderr=True)
    layer = demo.first_nodes(load_fixture(), arguments.nodes)
    if arguments.device == "emulator":
        device, why = "emulator", "asked for"
    else:
        device, why = demo.choose_device(arguments.device, doctor.gather_facts())
    if not arguments.json:
        demo.show_tree(console, layer)
        console.print(Text.assemble("running on: ", (device, "bold"), f", {why}\n"))
    options = {"seed": arguments.seed, "reduction": arguments.reduction}
    runs = []
    for run in (demo.run_fixture, demo.run_kimi) if device == "gpu" else (demo.run_fixture,):
        done = demo.run_fixture(layer, device, console=status, **options) if run is demo.run_fixture else run(**options)
        runs.append(done)
        if not arguments.json:
            demo.show_run(console, done)
    passed = all(run.passed for run in runs)
    if arguments.json:
        print(json.dumps({"device": device, "passed": passed, "runs": [run.record() for run in runs]}, indent=2))
    else:
        console.print("[bold green]PASS[/bold green]" if passed else "[bold red]FAIL[/bold red]")
    return 0 if passed else 1


# --- doctor ----------------------------------------------------------------------------------------------------------


def add_doctor(commands: Any) -> None:
    """Flags of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed, what is wrong, and what to type",
        description="Check Python, packages, toolkit, driver and GPUs.  Exit code 1 if something is broken; "
        "a machine without a GPU is not.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """``nbverify doctor``."""
    from nbverify import doctor

    facts = doctor.gather_facts()
    findings = doctor.examine(facts)
    sound = doctor.can_run(findings)
    if arguments.json:
        record = {
            "ok": sound,
            "findings": [dataclasses.asdict(f) for f in findings],
            "facts": dataclasses.asdict(facts),
        }
        print(json.dumps(record, indent=2))
        return 0 if sound else 1

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {doctor.OK: "green", doctor.WARN: "yellow", doctor.FAIL: "bold red"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        text = Text(finding.detail)
        if finding.fix:
            text.append("\ntype: ", "dim").append(finding.fix, "bold")
        table.add_row(Text(finding.status, colours[finding.status]), finding.name, text)
    console = Console()
    console.print(table)
    if not sound:
        console.print("[bold red]broken[/bold red]: see the lines marked fail", highlight=False)
    elif facts.gpus:
        console.print("[green]ready[/green]: nbverify demo", highlight=False)
    else:
        console.print(
            "[green]ready[/green] without a GPU: nbverify demo runs in the emulator, nbverify compile works",
            highlight=False,
        )
    return 0 if sound else 1


# --- compile ---------------------------------------------------------------------------------------------------------

# Flags that are fields of VerifySpec, given through to it: name -> type.  Unset ones keep the preset's value.
SPEC_FLAGS: dict[str, type] = {
    "max_requests": int,
    "max_nodes": int,
    "max_kv_len": int,
    "sm_scale": float,
    "dtype": str,
    "kv_dtype": str,
    "mask": str,
    "split": str,
    "reduction": str,
    "schedule": str,
    "kernel": str,
}
CHOICES: dict[str, Sequence[str]] = {
    "dtype": DTYPES,
    "kv_dtype": (*DTYPES, KV_DTYPE_FP8),
    "mask": [mask.value for mask in Mask],
    "split": SPLITS,
    "reduction": REDUCTIONS,
    "schedule": SCHEDULES,
    "kernel": KERNELS,
}
# What --mla and --gqa start from; sizes beside max_requests do not change the code.
OWN_SHAPE_SIZES: dict[str, Any] = {"max_requests": 16, "max_nodes": 33, "max_kv_len": 262_144}


def add_compile(commands: Any) -> None:
    """Flags of ``compile``."""
    parser = commands.add_parser(
        "compile",
        help="compile for any GPU, without one: registers, shared memory, PTX, cubin",
        description="Compile the kernels of a spec for a compute capability and report what they need.",
    )
    parser.add_argument(
        "--cc", action="append", required=True, metavar="X.Y", help="compute capability such as 12.0; may be repeated"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--preset", choices=presets.PRESETS, help=f"a model of nbverify/presets.py (default {DEFAULT_PRESET})"
    )
    shape.add_argument(
        "--mla", type=_integers, metavar="HEADS[,DQK,DV]", help="a shape of your own with shared K and V"
    )
    shape.add_argument("--gqa", type=_integers, metavar="HQ,HKV,D[,DV]", help="your own shape, K and V apart")
    for name, kind in SPEC_FLAGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, choices=CHOICES.get(name), help="as in VerifySpec"
        )
    parser.add_argument("--debug", action="store_true", help="with the input checks of VerifyPlan(debug=True)")
    parser.add_argument("--ptx", type=Path, metavar="FILE", help="write the PTX")
    parser.add_argument("--cubin", type=Path, metavar="FILE", help="write the cubin")
    parser.add_argument(
        "--report",
        nargs="?",
        const=ALL_KINDS,
        metavar="KIND[,KIND]",
        help=f"every tile of the tensor-core kernel instead of one spec, and the modelled time of Kimi K2.6's shapes; "
        f"of {', '.join(SPECS)} (all)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run_compile)


def run_compile(arguments: argparse.Namespace) -> int:
    """``nbverify compile``."""
    from rich.console import Console

    from nbverify import compile
    from nbverify.report import kernel_reports, show_compiled

    if arguments.report is not None:
        return run_report(arguments)
    spec = spec_of(arguments)
    targets = [compile.target_of(cc) for cc in arguments.cc]
    check_output("--ptx", arguments.ptx)
    check_output("--cubin", arguments.cubin)
    reports: list[dict[str, Any]] = []
    compiled: list[CompiledKernel] = []
    with Console(stderr=True).status("") as status:
        for target in targets:
            lines: list[str] = []  # compile_spec says something only when it compiles

            def say(line: str, lines: list[str] = lines) -> None:
                lines.append(line)
                status.update(f"{line} (10 to 60 s)")

            start = time.perf_counter()
            geometry = geometry_of(spec, limits_of((target.major, target.minor)))
            kernels = compile.compile_spec(spec, target, geometry, debug=arguments.debug, progress=say)
            seconds = time.perf_counter() - start
            compiled += kernels
            reports += kernel_reports(
                spec, geometry, kernels, target.cc[:2], debug=arguments.debug, cached=not lines, seconds=seconds
            )
    for path, contents in ((arguments.ptx, "ptx"), (arguments.cubin, "cubin")):
        if path is not None:
            write_outputs(path, compiled, contents)
    if arguments.json:
        record = {"spec": _plain(spec), "sources": compile.source_hash(), "kernels": reports}
        print(json.dumps(record, indent=2))
    else:
        show_compiled(Console(), spec, reports)
    bad = [report for report in reports if report["instructions"]["f64"]]
    if bad:
        names = ", ".join(f"{report['name']} for {report['target']}" for report in bad)
        return fail(f"float64 instructions in {names}: a literal without float32(), or a Python float")
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """``nbverify compile --report``."""
    from rich.console import Console

    from nbverify import tile_report

    for flag in (*SPEC_FLAGS, "preset", "mla", "gqa", "debug", "ptx", "cubin"):
        if getattr(arguments, flag) not in (None, False):
            raise ArgumentError("--report", f"no --{flag.replace('_', '-')}: it is about all tiles", "both")
    kinds = tuple(SPECS) if arguments.report == ALL_KINDS else tuple(arguments.report.split(","))
    records = []
    with Console(stderr=True).status("") as status:
        for cc in arguments.cc:
            records.append(
                tile_report.make_report(cc, kinds, progress=lambda line: status.update(f"{line} (10 to 60 s)"))
            )
    if arguments.json:
        print(json.dumps(records, indent=2))
    else:
        for record in records:
            tile_report.show_report(Console(), record)
    return 0


def check_output(flag: str, path: Path | None) -> None:
    """Refuse, before a minute of compiling, what cannot be written afterwards."""
    if path is not None and (os.path.isdir(path) or not os.path.isdir(path.parent)):
        raise ArgumentError(flag, "a file in a directory that exists", path)


def spec_of(arguments: argparse.Namespace) -> VerifySpec:
    """The spec that the flags describe."""
    given = {name: getattr(arguments, name) for name in SPEC_FLAGS if getattr(arguments, name) is not None}
    if arguments.mla is None and arguments.gqa is None:
        spec = presets.preset(arguments.preset or DEFAULT_PRESET)
        if "dtype" in given:
            given.setdefault("kv_dtype", None)  # see the head of presets.py
        return dataclasses.replace(spec, **given)
    options = {**OWN_SHAPE_SIZES, **given}
    if arguments.mla is not None:
        if len(arguments.mla) not in (1, 3):
            raise ArgumentError("--mla", "HEADS or HEADS,DQK,DV", arguments.mla)
        heads, qk, v = arguments.mla if len(arguments.mla) == 3 else (*arguments.mla, 576, 512)
        options.setdefault("sm_scale", qk**-0.5 if qk > 0 else 1.0)
        return VerifySpec.mla(heads, head_dim_qk=qk, head_dim_v=v, **options)
    if len(arguments.gqa) not in (3, 4):
        raise ArgumentError("--gqa", "HQ,HKV,D or HQ,HKV,D,DV", arguments.gqa)
    q_heads, kv_heads, qk, *rest = arguments.gqa
    options.setdefault("sm_scale", qk**-0.5 if qk > 0 else 1.0)
    return VerifySpec.gqa(q_heads, kv_heads, qk, head_dim_v=rest[0] if rest else None, **options)


def write_outputs(path: Path, kernels: Sequence[CompiledKernel], contents: str) -> None:
    """One kernel: the file as named.  Several: ``name.<kernel>.<target>.suffix``."""
    for kernel in kernels:
        data = kernel.ptx.encode() if contents == "ptx" else kernel.cubin
        own = path if len(kernels) == 1 else path.with_name(f"{path.stem}.{kernel.name}.{kernel.target}{path.suffix}")
        own.write_bytes(data)


# --- tree ------------------------------------------------------------------------------------------------------------

# Of random drafts: flag -> (default, what it is).
RANDOM_DRAFTS: dict[str, tuple[int, str]] = {
    "seed": (0, "of random drafts"),
    "depth": (4, "positions drafted"),
    "top_k": (3, "candidates a position"),
    "budget": (12, "drafted nodes at most"),
}


def add_tree(commands: Any) -> None:
    """Flags of ``tree``."""
    parser = commands.add_parser(
        "tree",
        help="draw a draft tree and its mask, in the terminal or as PNG",
        description="Draw a draft tree with log-probabilities, its accepted path in green, and the ancestor mask: of a "
        "JSON file (its format: docs/tree_build.md), or DDTree's best-first tree of random drafts.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="JSON; without it, random drafts")
    for name, (default, what) in RANDOM_DRAFTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_not_negative, metavar="N", help=f"{what} ({default})")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture instead (needs matplotlib)")
    parser.set_defaults(run=run_tree)


def run_tree(arguments: argparse.Namespace) -> int:
    """``nbverify tree``."""
    from rich.console import Console

    from nbverify.tree import draw

    given = {name: getattr(arguments, name) for name in RANDOM_DRAFTS if getattr(arguments, name) is not None}
    if arguments.file is not None and given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise ArgumentError(flag, "no FILE beside it: it is about random drafts", arguments.file)
    check_output("--png", arguments.png)
    if arguments.file is not None:
        drawing = draw.read_drawing(arguments.file)
    else:
        drawing = draw.random_drawing(**{name: default for name, (default, _) in RANDOM_DRAFTS.items()} | given)
    if arguments.png is not None:
        draw.save_png(drawing, arguments.png)
    else:
        draw.show(Console(), drawing, "the prefix, and:")
    return 0


# --- commands of the checkout -----------------------------------------------------------------------------------------


def add_generate(commands: Any) -> None:
    """``generate``."""
    add_handed_on(
        commands, "generate", "let a small language model answer, decoded with draft trees (in a checkout)"
    ).set_defaults(run=run_generate)


def add_bench(commands: Any) -> None:
    """``bench``."""
    add_handed_on(
        commands, "bench", "time the kernels on a GPU beside its limits and other kernels (in a checkout)"
    ).set_defaults(run=run_bench)


def add_handed_on(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A command that hands everything behind it on, ``--help`` too: no character of it begins a flag of this parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, add_help=False, prefix_chars="\0")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    return parser


def run_generate(arguments: argparse.Namespace) -> int:
    """``nbverify generate``: ``examples/smollm2/generate.py``."""
    find_in_checkout("generate", "the example model is", "examples/smollm2/generate.py", "examples.smollm2.generate")
    from examples.smollm2 import generate

    return generate.main(arguments.flags, prog="nbverify generate")


def run_bench(arguments: argparse.Namespace) -> int:
    """``nbverify bench``: ``benchmarks/verify.py``."""
    find_in_checkout("bench", "the benchmarks are", "benchmarks/verify.py", "benchmarks.verify")
    from benchmarks import verify

    return verify.main(arguments.flags, prog="nbverify bench")


def find_in_checkout(command: str, they_are: str, file: str, module: str) -> None:
    """Make the modules of the checkout that this package lies in importable; NbverifyError outside one."""
    root = Path(nbverify.__file__).resolve().parents[1]
    if not (root / file).is_file():
        raise NbverifyError(
            f"{command}: {they_are} part of the source tree and not of the installed package, and there is no "
            f"{file} in {root}: run it in a checkout (python -m {module}), or after `pip install -e CHECKOUT`"
        )
    sys.path.insert(0, str(root))


# --- parsing ---------------------------------------------------------------------------------------------------------


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {text!r}") from None


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def _plain(spec: VerifySpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
