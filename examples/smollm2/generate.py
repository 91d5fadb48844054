"""``nbverify generate``: answers of SmolLM2-135M, decoded with draft trees.

Accepted drafts are green.  Then: tokens a step, tokens a second plain and with trees, and the share of attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import nbverify as nv
from examples.smollm2 import fit
from examples.smollm2.decode import Decoder
from examples.smollm2.drafters import LOOKUP_DEPTH, TOP_K, Drafter, Mixture, PromptLookup, RidgeHeads
from examples.smollm2.kernel_model import KernelModel, StepSizes, what_compiles
from examples.smollm2.model import Config, NumpyModel
from examples.smollm2.tokenizer import Tokenizer
from examples.smollm2.weights import find_file, read_gguf
from nbverify import demo, doctor, reference
from nbverify.ahead import compile_ahead
from nbverify.errors import ArgumentError

DESCRIPTION = (
    "Let SmolLM2-135M-Instruct answer, decoded with draft trees, token for token as plain greedy decoding does. "
    "Accepted drafts are green.  docs/example.md says how to get the weights."
)
BUDGETS = (8, 16, 32, 64)
PLAIN_STEP: StepSizes = (1, 1, 1)
DRAFTERS = ("lookup", "ridge", "mixture")
MOST_REQUESTS = 8  # at once
PLAIN_SAMPLE = 32  # tokens of plain decoding that its speed is taken from, on a CPU and without --compare
CLOSE = 0.05  # a top-2 gap in the logits below this is a tie that rounding may decide
FIT_QUESTIONS, FIT_REQUESTS = 54, 18
EMULATED_BLOCKS = 4
DRAFT_STYLE = "green"
FAILED = 1


@dataclass
class Answer:
    """One text as it grows."""

    tokens: list[int] = field(default_factory=list)
    is_draft: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Decoded:
    """A run: the answers, and what it took."""

    answers: list[Answer]
    steps: int  # of each request, added up
    seconds: float
    attention_s: float

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_a_second(self) -> float:
        """Drafting and prompts included."""
        return self.num_tokens / self.seconds

    @property
    def tokens_a_step(self) -> float:
        """Of each request: 1 in plain decoding."""
        return self.num_tokens / self.steps


def main(argv: Sequence[str], prog: str = "nbverify generate") -> int:
    """Run the command; its exit code."""
    started, arguments = time.perf_counter(), build_parser(prog).parse_args(argv)
    console, status = Console(highlight=False), Console(stderr=True)
    if (arguments.fit is not None) == bool(arguments.prompts):
        raise ArgumentError("prompt", "one or more, or --fit", "both" if arguments.prompts else "none")
    if arguments.emulate_layer is not None and arguments.device == "gpu":
        raise ArgumentError("--emulate-layer", "--device cpu: it checks the numpy path", "--device gpu")
    with _doing(status, "reading the weights"):
        weights = read_gguf(find_file(arguments.weights))
        tokenizer = Tokenizer(weights.fields)
    device = choose_device(arguments.device)
    if arguments.fit:
        return run_fit(weights, tokenizer, device, arguments.fit, status)
    prompts = [tokenizer.chat(prompt) for prompt in arguments.prompts]
    room = max(map(len, prompts)) + arguments.max_tokens + arguments.budget + 1
    with _doing(status, "making the model and its plans") as say:
        steps = [PLAIN_STEP, step_sizes(arguments.drafter, arguments.budget)]
        model = make_model(weights, device, min(len(prompts), MOST_REQUESTS), room, steps, say)
        drafter = make_drafter(arguments.drafter, model)
        layer = None if arguments.emulate_layer is None else WatchedLayer(model, arguments.emulate_layer)
        decoder = Decoder(model, drafter, arguments.budget, end_token=tokenizer.end)
    ready_s = time.perf_counter() - started
    shown = Streamed(console, tokenizer) if len(prompts) == 1 and not arguments.compare else None
    trees = decode(decoder, prompts, arguments.max_tokens, shown)
    if shown is not None:
        console.print()
    elif not arguments.compare:
        for prompt, answer in zip(arguments.prompts, trees.answers, strict=True):
            console.rule(Text(prompt.splitlines()[0][:100], style="bold"), align="left")
            console.print(coloured(answer, tokenizer))
    # As many tokens as with trees, so that the prompt weighs the same; a CPU is too slow for that.
    in_full = arguments.compare or device == "gpu"
    sample = arguments.max_tokens if in_full else min(PLAIN_SAMPLE, arguments.max_tokens)
    with _doing(status, f"plain decoding, {sample} tokens at most"):
        plain = decode(Decoder(model, end_token=tokenizer.end), prompts, sample)
    passed = not arguments.compare or compare(console, tokenizer, model, prompts, plain, trees)
    show_figures(console, device, arguments, model.max_requests, plain, trees, ready_s)
    if layer is not None:
        with _doing(status, f"layer {layer.layer} of the first step in the emulator (10 to 60 s)"):
            check = layer.emulate()
        verdict = "[green]PASS[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        console.print(f"layer {layer.layer} in the emulator: error {check.max_error:.1e}, "
                      f"{check.worst:.2f} of its bound ({check.bound}) {verdict}")  # fmt: skip
        passed = passed and check.passed
    return 0 if passed else FAILED


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="several are decoded at once")
    parser.add_argument("--budget", type=int, choices=BUDGETS, default=16, help="drafted nodes of a tree (16)")
    parser.add_argument(
        "--drafter", choices=DRAFTERS, default="lookup",
        help="lookup: the text so far (default); ridge: block heads; mixture: both.  The last two need --fit once",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=_positive, default=160, metavar="N", help="of an answer (160)")
    parser.add_argument("--compare", action="store_true", help="plain decoding beside trees, and where they differ")
    parser.add_argument(
        "--device", choices=("auto", "gpu", "cpu"), default="auto",
        help="auto: the GPU, and numpy only where there is none (default)",
    )  # fmt: skip
    parser.add_argument("--weights", type=Path, metavar="FILE", help="the GGUF file, if the package is not installed")
    parser.add_argument("--emulate-layer", type=int, metavar="L", help="cpu: verify layer L of a step in the emulator")
    parser.add_argument(
        "--fit", type=_positive, nargs="?", const=FIT_QUESTIONS, metavar="N",
        help=f"fit the block heads to the model's own answers to N questions ({FIT_QUESTIONS}), and stop",
    )  # fmt: skip
    return parser


def choose_device(requested: str) -> str:
    """ "gpu" or "cpu"; NbverifyError for a GPU that is there and cannot be used."""
    if requested == "cpu":
        return "cpu"
    found, _ = demo.choose_device(requested, doctor.gather_facts())
    return "gpu" if found == "gpu" else "cpu"


def make_model(
    weights: Any, device: str, max_requests: int, max_len: int, steps: Iterable[StepSizes], say: Callable[[str], None]
) -> NumpyModel | KernelModel:
    """The model on that device; on a GPU first all that it and its ``steps`` need is compiled, at once."""
    config = Config.of(weights.fields)
    sizes: dict[str, Any] = {"max_requests": max_requests, "max_len": max_len}
    if device == "cpu":
        return NumpyModel(weights.tensors, config, **sizes)
    vocab_size = len(weights.tensors["token_embd.weight"])
    compile_ahead(what_compiles(config, vocab_size, steps, **sizes), progress=say)
    return KernelModel(weights.tensors, config, **sizes)


def step_sizes(drafter: str, budget: int) -> StepSizes:
    """Of a decoder with that drafter."""
    lookup = 0 if drafter == "ridge" else LOOKUP_DEPTH
    heads = 0 if drafter == "lookup" else len(fit.load_heads())
    return budget + 1, min(max(lookup, heads), budget), TOP_K


def make_drafter(name: str, model: Any) -> Drafter:
    """The drafter of that name."""
    if name == "lookup":
        return PromptLookup()
    heads = RidgeHeads(fit.load_heads(), model)
    return heads if name == "ridge" else Mixture(PromptLookup(), heads)


def decode(
    decoder: Decoder, prompts: list[list[int]], max_tokens: int, on_token: Callable[[int, bool], None] | None = None
) -> Decoded:
    """Decode all prompts; ``on_token(token, is_draft)`` sees each as it comes, and its time does not count."""
    model, answers = decoder.model, [Answer() for _ in prompts]
    model.attention_s(decoder.step, 0)
    steps, steps_before, shown_s = 0, decoder.steps, 0.0
    start = time.perf_counter()
    for grown in decoder.run(prompts, max_tokens):
        steps += 1
        answer, grown_at = answers[grown.text], time.perf_counter()
        for i, token in enumerate(grown.tokens):
            answer.tokens.append(token)
            answer.is_draft.append(i < grown.drafted)
            if on_token is not None:
                on_token(token, i < grown.drafted)
        shown_s += time.perf_counter() - grown_at  # a terminal is slower than a step, and no part of decoding
    seconds = time.perf_counter() - start - shown_s
    return Decoded(answers, steps, seconds, model.attention_s(decoder.step, decoder.steps - steps_before))


class Streamed:
    """Prints an answer token by token.  Bytes of a character that is not complete wait for the rest."""

    def __init__(self, console: Console, tokenizer: Tokenizer):
        self.console, self.tokenizer, self.printed = console, tokenizer, 0
        self.tokens: list[int] = []

    def __call__(self, token: int, is_draft: bool) -> None:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.console.print(Text(text[self.printed :], DRAFT_STYLE if is_draft else ""), end="", soft_wrap=True)
            self.printed = len(text)


def coloured(answer: Answer, tokenizer: Tokenizer) -> Text:
    """An answer with its accepted drafts in colour."""
    made, printed = Text(), 0
    for n, is_draft in enumerate(answer.is_draft, start=1):
        text = tokenizer.decode(answer.tokens[:n])
        if n == len(answer.tokens) or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            made.append(text[printed:], DRAFT_STYLE if is_draft else "")
            printed = len(text)
    return made


def compare(
    console: Console, tokenizer: Tokenizer, model: Any, prompts: list[list[int]], plain: Decoded, trees: Decoded
) -> bool:
    """Print both side by side; False where they differ though the target's choice was clear."""
    passed, judge = True, None
    for prompt, one, other in zip(prompts, plain.answers, trees.answers, strict=True):
        table = Table("plain", "with trees", expand=True)
        table.add_row(coloured(one, tokenizer), coloured(other, tokenizer))
        console.print(table)
        at = first_difference(one.tokens, other.tokens)
        if at is None:
            console.print(f"[green]identical[/green], {len(one.tokens)} tokens")
            continue
        judge = judge or Decoder(model)
        best, gap = judge.top_two(prompt + one.tokens[:at])
        names = " and ".join(repr(tokenizer.decode([token], special=True)) for token in best)
        said = "a tie that rounding decides" if gap < CLOSE else "[bold red]more than rounding does[/bold red]"
        console.print(f"first difference at token {at}: {names} are {gap:.4f} apart, {said}")
        passed = passed and gap < CLOSE
    return passed


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; None if they are the same."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def show_figures(
    console: Console,
    device: str,
    arguments: argparse.Namespace,
    requests: int,
    plain: Decoded,
    trees: Decoded,
    ready_s: float,
) -> None:
    """The lines under the answers."""
    where = f"{device}, {arguments.drafter}, budget {arguments.budget}, {requests} at once"
    console.print(
        f"\n[bold]{trees.tokens_a_step:.2f}[/bold] tokens a step ({trees.num_tokens} in {trees.steps}), "
        f"[bold]{trees.tokens_a_second:.1f}[/bold] tokens/s with trees, {plain.tokens_a_second:.1f} plain; attention "
        f"{trees.attention_s / trees.seconds:.0%} of the time\n({where}; ready in {ready_s:.1f} s)"
    )


