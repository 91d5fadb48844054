"""The PTX instructions compile to themselves, for the targets they name, without float64 and local memory."""

import numpy as np
import pytest
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, float32, float64, int32, uint32
from support.ptx_cases import CASES, Case, compile_case, link_case

from nbverify.compile import Target, target_of
from nbverify.kernels import ptx

TARGETS = ["8.0", "9.0", "12.0"]
WITHOUT_LOOPS = {  # that the compiler may unroll: what is asked for is there as often as it is asked for
    *("mma_bf16", "mma_f16", "ldmatrix", "arithmetic", "division", "permute", "pair products", "widen bfloat16"),
    *("widen float16", "memory", "elect", "setmaxnreg", "trap"),
}
LAUNCH_REGISTERS = 168  # what 384 threads can have of 65536, a multiple of 8
# In the assembler's words.
IGNORED = "'setmaxnreg' ignored"
TOO_OLD = r"not supported on \.target|requires \.target|Feature .* requires"


def problems_of(kernel):
    need = kernel.resources
    checks = {
        "float64": ".f64" not in kernel.ptx,
        "an array in local memory": ".local" not in kernel.ptx and need.local_bytes == 0,
        "spills": need.spill_bytes == 0 and need.stack_bytes == 0,
        "a call": "call.uni" not in kernel.ptx,
    }
    return [text for text, holds in checks.items() if not holds]


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, cc):
    target = target_of(cc)
    if (target.major, target.minor) < case.min_cc:
        with pytest.raises(Exception, match=TOO_OLD):
            compile_case(case, target)
        return
    kernel = compile_case(case, target)
    assert problems_of(kernel) == []
    found = {text: kernel.ptx.count(text) for text in case.instructions}
    assert {text for text, count in found.items() if count == 0} == set()
    if case.name in WITHOUT_LOOPS:
        assert found == case.instructions


def test_setmaxnreg_needs_the_specific_target():
    (case,) = [case for case in CASES if case.name == "setmaxnreg"]
    with pytest.raises(Exception, match=TOO_OLD):
        compile_case(case, Target(12, 0, ""))


@pytest.mark.parametrize("cc", ["9.0", "12.0"])
def test_setmaxnreg_is_kept(cc):
    """The program is compiled for what its threads have at launch; an assembler that ignores it says so."""
    (case,) = [case for case in CASES if case.name == "setmaxnreg"]
    kernel, log = link_case(case, target_of(cc))
    assert kernel.resources.registers == LAUNCH_REGISTERS
    assert IGNORED not in log
    # What the linker says where it is not kept: of the same program as PTX, which it takes for a part of one.
    linker = Linker(
        ObjectCode.from_ptx(kernel.ptx.encode()),
        options=LinkerOptions(arch=kernel.target, verbose=True, ptxas_options=["-v"]),
    )
    linker.link("cubin")
    assert IGNORED in linker.get_info_log()
    linker.close()


# ----------------------------------------------------------------------------------------------------------------- hint

COLUMNS, STEPS = 32, 4  # 128 accumulators a thread


def accumulate(args):
    ptx.unroll_loops()
    tile = cuda.shared.array(0, uint32, alignment=128)
    acc = cuda.local.array((COLUMNS, 4), float32)
    for j in range(COLUMNS):
        for e in range(4):
            acc[j, e] = float32(0)
    base = ptx.shared_address(tile, 4 * cuda.threadIdx.x)
    for step in range(args.steps[0]):
        for k in range(STEPS):
            a = ptx.ldmatrix_x4(base + 512 * k + step)
            for j in range(COLUMNS):
                b = ptx.ldmatrix_x2(base + 512 * (k + j))
                acc[j, 0], acc[j, 1], acc[j, 2], acc[j, 3] = ptx.mma_bf16(
                    a, b, (acc[j, 0], acc[j, 1], acc[j, 2], acc[j, 3])
                )
    for j in range(COLUMNS):
        for e in range(4):
            args.out[(j * 4 + e) * 32 + cuda.threadIdx.x] = acc[j, e]


