"""A stage for the tests of sampling: draws from one row with random bits of the caller's choice."""

from numba import cuda, int64, uint64

from nbverify.stages import Stage, array, scalar
from nbverify.tree.kernels.accept_rules import BINS
from nbverify.tree.kernels.sampling import make_draw

PARAMETERS = (array("bits", "int64"), array("tokens", "int64"), scalar("row_stride"), scalar("vocab"), scalar("top_k"),
              scalar("temperature", "float32"), scalar("top_p", "float32"))  # fmt: skip
THREADS = 64


def make_body(logits_dtype):
    """``body(args)``."""
    draw = make_draw(logits_dtype, THREADS)

    def draw_probe(args):
        b = cuda.blockIdx.x
        token, _ = draw(args, int64(0), args.temperature, args.top_k, args.top_p, uint64(args.bits[b]))
        if cuda.threadIdx.x == 0:
            args.tokens[b] = token

    return draw_probe


def stage(logits_dtype):
    """It."""
    logits = array("logits", "float32" if logits_dtype == "float32" else "uint16")
    shared, constants = 8 * BINS * THREADS, {"logits_dtype": logits_dtype}
    return Stage("draw_probe", "tests.support.draw_probe", (logits, *PARAMETERS), THREADS, shared, constants)
