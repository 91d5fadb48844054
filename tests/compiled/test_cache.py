"""The cubin cache: when it is used, when it must not be, and that nothing breaks it.

Most tests replace ``compile_body`` by a stub that counts: what is a hit and what a miss needs no compiler.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32

import nbverify as nv
from nbverify import compile
from nbverify.compile import CompiledKernel, Resources, Target, cache_directory, target_of
from nbverify.kernels.planner import geometry_of, limits_of
from nbverify.spec import KERNELS

PACKAGE = Path(nv.__file__).parent
LIMITS = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 64, "sm_scale": 0.25, "kernel": "simt"}
SPEC = nv.VerifySpec.gqa(1, 1, 16, mask="none", reduction="two_launch", **LIMITS)
TARGET = Target(12, 0, "a")
NUM_KERNELS = 2


def compile_spec(spec, target, **options):
    """With the geometry of the target's own capability."""
    geometry = geometry_of(spec, limits_of((target.major, target.minor)))
    return compile.compile_spec(spec, target, geometry, **options)


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    home = tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv(compile.OVERRIDE, raising=False)
    return home


def stub_kernel(body, parameters, target):
    """Something that has all fields, each different enough to be told apart."""
    numbers = {f.name: i for i, f in enumerate(fields(Resources))} | {"instructions": {"ret": 1, "add.f32": 2}}
    return CompiledKernel(
        name=f"nbverify_{body.__name__}", entry=f"_Z{body.__name__}", target=target.name, parameters=parameters,
        ptx=f"// {body.__name__}\n", cubin=b"\x7fELF" + bytes(range(256)), cooperative=False,
        resources=Resources(**numbers),
    )  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Names of the bodies that were compiled."""
    names = []

    def compile_body(body, parameters, target, **options):
        names.append(body.__name__)
        return stub_kernel(body, parameters, target)

    monkeypatch.setattr(compile, "compile_body", compile_body)
    return names


def files():
    return sorted(p for p in cache_directory().rglob("*") if p.is_file())


# ---- hits and misses


def test_the_second_time_nothing_is_compiled(compiled):
    first = compile_spec(SPEC, TARGET)
    assert compiled == ["verify_split", "verify_merge"]
    second = compile_spec(SPEC, TARGET)
    assert len(compiled) == NUM_KERNELS
    assert second == first
    assert [type(k.cubin) for k in second] == [bytes] * NUM_KERNELS
    assert len(files()) == 1


def test_progress_is_told_for_what_is_compiled_only(compiled):
    lines = []
    compile_spec(SPEC, TARGET, progress=lines.append)
    assert len(lines) == NUM_KERNELS and all("sm_120a" in line for line in lines)
    compile_spec(SPEC, TARGET, progress=lines.append)
    assert len(lines) == NUM_KERNELS


def test_sizes_and_scales_are_runtime_parameters(compiled):
    compile_spec(SPEC, TARGET)
    compile_spec(replace(SPEC, max_requests=7, max_nodes=9, max_kv_len=999, sm_scale=0.5), TARGET)
    assert len(compiled) == NUM_KERNELS


def test_sizes_that_do_not_change_the_tile_are_runtime_parameters(compiled):
    """mma: the rows of a tile follow from nodes x heads, so a kernel serves all sizes that fill the same tile."""
    spec = replace(SPEC, kernel="mma", max_nodes=9)
    compile_spec(spec, TARGET)
    compile_spec(replace(spec, max_requests=7, max_nodes=16, max_kv_len=999, sm_scale=0.5), TARGET)
    assert len(compiled) == NUM_KERNELS
    compile_spec(replace(spec, max_nodes=17), TARGET)
    assert len(compiled) == 2 * NUM_KERNELS


def test_another_geometry_is_another_kernel(compiled):
    """The same spec and target, but a device, or a user, that grants less shared memory."""
    spec = replace(SPEC, kernel="mma", head_dim_qk=64, head_dim_v=64, max_nodes=48)
    for shared_bytes in (232_448, 101_376):
        geometry = geometry_of(spec, limits_of((TARGET.major, TARGET.minor), shared_bytes))
        compile.compile_spec(spec, TARGET, geometry)
    assert len(compiled) == 2 * NUM_KERNELS


@pytest.mark.parametrize(
    "changes",
    [
        *({"mask": layout} for layout in ("full", "tree", "packed", "causal")),
        *({"split": "fixed"}, {"reduction": "grid_sync"}, {"dtype": "float16", "kv_dtype": "float16"}),
        *({"kv_dtype": "float8_e4m3fn"}, {"head_dim_qk": 32}, {"head_dim_v": 32}, {"num_q_heads": 2}),
        *({"shared_kv": True}, {"num_q_heads": 2, "num_kv_heads": 2}, {"kernel": "mma"}),
    ],
    ids=str,
)
def test_another_spec_is_another_kernel(compiled, changes):
    compile_spec(SPEC, TARGET)
    compile_spec(replace(SPEC, **changes), TARGET)
    assert len(compiled) > NUM_KERNELS
    assert len(files()) == 2


@pytest.mark.parametrize("other", [target_of("9.0"), target_of("12.1"), Target(12, 0, "")], ids=lambda t: t.name)
def test_another_target_is_another_kernel(compiled, other):
    compile_spec(SPEC, TARGET)
    (kernel, _) = compile_spec(SPEC, other)
    assert kernel.target == other.name
    assert len(compiled) == 2 * NUM_KERNELS


def test_debug_is_another_program(compiled):
    compile_spec(SPEC, TARGET)
    with_checks, without = compile_spec(SPEC, TARGET, debug=True), compile_spec(SPEC, TARGET)
    assert [k.name for k in with_checks] == ["nbverify_check", *(k.name for k in without)]


def test_another_toolkit_is_another_kernel(compiled, monkeypatch):
    compile_spec(SPEC, TARGET)
    monkeypatch.setattr(compile, "toolkit_versions", lambda: {"numba-cuda": "0.0.0"})
    compile_spec(SPEC, TARGET)
    assert len(compiled) == 2 * NUM_KERNELS


def test_a_failure_is_not_kept(compiled, monkeypatch):
    def fail(body, *args, **options):
        raise nv.CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr(compile, "compile_body", fail)
        with pytest.raises(nv.CompileError):
            compile_spec(SPEC, TARGET)
    assert files() == []
    assert len(compile_spec(SPEC, TARGET)) == NUM_KERNELS == len(compiled)


# ---- score_mod: pairs that compile to different code


SCALE = float32(2.0)


def scaling(factor):
    def score_mod(score, request, head, node, key):
        return score * factor

    return score_mod


def helper_plus(x):
    return x + SCALE


def helper_minus(x):
    return x - SCALE


def calling(helper):
    def score_mod(score, request, head, node, key):
        return helper(score)

    return score_mod


def with_global(function, **values):
    """A copy of a function whose globals hold other values."""
    return types.FunctionType(function.__code__, {**globals(), **values}, function.__name__, None, function.__closure__)


def module_with(**values):
    module = types.ModuleType("settings")
    vars(module).update(values)
    return module


def uses_scale(score, request, head, node, key):
    return score * SCALE


def uses_module(score, request, head, node, key):
    return score * settings.slope  # noqa: F821  # each copy below has its own


def inner_plus(score, request, head, node, key):
    def change(x):
        return x + SCALE

    return change(score)


def inner_minus(score, request, head, node, key):
    def change(x):
        return x - SCALE

    return change(score)


def inner_global(score, request, head, node, key):
    def change(x):
        return x * SCALE

    return change(score)


def indexing(table):
    def score_mod(score, request, head, node, key):
        return score + table[head]

    return score_mod


LONG = np.arange(5000, dtype=np.float32)


def nested(factor, inner):
    def score_mod(s, b, h, i, j):
        return inner(s, b, h, i, j) * factor

    return score_mod


DIFFERENT = {
    "constant": (lambda s, b, h, i, j: s + float32(1.0), lambda s, b, h, i, j: s + float32(2.0)),
    "sign of zero": (lambda s, b, h, i, j: s * 0.0, lambda s, b, h, i, j: s * -0.0),
    "type of a constant": (lambda s, b, h, i, j: s * 1, lambda s, b, h, i, j: s * 1.0),
    "operator": (lambda s, b, h, i, j: s + SCALE, lambda s, b, h, i, j: s - SCALE),
    "parameter": (lambda s, b, h, i, j: s + float32(h), lambda s, b, h, i, j: s + float32(i)),
    "function of a module": (lambda s, b, h, i, j: math.sin(s), lambda s, b, h, i, j: math.tanh(s)),
    "captured number": (scaling(float32(0.5)), scaling(float32(0.25))),
    "captured type": (scaling(np.float32(0.5)), scaling(0.5)),
    "last bit of a captured number": (scaling(0.1), scaling(float(np.nextafter(0.1, 1)))),
    "last bit of a captured float32": (scaling(np.float32(0.1)), scaling(np.nextafter(np.float32(0.1), np.float32(1)))),
    "captured function": (calling(helper_plus), calling(helper_minus)),
    "captured device function": (calling(cuda.jit(device=True)(helper_plus)), calling(cuda.jit(helper_minus))),
    "constant of a captured function": (
        calling(with_global(helper_plus, SCALE=float32(1.0))),
        calling(with_global(helper_plus, SCALE=float32(3.0))),
    ),
    "global": (uses_scale, with_global(uses_scale, SCALE=float32(4.0))),
    "attribute of a module": tuple(with_global(uses_module, settings=module_with(slope=x)) for x in (1.0, 2.0)),
    "captured function of the same factory": (
        nested(2.0, nested(3.0, helper_plus)),
        nested(2.0, nested(5.0, helper_plus)),
    ),
    "tuple of tables": tuple(indexing((LONG + float32(i), LONG)) for i in range(2)),
    "inner function": (inner_plus, inner_minus),
    "global of an inner function": (inner_global, with_global(inner_global, SCALE=float32(4.0))),
    "element of a long table": (indexing(LONG), indexing(np.where(np.arange(5000) == 2500, np.float32(0), LONG))),
    "type of a table": (indexing(LONG[:4]), indexing(LONG[:4].astype(np.float64))),
    "last bit of a table": (indexing(np.array([0.1])), indexing(np.array([np.nextafter(0.1, 1)]))),
}


def score_mods_give_kernels(compiled, *functions):
    for function in functions:
        compile_spec(replace(SPEC, score_mod=function), TARGET)
    return len(compiled) // NUM_KERNELS


@pytest.mark.parametrize("first, second", DIFFERENT.values(), ids=DIFFERENT)
def test_another_score_mod_is_another_kernel(compiled, first, second):
    assert score_mods_give_kernels(compiled, first, second) == 2


def test_with_and_without_score_mod(compiled):
    assert score_mods_give_kernels(compiled, None, lambda s, b, h, i, j: s) == 2


SAME = {
    "two calls of a factory": (scaling(float32(0.5)), scaling(float32(0.5))),
    "equal helpers": (calling(helper_plus), calling(with_global(helper_plus))),
    "a device function made twice": tuple(calling(cuda.jit(device=True)(helper_plus)) for _ in range(2)),
    "two copies of a table": (indexing(LONG), indexing(LONG.copy())),
}


@pytest.mark.parametrize("first, second", SAME.values(), ids=SAME)
def test_the_same_score_mod_made_again_is_a_hit(compiled, first, second):
    assert first is not second
    assert score_mods_give_kernels(compiled, first, second) == 1


# ---- sources: a copy of the package, with edits

FAKE_COMPILER = """
import sys, types
from nbverify import VerifySpec, compile
from nbverify.kernels import geometry
from nbverify.kernels.planner import geometry_of, limits_of

