"""VerifyPlan compiles and allocates, BoundVerify launches: three moments, three duties.

    VerifyPlan(spec)   compiles (or takes from the cache), loads, sizes the grid, allocates the workspace: once
    plan.bind(...)     checks every argument, packs the parameters: once per set of buffers
    bound.launch(s)    one driver call

A plan is one launch in flight: its workspace is shared by all its binds.  Two streams, two plans.  What a launch uses
must stay alive while it, or a replay of a graph that captured it, can run: the bound arrays, and the BoundVerify or its
plan, which owns workspace and code.  Freeing them earlier is the caller's error.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbverify import arrays, contract
from nbverify.arrays import ArrayInfo
from nbverify.backends import BoundCall, EmulatorBackend, GpuBackend
from nbverify.compile import CompiledKernel
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError, DeviceInputError
from nbverify.findings import describe_findings
from nbverify.kernels import geometry as geo
from nbverify.kernels.geometry import Geometry
from nbverify.kernels.planner import geometry_of
from nbverify.spec import FLOAT32_MAX, FLOAT32_TINY, Mask, VerifySpec

MAX_SLOTS = 2**32  # kernels read the low 32 bits of a slot number
WRITTEN = ("out", "lse")
SCHEDULED = ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc", "mask_indptr")  # what a schedule is made from
REBINDABLE = ("q", "k_cache", "v_cache", "out", "lse")


@dataclass(frozen=True)
class PlanReport:
    """What a plan uses: ``print(plan.report())``."""

    device: str
    target: str
    geometry: Geometry
    kernels: tuple[CompiledKernel, ...]
    grid: int
    blocks_per_sm: int
    shared_bytes: int
    max_splits: int
    workspace_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.device} ({self.target}): grid {self.grid} blocks ({self.blocks_per_sm} per SM) "
            f"of {self.geometry.threads} threads, "
            f"tile {self.geometry.rows_per_tile} rows x {self.geometry.keys_per_tile} keys",
            f"shared memory {self.shared_bytes:,} bytes a block, workspace {self.workspace_bytes:,} bytes, "
            f"at most {self.max_splits} splits of a row unit",
        ]
        for k in self.kernels:
            r = k.resources
            lines.append(f"{k.name}: {r.registers} registers, {r.spill_bytes} B spilled, {r.local_bytes} B local")
        return "\n".join(lines)


class VerifyPlan:
    """A compiled verify kernel with its workspace, for every batch that a spec allows.

    Parameters
    ----------
    spec
        The problem.
    device
        None: the current GPU.  An ordinal.  "emulator" or ``Emulator(blocks, seed)``: the same kernel bodies on the
        CPU, on numpy arrays.
    debug
        Check every index, prefix sum and mask bound on the device before each launch; :meth:`check` reports.
    max_blocks, shared_limit
        Caps on the grid, and on the bytes of shared memory a block may use (to play a smaller device).

    Raises
    ------
    ArgumentError
        A wrong argument, a spec that does not fit the device, ``max_blocks`` beyond what can be co-resident.
    CompileError, DriverError
        From the toolkit and the driver.
    """

    def __init__(
        self,
        spec: VerifySpec,
        *,
        device: int | str | Emulator | None = None,
        debug: bool = False,
        max_blocks: int | None = None,
        shared_limit: int | None = None,
    ):
        if not isinstance(spec, VerifySpec):
            raise ArgumentError("spec", "a VerifySpec", type(spec).__name__)
        if not isinstance(debug, bool):
            raise ArgumentError("debug", "a bool", repr(debug))
        for name, value in (("max_blocks", max_blocks), ("shared_limit", shared_limit)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(name, "None or an int >= 1", repr(value))
        self.spec, self.debug = spec, debug
        backend: GpuBackend | EmulatorBackend
        if isinstance(device, str) and device == "emulator":
            backend = EmulatorBackend(Emulator(), spec, debug)
        elif isinstance(device, Emulator):
            backend = EmulatorBackend(device, spec, debug)
        elif device is not None and (type(device) is not int or device < 0):
            raise ArgumentError("device", 'None, an ordinal, "emulator" or an Emulator', repr(device))
        else:
            backend = GpuBackend(device, spec, debug)
        self._backend = backend
        limits = backend.limits
        if shared_limit is not None:
            limits = replace(limits, shared_bytes=min(shared_limit, limits.shared_bytes))
        self.geometry = geometry_of(spec, limits)
        geo.check_shared_memory(spec, self.geometry, limits.shared_bytes)
        geo.check_items(spec, self.geometry)
        backend.load(self.geometry)
        if max_blocks is not None and max_blocks > backend.max_blocks:
            raise ArgumentError(
                "max_blocks", f"<= {backend.max_blocks}, the blocks that can be co-resident", max_blocks
            )
        #: Blocks of every launch of this plan.
        self.grid = backend.max_blocks if max_blocks is None else max_blocks
        #: Bytes of the partial states that the plan allocates (debug=True adds some 200 bytes).
        self.workspace_bytes = geo.workspace_bytes(spec, self.geometry, self.grid, limits.max_chunks)
        backend.allocate(self.grid)
        self._scheduled: tuple | None = None  # the lengths of the last schedule of a step
        self._rules = {name: arrays.Rule(contract.BUFFER[name], spec) for name in contract.CALLER_BUFFERS}
        self._needed = {name: contract.is_needed(contract.BUFFER[name], spec) for name in contract.CALLER_BUFFERS}

    @property
    def emulated(self) -> bool:
        """Whether this plan runs on the CPU, on numpy arrays."""
        return isinstance(self._backend, EmulatorBackend)

    def bind(
        self,
        *,
        q: Any,
        k_cache: Any,
        v_cache: Any = None,
        kv_indptr: Any,
        kv_indices: Any,
        qo_indptr: Any,
        out_cache_loc: Any,
        custom_mask: Any = None,
        mask_indptr: Any = None,
        out: Any,
        lse: Any = None,
        k_scale: float = 1.0,
        v_scale: float | None = None,
    ) -> BoundVerify:
        """Check every buffer against the contract, note its address, and pack the parameters.

        Shapes, dtypes and meanings: docs/contract.md.  Static buffers may be larger than the batch in them; their
        contents are read at launch, or at replay.  ``k_scale`` and ``v_scale`` are what stored K and V are multiplied
        with; ``v_scale=None`` means ``k_scale`` for MLA, whose V is part of K, and 1 otherwise.

        Raises ArgumentError, and changes nothing, if an argument is wrong.
        """
        given = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "qo_indptr": qo_indptr,
            "out_cache_loc": out_cache_loc,
            "custom_mask": custom_mask,
            "mask_indptr": mask_indptr,
            "out": out,
            "lse": lse,
        }
        spec, host = self.spec, self.emulated
        infos: dict[str, ArrayInfo] = {}
        dims = contract.dims_of(spec)
        for name in contract.CALLER_BUFFERS:
            array, needed = given[name], self._needed[name]
            if array is None:
                if needed:
                    raise ArgumentError(name, "an array", None)
                continue
            if needed is False:
                why = "shared K/V (MLA)" if name == "v_cache" else f"mask={spec.mask.value!r}"
                raise ArgumentError(name, f"None with {why}", type(array).__name__)
            info = arrays.describe(name, array, host=host)
            self._rules[name].check(info, dims)
            self._backend.check_device(name, info)
            infos[name] = info
        if dims["num_requests"] > spec.max_requests:
            raise ArgumentError(
                "kv_indptr", f"at most max_requests={spec.max_requests} requests", f"{dims['num_requests']}"
            )
        if dims["num_slots"] < 1:
            raise ArgumentError("k_cache", "at least one slot", "0")
        if dims["num_slots"] >= MAX_SLOTS:
            raise ArgumentError("k_cache", f"fewer than {MAX_SLOTS} slots", f"{dims['num_slots']}")
        ranges = {name: arrays.byte_range(info) for name, info in infos.items()}
        _check_overlaps(infos, ranges, infos)
        scalars = {
            "num_tokens": dims["num_tokens"],
            "num_requests": dims["num_requests"],
            "num_slots": dims["num_slots"],
            "max_nodes": spec.max_nodes,
            "max_kv_len": spec.max_kv_len,
            "max_chunks": self._backend.limits.max_chunks,
            **_factors(spec, k_scale, v_scale),
        }
        values = {name: a for name, a in given.items() if a is not None}
        return BoundVerify(self, infos, ranges, given, *self._backend.bind(infos, values, scalars))

    def check(self) -> None:
        """Wait for the device and report what the launches of this ``debug=True`` plan found since the last call.

        Raises DeviceInputError that names buffer, position and value of each kind of finding; returns None if clean.
        """
        if not self.debug:
            raise ArgumentError("debug", "True: only such a plan checks its inputs", False)
        limits = {"max_nodes": self.spec.max_nodes, "max_kv_len": self.spec.max_kv_len}
        lines = describe_findings(self._backend.take_findings(), limits)
        if lines:
            raise DeviceInputError("\n".join(lines))

    def report(self) -> PlanReport:
        """Registers, shared memory, spills, grid and splits of this plan."""
        splits = self.grid
        if self.spec.split == "fixed":
            splits = geo.max_splits(self.spec, self.geometry, self._backend.limits.max_chunks)
        return PlanReport(
            device=self._backend.name,
            target=self._backend.target,
            geometry=self.geometry,
            kernels=self._backend.compiled,
            grid=self.grid,
            blocks_per_sm=self._backend.blocks_per_sm,
            shared_bytes=self.geometry.shared_bytes(self.spec.max_requests),
            max_splits=splits,
            workspace_bytes=self.workspace_bytes,
        )


class BoundVerify:
    """A plan with its buffers.  Made by :meth:`VerifyPlan.bind`."""

    def __init__(
        self,
        plan: VerifyPlan,
        infos: dict[str, ArrayInfo],
        ranges: dict[str, tuple[int, int]],
        given: dict[str, Any],
        call: BoundCall,
        schedule: Callable[[int], None] | None,
    ):
        self.plan = plan
        self._schedule = schedule
        self._lengths = tuple(infos.get(name) for name in SCHEDULED)
        self._infos, self._ranges, self._call = infos, ranges, call
        self._layouts: dict[str, tuple | None] = {}
        for name in () if plan.emulated else REBINDABLE:
            found = arrays.address_and_layout(given[name])
            self._layouts[name] = found and found[1]

    def launch(self, stream: Any = None) -> None:
        """Verify, on a stream: no allocation, copy, synchronisation, or look at device data.

        ``stream`` is an int handle, or an object with ``__cuda_stream__``, ``.cuda_stream``, ``.ptr`` or ``.handle``;
        None is the legacy default stream.  It may be capturing.  The plan's device must be the current one.

        With ``schedule="step"``, raises ArgumentError if the plan's last :meth:`schedule` was of other buffers.
        """
        if self._schedule and self.plan._scheduled != self._lengths:
            raise ArgumentError(*self._other_schedule())
        self._call(arrays.stream_handle(stream))

    def schedule(self, stream: Any = None) -> None:
        """Work out who does what, for every launch that follows, of any bind of the plan with the same lengths.

        For ``schedule="step"``: once a step, on the stream of the launches and before them, in the same graph if there
        is one.  It reads kv_indptr, qo_indptr and mask_indptr; when these change, or the graph of another step has run,
        call it again.  A launch goes by the last one: ``debug=True`` finds lengths that have changed since.
        """
        if self._schedule is None:
            raise ArgumentError("schedule", "'step' in the plan's spec", repr(self.plan.spec.schedule))
        self._schedule(arrays.stream_handle(stream))
        self.plan._scheduled = self._lengths

    def _other_schedule(self) -> tuple[str, str, str]:
        """What to say of a launch without its schedule."""
        made = self.plan._scheduled
        if made is None:
            return "schedule", "bound.schedule() before the first launch", "none yet"
        name, old, new = next(x for x in zip(SCHEDULED, made, self._lengths, strict=True) if x[1] != x[2])
        return "schedule", f"one made with this {name}, {_where(new)}", _where(old)

    def rebind(
        self,
        *,
        q: Any = None,
        k_cache: Any = None,
        v_cache: Any = None,
        out: Any = None,
        lse: Any = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Other addresses for some buffers, with the shapes, strides and dtypes they were bound with; other scales.

        For eager mode, and for the layers of a model.  Launches already made or captured keep the old ones.  Scales
        stay as they are with ``k_scale=None``; with a number for it, ``v_scale`` means what it does in ``bind``.
        Raises ArgumentError, and changes nothing, if an array differs in more than its address.
        """
        ranges, changed = self._ranges.copy(), {}
        for name, array in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), ("lse", lse)):
            if array is not None:
                address = self._address(name, array)
                start, end = ranges[name]
                ranges[name] = (address, address + end - start)
                changed[name] = array
        _check_overlaps(self._infos, ranges, changed)
        if k_scale is not None:
            self._call.rescale(_factors(self.plan.spec, k_scale, v_scale))
        elif v_scale is not None:
            raise ArgumentError("v_scale", "None without a k_scale", v_scale)
        self._ranges = ranges
        for name, array in changed.items():
            self._call.move(name, ranges[name][0], array)

    def _address(self, name: str, array: Any) -> int:
        """Address of an array that differs from the bound one in nothing else."""
        bound = self._infos.get(name)
        if bound is None:
            raise ArgumentError(name, "None: it was not bound", type(array).__name__)
        layout = self._layouts.get(name)
        found = layout and arrays.address_and_layout(array)
        if found and found[1] == layout:
            address = found[0]
        else:
            info = arrays.describe(name, array, host=self.plan.emulated)
            if info[1:5] != bound[1:5] or (info.readonly and name in WRITTEN):
                raise ArgumentError(name, f"as bound, {_text(bound)}", _text(info))
            address = info.pointer
        alignment = self.plan._rules[name].alignment
        if address % alignment:
            raise ArgumentError(name, f"an address of {alignment}-byte alignment", hex(address))
        return address


