"""From kernel bodies to cubins, for any compute capability, with or without a GPU; and what they need to run.

    body --numba, libNVVM--> LTO-IR --nvJitLink--> cubin, PTX --> resource report

Link-time optimization is not for speed here, as there is one body and no library: but it is the only input that
nvJitLink assembles as a whole program.  PTX becomes a part of a program, in which ``setmaxnreg`` is ignored.
nvJitLink's own cache is off: what it finds there comes without a report.

Numba compiles for the device it finds.  Here the target is an argument: ``cc`` goes through every step, and
``numba.cuda.dispatcher.get_current_device``, which device functions consult even when ``cc`` is given, is answered
with the target for the time of the compilation.  This is the only file that touches numba's private API.

Targets.  ``(9, 0)`` becomes sm_90a and ``(12, 0)`` sm_120a: from 9.0 on, the architecture-specific variant is what
runs on the device itself.  numba's own override, ``NUMBA_FORCE_CUDA_CC=12.0`` in the environment, wins over the
device's capability for plans too; it has no suffix, so it gives sm_120 without the ``a``.  It cannot make sm_120 code
run on another device: the plan then fails when the cubin is loaded, with both names.

Cache.  Cubins are kept under ``$XDG_CACHE_HOME/nbverify`` (``~/.cache/nbverify``), one file each, named by a hash of
the kernel sources, the spec's compile key, the code and constants of ``score_mod``, the target and the versions of the
toolkit.  A file is written under another name and renamed, so that two processes may compile at once.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING

import numpy as np

from nbverify import contract
from nbverify.contract import Parameter
from nbverify.errors import ArgumentError, CompileError
from nbverify.kernels.geometry import Geometry, steps
from nbverify.spec import VerifySpec

if TYPE_CHECKING:
    from nbverify.stages import Stage

OVERRIDE = "NUMBA_FORCE_CUDA_CC"
MIN_CC = (8, 0)
_TOOLKIT_PACKAGES = (
    "numba-cuda", "numba", "llvmlite", "cuda-core", "cuda-bindings",
    "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12", "nvidia-cuda-runtime-cu12",
    "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-runtime",
)  # fmt: skip
_compile_lock = threading.Lock()  # numba's compiler and the stub below are process-wide state


@dataclass(frozen=True)
class Target:
    """A compute capability to compile for."""

    major: int
    minor: int
    suffix: str  # "a": architecture-specific

    @property
    def name(self) -> str:
        """As the toolkit spells it: sm_120a."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def cc(self) -> tuple:
        """As numba spells it."""
        return (self.major, self.minor, self.suffix) if self.suffix else (self.major, self.minor)


@dataclass(frozen=True)
class Resources:
    """What one kernel needs, as the linker reports it, and what its PTX consists of."""

    registers: int
    spill_bytes: int  # stores and loads of registers that had to go to memory
    local_bytes: int  # local memory a thread: spills, and arrays that did not stay in registers
    stack_bytes: int  # that, and what calls need; there are none
    static_shared_bytes: int
    instructions: dict[str, int]  # PTX opcode with all its modifiers -> occurrences


@dataclass(frozen=True)
class CompiledKernel:
    """One entry point, ready to load."""

    name: str
    entry: str  # the name in the cubin
    target: str
    parameters: tuple[Parameter, ...]  # what it was compiled for; the launcher compares them with the contract
    ptx: str
    cubin: bytes
    cooperative: bool
    resources: Resources


def override_cc() -> tuple[int, int] | None:
    """The capability that numba's override asks for; None if it is not set.

    Raises ArgumentError if it is not what numba takes: it would warn and ignore it.
    """
    override = os.environ.get(OVERRIDE)
    if not override:
        return None
    match = re.fullmatch(r"(\d+)\.(\d)", override)
    if match is None:
        raise ArgumentError(OVERRIDE, 'unset, or "major.minor" such as "12.0"', repr(override))
    return int(match[1]), int(match[2])


def target_of(cc: str | tuple | None) -> Target:
    """``"12.0"``, ``(12, 0)``, ``(12, 0, "a")`` or ``"sm_120a"`` -> Target; None: what numba's override asks for.

    Raises ArgumentError for anything else, for capabilities below 8.0, and where numba's override contradicts ``cc``.
    """
    override = override_cc()
    major, minor = override if cc is None and override else _parse_cc(cc)
    if override not in (None, (major, minor)):
        raise ArgumentError("cc", f"{os.environ[OVERRIDE]}, which {OVERRIDE} sets for all of numba", cc)
    if (major, minor) < MIN_CC:
        raise ArgumentError("cc", "8.0 or higher", f"{major}.{minor}")
    specific = override is None and (major, minor) >= (9, 0)
    return Target(major, minor, "a" if specific else "")


