"""The demo: on the real fixture in the emulator, its bounds, and which device it takes."""

import json
import re
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import nbverify as nv
from nbverify import demo, doctor, presets, reference
from nbverify.cli import main
from nbverify.demo import choose_device, compare
from nbverify.doctor import Facts, Gpu
from nbverify.errors import NbverifyError
from nbverify.fixture import load_fixture
from nbverify.spec import KERNELS

NO_GPU = Facts(
    python=(3, 12, 0),
    versions={name: "1.0" for name in doctor.PACKAGES} | {"numpy": "2.4.6", "numba-cuda": "0.30.4"},
    toolkit=dict.fromkeys(doctor.TOOLKIT_PIECES, "/somewhere"),
    toolkit_version=(12, 9),
    driver_missing=True,
    driver_error="no driver library",
)
ONE_GPU = replace(
    NO_GPU,
    driver_missing=False,
    driver_error=None,
    driver_cuda=(13, 0),
    gpus=(Gpu(0, "NVIDIA H200", (9, 0), 132, 232_448, True),),
    hardware=("/dev/nvidia0",),
    cupy_packages=("cupy-cuda13x 14.2.0",),
)
BROKEN_GPU = replace(ONE_GPU, gpus=(), driver_code=999, driver_error="cuInit: CUDA_ERROR_UNKNOWN (999)")


@pytest.fixture(scope="module")
def layer():
    return load_fixture()


# --- the command -----------------------------------------------------------------------------------------------------


