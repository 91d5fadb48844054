"""A server's attention, without the server: SGLang's own runner, pool, backend and batches around one layer.

Needs torch and sglang 0.5.23 (whose wheel has the test kit that the runners come from).  On a GPU ``capture`` makes a
real CUDA graph; elsewhere it keeps the call, and a replay makes it again.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention

from nbverify.reference import ancestor_mask

VERIFY = ForwardMode.TARGET_VERIFY
KIMI_SM_SCALE = 0.144680
_parallel = get_parallel().override(attn_dcp_rank=0)  # the kit states the tensor-parallel size only
_parallel.__enter__()


def random_tree(rng: np.random.Generator, nodes: int, device) -> torch.Tensor:
    """Ancestor mask, parents before children."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    return torch.from_numpy(ancestor_mask(parents)).to(device)


def rows_of(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """In float64.  Bytes are gathered as bytes: not every operation has fp8."""
    if pool.element_size() > 1:
        return pool[slots].double()
    return pool.view(torch.uint8)[slots].view(pool.dtype).float().double()


class Server:
    """One layer, its pool filled with random keys, and page tables of ``requests`` requests."""

    def __init__(self, *, is_mla, heads, kv_heads, nodes, page, context, requests, fp8=False, dtype, device, seed=0):
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.is_mla, self.nodes, self.requests, self.device = is_mla, nodes, requests, device
        self.dims = (576, 512) if is_mla else (128, 128)
        self.heads, self.dtype = heads, dtype
        scale = KIMI_SM_SCALE if is_mla else 128**-0.5
        common = dict(
            name="verify", backend="triton", forward_mode=VERIFY, num_heads=heads, page_size=page,
            prefix_lens=(1,) * requests, extend_lens=(nodes,) * requests,
        )  # fmt: skip
        options = dict(
            dtype=dtype, device=device, max_context_len=context, disable_cuda_graph=False, runner_batch_size=requests
        )
        if is_mla:
            latent = dict(kv_lora_rank=512, qk_rope_head_dim=64)
            config = mla_attention.TinyMLAModelConfig(num_heads=heads, hidden_size=64, context_len=context, **latent)
            case = mla_attention.MLAAttentionCase(**common)
            self.runner = mla_attention.MockMLAModelRunner(
                case=case, model_config=config, fp8_kv_cache=fp8, **latent, **options
            )
        else:
            assert not fp8, "the kit's dense runner has no fp8 pool"
            config = dense_attention.TinyModelConfig(
                num_heads=heads, num_kv_heads=kv_heads, head_dim=128, hidden_size=64, context_len=context
            )
            case = dense_attention.DenseAttentionCase(num_kv_heads=kv_heads, **common)
            self.runner = dense_attention.MockModelRunner(case=case, model_config=config, head_dim=128, **options)
        self.kv_heads = 1 if is_mla else kv_heads
        self.layer = RadixAttention(
            num_heads=heads, head_dim=self.dims[0], scaling=scale, num_kv_heads=self.kv_heads, layer_id=0,
            v_head_dim=self.dims[1],
        )  # fmt: skip
        self.k_pool = self.runner.token_to_kv_pool.get_key_buffer(0)
        self.v_pool = self.runner.token_to_kv_pool.get_value_buffer(0)
        self.pools = (self.k_pool,) if is_mla else (self.k_pool, self.v_pool)  # MLA: V is part of K
        for pool in self.pools:
            pool.copy_((torch.randn(pool.shape, device=device) * 0.3).to(pool.dtype))
        self.table = self.runner.req_to_token_pool.req_to_token
        pages = -(-context // page)
        order = torch.randperm(requests * pages, device=device) + 1
        position = torch.arange(context, device=device)
        for request in range(requests):
            mine = order[request * pages : (request + 1) * pages]
            self.table[request + 1] = (mine[position // page] * page + position % page).int()
        rows = requests * nodes
        self.q = torch.randn(rows, heads * self.dims[0], device=device).to(dtype)
        self.k = torch.randn(rows, self.kv_heads, self.dims[0], device=device).to(dtype)
        self.v = self.k[..., :512] if is_mla else torch.randn_like(self.k)
        self.static_loc = torch.zeros(rows, dtype=torch.int64, device=device)

    def draw(self):
        """Other queries and drafts, in the same buffers.

        For truth(): drafts that are drawn once would come to lie in the pool many times, and the weights of copies are
        rounded alike, while the bound adds roundings up as independent ones.
        """
        for rows in (self.q, self.k, self.v):
            rows.normal_()

    def backend(self, name="triton"):
        return ATTENTION_BACKENDS[name](self.runner)

    def trees(self, count):
        return [random_tree(self.rng, self.nodes, self.device) for _ in range(count)]

    def mask(self, lens, trees):
        """FULL, of the live requests."""
        rows = [
            torch.cat([torch.ones(self.nodes, n, dtype=torch.bool, device=self.device), tree], 1).reshape(-1)
            for n, tree in zip(lens, trees, strict=True)
        ]
        return torch.cat(rows)

    def slots(self, lens):
        """Of the drafts of requests 0, 1, .. of these prefix lengths."""
        return torch.cat([self.table[b + 1, n : n + self.nodes] for b, n in enumerate(lens)]).long()

    def batch(self, lens, loc, mask, padded=0):
        """Requests 0, 1, .. of these prefix lengths, and padding as SGLang's graphs have it: row 0, one token."""
        rows, lens = [*range(1, len(lens) + 1)] + [0] * padded, [*lens] + [1] * padded
        as_tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        made = ForwardBatch(
            forward_mode=VERIFY, batch_size=len(rows),
            input_ids=torch.zeros(len(rows) * self.nodes, dtype=torch.int64, device=self.device),
            req_pool_indices=as_tensor(rows), seq_lens=as_tensor(lens), seq_lens_cpu=None, out_cache_loc=loc,
            seq_lens_sum=None,
        )  # fmt: skip
        made.spec_info = EagleVerifyInput(
            draft_token=None, custom_mask=mask, positions=None, retrieve_index=None, retrieve_next_token=None,
            retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=4, topk=2, draft_token_num=self.nodes,
            seq_lens_sum=None, seq_lens_cpu=None, capture_hidden_mode=CaptureHiddenMode.FULL,
        )  # fmt: skip
        self.runner.kv_index_translator.bind_own_plan(made)
        return made

    def eager(self, backend, lens, trees):
        """A verify without a graph."""
        rows = len(lens) * self.nodes
        batch = self.batch(lens, self.slots(lens), self.mask(lens, trees))
        backend.init_forward_metadata(batch)
        return backend.forward_extend(self.q[:rows], self.k[:rows], self.v[:rows], self.layer, batch)

    def capture(self, backend):
        """What SGLang does for one shape: metadata, two warm-ups, a capture.  Returns the output and ``replay``."""
        nodes, requests = self.nodes, self.requests
        backend.init_cuda_graph_state(requests, requests * nodes)
        fill = backend.get_cuda_graph_seq_len_fill_value()
        sentinel = torch.ones((requests * fill + requests * nodes) * nodes, dtype=torch.bool, device=self.device)
        captured = self.batch([], self.static_loc, sentinel, padded=requests)
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        step = lambda: backend.forward_extend(self.q, self.k, self.v, self.layer, captured)  # noqa: E731
        for _ in range(2):
            step()
            backend.on_after_cuda_graph_warmup()
        state = SimpleNamespace(out=None, graph=None)
        if str(self.device).startswith("cuda"):
            # As SGLang does: an object that is collected in a capture and gives device memory back would end it.
            gc.collect()
            gc.disable()
            try:
                state.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(state.graph):
                    state.out = step()
            finally:
                gc.enable()

        def prepare(lens, trees):
            """Everything outside of the graph, for a batch of fewer or as many requests."""
            slots = self.slots(lens)
            self.static_loc.zero_()
            self.static_loc[: len(slots)] = slots
            live = self.batch(lens, slots, self.mask(lens, trees), padded=requests - len(lens))
            backend.init_forward_metadata_out_graph(live, in_capture=False)

        def replay():
            if state.graph is None:
                state.out = step()
            else:
                state.graph.replay()
            return state.out

        return SimpleNamespace(prepare=prepare, replay=replay, graph=state.graph)

    def truth(self, lens, trees):
        """Out in float64 from what is in the pool now, and how far a kernel may be from it, element by element.

        The terms are those of tests/support/batches.py: float32 scores, weights rounded to 16 bits, one rounding of the
        output.
        """
        results, bounds = [], []
        u = torch.finfo(self.dtype).eps / 2
        eps32 = torch.finfo(torch.float32).eps
        group = self.heads // self.kv_heads
        slots = self.slots(lens)
        for b, (n, tree) in enumerate(zip(lens, trees, strict=True)):
            drafts = slots[b * self.nodes : (b + 1) * self.nodes]
            keys = torch.cat([self.table[b + 1, :n].long(), drafts])
            q = self.q[b * self.nodes : (b + 1) * self.nodes].view(self.nodes, self.heads, -1).double()
            k, v = (rows_of(pool, keys).repeat_interleave(group, 1) for pool in (self.k_pool, self.v_pool))
            scores = torch.einsum("ihd,jhd->hij", q, k) * self.layer.scaling
            hidden = torch.cat([torch.zeros(self.nodes, n, dtype=torch.bool, device=self.device), ~tree], 1)
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
            out = torch.einsum("hij,jhd->ihd", weights, v)
            spread = torch.einsum("hij,jhd->ihd", weights**2, v**2).sqrt()
            largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() * self.layer.scaling
            scores_off = 4 * eps32 * (1 + largest)
            float_off = (2 * scores_off + 16 * eps32) * v.abs().max()
            results.append(out)
            bounds.append(float_off + 2.02 * u * out.abs() + 5 / 3**0.5 * u * spread)
        return torch.cat(results), torch.cat(bounds)
