"""Other kernels on the same problems, each where it can be loaded; what cannot says why.

    triton     SGLang's extend kernel: one program a request, head and row tile walks the whole prefix.  Whole tree
    fa2, fa3   FlashInfer's MLA kernel, mma.sync and wgmma.  It knows no tree: prefix alone, without drafts and merge
    fa2_mask   FlashInfer's paged prefill kernel with a custom mask, for K and V apart.  Whole tree
    flashmla   DeepSeek's decode kernel (wgmma), pages of 64, gathered beforehand.  Prefix alone, as above
    sdpa       plain PyTorch: gather the keys, then scaled_dot_product_attention with a bool mask.  Whole tree

What computes the prefix alone is favoured: a whole tree needs a second small attention and a merge on top.  All are
given tensors over the memory of our arrays, captured in a graph of torch's, and replayed on our clock's stream.

``stage.sh DIR`` collects what is not installed; ``NBVERIFY_PEERS=DIR`` or ``--peers DIR`` names the folder.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.check import Accuracy, Expected
from benchmarks.problem import Problem
from nbverify.compile import cache_directory
from nbverify.errors import NbverifyError

FOLDER_VARIABLE = "NBVERIFY_PEERS"
WARM_LAUNCHES = 3
MODULES = ("sglang_triton", "flashinfer", "flashmla", "sdpa")


class Unavailable(NbverifyError):
    """A peer that cannot be loaded here."""


class TorchProblem:
    """A problem as torch tensors that share its memory, and what several peers need of it.

    ``q`` [tokens, heads, width]; ``k_pool``, ``v_pool`` [slots, KV heads, width] (MLA: V is a view of K);
    ``k_new``, ``v_new`` [tokens, KV heads, width] the rows of the drafts; ``qo_indptr``, ``kv_indptr`` int32 [B + 1];
    ``prefix_slots`` and ``draft_slots``, int64, all requests in a row; ``trees`` a bool tensor [n, n] for each request.
    """

    def __init__(self, problem: Problem):
        import torch

        self.problem, self.torch = problem, torch
        self.shape, self.spec = problem.case.shape, problem.spec
        self.dtype = getattr(torch, self.spec.dtype)
        arrays = problem.arrays
        self.q = self._rows(arrays["q"])
        self.k_pool = self._rows(arrays["k_cache"])
        mla = self.shape.shared_kv
        self.v_pool = self.k_pool[..., : self.shape.head_dim_v] if mla else self._rows(arrays["v_cache"])
        self.device = self.q.device
        self.qo_indptr, self.kv_indptr = self.indptr(self.shape.nodes), self.indptr(self.shape.prefixes)
        self.prefix_slots = self.tensor(np.concatenate(problem.prefix_slots))
        self.draft_slots = self.tensor(np.concatenate(problem.draft_slots))
        self.k_new = self.k_pool[self.draft_slots]
        self.v_new = self.v_pool[self.draft_slots].contiguous()
        self.trees = [self.tensor(tree) for tree in problem.trees]

    def _rows(self, bits: Any) -> Any:
        # int16: what every version of torch takes through DLPack
        signed = bits.view(np.int16)
        tensor = self.torch.from_dlpack(signed) if hasattr(signed, "__dlpack__") else self.torch.as_tensor(signed)
        return tensor.view(self.dtype)

    def tensor(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def indptr(self, lengths: Sequence[int], dtype: Any = np.int32) -> Any:
        return self.tensor(np.cumsum([0, *lengths]).astype(dtype))

    def full_masks(self) -> list[Any]:
        """bool [n, c + n] of each request."""
        pairs = zip(self.trees, self.shape.prefixes, strict=True)
        return [self.torch.cat([tree.new_ones(len(tree), prefix), tree], 1) for tree, prefix in pairs]

    def all_slots(self) -> list[Any]:
        """Prefix and draft slots of each request."""
        prefixes, drafts = self.problem.prefix_slots, self.problem.draft_slots
        return [self.tensor(np.concatenate(pair)) for pair in zip(prefixes, drafts, strict=True)]


class Peer:
    """One kernel.  ``__init__`` loads it, or raises Unavailable."""

    name = ""
    title = ""
    whole_tree = True  # else the prefix alone

    def __init__(self, folder: Path | None):
        raise NotImplementedError

    def serves(self, problem: TorchProblem) -> bool:
        """Whether the kernel is made for such a problem at all."""
        raise NotImplementedError

    def prepare(self, problem: TorchProblem) -> Callable[[], Any]:
        """A call, fit for a stream capture, that gives out [tokens, heads, head_dim_v]."""
        raise NotImplementedError


def load(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """The peers there are, and by title why the others are not."""
    try:
        import torch
    except ImportError as error:
        return [], {"all peers": f"torch cannot be imported: {one_line(error)}"}
    if not torch.cuda.is_available():
        return [], {"all peers": "torch finds no GPU"}
    if folder is not None:
        unpack_wheels(folder)
    return load_classes(folder)


def load_classes(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """As ``load``, where torch is there."""
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for module in MODULES:
        for kind in importlib.import_module(f"benchmarks.peers.{module}").PEERS:
            try:
                found.append(kind(folder))
            except Exception as error:  # foreign code: whatever it raises is its reason
                missing[kind.title] = one_line(error)
    return found, missing


def folder_of(given: str | None) -> Path | None:
    """``--peers DIR``, else the variable, else ``.peers`` in the working directory; None where there is none."""
    chosen = given or os.environ.get(FOLDER_VARIABLE)
    if chosen:
        if not Path(chosen).is_dir():
            raise NbverifyError(f"{chosen}: no such folder of peers; benchmarks/peers/stage.sh makes one")
        return Path(chosen).resolve()
    return Path(".peers").resolve() if Path(".peers").is_dir() else None


def unpack_wheels(folder: Path) -> None:
    """Put the folder's wheels on the path, behind what is installed.  They are unpacked once, into the cache."""
    for wheel in sorted(folder.glob("*.whl")):
        place = scratch(wheel.stem)
        if not (place / ".unpacked").exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
            (place / ".unpacked").touch()
        sys.path.append(str(place))


