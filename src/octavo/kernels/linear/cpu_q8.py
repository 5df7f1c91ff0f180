"""Activations as int8 with a scale for every 32: the ``q8`` rows of the package's docstring."""

from __future__ import annotations

from llvmlite import ir

from octavo.checkpoint.quants import Bytes
from octavo.kernels.jit import jit
from octavo.kernels.late import intrinsic, types
from octavo.kernels.linear.cpu_formats import GROUP
from octavo.kernels.program import buffer
from octavo.kernels.vector_ir import (
    F32,
    I32,
    I64,
    broadcast,
    call,
    fill,
    load_vector,
    pointer,
    vector,
)

NUMBERS = 4  # float32 of a group: its scale, the sum of its int8, the sum of either half


def q8_row_bytes(columns: int) -> int:
    """Bytes from one row to the next."""
    lines = -(-(columns + columns // GROUP * 4 * NUMBERS) // 64)
    return 64 * (lines | 1)


def q8_rows(num_rows: int, columns: int) -> Bytes:
    """Zeroed rows, uint8 ``[num_rows, q8_row_bytes(columns)]``, at a cache line."""
    stride = q8_row_bytes(columns)
    return buffer(num_rows * stride).reshape(num_rows, stride)


@jit
def quantize_row(x, columns, row):
    """Quantise ``columns`` float32 at address ``x`` into the row at address ``row``."""
    for group in range(columns // GROUP):
        quantize_group(x + 4 * GROUP * group, row, columns, group)


@intrinsic
def quantize_group(typing, x, row, columns, group):
    """Quantise 32 float32 at address ``x`` into group ``group`` of a row of ``columns``.

    To the nearest int8, even where there are two. A group with a NaN or an infinity gets such a
    scale, and so does every result."""

    def emit(context, b, signature, arguments):
        x, row, columns, group = arguments
        floats, ints = vector(F32, GROUP), vector(I32, GROUP)
        values = load_vector(b, x, 0, floats)
        # The largest magnitude as an integer: a NaN's bits are larger than any number's.
        magnitudes = b.and_(b.bitcast(values, ints), fill(I32, 0x7FFFFFFF, GROUP))
        largest = b.bitcast(
            call(b, f"llvm.vector.reduce.umax.v{GROUP}i32", magnitudes, returns=I32), F32
        )
        is_some = b.fcmp_ordered(">", largest, F32(1e-30))
        factor = b.select(is_some, b.fdiv(F32(127), largest), F32(0))
        scaled = b.fmul(values, broadcast(b, factor, GROUP))
        whole = b.fptosi(call(b, f"llvm.rint.v{GROUP}f32", scaled), ints)
        b.store(
            b.trunc(whole, vector(ir.IntType(8), GROUP)),
            pointer(b, b.add(row, b.mul(group, I64(GROUP))), 0, vector(ir.IntType(8), GROUP)),
            align=1,
        )
        half = GROUP // 2
        sums = [
            b.sitofp(
                call(
                    b,
                    f"llvm.vector.reduce.add.v{half}i32",
                    b.shuffle_vector(
                        whole,
                        whole,
                        ir.Constant(vector(I32, half), list(range(start, start + half))),
                    ),
                    returns=I32,
                ),
                F32,
            )
            for start in (0, half)
        ]
        numbers = b.add(b.add(row, columns), b.mul(group, I64(4 * NUMBERS)))
        scale = b.fdiv(largest, F32(127))
        for i, number in enumerate((scale, b.fadd(*sums), *sums)):
            b.store(number, pointer(b, numbers, 4 * i, F32))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit
