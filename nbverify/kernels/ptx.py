"""All inline PTX of the project: one function per instruction, called from kernels like any other function.

Reading the descriptions
    u32, f32 ..   widths of operands and results; ``u32[4]`` is a tuple of four.  An integer operand may be of any
                  integer type and gives its low bits, so that ``base + 32 * k``, which Numba widens to 64 bits, needs
                  no cast.  A float64 where a float32 is due is an error of the compilation, never a silent conversion.
    pair          a u32 that holds two 16-bit elements; the one with the lower index in the low half.
    lanes         g = lane // 4 (0 to 7) and t = lane % 4, as in the figures of the PTX ISA.
    shared        a u32 address in the shared window, from ``shared_address``; global: u64, from ``global_address``.
    sm_80 ..      the first architecture that has the instruction.  The title in quotes is its section in the PTX ISA.

What the compiler may do with them
    Arithmetic (mma, ex2, cvt) is pure: it may be moved and shared.  Whatever reads or writes memory, or orders others'
    accesses, is volatile with a memory clobber: LLVM moves no load or store across it.  ``.sync`` and barrier text is
    convergent as well: LLVM must not make it depend on a condition that it did not depend on before, which matters
    where warps take different roles.  Convergent is not converged: for ``.aligned`` text all lanes of the warp must
    come to the same call, so no such call stands under a condition that differs inside a warp.

    Inside a kernel refer to these as globals of a module: an intrinsic in a closure has a new identity in each process.
"""

import re

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic
from numba.cuda.np.arrayobj import make_array, populate_array
from numba.cuda.typing import signature

f32, u32, u64, i64 = types.float32, types.uint32, types.uint64, types.int64
u32x2, u32x4 = types.UniTuple(u32, 2), types.UniTuple(u32, 4)
u64x2 = types.UniTuple(u64, 2)
f32x2, f32x4 = types.UniTuple(f32, 2), types.UniTuple(f32, 4)

# LLVM type, and letter of the inline assembly's constraint
_REGISTERS = {f32: (ir.FloatType(), "f"), u32: (ir.IntType(32), "r"), u64: (ir.IntType(64), "l")}
SHARED_SPACE = 3  # LLVM's number of the .shared state space
UNROLLED = ("llvm.loop.unroll.full", "llvm.loop.unroll.runtime.disable")
KEPT = ("llvm.loop.unroll.disable",)
SETMAXNREG_RANGE = range(24, 257, 8)


# -------------------------------------------------------------------------------------------------------- the machinery


def _emit(text, result, *operands, pure=False, early=False):
    """What an intrinsic's typing function returns: the signature, and code that emits ``text`` in place of the call.

    ``operands`` are pairs (type at the call, type that the instruction takes).  In ``text`` the registers of the result
    come first, ``$0`` and on, then those of the operands in order; a tuple takes as many as it has elements.
    ``early``: results are written before all operands have been read, so they must not share registers.
    """
    for number, (given, wanted) in enumerate(operands):
        if not _accepts(given, wanted):
            raise TypingError(f"operand {number} of `{text.splitlines()[0]}`: expected {wanted}, got {given}")
    results = _elements(result)
    inputs = [element for _, wanted in operands for element in _elements(wanted)]
    constraints = [("=&" if early else "=") + _REGISTERS[t][1] for t in results]
    constraints += [_REGISTERS[t][1] for t in inputs]
    if not pure:
        constraints.append("~{memory}")
    llvm_results = [_REGISTERS[t][0] for t in results]
    returns = (
        ir.VoidType() if not results else llvm_results[0] if len(results) == 1 else ir.LiteralStructType(llvm_results)
    )
    kind = ir.FunctionType(returns, [_REGISTERS[t][0] for t in inputs])
    attributes = ("convergent",) if re.search(r"\.sync|bar\.arrive|barrier\.red", text) else ()

    def generate(context, builder, sig, values):
        registers = []
        for value, (_, wanted) in zip(values, operands, strict=True):
            registers += cgutils.unpack_tuple(builder, value) if isinstance(wanted, types.UniTuple) else [value]
        assembly = ir.InlineAsm(kind, text, ",".join(constraints), side_effect=not pure)
        value = builder.call(assembly, registers, attrs=attributes)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return value
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(len(results))])

    return signature(result, *(wanted for _, wanted in operands)), generate


def _elements(kind):
    if kind is types.void:
        return []
    return [kind.dtype] * kind.count if isinstance(kind, types.UniTuple) else [kind]


def _accepts(given, wanted):
    if isinstance(wanted, types.UniTuple):
        return (
            isinstance(given, types.BaseTuple)
            and len(given) == wanted.count
            and all(_accepts(element, wanted.dtype) for element in given)
        )
    return given == f32 if wanted is f32 else isinstance(given, types.Integer)


