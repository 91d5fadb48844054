"""What the SGLang plugin takes and leaves, its switch, its hook and its check, without SGLang, torch or a kernel."""

import importlib
import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support import sglang_stand_in as stand_in
from support.sglang_stand_in import EmulatorPlace, Pool, TritonAttnBackend, runner_of, taken_over

import nbverify as nv
from nbverify.integrations import sglang, sglang_calls, sglang_check, sglang_plans, sglang_takeover
from nbverify.integrations.sglang_calls import Surroundings, by_name, signature_of, take
from nbverify.integrations.sglang_plans import Limits, Plans, spec_of

ROOT = Path(__file__).parents[2]
BF16, E4M3, E5M2 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
SIGNATURES = {version: signature_of(kernel) for version, kernel in stand_in.stock_kernels([]).items()}
NEWEST = SIGNATURES["0.5.23"]


def arguments(*, is_mla=False, dtype=BF16, kv_dtype=None, **changes):
    """A verify of 2 requests of 4 nodes, by the stock kernel's names."""
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    k = np.zeros((9, 1 if is_mla else 2, 32), kv_dtype)
    v = k[..., :16] if is_mla else np.zeros((9, 2, 32), kv_dtype)
    given = dict(
        q_extend=np.zeros((8, 4, 32), dtype), k_extend=k[:8].astype(dtype), v_extend=v[:8].astype(dtype),
        o_extend=np.zeros((8, 4, v.shape[2]), dtype), k_buffer=k, v_buffer=v, qo_indptr=np.array([0, 4, 8]),
        kv_indptr=np.array([0, 1, 1], np.int32), kv_indices=np.zeros(1, np.int64), custom_mask=np.ones(36, bool),
        is_causal=True, mask_indptr=np.array([0, 20, 36]), max_len_extend=4, k_scale=1.0, v_scale=1.0, sm_scale=0.25,
    )  # fmt: skip
    return given | changes


def around(**changes):
    return Surroundings(**({"out_cache_loc": np.arange(8), "is_stored": True} | changes))


# ---- which calls are taken


@pytest.mark.parametrize("version", stand_in.VERSIONS)
def test_positions_are_read_by_the_signature_that_is_there(version):
    signature = SIGNATURES[version]
    given = {name: value for name, value in arguments().items() if name in signature.names}
    positional = [given[name] for name in signature.names if name in given]
    assert by_name(signature, positional, {"logit_cap": 0.0}) == given | {"logit_cap": 0.0}
    call = take(by_name(signature, positional, {}), around(), signature)
    assert call.sm_scale == 0.25 and call.nodes == 4 and call.q is given["q_extend"]
    assert (call.k_scale, call.v_scale) == (1.0, 1.0), "0.5.9 has no scales"
    assert ("k_scale" in signature.names) == (version != "0.5.9")


REFUSED = {
    "no mask": (dict(custom_mask=None), "no custom_mask"),
    "cross or encoder attention": (dict(is_causal=False), "not causal"),
    "window": (dict(sliding_window_size=128), "sliding window"),
    "window 0": (dict(sliding_window_size=0), "sliding window"),
    "window offsets": (dict(window_kv_offsets=np.zeros(2)), "sliding window"),
    "sinks": (dict(sinks=np.zeros(4)), "sinks"),
    "logit cap": (dict(logit_cap=30.0), "logit cap"),
    "temperature": (dict(xai_temperature_len=4096), "temperature"),
    "score_mod": (dict(score_mod=abs), "score modifier"),
    "aux_tensors": (dict(aux_tensors=[np.zeros(1)]), "score modifier"),
    "lse": (dict(lse_extend=np.zeros((8, 4))), "DCP"),
    "skip_prefix": (dict(skip_prefix=True), "DCP"),
    "skip_extend": (dict(skip_extend=True), "DCP"),
    "prefix bytes": (dict(skip_prefix_custom_mask=False), "prefix bytes"),
    "dense K and V": (dict(identity_kv_indices=True), "not the pool's"),
    "an argument of a later version": (dict(rotate="pairs"), "rotate='pairs'"),
    "no scale": (dict(sm_scale=None), "sm_scale"),
}


