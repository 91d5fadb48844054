"""Refusals that no other file is about: each a named error, found in a review by trying to break the API."""

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from support.batches import random_batch
from support.devices import BoundBatch, EmulatorDevice

import nbverify as nv

SPEC = nv.VerifySpec.gqa(
    2, 1, 16, max_requests=3, max_nodes=4, max_kv_len=40, sm_scale=0.25, mask="tree", kernel="simt"
)


def arguments(spec=SPEC, lens=(5, 3), nodes=(2, 3)):
    batch = random_batch(np.random.default_rng(0), spec, lens, nodes)
    out = np.empty((batch.num_tokens, spec.num_q_heads, spec.head_dim_v), batch.q.dtype)
    return {**batch.inputs(), "out": out}


@pytest.mark.parametrize("travel", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_argument_error_survives_travel(travel):
    """Process pools send errors by pickle, and hang if that fails."""
    error = nv.ArgumentError("q", "an array", object())
    again = travel(error)
    assert (type(again), str(again), again.argument) == (nv.ArgumentError, str(error), "q")


@pytest.mark.parametrize("name, value", [("k_scale", 1e-46), ("v_scale", 1e-46), ("k_scale", 2.0**-127)])
def test_a_scale_that_vanishes_in_float32(name, value):
    plan = nv.VerifyPlan(SPEC, device="emulator")
    with pytest.raises(nv.ArgumentError, match=rf"^{name}: "):
        plan.bind(**arguments(), **{name: value})


def test_a_product_of_scales_that_vanishes_in_float32():
    plan = nv.VerifyPlan(replace(SPEC, sm_scale=1e-30), device="emulator")
    with pytest.raises(nv.ArgumentError, match=r"^k_scale: expected sm_scale \* k_scale"):
        plan.bind(**arguments(), k_scale=1e-30)
    nv.VerifyPlan(replace(SPEC, sm_scale=0.0), device="emulator").bind(**arguments(), k_scale=1e-30)


def test_no_memory_holds_the_workspace():
    limits = {
        "max_requests": 1000,
        "max_nodes": 16,
        "max_kv_len": 16,
        "kernel": "simt",
    }  # 2^20 row units a request, of one item each
    huge = nv.VerifySpec.gqa(2**20, 2**20, 576, **limits, sm_scale=1.0)
    with pytest.raises(nv.ArgumentError, match=r"^spec: expected a workspace of at most [\d,]+ bytes"):
        nv.VerifyPlan(huge, device="emulator")


@pytest.mark.parametrize("name", ["q", "kv_indices", "out"])
def test_masked_arrays(name):
    given = arguments()
    given[name] = np.ma.masked_array(given[name])
    with pytest.raises(nv.ArgumentError, match=rf"^{name}: expected a numpy array"):
        nv.VerifyPlan(SPEC, device="emulator").bind(**given)


def yields(score, request, head, node, key):
    yield score


async def awaits(score, request, head, node, key):
    return score


@pytest.mark.parametrize("function", [yields, awaits])
def test_score_mods_that_do_not_return_a_score(function):
    with pytest.raises(nv.ArgumentError, match=r"^score_mod: .*generator or a coroutine"):
        replace(SPEC, score_mod=function)


def test_numbers_of_numpy_are_numbers():
    assert replace(SPEC, sm_scale=np.float32(0.25)) == SPEC
    assert hash(replace(SPEC, sm_scale=np.float32(0.25))) == hash(SPEC)


@pytest.mark.parametrize("stream", [-1, 2**64])
def test_no_handle_of_a_stream(stream):
    dev = EmulatorDevice()
    bound = BoundBatch(dev, dev.plan(SPEC), random_batch(np.random.default_rng(0), SPEC, [5], [2]))
    with pytest.raises(nv.ArgumentError, match=r"^stream: "):
        bound.run(stream)


def test_padding_brings_no_mask():
    """Only starts are read, and of a padding request not even that: its block may be missing."""
    given = arguments(lens=(5, 3), nodes=(2, 3))
    given["kv_indptr"] = np.array([0, 5, 4])  # the second request is padding
    given["custom_mask"] = given["custom_mask"][:4]
    out, lse = nv.verify_attention(SPEC, **given, lse=np.empty((5, 2), np.float32), device="emulator")
    assert np.isfinite(lse[:2]).all() and (lse[2:] == -np.inf).all() and not out[2:].any()


def test_numbas_simulator_is_named():
    code = (
        "import nbverify as nv; nv.VerifyPlan(nv.VerifySpec.gqa(1, 1, 16, max_requests=1, max_nodes=1, max_kv_len=1, "
        "sm_scale=1.0), device='emulator')"
    )
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert "ArgumentError: NUMBA_ENABLE_CUDASIM: expected unset" in done.stderr