def _where(info: ArrayInfo | None) -> str:
    return "none" if info is None else f"{info.dtype} {list(info.shape)} at {info.pointer:#x}"


def _text(info: ArrayInfo) -> str:
    return f"{info.dtype} {list(info.shape)} with strides {list(info.strides)} on device {info.device}"


def _check_overlaps(infos: dict[str, ArrayInfo], ranges: dict[str, tuple[int, int]], changed: Iterable[str]) -> None:
    """What is written overlaps nothing else that is used.  Pairs without a ``changed`` array are skipped."""
    for written in WRITTEN:
        if written not in ranges:
            continue
        start, end = ranges[written]
        for name in ranges if written in changed else changed:
            other_start, other_end = ranges[name]
            if start < other_end and other_start < end and name != written:
                # A range starts at the array's address: strides are not negative.
                moved = infos[written]._replace(pointer=start), infos[name]._replace(pointer=other_start)
                if arrays.overlaps(*moved):
                    raise ArgumentError(written, f"memory that {name} does not use", f"overlapping {name}")


def _check_scales(spec: VerifySpec, k_scale: float, v_scale: float | None) -> tuple[float, float]:
    given: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    for name, value in given.items():
        if value is None and name == "v_scale":
            continue
        if type(value) is bool or not issubclass(type(value), numbers.Real):
            raise ArgumentError(name, "a number on the host", type(value).__name__)
        if not FLOAT32_TINY <= value <= FLOAT32_MAX:
            raise ArgumentError(name, "a positive normal float32", value)
    if v_scale is None:
        v_scale = k_scale if spec.shared_kv else 1.0
    if spec.shared_kv and v_scale != k_scale:
        raise ArgumentError("v_scale", f"None or k_scale={k_scale}: with shared K/V it is the same row", v_scale)
    return float(k_scale), float(v_scale)


