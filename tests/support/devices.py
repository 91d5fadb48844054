"""Two devices with one face: the emulator on numpy arrays, and a GPU on CuPy arrays."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

import nbverify as nv
from support.batches import NUMPY_DTYPE, Batch

CANARY_BYTES = 4096
CANARY = 0xA5
PLANS_KEPT = 64

_plans: OrderedDict[tuple, nv.VerifyPlan] = OrderedDict()


def _plan(key: tuple, fresh: bool, spec: nv.VerifySpec, **options) -> nv.VerifyPlan:
    """A plan, made once for every device, spec and options: compiling takes seconds.

    So a test may get a plan whose workspace holds what another test left in it, as every launch but a plan's first
    does.  ``fresh`` asks for one with its NaN still in place.
    """
    named = tuple(sorted((name, value) for name, value in options.items() if name != "device" and value is not None))
    key = (*key, spec, named)
    if fresh or key not in _plans:
        plan = nv.VerifyPlan(spec, **options)
        if fresh:
            return plan
        _plans[key] = plan
        if len(_plans) > PLANS_KEPT:
            _plans.popitem(last=False)
    _plans.move_to_end(key)
    return _plans[key]


@dataclass
class Result:
    """What a launch wrote: out as the spec's dtype, its raw bits, and lse."""

    out: np.ndarray
    lse: np.ndarray

    @property
    def bits(self) -> bytes:
        """For bitwise comparison of out and lse."""
        return self.rows(slice(None))

    def rows(self, rows: slice) -> bytes:
        """Bits of some rows of out and lse."""
        return self.out[rows].tobytes() + self.lse[rows].tobytes()


class EmulatorDevice:
    """Kernel bodies on the CPU."""

    name = "emulator"
    is_gpu = False

    def __init__(self, blocks: int = 4, seed: int = 0, cc: tuple[int, int] = (9, 0)):
        self.blocks, self.seed, self.cc = blocks, seed, cc

    @property
    def device(self) -> nv.Emulator:
        """What ``device=`` takes."""
        return nv.Emulator(self.blocks, self.seed, self.cc)

    def plan(self, spec: nv.VerifySpec, *, fresh: bool = False, **options) -> nv.VerifyPlan:
        return _plan((self.name, self.blocks, self.seed, self.cc), fresh, spec, device=self.device, **options)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()  # as from a GPU: a later launch must not change what an earlier one gave

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        """Overwrite a device array in place."""
        array[...] = values

    def raw(self, nbytes: int) -> np.ndarray:
        """Device bytes, 256-byte aligned."""
        storage = np.empty(nbytes + 256, np.uint8)
        start = -storage.ctypes.data % 256
        return storage[start : start + nbytes]

    def vast(self, count: int, dtype: str) -> np.ndarray:
        """Gigabytes: zeros that take no memory until they are written."""
        return np.zeros(count, dtype)

    def free(self) -> None:
        """Numpy frees by itself."""


class GpuDevice:
    """A GPU, with CuPy arrays.  16-bit and fp8 arrays travel as raw bits: CuPy has no such dtypes."""

    name = "gpu"
    is_gpu = True

    def __init__(self, ordinal: int = 0):
        import cupy

        self.cupy, self.ordinal = cupy, ordinal
        cupy.cuda.Device(ordinal).use()
        cupy.cuda.runtime.free(0)  # makes the context now: tests that call the driver need one

    @property
    def device(self) -> int:
        """What ``device=`` takes."""
        return self.ordinal

    def plan(self, spec: nv.VerifySpec, *, fresh: bool = False, **options) -> nv.VerifyPlan:
        return _plan((self.name, self.ordinal), fresh, spec, device=self.ordinal, **options)

    def upload(self, array: np.ndarray):
        return self.cupy.asarray(raw_bits(array))

    def download(self, array) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def write(self, array, values: np.ndarray) -> None:
        array.set(np.ascontiguousarray(raw_bits(np.asarray(values))))

    def raw(self, nbytes: int):
        return self.cupy.empty(nbytes, self.cupy.uint8)

    def vast(self, count: int, dtype: str):
        """Gigabytes, zeroed."""
        return self.cupy.zeros(count, dtype)

    def free(self) -> None:
        """Give what ``vast`` took, and is referred to no more, back to the driver."""
        self.cupy.get_default_memory_pool().free_all_blocks()


def raw_bits(array: np.ndarray) -> np.ndarray:
    """A 16-bit or fp8 array as unsigned integers; any other as it is."""
    if array.dtype in (NUMPY_DTYPE["bfloat16"], NUMPY_DTYPE["float16"]):
        return array.view(np.uint16)
    if array.dtype == NUMPY_DTYPE["float8_e4m3fn"]:
        return array.view(np.uint8)
    return array


class Guarded:
    """A device array with 4 KiB of canary bytes after it."""

    def __init__(self, dev, shape, dtype: np.dtype, fill_byte: int = 0xFF):
        self._dev = dev
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._storage = dev.raw(self.nbytes + CANARY_BYTES)
        contents = np.full(self.nbytes + CANARY_BYTES, CANARY, np.uint8)
        contents[: self.nbytes] = fill_byte  # 0xFF: NaN in every float type here
        dev.write(self._storage, contents)
        self.array = self._storage[: self.nbytes].view(raw_bits(np.empty(0, dtype)).dtype).reshape(shape)
        self._dtype = dtype

    def check(self) -> None:
        tail = self._dev.download(self._storage)[self.nbytes :]
        assert (tail == CANARY).all(), "bytes past the end of the array were overwritten"

    def numpy(self) -> np.ndarray:
        return np.ascontiguousarray(self._dev.download(self.array)).view(self._dtype)


class BoundBatch:
    """A batch on a device, bound to a plan; ``run()`` launches and returns what was written."""

    def __init__(self, dev, plan: nv.VerifyPlan, batch: Batch, *, with_lse: bool = True, **replaced):
        """``replaced``: device arrays to bind instead of the batch's own."""
        spec = batch.spec
        assert spec.kernel == plan.spec.kernel, "tolerances are those of the kernel that runs"
        self.dev, self.plan, self.batch = dev, plan, batch
        self.arrays = {name: dev.upload(a) for name, a in batch.inputs().items()}
        rows = batch.num_tokens
        self._out = Guarded(dev, (rows, spec.num_q_heads, spec.head_dim_v), NUMPY_DTYPE[spec.dtype])
        self._lse = Guarded(dev, (rows, spec.num_q_heads), np.dtype(np.float32))
        self.arrays["out"] = self._out.array
        if with_lse:
            self.arrays["lse"] = self._lse.array
        self.arrays |= replaced
        self.bound = plan.bind(**self.arrays, k_scale=batch.k_scale, v_scale=batch.v_scale)

    def run(self, stream=None) -> Result:
        self.bound.launch(stream)
        return self.result()

    def result(self) -> Result:
        """What stands in out and lse now; checks the canaries."""
        self._out.check()
        self._lse.check()
        return Result(self._out.numpy(), self._lse.numpy())

    def poison(self) -> None:
        """Fill out and lse with NaN again."""
        self.dev.write(self._out.array, np.full(self._out.array.shape, 0xFFFF, np.uint16))
        self.dev.write(self._lse.array, np.full(self._lse.array.shape, np.nan, np.float32))


def run(dev, batch: Batch, *, max_blocks: int | None = None, shared_limit: int | None = None, **bind_options) -> Result:
    """Plan, bind, launch once."""
    plan = dev.plan(batch.spec, max_blocks=max_blocks, shared_limit=shared_limit)
    return BoundBatch(dev, plan, batch, **bind_options).run()
