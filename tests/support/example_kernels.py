"""The example's model through the kernels, random weights.  Collected by the emulated and the gpu tier.

In the emulator a few steps; on a GPU all drafters, budgets, batches and page sizes, and the graph itself.
"""

import math

import numpy as np
import pytest

import nbverify as nv
from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import RidgeHeads
from examples.smollm2.kernel_model import KernelModel, what_compiles
from examples.smollm2.model import NumpyModel, rms_norm
from examples.smollm2.stages import TOP_THREADS, stage
from nbverify.stages import EmulatorRunner, open_runner
from support.tiny_llama import CONFIG, PROMPTS, VOCAB, Oracle, decoded, tiny_model, tiny_tensors
from support.tiny_llama import WIDTH as MODEL_WIDTH

HALF_ULP = 2.0**-11
ROWS, WIDTH, SLOTS = 3, 150, 12


class Small:
    """One small kernel on a device: arrays in by name, arrays out."""

    def __init__(self, dev, name):
        self.runner, self.name = open_runner(dev.device), name

    def run(self, grid, arrays, **scalars):
        made = {}
        for name, array in arrays.items():
            made[name] = self.runner.empty(array.shape, array.dtype.name)
            made[name].set(array)
        self.runner.bind(stage(self.name), grid, made, scalars)(0)
        return {name: array.get() for name, array in made.items()}


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def nans(*shape, dtype=np.float16):
    return np.full(shape, np.nan, dtype)


def test_windows_are_the_next_slots_of_each_request(dev):
    table = np.random.default_rng(0).permutation(40).astype(np.int32).reshape(2, 20)
    arrays = {"req_to_token": table, "prefix_lens": np.array([3, 15]), "out_cache_loc": np.full(14, -1)}
    got = Small(dev, "take_slots").run(2, arrays, max_len=20, num_nodes=7)["out_cache_loc"].reshape(2, 7)
    assert got[0].tolist() == table[0, 3:10].tolist()
    assert got[1].tolist() == [*table[1, 15:], table[1, -1], table[1, -1]]  # and never beyond the row


def test_embeddings_are_widened(dev):
    table, tokens = normal(1, 20, WIDTH, dtype=np.float16), np.array([7, 19, 0])
    arrays = {"tokens": tokens, "table": table, "x": nans(ROWS, WIDTH, dtype=np.float32)}
    np.testing.assert_array_equal(Small(dev, "embed").run(ROWS, arrays, width=WIDTH)["x"], table[tokens])


def test_rows_are_normed(dev):
    x, weight = 100 * normal(2, ROWS, WIDTH), normal(3, WIDTH)
    arrays = {"x": x, "weight": weight, "y": nans(ROWS, WIDTH)}
    got = Small(dev, "rms_norm").run(ROWS, arrays, width=WIDTH, epsilon=1e-5)["y"]
    want = rms_norm(x.astype(np.float64), weight, 1e-5)
    # The last rounding; the sum of WIDTH squares and two products are float32.
    np.testing.assert_allclose(got, want, rtol=1.1 * HALF_ULP, atol=2.0**-24)


def test_keys_are_turned_and_stored(dev):
    q_heads, kv_heads, dim = CONFIG.num_q_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    model = tiny_model()
    qkv, positions, slots = normal(4, ROWS, q_heads + 2 * kv_heads, dim), np.array([0, 5, 41]), np.array([2, 11, 7])
    arrays = {
        "qkv": qkv, "positions": positions, "slots": slots, "angles": model.rope_table, "q": nans(ROWS, q_heads, dim),
        "keys": nans(SLOTS, kv_heads, dim), "values": nans(SLOTS, kv_heads, dim),
    }  # fmt: skip
    shape = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "max_len": model.max_len}
    got = Small(dev, "rope_store").run(ROWS, arrays, **shape)
    q, k, v = np.split(qkv, [q_heads, q_heads + kv_heads], axis=1)
    bound = {"rtol": 1.1 * HALF_ULP, "atol": 4e-7}  # of products that may cancel: an ulp of the larger one
    np.testing.assert_allclose(got["q"], model.rope(q, positions), **bound)
    np.testing.assert_allclose(got["keys"][slots], model.rope(k, positions), **bound)
    np.testing.assert_array_equal(got["values"][slots], v.astype(np.float16))
    others = np.setdiff1d(np.arange(SLOTS), slots)
    assert np.isnan(got["keys"][others]).all() and np.isnan(got["values"][others]).all()


