"""The emulator: a kernel's own Python body, run on the CPU, one greenlet for each CUDA thread.

The model
    Every thread of every block is alive at once, so the grid barrier is as real as the block barrier, and warp
    operations wait for the lanes in their mask.  A thread runs until it blocks.  Who runs next is drawn from ``seed``:
    0 is plain order (block 0 thread 0 first); an odd seed picks any thread that can run; an even one ranks blocks and
    warps, so that some run far ahead of others.  A nonzero seed also changes threads at atomics and fences.  One seed
    always gives the same run.  A missing barrier shows as a wrong result under some seed; test several.

    The body is not rewritten: its code object runs as it stands, so breakpoints, pdb, print and coverage
    (``concurrency = greenlet``) work on the kernel's own lines.  Only what its names refer to changes: numba and math
    are replaced by CPU twins (twins.py), found by what a name holds, not by the name (localise.py).

    Shared and local memory start as garbage with NaN in it.  Arrays are checked: an index outside, a view at a
    misaligned address and a write to read-only memory raise ``MemoryAccessError``.  A barrier that not all reach
    raises ``DeadlockError``, which says who waits where.

What it cannot show
    Types.  Numba infers them, Python does not: here signed integers are Python ints that never overflow (casts such as
    ``int32(x)`` wrap), unsigned ones are numpy scalars that wrap at their own width (numba widens to 64 bits first),
    and a float64 that slips in goes unnoticed.  The compiled tests prove types.
    Races, beyond their order: a store is visible at once and in program order, and between two points where a thread
    may be interrupted nobody else runs.  A loop that waits on a plain load (no atomic, no nanosleep) never ends.
    Undefined results of the hardware: a lane that a shuffle cannot reach keeps its own value here.
    Time, occupancy, registers, bank conflicts.

Files: machine.py (threads, barriers, order), memory.py (checked arrays), twins.py and numbers.py (what stands for
numba and math), ptx_twins.py (what stands for kernels/ptx.py), localise.py (giving a body its twins).
"""

from nbverify.emulator.machine import Emulator, warp_collective
from nbverify.emulator.twins import register_twin

__all__ = ["Emulator", "register_twin", "warp_collective"]
