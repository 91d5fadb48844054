"""What nbverify costs on the host, and the plain kernel's device time for Kimi K2.6 (8 heads a GPU).

    python -m benchmarks.host [--json FILE] [--no-kernel] [--no-plan]

Host       microseconds of one launch, graph replay, rebind and bind; seconds of a plan, cached and cold, in a process
           of its own.  Each beside its limit.
Kernel     values are checked against float64 first; then graph replays with a cold L2 cache.  GB/s counts the prefix's
           KV rows once, TFLOP/s counts 2 * rows * keys * (576 + 512).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import nbverify as nv
from benchmarks.timing import ROOT, DeviceClock, Times, head, head_line, host_times, save
from nbverify import compile, contract, launch, reference
from nbverify.compile import CompiledKernel, Target
from nbverify.demo import EPS32, rounding_bound, score_rounding, weight_spread
from nbverify.presets import preset

SEED = 0
SPEC = replace(preset("kimi-k2.6-tp8"), kernel="simt", max_requests=8, max_kv_len=32_768 + 33)
LIMITS_US = {"launch": 6.0, "rebind q, out": 6.0, "bind": 200.0}
LIMITS_S = {"plan, cached": 0.5, "plan, cold": 10.0}
SHAPES = ((1, 8, 32_768), (1, 33, 32_768), (8, 8, 32_768), (8, 33, 32_768))  # requests, nodes, prefix
HOST_SHAPE = (1, 8, 512)  # short, so that the queue does not fill
ROWS_CHECKED = 3
BARRIER_THREADS = 128

CHILD = """
import json, sys, time
begin = time.perf_counter()
import nbverify
from nbverify.presets import preset
imported = time.perf_counter()
if sys.argv[1] == "context":
    from nbverify.launch import Device
    Device(0)
ready = time.perf_counter()
nbverify.VerifyPlan(preset("kimi-k2.6-tp8"), device=0)
end = time.perf_counter()
print(json.dumps({"import": imported - begin, "context": ready - imported, "plan": end - ready,
                  "compiled": "numba" in sys.modules}))
