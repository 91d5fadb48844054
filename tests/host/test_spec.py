"""VerifySpec: what it refuses, by name; equality and hash; what is part of the compile key and what is not."""

import dataclasses
import functools
import math
from dataclasses import replace

import numpy as np
import pytest

import nbverify as nv
from nbverify.errors import ArgumentError

LIMITS = {"max_requests": 4, "max_nodes": 33, "max_kv_len": 1024, "sm_scale": 0.1}
GQA = nv.VerifySpec.gqa(8, 2, 64, **LIMITS)
MLA = nv.VerifySpec.mla(8, **LIMITS)
INT_FIELDS = ("num_q_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "max_requests", "max_nodes", "max_kv_len")
CHOICE_FIELDS = ("dtype", "kv_dtype", "mask", "split", "reduction", "kernel")


def plain_mod(score, request, head, node, key):
    return score


class Modifier:
    def __call__(self, score, request, head, node, key):
        return score

    def method(self, score, request, head, node, key):
        return score


def wrong_fields():
    """(base spec, changes, argument that the error names)."""
    no_ints = (None, 1.0, 8.0, "8", b"8", True, [8], (8,), np.array([8]), np.float32(8), math.nan, object())
    for name in INT_FIELDS:
        yield from ((GQA, {name: value}, name) for value in (0, -1, -8, 2**31, 2**63, 10**30, *no_ints))
    for name in ("head_dim_qk", "head_dim_v"):
        yield from ((GQA, {name: value}, name) for value in (1, 8, 15, 17, 40, 575, 577, 592))
    for name in ("shared_kv", "prefix_visible"):
        yield from ((GQA, {name: value}, name) for value in (None, 0, 1, "True", np.bool_(True), []))
    for value in (math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, None, "0.1", b"1", True, 1j, [0.1], np.ones(1)):
        yield GQA, {"sm_scale": value}, "sm_scale"
    no_names = ("", "Bfloat16", "nothing", b"bfloat16", 0, 1.0, True, [], ["full"], (), {}, object(), str)
    for name in CHOICE_FIELDS:
        yield from ((GQA, {name: value}, name) for value in no_names)
        yield GQA, {name: np.array(["bfloat16", "full"])}, name
        if name != "kv_dtype":
            yield GQA, {name: None}, name
    for value in ("bf16", "float32", "float8_e4m3fn", "half", np.float16, np.dtype("float16"), "fp16"):
        yield GQA, {"dtype": value, "kv_dtype": None}, "dtype"  # np.dtype equals its name, and has another hash
    for value in ("float16", "float8_e5m2", "float8_e4m3fnuz", "float8_e4m3", "fp8", "uint8", "int8", np.uint8):
        yield GQA, {"kv_dtype": value}, "kv_dtype"
    for value in ("FULL", "qlen_only", "Mask.FULL"):
        yield GQA, {"mask": value}, "mask"
    for layout in ("tree", "packed", "causal", "none"):
        yield GQA, {"mask": layout, "prefix_visible": False}, "prefix_visible"
    yield GQA, {"num_q_heads": 7}, "num_q_heads"
    yield GQA, {"num_q_heads": 1}, "num_q_heads"
    yield GQA, {"num_kv_heads": 3}, "num_q_heads"
    yield GQA, {"max_kv_len": 32}, "max_kv_len"
    yield GQA, {"max_kv_len": 2**31 - 127}, "max_kv_len"
    yield GQA, {"max_nodes": 2**30, "max_kv_len": 2**31 - 128}, "max_nodes"  # rows of a request: max_nodes * group
    yield MLA, {"num_kv_heads": 2}, "num_kv_heads"
    yield MLA, {"head_dim_v": 576, "head_dim_qk": 512}, "head_dim_v"
    yield MLA, {"shared_kv": None}, "shared_kv"
    no_functions = ("score", 1, True, [], Modifier(), print, math.exp, functools.partial(plain_mod), type, Modifier)
    yield from ((GQA, {"score_mod": value}, "score_mod") for value in no_functions)
    yield GQA, {"score_mod": Modifier().method}, "score_mod"
    for function in (
        lambda: 0.0,
        lambda score: score,
        lambda score, request, head, node: score,
        lambda score, request, head, node, key, more: score,
        lambda *args: args[0],
        lambda score, *args: score,
        lambda score, request, head, node, *, key: score,
        lambda score, request, head, node, key, *, slope: score,
    ):
        yield GQA, {"score_mod": function}, "score_mod"


WRONG = list(wrong_fields())


@pytest.mark.parametrize("base, changes, name", WRONG, ids=[f"{i} {case[2]}" for i, case in enumerate(WRONG)])
def test_wrong_field_is_refused_by_name(base, changes, name):
    with pytest.raises(ArgumentError) as failure:
        replace(base, **changes)
    assert failure.value.argument == name, changes
    assert str(failure.value).startswith(f"{name}: expected "), changes


def test_jitted_score_mod_is_refused():
    """It would be compiled a second time, and a cuda.jit function has no code and constants to make a key from."""
    cuda = pytest.importorskip("numba.cuda")
    with pytest.raises(ArgumentError, match=r"^score_mod: expected "):
        replace(GQA, score_mod=cuda.jit(device=True)(plain_mod))


@pytest.mark.parametrize(
    "make", [lambda **kw: nv.VerifySpec.mla(8, **kw), lambda **kw: nv.VerifySpec.gqa(8, 2, 64, **kw)]
)
@pytest.mark.parametrize("name, value", [("max_requests", 0), ("dtype", "int8"), ("mask", "x"), ("split", "x")])
def test_constructors_check_too(make, name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        make(**{**LIMITS, name: value})


@pytest.mark.parametrize("name", ["max_requests", "max_nodes", "max_kv_len", "sm_scale"])
def test_limits_and_the_scale_have_no_default(name):
    limits = {k: v for k, v in LIMITS.items() if k != name}
    for make in (lambda: nv.VerifySpec.mla(8, **limits), lambda: nv.VerifySpec.gqa(8, 2, 64, **limits)):
        with pytest.raises(TypeError, match=name):
            make()


VALID = [
    {"num_q_heads": 2},
    {"num_q_heads": 128, "num_kv_heads": 128},
    {"head_dim_qk": 16, "head_dim_v": 576},
    {"head_dim_qk": 576, "head_dim_v": 16},
    {"max_nodes": 1, "max_kv_len": 1, "max_requests": 1},
    {"max_nodes": 1024, "max_kv_len": 1024},
    {"max_kv_len": 2**31 - 128, "max_requests": 2**31 - 1},
    {"sm_scale": 1},
    {"sm_scale": -1.0},
    {"sm_scale": 0.0},
    {"sm_scale": 3e38},
    {"sm_scale": np.float64(0.5)},
    {"dtype": "float16", "kv_dtype": "float16"},
    {"dtype": "float16", "kv_dtype": "float8_e4m3fn"},
    *({"mask": layout} for layout in nv.Mask),
    *({"mask": layout.value} for layout in nv.Mask),
    {"prefix_visible": False},
    {"split": "fixed"},
    {"reduction": "two_launch"},
    {"score_mod": plain_mod},
    {"score_mod": lambda s, b, h, i, j: s},
]


@pytest.mark.parametrize("changes", VALID, ids=[f"{i} {next(iter(changes))}" for i, changes in enumerate(VALID)])
def test_valid_fields(changes):
    base = replace(GQA, kv_dtype=None)
    spec = replace(base, **({"kv_dtype": changes.get("dtype", base.dtype)} | changes))
    for name, value in changes.items():
        assert getattr(spec, name) == value
    assert hash(spec) == hash(replace(spec)) and spec == replace(spec)


def test_kv_dtype_defaults_to_dtype():
    assert nv.VerifySpec.mla(8, **LIMITS, dtype="float16").kv_dtype == "float16"
    assert not MLA.is_fp8
    assert nv.VerifySpec.mla(8, **LIMITS, kv_dtype="float8_e4m3fn").is_fp8


def test_mla_and_gqa_fields():
    assert (MLA.num_kv_heads, MLA.head_dim_qk, MLA.head_dim_v, MLA.shared_kv, MLA.group) == (1, 576, 512, True, 8)
    assert (GQA.head_dim_qk, GQA.head_dim_v, GQA.shared_kv, GQA.group) == (64, 64, False, 4)
    assert nv.VerifySpec.gqa(8, 2, 64, head_dim_v=32, **LIMITS).head_dim_v == 32


def test_both_constructors_pass_every_option_on():
    options = {
        **{"max_requests": 3, "max_nodes": 5, "max_kv_len": 77, "sm_scale": 0.3, "dtype": "float16"},
        **{"kv_dtype": "float8_e4m3fn", "mask": "full", "prefix_visible": False, "split": "fixed"},
        **{"reduction": "two_launch", "kernel": "simt", "score_mod": plain_mod},
    }
    for spec in (nv.VerifySpec.mla(8, **options), nv.VerifySpec.gqa(8, 2, 64, **options)):
        assert {name: getattr(spec, name) for name in options} == options


def test_mask_is_a_str_and_a_mask():
    for layout in nv.Mask:
        spec = replace(GQA, mask=layout.value)
        assert spec.mask is layout and spec.mask == layout.value
        assert spec == replace(GQA, mask=layout) and hash(spec) == hash(replace(GQA, mask=layout))
    reads = [layout.value for layout in nv.Mask if layout.reads_buffer]
    assert reads == ["full", "tree", "packed"]


def test_equal_specs_have_equal_hashes():
    """A plan is kept by its spec, in verify_attention."""
    pairs = [
        (GQA, replace(GQA, kv_dtype=None)),
        (GQA, replace(GQA, sm_scale=np.float64(0.1))),
        (replace(GQA, sm_scale=1), replace(GQA, sm_scale=1.0)),
    ]
    for a, b in pairs:
        assert a == b and hash(a) == hash(b)


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GQA.max_nodes = 1


OTHER = {
    **{"num_q_heads": 16, "num_kv_heads": 4, "head_dim_qk": 32, "head_dim_v": 32, "dtype": "float16"},
    **{"kv_dtype": "float8_e4m3fn", "mask": "tree", "prefix_visible": False, "split": "fixed"},
    **{"reduction": "two_launch"},
}
NOT_COMPILED_IN = {"max_requests": 5, "max_nodes": 7, "max_kv_len": 2000, "sm_scale": 0.7}


def test_every_field_is_in_the_key_or_a_runtime_parameter():
    fields = {f.name for f in dataclasses.fields(nv.VerifySpec)}
    # shared_kv comes below; schedule goes with one kernel only (emulated/test_step_schedule.py); kernel has one value;
    # score_mod is keyed by its code (compiled/test_cache.py).
    assert fields == {*OTHER, *NOT_COMPILED_IN, "shared_kv", "kernel", "schedule", "score_mod"}


@pytest.mark.parametrize("name", OTHER)
def test_compile_key_has_what_code_depends_on(name):
    changes = {name: OTHER[name]}
    if name == "dtype":
        changes["kv_dtype"] = OTHER[name]
    assert replace(GQA, **changes).compile_key != GQA.compile_key


def test_compile_key_tells_shared_kv():
    one_head = replace(GQA, num_kv_heads=1)
    assert replace(one_head, shared_kv=True).compile_key != one_head.compile_key


@pytest.mark.parametrize("name", NOT_COMPILED_IN)
def test_compile_key_has_no_sizes_and_scales(name):
    assert replace(GQA, **{name: NOT_COMPILED_IN[name]}).compile_key == GQA.compile_key


def test_compile_key_is_reproducible_text():
    """Its repr is hashed into file names, in other processes too."""
    assert " at 0x" not in repr(MLA.compile_key)
    assert repr(MLA.compile_key) == repr(replace(MLA).compile_key)


def test_error_is_a_value_error_with_the_values():
    with pytest.raises(ValueError, match=r"^max_kv_len: expected >= max_nodes=33 .*, got 32$"):
        replace(GQA, max_kv_len=32)
