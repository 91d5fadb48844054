"""Two requests with a draft tree each: verify them, and compare with float64.

python examples/quickstart.py                  in the emulator, without a GPU
python examples/quickstart.py --device gpu     on the current GPU, with CuPy
"""

import sys
from typing import Any

import numpy as np

import nbverify as nv

PREFIX_LENS, PARENTS = [40, 3], [[-1, 0, 0, 1], [-1, 0]]  # a tree is the parents of its nodes, -1 for the root
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def make_inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random q and KV, in shuffled slots of a pool, and the trees as TREE masks."""
    nodes, masks = [len(parents) for parents in PARENTS], [nv.reference.ancestor_mask(p).ravel() for p in PARENTS]
    slots = rng.permutation(sum(PREFIX_LENS) + sum(nodes))  # as an allocator hands them out
    return {
        "q": rng.standard_normal((sum(nodes), HEADS, HEAD_DIM)).astype(np.float16),
        "k_cache": rng.standard_normal((len(slots), KV_HEADS, HEAD_DIM)).astype(np.float16),
        "v_cache": rng.standard_normal((len(slots), KV_HEADS, HEAD_DIM)).astype(np.float16),
        "kv_indptr": np.cumsum([0, *PREFIX_LENS]),
        "kv_indices": slots[: sum(PREFIX_LENS)],
        "qo_indptr": np.cumsum([0, *nodes]),
        "out_cache_loc": slots[sum(PREFIX_LENS) :],
        "custom_mask": np.concatenate(masks),
        "mask_indptr": np.cumsum([0, *(len(mask) for mask in masks)]),
    }


def main(on_gpu: bool) -> None:
    """Plan once, bind once per set of buffers, launch often."""
    spec = nv.VerifySpec.gqa(
        HEADS, KV_HEADS, HEAD_DIM, sm_scale=HEAD_DIM**-0.5, dtype="float16", mask=nv.Mask.TREE,
        max_requests=2, max_nodes=4, max_kv_len=64,
    )  # fmt: skip
    plan = nv.VerifyPlan(spec, device=None if on_gpu else "emulator")
    inputs = make_inputs(np.random.default_rng(0))
    arrays: dict[str, Any] = {**inputs, "out": np.zeros_like(inputs["q"]), "lse": np.zeros((6, HEADS), np.float32)}
    if on_gpu:
        import cupy

        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
    plan.bind(**arrays).launch()  # on the legacy default stream, as CuPy's work
    out, lse = (array.get() if on_gpu else array for array in (arrays["out"], arrays["lse"]))

    want, want_lse = nv.reference.verify_attention(**inputs, sm_scale=spec.sm_scale, mask=spec.mask)
    print(plan.report())
    print(f"largest error of out {abs(out - want).max():.1e}, half a float16 ulp is {abs(want).max() * 2**-11:.1e}")
    print(f"largest error of lse {abs(lse - want_lse).max():.1e}")


if __name__ == "__main__":
    main(on_gpu=sys.argv[1:] == ["--device", "gpu"])
