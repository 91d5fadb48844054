"""Kernels beside the verify kernel: a body, a table of its parameters, and where it runs.

    stage = Stage("masks", "nbverify.tree.kernels.masks", PARAMETERS, threads=128, constants={"layout": "full"})
    runner = open_runner(device)                       # a GPU, or the emulator
    call = runner.bind(stage, grid, arrays, scalars)   # compiled or from the cache, loaded, parameters packed: once
    call(stream)                                       # one driver call: no allocation, copy or synchronisation

What the verify kernel's plan does for its one contract (plan.py, backends.py), this does for any small table: same
compiler, cache, parameter block and launch, same emulator.  Bodies have the single parameter ``args``, whose fields are
the table's; arrays arrive flat.  A table entry ``x_words`` after an array ``x`` of int32 makes ``x`` an index buffer:
int32 or int64, as the caller has it (kernels/indices.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from nbverify import arrays, compile, contract, launch
from nbverify.arrays import ArrayInfo
from nbverify.contract import Parameter
from nbverify.emulator import Emulator
from nbverify.errors import ArgumentError

WORDS = "_words"
SAME_BITS = {  # what else may stand for a parameter's dtype
    "uint8": ("uint8", "bool"),
    "uint16": ("uint16", "int16", "bfloat16", "float16"),
    "uint32": ("uint32", "int32"),
}


def array(name: str, dtype: str) -> Parameter:
    """A table entry: a flat array."""
    return Parameter(name, dtype, True)


def index_array(name: str) -> tuple[Parameter, Parameter]:
    """Two table entries: an index buffer of either width, and which it is."""
    return Parameter(name, "int32", True), Parameter(name + WORDS, "int64", False)


def scalar(name: str, dtype: str = "int64") -> Parameter:
    """A table entry: a number by value, int64 or float32."""
    return Parameter(name, dtype, False)


@dataclass(frozen=True)
class Stage:
    """One kernel: ``module.make_body(**constants)`` is its body, made when it is compiled or emulated."""

    name: str
    module: str
    parameters: tuple[Parameter, ...]
    threads: int
    shared_bytes: int = 0  # dynamic
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for p in self.parameters:
            if hasattr(tuple, p.name):  # numba takes `args.count` and `args.index` for the methods
                raise ArgumentError("parameters", "names that are no methods of a tuple", p.name)

    def make_body(self) -> Callable:
        """The body itself; imports numba."""
        return importlib.import_module(self.module).make_body(**self.constants)

    @property
    def compile_key(self) -> tuple:
        """What its cubin depends on beside the sources."""
        return self.name, self.module, self.parameters, self.threads, tuple(sorted(self.constants.items()))

    @property
    def args_class(self) -> type:
        """The named tuple that the body receives."""
        return contract.args_class_of(tuple(p.name for p in self.parameters))


class DeviceArray(launch.DeviceBuffer):
    """An array of our own in device memory, C order: for CuPy, torch and numba through ``__cuda_array_interface__``."""

    def __init__(self, device: launch.Device, shape: tuple[int, ...], dtype: str, fill: int):
        super().__init__(device, max(1, prod(shape)) * np.dtype(dtype).itemsize, fill)
        self.shape, self.dtype = shape, np.dtype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        pointer = self.pointer if prod(self.shape) else 0
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (pointer, False), "version": 3, "stream": None}

    def get(self) -> np.ndarray:
        """A copy on the host, after everything queued on the device."""
        return np.frombuffer(self.read(), self.dtype)[: prod(self.shape)].reshape(self.shape).copy()

    def set(self, values: Any) -> None:
        """Overwrite it from the host, after everything queued on the device."""
        data = np.ascontiguousarray(values, self.dtype)
        if data.shape != self.shape:
            raise ArgumentError("values", f"shape {list(self.shape)}", list(data.shape))
        self.device.synchronize()
        if data.size:
            self.write(data.tobytes())


class HostArray(np.ndarray):
    """The emulator's counterpart of :class:`DeviceArray`: a numpy array with ``get`` and ``set``."""

    def get(self) -> np.ndarray:
        """A copy."""
        return np.array(self)

    def set(self, values: Any) -> None:
        """Overwrite it."""
        data = np.asarray(values, self.dtype)
        if data.shape != self.shape:
            raise ArgumentError("values", f"shape {list(self.shape)}", list(data.shape))
        self[...] = data


