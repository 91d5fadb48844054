"""Driver-level launches: load a cubin, ask for its occupancy, pack its parameters once, launch it in one call.

numba's own launch path types and converts every argument at every launch (27 to 170 us) and may synchronise on a
foreign array.  Here a launch is ``cuLaunchKernelEx`` on a parameter block that was packed when the arrays were bound:
no allocation, copy, synchronisation or look at device data, so a stream capture of the strictest mode takes it.

``import cuda.bindings`` costs time and needs no driver; it happens on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbverify import contract
from nbverify.arrays import ArrayInfo
from nbverify.compile import CompiledKernel
from nbverify.contract import Parameter
from nbverify.errors import ArgumentError, CompileError, DriverError

MIN_DRIVER_CUDA = 12_040  # cuFuncLoad; cuDriverGetVersion's way to write 12.4
TWO_LAUNCH_HINT = 'ask for VerifySpec(reduction="two_launch"), which needs no cooperative launch'


def driver() -> Any:
    """The binding module, imported on first use."""
    from cuda.bindings import driver as module

    return module


def call(what: str, result: tuple) -> Any:
    """The value of a driver call's result tuple; DriverError with its name, code and text if it failed."""
    code = result[0]
    if int(code) != 0:
        raise DriverError(f"{what}: {describe_error(code)}")
    return result[1] if len(result) == 2 else result[1:]


