"""The command line: start-up, errors, exit codes, presets, and `compile` on kernels that are made up."""

import argparse
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import nbverify as nv
from nbverify import cli, compile, presets, report, tile_report
from nbverify.cli import main
from nbverify.compile import CompiledKernel, Resources
from nbverify.configurations import configurations
from nbverify.doctor import SM_LIMITS
from nbverify.kernels import geometry as geo
from nbverify.kernels.planner import geometry_of, limits_of

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


# --- start-up --------------------------------------------------------------------------------------------------------


def test_module_runs_and_tells_its_version():
    done = python("-m", "nbverify", "--version")
    assert (done.returncode, done.stdout) == (0, f"nbverify {nv.__version__}\n")


def test_help_imports_nothing_heavy():
    heavy = ("numba", "numpy", "rich", "cupy", "ml_dtypes", "nbverify.compile")
    code = (
        "import sys\nfrom nbverify.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("demo", "doctor", "compile", "bench"):
        assert f"    {command} " in done.stdout


def test_no_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error, code, line", [
    (nv.ArgumentError("q", "float16", "float64"), 2, "error: q: expected float16, got float64\n"),
    (nv.DriverError("cuInit: no [red]"), 1, "error: cuInit: no [red]\n"),
    (nv.DeviceInputError("kv_indptr"), 1, "error: kv_indptr\n"),  # a ValueError too, but no wrong usage
    (FileNotFoundError(2, "No such file or directory", "/no/file"), 1, "error: /no/file: No such file or directory\n"),
    (ImportError("Numba needs NumPy 2.4 or less.\nMore."), 1,
     "error: Numba needs NumPy 2.4 or less. (type `nbverify doctor` to see what is wrong with this installation)\n"),
])  # fmt: skip
def test_an_error_is_one_line_and_an_exit_code(monkeypatch, capsys, error, code, line):
    def run(arguments):
        raise error

    monkeypatch.setattr(cli, "run_doctor", run)
    assert main(["doctor"]) == code
    assert capsys.readouterr() == ("", line)


def test_interrupt(monkeypatch, capsys):
    def run(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_doctor", run)
    assert main(["doctor"]) == 130


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def run(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "run_doctor", run)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


# --- bench -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--suite", "must", "--json"], ["--help"], ["--version"], ["-h"]])
def test_bench_hands_its_flags_on(monkeypatch, flags):
    from benchmarks import verify

    given = []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(verify, "main", lambda flags, prog: given.append((flags, prog)) or 3)
    assert main(["bench", *flags]) == 3
    assert given == [(flags, "nbverify bench")]


def test_bench_without_a_checkout_says_what_is_missing(monkeypatch, tmp_path, capsys):
    (tmp_path / "site" / "nbverify").mkdir(parents=True)
    monkeypatch.setattr(nv, "__file__", str(tmp_path / "site" / "nbverify" / "__init__.py"))
    assert main(["bench", "--suite", "must"]) == 1
    error = capsys.readouterr().err
    assert f"no benchmarks/verify.py in {tmp_path / 'site'}" in error and "run it in a checkout" in error


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, heads, kv_heads, widths, sm_scale", [
    ("kimi-k2.6-tp8", 8, 1, (576, 512), 0.144680),
    ("kimi-k2.6-tp4", 16, 1, (576, 512), 0.144680),
    ("deepseek-v3-tp8", 16, 1, (576, 512), 0.135234),
    ("qwen3-8b", 32, 8, (128, 128), 0.088388),
    ("smollm2-135m", 9, 3, (64, 64), 0.125),
])  # fmt: skip
def test_presets(name, heads, kv_heads, widths, sm_scale):
    spec = presets.preset(name)
    assert (spec.num_q_heads, spec.num_kv_heads) == (heads, kv_heads)
    assert (spec.head_dim_qk, spec.head_dim_v) == widths
    assert spec.shared_kv == (kv_heads == 1)
    assert spec.sm_scale == pytest.approx(sm_scale, abs=5e-7)
    assert spec.max_nodes == 33


def test_unknown_preset_names_all():
    with pytest.raises(nv.ArgumentError, match=r"preset: expected one of \('kimi-k2.6-tp8', .*got 'gpt'"):
        presets.preset("gpt")


