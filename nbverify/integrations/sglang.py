"""The SGLang plugin: tree verification of MLA and GQA models goes through nbverify.

SGLang finds :func:`activate` under the entry point group ``sglang.srt.plugins`` and calls it in every process, before
the server's arguments are parsed.  It hooks the construction of ``TritonAttnBackend``, so that
``--attention-backend triton`` stays what it is called, and registers the name ``nbverify`` beside it.  What is taken
over and what is not: ``sglang_calls.py``; how: ``sglang_takeover.py``.

One environment variable, ``NBVERIFY_SGLANG``, words separated by commas:

    on             the default: every triton backend of a target model
    off            nothing: also the name ``nbverify`` is plain Triton then
    named          only ``--attention-backend nbverify``, to compare both in one installation
    compact-mask   beside one of the others: masks of [nodes, nodes], see docs/sglang.md for what that excludes

    python -m nbverify.integrations.sglang --check      what is installed, found, and would be taken over
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from nbverify.errors import ArgumentError
from nbverify.integrations import sglang_takeover
from nbverify.integrations.sglang_plans import Place, TorchGpu

NAME = "nbverify"
VARIABLE = "NBVERIFY_SGLANG"
GROUP = "sglang.srt.plugins"
BACKEND = "sglang.srt.layers.attention.triton_backend"
CONSTRUCTOR = f"{BACKEND}.TritonAttnBackend.__init__"
FIRST, LAST = (0, 5, 12), (0, 5, 23)  # versions that this was read and run against
WITHOUT_LOADER = (0, 5, 9)  # the same code, but activate() must be called by hand in every process

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Switch:
    """What ``NBVERIFY_SGLANG`` says."""

    hooks: bool = True
    named: bool = True
    compact_mask: bool = False


SETTINGS = {"on": Switch(), "off": Switch(hooks=False, named=False), "named": Switch(hooks=False)}
COMPACT = "compact-mask"


def switch_of(text: str | None) -> Switch:
    """Read the variable; raises ArgumentError for a word that it does not have."""
    words = [word.strip().lower() for word in (text or "on").split(",") if word.strip()]
    chosen = [word for word in words if word != COMPACT]
    if len(chosen) > 1 or any(word not in SETTINGS for word in chosen):
        raise ArgumentError(VARIABLE, f"one of {list(SETTINGS)}, and {COMPACT!r} beside it if wanted", repr(text))
    base = SETTINGS[chosen[0]] if chosen else Switch()
    return Switch(base.hooks, base.named, COMPACT in words)


def activate() -> None:
    """The entry point: hook and register, once a process."""
    switch = switch_of(os.environ.get(VARIABLE))
    note = about_version(metadata.version("sglang"))
    if note is not None:
        logger.warning("nbverify: %s", note)
    if not _active:
        register_name(switch)
        if switch.hooks:
            hook_constructor(switch)
        _active.append(switch)


_active: list[Switch] = []  # of this process: a second hook would wrap the first


def about_version(version: str) -> str | None:
    """What is to be said of a version of SGLang; None if it was tried."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if FIRST <= numbers <= LAST:
        return None
    tried = f"{_text(FIRST)}.post1 to {_text(LAST)}"
    if numbers == WITHOUT_LOADER:
        return f"SGLang {version} has no plugin loader: call {__name__}.activate() in every process"
    return f"SGLang {version} is outside of what this was tried with ({tried}); calls that look otherwise stay stock"


def hook_constructor(switch: Switch) -> None:
    """Every TritonAttnBackend that is constructed from now on is looked at by :func:`attach`."""

    def construct(original: Callable, backend: Any, *args: Any, **kwargs: Any) -> None:
        original(backend, *args, **kwargs)
        attach(backend, args[0] if args else kwargs["model_runner"], switch)

    try:
        registry = import_module("sglang.srt.plugins.hook_registry")
    except ImportError:  # 0.5.9
        stock_class = import_module(BACKEND).TritonAttnBackend
        original = stock_class.__init__
        stock_class.__init__ = lambda backend, *args, **kwargs: construct(original, backend, *args, **kwargs)
        return
    registry.HookRegistry.register(CONSTRUCTOR, construct, registry.HookType.AROUND)


def register_name(switch: Switch) -> None:
    """``--attention-backend nbverify``: SGLang's own Triton backend, of its own class, with the verify taken over."""
    backends = import_module("sglang.srt.layers.attention.attention_registry")

    def make(runner: Any) -> Any:
        backend = backends.ATTENTION_BACKENDS["triton"](runner)
        if switch.named:
            attach(backend, runner, switch)
        return backend

    backends.register_attention_backend(NAME)(make)
    try:
        choices = import_module("sglang.srt.arg_groups.choices")
    except ImportError:  # up to 0.5.12
        choices = import_module("sglang.srt.server_args")
    choices.add_attention_backend_choices([NAME])


def attach(backend: Any, runner: Any, switch: Switch) -> None:
    """Take over a backend that is to be: on a CUDA device, of a target model, not done yet.

    The takeover can be found as ``backend.nbverify``.  Whatever speaks against it is logged, and the backend is stock.
    """
    if hasattr(backend, NAME):
        return
    rank = getattr(runner, "tp_rank", 0)
    say = lambda text: logger.log(logging.INFO if rank == 0 else logging.DEBUG, "nbverify: %s", text)  # noqa: E731
    if getattr(runner, "is_draft_worker", False):
        return  # drafts have no tree to verify
    place = place_of(runner)
    if place is None:
        say(f"nothing is taken over on {runner.device}: only CUDA devices are")
        return
    try:
        backend.nbverify = sglang_takeover.take_over(backend, runner, place=place, say=say)
    except ArgumentError as error:
        logger.warning("nbverify: nothing is taken over: %s", error)
        return
    if switch.compact_mask:
        why = sglang_takeover.why_no_compact_mask(backend, runner)
        if why is not None:
            say(f"the mask stays FULL: {why}")
            return
        modes = import_module("sglang.srt.speculative.eagle_utils")
        sglang_takeover.use_compact_mask(backend.nbverify, import_module(BACKEND), modes.TreeMaskMode.QLEN_ONLY)
        say("masks are compact: [nodes, nodes] bytes a request")


def place_of(runner: Any) -> Place | None:
    """Where a runner's tensors live; None where the kernels cannot run."""
    import torch

    if not str(runner.device).startswith("cuda") or torch.version.hip is not None:
        return None
    return TorchGpu()


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


if __name__ == "__main__":
    from nbverify.integrations.sglang_check import main

    sys.exit(main())