def _constant(name, given):
    """The value of an operand that is written into the instruction, so must be a literal or a closure constant."""
    if not isinstance(given, types.IntegerLiteral):
        raise TypingError(f"{name}: expected a constant, got {given}")
    return given.literal_value


# ------------------------------------------------------------------------------------------------------------ addresses


@intrinsic
def shared_address(typingctx, array, index):
    """Shared address (u32) of ``array[index]``; the array lies in shared memory, the index is not checked.

    Not an instruction: a conversion from the generic address, which the compiler folds.  Add byte offsets to it.
    """

    def generate(context, builder, sig, values):
        pointer = make_array(sig.args[0])(context, builder, values[0]).data
        inside = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, SHARED_SPACE))
        start = builder.ptrtoint(inside, ir.IntType(32))
        return builder.add(start, builder.mul(values[1], ir.IntType(32)(_itemsize(context, sig.args[0]))))

    return _address_signature("shared_address", u32, array, index, u32), generate


@intrinsic
def shared_int64(typingctx, address, length):
    """The ``length`` (a constant) int64 at a shared address (u32, 8-byte aligned), as an array.

    Not an instruction: an array like any other, but its place derives from the address and from nothing else.
    """
    count = _constant("shared_int64", length)
    array = types.Array(i64, 1, "C")

    def generate(context, builder, sig, values):
        element = ir.IntType(64)
        pointer = builder.inttoptr(values[0], ir.PointerType(element, SHARED_SPACE))
        made = make_array(array)(context, builder)
        populate_array(
            made,
            data=builder.addrspacecast(pointer, ir.PointerType(element)),
            shape=[context.get_constant(types.intp, count)],
            strides=[context.get_constant(types.intp, 8)],
            itemsize=context.get_constant(types.intp, 8),
            meminfo=None,
        )
        return made._getvalue()

    return signature(array, u32, length), generate


@intrinsic
def global_address(typingctx, array, index):
    """Global address (u64) of ``array[index]``; the array lies in global memory, the index is not checked."""

    def generate(context, builder, sig, values):
        pointer = make_array(sig.args[0])(context, builder, values[0]).data
        start = builder.ptrtoint(pointer, ir.IntType(64))
        return builder.add(start, builder.mul(values[1], ir.IntType(64)(_itemsize(context, sig.args[0]))))

    return _address_signature("global_address", u64, array, index, i64), generate


def _address_signature(name, result, array, index, index_type):
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        raise TypingError(f"{name}: expected a contiguous 1-D array, got {array}")
    if not isinstance(index, types.Integer):
        raise TypingError(f"{name}: expected an integer index, got {index}")
    return signature(result, array, index_type)


def _itemsize(context, array):
    return context.get_abi_sizeof(context.get_data_type(array.dtype))


# ---------------------------------------------------------------------------------------------------------- tensor core


@intrinsic
def mma_bf16(typingctx, a, b, c):
    """``a @ b + c`` for a 16 x 16 of a, 16 x 8 of b and 16 x 8 of c, a warp together: u32[4], u32[2], f32[4] -> f32[4].

    bfloat16 elements, float32 sums.  What a lane holds:

        a[0] pair (row g,     columns 2t, 2t+1)      a[2] pair (row g,     columns 2t+8, 2t+9)
        a[1] pair (row g + 8, columns 2t, 2t+1)      a[3] pair (row g + 8, columns 2t+8, 2t+9)
        b[0] pair (rows 2t, 2t+1, column g)          b[1] pair (rows 2t+8, 2t+9, column g)
        c[0], c[1] row g, columns 2t, 2t+1           c[2], c[3] row g + 8, columns 2t, 2t+1

    ``ldmatrix_x4`` gives a from a row-major tile, ``ldmatrix_x2`` gives b from keys as rows (K: column of b = key), and
    ``ldmatrix_x2_trans`` gives b from keys as rows where the keys are what is summed over (V).  The result's layout is
    that of a's halves: two neighbouring results, packed, are the a of a following product (P from scores).

    Products are exact; the order of the sum and its inner roundings are the hardware's.  A row of the result depends on
    its row of a only.  sm_80, aligned.  "Matrix Fragments for mma.m16n8k16 with floating point type".
    """
    return _mma("bf16", a, b, c)


@intrinsic
def mma_f16(typingctx, a, b, c):
    """``mma_bf16`` with float16 elements; sums are float32 here too.  sm_80, aligned."""
    return _mma("f16", a, b, c)


def _mma(element, a, b, c):
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return _emit(text, f32x4, (a, u32x4), (b, u32x2), (c, f32x4), pure=True)


