"""Stages compile without a GPU, into the same cache."""

from nbverify.compile import compile_stage, target_of
from tests.support.scale_stage import stage


def test_a_stage_compiles_once_and_by_its_constants(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_stage(stage(), target_of("9.0"))
    assert first.name == "nbverify_scale" and first.target == "sm_90a" and first.resources.local_bytes == 0
    assert compile_stage(stage(), target_of("9.0")) == first and len(list((tmp_path / "nbverify").iterdir())) == 1
    compile_stage(stage(plus=2), target_of("9.0"))
    assert len(list((tmp_path / "nbverify").iterdir())) == 2