StageCall = Callable[[int], None]  # of a stream handle


class GpuRunner:
    """Stages on a GPU."""

    emulated = False

    def __init__(self, ordinal: int | None):
        self.device = launch.Device(ordinal)
        self.name = self.device.name
        self.num_sms = self.device.num_sms
        self._target = compile.target_of(compile.override_cc() or self.device.cc)
        self._loaded: dict[tuple, launch.LoadedKernel] = {}

    def empty(self, shape: tuple[int, ...], dtype: str, fill: int = 0) -> DeviceArray:
        """An array whose bytes are all ``fill``."""
        made = DeviceArray(self.device, shape, dtype, fill)
        self.device.synchronize()  # the fill is ordered before launches on any stream
        return made

    def load(self, stage: Stage) -> launch.LoadedKernel:
        """Compiled or from the cache, and ready: a launch may be captured right away."""
        # Plans of other sizes may have the same kernel and more shared memory, which is set when it is loaded.
        key = stage.compile_key, stage.shared_bytes
        if key not in self._loaded:
            compiled = compile.compile_stage(stage, self._target)
            self._loaded[key] = launch.LoadedKernel(
                self.device, compiled, threads=stage.threads, shared_bytes=stage.shared_bytes
            )
        return self._loaded[key]

    def bind(
        self,
        stage: Stage,
        grid: int,
        buffers: Mapping[str, Any],
        scalars: Mapping[str, float],
        memory: Mapping[str, Any] | None = None,
    ) -> StageCall:
        """Pack the parameters; ``memory`` are arrays that the kernel reaches by address, kept alive with the call."""
        kernel = self.load(stage)
        block = launch.ParameterBlock(launch.ParameterLayout(stage.parameters))
        infos = _describe_all(stage, buffers, host=False)
        for p in stage.parameters:
            if p.is_array:
                info, itemsize = infos[p.name], arrays.ITEMSIZE[p.dtype]
                block.set_array(p.name, *((info.pointer, _extent(info, p)) if info else (0, 0)), itemsize)
            elif p.dtype == "float32":
                block.set_float(p.name, scalars[p.name])
            else:
                block.set_integer(p.name, _integer(p, infos, scalars))
        self._check_devices(infos)
        return launch.Launcher([kernel], [grid], block, (dict(buffers), dict(memory or {})))

    def _check_devices(self, infos: Mapping[str, ArrayInfo | None]) -> None:
        for name, info in infos.items():
            if info is not None and info.device not in (None, self.device.ordinal):
                raise ArgumentError(name, f"an array on device {self.device.ordinal}", f"device {info.device}")

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self.device.synchronize()


class EmulatorRunner:
    """The same bodies on the CPU, on numpy arrays."""

    emulated = True

    def __init__(self, emulator: Emulator):
        self._emulator = emulator
        self.name = repr(emulator)
        self.num_sms = emulator.blocks

    def empty(self, shape: tuple[int, ...], dtype: str, fill: int = 0) -> HostArray:
        """As on a GPU."""
        made = np.full(max(1, prod(shape)) * np.dtype(dtype).itemsize, fill, np.uint8)
        return made.view(dtype)[: prod(shape)].reshape(shape).view(HostArray)

    def bind(
        self,
        stage: Stage,
        grid: int,
        buffers: Mapping[str, Any],
        scalars: Mapping[str, float],
        memory: Mapping[str, Any] | None = None,
    ) -> StageCall:
        """As on a GPU; the body is made once."""
        body = stage.make_body()
        infos = _describe_all(stage, buffers, host=True)
        fields: dict[str, Any] = {}
        for p in stage.parameters:
            if p.is_array:
                info = infos[p.name]
                fields[p.name] = _flat(buffers[p.name], info, p) if info else np.empty(0, p.dtype)
            elif p.dtype == "float32":
                fields[p.name] = np.float32(scalars[p.name])
            else:
                fields[p.name] = _integer(p, infos, scalars)
        args = stage.args_class(**fields)
        reached = {name: np.asarray(one) for name, one in (memory or {}).items()}

        def call(stream: int) -> None:
            self._emulator.launch(
                body,
                args,
                grid=grid,
                block=stage.threads,
                shared_bytes=stage.shared_bytes,
                name=stage.name,
                memory=reached,
            )

        return call

    def synchronize(self) -> None:
        """A call returns when it has run."""