@intrinsic
def ldmatrix_x4(typingctx, address):
    """Four 8 x 8 matrices of 16-bit elements from shared memory, a warp together: shared -> u32[4].

    Lane 8i + r gives the address of row r of matrix i: 16 bytes, 16-byte aligned, anywhere.  Element i of the result
    is the pair (row g, columns 2t and 2t+1) of matrix i.  Eight rows whose addresses differ in bits 4 to 6 have no
    bank conflict.  For an ``a`` of mma, matrices in the order: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.

    Reads memory: what other threads wrote must have been published by a barrier.  sm_75, aligned.
    "Warp-level matrix load instruction: ldmatrix".
    """
    return _ldmatrix("x4", u32x4, address)


@intrinsic
def ldmatrix_x2(typingctx, address):
    """Two matrices, addresses from lanes 0 to 15, the others' are ignored: shared -> u32[2].  See ``ldmatrix_x4``."""
    return _ldmatrix("x2", u32x2, address)


@intrinsic
def ldmatrix_x1(typingctx, address):
    """One matrix, addresses from lanes 0 to 7, the others' are ignored: shared -> u32.  See ``ldmatrix_x4``."""
    return _ldmatrix("x1", u32, address)


@intrinsic
def ldmatrix_x4_trans(typingctx, address):
    """``ldmatrix_x4`` with each matrix transposed: a lane's pair is (rows 2t and 2t+1, column g) as stored."""
    return _ldmatrix("x4.trans", u32x4, address)


@intrinsic
def ldmatrix_x2_trans(typingctx, address):
    """``ldmatrix_x2`` with each matrix transposed."""
    return _ldmatrix("x2.trans", u32x2, address)


@intrinsic
def ldmatrix_x1_trans(typingctx, address):
    """``ldmatrix_x1`` with the matrix transposed."""
    return _ldmatrix("x1.trans", u32, address)


def _ldmatrix(shape, result, address):
    count = len(_elements(result))
    registers = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.{shape}.shared.b16 {{{registers}}}, [${count}];"
    return _emit(text, result, (address, u32))


# ----------------------------------------------------------------------------------------------------------- arithmetic


@intrinsic
def ex2(typingctx, x):
    """2 ** x: f32 -> f32, relative error at most 2^-22; -inf gives 0, NaN stays.

    Subnormal inputs count as 0 and subnormal results are 0 (``.ftz``): one instruction, where the form without it takes
    three more to rescale, for weights below 1.2e-38.  ``ex2(0)`` is exactly 1.  "Floating Point Instructions: ex2".
    """
    return _emit("ex2.approx.ftz.f32 $0, $1;", f32, (x, f32), pure=True)


@intrinsic
def rcp(typingctx, x):
    """1 / x: f32 -> f32, relative error at most 2^-23; 0 and subnormal inputs give an infinity.

    For the hot path only: where a result's bits are promised, divide exactly.  "Floating Point Instructions: rcp".
    """
    return _emit("rcp.approx.ftz.f32 $0, $1;", f32, (x, f32), pure=True)


@intrinsic
def pack_bf16x2(typingctx, low, high):
    """Pair of two floats as bfloat16, ties to even: f32, f32 -> u32.  NaN becomes 0x7FFF.

    sm_80.  "Data Movement and Conversion Instructions: cvt"; PTX names the high half first.
    """
    return _emit("cvt.rn.bf16x2.f32 $0, $2, $1;", u32, (low, f32), (high, f32), pure=True)


@intrinsic
def pack_f16x2(typingctx, low, high):
    """Pair of two floats as float16, ties to even, overflow to infinity: f32, f32 -> u32.  NaN is 0x7FFF.  sm_80."""
    return _emit("cvt.rn.f16x2.f32 $0, $2, $1;", u32, (low, f32), (high, f32), pure=True)


@intrinsic
def unpack_e4m3x2(typingctx, two_bytes):
    """Pair of float16 from two fp8 e4m3 in the low 16 bits, exact: u32 -> u32.  The low byte goes to the low half.

    NaN becomes 0x7FFF.  sm_89; before that, see formats.py.
    """
    text = "{\n.reg .b16 pair;\ncvt.u16.u32 pair, $1;\ncvt.rn.f16x2.e4m3x2 $0, pair;\n}"
    return _emit(text, u32, (two_bytes, u32), pure=True)


@intrinsic
def permute_bytes(typingctx, low, high, selector):
    """Four bytes out of eight: u32, u32, u32 -> u32.  Nibble i of the selector says which is byte i of the result.

    0 to 3 are the bytes of ``low``, 4 to 7 those of ``high``; 8 more: all its bits are the sign bit of that byte.
    "Integer Arithmetic Instructions: prmt".
    """
    return _emit("prmt.b32 $0, $1, $2, $3;", u32, (low, u32), (high, u32), (selector, u32), pure=True)


