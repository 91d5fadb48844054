"""Arrays and streams of every library, with real objects: the same bits as with CuPy arrays on the default stream."""

from dataclasses import replace

import numpy as np
import pytest
from support.batches import random_batch
from support.devices import BoundBatch, raw_bits
from support.kernels import parametrize_specs
from support.streams import DriverStream, begin_capture, capture, end_capture, torch_with_gpu, wait_for_device

import nbverify as nv
from nbverify import arrays
from nbverify.launch import call, driver

# The compiled kernels of support/basic.py: sizes are no part of them.
LIMITS = {"max_requests": 4, "max_nodes": 24, "max_kv_len": 600, "kernel": "simt"}


def gqa(**options):
    return nv.VerifySpec.gqa(4, 2, 16, sm_scale=0.25, **{**LIMITS, **options})


BF16 = gqa()
FP16 = gqa(dtype="float16")
FP8 = gqa(kv_dtype="float8_e4m3fn")
PACKED = gqa(mask=nv.Mask.PACKED)
SPECS = {"bf16": BF16, "fp16": FP16, "fp8": FP8, "packed": PACKED}
PER_THREAD = 2  # CU_STREAM_PER_THREAD


def make_batch(spec, seed=70):
    return random_batch(np.random.default_rng(seed), spec, [300, 0, 77], [5, 1, 3])


# ------------------------------------------------------------------------------------------------------------- arrays


class TorchArrays:
    """Tensors of the true types; a byte mask is bool."""

    def __init__(self):
        self.torch = torch_with_gpu()

    def upload(self, array):
        tensor = self.torch.from_numpy(np.ascontiguousarray(raw_bits(array))).cuda()
        return tensor if raw_bits(array) is array else tensor.view(getattr(self.torch, array.dtype.name))

    def mask(self, array):
        return self.upload(array if array.dtype == np.uint32 else array.astype(bool))

    def download(self, tensor):
        self.torch.cuda.synchronize()
        return tensor.contiguous().view(self.torch.uint8).cpu().numpy().tobytes()


class TorchRawBits(TorchArrays):
    """int16 and uint8 in place of the 16-bit and fp8 types."""

    def upload(self, array):
        bits = raw_bits(array)
        if bits is not array:
            bits = bits.view({1: np.uint8, 2: np.int16}[bits.itemsize])
        return self.torch.from_numpy(np.ascontiguousarray(bits)).cuda()

    def mask(self, array):
        return self.upload(array.view(np.int32) if array.dtype == np.uint32 else array)


class TorchSubclass(TorchArrays):
    """Not torch.Tensor itself: read through DLPack."""

    def upload(self, array):
        class Tensor(self.torch.Tensor):
            pass

        return super().upload(array).as_subclass(Tensor)


class CupyArrays:
    """Raw bits, and a bool mask."""

    def __init__(self):
        import cupy

        self.cupy = cupy

    def upload(self, array):
        return self.cupy.asarray(raw_bits(array))

    def mask(self, array):
        return self.upload(array if array.dtype == np.uint32 else array.astype(bool))

    def download(self, array):
        return self.cupy.asnumpy(array).tobytes()


class NumbaArrays:
    """numba's own device arrays."""

    def __init__(self):
        from numba import cuda

        self.cuda = cuda

    def upload(self, array):
        return self.cuda.to_device(np.ascontiguousarray(raw_bits(array)))

    mask = upload

    def download(self, array):
        return array.copy_to_host().tobytes()


class CoreBuffers:
    """Memory of cuda.core, as an object that has the array interface and nothing else."""

    class Array:
        def __init__(self, buffer, shape, dtype):
            self.buffer = buffer
            self.__cuda_array_interface__ = {
                "shape": shape,
                "typestr": dtype.str,
                "data": (int(buffer.handle), False),
                "strides": None,
                "version": 3,
            }

    def __init__(self):
        from cuda.core import Device

        self.device = Device(0)
        self.device.set_current()
        self.stream = self.device.create_stream()

    def upload(self, array):
        host = np.ascontiguousarray(raw_bits(array))
        buffer = self.device.allocate(max(host.nbytes, 16), stream=self.stream)
        self.stream.sync()
        call("cuMemcpyHtoD", driver().cuMemcpyHtoD(int(buffer.handle), host.ctypes.data, host.nbytes))
        return self.Array(buffer, host.shape, host.dtype)

    mask = upload

    def download(self, array):
        interface = array.__cuda_array_interface__
        host = np.empty(interface["shape"], interface["typestr"])
        call("cuCtxSynchronize", driver().cuCtxSynchronize())
        call("cuMemcpyDtoH", driver().cuMemcpyDtoH(host.ctypes.data, interface["data"][0], host.nbytes))
        return host.tobytes()


