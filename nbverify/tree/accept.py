"""Acceptance: how far the target model agrees with a draft tree, and the token that comes after.

The target has scored every node of the tree.  Its token after a node, the largest logit (greedy) or a draw from its
distribution (sampled), is compared with the tokens of that node's children: if one has it, the walk goes there, to the
one with the lowest number, else it ends, and the token is the *bonus*, the root of the next tree.

The functions here define the result; :class:`AcceptPlan` computes the same bits on a GPU (tree/kernels/accept.py,
accept_argmax.py, accept_sampled.py), or runs the same kernels in the emulator.

Shapes: B requests of at most N nodes, paths of at most D + 1 nodes, R rows of V logits.  Row ``qo_indptr[b] + j``
belongs to node j of request b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbverify import arrays
from nbverify.arrays import ArrayInfo
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError
from nbverify.stages import Runner, Stage, array, check_array, index_array, open_runner, scalar
from nbverify.tree.binding import BoundStage, check_int, refuse_overlaps
from nbverify.tree.kernels.accept_rules import (
    ALL_BITS,
    ARGMAX_BLOCKS_PER_SM,
    ARGMAX_THREADS,
    BINS,
    EXP2,
    LEAST_EXPONENT,
    LOG2_E,
    MANTISSA_BITS,
    MAX_VOCAB,
    NO_NODE,
    NO_TOKEN,
    PHILOX_INCREMENTS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    SIGN,
    SPLITS,
    TOP_P_BITS,
    WEIGHT_BITS,
    AcceptFlag,
)
from nbverify.tree.trees import MAX_NODES

__all__ = ["AcceptFlag", "AcceptPlan", "Accepted", "accept_greedy", "accept_sampled", "draw_token"]

MAX_REQUESTS = 8192  # whose sums of rows are in a block's shared memory
LOGITS_DTYPES = {  # what a buffer of that type may be labelled as
    "float32": ("float32",),
    "bfloat16": ("bfloat16", "uint16", "int16"),
    "float16": ("float16", "uint16", "int16"),
}
INDEX = ("int32", "int64")


# ------------------------------------------------------------------------------------------------------- what it means


@dataclass(frozen=True, eq=False)
class Accepted:
    """What acceptance says of a batch."""

    accept_nodes: NDArray[np.int32]
    """``[B, D + 1]`` int32: the accepted path, root first, then -1."""
    accept_lens: NDArray[np.int32]
    """``[B]`` int32: nodes on it; 0 for a request that does not exist or whose data are wrong."""
    bonus_tokens: NDArray[np.int64]
    """``[B]`` int64: the target's token at the last node of the path; 0 where there is none."""
    flags: NDArray[np.int32]
    """``[B]`` int32: :class:`AcceptFlag`."""
    target_tokens: NDArray[np.int64]
    """``[B, D + 1]`` int64: the target's token at each node of the path, then -1."""

    def accept_index(self, qo_indptr: NDArray) -> NDArray[np.int32]:
        """``[B, D + 1]`` int32: the path as rows, then -1 (SGLang's form)."""
        first = np.asarray(qo_indptr)[: len(self.accept_nodes), None]
        return np.where(self.accept_nodes == NO_NODE, NO_NODE, self.accept_nodes + first).astype(np.int32)


