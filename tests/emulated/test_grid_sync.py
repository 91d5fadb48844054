"""The grid's barrier, alone: nobody passes before all have come, round after round, over one counter."""

from collections import namedtuple

import numpy as np
import pytest
from numba import cuda

from nbverify.emulator import Emulator
from nbverify.errors import DeadlockError
from nbverify.kernels import ptx
from nbverify.reduce.grid_sync import grid_barrier

SIGN = 1 << 31
ROUNDS = 3
LONG = 60


def launch(body, *, grid, block=2, seed=0, counter=0, **fields):
    arrays = {"arrivals": np.array([counter], np.uint32), **fields}
    args = namedtuple("Args", arrays)(**arrays)
    Emulator(seed=seed).launch(body, args, grid=grid, block=block, shared_bytes=0, name="k")
    return args


def meet(args):
    """Every thread counts itself, in its block's place, and after the barrier reads what all blocks have counted.

    A block is late in each round, but not its first thread, which is the one that tells the others.
    """
    block, grid = cuda.blockIdx.x, cuda.gridDim.x
    for turn in range(ROUNDS):
        if block == turn % grid and cuda.threadIdx.x > 0:
            for _ in range(LONG):
                ptx.atomic_add_u32(ptx.global_address(args.nothing, 0), 1)
        ptx.atomic_add_u32(ptx.global_address(args.came, turn * grid + block), 1)
        grid_barrier(args)
        for other in range(grid):
            came = ptx.load_global_u32(ptx.global_address(args.came, turn * grid + other))
            if came != cuda.blockDim.x:
                args.early[block] = 1 + turn


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grid", [1, 2, 3, 7])
def test_nobody_passes_early(grid, seed):
    """Several rounds in one launch, and launches one after the other, as the plan's counter sees them."""
    counter = 0
    for _ in range(2):
        done = launch(
            meet,
            grid=grid,
            seed=seed,
            counter=counter,
            came=np.zeros(ROUNDS * grid, np.uint32),
            early=np.zeros(grid),
            nothing=np.zeros(1, np.uint32),
        )
        assert not done.early.any()
        counter = int(done.arrivals[0])
        assert counter in (0, SIGN), "all but the sign is zero again"
    assert counter == 0, "an even number of rounds"


@pytest.mark.parametrize("missing", [0, 2])
def test_a_block_that_does_not_come_is_a_deadlock(missing):
    """Block 0 adds another number than the others do: neither may be replaced."""

    def body(args):
        if cuda.blockIdx.x != missing:
            grid_barrier(args)

    with pytest.raises(DeadlockError, match="threads spin and nothing changes"):
        launch(body, grid=4)