@pytest.mark.parametrize("changes, why", REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_stays_with_stock(changes, why):
    found = take(arguments(**changes), around(), NEWEST)
    assert isinstance(found, str) and why in found


def test_defaults_of_every_version_are_taken():
    """Whatever a version may pass, at the value that its own signature has for it."""
    for signature in SIGNATURES.values():
        given = {**signature.defaults, **{n: v for n, v in arguments().items() if n in signature.names}}
        assert not isinstance(take(given, around(), signature), str)
    later = sglang_calls.Signature((*NEWEST.names, "rotate"), {**NEWEST.defaults, "rotate": 0.5})
    assert not isinstance(take(arguments(rotate=0.5), around(), later), str)
    assert "rotate" in take(arguments(rotate=0.25), around(), later)


def test_every_known_argument_has_its_place():
    known = {*sglang_calls.TAKEN, *sglang_calls.WITHOUT_MEANING_HERE, *sglang_calls.UNUSED}
    assert known == {name for signature in SIGNATURES.values() for name in signature.names}


@pytest.mark.parametrize(
    "changes, why",
    [
        (dict(is_stored=False), "whether the drafts are in the pool"),
        (dict(out_cache_loc=None), "out_cache_loc"),
        (dict(out_cache_loc=np.arange(7)), "out_cache_loc"),
        (dict(layer_scales=(0.5, None)), "one scale of two"),
    ],
)
def test_drafts_must_be_in_the_pool(changes, why):
    assert why in take(arguments(), around(**changes), NEWEST)


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(dtype=np.dtype(np.float32)), "queries of float32"),
        (dict(o_extend=np.zeros((8, 4, 32), np.float32)), "out of float32"),
        (dict(kv_dtype=E5M2), "float8_e5m2"),
        (dict(kv_dtype=np.dtype(np.float16)), "a cache of float16"),
        (dict(kv_dtype=np.dtype(np.uint8)), "a cache of uint8"),
        (dict(v_buffer=np.zeros((9, 2, 32), E4M3)), "bfloat16 and float8_e4m3fn"),
        (dict(is_mla=True, kv_dtype=E4M3, k_scale=0.5, v_scale=2.0), "one row"),
        (dict(k_scale=0.5, v_scale=0.5), "stored unscaled"),
    ],
)
def test_types_and_scales_that_stay_with_stock(options, why):
    assert why in take(arguments(**options), around(), NEWEST)


def test_types_and_scales_that_are_taken():
    for options in (
        dict(kv_dtype=E4M3, k_scale=0.5, v_scale=2.0),
        dict(is_mla=True, kv_dtype=E4M3, k_scale=0.5, v_scale=0.5),
        dict(is_mla=True, k_scale=0.5, v_scale=0.5),  # SGLang divides by it whatever the pool's type
        dict(dtype=np.dtype(np.float16)),
    ):
        call = take(arguments(**options), around(layer_scales=(1.0, 1.0)), NEWEST)
        assert not isinstance(call, str) and call.is_shared == options.get("is_mla", False)


def test_mla_is_one_row_for_k_and_v():
    k = np.zeros((9, 1, 32), BF16)
    assert sglang_calls.is_mla(k, k[..., :16])
    assert not sglang_calls.is_mla(k, k.copy()[..., :16]), "other memory"
    assert not sglang_calls.is_mla(k, k), "as wide as K"
    wide = np.zeros((9, 2, 32), BF16)
    assert not sglang_calls.is_mla(wide, wide[..., :16]), "two heads"


# ---- specs and plans


def test_the_spec_of_a_call():
    call = take(arguments(is_mla=True, kv_dtype=E4M3), around(), NEWEST)
    spec = spec_of(call, Limits(48, 262_144), nv.Mask.FULL)
    assert spec == nv.VerifySpec.mla(
        4, head_dim_qk=32, head_dim_v=16, max_requests=48, max_nodes=4, max_kv_len=262_148, sm_scale=0.25,
        kv_dtype="float8_e4m3fn", kernel="mma",
    )  # fmt: skip
    gqa = spec_of(take(arguments(), around(), NEWEST), Limits(1, 8), nv.Mask.TREE)
    assert (gqa.num_kv_heads, gqa.shared_kv, gqa.kv_dtype, gqa.mask) == (2, False, "bfloat16", nv.Mask.TREE)