PRODUCERS = [TorchArrays, TorchRawBits, TorchSubclass, CupyArrays, NumbaArrays, CoreBuffers]


def upload_all(producer, batch):
    """Every input by name, and out and lse full of NaN."""
    spec = batch.spec
    inputs = {
        name: producer.mask(array) if name == "custom_mask" else producer.upload(array)
        for name, array in batch.inputs().items()
    }
    out = np.full((batch.num_tokens, spec.num_q_heads, spec.head_dim_v), np.nan, batch.q.dtype)
    lse = np.full((batch.num_tokens, spec.num_q_heads), np.nan, np.float32)
    return {**inputs, "out": producer.upload(out), "lse": producer.upload(lse)}


@parametrize_specs(SPECS)
@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda producer: producer.__name__)
def test_arrays_of_every_library(dev, producer, spec):
    batch, plan = make_batch(spec), dev.plan(spec)
    want = BoundBatch(dev, plan, batch).run()
    producer = producer()
    given = upload_all(producer, batch)
    try:
        bound = plan.bind(**given)
    except nv.ArgumentError as error:
        if isinstance(producer, TorchSubclass) and arrays.RAW_BITS in str(error):
            pytest.skip(f"this torch exports no {spec.kv_dtype}, and the error says what to do: {error}")
        raise
    bound.launch()
    assert producer.download(given["out"]) + producer.download(given["lse"]) == want.bits

    fresh = upload_all(producer, batch)
    bound.rebind(**{name: fresh[name] for name in ("q", "k_cache", "v_cache", "out", "lse")})
    bound.launch()
    assert producer.download(fresh["out"]) + producer.download(fresh["lse"]) == want.bits


def test_libraries_mixed_in_one_bind(dev):
    batch, plan = make_batch(BF16), dev.plan(BF16)
    want = BoundBatch(dev, plan, batch).run()
    torch, cupy, numba = TorchArrays(), CupyArrays(), NumbaArrays()
    given = upload_all(torch, batch)
    given["k_cache"], given["kv_indices"] = cupy.upload(batch.k_cache), numba.upload(batch.kv_indices)
    given["lse"] = numba.upload(np.full(want.lse.shape, np.nan, np.float32))
    plan.bind(**given).launch()
    assert torch.download(given["out"]) + numba.download(given["lse"]) == want.bits


@parametrize_specs({"bf16": BF16, "fp8": FP8})
def test_views_of_packed_tensors(dev, spec):
    """q is a part of a fused projection's output, K and V of one pool; out and lse are parts of wider buffers."""
    torch = torch_with_gpu()
    producer = TorchArrays()
    batch, plan = make_batch(spec), dev.plan(spec)
    want = BoundBatch(dev, plan, batch).run()
    given = upload_all(producer, batch)
    tokens, heads, width = given["q"].shape
    nan = float("nan")

    qkv = torch.full((tokens, (heads + 2 * spec.num_kv_heads) * width), nan, dtype=torch.bfloat16, device="cuda")
    q = qkv[:, : heads * width].unflatten(1, (heads, width))
    q.copy_(given["q"])
    pool = torch.stack([given["k_cache"].view(torch.uint8), given["v_cache"].view(torch.uint8)], dim=1)
    pool = pool.view(given["k_cache"].dtype)
    wide = torch.full((tokens, heads + 3, width + 8), nan, dtype=torch.bfloat16, device="cuda")
    wide_lse = torch.full((tokens, heads + 5), nan, dtype=torch.float32, device="cuda")
    given |= {"q": q, "k_cache": pool[:, 0], "v_cache": pool[:, 1]}
    given |= {"out": wide[:, :heads, :width], "lse": wide_lse[:, :heads]}
    assert not any(given[name].is_contiguous() for name in ("q", "k_cache", "v_cache", "out", "lse"))

    plan.bind(**given).launch()
    assert producer.download(given["out"]) + producer.download(given["lse"]) == want.bits
    assert wide[:, heads:].isnan().all() and wide[..., width:].isnan().all() and wide_lse[:, heads:].isnan().all()


