"""A kernel whose parameters are not the contract's cannot be launched: not compiled, or refused by the launcher.

Bodies here are a few lines, and compile in about a second.
"""

import ctypes
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from numba import cuda, float32

import nbverify as nv
from nbverify import contract, launch
from nbverify.compile import check_parameter_block, compile_body, target_of
from nbverify.contract import Parameter
from nbverify.errors import CompileError

SPEC = nv.VerifySpec.gqa(2, 1, 16, max_requests=1, max_nodes=1, max_kv_len=1, sm_scale=1.0)
PARAMETERS = contract.parameters(SPEC)
TARGET = target_of("8.0")


def compiled(body, parameters=PARAMETERS):
    return compile_body(body, parameters, TARGET, launch_bounds=(128, 1), cooperative=False)


def tiny(args):
    args.lse[cuda.threadIdx.x] = args.v_scale * float32(args.num_tokens)


@pytest.fixture(scope="module")
def tiny_kernel():
    return compiled(tiny)


# ---- bodies


def no_parameter():
    pass


def other_name(arguments):
    pass


def one_more(args, more):
    pass


def flat_parameters(q, k_cache, v_cache):
    pass


@pytest.mark.parametrize("body", [no_parameter, other_name, one_more, flat_parameters])
def test_body_with_other_parameters(body):
    with pytest.raises(CompileError, match=rf"^{body.__name__}: expected one parameter, args "):
        compiled(body)


def reads_unknown_field(args):
    args.lse[0] = args.colour


def reads_renamed_buffer(args):
    args.log_sum_exp[0] = args.v_scale


@pytest.mark.parametrize("body, field", [(reads_unknown_field, "colour"), (reads_renamed_buffer, "log_sum_exp")])
def test_body_that_reads_a_field_the_table_does_not_have(body, field):
    with pytest.raises(CompileError, match=field) as failure:
        compiled(body)
    assert str(failure.value).startswith(f"{body.__name__} for sm_80: ")


def test_entry_point_and_parameters(tiny_kernel):
    assert tiny_kernel.name == "nbverify_tiny"
    assert tiny_kernel.target == "sm_80"
    assert tiny_kernel.parameters == PARAMETERS
    assert not tiny_kernel.cooperative
    assert tiny_kernel.cubin[:4] == b"\x7fELF"
    assert tiny_kernel.entry.encode() in tiny_kernel.cubin, "what the launcher asks for"
    assert ".entry nbverify_tiny(" in tiny_kernel.ptx


# ---- the entry point's parameter block


def swapped(i, j):
    changed = list(PARAMETERS)
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


def index_of(name):
    return [p.name for p in PARAMETERS].index(name)


def with_field(field, **changes):
    return tuple(replace(p, **changes) if p.name == field else p for p in PARAMETERS)


OTHER_BLOCKS = {
    "float32 and int64 swapped": swapped(index_of("score_scale"), index_of("num_tokens")),
    "one scalar less": PARAMETERS[:-1],
    "one array less": PARAMETERS[1:],
    "one scalar more": (*PARAMETERS, Parameter("more", "int64", False)),
    "one array more": (Parameter("more", "uint8", True), *PARAMETERS),
    "wider scalar": with_field("v_scale", dtype="float64"),
    "narrower scalar": with_field("num_tokens", dtype="int32"),
    "scalar for an array": with_field("lse", is_array=False),
    "array for a scalar": with_field("max_nodes", is_array=True),
}


def test_check_parameter_block_takes_what_was_compiled(tiny_kernel):
    check_parameter_block(tiny_kernel.name, tiny_kernel.ptx, PARAMETERS)


