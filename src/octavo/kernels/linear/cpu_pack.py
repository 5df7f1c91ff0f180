"""Packing rows into blocks, as an op: whole 32-bit words are moved wherever the file has them so.

Source layouts are those of ``checkpoint.quants``, packed ones those of ``cpu_formats``. What is
said in LLVM IR here is done for one row and one group of 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from octavo.checkpoint.quants import FORMATS as FILE_FORMATS
from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.linear.cpu_formats import (
    FLOAT_BYTES,
    FORMATS,
    GROUP,
    ROWS,
    Place,
    load_floats,
)
from octavo.kernels.program import Op, fetch_add, int64s, op
from octavo.kernels.vector_ir import (
    F32,
    I32,
    I64,
    Builder,
    Value,
    broadcast,
    call,
    fill,
    loop,
    pointer,
    reduce_max,
    tree,
    variable,
    vector,
    zeros,
)

I8, I16 = ir.IntType(8), ir.IntType(16)
LANES = 16
AT_ONCE = 4  # blocks


@dataclass(frozen=True)
class _Move:
    """From ``source``, the address of a file's block, to a place; ``sub``: which group of the
    file's block it is."""

    source: Value
    sub: Value
    place: Place

    def get(self, offset: Value, kind: Any = I32) -> Value:
        """A number of the file's block."""
        b = self.place.b
        return b.load(pointer(b, b.add(self.source, offset), 0, kind), align=1)

    def put(self, value: Value, field: int, item: int = 0) -> None:
        place = self.place
        offset = item * ROWS * place.fields[field].size
        place.b.store(value, pointer(place.b, place.address(field), offset, value.type), align=1)

    def copy(self, offset: int, field: int, kind: Any = I16) -> None:
        self.put(self.get(I64(offset), kind), field)

    def words(self, offset: Value, count: int) -> list[Value]:
        return [self.get(self.place.b.add(offset, I64(4 * t))) for t in range(count)]

    def put_nibbles(self, words: list[Value]) -> None:
        """Eight words of nibbles, one in each byte."""
        b = self.place.b
        for t in range(4):
            self.put(b.or_(words[t], b.shl(words[t + 4], I32(4))), 0, t)


def _q4(move: _Move, scales: int, fifth: bool) -> None:
    """Q4_0, Q4_1, Q5_0, Q5_1: scales, fifth bits, nibbles in packed order."""
    start = 2 * scales
    if fifth:
        move.put(_fifth_word(move.place.b, move.get(I64(start))), 1)
        start += 4
    for t, word in enumerate(move.words(I64(start), 4)):
        move.put(word, 0, t)
    for i in range(scales):
        move.copy(2 * i, 1 + fifth + i)


def _fifth_word(b: Builder, bits: Value) -> Value:
    """Bit 4t + j to bit t of byte j."""
    word = I32(0)
    for t in range(8):
        four = b.and_(b.lshr(bits, I32(4 * t)), I32(15))
        spread = b.and_(b.mul(four, I32(0x00204081)), I32(0x01010101))
        word = b.or_(word, b.shl(spread, I32(t)))
    return word


def _q8(move: _Move) -> None:
    for t, word in enumerate(move.words(I64(2), 8)):
        move.put(move.place.b.xor(word, I32(0x80808080 - 2**32)), 0, t)
    move.copy(0, 1)


def _k(move: _Move, fifth: bool) -> None:
    """Q4_K and Q5_K: two factors, twelve bytes of scales, fifth bits, nibbles of two groups."""
    b = move.place.b
    sub32 = b.trunc(move.sub, I32)
    start = 16
    if fifth:
        word = I32(0)
        for t, bits in enumerate(move.words(I64(start), 8)):
            one = b.and_(b.lshr(bits, sub32), I32(0x01010101))
            word = b.or_(word, b.shl(one, I32(t)))
        move.put(word, 1)
        start += 32
    shift = b.shl(b.and_(sub32, I32(1)), I32(2))
    pair = b.add(b.mul(b.lshr(move.sub, I64(1)), I64(32)), I64(start))
    move.put_nibbles([b.and_(b.lshr(word, shift), I32(0x0F0F0F0F)) for word in move.words(pair, 8)])
    first, second, nibbles = (
        b.zext(move.get(b.add(b.and_(move.sub, I64(3)), I64(4 + 4 * i)), I8), I32) for i in range(3)
    )
    in_low_half = b.icmp_unsigned("<", move.sub, I64(4))

    def six_bits(whole: Value, four: Value) -> Value:
        two = b.shl(b.lshr(whole, I32(6)), I32(4))
        return b.select(in_low_half, b.and_(whole, I32(63)), b.or_(b.and_(four, I32(15)), two))

    scale, minimum = six_bits(first, nibbles), six_bits(second, b.lshr(nibbles, I32(4)))
    index = 1 + fifth
    low = b.or_(b.and_(scale, I32(15)), b.shl(b.and_(minimum, I32(15)), I32(4)))
    move.put(b.trunc(low, I8), index)
    high = b.or_(b.lshr(scale, I32(4)), b.shl(b.lshr(minimum, I32(4)), I32(2)))
    address = pointer(b, move.place.address(index + 1), 0, I8)
    b.store(b.or_(b.load(address), b.trunc(b.shl(high, shift), I8)), address)
    move.copy(0, index + 2)
    move.copy(2, index + 3)