def accept_greedy(
    parents: NDArray,
    node_tokens: NDArray,
    num_nodes: NDArray,
    qo_indptr: NDArray,
    target_tokens: NDArray | None = None,
    *,
    logits: NDArray | None = None,
    max_depth: int,
) -> Accepted:
    """Follow the largest logits of the target.

    Parameters
    ----------
    parents, node_tokens
        ``[B, N]``: the trees, root first, otherwise in any order.  Entries beyond ``num_nodes`` are not read.
    num_nodes
        ``[B]``: nodes with the root; 0 for no request.
    qo_indptr
        ``[B + 1]``: the first row of each request; the last entry is not read.
    target_tokens, logits
        One of them: ``[R]`` the target's token by row, or ``[R, V]`` float32, float16 or bfloat16.  Of equal logits the
        lowest token is taken; a NaN counts as -inf; a row with nothing above -inf gives token 0.
    max_depth
        D.  A path that would be longer ends there; the bonus is then the token that a child may have had.

    Bad data never raise: the request is flagged, gets no path, and the others are not affected.

    Raises ArgumentError for wrong shapes and types.
    """
    if (target_tokens is None) == (logits is None):
        raise ArgumentError("target_tokens", "either target_tokens or logits", "both" if logits is not None else "none")
    rows = _checked_rows("target_tokens" if logits is None else "logits", target_tokens if logits is None else logits)

    def token_at(request: int, depth: int, row: int) -> tuple[int, bool]:
        return (int(rows[row]), False) if logits is None else largest_logit(rows[row])

    return _walk(parents, node_tokens, num_nodes, qo_indptr, len(rows), max_depth, token_at, lambda b: True)


def accept_sampled(
    parents: NDArray,
    node_tokens: NDArray,
    num_nodes: NDArray,
    qo_indptr: NDArray,
    logits: NDArray,
    *,
    temperatures: NDArray,
    top_ks: NDArray,
    top_ps: NDArray,
    seeds: NDArray,
    prefix_lens: NDArray,
    max_depth: int,
) -> Accepted:
    """Let the target draw a token at each node it comes to, and go to the child that has it.

    Lossless by construction: every token given out is a draw from the target's distribution after what precedes it.
    See :func:`draw_token` for that distribution, and :func:`accept_greedy` for the other arguments.

    Parameters
    ----------
    temperatures, top_ks, top_ps
        ``[B]`` float32, int32, float32: as :func:`draw_token` takes them.
    seeds, prefix_lens
        ``[B]``: the draw at the node that is i steps down the path uses ``random_bits(seed, prefix_len + i)``, one pair
        for each position of the text.  The same seed gives the same text with any tree, or none.
    """
    rows = _checked_rows("logits", logits)
    temperatures, top_ps = np.asarray(temperatures, np.float32), np.asarray(top_ps, np.float32)

    def token_at(b: int, depth: int, row: int) -> tuple[int, bool]:
        bits = random_bits(int(seeds[b]), int(prefix_lens[b]) + depth)
        return draw_token(rows[row], temperatures[b], int(top_ks[b]), top_ps[b], bits)

    def is_valid(b: int) -> bool:
        return bool(0 <= temperatures[b] < np.inf and 0 < top_ps[b] <= 1)

    return _walk(parents, node_tokens, num_nodes, qo_indptr, len(rows), max_depth, token_at, is_valid)


def _checked_rows(name: str, given: Any) -> NDArray:
    rows = np.asarray(given)
    dtypes, ndim = (INDEX, 1) if name == "target_tokens" else (("float32", "float16", "bfloat16"), 2)
    if rows.dtype.name not in dtypes:
        raise ArgumentError(name, f"dtype {' or '.join(dtypes)}", rows.dtype)
    if rows.ndim != ndim:
        raise ArgumentError(name, f"{ndim} dimensions", list(rows.shape))
    return rows