def for_known(args):
    ptx.unroll_loops()
    values = cuda.local.array(128, float32)
    for i in range(128):
        values[i] = float32(0)
    for step in range(args.steps[0]):
        for i in range(128):
            values[i] += ptx.ex2(args.out[step * 128 + i])
    for i in range(128):
        args.out[i * 32 + cuda.threadIdx.x] = values[i]


def while_known(args):
    ptx.unroll_loops()
    total = float32(0)
    i = int32(0)
    while i < 200:
        total = ptx.ex2(total + args.out[i])
        i = int32(i + 1)
    args.out[cuda.threadIdx.x] = total


def make_for_unknown(hint):
    def for_unknown(args):
        hint()
        total = float32(0)
        for i in range(args.steps[0]):
            total += ptx.ex2(args.out[i])
        args.out[cuda.threadIdx.x] = total

    return for_unknown


def for_kept(args):
    ptx.keep_loops()
    total = float32(0)
    for i in range(3):
        total = ptx.ex2(total + args.out[i])
    args.out[cuda.threadIdx.x] = total


for_unknown, for_unknown_kept = make_for_unknown(ptx.unroll_loops), make_for_unknown(ptx.keep_loops)
HINTED = {for_known: 128, while_known: 200, for_unknown: 1, for_kept: 1, for_unknown_kept: 1}  # -> ex2 in the PTX


def hint_case(body):
    return Case(
        body.__name__,
        body,
        lambda rng: {"steps": np.ones(1, np.int32), "out": np.zeros(32 * 128, np.float32)},
        check=lambda before, after: None,
        instructions={},
        shared_bytes=512 * 40,
    )


@pytest.mark.parametrize("cc", TARGETS)
def test_known_loops_are_unrolled_and_accumulators_stay_in_registers(cc):
    kernel = compile_case(hint_case(accumulate), target_of(cc))
    assert problems_of(kernel) == []
    assert kernel.ptx.count("mma.sync") == STEPS * COLUMNS  # and the outer loop is one loop still


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("body", HINTED, ids=lambda body: body.__name__)
def test_loops_are_unrolled_or_kept_as_asked(body, cc):
    kernel = compile_case(hint_case(body), target_of(cc))
    assert problems_of(kernel) == []
    assert kernel.ptx.count("ex2.approx") == HINTED[body]


@pytest.mark.parametrize("body", HINTED, ids=lambda body: body.__name__)
def test_the_compiler_would_not_do_it_by_itself(body, monkeypatch):
    identity = ptx._loop_identity
    monkeypatch.setattr(ptx, "_loop_identity", lambda module, wishes: identity(module, ("llvm.loop.mustprogress",)))
    assert compile_case(hint_case(body), target_of("12.0")).ptx.count("ex2.approx") != HINTED[body]


@pytest.mark.parametrize("body", HINTED, ids=lambda body: body.__name__)
def test_hint_in_the_emulator(body):
    hint_case(body).emulate()


# --------------------------------------------------------------------------------------------------------------- typing


def run_typing(body):
    with pytest.raises(Exception) as error:
        compile_case(hint_case(body), target_of("8.0"))
    return str(error.value)


def test_float64_is_refused():
    def body(args):
        args.out[0] = ptx.ex2(float64(args.out[0]))

    assert "expected float32, got float64" in run_typing(body)


def test_a_tuple_of_the_wrong_length_is_refused():
    def body(args):
        zero = float32(0)
        args.out[0] = ptx.mma_bf16((1, 2, 3, 4), (1, 2, 3), (zero, zero, zero, zero))[0]

    assert "operand 1 of `mma.sync" in run_typing(body)


def test_a_group_count_that_is_no_constant_is_refused():
    def body(args):
        ptx.cp_async_wait(args.steps[0])

    assert "cp_async_wait: expected a constant" in run_typing(body)


def test_a_register_count_that_the_hardware_lacks_is_refused():
    def body(args):
        ptx.setmaxnreg_inc(100)

    assert "expected a multiple of 8 from 24 to 256, got 100" in run_typing(body)


def test_the_length_of_a_view_that_is_no_constant_is_refused():
    def body(args):
        ptx.shared_int64(uint32(0), args.steps[0])

    assert "shared_int64: expected a constant" in run_typing(body)