@pytest.mark.parametrize("dims, kernel", [((576, 512), "mma"), ((128, 128), "mma"), ((320, 320), "simt")])
def test_the_kernel_is_the_fast_one_where_it_serves(dims, kernel):
    spec = nv.VerifySpec(
        num_q_heads=8, num_kv_heads=1, head_dim_qk=dims[0], head_dim_v=dims[1], shared_kv=dims[0] == 576,
        max_requests=4, max_nodes=33, max_kv_len=4096, sm_scale=0.1,
    )  # fmt: skip
    assert sglang_plans.with_kernel(spec).kernel == kernel


@pytest.mark.parametrize("wrong", [dict(max_requests=0, max_prefix=1), dict(max_requests=1, max_prefix=2.0)])
def test_limits_are_checked(wrong):
    with pytest.raises(nv.ArgumentError, match="max_"):
        Limits(**wrong)


class CountingPlace(EmulatorPlace):
    """Stand-in plans that note what they are given; ``error``: what making one raises."""

    def __init__(self, error=None):
        super().__init__()
        self.plans, self.error, self.events = [], error, []

    def make_plan(self, spec, q):
        self.plans.append(spec)
        if self.error:
            raise self.error
        return SimpleNamespace(spec=spec, workspace_bytes=4096, bind=self.bind)

    def bind(self, **buffers):
        self.events.append("bind")
        return SimpleNamespace(
            launch=lambda stream: self.events.append("launch"),
            rebind=lambda **changes: self.events.append("rescale" if "k_scale" in changes else "rebind"),
        )


def test_one_plan_a_kind_one_bind_a_forward_and_rebinds_for_its_layers():
    place, said = CountingPlace(), []
    plans = Plans(Limits(4, 8), place, said.append)
    call = take(arguments(), around(), NEWEST)
    for _ in range(3):
        assert plans.launch(call) is None
    assert place.events == ["bind", "launch", "rebind", "launch", "rebind", "launch"]
    place.events.clear()
    plans.launch(call._replace(k_scale=2.0))
    plans.launch(call._replace(k_scale=2.0))
    assert place.events == ["rescale", "launch", "rebind", "launch"]
    place.events.clear()
    for name in sglang_plans.HELD:  # any other object, even with the same contents
        plans.launch(call._replace(**{name: getattr(call, name).copy()}))
    assert place.events == ["bind", "launch"] * len(sglang_plans.HELD)
    plans.launch(call)
    place.events.clear()
    plans.launch(call._replace(q=call.q[:4]))
    assert place.events == ["bind", "launch"], "other rows"
    assert len(place.plans) == 1 and len(said) == 1 and "workspace 4,096 bytes" in said[0]
    for other in (dict(nodes=3), dict(sm_scale=0.5), dict(out=call.out[..., :16]), dict(q=call.q[:, :2])):
        plans.launch(call._replace(**other))
    assert len(place.plans) == 5 and plans.workspace_bytes() == 5 * 4096
    plans.launch(call, nv.Mask.TREE)
    assert len(place.plans) == 6


def test_buffers_of_a_forward_are_not_kept_alive():
    place = CountingPlace()
    plans = Plans(Limits(4, 8), place, lambda text: None)
    surroundings, given = around(), arguments()
    plans.launch(take(given, surroundings, NEWEST))
    (held,) = plans._held.values()
    buffers = dict(zip(sglang_plans.HELD, held.buffers, strict=True))
    assert buffers["kv_indptr"]() is given["kv_indptr"]
    del given
    assert all(buffers[name]() is None for name in sglang_calls.OF_A_FORWARD)


def test_a_rebind_that_does_not_fit_becomes_a_bind():
    place = CountingPlace()
    plans = Plans(Limits(4, 8), place, lambda text: None)
    call = take(arguments(), around(), NEWEST)
    plans.launch(call)
    (held,) = plans._held.values()

    def refuse(**changes):
        raise nv.ArgumentError("q", "as bound", "other strides")

    held.bound.rebind = refuse
    assert plans.launch(call) is None and place.events == ["bind", "launch", "bind", "launch"]


# ---- the layers after the first


def layers_of(*, is_mla=False):
    """The place, and a function that calls a backend's kernel for a layer more of one forward.

    It gives what the place then did, and how often the call stayed with stock.
    """
    backend = backend_of(place=CountingPlace())
    takeover, first, slots = backend.nbverify, arguments(is_mla=is_mla), np.arange(8)

    def layer(surroundings=(), **changes):
        own = arguments(is_mla=is_mla)
        given = first | {name: own[name] for name in sglang_calls.OF_A_LAYER} | changes
        options = {"logit_cap": 0.0, "sinks": None} | {n: v for n, v in given.items() if n not in first}
        takeover._around = Surroundings(**({"out_cache_loc": slots, "is_stored": True} | dict(surroundings)))
        done, stock = len(takeover.place.events), takeover.stock
        backend.extend_attention_fwd(*(given[name] for name in NEWEST.names if name in first), **options)
        return takeover.place.events[done:], takeover.stock - stock

    takeover._stock_kernel = lambda *args, **kwargs: None
    return takeover.place, layer


