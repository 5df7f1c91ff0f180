"""The steps of prefill's attention on a CPU on some rows of scores, in LLVM's vector IR.

Addresses and counts are int64; a row's ``columns`` are vectors of 16 float32s. Scores lie [row,
key], ``SCORE_STRIDE`` bytes a row.
"""

from __future__ import annotations

import math

from llvmlite import ir

from octavo.kernels.kv_store.cpu import TILE
from octavo.kernels.late import intrinsic, types
from octavo.kernels.paged_prefill.cpu_products import (
    AMX,
    PAIRS,
    TILE_PAIR,
    rounded_pairs,
    store_split,
)
from octavo.kernels.vector_ir import (
    F32,
    I32,
    I64,
    Builder,
    Value,
    broadcast,
    constant,
    exp_below_88,
    fill,
    fma,
    larger,
    load,
    load_scalar,
    load_vector,
    loop,
    reduce_max,
    reduce_sum,
    rough_power_of_two,
    soft_cap,
    store_scalar,
    store_vector,
    unpack,
    variable,
    vector,
    zeros,
)

KEY_BLOCK = 256  # tokens that are unpacked at once
SCORE_STRIDE = 4 * KEY_BLOCK + 64  # bytes: a column of scores doesn't fall on one set of the cache
PART = 32  # rows whose scores exist at once; all products are made for so many
ROWS_AT_ONCE = 4  # whose softmax goes side by side
LOG2_E = 1 / math.log(2)


