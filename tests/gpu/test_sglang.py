"""SGLang's real TritonAttnBackend on a GPU, stock and with the plugin: one pool, one ForwardBatch, real graphs.

Skipped without torch and sglang 0.5.23.  Values are compared with float64 of what is in the pool, within a derived
bound; the planted faults must leave it.
"""

import importlib.util

import numpy as np
import pytest

import nbverify as nv

NEEDED = ("torch", "triton", "sglang")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.timeout(600),
]

CONTEXT = 4096
REPLAYS = 200
PADDED = 4  # requests that the graph is captured for
MLA8 = dict(is_mla=True, heads=8, kv_heads=1)
MLA16 = dict(is_mla=True, heads=16, kv_heads=1)
GQA = dict(is_mla=False, heads=32, kv_heads=8)
CASES = {
    "mla-8 4 nodes": dict(MLA8, nodes=4, page=1),
    "mla-8 9 nodes fp8": dict(MLA8, nodes=9, page=64, fp8=True),
    "mla-8 33 nodes": dict(MLA8, nodes=33, page=64),
    "mla-8 33 nodes fp8": dict(MLA8, nodes=33, page=1, fp8=True),
    "mla-8 65 nodes": dict(MLA8, nodes=65, page=1),
    "mla-16 33 nodes": dict(MLA16, nodes=33, page=1),
    "mla-16 65 nodes fp8": dict(MLA16, nodes=65, page=64, fp8=True),
    "gqa 4 nodes": dict(GQA, nodes=4, page=64),
    "gqa 9 nodes": dict(GQA, nodes=9, page=1),
    "gqa 33 nodes": dict(GQA, nodes=33, page=1),
    "gqa 65 nodes": dict(GQA, nodes=65, page=64),
}


def spec_of(*, is_mla, heads, kv_heads, nodes, page, fp8=False):
    """What the plugin asks for: said here, so that all kernels are compiled before the first test, in parallel."""
    kv_dtype = "float8_e4m3fn" if fp8 else None
    sizes = dict(max_requests=PADDED, max_nodes=nodes, max_kv_len=CONTEXT + nodes, sm_scale=0.1, kv_dtype=kv_dtype)
    return nv.VerifySpec.mla(heads, **sizes) if is_mla else nv.VerifySpec.gqa(heads, kv_heads, 128, **sizes)


ALSO_COMPILED = [] if missing else [spec_of(**case) for case in CASES.values()]


def serve(case, **options):
    """A server of a case, and its backends: stock, and one with the plugin."""
    from benchmarks.sglang_imports import ON_A_GPU, allow_missing

    allow_missing(ON_A_GPU)
    import torch

    from benchmarks.sglang_server import Server
    from nbverify.integrations import sglang as plugin

    torch.set_grad_enabled(False)
    server = Server(**case, context=CONTEXT, requests=PADDED, dtype=torch.bfloat16, device="cuda:0", **options)
    stock, ours = server.backend(), server.backend()
    plugin.attach(ours, server.runner, plugin.Switch())
    return server, stock, ours


def worst(server, out, lens, trees):
    """Largest deviation from float64 in parts of what is allowed."""
    truth, allowed = server.truth(lens, trees)
    rows = len(lens) * server.nodes
    ratio = float(((out[:rows].view(truth.shape).double() - truth).abs() / allowed).max())
    assert ratio == ratio, "NaN"
    return ratio


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_eager(case):
    server, stock, ours = serve(case)
    lens, trees = [3000, 2, 1777], server.trees(3)
    want = server.eager(stock, lens, trees).clone()
    got = server.eager(ours, lens, trees).clone()
    assert worst(server, got, lens, trees) <= 1
    assert (ours.nbverify.taken, ours.nbverify.stock) == (1, 0)
    if not case.get("fp8"):
        # Stock rounds as often as we do.  (In fp8 it casts q and the weights to fp8, and reads drafts unrounded.)
        assert worst(server, want, lens, trees) <= 1


@pytest.mark.alone
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_captured_graph_serves_every_batch(case):
    """200 replays with other lengths, trees and numbers of requests, among them the longest prefix."""
    import torch

    server, _, ours = serve(case)
    graph = server.capture(ours)
    plans = ours.nbverify.plans
    assert (plans.binds, len(plans._held)) == (1, 1) and ours.nbverify.stock == 0
    rng = np.random.default_rng(5)
    longest = CONTEXT - server.nodes
    graph.replay()  # the first replay of a graph may upload it, which takes memory
    for number in range(REPLAYS):
        live = 1 + number % PADDED
        lens = [int(n) for n in rng.integers(1, 600, live)]
        if number % 20 == 0:
            lens[-1] = longest
        trees = server.trees(live)
        server.draw()
        graph.prepare(lens, trees)
        torch.cuda.synchronize()
        free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
        out = graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] == free, "a replay took device memory"
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated, "a replay allocated"
        assert worst(server, out, lens, trees) <= 1, f"replay {number}: {lens}"
        if number == 0:
            first, bits = (lens, trees), out[: live * server.nodes].clone()
            buffers = [*server.pools, server.q, server.k, server.v]
            then = [buffer.clone() for buffer in buffers]
    for buffer, was in zip(buffers, then, strict=True):
        buffer.copy_(was)  # later drafts lie where its prefix was
    graph.prepare(*first)
    assert torch.equal(graph.replay()[: len(bits)], bits), "the same batch, the same bits"
    assert (plans.binds, plans.rebinds) == (1, 2), "two warm-ups and a capture; nothing at a replay"


