"""The small kernels of kernels.py as stages of nbverify: what each is given, without importing numba."""

from nbverify.stages import Stage, array, scalar

THREADS = 256
TOP_THREADS = 1024  # of top_tokens, whose rows are as long as the vocabulary

PARAMETERS = {
    "take_slots": (array("req_to_token", "int32"), array("prefix_lens", "int64"), array("out_cache_loc", "int64"),
                   scalar("max_len"), scalar("num_nodes")),
    "embed": (array("tokens", "int64"), array("table", "uint16"), array("x", "float32"), scalar("width")),
    "rms_norm": (array("x", "float32"), array("weight", "float32"), array("y", "uint16"), scalar("width"),
                 scalar("epsilon", "float32")),
    "rope_store": (array("qkv", "float32"), array("positions", "int64"), array("slots", "int64"),
                   array("angles", "float32"), array("q", "uint16"), array("keys", "uint16"),
                   array("values", "uint16"), scalar("num_q_heads"), scalar("num_kv_heads"), scalar("head_dim"),
                   scalar("max_len")),
    "silu_mul": (array("gate_up", "float32"), array("y", "uint16"), scalar("width")),
    "top_tokens": (array("logits", "float32"), array("tokens", "int64"), array("probabilities", "float32"),
                   scalar("width"), scalar("top_k")),
}  # fmt: skip


def stage(name: str) -> Stage:
    """The kernel of that name."""
    threads = TOP_THREADS if name == "top_tokens" else THREADS
    return Stage(name, "examples.smollm2.kernels", PARAMETERS[name], threads=threads, constants={"name": name})
