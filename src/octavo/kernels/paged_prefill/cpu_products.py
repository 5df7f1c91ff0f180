"""The products of prefill attention, ``c[i, j] += sum_k a[i, k] b[k, j]``, with float32 sums.

On any CPU they are vectors' FMAs over float32. AMX multiplies tiles of bfloat16: there ``b`` is
bfloat16 as it is stored, and ``a`` the sum of two bfloat16s that ``split_row`` makes of each
float32, right to 2**-17 of its value. PAIRS are vectors' dot products of pairs of bfloat16s: twice
the multiplications of an FMA where they pay (``kernels.levels``), which they do only while ``a`` is
one bfloat16, right to 2**-9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from octavo.kernels.late import intrinsic, types
from octavo.kernels.vector_ir import (
    I32,
    I64,
    Builder,
    Value,
    broadcast,
    call,
    fill,
    fma,
    load,
    load_scalar,
    loop,
    pointer,
    store_vector,
    variable,
    vector,
    zeros,
)

LANES = 16
AMX, PAIRS = 0, 1  # as ``room``
# Rows and vectors of sums that are made together, by ``room``.
BLOCK = {20: (8, 2), 6: (4, 1), PAIRS: (8, 2)}
TILE_PAIR = 2048  # bytes of a tile of high parts and one of low parts: 16 rows of 32 bfloat16s each

I8, I16 = ir.IntType(8), ir.IntType(16)


@intrinsic(prefer_literal=True)
def multiply_add(
    typing, a, b, c, rows, columns, depth, a_stride, b_step, b_column, b_row, c_stride, fresh, room
):
    """``c`` [rows, 16 columns] += ``a`` [rows, depth] ``b`` [depth, 16 columns]; where ``fresh`` is
    1, what was in ``c`` doesn't count. Rows and ``16 columns`` are multiples of 32.

    Addresses and counts are int64. The strides, in bytes, are known when compiling: of the rows of
    ``a`` and ``c``, and from one step, and from one block of 16 columns, of ``b`` to the next.
    ``room`` says how many 16-lane sums the registers hold, or how bfloat16s are multiplied. PAIRS:
    a step is two elements of the sum, a word of ``a`` and a row of words of ``b``. AMX: a step is
    32 elements, 16 pairs of rows of ``b`` which are ``b_row`` apart, and ``a`` has for every 16
    rows, ``a_stride`` apart, a TILE_PAIR for each step.
    """

    def emit(context, builder, signature, arguments):
        literals = (a_stride, b_step, b_column, b_row, c_stride, fresh)
        shape = [x.literal_value for x in literals]
        if room.literal_value == AMX:
            _multiply_tiles(builder, arguments[:6], shape)
        else:
            _multiply_vectors(builder, arguments[:6], shape, room.literal_value)
        return context.get_dummy_value()

    kinds = (a, b, c, rows, columns, depth)
    return types.void(*kinds, a_stride, b_step, b_column, b_row, c_stride, fresh, room), emit


def _multiply_vectors(
    builder: Builder, arguments: Sequence[Value], shape: Sequence[int], room: int
) -> None:
    a, b, c, rows, columns, depth = arguments
    a_stride, b_step, b_column, _, c_stride, fresh = shape
    height, width = BLOCK[room]
    multiply = dot_pairs if room == PAIRS else fma
    with (
        loop(builder, I64(0), columns, step=width) as j,
        loop(builder, I64(0), rows, step=height) as i,
    ):
        left = builder.add(a, builder.mul(i, I64(a_stride)))
        right = builder.add(b, builder.mul(j, I64(b_column)))
        out = _place(builder, c, i, c_stride, j)
        sums = {}
        for y in range(height):
            for x in range(width):
                there = c_stride // 4 * y + LANES * x
                start = zeros(LANES) if fresh else load(builder, out, there, LANES)
                sums[y, x] = variable(builder, start)
        with loop(builder, I64(0), depth) as k:
            row = builder.add(left, builder.mul(k, I64(4)))
            step = builder.add(right, builder.mul(k, I64(b_step)))
            values = [load(builder, step, b_column // 4 * x, LANES) for x in range(width)]
            for y in range(height):
                element = broadcast(builder, load_scalar(builder, row, a_stride // 4 * y), LANES)
                for x, value in enumerate(values):
                    total = multiply(builder, element, value, builder.load(sums[y, x]))
                    builder.store(total, sums[y, x])
        for (y, x), total in sums.items():
            store_vector(builder, builder.load(total), out, c_stride // 4 * y + LANES * x)


def dot_pairs(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """``z`` plus the products of both bfloat16s of each lane's words."""
    x, y = (b.bitcast(each, vector(I32, LANES)) for each in (x, y))
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", z, x, y, returns=z.type)


