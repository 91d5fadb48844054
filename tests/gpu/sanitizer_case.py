"""A small matrix of launches of a kernel for compute-sanitizer, each compared with float64.  Run by test_sanitizer.py.

Few blocks and short prefixes: under racecheck a launch takes seconds.
"""

import sys
from dataclasses import replace

import numpy as np
from support.batches import assert_close, random_batch
from support.devices import BoundBatch, GpuDevice
from support.kernels import kernels_of

import nbverify as nv

LIMITS = {"max_requests": 4, "max_nodes": 8, "max_kv_len": 400, "sm_scale": 0.25, "kernel": "simt"}
BLOCKS = 5
SPECS = {
    "gqa": nv.VerifySpec.gqa(4, 2, 16, **LIMITS),
    "fixed": nv.VerifySpec.gqa(4, 2, 16, split="fixed", **LIMITS),
    "two_launch": nv.VerifySpec.gqa(4, 2, 16, reduction="two_launch", **LIMITS),
    "fixed-two_launch": nv.VerifySpec.gqa(4, 2, 16, split="fixed", reduction="two_launch", **LIMITS),
    "fp8": nv.VerifySpec.gqa(4, 2, 16, kv_dtype="float8_e4m3fn", **LIMITS),
    "packed": nv.VerifySpec.gqa(4, 2, 16, mask=nv.Mask.PACKED, **LIMITS),
    "odd widths": nv.VerifySpec.gqa(2, 1, 48, head_dim_v=80, **LIMITS),
    "mla-fp8": nv.VerifySpec.mla(2, head_dim_qk=48, head_dim_v=32, kv_dtype="float8_e4m3fn", **LIMITS),
    "wide-mla": nv.VerifySpec.mla(2, head_dim_qk=288, head_dim_v=64, **LIMITS),
    "tall wide-mla": nv.VerifySpec.mla(9, head_dim_qk=288, head_dim_v=64, **LIMITS),  # 72 rows
    # Score warps that share fragments, and warps without any (tensor cores): 4 for one, 3 for three, 2 and 2 for four.
    "16 rows": nv.VerifySpec.mla(2, **LIMITS),
    "48 rows": nv.VerifySpec.mla(6, **LIMITS),
    "64 rows": nv.VerifySpec.mla(8, **LIMITS),
}
RAGGED_AND_PADDED = ([300, 0, 37, -1], [8, 3, 1, 2])


def main() -> None:
    dev, kernel = GpuDevice(), sys.argv[1]
    for name, spec in SPECS.items():
        if kernel not in kernels_of(spec):
            continue
        spec = replace(spec, kernel=kernel)
        debug = name == "gqa"
        plan = dev.plan(spec, max_blocks=BLOCKS, debug=debug)
        batch = random_batch(np.random.default_rng(100), spec, *RAGGED_AND_PADDED)
        bound = BoundBatch(dev, plan, batch)
        result = bound.run()
        assert_close(batch, result.out, result.lse)
        if debug:
            plan.check()
        print(name, "right", flush=True)


if __name__ == "__main__":
    main()
