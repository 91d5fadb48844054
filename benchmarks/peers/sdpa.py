"""What one writes first in PyTorch: gather the keys, then scaled_dot_product_attention with a bool mask.

Query heads that share keys are rows of one product, so that nothing is repeated.  Requests of equal sizes are one call;
ragged ones are called one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer, TorchProblem


class Sdpa(Peer):
    name, title = "sdpa", "torch gather + SDPA"

    def __init__(self, folder: Path | None):
        import torch

        self._attention = torch.nn.functional.scaled_dot_product_attention

    def serves(self, problem: TorchProblem) -> bool:
        return not problem.spec.is_fp8

    def prepare(self, problem: TorchProblem) -> Callable[[], Any]:
        torch, p = problem.torch, problem
        shape = p.shape
        slots, masks = p.all_slots(), p.full_masks()
        parts = [range(shape.requests)] if shape.is_even else [range(b, b + 1) for b in range(shape.requests)]
        calls = []
        for part in parts:
            rows = slice(sum(shape.nodes[: part.start]), sum(shape.nodes[: part.stop]))
            both = [torch.stack([tensors[b] for b in part]) for tensors in (slots, masks)]
            calls.append(self._call(p, p.q[rows], *both))
        return calls[0] if len(calls) == 1 else lambda: torch.cat([call() for call in calls])

    def _call(self, problem: TorchProblem, q: Any, slots: Any, mask: Any) -> Callable[[], Any]:
        """q [b * n, heads, width], slots [b, keys], mask [b, n, keys]."""
        p, shape = problem, problem.shape
        requests, nodes, _ = mask.shape
        heads, group = shape.num_kv_heads, p.spec.group
        rows = q.view(requests, nodes, heads, group, -1).permute(0, 2, 1, 3, 4)
        rows = rows.reshape(requests, heads, nodes * group, -1)
        seen = mask.repeat_interleave(group, 1)[:, None]

        def launch() -> Any:
            k = p.k_pool[slots].transpose(1, 2)
            v = k[..., : shape.head_dim_v] if shape.shared_kv else p.v_pool[slots].transpose(1, 2)
            out = self._attention(rows, k, v, attn_mask=seen, scale=p.spec.sm_scale)
            by_node = out.reshape(requests, heads, nodes, group, -1).permute(0, 2, 1, 3, 4)
            return by_node.reshape(requests * nodes, heads * group, -1)

        return launch


PEERS = (Sdpa,)
