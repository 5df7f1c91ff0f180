"""The inner product of a few blocks of rows and a tile of tokens, as LLVM IR.

Both modes go through the columns once. Weights are unpacked into registers, then the tokens pass
by, one or a few at a time; their sums lie in the first-level cache, ``[token, 2 blocks, 16 rows]``
float32. So one token and a whole prefill chunk are the same code and the same order of additions.

In ``q8`` a group's sum of integers s becomes ``scale * (s - offset * sum(x))``, rounded once, at
every level. Where one FMA can do it, the integers are added to the bits of the float32 1.5 * 2**23:
as long as they stay below 2**22, the result read as a float32 is that number plus s, and
``fma(result, scale, -1.5 * 2**23 * scale)`` is the product, without a conversion. For this the last
addend must be exact, hence scales of at most 21 bits; those of the file have less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from octavo.kernels.linear.cpu_dot import Level
from octavo.kernels.linear.cpu_formats import (
    FLOAT_BYTES,
    FORMATS,
    GROUP,
    ROWS,
    PackedFormat,
    Scales,
    View,
    load_floats,
)
from octavo.kernels.linear.cpu_q8 import NUMBERS
from octavo.kernels.vector_ir import (
    F32,
    I32,
    I64,
    Builder,
    Value,
    broadcast,
    call,
    fill,
    load_scalar,
    load_vector,
    loop,
    opaque,
    pointer,
    prefetch,
    store_vector,
    variable,
    vector,
)

BIAS = 1.5 * 2.0**23
TOKEN_BYTES = 2 * ROWS * 4  # of a token's sums
AT_ONCE = 8  # columns whose weights are in registers together, in exact mode


@dataclass(frozen=True)
class Tile:
    """What is multiplied: addresses and numbers, i64.

    ``blocks``: two, or one alone; ``row``: the first row of each that is meant;
    ``x``: the first token's activations, ``x_stride`` bytes before the next one's; ``ahead``:
    weights that will be read soon; ``sums``: written.
    """

    blocks: Sequence[Value]
    row: Value
    x: Value
    x_stride: Value
    num_tokens: Value
    num_columns: Value
    ahead: Value
    sums: Value

    def sum(self, b: Builder, token: Value, block: int) -> Value:
        """The address of a token's sums of a block."""
        offset = b.add(b.mul(token, I64(TOKEN_BYTES)), b.mul(self.row, I64(4)))
        return b.add(b.add(self.sums, offset), I64(4 * ROWS * block))

    def alone(self, b: Builder, number: Value) -> Tile:
        """One of two blocks, number 0 or 1."""
        first, second = self.blocks
        start = b.mul(number, b.sub(second, first))
        return replace(
            self,
            blocks=[b.add(first, start)],
            ahead=b.add(self.ahead, start),
            sums=b.add(self.sums, b.mul(number, I64(4 * ROWS))),
        )


@dataclass(frozen=True)
class Group:
    """A group of columns of one block in registers; ``words`` as unpacked."""

    words: Sequence[Value]
    scales: Scales


def emit_q8(b: Builder, format: PackedFormat, level: Level, tile: Tile) -> None:
    """Add up the products of quantised activations, of ``level.together`` tokens at once."""
    with groups_of(b, format, level, tile) as (groups, activations):
        weights = [level.prepare(b, group.words, format.bits) for group in groups]

        def add(first: Value, count: int) -> None:
            tokens = [b.add(first, I64(i)) for i in range(count)]
            xs = [activations(token) for token in tokens]
            results = _scaled(b, format, level, groups, weights, xs)
            for token, x, row in zip(tokens, xs, results, strict=True):
                add_group(b, level, tile, token, groups, x, row)

        whole = b.and_(tile.num_tokens, I64(-level.together))
        with loop(b, I64(0), whole, step=level.together) as token:
            add(token, level.together)
        if level.together > 1:
            with loop(b, whole, tile.num_tokens) as token:
                add(token, 1)


