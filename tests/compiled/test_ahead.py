"""Many kernels compiled at once, in processes of their own."""

from functools import partial
from types import SimpleNamespace

import pytest

import nbverify as nv
from nbverify import ahead, compile
from tests.support.scale_stage import stage

TARGET = compile.target_of("9.0")


@pytest.fixture
def h200(monkeypatch, tmp_path):
    """What is asked of a GPU, and an empty cache."""
    monkeypatch.setattr(ahead.launch, "Device", lambda ordinal: SimpleNamespace(cc=(9, 0), shared_limit=232_448))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NBVERIFY_CC", raising=False)


def test_what_is_missing_is_compiled_and_then_is_there(h200):
    spec = nv.VerifySpec.gqa(2, 1, 16, max_requests=1, max_nodes=2, max_kv_len=64, sm_scale=0.25)
    too_wide = nv.VerifySpec.gqa(1, 1, 512, max_requests=1, max_nodes=2, max_kv_len=64, sm_scale=0.1, kernel="mma")
    lines = []
    wanted = [spec, stage(), stage(plus=3), stage(), too_wide]
    assert ahead.compile_ahead(wanted, progress=lines.append) == 3
    assert lines == [f"compiled {n} of 3 kernels" for n in (1, 2, 3)]
    geometry = nv.kernels.planner.geometry_of(spec, nv.kernels.planner.limits_of((9, 0)))
    files = [compile.cache_file(spec, TARGET, geometry), *(compile.cache_file_of_stage(s, TARGET) for s in wanted[1:3])]
    assert all(path.is_file() for path in files)
    before = {path: path.stat().st_mtime_ns for path in files}
    assert ahead.compile_ahead(wanted, progress=lines.append) == 0 and len(lines) == 3
    compile.compile_stage(stage(plus=3), TARGET)
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_a_single_one_needs_no_process(h200, monkeypatch):
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", None)
    assert ahead.compile_ahead([stage(plus=4)]) == 1 and compile.cache_file_of_stage(stage(plus=4), TARGET).exists()
    ahead.run_in_processes([partial(int, "no number")])


def test_a_failure_does_not_keep_the_others_from_being_made(tmp_path):
    made, lines = tmp_path / "made", []
    ahead.run_in_processes([partial(int, "no number"), partial(made.write_text, "here")], lines.append)
    assert made.read_text() == "here" and len(lines) == 2 and lines[-1] == "compiled 1 of 2 kernels"
