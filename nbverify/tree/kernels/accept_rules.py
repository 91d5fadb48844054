"""Numbers that the acceptance kernels and their numpy definitions share, so that both give the same bits.

No numba here: the definitions import it on machines without a GPU.
"""

from enum import IntEnum


class AcceptFlag(IntEnum):
    """What was wrong with a request's data, in ``flags [B]``; of several faults the one with the lowest code."""

    OK = 0
    NUM_NODES = 1
    """``num_nodes`` is negative or larger than the plan's ``max_nodes``."""
    ROWS = 2
    """Rows ``qo_indptr[b]`` to ``qo_indptr[b] + num_nodes[b] - 1`` are not all there."""
    ROOT = 3
    """Node 0 has a parent."""
    PARENT = 4
    """A node other than 0 has a parent that is no node of this request, or itself; a second root is one of these."""
    CYCLE = 5
    """Parents lead round in a circle that never comes to the root."""
    SAMPLING = 6
    """The temperature is negative, infinite or NaN, or ``top_p`` is not in (0, 1]."""
    BAD_LOGITS = 7
    """A warning: the request is served.  A row on its path has a NaN (it counts as -inf) or nothing above -inf."""


NO_NODE = -1  # in accept_nodes and accept_index, after the end of the path
NO_TOKEN = 0  # the bonus token of a request that is not served: an embedding has this row, and none has row -1

# A float32 as an integer of 32 bits in the same order; -0 and +0 are the same.
SIGN, ALL_BITS = 1 << 31, (1 << 32) - 1

# 2^f for f in [0, 1]: coefficients of f^0 to f^6, by float32 products and sums in Horner's order, never fused.
# 1 and 2 at the ends, never falling in between; the relative error is below 1e-7 (fitted for it, then rounded).
EXP2 = (1.0, 0.6931470036506653, 0.2402295172214508, 0.05548415333032608, 0.009678063914179802, 0.0012440881691873074,
        0.0002171500527765602)  # fmt: skip
LOG2_E = 1.4426950408889634

# The weight of a token is 2^((logit - largest) / temperature * log2 e) as an integer in units of 2^-40.
WEIGHT_BITS = 40
MANTISSA_BITS = 23
LEAST_EXPONENT = -40.0  # below it the weight is 0
MAX_VOCAB = 1 << 22  # so that all sums of weights stay below 2^62

TOP_P_BITS = 24  # of top_p as a fraction

# Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
PHILOX_INCREMENTS = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10

# What the plan allocates and launches for them.
SPLITS = 16  # parts of a row, each of them read by a warp
ARGMAX_THREADS, ARGMAX_BLOCKS_PER_SM = 256, 4
DIGIT_BITS = 4
BINS = 1 << DIGIT_BITS  # sums of a thread that draws, 8 bytes each