def test_gates_open(dev):
    gate_up = 5 * normal(5, ROWS, 2 * WIDTH)
    gate_up[0, :3] = 90.0, -90.0, 0.0
    got = Small(dev, "silu_mul").run(ROWS, {"gate_up": gate_up, "y": nans(ROWS, WIDTH)}, width=WIDTH)["y"]
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1.2 * HALF_ULP, atol=2.0**-24)


def test_the_best_tokens_of_rows(dev):
    """More columns than threads, equal logits, and one thread that has the three best."""
    width, best = 2 * TOP_THREADS + 70, 5
    logits = 3 * normal(6, 2, width)
    logits[0, [7, 7 + TOP_THREADS, 7 + 2 * TOP_THREADS]] = 20.0, 21.0, 20.5
    logits[1, [900, 30, 31]] = 15.0
    arrays = {
        "logits": logits, "tokens": np.full((2, best), -1), "probabilities": nans(2, best, dtype=np.float32),
    }  # fmt: skip
    got = Small(dev, "top_tokens").run(2, arrays, width=width, top_k=best)
    want = np.argsort(-logits, axis=1, kind="stable")[:, :best]
    assert got["tokens"].tolist() == want.tolist()
    softmax = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    of_best = np.take_along_axis(softmax / softmax.sum(1, keepdims=True), want, 1)
    # float32: the sum of WIDTH terms in any order, and exponentials of differences that are rounded at 2^-20.
    np.testing.assert_allclose(got["probabilities"], of_best, rtol=4e-6)


def kernel_model(dev, *, max_requests=2, max_len=64, page_size=4, kernel="simt", prefill_rows=4):
    sizes = {"max_requests": max_requests, "max_len": max_len, "page_size": page_size, "prefill_rows": prefill_rows}
    return KernelModel(tiny_tensors(), CONFIG, **sizes, device=dev.device, kernel=kernel)


@pytest.mark.parametrize("kernel", ["simt", "mma"])
def test_a_prompt_goes_through_in_parts(dev, kernel):
    """Against numpy in float32, from weights in float16: six tokens, four at a time."""
    half = {name: array.astype(np.float16).astype(np.float32) for name, array in tiny_tensors().items()}
    want_from = NumpyModel(half, CONFIG, max_requests=1, max_len=64)
    ids, slots = [3, 1, 4, 1, 5, 9], np.array([9, 6, 20, 11, 5, 17])
    want_from.set_slots(0, slots)
    want = want_from.prefill(0, ids)
    model = kernel_model(dev, kernel=kernel)
    model.set_slots(1, slots)
    got = model.prefill(1, ids)
    # Roundings to float16, some ten on the way of a value through two layers, most of them independent.
    bound = 10 * HALF_ULP * math.sqrt(10)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * abs(want).max())
    keys = model.keys[1].get()[slots]
    np.testing.assert_allclose(
        keys, want_from.keys[1][slots], rtol=0, atol=10 * HALF_ULP * math.sqrt(10) * abs(keys).max()
    )
    assert len(model.prefill(1, [])) == 0


