"""Can nbverify run on this machine?  What is found, what is wrong, and what to type.

``gather_facts()`` looks; the ``check_*`` functions judge.  They are pure, Facts -> Finding, so that a test can make up
any machine.  Looking must work on a broken machine: the driver is asked through ctypes, not through the CUDA bindings,
and whatever cannot be imported is a fact, not an exception.

A machine without a GPU is a sound one: the emulator runs, and kernels compile for any GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from nbverify.errors import ArgumentError

OK, WARN, FAIL = "ok", "warn", "fail"

# The bounds of pyproject.toml (a test compares them), where a wrong version has been seen to break something.
PYTHON_MIN = (3, 10)
NUMPY_RANGE = ((1, 26), (2, 5))
NUMBA_CUDA_RANGE = ((0, 30, 2), (0, 31))

MIN_DRIVER_CUDA = (12, 4)  # the first with cuFuncLoad, which loads a kernel before a graph captures it
MIN_CC = (8, 0)
# The first toolkit that compiles for a GPU, where 12.0 is not enough.
MIN_TOOLKIT = {(10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8), (12, 1): (12, 9)}

PACKAGES = ("numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "cuda-pathfinder", "ml-dtypes", "greenlet")
# Loaded or opened at compile time: name in messages -> the cuda.pathfinder call and its argument.
TOOLKIT_PIECES = {
    "libNVVM": ("load_nvidia_dynamic_lib", "nvvm"),
    "libdevice": ("find_bitcode_lib", "device"),
    "nvJitLink": ("load_nvidia_dynamic_lib", "nvJitLink"),
}

CUDA_ERROR_NO_DEVICE = 100
NVIDIA_PCI_VENDOR = "0x10de"
PCI_DISPLAY_CLASS = "0x03"  # VGA, 3D and other display controllers

# CUdevice_attribute
ATTRIBUTES = {
    "num_sms": 16,
    "cc_major": 75,
    "cc_minor": 76,
    "cooperative": 95,
    "shared_optin_bytes": 97,
}


@dataclass(frozen=True)
class SmLimits:
    """What one SM offers to resident blocks (CUDA C++ Programming Guide, "Technical Specifications")."""

    shared_bytes: int  # of the SM; each resident block also takes 1 KiB of it for the system
    shared_optin_bytes: int  # most that one block may ask for
    max_threads: int
    max_blocks: int
    registers: int = 65_536


SM_LIMITS: dict[tuple[int, int], SmLimits] = {
    (8, 0): SmLimits(167_936, 166_912, 2048, 32),
    (8, 6): SmLimits(102_400, 101_376, 1536, 16),
    (8, 7): SmLimits(167_936, 166_912, 1536, 16),
    (8, 9): SmLimits(102_400, 101_376, 1536, 24),
    (9, 0): SmLimits(233_472, 232_448, 2048, 32),
    (10, 0): SmLimits(233_472, 232_448, 2048, 32),
    (10, 3): SmLimits(233_472, 232_448, 2048, 32),
    (12, 0): SmLimits(102_400, 101_376, 1536, 24),
    (12, 1): SmLimits(102_400, 101_376, 1536, 24),
}
SYSTEM_SHARED_BYTES = 1024  # per resident block
WARP = 32
REGISTERS_STEP = 256  # a warp's registers are handed out in such units
SHOWN_WITHOUT_GPU = ((8, 0), (9, 0), (12, 0))


@dataclass(frozen=True)
class Gpu:
    """One device as the driver describes it."""

    ordinal: int
    name: str
    cc: tuple[int, int]
    num_sms: int
    shared_optin_bytes: int
    cooperative: bool

    @property
    def sm(self) -> str:
        """sm_90."""
        return f"sm_{self.cc[0]}{self.cc[1]}"


@dataclass(frozen=True)
class Facts:
    """What was found.  ``None`` means absent; errors are the text of what came instead."""

    python: tuple[int, ...]
    versions: dict[str, str | None]
    numba_error: str | None = None  # what ``from numba import cuda`` raised
    toolkit: dict[str, str | None] = field(default_factory=dict)  # piece -> path
    toolkit_version: tuple[int, int] | None = None  # of nvJitLink
    driver_error: str | None = None  # libcuda is missing, or cuInit failed
    driver_missing: bool = False  # there is no libcuda
    driver_code: int = 0  # of cuInit
    driver_cuda: tuple[int, int] | None = None  # newest CUDA that the driver supports
    gpus: tuple[Gpu, ...] = ()
    hardware: tuple[str, ...] = ()  # signs of an NVIDIA GPU that need no driver
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    mps: bool = False  # an MPS server seems to be in use
    cupy_packages: tuple[str, ...] = ()  # "cupy-cuda12x 13.6.0"
    cupy_error: str | None = None  # what importing CuPy raised, if one is installed
    override: str | None = None  # NUMBA_FORCE_CUDA_CC
    override_cc: tuple[int, int] | None = None  # what numba understands of it
    override_error: str | None = None  # why it understands nothing
    simulator: str | None = None  # NUMBA_ENABLE_CUDASIM
    cache_path: str = ""
    cache_error: str | None = None  # why it cannot be read or written
    cache_files: int = 0
    cache_bytes: int = 0

    @property
    def gpu_wanted(self) -> bool:
        """Whether this machine has, or should have, a GPU for us: without one, its needs are only worth a warning."""
        return bool(self.gpus) or (bool(self.hardware) and not self.gpu_hidden)

    @property
    def gpu_hidden(self) -> bool:
        """CUDA_VISIBLE_DEVICES names no device: whoever set it wants none."""
        return self.visible_devices is not None and self.visible_devices.strip() in ("", "-1", "NoDevFiles")

    @property
    def extra(self) -> str:
        """The extra of nbverify that fits the driver."""
        return "cu13" if self.driver_cuda is not None and self.driver_cuda[0] >= 13 else "cu12"


@dataclass(frozen=True)
class Finding:
    """One line of the report.  ``fix`` is what to type; empty when there is nothing to do."""

    name: str
    status: str  # OK, WARN: it runs, with something less; FAIL: it does not run
    detail: str
    fix: str = ""


# --- checks: Facts -> Finding ----------------------------------------------------------------------------------------


def check_python(facts: Facts) -> Finding:
    """Python is new enough."""
    text = ".".join(map(str, facts.python))
    if facts.python[:2] < PYTHON_MIN:
        return Finding("Python", FAIL, f"{text}; 3.10 or newer is needed", "python3.12 -m venv .venv   # then install")
    return Finding("Python", OK, text)


def check_numpy(facts: Facts) -> Finding:
    """The numpy version is one that numba-cuda works with."""
    version = facts.versions.get("numpy")
    low, high = NUMPY_RANGE
    if version is None:
        return Finding("numpy", FAIL, "not installed", "pip install 'numpy<2.5'")
    if parse_version(version) >= high:
        return Finding("numpy", FAIL, f"{version}: numba-cuda 0.30 does not work with 2.5", "pip install 'numpy<2.5'")
    if parse_version(version) < low:
        return Finding("numpy", FAIL, f"{version}: older than 1.26", "pip install 'numpy>=1.26,<2.5'")
    return Finding("numpy", OK, version)


def check_numba(facts: Facts) -> Finding:
    """numba-cuda is of the tested series, and imports."""
    version = facts.versions.get("numba-cuda")
    low, high = NUMBA_CUDA_RANGE
    install = f"pip install 'numba-cuda[{facts.extra}]>=0.30.2,<0.31'"
    if version is None:
        return Finding("numba-cuda", FAIL, "not installed", install)
    if not low <= parse_version(version) < high:
        return Finding(
            "numba-cuda", FAIL, f"{version}: outside 0.30.2 <= version < 0.31, which nbverify needs", install
        )
    if facts.numba_error:
        fix = "pip install 'numpy<2.5'" if check_numpy(facts).status == FAIL else f"{install} --force-reinstall"
        return Finding("numba-cuda", FAIL, f"{version} is installed, but cannot be imported: {facts.numba_error}", fix)
    return Finding("numba-cuda", OK, f"{version}, numba {facts.versions.get('numba')}")


def check_packages(facts: Facts) -> Finding:
    """Everything else that the base package depends on is installed."""
    rest = [name for name in PACKAGES if name not in ("numpy", "numba-cuda")]
    missing = [name for name in rest if facts.versions.get(name) is None]
    if missing:
        return Finding("packages", FAIL, f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("packages", OK, ", ".join(f"{name} {facts.versions[name]}" for name in rest))


def check_toolkit(facts: Facts) -> Finding:
    """The pieces of the CUDA toolkit that compiling needs."""
    missing = [piece for piece in TOOLKIT_PIECES if not facts.toolkit.get(piece)]
    if missing:
        return Finding(
            "CUDA toolkit",
            FAIL if facts.gpu_wanted else WARN,
            f"not found: {', '.join(missing)}; kernels cannot be compiled"
            + ("" if facts.gpu_wanted else " (the emulator does not need it)"),
            f"pip install 'numba-cuda[{facts.extra}]'",
        )
    version = f"{dotted(facts.toolkit_version)}: " if facts.toolkit_version else ""
    return Finding("CUDA toolkit", OK, version + ", ".join(TOOLKIT_PIECES))


def check_driver(facts: Facts) -> Finding:
    """The driver, if there is hardware for it."""
    if facts.driver_error is None:
        return Finding("driver", OK, f"supports CUDA {dotted(facts.driver_cuda)}, {len(facts.gpus)} GPU(s)")
    emulator_only = "no GPU here: the emulator runs, and kernels compile for any GPU"
    if facts.gpu_hidden:
        return Finding("driver", OK, f"{emulator_only} (CUDA_VISIBLE_DEVICES={facts.visible_devices!r} hides all GPUs)")
    if not facts.hardware and (facts.driver_missing or facts.driver_code == CUDA_ERROR_NO_DEVICE):
        return Finding("driver", OK, f"{emulator_only} ({facts.driver_error})")
    seen = f"; this machine has a GPU: {', '.join(facts.hardware)}" if facts.hardware else ""
    if facts.driver_missing:
        fix = "install NVIDIA's driver (sudo apt install nvidia-driver-580); in a container: docker run --gpus all"
    elif facts.driver_code == CUDA_ERROR_NO_DEVICE and facts.visible_devices is not None:
        fix = f"unset CUDA_VISIBLE_DEVICES   # it is {facts.visible_devices!r}"
    else:
        fix = "nvidia-smi   # if it fails too: reboot, or reinstall the driver; in a container: docker run --gpus all"
    return Finding("driver", FAIL, f"{facts.driver_error}{seen}", fix)


def check_driver_version(facts: Facts) -> Finding:
    """The driver has all that plans call, and runs what the toolkit makes: no cubin of a later major CUDA version."""
    name = "driver version"
    if facts.driver_cuda is None or not facts.gpu_wanted:
        return Finding(name, OK, f"nothing to compare: no {'driver version' if facts.gpu_wanted else 'GPU'}")
    if facts.driver_cuda < MIN_DRIVER_CUDA:
        return Finding(
            name,
            FAIL,
            f"the driver supports CUDA {dotted(facts.driver_cuda)} at most; {dotted(MIN_DRIVER_CUDA)} or newer is "
            "needed (cuFuncLoad)",
            "sudo apt install nvidia-driver-580   # or any driver from 550 on",
        )
    if facts.toolkit_version is None:
        return Finding(name, OK, f"for CUDA {dotted(facts.driver_cuda)}; no toolkit to compare it with")
    driver, toolkit = dotted(facts.driver_cuda), dotted(facts.toolkit_version)
    if facts.driver_cuda[0] >= facts.toolkit_version[0]:
        return Finding(name, OK, f"for CUDA {driver}, toolkit {toolkit}")
    detail = (
        f"the driver supports CUDA {driver} at most, the toolkit is CUDA {toolkit}: "
        f"what it compiles (PTX and cubins of CUDA {toolkit}) does not load"
    )
    fix = (
        "pip uninstall -y cupy-cuda13x nvidia-nvvm nvidia-nvjitlink nvidia-cuda-runtime && "
        f"pip install 'nbverify[cu{facts.driver_cuda[0]}]'   # or upgrade the driver"
    )
    return Finding(name, FAIL, detail, fix)


def check_gpu(facts: Facts, gpu: Gpu) -> Finding:
    """One device: capability, toolkit that knows it, cooperative launch."""
    name = f"GPU {gpu.ordinal}"
    shares = [f"a MIG slice of {gpu.num_sms} SMs"] if "MIG" in gpu.name else []
    shares += (
        ["MPS is in use: its active-thread percentage can make cooperative launches too large"] if facts.mps else []
    )
    detail = (
        f"{gpu.name}, {gpu.sm}, {gpu.num_sms} SMs, {gpu.shared_optin_bytes:,} bytes of shared memory a block, "
        f"cooperative launch {'yes' if gpu.cooperative else 'no'}" + "".join(f"; {text}" for text in shares)
    )
    if gpu.cc < MIN_CC:
        return Finding(
            name, FAIL, f"{detail}; sm_80 or newer is needed", "choose another GPU: CUDA_VISIBLE_DEVICES=<ordinal>"
        )
    needed = MIN_TOOLKIT.get(gpu.cc)
    if needed and facts.toolkit_version and facts.toolkit_version < needed:
        return Finding(
            name,
            FAIL,
            f"{detail}; toolkit {dotted(facts.toolkit_version)} cannot compile for {gpu.sm}, {dotted(needed)} can",
            f"pip install --upgrade 'numba-cuda[{facts.extra}]' 'cuda-toolkit>={dotted(needed)}'",
        )
    if not gpu.cooperative:
        return Finding(
            name,
            WARN,
            f'{detail}; the default reduction "grid_sync" needs it',
            'VerifySpec(..., reduction="two_launch")',
        )
    return Finding(name, OK, detail)


def check_cupy(facts: Facts) -> Finding:
    """CuPy, which only the demo and the tests on a GPU need: a user may bring torch or any other arrays."""
    install = f"pip install 'nbverify[{facts.extra}]'"
    majors = [int(m[1]) for package in facts.cupy_packages if (m := re.match(r"cupy-cuda(\d+)x", package))]
    if not facts.cupy_packages:
        if facts.gpus:
            return Finding("CuPy", WARN, "not installed; `nbverify demo` and the GPU tests need it", install)
        return Finding("CuPy", OK, "not installed, and not needed without a GPU")
    text = ", ".join(facts.cupy_packages)
    if len(facts.cupy_packages) > 1:
        names = " ".join(package.split()[0] for package in facts.cupy_packages)
        return Finding(
            "CuPy", WARN, f"{text}: more than one, they overwrite each other", f"pip uninstall -y {names}; {install}"
        )
    if facts.driver_cuda and majors and majors[0] > facts.driver_cuda[0]:
        return Finding(
            "CuPy",
            WARN,
            f"{text} is for CUDA {majors[0]}, the driver supports CUDA {dotted(facts.driver_cuda)} at most",
            f"pip uninstall -y {facts.cupy_packages[0].split()[0]}; {install}",
        )
    if facts.cupy_error:
        return Finding("CuPy", WARN, f"{text} cannot be imported: {facts.cupy_error}", f"{install} --force-reinstall")
    return Finding("CuPy", OK, text)


def check_override(facts: Facts) -> Finding:
    """NUMBA_FORCE_CUDA_CC, which changes what plans are compiled for."""
    name = "NUMBA_FORCE_CUDA_CC"
    fix = "unset NUMBA_FORCE_CUDA_CC"
    if not facts.override:
        return Finding(name, OK, "not set")
    if facts.override_error:
        return Finding(name, FAIL, facts.override_error, f"{fix}   # or write it as in 12.0")
    cc = facts.override_cc
    if cc is not None and cc < MIN_CC:
        return Finding(name, FAIL, f"{facts.override}; 8.0 or higher is needed", fix)
    detail = f"{facts.override}: kernels are compiled for it, without the architecture-specific variant"
    # A cubin runs on its own major version, from its own minor one on.
    wrong = [gpu for gpu in facts.gpus if cc is not None and not cc <= gpu.cc < (cc[0] + 1, 0)]
    if wrong:
        detail += f"; they will not load on {', '.join(f'{gpu.name} ({gpu.sm})' for gpu in wrong)}"
    return Finding(name, FAIL if wrong else WARN, detail, fix)


def check_simulator(facts: Facts) -> Finding:
    """NUMBA_ENABLE_CUDASIM, which puts numba's simulator in the place of its compiler."""
    name = "NUMBA_ENABLE_CUDASIM"
    if facts.simulator in (None, "", "0"):
        return Finding(name, OK, "not set")
    return Finding(
        name,
        FAIL,
        f"{facts.simulator}: numba's simulator replaces numba.cuda, nothing can be compiled; nbverify has an emulator "
        "of its own",
        "unset NUMBA_ENABLE_CUDASIM",
    )


