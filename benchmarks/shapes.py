"""Which problems are measured: their sizes, the least they cost, and the suites.

A shape is a batch of draft trees over prefixes, for one model's heads.  A case is a shape and how it is computed.  What
a shape costs at least, whatever computes it:

    FLOP    2 * rows * keys * (head_dim_qk + head_dim_v)      rows = nodes x query heads, keys = prefix + nodes
    bytes   each key's row once for each KV head of its request, and q and out once

Both count all the draft keys of a request, hidden ones too: of 32k keys they are nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbverify import presets
from nbverify.errors import ArgumentError
from nbverify.spec import KV_DTYPE_FP8, VerifySpec

K = 1024
HALF_BYTES = 2  # an element of q and out, bf16 or fp16
MLA_DIMS = (576, 512)
KIMI = "kimi-k2.6-tp8"
LONGER = 1.1  # a neighbour's prefix


@dataclass(frozen=True)
class Shape:
    """A batch: ``nodes`` and ``prefixes`` have an entry for each request."""

    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    shared_kv: bool
    nodes: tuple[int, ...]
    prefixes: tuple[int, ...]
    sm_scale: float

    @property
    def requests(self) -> int:
        return len(self.nodes)

    @property
    def tokens(self) -> int:
        """Nodes of all requests: the rows of q and out."""
        return sum(self.nodes)

    @property
    def rows(self) -> int:
        """Query rows, a node and a head each."""
        return self.tokens * self.num_q_heads

    @property
    def keys(self) -> int:
        """Keys of all requests, draft keys included; the slots that the batch takes in a pool."""
        return sum(self.prefixes) + self.tokens

    @property
    def longest(self) -> int:
        """Prefix and nodes of the longest request."""
        return max(c + n for c, n in zip(self.prefixes, self.nodes, strict=True))

    @property
    def is_even(self) -> bool:
        return len(set(self.nodes)) == 1 and len(set(self.prefixes)) == 1

    def flop_of(self, request: int) -> int:
        """Floating point operations of one request."""
        nodes, keys = self.nodes[request], self.prefixes[request] + self.nodes[request]
        return 2 * nodes * self.num_q_heads * keys * (self.head_dim_qk + self.head_dim_v)

    @property
    def flop(self) -> int:
        return sum(self.flop_of(request) for request in range(self.requests))

    def num_bytes(self, kv_itemsize: int) -> int:
        """K and V of every key once, q and out once."""
        widths = self.head_dim_qk + self.head_dim_v
        row = self.head_dim_qk if self.shared_kv else widths
        return self.keys * self.num_kv_heads * row * kv_itemsize + self.rows * widths * HALF_BYTES

    @property
    def heads_text(self) -> str:
        """``8``; ``32/8 x 128`` where K and V are apart."""
        if self.shared_kv:
            dims = (self.head_dim_qk, self.head_dim_v)
            return f"{self.num_q_heads}" + ("" if dims == MLA_DIMS else f" x {dims[0]}/{dims[1]}")
        dims_text = f"{self.head_dim_qk}" + ("" if self.head_dim_v == self.head_dim_qk else f"/{self.head_dim_v}")
        return f"{self.num_q_heads}/{self.num_kv_heads} x {dims_text}"

    @property
    def label(self) -> str:
        """``1 x 8 x 8, 32k``: requests x nodes x heads, prefix."""
        nodes = _span(self.nodes)
        return f"{self.requests} x {nodes} x {self.heads_text}, {_span(self.prefixes)}"


@dataclass(frozen=True)
class Case:
    """A shape, and how it is computed.

    ``kernel`` None: the spec's default.  ``contiguous``: slots in order, not shuffled.  ``capture_prefix``: prefix
    length of every request while the graph is captured; None: its own.  ``launches``: of one graph, as the layers of a
    step; with ``schedule`` "step" the schedule comes once before them.  They are all of the same buffers.
    """

    shape: Shape
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    mask: str = "full"
    split: str = "balanced"
    reduction: str = "grid_sync"
    schedule: str = "launch"
    kernel: str | None = None
    contiguous: bool = False
    capture_prefix: int | None = None
    launches: int = 1

    @property
    def longest(self) -> int:
        """What ``max_kv_len`` must hold."""
        at_capture = 0 if self.capture_prefix is None else self.capture_prefix + max(self.shape.nodes)
        return max(self.shape.longest, at_capture)

    @property
    def kv_itemsize(self) -> int:
        return 1 if self.kv_dtype == KV_DTYPE_FP8 else HALF_BYTES

    @property
    def flop(self) -> int:
        """Of all launches."""
        return self.launches * self.shape.flop

    @property
    def num_bytes(self) -> int:
        """Of all launches, as if each read its keys from memory."""
        return self.launches * self.shape.num_bytes(self.kv_itemsize)

    def spec(self, *, max_requests: int | None = None, max_kv_len: int | None = None) -> VerifySpec:
        """The spec, with limits that just hold the case where none are given.  Raises ArgumentError."""
        shape = self.shape
        options: dict[str, Any] = {
            "max_requests": max_requests or shape.requests,
            "max_nodes": max(shape.nodes),
            "max_kv_len": max_kv_len or self.longest,
            "sm_scale": shape.sm_scale,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "mask": self.mask,
            "split": self.split,
            "reduction": self.reduction,
            "schedule": self.schedule,
        }
        if self.kernel is not None:
            options["kernel"] = self.kernel
        if shape.shared_kv:
            return VerifySpec.mla(
                shape.num_q_heads, head_dim_qk=shape.head_dim_qk, head_dim_v=shape.head_dim_v, **options
            )
        return VerifySpec.gqa(
            shape.num_q_heads, shape.num_kv_heads, shape.head_dim_qk, head_dim_v=shape.head_dim_v, **options
        )

    def differences(self) -> str:
        """What of it is not the default, for a label: ``split fixed, mask none``."""
        words = [
            f"{name} {getattr(self, name)}"
            for name, usual in (("dtype", "bfloat16"), ("kv_dtype", None), ("mask", "full"), ("split", "balanced"),
                                ("reduction", "grid_sync"), ("schedule", "launch"), ("kernel", None))
            if getattr(self, name) != usual
        ]  # fmt: skip
        words += ["contiguous slots"] if self.contiguous else []
        words += [] if self.capture_prefix is None else [f"captured at {size_text(self.capture_prefix)}"]
        words += [] if self.launches == 1 else [f"{self.launches} launches"]
        return ", ".join(words)

    @property
    def label(self) -> str:
        return ", ".join(text for text in (self.shape.label, self.differences()) if text)


# ---- making shapes


def mla(requests: int, nodes: int, heads: int, prefix: int) -> Shape:
    """Kimi's latent rows, 576 / 512 wide, with its scale."""
    kimi = replace_heads(presets.preset(KIMI), heads)
    return of_model(kimi, (nodes,) * requests, (prefix,) * requests)