def _walk(
    parents: NDArray,
    node_tokens: NDArray,
    num_nodes: NDArray,
    qo_indptr: NDArray,
    num_rows: int,
    max_depth: int,
    token_at: Callable[[int, int, int], tuple[int, bool]],
    is_valid: Callable[[int], bool],
) -> Accepted:
    """The walk of a batch; ``token_at(request, depth, row)`` is the target's token and whether the row is bad."""
    parents, node_tokens = np.asarray(parents), np.asarray(node_tokens)
    num_nodes, qo_indptr = np.asarray(num_nodes), np.asarray(qo_indptr)
    if parents.ndim != 2 or parents.shape != node_tokens.shape:
        raise ArgumentError("parents", f"shape [B, N], as node_tokens {list(node_tokens.shape)}", list(parents.shape))
    batch = len(parents)
    for name, found, shape in (("num_nodes", num_nodes, (batch,)), ("qo_indptr", qo_indptr, (batch + 1,))):
        if found.shape != shape:
            raise ArgumentError(name, f"shape {list(shape)}", list(found.shape))
    result = Accepted(
        accept_nodes=np.full((batch, max_depth + 1), NO_NODE, np.int32),
        accept_lens=np.zeros(batch, np.int32),
        bonus_tokens=np.full(batch, NO_TOKEN, np.int64),
        flags=np.zeros(batch, np.int32),
        target_tokens=np.full((batch, max_depth + 1), -1, np.int64),
    )
    for b in range(batch):
        n, first_row = int(num_nodes[b]), int(qo_indptr[b])
        flag = tree_flag(parents[b], n, first_row, num_rows)
        if flag == AcceptFlag.OK and n > 0 and not is_valid(b):
            flag = AcceptFlag.SAMPLING
        result.flags[b] = flag
        node: int | None = 0 if flag == AcceptFlag.OK and n > 0 else None
        depth = 0
        while node is not None and depth <= max_depth:
            token, is_bad = token_at(b, depth, first_row + node)
            if is_bad:
                result.flags[b] = AcceptFlag.BAD_LOGITS
            result.accept_nodes[b, depth], result.target_tokens[b, depth] = node, token
            result.bonus_tokens[b] = token
            agreeing = [j for j in range(1, n) if parents[b, j] == node and node_tokens[b, j] == token]
            node, depth = min(agreeing, default=None), depth + 1
        result.accept_lens[b] = depth
    return result


def tree_flag(parents: NDArray, num_nodes: int, first_row: int, num_rows: int) -> AcceptFlag:
    """What is wrong with a request: its row of parents ``[N]``, and where its rows are."""
    if not 0 <= num_nodes <= len(parents):
        return AcceptFlag.NUM_NODES
    if num_nodes > 0 and not 0 <= first_row <= num_rows - num_nodes:
        return AcceptFlag.ROWS
    if num_nodes > 0 and parents[0] != NO_NODE:
        return AcceptFlag.ROOT
    if any(not 0 <= parents[j] < num_nodes or parents[j] == j for j in range(1, num_nodes)):
        return AcceptFlag.PARENT
    at_root = {0}
    for start in range(1, num_nodes):
        walked, node = set(), start
        while node not in at_root:
            if node in walked:
                return AcceptFlag.CYCLE
            walked.add(node)
            node = int(parents[node])
        at_root |= walked
    return AcceptFlag.OK


# --------------------------------------------------------------------------------------------------- a token of a row


def largest_logit(logits: NDArray) -> tuple[int, bool]:
    """The lowest token with the largest of ``[V]`` logits, and whether the row is bad.

    A NaN counts as -inf.  Bad is a row with a NaN, or with nothing above -inf: its token is 0.
    """
    has_nan = np.isnan(logits)
    numbers = np.where(has_nan, -np.inf, logits.astype(np.float32))
    return int(np.argmax(numbers)), bool(has_nan.any() or numbers.max() == -np.inf)


