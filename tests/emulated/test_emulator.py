"""The emulator itself: what its twins compute, what it refuses, and what it finds."""

import gc
import inspect
import math
import math as m
import os
import re
import subprocess
import sys
import time
from collections import namedtuple
from fractions import Fraction
from math import exp as exponential

import numba
import numpy as np
import pytest
from greenlet import greenlet
from numba import boolean, cuda, float32, int32, int64, uint8, uint16, uint32, uint64
from numba.cuda import libdevice, threadIdx, types
from numba.cuda.extending import intrinsic

from nbverify.emulator import Emulator, register_twin, warp_collective
from nbverify.emulator import numbers as emulated_numbers
from nbverify.emulator.memory import CheckedArray
from nbverify.errors import ArgumentError, DeadlockError, MemoryAccessError, NbverifyError

FULL = 0xFFFFFFFF
BLOCK = 64
LAUNCH_SECONDS = 0.3  # 4 blocks of 128 threads, 40 block barriers
READ_SECONDS = 0.35e-6
SLOW_MACHINE = 4  # the two bounds above are for the machine they were measured on
THIS = os.path.basename(__file__)


def launch(body, *, grid=1, block=32, seed=0, shared_bytes=0, name="k", **fields):
    """Run ``body`` with a named tuple of ``fields``; the tuple."""
    args = namedtuple("Args", fields)(**fields)
    Emulator(seed=seed).launch(body, args, grid=grid, block=block, shared_bytes=shared_bytes, name=name)
    return args


def seen(body, **options):
    """What one thread appends to ``args.seen``."""
    return launch(body, seen=[], **{"block": 1, **options}).seen


def outputs(body, dtype=np.int64, **options):
    """Element t of ``args.out`` for each thread t of the grid."""
    count = options.get("grid", 1) * options.setdefault("block", 32)
    return launch(body, out=np.full(count, 99, dtype), **options).out.tolist()


# ------------------------------------------------------------------------------------------------------- interface


@pytest.mark.parametrize("blocks", [0, -1, 1.0, True])
def test_blocks_is_checked(blocks):
    with pytest.raises(ArgumentError, match="blocks: expected an int >= 1"):
        Emulator(blocks=blocks)


def test_attributes():
    emulator = Emulator(blocks=3, seed=7)
    assert (emulator.blocks, emulator.seed) == (3, 7)
    assert (Emulator().blocks, Emulator().seed) == (4, 0)


@pytest.mark.parametrize("change", [{"grid": 0}, {"block": 0}, {"block": 1025}, {"shared_bytes": -1}])
def test_launch_is_checked(change):
    with pytest.raises(ArgumentError, match=next(iter(change))):
        launch(lambda args: None, **change)


def test_two_dimensional_argument_is_refused():
    with pytest.raises(ArgumentError, match="pool: expected a 1-D array"):
        launch(lambda args: None, pool=np.zeros((2, 2)))


def test_importing_it_does_not_import_numba():
    code = "import sys, nbverify.emulator; assert not any(m.split('.')[0] == 'numba' for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_arguments_arrive_as_they_are():
    def body(args):
        args.seen.append((args.i, args.f, args.x))

    ((i, f, x),) = launch(body, block=1, seen=[], i=3, f=np.float32(0.1), x=np.zeros(3)).seen
    assert type(i) is int and type(f) is np.float32 and isinstance(x, CheckedArray) and x.name == "x"


# ------------------------------------------------------------------------------------------------ indices and names


def test_indices():
    def body(args):
        i = cuda.grid(1)
        assert i == cuda.blockIdx.x * cuda.blockDim.x + threadIdx.x
        assert cuda.gridsize(1) == cuda.gridDim.x * cuda.blockDim.x
        assert cuda.laneid == cuda.threadIdx.x % cuda.warpsize
        assert (cuda.threadIdx.y, cuda.threadIdx.z, cuda.gridDim.y, cuda.blockDim.z) == (0, 0, 1, 1)
        args.out[i] = i

    assert outputs(body, grid=3, block=40) == list(range(120))


@cuda.jit(device=True)
def decorated(x):
    return uint8(plain(x))


def plain(x):
    return libdevice.fmul_rn(x, x)


@cuda.jit(device=True)
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


Shape = namedtuple("Shape", ["rows", "columns"])
Tools = namedtuple("Tools", ["twice", "cast"])


def make_body(modify, constants, tools):
    @cuda.jit(device=True)
    def inner(x):
        return modify(x)

    changed = cuda.jit(device=True)(modify)

    def body(args):
        inside = [int32(v) for v in (1.5, 2**31)]  # a comprehension has globals too
        args.seen.append((inner(3), changed(4), constants, tools.twice(tools.cast(300)), inside))

    return body


def test_reached_functions_are_localised():
    constants = Shape(3, 4)
    body = make_body(lambda x: uint8(x + 254), constants, Tools(plain, uint8))
    ((a, b, c, d, e),) = seen(body)
    assert (a, b, d, e) == (1, 2, 44 * 44, [1, -(2**31)]) and c is constants