@pytest.mark.parametrize("is_mla", [False, True], ids=["gqa", "mla"])
def test_layers_like_the_first_are_not_looked_at_again(is_mla, monkeypatch):
    _, layer = layers_of(is_mla=is_mla)
    assert layer() == (["bind", "launch"], 0)
    monkeypatch.delattr(sglang_takeover, "take")
    for _ in range(3):
        assert layer() == (["rebind", "launch"], 0)
    assert layer(sm_scale=float("0.25")) == (["rebind", "launch"], 0), "an equal number that is another object"


@pytest.mark.parametrize(
    "changes, stays",
    [
        (dict(sm_scale=0.5), False),
        (dict(custom_mask=np.ones(36, bool)), False),
        (dict(kv_indptr=np.array([0, 1, 1], np.int32)), False),
        (dict(surroundings=dict(out_cache_loc=np.arange(8))), False),
        (dict(k_scale=0.5), True),
        (dict(is_causal=False), True),
        (dict(logit_cap=30.0), True),
        (dict(sinks=np.zeros(4)), True),
        (dict(rotate="pairs"), True),
        (dict(custom_mask=None), True),
        (dict(surroundings=dict(is_stored=False)), True),
        (dict(surroundings=dict(layer_scales=(0.5, None))), True),
        (dict(surroundings=dict(out_cache_loc=None)), True),
    ],
)
def test_a_layer_that_differs_is_looked_at(changes, stays):
    _, layer = layers_of()
    layer()
    events, stock = layer(**changes)
    assert (events, stock) == (([], 1) if stays else (["bind", "launch"], 0))


def test_a_layer_whose_v_is_not_in_its_k_is_not_mla():
    place, layer = layers_of(is_mla=True)
    layer()
    assert layer(v_buffer=np.zeros((9, 1, 16), BF16)) == (["bind", "launch"], 0)
    assert [spec.shared_kv for spec in place.plans] == [True, False]


def test_a_layer_of_another_layout_is_looked_at():
    place, layer = layers_of()

    def refuse(**changes):
        raise nv.ArgumentError("q", "as bound", "other strides")

    place.bind = lambda **buffers: SimpleNamespace(launch=lambda stream: place.events.append("launch"), rebind=refuse)
    layer()
    assert layer() == (["launch"], 0) and len(place.plans) == 1, "bound anew"


def test_a_mask_that_is_gone_is_not_a_mask_that_is_missing():
    plans = Plans(Limits(4, 8), CountingPlace(), lambda text: None)
    given = arguments()
    plans.launch(take(given, around(), NEWEST))
    del given["custom_mask"]
    buffers = [given.get(name, None) for name in sglang_calls.OF_A_FORWARD]
    assert not plans._last.is_of([*buffers, np.arange(8)])


@pytest.mark.parametrize("error", [nv.ArgumentError("spec", "less", "more"), nv.CompileError("x"), nv.DriverError("y")])
def test_a_plan_that_cannot_be_made_is_asked_for_once(error):
    place = CountingPlace(error)
    plans = Plans(Limits(4, 8), place, lambda text: None)
    call = take(arguments(), around(), NEWEST)
    assert plans.launch(call) == plans.launch(call) == str(error)
    assert len(place.plans) == 1


def test_what_bind_refuses_stays_with_stock_and_is_named():
    plans = Plans(Limits(1, 8), EmulatorPlace(), lambda text: None)
    why = plans.launch(take(arguments(), around(), NEWEST))
    assert "kv_indptr: expected at most max_requests=1 requests, got 2" in why


# ---- the backend object


