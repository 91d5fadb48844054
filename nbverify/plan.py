"""VerifyPlan compiles and allocates, BoundVerify launches: three moments, three duties.

    VerifyPlan(spec)   compiles (or takes from the cache), loads, sizes the grid, allocates the workspace: once
    plan.bind(...)     checks every argument, packs the parameters: once per set of buffers
    bound.launch(s)    one driver call

A plan is one launch in flight: its workspace is shared by all its binds.  Two streams, two plans.  Arrays that were
bound must stay alive while launches of theirs, graph replays included, can run: freeing them is the caller's error.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from nbverify import arrays, compile, contract, launch
from nbverify.arrays import ArrayInfo
from nbverify.check_names import CHECKS
from nbverify.compile import CompiledKernel, Target
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError, DeviceInputError, DriverError
from nbverify.kernels import geometry as geo
from nbverify.kernels.geometry import SimtGeometry
from nbverify.spec import Mask, VerifySpec

BUFFER = {b.name: b for b in contract.BUFFERS}
WRITTEN = ("out", "lse")
CHECK_THREADS = 256
NO_FINDING = np.tile(np.array([0, np.iinfo(np.int64).max, 0], np.int64), (len(CHECKS), 1))
EMULATOR_SHARED_LIMIT = 232_448  # of sm_90; ``shared_limit`` plays a smaller device
ITEMSIZE = {"uint8": 1, "uint16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8}


@dataclass(frozen=True)
class PlanReport:
    """What a plan uses: ``print(plan.report())``."""

    device: str
    target: str
    geometry: SimtGeometry
    kernels: tuple[CompiledKernel, ...]
    grid: int
    blocks_per_sm: int
    shared_bytes: int
    max_splits: int
    workspace_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.device} ({self.target}): grid {self.grid} blocks ({self.blocks_per_sm} per SM) "
            f"of {self.geometry.threads} threads, tile {self.geometry.rows_per_tile} rows x {self.geometry.keys_per_tile} keys",
            f"shared memory {self.shared_bytes:,} bytes a block, workspace {self.workspace_bytes:,} bytes, "
            f"at most {self.max_splits} splits of a row unit",
        ]
        for k in self.kernels:
            r = k.resources
            lines.append(f"{k.name}: {r.registers} registers, {r.stack_bytes} B stack, {r.local_bytes} B local")
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
        self.geometry = geo.simt_geometry(spec)
        backend: _GpuBackend | _EmulatorBackend
        if device == "emulator":
            backend = _EmulatorBackend(Emulator(), spec, self.geometry, debug)
        elif isinstance(device, Emulator):
            backend = _EmulatorBackend(device, spec, self.geometry, debug)
        elif isinstance(device, str):
            raise ArgumentError("device", 'None, an ordinal, "emulator" or an Emulator', repr(device))
        else:
            backend = _GpuBackend(device, spec, self.geometry, debug)
        self._backend = backend
        limit = backend.shared_limit if shared_limit is None else min(shared_limit, backend.shared_limit)
        geo.check_shared_memory(spec, self.geometry, limit)
        backend.load()
        if max_blocks is not None and max_blocks > backend.max_blocks:
            raise ArgumentError("max_blocks", f"<= {backend.max_blocks}, the blocks that can be co-resident", max_blocks)
        #: Blocks of every launch of this plan.
        self.grid = backend.max_blocks if max_blocks is None else max_blocks
        #: Bytes of device memory that the plan allocates.
        self.workspace_bytes = geo.workspace_bytes(spec, self.geometry, self.grid)
        backend.allocate(self.grid)

    @property
    def emulated(self) -> bool:
        """Whether this plan runs on the CPU, on numpy arrays."""
        return isinstance(self._backend, _EmulatorBackend)

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
        spec = self.spec
        infos: dict[str, ArrayInfo] = {}
        dims = contract.dims_of(spec)
        for name in contract.CALLER_BUFFERS:
            array, needed = given[name], contract.is_needed(BUFFER[name], spec)
            if array is None:
                if needed:
                    raise ArgumentError(name, "an array", None)
                continue
            if needed is False:
                why = "shared K/V (MLA)" if name == "v_cache" else f"mask={spec.mask.value!r}"
                raise ArgumentError(name, f"None with {why}", type(array).__name__)
            info = arrays.describe(name, array, host=self.emulated)
            arrays.check(BUFFER[name], info, spec, dims)
            self._backend.check_device(name, info)
            infos[name] = info
        if dims["num_requests"] > spec.max_requests:
            raise ArgumentError(
                "kv_indptr", f"at most max_requests={spec.max_requests} requests", f"{dims['num_requests']}"
            )
        if dims["num_slots"] < 1:
            raise ArgumentError("k_cache", "at least one slot", "0")
        _check_overlaps(infos, infos)
        k_scale, v_scale = _check_scales(spec, k_scale, v_scale)
        scalars = {
            "num_tokens": dims["num_tokens"],
            "num_requests": dims["num_requests"],
            "num_slots": dims["num_slots"],
            "max_nodes": spec.max_nodes,
            "max_kv_len": spec.max_kv_len,
            "max_splits": geo.max_splits(spec, self.geometry),
            "score_scale": spec.sm_scale * k_scale,
            "v_scale": v_scale,
        }
        if abs(scalars["score_scale"]) > np.finfo(np.float32).max:
            raise ArgumentError("k_scale", "sm_scale * k_scale within float32", k_scale)
        values = {name: a for name, a in given.items() if a is not None}
        return BoundVerify(self, infos, self._backend.bind(infos, values, scalars))

    def check(self) -> None:
        """Wait for the device and report what the launches of this ``debug=True`` plan found since the last call.

        Raises DeviceInputError that names buffer, position and value of each kind of finding; returns None if clean.
        """
        if not self.debug:
            raise ArgumentError("debug", "True: only such a plan checks its inputs", False)
        findings = self._backend.take_findings()
        limits = {"max_nodes": self.spec.max_nodes, "max_kv_len": self.spec.max_kv_len, **self._backend.last_extents}
        lines = []
        for check, (count, position, value) in enumerate(findings.tolist()):
            if count:
                buffer, expected, what = CHECKS[check]
                more = f" ({count - 1} more)" if count > 1 else ""
                lines.append(f"{buffer}[{position}]: expected {expected.format(**limits)}, got {what} {value}{more}")
        if lines:
            raise DeviceInputError("\n".join(lines))

    def report(self) -> PlanReport:
        """Registers, shared memory, spills, grid and splits of this plan."""
        return PlanReport(
            device=self._backend.name,
            target=self._backend.target,
            geometry=self.geometry,
            kernels=self._backend.compiled,
            grid=self.grid,
            blocks_per_sm=self._backend.blocks_per_sm,
            shared_bytes=self.geometry.shared_bytes(self.spec.max_requests),
            max_splits=geo.max_splits(self.spec, self.geometry) if self.spec.split == "fixed" else self.grid,
            workspace_bytes=self.workspace_bytes,
        )


class BoundVerify:
    """A plan with its buffers.  Made by :meth:`VerifyPlan.bind`."""

    def __init__(self, plan: VerifyPlan, infos: dict[str, ArrayInfo], call: Any):
        self.plan = plan
        self._infos, self._call = infos, call

    def launch(self, stream: Any = None) -> None:
        """Verify, on a stream: no allocation, copy, synchronisation, or look at device data.

        ``stream`` is an int handle, or an object with ``__cuda_stream__``, ``.cuda_stream``, ``.ptr`` or ``.handle``;
        None is the legacy default stream.  It may be capturing.  The plan's device must be the current one.
        """
        self._call(stream if type(stream) is int else arrays.stream_handle(stream))

    def rebind(
        self, *, q: Any = None, k_cache: Any = None, v_cache: Any = None, out: Any = None, lse: Any = None
    ) -> None:
        """Other addresses for some buffers, with the shapes, strides and dtypes they were bound with.

        For eager mode, and for the layers of a model.  Launches already made or captured keep the old addresses.
        Raises ArgumentError, and changes nothing, if an array differs in more than its address.
        """
        changed: dict[str, ArrayInfo] = {}
        values: dict[str, Any] = {}
        for name, array in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), ("lse", lse)):
            if array is None:
                continue
            bound = self._infos.get(name)
            if bound is None:
                raise ArgumentError(name, "None: it was not bound", type(array).__name__)
            info = arrays.describe(name, array, host=self.plan.emulated)
            if info[1:5] != bound[1:5] or (name in WRITTEN and info.readonly):
                raise ArgumentError(name, f"as bound, {_text(bound)}", _text(info))
            if info.pointer % contract.alignment_bytes(BUFFER[name], self.plan.spec):
                raise ArgumentError(
                    name, f"an address of {contract.alignment_bytes(BUFFER[name], self.plan.spec)}-byte alignment",
                    hex(info.pointer),
                )  # fmt: skip
            changed[name] = info
            values[name] = array
        infos = {**self._infos, **changed}
        _check_overlaps(infos, changed)
        self._infos = infos
        for name, info in changed.items():
            self._call.set_array(name, info, values[name])


def _text(info: ArrayInfo) -> str:
    return f"{info.dtype} {list(info.shape)} with strides {list(info.strides)} on device {info.device}"


def _check_overlaps(infos: dict[str, ArrayInfo], changed: dict[str, ArrayInfo]) -> None:
    """What is written overlaps nothing that is read or written beside it.  Pairs without a ``changed`` one are skipped."""
    for written in WRITTEN:
        if written not in infos:
            continue
        for name, info in infos.items():
            if name == written or (name not in changed and written not in changed):
                continue
            if arrays.overlaps(infos[written], info):
                raise ArgumentError(written, f"memory that {name} does not use", f"overlapping {name}")


def _check_scales(spec: VerifySpec, k_scale: float, v_scale: float | None) -> tuple[float, float]:
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is None and name == "v_scale":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ArgumentError(name, "a number on the host", type(value).__name__)
        if not (0 < value <= np.finfo(np.float32).max):
            raise ArgumentError(name, "a finite number > 0", value)
    if v_scale is None:
        v_scale = k_scale if spec.shared_kv else 1.0
    if spec.shared_kv and v_scale != k_scale:
        raise ArgumentError("v_scale", f"None or k_scale={k_scale}: with shared K/V it is the same row", v_scale)
    return float(k_scale), float(v_scale)


def _extent(name: str, info: ArrayInfo, storage: str) -> int:
    """Elements of the flat array that the kernel sees, of its storage type."""
    itemsize = arrays.ITEMSIZE[info.dtype]
    return arrays.storage_extent(info) * itemsize // ITEMSIZE[storage]


class _Extents:
    """Limits that the text of a finding mentions, kept from the last bind."""

    last_extents: dict[str, int]

    def note_extents(self, infos: dict[str, ArrayInfo], scalars: dict[str, float]) -> None:
        self.last_extents = {
            "num_tokens": int(scalars["num_tokens"]),
            "num_slots": int(scalars["num_slots"]),
            "kv_indices": infos["kv_indices"].shape[0],
            "custom_mask": infos["custom_mask"].shape[0] if "custom_mask" in infos else 0,
        }


class _GpuBackend(_Extents):
    """Compile, load, allocate and launch on a GPU."""

    def __init__(self, ordinal: Any, spec: VerifySpec, geometry: SimtGeometry, debug: bool):
        self.device = launch.Device(ordinal)
        self._spec, self._geometry, self._debug = spec, geometry, debug
        self.shared_limit = self.device.shared_limit
        self.name = self.device.name
        self.last_extents = {}
        if spec.reduction == "grid_sync" and not self.device.cooperative:
            raise DriverError(f"{self.name} does not support cooperative launches; {launch.TWO_LAUNCH_HINT}")

    def load(self) -> None:
        """Compile or take from the cache, and load."""
        target = compile.target_of(self.device.cc if not _override_is_set() else None)
        self.target = target.name
        self.compiled = _compile_with_status(self._spec, target, self._debug)
        self._kernels = []
        verify = [k for k in self.compiled if k.name != "nbverify_check"]
        for compiled in self.compiled:
            if compiled.name == "nbverify_check":
                threads, shared = CHECK_THREADS, 0
            else:
                threads = self._geometry.threads
                merge_only = compiled is verify[-1] and len(verify) > 1
                shared = (
                    self._geometry.merge_shared_bytes(self._spec.max_requests)
                    if merge_only
                    else self._geometry.shared_bytes(self._spec.max_requests)
                )
            self._kernels.append(
                launch.LoadedKernel(self.device, compiled, threads=threads, shared_bytes=shared)
            )
        split = self._kernels[len(self.compiled) - len(verify)]
        self.blocks_per_sm = split.blocks_per_sm()
        self.max_blocks = self.blocks_per_sm * self.device.num_sms
        if self.max_blocks < 1:
            raise DriverError(
                f"{split.compiled.name}: no block of {split.threads} threads with {split.shared_bytes} bytes of "
                f"shared memory fits an SM of {self.name}"
            )

    def allocate(self, grid: int) -> None:
        """The workspace, filled with NaN: no result may depend on what stands in it."""
        spec, geometry = self._spec, self._geometry
        self._grids = [1 if k.compiled.name == "nbverify_check" else grid for k in self._kernels]
        rows = geo.num_partials(spec, geometry, grid) * geometry.rows_per_tile
        self._partial_o = launch.DeviceBuffer(self.device, 4 * rows * spec.head_dim_v, fill=0xFF)
        self._partial_ml = launch.DeviceBuffer(self.device, 4 * rows * 2, fill=0xFF)
        self._rows = rows
        self._findings = launch.DeviceBuffer(self.device, NO_FINDING.nbytes) if self._debug else None
        if self._findings:
            self._findings.write(NO_FINDING.tobytes())

    def check_device(self, name: str, info: ArrayInfo) -> None:
        """Refuse an array of another GPU."""
        if info.device is not None and info.device != self.device.ordinal:
            raise ArgumentError(name, f"an array on device {self.device.ordinal}, the plan's", f"device {info.device}")

    def bind(self, infos: dict[str, ArrayInfo], values: dict[str, Any], scalars: dict[str, float]) -> _GpuCall:
        """Pack a parameter block."""
        self.note_extents(infos, scalars)
        parameters = contract.parameters(self._spec)
        block = launch.ParameterBlock(parameters)
        for buffer in contract.BUFFERS:
            storage = contract.storage_dtype(buffer, self._spec)
            info = infos.get(buffer.name)
            if info is None:
                block.set_array(buffer.name, 0, 0, ITEMSIZE[storage])
            else:
                extent = _extent(buffer.name, info, storage)
                block.set_array(buffer.name, info.pointer, extent, ITEMSIZE[storage])
            for field, value in _strides(buffer, info).items():
                block.set_scalar(field, "int64", value)
        width = self._spec.head_dim_v
        block.set_array("partial_o", self._partial_o.pointer, self._rows * width, 4)
        block.set_array("partial_ml", self._partial_ml.pointer, self._rows * 2, 4)
        if self._findings:
            block.set_array("findings", self._findings.pointer, NO_FINDING.size, 8)
        for scalar in contract.SCALARS:
            block.set_scalar(scalar.name, scalar.dtype, scalars[scalar.name])
        return _GpuCall(launch.Launcher(self._kernels, self._grids, block), block)

    def take_findings(self) -> np.ndarray:
        """Findings so far, [checks, 3]; clears them."""
        assert self._findings is not None
        found = np.frombuffer(self._findings.read(), np.int64).reshape(NO_FINDING.shape)
        self._findings.write(NO_FINDING.tobytes())
        return found


class _GpuCall:
    """A parameter block and its launch."""

    def __init__(self, launcher: launch.Launcher, block: launch.ParameterBlock):
        self._launcher, self._block = launcher, block

    def __call__(self, stream: int) -> None:
        self._launcher(stream)

    def set_array(self, name: str, info: ArrayInfo, value: Any) -> None:
        self._block.set_pointer(name, info.pointer)


class _EmulatorBackend(_Extents):
    """The same moments on the CPU."""

    blocks_per_sm = 1
    target = "emulator"
    compiled: tuple[CompiledKernel, ...] = ()

    def __init__(self, emulator: Emulator, spec: VerifySpec, geometry: SimtGeometry, debug: bool):
        self._emulator, self._spec, self._geometry, self._debug = emulator, spec, geometry, debug
        self.shared_limit = EMULATOR_SHARED_LIMIT
        self.max_blocks = emulator.blocks
        self.name = f"emulator of {emulator.blocks} blocks, seed {emulator.seed}"
        self.last_extents = {}

    def load(self) -> None:
        """The bodies themselves."""
        from nbverify.kernels import check, simt

        spec, geometry = self._spec, self._geometry
        bodies = simt.make_bodies(spec, geometry)
        shared = [geometry.shared_bytes(spec.max_requests)]
        if len(bodies) > 1:
            shared.append(geometry.merge_shared_bytes(spec.max_requests))
        self._steps: list[tuple[Callable, int | None, int, int]] = [
            (body, None, geometry.threads, size) for body, size in zip(bodies, shared, strict=True)
        ]
        if self._debug:
            self._steps.insert(0, (check.make_bodies(spec)[0], 1, CHECK_THREADS, 0))

    def allocate(self, grid: int) -> None:
        """The workspace, filled with NaN."""
        spec, geometry = self._spec, self._geometry
        rows = geo.num_partials(spec, geometry, grid) * geometry.rows_per_tile
        self._grid = grid
        self._partial_o = np.full(rows * spec.head_dim_v, np.nan, np.float32)
        self._partial_ml = np.full(rows * 2, np.nan, np.float32)
        self._findings = NO_FINDING.copy() if self._debug else np.empty((0, 3), np.int64)

    def check_device(self, name: str, info: ArrayInfo) -> None:
        """Host memory has no device."""

    def bind(self, infos: dict[str, ArrayInfo], values: dict[str, Any], scalars: dict[str, float]) -> _EmulatorCall:
        """The fields of ``args``, by name."""
        self.note_extents(infos, scalars)
        fields: dict[str, Any] = {}
        for buffer in contract.BUFFERS:
            storage = contract.storage_dtype(buffer, self._spec)
            info = infos.get(buffer.name)
            if info is None:
                fields[buffer.name] = np.empty(0, storage)
            else:
                fields[buffer.name] = _flat(values[buffer.name], _extent(buffer.name, info, storage), storage)
            fields.update(_strides(buffer, info))
        fields["partial_o"], fields["partial_ml"] = self._partial_o, self._partial_ml
        fields["findings"] = self._findings.reshape(-1)
        for scalar in contract.SCALARS:
            value = scalars[scalar.name]
            fields[scalar.name] = np.float32(value) if scalar.dtype == "float32" else int(value)
        return _EmulatorCall(self._emulator, self._steps, self._grid, fields, self._spec)

    def take_findings(self) -> np.ndarray:
        """Findings so far; clears them."""
        found = self._findings.copy()
        self._findings[:] = NO_FINDING
        return found


class _EmulatorCall:
    """``args`` and the bodies that take them."""

    def __init__(self, emulator: Emulator, steps: list, grid: int, fields: dict[str, Any], spec: VerifySpec):
        self._emulator, self._steps, self._grid, self._fields, self._spec = emulator, steps, grid, fields, spec

    def __call__(self, stream: int) -> None:
        args = contract.args_class()(**self._fields)
        for body, grid, threads, shared in self._steps:
            self._emulator.launch(
                body,
                args,
                grid=self._grid if grid is None else grid,
                block=threads,
                shared_bytes=shared,
                name=body.__name__,
            )

    def set_array(self, name: str, info: ArrayInfo, value: Any) -> None:
        storage = contract.storage_dtype(BUFFER[name], self._spec)
        self._fields[name] = _flat(value, _extent(name, info, storage), storage)


def _strides(buffer: contract.Buffer, info: ArrayInfo | None) -> dict[str, int]:
    """Values of a buffer's runtime stride (or width) fields."""
    if buffer.kind == "index":
        return {f"{buffer.name}_words": 2 if info is not None and info.dtype == "int64" else 1}
    strides = info.strides if info is not None else (0,) * len(buffer.free_strides)
    return {f"{buffer.name}_stride_{axis}": s for axis, s in zip(buffer.free_strides, strides, strict=False)}