@intrinsic
def multiply_bf16x2(typingctx, a, b):
    """Products of two pairs of bfloat16, each rounded once, subnormals kept: u32, u32 -> u32.  NaN is 0x7FFF.

    An fma with -0, which changes nothing: sm_80 has no multiplication of its own.
    "Half Precision Floating Point Instructions: fma".
    """
    text = "{\n.reg .b32 nothing;\nmov.b32 nothing, 0x80008000;\nfma.rn.bf16x2 $0, $1, $2, nothing;\n}"
    return _emit(text, u32, (a, u32), (b, u32), pure=True)


@intrinsic
def multiply_f16x2(typingctx, a, b):
    """Products of two pairs of float16, each rounded once, subnormals kept: u32, u32 -> u32.  NaN is 0x7FFF."""
    return _emit("mul.rn.f16x2 $0, $1, $2;", u32, (a, u32), (b, u32), pure=True)


@intrinsic
def divide_u32(typingctx, dividend, divisor):
    """``dividend // divisor``: u32, u32 -> u32.  Numba's ``//`` calls a 64-bit routine.  The divisor is not 0."""
    return _emit("div.u32 $0, $1, $2;", u32, (dividend, u32), (divisor, u32), pure=True)


@intrinsic
def divide_u64(typingctx, dividend, divisor):
    """``dividend // divisor``: u64, u64 -> u64; a routine of the assembler's.  The divisor is not 0."""
    return _emit("div.u64 $0, $1, $2;", u64, (dividend, u64), (divisor, u64), pure=True)


# ----------------------------------------------------------------------------------------------------- loads and stores


@intrinsic
def load_shared_u32(typingctx, address):
    """4 bytes, 4-byte aligned: shared -> u32.  "Data Movement and Conversion Instructions: ld"."""
    return _emit("ld.shared.u32 $0, [$1];", u32, (address, u32))


@intrinsic
def load_shared_f32(typingctx, address):
    """4 bytes, 4-byte aligned: shared -> f32."""
    return _emit("ld.shared.f32 $0, [$1];", f32, (address, u32))


@intrinsic
def load_shared_v4_u32(typingctx, address):
    """16 bytes, 16-byte aligned: shared -> u32[4].  Eight lanes read 128 bytes a cycle."""
    return _emit("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", u32x4, (address, u32))


@intrinsic
def load_shared_v4_f32(typingctx, address):
    """16 bytes, 16-byte aligned: shared -> f32[4]."""
    return _emit("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", f32x4, (address, u32))


@intrinsic
def store_shared_u32(typingctx, address, value):
    """4 bytes, 4-byte aligned: shared, u32.  "Data Movement and Conversion Instructions: st"."""
    return _emit("st.shared.u32 [$0], $1;", types.void, (address, u32), (value, u32))


@intrinsic
def load_shared_v2_u64(typingctx, address):
    """16 bytes, 16-byte aligned: shared -> u64[2]."""
    return _emit("ld.shared.v2.u64 {$0, $1}, [$2];", u64x2, (address, u32))


@intrinsic
def store_shared_v2_u64(typingctx, address, values):
    """16 bytes, 16-byte aligned: shared, u64[2]."""
    return _emit("st.shared.v2.u64 [$0], {$1, $2};", types.void, (address, u32), (values, u64x2))


@intrinsic
def store_shared_f32(typingctx, address, value):
    """4 bytes, 4-byte aligned: shared, f32."""
    return _emit("st.shared.f32 [$0], $1;", types.void, (address, u32), (value, f32))


@intrinsic
def store_shared_v4_u32(typingctx, address, values):
    """16 bytes, 16-byte aligned: shared, u32[4]."""
    return _emit("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", types.void, (address, u32), (values, u32x4))


@intrinsic
def store_shared_v4_f32(typingctx, address, values):
    """16 bytes, 16-byte aligned: shared, f32[4]."""
    return _emit("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", types.void, (address, u32), (values, f32x4))


@intrinsic
def load_global_u32(typingctx, address):
    """4 bytes, 4-byte aligned: global -> u32."""
    return _emit("ld.global.u32 $0, [$1];", u32, (address, u64))


@intrinsic
def load_global_u8_if(typingctx, address, condition):
    """1 byte where the condition (u32) is not 0; else 0, and no access: global -> u32.

    Predicated, as ``load_global_v4_f32_if``.
    """
    text = "{\n.reg .pred yes;\nsetp.ne.u32 yes, $2, 0;\nmov.u32 $0, 0;\n@yes ld.global.u8 $0, [$1];\n}"
    return _emit(text, u32, (address, u64), (condition, u32), early=True)


@intrinsic
def load_global_u32_if(typingctx, address, condition):
    """``load_global_u32`` where the condition (u32) is not 0; else 0, and no access."""
    text = "{\n.reg .pred yes;\nsetp.ne.u32 yes, $2, 0;\nmov.u32 $0, 0;\n@yes ld.global.u32 $0, [$1];\n}"
    return _emit(text, u32, (address, u64), (condition, u32), early=True)