def check_presets(facts: Facts) -> list[Finding]:
    """Which presets fit a block's shared memory: on each GPU here, else on those of 8.0, 9.0 and 12.0."""
    if facts.gpus:
        devices = [(f"fits GPU {gpu.ordinal}", gpu.cc, gpu.shared_optin_bytes) for gpu in facts.gpus]
    else:
        devices = [(f"fits sm_{a}{b}", (a, b), SM_LIMITS[a, b].shared_optin_bytes) for a, b in SHOWN_WITHOUT_GPU]
    return [check_presets_fit(*device) for device in devices]


def check_presets_fit(name: str, cc: tuple[int, int], limit_bytes: int) -> Finding:
    """Which presets fit ``limit_bytes`` of shared memory, with the tiles chosen for such a device."""
    from nbverify import presets
    from nbverify.kernels import geometry as geo
    from nbverify.kernels.planner import geometry_of, limits_of

    fits, too_large, limits = [], [], limits_of(cc, limit_bytes)
    for preset in presets.PRESETS:
        spec = presets.preset(preset)
        try:
            geo.check_shared_memory(spec, geometry_of(spec, limits), limit_bytes)
            fits.append(preset)
        except ArgumentError as error:
            too_large.append(f"{preset} ({str(error).partition(', got ')[2].partition(':')[0]})")
    detail = f"of {limit_bytes:,} bytes a block: {', '.join(fits) or 'none'}"
    if not too_large:
        return Finding(name, OK, detail)
    return Finding(
        name,
        WARN,
        f"{detail}; too large: {', '.join(too_large)}",
        "smaller max_requests, or a GPU with more shared memory",
    )