def emit_q8_one(b: Builder, format: PackedFormat, level: Level, tile: Tile) -> None:
    """As :func:`emit_q8`, for one token and one block: its sums stay in registers, and all of its
    rows pass before the next group of columns."""
    [block] = tile.blocks
    tiles = [replace(tile, row=I64(row)) for row in range(0, ROWS, level.lanes)]
    sums = [variable(b, fill(F32, 0.0, level.lanes)) for _ in tiles]
    step = _group_bytes(format)
    with loop(b, I64(0), b.udiv(tile.num_columns, I64(GROUP))) as number:
        prefetch(b, b.add(tile.ahead, b.mul(number, I64(step))), step)
        x = _activations(b, format, level, tile, number)(I64(0))
        for rows, total in zip(tiles, sums, strict=True):
            group = _group(b, format, level, rows, block, number)
            weights = level.prepare(b, group.words, format.bits)
            [[result]] = _scaled(b, format, level, [group], [weights], [x])
            b.store(_plus_group(b, level, group, x, result, b.load(total)), total)
    for rows, total in zip(tiles, sums, strict=True):
        store_vector(b, b.load(total), rows.sum(b, I64(0), 0), 0)


def _scaled(
    b: Builder,
    format: PackedFormat,
    level: Level,
    groups: Sequence[Group],
    weights: Sequence[Sequence[Any]],
    xs: Sequence[Activations],
) -> list[list[Value]]:
    """scale * (sum of products + offset), by token and block; ``weights`` are the groups' words,
    prepared. Each sum is a chain of dot products that wait for each other, and a core looks at some
    hundred operations at a time: where several tokens go together, a word of weights is multiplied
    with all of them before the next."""
    num_words = GROUP // 4 // format.num_parts
    at_once = 1 if level.together > 1 else num_words
    results: list[list[Value]] = [[None] * len(groups) for _ in xs]
    for part in range(format.num_parts):
        totals = [[_start(b, level, x, part) for _ in groups] for x in xs]
        for first in range(num_words * part, num_words * (part + 1), at_once):
            words = range(first, first + at_once)
            for x, row in zip(xs, totals, strict=True):
                values = [_word(b, x.words, t, level.lanes) for t in words]
                for i, mine in enumerate(weights):
                    row[i] = level.dot(b, [mine[t] for t in words], values, format.bits, row[i])
        for x, row, total in zip(xs, results, totals, strict=True):
            for i, group in enumerate(groups):
                row[i] = _finish(b, level, group, x, part, total[i], row[i])
    return results


def _start(b: Builder, level: Level, x: Activations, part: int) -> Value:
    """What a part's sum of integers begins with, <lanes x i32>: see the module's docstring."""
    if not _is_biased(level, part):
        return fill(I32, 0, level.lanes)
    start = fill(F32, BIAS, level.lanes)
    if x.zero:
        start = _fma(b, level, fill(F32, -x.zero, level.lanes), x.part(part), start)  # exact
    return b.bitcast(start, vector(I32, level.lanes))


def _finish(
    b: Builder,
    level: Level,
    group: Group,
    x: Activations,
    part: int,
    total: Value,
    before: Value | None,
) -> Value:
    """scale * (sum of products + offset) + what the part before this one gave, from the sum."""
    scale = group.scales.scale[part]
    if not _is_biased(level, part):
        return scale_sum(b, level, total, x.offset(part), scale, before)
    bias = b.fmul(scale, fill(F32, -BIAS, level.lanes))
    return _fma(b, level, b.bitcast(total, vector(F32, level.lanes)), scale, bias)


def _is_biased(level: Level, part: int) -> bool:
    return level.accumulates and part == 0


@dataclass(frozen=True)
class Activations:
    """A group of a token's: the addresses of its int8 and of its numbers (see ``cpu_q8``). They are
    loaded where they are wanted, so that they take up no registers before."""

    b: Builder
    lanes: int
    words: Value
    numbers: Value
    zero: int  # the weights' offset, as far as it is still in them
    num_parts: int

    def number(self, index: int) -> Value:
        """Its scale, the sum of its int8, the sum of either half, in all lanes."""
        return _number(self.b, self.numbers, index, self.lanes)

    def part(self, part: int) -> Value:
        """The sum of the int8 of a part with a scale of its own."""
        return self.number(1 if self.num_parts == 1 else 2 + part)

    def offset(self, part: int) -> Value | None:
        """What the weights' offset adds to a part, None: nothing."""
        if self.zero == 0:
            return None
        return self.b.fmul(fill(F32, -self.zero, self.lanes), self.part(part))


