"""``nbverify generate``, with a random model in place of the real one."""

import json
from pathlib import Path

import numpy as np
import pytest
from cuda import pathfinder
from support.tiny_llama import CONFIG, Oracle, plain, tiny_tensors

import nbverify
from examples.smollm2 import fit, generate, measure
from examples.smollm2.drafters import PromptLookup, RidgeHeads
from examples.smollm2.products import CublasProducts
from examples.smollm2.weights import Gguf
from nbverify.cli import main
from nbverify.errors import ArgumentError, NbverifyError

FIELDS = {
    "llama.attention.head_count": CONFIG.num_q_heads, "llama.attention.head_count_kv": CONFIG.num_kv_heads,
    "llama.embedding_length": 144, "llama.attention.layer_norm_rms_epsilon": CONFIG.epsilon,
    "llama.rope.freq_base": CONFIG.rope_base,
}  # fmt: skip
EXAMPLE = Path(generate.__file__).parent
GREEN, RESET = "\x1b[32m", "\x1b[0m"


class Letters:
    """A tokenizer of 61 tokens: letters, one of them the first half of a character."""

    HALF = 60

    def __init__(self, fields):
        self.end = 59

    def chat(self, prompt):
        return [ord(letter) - ord("A") for letter in prompt]

    def decode(self, tokens, *, special=False):
        letters = "".join(chr(ord("A") + token) for token in tokens if token not in (self.HALF, self.end))
        return letters + ("\N{REPLACEMENT CHARACTER}" if tokens[-1:] == [self.HALF] else "")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "find_file", lambda path: path)
    monkeypatch.setattr(generate, "read_gguf", lambda path: Gguf(FIELDS, tiny_tensors()))
    monkeypatch.setattr(generate, "Tokenizer", Letters)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def wanted(prompt, count):
    return Letters({}).decode(plain([Letters({}).chat(prompt)], count, end_token=59)[0])


