"""Twins of the instructions in kernels/ptx.py.

Addresses
    A shared address is an offset in a window of the block, where dynamic shared memory starts at WINDOW_START; a global
    one is the address in this process.  Each access finds the array that its bytes lie in, so one that lies in none, or
    is misaligned, is an error that names the nearest.

Asynchronous copies
    From the start of a copy its destination holds 0xFF bytes, NaN in every float type of ours, and the source is read
    at the end of it.  A ``cp_async`` ends when its thread has waited for its group: no sooner, as the hardware may.
    A bulk copy ends at a time of its own: after everything that can run (seed 0), or at a random one.

Barriers
    An mbarrier is 8 bytes of shared memory: that it was initialised, and not overwritten since, is checked at each use.
    More arrivals at an mbarrier, or at a named barrier, than a phase has are errors here, and undefined on the GPU.

Not shown: the two proxies (a missing ``fence_proxy_async`` goes unnoticed), registers (``setmaxnreg`` does nothing),
divergence inside a warp at aligned instructions, bank conflicts, and the hardware's order and inner rounding of the
sum of an mma: here products and sums are float64, rounded to float32 once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from greenlet import getcurrent

from nbverify.emulator.machine import WARP, warp_collective
from nbverify.emulator.memory import SHARED_ALIGNMENT_BYTES, CheckedArray, place
from nbverify.emulator.numbers import CASTS, F32, Twin
from nbverify.errors import MemoryAccessError

uint32, uint64, float32 = CASTS["uint32"], CASTS["uint64"], CASTS["float32"]

WINDOW_START = 1024
COPY_BYTES = 16  # of a cp.async, of an ldmatrix row; and what bulk copies come in multiples of
MBARRIER_BYTES = 8
MAX_ARRIVALS = (1 << 20) - 1
MAX_BYTES = (1 << 20) - 1  # that an mbarrier can expect
NAMED_BARRIERS = range(1, 16)
IN_FLIGHT = 0xFF
CANONICAL_NAN = 0x7FFF  # what conversions to 16 bits give
INFINITY_BITS = 0x7F800000
_FLOAT, _WORD = struct.Struct("<f"), struct.Struct("<I")
TINY = np.finfo(np.float32).tiny  # below it are the subnormals


# ------------------------------------------------------------------------------------------------------------ addresses


class Region:
    """An array, and where it starts in an address space."""

    def __init__(self, array: CheckedArray, start: int):
        self.name, self.start = array.name, start
        self.real_start = array.address
        self.bytes = array.data.view(np.uint8)
        self.end = start + self.bytes.size
        self.words = self.bytes[: self.bytes.size // 4 * 4].view(np.uint32)


class Space:
    """An address space: the arrays in it, and the search for the one that an address belongs to."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def find(self, operation: str, address: int, size: int, alignment: int) -> np.ndarray:
        """The ``size`` bytes at ``address``, writable in place."""
        for region in self.regions:
            if region.start <= address and address + size <= region.end:
                if address % alignment:
                    break
                return region.bytes[address - region.start : address - region.start + size]
        raise self.error(operation, address, size, alignment)

    def error(self, operation: str, address: int, size: int, alignment: int) -> MemoryAccessError:
        """What is wrong with an access."""
        below = [region for region in self.regions if region.start <= address]
        if not below:
            return MemoryAccessError(f"{operation}: address {address:#x} is in no array of the kernel; {place()}")
        inside = [region for region in below if address < region.end]
        region = inside[0] if inside else max(below, key=lambda region: region.end)
        where = f"{operation}: {region.name}, byte {address - region.start}"
        if address % alignment and address + size <= region.end:
            return MemoryAccessError(f"{where}: misaligned: no multiple of {alignment} bytes; {place()}")
        return MemoryAccessError(f"{where}: {size} bytes there are outside its {region.bytes.size} bytes; {place()}")


