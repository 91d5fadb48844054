"""CPU twins of the PTX instructions: values in every lane, and what they refuse."""

from collections import namedtuple

import numpy as np
import pytest
from numba import cuda, float32, uint32, uint64
from support.ptx_cases import CASES

from nbverify.emulator import Emulator, ptx_twins
from nbverify.errors import DeadlockError, MemoryAccessError
from nbverify.kernels import ptx

SEEDS = [0, 1, 2, 3, 4]


def launch(body, *, block=32, shared_bytes=1024, seed=0, **fields):
    fields = {"x": np.arange(256, dtype=np.uint32), **fields}
    args = namedtuple("Args", fields)(**fields)
    Emulator(seed=seed).launch(body, args, grid=1, block=block, shared_bytes=shared_bytes, name="k")
    return args


def base_of(kind=uint32):
    return ptx.shared_address(cuda.shared.array(0, kind), 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, seed):
    case.emulate(seed)


def test_every_instruction_has_a_twin_and_a_case():
    intrinsics = {n for n, v in vars(ptx).items() if isinstance(v, type(ptx.ex2))}
    assert len(intrinsics) > 50
    assert intrinsics - set(ptx_twins.PTX_TWINS) == set()
    used = {name for case in CASES for name in names_of(case.body)}
    assert intrinsics - used == {"unroll_loops", "keep_loops"}  # the compiled tests have it


def names_of(body):
    inner = [cell.cell_contents for cell in body.__closure__ or ()]
    return {*body.__code__.co_names, *(name for f in inner if hasattr(f, "py_func") for name in names_of(f.py_func))}


# -------------------------------------------------------------------------------------------------- asynchronous copies


def test_a_copy_is_not_there_before_it_was_waited_for():
    seen = []

    def body(args):
        room = cuda.shared.array(0, float32)
        ptx.cp_async_16(ptx.shared_address(room, 0), ptx.global_address(args.y, 0))
        ptx.cp_async_commit()
        ptx.cp_async_16(ptx.shared_address(room, 4), ptx.global_address(args.y, 4))
        ptx.cp_async_commit()
        seen.append([room[0], room[4]])
        ptx.cp_async_wait(1)
        seen.append([room[0], room[4]])
        ptx.cp_async_wait(0)
        seen.append([room[0], room[4]])

    launch(body, block=1, y=np.arange(1, 9, dtype=np.float32))
    np.testing.assert_array_equal(seen, [[np.nan, np.nan], [1, np.nan], [1, 5]])


def test_a_copy_that_was_not_committed_is_not_waited_for():
    seen = []

    def body(args):
        room = cuda.shared.array(0, uint32)
        ptx.cp_async_16(ptx.shared_address(room, 0), ptx.global_address(args.x, 4))
        ptx.cp_async_wait(0)
        seen.append(int(room[0]))
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
        seen.append(int(room[0]))

    launch(body, block=1)
    assert seen == [0xFFFFFFFF, 4]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_copy_is_there_when_its_phase_is_complete(seed):
    seen = []

    def body(args):
        room = cuda.shared.array(0, uint32)
        bar = ptx.shared_address(room, 128)
        ptx.mbarrier_init(bar, 1)
        ptx.mbarrier_arrive_expect_tx(bar, 32)
        ptx.bulk_copy(ptx.shared_address(room, 0), ptx.global_address(args.x, 8), 16, bar)
        ptx.bulk_copy(ptx.shared_address(room, 4), ptx.global_address(args.x, 16), 16, bar)
        seen.append(int(room[0]))
        ptx.mbarrier_try_wait(bar, 0)
        seen.append([int(room[0]), int(room[4])])

    launch(body, block=1, seed=seed)
    assert seen == [0xFFFFFFFF, [8, 16]]


def test_a_missing_wait_is_a_wrong_result():
    """The ring's consumer reads before the phase: what a kernel that forgot the wait would give."""
    out = []

    def body(args):
        room = cuda.shared.array(0, float32)
        bar = ptx.shared_address(room, 128)
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(bar, 1)
            ptx.mbarrier_arrive_expect_tx(bar, 16)
            ptx.bulk_copy(ptx.shared_address(room, 0), ptx.global_address(args.y, 0), 16, bar)
        cuda.syncthreads()
        out.append(room[0])
        ptx.mbarrier_try_wait(bar, 0)

    launch(body, block=2, y=np.ones(4, np.float32))
    assert np.isnan(out).all()