def test_an_answer_is_streamed_and_the_figures_follow(tiny, capsys):
    assert main(["generate", "BCDBCDBC", "--device", "cpu", "--max-tokens", "20", "--budget", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(wanted("BCDBCDBC", 20) + "\n\n")
    assert "tokens a step (13 in " in out and "tokens/s with trees" in out and "plain; attention" in out
    assert "(cpu, lookup, budget 8, 1 at once; ready in " in out


def test_several_prompts_are_decoded_at_once(tiny, capsys):
    prompts = ["BCDBCDBC", "F", "HHH"]
    assert main(["generate", *prompts, "--device", "cpu", "--max-tokens", "9"]) == 0
    out = capsys.readouterr().out
    for prompt in prompts:
        assert f"{prompt} ───" in out and wanted(prompt, 9) in out
    assert "(27 in " in out and "3 at once" in out


def test_compare_says_that_they_are_identical(tiny, capsys):
    assert main(["generate", "BCDBCDBC", "--device", "cpu", "--max-tokens", "12", "--compare"]) == 0
    out = capsys.readouterr().out
    assert out.count(wanted("BCDBCDBC", 12)) == 2 and "identical, 12 tokens" in out


@pytest.mark.parametrize("close, code", [(1e9, 0), (0.0, 1)], ids=["a tie", "a fault"])
def test_compare_shows_the_first_difference_and_its_gap(tiny, capsys, monkeypatch, close, code):
    honest = generate.decode

    def dishonest(decoder, *arguments):
        run = honest(decoder, *arguments)
        if decoder.drafter is not None:
            run.answers[0].tokens[5] ^= 1
        return run

    monkeypatch.setattr(generate, "decode", dishonest)
    monkeypatch.setattr(generate, "CLOSE", close)
    assert main(["generate", "BCDBCDBC", "--device", "cpu", "--max-tokens", "12", "--compare"]) == code
    out = capsys.readouterr().out
    assert "first difference at token 5: " in out and " apart, " in out
    assert ("a tie that rounding decides" in out) == (code == 0)


def test_accepted_drafts_are_green_and_characters_stay_whole():
    from rich.console import Console

    with open("/dev/null", "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, color_system="standard", record=True)
        shown = generate.Streamed(console, Letters({}))
        for token, is_draft in ((1, False), (60, False), (2, True), (59, False)):
            shown(token, is_draft)
        text = console.export_text(styles=True)
    assert text == f"B{GREEN}C{RESET}"
    made = generate.coloured(generate.Answer([1, 60, 2], [False, True, True]), Letters({}))
    assert made.plain == "BC" and [str(span.style) for span in made.spans] == ["green"]


def test_the_emulator_verifies_one_layer_of_a_step(tiny, capsys):
    flags = ["--device", "cpu", "--max-tokens", "4", "--budget", "8", "--emulate-layer", "1"]
    assert main(["generate", "BCDBCDBC", *flags]) == 0
    assert "layer 1 in the emulator: error " in capsys.readouterr().out


def test_a_layer_that_fails_makes_the_command_fail(tiny, capsys, monkeypatch):
    failing = generate.demo.Check("float64", "none", 1, 1.0, 2.0, False)
    monkeypatch.setattr(generate.WatchedLayer, "emulate", lambda self: failing)
    assert main(["generate", "BCD", "--device", "cpu", "--max-tokens", "2", "--emulate-layer", "1"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_drafts_are_told_from_what_the_target_said():
    prompt, text = [1, 2, 3], plain([[1, 2, 3]], 9)[0]
    model = generate.NumpyModel(tiny_tensors(), CONFIG, max_requests=1, max_len=64)
    decoder = generate.Decoder(model, Oracle([prompt + text + [0] * 9]), 12)
    run = generate.decode(decoder, [prompt], 9)
    assert run.answers[0].tokens == text and (run.steps, run.num_tokens) == (2, 9)
    # Steps of five: four drafts, and the target's own token.
    assert run.answers[0].is_draft == [True] * 4 + [False] + [True] * 4
    assert 0 < run.attention_s < run.seconds and run.tokens_a_step == 4.5


def test_a_wrong_attention_is_seen_by_the_emulator(tiny, capsys, monkeypatch):
    nothing = lambda **inputs: (inputs["q"] * 0.0, np.zeros(inputs["q"].shape[:2]))  # noqa: E731
    monkeypatch.setattr(generate.reference, "verify_attention", nothing)
    model = generate.NumpyModel(tiny_tensors(), CONFIG, max_requests=1, max_len=32)
    watched = generate.WatchedLayer(model, 0)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((16, 3, 16)).astype(np.float32)
    inputs = {"q": rng.standard_normal((2, 9, 16)), "k_cache": pool, "v_cache": pool,
              "kv_indptr": np.array([0, 2]), "kv_indices": np.array([3, 4]), "qo_indptr": np.array([0, 2]),
              "out_cache_loc": np.array([5, 6]), "custom_mask": np.array([1, 0, 1, 1]),
              "mask_indptr": np.array([0, 4])}  # fmt: skip
    watched._keep(0, "tree", inputs, None)
    assert not watched.emulate().passed


def test_heads_are_fitted_kept_and_used(tiny, capsys, monkeypatch):
    monkeypatch.setattr(fit, "questions", lambda count: ["ABCDEFGHIJKLMNOP"[i] * 2 for i in range(count)])
    monkeypatch.setattr(fit, "ANSWER", 20)
    asked = ["generate", "BCDBCDBC", "--device", "cpu", "--max-tokens", "6", "--drafter"]
    assert main([*asked, "ridge"]) == 1
    assert "no fitted heads yet" in capsys.readouterr().err
    monkeypatch.setattr(fit.fit, "__kwdefaults__", {**fit.fit.__kwdefaults__, "answer": 20})
    assert main(["generate", "--fit", "8", "--device", "cpu"]) == 0
    assert "the best token of positions 1 to 6 was right in" in capsys.readouterr().err
    for name in ("ridge", "mixture"):
        assert main([*asked, name]) == 0
        assert capsys.readouterr().out.startswith(wanted("BCDBCDBC", 6))


def test_each_drafter_by_its_name(tiny, monkeypatch):
    monkeypatch.setattr(fit, "load_heads", lambda: np.zeros((3, 288, 144), np.float32))
    model = generate.NumpyModel(tiny_tensors(), CONFIG, max_requests=1, max_len=32)
    assert isinstance(generate.make_drafter("lookup", model), PromptLookup)
    assert isinstance(generate.make_drafter("ridge", model), RidgeHeads)
    mixture = generate.make_drafter("mixture", model)
    assert (mixture.lookup.depth, mixture.heads.depth, mixture.depth) == (16, 3, 16)


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("name", [None, *generate.DRAFTERS])
def test_what_is_compiled_ahead_is_for_the_decoders_step(monkeypatch, name, budget):
    monkeypatch.setattr(fit, "load_heads", lambda: np.zeros((6, 288, 144), np.float32))
    model = generate.NumpyModel(tiny_tensors(), CONFIG, max_requests=1, max_len=96)
    drafter = generate.make_drafter(name, model) if name else None
    decoder = generate.Decoder(model, drafter, budget if name else 0)
    sizes = generate.step_sizes(name, budget) if name else generate.PLAIN_STEP
    assert sizes == (decoder.budget + 1, decoder.depth, decoder.top_k)


def test_wrong_flags_are_refused(tiny, capsys):
    for flags, said in (
        ([], "prompt: expected one or more, or --fit, got none"),
        (["A", "--fit", "3"], "prompt: expected one or more, or --fit, got both"),
        (["A", "--emulate-layer", "2", "--device", "gpu"], "--emulate-layer: expected --device cpu"),
        (["A", "--emulate-layer", "2", "--device", "cpu"], "--emulate-layer: expected 0 to 1, got 2"),
    ):
        assert main(["generate", *flags]) == 2
        assert said in capsys.readouterr().err
    for flags in (["A", "--budget", "9"], ["A", "--max-tokens", "0"], ["A", "--drafter", "none"]):
        with pytest.raises(SystemExit):
            main(["generate", *flags])


def test_outside_a_checkout_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(nbverify, "__file__", str(tmp_path / "site-packages" / "nbverify" / "__init__.py"))
    assert main(["generate", "hello"]) == 1
    error = capsys.readouterr().err
    assert "generate: the example model is part of the source tree" in error and "examples/smollm2/generate.py" in error


def test_differences():
    assert generate.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert generate.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert generate.first_difference([1, 2], [1, 2, 3]) == 2


def test_the_table_of_the_figures(tiny, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "find_file", lambda path: path)
    monkeypatch.setattr(measure, "read_gguf", lambda path: Gguf(FIELDS, tiny_tensors()))
    monkeypatch.setattr(measure, "Tokenizer", Letters)
    monkeypatch.setattr(measure, "PROMPTS", {"one": "BCDBCD", "two": "HH"})
    flags = ["--device", "cpu", "--max-tokens", "9", "--drafter", "lookup", "--budget", "8", "--budget", "16"]
    assert measure.main([*flags, "--json", str(tmp_path / "rows.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| drafter | budget | one | two | mean of one, two |" and len(lines) == 5
    assert lines[2].startswith("| plain | 0 | 1.00, ") and lines[4].startswith("| lookup | 16 | ")
    assert lines[2].count(", 1.00 x |") == 2 and lines[2].endswith("| 1.00 x |")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["budget"] for row in rows] == [0, 8, 16] and rows[1]["prompts"]["one"]["tokens"] == 9


def test_a_missing_cublas_is_said(monkeypatch):
    def missing(name):
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(NbverifyError, match="cuBLAS is missing: pip install nvidia-cublas"):
        CublasProducts(device=None)


def test_model_drafters_and_loop_stay_readable():
    """What one reads to understand it; the same model through kernels is two files more."""
    names = ("model", "drafters", "decode", "host_step")
    lines = [len((EXAMPLE / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in names]
    assert sum(lines) < 600


def test_a_prompt_that_does_not_fit_is_refused():
    model = generate.NumpyModel(tiny_tensors(), CONFIG, max_requests=1, max_len=8)
    with pytest.raises(ArgumentError, match="prompt: expected at most"):
        list(generate.Decoder(model).run([[1] * 9], 4))
