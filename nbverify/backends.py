"""Where a plan runs: on a GPU through the driver, or in the emulator.  Two classes with the same moments.

load       the kernels of the spec, and from them the largest grid
allocate   the workspace, its partial states filled with NaN: no result may depend on what stands there
bind       the fields of ``args`` (contract.py) for one set of buffers -> something that can be called, and
           with schedule="step" the kernel that comes once a step
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from nbverify import arrays, compile, contract, launch
from nbverify.arrays import ArrayInfo
from nbverify.compile import CompiledKernel, Target
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError, DriverError
from nbverify.findings import NOTHING_FOUND
from nbverify.kernels import geometry as geo
from nbverify.kernels.geometry import Geometry
from nbverify.kernels.planner import limits_of
from nbverify.spec import VerifySpec

EMULATOR_MEMORY = 2**36  # more than any emulated problem needs
ALL_BITS = 0xFF  # NaN in every float format


class BoundCall(Protocol):
    """A launch whose parameters are packed."""

    def __call__(self, stream: int) -> None:
        """Launch."""

    def move(self, name: str, pointer: int, array: Any) -> None:
        """The same buffer at another address."""

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Other float32 scalars."""


class GpuBackend:
    """Compile, load, allocate and launch on a GPU."""

    def __init__(self, ordinal: Any, spec: VerifySpec, debug: bool):
        self.device = launch.Device(ordinal)
        self.name = self.device.name
        self._target = compile.target_of(compile.override_cc() or self.device.cc)
        self.target = self._target.name
        self.limits = limits_of((self._target.major, self._target.minor), self.device.shared_limit)
        self._spec, self._debug = spec, debug
        self._storage = {b.name: contract.storage_dtype(b, spec) for b in contract.BUFFERS}
        self._layout = launch.ParameterLayout(contract.parameters(spec))
        if spec.reduction == "grid_sync" and not self.device.cooperative:
            raise DriverError(f"{self.name} does not support cooperative launches; {launch.TWO_LAUNCH_HINT}")

    def load(self, geometry: Geometry) -> None:
        """Compile or take from the cache, load, and ask for the occupancy of the kernel that walks the keys."""
        self._geometry = geometry
        self.compiled = _compile_with_status(self._spec, self._target, geometry, self._debug)
        self._steps = geo.steps(self._spec, self._geometry, debug=self._debug)
        self._kernels = [
            launch.LoadedKernel(self.device, compiled, threads=step.threads, shared_bytes=step.shared_bytes)
            for compiled, step in zip(self.compiled, self._steps, strict=True)
        ]
        walker = self._kernels[[step.body.startswith("verify") for step in self._steps].index(True)]
        self.blocks_per_sm = walker.blocks_per_sm()
        self.max_blocks = self.blocks_per_sm * self.device.num_sms
        if self.max_blocks < 1:
            raise DriverError(
                f"{walker.compiled.name}: no block of {walker.threads} threads with {walker.shared_bytes} bytes of "
                f"shared memory fits an SM of {self.name}"
            )

    def allocate(self, grid: int) -> None:
        """Partial states, and the findings of ``debug``."""
        self._grids = [1 if step.one_block else grid for step in self._steps]
        sizes = self._spec, self._geometry, grid, self.limits.max_chunks
        check_workspace(geo.workspace_bytes(*sizes), self.device.total_memory())
        self._workspace = {
            name: launch.DeviceBuffer(
                self.device, elements * arrays.ITEMSIZE[self._storage[name]], fill=fill_of(contract.BUFFER[name])
            )
            for name, elements in geo.workspace(*sizes).items()
        }
        if self._debug:
            self._workspace["findings"] = launch.DeviceBuffer(self.device, NOTHING_FOUND.nbytes)
            self._workspace["findings"].write(NOTHING_FOUND.tobytes())
        self.wait()  # the fills are ordered before launches on any stream

    def wait(self) -> None:
        """Until the device is idle."""
        self.device.synchronize()

    def check_device(self, name: str, info: ArrayInfo) -> None:
        """Refuse an array of another GPU."""
        if info.device is not None and info.device != self.device.ordinal:
            raise ArgumentError(name, f"an array on device {self.device.ordinal}, the plan's", f"device {info.device}")

    def bind(
        self, infos: dict[str, ArrayInfo], values: dict[str, Any], scalars: dict[str, float]
    ) -> tuple[BoundCall, Callable[[int], None] | None]:
        """Pack a parameter block: the launch, and the schedule of a step if there is one."""
        block = launch.ParameterBlock(self._layout)
        for buffer in contract.BUFFERS:
            storage = self._storage[buffer.name]
            itemsize = arrays.ITEMSIZE[storage]
            info, own = infos.get(buffer.name), self._workspace.get(buffer.name)
            if info is not None:
                block.set_array(buffer.name, info.pointer, storage_extent(info, storage), itemsize)
            elif own is not None:
                block.set_array(buffer.name, own.pointer, own.num_bytes // itemsize, itemsize)
            else:
                block.set_array(buffer.name, 0, 0, itemsize)
            for field, value in layout_values(buffer, info).items():
                block.set_integer(field, value)
        for scalar in contract.SCALARS:
            if scalar.dtype == "float32":
                block.set_float(scalar.name, scalars[scalar.name])
            else:
                block.set_integer(scalar.name, int(scalars[scalar.name]))
        call = launch.Launcher(*self._kernels_of(once_a_step=False), block, self._workspace)
        if self._spec.schedule == "launch":
            return call, None
        return call, launch.Launcher(*self._kernels_of(once_a_step=True), block, self._workspace)

    def _kernels_of(self, *, once_a_step: bool) -> tuple[list[launch.LoadedKernel], list[int]]:
        """Kernels of a launch, or of a step, and their grids."""
        chosen = [i for i, step in enumerate(self._steps) if step.once_a_step == once_a_step]
        return [self._kernels[i] for i in chosen], [self._grids[i] for i in chosen]

    def read_index(self, info: ArrayInfo) -> np.ndarray:
        """An index buffer on the host, after everything queued on the device."""
        return self.device.read_index(info)

    def take_findings(self) -> np.ndarray:
        """Findings so far, int64 [checks, 3]; clears them."""
        buffer = self._workspace["findings"]
        found = np.frombuffer(buffer.read(), np.int64).reshape(NOTHING_FOUND.shape)
        buffer.write(NOTHING_FOUND.tobytes())
        return found


class EmulatorBackend:
    """The same on the CPU."""

    blocks_per_sm = 1
    target = "emulator"
    compiled: tuple[CompiledKernel, ...] = ()

    def __init__(self, emulator: Emulator, spec: VerifySpec, debug: bool):
        self._emulator, self._spec, self._debug = emulator, spec, debug
        self.limits = limits_of(emulator.cc)
        self._storage = {b.name: contract.storage_dtype(b, spec) for b in contract.BUFFERS}
        self.max_blocks = emulator.blocks
        self.name = f"emulator of {emulator.blocks} blocks, seed {emulator.seed}"

    def load(self, geometry: Geometry) -> None:
        """The bodies themselves."""
        from nbverify.kernels.bodies import make_bodies

        self._geometry = geometry
        self._bodies = make_bodies(self._spec, self._geometry, debug=self._debug)
        self._steps = geo.steps(self._spec, self._geometry, debug=self._debug)

    def allocate(self, grid: int) -> None:
        """As for a GPU."""
        self._grid = grid
        sizes = self._spec, self._geometry, grid, self.limits.max_chunks
        check_workspace(geo.workspace_bytes(*sizes), EMULATOR_MEMORY)
        self._workspace: dict[str, np.ndarray] = {}
        for name, elements in geo.workspace(*sizes).items():
            size, fill = elements * arrays.ITEMSIZE[self._storage[name]], fill_of(contract.BUFFER[name])
            self._workspace[name] = np.full(size, fill, np.uint8).view(self._storage[name])
        if self._debug:
            self._workspace["findings"] = NOTHING_FOUND.flatten()

    def wait(self) -> None:
        """A launch returns when it has run."""

    def check_device(self, name: str, info: ArrayInfo) -> None:
        """Host memory has no device."""

    def bind(
        self, infos: dict[str, ArrayInfo], values: dict[str, Any], scalars: dict[str, float]
    ) -> tuple[BoundCall, Callable[[int], None] | None]:
        """The fields of ``args``, by name."""
        fields: dict[str, Any] = {}
        for buffer in contract.BUFFERS:
            storage = self._storage[buffer.name]
            info = infos.get(buffer.name)
            if info is not None:
                fields[buffer.name] = flat_storage(values[buffer.name], info, storage)
            else:
                fields[buffer.name] = self._workspace.get(buffer.name, np.empty(0, storage))
            fields.update(layout_values(buffer, info))
        for scalar in contract.SCALARS:
            value = scalars[scalar.name]
            fields[scalar.name] = np.float32(value) if scalar.dtype == "float32" else int(value)
        call = _EmulatorCall(self, infos, fields)
        return call, (lambda stream: self.run(fields, once_a_step=True)) if self._spec.schedule == "step" else None

    def run(self, fields: dict[str, Any], *, once_a_step: bool = False) -> None:
        """The kernels of a launch, or those of a step, in order."""
        args = contract.args_class()(**fields)
        for body, step in zip(self._bodies, self._steps, strict=True):
            if step.once_a_step != once_a_step:
                continue
            self._emulator.launch(
                body,
                args,
                grid=1 if step.one_block else self._grid,
                block=step.threads,
                shared_bytes=step.shared_bytes,
                name=step.body,
            )

    def storage_of(self, name: str) -> str:
        """Storage dtype of a buffer of this spec."""
        return self._storage[name]

    def read_index(self, info: ArrayInfo) -> np.ndarray:
        """An index buffer as int64."""
        ctype = ctypes.c_int64 if info.dtype == "int64" else ctypes.c_int32
        return np.array((ctype * info.shape[0]).from_address(info.pointer), np.int64)

    def take_findings(self) -> np.ndarray:
        """Findings so far; clears them."""
        findings = self._workspace["findings"]
        found = findings.reshape(NOTHING_FOUND.shape).copy()
        findings[:] = NOTHING_FOUND.reshape(-1)
        return found


class _EmulatorCall:
    """The fields of ``args``, and the backend that runs on them."""

    def __init__(self, backend: EmulatorBackend, infos: dict[str, ArrayInfo], fields: dict[str, Any]):
        self._backend, self._infos, self._fields = backend, infos, fields

    def __call__(self, stream: int) -> None:
        self._backend.run(self._fields)

    def move(self, name: str, pointer: int, array: Any) -> None:
        self._fields[name] = flat_storage(array, self._infos[name], self._backend.storage_of(name))

    def rescale(self, factors: Mapping[str, float]) -> None:
        self._fields.update({name: np.float32(value) for name, value in factors.items()})


def fill_of(buffer: contract.Buffer) -> int:
    """The byte that a buffer of the plan is filled with: 0 where it counts, NaN where nothing may be read."""
    return ALL_BITS if buffer.kind == "scratch" else 0


def check_workspace(need: int, available: int) -> None:
    """Refuse, with both numbers, limits whose partial states no memory holds."""
    if need > available:
        raise ArgumentError(
            "spec", f"a workspace of at most {available:,} bytes, the memory there is", f"{need:,} bytes"
        )


LAYOUT_FIELDS: dict[str, tuple[str, ...]] = {b.name: contract.layout_fields(b) for b in contract.BUFFERS}


def layout_values(buffer: contract.Buffer, info: ArrayInfo | None) -> dict[str, int]:
    """Values of the fields that follow a buffer in ``args``: its free strides, or its index width in words."""
    fields = LAYOUT_FIELDS[buffer.name]
    if buffer.kind == "index":
        return {fields[0]: 2 if info is not None and info.dtype == "int64" else 1}
    if info is None:
        return dict.fromkeys(fields, 0)
    return dict(zip(fields, info.strides, strict=False))  # the last axis has none


def storage_extent(info: ArrayInfo, storage: str) -> int:
    """Elements, of the storage dtype, of the flat array that a kernel sees."""
    return arrays.storage_extent(info) * arrays.ITEMSIZE[info.dtype] // arrays.ITEMSIZE[storage]


def flat_storage(array: np.ndarray, info: ArrayInfo, storage: str) -> np.ndarray:
    """The storage of a host array as a flat array of raw bits that shares its memory."""
    extent = storage_extent(info, storage)
    if extent == 0:
        return np.empty(0, storage)
    first = array[(0,) * (array.ndim - 1)][:1].view(np.uint8)
    num_bytes = extent * arrays.ITEMSIZE[storage]
    writeable = bool(array.flags.writeable)
    return np.lib.stride_tricks.as_strided(first, (num_bytes,), (1,), writeable=writeable).view(storage)


def _compile_with_status(
    spec: VerifySpec, target: Target, geometry: Geometry, debug: bool
) -> tuple[CompiledKernel, ...]:
    """Compile, with a line on a terminal while it lasts: a cold compilation takes several seconds."""
    if not sys.stderr.isatty():
        return compile.compile_spec(spec, target, geometry, debug=debug)
    from rich.console import Console

    with Console(stderr=True).status("nbverify") as status:
        show: Callable[[str], None] = lambda text: status.update(f"nbverify: {text}")  # noqa: E731
        return compile.compile_spec(spec, target, geometry, debug=debug, progress=show)