class BlockState:
    """What a block has besides its threads: its shared window and the barriers in it."""

    def __init__(self, block: Any):
        self.statics = block.static_shared
        self.shared = Space()
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self._next_start = WINDOW_START
        self._add(block.dynamic_shared)

    def _add(self, array: CheckedArray) -> Region:
        region = Region(array, self._next_start)
        self.shared.regions.append(region)
        self._next_start += -(-(region.bytes.size + 1) // SHARED_ALIGNMENT_BYTES) * SHARED_ALIGNMENT_BYTES
        return region

    def address_of(self, array: CheckedArray) -> int:
        """Address in the window of an array, or of a view or part of one."""
        real = array.address
        for region in self.shared.regions:
            if region.real_start <= real < region.real_start + region.bytes.size:
                return region.start + real - region.real_start
        for static in self.statics.values():
            if static.address <= real < static.address + static.data.nbytes:
                return self._add(static).start + real - static.address
        raise MemoryAccessError(f"shared_address: {array.name} is not in shared memory; {place()}")

    def mbarrier(self, operation: str, address: Any) -> MBarrier:
        """The mbarrier at an address."""
        where = _address32(address)
        memory = self.shared.find(operation, where, MBARRIER_BYTES, MBARRIER_BYTES)
        barrier = self.mbarriers.get(where)
        if barrier is None or memory.tobytes() != barrier.token:
            what = "was not initialised" if barrier is None else "was overwritten after its initialisation"
            raise MemoryAccessError(
                f"{operation}: the mbarrier at shared byte {where - WINDOW_START} {what}; {place()}"
            )
        return barrier


class ThreadState:
    """A thread's asynchronous copies: groups from the oldest on, then those of no group yet."""

    def __init__(self, thread: Any):
        self.groups: list[list[Copy]] = []
        self.open: list[Copy] = []


class LaunchState:
    """The arrays that a kernel was given."""

    def __init__(self, launch: Any):
        self.memory = Space()
        given = (*launch.args, *launch.memory)
        arrays = [value for value in given if isinstance(value, CheckedArray) and value.size]
        self.memory.regions = [Region(array, array.address) for array in arrays]


def _state(owner: Any, kind: type) -> Any:
    """The state of a block, thread or launch, kept on it, made when first asked for."""
    state = getattr(owner, "ptx", None)
    if state is None:
        state = owner.ptx = kind(owner)
    return state


def _block() -> BlockState:
    return _state(getcurrent().block, BlockState)


def _address32(address: Any) -> int:
    return int(address) & 0xFFFFFFFF


def _shared(operation: str, address: Any, size: int, alignment: int) -> np.ndarray:
    return _block().shared.find(operation, _address32(address), size, alignment)


def _global(operation: str, address: Any, size: int, alignment: int, *, write: bool = False) -> np.ndarray:
    space = _state(getcurrent().launch, LaunchState).memory
    memory = space.find(operation, int(address), size, alignment)
    if write and not memory.flags.writeable:
        raise MemoryAccessError(f"{operation}: written at {int(address):#x}, but it is read-only; {place()}")
    return memory


def shared_address(array: CheckedArray, index: Any) -> Any:
    """Offset in the block's window."""
    return uint32(_block().address_of(array) + int(index) * array.itemsize)


def shared_int64(address: Any, length: int) -> Any:
    """A view of the block's dynamic shared memory."""
    _shared("shared_int64", address, 8 * length, 8)
    first = (_address32(address) - WINDOW_START) // 8
    return getcurrent().block.dynamic_shared.view(np.int64)[first : first + length]


def global_address(array: CheckedArray, index: Any) -> Any:
    """Address in this process."""
    return uint64(array.address + int(index) * array.itemsize)


# ---------------------------------------------------------------------------------------------------------- tensor core

_LANE = np.arange(WARP)[:, None]
_G, _T = _LANE // 4, _LANE % 4
_ELEMENT = np.arange(8)
# Row and column of the 16-bit elements of a lane's registers, in their order; of c, the float32 ones.
A_ROWS, A_COLUMNS = _G + 8 * (_ELEMENT // 2 % 2), 2 * _T + _ELEMENT % 2 + 8 * (_ELEMENT // 4)
B_ROWS, B_COLUMNS = 2 * _T + _ELEMENT[:4] % 2 + 8 * (_ELEMENT[:4] // 2), np.broadcast_to(_G, (WARP, 4))
C_ROWS, C_COLUMNS = _G + 8 * (_ELEMENT[:4] // 2), 2 * _T + _ELEMENT[:4] % 2


def _bfloat16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(F32)


def _float16_values(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16)


def _all_lanes(operation: str, values: Sequence) -> None:
    if values[-1] is None:
        raise ValueError(f"{operation}: all 32 lanes take part, and this warp has fewer; {place()}")


def _named(name: str, work: Callable[[list], Sequence]) -> Callable[[list], Sequence]:
    """``work``, under the name by which ``warp_collective`` tells operations apart, in meetings and in reports."""
    work.__qualname__ = name
    return work


def _mma(name: str, values_of: Callable[[np.ndarray], np.ndarray]) -> Twin:
    def work(lanes: list) -> Sequence:
        _all_lanes(name, lanes)
        a, b, c = (np.zeros(shape) for shape in ((16, 16), (16, 8), (16, 8)))
        a[A_ROWS, A_COLUMNS] = values_of(np.array([lane[0] for lane in lanes], np.uint32).view(np.uint16))
        b[B_ROWS, B_COLUMNS] = values_of(np.array([lane[1] for lane in lanes], np.uint32).view(np.uint16))
        c[C_ROWS, C_COLUMNS] = np.array([lane[2] for lane in lanes], F32)
        return list(map(tuple, (a @ b + c).astype(F32)[C_ROWS, C_COLUMNS]))

    _named(name, work)
    return lambda a, b, c: warp_collective((a, b, c), work)


def _ldmatrix(name: str, count: int, *, transposed: bool) -> Twin:
    def work(addresses: list) -> Sequence:
        _all_lanes(name, addresses)
        rows = np.array([_address32(address) for address in addresses[: 8 * count]])
        words = _matrix_rows(name, rows)
        if transposed:
            matrices = words.view(np.uint16).reshape(count, 8, 8).transpose(0, 2, 1)
            words = np.ascontiguousarray(matrices).view(np.uint32)
        lanes = words.reshape(count, WARP).T
        return list(lanes[:, 0]) if count == 1 else list(map(tuple, lanes))

    _named(name, work)
    return lambda address: warp_collective(address, work)


def _matrix_rows(name: str, rows: np.ndarray) -> np.ndarray:
    """The 16 bytes at each of the addresses, as four words a row."""
    space = _block().shared
    if not (rows % COPY_BYTES).any():
        for region in space.regions:
            if region.start <= rows.min() and rows.max() + COPY_BYTES <= region.end:
                return region.words[(rows - region.start)[:, None] // 4 + np.arange(4)]
    found = [  # in several arrays, or an error, which names the first lane that has one
        space.find(f"{name}, row address of lane {lane}", int(row), COPY_BYTES, COPY_BYTES)
        for lane, row in enumerate(rows)
    ]
    return np.concatenate(found).view(np.uint32).reshape(-1, 4)


# ----------------------------------------------------------------------------------------------------------- arithmetic


def _flushed(x: Any) -> Any:
    """0 for a subnormal, with its sign."""
    return x * F32(0) if 0 < abs(x) < TINY else x


def ex2(x: Any) -> Any:
    """2 ** x, rounded once: more exact than the hardware's."""
    return _flushed(F32(np.exp2(np.float64(_flushed(float32(x))))))


def rcp(x: Any) -> Any:
    """1 / x, rounded once."""
    return _flushed(F32(1) / _flushed(float32(x)))


def _pack(low: int, high: int) -> Any:
    return uint32(high << 16 | low)


def _bfloat16_bits(x: Any) -> int:
    (bits,) = _WORD.unpack(_FLOAT.pack(float32(x)))  # a third of the time that a numpy view takes
    if bits & 0x7FFFFFFF > INFINITY_BITS:
        return CANONICAL_NAN
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _float16_bits(x: Any) -> int:
    return CANONICAL_NAN if x != x else int(np.float16(x).view(np.uint16))


def _e4m3_bits_as_float16(byte: int) -> int:
    magnitude = byte & 0x7F
    if magnitude == 0x7F:
        return CANONICAL_NAN
    # The layout of a float16 shifted by seven bits, with a bias of 7 for 15.
    value = np.array([magnitude << 7], np.uint16).view(np.float16)[0] * np.float16(256)
    return int(value.view(np.uint16)) | (byte & 0x80) << 8


def permute_bytes(low: Any, high: Any, selector: Any) -> Any:
    """Bytes by number; a nibble's fourth bit asks for the byte's sign instead, in all bits."""
    eight, chosen = _address32(high) << 32 | _address32(low), _address32(selector)
    found = 0
    for i in range(4):
        nibble = chosen >> 4 * i & 0xF
        byte = eight >> 8 * (nibble & 7) & 0xFF
        found |= ((0xFF * (byte >> 7)) if nibble & 8 else byte) << 8 * i
    return uint32(found)


def multiply_bf16x2(a: Any, b: Any) -> Any:
    """Halves apart: a product of two bfloat16 is exact in float32."""
    products = [F32(_bfloat16_value(int(a) >> n)) * F32(_bfloat16_value(int(b) >> n)) for n in (0, 16)]
    return _pack(_bfloat16_bits(products[0]), _bfloat16_bits(products[1]))


def _bfloat16_value(bits: int) -> float:
    return _FLOAT.unpack(_WORD.pack((bits & 0xFFFF) << 16))[0]


def multiply_f16x2(a: Any, b: Any) -> Any:
    """Halves apart."""
    x, y = (np.array([_address32(v)], np.uint32).view(np.float16) for v in (a, b))
    products = x * y
    return _pack(*(_float16_bits(product) for product in products))


def unpack_e4m3x2(two_bytes: Any) -> Any:
    """Two bytes to two float16."""
    return _pack(_e4m3_bits_as_float16(int(two_bytes) & 0xFF), _e4m3_bits_as_float16(int(two_bytes) >> 8 & 0xFF))


# ----------------------------------------------------------------------------------------------------- loads and stores


def _load(name: str, memory_at: Callable, dtype: Any, count: int) -> Twin:
    size = np.dtype(dtype).itemsize * count

    def load(address: Any) -> Any:
        values = memory_at(name, address, size, size).view(dtype)
        return values[0] if count == 1 else tuple(values)

    return load


def _store(name: str, memory_at: Callable, dtype: Any, count: int) -> Twin:
    size = np.dtype(dtype).itemsize * count
    convert = CASTS[np.dtype(dtype).name]

    def store(address: Any, values: Any) -> None:
        memory_at(name, address, size, size).view(dtype)[:] = (
            convert(values) if count == 1 else [convert(value) for value in values]
        )

    return store


def _writable_global(operation: str, address: Any, size: int, alignment: int) -> np.ndarray:
    return _global(operation, address, size, alignment, write=True)


def _load_if(name: str, dtype: Any, count: int) -> Twin:
    size = np.dtype(dtype).itemsize * count

    def load(address: Any, condition: Any) -> Any:
        if _address32(condition) == 0:
            values = (dtype(0),) * count
        else:
            values = tuple(_global(name, address, size, size).view(dtype))
        return values if count > 1 else uint32(values[0])

    return load


def prefetch_l2(address: Any) -> None:
    """Nothing but the check."""
    _global("prefetch_l2", address, 1, 1)


def atomic_add_u32(address: Any, value: Any) -> Any:
    """Add, and what was there before; others may run first."""
    me = getcurrent()
    me.interrupt()
    me.launch.spins = 0
    memory = _writable_global("atomic_add_u32", address, 4, 4).view(np.uint32)
    before = memory[0]
    memory[0] = _address32(int(before) + int(value))
    return before


def wait_sign_flip(address: Any, before: Any) -> None:
    """Until the other threads have flipped the sign."""
    me = getcurrent()
    memory = _global("wait_sign_flip", address, 4, 4).view(np.uint32)
    while (int(memory[0]) ^ _address32(before)) >> 31 == 0:
        me.spin()


# --------------------------------------------------------------------------------------------------------------- copies


class Copy:
    """A copy in flight."""

    def __init__(self, destination: np.ndarray, source: np.ndarray):
        self.destination, self.source = destination, source
        self.complete = False
        destination[:] = IN_FLIGHT

    def finish(self) -> None:
        """The data is there; bytes that the source lacks are zeros."""
        if not self.complete:
            self.destination[: self.source.size] = self.source
            self.destination[self.source.size :] = 0
            self.complete = True


class Delivery:
    """Something that happens by itself, later: it stands among the threads in their order, and runs once."""

    def __init__(self, thread: Any, what: str, finish: Callable[[], None]):
        self.block, self.warp, self._launch = thread.block, thread.warp, thread.launch
        self._what, self._place, self._finish = what, thread.place, finish
        self._launch.order.add(self, behind_all=not self._launch.interruptible)

    def switch(self) -> None:
        """Let it happen."""
        if all(thread.dead for thread in self.block.threads):
            raise MemoryAccessError(f"{self._what}: still in flight when its block ended; started by {self._place}")
        self._launch.spins = 0
        self._finish()


def cp_async_16(destination: Any, source: Any) -> None:
    """Start to copy 16 bytes."""
    _start_copy("cp_async_16", destination, source, COPY_BYTES)


def cp_async_4(destination: Any, source: Any) -> None:
    """Start to copy 4 bytes."""
    target = _shared("cp_async_4, destination", destination, 4, 4)
    _state(getcurrent(), ThreadState).open.append(Copy(target, _global("cp_async_4, source", source, 4, 4)))


def cp_async_16_zfill(destination: Any, source: Any, source_bytes: Any) -> None:
    """Start to copy some of 16 bytes."""
    size = _address32(source_bytes)
    if size > COPY_BYTES:
        raise ValueError(f"cp_async_16_zfill: source_bytes: expected 0 to {COPY_BYTES}, got {size}; {place()}")
    _start_copy("cp_async_16_zfill", destination, source, size)


def _start_copy(name: str, destination: Any, source: Any, size: int) -> None:
    target = _shared(f"{name}, destination", destination, COPY_BYTES, COPY_BYTES)
    data = _global(f"{name}, source", source, size, COPY_BYTES) if size else np.empty(0, np.uint8)
    _state(getcurrent(), ThreadState).open.append(Copy(target, data))


def cp_async_commit() -> None:
    """Close the group."""
    copies = _state(getcurrent(), ThreadState)
    copies.groups.append(copies.open)
    copies.open = []


def cp_async_wait(pending: int) -> None:
    """All groups but the last ``pending`` are complete."""
    me = getcurrent()
    me.interrupt()
    copies = _state(me, ThreadState)
    while len(copies.groups) > pending:
        for copy in copies.groups.pop(0):
            copy.finish()


def cp_async_arrive(mbarrier: Any) -> None:
    """An arrival at the mbarrier when the copies of this thread are complete."""
    me = getcurrent()
    barrier = _block().mbarrier("cp_async_arrive", mbarrier)
    copies = _state(me, ThreadState)
    started = [copy for group in copies.groups for copy in group] + copies.open

    def finish() -> None:
        for copy in started:
            copy.finish()
        barrier.arrive()

    Delivery(me, "cp_async_arrive", finish)


def bulk_copy(destination: Any, source: Any, num_bytes: Any, mbarrier: Any) -> None:
    """Start a copy; its end counts on the mbarrier."""
    size = _address32(num_bytes)
    if size % COPY_BYTES:
        raise MemoryAccessError(f"bulk_copy: num_bytes: expected a multiple of {COPY_BYTES}, got {size}; {place()}")
    barrier = _block().mbarrier("bulk_copy", mbarrier)
    copy = Copy(
        _shared("bulk_copy, destination", destination, size, COPY_BYTES),
        _global("bulk_copy, source", source, size, COPY_BYTES),
    )

    def finish() -> None:
        copy.finish()
        barrier.expect(-size)
        barrier.settle()

    Delivery(getcurrent(), f"bulk_copy of {size} bytes", finish)


# ------------------------------------------------------------------------------------------------------------- barriers


class MBarrier:
    """A barrier in shared memory."""

    def __init__(self, address: int, arrivals: int):
        self._offset, self._arrivals = address - WINDOW_START, arrivals
        self.token = b"mbar" + address.to_bytes(4, "little")
        self.phase = 0
        self._missing, self._bytes = arrivals, 0
        self._waiting: list[Any] = []

    @property
    def label(self) -> str:
        """``the mbarrier at shared byte 64 (phase 3, 2 of 8 arrivals and 1152 bytes missing)``."""
        missing = f"{self._missing} of {self._arrivals} arrivals and {self._bytes} bytes missing"
        return f"the mbarrier at shared byte {self._offset} (phase {self.phase}, {missing})"

    def arrive(self) -> None:
        """One arrival."""
        if self._missing == 0:
            raise ValueError(f"{self.label}: one arrival too many; {place()}")
        self._missing -= 1
        self.settle()

    def expect(self, num_bytes: int) -> None:
        """That many bytes more (or, negative, fewer) are to come in this phase."""
        self._bytes += num_bytes
        if abs(self._bytes) > MAX_BYTES:
            raise ValueError(f"{self.label}: it counts no more than {MAX_BYTES} bytes; {place()}")

    def settle(self) -> None:
        """Begin the next phase if this one is complete."""
        if self._missing == 0 and self._bytes == 0:
            self.phase += 1
            self._missing = self._arrivals
            waiting, self._waiting = self._waiting, []
            for thread in waiting:
                thread.release(None)

    def wait(self, thread: Any, parity: int) -> None:
        """Until the current phase has the other parity: looked at again after each phase, as the hardware's loop."""
        while self.phase & 1 == parity:
            self._waiting.append(thread)
            thread.wait(self)


def mbarrier_init(mbarrier: Any, arrivals: Any) -> None:
    """Phase 0 begins."""
    count, address = _address32(arrivals), _address32(mbarrier)
    if not 1 <= count <= MAX_ARRIVALS:
        raise ValueError(f"mbarrier_init: arrivals: expected 1 to {MAX_ARRIVALS}, got {count}; {place()}")
    block = _block()
    memory = block.shared.find("mbarrier_init", address, MBARRIER_BYTES, MBARRIER_BYTES)
    barrier = block.mbarriers[address] = MBarrier(address, count)
    memory[:] = np.frombuffer(barrier.token, np.uint8)


def mbarrier_arrive(mbarrier: Any) -> None:
    """One arrival; others may run before it."""
    getcurrent().interrupt()
    _block().mbarrier("mbarrier_arrive", mbarrier).arrive()


def mbarrier_arrive_expect_tx(mbarrier: Any, num_bytes: Any) -> None:
    """Bytes to come, and one arrival."""
    getcurrent().interrupt()
    barrier = _block().mbarrier("mbarrier_arrive_expect_tx", mbarrier)
    barrier.expect(_address32(num_bytes))
    barrier.arrive()


def _mbarrier_wait(name: str) -> Twin:
    def wait(mbarrier: Any, parity: Any) -> None:
        if int(parity) not in (0, 1):
            raise ValueError(f"{name}: parity: expected 0 or 1, got {parity}; {place()}")
        me = getcurrent()
        me.interrupt()
        _block().mbarrier(name, mbarrier).wait(me, int(parity))

    return wait


class NamedBarrier:
    """Barriers 1 to 15 of a block."""

    def __init__(self, number: int):
        self._number, self._size = number, 0
        self._arrived: set[int] = set()
        self._waiting: list[Any] = []
        self._vote = False

    @property
    def label(self) -> str:
        """``named barrier 3 (64 of 96 threads came)``."""
        return f"named barrier {self._number} ({len(self._arrived)} of {self._size} threads came)"

    def come(self, thread: Any, size: int, *, wait: bool, vote: bool = False) -> Any:
        """Arrive, and wait for the others or not; what any voted for, in this phase."""
        thread.must_run()
        if size % WARP or size == 0:
            raise ValueError(
                f"named barrier {self._number}: expected a multiple of {WARP} threads, got {size}; {place()}"
            )
        if self._arrived and size != self._size:
            raise ValueError(f"{self.label}: now one comes that expects {size} threads; {place()}")
        if thread.index in self._arrived:
            raise ValueError(f"{self.label}: a thread comes for the second time in this phase; {place()}")
        self._size = size
        self._vote |= vote
        self._arrived.add(thread.index)
        if len(self._arrived) == size:
            waiting, result = self._waiting, self._vote
            self._arrived, self._waiting, self._vote = set(), [], False
            for other in waiting:
                other.release(result)
            return result
        if wait:
            self._waiting.append(thread)
            return thread.wait(self)
        return None


def _named_barrier(name: str, *, wait: bool) -> Twin:
    def twin(barrier: Any, threads: Any, vote: Any = 0) -> Any:
        number = _address32(barrier)
        if number not in NAMED_BARRIERS:
            raise ValueError(f"{name}: barrier: expected 1 to 15 (0 is syncthreads), got {number}; {place()}")
        me = getcurrent()
        me.interrupt()
        named = _block().named
        barrier = named.setdefault(number, NamedBarrier(number))
        return barrier.come(me, _address32(threads), wait=wait, vote=bool(vote))

    return twin


_barrier_or = _named_barrier("barrier_or", wait=True)


def _fence() -> None:
    getcurrent().interrupt()


_ELECT = _named("elect_one", lambda lanes: [lane == max(i for i in range(WARP) if lanes[i]) for lane in range(WARP)])
_SETMAXNREG = _named("setmaxnreg", lambda lanes: lanes)


def elect_one() -> bool:
    """The last lane: a kernel that means lane 0 must say so."""
    return warp_collective(True, _ELECT)


def setmaxnreg(registers: int) -> None:
    """All lanes come to it, and nothing happens."""
    warp_collective(registers, _SETMAXNREG)


_MEMORY_TWINS: dict[str, Twin] = {}
for _dtype, _letter in ((np.uint32, "u32"), (np.uint64, "u64"), (F32, "f32")):
    for _count, _width in ((1, ""), (2, "v2_"), (4, "v4_")):
        for _space, _readable, _writable in (("shared", _shared, _shared), ("global", _global, _writable_global)):
            _name = f"{_space}_{_width}{_letter}"
            _MEMORY_TWINS[f"load_{_name}"] = _load(f"load_{_name}", _readable, _dtype, _count)
            _MEMORY_TWINS[f"store_{_name}"] = _store(f"store_{_name}", _writable, _dtype, _count)


# By name in kernels/ptx.py.  More than it has, of loads and stores: those it lacks are left out.
def trap() -> None:
    """An error, as on the GPU."""
    raise RuntimeError(f"trap; {place()}")


PTX_TWINS: dict[str, Twin] = {
    "trap": trap,
    **_MEMORY_TWINS,
    "shared_address": shared_address,
    "shared_int64": shared_int64,
    "global_address": global_address,
    "mma_bf16": _mma("mma_bf16", _bfloat16_values),
    "mma_f16": _mma("mma_f16", _float16_values),
    **{f"ldmatrix_x{n}": _ldmatrix(f"ldmatrix_x{n}", n, transposed=False) for n in (1, 2, 4)},
    **{f"ldmatrix_x{n}_trans": _ldmatrix(f"ldmatrix_x{n}_trans", n, transposed=True) for n in (1, 2, 4)},
    "ex2": ex2,
    "rcp": rcp,
    "pack_bf16x2": lambda low, high: _pack(_bfloat16_bits(low), _bfloat16_bits(high)),
    "pack_f16x2": lambda low, high: _pack(_float16_bits(low), _float16_bits(high)),
    "unpack_e4m3x2": unpack_e4m3x2,
    "permute_bytes": permute_bytes,
    "multiply_bf16x2": multiply_bf16x2,
    "multiply_f16x2": multiply_f16x2,
    "divide_u32": lambda dividend, divisor: uint32(_address32(dividend) // _address32(divisor)),
    "divide_u64": lambda dividend, divisor: uint64(int(dividend) // int(divisor)),
    "load_global_u8": lambda address: uint32(_global("load_global_u8", address, 1, 1)[0]),
    "store_global_u8": _store("store_global_u8", _writable_global, np.uint8, 1),
    "load_global_u8_if": _load_if("load_global_u8_if", np.uint8, 1),
    "load_global_u32_if": _load_if("load_global_u32_if", np.uint32, 1),
    "load_global_v2_f32_if": _load_if("load_global_v2_f32_if", F32, 2),
    "load_global_v4_f32_if": _load_if("load_global_v4_f32_if", F32, 4),
    "warp_max_u32": lambda value: warp_collective(_address32(value), lambda lanes: [uint32(max(lanes))] * len(lanes)),
    "warp_min_u32": lambda value: warp_collective(_address32(value), lambda lanes: [uint32(min(lanes))] * len(lanes)),
    "prefetch_l2": prefetch_l2,
    "atomic_add_u32": atomic_add_u32,
    "wait_sign_flip": wait_sign_flip,
    "cp_async_4": cp_async_4,
    "cp_async_16": cp_async_16,
    "cp_async_16_zfill": cp_async_16_zfill,
    "cp_async_commit": cp_async_commit,
    "cp_async_wait": cp_async_wait,
    "cp_async_arrive": cp_async_arrive,
    "bulk_copy": bulk_copy,
    "mbarrier_init": mbarrier_init,
    "mbarrier_arrive": mbarrier_arrive,
    "mbarrier_arrive_expect_tx": mbarrier_arrive_expect_tx,
    "mbarrier_wait": _mbarrier_wait("mbarrier_wait"),
    "mbarrier_try_wait": _mbarrier_wait("mbarrier_try_wait"),
    "fence_mbarrier_init": _fence,
    "fence_proxy_async": _fence,
    "barrier_sync": _named_barrier("barrier_sync", wait=True),
    "barrier_or": lambda barrier, threads, vote: uint32(_barrier_or(barrier, threads, vote)),
    "barrier_arrive": _named_barrier("barrier_arrive", wait=False),
    "elect_one": elect_one,
    "setmaxnreg_inc": setmaxnreg,
    "setmaxnreg_dec": setmaxnreg,
    "thread_id": lambda: uint32(getcurrent().index),
    "opaque_u32": lambda x: uint32(_address32(x)),
    "opaque_u64": uint64,
    "unroll_loops": lambda: None,
    "keep_loops": lambda: None,
}


def twins_of(ptx: Any) -> dict[int, Twin]:
    """The twins of what a module such as ``kernels/ptx.py`` has, by id."""
    return {id(getattr(ptx, name)): twin for name, twin in PTX_TWINS.items() if hasattr(ptx, name)}