def _q6_k(move: _Move) -> None:
    """Two halves of four groups: 64 bytes of nibbles and 32 of the bits above them for each half,
    then scales and the factor."""
    b = move.place.b
    half, quarter = b.lshr(move.sub, I64(2)), b.and_(move.sub, I64(3))
    low = b.add(b.mul(half, I64(64)), b.mul(b.and_(quarter, I64(1)), I64(32)))
    shift = b.trunc(b.shl(b.lshr(quarter, I64(1)), I64(2)), I32)
    move.put_nibbles([b.and_(b.lshr(word, shift), I32(0x0F0F0F0F)) for word in move.words(low, 8)])
    high = b.add(b.mul(half, I64(32)), I64(128))
    shift = b.trunc(b.shl(quarter, I64(1)), I32)
    twos = [b.and_(b.lshr(word, shift), I32(0x03030303)) for word in move.words(high, 8)]
    for h in range(2):
        parts = [b.shl(two, I32(2 * i)) for i, two in enumerate(twos[4 * h : 4 * h + 4])]
        move.put(tree(b.or_, parts), 1, h)
    for h in range(2):
        move.put(move.get(b.add(b.mul(move.sub, I64(2)), I64(192 + h)), I8), 2, h)
    move.copy(208, 3)


_MOVES = {
    "Q4_0": lambda move: _q4(move, 1, False),
    "Q4_1": lambda move: _q4(move, 2, False),
    "Q5_0": lambda move: _q4(move, 1, True),
    "Q5_1": lambda move: _q4(move, 2, True),
    "Q8_0": _q8,
    "Q4_K": lambda move: _k(move, False),
    "Q5_K": lambda move: _k(move, True),
    "Q6_K": _q6_k,
}


@intrinsic(prefer_literal=True)
def pack_row(typing, kind, source, block, row, num_columns):
    """One row, from its address in a file, to its place in a block. ``kind``: the file's format,
    and the packed one."""
    before, after = kind.literal_value.split()

    def emit(context, b, signature, arguments):
        _, source, block, row, num_columns = arguments
        if after in FLOAT_BYTES:
            _copy_row(b, ir.IntType(8 * FLOAT_BYTES[after]), source, block, row, num_columns)
        elif after == "INT8":
            _quantize_row(b, before, source, block, row, num_columns)
        else:
            layout, fields = FILE_FORMATS[before], FORMATS[after].fields
            groups = I64(layout.block_size // GROUP)
            num_groups = b.udiv(num_columns, I64(GROUP))
            with loop(b, I64(0), num_groups) as group:
                start = b.mul(b.udiv(group, groups), I64(layout.block_bytes))
                place = Place(b, fields, block, num_groups, group, row)
                _MOVES[before](_Move(b.add(source, start), b.urem(group, groups), place))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), emit


def _copy_row(b, kind, source, block, row, num_columns):
    size = I64(kind.width // 8)
    with loop(b, I64(0), num_columns) as column:
        number = b.load(pointer(b, b.add(source, b.mul(column, size)), 0, kind), align=1)
        index = b.add(b.mul(column, I64(ROWS)), row)
        b.store(number, pointer(b, b.add(block, b.mul(index, size)), 0, kind))


def _quantize_row(b, format, source, block, row, num_columns):
    """scale = largest magnitude / 127, of 20 bits (see ``cpu_product``), rounded up so that none
    is beyond 127."""
    place = Place(b, FORMATS["INT8"].fields, block, b.udiv(num_columns, I64(GROUP)), I64(0), row)
    ints = vector(I32, LANES)

    def numbers(column):
        address = b.add(source, b.mul(column, I64(FLOAT_BYTES[format])))
        return load_floats(b, format, False, address, 0, LANES)

    largest = variable(b, zeros(LANES))
    with loop(b, I64(0), num_columns, step=LANES) as column:
        magnitude = call(b, f"llvm.fabs.v{LANES}f32", numbers(column))
        b.store(call(b, f"llvm.maximum.v{LANES}f32", b.load(largest), magnitude), largest)
    scale = b.fdiv(reduce_max(b, b.load(largest)), F32(127))
    scale = b.bitcast(b.and_(b.add(b.bitcast(scale, I32), I32(15)), I32(-16)), F32)
    b.store(scale, pointer(b, place.address(1), 0, F32))
    is_zero = b.fcmp_ordered("==", scale, F32(0))
    divisor = broadcast(b, b.select(is_zero, F32(1), scale), LANES)
    with loop(b, I64(0), num_columns, step=LANES) as column:
        rounded = call(b, f"llvm.rint.v{LANES}f32", b.fdiv(numbers(column), divisor))
        biased = b.add(b.fptosi(rounded, ints), fill(I32, 128, LANES))
        words = b.bitcast(b.trunc(biased, vector(I8, LANES)), vector(I32, LANES // 4))
        for t in range(LANES // 4):
            word = b.add(b.udiv(column, I64(4)), I64(t))
            index = b.add(b.mul(word, I64(ROWS)), row)
            address = b.add(block, b.mul(index, I64(4)))
            b.store(b.extract_element(words, I32(t)), pointer(b, address, 0, I32))


@cache
def pack_op(before: str, after: str) -> Op:
    kind = f"{before} {after}"

    @op(sources="i8", target="i8", block_bytes="i8", num_blocks="i8", columns="i8")
    def pack(thread, num_threads, counter, args):
        """``sources``: addresses of the packed rows in the file, int64, 0 for a row of padding."""
        a = carray(args, 1)[0]
        sources = int64s(a.sources, a.num_blocks * ROWS)
        while True:
            first = fetch_add(counter, AT_ONCE)
            if first >= a.num_blocks:
                return
            for block in range(first, min(first + AT_ONCE, a.num_blocks)):
                for row in range(ROWS):
                    source = sources[block * ROWS + row]
                    if source != 0:
                        address = a.target + block * a.block_bytes
                        pack_row(kind, source, address, row, a.columns)

    return pack
