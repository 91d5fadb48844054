"""``python -m nbverify.integrations.sglang --check``: what is installed, what SGLang would find, what would be taken.

SGLang's loader logs an exception of a plugin and goes on, and what the user then sees is "Invalid attention backend".
This calls the same entry point and lets the exception through.

Needs no GPU and no SGLang to say what it can: exit code 0 if the plugin would work here, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import nbverify
from nbverify import model, presets
from nbverify.errors import ArgumentError
from nbverify.integrations import sglang as plugin
from nbverify.integrations.sglang_calls import FP8
from nbverify.integrations.sglang_plans import with_kernel
from nbverify.kernels.planner import choose_tiles, limits_of
from nbverify.spec import Mask, VerifySpec

OK, FAULT, NOTE = "ok", "FAULT", "note"
K = 1024
PACKAGES = ("numba-cuda", "torch", "triton", "sglang")
CACHE_DTYPES = {"auto": None, "bfloat16": None, "bf16": None, "fp8_e4m3": FP8}

Line = tuple[str, str]  # one of OK, FAULT, NOTE, and what


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m nbverify.integrations.sglang", description="The SGLang plugin.")
    parser.add_argument("--check", action="store_true", required=True, help="say what works here, and what does not")
    parser.add_argument("--model", type=Path, metavar="FILE", help="config.json of a model, or the folder that has it")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the heads")
    parser.add_argument("--nodes", type=int, default=33, metavar="N", help="draft tokens a request, the root included")
    parser.add_argument("--requests", type=int, default=1, metavar="N")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=[*CACHE_DTYPES, "fp8_e5m2"])
    parser.add_argument("--contexts", type=_contexts, default=_contexts("1k,8k,32k,128k"), metavar="1k,32k")
    parser.add_argument("--gpu", default="9.0", choices=list(model.CHIPS), help="compute capability of expected times")
    arguments = parser.parse_args(argv)
    lines = [*about_packages(), *about_plugin()]
    if arguments.model is not None:
        try:
            config = read_config(arguments.model)
            lines += about_model(
                config, tp=arguments.tp, nodes=arguments.nodes, requests=arguments.requests,
                kv_cache_dtype=arguments.kv_cache_dtype, contexts=arguments.contexts, gpu=arguments.gpu,
            )  # fmt: skip
        except (ArgumentError, OSError, json.JSONDecodeError) as error:
            print(f"--model: {error}", file=sys.stderr)
            return 2
    for kind, text in lines:
        print(f"{kind:6} {text}")
    return 1 if any(kind == FAULT for kind, _ in lines) else 0


def _contexts(text: str) -> list[int]:
    """``1k,32768`` as numbers."""
    try:
        lengths = [int(part[:-1]) * K if part[-1:] in "kK" and part else int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"lengths such as 1k,32k, not {text!r}") from None
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"lengths of at least 1, not {text!r}")
    return lengths


# ---- the installation


def about_packages() -> Iterator[Line]:
    """Versions, and whether this one of SGLang was tried."""
    yield NOTE, f"nbverify {nbverify.__version__}, Python {sys.version.split()[0]}"
    for name in PACKAGES:
        version = version_of(name)
        yield (NOTE if version or name != "sglang" else FAULT), f"{name} {version or 'is not installed'}"
    version = version_of("sglang")
    if version is not None:
        note = plugin.about_version(version)
        yield (OK, f"SGLang {version} is one that this was tried with") if note is None else (NOTE, note)


def version_of(name: str) -> str | None:
    """Of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def about_plugin() -> Iterator[Line]:
    """What SGLang's loader would find and do, one step after the other."""
    try:
        switch = plugin.switch_of(os.environ.get(plugin.VARIABLE))
    except ArgumentError as error:
        yield FAULT, str(error)
        return
    if not switch.hooks:
        what = "only --attention-backend nbverify is taken over" if switch.named else "nothing is taken over"
        yield NOTE, f"{plugin.VARIABLE}={os.environ[plugin.VARIABLE]}: {what}"
    found = [entry for entry in metadata.entry_points(group=plugin.GROUP) if entry.name == plugin.NAME]
    if not found:
        yield FAULT, f"no entry point {plugin.NAME!r} in group {plugin.GROUP}: is nbverify installed with pip?"
        return
    yield OK, f"entry point {found[0].name} = {found[0].value} in group {plugin.GROUP}"
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and plugin.NAME not in [name.strip() for name in allowed.split(",")]:
        yield FAULT, f"SGLANG_PLUGINS={allowed} leaves {plugin.NAME} out"
    if version_of("sglang") is None:
        return
    try:
        importlib.import_module("sglang.srt.plugins")
    except ImportError as error:
        yield FAULT, f"SGLang's plugin loader cannot be imported: {error}"
        return
    yield from about_activation(found[0].load, switch)