@pytest.mark.parametrize("rows, inputs, outputs", [(1, 144, 61), (7, 48, 144), (65, 16, 8)])
def test_products(dev, rows, inputs, outputs):
    """float16 factors, sums in float32; into float32, added to it, and into float16."""
    model, a, w, base = (
        kernel_model(dev),
        normal(9, rows, inputs),
        normal(10, outputs, inputs),
        normal(11, rows, outputs),
    )
    a, w = a.astype(np.float16), w.astype(np.float16)
    want, bound = a.astype(np.float64) @ w.T.astype(np.float64), inputs * 2.0**-24 * abs(a).max() * abs(w).max()
    for dtype, add in (("float32", False), ("float32", True), ("float16", False)):
        x, weights, out = (
            model.runner.empty(array.shape, name) for array, name in ((a, "float16"), (w, "float16"), (base, dtype))
        )
        for buffer, array in ((x, a), (weights, w), (out, base)):
            buffer.set(array)
        model.products.multiply(x, weights, out, add, 0)
        ulp = HALF_ULP if dtype == "float16" else 2.0**-24
        np.testing.assert_allclose(out.get(), want + base if add else want, rtol=2 * ulp, atol=bound)


def test_a_short_text_takes_fewer_rows_at_once(dev):
    assert kernel_model(dev, max_len=20, prefill_rows=64).prefill_rows == 20


def test_block_heads_say_what_they_say_in_numpy(dev):
    """Two texts of three that there is room for; the same roundings of factors to float16, float32 between them."""
    made = normal(7, 2, 2 * MODEL_WIDTH, MODEL_WIDTH) / MODEL_WIDTH
    hidden, texts = list(normal(8, 2, MODEL_WIDTH)), [[1, 2], [3]]
    got = RidgeHeads(made, kernel_model(dev, max_requests=3), top_k=3).propose(texts, hidden)
    want = RidgeHeads(made, tiny_model(), top_k=3).propose(texts, hidden)
    for ours, theirs in zip(got[0] + got[1], want[0] + want[1], strict=True):
        # A logit is a sum over two products of factors that are rounded, and of a rounded vector between them.
        assert list(ours.values()) == pytest.approx(sorted(theirs.values(), reverse=True), rel=20 * HALF_ULP)


@pytest.mark.timeout(300)  # half a minute in the emulator, more where other tests run beside it
def test_trees_give_what_plain_decoding_through_the_same_kernels_gives(dev):
    """Ragged prompts and trees: one request has no drafts, and a row of the batch is used again by the third text."""
    # Two kernels may round apart where two tokens are about as good: in these texts the best is ahead by 0.03 or more.
    model, prompts, new = kernel_model(dev), PROMPTS[1:4], 12 if dev.is_gpu else 3
    plain, _ = decoded(Decoder(model), prompts, new)
    oracle = Oracle([prompt + text + [0] * 9 for prompt, text in zip(prompts, plain, strict=True)], silent=(0,))
    decoder = Decoder(model, oracle, 5)
    trees, drafted = decoded(decoder, prompts, new)
    assert trees == plain
    assert drafted >= 2 and decoder.steps < 2 * new
    assert decoder.step.problems() == []


def test_what_is_compiled_ahead_is_what_is_used(monkeypatch):
    """A kernel that the list lacks is compiled when it is bound: nothing fails, but one waits for each."""
    used, plan = set(), nv.VerifyPlan

    def bind(self, stage, *arguments, bind=EmulatorRunner.bind):
        used.add(stage.compile_key)
        return bind(self, stage, *arguments)

    def recorded(spec, **options):
        used.add(spec.compile_key)
        return plan(spec, **options)

    monkeypatch.setattr(EmulatorRunner, "bind", bind)
    monkeypatch.setattr(nv, "VerifyPlan", recorded)
    sizes, steps = {"max_requests": 2, "max_len": 70}, [(1, 1, 1), (9, 4, 3)]
    model = KernelModel(tiny_tensors(), CONFIG, **sizes, device=nv.Emulator())
    for max_nodes, depth, top_k in steps:
        model.open_step(max_nodes=max_nodes, depth=depth, top_k=top_k)
    model.open_heads(np.zeros((2, 2 * MODEL_WIDTH, MODEL_WIDTH), np.float32), 3)
    assert {one.compile_key for one in what_compiles(CONFIG, VOCAB, steps, **sizes)} == used