def body_of(step):
    def body(args): pass
    body.__name__ = step.body
    return body

bodies = types.ModuleType("nbverify.kernels.bodies")  # the real one imports numba, which takes seconds
bodies.make_bodies = lambda spec, geo, *, debug: [body_of(s) for s in geometry.steps(spec, geo, debug=debug)]
sys.modules["nbverify.kernels.bodies"] = bodies
compiled = []

def compile_body(body, parameters, target, **options):
    numbers = {name: 0 for name in compile.Resources.__dataclass_fields__} | {"instructions": {}}
    compiled.append(body.__name__)
    return compile.CompiledKernel(
        name=body.__name__, entry="_Z", target=target.name, parameters=parameters, ptx="", cubin=b"x",
        cooperative=False, resources=compile.Resources(**numbers),
    )

compile.compile_body = compile_body
spec = VerifySpec.gqa(1, 1, 16, max_requests=1, max_nodes=1, max_kv_len=1, sm_scale=1.0)
compile.compile_spec(spec, compile.Target(12, 0, "a"), geometry_of(spec, limits_of((12, 0))))
assert compile.__file__.startswith(sys.argv[1]), compile.__file__
print("compiled" if compiled else "hit")
"""


def outcome(root):
    done = subprocess.run(
        [sys.executable, "-c", FAKE_COMPILER, str(root)], env={**os.environ, "PYTHONPATH": str(root)}, cwd=root,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def copy_of_package(tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(PACKAGE, root / "nbverify", ignore=shutil.ignore_patterns("__pycache__", "data"))
    assert outcome(root) == "compiled"
    assert outcome(root) == "hit"
    return root


def test_an_edit_of_what_kernels_are_made_of_compiles_again(copy_of_package):
    package = copy_of_package / "nbverify"
    sources = [*package.glob("kernels/*.py"), *package.glob("reduce/*.py")]
    sources += [package / name for name in ("contract.py", "compile.py", "spec.py", "findings.py")]
    assert len(sources) > 12
    for path in sources:
        path.write_text(path.read_text() + "\n# edited\n")
        assert outcome(copy_of_package) == "compiled", path
    assert outcome(copy_of_package) == "hit"


def test_an_edit_of_what_only_launches_does_not(copy_of_package):
    package = copy_of_package / "nbverify"
    for name in (
        "plan.py",
        "launch.py",
        "arrays.py",
        "reference.py",
        "errors.py",
        "__init__.py",
        "emulator/__init__.py",
    ):
        path = package / name
        path.write_text(path.read_text() + "\n# edited\n")
    assert outcome(copy_of_package) == "hit"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_sources_of_bodies_are_all_hashed(kernel):
    """Every module of this package that kernels refer to is one whose edit compiles again (see above)."""
    from nbverify.kernels import bodies

    hashed = {"contract", "compile", "spec", "findings"}
    spec = replace(SPEC, kernel=kernel)
    seen, queue = set(), list(bodies.make_bodies(spec, geometry_of(spec, limits_of((12, 0))), debug=True))
    while queue:
        function = queue.pop()
        function = getattr(function, "py_func", function)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        queue += [*cells, *(function.__globals__.get(name) for name in function.__code__.co_names)]
    modules = {f.__module__ for f in seen if f.__module__.startswith("nbverify")}
    assert len(seen) > 20
    for module in modules:
        _, part, *_ = module.split(".")
        assert part in ("kernels", "reduce") or part in hashed, module


# ---- damage


def whole_file():
    (path,) = files()
    return path, path.read_bytes()


DAMAGE = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "no text": lambda data: b"\xff\xfe" + data,
    "other JSON list": lambda data: b"[]",
    "other JSON object": lambda data: b"{}",
    "JSON string": lambda data: b'""',
    "null": lambda data: b"null",
    "number": lambda data: b"1",
    "list of numbers": lambda data: b"[1, 2]",
    "list of lists": lambda data: b"[[]]",
    "one kernel missing": lambda data: rewritten(data, lambda kernels: kernels[:1]),
    "field missing": lambda data: without_field(data, "cubin"),
    "resources missing": lambda data: without_field(data, "resources"),
    "field too many": lambda data: changed(data, lambda kernel: kernel | {"colour": "red"}),
    "no base64": lambda data: changed(data, lambda kernel: kernel | {"cubin": "xyz"}),
    "cubin is null": lambda data: changed(data, lambda kernel: kernel | {"cubin": None}),
    "resources are null": lambda data: changed(data, lambda kernel: kernel | {"resources": None}),
    "parameters are numbers": lambda data: changed(data, lambda kernel: kernel | {"parameters": [1]}),
    "a bit of a cubin": lambda data: flipped(data),
    "cubin cut short": lambda data: changed(data, lambda kernel: kernel | {"cubin": kernel["cubin"][:100]}),
}


def rewritten(data, change):
    """The file with other kernels under the old checksum."""
    checksum, text = data.split(b"\n", 1)
    return checksum + b"\n" + json.dumps(change(json.loads(text))).encode()


def changed(data, change):
    return rewritten(data, lambda kernels: [change(kernel) for kernel in kernels])


def without_field(data, name):
    return changed(data, lambda kernel: {key: value for key, value in kernel.items() if key != name})


def flipped(data):
    """A cubin that decodes, but is another."""
    return changed(data, lambda k: k | {"cubin": ("B" if k["cubin"][0] == "A" else "A") + k["cubin"][1:]})


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_compiled_again_and_repaired(compiled, damage):
    want = compile_spec(SPEC, TARGET)
    path, data = whole_file()
    assert damage(data) != data
    path.write_bytes(damage(data))
    assert compile_spec(SPEC, TARGET) == want
    assert len(compiled) == 2 * NUM_KERNELS
    assert whole_file() == (path, data)
    compile_spec(SPEC, TARGET)
    assert len(compiled) == 2 * NUM_KERNELS


# ---- places that cannot be written


def test_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, ""):
        monkeypatch.delenv("XDG_CACHE_HOME") if value is None else monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "nbverify"


def test_relative_places_are_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_directory() == tmp_path / ".cache" / "nbverify"


def test_a_user_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert cache_directory().name == f"nbverify-{os.getuid()}"


def test_a_file_where_the_directory_should_be(compiled, cache_home):
    cache_home.write_text("in the way")
    assert len(compile_spec(SPEC, TARGET)) == NUM_KERNELS
    assert len(compile_spec(SPEC, TARGET)) == NUM_KERNELS
    assert len(compiled) == 2 * NUM_KERNELS


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_read_only_directory(compiled, mode):
    directory = cache_directory()
    directory.mkdir(parents=True)
    directory.chmod(mode)
    try:
        assert len(compile_spec(SPEC, TARGET)) == NUM_KERNELS
    finally:
        directory.chmod(0o755)
    assert files() == []


@pytest.mark.parametrize("call", ["pathlib.Path.write_text", "os.replace", "pathlib.Path.mkdir"])
def test_every_step_of_writing_may_be_refused(compiled, call, monkeypatch):
    """What a read-only file system, a full disk or a quota does; also for root.  And nothing is left behind."""

    def refuse(*args, **options):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(call, refuse)
        assert len(compile_spec(SPEC, TARGET)) == NUM_KERNELS
    assert files() == []
    compile_spec(SPEC, TARGET)
    assert len(compiled) == 2 * NUM_KERNELS and len(files()) == 1


def test_read_only_directory_that_has_the_file_is_read(compiled):
    want = compile_spec(SPEC, TARGET)
    cache_directory().chmod(0o555)
    try:
        assert compile_spec(SPEC, TARGET) == want
    finally:
        cache_directory().chmod(0o755)
    assert len(compiled) == NUM_KERNELS


# ---- at once


def test_threads_compile_once(monkeypatch):
    names, results = [], []

    def slow_compile_body(body, parameters, target, **options):
        names.append(body.__name__)
        time.sleep(0.1)
        return stub_kernel(body, parameters, target)

    monkeypatch.setattr(compile, "compile_body", slow_compile_body)
    threads = [threading.Thread(target=lambda: results.append(compile_spec(SPEC, TARGET))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == NUM_KERNELS
    assert len(results) == 8 and all(result == results[0] for result in results)


REAL_COMPILER = """
import json, sys
from nbverify import VerifySpec
from nbverify.compile import compile_spec, target_of
from nbverify.kernels.planner import geometry_of, limits_of

spec = VerifySpec.gqa(1, 1, 16, mask="none", reduction="two_launch",
                      max_requests=4, max_nodes=8, max_kv_len=64, sm_scale=0.25)
kernels = compile_spec(spec, target_of("12.0"), geometry_of(spec, limits_of((12, 0))))
print(json.dumps({"numba": "numba" in sys.modules, "kernels": [[k.name, k.cubin.hex()] for k in kernels]}))
"""


def real_process():
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.Popen([sys.executable, "-c", REAL_COMPILER], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)  # three processes, two of them compiling: slow on a busy machine
def test_processes():
    """Two compile the same kernel at once; a third is served from the cache, and never imports numba."""
    processes = [real_process() for _ in range(2)]
    results = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for result in results:
        assert result["numba"]
        assert [name for name, _ in result["kernels"]] == ["nbverify_verify_split", "nbverify_verify_merge"]
    assert len(files()) == 1, "one whole file, and no temporary one"

    third = real_process()
    served = json.loads(third.communicate(timeout=60)[0])
    assert not served["numba"]
    assert served["kernels"] in [result["kernels"] for result in results]
