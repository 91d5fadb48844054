"""What compiled kernels need: registers, spills, shared memory, instructions, blocks per SM; as rows and as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbverify.doctor import REGISTERS_STEP, SM_LIMITS, SYSTEM_SHARED_BYTES, WARP
from nbverify.kernels import geometry as geo
from nbverify.kernels.geometry import Geometry
from nbverify.spec import VerifySpec
from nbverify.tile_counts import SM_QUARTERS

if TYPE_CHECKING:
    from rich.console import Console

    from nbverify.compile import CompiledKernel

# Instruction class -> pattern of the PTX opcode.  f64 must be 0; 64-bit integers are slow.
INSTRUCTION_CLASSES = {
    "mma": r"(wg)?mma\.",
    "ldmatrix": r"ldmatrix\.",
    "async copies": r"cp\.(async|reduce)\.",
    "shared loads": r"ld\.shared",
    "shared stores": r"st\.shared",
    "global loads": r"ld\.global",
    "global stores": r"st\.global",
    "local memory": r"(ld|st)\.local",
    "fma": r"fma\.\w+(\.\w+)*",
    "64-bit integer": r"(add|sub|mul|mad|div|rem|min|max|neg|abs|sh[lr]|and|x?or|not|setp|selp)\.([\w.]*\.)?[sub]64",
}
F64 = re.compile(r"^\s+(?:@!?%p\d+\s+)?[a-z]\w*(?:\.\w+)*\.f64\b", re.MULTILINE)


def kernel_reports(
    spec: VerifySpec,
    geometry: Geometry,
    kernels: Sequence[CompiledKernel],
    cc: tuple[int, int],
    *,
    debug: bool,
    cached: bool,
    seconds: float,
) -> list[dict[str, Any]]:
    """What each kernel of one target needs."""
    steps = geo.steps(spec, geometry, debug=debug)
    reports = []
    for kernel, step in zip(kernels, steps, strict=True):
        r = kernel.resources
        shared = r.static_shared_bytes + step.shared_bytes
        blocks, limit = blocks_per_sm(cc, step.threads, r.registers, shared)
        reports.append(
            {
                "name": kernel.name,
                "target": kernel.target,
                "cooperative": kernel.cooperative,
                "threads": step.threads,
                "registers": r.registers,
                "spill_bytes": r.spill_bytes,
                "local_bytes": r.local_bytes,
                "stack_bytes": r.stack_bytes,
                "static_shared_bytes": r.static_shared_bytes,
                "dynamic_shared_bytes": step.shared_bytes,
                "blocks_per_sm": blocks,
                "blocks_limited_by": limit,
                "cubin_bytes": len(kernel.cubin),
                "instructions": count_instructions(kernel),
                "from_cache": cached,
                "seconds": round(seconds, 3),
            }
        )
    return reports


def count_instructions(kernel: CompiledKernel) -> dict[str, int]:
    """PTX instructions by class, as written: a loop's body counts once."""
    counts = {
        name: sum(n for opcode, n in kernel.resources.instructions.items() if re.match(pattern, opcode))
        for name, pattern in INSTRUCTION_CLASSES.items()
    }
    counts["f64"] = len(F64.findall(kernel.ptx))
    counts["all"] = sum(kernel.resources.instructions.values())
    return counts


def blocks_per_sm(cc: tuple[int, int], threads: int, registers: int, shared_bytes: int) -> tuple[int | None, str]:
    """(Co-resident blocks, what limits them), by the limits of the architecture; the plan asks the driver.

    Blocks is None for an architecture that is not in the table.

    A quarter of an SM has a quarter of the registers, for whole warps.  Before it spreads a block's warps over the
    quarters, the device asks for a whole group of four: what a block of 9 warps would need with 12 must be there.
    """
    limits = SM_LIMITS.get(cc)
    if limits is None:
        return None, "unknown architecture"
    if shared_bytes > limits.shared_optin_bytes:
        return 0, f"shared memory: {limits.shared_optin_bytes:,} bytes a block"
    warps = -(-threads // WARP)
    warp_registers = -(-registers * WARP // REGISTERS_STEP) * REGISTERS_STEP
    groups = -(-warps // SM_QUARTERS)
    if groups * SM_QUARTERS * warp_registers > limits.registers:
        return 0, f"registers: {limits.registers:,} a block, in groups of {SM_QUARTERS} warps"
    quarter_warps = limits.registers // SM_QUARTERS // warp_registers if registers else limits.max_threads
    by = {
        "registers": SM_QUARTERS * quarter_warps // warps,
        "shared memory": limits.shared_bytes // (shared_bytes + SYSTEM_SHARED_BYTES),
        "threads": limits.max_threads // (warps * WARP),
        "blocks": limits.max_blocks,
    }
    smallest = min(by, key=lambda name: by[name])
    return by[smallest], smallest


def show_compiled(console: Console, spec: VerifySpec, reports: list[dict[str, Any]]) -> None:
    """A column for each kernel and target."""
    from rich.table import Table
    from rich.text import Text

    kind = "MLA" if spec.shared_kv else "GQA"
    console.print(
        f"{kind}, {spec.num_q_heads} heads / {spec.num_kv_heads} KV, {spec.head_dim_qk} / {spec.head_dim_v} wide, "
        f"{spec.dtype}, KV {spec.kv_dtype}, mask {spec.mask.value}, split {spec.split}, reduction {spec.reduction}, "
        f"kernel {spec.kernel}, max_requests {spec.max_requests}",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for report in reports:
        table.add_column(f"{report['name'].removeprefix('nbverify_')} {report['target']}", justify="right")

    def row(name: str, values: list[str], bad: list[bool] | None = None) -> None:
        marks = bad or [False] * len(values)
        table.add_row(name, *(Text(v, "bold red" if b else "") for v, b in zip(values, marks, strict=True)))

    def numbers(key: str, *, must_be_zero: bool = False) -> tuple[list[str], list[bool]]:
        return [f"{r[key]:,}" for r in reports], [must_be_zero and r[key] != 0 for r in reports]

    row("registers", *numbers("registers"))
    row("spills, bytes", *numbers("spill_bytes", must_be_zero=True))
    row("local memory, bytes", *numbers("local_bytes", must_be_zero=True))
    row("stack, bytes", *numbers("stack_bytes"))
    row("static shared, bytes", *numbers("static_shared_bytes"))
    row("dynamic shared, bytes", *numbers("dynamic_shared_bytes"))
    row("threads", *numbers("threads"))
    row("cooperative launch", ["yes" if r["cooperative"] else "no" for r in reports])
    row(
        "blocks per SM, estimate",
        ["?" if r["blocks_per_sm"] is None else str(r["blocks_per_sm"]) for r in reports],
        [r["blocks_per_sm"] == 0 for r in reports],
    )
    row("  limited by", [r["blocks_limited_by"] for r in reports])
    row("cubin, bytes", *numbers("cubin_bytes"))
    for name in reports[0]["instructions"]:
        counts = [r["instructions"][name] for r in reports]
        row(f"PTX {name}", [f"{n:,}" for n in counts], [name == "f64" and n != 0 for n in counts])
    row("from", ["the cache" if r["from_cache"] else "compiled now" for r in reports])
    row("seconds", [f"{r['seconds']:.1f}" for r in reports])
    console.print(table)