def test_layouts_that_are_refused(dev):
    torch_with_gpu()
    batch, plan = make_batch(BF16), dev.plan(BF16)
    given = upload_all(TorchArrays(), batch)
    q = given["q"]
    for wrong in (q.transpose(0, 2).contiguous().transpose(0, 2), q.flatten(), q[:, :2], q.cpu()):
        with pytest.raises(nv.ArgumentError, match=r"^q: expected "):
            plan.bind(**{**given, "q": wrong})
    with pytest.raises(nv.ArgumentError, match=r"^out: expected "):
        plan.bind(**{**given, "out": given["out"][:1].expand_as(given["out"])})
    with pytest.raises(nv.ArgumentError, match=r"^out: expected memory that q does not use"):
        plan.bind(**{**given, "out": q})
    plan.bind(**given)


class ArrayInterfaceOnly:
    """A tensor of which a consumer sees the array interface, with a label that some torch versions give."""

    def __init__(self, tensor, typestr):
        self.dtype, self._tensor, self._typestr = tensor.dtype, tensor, typestr

    @property
    def __cuda_array_interface__(self):
        import torch

        return {**self._tensor.view(torch.int16).__cuda_array_interface__, "typestr": self._typestr}


class WithDLPack(ArrayInterfaceOnly):
    """The same, with DLPack telling the truth."""

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("wrapper", [ArrayInterfaceOnly, WithDLPack])
@pytest.mark.parametrize("typestr", ["<f2", "<V2"])
def test_bfloat16_under_a_wrong_label(dev, wrapper, typestr):
    producer = TorchArrays()
    batch, plan = make_batch(BF16), dev.plan(BF16)
    want = BoundBatch(dev, plan, batch).run()
    given = upload_all(producer, batch)
    labelled = {name: wrapper(given[name], typestr) for name in ("q", "k_cache", "v_cache", "out")}
    plan.bind(**{**given, **labelled}).launch()
    assert producer.download(given["out"]) + producer.download(given["lse"]) == want.bits
    half = upload_all(producer, make_batch(FP16))
    with pytest.raises(nv.ArgumentError, match=r"^q: expected float16.*got bfloat16"):
        dev.plan(FP16).bind(**{**half, "q": labelled["q"]})


def test_what_torch_calls_its_own_types(dev, record_property):
    """Read directly, through DLPack, and through the array interface if this torch has one for the type."""
    torch = torch_with_gpu()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensor = torch.zeros(4, 2, 16, dtype=dtype, device="cuda")
        direct = arrays.describe("x", tensor)
        assert direct.dtype == str(dtype).removeprefix("torch.")
        subclass = tensor.as_subclass(type("Tensor", (torch.Tensor,), {}))
        try:
            assert arrays.describe("x", subclass) == direct
        except nv.ArgumentError as error:
            assert dtype is torch.float8_e4m3fn and arrays.RAW_BITS in str(error)
        try:
            record_property(f"typestr of {direct.dtype}", tensor.__cuda_array_interface__["typestr"])
        except Exception as error:
            record_property(f"typestr of {direct.dtype}", f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "spec, name, dtype",
    [
        (BF16, "q", "float16"), (BF16, "k_cache", "float32"), (FP16, "q", "bfloat16"), (FP8, "k_cache", "int8"),
        (FP8, "k_cache", "float8_e5m2"), (FP8, "v_cache", "float8_e4m3fnuz"), (BF16, "out", "float16"),
        (BF16, "lse", "float16"), (BF16, "kv_indptr", "int16"), (BF16, "custom_mask", "int32"),
        (PACKED, "custom_mask", "uint8"),
    ],
)  # fmt: skip
def test_types_that_are_refused(dev, spec, name, dtype):
    torch = torch_with_gpu()
    given = upload_all(TorchArrays(), make_batch(spec))
    wrong = torch.empty(given[name].shape, dtype=getattr(torch, dtype), device="cuda")
    with pytest.raises(nv.ArgumentError, match=rf"^{name}: expected .*got {dtype}"):
        dev.plan(spec).bind(**{**given, name: wrong})


# ------------------------------------------------------------------------------------------------------------ streams


def torch_stream():
    stream = torch_with_gpu().cuda.Stream()
    return stream, stream.cuda_stream


def torch_current_stream():
    torch = torch_with_gpu()
    with torch.cuda.stream(torch.cuda.Stream()):
        stream = torch.cuda.current_stream()
    return stream, stream.cuda_stream


def cupy_stream():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, stream.ptr


def numba_stream():
    from numba import cuda

    stream = cuda.stream()
    return stream, int(stream)


def cuda_core_stream():
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    return stream, int(stream.handle)