def check_cache(facts: Facts) -> Finding:
    """Compiled kernels can be kept."""
    if facts.cache_error:
        return Finding(
            "cache",
            WARN,
            f"{facts.cache_path or 'its directory'} cannot be used ({facts.cache_error}); every process compiles again",
            "export XDG_CACHE_HOME=<a directory that you may write to>",
        )
    if not facts.cache_path:
        return Finding("cache", OK, "not looked at: nbverify.compile cannot be imported")
    return Finding("cache", OK, f"{facts.cache_path}: {facts.cache_files} kernels, {facts.cache_bytes / 2**20:.1f} MiB")


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    check_python,
    check_numpy,
    check_numba,
    check_packages,
    check_toolkit,
    check_driver,
    check_driver_version,
    check_cupy,
    check_override,
    check_simulator,
    check_cache,
)


def examine(facts: Facts) -> list[Finding]:
    """All findings, in the order of the report."""
    gpus = [check_gpu(facts, gpu) for gpu in facts.gpus]
    return [check(facts) for check in CHECKS] + gpus + check_presets(facts)


def can_run(findings: list[Finding]) -> bool:
    """Whether nothing is broken.  Emulator only counts."""
    return all(finding.status != FAIL for finding in findings)


# --- gathering -------------------------------------------------------------------------------------------------------