def draw_token(logits: NDArray, temperature: np.float32, top_k: int, top_p: np.float32, bits: int) -> tuple[int, bool]:
    """A draw from the target's distribution, made from 64 random bits, and whether the row is bad.

    The order is that of SGLang's verify (softmax of logits / temperature, then ``top_k_renorm_prob``, then
    ``top_p_renorm_prob``): top-p is a share of what top-k has left.

    Parameters
    ----------
    logits
        ``[V]`` float32, float16 or bfloat16; a NaN counts as -inf, a row with nothing above -inf gives token 0.
    temperature
        Finite, not negative.  0 takes the largest logit, like :func:`accept_greedy`.
    top_k
        Keep the tokens that fewer than k others beat; equal logits stay or go together.  Below 1 or at least V: keep
        all.  1: as temperature 0, so the lowest token of equals.
    top_p
        In (0, 1]: keep those of them where the ones that beat a token have less than this share of the weight.
    bits
        0 to 2^64 - 1, uniform.

    Weights are integers in units of 2^-40 of the largest, so that sums do not depend on their order: a token below
    2^-40 of the largest is never drawn, and any other has its probability up to the rounding of float32.
    """
    token, is_bad = largest_logit(logits)
    amounts = kept_weights(logits, temperature, top_k, top_p)
    if amounts is None:
        return token, is_bad
    left = bits * int(amounts.sum()) >> 64
    return int(np.searchsorted(np.cumsum(amounts), left, side="right")), is_bad


def kept_weights(logits: NDArray, temperature: np.float32, top_k: int, top_p: np.float32) -> NDArray[np.int64] | None:
    """The distribution that :func:`draw_token` draws from: ``[V]`` int64, in proportion to the probabilities.

    None where nothing is drawn: temperature 0, top_k 1, or nothing above -inf.
    """
    token, _ = largest_logit(logits)
    values = logits.astype(np.float32)
    if temperature == 0 or top_k == 1 or not values[token] > -np.inf:
        return None
    values = np.where(np.isnan(values), np.float32(-np.inf), values)
    keys, amounts = order_keys(values), weights(values, values[token], temperature)
    if 0 < top_k < len(values):
        amounts = np.where(_sum_above(keys, np.ones_like(amounts)) < top_k, amounts, 0)
    if top_p < 1:
        numerator = int(np.float32(top_p) * np.float32(1 << TOP_P_BITS))
        share = max(int(amounts.sum()) * numerator >> TOP_P_BITS, 1)
        amounts = np.where(_sum_above(keys, amounts) < share, amounts, 0)
    return amounts


def weights(values: NDArray[np.float32], largest: np.float32, temperature: np.float32) -> NDArray[np.int64]:
    """``2^((value - largest) / temperature * log2 e)`` in units of 2^-40, rounded down: 0 to 2^40.

    Each float32 operation is rounded by itself and none is fused, here and in the kernel: so both have the same bits.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # infinite logits, and temperatures near 0
        scale = np.float32(LOG2_E) / np.float32(temperature)
        x = (values - largest) * scale
    is_counted = x > np.float32(LEAST_EXPONENT)
    x = np.where(is_counted, x, np.float32(0))
    whole = np.floor(x)
    f = x - whole
    power = np.full_like(f, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power = power * f + np.float32(coefficient)
    mantissa = (power * np.float32(1 << MANTISSA_BITS)).astype(np.int64)
    amounts = (mantissa << (WEIGHT_BITS - MANTISSA_BITS)) >> (-whole).astype(np.int64)
    return np.where(values == largest, np.int64(1 << WEIGHT_BITS), np.where(is_counted, amounts, 0))


def order_keys(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Integers in the order of the numbers; -0 and +0 are the same."""
    bits = values.view(np.uint32).astype(np.int64)
    return np.where(bits > SIGN, ALL_BITS - bits, bits | SIGN)


