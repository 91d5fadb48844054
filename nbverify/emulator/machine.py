"""The machine: threads, warps, blocks and their barriers, and the order in which threads run."""

from __future__ import annotations

import contextvars
import heapq
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from nbverify.emulator.memory import CheckedArray, Garbage
from nbverify.errors import ArgumentError, DeadlockError

WARP = 32
FULL_MASK = 0xFFFFFFFF
MAX_BLOCK_THREADS = 1024
BEHIND_ALL = 1e15  # a thread that spins runs after all that do not
SPINS_PER_THREAD = 2000  # rounds in which every thread that could run only spun: nobody will ever release them
HERE = os.path.dirname(os.path.abspath(__file__))


class Emulator:
    """A stand-in for a GPU: ``VerifyPlan(spec, device=nv.Emulator(blocks=4, seed=0))``.

    Parameters
    ----------
    blocks
        How many blocks fit at once; a plan sizes its grid by it.
    seed
        Order of threads and contents of uninitialised memory.  0: plain order.
    cc
        The compute capability whose tiles and copy engine a plan takes: (8, 0), (9, 0), (12, 0) ..
    """

    def __init__(self, blocks: int = 4, seed: int = 0, cc: tuple[int, int] = (9, 0)):
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise ArgumentError("blocks", "an int >= 1", repr(blocks))
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ArgumentError("seed", "an int >= 0", repr(seed))
        if not isinstance(cc, tuple) or len(cc) != 2 or any(type(x) is not int for x in cc) or cc < (8, 0):
            raise ArgumentError("cc", "a compute capability of at least (8, 0), such as (12, 0)", repr(cc))
        self.blocks = blocks
        self.seed = seed
        self.cc = cc

    def __repr__(self) -> str:
        return f"Emulator(blocks={self.blocks}, seed={self.seed}, cc={self.cc})"

    def launch(
        self,
        body: Any,
        args: Any,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        name: str,
        memory: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Run ``body(args)`` for ``grid`` blocks of ``block`` threads; return when all have returned.

        Parameters
        ----------
        body
            A plain Python function of one parameter, or a numba dispatcher of one.
        args
            A named tuple.  1-D numpy arrays reach the body as checked arrays that carry their field's name.
        shared_bytes
            Size of the dynamic shared memory, ``cuda.shared.array(0, dtype)``.
        name
            The kernel's name in messages.
        memory
            Further arrays, in C order, that the kernel reaches by their addresses alone (a table of pointers).

        Raises
        ------
        DeadlockError
            No thread can run, and some have not returned.
        MemoryAccessError
            An access outside an array, misaligned, or a write to read-only memory.
        """
        if grid < 1:
            raise ArgumentError("grid", ">= 1 blocks", grid)
        if not 1 <= block <= MAX_BLOCK_THREADS:
            raise ArgumentError("block", f"1 to {MAX_BLOCK_THREADS} threads", block)
        if shared_bytes < 0:
            raise ArgumentError("shared_bytes", ">= 0", shared_bytes)
        from nbverify.emulator.localise import localise  # imports numba, which `import nbverify` must not

        run = localise(body)
        checked = type(args)._make(_checked(field, value) for field, value in zip(args._fields, args, strict=True))
        with np.errstate(all="ignore"):  # a GPU does not warn
            launch = Launch(name, run, checked, grid, block, shared_bytes, self.seed)
            launch.memory = [CheckedArray(one.reshape(-1), key) for key, one in (memory or {}).items()]
            launch.run()


def _checked(field: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ArgumentError(field, "a 1-D array", f"shape {value.shape}")
        return CheckedArray(value, field)
    return value


class Launch:
    """One kernel launch in progress."""

    def __init__(self, name: str, body: Callable, args: Any, grid: int, block: int, shared_bytes: int, seed: int):
        self.name, self.body, self.args = name, body, args
        self.grid, self.block_size = grid, block
        self.home = getcurrent()  # where threads go back to when they block
        self.order = Order(seed, grid, block)
        self.garbage = Garbage(seed)
        self.interruptible = seed != 0
        self.memory: list[CheckedArray] = []  # beside the arguments, reached by address
        self.spins = 0  # since anything else happened
        self.stopped = False
        self.grid_barrier = Barrier("grid.sync", grid * block)
        self.blocks = [Block(self, index, shared_bytes) for index in range(grid)]
        self.threads = [thread for each in self.blocks for thread in each.threads]

    def run(self) -> None:
        """Run all threads to their end."""
        limit = SPINS_PER_THREAD * len(self.threads)
        try:
            for thread in self.threads:
                self.order.add(thread)
            while self.order:
                self.order.next().switch()
                if self.spins > limit:
                    raise DeadlockError(f"kernel {self.name}: threads spin and nothing changes\n{self._who_waits()}")
            if not all(thread.dead for thread in self.threads):
                raise DeadlockError(f"kernel {self.name}: no thread can run\n{self._who_waits()}")
        finally:
            self._drop_threads()

    def _drop_threads(self) -> None:
        self.stopped = True
        for thread in self.threads:
            if not thread.dead:
                with suppress(Exception):
                    thread.throw(GreenletExit)

    def _who_waits(self) -> str:
        blocks_of: dict[str, list[int]] = {}
        for block in self.blocks:
            threads_of: dict[str, list[int]] = {}
            for thread in block.threads:
                threads_of.setdefault(thread.state(), []).append(thread.index)
            text = "; ".join(f"threads {ranges(threads)} {state}" for state, threads in threads_of.items())
            blocks_of.setdefault(text, []).append(block.index)
        lines = [
            f"  block{'s' if len(blocks) > 1 else ''} {ranges(blocks)}: {text}" for text, blocks in blocks_of.items()
        ]
        if any(thread.dead for thread in self.threads):
            lines.append("  (a thread that returned does not arrive at later barriers: no `return` above one)")
        return "\n".join(lines)


class Order:
    """The threads that can run, and which of them is next."""

    def __init__(self, seed: int, grid: int, block: int):
        self._heap: list[tuple[float, int, Thread]] = []
        self._added = 0
        self._random = random.Random(seed)
        self._plain = seed == 0
        warps = -(-block // WARP)
        # Even seeds: a rank for each block and each of its warps, and a random choice inside a warp.
        ranks = self._random.sample(range(grid), grid)
        spread = 0 if seed % 2 else 1
        self._rank = [
            [spread * (ranks[b] * warps + w) for w in self._random.sample(range(warps), warps)] for b in range(grid)
        ]

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, thread: Thread, behind_all: bool = False) -> None:
        """``thread`` can run."""
        self._added += 1
        if behind_all:
            key = BEHIND_ALL
        elif self._plain:
            key = 0.0
        else:
            key = self._rank[thread.block.index][thread.warp.index] + self._random.random()
        heapq.heappush(self._heap, (key, self._added, thread))

    def next(self) -> Thread:
        """Take the next one."""
        return heapq.heappop(self._heap)[2]


class Block:
    """Threads that share memory and a barrier."""

    def __init__(self, launch: Launch, index: int, shared_bytes: int):
        self.launch, self.index = launch, index
        self.barrier = Barrier("syncthreads", launch.block_size)
        self.dynamic_shared = CheckedArray(launch.garbage.shared(shared_bytes), "shared memory")
        self.static_shared: dict[tuple, CheckedArray] = {}  # by the line that asks for it
        warps = [Warp(w, min(WARP, launch.block_size - w * WARP)) for w in range(-(-launch.block_size // WARP))]
        self.threads = [Thread(launch, self, warps[t // WARP], t) for t in range(launch.block_size)]


class Thread(greenlet):
    """A CUDA thread."""

    def __init__(self, launch: Launch, block: Block, warp: Warp, index: int):
        super().__init__(parent=launch.home)
        self.gr_context = contextvars.copy_context()  # holds numpy's errstate, which a greenlet would start without
        self.launch, self.block, self.warp = launch, block, warp
        self.index, self.lane = index, index % WARP
        self.waits_at: Barrier | Meeting | None = None
        self.result: Any = None

    def run(self) -> None:
        """The whole life of the thread."""
        try:
            self.launch.body(self.launch.args)
        except GreenletExit:
            raise
        except BaseException as error:
            _add_note(error, f"in {self.place}")
            raise
        self.launch.spins = 0

    @property
    def place(self) -> str:
        """Kernel, block and thread, for messages."""
        return f"kernel {self.launch.name}, block {self.block.index}, thread {self.index}"

    def wait(self, barrier: Barrier | Meeting) -> Any:
        """Let others run until the barrier opens; what the last one to arrive left for this thread."""
        self.waits_at = barrier
        self._leave()
        self.waits_at = None
        return self.result

    def release(self, result: Any) -> None:
        """The barrier has opened."""
        self.result = result
        self.launch.spins = 0
        self.launch.order.add(self)

    def interrupt(self) -> None:
        """A point where others may run first: memory that they share with this thread is about to be touched."""
        if self.launch.interruptible:
            self.launch.order.add(self)
            self._leave()

    def spin(self) -> None:
        """Nothing changed: let all others run first."""
        self.launch.spins += 1
        self.launch.order.add(self, behind_all=True)
        self._leave()

    def must_run(self) -> None:
        """End the thread if the launch is over: a ``finally`` of its body must neither wait nor open a barrier."""
        if self.launch.stopped:
            raise GreenletExit

    def _leave(self) -> None:
        self.must_run()
        self.launch.home.switch()

    def state(self) -> str:
        """For the deadlock report: what it waits for, and on which line of the kernel."""
        if self.dead:
            return "returned"
        what = f"wait at {self.waits_at.label}" if self.waits_at else "spin"
        frame = self.gr_frame
        while frame is not None and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) == HERE:
            frame = frame.f_back
        if frame is None:
            return what
        return f"{what} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


class Barrier:
    """Where all threads of a block, or of the grid, meet; ``votes`` are added up."""

    def __init__(self, label: str, size: int):
        self.label, self.size = label, size
        self._arrived: list[Thread] = []
        self._votes = 0

    def meet(self, thread: Thread, vote: int = 0) -> int:
        """Wait for the others; the sum of all votes."""
        thread.must_run()
        self._votes += vote
        if len(self._arrived) + 1 < self.size:
            self._arrived.append(thread)
            return thread.wait(self)
        votes, arrived = self._votes, self._arrived
        self._votes, self._arrived = 0, []
        for other in arrived:
            other.release(votes)
        return votes


class Warp:
    """Up to 32 threads; the lanes that a partial last warp lacks take no part."""

    def __init__(self, index: int, lanes: int):
        self.index = index
        self.present = (1 << lanes) - 1
        self._meetings: dict[tuple[str, int], Meeting] = {}

    def meet(
        self, thread: Thread, operation: str, mask: int, value: Any, work: Callable[[list], Sequence] | None = None
    ) -> Any:
        """Wait for the lanes of ``mask`` to call the same operation with that mask.

        Gives ``work(values by lane)``, computed once by the last to arrive, or the values; None for other lanes.
        """
        thread.must_run()
        lanes = int(mask) & FULL_MASK
        if not lanes >> thread.lane & 1:
            raise ValueError(
                f"{operation}: lane {thread.lane} calls it with the mask {lanes:#010x}, which leaves it out"
            )
        lanes &= self.present
        meeting = self._meetings.get((operation, lanes))
        if meeting is None:
            meeting = self._meetings[operation, lanes] = Meeting(self.index, operation, lanes)
        meeting.values[thread.lane] = value
        meeting.missing -= 1
        if meeting.missing:
            meeting.arrived.append(thread)
            return thread.wait(meeting)
        del self._meetings[operation, lanes]
        result = meeting.values if work is None else work(meeting.values)
        for other in meeting.arrived:
            other.release(result)
        return result


class Meeting:
    """One warp operation, from the first lane that arrives to the last."""

    def __init__(self, warp: int, operation: str, mask: int):
        self._warp, self._operation, self._mask = warp, operation, mask
        self.values: list[Any] = [None] * WARP
        self.arrived: list[Thread] = []
        self.missing = bin(mask).count("1")

    @property
    def label(self) -> str:
        """``warp shuffle of warp 3 (shfl_xor_sync, lanes 0-31)``."""
        kind = "warp collective"
        if self._operation.startswith("shfl_"):
            kind = "warp shuffle"
        elif self._operation in ("all_sync", "any_sync", "eq_sync", "ballot_sync"):
            kind = "warp vote"
        elif self._operation == "syncwarp":
            kind = "syncwarp"
        lanes = ranges(lane for lane in range(WARP) if self._mask >> lane & 1)
        return f"{kind} of warp {self._warp} ({self._operation}, lanes {lanes})"


def warp_collective(value: Any, work: Callable[[list], Sequence]) -> Any:
    """For twins of instructions that a whole warp executes together (ldmatrix, mma).

    ``work`` receives the 32 lanes' values (None for lanes that a partial warp lacks) and returns one result a lane;
    each lane's call returns its own.  ``work`` runs once, when the last lane has arrived.
    """
    thread = getcurrent()
    return thread.warp.meet(thread, work.__qualname__, FULL_MASK, value, work)[thread.lane]


def ranges(numbers: Iterable[int]) -> str:
    """``0-31, 40`` of ascending numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:  # Python 3.10 has no notes
        error.__cause__ = RuntimeError(note)