def test_device_functions_recursion_and_dispatchers():
    def body(args):
        args.seen.append((decorated(float32(3)), factorial(10)))

    assert seen(cuda.jit(body)) == [(9, 3628800)]


def test_twins_are_found_by_value_not_by_name():
    def body(args, multiply=libdevice.fmul_rn):
        args.seen.append(m.exp(float32(0)))
        args.seen.append(exponential(float32(0)))
        args.seen.append(numba.float32(1.0))
        args.seen.append(types.float32(1.0))
        args.seen.append(multiply(float32(1), float32(1)))
        args.seen.append(numba.cuda.fma(float32(0), float32(0), float32(1)))

    values = seen(body)
    assert values == [1] * 6 and all(type(value) is np.float32 for value in values)


def test_code_object_is_the_same():
    """So that breakpoints, pdb and coverage meet the kernel's own lines."""
    frames, lines = [], []

    def body(args):
        frames.append(inspect.currentframe().f_code)
        args.out[cuda.threadIdx.x] = 1

    def trace(frame, event, argument):
        if frame.f_code is body.__code__ and event == "line":
            lines.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        launch(body, block=1, out=np.zeros(1))
    finally:
        sys.settrace(before)
    first = body.__code__.co_firstlineno
    assert frames == [body.__code__] and lines == [first + 1, first + 2]


def test_numpy_and_the_standard_library_stay():
    def body(args):
        args.seen.append((np.sqrt, time.sleep, numba.cuda.laneid))

    assert seen(body) == [(np.sqrt, time.sleep, 0)]


CONSTANT = np.array([3, 4], np.int32)
SIGNED = int32(2**31 - 1)


def test_constants_of_the_module():
    def body(args):
        args.seen.append((CONSTANT[1], SIGNED + 1))

    ((element, total),) = seen(body)
    assert (element, total, type(total)) == (4, 2**31, int)


def test_constant_arrays_are_read_only():
    def body(args):
        CONSTANT[0] = 1

    with pytest.raises(MemoryAccessError, match="read-only"):
        launch(body)
    assert CONSTANT[0] == 3


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda: libdevice.sinpif(float32(1)), "libdevice.sinpif"),
        (lambda: math.gamma(float32(1)), "math.gamma"),
        (lambda: cuda.match_any_sync(FULL, 1), "match_any_sync"),
        (lambda: types.UniTuple(float32, 2), "UniTuple"),
        (lambda: untwinned(1), "untwinned"),
    ],
    ids=["libdevice", "math", "cuda", "type", "intrinsic"],
)
def test_missing_twin_is_named(use, name):
    with pytest.raises(NotImplementedError, match=f"no twin of .*{name}"):
        launch(lambda args: use(), block=1)


@intrinsic
def untwinned(typingctx, x):
    """Has no twin."""


@intrinsic
def reverse_warp(typingctx, x):
    """Lane i gets the value of lane 31 - i."""


register_twin(reverse_warp, lambda x: warp_collective(x, lambda values: values[::-1]))


@pytest.mark.parametrize("seed", range(3))
def test_registered_twin_works_on_whole_warps(seed):
    def body(args):
        args.out[cuda.threadIdx.x] = reverse_warp(cuda.threadIdx.x)

    assert outputs(body, block=64, seed=seed) == [*range(31, -1, -1), *range(63, 31, -1)]


def test_collective_runs_its_work_once():
    calls = []
    register_twin(untwinned_collective, lambda x: warp_collective(x, lambda v: calls.append(v) or v))
    launch(lambda args: untwinned_collective(cuda.laneid), block=40)
    assert calls == [list(range(32)), [*range(8)] + [None] * 24]


@intrinsic
def untwinned_collective(typingctx, x):
    """Gets its twin in the test above."""


# ------------------------------------------------------------------------------------------------------------ casts


def test_signed_casts_wrap_and_truncate():
    def body(args):
        args.seen.extend([int32(2**31), int32(-(2**31) - 1), int64(2**63), int32(-1.9), int32(uint32(FULL))])
        args.seen.append(types.int8(200))

    values = seen(body)
    assert values == [-(2**31), 2**31 - 1, -(2**63), -1, -1, -56] and all(type(v) is int for v in values)


def test_unsigned_casts_wrap():
    def body(args):
        args.seen.extend([uint8(-1), uint16(65537), uint32(-1), uint64(-1), uint32(3.7)])
        args.seen.append(uint32(1) << uint32(31) << uint32(1))
        args.seen.append(uint32(FULL) + uint32(2))

    values = seen(body)
    assert values == [255, 1, FULL, 2**64 - 1, 3, 0, 1]
    assert [type(v) for v in values[:4]] == [np.uint8, np.uint16, np.uint32, np.uint64]