def verify(backend, *, is_verify=True, save_kv_cache=True, k_is_given=True, mask=True, **layer):
    backend.forward_metadata = SimpleNamespace(
        qo_indptr=np.array([0, 4]), kv_indptr=np.array([0, 0]), kv_indices=np.zeros(0, np.int64),
        custom_mask=np.eye(4, dtype=np.uint8).ravel() if mask else None, mask_indptr=np.array([0, 16]),
        max_extend_len=4,
    )  # fmt: skip
    one = stand_in.layer_of(2, 16, 16, **layer)
    rows = np.ones((4, 2 * 16), BF16), np.ones((4, 1, 16), BF16), np.ones((4, 1, 16), BF16)
    q, k, v = rows if k_is_given else (rows[0], None, None)
    batch = stand_in.forward_batch(np.arange(4), stand_in.VERIFY if is_verify else stand_in.EXTEND)
    return backend.forward_extend(q, k, v, one, batch, save_kv_cache=save_kv_cache)


def backend_of(version="0.5.23", **options):
    return taken_over(TritonAttnBackend(version, Pool(1, 8, 1, 16, 16, BF16, is_mla=False)), **options)


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(mask=False), "no custom_mask"),
        (dict(save_kv_cache=False), "save_kv_cache=False"),
        (dict(k_is_given=False, k_scale=0.5, v_scale=0.5), "how scaled"),
        (dict(logit_cap=30.0), "a logit cap"),
        (dict(k_scale=0.5), "one scale of two"),
    ],
)
def test_a_call_that_stays_is_said_once(options, why):
    lines = []
    backend = backend_of(lines=lines, place=CountingPlace())
    for _ in range(3):
        verify(backend, **options)
    assert len(lines) == 1 and why in lines[0]
    assert (backend.nbverify.taken, backend.nbverify.stock, len(backend.stock_calls)) == (0, 3, 3)


def test_drafts_that_another_call_has_stored_are_taken():
    """Models that share K and V between layers pass none; stock reads them from their slots, and so do we."""
    backend = backend_of(place=CountingPlace())
    verify(backend, k_is_given=False)
    assert (backend.nbverify.taken, len(backend.stock_calls)) == (1, 0)


def test_other_forwards_are_stock_and_not_worth_a_line():
    lines = []
    backend = backend_of(lines=lines, place=CountingPlace())
    verify(backend, is_verify=False)
    backend.extend_attention_fwd(*([None] * 15))  # from outside of forward_extend
    assert lines == [] and backend.nbverify.stock == 0 and len(backend.stock_calls) == 2


@pytest.mark.parametrize(
    "attributes, why",
    [
        (dict(dcp_size=2), "context parallelism"),
        (dict(enable_deterministic=True), "deterministic"),
        ({}, "another of its kernels"),
    ],
)
def test_a_verify_that_takes_another_path_is_said_too(attributes, why):
    lines = []
    backend = TritonAttnBackend("0.5.23", Pool(1, 8, 1, 16, 16, BF16, is_mla=False))
    vars(backend).update(attributes)
    backend.forward_extend = lambda *args, **kwargs: "stock"
    taken_over(backend, lines=lines, place=CountingPlace())
    assert verify(backend) == "stock"
    assert len(lines) == 1 and why in lines[0]


def test_an_error_in_a_verify_does_not_leak_into_the_next_call():
    backend = backend_of(place=CountingPlace())
    backend.pool.store = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        verify(backend)
    assert backend.nbverify._around is None


def test_a_kernel_of_another_kind_is_refused():
    backend = TritonAttnBackend("0.5.23", None)
    backend.extend_attention_fwd = lambda q_extend, k_extend: None
    with pytest.raises(nv.ArgumentError, match=r"extend_attention_fwd: expected a function with .*o_extend"):
        taken_over(backend)


# ---- switch, hook and name


@pytest.mark.parametrize(
    "text, want",
    [
        (None, (True, True, False)),
        ("", (True, True, False)),
        ("on", (True, True, False)),
        ("OFF", (False, False, False)),
        ("named", (False, True, False)),
        ("compact-mask", (True, True, True)),
        ("named, compact-mask", (False, True, True)),
    ],
)
def test_the_switch(text, want):
    switch = sglang.switch_of(text)
    assert (switch.hooks, switch.named, switch.compact_mask) == want


@pytest.mark.parametrize("text", ["0", "on,off", "onn"])
def test_a_wrong_switch_is_refused_by_name(text):
    with pytest.raises(nv.ArgumentError, match="NBVERIFY_SGLANG: expected one of"):
        sglang.switch_of(text)