@contextmanager
def groups_of(
    b: Builder, format: PackedFormat, level: Level, tile: Tile
) -> Iterator[tuple[list[Group], Callable[[Value], Activations]]]:
    """Go through the groups, with the sums cleared before: a group of every block, and a function
    from token to activations."""
    with loop(b, I64(0), tile.num_tokens) as token:
        _clear(b, level, tile, token)
    step = _group_bytes(format) * len(tile.blocks)
    with loop(b, I64(0), b.udiv(tile.num_columns, I64(GROUP))) as group:
        prefetch(b, b.add(tile.ahead, b.mul(group, I64(step))), step)
        groups = [_group(b, format, level, tile, block, group) for block in tile.blocks]
        yield groups, _activations(b, format, level, tile, group)


def _group(
    b: Builder, format: PackedFormat, level: Level, tile: Tile, block: Value, group: Value
) -> Group:
    view = _view(b, format, level, tile, block, group)
    return Group(format.words(view), format.scales(view))


def _activations(
    b: Builder, format: PackedFormat, level: Level, tile: Tile, group: Value
) -> Callable[[Value], Activations]:
    """A function from a token to its activations of a group."""
    zero = 0 if level.signed and format.bits == 8 else format.offset
    x_words = b.add(tile.x, b.mul(group, I64(GROUP)))
    to_numbers = b.sub(tile.num_columns, b.mul(group, I64(GROUP - 4 * NUMBERS)))

    def activations(token: Value) -> Activations:
        words = opaque(b, b.add(x_words, b.mul(token, tile.x_stride)))
        numbers = b.add(words, to_numbers)
        return Activations(b, level.lanes, words, numbers, zero, format.num_parts)

    return activations


def scale_sum(
    b: Builder, level: Level, total: Value, offset: Value | None, scale: Value, before: Value | None
) -> Value:
    """scale * (total + offset) + before; ``total`` <lanes x i32>."""
    result = b.sitofp(total, vector(F32, level.lanes))
    if offset is not None:
        result = b.fadd(result, offset)  # exact
    return b.fmul(result, scale) if before is None else _fma(b, level, result, scale, before)


def add_group(
    b: Builder,
    level: Level,
    tile: Tile,
    token: Value,
    groups: Sequence[Group],
    x: Activations,
    results: Sequence[Value],
) -> None:
    """Add a group to the sums of a token. ``results`` are the scaled sums of products, by block."""
    for i, (group, result) in enumerate(zip(groups, results, strict=True)):
        address = tile.sum(b, token, i)
        before = load_vector(b, address, 0, vector(F32, level.lanes))
        store_vector(b, _plus_group(b, level, group, x, result, before), address, 0)


def _plus_group(
    b: Builder, level: Level, group: Group, x: Activations, result: Value, before: Value
) -> Value:
    """A sum and what a group adds to it."""
    if group.scales.minimum is not None:
        result = _fma(b, level, group.scales.minimum, x.number(1), result)
    return _fma(b, level, result, x.number(0), before)


def emit_exact(b: Builder, format: str, level: Level, tile: Tile) -> None:
    """Add up the products of float32 activations and dequantised weights."""
    with loop(b, I64(0), tile.num_tokens) as token:
        _clear(b, level, tile, token)
    if format in FLOAT_BYTES:
        _emit_floats(b, format, level, tile)
        return
    packed = FORMATS[format]
    step = _group_bytes(packed) * len(tile.blocks)
    with loop(b, I64(0), b.udiv(tile.num_columns, I64(GROUP))) as group:
        prefetch(b, b.add(tile.ahead, b.mul(group, I64(step))), step)
        views = [_view(b, packed, level, tile, block, group) for block in tile.blocks]
        weights = [dequantised(packed, view) for view in views]
        for first in range(0, GROUP, AT_ONCE):
            columns = [[weight(first + i) for i in range(AT_ONCE)] for weight in weights]
            start = b.add(b.mul(group, I64(GROUP)), I64(first))
            _add_columns(b, level, tile, columns, start)