def test_a_block_that_ends_before_its_copy():
    def body(args):
        bar = base_of() + 512
        ptx.mbarrier_init(bar, 1)
        ptx.bulk_copy(base_of(), ptx.global_address(args.x, 0), 16, bar)

    with pytest.raises(MemoryAccessError, match="bulk_copy of 16 bytes: still in flight when its block ended"):
        launch(body, block=1)


# ------------------------------------------------------------------------------------------------------------ addresses


def copy_to(byte, source=0):
    return lambda args: ptx.cp_async_16(base_of() + byte, ptx.global_address(args.x, source))


def bulk(destination=0, source=0, size=16, at=512):
    def body(args):
        bar = base_of() + at
        ptx.mbarrier_init(bar, 1)
        ptx.bulk_copy(base_of() + destination, ptx.global_address(args.x, source), size, bar)

    return body


REFUSED = {
    "cp.async to byte 8": (copy_to(8), "cp_async_16, destination: shared memory, byte 8: misaligned: .* 16"),
    "cp.async from byte 8": (copy_to(0, 2), "cp_async_16, source: x, byte 8: misaligned"),
    "cp.async past the end": (copy_to(1024), "cp_async_16, destination: shared memory, byte 1024: 16 bytes .* 1024"),
    "cp.async from past the end": (copy_to(0, 256), "source: x, byte 1024: 16 bytes there are outside its 1024 bytes"),
    "cp.async from nowhere": (
        lambda args: ptx.cp_async_16(base_of(), uint64(4096)),
        "cp_async_16, source: address 0x1000 is in no array",
    ),
    "ldmatrix row": (
        lambda args: ptx.ldmatrix_x4(base_of() + 16 * cuda.laneid + (2 if cuda.laneid == 5 else 0)),
        "ldmatrix_x4, row address of lane 5: shared memory, byte 82: misaligned",
    ),
    "ldmatrix past the end": (
        lambda args: ptx.ldmatrix_x1(base_of() + (1020 if cuda.laneid == 2 else 0)),
        "ldmatrix_x1, row address of lane 2: shared memory, byte 1020: 16 bytes there are outside",
    ),
    "v4 load": (lambda args: ptx.load_shared_v4_f32(base_of() + 4), "load_shared_v4_f32: shared memory, byte 4: mis"),
    "v4 store": (
        lambda args: ptx.store_global_v4_f32(ptx.global_address(args.x, 1), (float32(0),) * 4),
        "store_global_v4_f32: x, byte 4: misaligned",
    ),
    "bulk to": (bulk(destination=8), "bulk_copy, destination: shared memory, byte 8: misaligned"),
    "bulk from": (bulk(source=1), "bulk_copy, source: x, byte 4: misaligned"),
    "bulk size": (bulk(size=24), "bulk_copy: num_bytes: expected a multiple of 16, got 24"),
    "bulk past the end": (bulk(source=252, size=32), "bulk_copy, source: x, byte 1008: 32 bytes there are outside"),
    "mbarrier": (bulk(at=516), "mbarrier_init: shared memory, byte 516: misaligned: no multiple of 8"),
    "mbarrier not initialised": (
        lambda args: ptx.mbarrier_arrive(base_of()),
        "mbarrier_arrive: the mbarrier at shared byte 0 was not initialised",
    ),
    "word to": (
        lambda args: ptx.cp_async_4(base_of() + 2, ptx.global_address(args.x, 0)),
        "cp_async_4, destination: shared memory, byte 2: misaligned: no multiple of 4",
    ),
    "word from": (
        lambda args: ptx.cp_async_4(base_of(), ptx.global_address(args.x, 256)),
        "cp_async_4, source: x, byte 1024: 4 bytes there are outside",
    ),
    "view": (lambda args: ptx.shared_int64(base_of() + 4, 2), "shared_int64: shared memory, byte 4: misaligned"),
    "view past the end": (
        lambda args: ptx.shared_int64(base_of() + 1008, 3),
        "shared_int64: shared memory, byte 1008: 24 bytes there are outside",
    ),
    "pair": (
        lambda args: ptx.load_global_v2_f32_if(ptx.global_address(args.x, 1), 1),
        "load_global_v2_f32_if: x, byte 4: misaligned: no multiple of 8",
    ),
    "counter": (
        lambda args: ptx.atomic_add_u32(ptx.global_address(args.x, 0) + uint64(2), 1),
        "atomic_add_u32: x, byte 2: misaligned",
    ),
    "not shared": (lambda args: ptx.shared_address(args.x, 0), "shared_address: x is not in shared memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_accesses_are_refused_by_name(name):
    body, message = REFUSED[name]
    with pytest.raises(MemoryAccessError, match=message):
        launch(body)


def test_an_overwritten_mbarrier_is_found():
    def body(args):
        room = cuda.shared.array(0, uint32)
        ptx.mbarrier_init(ptx.shared_address(room, 0), 1)
        room[1] = 0
        ptx.mbarrier_arrive(ptx.shared_address(room, 0))

    with pytest.raises(MemoryAccessError, match="shared byte 0 was overwritten"):
        launch(body, block=1)


@pytest.mark.parametrize("write", [ptx.store_global_u32, ptx.atomic_add_u32], ids=["store", "atomic"])
def test_read_only_memory_is_not_written(write):
    y = np.zeros(4, np.uint32)
    y.flags.writeable = False
    with pytest.raises(MemoryAccessError, match="read-only"):
        launch(lambda args: write(ptx.global_address(args.y, 0), 1), block=1, y=y)


def test_a_view_reads_and_writes_the_memory_that_there_is():
    seen = []

    def body(args):
        view = ptx.shared_int64(base_of() + 16, 3)
        view[2] = -5
        seen.append(int(ptx.load_shared_u32(base_of() + 32)))
        with pytest.raises(MemoryAccessError, match="outside its 3 elements"):
            view[3]

    launch(body, block=1)
    assert seen == [0xFFFFFFFB]


def test_static_arrays_views_and_parts_have_addresses():
    seen = []

    def body(args):
        first, second = cuda.shared.array(4, uint32), cuda.shared.array(8, uint32)
        dynamic = cuda.shared.array(0, uint32)
        second[5], dynamic[7] = 11, 22
        seen.append(int(ptx.load_shared_u32(ptx.shared_address(second[2:], 3))))
        seen.append(int(ptx.load_shared_u32(ptx.shared_address(dynamic[6:].view(np.uint16), 2))))
        with pytest.raises(MemoryAccessError, match="shared array of line"):
            ptx.load_shared_u32(ptx.shared_address(first, 4))

    launch(body, block=1)
    assert seen == [11, 22]


# ------------------------------------------------------------------------------------------------------------- barriers


def flip(counter, blocks, adds):
    """One round of a barrier over a counter, where block 0 adds ``adds``."""

    def body(args):
        address = ptx.global_address(args.counter, 0)
        before = ptx.atomic_add_u32(address, uint32(adds if cuda.blockIdx.x == 0 else 1))
        ptx.wait_sign_flip(address, before)

    args = namedtuple("Args", "counter")(counter)
    Emulator().launch(body, args, grid=blocks, block=1, shared_bytes=0, name="k")


@pytest.mark.parametrize("start", [0, 0x80000000])
def test_a_sign_flips_when_all_have_added(start):
    """From either sign, also over 2^32."""
    counter = np.array([start], np.uint32)
    flip(counter, 5, (1 << 31) - 4)
    assert counter.tolist() == [(start + (1 << 31)) % (1 << 32)]


@pytest.mark.parametrize("adds", [1, (1 << 31) - 5])
def test_a_sign_that_does_not_flip_is_a_deadlock(adds):
    with pytest.raises(DeadlockError, match=r"threads spin and nothing changes\n  blocks 0-4: threads 0 spin"):
        flip(np.zeros(1, np.uint32), 5, adds)


def test_phases_and_parity():
    seen = []

    def body(args):
        bar = base_of()
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(bar, 1)
            ptx.mbarrier_wait(bar, 1)  # passes
        cuda.syncthreads()
        for phase in range(4):
            if cuda.threadIdx.x == 0:
                seen.append(phase)
                ptx.mbarrier_arrive(bar)
            ptx.mbarrier_wait(bar, phase % 2)
            cuda.syncthreads()
            seen.append(-phase)
            cuda.syncthreads()

    launch(body, block=2)
    assert seen == [0, 0, 0, 1, -1, -1, 2, -2, -2, 3, -3, -3]


def test_a_phase_needs_its_arrivals_and_its_bytes():
    def body(args):
        bar = base_of() + 64
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(bar, 3)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_arrive_expect_tx(bar, 48)
            ptx.bulk_copy(base_of(), ptx.global_address(args.x, 0), 16, bar)
        ptx.mbarrier_wait(bar, 0)

    message = (
        r"threads 0-3 wait at the mbarrier at shared byte 64 \(phase 0, 2 of 3 arrivals and 32 bytes missing\) \(test"
    )
    with pytest.raises(DeadlockError, match=message):
        launch(body, block=4)


def test_one_arrival_too_many():
    def body(args):
        ptx.mbarrier_init(base_of(), 1)
        ptx.mbarrier_arrive_expect_tx(base_of(), 16)
        ptx.mbarrier_arrive(base_of())

    with pytest.raises(ValueError, match=r"mbarrier at shared byte 0 .*: one arrival too many"):
        launch(body, block=1)


def test_a_named_barrier_that_not_all_reach():
    def body(args):
        if cuda.threadIdx.x < 32:
            ptx.barrier_sync(3, 96)
        elif cuda.threadIdx.x < 64:
            ptx.barrier_arrive(3, 96)

    with pytest.raises(
        DeadlockError, match=r"threads 0-31 wait at named barrier 3 \(64 of 96 threads came\) \(test_ptx"
    ):
        launch(body, block=96)


def sync_twice(args):
    ptx.barrier_arrive(1, 64)
    ptx.barrier_sync(1, 64)


NAMED = {
    "barrier 0": (lambda args: ptx.barrier_sync(0, 32), r"expected 1 to 15 \(0 is syncthreads\), got 0"),
    "half a warp": (lambda args: ptx.barrier_sync(1, 48), "expected a multiple of 32 threads, got 48"),
    "two sizes": (lambda args: ptx.barrier_sync(1, 64 + cuda.threadIdx.x // 32 * 32), "now one comes that expects 96"),
    "twice": (sync_twice, "a thread comes for the second time in this phase"),
}


@pytest.mark.parametrize("name", NAMED)
def test_misused_named_barriers(name):
    body, message = NAMED[name]
    with pytest.raises(ValueError, match=message):
        launch(body, block=64)


def test_a_partial_warp_has_no_mma():
    zero = (float32(0),) * 4
    with pytest.raises(ValueError, match="mma_bf16: all 32 lanes take part"):
        launch(lambda args: ptx.mma_bf16((0,) * 4, (0,) * 2, zero), block=31)


def test_different_operations_do_not_meet():
    def body(args):
        if cuda.laneid < 16:
            ptx.ldmatrix_x1(base_of())
        else:
            ptx.ldmatrix_x2(base_of())

    with pytest.raises(DeadlockError, match=r"warp collective of warp 0 \(ldmatrix_x1"):
        launch(body)


def test_nan_and_infinity_go_through_an_mma():
    """A column of b with NaN, one with an infinity and six of zeros."""

    def body(args):
        one, nan, inf = 0x3F80, 0x7FC0, 0x7F80
        b = ((nan, inf, 0)[min(cuda.laneid // 4, 2)], 0)
        c = ptx.mma_bf16((one, one, 0, 0), b, (float32(1),) * 4)
        for e in range(2):
            args.out[cuda.laneid * 2 + e] = c[e]

    out = launch(body, out=np.zeros(64, np.float32)).out.reshape(8, 8)
    np.testing.assert_array_equal(out, [[np.nan, np.inf, 1, 1, 1, 1, 1, 1]] * 8)


def test_a_trap_ends_the_launch():
    """On a device nothing is left of the context, so that the case of all tiers does not meet its trap."""

    def body(args):
        if cuda.threadIdx.x == 5:
            ptx.trap()

    with pytest.raises(RuntimeError, match="trap; kernel k, block 0, thread 5"):
        launch(body)