def test_float_casts():
    def body(args):
        args.seen.extend([float32(0.1), float32(1e300), types.float16(1), types.float64(0.1), boolean(3)])
        args.seen.append(uint32(0x3F800000).view(np.float32))

    values = seen(body)
    assert values == [np.float32(0.1), np.inf, 1, 0.1, True, 1]
    assert [type(v) for v in values] == [np.float32, np.float32, np.float16, np.float64, bool, np.float32]


def test_conversion_of_nan_to_an_integer_is_an_error():  # undefined on the GPU
    with pytest.raises(ValueError, match="NaN"):
        launch(lambda args: int32(float32(math.nan)))


def test_no_numpy_warnings():
    def body(args):
        args.seen.append(float32(3e38) * float32(10) - float32(1) / float32(0))

    with np.errstate(all="raise"):
        assert np.isnan(seen(body)).all()


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_max_and_min_drop_nan():
    nan = float32(math.nan)

    def body(args):
        args.seen.extend([max(nan, float32(1)), max(float32(1), nan), min(nan, float32(1)), min(float32(1), nan)])
        args.seen.extend([max(1, 3, 2), min(3, 1, 2), max([1, 2]), max(float32(1), float32(2)), min(4, 5)])

    assert seen(body) == [1, 1, 1, 1, 3, 1, 2, 2, 4]


def test_math_keeps_float32_and_never_raises():
    def body(args):
        one = float32(1)
        args.seen.extend(
            [math.exp2(one), math.exp(one), math.log(one), math.sqrt(one), math.floor(one), math.tanh(one)]
        )
        args.seen.extend([math.log(float32(0)), math.exp(float32(1000)), math.sqrt(float32(-1)), math.pow(one, one)])
        args.seen.extend([math.isnan(float32(math.nan)), math.isinf(float32(-math.inf)), math.isfinite(one)])
        args.seen.append(math.exp(1.0))

    values = seen(body)
    assert all(type(value) is np.float32 for value in values[:10])
    assert values[0] == 2 and values[1] == np.float32(math.e) and values[6] == -np.inf and values[7] == np.inf
    assert np.isnan(values[8]) and values[10:13] == [True, True, True] and values[13] == math.e


def test_fma_rounds_once():
    # a * b = 2^-24 + 2^-54 exactly: above the tie between 1 and 1 + 2^-23, by less than float64 can say beside 1.
    a, b = float32(80581), float32(13325 * 2.0**-54)

    def body(args):
        args.seen.extend([cuda.fma(a, b, float32(1)), cuda.fma(a, b, float32(1) + float32(2.0**-23))])
        args.seen.extend([cuda.fma(-a, b, float32(-1)), cuda.fma(float32(math.inf), float32(0), float32(1))])
        args.seen.append(cuda.fma(2.0**-60, 2.0**-60, 1.0))

    ulp = 2.0**-23
    assert seen(body)[:3] == [1 + ulp, 1 + 2 * ulp, -1 - ulp]
    assert np.isnan(seen(body)[3]) and seen(body)[4] == 1


def test_fma_equals_exact_arithmetic():
    rng = np.random.default_rng(5)
    for _ in range(2000):
        a, b, c = (np.float32(rng.integers(-(1 << 24), 1 << 24) * 2.0 ** rng.integers(-40, -8)) for _ in range(3))
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        assert emulated_numbers.fma(a, b, c) == nearest_float32(exact)