def _sum_above(keys: NDArray[np.int64], amounts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each token the sum of the amounts of tokens with a larger key."""
    order = np.argsort(-keys)
    before = np.concatenate([[0], np.cumsum(amounts[order])])
    return before[np.searchsorted(-keys[order], -keys, side="left")]


def random_bits(seed: int, position: int) -> int:
    """64 bits of Philox4x32-10 with the key ``seed`` and the counter ``position``, both taken modulo 2^64."""
    low = ALL_BITS
    key_0, key_1 = seed & low, seed >> 32 & low
    a, b, _, _ = philox(((position & low), position >> 32 & low, 0, 0), (key_0, key_1))
    return b << 32 | a


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four random words of 32 bits."""
    (a, b, c, d), (key_0, key_1) = counter, key
    for _ in range(PHILOX_ROUNDS):
        first, second = a * PHILOX_MULTIPLIERS[0], c * PHILOX_MULTIPLIERS[1]
        a, b, c, d = second >> 32 ^ b ^ key_0, second & ALL_BITS, first >> 32 ^ d ^ key_1, first & ALL_BITS
        key_0, key_1 = (key_0 + PHILOX_INCREMENTS[0]) & ALL_BITS, (key_1 + PHILOX_INCREMENTS[1]) & ALL_BITS
    return a, b, c, d


# -------------------------------------------------------------------------------------------------------- on the device

KERNELS = "nbverify.tree.kernels"
TREE = (array("num_nodes", "int32"), array("parents", "int32"), array("node_tokens", "int64"),
        *index_array("qo_indptr"))  # fmt: skip
RESULT = (array("accept_nodes", "int32"), array("accept_lens", "int32"), array("bonus_tokens", "int64"),
          array("flags", "int32"), array("accept_index", "int32"), *index_array("predict"),
          scalar("num_rows"))  # fmt: skip
WRITTEN = ("accept_nodes", "accept_lens", "bonus_tokens", "flags", "accept_index", "predict")
LOGITS_LAYOUT = (scalar("row_stride"), scalar("vocab"))
SAMPLING = (array("temperatures", "float32"), array("top_ks", "int32"), array("top_ps", "float32"),
            array("seeds", "int64"), *index_array("prefix_lens"))  # fmt: skip
WARP, GREEDY_THREADS, SAMPLED_THREADS = 32, 256, 512


def _threads_for(items: int, least: int, most: int) -> int:
    """As many as there is work for, in whole warps."""
    return max(least, min(most, -(-items // WARP) * WARP))


class AcceptPlan:
    """Acceptance of a batch on a device: compiles, and owns what lies between its two stages.

    Parameters
    ----------
    max_requests, max_nodes, max_depth
        Capacities: B at most, N exactly (1 to 1025), D (0 to 1024).
    vocab_size
        V, if logits are to be bound; up to 2^22.
    sampled
        Draw tokens; else take the largest logits.
    logits_dtype
        "float32", "bfloat16" or "float16"; the latter two may come as raw bits, uint16 or int16.
    device
        What :func:`nbverify.stages.open_runner` takes: None, an ordinal, "emulator", an Emulator, or a runner.

    One plan serves any number of ``bind``s, and has one launch in flight: two streams, two plans.

    Raises ArgumentError.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_nodes: int,
        max_depth: int,
        vocab_size: int | None = None,
        sampled: bool = False,
        logits_dtype: str = "float32",
        device: int | str | Emulator | Runner | None = None,
    ):
        self.max_requests = check_int("max_requests", max_requests, 1, MAX_REQUESTS)
        self.max_nodes = check_int("max_nodes", max_nodes, 1, MAX_NODES)
        self.max_depth = check_int("max_depth", max_depth, 0, MAX_NODES - 1)
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, 1, MAX_VOCAB)
        elif sampled:
            raise ArgumentError("vocab_size", "a number, to draw from the logits", vocab_size)
        if logits_dtype not in LOGITS_DTYPES:
            raise ArgumentError("logits_dtype", f"one of {', '.join(LOGITS_DTYPES)}", repr(logits_dtype))
        self.vocab_size, self.sampled, self.logits_dtype = vocab_size, sampled, logits_dtype
        self.runner = open_runner(device)
        self._partials = None
        if vocab_size is not None and not sampled:
            self._partials = self.runner.empty((max_requests * max_nodes, SPLITS), "int64")

    @property
    def stages(self) -> list[Stage]:
        """The kernels, as they are compiled; with ``vocab_size`` those that take logits."""
        return [stage for stage, _ in self._stages(self.max_requests, from_logits=self.vocab_size is not None)]

    @property
    def workspace_bytes(self) -> int:
        """Device bytes that the plan owns."""
        return 0 if self._partials is None else 8 * SPLITS * self.max_requests * self.max_nodes

    def bind(
        self,
        *,
        parents: Any,
        node_tokens: Any,
        num_nodes: Any,
        qo_indptr: Any,
        accept_nodes: Any,
        accept_lens: Any,
        bonus_tokens: Any,
        flags: Any,
        target_tokens: Any = None,
        logits: Any = None,
        temperatures: Any = None,
        top_ks: Any = None,
        top_ps: Any = None,
        seeds: Any = None,
        prefix_lens: Any = None,
        accept_index: Any = None,
        predict: Any = None,
    ) -> BoundStage:
        """Check the arrays of a batch once and keep their addresses.

        Shapes and dtypes are those of :func:`accept_greedy`, :func:`accept_sampled` and :class:`Accepted`, with B from
        ``parents``: num_nodes, parents, top_ks and the results are int32, node_tokens, seeds and bonus_tokens int64,
        qo_indptr, target_tokens, prefix_lens and predict int32 or int64, temperatures and top_ps float32.  All in C
        order; the rows of ``logits`` may be further apart.

        ``accept_index`` ``[B, D + 1]`` int32 (the path as rows) and ``predict`` ``[R]`` (the target's token at the rows
        of the path; others are not touched) are SGLang's, and may be left out.

        Raises ArgumentError for a wrong dtype, shape, layout or device, and for a result that is read-only or shares
        memory with another array.
        """
        host = self.runner.emulated
        infos: dict[str, ArrayInfo] = {}

        def check(name: str, value: Any, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> int:
            infos[name] = check_array(name, value, dtypes, shape, host=host)
            return infos[name].shape[0]

        batch = check("parents", parents, ("int32",), (None, self.max_nodes))
        if batch > self.max_requests:
            raise ArgumentError("parents", f"at most max_requests = {self.max_requests} rows", batch)
        check("node_tokens", node_tokens, ("int64",), (batch, self.max_nodes))
        check("num_nodes", num_nodes, ("int32",), (batch,))
        check("qo_indptr", qo_indptr, INDEX, (batch + 1,))
        per_request = {
            "temperatures": (temperatures, ("float32",)),
            "top_ks": (top_ks, ("int32",)),
            "top_ps": (top_ps, ("float32",)),
            "seeds": (seeds, ("int64",)),
            "prefix_lens": (prefix_lens, INDEX),
        }
        for name, (value, dtypes) in per_request.items():
            if self.sampled:
                check(name, value, dtypes, (batch,))
            elif value is not None:
                raise ArgumentError(name, "nothing in a plan that does not sample", "an array")
        if (logits is None) == (target_tokens is None) or (self.sampled and logits is None):
            wanted = "logits" if self.sampled else "either target_tokens or logits"
            raise ArgumentError("logits", wanted, "neither" if logits is None and target_tokens is None else "not that")
        row_stride = 0
        if logits is None:
            num_rows = check("target_tokens", target_tokens, INDEX, (None,))
        else:
            info = infos["logits"] = self._check_logits(logits)
            num_rows, row_stride = info.shape[0], info.strides[0] if info.shape[0] > 1 else info.shape[1]
        wide = (batch, self.max_depth + 1)
        check("accept_nodes", accept_nodes, ("int32",), wide)
        check("accept_lens", accept_lens, ("int32",), (batch,))
        check("bonus_tokens", bonus_tokens, ("int64",), (batch,))
        check("flags", flags, ("int32",), (batch,))
        if accept_index is not None:
            check("accept_index", accept_index, ("int32",), wide)
        if predict is not None:
            check("predict", predict, INDEX, (num_rows,))
        refuse_overlaps(infos, WRITTEN)

        buffers = {
            "num_nodes": num_nodes, "parents": parents, "node_tokens": node_tokens, "qo_indptr": qo_indptr,
            "accept_nodes": accept_nodes, "accept_lens": accept_lens, "bonus_tokens": bonus_tokens, "flags": flags,
            "accept_index": accept_index, "predict": predict, "target_tokens": target_tokens, "logits": logits,
            "partials": self._partials, **{name: value for name, (value, _) in per_request.items()},
        }  # fmt: skip
        scalars = {"num_requests": batch, "num_rows": num_rows, "row_stride": row_stride, "vocab": self.vocab_size or 0}
        calls = []
        if batch > 0:
            for stage, grid in self._stages(batch, from_logits=logits is not None):
                given = {p.name: buffers[p.name] for p in stage.parameters if p.is_array}
                calls.append(self.runner.bind(stage, grid, given, scalars))
        return BoundStage(*calls)

    def _check_logits(self, logits: Any) -> ArrayInfo:
        if self.vocab_size is None:
            raise ArgumentError("logits", "vocab_size in the plan, to bind them", "None")
        info = arrays.describe("logits", logits, host=self.runner.emulated)
        labels = LOGITS_DTYPES[self.logits_dtype]
        if info.dtype not in labels:
            raise ArgumentError("logits", f"dtype {' or '.join(labels)}", info.dtype)
        if len(info.shape) != 2 or info.shape[1] != self.vocab_size:
            raise ArgumentError("logits", f"shape [*, {self.vocab_size}]", list(info.shape))
        if info.shape[0] > self.max_requests * self.max_nodes:
            most = self.max_requests * self.max_nodes
            raise ArgumentError("logits", f"at most max_requests * max_nodes = {most} rows", info.shape[0])
        row_stride, step = info.strides
        if (info.shape[1] > 1 and step != 1) or (info.shape[0] > 1 and row_stride < info.shape[1]):
            raise ArgumentError(
                "logits", "rows that do not overlap, of neighbouring elements", f"strides {info.strides}"
            )
        return info

    def _stages(self, batch: int, *, from_logits: bool) -> list[tuple[Stage, int]]:
        """The kernels of a launch in order, and their grids."""
        bits = array("logits", "float32" if self.logits_dtype == "float32" else "uint16")
        sizes = {"max_nodes": self.max_nodes, "max_depth": self.max_depth}
        if self.sampled:
            threads = _threads_for((self.vocab_size or 0) // 4, 2 * WARP, SAMPLED_THREADS)
            stage = Stage(
                "accept_sampled",
                f"{KERNELS}.accept_sampled",
                (*TREE, *RESULT, bits, *LOGITS_LAYOUT, *SAMPLING),
                threads,
                shared_bytes=8 * BINS * threads,
                constants={**sizes, "threads": threads, "logits_dtype": self.logits_dtype},
            )
            return [(stage, batch)]
        threads = _threads_for(self.max_nodes, WARP, GREEDY_THREADS)
        constants = {**sizes, "threads": threads, "splits": SPLITS if from_logits else 0}
        source = (array("partials", "int64"),) if from_logits else index_array("target_tokens")
        walk = Stage("accept_greedy", f"{KERNELS}.accept", (*TREE, *RESULT, *source), threads, constants=constants)
        if not from_logits:
            return [(walk, batch)]
        argmax = Stage(
            "argmax", f"{KERNELS}.accept_argmax",
            (array("num_nodes", "int32"), *index_array("qo_indptr"), bits, array("partials", "int64"),
             scalar("num_requests"), scalar("num_rows"), *LOGITS_LAYOUT),
            ARGMAX_THREADS, shared_bytes=4 * (batch + 1),
            constants={"logits_dtype": self.logits_dtype, "max_nodes": self.max_nodes},
        )  # fmt: skip
        most = -(-batch * self.max_nodes * SPLITS * WARP // ARGMAX_THREADS)  # blocks with a warp for everything
        return [(argmax, min(ARGMAX_BLOCKS_PER_SM * self.runner.num_sms, most)), (walk, batch)]
