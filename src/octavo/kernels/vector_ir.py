"""LLVM's vector IR in the few words that CPU kernels need, for the bodies of numba intrinsics.

``b`` is llvmlite's builder, an address an int64, a vector float32. What LLVM makes of a vector
that is wider than the CPU's registers is several of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from octavo.kernels.late import cgutils

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
Value = Any  # llvmlite has no types for mypy
Builder = Any
# 2**x from -0.5 to 0.5 to 8e-8 of its value: by order, those whose largest error is the smallest.
_COEFFICIENTS = (1.0, 0.693146944, 0.240221202, 0.0555071309, 0.00967554096, 0.00132764713)
_ROUGH_COEFFICIENTS = (0.999928077, 0.693260987, 0.242611133, 0.0551716724)  # to 8e-5, 0 too


def vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def fill(element: Any, value: float, lanes: int) -> Value:
    """A constant vector of one value."""
    return ir.Constant(vector(element, lanes), [value] * lanes)


def constant(value: float, lanes: int) -> Value:
    return fill(F32, value, lanes)


def zeros(lanes: int) -> Value:
    return constant(0.0, lanes)


def pointer(b: Builder, address: Value, offset: int, kind: Any) -> Value:
    return b.inttoptr(b.add(address, I64(offset)), kind.as_pointer())


def load(b: Builder, address: Value, index: int, lanes: int) -> Value:
    """``lanes`` float32s from element ``index`` on."""
    return b.load(pointer(b, address, 4 * index, vector(F32, lanes)), align=4)


def load_scalar(b: Builder, address: Value, index: int) -> Value:
    return b.load(pointer(b, address, 4 * index, F32), align=4)


def store_vector(b: Builder, value: Value, address: Value, index: int) -> None:
    b.store(value, pointer(b, address, 4 * index, value.type), align=4)


def prefetch(b: Builder, address: Value, size: int) -> None:
    """Ask for ``size`` bytes to be brought near, a cache line at a time."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    for offset in range(0, size, 64):
        line = pointer(b, address, offset, ir.IntType(8))
        b.call(fetch, [line, I32(0), I32(2), I32(1)])  # to read, into L2, data


def variable(b: Builder, value: Value) -> Value:
    """A local that LLVM turns into a register."""
    slot = cgutils.alloca_once(b, value.type)
    b.store(value, slot)
    return slot


@contextmanager
def loop(b: Builder, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
    with cgutils.for_range_slice(b, start, stop, I64(step)) as (index, _):
        yield index


def broadcast(b: Builder, scalar: Value, lanes: int) -> Value:
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(vector(I32, lanes), [0] * lanes))


def call(b: Builder, name: str, *arguments: Value, returns: Any = None) -> Value:
    kinds = [argument.type for argument in arguments]
    signature = ir.FunctionType(returns or kinds[0], kinds)
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return call(b, f"llvm.fma.v{z.type.count}f32", x, y, z)


