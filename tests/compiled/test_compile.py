"""Every kernel builds for every target, keeps to its registers, and has no float64; and how targets are named.

Compiled without a GPU.  ``make test`` takes one of each kind; the other combinations are marked slow.
"""

import itertools
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from numba import cuda, float32, int32
from support.kernels import compile_for, geometry_for, on_each_kernel, on_kernels, parametrize_specs

import nbverify as nv
from benchmarks.compiled import SOUND, resource_problems
from nbverify import compile, contract
from nbverify.compile import OVERRIDE, Target, compile_body, target_of
from nbverify.errors import ArgumentError, CompileError
from nbverify.report import kernel_reports

ROOT = Path(__file__).parents[2]
SLOPE = float32(0.0625)
RTX_SHARED_BYTES = 101_376  # of a block on sm_120

LIMITS = {"max_requests": 16, "max_nodes": 33, "max_kv_len": 262_144, "sm_scale": 0.144680, "kernel": "simt"}


def slope_mod(score, request, head, node, key):
    """Nothing but float32 and int32: the constant is wrapped, the product of two int32 as well."""
    return score - SLOPE * float32(int32(head + int32(1))) * float32(key)


SPECS = {
    "mla": nv.VerifySpec.mla(8, **LIMITS),
    "gqa128": nv.VerifySpec.gqa(32, 8, 128, mask="tree", split="fixed", **LIMITS),
    "fp8": nv.VerifySpec.mla(16, kv_dtype="float8_e4m3fn", prefix_visible=False, **LIMITS),
    "fp16 packed score_mod": nv.VerifySpec.gqa(6, 2, 64, dtype="float16", mask="packed", score_mod=slope_mod, **LIMITS),
    "two_launch debug": nv.VerifySpec.gqa(32, 8, 128, mask="causal", reduction="two_launch", **LIMITS),
}
TARGETS = ("8.0", "9.0", "12.0")
IN_MAKE_TEST = {
    ("mla", "12.0"),
    ("gqa128", "9.0"),
    ("fp8", "8.0"),
    ("fp16 packed score_mod", "12.0"),
    ("two_launch debug", "9.0"),  # three kernels: check, verify_split, verify_merge
}
# The tiles of the tensor-core kernel have a test of their own, test_tiles.py: here are its other masks and reductions.
MMA = ("gqa128", "fp16 packed score_mod", "two_launch debug")
MMA_IN_MAKE_TEST = {("gqa128", "9.0"), ("fp16 packed score_mod", "8.0")}
NAMES = {
    False: ["nbverify_verify"],
    True: ["nbverify_check", "nbverify_verify_split", "nbverify_verify_merge"],
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """So that what is tested is what compiles now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(OVERRIDE, raising=False)


def combinations():
    for name, given in SPECS.items():
        for spec, cc in itertools.product(on_kernels(given), TARGETS):
            if spec.kernel == "mma" and name not in MMA:
                continue
            is_quick = (name, cc) in (MMA_IN_MAKE_TEST if spec.kernel == "mma" else IN_MAKE_TEST)
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(name, spec, cc, marks=marks, id=f"{name} {cc} {spec.kernel}")


def machine_of(cubin):
    """``sm_120a``, from the flags in a cubin's ELF header (64 bit, little endian), in both of NVIDIA's layouts."""
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    number, is_specific = (flags & 0xFF, flags & 0x800) if cubin[8] < 8 else (flags >> 8 & 0xFF, flags & 0x8)
    return f"sm_{number}" + ("a" if is_specific else "")


def problems_of(kernel, target, report):
    """All that is wrong with a kernel, as text.  ``report``: its own, of ``kernel_reports``."""
    arrays = re.findall(r"\.local\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\]", kernel.ptx)
    checks = {
        f"target {kernel.target}": kernel.target == target.name,
        f"PTX is not for {target.name}": re.search(rf"^\.target {target.name}\b(?!a)", kernel.ptx, re.M) is not None,
        "cubin is no ELF": kernel.cubin[:4] == b"\x7fELF" and kernel.entry.encode() in kernel.cubin,
        f"cubin is for {machine_of(kernel.cubin)}": machine_of(kernel.cubin) == target.name,
        "float64": ".f64" not in kernel.ptx and not any("f64" in opcode for opcode in kernel.resources.instructions),
        f"arrays in local memory, of {arrays} bytes": not arrays,
    }
    return [f"{kernel.name}: {text}" for text, holds in checks.items() if not holds] + resource_problems(report, SOUND)


@pytest.mark.timeout(300)  # seconds on an idle machine, a minute on a busy one
@pytest.mark.parametrize("name, spec, cc", list(combinations()))
def test_kernels(name, spec, cc):
    target = target_of(cc)
    debug = spec.reduction == "two_launch"
    kernels = compile_for(spec, target, debug=debug)
    cc = (target.major, target.minor)
    assert [k.name for k in kernels] == NAMES[debug]
    assert [k.cooperative for k in kernels] == [spec.reduction == "grid_sync"] * len(kernels)
    reports = kernel_reports(spec, geometry_for(spec, cc), kernels, cc, debug=debug, cached=False, seconds=0.0)
    problems = [problems_of(kernel, target, report) for kernel, report in zip(kernels, reports, strict=True)]
    assert not any(problems), "\n".join(itertools.chain(*problems))


def test_an_array_in_local_memory_is_reported():
    """A gate on a number that cannot be anything but 0 would be none."""

    def indexes_an_array(args):
        values = cuda.local.array(64, float32)
        for i in range(64):
            values[i] = args.v_scale * float32(i)
        for i in range(args.num_tokens):
            values[(args.num_slots + i) % 64] += values[i * 7 % 64]
        args.lse[0] = values[args.num_requests % 64]

    parameters = contract.parameters(SPECS["mla"])
    kernel = compile_body(indexes_an_array, parameters, target_of("8.0"), launch_bounds=(32, 1), cooperative=False)
    assert kernel.resources.local_bytes >= 64 * 4


@parametrize_specs(SPECS)
def test_dynamic_shared_memory_fits_an_rtx(spec):
    """By the plan's formula, which is what the launch asks for."""
    plan = nv.VerifyPlan(spec, device="emulator", shared_limit=RTX_SHARED_BYTES)
    assert 0 < plan.report().shared_bytes <= RTX_SHARED_BYTES


def bare_mod(score, request, head, node, key):
    return score * 0.1  # not 0.5: its product is the same in float32, which the compiler knows


@pytest.mark.slow
@pytest.mark.parametrize("score_mod, has_float64", [(bare_mod, True), (slope_mod, False)])
@on_each_kernel(SPECS["two_launch debug"])
def test_a_bare_float_in_a_score_mod_is_float64(spec, score_mod, has_float64):
    """It compiles, and is right; it costs double precision in the inner loop.  Hence float32(...) in every example."""
    kernels = compile_for(replace(spec, score_mod=score_mod), target_of("12.0"))
    assert any(".f64" in k.ptx for k in kernels) == has_float64


@on_each_kernel(SPECS["two_launch debug"])
def test_score_mod_that_does_not_compile_is_named(spec):
    def score_mod(score, request, head, node, key):
        return score + unknown_name  # noqa: F821

    with pytest.raises(nv.CompileError, match="unknown_name"):
        compile_for(replace(spec, score_mod=score_mod), target_of("12.0"))


# ---- targets


@pytest.mark.parametrize(
    "cc, name",
    [
        *((cc, "sm_120a") for cc in ("12.0", "120", "sm_120", "sm_120a", "12.0a", (12, 0), (12, 0, "a"))),
        *((cc, "sm_90a") for cc in ("9.0", "90", "sm_90", "sm_90a", (9, 0), (9, 0, "a"))),
        ("10.3", "sm_103a"),
        ("sm_121", "sm_121a"),
        *((cc, "sm_80") for cc in ("8.0", "80", "sm_80", (8, 0))),
        ("8.6", "sm_86"),
        ((8, 9), "sm_89"),
    ],
)
def test_target_names(cc, name):
    target = target_of(cc)
    assert target.name == name
    assert target.cc == (target.major, target.minor, *(["a"] if name.endswith("a") else []))


@pytest.mark.parametrize(
    "cc",
    [
        *(None, "", "hopper", "12", "12.", ".0", "12.0.0", "12.0b", "12.0 ", "sm_", "sm120", "-9.0", "7.5", "sm_75"),
        *((7, 5), (12,), (), (12, 0, "a", 0), ("12", "0"), (12.0, 0), [12, 0], 12.0, 12, 120, True, b"12.0"),
    ],
    ids=repr,
)
def test_no_target(cc):
    with pytest.raises(ArgumentError, match=r"^cc: expected "):
        target_of(cc)


@pytest.mark.parametrize("cc", [(True, 0), (12, False), (12, -1), (12, 0, "x"), (12, 0, None), (9, 10)])
def test_no_target_though_it_looks_like_one(cc):
    with pytest.raises(ArgumentError, match=r"^cc: expected "):
        target_of(cc)


@pytest.mark.parametrize("cc", [None, "12.0", "sm_120a", (12, 0), (12, 0, "a")])
def test_override_drops_the_suffix(cc, monkeypatch):
    monkeypatch.setenv(OVERRIDE, "12.0")
    assert target_of(cc) == Target(12, 0, "")
    assert target_of(cc).name == "sm_120"
    assert target_of(cc).cc == (12, 0)


def test_override_contradicts(monkeypatch):
    monkeypatch.setenv(OVERRIDE, "12.0")
    with pytest.raises(ArgumentError, match=rf"^cc: expected 12\.0, which {OVERRIDE} sets .* got 9\.0"):
        target_of("9.0")


def test_empty_override_is_none(monkeypatch):
    monkeypatch.setenv(OVERRIDE, "")
    assert target_of("12.0").name == "sm_120a"
    with pytest.raises(ArgumentError, match=r"^cc: "):
        target_of(None)


@pytest.mark.parametrize("override", ["rtx", "7.5"])
@pytest.mark.parametrize("cc", [None, "12.0"])
def test_override_that_is_no_target(cc, override, monkeypatch):
    monkeypatch.setenv(OVERRIDE, override)
    with pytest.raises(ArgumentError):
        target_of(cc)


def test_a_target_that_the_toolkit_does_not_have():
    """Whichever library refuses it, the error is ours."""
    with pytest.raises(CompileError, match=r"99\.9|sm_999a"):
        compile_for(SPECS["mla"], target_of("99.9"))


def tiny(args):
    args.lse[0] = args.v_scale


@pytest.mark.parametrize("code", [b"", b"no LTO-IR", None], ids=["nothing", "text", "cut short"])
def test_a_linker_error_is_a_compile_error(monkeypatch, code):
    compile_lto = compile._compile_lto
    monkeypatch.setattr(compile, "_compile_lto", lambda *given: compile_lto(*given)[:200] if code is None else code)
    with pytest.raises(CompileError, match=r"^linking for sm_80: "):
        compile_body(
            tiny, contract.parameters(SPECS["mla"]), target_of("8.0"), launch_bounds=(32, 1), cooperative=False
        )


def test_a_linker_report_without_the_kernel_is_a_compile_error(monkeypatch):
    """Instead of a resource report of zeros."""
    link = compile._link
    monkeypatch.setattr(compile, "_link", lambda *given: (link(*given)[0], "info    : 0 bytes gmem"))
    with pytest.raises(CompileError, match=r"^nbverify_tiny: the linker's report has no line for it"):
        compile_body(
            tiny, contract.parameters(SPECS["mla"]), target_of("8.0"), launch_bounds=(32, 1), cooperative=False
        )


@pytest.mark.parametrize("cooperative", [True, False])
def test_who_launches_says_what_is_cooperative(cooperative):
    """Nothing in the code tells any more: the barrier is made of ordinary instructions."""
    parameters = contract.parameters(SPECS["mla"])
    kernel = compile_body(tiny, parameters, target_of("8.0"), launch_bounds=(32, 1), cooperative=cooperative)
    assert kernel.cooperative is cooperative


def test_what_is_linked_again_has_a_report_again(monkeypatch):
    """nvJitLink can keep what it has linked, and then has nothing to say about it."""
    link, codes, target = compile._link, [], target_of("8.0")

    def keep_code(code, *given):
        codes.append(code)
        return link(code, *given)

    monkeypatch.setattr(compile, "_link", keep_code)
    kernel = compile_body(tiny, contract.parameters(SPECS["mla"]), target, launch_bounds=(32, 1), cooperative=False)
    for _ in range(2):
        _, log = link(codes[0], target, "cubin")
        assert compile._resources(kernel.entry, log, kernel.ptx.replace(kernel.name, kernel.entry)) == kernel.resources
    assert kernel.resources.registers > 0


PTX_LINES = """.visible .entry nbverify_k(
	.param .u64 a
)
{
	ld.param.u64 	%rd1, [a];
$L__BB0_1:
	mbarrier.try_wait.parity.shared::cta.b64 	%p1, [%r1], %r2;
	@%p1 bra 	$L__BB0_3;
	@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];
	trap;
$L__BB0_3:
	ret;
}
"""
REPORT = """ptxas info    : Function properties for nbverify_k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 8 bytes cumulative stack size, 96 bytes smem
"""


def test_the_report_is_read_and_every_opcode_counted():
    found = compile._resources("nbverify_k", REPORT, PTX_LINES)
    assert (found.registers, found.spill_bytes, found.local_bytes) == (40, 16, 8)
    assert (found.stack_bytes, found.static_shared_bytes) == (8, 96)
    assert found.instructions == {
        "ld.param.u64": 1, "mbarrier.try_wait.parity.shared::cta.b64": 1, "bra": 1, "trap": 1, "ret": 1,
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": 1,
    }  # fmt: skip


COMPILE_TINY = """
import json
from nbverify import VerifySpec, contract
from nbverify.compile import compile_body, target_of

def tiny(args):
    args.lse[0] = args.v_scale

spec = VerifySpec.gqa(1, 1, 16, max_requests=1, max_nodes=1, max_kv_len=1, sm_scale=1.0)
kernel = compile_body(tiny, contract.parameters(spec), target_of(None), launch_bounds=(32, 1), cooperative=False)
print(json.dumps([kernel.target, kernel.ptx, kernel.cubin[:64].hex()]))
"""


def test_compiling_under_the_override():
    """In a process of its own, because numba reads the variable when it is imported."""
    environment = {**os.environ, OVERRIDE: "12.0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_TINY], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    target, ptx, elf = json.loads(done.stdout)
    assert target == "sm_120"
    assert re.search(r"^\.target sm_120$", ptx, re.M)
    assert machine_of(bytes.fromhex(elf)) == "sm_120"
