"""Products of 16 tokens and more in the tile registers of AMX.

A tile of activations [16 tokens, 32 columns] times one of weights [32 columns, 16 rows] is one
instruction; the weights lie in memory as they are unpacked, words of four columns. The sums of
integers are the same as one token's alone, and so is what is done with them afterwards.
"""

from __future__ import annotations

from llvmlite import ir

from octavo.kernels.linear.cpu_dot import Level
from octavo.kernels.linear.cpu_formats import GROUP, ROWS, PackedFormat
from octavo.kernels.linear.cpu_product import Tile, add_group, groups_of, scale_sum
from octavo.kernels.vector_ir import (
    I32,
    I64,
    Builder,
    Value,
    call,
    load_vector,
    loop,
    pointer,
    stack,
    vector,
)

TOKENS = 16  # of a tile
_I8 = ir.IntType(8)
_LINE = 4 * ROWS  # bytes of a row of a tile of weights or sums
_SUMS, _ACTIVATIONS, _WEIGHTS = (0, 1), (2, 3), (4, 5, 6, 7)  # registers


def emit_config(b: Builder, num_parts: int) -> None:
    """Set up the tiles of this thread. ``num_parts``: of a group, each with its own scale."""
    columns = [0] * 16
    rows = [0] * 16
    for register in _SUMS:
        columns[register], rows[register] = _LINE, TOKENS
    for register in _ACTIVATIONS:
        columns[register], rows[register] = GROUP // num_parts, TOKENS
    for register in _WEIGHTS:
        columns[register], rows[register] = _LINE, GROUP // 4 // num_parts
    # Palette 1, start row 0; bytes of a row from byte 16 on, 16 bits each; rows from byte 48 on.
    config = [1, *[0] * 15, *[byte for n in columns for byte in (n & 255, n >> 8)], *rows]
    memory = stack(b, 64)
    kind = vector(_I8, 64)
    b.store(ir.Constant(kind, config), pointer(b, memory, 0, kind), align=64)
    call(b, "llvm.x86.ldtilecfg", pointer(b, memory, 0, _I8), returns=ir.VoidType())


def emit_release(b: Builder) -> None:
    """Give the tiles back: they needn't be kept for this thread any more."""
    call(b, "llvm.x86.tilerelease", returns=ir.VoidType())


def emit_q8_tiles(b: Builder, format: PackedFormat, level: Level, tile: Tile) -> None:
    """As ``cpu_product.emit_q8``, for 16 tokens and more."""
    unpacked = stack(b, 2 * GROUP * ROWS)
    sums = stack(b, 2 * 4 * TOKENS * _LINE)
    line = I64(_LINE)
    with groups_of(b, format, level, tile) as (groups, activations):
        num_parts = len(groups[0].scales.scale)
        num_words = GROUP // 4 // num_parts
        for i, group in enumerate(groups):
            for t, word in enumerate(group.words):
                offset = (i * GROUP // 4 + t) * _LINE
                b.store(word, pointer(b, unpacked, offset, word.type), align=64)
            for part in range(num_parts):
                offset = (i * GROUP // 4 + part * num_words) * _LINE
                _tile(b, "tileloadd64", _WEIGHTS[2 * i + part], unpacked, offset, line)
        # The last tile of tokens begins early enough to be whole.
        last = b.sub(tile.num_tokens, I64(TOKENS))
        num_tiles = b.udiv(b.add(tile.num_tokens, I64(TOKENS - 1)), I64(TOKENS))

        def start_of(number: Value) -> Value:
            start = b.mul(number, I64(TOKENS))
            return b.select(b.icmp_signed("<", start, last), start, last)

        def sums_of(number: Value) -> Value:
            """Two tiles of tokens take turns."""
            return b.add(sums, b.mul(b.and_(number, I64(1)), I64(4 * TOKENS * _LINE)))

        def multiply(number: Value) -> None:
            x, mine = activations(start_of(number)).words, sums_of(number)
            for part in range(num_parts):
                offset = part * GROUP // num_parts
                _tile(b, "tileloadd64", _ACTIVATIONS[part], x, offset, tile.x_stride)
            for i in range(len(groups)):
                for part in range(num_parts):
                    index = 2 * i + part
                    register = _SUMS[part if num_parts == 2 else i]
                    call(b, "llvm.x86.tilezero", _I8(register), returns=ir.VoidType())
                    call(
                        b,
                        "llvm.x86.tdpbsud",
                        _I8(register),
                        _I8(_ACTIVATIONS[part]),
                        _I8(_WEIGHTS[index]),
                        returns=ir.VoidType(),
                    )
                    _tile(b, "tilestored64", register, mine, index * TOKENS * _LINE, line)

        def add(number: Value) -> None:
            start, first = start_of(number), b.mul(number, I64(TOKENS))
            end = b.add(start, I64(TOKENS))
            with loop(b, first, end) as token:
                x = activations(token)
                mine = b.add(sums_of(number), b.mul(b.sub(token, start), line))

                results = []
                for block, group in enumerate(groups):
                    result = None
                    for part, scale in enumerate(group.scales.scale):
                        offset = (2 * block + part) * TOKENS * _LINE
                        total = load_vector(b, mine, offset, vector(I32, ROWS))
                        result = scale_sum(b, level, total, x.offset(part), scale, result)
                    results.append(result)
                add_group(b, level, tile, token, groups, x, results)

        # A tile is multiplied while the sums of the one before it are added.
        multiply(I64(0))
        with loop(b, I64(1), num_tiles) as number:
            multiply(number)
            add(b.sub(number, I64(1)))
        add(b.sub(num_tiles, I64(1)))


def _tile(b: Builder, name: str, register: int, address: Value, offset: int, stride: Value) -> None:
    place = pointer(b, address, offset, _I8)
    call(b, f"llvm.x86.{name}", _I8(register), place, stride, returns=ir.VoidType())
