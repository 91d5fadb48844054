"""The yardstick of the tensor cores: nothing but the products it is paid for, and they are the right ones."""

from collections import namedtuple

import numpy as np
import pytest

import nbverify as nv
from benchmarks import ceilings
from benchmarks.ceilings import CHAINS, STEPS, THREADS, compile_mma_loop
from nbverify.compile import target_of

FRAGMENTS = {"a0": (1, 3, 5, 7), "a1": (9, 11, 13, 15)}
PAIRS_OF_B = ((17, 19), (21, 23), (25, 27), (29, 31))


@pytest.mark.parametrize("cc", ["8.0", "9.0", "12.0"])
def test_the_loop_is_its_products(cc):
    kernel = compile_mma_loop(target_of(cc))
    need = kernel.resources
    products = [count for opcode, count in need.instructions.items() if opcode.startswith("mma.")]
    assert products == [STEPS * CHAINS]
    assert (need.spill_bytes, need.local_bytes, need.static_shared_bytes) == (0, 0, 0)
    assert not any(opcode.startswith(("ld.global", "ld.shared", "ldmatrix")) for opcode in need.instructions)
    assert ".f64" not in kernel.ptx
    assert need.registers * THREADS * ceilings.BLOCKS_PER_SM <= 65_536


def test_every_product_counts():
    """Emulated, a warp, two rounds: the sums that the fragments of bfloat16 pairs give, by the layout of mma."""
    rounds = 2
    sums = np.zeros(32, np.float32)
    args = namedtuple("Args", [ceilings.ROUNDS_FIELD, ceilings.RESULT_FIELD])(np.int64(rounds), sums)
    nv.Emulator().launch(ceilings.mma_loop, args, grid=1, block=32, shared_bytes=0, name="mma_loop")

    def pair(factor: int) -> np.ndarray:
        """[lanes, 2] floats."""
        word = (np.arange(32, dtype=np.uint64) * 2654435761 + 12345) * factor
        bits = (word.astype(np.uint32) & 0x807F807F) | 0x3F803F80
        halves = np.stack([bits & 0xFFFF, bits >> 16], 1)
        return (halves << 16).astype(np.uint32).view(np.float32).astype(np.float64)

    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4
    want = np.zeros((16, 8))
    for factors in FRAGMENTS.values():
        a = np.zeros((16, 16))
        for i, factor in enumerate(factors):
            for half in range(2):
                a[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = pair(factor)[:, half]
        for both in PAIRS_OF_B:
            b = np.zeros((16, 8))
            for i, factor in enumerate(both):
                for half in range(2):
                    b[2 * t + half + 8 * i, g] = pair(factor)[:, half]
            want += rounds * STEPS * a @ b
    by_lane = [want[g, 2 * t], want[g, 2 * t + 1], want[g + 8, 2 * t], want[g + 8, 2 * t + 1]]
    np.testing.assert_allclose(sums, sum(by_lane), rtol=1e-5, atol=0.05)