def _parse_cc(cc: object) -> tuple[int, int]:
    text = cc if isinstance(cc, str) else ""
    if isinstance(cc, tuple) and len(cc) in (2, 3) and all(type(x) is int for x in cc[:2]):
        text = ".".join(str(x) for x in cc[:2]) + "".join(str(x) for x in cc[2:])
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)a?", text)
    if match is None:
        raise ArgumentError("cc", 'a compute capability such as "12.0" or (12, 0)', repr(cc))
    return int(match[1]), int(match[2])


def compile_spec(
    spec: VerifySpec,
    target: Target,
    geometry: Geometry,
    *,
    debug: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[CompiledKernel, ...]:
    """The kernels of a spec in launch order, from the cache or compiled now.

    With ``debug`` the input checks come first.  ``progress`` is called with a line of text before each long step.
    """
    path = cache_file(spec, target, geometry, debug=debug)
    return _from_cache(path, lambda: _compile_now(spec, target, geometry, debug, progress))


def _from_cache(path: Path, make: Callable[[], tuple[CompiledKernel, ...]]) -> tuple[CompiledKernel, ...]:
    """Kernels of a cache file, or made and kept there."""
    kernels = _read_cached(path)
    if kernels is None:
        with _compile_lock:
            kernels = _read_cached(path)  # another thread may have made it while this one waited
            if kernels is None:
                kernels = make()
                _write_cached(path, kernels)
    return kernels


def compile_stage(stage: Stage, target: Target) -> CompiledKernel:
    """One kernel of a tree step (stages.py), from the cache or compiled now."""

    def make() -> tuple[CompiledKernel, ...]:
        bounds = (stage.threads, 1)
        return (compile_body(stage.make_body(), stage.parameters, target, launch_bounds=bounds, cooperative=False),)

    return _from_cache(cache_file_of_stage(stage, target), make)[0]


def _compile_now(
    spec: VerifySpec, target: Target, geometry: Geometry, debug: bool, progress: Callable[[str], None] | None
) -> tuple[CompiledKernel, ...]:
    from nbverify.kernels.bodies import make_bodies

    kernels = []
    bodies = make_bodies(spec, geometry, debug=debug)
    for body, step in zip(bodies, steps(spec, geometry, debug=debug), strict=True):
        if progress:
            progress(f"compiling {body.__name__} for {target.name}")
        kernels.append(
            compile_body(
                body,
                contract.parameters(spec),
                target,
                launch_bounds=(step.threads, 1),
                cooperative=spec.reduction == "grid_sync" and not (step.one_block or step.once_a_step),
            )
        )
    return tuple(kernels)


def compile_body(
    body: Callable,
    parameters: tuple[Parameter, ...],
    target: Target,
    *,
    launch_bounds: tuple[int, int],
    cooperative: bool,
) -> CompiledKernel:
    """Compile and link one kernel body with the single parameter ``args``.

    ``launch_bounds`` are the threads of a block and the blocks that an SM should hold: they cap the registers.

    Raises CompileError if the body has other parameters, if it does not compile, or if the entry point's parameter
    block is not the one that the table describes.
    """
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    if names != ("args",):
        raise CompileError(f"{body.__name__}: expected one parameter, args (see contract.py), got {names}")
    code = _compile_lto(body, parameters, target, launch_bounds)
    ptx, _ = _link(code, target, "ptx")
    cubin, log = _link(code, target, "cubin")
    mangled = re.search(r"\.entry\s+([\w$]+)\s*\(", ptx.decode())
    if mangled is None:
        raise CompileError(f"{body.__name__}: no entry point in the PTX")
    entry, name = mangled[1], f"nbverify_{body.__name__}"
    text = ptx.decode().replace(entry, name)
    check_parameter_block(name, text, parameters)
    resources = _resources(name, log.replace(entry, name), text)
    return CompiledKernel(name, entry, target.name, parameters, text, cubin, cooperative, resources)


def check_parameter_block(name: str, ptx: str, parameters: tuple[Parameter, ...]) -> None:
    """Compare the entry's parameters, one by one, with what the launcher will pack."""
    header = ptx[ptx.index(f".entry {name}") :]
    header = header[: header.index(")")]
    found = [int(width) // 8 for width in re.findall(r"\.param\s+\.[a-z](\d+)", header)]
    expected = []
    for p in parameters:
        expected += [8] * contract.cells_of(p) if p.is_array else [_itemsize(p.dtype)]
    if found != expected:
        raise CompileError(f"{name}: expected a parameter block of widths {expected} bytes, the kernel has {found}")


def _itemsize(dtype: str) -> int:
    return int(re.search(r"\d+$", dtype)[0]) // 8  # type: ignore[index]  # all contract dtypes end in their width


def _compile_lto(
    body: Callable, parameters: tuple[Parameter, ...], target: Target, launch_bounds: tuple[int, int]
) -> bytes:
    from numba import cuda
    from numba.cuda import types

    fields = []
    for p in parameters:
        scalar = getattr(types, p.dtype)
        fields.append(types.Array(scalar, 1, "C") if p.is_array else scalar)
    args_type = types.NamedTuple(fields, contract.args_class_of(tuple(p.name for p in parameters)))
    with _target_as_device(target):
        try:
            code, _ = cuda.compile(
                body,
                (args_type,),
                device=False,
                abi="numba",
                cc=target.cc,
                launch_bounds=launch_bounds,
                output="ltoir",
            )
        except Exception as error:
            raise CompileError(f"{body.__name__} for {target.name}: {type(error).__name__}: {error}") from error
    return code


@contextlib.contextmanager
def _target_as_device(target: Target) -> Iterator[None]:
    """Answer numba's question for the current device with the target (see the head of this file)."""
    from numba.cuda import dispatcher

    class TargetDevice:
        compute_capability = (target.major, target.minor)

    original = dispatcher.get_current_device
    dispatcher.get_current_device = TargetDevice
    try:
        yield
    finally:
        dispatcher.get_current_device = original


def _link(code: bytes, target: Target, kind: str) -> tuple[bytes, str]:
    """``code`` as "ptx" or as "cubin", and the linker's report.  The program is complete, and assembled as such."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(
        arch=target.name,
        verbose=True,
        link_time_optimization=True,
        ptx=kind == "ptx",
        ptxas_options=["-v"],
        no_cache=True,
    )
    try:
        linker = Linker(ObjectCode.from_ltoir(code), options=options)
        try:
            return bytes(linker.link(kind).code), linker.get_info_log()
        finally:
            linker.close()
    except Exception as error:  # of whichever library did it; some raise when the linker is made
        raise CompileError(f"linking for {target.name}: {error}") from error


def _resources(name: str, log: str, ptx: str) -> Resources:
    """Read the assembler's report, and count the PTX."""
    spills = re.search(
        rf"Function properties for {name}\s[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill",
        log,
    )
    usage = re.search(r"Used (\d+) registers([^\n]*)", log)
    if usage is None or spills is None:
        raise CompileError(f"{name}: the linker's report has no line for it:\n{log[-2000:]}")
    counts: dict[str, int] = {}
    body = ptx[ptx.index(f".entry {name}") :]
    for opcode in re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*[a-z0-9])[\s;]", body, re.M):
        counts[opcode] = counts.get(opcode, 0) + 1
    stack = re.search(r"(\d+) bytes cumulative stack size", usage[2])
    shared = re.search(r"(\d+) bytes smem", usage[2])
    return Resources(
        registers=int(usage[1]),
        spill_bytes=int(spills[2]) + int(spills[3]),
        local_bytes=int(spills[1]),
        stack_bytes=int(stack[1]) if stack else 0,
        static_shared_bytes=int(shared[1]) if shared else 0,
        instructions=dict(sorted(counts.items())),
    )


# --- cache -----------------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where cubins are kept between processes."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # a relative path is to be ignored, says the XDG specification
        return Path(base) / "nbverify"
    try:
        return Path.home() / ".cache" / "nbverify"
    except RuntimeError:  # a user without a home, as in containers
        return Path(tempfile.gettempdir()) / f"nbverify-{os.getuid()}"


@cache
def source_hash() -> str:
    """Hash of the kernel sources: kernels/, reduce/ and the contract.

    Benchmark results carry it, so that anyone sees whether a figure belongs to the code.
    """
    root = Path(__file__).parent
    return _hash_files([root / "contract.py", *root.glob("kernels/*.py"), *root.glob("reduce/*.py")])


@cache
def tree_source_hash() -> str:
    """Hash of the sources of the tree step's kernels: tree/kernels/, and the verify kernels' that they build on."""
    return _digest((source_hash(), _hash_files([*(Path(__file__).parent / "tree" / "kernels").glob("*.py")])))[:16]


def _stage_hash(stage: Stage) -> str:
    """Hash of the file that a stage's body is in, which may be anyone's."""
    found = importlib.util.find_spec(stage.module)
    return _hash_files([Path(found.origin)]) if found is not None and found.origin else ""


@cache
def _build_hash() -> str:
    """Hash of what else a cubin depends on: how it is built, and constants that kernels import."""
    root = Path(__file__).parent
    return _hash_files([root / "compile.py", root / "spec.py", root / "findings.py"])


def _hash_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def toolkit_versions() -> dict[str, str]:
    """Versions of the packages that turn a body into a cubin, those that are installed."""
    found = {}
    for package in _TOOLKIT_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def cache_file(spec: VerifySpec, target: Target, geometry: Geometry, *, debug: bool = False) -> Path:
    """Where the kernels of a spec are kept once they are compiled."""
    parts = (
        source_hash(),
        _build_hash(),
        spec.compile_key,
        repr(geometry),
        describe_function(spec.score_mod),
        debug,
        target.name,
        toolkit_versions(),
    )
    return cache_directory() / f"{_digest(parts)}.json"


def cache_file_of_stage(stage: Stage, target: Target) -> Path:
    """Where the kernel of a stage is kept once it is compiled."""
    sources = tree_source_hash(), _build_hash(), _stage_hash(stage)
    return cache_directory() / f"{_digest((*sources, stage.compile_key, target.name, toolkit_versions()))}.json"


def _digest(parts: tuple) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def describe_function(function: Callable | None, known: tuple = ()) -> object:
    """What a ``score_mod`` compiles to: bytecode, names, constants, and the values that it and its callees use.

    ``known`` are the functions and modules that led here: what leads back to itself is described once.
    """
    if function is None:
        return None
    code = function.__code__
    used = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            used[name] = cell.cell_contents
    names = _names_used(code)
    used |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    values = tuple((name, _describe_value(used[name], names, (*known, function))) for name in sorted(used))
    return (_describe_code(code), function.__defaults__, values)


def _describe_code(code: CodeType) -> tuple:
    constants = tuple(_describe_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def _names_used(code: CodeType) -> set[str]:
    """Globals and attributes that the code, or a function inside it, mentions."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*(_names_used(c) for c in inner))


def _describe_value(value: object, names: set[str], known: tuple) -> object:
    """A captured value; of a module, those attributes that the code mentions by name."""
    function = getattr(value, "py_func", value)  # of a numba dispatcher
    for i, one in enumerate(known):
        if function is one:
            return i
    if isinstance(function, FunctionType):
        return describe_function(function, known)
    if isinstance(value, ModuleType):
        inside = sorted(name for name in names if hasattr(value, name))
        return (value.__name__, [(n, _describe_value(getattr(value, n), names, (*known, value))) for n in inside])
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, [_describe_value(item, names, known) for item in value])
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _write_cached(path: Path, kernels: tuple[CompiledKernel, ...]) -> None:
    record = []
    for kernel in kernels:
        entry = asdict(kernel)
        entry["cubin"] = base64.b64encode(kernel.cubin).decode()
        record.append(entry)
    text = json.dumps(record)
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{_checksum(text)}\n{text}")
        os.replace(temporary, path)
    except OSError:
        pass  # a full disk, a read-only home: the next process compiles again
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read_cached(path: Path) -> tuple[CompiledKernel, ...] | None:
    """The kernels of a cache file; None if there is none, or if it is not what was written."""
    try:
        checksum, text = path.read_text().split("\n", 1)
    except (OSError, ValueError):
        return None
    if checksum != _checksum(text):
        return None
    kernels = []
    for entry in json.loads(text):
        entry["cubin"] = base64.b64decode(entry["cubin"])
        entry["resources"] = Resources(**entry["resources"])
        entry["parameters"] = tuple(Parameter(**p) for p in entry["parameters"])
        kernels.append(CompiledKernel(**entry))
    return tuple(kernels)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