def _factors(spec: VerifySpec, k_scale: float, v_scale: float | None) -> dict[str, float]:
    """The scalars of the contract that scales become."""
    k_scale, v_scale = _check_scales(spec, k_scale, v_scale)
    score_scale = spec.sm_scale * k_scale
    if spec.sm_scale and not FLOAT32_TINY <= abs(score_scale) <= FLOAT32_MAX:
        raise ArgumentError("k_scale", "sm_scale * k_scale to be a normal float32", k_scale)
    return {"score_scale": score_scale, "v_scale": v_scale}


def verify_attention(
    spec: VerifySpec,
    *,
    q: Any,
    k_cache: Any,
    v_cache: Any = None,
    kv_indptr: Any,
    kv_indices: Any,
    qo_indptr: Any,
    out_cache_loc: Any,
    custom_mask: Any = None,
    mask_indptr: Any = None,
    out: Any,
    lse: Any = None,
    k_scale: float = 1.0,
    v_scale: float | None = None,
    device: int | str | Emulator | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """The one-call form, for notebooks: make a plan, bind, check the mask's size, launch, wait.

    Returns ``(out, lse)``, the arrays that were given.

    It reads the prefix sums back, which waits for the device, to refuse a ``custom_mask`` that is not exactly as
    large as its layout says: a FULL mask declared TREE, or the other way round, is caught here.  Static buffers that
    are larger than their batch need :meth:`VerifyPlan.bind`, which cannot know.
    """
    plan = VerifyPlan(spec, device=device)
    bound = plan.bind(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        qo_indptr=qo_indptr,
        out_cache_loc=out_cache_loc,
        custom_mask=custom_mask,
        mask_indptr=mask_indptr,
        out=out,
        lse=lse,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if spec.mask.reads_buffer:
        _check_mask_size(plan, bound._infos)
    if spec.schedule == "step":
        bound.schedule(stream)
    bound.launch(stream)
    plan._backend.wait()  # the plan and its workspace end with this call
    return out, lse


def _check_mask_size(plan: VerifyPlan, infos: dict[str, ArrayInfo]) -> None:
    read = plan._backend.read_index
    prefix, nodes = np.diff(read(infos["kv_indptr"])), np.diff(read(infos["qo_indptr"]))
    reads_mask = (prefix >= 0) & (nodes > 0)  # the others are padding
    prefix, nodes = prefix[reads_mask], nodes[reads_mask]
    row = {Mask.FULL: prefix + nodes, Mask.TREE: nodes, Mask.PACKED: -(-nodes // 32)}[plan.spec.mask]
    need, have = int((nodes * row).sum()), infos["custom_mask"].shape[0]
    if have != need:
        raise ArgumentError(
            "custom_mask", f"{need} elements in layout {plan.spec.mask.value!r} for these lengths", have
        )
