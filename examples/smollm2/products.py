"""Matrix products of float16 with sums in float32, on buffers that are there: by cuBLAS, and by numpy in the emulator.

cuBLAS is called by ctypes, since CuPy refuses it while a stream captures.  A capture also forbids that cuBLAS takes
memory: it has a workspace of ours, which it forgets whenever it is given another stream.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from nbverify.errors import NbverifyError
from nbverify.launch import Device, DeviceBuffer, call, driver

MISSING = "cuBLAS is missing: pip install nvidia-cublas for CUDA 13, nvidia-cublas-cu12 for CUDA 12"
WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper; elsewhere it takes less
FLOAT = {"float32": 0, "float16": 2}  # cudaDataType
NOT_TURNED, TURNED = 0, 1  # cublasOperation_t
SUMS_IN_FLOAT32 = 68  # cublasComputeType_t
ANY_ALGORITHM = -1  # cublasGemmAlgo_t

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_MATRIX = (_POINTER, _INT, _INT)  # where, type, elements from one column to the next
SIGNATURES = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasGemmEx": (_POINTER, *[_INT] * 5, _POINTER, *_MATRIX, *_MATRIX, _POINTER, *_MATRIX, _INT, _INT),
}


class NumpyProducts:
    """In the emulator."""

    def multiply(self, a: Any, w: Any, out: Any, add: bool, stream: int) -> None:
        """``out = a @ w.T``, or added to it; ``a`` has as many rows as ``out``."""
        made = a.reshape(len(out), -1).astype(np.float32) @ w.astype(np.float32).T
        out[...] = out + made if add else made


class CublasProducts:
    """On a GPU.  One at a time works: all products share the workspace."""

    def __init__(self, device: Device):
        self._device, self._lib = device, _load()
        # Launches go to the current context, and a process that has used no CUDA library yet has none.
        call("cuCtxSetCurrent", driver().cuCtxSetCurrent(device.context))
        self._workspace = DeviceBuffer(device, WORKSPACE_BYTES)
        self._scalars = np.array([0.0, 1.0], np.float32)  # cuBLAS reads them when it is called
        zero = self._scalars.ctypes.data
        self._one, self._beta = zero + 4, (zero, zero + 4)
        self._stream: int | None = None
        self._handle = _POINTER()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))

    def multiply(self, a: Any, w: Any, out: Any, add: bool, stream: int) -> None:
        """``out = a @ w.T``, or added to it.  cuBLAS has columns first: there it is ``out.T = w @ a.T``."""
        if stream != self._stream:
            self._call("cublasSetStream_v2", self._handle, stream)
            self._call("cublasSetWorkspace_v2", self._handle, self._workspace.pointer, WORKSPACE_BYTES)
            self._stream = stream
        (outputs, inputs), rows, half = w.shape, out.shape[0], FLOAT["float16"]
        self._call(
            "cublasGemmEx", self._handle, TURNED, NOT_TURNED, outputs, rows, inputs, self._one, w.pointer, half, inputs,
            a.pointer, half, inputs, self._beta[add], out.pointer, FLOAT[out.dtype.name], outputs, SUMS_IN_FLOAT32,
            ANY_ALGORITHM,
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status != 0:
            raise NbverifyError(f"{name}: cuBLAS status {status}")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            try:
                with self._device:
                    self._lib.cublasDestroy_v2(self._handle)
            except Exception:  # at interpreter exit the driver may be gone already
                pass


def _load() -> ctypes.CDLL:
    """The library: of the package, or of an installed toolkit."""
    from cuda import pathfinder

    try:
        lib = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
    except (RuntimeError, OSError) as error:  # pathfinder's own errors are RuntimeErrors
        raise NbverifyError(MISSING) from error
    for name, arguments in SIGNATURES.items():
        getattr(lib, name).argtypes = arguments
    return lib
