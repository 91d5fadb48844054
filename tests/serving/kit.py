"""Run SGLang's own attention kit, EAGLE verify cases, on the CPU; prints a JSON object of outcomes as its last line.

    TRITON_INTERPRET=1 python tests/serving/kit.py          run by test_kit.py, in a process of its own

Three things are played. Of each: cases that passed and failed, and verify calls that were taken over or left.

    triton       stock, as the control
    nbverify     the plugin, found by SGLang's loader, with nbverify's numpy reference in place of the kernels
    a fault      the same with one thing wrong in what is launched: cases must fail

It must run alone: SGLang and the interpreter keep state in the process.
"""

import functools
import json
import unittest
from types import SimpleNamespace

from benchmarks.sglang_imports import allow_missing

allow_missing()

import torch  # noqa: E402

torch.set_grad_enabled(False)  # the kit's dense half leaves it on while it writes to the pool

import numpy as np  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

from nbverify import reference  # noqa: E402
from nbverify.integrations import sglang as plugin  # noqa: E402
from nbverify.integrations.sglang_plans import Plans, TorchGpu  # noqa: E402

PARENTS = {4: (-1, 0, 0, 1), 9: (-1, 0, 0, 1, 1, 2, 3, 3, 6)}
made = []  # plans of this run


class ReferencePlan:
    """Computes with the numpy reference.  Tensors are float16: the interpreter multiplies bfloat16 as raw bits."""

    workspace_bytes = 0

    def __init__(self, spec):
        self.spec, self.launches = spec, 0
        made.append(self)

    def bind(self, **buffers):
        self.given = buffers
        return SimpleNamespace(launch=self.launch, rebind=self.rebind)

    def rebind(self, **changes):
        self.given |= {name: value for name, value in changes.items() if value is not None}

    def launch(self, stream):
        given = {k: v.numpy() if torch.is_tensor(v) else v for k, v in self.given.items() if v is not None}
        out = self.given["out"]
        spec = self.spec
        result, _ = reference.verify_attention(
            **{name: value for name, value in given.items() if name not in ("out", "k_scale", "v_scale")},
            sm_scale=spec.sm_scale, mask=spec.mask.value, head_dim_v=spec.head_dim_v,
        )  # fmt: skip
        out.copy_(torch.from_numpy(np.nan_to_num(result)).to(out.dtype))
        self.launches += 1


class Cpu(TorchGpu):
    """Tensors on the CPU."""

    def make_plan(self, spec, q):
        return ReferencePlan(spec)

    def stream_of(self, q):
        return None

    def is_capturing(self):
        return False


def causal(call):
    mask, nodes = call.custom_mask.clone(), call.nodes
    lens = call.kv_indptr[1:] - call.kv_indptr[:-1]
    for b, n in enumerate(lens.tolist()):
        start = int(call.mask_indptr[b])
        block = mask[start : start + nodes * (n + nodes)].view(nodes, -1)
        block[:, n:] = torch.tril(torch.ones(nodes, nodes)).to(mask.dtype)
    return call._replace(custom_mask=mask)


FAULTS = {
    "a causal mask": causal,
    "a mask offset": lambda call: call._replace(mask_indptr=call.mask_indptr + 1),
    "a prefix offset": lambda call: call._replace(kv_indices=call.kv_indices.roll(1)),
    "another scale": lambda call: call._replace(sm_scale=1.5 * call.sm_scale),
    "other draft slots": lambda call: call._replace(out_cache_loc=call.out_cache_loc.flip(0)),
}


