"""From a tile's sums to its results, as LLVM IR: gate, bias, residual.

``sums`` are those of ``cpu_product``, ``[token, 2 blocks, 16 rows]`` float32. Vectors have 16 lanes
at every level; LLVM makes of them what the CPU has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def emit_gate(b: Builder, sums: Value, num_tokens: Value, bias: Value, gelu: Value) -> None:
    """The first block becomes act(first) * second: SiLU, or GELU by tanh where ``gelu`` is true.
    ``bias`` [2 blocks, 16 rows], where that is no 0, is added to both before.

    Both are x / (1 + exp(-y)): y = x for SiLU, and 2 sqrt(2 / pi) (x + 0.044715 x**3) for GELU,
    since (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
    """
    floats = vector(F32, ROWS)
    factor = 2 * math.sqrt(2 / math.pi)
    one = constant(1.0, ROWS)
    has_bias = b.icmp_unsigned("!=", bias, I64(0))
    readable = b.select(has_bias, bias, sums)
    addends = [
        b.select(
            broadcast(b, has_bias, ROWS),
            load_vector(b, readable, 4 * ROWS * i, floats),
            zeros(ROWS),
        )
        for i in range(2)
    ]
    with loop(b, I64(0), num_tokens) as token:
        address = b.add(sums, b.mul(token, I64(TOKEN_BYTES)))
        gate, up = (
            b.fadd(load_vector(b, address, 4 * ROWS * i, floats), addends[i]) for i in range(2)
        )
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
    for i in range(2):
        left = b.trunc(b.sub(count, I64(ROWS * i)), I32)
        with b.if_then(b.icmp_signed(">", left, I32(0))):
            start = I64(4 * ROWS * i)
            rows = b.add(sums, start), num_tokens, left, bias, b.add(out, start), out_stride
            _store_rows(b, *rows, start, accumulate)


def _store_rows(
    b: Builder,
    sums: Value,
    num_tokens: Value,
    count: Value,
    bias: Value,
    out: Value,
    out_stride: Value,
    bias_start: Value,
    accumulate: Value,
) -> None:
    """The first ``count`` of a block, i32, 1 or more; its bias is ``bias_start`` bytes on."""
    floats = vector(F32, ROWS)
    lanes = ir.Constant(vector(I32, ROWS), list(range(ROWS)))
    nothing = zeros(ROWS)
    mask = b.icmp_signed("<", lanes, broadcast(b, count, ROWS))

    def masked_load(address: Value, mask: Value) -> Value:
        place = pointer(b, address, 0, floats)
        return call(b, "llvm.masked.load.v16f32.p0", place, I32(4), mask, nothing, returns=floats)

    def where(condition: Value) -> Value:
        return b.select(broadcast(b, condition, ROWS), mask, fill(BIT, 0, ROWS))

    # A load from address 0 takes the CPU hundreds of cycles, even if its mask is empty.
    is_there = b.icmp_unsigned("!=", bias, I64(0))
    readable = b.select(is_there, b.add(bias, bias_start), sums)
    has_bias, has_addend = where(is_there), where(accumulate)
    addend = masked_load(readable, has_bias)

    def put(load: Callable[[Value], Value], store: Callable[[Value, Value], Any]) -> None:
        with loop(b, I64(0), num_tokens) as token:
            result = load_vector(b, b.add(sums, b.mul(token, I64(TOKEN_BYTES))), 0, floats)
            target = b.add(out, b.mul(token, out_stride))
            result = b.fadd(b.fadd(result, addend), load(target))
            store(result, pointer(b, target, 0, floats))

    def load_whole(target: Value) -> Value:
        is_wanted = broadcast(b, accumulate, ROWS)
        return b.select(is_wanted, load_vector(b, target, 0, floats), nothing)

    def store_masked(result: Value, place: Value) -> None:
        name = "llvm.masked.store.v16f32.p0"
        call(b, name, result, place, I32(4), mask, returns=ir.VoidType())

    # A masked store costs some CPUs with AVX2 40 operations.
    with b.if_else(b.icmp_signed(">=", count, I32(ROWS))) as (whole, cut):
        with whole:
            put(load_whole, lambda result, place: b.store(result, place, align=4))
        with cut:
            put(lambda target: masked_load(target, has_addend), store_masked)