def run_fit(weights: Any, tokenizer: Tokenizer, device: str, count: int, status: Console) -> int:
    """``--fit``."""
    from rich.progress import Progress

    prompts = [tokenizer.chat(question) for question in fit.questions(count)]
    room = max(map(len, prompts)) + fit.ANSWER + 1
    with _doing(status, "making the model and its plans") as say:
        model = make_model(weights, device, FIT_REQUESTS, room, [PLAIN_STEP], say)
    with Progress(console=status) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        heads, right = fit.fit(model, prompts, end_token=tokenizer.end, progress=progress)
    path = fit.save_heads(heads)
    shares = ", ".join(f"{share:.0%}" for share in right)
    status.print(f"{path}: on held-out answers the best token of positions 1 to {len(right)} was right in {shares}")
    return 0


class WatchedLayer:
    """Keeps what one layer's attention was given in the first step with a tree, for the emulator."""

    def __init__(self, model: Any, layer: int):
        if not 0 <= layer < len(model.layers):
            raise ArgumentError("--emulate-layer", f"0 to {len(model.layers) - 1}", layer)
        self.layer = layer
        self.inputs: dict[str, Any] = {}
        model.on_attend = self._keep

    def _keep(self, layer: int, mask: str, inputs: dict[str, Any], out: np.ndarray) -> None:
        if layer == self.layer and mask == "tree" and not self.inputs:
            self.inputs = {name: np.array(array) for name, array in inputs.items()}

    def emulate(self) -> demo.Check:
        """The verify kernel's own body on these inputs in float16, against the definition on the same."""
        half = {name: self.inputs[name].astype(np.float16) for name in ("q", "k_cache", "v_cache")}
        inputs = {**self.inputs, **half}
        q, keys = inputs["q"], inputs["k_cache"]
        nodes, lens = np.diff(inputs["qo_indptr"]), np.diff(inputs["kv_indptr"])
        spec = nv.VerifySpec.gqa(
            q.shape[1], keys.shape[1], q.shape[2], max_requests=len(nodes), max_nodes=int(nodes.max()),
            max_kv_len=int((nodes + lens).max()), sm_scale=q.shape[2] ** -0.5, dtype="float16", mask=nv.Mask.TREE,
        )  # fmt: skip
        out = np.zeros(q.shape, np.float16)
        inputs["custom_mask"] = inputs["custom_mask"].astype(np.uint8)
        nv.verify_attention(spec, **inputs, out=out, device=nv.Emulator(EMULATED_BLOCKS))
        defined = {**inputs, "mask": "tree", "sm_scale": spec.sm_scale}
        want, want_lse = reference.verify_attention(**defined)
        spread = demo.weight_spread(spec, defined, want_lse)
        used = np.concatenate([inputs["kv_indices"], inputs["out_cache_loc"]])
        bound = demo.rounding_bound(spec, q, keys[used], inputs["v_cache"][used], want, spread)
        return demo.compare("float64", demo.bound_in_words(spec), out, want, bound)


@contextmanager
def _doing(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Say what takes its time; and, with what is yielded, how far it is."""
    with console.status(what) as status:
        yield lambda how_far: status.update(f"{what}: {how_far}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)