def _flat(array: np.ndarray, extent: int, storage: str) -> np.ndarray:
    """The storage of a host array as a flat array of its raw bits, sharing memory."""
    if extent == 0:
        return np.empty(0, storage)
    flat = np.lib.stride_tricks.as_strided(
        array.reshape(-1)[:1].view(np.uint8) if array.ndim == 0 else array[(0,) * (array.ndim - 1)][:1].view(np.uint8),
        shape=(extent * ITEMSIZE[storage],),
        strides=(1,),
        writeable=array.flags.writeable,
    )
    return flat.view(storage)


def _override_is_set() -> bool:
    import os

    return bool(os.environ.get(compile.OVERRIDE))


def _compile_with_status(spec: VerifySpec, target: Target, debug: bool) -> tuple[CompiledKernel, ...]:
    """Compile, with a line on a terminal while it lasts."""
    import sys

    if not sys.stderr.isatty():
        return compile.compile_spec(spec, target, debug=debug)
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        return compile.compile_spec(spec, target, debug=debug, progress=lambda text: status.update(f"nbverify: {text}"))


@lru_cache(maxsize=8)
def _plan_for(spec: VerifySpec, device: Any) -> VerifyPlan:
    return VerifyPlan(spec, device=device)


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
) -> None:
    """The one-call form, for notebooks: plan (kept for the next call), bind, check the mask's size, launch.

    It reads the prefix sums back, which waits for the device, to refuse a ``custom_mask`` that is not exactly as
    large as its layout says: a FULL mask declared TREE, or the other way round, is caught here.  Static buffers that
    are larger than their batch need :meth:`VerifyPlan.bind`, which cannot know.
    """
    plan = _plan_for(spec, device)
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
    bound.launch(stream)


def _check_mask_size(plan: VerifyPlan, infos: dict[str, ArrayInfo]) -> None:
    read = _read_host_index if plan.emulated else plan._backend.device.read_index  # type: ignore[union-attr]
    prefix = np.diff(read(infos["kv_indptr"]))
    nodes = np.diff(read(infos["qo_indptr"]))
    rows = {
        Mask.FULL: prefix.clip(0) + nodes,
        Mask.TREE: nodes,
        Mask.PACKED: -(-nodes // 32),
    }[plan.spec.mask]
    ends = read(infos["mask_indptr"])[:-1] + nodes.clip(0) * rows
    need = int(ends.max()) if ends.size else 0
    have = infos["custom_mask"].shape[0]
    if have != need:
        raise ArgumentError("custom_mask", f"{need} elements in layout {plan.spec.mask.value!r} for these lengths", have)


def _read_host_index(info: ArrayInfo) -> np.ndarray:
    ctype = ctypes.c_int64 if info.dtype == "int64" else ctypes.c_int32
    return np.array((ctype * info.shape[0]).from_address(info.pointer), np.int64)


assert math.prod(NO_FINDING.shape) == 3 * len(CHECKS)
