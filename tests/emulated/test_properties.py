"""Random ragged batches against float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.batches import assert_close, random_batch
from support.devices import EmulatorDevice, run
from support.kernels import KERNELS

import nbverify as nv

PREFIX_LENS = st.sampled_from([-1, 0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129])
NODES = st.sampled_from([1, 2, 0, 3, 4, 9])
REQUESTS = st.lists(st.tuples(PREFIX_LENS, NODES), min_size=1, max_size=3)
HEADS = st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (4, 2), (3, 3)])
WIDTHS = st.sampled_from([(16, 16), (32, 16), (16, 48)])
DTYPES = st.sampled_from([("bfloat16", None), ("float16", None), ("bfloat16", "float8_e4m3fn")])
MASKS = st.sampled_from([("full", True), ("full", False), ("tree", True), ("packed", True), ("causal", True)])

SHAPES = st.one_of(
    st.fixed_dictionaries({"mla": st.sampled_from([1, 3, 4]), "widths": st.sampled_from([(48, 32), (288, 64)])}),
    st.fixed_dictionaries({"gqa": HEADS, "widths": WIDTHS}),
)
CASES = st.fixed_dictionaries(
    {
        "requests": REQUESTS,
        "shape": SHAPES,
        "mask": MASKS,
        "dtypes": DTYPES,
        "index_dtypes": st.tuples(*[st.sampled_from(["int32", "int64"])] * 5),
        "scales": st.sampled_from([(1.0, None), (0.5, 1.5)]),
        "values": st.integers(0, 2**32 - 1),
        "blocks": st.integers(1, 5),
        "seed": st.integers(0, 6),
        "cc": st.sampled_from([(9, 0), (8, 0), (12, 0)]),
        "kernel": st.sampled_from(KERNELS),
        "options": st.fixed_dictionaries(
            {
                "max_requests": st.sampled_from([3, 33]),
                "max_nodes": st.sampled_from([9, 24]),
                "max_kv_len": st.sampled_from([150, 4000]),
                "sm_scale": st.sampled_from([0.25, 1.0, -0.5]),
                "split": st.sampled_from(["balanced", "fixed"]),
                "reduction": st.sampled_from(["grid_sync", "two_launch"]),
            }
        ),
    }
)


def batch_of(case):
    shape, (dtype, kv_dtype), (mask, prefix_visible) = case["shape"], case["dtypes"], case["mask"]

    common = {
        **case["options"], "dtype": dtype, "kv_dtype": kv_dtype, "mask": mask, "prefix_visible": prefix_visible,
        "kernel": case["kernel"],
    }  # fmt: skip
    qk, v = shape["widths"]
    if "mla" in shape:
        spec = nv.VerifySpec.mla(shape["mla"], head_dim_qk=qk, head_dim_v=v, **common)
    else:
        spec = nv.VerifySpec.gqa(*shape["gqa"], qk, head_dim_v=v, **common)
    lens, counts = [], []
    for prefix_len, num_nodes in case["requests"]:
        # A length of -1 lowers the prefix sums: before any token, the next request would start at -1.
        lens.append(max(prefix_len, 0) if sum(lens) == 0 else prefix_len)
        counts.append(num_nodes)
    rng = np.random.default_rng(case["values"])
    batch = random_batch(rng, spec, lens, counts, index_dtypes=case["index_dtypes"])
    if not prefix_visible:
        batch = replace(batch, custom_mask=(rng.random(len(batch.custom_mask)) < 0.4).astype(np.uint8))
    k_scale, v_scale = case["scales"]
    return replace(batch, k_scale=k_scale, v_scale=None if spec.shared_kv else v_scale)


def check(case):
    batch = batch_of(case)
    result = run(EmulatorDevice(case["blocks"], case["seed"], case["cc"]), batch)
    assert_close(batch, result.out, result.lse)


def examples(count):
    """The same ones every time; not shrunk, which takes minutes: a case is a short dictionary as it is."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(600)  # half a minute on an idle machine
@examples(25)
@given(CASES)
def test_random_batches(case):
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@examples(250)
@given(CASES)
def test_many_random_batches(case):
    check(case)