def integer_handle():
    stream = DriverStream()
    return stream.handle, stream.handle, stream


def per_thread_stream():
    return PER_THREAD, PER_THREAD


CAPTURABLE = [
    torch_stream, torch_current_stream, cupy_stream, numba_stream, cuda_core_stream, integer_handle,
    per_thread_stream,
]  # fmt: skip


@pytest.mark.parametrize("make", CAPTURABLE, ids=lambda make: make.__name__)
def test_the_launch_is_on_the_stream_it_was_given(dev, make):
    """The stream is capturing, so a launch on any other one would run, and leave the graph empty."""
    bound = BoundBatch(dev, dev.plan(BF16), make_batch(BF16))
    untouched = bound.result().bits
    stream, handle, *_keep_alive = make()

    def wait():
        call("cuStreamSynchronize", driver().cuStreamSynchronize(handle))

    begin_capture(handle)
    try:
        bound.bound.launch(stream)
    finally:
        captured = end_capture(handle, wait)
    assert captured.nodes == {"KERNEL": 1} and bound.result().bits == untouched
    captured.replay()
    first = bound.result().bits
    bound.poison()
    assert bound.run().bits == first != untouched

    bound.poison()
    wait_for_device()
    bound.bound.launch(stream)
    wait()
    assert bound.result().bits == first


def legacy_streams(dev):
    import cupy
    from numba import cuda

    streams = [None, 0, 1, cupy.cuda.Stream.null, cuda.default_stream()]
    try:
        import torch
    except ImportError:
        return streams
    return [*streams, torch.cuda.default_stream()] if torch.cuda.is_available() else streams


def test_default_streams_are_in_order_with_cupy(dev):
    """q arrives on the legacy default stream behind long copies, with nobody waiting; a launch elsewhere misses it."""
    cupy = dev.cupy
    plan, batch = dev.plan(BF16), make_batch(BF16)
    bound = BoundBatch(dev, plan, batch)
    first = bound.run().bits
    zero = replace(batch, q=np.zeros_like(batch.q))
    q, no_q = bound.arrays["q"], dev.upload(zero.q)
    new_q, block = q.copy(), cupy.empty(1 << 28, cupy.uint8)
    for stream in legacy_streams(dev):
        q[...] = no_q
        bound.poison()
        for _ in range(8):
            block[: 1 << 27] = block[1 << 27 :]
        q[...] = new_q
        bound.bound.launch(stream)
        q[...] = no_q
        assert bound.result().bits == first, stream


def test_objects_that_are_no_stream(dev):
    bound = BoundBatch(dev, dev.plan(BF16), make_batch(BF16))
    untouched = bound.result().bits
    for wrong in (-1, True, "stream", 1.0, object(), dev):
        with pytest.raises(nv.ArgumentError, match=r"^stream: expected "):
            bound.bound.launch(wrong)
    assert bound.result().bits == untouched


# ------------------------------------------------------------------------------------- a step of a server in one graph


def test_torch_work_around_the_launch_in_one_graph(dev):
    """Torch fills q before and reads out behind, on the capturing stream; replays see what the inputs hold then."""
    torch = torch_with_gpu()
    producer = TorchArrays()
    plan = dev.plan(BF16)
    batches = [make_batch(BF16, seed) for seed in (71, 72, 73)]
    batches = [replace(batches[0], q=batch.q) for batch in batches]
    wants = [BoundBatch(dev, plan, batch).run() for batch in batches]
    given = upload_all(producer, batches[0])
    sources = [producer.upload(batch.q) for batch in batches]
    source = sources[0].clone()
    bound = plan.bind(**given)
    result = torch.empty_like(given["out"])

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        given["q"].copy_(source)
        bound.launch(torch.cuda.current_stream())
        result.copy_(given["out"])
        given["out"].fill_(float("nan"))
    for tensor, want in [*zip(sources, wants, strict=True), (sources[0], wants[0])]:
        source.copy_(tensor)
        graph.replay()
        assert producer.download(result) == want.out.tobytes()
        assert producer.download(given["lse"]) == want.lse.tobytes()
        assert given["out"].isnan().all()


def test_one_bind_captured_by_every_library(dev):
    bound = BoundBatch(dev, dev.plan(BF16), make_batch(BF16))
    first = bound.run().bits
    graphs = [capture(library, bound.bound.launch) for library in ("driver", "cupy", "cuda.core")]
    for graph in [*graphs, *reversed(graphs)]:
        bound.poison()
        wait_for_device()
        graph.replay()
        assert bound.result().bits == first