def gqa(requests: int, nodes: int, heads: int, kv_heads: int, head_dim: int, prefix: int) -> Shape:
    """K and V apart, one width, the usual scale."""
    return Shape(
        heads, kv_heads, head_dim, head_dim, False, (nodes,) * requests, (prefix,) * requests, head_dim**-0.5
    )  # fmt: skip


def of_model(spec: VerifySpec, nodes: tuple[int, ...], prefixes: tuple[int, ...]) -> Shape:
    """The heads and the scale of a spec, such as a preset's."""
    return Shape(
        spec.num_q_heads, spec.num_kv_heads, spec.head_dim_qk, spec.head_dim_v, spec.shared_kv,
        nodes, prefixes, spec.sm_scale,
    )  # fmt: skip


def replace_heads(spec: VerifySpec, heads: int) -> VerifySpec:
    """Another number of query heads; checked by the spec."""
    return replace(spec, num_q_heads=heads)


def model_of_flags(heads: int, kv_heads: int | None, head_dims: tuple[int, int] | None) -> VerifySpec:
    """The spec that --heads, --kv-heads and --head-dim describe: without --kv-heads MLA.  Raises ArgumentError."""
    limits: dict[str, Any] = {"max_requests": 1, "max_nodes": 1, "max_kv_len": 1}
    if kv_heads is None:
        qk, v = head_dims or MLA_DIMS
        scale = presets.preset(KIMI).sm_scale if (qk, v) == MLA_DIMS else max(qk, 1) ** -0.5
        return VerifySpec.mla(heads, head_dim_qk=qk, head_dim_v=v, sm_scale=scale, **limits)
    qk, v = head_dims or (128, 128)
    return VerifySpec.gqa(heads, kv_heads, qk, head_dim_v=v, sm_scale=max(qk, 1) ** -0.5, **limits)