Runner = GpuRunner | EmulatorRunner


def open_runner(device: int | str | Emulator | Runner | None = None) -> Runner:
    """Where stages run: None is the current GPU, an int an ordinal, "emulator" or an Emulator the CPU; or a runner.

    Raises ArgumentError for anything else, DriverError without a GPU.
    """
    if isinstance(device, (GpuRunner, EmulatorRunner)):
        return device
    if isinstance(device, Emulator):
        return EmulatorRunner(device)
    if isinstance(device, str) and device == "emulator":
        return EmulatorRunner(Emulator())
    if device is not None and (type(device) is not int or device < 0):
        raise ArgumentError("device", 'None, an ordinal, "emulator" or an Emulator', repr(device))
    return GpuRunner(device)


def check_array(
    name: str, value: Any, dtypes: tuple[str, ...], shape: tuple[int | None, ...], *, host: bool
) -> ArrayInfo:
    """An argument in C order with one of these dtypes; None in ``shape`` is any extent.

    Raises ArgumentError with the argument, what was expected, and what came.
    """
    info = arrays.describe(name, value, host=host)
    if info.dtype not in dtypes:
        raise ArgumentError(name, f"dtype {' or '.join(dtypes)}", info.dtype)
    fits = len(info.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, info.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ArgumentError(name, f"shape [{wanted}]", list(info.shape))
    stride = 1
    for extent, found in zip(reversed(info.shape), reversed(info.strides), strict=True):
        if extent > 1 and found != stride:
            raise ArgumentError(name, "an array in C order", f"shape {list(info.shape)}, strides {list(info.strides)}")
        stride *= extent
    return info


def _describe_all(stage: Stage, buffers: Mapping[str, Any], *, host: bool) -> dict[str, ArrayInfo | None]:
    """What is known of the arrays that a stage is given; None for those that it is to go without."""
    infos: dict[str, ArrayInfo | None] = {}
    is_index = {p.name.removesuffix(WORDS) for p in stage.parameters if p.name.endswith(WORDS)}
    for p in stage.parameters:
        if not p.is_array:
            continue
        given = buffers[p.name]
        if given is None:
            infos[p.name] = None
            continue
        info = arrays.describe(p.name, given, host=host)
        taken = ("int32", "int64") if p.name in is_index else SAME_BITS.get(p.dtype, (p.dtype,))
        if info.dtype not in taken:
            raise ArgumentError(p.name, f"dtype {' or '.join(taken)}", info.dtype)
        infos[p.name] = info
    return infos


def _integer(p: Parameter, infos: Mapping[str, ArrayInfo | None], scalars: Mapping[str, float]) -> int:
    """An int64 parameter: given, or the width of an index buffer in words."""
    if p.name.endswith(WORDS) and p.name not in scalars:
        info = infos[p.name.removesuffix(WORDS)]
        return 2 if info is not None and info.dtype == "int64" else 1
    return int(scalars[p.name])


def _extent(info: ArrayInfo, p: Parameter) -> int:
    """Elements of the flat array that the kernel sees."""
    return arrays.storage_extent(info) * arrays.ITEMSIZE[info.dtype] // arrays.ITEMSIZE[p.dtype]


def _flat(value: np.ndarray, info: ArrayInfo, p: Parameter) -> np.ndarray:
    """The same memory, flat, as the parameter's dtype."""
    from nbverify.backends import flat_storage

    return flat_storage(np.asarray(value), info, p.dtype)
