"""From a tile's sums to its results, as LLVM IR: gate, bias, residual.

``sums`` are those of ``cpu_product``, ``[token, 2 blocks, 16 rows]`` float32. Vectors have 16 lanes
at every level; LLVM makes of them what the CPU has.
"""

from __future__ import annotations

import math

from llvmlite import ir

from octavo.kernels.linear.cpu_formats import ROWS
from octavo.kernels.linear.cpu_product import TOKEN_BYTES
from octavo.kernels.vector_ir import (
    F32,
    I32,
    I64,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    exp,
    fill,
    load_vector,
    loop,
    pointer,
    store_vector,
    vector,
    zeros,
)

BIT = ir.IntType(1)


def emit_gate(b: Builder, sums: Value, num_tokens: Value, gelu: Value) -> None:
    """The first block becomes act(first) * second: SiLU, or GELU by tanh where ``gelu`` is true.

    Both are x / (1 + exp(-y)): y = x for SiLU, and 2 sqrt(2 / pi) (x + 0.044715 x**3) for GELU,
    since (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
    """
    floats = vector(F32, ROWS)
    factor = 2 * math.sqrt(2 / math.pi)
    one = constant(1.0, ROWS)
    with loop(b, I64(0), num_tokens) as token:
        address = b.add(sums, b.mul(token, I64(TOKEN_BYTES)))
        gate, up = (load_vector(b, address, 4 * ROWS * i, floats) for i in range(2))
        cubic = b.fmul(
            gate,
            b.fadd(
                constant(factor, ROWS),
                b.fmul(constant(factor * 0.044715, ROWS), b.fmul(gate, gate)),
            ),
        )
        inner = b.select(broadcast(b, gelu, ROWS), cubic, gate)
        divisor = b.fadd(one, exp(b, b.fneg(inner)))
        store_vector(b, b.fmul(b.fdiv(gate, divisor), up), address, 0)


def emit_store(
    b: Builder,
    sums: Value,
    num_tokens: Value,
    count: Value,
    bias: Value,
    out: Value,
    out_stride: Value,
    accumulate: Value,
) -> None:
    """The first ``count`` sums of every token, plus ``bias`` where that is no 0, to ``out``; added
    to what is there where ``accumulate`` is true."""
    floats = vector(F32, ROWS)
    lanes = ir.Constant(vector(I32, ROWS), list(range(ROWS)))
    nothing = zeros(ROWS)

    def masked_load(address: Value, offset: int, mask: Value) -> Value:
        place = pointer(b, address, offset, floats)
        return call(b, "llvm.masked.load.v16f32.p0", place, I32(4), mask, nothing, returns=floats)

    def where(condition: Value, mask: Value) -> Value:
        return b.select(broadcast(b, condition, ROWS), mask, fill(BIT, 0, ROWS))

    for i in range(2):
        left = b.trunc(b.sub(count, I64(ROWS * i)), I32)
        with b.if_then(b.icmp_signed(">", left, I32(0))):
            offset = 4 * ROWS * i
            mask = b.icmp_signed("<", lanes, broadcast(b, left, ROWS))
            addend = masked_load(bias, offset, where(b.icmp_unsigned("!=", bias, I64(0)), mask))
            add_mask = where(accumulate, mask)
            with loop(b, I64(0), num_tokens) as token:
                result = load_vector(b, b.add(sums, b.mul(token, I64(TOKEN_BYTES))), offset, floats)
                target = b.add(out, b.mul(token, out_stride))
                result = b.fadd(b.fadd(result, addend), masked_load(target, offset, add_mask))
                place = pointer(b, target, offset, floats)
                call(
                    b,
                    "llvm.masked.store.v16f32.p0",
                    result,
                    place,
                    I32(4),
                    mask,
                    returns=ir.VoidType(),
                )