@pytest.mark.parametrize(
    "version, said",
    [
        ("0.5.12.post1", None),
        ("0.5.16", None),
        ("0.5.23", None),
        ("0.5.9", "call nbverify.integrations.sglang.activate() in every process"),
        ("0.5.10", "outside of what this was tried with"),
        ("0.5.24", "outside of what this was tried with"),
        ("0.6.0rc1", "outside of what this was tried with"),
    ],
)
def test_versions(version, said):
    note = sglang.about_version(version)
    assert note is None if said is None else said in note


class Hooks:
    """SGLang's hook registry, as far as the plugin sees it."""

    HookType = SimpleNamespace(AROUND="around")

    def __init__(self, modules):
        self.HookRegistry, self._modules, self._hooks = self, modules, []

    def register(self, target, hook, kind):
        assert kind == "around"
        self._hooks.append((target, hook))

    def apply_hooks(self):
        for target, hook in self._hooks:
            owner = self._modules[sglang.BACKEND].TritonAttnBackend
            assert target == f"{sglang.BACKEND}.TritonAttnBackend.__init__"
            original = owner.__init__

            def wrapped(self, *args, _hook=hook, _original=original, **kwargs):
                return _hook(_original, self, *args, **kwargs)

            wrapped.__wrapped__ = original
            owner.__init__ = wrapped


@pytest.fixture
def fake_sglang(monkeypatch):
    """Modules of the names that the plugin imports; ``start(text)`` is what a process of the server does."""
    monkeypatch.setattr(sglang, "_active", [])
    monkeypatch.setattr(sglang.metadata, "version", lambda name: "0.5.23")
    monkeypatch.setattr(sglang, "place_of", lambda runner: CountingPlace() if runner.device == "cuda" else None)
    modules = {}

    class Backend(TritonAttnBackend):
        def __init__(self, model_runner, skip_prefill=False):
            super().__init__("0.5.23", Pool(1, 8, 1, 16, 16, BF16, is_mla=False))

    backends, choices = {"triton": lambda runner: modules[sglang.BACKEND].TritonAttnBackend(runner)}, []
    hooks = Hooks(modules)
    made = {
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": dict(HookRegistry=hooks, HookType=hooks.HookType),
        "sglang.srt.layers.attention.attention_registry": dict(
            ATTENTION_BACKENDS=backends,
            register_attention_backend=lambda name: lambda make: backends.__setitem__(name, make),
        ),
        "sglang.srt.arg_groups.choices": dict(add_attention_backend_choices=choices.extend),
        sglang.BACKEND: dict(TritonAttnBackend=Backend),
    }
    for name, attributes in made.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(attributes)
        monkeypatch.setitem(sys.modules, name, modules[name])

    def start(text=None):
        monkeypatch.setenv(sglang.VARIABLE, text or "on")
        sglang.activate()
        hooks.apply_hooks()
        return lambda name, **options: backends[name](runner_of(**({"device": "cuda"} | options)))

    return SimpleNamespace(start=start, hooks=hooks, choices=choices, modules=modules, monkeypatch=monkeypatch)


@pytest.mark.parametrize("text, triton, named", [("on", True, True), ("named", False, True), ("off", False, False)])
def test_which_backends_are_taken_over(fake_sglang, text, triton, named, caplog):
    make = fake_sglang.start(text)
    assert fake_sglang.choices == ["nbverify"]
    for name, is_taken in (("triton", triton), ("nbverify", named)):
        backend = make(name)
        assert hasattr(backend, "nbverify") == is_taken
        assert caplog.text == "", "nor is it tried twice"
        assert type(backend).__name__ in ("TritonAttnBackend", "Backend"), "checks by class keep working"
        verify(backend)
        assert len(backend.stock_calls) == (0 if is_taken else 1)


def test_activate_twice_hooks_once(fake_sglang):
    fake_sglang.start()
    sglang.activate()
    assert len(fake_sglang.hooks._hooks) == 1


def test_draft_workers_and_other_devices_are_left_alone(fake_sglang, caplog):
    make = fake_sglang.start()
    with caplog.at_level(logging.INFO):
        assert not hasattr(make("triton", is_draft_worker=True), "nbverify") and caplog.text == ""
        assert not hasattr(make("triton", device="cpu"), "nbverify")
        assert "nothing is taken over on cpu" in caplog.text
        caplog.clear()
        assert not hasattr(make("triton", device="cpu", tp_rank=3), "nbverify") and caplog.text == "", "one rank talks"


