"""A launch in a CUDA graph, replayed with other lengths, slots and masks.  Needs a GPU and CuPy.

python examples/graph_capture.py

The graph is captured once, for the largest batch.  Before each replay a serving loop writes the batch of the day into
the same static buffers; requests that it lacks are padding (negative prefix length: no key is read, zeros come out).
"""

import cupy as cp
import numpy as np

import nbverify as nv
from nbverify import contract

NODES, MAX_KV_LEN, NUM_SLOTS, WIDTH = 9, 4096, 8192, 576
SPEC = nv.VerifySpec.mla(
    num_q_heads=8, max_requests=2, max_nodes=NODES, max_kv_len=MAX_KV_LEN, sm_scale=0.144680, dtype="float16",
    mask=nv.Mask.TREE,
)  # fmt: skip


def main() -> None:
    """Capture once, replay three batches, compare each with float64."""
    rng = np.random.default_rng(0)
    tokens = SPEC.max_requests * NODES
    size = contract.capacity_elements(SPEC)  # elements of each static buffer
    pool = cp.asarray(rng.standard_normal((NUM_SLOTS, 1, WIDTH)).astype(np.float16))
    q = cp.asarray(rng.standard_normal((tokens, SPEC.num_q_heads, WIDTH)).astype(np.float16))
    out, lse = cp.zeros((tokens, SPEC.num_q_heads, 512), cp.float16), cp.zeros((tokens, SPEC.num_q_heads), cp.float32)
    batch = {
        "kv_indptr": cp.zeros(size["kv_indptr"], cp.int32),
        "kv_indices": cp.zeros(size["kv_indices"], cp.int64),
        "qo_indptr": cp.arange(0, tokens + 1, NODES, dtype=cp.int32),
        "out_cache_loc": cp.zeros(size["out_cache_loc"], cp.int64),
        "custom_mask": cp.zeros(size["custom_mask"], cp.uint8),
        "mask_indptr": cp.arange(0, size["custom_mask"] + 1, NODES * NODES, dtype=cp.int64),
    }

    plan = nv.VerifyPlan(SPEC)  # compiles and loads: nothing of that is left for the capture
    verify = plan.bind(q=q, k_cache=pool, out=out, lse=lse, **batch)  # keep all of these alive
    cp.cuda.Device().synchronize()  # the stream below does not wait for the default stream
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        verify.launch(stream)
        graph = stream.end_capture()

    for prefix_lens in ([4087, 3000], [1, 77], [500, -1]):  # -1: the second request is padding
        slots = rng.permutation(NUM_SLOTS)
        num_prefix = sum(max(length, 0) for length in prefix_lens)
        trees = [nv.reference.ancestor_mask([-1, *(rng.integers(0, i) for i in range(1, NODES))]) for _ in prefix_lens]
        today = {
            "kv_indptr": np.cumsum([0, *prefix_lens]),
            "kv_indices": slots[:num_prefix],
            "out_cache_loc": slots[num_prefix : num_prefix + tokens],
            "custom_mask": np.concatenate([tree.ravel() for tree in trees]),
        }
        with stream:
            for name, values in today.items():
                batch[name][: len(values)] = cp.asarray(values.astype(batch[name].dtype))  # in place
            graph.launch(stream)
        stream.synchronize()

        want, want_lse = nv.reference.verify_attention(
            q=q.get(), k_cache=pool.get(), **{name: array.get() for name, array in batch.items()},
            sm_scale=SPEC.sm_scale, mask=SPEC.mask, head_dim_v=SPEC.head_dim_v,
        )  # fmt: skip
        live = np.isfinite(want_lse)
        error, lse_error = abs(out.get() - want).max(), abs(lse.get()[live] - want_lse[live]).max()
        print(f"prefixes {prefix_lens}: largest error of out {error:.1e}, of lse {lse_error:.1e}")
        assert (np.isneginf(lse.get()) == ~live).all() and error < 4e-3


if __name__ == "__main__":
    main()