def scratch(name: str) -> Path:
    """A folder of ours that stays."""
    place = cache_directory() / "peers" / name
    place.mkdir(parents=True, exist_ok=True)
    return place


def one_line(error: object) -> str:
    """The first line of an error that says something, not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines or [""])[0]
    return f"{type(error).__name__}: {text}"[:200] if isinstance(error, BaseException) else text[:200]


# ---- measuring


class TorchClock:
    """Graphs of torch's, replayed on the stream of our clock, between its events, behind its flush."""

    def __init__(self, device: Any):
        import torch

        self._torch, self._device = torch, device
        self._stream = torch.cuda.ExternalStream(device.clock.stream.ptr)

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """(graph, what the call returned): its memory holds the result after a replay."""
        torch = self._torch
        torch.cuda.synchronize()  # whatever prepared the call's inputs, on whichever stream
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(WARM_LAUNCHES):  # compiles, tunes, allocates
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = call()
        torch.cuda.synchronize()
        return graph, out

    def replay(self, graph: Any) -> None:
        """Once, to the end."""
        with self._torch.cuda.stream(self._stream):
            graph.replay()
        self._torch.cuda.synchronize()

    def times(self, graph: Any, repeats: int) -> Any:
        """Device time of replays with a cold L2 cache."""
        with self._torch.cuda.stream(self._stream):
            return self._device.clock.device_times(lambda stream: graph.replay(), repeats=repeats)

    def free(self) -> None:
        """Give torch's unused memory back, for CuPy."""
        self._torch.cuda.empty_cache()


class Comparison:
    """The float64 results of a problem, computed when first asked for."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._expected: dict[bool, Expected] = {}

    def compare(self, out: Any, *, whole_tree: bool) -> Accuracy:
        """``out``: a torch tensor [tokens, heads, head_dim_v]."""
        if whole_tree not in self._expected:
            self._expected[whole_tree] = Expected(self._problem, drafts=whole_tree)
        shape = self._problem.case.shape
        floats = out.detach().float().reshape(shape.tokens, shape.num_q_heads, shape.head_dim_v).contiguous()
        return self._expected[whole_tree].compare(self._problem.xp.from_dlpack(floats))


def measure_peers(
    peers: Sequence[Peer],
    clock: Any,
    problem: Problem,
    *,
    ours_us: float | None,
    timed: Callable[[Callable[[int], Any]], dict[str, float]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, entry) of each peer that serves the problem: its times, error, and ours / theirs; or why it has none.

    ``timed`` makes a summary of times from a function of a number of repeats.  A peer that is wrong is shown, with its
    error beside its time.
    """
    given = TorchProblem(problem)
    comparison = Comparison(problem)
    for peer in peers:
        if not peer.serves(given):
            continue
        entry: dict[str, Any]
        try:
            us, accuracy = _measure(peer, clock, given, comparison, timed)
            ratio = None if ours_us is None else ours_us / us["p50"]
            entry = {"us": us, "error": accuracy.record(), "ratio": ratio, "whole_tree": peer.whole_tree}
        except Exception as error:  # foreign code: whatever it raises is its reason
            entry = {"failed": one_line(error)}
        clock.free()
        yield peer.name, entry


def _measure(
    peer: Peer, clock: Any, given: TorchProblem, comparison: Comparison, timed: Callable[..., dict[str, float]]
) -> tuple[dict[str, float], Accuracy]:
    """In a function of its own, so that the graph and its memory are gone when the next peer comes.

    ``call`` lives as long as the graph: it owns the tensors whose addresses the graph has.
    """
    call = peer.prepare(given)
    graph, out = clock.capture(call)
    clock.replay(graph)
    accuracy = comparison.compare(out, whole_tree=peer.whole_tree)
    return timed(lambda repeats: clock.times(graph, repeats)), accuracy