def _emit_floats(b: Builder, format: str, level: Level, tile: Tile) -> None:
    size = FLOAT_BYTES[format]
    column_bytes = ROWS * size
    step = column_bytes * len(tile.blocks)

    def add_columns(start: Value, count: int) -> None:
        offset = b.add(b.mul(start, I64(column_bytes)), b.mul(tile.row, I64(size)))
        columns = [
            [
                load_floats(
                    b, format, level.fused, b.add(block, offset), i * column_bytes, level.lanes
                )
                for i in range(count)
            ]
            for block in tile.blocks
        ]
        _add_columns(b, level, tile, columns, start)

    whole = b.and_(tile.num_columns, I64(-AT_ONCE))
    with loop(b, I64(0), whole, step=AT_ONCE) as start:
        prefetch(b, b.add(tile.ahead, b.mul(start, I64(step))), step * AT_ONCE)
        add_columns(start, AT_ONCE)
    with loop(b, whole, tile.num_columns) as start:
        add_columns(start, 1)


def _add_columns(
    b: Builder, level: Level, tile: Tile, weights: Sequence[Sequence[Value]], start: Value
) -> None:
    """Some columns from ``start`` on of all tokens: ``weights`` [block][column]."""
    x = b.add(tile.x, b.mul(start, I64(4)))
    with loop(b, I64(0), tile.num_tokens) as token:
        address = b.add(x, b.mul(token, tile.x_stride))
        values = [_number(b, address, i, level.lanes) for i in range(len(weights[0]))]
        for i, columns in enumerate(weights):
            place = tile.sum(b, token, i)
            total = load_vector(b, place, 0, vector(F32, level.lanes))
            for weight, value in zip(columns, values, strict=True):
                total = _fma(b, level, weight, value, total)
            store_vector(b, total, place, 0)


def dequantised(format: PackedFormat, view: View) -> Callable[[int], Value]:
    """The weights of a column of the view's group as float32, by the operations of
    ``checkpoint.quants`` and equal to its result by bits."""
    b = view.b
    words, scales = format.words(view), format.scales(view)
    part = GROUP // len(scales.scale)

    def weight(column: int) -> Value:
        word = b.lshr(words[column // 4], view.int(8 * (column % 4)))
        q = b.sub(b.and_(word, view.int(0xFF)), view.int(format.offset))
        product = b.fmul(view.float(q), scales.scale[column // part])
        return product if scales.minimum is None else b.fadd(product, scales.minimum)

    return weight


def _view(
    b: Builder, format: PackedFormat, level: Level, tile: Tile, block: Value, group: Value
) -> View:
    num_groups = b.udiv(tile.num_columns, I64(GROUP))
    return View(b, format.fields, block, num_groups, group, tile.row, level.lanes, level.fused)


def _clear(b: Builder, level: Level, tile: Tile, token: Value) -> None:
    for i in range(len(tile.blocks)):
        store_vector(b, fill(F32, 0.0, level.lanes), tile.sum(b, token, i), 0)


def _fma(b: Builder, level: Level, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once where the CPU can."""
    name = "fma" if level.fused else "fmuladd"
    return call(b, f"llvm.{name}.v{z.type.count}f32", x, y, z)


def _word(b: Builder, address: Value, index: int, lanes: int) -> Value:
    return broadcast(b, b.load(pointer(b, address, 4 * index, I32), align=4), lanes)


def _number(b: Builder, address: Value, index: int, lanes: int) -> Value:
    return broadcast(b, load_scalar(b, address, index), lanes)


def _group_bytes(format: PackedFormat) -> int:
    """Bytes of a group of a block, in whole cache lines."""
    return -(-format.block_bytes(256) // 8 // 64) * 64
