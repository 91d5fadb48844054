"""Stages compile without a GPU, into the same cache."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

from nbverify.compile import compile_stage, target_of
from tests.support import scale_stage
from tests.support.scale_stage import stage


def test_a_stage_compiles_once_and_by_its_constants(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_stage(stage(), target_of("9.0"))
    assert first.name == "nbverify_scale" and first.target == "sm_90a" and first.resources.local_bytes == 0
    assert compile_stage(stage(), target_of("9.0")) == first and len(list((tmp_path / "nbverify").iterdir())) == 1
    compile_stage(stage(plus=2), target_of("9.0"))
    assert len(list((tmp_path / "nbverify").iterdir())) == 2


def test_a_stage_of_someone_else_is_compiled_again_when_its_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "their_stage.py"
    theirs = replace(stage(), module="their_stage")
    module.write_text(Path(scale_stage.__file__).read_text())
    first = compile_stage(theirs, target_of("9.0"))
    assert compile_stage(theirs, target_of("9.0")) == first
    monkeypatch.delitem(sys.modules, "their_stage")
    module.write_text(module.read_text().replace("args.factor * args.x[i]", "args.x[i]"))
    importlib.invalidate_caches()
    assert "fma.rn.f32" in first.ptx and "fma.rn.f32" not in compile_stage(theirs, target_of("9.0")).ptx