def _text_of(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def describe_error(code: Any) -> str:
    """``CUDA_ERROR_X (n): text``."""
    _, text = driver().cuGetErrorString(code)
    return f"{getattr(code, 'name', code)} ({int(code)}): {text.decode() if text else 'no text'}"


class Device:
    """A GPU and its primary context, the one that CuPy, torch and numba use."""

    def __init__(self, ordinal: int | None):
        drv = driver()
        try:
            call("cuInit", drv.cuInit(0))
        except DriverError:
            raise
        except Exception as error:  # of cuda.pathfinder, where there is no libcuda
            raise DriverError(
                f'no NVIDIA driver ({type(error).__name__}); VerifyPlan(spec, device="emulator") needs none, '
                "`nbverify doctor` says what is missing"
            ) from error
        version = call("cuDriverGetVersion", drv.cuDriverGetVersion())
        if version < MIN_DRIVER_CUDA:
            raise DriverError(
                f"the driver supports CUDA {_text_of(version)}, nbverify needs {_text_of(MIN_DRIVER_CUDA)} or newer: "
                "update the driver"
            )
        count = call("cuDeviceGetCount", drv.cuDeviceGetCount())
        if ordinal is None:
            ordinal = self._current_ordinal()
        if ordinal >= count:
            raise ArgumentError("device", f"an ordinal below {count}", ordinal)
        self.ordinal = ordinal
        self.handle = call("cuDeviceGet", drv.cuDeviceGet(ordinal))
        self.context = call("cuDevicePrimaryCtxRetain", drv.cuDevicePrimaryCtxRetain(self.handle))
        attribute = drv.CUdevice_attribute
        self.cc = (
            self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.num_sms = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_limit = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.cooperative = bool(self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH))
        self.name = call("cuDeviceGetName", drv.cuDeviceGetName(256, self.handle)).split(b"\0")[0].decode()

    @staticmethod
    def _current_ordinal() -> int:
        drv = driver()
        if int(call("cuCtxGetCurrent", drv.cuCtxGetCurrent())) == 0:
            return 0
        return int(call("cuCtxGetDevice", drv.cuCtxGetDevice()))

    def attribute(self, which: Any) -> int:
        """A device attribute."""
        return call("cuDeviceGetAttribute", driver().cuDeviceGetAttribute(which, self.handle))

    def total_memory(self) -> int:
        """Bytes of device memory."""
        return call("cuDeviceTotalMem", driver().cuDeviceTotalMem(self.handle))

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        with self:
            call("cuCtxSynchronize", driver().cuCtxSynchronize())

    def read_index(self, info: ArrayInfo) -> np.ndarray:
        """An index buffer on the host, as int64, after everything queued on the device."""
        data = np.empty(info.shape, info.dtype)
        self.synchronize()
        if data.size:
            with self:
                call("cuMemcpyDtoH", driver().cuMemcpyDtoH(data.ctypes.data, info.pointer, data.nbytes))
        return data.astype(np.int64)

    def __enter__(self) -> Device:
        call("cuCtxPushCurrent", driver().cuCtxPushCurrent(self.context))
        return self

    def __exit__(self, *exc: object) -> None:
        call("cuCtxPopCurrent", driver().cuCtxPopCurrent())


class DeviceBuffer:
    """Device memory that a plan owns: allocated once, freed with the plan."""

    def __init__(self, device: Device, num_bytes: int, fill: int | None = None):
        drv = driver()
        self.device, self.num_bytes = device, num_bytes
        self.pointer = 0
        with device:
            self.pointer = int(call(f"cuMemAlloc of {num_bytes} bytes", drv.cuMemAlloc(num_bytes)))
            if fill is not None:
                call("cuMemsetD8", drv.cuMemsetD8(self.pointer, fill, num_bytes))

    def read(self) -> bytes:
        """Contents, after everything queued on the device."""
        data = bytearray(self.num_bytes)
        self.device.synchronize()
        with self.device:
            call("cuMemcpyDtoH", driver().cuMemcpyDtoH(data, self.pointer, self.num_bytes))
        return bytes(data)

    def write(self, data: bytes) -> None:
        """Replace the contents."""
        with self.device:
            call("cuMemcpyHtoD", driver().cuMemcpyHtoD(self.pointer, data, len(data)))

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            try:
                with self.device:
                    driver().cuMemFree(self.pointer)
            except Exception:  # at interpreter exit the driver may be gone already
                pass


class LaunchConfig:
    """A CUlaunchConfig and the stream that stands in it, which is set only when another one comes."""

    __slots__ = ("config", "stream")

    def __init__(self, config: Any):
        self.config = config
        self.stream: int | None = None

    def set_stream(self, stream: int) -> None:
        """The stream of the next launch."""
        self.config.hStream = stream
        self.stream = stream


class LoadedKernel:
    """A cubin on a device, with its shared memory opted in."""

    def __init__(self, device: Device, compiled: CompiledKernel, *, threads: int, shared_bytes: int):
        drv = driver()
        self.compiled, self.device = compiled, device
        self.threads, self.shared_bytes = threads, shared_bytes
        self._configs: dict[int, LaunchConfig] = {}
        with device:
            result = drv.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0)
            if int(result[0]) != 0:
                raise DriverError(
                    f"loading {compiled.name}, built for {compiled.target}, on {device.name} "
                    f"(sm_{device.cc[0]}{device.cc[1]}): {describe_error(result[0])}"
                )
            self.library = result[1]
            kernel = call("cuLibraryGetKernel", drv.cuLibraryGetKernel(self.library, compiled.entry.encode()))
            # The CUfunction of this context: module load and everything lazy happens here, not in a stream capture.
            self.function = call("cuKernelGetFunction", drv.cuKernelGetFunction(kernel))
            call("cuFuncLoad", drv.cuFuncLoad(self.function))
            call(
                f"opting in to {shared_bytes} bytes of dynamic shared memory of {device.shared_limit}, "
                f"{compiled.resources.static_shared_bytes} being static",
                drv.cuFuncSetAttribute(
                    self.function,
                    drv.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes,
                ),
            )

    def launch_config(self, grid: int) -> LaunchConfig:
        """The driver's description of a launch, made once per grid and shared by all binds; only its stream changes."""
        if grid not in self._configs:
            drv = driver()
            config = drv.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
            config.sharedMemBytes = self.shared_bytes
            if self.compiled.cooperative:
                attribute = drv.CUlaunchAttribute()
                attribute.id = drv.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
                attribute.value.cooperative = 1
                config.attrs, config.numAttrs = [attribute], 1
            self._configs[grid] = LaunchConfig(config)
        return self._configs[grid]

    def blocks_per_sm(self) -> int:
        """Co-resident blocks of this exact kernel, block size and shared memory."""
        with self.device:
            return call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.threads, self.shared_bytes),
            )

    def __del__(self) -> None:
        if getattr(self, "library", None) is not None:
            try:
                with self.device:
                    driver().cuLibraryUnload(self.library)
            except Exception:  # as above
                pass