def batches(
    requests: Sequence[int], nodes: Sequence[int], prefixes: Sequence[int], *, ragged: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(nodes, prefixes) by request, of each batch that the lists describe.

    They multiply out, in the order given; ``ragged``: they are one batch, an entry for each request, and a single one
    serves all requests.
    """
    for flag, values, least in (("--batch", requests, 1), ("--nodes", nodes, 1), ("--prefix", prefixes, 0)):
        bad = [value for value in values if value < least]
        if bad:
            raise ArgumentError(flag, f">= {least}", bad[0])
    if not ragged:
        return [((n,) * b, (c,) * b) for b, n, c in itertools.product(requests, nodes, prefixes)]
    lengths = {len(values) for values in (nodes, prefixes) if len(values) > 1} or {1}
    if len(lengths) > 1:
        raise ArgumentError("--ragged", "as many --nodes as --prefix, or one", f"{len(nodes)} and {len(prefixes)}")
    (count,) = lengths
    if tuple(requests) not in ((1,), (count,)):
        raise ArgumentError("--batch", f"none, or {count}, the entries of a ragged batch", list(requests))
    return [(_spread(nodes, count), _spread(prefixes, count))]


def _spread(values: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(values) * (count if len(values) == 1 else 1)


# ---- sizes in text


def sizes(text: str) -> tuple[int, ...]:
    """``"4k,32k,5700"`` -> (4096, 32768, 5700).  Raises ValueError."""
    return tuple(_size(part.strip()) for part in text.split(","))


def _size(text: str) -> int:
    number = text[:-1] if text[-1:] in ("k", "K") else text
    if not number.isdecimal():  # 5.7k: 5,700 or 5,836?
        raise ValueError(f"expected whole numbers such as 32k (32,768) or 5700, got {text!r}")
    return int(number) * (K if number != text else 1)


def size_text(size: int) -> str:
    """32768 -> ``32k``; what is no multiple of 1024 in full: ``5,700``."""
    return f"{size // K}k" if size and size % K == 0 else f"{size:,}"


def _span(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return size_text(low) if low == high else f"{size_text(low)}..{size_text(high)}"


# ---- suites


@dataclass(frozen=True)
class Goal:
    """A row of the tables that the kernel is judged by, on an H200: microseconds.

    ``peer`` and ``triton`` are what was measured of others there, before; of MLA peers the prefix alone.
    """

    shape: Shape
    must_us: float
    aim_us: float
    peer: str = ""
    triton_us: float | None = None


MUST: tuple[Goal, ...] = (
    Goal(mla(1, 8, 8, 4 * K), 18, 12, "23", 659),
    Goal(mla(1, 8, 8, 5700), 20, 13, "25", 915),
    Goal(mla(1, 8, 8, 32 * K), 32, 22, "54", 5145),
    Goal(mla(1, 9, 8, 32 * K), 40, 26, "", 5140),
    Goal(mla(1, 8, 8, 128 * K), 65, 48, "82", 20492),
    Goal(mla(1, 33, 8, 32 * K), 80, 58, "51 (wgmma); 124 (mma.sync)", 5087),
    Goal(mla(1, 65, 8, 128 * K), 430, 340, "238 (wgmma); 765 (mma.sync)", 20252),
    Goal(mla(1, 64, 16, 32 * K), 200, 180, "125 (wgmma); 295 (mma.sync)", 5085),
    Goal(mla(8, 8, 8, 32 * K), 112, 85, "97 (wgmma); 163 (mma.sync)", 5150),
    Goal(mla(16, 17, 8, 8 * K), 165, 105, "96 (wgmma); 298 (mma.sync)", 1304),
    Goal(mla(32, 8, 8, 4 * K), 70, 50, "58 (wgmma); 93 (mma.sync)", 1352),
    Goal(mla(1, 1, 8, 128 * K), 50, 42, "76", 20486),
    Goal(gqa(1, 8, 32, 8, 128, 4 * K), 16, 11, "27", 284),
    Goal(gqa(1, 8, 32, 8, 128, 32 * K), 46, 37, "106", 2182),
    Goal(gqa(1, 33, 32, 8, 128, 32 * K), 80, 52, "315", 2183),
    Goal(gqa(1, 65, 32, 8, 128, 32 * K), 130, 95, "443", 2190),
    Goal(gqa(8, 8, 32, 8, 128, 32 * K), 310, 270, "673", 4245),
    Goal(gqa(16, 17, 32, 4, 128, 8 * K), 130, 95, "640", 2090),
    Goal(gqa(1, 17, 9, 3, 64, 2 * K), 14, 9, "20", 166),
)


def neighbours(shape: Shape) -> dict[str, Shape]:
    """Shapes beside one: nothing is tuned to a shape alone if these do as well."""
    found = {"one node more": replace(shape, nodes=tuple(n + 1 for n in shape.nodes))}
    # The next smaller number that the KV heads divide.
    fewer = shape.num_q_heads - shape.num_kv_heads
    if fewer > 0:
        found["one head less"] = replace(shape, num_q_heads=fewer)
    found["10 % longer"] = replace(shape, prefixes=tuple(round(LONGER * c) for c in shape.prefixes))
    return found


@dataclass(frozen=True)
class Claim:
    """A ratio of two cases that must hold.

    ``of`` "time": measured / against, at most ``limit`` (at least, with ``at_least``).
    ``of`` "share": the shares of their rooflines, at least ``limit``; less where ``measured`` needs more row fragments
    or row tiles, see measure.py.  ``against`` may be the name of a peer, on the shape of ``measured``.
    ``of`` "waste": the share of mma rows that no query row needs, at most ``limit`` for any number of nodes from those
    of ``measured`` to those of ``against``; follows from the planner's tiles, and nothing is measured.
    """

    name: str
    measured: Case
    against: Case | str
    limit: float
    of: str = "time"
    at_least: bool = False


NEIGHBOUR_LIMIT = 0.85
NEW_TILE_LIMIT = 0.65
TREE_TAX, SHUFFLE_TAX, CAPTURE_TAX, RAGGED_TAX, FIXED_TAX = 1.03, 1.05, 1.10, 1.10, 1.30
FP8_GAIN = 1.5
STEP_LIMIT = 1.0  # it saves time, or it is not worth its rules
STEP_LAUNCHES = 61  # the layers of Kimi K2.6
WASTE_LIMIT = 0.20
WASTE_FROM_ROWS = 72  # that share keys: 9 nodes x 8 heads
WASTE_TO_NODES = 65  # the most of MUST
RAGGED = (4641, 45118, 1730, 1696)  # ThunderMLA's case


def neighbour_claims(usual: Case) -> list[Claim]:
    """Three neighbours of each shape of the tables."""
    return [
        Claim(name, replace(usual, shape=shape), replace(usual, shape=goal.shape), NEIGHBOUR_LIMIT, of="share")
        for goal in MUST
        for name, shape in neighbours(goal.shape).items()
    ]


def side_claims(usual: Case, *, peers: bool) -> list[Claim]:
    """What the kernel promises beside its times."""

    def case(shape: Shape, **changes: Any) -> Case:
        return replace(usual, shape=shape, **changes)

    claims = []
    wide = [mla(1, 8, 8, 32 * K), mla(1, 33, 8, 32 * K), mla(8, 8, 8, 32 * K), gqa(1, 8, 32, 8, 128, 32 * K),
            gqa(1, 33, 32, 8, 128, 32 * K)]  # fmt: skip
    for shape in wide:
        tree = usual.mask if usual.mask not in ("none", "causal") else "full"
        claims.append(Claim("tree mask against none", case(shape, mask=tree), case(shape, mask="none"), TREE_TAX))
    for shape in (wide[0], wide[2], wide[3]):
        claims.append(Claim("shuffled slots", case(shape), case(shape, contiguous=True), SHUFFLE_TAX))
    for shape in (mla(1, 8, 8, 4 * K), gqa(1, 8, 32, 8, 128, 4 * K)):
        captured = case(shape, capture_prefix=256 * K)
        claims.append(Claim("graph captured at 256k", captured, case(shape), CAPTURE_TAX))
    even = tuple(sum(RAGGED) // len(RAGGED) + (i < sum(RAGGED) % len(RAGGED)) for i in range(len(RAGGED)))
    for shape in (mla(len(RAGGED), 8, 8, 1), mla(len(RAGGED), 4, 16, 1), gqa(len(RAGGED), 8, 32, 8, 128, 1)):
        ragged = case(replace(shape, prefixes=RAGGED))
        claims.append(Claim("ragged batch", ragged, case(replace(shape, prefixes=even)), RAGGED_TAX))
    one = mla(1, 1, 8, 128 * K)
    claims.append(Claim("fp8 cache", case(one), case(one, kv_dtype=KV_DTYPE_FP8), FP8_GAIN, at_least=True))
    for goal in MUST:
        pair = (case(goal.shape, split="fixed"), case(goal.shape, split="balanced"))
        claims.append(Claim("fixed against balanced", *pair, FIXED_TAX))
    if usual.spec().kernel == "mma":
        short = case(mla(1, 8, 8, 4 * K), launches=STEP_LAUNCHES)
        pair = (replace(short, schedule="step"), replace(short, schedule="launch"))
        claims.append(Claim("one schedule a step", *pair, STEP_LIMIT))
        claims += [Claim("mma rows wasted", case(few), case(many), WASTE_LIMIT, of="waste") for few, many in models()]
    if peers:
        for shape in (mla(1, 8, 8, K), mla(1, 64, 16, K), mla(32, 8, 8, K), gqa(1, 8, 32, 8, 128, K),
                      gqa(32, 8, 32, 8, 128, K)):  # fmt: skip
            claims.append(Claim("never slower than Triton", case(shape), "triton", 1.0))
    return claims


def models() -> list[tuple[Shape, Shape]]:
    """One request of each model of the tables, with the fewest nodes that make WASTE_FROM_ROWS rows, and the most."""
    found: dict[str, tuple[Shape, Shape]] = {}
    for goal in MUST:
        shape = replace(goal.shape, nodes=(1,), prefixes=goal.shape.prefixes[:1])
        few = -(-WASTE_FROM_ROWS // (shape.num_q_heads // shape.num_kv_heads))
        pair = replace(shape, nodes=(few,)), replace(shape, nodes=(WASTE_TO_NODES,))
        found.setdefault(shape.heads_text, pair)
    return list(found.values())


def cases_of(claims: Sequence[Claim]) -> list[Case]:
    """Each case that must be measured once, in order of appearance."""
    found: dict[Case, None] = {}
    for claim in claims:
        if claim.of == "waste":
            continue
        found[claim.measured] = None
        if isinstance(claim.against, Case):
            found[claim.against] = None
    return list(found)