@intrinsic(prefer_literal=True)
def unpack_tile(typing, source, target, rows, width, target_stride, kv_bytes, unpacked_bytes):
    """Unpack ``rows`` of ``width`` packed words to rows, ``target_stride`` bytes apart, of words
    that pack fewer: float32s, or pairs of bfloat16s."""

    def emit(context, b, signature, arguments):
        source, target, rows = arguments[:3]
        words, stride = width.literal_value, target_stride.literal_value
        size, wanted = kv_bytes.literal_value, unpacked_bytes.literal_value
        with loop(b, I64(0), rows) as i:
            line = b.add(source, b.mul(i, I64(4 * words)))
            place = b.add(target, b.mul(i, I64(stride * wanted // size)))
            for d in range(0, words, TILE):
                lanes = min(TILE, words - d)
                kind = vector(I32, lanes)
                packed = load_vector(b, line, 4 * d, kind)
                if wanted == size:
                    unpacked = [packed]
                elif wanted == 4:
                    unpacked = unpack(b, packed, size)
                else:  # int8s are exact as bfloat16s
                    floats = [b.bitcast(x, kind) for x in unpack(b, packed, size)]
                    sixteen = fill(I32, 16, lanes)
                    unpacked = [
                        b.or_(b.lshr(low, sixteen), high)
                        for low, high in zip(floats[::2], floats[1::2], strict=True)
                    ]
                for j, x in enumerate(unpacked):
                    store_vector(b, x, place, stride // 4 * j + d)
        return context.get_dummy_value()

    kinds = (source, target, rows)
    return types.void(*kinds, width, target_stride, kv_bytes, unpacked_bytes), emit


@intrinsic(prefer_literal=True)
def scale_row(typing, source, target, width, factor):
    """``width`` float32s times a factor. (numba's loop would go number by number.)"""

    def emit(context, b, signature, arguments):
        source, target, _, factor = arguments
        for d in range(0, width.literal_value, TILE):
            lanes = min(TILE, width.literal_value - d)
            numbers = load(b, source, d, lanes)
            store_vector(b, b.fmul(numbers, broadcast(b, factor, lanes)), target, d)
        return context.get_dummy_value()

    return types.void(source, target, width, types.float32), emit


@intrinsic
def keep(typing, scores, columns, start, stop):
    """Make all scores of a row -inf but for ``start : stop``, of vectors of which there are
    ``columns``."""

    def emit(context, b, signature, arguments):
        scores, columns, start, stop = arguments
        words = vector(I32, TILE)
        first, last = (broadcast(b, b.trunc(x, I32), TILE) for x in (start, stop))
        with loop(b, I64(0), columns) as j:
            place = b.add(scores, b.mul(j, I64(64)))
            number = broadcast(b, b.trunc(b.mul(j, I64(TILE)), I32), TILE)
            number = b.add(number, ir.Constant(words, list(range(TILE))))
            shown = b.and_(b.icmp_signed(">=", number, first), b.icmp_signed("<", number, last))
            score = b.select(shown, load(b, place, 0, TILE), constant(-math.inf, TILE))
            store_vector(b, score, place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic(prefer_literal=True)
def hide_newer(typing, scores, rows, start, stop, newest, first, group):
    """Of some rows hide the keys that are newer than a row's token. Vectors ``start`` to ``stop``
    are looked at; number 0 of all rows sees keys up to ``newest``, every ``group`` rows one more;
    ``first`` is the number of the first row here."""

    def emit(context, b, signature, arguments):
        scores, rows, start, stop, newest, first, _ = arguments
        lanes = ir.Constant(vector(I32, TILE), list(range(TILE)))
        with loop(b, I64(0), rows) as i:
            token = b.udiv(b.add(first, i), I64(group.literal_value))
            limit = broadcast(b, b.trunc(b.add(newest, token), I32), TILE)
            with loop(b, start, stop) as j:
                place = _score(b, scores, i, j)
                number = broadcast(b, b.trunc(b.mul(j, I64(TILE)), I32), TILE)
                shown = b.icmp_signed("<=", b.add(number, lanes), limit)
                score = b.select(shown, load(b, place, 0, TILE), constant(-math.inf, TILE))
                store_vector(b, score, place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, group), emit


@intrinsic(prefer_literal=True)
def weigh_rows(
    typing,
    scores,
    weights,
    v_scales,
    columns,
    factor,
    m,
    l,
    outs,
    v_width,
    weight_stride,
    kv_bytes,
    room,
):
    """From PART rows of scores to their weights ``exp(factor * score - M)``, where ``M`` is the
    larger of a row's maximum and the running one in ``m``, which it replaces. Discounts the running
    sums in ``l``, to which the weights' are added, and the sums of values in ``outs``
    [PART, v_width].

    Weights go where the second product wants them, int8 values' scales multiplied in, as PAIRS
    rounded to bfloat16; the sums are of what they are before. The columns are even in number."""

    def emit(context, b, signature, arguments):
        scores, weights, v_scales, columns, factor, m, l, outs = arguments[:8]
        width, stride = v_width.literal_value, weight_stride.literal_value
        several = range(ROWS_AT_ONCE)
        is_rough = room.literal_value == PAIRS
        unit = LOG2_E if is_rough else 1.0
        rate = broadcast(b, b.fmul(factor, F32(unit)), TILE)
        with loop(b, I64(0), I64(PART), step=ROWS_AT_ONCE) as i:
            first = b.add(scores, b.mul(i, I64(SCORE_STRIDE)))
            places = [b.add(first, I64(SCORE_STRIDE * r)) for r in several]
            tops, sums = (b.add(x, b.mul(i, I64(4))) for x in (m, l))
            old = [load_scalar(b, tops, r) for r in several]
            highest = [variable(b, constant(-math.inf, TILE)) for _ in several]
            with loop(b, I64(0), columns, step=2) as j:
                for place, top in zip(places, highest, strict=True):
                    here = b.add(place, b.mul(j, I64(64)))
                    pair = larger(b, load(b, here, 0, TILE), load(b, here, TILE, TILE))
                    b.store(larger(b, pair, b.load(top)), top)
            top = [
                larger(b, b.fmul(reduce_max(b, b.load(x)), factor), before)
                for x, before in zip(highest, old, strict=True)
            ]
            lanes = [broadcast(b, b.fmul(x, F32(-unit)), TILE) for x in top]
            totals = [variable(b, zeros(TILE)) for _ in several]
            if room.literal_value == AMX:
                block = b.mul(b.lshr(i, I64(4)), I64(stride))
                target = b.add(weights, b.add(block, b.mul(b.and_(i, I64(15)), I64(64))))
                targets, step = [b.add(target, I64(64 * r)) for r in several], TILE_PAIR
            else:
                targets, step = places, 64 if is_rough else 128
            with loop(b, I64(0), columns, step=2) as j:
                offset = b.mul(j, I64(64))
                scales = [load(b, b.add(v_scales, offset), d, TILE) for d in (0, TILE)]
                for r in several:
                    here = b.add(places[r], offset)
                    pair = [load(b, here, d, TILE) for d in (0, TILE)]
                    power = rough_power_of_two if is_rough else exp_below_88
                    pair = [power(b, fma(b, x, rate, lanes[r])) for x in pair]
                    b.store(b.fadd(b.load(totals[r]), b.fadd(*pair)), totals[r])
                    if kv_bytes.literal_value == 1:
                        pair = [b.fmul(w, scale) for w, scale in zip(pair, scales, strict=True)]
                    there = b.add(targets[r], b.mul(b.lshr(j, I64(1)), I64(step)))
                    if room.literal_value == AMX:
                        store_split(b, pair, there)
                    elif is_rough:
                        store_vector(b, rounded_pairs(b, *pair), there, 0)
                    else:
                        for d, w in zip((0, TILE), pair, strict=True):
                            store_vector(b, w, there, d)
            for r in several:
                discount = exp_below_88(b, broadcast(b, b.fsub(old[r], top[r]), TILE))
                one = b.extract_element(discount, I32(0))
                before = b.fmul(load_scalar(b, sums, r), one)
                total = b.fadd(before, reduce_sum(b, b.load(totals[r])))
                store_scalar(b, top[r], b.add(tops, I64(4 * r)))
                store_scalar(b, total, b.add(sums, I64(4 * r)))
                out = b.add(outs, b.mul(b.add(i, I64(r)), I64(4 * width)))
                with b.if_then(b.fcmp_unordered("!=", one, ir.Constant(F32, 1.0))):
                    for d in range(0, width, TILE):
                        store_vector(b, b.fmul(load(b, out, d, TILE), discount), out, d)
        return context.get_dummy_value()

    kinds = (scores, weights, v_scales, columns, factor, m, l, outs)
    return types.void(*kinds, v_width, weight_stride, kv_bytes, room), emit


@intrinsic
def cap_rows(typing, scores, rows, columns, factor, cap):
    """Replace scores ``s`` by ``cap * tanh(factor * s / cap)``."""

    def emit(context, b, signature, arguments):
        scores, rows, columns, factor, cap = arguments
        factors = broadcast(b, factor, TILE)
        with loop(b, I64(0), rows) as i, loop(b, I64(0), columns) as j:
            place = _score(b, scores, i, j)
            scaled = b.fmul(load(b, place, 0, TILE), factors)
            store_vector(b, soft_cap(b, scaled, cap), place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.float32), emit


@intrinsic
def multiply_rows(typing, scores, factors, rows, columns):
    """Multiply every row by the same row of factors, element by element."""

    def emit(context, b, signature, arguments):
        scores, factors, rows, columns = arguments
        with loop(b, I64(0), columns) as j:
            factor = load(b, b.add(factors, b.mul(j, I64(64))), 0, TILE)
            with loop(b, I64(0), rows) as i:
                place = _score(b, scores, i, j)
                store_vector(b, b.fmul(load(b, place, 0, TILE), factor), place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def _score(b: Builder, scores: Value, row: Value, column: Value) -> Value:
    return b.add(scores, b.add(b.mul(row, I64(SCORE_STRIDE)), b.mul(column, I64(64))))