@intrinsic
def load_global_u8(typingctx, address):
    """1 byte: global -> u32, the upper bits 0.  "ld"."""
    return _emit("ld.global.u8 $0, [$1];", u32, (address, u64))


@intrinsic
def load_global_v4_u32(typingctx, address):
    """16 bytes, 16-byte aligned: global -> u32[4].

    ``.cg``: from L2, past L1, so that after a grid barrier it sees what other blocks stored (L1 is not coherent).
    """
    return _emit("ld.global.cg.v4.u32 {$0, $1, $2, $3}, [$4];", u32x4, (address, u64))


@intrinsic
def load_global_v4_f32(typingctx, address):
    """16 bytes, 16-byte aligned, from L2: global -> f32[4].  See ``load_global_v4_u32``."""
    return _emit("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", f32x4, (address, u64))


@intrinsic
def load_global_v4_f32_if(typingctx, address, condition):
    """``load_global_v4_f32`` where the condition (u32) is not 0; else four zeros, and no access.

    Predicated, not a branch, so that many are in flight at once.
    """
    text = (
        "{\n.reg .pred yes;\nsetp.ne.u32 yes, $5, 0;\n"
        "mov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\nmov.f32 $2, 0f00000000;\nmov.f32 $3, 0f00000000;\n"
        "@yes ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];\n}"
    )
    return _emit(text, f32x4, (address, u64), (condition, u32), early=True)


@intrinsic
def load_global_v2_f32_if(typingctx, address, condition):
    """``load_global_v2_f32`` where the condition (u32) is not 0; else two zeros, and no access."""
    text = (
        "{\n.reg .pred yes;\nsetp.ne.u32 yes, $3, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\n"
        "@yes ld.global.cg.v2.f32 {$0, $1}, [$2];\n}"
    )
    return _emit(text, f32x2, (address, u64), (condition, u32), early=True)


@intrinsic
def load_global_v2_f32(typingctx, address):
    """8 bytes, 8-byte aligned, from L2: global -> f32[2].  See ``load_global_v4_u32``."""
    return _emit("ld.global.cg.v2.f32 {$0, $1}, [$2];", f32x2, (address, u64))


@intrinsic
def store_global_u8(typingctx, address, value):
    """1 byte: global, the low bits of a u32.  "st"."""
    return _emit("st.global.u8 [$0], $1;", types.void, (address, u64), (value, u32))


@intrinsic
def store_global_u32(typingctx, address, value):
    """4 bytes, 4-byte aligned: global, u32.  A pair of an mma result, rounded."""
    return _emit("st.global.u32 [$0], $1;", types.void, (address, u64), (value, u32))


@intrinsic
def store_global_v2_f32(typingctx, address, values):
    """8 bytes, 8-byte aligned: global, f32[2].  The same pair in float32."""
    return _emit("st.global.v2.f32 [$0], {$1, $2};", types.void, (address, u64), (values, f32x2))


@intrinsic
def store_global_v4_u32(typingctx, address, values):
    """16 bytes, 16-byte aligned: global, u32[4]."""
    return _emit("st.global.v4.u32 [$0], {$1, $2, $3, $4};", types.void, (address, u64), (values, u32x4))


@intrinsic
def store_global_v4_f32(typingctx, address, values):
    """16 bytes, 16-byte aligned: global, f32[4]."""
    return _emit("st.global.v4.f32 [$0], {$1, $2, $3, $4};", types.void, (address, u64), (values, f32x4))


@intrinsic
def prefetch_l2(typingctx, address):
    """Start to bring the line at a global address to L2; no result, no ordering, and an address that is mapped."""
    return _emit("prefetch.global.L2 [$0];", types.void, (address, u64))


@intrinsic
def atomic_add_u32(typingctx, address, value):
    """Add to 4 bytes (global, u32) for all blocks to see; what they held before: -> u32.  The sum wraps.

    What this thread did, or had learned by a barrier, before it is visible to those that see the sum (release), and it
    sees what was done before the sums that it adds to (acquire).
    """
    return _emit("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", u32, (address, u64), (value, u32))


@intrinsic
def wait_sign_flip(typingctx, address, before):
    """Wait until bit 31 of the u32 at ``address`` (global) is not that of ``before``.

    With acquire: what others did before they changed it is seen.  A loop around ``ld.acquire``.
    "Memory Consistency Model".
    """
    text = (
        "{\n.reg .pred same;\n.reg .b32 now;\nagain:\nld.acquire.gpu.global.u32 now, [$0];\n"
        "xor.b32 now, now, $1;\nsetp.ge.s32 same, now, 0;\n@same bra again;\n}"
    )
    return _emit(text, types.void, (address, u64), (before, u32))


# ------------------------------------------------------------------------------- asynchronous copies by threads (sm_80)


