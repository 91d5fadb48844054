"""The table of docs/example.md: tokens a step and tokens a second, plain and with trees, in one run.

    python -m examples.smollm2.measure --json smollm2.json > table.md

Every row's tokens are compared with plain decoding in the same process, and differences are said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.smollm2.decode import Decoder
from examples.smollm2.generate import (
    BUDGETS,
    CLOSE,
    DRAFTERS,
    PLAIN_STEP,
    choose_device,
    decode,
    first_difference,
    make_drafter,
    make_model,
    step_sizes,
)  # fmt: skip
from examples.smollm2.kernel_model import KernelModel
from examples.smollm2.prompts import PROMPTS
from examples.smollm2.tokenizer import Tokenizer
from examples.smollm2.weights import find_file, read_gguf

WARM_TOKENS = 8
CHAT = ("code", "list", "prose", "json")  # what the mean is of: no prompt that is mostly copied


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a difference was more than a tie."""
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2.measure", description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--drafter", choices=DRAFTERS, action="append", help="may be repeated; all")
    parser.add_argument("--budget", type=int, choices=BUDGETS, action="append", help="may be repeated; all")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    arguments = parser.parse_args(argv)
    say("weights")
    weights, device = read_gguf(find_file(arguments.weights)), choose_device(arguments.device)
    tokenizer = Tokenizer(weights.fields)
    prompts = {name: tokenizer.chat(prompt) for name, prompt in PROMPTS.items()}
    room = max(map(len, prompts.values())) + arguments.max_tokens + max(BUDGETS) + 1
    say("model and plans")
    trees = [(name, budget) for name in arguments.drafter or DRAFTERS for budget in arguments.budget or BUDGETS]
    model = make_model(weights, device, 1, room, [PLAIN_STEP, *(step_sizes(*tree) for tree in trees)], say)
    say("plain decoding")
    plain_of, rows, passed = measured(Decoder(model, end_token=tokenizer.end), prompts, arguments.max_tokens), [], True
    rows.append(("plain", 0, {name: figures(run) for name, run in plain_of.items()}))
    for drafter, budget in trees:
        say(f"{drafter}, budget {budget}")
        decoder = Decoder(model, make_drafter(drafter, model), budget, end_token=tokenizer.end)
        runs = measured(decoder, prompts, arguments.max_tokens)
        rows.append((drafter, budget, {name: figures(run) for name, run in runs.items()}))
        for name, run in runs.items():
            want = plain_of[name].answers[0].tokens
            at = first_difference(want, run.answers[0].tokens)
            if at is not None:
                _, gap = Decoder(model).top_two(prompts[name] + want[:at])
                passed = passed and gap < CLOSE
                say(f"{drafter} {budget} {name}: differs at token {at}, top-2 gap {gap:.4f}")
    print(table(rows))
    if arguments.json is not None:
        names = ("drafter", "budget", "prompts")
        record = {
            "device": model.runner.name if isinstance(model, KernelModel) else device,
            "max_tokens": arguments.max_tokens,
            "rows": [dict(zip(names, row, strict=True)) for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


def say(what: str) -> None:
    """Where it is, on the terminal; and what is not in the table."""
    print(what, file=sys.stderr, flush=True)


def measured(decoder: Decoder, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, Any]:
    """A run of each prompt by itself, after a short one that nobody looks at."""
    decode(decoder, [next(iter(prompts.values()))], WARM_TOKENS)
    return {name: decode(decoder, [prompt], max_tokens) for name, prompt in prompts.items()}


def figures(run: Any) -> dict[str, float]:
    """What is kept of a run."""
    return {
        "tokens": run.num_tokens,
        "tokens_a_step": run.tokens_a_step,
        "tokens_a_second": run.tokens_a_second,
        "attention_share": run.attention_s / run.seconds,
    }


def table(rows: list[tuple[str, int, dict[str, dict[str, float]]]]) -> str:
    """Markdown: tokens a step, tokens a second and how many times that is plain decoding's, by prompt."""
    names, plain = list(rows[0][2]), rows[0][2]
    of_mean = [name for name in CHAT if name in plain] or names
    lines = [f"| drafter | budget | {' | '.join(names)} | mean of {', '.join(of_mean)} |"]
    lines.append("| --- | --- |" + " --- |" * (len(names) + 1))
    for drafter, budget, by_name in rows:
        times = {name: one["tokens_a_second"] / plain[name]["tokens_a_second"] for name, one in by_name.items()}
        cells = [
            f"{one['tokens_a_step']:.2f}, {one['tokens_a_second']:.0f}, {times[name]:.2f} x"
            for name, one in by_name.items()
        ]
        cells.append(f"{sum(times[name] for name in of_mean) / len(of_mean):.2f} x")
        lines.append(f"| {drafter} | {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
