"""Sums of products of unsigned weights and int8 activations, level by level.

Weights and activations come as 32-bit words of four columns; a word of weights is a vector, a lane
for each row, and a word of activations is the same in all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from octavo.kernels.vector_ir import I32, Builder, Value, call, fill, vector

I8, I16 = ir.IntType(8), ir.IntType(16)


@dataclass(frozen=True)
class Level:
    """``prepare(b, words, bits)`` makes of weights of so many bits what ``dot`` takes, once for
    many tokens; ``dot(b, weights, activations, bits, start)`` is ``start`` [lanes x i32] plus the
    sum of the products; where it ``accumulates``, a start costs nothing. ``fused``: a
    multiplication and an addition round once (FMA), and float16 is converted by the CPU.
    ``signed``: weights of 8 bits lose their offset of 128 in ``prepare``, otherwise it is taken off
    later. ``tiles``: 16 tokens and more go through ``cpu_amx``. ``together``: tokens whose sums are
    made at once, as many as leave the weights their registers."""

    lanes: int  # of a vector: 16, and two blocks are worked on together, or 8, half a block alone
    accumulates: bool
    fused: bool
    signed: bool
    tiles: bool
    together: int
    prepare: Callable[[Builder, Sequence[Value], int], list[Any]]
    dot: Callable[[Builder, Sequence[Any], Sequence[Value], int, Value], Value]


def _as_is(b: Builder, words: Sequence[Value], bits: int) -> list[Any]:
    return list(words)


def _dot_vnni(
    b: Builder, weights: Sequence[Any], activations: Sequence[Value], bits: int, start: Value
) -> Value:
    for w, x in zip(weights, activations, strict=True):
        start = call(b, f"llvm.x86.avx512.vpdpbusd.{32 * start.type.count}", start, w, x)
    return start


def _prepare_avx2(b: Builder, words: Sequence[Value], bits: int) -> list[Any]:
    """8-bit weights signed, and their magnitudes: vpmaddubsw adds up two products in 16 bits, of
    which 2 * 255 * 127 would be too large and 2 * 128 * 127 isn't."""
    if bits < 8:
        return list(words)
    kind = vector(I8, 32)
    signed = [b.bitcast(b.xor(word, fill(I32, 0x80808080, 8)), kind) for word in words]
    return [(s, call(b, "llvm.abs.v32i8", s, ir.Constant(ir.IntType(1), 0))) for s in signed]


def _dot_avx2(
    b: Builder, weights: Sequence[Any], activations: Sequence[Value], bits: int, start: Value
) -> Value:
    bytes_, pairs = vector(I8, 32), vector(I16, 16)
    sums = []
    for w, x in zip(weights, activations, strict=True):
        x = b.bitcast(x, bytes_)
        if bits == 8:
            signed, w = w
            x = call(b, "llvm.x86.avx2.psign.b", x, signed)
        sums.append(call(b, "llvm.x86.avx2.pmadd.ub.sw", b.bitcast(w, bytes_), x, returns=pairs))
    # So many sums of two products fit into 16 bits: 8 of 2 * 15 * 127, 4 of 2 * 31 * 127, ...
    together = 2 ** max(0, 7 - bits)
    for i in range(0, len(sums), together):
        total = sums[i]
        for more in sums[i + 1 : i + together]:
            total = b.add(total, more)
        four = call(b, "llvm.x86.avx2.pmadd.wd", total, fill(I16, 1, 16), returns=vector(I32, 8))
        start = b.add(start, four)
    return start


def _dot_plain(
    b: Builder, weights: Sequence[Any], activations: Sequence[Value], bits: int, start: Value
) -> Value:
    """Bytes of even and odd columns widened to 16 bits, in which a product fits."""
    lanes = start.type.count
    half, word = vector(I16, 2 * lanes), vector(I32, lanes)
    eight, sixteen = fill(I16, 8, 2 * lanes), fill(I32, 16, lanes)
    for w, x in zip(weights, activations, strict=True):
        w, x = b.bitcast(w, half), b.bitcast(x, half)
        even = b.mul(b.and_(w, fill(I16, 0xFF, 2 * lanes)), b.ashr(b.shl(x, eight), eight))
        odd = b.mul(b.lshr(w, eight), b.ashr(x, eight))
        for products in (b.bitcast(even, word), b.bitcast(odd, word)):
            start = b.add(start, b.ashr(b.shl(products, sixteen), sixteen))
            start = b.add(start, b.ashr(products, sixteen))
    return start


LEVELS = {
    "amx": Level(16, True, True, False, True, 4, _as_is, _dot_vnni),
    "vnni": Level(16, True, True, False, False, 4, _as_is, _dot_vnni),
    "avxvnni": Level(8, True, True, False, False, 2, _as_is, _dot_vnni),
    "avx2": Level(8, False, True, True, False, 1, _prepare_avx2, _dot_avx2),
    "plain": Level(8, False, False, False, False, 1, _as_is, _dot_plain),
}
