"""The example's model, drafters and loop, on a random model of the same architecture."""

from collections import Counter

import numpy as np
import pytest
from support.tiny_llama import CONFIG, LAYERS, PROMPTS, VOCAB, Oracle, decoded, plain, tiny_model, tiny_tensors

from examples.smollm2 import fit
from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import Mixture, PromptLookup, RidgeHeads, pack
from examples.smollm2.model import SCRATCH_PAGE, rms_norm
from nbverify.errors import ArgumentError, NbverifyError

NEW = 24


def heads(depth=3, seed=1):
    width = CONFIG.num_q_heads * CONFIG.head_dim
    return np.random.default_rng(seed).standard_normal((depth, 2 * width, width)).astype(np.float32) / width


def make(name, model):
    lookup, fitted = PromptLookup(), RidgeHeads(heads(), model)
    return {"lookup": lookup, "ridge": fitted, "mixture": Mixture(lookup, fitted)}[name]


def test_the_model_is_a_llama():
    """Against the same formulas without a pool, in float64: one text, all of it at once."""
    w, c, ids = tiny_tensors(), CONFIG, np.array([3, 1, 4, 1, 5, 9, 2, 6])
    w = {name: array.astype(np.float64) for name, array in w.items()}
    n, group = len(ids), c.num_q_heads // c.num_kv_heads

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.epsilon) * weight

    def turned(x):
        pairs = x.reshape(n, -1, c.head_dim // 2, 2)
        angles = np.arange(n)[:, None] * c.rope_base ** (-2 * np.arange(c.head_dim // 2) / c.head_dim)
        complex_pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
        return np.stack([complex_pairs.real, complex_pairs.imag], -1).reshape(n, -1, c.head_dim)

    x = w["token_embd.weight"][ids]
    for i in range(LAYERS):
        of = {name.split(".")[2]: array for name, array in w.items() if name.startswith(f"blk.{i}.")}
        a = norm(x, of["attn_norm"])
        q, k = turned(a @ of["attn_q"].T), turned(a @ of["attn_k"].T)
        v = (a @ of["attn_v"].T).reshape(n, -1, c.head_dim)
        seen = []
        for h in range(c.num_q_heads):
            scores = q[:, h] @ k[:, h // group].T / np.sqrt(c.head_dim)
            weights = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
            seen.append(weights / weights.sum(-1, keepdims=True) @ v[:, h // group])
        x = x + np.concatenate(seen, -1) @ of["attn_output"].T
        f = norm(x, of["ffn_norm"])
        gate = f @ of["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (f @ of["ffn_up"].T)) @ of["ffn_down"].T
    model = tiny_model()
    model.set_slots(0, np.arange(16, 16 + n))
    # float32 through two layers: some ten roundings of values up to the largest one.
    np.testing.assert_allclose(model.prefill(0, ids.tolist()), x, rtol=0, atol=2e-5 * abs(x).max())


@pytest.mark.parametrize("budget", [1, 8, 33])
@pytest.mark.parametrize("name", ["lookup", "ridge", "mixture"])
def test_trees_give_what_plain_decoding_gives(name, budget):
    model, new = tiny_model(max_requests=2, max_len=128), 12
    got, _ = decoded(Decoder(model, make(name, model), budget), PROMPTS[:3], new)
    assert got == plain(PROMPTS[:3], new)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("max_requests", [1, 3])
def test_accepted_paths_are_the_text(page_size, max_requests):
    """With a drafter that is mostly right, at a rank that varies: long paths, moved in the pool, of ragged requests."""
    want = plain(PROMPTS, NEW)
    oracle = Oracle([prompt + text + [0] * 9 for prompt, text in zip(PROMPTS, want, strict=True)])
    model = tiny_model(max_requests=max_requests, page_size=page_size)
    decoder = Decoder(model, oracle, 12)
    got, drafted = decoded(decoder, PROMPTS, NEW)
    assert got == want
    assert drafted > 0.6 * NEW * len(PROMPTS)  # of 5 tokens a step 4 are drafts, but for the wrong ones
    assert sorted(decoder.free_pages) == [p for p in range(model.num_pages) if p != SCRATCH_PAGE]
    assert not model.table.any() and (decoder.step.budgets == -1).all()


def test_the_pool_holds_what_a_prompt_would_have_left_there():
    want = plain(PROMPTS[:2], NEW)
    model = tiny_model(max_requests=2, page_size=4)
    decoder = Decoder(model, Oracle([p + t for p, t in zip(PROMPTS, want, strict=False)]), 12)
    for text in range(2):
        decoder.enter(text, PROMPTS[text], NEW)
    while all(len(request.ids) < 22 for request in decoder.requests.values()):
        decoder.advance()
    taken = [page for request in decoder.requests.values() for page in request.pages]
    assert len(set(taken)) == len(taken) and not set(taken) & set(decoder.free_pages) and SCRATCH_PAGE not in taken
    steps = np.abs(np.concatenate([np.diff(request.pages) for request in decoder.requests.values()]))
    assert (steps != 1).any()  # shuffled, or the order of slots proves nothing
    for row, request in decoder.requests.items():
        fresh, n = tiny_model(), len(request.ids) - 1
        fresh.set_slots(0, np.arange(n) + 16)
        hidden = fresh.prefill(0, request.ids[:n])
        np.testing.assert_allclose(request.hidden, hidden[-1], atol=1e-4)  # what the next drafts are made from
        for ours, theirs in zip(model.keys + model.values, fresh.keys + fresh.values, strict=True):
            np.testing.assert_allclose(ours[model.table[row, :n]], theirs[16 : 16 + n], atol=1e-4)


def test_a_text_ends_at_its_end_token():
    texts = plain(PROMPTS, NEW)
    end = Counter(token for text in texts for token in text).most_common(1)[0][0]
    want = [text[: text.index(end) + 1] if end in text else text for text in texts]
    assert len({len(text) for text in want}) > 2  # they end at different times
    model = tiny_model(max_requests=2)
    oracle = Oracle([prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)])
    assert decoded(Decoder(model, oracle, 12, end_token=end), PROMPTS, NEW)[0] == want


def test_the_two_best_tokens_and_their_gap():
    text = plain(PROMPTS[:1], 3)[0]
    model = tiny_model()
    decoder = Decoder(model)
    best, gap = decoder.top_two(PROMPTS[0] + text[:2])
    assert best[0] == text[2]
    model.set_slots(0, np.arange(16, 40))
    hidden = model.prefill(0, PROMPTS[0] + text[:2])[-1]
    logits = np.sort(rms_norm(hidden, model.norm, CONFIG.epsilon) @ model.embed.T)
    assert gap == pytest.approx(logits[-1] - logits[-2], abs=1e-3) and gap > 0
    assert not decoder.requests


def test_wrong_arguments_are_refused_by_name():
    model = tiny_model(max_len=32)
    for drafter, budget in ((None, 4), (PromptLookup(), 0), (PromptLookup(), 2.5)):
        with pytest.raises(ArgumentError, match="budget: expected"):
            Decoder(model, drafter, budget)
    with pytest.raises(ArgumentError, match="prompt: expected at most 15 tokens beside max_tokens and a tree, got 16"):
        Decoder(model, PromptLookup(), 8).enter(0, [1] * 16, 8)
    with pytest.raises(ArgumentError, match="prompt, max_tokens: expected a token at least, of each, got 0, 8"):
        Decoder(model).enter(0, [], 8)
    with pytest.raises(ArgumentError, match=r"heads: expected shape \[depth, 288, 144\], got \[3, 288, 143\]"):
        RidgeHeads(heads()[..., 1:], model)
    with pytest.raises(ArgumentError, match="top_k: expected 1 to 61, the tokens there are, got 62"):
        RidgeHeads(heads(), model, top_k=62)
    for name in ("max_requests", "max_len", "page_size"):
        with pytest.raises(ArgumentError, match=f"{name}: expected an int >= 1, got 0"):
            tiny_model(**{name: 0})


def test_a_step_that_gives_nothing_is_an_error():
    decoder = Decoder(tiny_model())
    decoder.enter(0, [1, 2, 3], 4)
    decoder.step.budgets[0] = -1
    with pytest.raises(NbverifyError, match="a step without a token"):
        decoder.advance()


# --- drafters


def test_lookup_weighs_longer_matches_more():
    weights = PromptLookup(depth=3).weights([1, 2, 9, 5, 2, 7, 1, 2])
    # "2" came before 9 and 7, "1 2" before 9: 8 for each match of one token, 64 more for that of two.
    assert weights[0] == {9: 8 + 64, 7: 8}
    assert weights[1] == {5: 8 + 64, 1: 8}
    assert weights[2] == {2: 8 + 64 + 8}
    first = PromptLookup(depth=3).propose([[1, 2, 9, 5, 2, 7, 1, 2]], None)[0][0]
    assert first == {9: pytest.approx(0.9), 7: pytest.approx(0.1)}
    assert PromptLookup(depth=2).propose([[4], [4, 5]], None) == [[{}, {}], [{}, {}]]


def test_ridge_heads_are_a_linear_map_and_the_targets_head():
    model, matrix = tiny_model(), heads(depth=2)
    hidden = np.random.default_rng(3).standard_normal((2, 144)).astype(np.float32)
    got = RidgeHeads(matrix, model, top_k=5).propose([[1, 2], [3]], list(hidden))
    for b, root in enumerate((2, 3)):
        feature = np.concatenate([rms_norm(hidden[b], model.norm, CONFIG.epsilon), 10 * model.embed[root]])
        for d in range(2):
            logits = feature.astype(np.float64) @ matrix[d] @ model.embed.T
            want = np.exp(logits) / np.exp(logits).sum()
            best = np.argsort(-want)[:5]
            assert got[b][d] == {int(t): pytest.approx(want[t], rel=1e-4) for t in best}


def test_the_mixture_trusts_lookup_by_what_it_found():
    class Fixed:
        depth, top_k = 2, 8

        def start(self, texts, hidden):
            return lambda: [[{9: 0.5, 4: 0.5}, {4: 1.0}] for _ in texts]

    first, second, third = Mixture(PromptLookup(depth=3), Fixed()).propose([[1, 2, 9, 5, 3, 1, 2]], None)[0]
    assert first == {9: pytest.approx(0.5 * 64 / 136 + 72 / 136), 4: pytest.approx(0.5 * 64 / 136)}
    assert second == {4: pytest.approx(64 / 136), 5: pytest.approx(72 / 136)}
    assert third == {3: pytest.approx(1.0)}  # beyond the heads it is lookup alone
    nothing = Mixture(PromptLookup(depth=3), Fixed()).propose([[1, 2]], None)[0]
    assert nothing == [{9: 0.5, 4: 0.5}, {4: 1.0}, {}]


def test_packed_drafts_are_ranked_and_end_with_minus_infinity():
    tokens, logprobs = pack([[{3: 0.2, 8: 0.5, 1: 0.2, 2: 0.0}], []], depth=2, top_k=4)
    assert tokens[0, 0].tolist() == [8, 1, 3, 0]
    np.testing.assert_allclose(logprobs[0, 0], [np.log(0.5), np.log(0.2), np.log(0.2), -np.inf], rtol=1e-6)
    assert (logprobs[0, 1] == -np.inf).all() and (logprobs[1] == -np.inf).all()


# --- fitting


def test_fitted_heads_predict_and_are_kept(tmp_path):
    """On a model whose text repeats itself, so that what comes is a function of what is there."""
    model = tiny_model(max_requests=4, max_len=80)
    prompts, told = [[token] for token in range(24)], []
    made, right = fit.fit(model, prompts, end_token=None, answer=40, depth=2, progress=lambda *what: told.append(what))
    assert made.shape == (2, 288, 144) and right.shape == (2,)
    assert right[0] > 3 / VOCAB  # guessing gives one
    drafter, hits = RidgeHeads(made, model), np.zeros(2)
    texts = [prompt + text for prompt, text in zip(prompts, plain(prompts, 40), strict=True)][fit.HELD_OUT :]
    for text in texts:  # those that it was fitted to
        stream = model.prefill(0, text)
        for at in range(1, 30):
            positions = drafter.propose([text[: at + 1]], [stream[at - 1]])[0]
            hits += [max(p, key=p.get) == text[at + 1 + d] for d, p in enumerate(positions)]
    assert (hits > 0.12 * 29 * len(texts)).all()
    assert told[-1] == ("texts read again", 24, 24) and ("answers, tokens at most", 24 * 40, 24 * 40) in told
    path = fit.save_heads(made, tmp_path / "new" / "heads.npz")
    np.testing.assert_allclose(fit.load_heads(path), made, atol=1e-3)
    with pytest.raises(NbverifyError, match=r"no fitted heads yet.*nbverify generate --fit"):
        fit.load_heads(tmp_path / "none.npz")


def test_heads_learn_from_the_root_and_what_precedes_it():
    model, text = tiny_model(), [3, 1, 4, 1, 5, 9, 2, 6]
    model.set_slots(0, np.arange(16, 24))
    stream = rms_norm(model.prefill(0, text), model.norm, CONFIG.epsilon)
    x, y = fit.pairs(model, text, 3, depth=2)
    # The answer is 1 5 9 2 6.  Its roots are 1 5 9 2: two positions on from where they are read must still be text.
    assert x.shape == (4, 288) and y.shape == (2, 4, 144)
    np.testing.assert_allclose(x[1], [*stream[3], *(10 * model.embed[5])], rtol=1e-5)
    np.testing.assert_allclose(y[:, 1], stream[4:6], rtol=1e-5)
    assert len(fit.pairs(model, text, 8, depth=2)[0]) == 0


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(NbverifyError, match="the answers are too short"):
        fit.fit(tiny_model(), [[1], [2]], end_token=None, answer=2)


def test_heads_are_cached_outside_the_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fit.cache_path().is_relative_to(tmp_path)


def test_questions_for_fitting_are_not_those_of_the_figures():
    from examples.smollm2.prompts import PROMPTS as FIGURES

    assert len(set(fit.questions(54))) == 54 and not set(fit.questions(100)) & set(FIGURES.values())