each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@each_kernel
def test_command_on_a_small_tree(capsys, monkeypatch, kernel):
    """With the default kernel, whichever that is, and with the other one."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(nv.VerifySpec, "gqa", partial(nv.VerifySpec.gqa, kernel=kernel))
    assert main(["demo", "--device", "emulator", "--nodes", "3", "--seed", "3"]) == 0
    printed, progress = capsys.readouterr()
    for words in ("' def'", "0 █··", "2 ███", "emulator of 5 blocks, seed 3", "tile", "versions", "float64"):
        assert words in printed
    assert printed.count("PASS") == 4 and "FAIL" not in printed
    assert re.search(r"emulating \d+ CUDA threads", progress)


@pytest.mark.slow
@pytest.mark.timeout(600)  # 10 s on an idle core, minutes on a crowded one
def test_command_on_the_whole_tree(capsys):
    assert main(["demo", "--device", "emulator", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["passed"] and record["device"] == "emulator"
    (run,) = record["runs"]
    assert "17 nodes" in run["title"]
    assert [check["values"] for check in run["checks"]] == [17 * 9 * 64, 17 * 9, 17 * 9 * 64]


def test_a_failed_check_is_exit_code_1(capsys, monkeypatch, layer):
    bad = replace(layer, attention_out=layer.attention_out + np.float32(1))
    monkeypatch.setattr("nbverify.fixture.load_fixture", lambda: bad)
    assert main(["demo", "--device", "emulator", "--nodes", "2"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("PASS") == 2 and printed.count("FAIL") == 2
    assert printed.rstrip().endswith("FAIL")


def test_wrong_number_of_nodes(capsys):
    for nodes in ("0", "-1", "18"):
        assert main(["demo", "--device", "emulator", "--nodes", nodes]) == 2
        assert f"--nodes: expected 1 to 17, the nodes of the packaged tree, got {nodes}" in capsys.readouterr().err


# --- which device ----------------------------------------------------------------------------------------------------


def test_auto_takes_the_gpu_or_the_emulator_where_there_is_none():
    assert choose_device("auto", ONE_GPU) == ("gpu", "NVIDIA H200")
    device, why = choose_device("auto", NO_GPU)
    assert device == "emulator" and "no driver library" in why
    assert choose_device("emulator", BROKEN_GPU)[0] == "emulator"


@pytest.mark.parametrize("requested", ["auto", "gpu"])
def test_a_broken_gpu_is_never_replaced_by_the_emulator(requested):
    with pytest.raises(NbverifyError, match=r"\(999\); this machine has a GPU: /dev/nvidia0\s+to fix: "):
        choose_device(requested, BROKEN_GPU)
    with pytest.raises(NbverifyError, match=r"the toolkit is CUDA 13.1"):
        choose_device(requested, replace(ONE_GPU, driver_cuda=(12, 4), toolkit_version=(13, 1)))
    with pytest.raises(NbverifyError, match=r"cupy: .*pip install 'nbverify\[cu13\]'"):
        choose_device(requested, replace(ONE_GPU, cupy_packages=()))


def test_gpu_that_is_not_there():
    with pytest.raises(NbverifyError, match="--device gpu: no GPU here"):
        choose_device("gpu", NO_GPU)


def test_broken_gpu_on_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "gather_facts", lambda: BROKEN_GPU)
    assert main(["demo"]) == 1
    printed, error = capsys.readouterr()
    assert printed == "" and "CUDA_ERROR_UNKNOWN" in error and "--device emulator" in error


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_compare_is_per_element_and_refuses_nan():
    want = np.zeros(3)
    assert compare("", "", np.array([0.0, 0.5, 1.0]), want, np.array([1e-9, 0.5, 2.0])).passed
    one_off = compare("", "", np.array([0.0, 0.5, 1.0]), want, np.array([1e-9, 0.4, 2.0]))
    assert not one_off.passed and one_off.worst == 1.25 and one_off.max_error == 1.0
    assert not compare("", "", np.array([0.0, np.nan, 0.0]), want, 1.0).passed


def rounded_attention(layer, mask: np.ndarray) -> np.ndarray:
    """float64 attention over the inputs in float16, under another tree mask."""
    out, _ = reference.verify_attention(
        q=layer.q.astype(np.float16), k_cache=layer.k.astype(np.float16), v_cache=layer.v.astype(np.float16),
        kv_indptr=[0, len(layer.prefix_slots)], kv_indices=layer.prefix_slots,
        qo_indptr=[0, len(layer.q)], out_cache_loc=layer.draft_slots,
        custom_mask=mask.astype(np.uint8).ravel(), mask_indptr=[0, mask.size], sm_scale=layer.sm_scale, mask="tree",
    )  # fmt: skip
    return out


def test_bound_of_input_rounding_holds_and_tells_a_wrong_mask(layer):
    used = np.concatenate([layer.prefix_slots, layer.draft_slots])
    right = reference.ancestor_mask(layer.parents.tolist())
    mean_abs_v = rounded_attention(replace(layer, v=np.abs(layer.v)), right)
    bound = demo.input_rounding_bound(layer.sm_scale, layer.q, layer.k[used], mean_abs_v, 2.0**-11)
    want = layer.attention_out
    assert (np.abs(rounded_attention(layer, right) - want) <= bound).all()
    for wrong in (np.tri(len(right), dtype=bool), np.eye(len(right), dtype=bool), np.ones_like(right)):
        assert (np.abs(rounded_attention(layer, wrong) - want) > bound).any()
    coarse = demo.input_rounding_bound(layer.sm_scale, layer.q, layer.k[used], mean_abs_v, 2.0**-8)
    assert (coarse > 4 * bound).all()  # bfloat16 may differ by more


@each_kernel
def test_kimi_rows_agree_with_the_masked_reference_and_tell_a_wrong_tree(kernel):
    spec = replace(presets.preset("kimi-k2.6-tp8"), max_requests=1, max_kv_len=233, kernel=kernel)
    inputs, parents = demo.kimi_inputs(spec, 200, seed=5)
    out, _ = reference.verify_attention(**inputs, sm_scale=spec.sm_scale, head_dim_v=512)
    stored = out.astype(ml_dtypes.bfloat16)
    wrong = [-1, *range(presets.MAX_NODES - 1)]  # a chain: every node sees all earlier ones
    for node in demo.KIMI_NODES[2:]:
        want, allowed = demo.kimi_row(spec, inputs, parents, node)
        np.testing.assert_allclose(want, out[node, list(demo.KIMI_HEADS)], rtol=1e-12, atol=1e-12)
        assert compare("", "", stored[node, list(demo.KIMI_HEADS)], want, allowed).passed
        other, allowed = demo.kimi_row(spec, inputs, wrong, node)
        assert not compare("", "", stored[node, list(demo.KIMI_HEADS)], other, allowed).passed


@each_kernel
def test_kimi_drafts_and_prefix_both_weigh(kernel):
    """A kernel that forgets a node's ancestors, or half of the prefix, is far outside the bound."""
    spec = replace(presets.preset("kimi-k2.6-tp8"), max_requests=1, max_kv_len=40_000, kernel=kernel)
    inputs, parents = demo.kimi_inputs(spec, demo.KIMI_PREFIX, seed=0)
    half = inputs | {"kv_indices": inputs["kv_indices"][: demo.KIMI_PREFIX // 2]}
    node = 1  # has one ancestor, the fewest that can be forgotten
    want, allowed = demo.kimi_row(spec, inputs, parents, node)
    no_ancestors, _ = demo.kimi_row(spec, inputs, [-1] * presets.MAX_NODES, node)
    half_a_prefix, _ = demo.kimi_row(spec, half, parents, node)
    assert compare("", "", no_ancestors, want, allowed).worst > 10
    assert compare("", "", half_a_prefix, want, allowed).worst > 10


def test_timing_counts_every_key_once():
    timing = demo.Timing(median_us=10.0, low_us=9.0, high_us=11.0, kv_bytes=40_000_000)
    assert timing.gb_per_s == pytest.approx(4000.0)