"""


@dataclass
class Problem:
    """Arrays of one batch on the device, and what the check needs of it on the host."""

    arrays: dict[str, Any]
    pool_bits: np.ndarray
    q_bits: np.ndarray
    slots: list[np.ndarray]  # prefix slots by request
    drafts: np.ndarray  # [requests, nodes]
    trees: list[np.ndarray]


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16, rounded to nearest even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float_of(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_pool(rng: np.random.Generator, num_slots: int) -> np.ndarray:
    """Normal latent rows [num_slots, 1, 576]."""
    return bfloat16_bits(rng.standard_normal((num_slots, 1, SPEC.head_dim_qk), dtype=np.float32))


def make_problem(rng: np.random.Generator, pool_bits: np.ndarray, pool: Any, shape: tuple[int, int, int]) -> Problem:
    """Shuffled slots, a random tree for each request, a FULL mask."""
    import cupy

    requests, nodes, prefix = shape
    slots = rng.permutation(len(pool_bits))[: requests * (prefix + nodes)]
    prefixes = slots[: requests * prefix].reshape(requests, prefix)
    drafts = slots[requests * prefix :].reshape(requests, nodes)
    trees = [
        reference.ancestor_mask([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]) for _ in range(requests)
    ]
    mask = np.concatenate([reference.full_mask(prefix, tree).astype(np.uint8).ravel() for tree in trees])
    tokens = requests * nodes
    q_bits = bfloat16_bits(rng.standard_normal((tokens, SPEC.num_q_heads, SPEC.head_dim_qk), dtype=np.float32))
    steps = np.arange(requests + 1)
    host = {
        "q": q_bits,
        "kv_indptr": (steps * prefix).astype(np.int32),
        "kv_indices": prefixes.ravel().astype(np.int64),
        "qo_indptr": (steps * nodes).astype(np.int32),
        "out_cache_loc": drafts.ravel().astype(np.int64),
        "custom_mask": mask,
        "mask_indptr": (steps * nodes * (prefix + nodes)).astype(np.int64),
        "out": np.full((tokens, SPEC.num_q_heads, SPEC.head_dim_v), 0xFFFF, np.uint16),
        "lse": np.full((tokens, SPEC.num_q_heads), np.nan, np.float32),
    }
    arrays = {name: cupy.asarray(array) for name, array in host.items()}
    cupy.cuda.Device().synchronize()  # the clock's stream does not wait for the one of these copies
    return Problem({**arrays, "k_cache": pool}, pool_bits, q_bits, list(prefixes), drafts, trees)


def largest_error(rng: np.random.Generator, problem: Problem) -> float:
    """A few rows against float64; the largest error, after refusing one that rounding does not explain.

    A node's keys in any order are the same sum, so each row is a request of its own: its prefix and its ancestors as
    prefix, itself as the only node, no mask.
    """
    import cupy

    requests, nodes = problem.drafts.shape
    out = float_of(cupy.asnumpy(problem.arrays["out"]))
    lse = cupy.asnumpy(problem.arrays["lse"])
    chosen = {(0, 0), (requests - 1, nodes - 1)}
    while len(chosen) < ROWS_CHECKED:
        chosen.add((int(rng.integers(requests)), int(rng.integers(nodes))))
    worst = 0.0
    for request, node in sorted(chosen):
        row = request * nodes + node
        others = problem.trees[request][node].copy()
        others[node] = False
        slots = np.concatenate(
            [problem.slots[request], problem.drafts[request][others], [problem.drafts[request][node]]]
        )
        q, keys = float_of(problem.q_bits[row : row + 1]), float_of(problem.pool_bits[slots])
        inputs: dict[str, Any] = {
            "q": q,
            "k_cache": keys,
            "kv_indptr": [0, len(slots) - 1],
            "kv_indices": np.arange(len(slots) - 1),
            "qo_indptr": [0, 1],
            "out_cache_loc": [len(slots) - 1],
            "sm_scale": SPEC.sm_scale,
            "mask": "none",
            "head_dim_v": SPEC.head_dim_v,
        }
        want, want_lse = reference.verify_attention(**inputs)
        error, lse_error = np.abs(out[row] - want[0]), np.abs(lse[row] - want_lse[0])
        spread = weight_spread(SPEC, inputs, want_lse)
        bound = rounding_bound(SPEC, q, keys, keys[..., : SPEC.head_dim_v], want, spread)[0]
        lse_bound = score_rounding(SPEC, q, keys) + 4 * EPS32 * np.abs(want_lse[0])
        if not ((error <= bound).all() and (lse_error <= lse_bound).all()):
            raise SystemExit(f"wrong values in row {row}: error {error.max():.3g}, lse {lse_error.max():.3g}; no times")
        worst = max(worst, float(error.max()))
    return worst


# ---- host


def empty_launch(stream: int, arrivals: launch.DeviceBuffer) -> Callable[[], object]:
    """The driver's part of a launch: a cooperative kernel of the same parameters that does nothing but its barrier.

    ``arrivals``: 4 bytes of zeros, the barrier's counter; they must outlive the launches.
    """
    device = arrivals.device
    compiled = compile_barrier(compile.target_of(device.cc))
    kernel = launch.LoadedKernel(device, compiled, threads=BARRIER_THREADS, shared_bytes=0)
    block = launch.ParameterBlock(launch.ParameterLayout(contract.parameters(SPEC)))
    block.set_array("arrivals", arrivals.pointer, 1, 4)
    config, call = kernel.launch_config(device.num_sms), launch.driver().cuLaunchKernelEx
    config.set_stream(stream)
    return lambda: call(config.config, kernel.function, block.address, 0)


def compile_barrier(target: Target) -> CompiledKernel:
    """A kernel that is nothing but the grid's barrier."""
    from nbverify.reduce.grid_sync import grid_barrier

    def barrier(args: Any) -> None:
        grid_barrier(args)

    bounds = (BARRIER_THREADS, 1)
    return compile.compile_body(barrier, contract.parameters(SPEC), target, launch_bounds=bounds, cooperative=True)