def larger(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def reduce_max(b: Builder, x: Value) -> Value:
    """The largest of a vector's lanes. (``llvm.vector.reduce.fmax`` becomes a chain over them.)"""
    return _reduce(b, larger, x)


def reduce_sum(b: Builder, x: Value) -> Value:
    """The sum of a vector's lanes: a fixed order."""
    return _reduce(b, lambda b, x, y: b.fadd(x, y), x)


def _reduce(b: Builder, combine: Callable[[Builder, Value, Value], Value], x: Value) -> Value:
    """Halve a vector until one lane is left."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (
            b.shuffle_vector(
                x, x, ir.Constant(vector(I32, lanes), list(range(start, start + lanes)))
            )
            for start in (0, lanes)
        )
        x = combine(b, low, high)
    return b.extract_element(x, I32(0))


def exp(b: Builder, x: Value) -> Value:
    """``exp(x)`` to 2e-7 of its value near 0, to 4e-6 at 87: 2 to the nearest integer times a
    polynomial for the rest.

    Clamped to 2**-126 and 2**126; a NaN stays one."""
    lanes = x.type.count
    power = b.fmul(x, constant(1 / math.log(2), lanes))
    for sign, limit in (("<", -126.0), (">", 126.0)):
        bound = constant(limit, lanes)
        power = b.select(b.fcmp_ordered(sign, power, bound), bound, power)
    whole = call(b, f"llvm.rint.v{lanes}f32", power)
    return _power_of_two(b, b.fptosi(whole, vector(I32, lanes)), b.fsub(power, whole))


def _power_of_two(
    b: Builder, whole: Value, rest: Value, coefficients: Sequence[float] = _COEFFICIENTS
) -> Value:
    """2 ** (whole + rest). ``whole``: i32, of which 9 bits count; ``rest`` float32 from -0.5 to
    0.5, of which the power is a polynomial, the first of ``coefficients`` for 0; the other is added
    to its exponent."""
    lanes = rest.type.count
    result = constant(coefficients[-1], lanes)
    for coefficient in coefficients[-2::-1]:
        result = fma(b, result, rest, constant(coefficient, lanes))
    bits = b.add(b.bitcast(result, whole.type), b.shl(whole, fill(I32, 23, lanes)))
    return b.bitcast(bits, rest.type)


def tree(combine: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Combine neighbours, then the results, and so on."""
    while len(values) > 1:
        pairs = [combine(x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = pairs + list(values[len(pairs) * 2 :])
    return values[0]


def load_vector(b: Builder, address: Value, offset: int, kind: Any) -> Value:
    """A vector of type ``kind``, ``offset`` bytes from an address of any alignment."""
    return b.load(pointer(b, address, offset, kind), align=1)


def exp_below_88(b: Builder, x: Value) -> Value:
    """``exp(x)`` to 2e-7 of its value near 0, to 1.4e-6 at 87, quicker than :func:`exp`: for x
    below 88 (or NaN, which stays one). Below -87 it is exp(-87), about 1e-38."""
    lanes = x.type.count
    lowest, magic = constant(-87.0, lanes), constant(1.5 * 2**23, lanes)
    x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
    # Adding 1.5 * 2**23 rounds to whole numbers and leaves them in the last bits.
    rounded = fma(b, x, constant(1 / math.log(2), lanes), magic)
    rest = fma(b, x, constant(1 / math.log(2), lanes), b.fsub(magic, rounded))
    return _power_of_two(b, b.bitcast(rounded, vector(I32, lanes)), rest)


def rough_power_of_two(b: Builder, x: Value) -> Value:
    """``2 ** x`` to 8e-5 of its value, for what will be a bfloat16: x below 127 (or NaN, which
    stays one). Below -126 it is 2**-126."""
    lanes = x.type.count
    lowest, magic = constant(-126.0, lanes), constant(1.5 * 2**23, lanes)
    x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
    rounded = b.fadd(x, magic)
    rest = b.fsub(x, b.fsub(rounded, magic))
    whole = b.bitcast(rounded, vector(I32, lanes))
    return _power_of_two(b, whole, rest, _ROUGH_COEFFICIENTS)


def unpack(b: Builder, words: Value, size: int) -> list[Value]:
    """The numbers packed into 32-bit words, lowest bits first, as float32 vectors: ``size`` is
    that of a number in bytes, 4 (float32), 2 (bfloat16) or 1 (int8)."""
    lanes = words.type.count
    floats = vector(F32, lanes)
    if size == 4:
        return [b.bitcast(words, floats)]
    if size == 2:
        high = b.and_(words, fill(I32, -(1 << 16), lanes))
        return [b.bitcast(b.shl(words, fill(I32, 16, lanes)), floats), b.bitcast(high, floats)]
    raised = [b.shl(words, fill(I32, 24 - 8 * i, lanes)) for i in range(3)] + [words]
    return [b.sitofp(b.ashr(x, fill(I32, 24, lanes)), floats) for x in raised]


def stack(b: Builder, nbytes: int) -> Value:
    """The address of memory at a cache line that lasts until the function returns, not cleared
    (``alloca_once`` would clear it, for which LLVM takes a second to find nothing better)."""
    with b.goto_entry_block():
        memory = b.alloca(ir.ArrayType(ir.IntType(8), nbytes))
    memory.align = 64
    return b.ptrtoint(memory, I64)


def soft_cap(b: Builder, x: Value, cap: Value) -> Value:
    """``cap * tanh(x / cap)``, of a vector and a number."""
    lanes = x.type.count
    cap = broadcast(b, cap, lanes)
    one, two = constant(1.0, lanes), constant(2.0, lanes)
    e = exp(b, b.fdiv(b.fmul(two, x), cap))  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
    return b.fmul(cap, b.fsub(one, b.fdiv(two, b.fadd(e, one))))


def opaque(b: Builder, number: Value) -> Value:
    """The same i64, of which LLVM doesn't know where it comes from: it keeps it in a register
    instead of going from one to the next with an addition for each."""
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [number], side_effect=False)


def store_scalar(b: Builder, value: Value, address: Value) -> None:
    b.store(value, pointer(b, address, 0, value.type), align=4)