@intrinsic
def cp_async_4(typingctx, destination, source):
    """Start a copy of 4 bytes, global to shared: shared, global; both 4-byte aligned.  See ``cp_async_16``."""
    return _emit("cp.async.ca.shared.global [$0], [$1], 4;", types.void, (destination, u32), (source, u64))


@intrinsic
def cp_async_16(typingctx, destination, source):
    """Start a copy of 16 bytes, global to shared, past L1: shared, global; both 16-byte aligned.

    The thread goes on at once.  Until it has waited (``cp_async_wait``) the destination is undefined, to it as well;
    other threads see the data after that and a barrier.  sm_80.  "Non-bulk asynchronous copy: cp.async".
    """
    text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;"
    return _emit(text, types.void, (destination, u32), (source, u64))


@intrinsic
def cp_async_16_zfill(typingctx, destination, source, source_bytes):
    """``cp_async_16`` that reads ``source_bytes`` (u32, 0 to 16) only and writes zeros for the rest.

    With 0 nothing is read, whatever the address: a row that is not there becomes zeros.
    """
    text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
    return _emit(text, types.void, (destination, u32), (source, u64), (source_bytes, u32))


@intrinsic
def cp_async_commit(typingctx):
    """Close a group: the copies this thread started since its last group.  An empty group counts.  sm_80."""
    return _emit("cp.async.commit_group;", types.void)


@intrinsic
def cp_async_wait(typingctx, pending):
    """Wait until at most ``pending`` (a constant) of this thread's latest groups are incomplete.  sm_80."""
    return _wait_group(pending)


def _wait_group(pending):
    count = _constant("cp_async_wait", pending)
    _, generate = _emit(f"cp.async.wait_group {count};", types.void)
    return signature(types.void, pending), lambda context, builder, sig, values: generate(context, builder, sig, ())


@intrinsic
def cp_async_arrive(typingctx, mbarrier):
    """Arrive at the mbarrier (shared) once all copies that this thread has started are complete; do not wait.

    ``.noinc``: it is one of the arrivals that the mbarrier was initialised for.  With it a ring of tiles has the same
    mbarriers whether ``cp_async_16`` or ``bulk_copy`` fills it.  sm_80.  "mbarrier: cp.async.mbarrier.arrive".
    """
    return _emit("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", types.void, (mbarrier, u32))


# ------------------------------------------------------------------------------------------------------------ mbarriers


@intrinsic
def mbarrier_init(typingctx, mbarrier, arrivals):
    """Make the 8 bytes at ``mbarrier`` (shared, 8-byte aligned) a barrier of ``arrivals`` (u32) a phase; begin phase 0.

    By one thread, before a block barrier that publishes it.  Where bulk copies complete on it, ``fence_mbarrier_init``
    in between.  sm_80.  "Parallel Synchronization and Communication Instructions: mbarrier.init".
    """
    return _emit("mbarrier.init.shared.b64 [$0], $1;", types.void, (mbarrier, u32), (arrivals, u32))


@intrinsic
def mbarrier_arrive(typingctx, mbarrier):
    """One arrival.  What this thread did before is visible to those that wait for the phase (release).  sm_80.

    A phase is complete when all its arrivals are in and all expected bytes have come; the next one begins at once.
    """
    return _emit("mbarrier.arrive.shared.b64 _, [$0];", types.void, (mbarrier, u32))


@intrinsic
def mbarrier_arrive_expect_tx(typingctx, mbarrier, num_bytes):
    """Let the phase expect ``num_bytes`` (u32) more from bulk copies, then arrive once.  sm_90.

    At most 2^20 - 1 bytes may be outstanding.
    """
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    return _emit(text, types.void, (mbarrier, u32), (num_bytes, u32))


@intrinsic
def mbarrier_wait(typingctx, mbarrier, parity):
    """Wait until the phase of this parity (u32, 0 or 1) is complete; sees what was done before its arrivals (acquire).

    Phases count from 0: wait with 0 for the first, 1 for the second, 0 again.  On a fresh mbarrier parity 1 passes: the
    phase before the first counts as complete.  A thread must not fall behind by two phases, or it waits for a later
    one.  A loop around ``test_wait``, which does not suspend; from sm_90 on take ``mbarrier_try_wait``.  sm_80.
    """
    return _wait("test_wait.parity.shared.b64", mbarrier, parity)


@intrinsic
def mbarrier_try_wait(typingctx, mbarrier, parity):
    """``mbarrier_wait`` with ``try_wait``, which lets the hardware suspend the thread for a while.  sm_90."""
    return _wait("try_wait.parity.shared::cta.b64", mbarrier, parity)


def _wait(operation, mbarrier, parity):
    # In braces, so that the label and the predicate are this copy's own when LLVM duplicates the block.
    text = f"{{\n.reg .pred complete;\nagain:\nmbarrier.{operation} complete, [$0], $1;\n@!complete bra again;\n}}"
    return _emit(text, types.void, (mbarrier, u32), (parity, u32))


