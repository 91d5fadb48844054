"""The doctor's verdict on made-up machines: each fault is named, with what to type; and on this one."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nbverify import compile, doctor, presets
from nbverify.cli import main
from nbverify.doctor import FAIL, OK, WARN, Facts, Gpu
from nbverify.spec import KERNELS

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

RTX_PRO_6000 = Gpu(0, "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 101_376, True)
H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 232_448, True)
WITH_GPU = Facts(
    python=(3, 12, 3),
    versions={name: "1.0" for name in doctor.PACKAGES} | {"numpy": "2.4.6", "numba-cuda": "0.30.4"},
    toolkit=dict.fromkeys(doctor.TOOLKIT_PIECES, "/somewhere"),
    toolkit_version=(12, 9),
    driver_cuda=(13, 0),
    gpus=(RTX_PRO_6000,),
    hardware=("/dev/nvidia0",),
    cupy_packages=("cupy-cuda13x 14.2.0",),
    cache_path="/home/me/.cache/nbverify",
)
NO_DRIVER = {
    "gpus": (),
    "driver_cuda": None,
    "driver_missing": True,
    "driver_error": "no driver library: libcuda.so.1: cannot open shared object file",
    "cupy_packages": (),
}
WITHOUT_GPU = replace(WITH_GPU, hardware=(), **NO_DRIVER)


def finding(facts: Facts, name: str) -> doctor.Finding:
    (found,) = [f for f in doctor.examine(facts) if f.name == name]
    return found


def statuses(facts: Facts) -> dict[str, str]:
    """Findings that are not ok."""
    return {f.name: f.status for f in doctor.examine(facts) if f.status != OK}


@pytest.mark.parametrize("facts", [WITH_GPU, WITHOUT_GPU], ids=["gpu", "emulator only"])
def test_a_sound_machine(facts):
    assert statuses(facts) == {}
    assert doctor.can_run(doctor.examine(facts))


# name of the fault -> (facts, finding, status, words of its detail, words of its fix)
FAULTS = {
    "numpy 2.5": (
        replace(
            WITH_GPU,
            versions=WITH_GPU.versions | {"numpy": "2.5.2"},
            numba_error="ImportError: Numba needs NumPy 2.4 or less",
        ),
        "numpy",
        FAIL,
        ["2.5.2", "numba-cuda 0.30"],
        "pip install 'numpy<2.5'",
    ),
    "numpy 2.5 explains numba": (
        replace(WITH_GPU, versions=WITH_GPU.versions | {"numpy": "2.5.2"}, numba_error="ImportError: Numba needs"),
        "numba-cuda",
        FAIL,
        ["ImportError: Numba needs"],
        "pip install 'numpy<2.5'",
    ),
    "numba does not import": (
        replace(WITH_GPU, numba_error="OSError: libllvm"),
        "numba-cuda",
        FAIL,
        ["0.30.4", "OSError: libllvm"],
        "pip install 'numba-cuda[cu13]",
    ),
    "another numba-cuda": (
        replace(WITH_GPU, versions=WITH_GPU.versions | {"numba-cuda": "0.31.0"}),
        "numba-cuda",
        FAIL,
        ["0.31.0", "0.30.2 <= version < 0.31"],
        "pip install 'numba-cuda[cu13]",
    ),
    "no greenlet": (
        replace(WITHOUT_GPU, versions=WITHOUT_GPU.versions | {"greenlet": None}),
        "packages",
        FAIL,
        ["greenlet"],
        "pip install greenlet",
    ),
    "old Python": (replace(WITH_GPU, python=(3, 9, 1)), "Python", FAIL, ["3.9.1", "3.10"], "venv"),
    "no libNVVM, with a GPU": (
        replace(WITH_GPU, toolkit=WITH_GPU.toolkit | {"libNVVM": None}),
        "CUDA toolkit",
        FAIL,
        ["libNVVM"],
        "pip install 'numba-cuda[cu13]'",
    ),
    "no libNVVM, without a GPU": (
        replace(WITHOUT_GPU, toolkit=WITH_GPU.toolkit | {"libNVVM": None}),
        "CUDA toolkit",
        WARN,
        ["libNVVM", "emulator"],
        "pip install 'numba-cuda[cu12]'",
    ),
    "no linker, with a GPU": (
        replace(WITH_GPU, toolkit=WITH_GPU.toolkit | {"nvJitLink": None}),
        "CUDA toolkit",
        FAIL,
        ["nvJitLink"],
        "pip install 'numba-cuda[cu13]'",
    ),
    "no driver, but a GPU": (
        replace(WITH_GPU, **NO_DRIVER),
        "driver",
        FAIL,
        ["libcuda.so.1", "/dev/nvidia0"],
        "--gpus all",
    ),
    "driver and library of two versions": (
        replace(WITH_GPU, gpus=(), driver_code=803, driver_error="cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        "driver",
        FAIL,
        ["DRIVER_MISMATCH", "/dev/nvidia0"],
        "nvidia-smi",
    ),
    "a GPU that is not visible": (
        replace(WITH_GPU, gpus=(), driver_code=100, driver_error="cuInit: CUDA_ERROR_NO_DEVICE", visible_devices="7"),
        "driver",
        FAIL,
        ["NO_DEVICE"],
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "old driver": (
        replace(
            WITH_GPU, driver_cuda=(12, 4), toolkit_version=(13, 1), cupy_packages=("cupy-cuda12x 13.6.0",)
        ),
        "driver version",
        FAIL,
        ["driver supports CUDA 12.4", "toolkit is CUDA 13.1", "PTX"],
        "pip install 'nbverify[cu12]'",
    ),
    "very old driver": (
        replace(WITH_GPU, driver_cuda=(11, 8)),
        "driver version",
        FAIL,
        ["CUDA 11.8", "12.4 or newer"],
        "sudo apt install nvidia-driver-580",
    ),
    "driver without cuFuncLoad": (
        replace(WITH_GPU, driver_cuda=(12, 3), cupy_packages=("cupy-cuda12x 13.6.0",)),
        "driver version",
        FAIL,
        ["CUDA 12.3", "12.4 or newer", "cuFuncLoad"],
        "sudo apt install nvidia-driver-580   # or any driver from 550 on",
    ),
    "the same, and no toolkit version": (
        replace(WITH_GPU, driver_cuda=(12, 3), toolkit_version=None, cupy_packages=("cupy-cuda12x 13.6.0",)),
        "driver version",
        FAIL,
        ["CUDA 12.3", "12.4 or newer"],
        "sudo apt install nvidia-driver-580",
    ),
    "toolkit that does not know the GPU": (
        replace(WITH_GPU, toolkit_version=(12, 4)),
        "GPU 0",
        FAIL,
        ["12.4", "sm_120", "12.8"],
        "pip install --upgrade",
    ),
    "old GPU": (
        replace(WITH_GPU, gpus=(replace(RTX_PRO_6000, name="T4", cc=(7, 5)),)),
        "GPU 0",
        FAIL,
        ["T4", "sm_75", "sm_80"],
        "CUDA_VISIBLE_DEVICES",
    ),
    "no cooperative launch": (
        replace(WITH_GPU, gpus=(replace(RTX_PRO_6000, cooperative=False),)),
        "GPU 0",
        WARN,
        ["cooperative launch no", "grid_sync"],
        'reduction="two_launch"',
    ),
    "shared memory too small": (
        replace(WITH_GPU, gpus=(replace(RTX_PRO_6000, shared_optin_bytes=49_152),)),
        "fits GPU 0",
        WARN,
        ["49,152", "smollm2-135m; too large: kimi-k2.6-tp8 (", "bytes)"],
        "max_requests",
    ),
    "no CuPy": (replace(WITH_GPU, cupy_packages=()), "CuPy", WARN, ["demo"], "pip install 'nbverify[cu13]'"),
    "CuPy newer than the driver": (
        replace(WITH_GPU, driver_cuda=(12, 8)),
        "CuPy",
        WARN,
        ["cupy-cuda13x", "12.8"],
        "pip uninstall -y cupy-cuda13x; pip install 'nbverify[cu12]'",
    ),
    "two CuPys": (
        replace(WITH_GPU, cupy_packages=("cupy-cuda12x 14.2.0", "cupy-cuda13x 14.2.0")),
        "CuPy",
        WARN,
        ["more than one"],
        "pip uninstall -y cupy-cuda12x cupy-cuda13x",
    ),
    "CuPy does not import": (
        replace(WITH_GPU, cupy_error="ImportError: x"),
        "CuPy",
        WARN,
        ["ImportError: x"],
        "pip install 'nbverify[cu13]' --force-reinstall",
    ),
    "override for another GPU": (
        replace(WITH_GPU, override="9.0", override_cc=(9, 0)),
        "NUMBA_FORCE_CUDA_CC",
        FAIL,
        ["9.0", "will not load", "sm_120"],
        "unset NUMBA_FORCE_CUDA_CC",
    ),
    "override for a newer GPU": (
        replace(WITH_GPU, override="12.1", override_cc=(12, 1)),
        "NUMBA_FORCE_CUDA_CC",
        FAIL,
        ["12.1", "will not load", "sm_120"],
        "unset NUMBA_FORCE_CUDA_CC",
    ),
    "override for this GPU": (
        replace(WITH_GPU, gpus=(H200,), override="9.0", override_cc=(9, 0)),
        "NUMBA_FORCE_CUDA_CC",
        WARN,
        ["9.0: kernels are compiled for it, without"],
        "unset NUMBA_FORCE_CUDA_CC",
    ),
    "override of before 8.0": (
        replace(WITHOUT_GPU, override="7.5", override_cc=(7, 5)),
        "NUMBA_FORCE_CUDA_CC",
        FAIL,
        ["7.5", "8.0 or higher"],
        "unset NUMBA_FORCE_CUDA_CC",
    ),
    "override that numba does not take": (
        replace(WITH_GPU, override="sm_120", override_error="expected ..., got 'sm_120'"),
        "NUMBA_FORCE_CUDA_CC",
        FAIL,
        ["expected ..., got 'sm_120'"],
        "unset NUMBA_FORCE_CUDA_CC   # or write it as in 12.0",
    ),
    "numba's simulator": (
        replace(WITHOUT_GPU, simulator="1"),
        "NUMBA_ENABLE_CUDASIM",
        FAIL,
        ["1: numba's simulator replaces numba.cuda", "emulator"],
        "unset NUMBA_ENABLE_CUDASIM",
    ),
    "cache that cannot be written": (
        replace(WITH_GPU, cache_error="Read-only file system"),
        "cache",
        WARN,
        ["/home/me/.cache/nbverify", "Read-only"],
        "export XDG_CACHE_HOME",
    ),
    "no cache directory": (
        replace(WITH_GPU, cache_path="", cache_error="RuntimeError: Could not determine home directory."),
        "cache",
        WARN,
        ["its directory cannot be used (RuntimeError: Could"],
        "export XDG_CACHE_HOME",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_and_has_a_fix(fault):
    facts, name, status, details, fix = FAULTS[fault]
    found = finding(facts, name)
    assert found.status == status
    for words in details:
        assert words in found.detail
    assert fix in found.fix
    assert doctor.can_run(doctor.examine(facts)) == (status == WARN)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_not_ok_has_a_fix(fault):
    assert all(f.fix for f in doctor.examine(FAULTS[fault][0]) if f.status != OK)


def test_one_fault_gives_one_finding():
    spread = {  # one cause that two findings show
        "numpy 2.5": {"numpy", "numba-cuda"},
        "numpy 2.5 explains numba": {"numpy", "numba-cuda"},
        "very old driver": {"driver version", "CuPy"},
        "toolkit that does not know the GPU": {"GPU 0"},
    }
    for fault, (facts, name, *_) in FAULTS.items():
        assert set(statuses(facts)) == spread.get(fault, {name}), fault


def test_hidden_gpus_are_no_fault():
    hidden = replace(WITH_GPU, gpus=(), driver_code=100, driver_error="cuInit: NO_DEVICE", visible_devices="")
    assert statuses(hidden) == {}
    assert "CUDA_VISIBLE_DEVICES" in finding(hidden, "driver").detail


def test_an_old_driver_without_a_gpu_is_no_fault():
    old = replace(WITHOUT_GPU, driver_missing=False, driver_code=100, driver_cuda=(11, 8))
    assert statuses(old) == {}


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_simulator_that_is_off(value):
    assert finding(replace(WITH_GPU, simulator=value), "NUMBA_ENABLE_CUDASIM").status == OK


def test_an_override_loads_on_later_minors_of_its_major():
    def status(cc: tuple[int, int], gpu: tuple[int, int]) -> str:
        facts = replace(WITH_GPU, gpus=(replace(H200, cc=gpu),), override="x", override_cc=cc)
        return finding(facts, "NUMBA_FORCE_CUDA_CC").status

    assert status((8, 0), (8, 9)) == status((8, 9), (8, 9)) == WARN
    assert status((8, 9), (8, 6)) == status((8, 0), (9, 0)) == status((9, 0), (8, 9)) == FAIL


@pytest.mark.parametrize("value, cc", [("9.0", (9, 0)), ("12.0", (12, 0)), ("", None),
                                       ("90", None), ("sm_90", None), ("9.0a", None)])  # fmt: skip
def test_the_override_is_read_as_numba_reads_it(monkeypatch, value, cc):
    monkeypatch.setenv("NUMBA_FORCE_CUDA_CC", value)
    facts = doctor.gather_facts()
    assert (facts.override, facts.override_cc) == (value, cc)
    fields = {name: getattr(facts, name) for name in ("override", "override_cc", "override_error")}
    found = finding(replace(WITHOUT_GPU, **fields), "NUMBA_FORCE_CUDA_CC")
    if cc or not value:
        assert facts.override_error is None and found.status == (WARN if cc else OK)
    else:
        assert found.status == FAIL and "major.minor" in found.detail and repr(value) in found.detail


def test_the_simulator_is_seen(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert finding(doctor.gather_facts(), "NUMBA_ENABLE_CUDASIM").status == FAIL


# --- a doctor does not die -------------------------------------------------------------------------------------------


def refuse(name: str):
    def function(*_, **__):
        raise PermissionError(13, "Permission denied", name)

    return function


@pytest.mark.parametrize("owner, name", [(doctor.os, "scandir"), (Path, "mkdir"),
                                         (doctor.tempfile, "NamedTemporaryFile")])  # fmt: skip
def test_a_cache_that_is_not_ours(monkeypatch, tmp_path, owner, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(owner, name, refuse(name))
    fields = doctor._look_at_cache()
    assert fields == {"cache_path": str(tmp_path / "nbverify"), "cache_error": "Permission denied"}
    found = finding(replace(WITH_GPU, **fields), "cache")
    assert found.status == WARN and f"{tmp_path / 'nbverify'} cannot be used (Permission denied)" in found.detail


def test_a_cache_that_changes_meanwhile(monkeypatch, tmp_path):
    class Gone:
        name = "kernel.json"

        def stat(self):
            raise FileNotFoundError(2, "No such file or directory", self.name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor.os, "scandir", lambda _: [Gone()])
    assert doctor._look_at_cache() == {"cache_path": str(tmp_path / "nbverify"), "cache_files": 1, "cache_bytes": 0}


def test_a_cache_is_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "nbverify").mkdir()
    for name, size in (("a.json", 3), ("b.json", 4), ("c.tmp", 8)):
        (tmp_path / "nbverify" / name).write_bytes(bytes(size))
    assert doctor._look_at_cache() == {"cache_path": str(tmp_path / "nbverify"), "cache_files": 2, "cache_bytes": 7}


def test_no_home_directory(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    fields = doctor._look_at_cache()  # compile.cache_directory() has another place
    assert Path(fields["cache_path"]).parent == tmp_path and "cache_error" not in fields

    monkeypatch.setattr(compile, "cache_directory", no_home)
    assert doctor._look_at_cache() == {
        "cache_path": "",
        "cache_error": "RuntimeError: Could not determine home directory.",
    }


def test_directories_that_are_not_ours(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse("stat"))
        in_use = doctor._mps_in_use()
    assert in_use is False


def test_half_removed_packages(monkeypatch):
    class Broken:
        @property
        def metadata(self):
            raise KeyError("Name")

    def broken(name):
        raise KeyError("Version")

    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: [Broken()])
    monkeypatch.setattr(doctor.importlib.metadata, "version", broken)
    assert doctor._cupy_packages() == () and doctor._version("numpy") is None


@pytest.mark.parametrize("variables, blocked, words", [
    ({"HOME": "/dev/null", "XDG_CACHE_HOME": ""}, [], "cannot be used (Not a directory)"),
    ({"NUMBA_FORCE_CUDA_CC": "90"}, [], "unset NUMBA_FORCE_CUDA_CC"),
    ({"NUMBA_ENABLE_CUDASIM": "1"}, [], "unset NUMBA_ENABLE_CUDASIM"),
    ({}, ["numpy"], "cannot be imported"),
])  # fmt: skip
def test_command_on_a_broken_machine(tmp_path, variables, blocked, words):
    """In a process of its own: a report, exit code 0 or 1, and nothing on stderr."""
    code = (
        f"import sys; sys.modules |= dict.fromkeys({blocked}); from nbverify import cli; sys.exit(cli.main(['doctor']))"
    )
    environment = os.environ | {"COLUMNS": "300", "XDG_CACHE_HOME": str(tmp_path)} | variables
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stderr == "" and done.returncode in (0, 1)
    assert words in done.stdout and done.stdout.splitlines()[-1].startswith(("ready", "broken"))


def test_a_share_of_a_gpu_is_mentioned():
    mig = replace(WITH_GPU, mps=True, gpus=(replace(RTX_PRO_6000, name="NVIDIA H200 MIG 1g.18gb", num_sms=16),))
    assert "a MIG slice of 16 SMs" in finding(mig, "GPU 0").detail
    assert "MPS" in finding(mig, "GPU 0").detail


def test_presets_are_judged_for_known_limits_without_a_gpu():
    findings = {f.name: f.detail for f in doctor.check_presets(WITHOUT_GPU)}
    for name, limit in (("fits sm_80", "166,912"), ("fits sm_90", "232,448"), ("fits sm_120", "101,376")):
        assert limit in findings[name]
        assert all(preset in findings[name] for preset in presets.PRESETS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_presets_are_judged_by_their_own_kernel(monkeypatch, kernel):
    """All fit every known device; what does not fit is named, with its bytes."""
    made = {name: replace(presets.preset(name), kernel=kernel) for name in presets.PRESETS}
    monkeypatch.setattr(presets, "preset", made.get)
    for cc, limits in doctor.SM_LIMITS.items():
        found = doctor.check_presets_fit("fits", cc, limits.shared_optin_bytes)
        assert found.status == doctor.OK, (cc, found.detail)
    made["smollm2-135m"] = replace(made["smollm2-135m"], max_requests=14_000)
    found = doctor.check_presets_fit("fits", (12, 0), 101_376)
    assert found.status == doctor.WARN
    assert re.search(r"too large: smollm2-135m \(\d+ bytes\)", found.detail), found.detail


def test_bounds_are_those_of_pyproject():
    def bounds(package: str) -> tuple:
        low, high = re.search(rf'"{package}>=([\d.]+),<([\d.]+)"', PYPROJECT).groups()
        return doctor.parse_version(low), doctor.parse_version(high)

    assert bounds("numpy") == doctor.NUMPY_RANGE
    assert bounds("numba-cuda") == doctor.NUMBA_CUDA_RANGE
    low = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    assert doctor.parse_version(low) == doctor.PYTHON_MIN


@pytest.mark.parametrize(
    "text, numbers", [("2.5.0rc1", (2, 5, 0)), ("0.30.4", (0, 30, 4)), ("2.5.dev0+git", (2, 5)), ("?", ())]
)
def test_parse_version(text, numbers):
    assert doctor.parse_version(text) == numbers


def test_this_machine_can_be_examined(has_gpu):
    facts = doctor.gather_facts()
    assert bool(facts.gpus) == has_gpu
    assert facts.versions["numpy"] and facts.python >= doctor.PYTHON_MIN
    assert finding(facts, "numba-cuda").status == OK  # the tests could not run without it
    json.dumps(asdict(facts))


def test_gathering_survives_anything_missing(monkeypatch, tmp_path):
    """No package, no library, no driver, and a cache under a file: facts, not exceptions."""

    def missing(name, *_, **__):
        raise ModuleNotFoundError(f"No module named {name!r}")

    def no_library():
        raise OSError("libcuda.so.1: cannot open shared object file")

    def no_package(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(doctor.importlib, "import_module", missing)
    monkeypatch.setattr(doctor.importlib.metadata, "version", no_package)
    monkeypatch.setattr(doctor, "_load_driver", no_library)
    monkeypatch.setitem(doctor.sys.modules, "cuda.pathfinder", None)
    monkeypatch.setitem(doctor.sys.modules, "cuda.bindings", None)
    facts = doctor.gather_facts()
    assert facts.driver_missing and "cannot open" in facts.driver_error
    assert facts.numba_error == "ModuleNotFoundError: No module named 'numba.cuda'"
    assert set(facts.versions.values()) == set(facts.toolkit.values()) == {None}
    assert facts.cache_error
    failed = {f.name for f in doctor.examine(replace(facts, hardware=())) if f.status == FAIL}
    assert failed == {"numpy", "numba-cuda", "packages"}


class FakeDriver:
    """libcuda by its functions; each call answers with what the test says."""

    def __init__(self, version: int, init: int, devices: int):
        self.version, self.init, self.devices = version, init, devices

    def cuDriverGetVersion(self, out):
        out._obj.value = self.version
        return 0

    def cuInit(self, flags):
        return self.init

    def cuDeviceGetCount(self, out):
        out._obj.value = self.devices
        return 0

    def cuDeviceGet(self, out, ordinal):
        out._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, out, size, device):
        out.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, out, attribute, device):
        out._obj.value = {16: 132, 75: 9, 76: 0, 95: 0, 97: 232_448}[attribute]
        return 0

    def cuGetErrorName(self, code, out):
        out._obj.value = b"CUDA_ERROR_SOMETHING"
        return 0

    def cuGetErrorString(self, code, out):
        out._obj.value = b"something"
        return 0


def test_driver_is_asked(monkeypatch):
    monkeypatch.setattr(doctor, "_load_driver", lambda: FakeDriver(12040, 0, 1))
    facts = doctor.gather_facts()
    assert facts.driver_cuda == (12, 4) and facts.driver_error is None
    assert facts.gpus == (Gpu(0, "NVIDIA H200", (9, 0), 132, 232_448, False),)


@pytest.mark.parametrize("init, devices, error", [(803, 0, "cuInit: CUDA_ERROR_SOMETHING (803): something"),
                                                  (0, 0, "cuDeviceGetCount: no device")])  # fmt: skip
def test_driver_that_fails(monkeypatch, init, devices, error):
    monkeypatch.setattr(doctor, "_load_driver", lambda: FakeDriver(13000, init, devices))
    facts = doctor.gather_facts()
    assert facts.driver_cuda == (13, 0) and facts.driver_error == error and facts.gpus == ()


@pytest.mark.parametrize("facts, code, last", [(WITH_GPU, 0, "ready: nbverify demo"),
                                               (WITHOUT_GPU, 0, "ready without a GPU"),
                                               (FAULTS["old driver"][0], 1, "broken")])  # fmt: skip
def test_command(monkeypatch, capsys, facts, code, last):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(doctor, "gather_facts", lambda: facts)
    assert main(["doctor"]) == code
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(last)
    for found in doctor.examine(facts):
        assert found.detail in printed and found.fix in printed


def test_command_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather_facts", lambda: FAULTS["old driver"][0])
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is False
    assert record["facts"]["driver_cuda"] == [12, 4]
    (found,) = [f for f in record["findings"] if f["status"] == "fail"]
    assert found["name"] == "driver version" and "nbverify[cu12]" in found["fix"]
