"""Products with packed matrices, as ops.

An item is a run of pairs of blocks for a range of tokens. It takes a pair at a time: the pair's
inner products with a tile of tokens (``cpu_product``), then what happens to a result
(``cpu_finish``), and the same for the next tile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

from numpy.typing import NDArray

from octavo.kernels import levels
from octavo.kernels.jit import jit
from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.linear.cpu_amx import TOKENS, emit_config, emit_q8_tiles, emit_release
from octavo.kernels.linear.cpu_dot import LEVELS
from octavo.kernels.linear.cpu_finish import emit_gate, emit_store
from octavo.kernels.linear.cpu_formats import FLOAT_BYTES, FORMATS, GROUP, ROWS, View, load_floats
from octavo.kernels.linear.cpu_product import (
    TOKEN_BYTES,
    Tile,
    dequantised,
    emit_exact,
    emit_q8,
    emit_q8_one,
)
from octavo.kernels.linear.cpu_q8 import quantize_group
from octavo.kernels.linear.packing import PackedLinear
from octavo.kernels.program import Call, Op, fetch_add, int32s, int64s, next_run, op
from octavo.kernels.vector_ir import F32, I32, I64, loop, pointer, stack

Address = int | NDArray[Any]  # of the first byte, or the array that begins there

TILE = 32  # tokens for which a block is unpacked once
RANGE = 128  # tokens of an item: their activations stay in the second-level cache
ITEM_BYTES = 1 << 16  # weights of an item of one token
AHEAD = 4096  # bytes that one token's weights are asked for ahead
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}


def linear(
    weights: PackedLinear,
    *,
    num_tokens: Address,
    x: Address,
    x_stride: int,
    out: Address = 0,
    out_stride: int = 0,
    bias: Address = 0,
    accumulate: bool = False,
    activation: str | None = None,
    out_q8: Address = 0,
    out_q8_stride: int = 0,
    mode: str = "q8",
    level: str | None = None,
) -> Call:
    """``out = x w + bias`` for the first T tokens.

    ``num_tokens``: where T lies, an int64. ``x``: by ``mode`` q8 rows or float32 rows, ``x_stride``
    bytes apart. ``out``: float32 rows, ``out_stride`` bytes apart, N wide. ``bias``: N float32, or,
    with weights packed as ``gated``, in the order of ``packing.in_packed_order``. ``accumulate``:
    out += x w + bias. ``activation``: "silu" or "gelu_tanh", with ``gated`` weights:
    out = act(gate) * up, N / 2 wide. ``out_q8``: q8 rows that take the result, where it is a
    multiple of 32 wide; then ``out`` may be left out. ``level``: by default that of
    ``kernels.levels``.

    Raises ValueError where these don't go together.
    """
    if (activation is not None) != weights.gated or activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation} with weights of gated={weights.gated}")
    if mode == "q8" and weights.format in FLOAT_BYTES:
        raise ValueError(f'{weights.format} weights have no q8 mode; use "exact"')
    width = weights.rows // 2 if weights.gated else weights.rows
    if (_is_missing(out) and accumulate) or (_is_missing(out) and _is_missing(out_q8)):
        raise ValueError("there is nowhere to put the result: give out, or out_q8 at least")
    if width % GROUP and not _is_missing(out_q8):
        raise ValueError(f"a result of {width} numbers can't be quantised in groups of {GROUP}")
    return linear_op(weights.format, mode, usable(level)).bind(
        num_tokens=num_tokens,
        x=x,
        x_stride=x_stride,
        weights=weights.data,
        block_bytes=weights.block_bytes,
        num_blocks=weights.num_blocks,
        columns=weights.columns,
        bias=bias,
        out=out,
        out_stride=out_stride,
        width=width,
        accumulate=accumulate,
        activation=_ACTIVATIONS[activation],
        out_q8=out_q8,
        out_q8_stride=out_q8_stride,
    )


def _is_missing(address: Address) -> bool:
    return isinstance(address, int) and address == 0


def usable(level: str | None) -> str:
    """The level asked for, else the process's. ValueError where the CPU lacks it."""
    if level is None:
        return levels.level()
    if level not in levels.usable_levels():
        raise ValueError(f"level {level}: this CPU has {', '.join(levels.usable_levels())}")
    return level