def test_another_dtype_as_the_head_of_presets_says():
    spec = replace(presets.preset("qwen3-8b"), dtype="float16", kv_dtype=None)
    assert (spec.dtype, spec.kv_dtype) == ("float16", "float16")
    assert 'dtype="float16", kv_dtype=None' in presets.__doc__
    assert spec_of("--preset", "qwen3-8b", "--dtype", "float16") == spec


# --- compile: the spec ------------------------------------------------------------------------------------------------


def spec_of(*flags: str) -> nv.VerifySpec:
    return cli.spec_of(cli.build_parser().parse_args(["compile", "--cc", "9.0", *flags]))


def test_flags_make_a_spec():
    assert spec_of() == presets.preset("kimi-k2.6-tp8")
    assert spec_of("--preset", "qwen3-8b") == presets.preset("qwen3-8b")
    changed = spec_of("--preset", "qwen3-8b", "--dtype", "float16", "--mask", "packed", "--max-requests", "3")
    assert (changed.dtype, changed.kv_dtype, changed.mask, changed.max_requests) == ("float16", "float16", "packed", 3)
    assert spec_of("--kv-dtype", "float8_e4m3fn").kv_dtype == "float8_e4m3fn"
    mla = spec_of("--mla", "4")
    assert (mla.num_q_heads, mla.head_dim_qk, mla.head_dim_v, mla.shared_kv) == (4, 576, 512, True)
    assert spec_of("--mla", "4,128,64").head_dim_v == 64
    gqa = spec_of("--gqa", "6,2,128,64", "--sm-scale", "0.5", "--reduction", "two_launch")
    assert (gqa.num_q_heads, gqa.num_kv_heads, gqa.head_dim_qk, gqa.head_dim_v) == (6, 2, 128, 64)
    assert (gqa.sm_scale, gqa.reduction) == (0.5, "two_launch")
    assert spec_of("--gqa", "6,2,64").sm_scale == 0.125