def kit_cases(backend):
    """MLA and dense, eager and by the graph hooks, trees and chains, pages of 1 and 16."""
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as runner

    class Verify(unittest.TestCase):
        pass

    def add(kind, graph, topk, nodes, page, prefixes):
        def test(self):
            common = dict(
                name="verify", backend=backend, forward_mode=ForwardMode.TARGET_VERIFY, num_heads=4, page_size=page,
                prefix_lens=prefixes, extend_lens=(nodes,) * len(prefixes),
            )  # fmt: skip
            options = dict(topk=topk, dtype=torch.float16, device="cpu")
            if graph:
                options["cuda_graph_capture_batch_size"] = 4
            if kind == "mla":
                case = mla_attention.MLAAttentionCase(**common)
                run = runner.run_mla_eagle_verify_cuda_graph_case if graph else runner.run_mla_eagle_verify_case
                run(self, case, kv_lora_rank=32, **options)
            else:
                case = dense_attention.DenseAttentionCase(num_kv_heads=2, **common)
                run = runner.run_dense_spec_verify_cuda_graph_case if graph else runner.run_dense_spec_verify_case
                run(self, case, **options)

        setattr(Verify, f"test_{kind}_{'graph' if graph else 'eager'}_topk{topk}_{nodes}_page{page}", test)

    for kind in ("mla", "dense"):
        for graph in (False, True):
            add(kind, graph, 2, 4, 1, (5, 2, 7))
            add(kind, graph, 2, 9, 1, (5, 2, 7))
            add(kind, graph, 1, 4, 16, (15, 16, 17))
    return unittest.defaultTestLoader.loadTestsFromTestCase(Verify)


def teach_the_kit():
    """Real trees (it knows one of 3 nodes), and slots on which its graph cases and its own check agree."""
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as runner

    chain = runner._draft_tree_mask

    def tree(*, draft_token_num, topk, device):
        if topk == 1:
            return chain(draft_token_num=draft_token_num, topk=1, device=device)
        return torch.from_numpy(reference.ancestor_mask(list(PARENTS[draft_token_num]))).to(device)

    runner._draft_tree_mask = tree
    for name in ("build_mla_attention_fixture", "build_dense_attention_fixture"):
        setattr(runner, name, functools.partial(getattr(runner, name), loc_layout="contiguous"))


def run(backend):
    """Outcomes of all cases."""
    made.clear()
    result = unittest.TestResult()
    kit_cases(backend).run(result)
    wrong = [*result.failures, *result.errors]
    return {
        "run": result.testsRun,
        "wrong": len(wrong),
        "errors": len(result.errors),
        "launches": sum(plan.launches for plan in made),
        "first": wrong[0][1][-2000:] if wrong else "",
    }


def replays():
    """Of graph shapes: the largest deviation from float64 in parts of what is allowed, by what is replayed."""
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    from benchmarks.sglang_server import Server
    from nbverify.integrations import sglang_takeover

    shape = dict(heads=2, kv_heads=1, nodes=4, page=1, context=64, requests=4, dtype=torch.float16, device="cpu")
    server, lens = Server(is_mla=True, **shape), [5, 2, 7]
    chains = [torch.tril(torch.ones(4, 4, dtype=torch.bool))] * 3
    found = {}
    for kind in ("full", "compact"):
        backend = server.backend()
        plugin.attach(backend, server.runner, plugin.Switch())
        if kind == "compact":
            sglang_takeover.use_compact_mask(backend.nbverify, triton_backend, TreeMaskMode.QLEN_ONLY)
        graph = server.capture(backend)
        for case, trees in (("trees", server.trees(3)), ("no mask", chains)):
            slots = server.slots(lens)
            server.static_loc[:12] = slots
            mask = server.mask(lens, trees)
            if kind == "compact":  # EAGLE writes into the backend's buffer, and passes that
                mask = backend.verify_mask.buffer.fill_(1)
                if case == "trees":
                    mask[:48] = torch.stack(trees).reshape(-1)
            live = server.batch(lens, slots, None if case == "no mask" else mask, padded=1)
            backend.init_forward_metadata_out_graph(live, in_capture=False)
            out = graph.replay()[:12]  # which stores the drafts: the truth is of the pool after that
            truth, allowed = server.truth(lens, trees)
            out = out.view(truth.shape).double()
            found[f"{kind}, {case}"] = float(((out - truth).abs() / allowed).max())
        found[f"{kind}, mask bytes"] = backend.verify_mask.buffer.numel()
    return found


def main():
    teach_the_kit()
    outcomes = {"triton": run("triton")}
    plugin.place_of = lambda runner: Cpu()
    load_plugins()
    outcomes["nbverify"] = run("nbverify")
    outcomes["hooked triton"] = run("triton")
    outcomes["replays"] = replays()
    launch = Plans.launch
    for name, fault in FAULTS.items():
        Plans.launch = lambda self, call, *mask, fault=fault: launch(self, fault(call), *mask)
        outcomes[name] = run("triton")
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