def measure_calls(plan: nv.VerifyPlan, pool_bits: np.ndarray, pool: Any) -> dict[str, Times]:
    """Microseconds of every call that a server makes."""
    import cupy

    rng = np.random.default_rng(SEED)
    problem = make_problem(rng, pool_bits, pool, HOST_SHAPE)
    clock = DeviceClock()
    bound = plan.bind(**problem.arrays)
    bound.launch(clock.stream)
    clock.stream.synchronize()
    largest_error(rng, problem)
    stream, handle, sync = clock.stream, clock.stream.ptr, clock.stream.synchronize
    graph = clock.capture(bound.launch)
    arrivals = launch.DeviceBuffer(launch.Device(0), 4, fill=0)
    times = {
        "driver call alone": host_times(empty_launch(handle, arrivals), sync),
        "launch": host_times(lambda: bound.launch(handle), sync),
        "launch (CuPy stream object)": host_times(lambda: bound.launch(stream), sync),
        "graph replay (CuPy)": host_times(lambda: graph.launch(stream), sync),
    }

    def nothing() -> None:
        """These calls queue nothing."""

    producers: dict[str, dict[str, Any]] = {"CuPy": problem.arrays}
    torch = _torch()
    if torch is not None:
        current = torch.cuda.current_stream()
        synchronize = torch.cuda.synchronize
        times["launch (torch stream object)"] = host_times(lambda: bound.launch(current), synchronize)
        producers["torch"] = {name: _as_torch(torch, name, array) for name, array in problem.arrays.items()}
    for library, given in producers.items():
        label = "" if library == "CuPy" else f" ({library})"
        other = {name: given[name].copy() if library == "CuPy" else given[name].clone() for name in ("q", "out")}
        same = {name: given[name] for name in ("q", "out")}
        bound = plan.bind(**given)
        turns = [other, same]

        def rebind(bound: nv.BoundVerify = bound, turns: list = turns) -> None:
            turns.reverse()
            bound.rebind(**turns[0])

        def bind(given: dict = given) -> None:
            plan.bind(**given)

        times["rebind q, out" + label] = host_times(rebind, nothing)
        times["bind" + label] = host_times(bind, nothing)
        cupy.cuda.Device().synchronize()
    return times


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _as_torch(torch: Any, name: str, array: Any) -> Any:
    """The same values in a tensor of the true type, in memory of torch's."""
    import cupy

    tensor = torch.from_numpy(cupy.asnumpy(array)).cuda()
    return tensor.view(torch.bfloat16) if name in ("q", "k_cache", "out") else tensor


def measure_plans() -> dict[str, dict[str, Any]]:
    """Seconds of a plan in fresh processes: cached (median of three), the same without a CUDA context, and cold.

    Making the context is the driver's work, some 0.4 s, and falls to whoever is first to use the GPU.
    """
    _child("bare")  # whatever was not cached is now
    with tempfile.TemporaryDirectory() as empty:
        cold = _child("bare", XDG_CACHE_HOME=empty)
    cached = sorted((_child("bare") for _ in range(3)), key=lambda run: run["plan"])[1]
    in_context = sorted((_child("context") for _ in range(3)), key=lambda run: run["plan"])[1]
    if not cold["compiled"] or cached["compiled"] or in_context["compiled"]:
        raise SystemExit(f"the cache did not do what it should: cold {cold}, cached {cached}, {in_context}")
    return {"plan, cached": in_context, "plan, cached, and the CUDA context": cached, "plan, cold": cold}


def _child(how: str, **environment: str) -> dict[str, Any]:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    whole = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"a plan in a fresh process failed:\n{done.stderr}")
    return {**json.loads(done.stdout), "whole process": whole}


# ---- kernel