@cache
def linear_op(format: str, mode: str, level: str) -> Op:
    # A compiled function is found in the cache by what it closes over: words and numbers only.
    kind = f"{format} {mode} {level}"
    tile = RANGE if LEVELS[level].tiles and mode == "q8" else TILE
    sums_bytes, kept_bytes = tile * TOKEN_BYTES, RANGE * 4 * GROUP

    @op(
        num_tokens="i8", x="i8", x_stride="i8", weights="i8", block_bytes="i8", num_blocks="i8",
        columns="i8", bias="i8", out="i8", out_stride="i8", width="i8", accumulate="i8",
        activation="i8", out_q8="i8", out_q8_stride="i8",
    )  # fmt: skip
    def linear(thread, num_threads, counter, args):
        a = carray(args, 1)[0]
        num_tokens = int64s(a.num_tokens, 1)[0]
        pairs = (a.num_blocks + 1) // 2
        pair_bytes = 2 * a.block_bytes
        pair_width = ROWS if a.activation != 0 else 2 * ROWS
        step = 2 if a.activation != 0 else 1  # columns enough for a group of the result
        piece = pairs_of_item(pairs, step, pair_bytes, num_tokens, num_threads)
        pieces = (pairs + piece - 1) // piece
        num_items = pieces * ((num_tokens + RANGE - 1) // RANGE)
        sums = scratch(sums_bytes)
        kept = scratch(kept_bytes)  # results that go nowhere but into q8 rows
        begin(kind)
        item, until = next_run(-1, thread, num_threads, counter, num_items)
        while item < num_items:
            start, first = item // pieces * RANGE, item % pieces
            taken = min(until - item, pieces - first)  # of the run, as far as these tokens go
            item += taken
            if item == until:  # asked for here and not behind the work, one token takes 2 % less
                item, until = next_run(until, thread, num_threads, counter, num_items)
            stop = min(start + RANGE, num_tokens)
            for pair in range(first * piece, min((first + taken) * piece, pairs)):
                block = a.weights + pair * pair_bytes
                other = a.weights + min(2 * pair + 1, a.num_blocks - 1) * a.block_bytes
                following = a.weights + min(pair + 1, pairs - 1) * pair_bytes
                ahead = block + AHEAD if num_tokens == 1 else following
                column = pair * pair_width
                count = min(pair_width, a.width - column)
                bias = a.bias + 8 * ROWS * pair if a.bias != 0 else 0
                for token in range(start, stop, tile):
                    n = min(tile, stop - token)
                    x = a.x + token * a.x_stride
                    add_up(kind, block, other, x, a.x_stride, n, a.columns, ahead, sums)
                    if a.activation != 0:
                        gate(sums, n, bias, a.activation == 2)
                    group = column // GROUP
                    if a.out != 0:
                        out_stride = a.out_stride
                        out = a.out + token * out_stride + 4 * GROUP * group
                    else:
                        out_stride = 4 * GROUP
                        out = kept + (token - start) * out_stride
                    address = out + 4 * (column % GROUP)
                    addend = bias if a.activation == 0 else 0
                    store(sums, n, count, addend, address, out_stride, a.accumulate != 0)
                    if a.out_q8 != 0 and (column + count) % GROUP == 0:
                        row = a.out_q8 + token * a.out_q8_stride
                        for i in range(n):
                            quantize_group(
                                out + i * out_stride, row + i * a.out_q8_stride, a.width, group
                            )
        end(kind)

    return linear


@jit
def pairs_of_item(pairs, step, pair_bytes, num_tokens, num_threads):
    """A multiple of ``step``, or all: enough work to be worth a look at the counter, and items
    enough for threads of unequal speed."""
    ranges = (num_tokens + RANGE - 1) // RANGE
    most = ITEM_BYTES // (pair_bytes * (1 + num_tokens // 16))
    return max(1, min(pairs * ranges // (8 * num_threads), most) // step) * step


@intrinsic(prefer_literal=True)
def add_up(typing, kind, block, other, x, x_stride, num_tokens, num_columns, ahead, sums):
    """The sums of two blocks for a tile of tokens: see ``cpu_product``."""
    format, mode, name = kind.literal_value.split()

    def emit(context, b, signature, arguments):
        _, block, other, *rest = arguments
        tile, level = Tile([block, other], I64(0), *rest), LEVELS[name]
        if mode == "exact":
            _in_pieces(b, level, tile, partial(emit_exact, b, format, level))
            return context.get_dummy_value()
        packed = FORMATS[format]
        with b.if_else(b.icmp_signed("==", tile.num_tokens, I64(1))) as (one, many):
            with one, loop(b, I64(0), I64(2)) as number:
                emit_q8_one(b, packed, level, tile.alone(b, number))
            with many:
                if level.tiles:
                    is_small = b.icmp_signed("<", tile.num_tokens, I64(TOKENS))
                    with b.if_else(is_small) as (few, enough):
                        with few:
                            emit_q8(b, packed, level, tile)
                        with enough:
                            emit_q8_tiles(b, packed, level, tile)
                else:
                    _in_pieces(b, level, tile, partial(emit_q8, b, packed, level))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), emit


def _in_pieces(b, level, tile, emit):
    """Both blocks together, or half a block after the other where a vector has no more lanes."""
    if level.lanes == ROWS:
        emit(tile)
        return
    with loop(b, I64(0), I64(2)) as number:
        alone = tile.alone(b, number)
        with loop(b, I64(0), I64(ROWS), step=level.lanes) as row:
            emit(replace(alone, row=row))


@intrinsic
def gate(typing, sums, num_tokens, bias, gelu):
    """See ``cpu_finish.emit_gate``."""

    def emit(context, b, signature, arguments):
        emit_gate(b, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.boolean), emit


@intrinsic
def store(typing, sums, num_tokens, count, bias, out, out_stride, accumulate):
    """See ``cpu_finish.emit_store``."""

    def emit(context, b, signature, arguments):
        emit_store(b, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.boolean), emit


@intrinsic(prefer_literal=True)
def scratch(typing, nbytes):
    size = nbytes.literal_value

    def emit(context, b, signature, arguments):
        return stack(b, size)

    return types.int64(nbytes), emit


@intrinsic(prefer_literal=True)
def begin(typing, kind):
    """What a thread does before its first product."""

    def emit(context, b, signature, arguments):
        format, level = q8_tiles(kind)
        if level:
            emit_config(b, FORMATS[format].num_parts)
        return context.get_dummy_value()

    return types.void(kind), emit


@intrinsic(prefer_literal=True)
def end(typing, kind):
    """And after its last one."""

    def emit(context, b, signature, arguments):
        if q8_tiles(kind)[1]:
            emit_release(b)
        return context.get_dummy_value()

    return types.void(kind), emit


def q8_tiles(kind):
    format, mode, level = kind.literal_value.split()
    return format, mode == "q8" and LEVELS[level].tiles


# ---- rows of a matrix


def embed(
    weights: PackedLinear,
    *,
    num_tokens: Address,
    input_ids: Address,
    out: Address,
    out_stride: int,
    factor: float = 1.0,
    level: str | None = None,
) -> Call:
    """``out[t] = factor * w[input_ids[t]]`` for the first T tokens: float32 from int32 ids, each
    of them a row of ``weights``. Equal to the dequantised rows by bits."""
    return embed_op(weights.format, usable(level)).bind(
        num_tokens=num_tokens,
        input_ids=input_ids,
        weights=weights.data,
        block_bytes=weights.block_bytes,
        columns=weights.columns,
        out=out,
        out_stride=out_stride,
        factor=factor,
    )


@cache
def embed_op(format: str, level: str) -> Op:
    kind = f"{format} {level}"

    @op(
        num_tokens="i8", input_ids="i8", weights="i8", block_bytes="i8", columns="i8", out="i8",
        out_stride="i8", factor="f4",
    )  # fmt: skip
    def embed(thread, num_threads, counter, args):
        a = carray(args, 1)[0]
        num_tokens = int64s(a.num_tokens, 1)[0]
        input_ids = int32s(a.input_ids, num_tokens)
        while True:
            token = fetch_add(counter, 1)
            if token >= num_tokens:
                return
            row = input_ids[token]
            block = a.weights + row // ROWS * a.block_bytes
            out = a.out + token * a.out_stride
            dequantize_row(kind, block, row % ROWS, a.columns, out, a.factor)

    return embed


@intrinsic(prefer_literal=True)
def dequantize_row(typing, kind, block, row, num_columns, out, factor):
    """A row of a block as float32, times a factor."""
    format, name = kind.literal_value.split()
    native_half = LEVELS[name].fused

    def emit(context, b, signature, arguments):
        _, block, row, num_columns, out, factor = arguments

        def put(value, column):
            value = b.fmul(b.extract_element(value, I32(0)), factor)
            b.store(value, pointer(b, b.add(out, b.mul(column, I64(4))), 0, F32))

        if format in FLOAT_BYTES:
            size = FLOAT_BYTES[format]
            with loop(b, I64(0), num_columns) as column:
                index = b.add(b.mul(column, I64(ROWS)), row)
                address = b.add(block, b.mul(index, I64(size)))
                put(load_floats(b, format, native_half, address, 0, 1), column)
            return context.get_dummy_value()
        num_groups = b.udiv(num_columns, I64(GROUP))
        fields = FORMATS[format].fields
        with loop(b, I64(0), num_groups) as group:
            view = View(b, fields, block, num_groups, group, row, 1, native_half)
            weight = dequantised(FORMATS[format], view)
            for i in range(GROUP):
                put(weight(i), b.add(b.mul(group, I64(GROUP)), I64(i)))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4, types.float32), emit
