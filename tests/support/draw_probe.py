"""A stage for the tests of sampling: draws from one row with random bits of the caller's choice."""

from numba import cuda, int64, uint64

from nbverify.stages import Stage, array, scalar
from nbverify.tree.kernels.accept_rules import BINS
from nbverify.tree.kernels.sampling import make_draw

PARAMETERS = (array("logits", "float32"), array("bits", "int64"), array("tokens", "int64"), scalar("row_stride"),
              scalar("vocab"), scalar("top_k"), scalar("temperature", "float32"),
              scalar("top_p", "float32"))  # fmt: skip
THREADS = 64


def make_body():
    """``body(args)``."""
    draw = make_draw("float32", THREADS)

    def draw_probe(args):
        b = cuda.blockIdx.x
        token, _ = draw(args, int64(0), args.temperature, args.top_k, args.top_p, uint64(args.bits[b]))
        if cuda.threadIdx.x == 0:
            args.tokens[b] = token

    return draw_probe


def stage():
    """It."""
    return Stage("draw_probe", "tests.support.draw_probe", PARAMETERS, THREADS, shared_bytes=8 * BINS * THREADS)