def measure_kernel(
    plan: nv.VerifyPlan, pool_bits: np.ndarray, pool: Any, show: Callable[[str], None], bandwidth: dict[str, float]
) -> list[dict[str, Any]]:
    """Device time of each shape."""
    rows = []
    clock = DeviceClock()
    for shape in SHAPES:
        rng = np.random.default_rng(SEED + 1)
        problem = make_problem(rng, pool_bits, pool, shape)
        bound = plan.bind(**problem.arrays)
        graph = clock.capture(bound.launch)
        graph.launch(clock.stream)
        clock.stream.synchronize()
        error = largest_error(rng, problem)
        times = clock.replay_times(graph, repeats=20)
        requests, nodes, prefix = shape
        kv_bytes = requests * prefix * SPEC.head_dim_qk * 2
        flop = 2 * requests * nodes * SPEC.num_q_heads * prefix * (SPEC.head_dim_qk + SPEC.head_dim_v)
        gb_s, tflop_s = kv_bytes / times.median / 1e3, flop / times.median / 1e6
        rows.append(
            {
                "requests": requests, "nodes": nodes, "heads": SPEC.num_q_heads, "prefix": prefix,
                "device_us": times.summary(), "gb_s": round(gb_s, 1), "tflop_s": round(tflop_s, 2),
                "largest_error": error,
            }
        )  # fmt: skip
        show(
            f"  {requests:8d} {nodes:6d} {SPEC.num_q_heads:6d} {prefix:7d} | {times.median:10.1f}  "
            f"{times.quantile(0.1):.1f}-{times.quantile(0.9):.1f} | {gb_s:7.0f} "
            f"{100 * gb_s / bandwidth['read_gb_s']:6.1f} {tflop_s:8.2f} | {error:.1e}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="where the record goes; default: benchmarks/results/")
    parser.add_argument("--no-kernel", action="store_true", help="leave out the kernel's device time")
    parser.add_argument("--no-plan", action="store_true", help="leave out the plans in fresh processes")
    options = parser.parse_args()
    import cupy

    def show(line: str) -> None:
        print(line, flush=True)

    cupy.cuda.Device().use()
    record: dict[str, Any] = {"head": head(SEED)}
    plan = nv.VerifyPlan(SPEC)
    show(head_line("nbverify host", record["head"]))
    show(f"{plan.report()}\n")
    longest = HOST_SHAPE if options.no_kernel else max(SHAPES, key=lambda s: s[0] * (s[1] + s[2]))
    pool_bits = make_pool(np.random.default_rng(SEED), longest[0] * (longest[1] + longest[2]))
    pool = cupy.asarray(pool_bits)
    within = True

    calls = measure_calls(plan, pool_bits, pool)
    record["calls_us"] = {}
    show(f"  {'call':42s} |    p50 us      min   p10-p90 | limit us")
    for name, times in calls.items():
        limit = next((us for kind, us in LIMITS_US.items() if name == kind or name.startswith(kind + " (")), None)
        ok = limit is None or times.median <= limit
        within &= ok
        record["calls_us"][name] = {**times.summary(), "limit": limit}
        spread = f"{times.quantile(0.1):.2f}-{times.quantile(0.9):.2f}"
        show(
            f"  {name:42s} | {times.median:9.2f} {min(times.samples_us):8.2f}   {spread:12s} | "
            + (f"{limit:g} {'ok' if ok else 'OVER'}" if limit else "")
        )

    if not options.no_plan:
        record["plans_s"] = measure_plans()
        show(f"\n  {'plan in a fresh process':42s} |    plan s   import  context    whole | limit s (of plan)")
        for name, run in record["plans_s"].items():
            limit = LIMITS_S.get(name)
            ok = limit is None or run["plan"] <= limit
            within &= ok
            run["limit"] = limit
            show(
                f"  {name:42s} | {run['plan']:9.3f} {run['import']:8.3f} {run['context']:8.3f} "
                f"{run['whole process']:8.3f} | " + (f"{limit:g} {'ok' if ok else 'OVER'}" if limit else "")
            )

    if not options.no_kernel:
        record["bandwidth"] = bandwidth = DeviceClock().bandwidth()
        empty = DeviceClock().device_times(lambda stream: None).median
        record["empty_us"] = round(empty, 2)
        show(
            f"\n  device: read {bandwidth['read_gb_s']:.0f} GB/s, copy {bandwidth['copy_gb_s']:.0f} GB/s; "
            f"two events with nothing between: {empty:.1f} us; kernel {SPEC.kernel}, bfloat16, L2 cold"
        )
        show("  requests  nodes  heads  prefix |     p50 us  p10-p90 |    GB/s  %read  TFLOP/s | max err")
        record["kernel"] = measure_kernel(plan, pool_bits, pool, show, bandwidth)

    record["within_limits"] = bool(within)
    show(f"\nwritten to {save('host', record, options.json)}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