@intrinsic
def fence_mbarrier_init(typingctx):
    """Make this thread's ``mbarrier_init`` visible to bulk copies of other threads.  sm_90.  "membar / fence"."""
    return _emit("fence.mbarrier_init.release.cluster;", types.void)


# -------------------------------------------------------------------------------------------------- bulk copies (sm_90)


@intrinsic
def bulk_copy(typingctx, destination, source, num_bytes, mbarrier):
    """Start a copy of ``num_bytes`` (u32), global to shared: shared, global, u32, mbarrier (shared).

    Both addresses and the size are multiples of 16.  When the data is there the mbarrier's expected bytes go down by
    the size; whoever reads it waits for that phase itself.  By one thread of a warp, under ``elect_one``: by several
    lanes it becomes a loop over them.

    The copy belongs to the async proxy.  Reads of the destination by threads before it are ordered by the barrier that
    hands the slot over; writes are not: ``fence_proxy_async`` by the writer, before that barrier.  The mbarrier and
    the block must outlive the copy.  sm_90.  "Bulk copy: cp.async.bulk"; the ``shared::cta`` form, PTX ISA 8.6: the
    ``shared::cluster`` one costs a call on sm_120.
    """
    text = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    return _emit(text, types.void, (destination, u32), (source, u64), (num_bytes, u32), (mbarrier, u32))


@intrinsic
def fence_proxy_async(typingctx):
    """Order this thread's plain accesses of shared memory before later bulk copies.  sm_90.  "fence.proxy.async"."""
    return _emit("fence.proxy.async.shared::cta;", types.void)


# --------------------------------------------------------------------------------------------- warps and named barriers


@intrinsic
def barrier_sync(typingctx, barrier, threads):
    """Wait at named barrier ``barrier`` (u32, 1 to 15) until ``threads`` (u32, a multiple of 32) have come to it.

    Arrivals count by warp, waiting ones and those of ``barrier_arrive`` alike.  Publishes shared and global memory as
    ``syncthreads`` does, which is barrier 0.  All that use a barrier in one phase name the same number.  A number that
    is no constant makes the assembler reserve all 16.  Aligned.  "bar, barrier".
    """
    return _emit("bar.sync $0, $1;", types.void, (barrier, u32), (threads, u32))


@intrinsic
def barrier_or(typingctx, barrier, threads, condition):
    """``barrier_sync``, and whether the condition (u32, true if not 0) of any thread was true: -> u32, 0 or 1."""
    text = (
        "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, $3, 0;\n"
        "barrier.red.or.pred any, $1, $2, mine;\nselp.u32 $0, 1, 0, any;\n}"
    )
    return _emit(text, u32, (barrier, u32), (threads, u32), (condition, u32))


@intrinsic
def barrier_arrive(typingctx, barrier, threads):
    """Arrive at a named barrier without waiting; publishes this thread's writes to those that wait.

    A warp must not arrive again before the phase is over: it would be counted twice, and open the barrier early.
    """
    return _emit("bar.arrive $0, $1;", types.void, (barrier, u32), (threads, u32))


@intrinsic
def warp_max_u32(typingctx, value):
    """u32: the largest of all lanes, in each.  sm_80.  "redux.sync"."""
    return _emit("redux.sync.max.u32 $0, $1, 0xffffffff;", u32, (value, u32))


@intrinsic
def warp_min_u32(typingctx, value):
    """u32: the smallest of all lanes, in each.  sm_80.  "redux.sync"."""
    return _emit("redux.sync.min.u32 $0, $1, 0xffffffff;", u32, (value, u32))


@intrinsic
def elect_one(typingctx):
    """True in one lane of the warp, always the same one, and not to be relied on as lane 0; all lanes call it.

    Unlike ``lane == 0`` it tells the assembler that one thread at most goes on: bulk copies need no loop then.
    sm_90.  "Parallel Synchronization and Communication Instructions: elect.sync".
    """
    text = "{\n.reg .pred chosen;\nelect.sync _|chosen, 0xffffffff;\nselp.u32 $0, 1, 0, chosen;\n}"
    _, generate_number = _emit(text, u32)

    def generate(context, builder, sig, values):
        number = generate_number(context, builder, sig, values)
        return builder.icmp_unsigned("!=", number, ir.IntType(32)(0))

    return signature(types.boolean), generate


