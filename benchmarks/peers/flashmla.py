"""DeepSeek's FlashMLA decode kernel (wgmma, sm_90), out of the shared object that sglang-kernel ships.

It reads pages of 64 tokens, so the prefix is gathered into pages before it is timed, which the others do not need.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer, TorchProblem, Unavailable, scratch

FILE = "flashmla_ops.abi3.so"
PAGE = 64
DIMS = (576, 512)


class FlashMla(Peer):
    name, title, whole_tree = "flashmla", "FlashMLA, prefix", False

    def __init__(self, folder: Path | None):
        import torch

        if folder is None or not (folder / f"{FILE}.xz").is_file():
            raise Unavailable(f"no {FILE}.xz in the folder of peers")
        if torch.cuda.get_device_capability()[0] != 9:
            raise Unavailable("it is built for sm_90 only")
        library = scratch("flashmla") / FILE
        library.write_bytes(lzma.decompress((folder / f"{FILE}.xz").read_bytes()))
        torch.ops.load_library(str(library))
        self._ops = torch.ops.sgl_kernel

    def serves(self, problem: TorchProblem) -> bool:
        shape = problem.shape
        return (
            shape.shared_kv
            and (shape.head_dim_qk, shape.head_dim_v) == DIMS
            and not problem.spec.is_fp8
            and min(shape.prefixes) > 0
            and len(set(shape.nodes)) == 1
        )

    def prepare(self, problem: TorchProblem) -> Callable[[], Any]:
        torch, p = problem.torch, problem
        shape = p.shape
        nodes, heads = shape.nodes[0], shape.num_q_heads
        pages, table = gather_pages(p)
        lengths = torch.tensor(shape.prefixes, dtype=torch.int32, device=p.device)
        metadata, splits = self._ops.get_mla_decoding_metadata(lengths, nodes * heads, 1, heads, False, None)
        q = p.q.view(shape.requests, nodes, heads, DIMS[0])

        def launch() -> Any:
            out, _ = self._ops.fwd_kvcache_mla(
                q, pages, DIMS[1], lengths, table, p.spec.sm_scale, False, metadata, splits, False,
                None, None, None, None, None, None,
            )  # fmt: skip
            return out

        return launch


PEERS = (FlashMla,)


def gather_pages(problem: TorchProblem) -> tuple[Any, Any]:
    """(cache [pages, 64, 1, width], table [B, pages of the longest] int32) of the prefixes."""
    torch, p = problem.torch, problem
    counts = [-(-prefix // PAGE) for prefix in p.shape.prefixes]
    cache = torch.zeros(sum(counts), PAGE, 1, DIMS[0], dtype=p.dtype, device=p.device)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=p.device)
    first = token = 0
    for request, (count, prefix) in enumerate(zip(counts, p.shape.prefixes, strict=True)):
        rows = cache[first : first + count].view(-1, DIMS[0])
        rows[:prefix] = p.k_pool[p.prefix_slots[token : token + prefix], 0]
        table[request, :count] = torch.arange(first, first + count, device=p.device)
        first, token = first + count, token + prefix
    return cache, table
