"""What the tensor cores do at most through mma.sync, measured where it is used as a yardstick.

Every warp of a full GPU multiplies fragments that stay in its registers: no memory, no shared memory, no dependence
between neighbouring products.  bfloat16 with float32 sums; fp16 has the same rate, and an fp8 cache is converted to
16 bits before it is multiplied.  Operands are random, because products of zeros draw less power and run faster.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from nbverify import compile, contract, launch
from nbverify.compile import CompiledKernel, Target
from nbverify.kernels import ptx
from nbverify.presets import preset

WARP = 32
THREADS = 256
BLOCKS_PER_SM = 2  # at least: 4 warps a tensor core, so that one can always issue
STEPS = 8
CHAINS = 8  # independent accumulators of a warp
FLOP_OF_MMA = 2 * 16 * 8 * 16
ROUNDS = 2000  # a few milliseconds
SPEC = preset("kimi-k2.6-tp8")  # any: its contract gives the kernel's parameters their types

# Which fields of VerifyArgs the body uses, and for what.
ROUNDS_FIELD, RESULT_FIELD = "num_tokens", "partial_o"


def mma_loop(args: Any) -> None:
    """``num_tokens`` rounds of STEPS x CHAINS products a warp; ``partial_o`` [threads] gets sums, so all are needed.

    Fragments are bfloat16 pairs of magnitude 1 to 2 with random signs and mantissas.  Two of a and four of b make eight
    different products, each added to an accumulator of its own.
    """
    ptx.unroll_loops()
    thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    word = uint32(thread * 2654435761 + 12345)  # Knuth's multiplicative hash
    a0 = (_pair(word, 1), _pair(word, 3), _pair(word, 5), _pair(word, 7))
    a1 = (_pair(word, 9), _pair(word, 11), _pair(word, 13), _pair(word, 15))
    b0, b1 = (_pair(word, 17), _pair(word, 19)), (_pair(word, 21), _pair(word, 23))
    b2, b3 = (_pair(word, 25), _pair(word, 27)), (_pair(word, 29), _pair(word, 31))
    c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = (float32(0), float32(0), float32(0), float32(0))
    done = int64(0)
    while done < args.num_tokens:
        for _ in range(STEPS):
            c0, c1 = ptx.mma_bf16(a0, b0, c0), ptx.mma_bf16(a0, b1, c1)
            c2, c3 = ptx.mma_bf16(a0, b2, c2), ptx.mma_bf16(a0, b3, c3)
            c4, c5 = ptx.mma_bf16(a1, b0, c4), ptx.mma_bf16(a1, b1, c5)
            c6, c7 = ptx.mma_bf16(a1, b2, c6), ptx.mma_bf16(a1, b3, c7)
        done += 1
    low, high = _sum(c0) + _sum(c1) + _sum(c2) + _sum(c3), _sum(c4) + _sum(c5) + _sum(c6) + _sum(c7)
    args.partial_o[thread] = low + high


@cuda.jit(device=True)
def _pair(word: Any, factor: int) -> Any:
    """Two bfloat16 of magnitude 1 to 2: exponent of one, sign and mantissa out of a hash."""
    bits = uint32(word * uint32(factor))
    return uint32((bits & uint32(0x807F807F)) | uint32(0x3F803F80))


@cuda.jit(device=True)
def _sum(c: Any) -> Any:
    return (c[0] + c[1]) + (c[2] + c[3])


def compile_mma_loop(target: Target) -> CompiledKernel:
    """The loop for a target, with or without a GPU."""
    parameters, bounds = contract.parameters(SPEC), (THREADS, BLOCKS_PER_SM)
    return compile.compile_body(mma_loop, parameters, target, launch_bounds=bounds, cooperative=False)


class MmaLoop:
    """The loop, loaded on the current device; ``launch(stream)`` runs it, ``flop`` is what that does."""

    def __init__(self, rounds: int = ROUNDS):
        device = launch.Device(None)
        compiled = compile_mma_loop(compile.target_of(compile.override_cc() or device.cc))
        kernel = launch.LoadedKernel(device, compiled, threads=THREADS, shared_bytes=0)
        grid = device.num_sms * kernel.blocks_per_sm()
        result = launch.DeviceBuffer(device, 4 * grid * THREADS)
        block = launch.ParameterBlock(launch.ParameterLayout(contract.parameters(SPEC)))
        block.set_array(RESULT_FIELD, result.pointer, grid * THREADS, 4)
        block.set_integer(ROUNDS_FIELD, rounds)
        self._launcher = launch.Launcher([kernel], [grid], block, result)
        self.flop = grid * (THREADS // WARP) * rounds * STEPS * CHAINS * FLOP_OF_MMA

    def launch(self, stream: Any) -> None:
        self._launcher(stream.ptr)


def measure_mma(clock: Any, repeats: int = 10) -> float:
    """TFLOP/s, the best of ten, as for memory."""
    loop = MmaLoop()
    times = clock.device_times(loop.launch, repeats=repeats, warm=True)
    return round(loop.flop / min(times.samples_us) / 1e6, 1)
