"""Rounding on the way into a CPU's pool, by vectors. (numba's loop would go number by number.)"""

from __future__ import annotations

from llvmlite import ir

from octavo.kernels.late import intrinsic, types
from octavo.kernels.vector_ir import I32, fill, load, pointer, vector

LANES = 8  # of a vector: every head is so many numbers, or a multiple


@intrinsic(prefer_literal=True)
def put_bfloat16s(typing, source, target, stride, together):
    """Round LANES float32s at an address to bfloat16s, to nearest even, and write them in runs of
    so many ``together``, 1 or 2, that begin ``stride`` bytes apart. A NaN stays one."""

    def emit(context, b, signature, arguments):
        source, target = arguments[:2]
        words = vector(I32, LANES)
        numbers = load(b, source, 0, LANES)
        bits, sixteen = b.bitcast(numbers, words), fill(I32, 16, LANES)
        odd = b.and_(b.lshr(bits, sixteen), fill(I32, 1, LANES))
        rounded = b.lshr(b.add(b.add(bits, fill(I32, 0x7FFF, LANES)), odd), sixteen)
        is_nan = b.fcmp_unordered("uno", numbers, numbers)
        rounded = b.select(is_nan, fill(I32, 0x7FC0, LANES), rounded)
        halves = b.trunc(rounded, vector(ir.IntType(16), LANES))
        run = ir.IntType(16 * together.literal_value)
        runs = b.bitcast(halves, vector(run, LANES // together.literal_value))
        for i in range(runs.type.count):
            place = pointer(b, target, stride.literal_value * i, run)
            b.store(b.extract_element(runs, I32(i)), place)
        return context.get_dummy_value()

    return types.void(source, target, stride, together), emit