def test_a_backend_that_cannot_be_taken_over_is_stock(fake_sglang, caplog):
    fake_sglang.monkeypatch.setattr(sglang_takeover, "missing_parameters", lambda signature: ["o_extend"])
    backend = fake_sglang.start()("triton")
    assert "nothing is taken over: extend_attention_fwd" in caplog.text
    verify(backend)
    assert len(backend.stock_calls) == 1


def test_a_server_of_another_version_is_told(fake_sglang, caplog):
    fake_sglang.monkeypatch.setattr(sglang.metadata, "version", lambda name: "0.7.1")
    fake_sglang.start()
    assert "SGLang 0.7.1 is outside" in caplog.text


def test_the_oldest_version_has_no_registry_of_hooks(fake_sglang):
    fake_sglang.monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    fake_sglang.monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    older = types.ModuleType("sglang.srt.server_args")
    older.add_attention_backend_choices = fake_sglang.choices.extend
    fake_sglang.monkeypatch.setitem(sys.modules, "sglang.srt.server_args", older)
    make = fake_sglang.start()
    assert hasattr(make("triton"), "nbverify") and fake_sglang.choices == ["nbverify"]


def test_compact_masks_only_where_everything_reads_them(fake_sglang, caplog):
    make = fake_sglang.start("compact-mask")
    with caplog.at_level(logging.INFO):
        assert make("triton").nbverify.compact_mask is None
    assert "the mask stays FULL: this SGLang has no verify_mask" in caplog.text


@pytest.mark.parametrize(
    "attributes, runner, why",
    [
        ({}, {}, "only the EAGLE worker"),
        ({}, dict(spec_algorithm=SimpleNamespace(is_eagle=lambda: False)), "only the EAGLE worker"),
        (dict(dcp_size=2), None, "context parallelism"),
        (dict(enable_deterministic=True), None, "deterministic"),
        (dict(sliding_window_size=128), None, "sliding window"),
        (dict(sliding_window_size=None), None, None),
    ],
)
def test_why_no_compact_mask(attributes, runner, why):
    with_mask = type("Backend", (), {"verify_mask": None})()
    vars(with_mask).update(attributes)
    eagle = dict(spec_algorithm=SimpleNamespace(is_eagle=lambda: True))
    found = sglang_takeover.why_no_compact_mask(with_mask, SimpleNamespace(**(eagle if runner is None else runner)))
    assert found is None if why is None else why in found


def test_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, nbverify.integrations.sglang, nbverify.integrations.sglang_trees; "
        "print([name for name in ('torch', 'sglang', 'numba', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_entry_point_names_what_there_is():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split(f'[project.entry-points."{sglang.GROUP}"]')[1].split("\n[")[0]
    name, _, target = section.strip().partition(" = ")
    module, _, function = target.strip('"').partition(":")
    assert name == sglang.NAME and getattr(importlib.import_module(module), function) is sglang.activate


# ---- the check


KIMI = {  # of a public config.json of Kimi K2.5
    "text_config": {
        "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 7168, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 64.0, "mscale_all_dim": 1.0},
    }
}  # fmt: skip
QWEN = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
FOR_MODEL = dict(tp=8, nodes=33, requests=1, kv_cache_dtype="auto", contexts=[1024, 32768], gpu="9.0")


def flat(config):
    return {**config, **config.get("text_config", {})}


def test_specs_of_model_configurations():
    sizes = dict(nodes=33, requests=4, kv_dtype=None, max_prefix=1024)
    kimi = sglang_check.spec_of_config(flat(KIMI), tp=8, **sizes)
    assert (kimi.num_q_heads, kimi.head_dim_qk, kimi.head_dim_v, kimi.shared_kv) == (8, 576, 512, True)
    assert kimi.sm_scale == pytest.approx(0.144680, abs=1e-6) and kimi.kernel == "mma"
    qwen = sglang_check.spec_of_config(QWEN, tp=2, **sizes)
    assert (qwen.num_q_heads, qwen.num_kv_heads, qwen.head_dim_qk, qwen.sm_scale) == (16, 4, 128, 128**-0.5)
    assert sglang_check.spec_of_config(QWEN, tp=16, **sizes).num_kv_heads == 1, "KV heads are replicated"
    for wrong, name in ((dict(tp=3), "tp"), (dict(tp=0), "tp")):
        with pytest.raises(nv.ArgumentError, match=name):
            sglang_check.spec_of_config(QWEN, **wrong, **sizes)
    with pytest.raises(nv.ArgumentError, match="num_attention_heads: expected a number"):
        sglang_check.spec_of_config({}, tp=1, **sizes)


def test_the_check_says_what_of_a_model_is_taken():
    lines = list(sglang_check.about_model(flat(KIMI), **FOR_MODEL))
    assert lines[0][0] == "ok" and "MLA 576/512, 8 heads over 1 a GPU" in lines[0][1]
    assert len(lines) == 3 and "32,768 tokens" in lines[2][1] and "modelled" in lines[2][1]
    windowed = flat(QWEN) | {"sliding_window": 4096, "attn_logit_softcapping": 30.0, "index_topk": 2048}
    found = [text for kind, text in sglang_check.about_model(windowed, **FOR_MODEL) if "stays" in text]
    assert len(found) == 3
    assert sglang_check.left_to_stock(QWEN | {"sliding_window": 4096, "use_sliding_window": False}) == []
    e5m2 = list(sglang_check.about_model(QWEN, **(FOR_MODEL | {"kv_cache_dtype": "fp8_e5m2"})))
    assert e5m2 == [("note", "stays with the stock kernel: a cache of fp8_e5m2")]
    wide = list(sglang_check.about_model(QWEN | {"head_dim": 320}, **FOR_MODEL))
    assert "no expected times" in wide[-1][1]


def entry(load):
    return SimpleNamespace(name="nbverify", value="nbverify.integrations.sglang:activate", load=load)


def checked(fake, load=lambda: sglang.activate, entries=None):
    found = [entry(load)] if entries is None else entries
    fake.monkeypatch.setattr(sglang_check.metadata, "entry_points", lambda group: found)
    return list(sglang_check.about_plugin())


def test_the_check_of_a_working_plugin(fake_sglang):
    lines = checked(fake_sglang)
    assert {kind for kind, _ in lines} == {"ok"} and "is hooked" in lines[-1][1]


def test_the_check_lets_through_what_the_loader_swallows(fake_sglang):
    def broken():
        raise ImportError("libcuda.so.1: cannot open shared object file")

    assert ("FAULT", "the entry point fails, which SGLang only logs: ImportError: "
            "libcuda.so.1: cannot open shared object file") in checked(fake_sglang, broken)  # fmt: skip


def test_the_check_of_what_is_missing_or_off(fake_sglang):
    assert "no entry point" in checked(fake_sglang, entries=[])[-1][1]
    fake_sglang.monkeypatch.setenv("SGLANG_PLUGINS", "other, third")
    assert ("FAULT", "SGLANG_PLUGINS=other, third leaves nbverify out") in checked(fake_sglang)
    fake_sglang.monkeypatch.delenv("SGLANG_PLUGINS")
    fake_sglang.monkeypatch.setenv(sglang.VARIABLE, "off")
    assert checked(fake_sglang)[0] == ("note", "NBVERIFY_SGLANG=off: nothing is taken over")
    fake_sglang.monkeypatch.setenv(sglang.VARIABLE, "of")
    assert [kind for kind, _ in checked(fake_sglang)] == ["FAULT"]
    fake_sglang.monkeypatch.delenv(sglang.VARIABLE)
    fake_sglang.monkeypatch.setitem(sys.modules, sglang.BACKEND, None)
    fake_sglang.monkeypatch.setitem(sys.modules, "sglang.srt.plugins", None)
    assert "loader cannot be imported" in checked(fake_sglang)[-1][1]


def test_a_hook_that_did_not_apply_is_a_fault(fake_sglang):
    fake_sglang.monkeypatch.setattr(Hooks, "apply_hooks", lambda self: None)
    assert checked(fake_sglang)[-1] == ("FAULT", f"{sglang.CONSTRUCTOR} is not hooked")


def test_the_command(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    run = [sys.executable, "-m", "nbverify.integrations.sglang", "--check", "--tp", "8"]
    done = subprocess.run([*run, "--model", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert "would be taken over: MLA 576/512" in done.stdout and "nbverify 0" in done.stdout
    wrong = subprocess.run([*run, "--model", "nowhere"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "nowhere" in wrong.stderr


def test_contexts():
    assert sglang_check._contexts("1k,300,32K") == [1024, 300, 32768]
    for wrong in ("", "k", "0", "1m"):
        with pytest.raises(Exception, match="lengths"):
            sglang_check._contexts(wrong)