def _multiply_tiles(builder: Builder, arguments: Sequence[Value], shape: Sequence[int]) -> None:
    """Tiles 0 to 3 are sums, 4 and 5 of ``b``, 6 and 7 of ``a``."""
    a, b, c, rows, columns, depth = arguments
    a_stride, b_step, b_column, b_row, c_stride, fresh = shape
    _configure(builder)
    with loop(builder, I64(0), columns, step=2) as j, loop(builder, I64(0), rows, step=32) as i:
        left = builder.add(a, builder.mul(builder.sdiv(i, I64(16)), I64(a_stride)))
        right = builder.add(b, builder.mul(j, I64(b_column)))
        out = _place(builder, c, i, c_stride, j)
        sums = [
            (2 * y + x, builder.add(out, I64(16 * c_stride * y + 64 * x)))
            for y in range(2)
            for x in range(2)
        ]
        for tile, place in sums:
            if fresh:
                _amx(builder, "tilezero", tile)
            else:
                _amx(builder, "tileloadd64", tile, place, c_stride)
        with loop(builder, I64(0), depth) as k:
            pair = builder.add(left, builder.mul(k, I64(TILE_PAIR)))
            step = builder.add(right, builder.mul(k, I64(b_step)))
            for x in range(2):
                _amx(builder, "tileloadd64", 4 + x, builder.add(step, I64(b_column * x)), b_row)
            for part in range(2):  # the high ones, the low ones
                for y in range(2):
                    place = builder.add(pair, I64(a_stride * y + TILE_PAIR // 2 * part))
                    _amx(builder, "tileloadd64", 6 + y, place, 64)
                    for x in range(2):
                        _amx(builder, "tdpbf16ps", 2 * y + x, 6 + y, 4 + x)
        for tile, place in sums:
            _amx(builder, "tilestored64", tile, place, c_stride)
    call(builder, "llvm.x86.tilerelease", returns=ir.VoidType())


def _place(builder: Builder, c: Value, i: Value, c_stride: int, j: Value) -> Value:
    return builder.add(c, builder.add(builder.mul(i, I64(c_stride)), builder.mul(j, I64(64))))


def _configure(builder: Builder) -> None:
    """All eight tiles have 16 rows of 64 bytes."""
    config = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
    kind = ir.ArrayType(I8, 64)
    name = "octavo_amx_config"
    if name in builder.module.globals:
        table = builder.module.globals[name]
    else:
        table = ir.GlobalVariable(builder.module, kind, name)
        table.initializer = ir.Constant(kind, config)
        table.global_constant, table.linkage = True, "internal"
    call(
        builder,
        "llvm.x86.ldtilecfg",
        builder.bitcast(table, I8.as_pointer()),
        returns=ir.VoidType(),
    )


def _amx(builder: Builder, name: str, *operands: Any) -> None:
    """One tile instruction: tiles by number, then an address and a stride."""
    if name.endswith("64"):
        tile, address, stride = operands
        place = builder.inttoptr(address, I8.as_pointer())
        values = [ir.Constant(I8, tile), place, I64(stride)]
    else:
        values = [ir.Constant(I8, tile) for tile in operands]
    call(builder, f"llvm.x86.{name}", *values, returns=ir.VoidType())


@intrinsic(prefer_literal=True)
def split_rows(typing, source, target, rows, steps, source_stride, target_stride):
    """Make of rows of ``32 steps`` float32s the high and low bfloat16s that AMX multiplies: a
    TILE_PAIR for each step of 16 rows, which are ``target_stride`` apart."""

    def emit(context, b, signature, arguments):
        source, target, rows, steps = arguments[:4]
        with loop(b, I64(0), rows) as i, loop(b, I64(0), steps) as k:
            row = b.add(source, b.mul(i, I64(source_stride.literal_value)))
            block = b.mul(b.lshr(i, I64(4)), I64(target_stride.literal_value))
            line = b.add(block, b.mul(b.and_(i, I64(15)), I64(64)))
            pair = b.add(b.add(target, line), b.mul(k, I64(TILE_PAIR)))
            numbers = b.add(row, b.mul(k, I64(128)))
            store_split(b, [load(b, numbers, d, LANES) for d in (0, LANES)], pair)
        return context.get_dummy_value()

    return types.void(source, target, rows, steps, source_stride, target_stride), emit


@intrinsic(prefer_literal=True)
def round_rows(typing, source, target, rows, steps, source_stride, target_stride):
    """Round rows of ``32 steps`` float32s to rows of bfloat16s; the strides are bytes."""

    def emit(context, b, signature, arguments):
        source, target, rows, steps = arguments[:4]
        with loop(b, I64(0), rows) as i, loop(b, I64(0), steps) as k:
            row = b.add(source, b.mul(i, I64(source_stride.literal_value)))
            numbers = b.add(row, b.mul(k, I64(128)))
            place = b.add(target, b.mul(i, I64(target_stride.literal_value)))
            halves = rounded_pairs(b, *(load(b, numbers, d, LANES) for d in (0, LANES)))
            store_vector(b, halves, b.add(place, b.mul(k, I64(64))), 0)
        return context.get_dummy_value()

    return types.void(source, target, rows, steps, source_stride, target_stride), emit


def rounded_pairs(b: Builder, first: Value, second: Value) -> Value:
    """Two vectors of float32s, one after the other, as the bfloat16s nearest to them, in words."""
    name, halves = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(I16, 2 * LANES)
    return b.bitcast(call(b, name, second, first, returns=halves), vector(I32, LANES))


def store_split(b: Builder, values: Sequence[Value], address: Value) -> None:
    """Store two vectors of float32s as a row of a TILE_PAIR."""
    highs = [_rounded(b, value) for value in values]
    rests = [b.fsub(x, b.bitcast(high, x.type)) for x, high in zip(values, highs, strict=True)]
    lows = [_rounded(b, rest) for rest in rests]
    for part, words in enumerate((highs, lows)):
        halves = _high_halves(b, *words)
        b.store(halves, pointer(b, address, TILE_PAIR // 2 * part, halves.type), align=4)


def _rounded(b: Builder, value: Value) -> Value:
    """The bits of float32s rounded to bfloat16s, in the high halves; the low ones are 0."""
    words = b.bitcast(value, vector(I32, LANES))
    return b.and_(b.add(words, fill(I32, 0x8000, LANES)), fill(I32, -(1 << 16), LANES))


def _high_halves(b: Builder, first: Value, second: Value) -> Value:
    """The high 16 bits of two vectors of words, one after the other."""
    halves = vector(I16, 2 * LANES)
    odd = ir.Constant(vector(I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return b.shuffle_vector(b.bitcast(first, halves), b.bitcast(second, halves), odd)