def about_activation(load: Any, switch: plugin.Switch) -> Iterator[Line]:
    """Call the entry point as the loader does, apply the hooks, and look whether they are there."""
    try:
        load()()
    except Exception as error:  # anything may come from importing SGLang: it is what the loader would hide
        yield FAULT, f"the entry point fails, which SGLang only logs: {type(error).__name__}: {error}"
        return
    backends = importlib.import_module("sglang.srt.layers.attention.attention_registry").ATTENTION_BACKENDS
    is_known = plugin.NAME in backends
    yield (OK if is_known else FAULT), f"--attention-backend {plugin.NAME} is {'' if is_known else 'not '}registered"
    if not switch.hooks:
        return
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    try:
        constructor = importlib.import_module(plugin.BACKEND).TritonAttnBackend.__init__
    except Exception as error:
        yield FAULT, f"SGLang's Triton backend cannot be imported: {type(error).__name__}: {error}"
        return
    is_hooked = hasattr(constructor, "__wrapped__")
    yield (OK if is_hooked else FAULT), f"{plugin.CONSTRUCTOR} is {'' if is_hooked else 'not '}hooked"


# ---- a model


def read_config(path: Path) -> dict[str, Any]:
    """The text model's part of a ``config.json``."""
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    return {**config, **config.get("text_config", {})}


def about_model(
    config: Mapping[str, Any], *, tp: int, nodes: int, requests: int, kv_cache_dtype: str, contexts: Sequence[int],
    gpu: str,
) -> Iterator[Line]:  # fmt: skip
    """What would be taken over of a model, and how long a verify of a layer should take."""
    for what in left_to_stock(config):
        yield NOTE, f"stays with the stock kernel: {what}"
    if kv_cache_dtype not in CACHE_DTYPES:
        yield NOTE, f"stays with the stock kernel: a cache of {kv_cache_dtype}"
        return
    kv_dtype = CACHE_DTYPES[kv_cache_dtype]
    spec = spec_of_config(config, tp=tp, nodes=nodes, requests=requests, kv_dtype=kv_dtype, max_prefix=max(contexts))
    kind = "MLA" if spec.shared_kv else "GQA"
    yield (
        OK,
        (
            f"would be taken over: {kind} {spec.head_dim_qk}/{spec.head_dim_v}, {spec.num_q_heads} heads over "
            f"{spec.num_kv_heads} a GPU, {spec.dtype}, cache {spec.kv_dtype}, sm_scale {spec.sm_scale:.6f}, "
            f"kernel {spec.kernel}"
        ),
    )
    chip = model.CHIPS[gpu]
    if spec.kernel != "mma":
        yield NOTE, "no expected times: the model is one of the tensor-core kernel"
        return
    for prefix in contexts:
        us = expected_us(spec, model.Batch(requests, nodes, prefix), chip)
        yield NOTE, f"{requests} x {nodes} nodes, {prefix:,} tokens: {us:.0f} us a layer on {chip.name}, modelled"


def left_to_stock(config: Mapping[str, Any]) -> list[str]:
    """What a configuration says of layers that nbverify does not compute."""
    found = []
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        found.append(f"layers with a sliding window of {config['sliding_window']}")
    if config.get("attn_logit_softcapping"):
        found.append("attention with a logit cap")
    if "index_topk" in config:
        found.append("sparse attention (DSA)")
    return found


def spec_of_config(
    config: Mapping[str, Any], *, tp: int, nodes: int, requests: int, kv_dtype: str | None, max_prefix: int
) -> VerifySpec:
    """The verify problem of a layer on one of ``tp`` GPUs, from the names of Hugging Face's ``config.json``.

    Raises ArgumentError for a missing number, heads that ``tp`` does not divide, and what VerifySpec refuses.
    """
    heads = _number(config, "num_attention_heads")
    if tp < 1 or heads % tp:
        raise ArgumentError("tp", f"a divisor of num_attention_heads={heads}", tp)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    sizes: dict[str, Any] = {
        "max_requests": requests, "max_nodes": nodes, "max_kv_len": max_prefix + nodes, "dtype": dtype,
        "kv_dtype": kv_dtype, "mask": Mask.FULL,
    }  # fmt: skip
    if config.get("kv_lora_rank"):
        latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        trained = _number(config, "qk_nope_head_dim") + rope
        scaling = config.get("rope_scaling") or {}
        scale = presets.yarn_sm_scale(trained, scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0))
        return with_kernel(
            VerifySpec.mla(heads // tp, head_dim_qk=latent + rope, head_dim_v=latent, sm_scale=scale, **sizes)
        )
    head_dim = config.get("head_dim") or _number(config, "hidden_size") // heads
    kv_heads = max(1, config.get("num_key_value_heads", heads) // tp)
    return with_kernel(VerifySpec.gqa(heads // tp, kv_heads, head_dim, sm_scale=head_dim**-0.5, **sizes))


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ArgumentError(name, "a number >= 1 in the model's config.json", repr(value))
    return value


def expected_us(spec: VerifySpec, batch: model.Batch, chip: model.Chip) -> float:
    """Modelled microseconds of a layer's verify; docs/model.md has the model's errors."""
    major, _, minor = chip.cc.partition(".")
    return model.estimate(spec, choose_tiles(spec, limits_of((int(major), int(minor)))), batch, chip).us