@pytest.mark.parametrize("flags, words", [
    (["--mla", "1,2"], "--mla: expected HEADS or HEADS,DQK,DV"),
    (["--gqa", "6,2"], "--gqa: expected HQ,HKV,D"),
    (["--gqa", "6,2,0"], "head_dim_qk: expected"),
    (["--dtype", "float16", "--kv-dtype", "bfloat16"], "kv_dtype: expected"),
    (["--max-requests", "0"], "max_requests: expected"),
    (["--cc", "7.0"], "cc: expected 8.0 or higher"),
    (["--cc", "x"], "cc: expected a compute capability"),
])  # fmt: skip
def test_wrong_flags(capsys, flags, words):
    assert main(["compile", "--cc", "9.0", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["preset", "dtype", "kv-dtype", "mask", "split", "reduction", "kernel"])
def test_choices_are_named(capsys, flag):
    with pytest.raises(SystemExit) as stop:
        main(["compile", "--cc", "9.0", f"--{flag}", "magic"])
    assert stop.value.code == 2
    choices = presets.PRESETS if flag == "preset" else cli.CHOICES[flag.replace("-", "_")]
    error = capsys.readouterr().err
    assert f"argument --{flag}: invalid choice: 'magic'" in error and all(choice in error for choice in choices)


def test_every_choice_is_one_of_the_spec():
    for name, choices in cli.CHOICES.items():
        for choice in choices:
            needed = {("kv_dtype", "float16"): ["--dtype", "float16"], ("schedule", "step"): ["--kernel", "mma"]}
            flags = needed.get((name, choice), [])
            assert getattr(spec_of(f"--{name.replace('_', '-')}", choice, *flags), name) == choice


@pytest.mark.parametrize("flags", [["compile"], ["compile", "--cc", "9.0", "--mla", "1", "--gqa", "1,1,16"],
                                   ["compile", "--cc", "9.0", "--mla", "a"], ["demo", "--seed", "-1"],
                                   ["demo", "--reduction", "none"]])  # fmt: skip
def test_wrong_usage(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2


# --- compile: the report ---------------------------------------------------------------------------------------------

PTX = ".visible .entry nbverify_x(\n)\n{\n\t.reg .f64 %fd<2>;\n\tadd.f32 %f1, %f2, %f3;\n}\n"
INSTRUCTIONS = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 3,
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": 5,
    "cp.async.cg.shared.global": 7,
    "ld.shared.f32": 11,
    "st.shared.v4.u32": 13,
    "ld.global.nc.u32": 17,
    "st.global.f32": 19,
    "ld.local.f32": 23,
    "fma.rn.f32": 29,
    "add.s64": 31,
    "setp.lt.s64": 37,
    "mul.wide.s32": 41,  # makes 64 bits, costs 32
    "mov.u64": 43,
    "ld.param.u64": 47,
    "mad.lo.s64": 53,
}


def kernels_for(spec: nv.VerifySpec, target: compile.Target, ptx: str = PTX) -> tuple[CompiledKernel, ...]:
    resources = Resources(
        registers=168,
        spill_bytes=0,
        local_bytes=0,
        stack_bytes=16,
        static_shared_bytes=0,
        instructions=INSTRUCTIONS,
    )
    return tuple(
        CompiledKernel(
            name=f"nbverify_{step.body}",
            entry=f"_Z{step.body}",
            target=target.name,
            parameters=(),
            ptx=ptx,
            cubin=step.body.encode(),
            cooperative=step.body == "verify",
            resources=resources,
        )
        for step in geo.steps(spec, geometry_of(spec, limits_of((target.major, target.minor))), debug=False)
    )


@pytest.fixture
def fake_compiler(monkeypatch):
    """compile_spec without a compiler; ``cached`` decides whether it says that it compiles."""
    state = argparse.Namespace(cached=False, ptx=PTX)

    def compile_spec(spec, target, geometry, *, debug=False, progress=None):
        if not state.cached:
            progress(f"compiling for {target.name}")
        return kernels_for(spec, target, state.ptx)

    monkeypatch.setattr(compile, "compile_spec", compile_spec)
    monkeypatch.setenv("COLUMNS", "200")
    return state


def test_instruction_classes():
    (kernel,) = kernels_for(presets.preset("kimi-k2.6-tp8"), compile.target_of("9.0"))
    assert report.count_instructions(kernel) == {
        "mma": 3,
        "ldmatrix": 5,
        "async copies": 7,
        "shared loads": 11,
        "shared stores": 13,
        "global loads": 17,
        "global stores": 19,
        "local memory": 23,
        "fma": 29,
        "64-bit integer": 31 + 37 + 53,
        "f64": 0,
        "all": sum(INSTRUCTIONS.values()),
    }


@pytest.mark.parametrize("line", [
    "\tadd.f64 %fd1, %fd2, %fd3;",
    "\t@%p1 mul.rn.f64 %fd1, %fd2;",
    "\tcvt.rn.f32.f64 %f1, %fd1;",
    "\tst.global.f64 [%rd1], %fd1;",
    "  cvt.f64.f32 \t%fd1, %f1;",
])  # fmt: skip
def test_f64_is_found_and_fails(fake_compiler, capsys, line):
    fake_compiler.ptx = PTX.replace("}\n", f"{line}\n}}\n")
    assert main(["compile", "--cc", "9.0"]) == 1
    assert "float64 instructions in nbverify_verify for sm_90a" in capsys.readouterr().err


def geometry_for(spec, cc=(9, 0)):
    return geometry_of(spec, limits_of(cc))


KIMI = replace(presets.preset("kimi-k2.6-tp8"), kernel="simt")  # whose shared memory is the same on every device


def test_report(fake_compiler, capsys):
    assert main(["compile", "--kernel", "simt", "--cc", "12.0", "--cc", "9.0"]) == 0
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    dynamic = geometry_for(KIMI).shared_bytes(presets.MAX_REQUESTS)
    assert rows["registers"] == ["168", "168"]
    assert rows["spills, bytes"] == rows["local memory, bytes"] == ["0", "0"]
    assert rows["blocks per SM, estimate"] == ["1", "2"]  # of 100 and 228 KiB
    assert rows["dynamic shared, bytes"] == [f"{dynamic:,}"] * 2
    assert rows["cooperative launch"] == ["yes", "yes"]
    assert rows["PTX f64"] == ["0", "0"]
    assert rows["from"] == ["compiled", "now"] * 2


def test_report_of_a_kernel_whose_tiles_depend_on_the_device(fake_compiler, capsys):
    assert main(["compile", "--kernel", "mma", "--cc", "12.0", "--cc", "9.0"]) == 0
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    tiles = [geometry_for(replace(KIMI, kernel="mma"), cc) for cc in ((12, 0), (9, 0))]
    assert rows["dynamic shared, bytes"] == [f"{tile.shared_bytes(presets.MAX_REQUESTS):,}" for tile in tiles]
    assert rows["threads"] == [str(tile.threads) for tile in tiles]
    assert rows["blocks per SM, estimate"] == ["1", "1"]


def test_report_json(fake_compiler, capsys):
    fake_compiler.cached = True
    assert main(["compile", "--cc", "12.0", "--reduction", "two_launch", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["spec"]["reduction"] == "two_launch" and record["sources"] == compile.source_hash()
    assert [(k["name"], k["target"], k["from_cache"]) for k in record["kernels"]] == [
        ("nbverify_verify_split", "sm_120a", True),
        ("nbverify_verify_merge", "sm_120a", True),
    ]


def test_output_files(fake_compiler, capsys, tmp_path):
    ptx, cubin = tmp_path / "one.ptx", tmp_path / "one.cubin"
    assert main(["compile", "--cc", "12.0", "--ptx", str(ptx), "--cubin", str(cubin)]) == 0
    assert (ptx.read_text(), cubin.read_bytes()) == (PTX, b"verify")
    assert main(["compile", "--cc", "9.0", "--reduction", "two_launch", "--cubin", str(tmp_path / "two.cubin")]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.glob("two*")} == {
        "two.nbverify_verify_split.sm_90a.cubin": b"verify_split",
        "two.nbverify_verify_merge.sm_90a.cubin": b"verify_merge",
    }


@pytest.mark.parametrize("flag", ["--ptx", "--cubin"])
@pytest.mark.parametrize("name", ["no/file", "", "file/file"])
def test_an_output_that_cannot_be_is_refused_before_compiling(monkeypatch, capsys, tmp_path, flag, name):
    monkeypatch.setattr(compile, "compile_spec", lambda *_, **__: pytest.fail("compiled"))
    (tmp_path / "file").touch()
    assert main(["compile", "--cc", "12.0", flag, str(tmp_path / name)]) == 2
    assert f"{flag}: expected a file in a directory that exists, got {tmp_path / name}" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_exit_code_1(fake_compiler, monkeypatch, capsys, tmp_path):
    def write_bytes(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert main(["compile", "--cc", "12.0", "--ptx", str(tmp_path / "file")]) == 1
    assert f"error: {tmp_path / 'file'}: No space left on device" in capsys.readouterr().err


# (cc, threads, registers, shared bytes) -> blocks, by the occupancy calculator's rules
@pytest.mark.parametrize("case, blocks, limit", [
    (((9, 0), 128, 168, 0), 3, "registers"),  # 168 * 32 = 5,376 a warp; 65,536 // 5,376 = 12 warps
    (((9, 0), 128, 165, 0), 3, "registers"),  # handed out in steps of 256: as 168
    (((9, 0), 128, 33, 0), 12, "registers"),
    (((9, 0), 96, 33, 0), 16, "registers"),  # 16,384 // 1,280 = 12 warps a quarter, 48 in all; 51 if it were one pool
    (((9, 0), 288, 168, 0), 1, "registers"),
    (((9, 0), 288, 176, 0), 0, "registers: 65,536 a block, in groups of 4 warps"),  # 9 warps as 12: 67,584
    (((9, 0), 256, 32, 0), 8, "registers"),
    (((12, 0), 512, 32, 0), 3, "threads"),
    (((9, 0), 128, 64, 90_512), 2, "shared memory"),
    (((9, 0), 128, 64, 115_712), 2, "shared memory"),  # with its 1 KiB exactly half of 228 KiB
    (((9, 0), 128, 64, 115_713), 1, "shared memory"),
    (((12, 0), 32, 16, 0), 24, "blocks"),
    (((12, 0), 128, 64, 101_377), 0, "shared memory: 101,376 bytes a block"),
    (((13, 0), 128, 64, 0), None, "unknown architecture"),
])  # fmt: skip
def test_blocks_per_sm(case, blocks, limit):
    assert report.blocks_per_sm(*case) == (blocks, limit)


def test_what_the_system_takes_of_shared_memory_is_counted_once():
    """Two blocks of half an SM fit: the linker does not count it."""
    geometry = geometry_for(KIMI)
    room = SM_LIMITS[9, 0].shared_bytes // 2 - 1024
    spec = replace(KIMI, max_requests=max(n for n in range(1, 20_000) if geometry.shared_bytes(n) <= room))
    kernels = kernels_for(spec, compile.target_of("9.0"))
    (row,) = report.kernel_reports(spec, geometry, kernels, (9, 0), debug=False, cached=True, seconds=0.0)
    assert (row["blocks_per_sm"], row["blocks_limited_by"]) == (2, "shared memory")


def test_limits_are_consistent():
    for cc, limits in SM_LIMITS.items():  # one block may have the whole SM but for its 1 KiB
        assert limits.shared_bytes - limits.shared_optin_bytes == 1024
        assert limits_of(cc).shared_bytes == limits.shared_optin_bytes


# --- compile: the report of all tiles --------------------------------------------------------------------------------


def test_report_of_all_tiles(fake_compiler, capsys):
    fake_compiler.cached = True
    assert main(["compile", "--cc", "12.0", "--report"]) == 0
    text = capsys.readouterr().out
    tiles = configurations("12.0")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line[:1].isalpha()}
    for one in tiles:
        _, height, keys, warps, stages, registers, spills, shared, _, mma, _ = rows[one.name]
        geometry = one.tiles
        assert (int(height), int(keys)) == (geometry.rows_per_tile, geometry.keys_per_tile)
        assert (int(warps), int(stages)) == (geometry.warps, geometry.stages)
        assert (registers, spills) == ("168", "0")
        assert shared == f"{geometry.shared_bytes(16):,}"
        assert int(mma.replace(",", "")) * 2048 == height_x_keys_x_widths(geometry)
    assert "RTX PRO 6000 Blackwell: 188 SMs" in text
    assert len([line for line in text.splitlines() if line.startswith("1 x ")]) == 9


def height_x_keys_x_widths(tiles):
    return tiles.rows_per_tile * tiles.keys_per_tile * (tiles.head_dim_qk + tiles.head_dim_v)


def test_report_of_all_tiles_as_json(fake_compiler, capsys):
    fake_compiler.cached = True
    assert main(["compile", "--cc", "12.0", "--cc", "8.0", "--report", "mla,gqa64", "--json"]) == 0
    rtx, a100 = json.loads(capsys.readouterr().out)
    assert (rtx["target"], a100["target"]) == ("sm_120a", "sm_80")
    assert {row["kind"] for row in rtx["tiles"]} == {"mla", "gqa64"}
    assert rtx["sources"] == compile.source_hash() and rtx["chip"]["sms"] == 188
    shapes = [(time["requests"], time["nodes"], time["heads"], time["prefix"]) for time in rtx["times"]]
    assert len(shapes) == 12 and shapes[0] == (1, 8, 8, 4096)
    assert all(time["us"] > time["limit_us"] > 0 for time in rtx["times"])
    assert a100["chip"] is None and a100["times"] == []


def test_report_says_why_there_are_no_times(fake_compiler, capsys):
    fake_compiler.cached = True
    assert main(["compile", "--cc", "8.0", "--report", "mla"]) == 0
    assert "No modelled times: no rates of such a chip" in capsys.readouterr().out
    assert main(["compile", "--cc", "12.0", "--report", "gqa64"]) == 0
    assert "No modelled times: only with the kind mla" in capsys.readouterr().out


def test_the_report_marks_spills(fake_compiler):
    fake_compiler.cached = True
    record = tile_report.make_report("12.0", ["mla288"])
    record["tiles"][0]["spill_bytes"] = 56
    console = Console(width=200, record=True, force_terminal=True, file=io.StringIO())
    tile_report.show_report(console, record)
    assert re.search(r"\x1b\[1;31m *56\x1b", console.export_text(styles=True))  # bold red


@pytest.mark.parametrize("flags", [
    *(["--preset", "qwen3-8b"], ["--mla", "8"], ["--gqa", "8,2,64"], ["--debug"], ["--ptx", "x"], ["--cubin", "x"]),
    *(["--max-nodes", "3"], ["--kernel", "mma"], ["--split", "fixed"]),
])  # fmt: skip
def test_the_report_of_all_tiles_takes_no_spec(fake_compiler, capsys, flags):
    assert main(["compile", "--cc", "12.0", "--report", "mla", *flags]) == 2
    assert f"--report: expected no {flags[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("kinds", ["nothing", "mla,", ""])
def test_kinds_that_there_are_not(fake_compiler, capsys, kinds):
    assert main(["compile", "--cc", "12.0", "--report", kinds]) == 2
    assert "--report: expected kinds of ('mla', " in capsys.readouterr().err