def gather_facts() -> Facts:
    """Look at this machine.  Raises nothing."""
    cupy_packages = _cupy_packages()
    return Facts(
        python=tuple(sys.version_info[:3]),
        versions={name: _version(name) for name in PACKAGES},
        numba_error=_import_error("numba.cuda"),
        toolkit=_find_toolkit(),
        toolkit_version=_toolkit_version(),
        **_ask_driver(),  # type: ignore[arg-type]
        hardware=_find_hardware(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        mps=_mps_in_use(),
        cupy_packages=cupy_packages,
        cupy_error=_import_error("cupy") if cupy_packages else None,
        **_read_override(),  # type: ignore[arg-type]
        simulator=os.environ.get("NUMBA_ENABLE_CUDASIM"),
        **_look_at_cache(),  # type: ignore[arg-type]
    )


def parse_version(text: str) -> tuple[int, ...]:
    """``"2.5.0rc1"`` -> (2, 5, 0): the leading numbers, which is all that the bounds here need."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dotted(version: tuple[int, ...] | None) -> str:
    """(12, 9) -> ``12.9``."""
    return ".".join(map(str, version)) if version else "unknown"


def one_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except Exception:  # not installed, or half removed
        return None


def _import_error(module: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of variables that numba cannot parse: there is a finding for that
            importlib.import_module(module)
    except Exception as error:
        return one_line(error)
    return None


def _find_toolkit() -> dict[str, str | None]:
    try:
        import cuda.pathfinder as pathfinder
    except Exception:
        return dict.fromkeys(TOOLKIT_PIECES)

    def find(function: str, argument: str) -> str | None:
        try:
            found = getattr(pathfinder, function)(argument)
        except Exception:  # its own types, one for each way not to find
            return None
        return str(getattr(found, "abs_path", found)) if found else None

    return {piece: find(*how) for piece, how in TOOLKIT_PIECES.items()}


def _toolkit_version() -> tuple[int, int] | None:
    try:
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
        return major, minor
    except Exception:
        return None


def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _ask_driver() -> dict[str, object]:
    """The driver's fields of Facts."""
    try:
        driver = _load_driver()
    except OSError as error:
        return {"driver_missing": True, "driver_error": f"no driver library: {error}"}
    version = ctypes.c_int()
    cuda = None
    if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value:
        cuda = (version.value // 1000, version.value % 1000 // 10)
    code = driver.cuInit(0)
    if code:
        return {"driver_error": f"cuInit: {_driver_text(driver, code)}", "driver_code": code, "driver_cuda": cuda}
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code or count.value == 0:
        text = _driver_text(driver, code) if code else "no device"
        return {
            "driver_error": f"cuDeviceGetCount: {text}",
            "driver_code": code or CUDA_ERROR_NO_DEVICE,
            "driver_cuda": cuda,
        }
    return {"driver_cuda": cuda, "gpus": tuple(_ask_gpu(driver, ordinal) for ordinal in range(count.value))}


def _driver_text(driver: ctypes.CDLL, code: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    driver.cuGetErrorString(code, ctypes.byref(text))
    return f"{(name.value or b'error').decode()} ({code}): {(text.value or b'no text').decode()}"


def _ask_gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    device, value = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, 256, device)
    found = {}
    for key, attribute in ATTRIBUTES.items():
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found[key] = value.value
    return Gpu(
        ordinal=ordinal,
        name=name.value.decode(errors="replace"),
        cc=(found["cc_major"], found["cc_minor"]),
        num_sms=found["num_sms"],
        shared_optin_bytes=found["shared_optin_bytes"],
        cooperative=bool(found["cooperative"]),
    )


def _find_hardware() -> tuple[str, ...]:
    """Signs of an NVIDIA GPU that need no driver: its device files, and PCI."""
    found = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA_PCI_VENDOR and kind.startswith(PCI_DISPLAY_CLASS):
            found.append(f"PCI {device.name}")
    return tuple(found)


def _mps_in_use() -> bool:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return os.path.exists(pipes / "control")  # Path.exists raises where the directory is not ours to read


def _cupy_packages() -> tuple[str, ...]:
    found = set()
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"] or "", distribution.version
        except Exception:  # half removed
            continue
        if re.fullmatch(r"cupy(-cuda\w+)?", name.lower()):
            found.add(f"{name} {version}")
    return tuple(sorted(found))


def _compile_module() -> ModuleType | None:
    try:
        from nbverify import compile
    except Exception:  # numpy is missing or broken, which other findings say
        return None
    return compile


def _read_override() -> dict[str, object]:
    """The override's fields of Facts."""
    found: dict[str, object] = {"override": os.environ.get("NUMBA_FORCE_CUDA_CC")}
    compile = _compile_module()
    if compile is not None:
        try:
            found["override_cc"] = compile.override_cc()
        except ArgumentError as error:
            found["override_error"] = str(error).partition(": ")[2]
    return found


def _look_at_cache() -> dict[str, object]:
    """The cache's fields of Facts.  The directory is made, as compiling would; the file of the trial goes at once."""
    compile = _compile_module()
    if compile is None:
        return {}
    path = ""
    try:
        directory = compile.cache_directory()
        path = str(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            sizes = [_size(entry) for entry in os.scandir(directory) if entry.name.endswith(".json")]
    except OSError as error:
        return {"cache_path": path, "cache_error": error.strerror or one_line(error)}
    except Exception as error:  # no home directory, a path that is none
        return {"cache_path": path, "cache_error": one_line(error)}
    return {"cache_path": path, "cache_files": len(sizes), "cache_bytes": sum(sizes)}


def _size(entry: os.DirEntry) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # another process has just replaced it
        return 0