def nearest_float32(exact):
    """The float32 nearest to a Fraction, ties to even."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.uint32)) & 1))


def test_libdevice():
    def body(args):
        third = libdevice.fdiv_rn(float32(1), float32(3))
        args.seen.extend([third, libdevice.fmul_rn(third, third), libdevice.fadd_rn(third, third)])
        args.seen.extend([libdevice.fsub_rn(third, third), libdevice.half2float(0x3C00), libdevice.exp2f(float32(3))])
        args.seen.append(libdevice.logf(float32(0)))
        args.seen.extend([libdevice.float2half_rn(float32(-2)), libdevice.float2half_rn(float32(1e6))])
        args.seen.extend([libdevice.float2half_rn(float32(math.nan)), libdevice.half2float(-0x4000)])

    values, third = seen(body), np.float32(1) / np.float32(3)
    assert values == [third, third * third, third + third, 0, 1, 8, -np.inf, 0xC000 - 65536, 0x7C00, 0x7FFF, -2]
    assert all(type(value) is np.float32 for value in values[:7]) and type(values[7]) is int


def test_bits():
    def body(args):
        args.seen.extend([cuda.popc(uint32(FULL)), cuda.popc(-1), cuda.popc(5), cuda.popc(-(2**40))])
        args.seen.extend([cuda.clz(uint32(1)), cuda.clz(uint64(1)), cuda.clz(uint32(0))])
        args.seen.extend([cuda.ffs(uint32(8)), cuda.ffs(0), cuda.ffs(-4), cuda.brev(uint32(1)), cuda.brev(uint64(2))])
        args.seen.extend([cuda.selp(True, 1, 2), cuda.selp(0, 1, 2)])

    assert seen(body) == [32, 32, 2, 24, 31, 63, 32, 4, 0, 3, 1 << 31, 1 << 62, 1, 2]


def test_clz_of_an_int_of_unknown_width_is_refused():
    with pytest.raises(TypeError, match=r"cuda\.clz\(uint32\(x\)\)"):
        launch(lambda args: cuda.clz(1))


# ----------------------------------------------------------------------------------------------------------- arrays


def test_reads_have_the_documented_types():
    for dtype, expected in [("int8", int), ("int32", int), ("int64", int), ("uint8", np.uint8), ("uint32", np.uint32)]:
        assert type(CheckedArray(np.ones(1, dtype), "a")[0]) is expected
    assert type(CheckedArray(np.ones(1, np.float32), "a")[0]) is np.float32


def test_array_attributes():
    array = CheckedArray(np.arange(6, dtype=np.int32), "a")
    assert (array.size, array.shape, len(array), array.dtype, array.ndim) == (6, (6,), 6, np.int32, 1)
    assert list(array) == [0, 1, 2, 3, 4, 5] and array[np.uint32(2)] == 2 and array[np.int64(3)] == 3


@pytest.mark.parametrize("index", [-1, 4, np.int64(4), np.uint32(7), 2**40])
@pytest.mark.parametrize("access", ["read", "write"])
def test_access_outside_is_named(index, access):
    def body(args):
        if cuda.threadIdx.x == 5 and cuda.blockIdx.x == 1:
            if access == "read":
                args.table[index]
            else:
                args.table[index] = 1

    with pytest.raises(MemoryAccessError) as caught:
        launch(body, grid=2, block=8, name="verify", table=np.zeros(4, np.int32))
    text = str(caught.value)
    assert f"table[{index}]: outside its 4 elements; kernel verify, block 1, thread 5" in text


def test_empty_array_has_no_element():
    with pytest.raises(MemoryAccessError, match=r"lse\[0\]: outside its 0 elements"):
        launch(lambda args: args.lse[0], lse=np.zeros(0, np.float32))


@pytest.mark.parametrize("index", [1.0, np.float32(1), None, "x"])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_index_must_be_an_integer(index, dtype):
    array = CheckedArray(np.zeros(4, dtype), "a")
    with pytest.raises(TypeError, match="index must be an integer"):
        array[index]
    with pytest.raises(TypeError, match="index must be an integer"):
        array[index] = 0


def test_slices_are_checked_arrays():
    memory = np.arange(10, dtype=np.int32)
    part = CheckedArray(memory, "a")[2:6]
    part[0] = 77
    assert part.size == 4 and memory[2] == 77 and part[3] == 5
    with pytest.raises(MemoryAccessError, match=r"a\[2:6\]\[4\]: outside its 4 elements"):
        part[4]
    whole = CheckedArray(memory, "a")
    assert whole[:3].size == 3 and whole[8:].size == 2 and whole[5:2].size == 0
    for outside in (slice(0, 11), slice(-1, 3), slice(11, 12), slice(2, -1)):
        with pytest.raises(MemoryAccessError, match="outside its 10 elements"):
            whole[outside]
    with pytest.raises(NotImplementedError, match="unit step"):
        whole[0:4:2]


def test_slice_assignment():
    memory = np.zeros(6, np.uint16)
    array = CheckedArray(memory, "a")
    array[1:3] = 70000
    array[4:6] = CheckedArray(np.array([5, 6], np.int32), "b")
    assert memory.tolist() == [0, 4464, 4464, 0, 5, 6]


def test_stores_convert_as_c_does():
    words, bits, floats = np.zeros(4, np.uint16), np.zeros(4, np.int32), np.zeros(2, np.float32)
    for i, value in enumerate([70000, -1, np.uint32(0x12345), np.float32(3.9)]):
        CheckedArray(words, "words")[i] = value
    for i, value in enumerate([2**31, -(2**31) - 1, np.uint32(FULL), np.int64(1 << 32)]):
        CheckedArray(bits, "bits")[i] = value
    CheckedArray(floats, "floats")[0] = 0.1
    CheckedArray(floats, "floats")[1] = math.nan
    assert words.tolist() == [4464, 65535, 0x2345, 3] and bits.tolist() == [-(2**31), 2**31 - 1, -1, 0]
    assert floats[0] == np.float32(0.1) and np.isnan(floats[1])


def test_read_only_memory():
    constant = np.zeros(4, np.float32)
    constant.flags.writeable = False

    def body(args):
        args.q.view(np.uint32)[1] = 1

    with pytest.raises(
        MemoryAccessError, match=r"q\.view\(uint32\)\[1\]: written, but it is read-only; kernel k, block 0"
    ):
        launch(body, q=constant)
    assert CheckedArray(constant, "q")[1] == 0


def test_view_counts_elements_of_the_new_type():
    array = CheckedArray(np.arange(9, dtype=np.uint16), "a")
    assert array.view(np.uint32).size == 4 and array.view(np.uint8).size == 18
    assert array.view(np.uint32)[1] == 2 | 3 << 16
    assert array.view(np.float32).dtype == np.float32 and array.view(np.uint32) is array.view(np.uint32)


def test_view_in_a_kernel_takes_numba_types():
    def body(args):
        args.seen.append((args.x.view(uint32)[0], args.x.view(types.int32)[0], args.x.view(np.uint8)[3]))

    assert launch(body, block=1, seen=[], x=np.array([-0.0], np.float32)).seen == [(1 << 31, -(2**31), 128)]


def test_misaligned_view():
    memory = np.zeros(16, np.uint16)

    def body(args):
        args.k[args.start :].view(np.uint32)[0]

    launch(body, k=memory, start=2)
    with pytest.raises(MemoryAccessError, match=r"k\[1:16\]\.view\(uint32\): misaligned.*kernel k, block 0, thread 0"):
        launch(body, k=memory, start=1)


# -------------------------------------------------------------------------------------------- shared and local memory


@pytest.mark.parametrize("seed", range(4))
def test_uninitialised_memory_is_garbage_with_nan(seed):
    def body(args):
        dynamic, static = cuda.shared.array(0, float32), cuda.shared.array(256, float32)
        local, integers = cuda.local.array(256, float32), cuda.local.array((256,), int32)
        halves = cuda.local.array(256, types.float16)
        args.seen.extend([list(dynamic), list(static), list(local), list(integers), list(halves)])

    *floats, integers, halves = seen(body, seed=seed, shared_bytes=1024)
    for values in [*floats, halves]:
        assert len(values) == 256 and 10 < np.isnan(values).sum() < 150
    assert len(set(integers)) > 200


def test_garbage_depends_on_the_seed_and_the_block():
    def body(args):
        args.seen.append(list(cuda.shared.array(0, uint32)))

    a, b = (seen(body, grid=2, seed=seed, shared_bytes=64) for seed in (0, 1))
    assert a[0] != a[1] and a != b and a == seen(body, grid=2, seed=0, shared_bytes=64)


def test_dynamic_shared_memory_starts_at_the_same_base():
    def body(args):
        words, bytes_ = cuda.shared.array(0, uint32, 16), cuda.shared.array(0, dtype=uint8, alignment=128)
        words[cuda.threadIdx.x] = cuda.threadIdx.x + 256
        cuda.syncthreads()
        other = (cuda.threadIdx.x + 1) % 32
        args.out[cuda.threadIdx.x] = bytes_[4 * other] + bytes_[4 * other + 1]
        assert words.size == 33 and bytes_.size == 135 and words.address % 1024 == 0

    assert outputs(body, shared_bytes=135) == [*range(2, 33), 1]


def test_dynamic_shared_memory_has_an_end():
    with pytest.raises(MemoryAccessError, match=r"shared memory\.view\(float32\)\[8\]: outside its 8 elements"):
        launch(lambda args: cuda.shared.array(0, float32)[8], shared_bytes=32)


def make_exchange(count):
    @cuda.jit(device=True)
    def buffer():
        return cuda.shared.array(count, int32)

    return buffer


small, large = make_exchange(32), make_exchange(32)


def test_static_shared_memory_belongs_to_its_line():
    def body(args):
        t = cuda.threadIdx.x
        if t == 31:
            b = large()  # this thread asks in another order
        a, b = small(), large()
        a[t], b[t] = t, 100 + t
        cuda.syncthreads()
        args.out[t] = small()[31 - t] * 1000 + b[31 - t]

    assert outputs(body, seed=2) == [1000 * t + 100 + t for t in range(31, -1, -1)]


def test_static_shared_arrays_of_two_lines_are_two():
    def body(args):
        a = cuda.shared.array(1, int32)
        b = cuda.shared.array(1, int32)
        a[0], b[0] = 1, 2
        args.seen.append((a[0], b[0]))

    assert seen(body) == [(1, 2)]


def test_blocks_do_not_share():
    def body(args):
        x = cuda.shared.array(1, int32)
        x[0] = cuda.blockIdx.x
        cuda.cg.this_grid().sync()
        args.out[cuda.blockIdx.x] = x[0]

    assert outputs(body, grid=4, block=1) == [0, 1, 2, 3]


def test_local_memory_is_a_threads_own():
    def body(args):
        mine = cuda.local.array(2, int32)
        mine[1] = cuda.threadIdx.x
        cuda.syncthreads()
        args.out[cuda.threadIdx.x] = mine[1]

    assert outputs(body) == list(range(32))


def test_large_local_arrays_do_not_overlap():
    def body(args):
        mine = cuda.local.array(4000, int32)  # eight of these exceed what garbage is drawn from
        for i in range(mine.size):
            mine[i] = cuda.threadIdx.x
        cuda.syncthreads()
        args.out[cuda.threadIdx.x] = sum(mine) // mine.size

    assert outputs(body, block=8) == list(range(8))


def test_only_one_dimension():
    with pytest.raises(NotImplementedError, match="1-D arrays only"):
        launch(lambda args: cuda.local.array((2, 2), int32))


# ------------------------------------------------------------------------------------------------------------ warps


@pytest.mark.parametrize(
    "shuffle, b, source",
    [
        ("shfl_sync", 3, lambda lane: 3),
        ("shfl_sync", 35, lambda lane: 3),  # PTX takes the low five bits
        ("shfl_up_sync", 2, lambda lane: lane - 2 if lane >= 2 else lane),
        ("shfl_down_sync", 2, lambda lane: lane + 2 if lane + 2 < 32 else lane),
        ("shfl_xor_sync", 5, lambda lane: lane ^ 5),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffles(shuffle, b, source, seed):
    run = getattr(cuda, shuffle)

    def body(args):
        args.out[cuda.grid(1)] = run(FULL, cuda.grid(1) * 10, b)

    expected = [10 * (32 * warp + source(lane)) for warp in range(2) for lane in range(32)]
    assert outputs(body, block=64, seed=seed) == expected


def test_shuffle_in_a_partial_warp():
    def body(args):
        args.out[cuda.threadIdx.x] = cuda.shfl_down_sync(FULL, cuda.threadIdx.x, 4)

    assert outputs(body, block=40)[32:] == [36, 37, 38, 39, 36, 37, 38, 39]


def test_shuffle_waits_for_its_mask_only():
    def body(args):
        t = cuda.threadIdx.x
        if t < 4:
            args.out[t] = cuda.shfl_xor_sync(0xF, t, 1)
        elif t < 8:
            args.out[t] = cuda.shfl_xor_sync(0xF0, t, 1)

    assert outputs(body)[:9] == [1, 0, 3, 2, 5, 4, 7, 6, 99]


def test_lane_outside_its_own_mask():
    with pytest.raises(ValueError, match=r"syncwarp: lane 4 calls it with the mask 0x0000000f"):
        launch(lambda args: cuda.syncwarp(0xF))


def test_votes():
    def body(args):
        t = cuda.threadIdx.x
        args.seen.append(
            (
                cuda.all_sync(FULL, t < 32), cuda.all_sync(FULL, t < 31), cuda.any_sync(FULL, t == 7),
                cuda.any_sync(FULL, t > 31), cuda.ballot_sync(FULL, t % 2 == 0), cuda.ballot_sync(FULL, True),
                cuda.eq_sync(FULL, True), cuda.eq_sync(FULL, t == 0), cuda.activemask(),
                cuda.lanemask_lt() == (1 << t) - 1,
            )
        )  # fmt: skip

    values = launch(body, seen=[]).seen
    assert values == [(True, False, True, False, 0x55555555, -1, True, False, FULL, True)] * 32


def test_votes_of_a_partial_warp():
    def body(args):
        args.seen.append((cuda.all_sync(FULL, True), cuda.ballot_sync(FULL, True), cuda.activemask()))

    assert launch(body, block=5, seen=[]).seen == [(True, 31, 31)] * 5


@pytest.mark.parametrize("seed", range(1, 6))
def test_syncwarp_orders_a_warp(seed):
    def body(args):
        shared = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        shared[t] = t
        cuda.syncwarp()
        args.out[t] = shared[t ^ 31]

    assert outputs(body, block=64, seed=seed) == [t ^ 31 for t in range(64)]


# --------------------------------------------------------------------------------------------------------- barriers


def test_votes_of_the_block():
    def body(args):
        t = cuda.threadIdx.x
        args.seen.append((cuda.syncthreads_count(t < 3), cuda.syncthreads_and(t < 40), cuda.syncthreads_and(t),
                          cuda.syncthreads_or(t == 39), cuda.syncthreads_or(t > 39)))  # fmt: skip

    assert launch(body, block=40, grid=2, seen=[]).seen == [(3, 1, 0, 1, 0)] * 80


def make_neighbour_sum(barrier):
    def body(args):
        t, i = cuda.threadIdx.x, cuda.grid(1)
        args.scratch[i] = i
        if barrier == "block":
            cuda.syncthreads()
        elif barrier == "grid":
            cuda.cg.this_grid().sync()
        size = cuda.blockDim.x
        base = cuda.blockIdx.x * size
        args.in_block[i] = args.scratch[base + (t + 1) % size]
        args.in_grid[i] = args.scratch[(i + size) % cuda.gridsize(1)]

    return body


def neighbours_are_right(barrier, seed):
    """Whether reads from the block, and from other blocks, saw what was written."""
    count = 3 * BLOCK
    arrays = {name: np.full(count, -1) for name in ("scratch", "in_block", "in_grid")}
    result = launch(make_neighbour_sum(barrier), grid=3, block=BLOCK, seed=seed, **arrays)
    i = np.arange(count)
    return (
        np.array_equal(result.in_block, i // BLOCK * BLOCK + (i + 1) % BLOCK),
        np.array_equal(result.in_grid, (i + BLOCK) % count),
    )


@pytest.mark.parametrize("seed", range(8))
def test_barriers_hold_in_every_order(seed):
    assert neighbours_are_right("grid", seed) == (True, True)
    assert neighbours_are_right("block", seed)[0]


@pytest.mark.parametrize("seed", range(8))
def test_missing_barrier_shows(seed):
    assert neighbours_are_right("none", seed) == (False, False)
    assert not neighbours_are_right("block", seed)[1], "a block barrier must not stand for a grid barrier"


def run_order(seed):
    """Thread ids of 2 blocks of 64 threads, in the order in which they ran."""
    return launch(lambda args: args.seen.append(cuda.grid(1)), grid=2, block=64, seed=seed, seen=[]).seen


def test_order_is_a_function_of_the_seed():
    assert run_order(0) == list(range(128))
    assert all(run_order(seed) == run_order(seed) and sorted(run_order(seed)) == run_order(0) for seed in range(6))
    assert len({tuple(run_order(seed)) for seed in range(12)}) == 12
    # Even seeds run a warp, and a block, ahead of the others; odd ones mix all.
    assert all({i // 32 for i in run_order(seed)[:32]} == {run_order(seed)[0] // 32} for seed in (2, 4, 6))
    assert all(len({i // 32 for i in run_order(seed)[:32]}) == 4 for seed in (1, 3, 5))
    firsts = {run_order(seed)[0] // 64 for seed in range(2, 16, 2)}
    assert firsts == {0, 1}, "some seed starts with the last block"


def test_sum_over_the_grid():
    x = np.arange(1000, dtype=np.float32)

    def body(args):
        everyone, i = cuda.cg.this_grid(), cuda.grid(1)
        total = float32(0)
        for k in range(i, args.x.size, cuda.gridsize(1)):
            total += args.x[k]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(FULL, total, step)
        if cuda.laneid == 0:
            args.part[i // 32] = total
        everyone.sync()
        if i == 0:
            total = float32(0)
            for k in range(args.part.size):
                total += args.part[k]
            args.out[0] = total

    for seed in range(4):
        result = launch(body, grid=4, block=64, seed=seed, x=x, part=np.full(8, np.nan), out=np.zeros(1, np.float32))
        assert result.out[0] == x.sum()


# --------------------------------------------------------------------------------------------------------- atomics


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32, np.int64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_atomic_add_loses_nothing(dtype, seed):
    def body(args):
        args.out[cuda.grid(1)] = cuda.atomic.add(args.counter, 0, 1)

    counter = np.zeros(1, dtype)
    result = launch(body, grid=3, block=40, seed=seed, counter=counter, out=np.zeros(120, dtype))
    assert counter[0] == 120 and sorted(result.out) == list(range(120))


@pytest.mark.parametrize(
    "name, start, values, stored",
    [
        ("sub", 5, (7,), -2),
        ("max", 5, (7,), 7),
        ("max", 5, (3,), 5),
        ("min", 5, (3,), 3),
        ("exch", 5, (9,), 9),
        ("cas", 5, (5, 8), 8),
        ("cas", 5, (4, 8), 5),
        ("and_", 6, (3,), 2),
        ("or_", 6, (1,), 7),
        ("xor", 6, (3,), 5),
    ],
)
def test_atomics(name, start, values, stored):
    operation = getattr(cuda.atomic, name)

    def body(args):
        args.seen.append(operation(args.x, 1, *values))

    result = launch(body, block=1, seen=[], x=np.array([0, start], np.int32))
    assert result.seen == [start] and result.x.tolist() == [0, stored]


def test_atomics_wrap_and_drop_nan():
    def body(args):
        cuda.atomic.sub(args.words, 0, 1)
        cuda.atomic.max(args.floats, (0,), float32(1))
        cuda.atomic.max(args.floats, 0, float32(math.nan))

    result = launch(body, block=1, words=np.zeros(1, np.uint32), floats=np.full(1, np.nan, np.float32))
    assert result.words[0] == FULL and result.floats[0] == 1


def test_atomics_are_checked():
    with pytest.raises(MemoryAccessError, match=r"counter\[1\]"):
        launch(lambda args: cuda.atomic.add(args.counter, 1, 1), counter=np.zeros(1, np.int32))


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_waiting_for_an_atomic_lets_others_run(seed, sleeps):
    def body(args):
        if cuda.grid(1) == 0:
            while cuda.atomic.cas(args.flag, 0, 1, 1) != 1:
                if sleeps:
                    cuda.nanosleep(100)
            args.out[0] = args.data[0]
        elif cuda.grid(1) == 40:
            args.data[0] = 42
            cuda.threadfence()
            cuda.atomic.exch(args.flag, 0, 1)

    zeros = {name: np.zeros(1, np.int32) for name in ("flag", "data", "out")}
    assert launch(body, grid=2, seed=seed, **zeros).out[0] == 42


def test_publishing_too_early_shows_under_some_seed():
    def body(args):
        arrived = cuda.atomic.add(args.count, 0, 1)  # wrong: counts before the value is stored
        args.data[cuda.grid(1)] = 1
        if arrived == cuda.gridsize(1) - 1:
            for i in range(args.data.size):
                args.sum[0] += args.data[i]

    def total(seed):
        zeros = {"count": np.zeros(1, np.int32), "data": np.zeros(64, np.int32), "sum": np.zeros(1, np.int32)}
        return launch(body, grid=2, seed=seed, **zeros).sum[0]

    assert min(total(seed) for seed in range(1, 7)) < 64


def test_cache_hints():
    def body(args):
        cuda.stcg(args.x, 1, cuda.ldcg(args.x, 0))

    assert launch(body, block=1, x=np.array([3, 0])).x.tolist() == [3, 3]


# --------------------------------------------------------------------------------------------------------- deadlocks


def deadlock(body, **options):
    with pytest.raises(DeadlockError) as caught:
        launch(body, name="verify", **options)
    return str(caught.value)


def line_of(body, text):
    lines, first = inspect.getsourcelines(body)
    return f"({THIS}:{first + next(i for i, line in enumerate(lines) if text in line)})"


def test_deadlock_after_an_early_return():
    def body(args):
        if cuda.threadIdx.x < 8 or cuda.threadIdx.x == 20:
            return
        cuda.syncthreads()

    text = deadlock(body, grid=3)
    assert text.splitlines()[0] == "kernel verify: no thread can run"
    where = line_of(body, "syncthreads")
    assert f"  blocks 0-2: threads 0-7, 20 returned; threads 8-19, 21-31 wait at syncthreads {where}" in text
    assert "a thread that returned does not arrive" in text


def test_deadlock_at_the_grid_barrier():
    def body(args):
        if cuda.blockIdx.x != 1:
            cuda.cg.this_grid().sync()

    text = deadlock(body, grid=3)
    where = line_of(body, "sync()")
    assert f"  blocks 0, 2: threads 0-31 wait at grid.sync {where}" in text
    assert "  block 1: threads 0-31 returned" in text


def test_deadlock_of_a_warp_and_a_block():
    def body(args):
        if cuda.threadIdx.x >= 100:
            cuda.shfl_xor_sync(FULL, 1, 1)
        elif cuda.threadIdx.x >= 96:
            cuda.syncwarp()
        else:
            cuda.syncthreads()

    text = deadlock(body, block=128)
    assert "block 0: threads 0-95 wait at syncthreads" in text
    assert "threads 96-99 wait at syncwarp of warp 3 (syncwarp, lanes 0-31)" in text
    assert "threads 100-127 wait at warp shuffle of warp 3 (shfl_xor_sync, lanes 0-31)" in text


def test_two_lines_are_one_barrier():  # as on the hardware, where both are barrier 0
    def body(args):
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()
        else:
            cuda.syncthreads()
        args.out[cuda.threadIdx.x] = 1

    assert outputs(body) == [1] * 32


def test_spinning_for_ever_is_a_deadlock():
    def body(args):
        while cuda.atomic.add(args.flag, 0, 0) == 0:
            cuda.nanosleep(100)

    text = deadlock(body, block=2, flag=np.zeros(1, np.int32))
    assert "threads spin and nothing changes" in text
    assert re.search(rf"block 0: threads 0(-1)? spin \({THIS}:", text)


def test_deadlock_is_the_package_s_error():
    assert issubclass(DeadlockError, NbverifyError)


# ------------------------------------------------------------------------------------------------------- exceptions


def test_exception_says_where():
    def body(args):
        if cuda.grid(1) == 37:
            raise KeyError("mine")
        cuda.syncthreads()

    with pytest.raises(KeyError) as caught:
        launch(body, grid=2, name="verify")
    place = "in kernel verify, block 1, thread 5"
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [place]
    else:
        assert str(caught.value.__cause__) == place
    assert caught.traceback[-1].name == "body", "the traceback must end in the kernel"


def test_threads_are_dropped_after_an_error():
    reached = []

    def body(args):
        if cuda.threadIdx.x == 31:
            raise KeyError
        try:
            cuda.syncthreads()
            reached.append("after the barrier")
        finally:
            cuda.syncthreads()  # were it to arrive, it would be the 32nd and open the barrier
            reached.append("after the barrier of the cleanup")

    with pytest.raises(KeyError):
        launch(body)
    assert reached == []
    gc.collect()
    assert not [x for x in gc.get_objects() if isinstance(x, greenlet) and x and hasattr(x, "lane")]


# ------------------------------------------------------------------------------------------------------------- speed


def test_speed_of_barriers():
    def body(args):
        for _ in range(40):
            cuda.syncthreads()

    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        launch(body, grid=4, block=128)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < LAUNCH_SECONDS * SLOW_MACHINE


@pytest.mark.parametrize("dtype", ["int32", "uint16", "float32"])
def test_speed_of_reads(dtype):
    array, count = CheckedArray(np.ones(16, dtype), "a"), 20_000
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            array[5]
        seconds.append(time.perf_counter() - start)
    assert min(seconds) / count < READ_SECONDS * SLOW_MACHINE