def test_two_shapes_are_captured_from_large_to_small():
    import torch

    server, _, ours = serve(CASES["mla-8 9 nodes fp8"])
    large = server.capture(ours)
    requests, server.requests = server.requests, 2
    all_rows = server.q, server.k, server.v, server.static_loc
    server.q, server.k, server.v, server.static_loc = (x[: 2 * server.nodes] for x in all_rows)
    # The same buffers of SGLang's, another shape: init_cuda_graph_state comes once in a server.
    keep, ours.init_cuda_graph_state = ours.init_cuda_graph_state, lambda *args: None
    small = server.capture(ours)
    ours.init_cuda_graph_state = keep
    server.q, server.k, server.v, server.static_loc = all_rows
    server.requests = requests
    for _ in range(5):
        for graph, live in ((large, 3), (small, 2)):
            server.requests = requests if graph is large else 2
            lens, trees = [700, 33, 5][:live], server.trees(live)
            graph.prepare(lens, trees)
            out = graph.replay()
            torch.cuda.synchronize()
            assert worst(server, out, lens, trees) <= 1


def causal(call):
    import torch

    mask, nodes = call.custom_mask.clone(), call.nodes
    lens = (call.kv_indptr[1:] - call.kv_indptr[:-1]).tolist()
    for start, n in zip(call.mask_indptr.tolist(), lens, strict=False):
        block = mask[start : start + nodes * (n + nodes)].view(nodes, -1)
        block[:, n:] = torch.tril(torch.ones(nodes, nodes, device=mask.device)).to(mask.dtype)
    return call._replace(custom_mask=mask)


def of_another_slot(call):
    """Only the live part is turned: what stands past it is not initialised."""
    slots, live = call.kv_indices.clone(), int(call.kv_indptr[-1])
    slots[:live] = slots[:live].roll(1)
    return call._replace(kv_indices=slots)


FAULTS = {
    "a causal mask": causal,
    "a mask offset": lambda call: call._replace(mask_indptr=call.mask_indptr + 1),
    "a prefix offset": of_another_slot,
    "another scale": lambda call: call._replace(sm_scale=1.1 * call.sm_scale),
    "other draft slots": lambda call: call._replace(out_cache_loc=call.out_cache_loc.flip(0)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("case", ["mla-8 33 nodes", "mla-8 33 nodes fp8", "gqa 33 nodes"])
def test_planted_faults_leave_the_bound(case, fault, monkeypatch):
    from nbverify.integrations.sglang_plans import Plans

    server, _, ours = serve(CASES[case])
    launch = Plans.launch
    monkeypatch.setattr(Plans, "launch", lambda self, call, *mask: launch(self, fault(call), *mask))
    lens, trees = [50, 2, 17], server.trees(3)  # short: drafts weigh as much as the prefix
    assert worst(server, server.eager(ours, lens, trees), lens, trees) > 1


def test_what_stays_with_stock_gives_the_stock_result():
    import torch

    server, stock, ours = serve(CASES["gqa 9 nodes"])
    server.layer.logit_cap = 30.0
    lens, trees = [300, 2, 77], server.trees(3)
    want = server.eager(stock, lens, trees).clone()
    assert torch.equal(server.eager(ours, lens, trees), want)
    assert (ours.nbverify.taken, ours.nbverify.stock) == (0, 1)


def test_ddtree_on_the_device_is_the_definition():
    from benchmarks.sglang_imports import ON_A_GPU, allow_missing

    allow_missing(ON_A_GPU)
    import torch

    from nbverify.integrations.sglang_trees import DraftTrees, verify_input

    trees = DraftTrees(max_requests=4, depth=7, top_k=8, budget=32, max_prefix=1000, fill_prefix=True, device=0)
    generator = torch.Generator(device="cuda").manual_seed(3)
    stream = torch.cuda.Stream()
    for requests in (4, 1, 3):
        with torch.cuda.stream(stream):
            logits = 3 * torch.randn(requests, 7, 5000, device="cuda", generator=generator)
            roots = torch.arange(requests, device="cuda") + 7
            lens = 300 * torch.arange(requests, device="cuda")
            made = trees.make(logits, roots, lens)
        torch.cuda.synchronize()
        assert trees.problems() == []
        # Log-probabilities of torch and numpy differ in the last bit, which may swap two nodes: compare with the
        # definition of what the device was given.
        tokens, logprobs = (trees._own[name].get()[:requests] for name in ("tokens", "logprobs"))
        from nbverify.tree import build_trees, tree_buffers

        want = build_trees(tokens, logprobs, roots.cpu().numpy(), np.full(requests, 32, np.int32), 33)
        buffers = tree_buffers(want.parents, want.num_nodes, lens.cpu().numpy(), mask="full", padded=True)
        assert (made.draft_token.cpu().numpy() == want.node_tokens.ravel()).all()
        assert (made.custom_mask.cpu().numpy()[: len(buffers.custom_mask)] == buffers.custom_mask).all()
        for name in ("positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
            assert (getattr(made, name).cpu().numpy() == getattr(buffers, name)).all(), name
        exact = verify_input(logits.cpu().numpy(), roots.cpu().numpy(), lens.cpu().numpy(), budget=32, top_k=8)
        assert (made.num_nodes.cpu().numpy() == exact.num_nodes).all()