@pytest.mark.parametrize("parameters", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_check_parameter_block_refuses_other_widths(tiny_kernel, parameters):
    with pytest.raises(CompileError, match=r"^nbverify_tiny: expected a parameter block of widths "):
        check_parameter_block(tiny_kernel.name, tiny_kernel.ptx, parameters)


# ---- the launcher: it compares names, order and types too, which widths cannot tell

SAME_WIDTHS = {
    "array and scalar swapped": swapped(index_of("q"), index_of("q_stride_token")),
    "arrays swapped": swapped(index_of("kv_indptr"), index_of("qo_indptr")),
    "arrays of other elements swapped": swapped(index_of("lse"), index_of("partial_o")),
    "scalars swapped": swapped(index_of("num_tokens"), index_of("num_slots")),
    "floats swapped": swapped(index_of("score_scale"), index_of("v_scale")),
    "strides swapped": swapped(index_of("k_cache_stride_slot"), index_of("k_cache_stride_head")),
    "renamed array": with_field("lse", name="log_sum_exp"),
    "renamed scalar": with_field("num_slots", name="num_rows"),
    "other elements": with_field("q", dtype="uint32"),
    "unsigned": with_field("num_tokens", dtype="uint64"),
}


def loaded(kernel):
    """What the launcher asks of a loaded kernel, without a driver."""
    return SimpleNamespace(compiled=kernel, device=None, function=0, launch_config=lambda grid: None)


def launcher_of(kernel, parameters=PARAMETERS):
    block = launch.ParameterBlock(launch.ParameterLayout(parameters))
    return launch.Launcher([loaded(kernel)], [1], block)


def test_launcher_takes_the_contracts_parameters(tiny_kernel):
    launcher_of(tiny_kernel)


@pytest.mark.parametrize("parameters", (SAME_WIDTHS | OTHER_BLOCKS).values(), ids=SAME_WIDTHS | OTHER_BLOCKS)
def test_launcher_refuses_a_kernel_of_other_parameters(tiny_kernel, parameters):
    """Whichever of the two is the odd one."""
    for kernel, block in ((replace(tiny_kernel, parameters=parameters), PARAMETERS), (tiny_kernel, parameters)):
        with pytest.raises(CompileError, match=r"^nbverify_tiny: compiled for other parameters than the contract's: "):
            launcher_of(kernel, block)


def test_launcher_names_the_first_difference(tiny_kernel):
    other = with_field("num_slots", name="num_rows")
    with pytest.raises(CompileError, match=rf"parameter {index_of('num_slots')}: .*num_slots.*num_rows"):
        launcher_of(replace(tiny_kernel, parameters=other))


def test_launcher_looks_at_every_kernel_of_a_sequence(tiny_kernel):
    odd = replace(tiny_kernel, name="nbverify_odd", parameters=SAME_WIDTHS["scalars swapped"])
    block = launch.ParameterBlock(launch.ParameterLayout(PARAMETERS))
    with pytest.raises(CompileError, match=r"^nbverify_odd: "):
        launch.Launcher([loaded(tiny_kernel), loaded(odd)], [1, 1], block)


@pytest.mark.parametrize("name", ["scalars swapped", "other elements"])
def test_a_kernel_keeps_the_parameters_it_was_compiled_for(name):
    """So that the launcher can tell: compiled through ``compile_body``, not made up."""
    kernel = compiled(tiny, SAME_WIDTHS[name])
    with pytest.raises(CompileError, match="compiled for other parameters"):
        launcher_of(kernel)


# ---- what the launcher packs, against where the compiled code looks


def packed(fill):
    """The values of a parameter block's cells, read the way the driver does: through the array of pointers."""
    layout = launch.ParameterLayout(PARAMETERS)
    block = launch.ParameterBlock(layout)
    fill(block)
    pointers = (ctypes.c_uint64 * layout.num_cells).from_address(block.address)
    return [(ctypes.c_char * 8).from_address(p).raw for p in pointers]


def test_a_cell_for_each_parameter_of_the_entry_point(tiny_kernel):
    cells = packed(lambda block: None)
    header = tiny_kernel.ptx[tiny_kernel.ptx.index(".entry nbverify_tiny") :]
    declared = re.findall(r"\.param\s+\.\w+\s+\w+", header[: header.index(")")])
    assert len(declared) == len(cells)


def cell_read_by(body, kind):
    """Number of the parameter that a body of one load reads, in its PTX."""
    ptx = compiled(body).ptx
    entry = ptx[ptx.index(".entry nbverify_") :]
    code = entry[entry.index("{") :]
    return {int(n) for n in re.findall(rf"ld\.param\.{kind}\s+[^\[]*\[\w+_param_(\d+)\]", code)}


def stores_scalar(args):
    args.lse[0] = args.v_scale


def stores_extent(args):
    args.findings[0] = args.kv_indices.size


def stores_width(args):
    args.findings[0] = args.qo_indptr_words


def test_values_stand_where_the_code_reads_them():
    def fill(block):
        block.set_array("lse", 0x1111, 7, 4)
        block.set_array("findings", 0x2222, 9, 8)
        block.set_array("kv_indices", 0x3333, 12345, 4)
        block.set_integer("qo_indptr_words", -2)
        block.set_float("v_scale", 0.1)
        block.set_pointer("lse", 0x4444)

    cells = packed(fill)

    def values_of(body, kind, size):
        return {cells[n][:size] for n in cell_read_by(body, kind)}

    assert values_of(stores_scalar, r"[fb]32", 4) == {bytes(ctypes.c_float(0.1))}
    pointer, output = (bytes(ctypes.c_uint64(x)) for x in (0x4444, 0x2222))
    assert values_of(stores_scalar, r"[ub]64", 8) == {pointer}
    # numba finds the extent of an array in its shape or in its number of items: the same value in both.
    assert values_of(stores_extent, r"[ub]64", 8) == {output, bytes(ctypes.c_uint64(12345))}
    assert values_of(stores_width, r"[ub]64", 8) == {output, bytes(ctypes.c_int64(-2))}
