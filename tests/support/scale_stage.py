"""A stage for the tests of nbverify.stages: y[slots[i]] = factor * x[i], and one word of a buffer known by address."""

from numba import cuda, float32, int32, uint64

from nbverify.kernels import ptx
from nbverify.kernels.indices import load_index
from nbverify.stages import Stage, array, index_array, scalar

PARAMETERS = (array("x", "float32"), *index_array("slots"), array("y", "float32"), array("table", "int64"),
              scalar("num"), scalar("factor", "float32"))  # fmt: skip


def make_body(plus):
    """``body(args)``."""

    def scale(args):
        i = int32(cuda.grid(1))
        if i < args.num:
            args.y[load_index(args.slots, args.slots_words, i)] = float32(args.factor * args.x[i]) + float32(plus)
        if i == 0 and args.table.size > 0:
            ptx.store_global_u32(uint64(args.table[0] + 4), ptx.load_global_u32(uint64(args.table[0])) + 1)

    return scale


def stage(plus=0):
    """It."""
    return Stage("scale", "tests.support.scale_stage", PARAMETERS, threads=64, constants={"plus": plus})
