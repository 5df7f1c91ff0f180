"""How each weight format lies in packed blocks, and how it is unpacked in registers.

A block is 16 rows, as *spans* of 1 or 8 groups of 32 columns, so that a block is read as one
stream. A span is *fields* one after another, each an array ``[entry][item][16 rows]``; an entry
serves 1, 2 or 8 groups, or, behind the last span, all of them. The first field holds the weights;
what is said here of a 32-bit word of four weights is for one row, so a vector of words is the same
for a vector of rows:

- ``nibbles``, four words a group: byte j of word t is column 4t + j in its low half and column
  16 + 4t + j in its high half. Q4_0 and Q4_1 have them in this order in the file.
- ``bytes``, eight words a group: byte j of word t is column 4t + j, plus 128.
- ``fifth``, a word a group: bit t of byte j is the fifth bit of column 4t + j.
- ``top``, two words a group: bits 2i and 2i + 1 of byte j of word h are the two highest bits of
  column 16h + 4i + j.
- ``low`` and ``high`` (Q4_K, Q5_K), a byte a group and one for two groups: four low bits of the
  scale, then of the minimum; two high bits of either for the even group, then for the odd one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from octavo.kernels.vector_ir import (
    F32,
    I32,
    I64,
    Builder,
    Value,
    broadcast,
    fill,
    load_vector,
    vector,
)

ROWS = 16  # of a block
GROUP = 32  # columns


@dataclass(frozen=True)
class Field:
    """``items`` numbers of ``size`` bytes for each row, for every ``groups`` groups of columns
    (0: for all of them)."""

    items: int
    size: int
    groups: int = 1

    @property
    def nbytes(self) -> int:
        return ROWS * self.items * self.size


def span_groups(fields: Sequence[Field]) -> int:
    """Groups of a span: as many as the field that serves most of them."""
    return max(1, *(field.groups for field in fields))


def span_bytes(fields: Sequence[Field]) -> int:
    """Bytes of a span's fields."""
    span = span_groups(fields)
    return sum(f.nbytes * (span // f.groups) for f in fields if f.groups)


@dataclass(frozen=True)
class Place:
    """A row in one group of a packed block, as code is emitted for it."""

    b: Builder
    fields: tuple[Field, ...]
    block: Value  # address
    num_groups: Value
    group: Value
    row: Value

    def address(self, index: int) -> Value:
        """Of the row's first item of a field."""
        b, field = self.b, self.fields[index]
        span = span_groups(self.fields)
        spans = b.udiv(self.group if field.groups else self.num_groups, I64(span))
        address = b.add(self.block, b.mul(spans, I64(span_bytes(self.fields))))
        if field.groups:
            before = sum(f.nbytes * (span // f.groups) for f in self.fields[:index])
            entry = b.udiv(b.urem(self.group, I64(span)), I64(field.groups))
            address = b.add(address, b.add(I64(before), b.mul(entry, I64(field.nbytes))))
        return b.add(address, b.mul(self.row, I64(field.size)))


@dataclass(frozen=True)
class View(Place):
    """``lanes`` rows from ``row`` on."""

    lanes: int
    native_half: bool  # the CPU converts float16

    def field(self, index: int, item: int = 0) -> Value:
        """An item of a field: <lanes x i8, i16 or i32>."""
        size = self.fields[index].size
        kind = vector(ir.IntType(8 * size), self.lanes)
        return load_vector(self.b, self.address(index), item * ROWS * size, kind)

    def word(self, index: int, item: int = 0) -> Value:
        """An item of a field, zero-extended to <lanes x i32>."""
        return self.b.zext(self.field(index, item), vector(I32, self.lanes))

    def half(self, index: int) -> Value:
        """A float16 field as float32."""
        b, lanes = self.b, self.lanes
        if self.native_half:
            halves = b.bitcast(self.field(index), vector(ir.HalfType(), lanes))
            return b.fpext(halves, vector(F32, lanes))
        return half_bits(b, self.word(index), lanes)

    def int(self, value: int) -> Value:
        return fill(I32, value, self.lanes)

    def float(self, word: Value) -> Value:
        """<lanes x i32> as float32."""
        return self.b.sitofp(word, vector(F32, self.lanes))


def half_bits(b: Builder, word: Value, lanes: int) -> Value:
    """The bits of finite float16 numbers, in i32, as float32: shifted to their place, the exponent
    put right by a multiplication, which makes denormal numbers normal, too."""
    magnitude = b.shl(b.and_(word, fill(I32, 0x7FFF, lanes)), fill(I32, 13, lanes))
    sign = b.shl(b.and_(word, fill(I32, 0x8000, lanes)), fill(I32, 16, lanes))
    number = b.fmul(b.bitcast(magnitude, vector(F32, lanes)), fill(F32, 2.0**112, lanes))
    return b.bitcast(b.or_(b.bitcast(number, vector(I32, lanes)), sign), vector(F32, lanes))


def load_floats(
    b: Builder, format: str, native_half: bool, address: Value, offset: int, lanes: int
) -> Value:
    """``lanes`` numbers of F32, F16 or BF16 side by side, as float32."""
    floats, words = vector(F32, lanes), vector(I32, lanes)
    if format == "F32":
        return load_vector(b, address, offset, floats)
    if format == "F16" and native_half:
        return b.fpext(load_vector(b, address, offset, vector(ir.HalfType(), lanes)), floats)
    word = b.zext(load_vector(b, address, offset, vector(ir.IntType(16), lanes)), words)
    if format == "F16":
        return half_bits(b, word, lanes)
    return b.bitcast(b.shl(word, fill(I32, 16, lanes)), floats)


@dataclass(frozen=True)
class Scales:
    """weight = scale * (q - offset) + minimum. ``scale``: one for the group, or one for either half
    of it; at most 21 significant bits (see ``cpu_product``)."""

    scale: tuple[Value, ...]
    minimum: Value | None = None


@dataclass(frozen=True)
class PackedFormat:
    """``words``: the group's weights q, unsigned, as eight words of four columns."""

    fields: tuple[Field, ...]
    bits: int  # of q
    offset: int
    num_parts: int  # of a group, each with a scale
    words: Callable[[View], list[Value]]
    scales: Callable[[View], Scales]

    def block_bytes(self, columns: int) -> int:
        """Bytes of a packed block of 16 rows."""
        spans = columns // GROUP // span_groups(self.fields)
        rest = sum(field.nbytes for field in self.fields if not field.groups)
        return -(-(spans * span_bytes(self.fields) + rest) // 64) * 64


def _nibbles(view: View) -> list[Value]:
    b = view.b
    words = [view.field(0, t) for t in range(4)]
    low = [b.and_(word, view.int(0x0F0F0F0F)) for word in words]
    high = [b.and_(b.lshr(word, view.int(4)), view.int(0x0F0F0F0F)) for word in words]
    return low + high


def _bytes(view: View) -> list[Value]:
    return [view.field(0, t) for t in range(8)]


def _nibbles_and_fifth(view: View) -> list[Value]:
    b, fifth, words = view.b, view.field(1), _nibbles(view)
    for t in range(8):
        bits = b.shl(fifth, view.int(4 - t)) if t < 4 else b.lshr(fifth, view.int(t - 4))
        words[t] = b.or_(words[t], b.and_(bits, view.int(0x10101010)))
    return words


def _nibbles_and_top(view: View) -> list[Value]:
    b, words = view.b, _nibbles(view)
    for h in range(2):
        top = view.field(1, h)
        for i in range(4):
            bits = b.shl(top, view.int(4 - 2 * i)) if i < 2 else b.lshr(top, view.int(2 * i - 4))
            words[4 * h + i] = b.or_(words[4 * h + i], b.and_(bits, view.int(0x30303030)))
    return words


def _one_scale(index: int) -> Callable[[View], Scales]:
    return lambda view: Scales((view.half(index),))


def _scale_and_minimum(index: int) -> Callable[[View], Scales]:
    return lambda view: Scales((view.half(index),), view.half(index + 1))


def _row_scale(view: View) -> Scales:
    return Scales((view.b.bitcast(view.field(1), vector(F32, view.lanes)),))


def _k_scales(index: int) -> Callable[[View], Scales]:
    """Six bits each for scale and minimum, times two factors for eight groups."""

    def scales(view: View) -> Scales:
        b = view.b
        low, high = view.word(index), view.word(index + 1)
        odd = b.trunc(b.and_(view.group, I64(1)), I32)
        high = b.lshr(high, broadcast(b, b.mul(odd, I32(4)), view.lanes))

        def six_bits(low: Value, high: Value) -> Value:
            top = b.shl(b.and_(high, view.int(3)), view.int(4))
            return view.float(b.or_(b.and_(low, view.int(15)), top))

        scale = six_bits(low, high)
        minimum = six_bits(b.lshr(low, view.int(4)), b.lshr(high, view.int(2)))
        return Scales(
            (b.fmul(scale, view.half(index + 2)),),
            b.fneg(b.fmul(minimum, view.half(index + 3))),
        )

    return scales


def _q6_k_scales(view: View) -> Scales:
    b, factor = view.b, view.half(3)
    signed = [b.sext(view.field(2, half), vector(I32, view.lanes)) for half in range(2)]
    return Scales(tuple(b.fmul(view.float(scale), factor) for scale in signed))


_NIBBLES, _BYTES, _FIFTH, _TOP = Field(4, 4), Field(8, 4), Field(1, 4), Field(2, 4)
_HALF = Field(1, 2)
_K_SCALES = (Field(1, 1), Field(1, 1, 2), Field(1, 2, 8), Field(1, 2, 8))

FORMATS = {
    "Q4_0": PackedFormat((_NIBBLES, _HALF), 4, 8, 1, _nibbles, _one_scale(1)),
    "Q4_1": PackedFormat((_NIBBLES, _HALF, _HALF), 4, 0, 1, _nibbles, _scale_and_minimum(1)),
    "Q5_0": PackedFormat((_NIBBLES, _FIFTH, _HALF), 5, 16, 1, _nibbles_and_fifth, _one_scale(2)),
    "Q5_1": PackedFormat(
        (_NIBBLES, _FIFTH, _HALF, _HALF), 5, 0, 1, _nibbles_and_fifth, _scale_and_minimum(2)
    ),
    "Q8_0": PackedFormat((_BYTES, _HALF), 8, 128, 1, _bytes, _one_scale(1)),
    "Q4_K": PackedFormat((_NIBBLES, *_K_SCALES), 4, 0, 1, _nibbles, _k_scales(1)),
    "Q5_K": PackedFormat((_NIBBLES, _FIFTH, *_K_SCALES), 5, 0, 1, _nibbles_and_fifth, _k_scales(2)),
    "Q6_K": PackedFormat(
        (_NIBBLES, _TOP, Field(2, 1), Field(1, 2, 8)), 6, 32, 2, _nibbles_and_top, _q6_k_scales
    ),
    "INT8": PackedFormat((_BYTES, Field(1, 4, 0)), 8, 128, 1, _bytes, _row_scale),
}
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # blocks [K][16 rows] of these
