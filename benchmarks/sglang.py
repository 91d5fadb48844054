"""Verify inside SGLang's own TritonAttnBackend, stock and with the plugin, on the same pool, batch and graph shape.

    python -m benchmarks.sglang                                   Kimi K2.6's shape and a GQA one, 1k to 128k
    python -m benchmarks.sglang --contexts 5700,32k --json FILE

Needs a GPU, torch and sglang 0.5.23 (whose test kit makes the runner).  Device time is a replay of a captured graph of
one layer's ``forward_extend``, which stores the drafts too, behind a read that evicts the L2 cache.  Host time is that
of an eager ``forward_extend``, from the second layer of a forward on.  Values are compared with float64 first.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.sglang_imports import ON_A_GPU, allow_missing
from benchmarks.timing import DeviceClock, head, head_line, host_times, save

K = 1024
CONTEXTS = (K, 5700, 8 * K, 32 * K, 128 * K)
SEED = 0
# Name, and what a Server takes; nodes x heads of the table.
CASES: dict[str, dict[str, Any]] = {
    "mla 1 x 9 x 8": dict(is_mla=True, heads=8, kv_heads=1, nodes=9, requests=1),
    "mla 1 x 33 x 8": dict(is_mla=True, heads=8, kv_heads=1, nodes=33, requests=1),
    "mla 1 x 33 x 16": dict(is_mla=True, heads=16, kv_heads=1, nodes=33, requests=1),
    "mla 4 x 33 x 8": dict(is_mla=True, heads=8, kv_heads=1, nodes=33, requests=4),
    "gqa 1 x 33 x 32/8": dict(is_mla=False, heads=32, kv_heads=8, nodes=33, requests=1),
    "mla 1 x 33 x 8 fp8": dict(is_mla=True, heads=8, kv_heads=1, nodes=33, requests=1, fp8=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang", description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="prefix lengths: 5700,32k")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    parser.add_argument("--commit", help="what to record where there is no git")
    arguments = parser.parse_args(argv)
    contexts = [int(t[:-1]) * K if t.endswith("k") else int(t) for t in arguments.contexts.split(",")]
    record = {"head": head(SEED, packages=("torch", "triton", "sglang"), commit=arguments.commit), "rows": []}
    print(head_line("SGLang verify, one layer  L2 cold", record["head"]))
    print(f"{'case':22} {'prefix':>8} | {'stock us':>9} {'ours us':>9} {'ratio':>6} | {'stock':>6} {'ours':>6} | error")
    for name in arguments.case or CASES:
        for row in rows_of(name, contexts):
            record["rows"].append(row)
            print(
                f"{name:22} {row['prefix']:>8,} | {row['stock_us']['p50']:>9.1f} {row['ours_us']['p50']:>9.1f} "
                f"{row['ratio']:>5.1f}x | {row['stock_host_us']['p50']:>6.1f} {row['ours_host_us']['p50']:>6.1f} | "
                f"{row['error']:.2f} of what is allowed",
                flush=True,
            )
            if arguments.json:
                save("sglang", record, arguments.json)
    return 0


def rows_of(name: str, contexts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Figures of a case, one context after the other."""
    allow_missing(ON_A_GPU)
    import torch

    from benchmarks.sglang_server import Server
    from nbverify.integrations import sglang as plugin

    torch.set_grad_enabled(False)
    clock = DeviceClock()
    for prefix in contexts:
        case = CASES[name]
        server = Server(
            **case, page=1, context=prefix + case["nodes"], dtype=torch.bfloat16, device="cuda:0", seed=SEED
        )
        lens, trees = [prefix] * case["requests"], server.trees(case["requests"])
        row: dict[str, Any] = {"case": name, "prefix": prefix}
        for side in ("stock", "ours"):
            backend = server.backend()
            if side == "ours":
                plugin.attach(backend, server.runner, plugin.Switch())
            out = server.eager(backend, lens, trees)
            if side == "ours":
                truth, allowed = server.truth(lens, trees)  # of the pool with the drafts in it
                row["error"] = float(((out.view(truth.shape).double() - truth).abs() / allowed).max())
                assert row["error"] <= 1 and backend.nbverify.stock == 0, "no time of a wrong result"
            batch = server.batch(lens, server.slots(lens), server.mask(lens, trees))
            backend.init_forward_metadata(batch)
            inputs = (server.q, server.k, server.v, server.layer, batch)
            call = partial(backend.forward_extend, *inputs)
            row[f"{side}_host_us"] = host_times(call, torch.cuda.synchronize, count=150).summary()
            made = server.capture(backend)
            made.prepare(lens, trees)
            torch.cuda.synchronize()

            def replay(stream: Any, graph: Any = made.graph) -> None:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                    graph.replay()

            row[f"{side}_us"] = clock.device_times(replay, repeats=20).summary()
        row["ratio"] = row["stock_us"]["p50"] / row["ours_us"]["p50"]
        yield row
        del server, backend, made, replay, call, inputs, batch, out, truth, allowed
        gc.collect()  # a backend and what has taken it over refer to each other
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