class ParameterLayout:
    """Where each field of ``args`` stands in a parameter block: 8-byte cells, in the order of the contract."""

    def __init__(self, parameters: tuple[Parameter, ...]):
        self.parameters = parameters
        self.first_cell: dict[str, int] = {}
        self.num_cells = 0
        for p in parameters:
            self.first_cell[p.name] = self.num_cells
            self.num_cells += contract.cells_of(p)


class ParameterBlock:
    """The parameters of one launch.

    The driver reads ``sizeof(parameter)`` bytes at each cell (a float32 is the low half of its cell) and copies them
    when a launch is called or captured, so a cell may be overwritten right after.
    """

    def __init__(self, layout: ParameterLayout):
        self.layout = layout
        self._first_cell = layout.first_cell
        self._cells = np.zeros(layout.num_cells, np.int64)
        base = self._cells.ctypes.data
        self._pointers = np.arange(base, base + 8 * layout.num_cells, 8, dtype=np.int64)
        self.address: int = self._pointers.ctypes.data

    def set_array(self, name: str, pointer: int, extent: int, itemsize: int) -> None:
        """A flat array: ``extent`` elements of ``itemsize`` bytes at ``pointer``."""
        first = self._first_cell[name]
        meminfo = parent = 0  # numba's own bookkeeping, unused in kernels
        self._cells[first : first + contract.ARRAY_CELLS] = (
            meminfo,
            parent,
            extent,
            itemsize,
            pointer,
            extent,
            itemsize,
        )

    def set_pointer(self, name: str, pointer: int) -> None:
        """Another address for an array of the same extent."""
        self._cells[self._first_cell[name] + contract.DATA_CELL] = pointer

    def set_integer(self, name: str, value: int) -> None:
        """An int64."""
        self._cells[self._first_cell[name]] = value

    def set_float(self, name: str, value: float) -> None:
        """A float32, in the low bytes of its cell."""
        cell = self._first_cell[name]
        self._cells[cell : cell + 1].view(np.float32)[0] = value


class Launcher:
    """A sequence of kernels on one parameter block.  It keeps alive what they use, ``workspace`` included."""

    def __init__(
        self,
        kernels: Sequence[LoadedKernel],
        grids: Sequence[int],
        block: ParameterBlock,
        workspace: object = None,
    ):
        self.block = block
        self._launch = driver().cuLaunchKernelEx
        self._address = block.address
        self._keep_alive = (kernels, workspace)
        self._device = kernels[0].device
        self._calls: list[tuple[LaunchConfig, Any, CompiledKernel]] = []
        for kernel, grid in zip(kernels, grids, strict=True):
            if kernel.compiled.parameters != block.layout.parameters:
                raise CompileError(
                    f"{kernel.compiled.name}: compiled for other parameters than the contract's: "
                    + _first_difference(kernel.compiled.parameters, block.layout.parameters)
                )
            self._calls.append((kernel.launch_config(grid), kernel.function, kernel.compiled))

    def __call__(self, stream: int) -> None:
        """Launch all kernels in order on a stream handle.  Nothing else."""
        for config, function, compiled in self._calls:
            if config.stream != stream:
                config.set_stream(stream)
            code = self._launch(config.config, function, self._address, 0)[0]
            if code:
                raise DriverError(self._explain(code, compiled))

    def move(self, name: str, pointer: int, array: object) -> None:
        """Another address for a buffer, from the next launch on."""
        self.block.set_pointer(name, pointer)

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Other float32 scalars, from the next launch on."""
        for name, value in factors.items():
            self.block.set_float(name, value)

    def _explain(self, code: Any, compiled: CompiledKernel) -> str:
        drv, text = driver(), f"launching {compiled.name}: {describe_error(code)}"
        if code in (drv.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, drv.CUresult.CUDA_ERROR_NOT_SUPPORTED):
            return f"{text}; {TWO_LAUNCH_HINT}"
        if code in (drv.CUresult.CUDA_ERROR_INVALID_CONTEXT, drv.CUresult.CUDA_ERROR_INVALID_HANDLE):
            return f"{text}; the plan is for device {self._device.ordinal}: is that the current one, and the stream's?"
        return text


def _first_difference(found: tuple[Parameter, ...], expected: tuple[Parameter, ...]) -> str:
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            return f"parameter {i}: expected {b}, the kernel has {a}"
    return f"expected {len(expected)} parameters, the kernel has {len(found)}"