@intrinsic
def setmaxnreg_inc(typingctx, registers):
    """Raise the registers of this thread to a constant (24 to 256, a multiple of 8); waits until they are free.

    By all warps of a group of four, aligned.  What is taken must have been given back by other groups: the pool is the
    registers of the launch times its threads, and asking for more hangs without a message.  Only for targets
    with an ``a``: sm_90a, sm_120a.  "Miscellaneous Instructions: setmaxnreg".

    It is kept because compile.py goes through LTO-IR, which nvJitLink assembles as a whole program, because nothing
    external is called (the grid's barrier is our own), and because kernels have launch bounds: those give the
    registers of the launch, 168 for 384 threads.  Of PTX, which nvJitLink takes for one part of a program, and in a
    kernel that calls an external function, the assembler drops it, with no more than a remark in its log.
    """
    return _setmaxnreg("inc", registers)


@intrinsic
def setmaxnreg_dec(typingctx, registers):
    """Give registers back, down to a constant.  See ``setmaxnreg_inc``; that it is kept takes LTO-IR (compile.py)."""
    return _setmaxnreg("dec", registers)


def _setmaxnreg(direction, registers):
    count = _constant(f"setmaxnreg_{direction}", registers)
    if count not in SETMAXNREG_RANGE:
        raise TypingError(f"setmaxnreg_{direction}: expected a multiple of 8 from 24 to 256, got {count}")
    _, generate = _emit(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", types.void)
    return signature(types.void, registers), lambda context, builder, sig, values: generate(context, builder, sig, ())


# ----------------------------------------------------------------------------------------------------------------- trap


@intrinsic
def trap(typingctx):
    """End the launch with an error; the context is lost.  "Miscellaneous Instructions: trap"."""
    return _emit("trap;", types.void)


# ---------------------------------------------------------------------------------------------------------------- hints


@intrinsic
def opaque_u32(typingctx, x):
    """The same number (u32), of which the compiler knows nothing and which it does not compute earlier than here.

    What derives from it, addresses above all, is then computed where it is needed.  Derived from the thread index
    itself, all of it would be hoisted out of the tile loop, each value into a register that the accumulators lack.
    """
    return _emit("mov.b32 $0, $1;", u32, (x, u32))


@intrinsic
def opaque_u64(typingctx, x):
    """``opaque_u32`` of 64 bits: u64 -> u64."""
    return _emit("mov.b64 $0, $1;", u64, (x, u64), pure=True)


@intrinsic
def thread_id(typingctx):
    """``threadIdx.x`` (u32), read from its special register each time: where a register to keep it in is missing."""
    return _emit("mov.u32 $0, %tid.x;", u32)


@intrinsic
def unroll_loops(typingctx):
    """Have every loop of known length that follows in this function unrolled fully; the others not at all.

    A local array stays in registers only if all its indices become constants, and without the hint the compiler unrolls
    what it deems worth it: an accumulator of a large tile ends in local memory.  It also unrolls loops of unknown
    length by two to four, which at this size of a body costs the instruction cache.  Call it first in the kernel; a
    device function that is inlined as IR (``inline="always"``) is covered, one that is called as usual needs its own.

    Not an instruction: a jump back to the head of a loop is given the metadata ``llvm.loop.unroll.full``, for loops of
    known length, and ``.runtime.disable``, for the others (``full`` alone leaves those to be unrolled).  Numba has no
    interface for that, but the builder handed to an intrinsic is the one that lowers the rest of the function, so the
    two methods by which jumps are made are wrapped on this one builder.
    """

    return _tag_loops(UNROLLED)


@intrinsic
def keep_loops(typingctx):
    """Have no loop that follows in this function unrolled; where to call it, and how it works: ``unroll_loops``.

    For what is run once or twice in a launch of microseconds: its instructions come from memory, and fewer come sooner.
    What that brings is to be measured: the tree builder took 22.1 us with it instead of 25.0, a merge 0.3 us less, and
    other kernels as long as before.
    """
    return _tag_loops(KEPT)


def _tag_loops(wishes):
    """What the typing function of a hint on loops returns; the first hint of a function stands."""

    def generate(context, builder, sig, values):
        if not hasattr(builder, "tags_loops"):
            builder.tags_loops = True
            builder.branch = _tagging(builder, builder.branch, wishes)
            builder.cbranch = _tagging(builder, builder.cbranch, wishes)  # `while`: its test stands at the end again
        return context.get_dummy_value()

    return signature(types.void), generate


def _tagging(builder, make_jump, wishes):
    def make_tagged_jump(*operands):
        # Blocks are filled in the order of the source, so a target with something in it lies behind.
        goes_back = any(isinstance(operand, ir.Block) and operand.instructions for operand in operands)
        jump = make_jump(*operands)
        if goes_back:
            jump.set_metadata("llvm.loop", _loop_identity(builder.module, wishes))
        return jump

    return make_tagged_jump


def _loop_identity(module, wishes):
    """A new metadata node, distinct because its first operand is itself, as LLVM asks of a loop's identity."""
    operands = [module.add_metadata([ir.MetaDataString(module, name)]) for name in wishes]
    node = ir.values.MDValue(module, operands, name=str(len(module.metadata)))
    node.operands = (node, *operands)
    return node
