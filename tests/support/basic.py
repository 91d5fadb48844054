"""Values of every feature against float64.  Collected by tests/emulated/test_verify.py and tests/gpu/test_verify.py."""

import numpy as np
import pytest
from support.batches import assert_close, random_batch
from support.devices import run

import nbverify as nv

LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 600}


def gqa(*heads_and_dim, **options):
    return nv.VerifySpec.gqa(*heads_and_dim, sm_scale=0.25, **{**LIMITS, **options})


def mla(num_q_heads, **options):
    return nv.VerifySpec.mla(num_q_heads, sm_scale=0.144680, **{**LIMITS, **options})


@pytest.mark.parametrize("mask", list(nv.Mask))
@pytest.mark.parametrize("split", ["balanced", "fixed"])
@pytest.mark.parametrize("reduction", ["grid_sync", "two_launch"])
def test_masks_splits_reductions(dev, mask, split, reduction):
    spec = gqa(6, 2, 16, mask=mask, split=split, reduction=reduction)
    batch = random_batch(np.random.default_rng(1), spec, [37, 0, 290], [7, 3, 1])
    result = run(dev, batch)
    assert_close(batch, result.out, result.lse)
