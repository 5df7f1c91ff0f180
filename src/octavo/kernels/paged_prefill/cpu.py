"""Causal attention of rows with many query tokens, on a CPU: prompts, chunks, mixed batches.

The reference is ``split_attention/reference.causal_prefill``; ``kv_store/cpu.py`` says how keys and
values lie. A work item is a tile of query tokens for one KV head: some 100 rows, a row for each
token and head that reads it. It goes through the keys it sees in blocks: both are unpacked once, a
product makes the scores, softmax against the rows' running maxima the weights, and a second product
adds up the values. What a row gets depends on its sequence and its place in the step, and on
nothing beside it.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from llvmlite import ir

from octavo.kernels.attention_plan.cpu import plan_at
from octavo.kernels.jit import jit
from octavo.kernels.kv_store.cpu import TILE, tile_bytes
from octavo.kernels.late import carray, intrinsic, register_jitable, types
from octavo.kernels.paged_prefill.cpu_products import (
    AMX,
    TILE_PAIR,
    multiply_add,
    split_rows,
    store_split,
)
from octavo.kernels.program import Op, fetch_add, float32s, int32s, op, uint32s
from octavo.kernels.split_attention.cpu import copy_live
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
    larger,
    load,
    load_scalar,
    load_vector,
    loop,
    reduce_max,
    reduce_sum,
    soft_cap,
    store_scalar,
    store_vector,
    unpack,
    variable,
    vector,
    zeros,
)

ROWS = 96  # of a tile, about: what is unpacked once serves so many
KEY_BLOCK = 256  # tokens that are unpacked at once
SCORE_STRIDE = 4 * KEY_BLOCK + 64  # bytes: a column of scores doesn't fall on one set of the cache
PART = 32  # rows whose scores exist at once; all products are made for so many
ROWS_AT_ONCE = 4  # whose softmax goes side by side
LOWEST = -3e38  # where maxima begin; finite, so that a row may see nothing of a block


@register_jitable
def padded(number, step):
    return -(-number // step) * step


def query_tile(group: int) -> int:
    """Tokens of a tile."""
    return max(8, ROWS // group // 8 * 8)


def prefill_scratch_bytes(group: int, head_dim: int, v_head_dim: int, kv_bytes: int) -> int:
    """What a thread needs, see :func:`prefill_op`."""
    rows, width, v_width = _sizes(group, head_dim, v_head_dim)
    per_row, per_key = 4 * (2 * width + v_width + 2), 4 * (width + v_width + 2)
    part = PART * (SCORE_STRIDE + 4 * KEY_BLOCK)
    return rows * per_row + KEY_BLOCK * per_key + part + tile_bytes(v_head_dim, kv_bytes)


def _sizes(group: int, head_dim: int, v_head_dim: int) -> tuple[int, int, int]:
    """Rows of a tile, and the elements of keys and values, as many as the products work on."""
    return padded(query_tile(group) * group, PART), padded(head_dim, 32), padded(v_head_dim, 32)


@cache
def prefill_op(group: int, head_dim: int, v_head_dim: int, kv_bytes: int, room: int) -> Op:
    """The op for one shape of head; its sizes are constants to the compiler. ``room`` is the
    number of 16-lane sums that the registers hold beside what else they must, or AMX; that is for
    keys and values that are no float32s."""
    rows_at_most, width, v_width = _sizes(group, head_dim, v_head_dim)
    k_tile, v_tile = tile_bytes(head_dim, kv_bytes), tile_bytes(v_head_dim, kv_bytes)
    pack = 4 // kv_bytes
    row_bytes, v_row_bytes = 4 * width, 4 * v_width
    # Unpacked, a word is a float32, or for AMX a pair of bfloat16s.
    tiles_multiply = room == AMX
    unpacked_bytes = 2 if tiles_multiply else 4
    key_rows = width // 2 if tiles_multiply else head_dim
    k_column = 64 * key_rows
    value_rows = TILE // 2 if tiles_multiply else TILE
    q_stride = TILE_PAIR // 32 * width if tiles_multiply else row_bytes
    k_step = 64 * TILE if tiles_multiply else 64
    q_depth = width // 32 if tiles_multiply else head_dim
    w_stride = TILE_PAIR // 32 * KEY_BLOCK if tiles_multiply else SCORE_STRIDE
    v_step = TILE * v_row_bytes if tiles_multiply else v_row_bytes

    @op(
        plan="i8",
        q="i8",
        k_cache="i8",
        v_cache="i8",
        out="i8",
        lse="i8",
        sinks="i8",
        num_kv_heads="i8",
        block_size="i8",
        window="i8",
        scale="f4",
        soft_cap="f4",
    )
    def prefill(thread, num_threads, counter, args):
        """``q`` [T, H, D] -> ``out`` [T, H, Dv] and ``lse`` [T, H] (0: not wanted), float32, of the
        tokens in the plan's tiles; ``window``, ``soft_cap`` and ``sinks`` [H] 0 for none. An item
        is a tile for a KV head."""
        a = carray(args, 1)[0]
        plan = plan_at(a.plan)
        tiles = int32s(plan.tiles, (plan.num_tiles, 4))
        queries = plan.scratch + thread * plan.scratch_bytes
        scaled = queries + rows_at_most * row_bytes if tiles_multiply else queries
        outs = scaled + rows_at_most * row_bytes
        scores = outs + rows_at_most * v_row_bytes
        weights = scores + PART * SCORE_STRIDE
        keys = weights + PART * 4 * KEY_BLOCK
        values = keys + KEY_BLOCK * row_bytes
        m = values + KEY_BLOCK * v_row_bytes
        l = m + 4 * rows_at_most
        k_scales = l + 4 * rows_at_most
        v_scales = k_scales + 4 * KEY_BLOCK
        spare = v_scales + 4 * KEY_BLOCK
        while True:
            item = fetch_add(counter, 1)
            if item >= plan.num_tiles * a.num_kv_heads:
                return
            number, kv_head = item // a.num_kv_heads, item % a.num_kv_heads
            row, token = np.int64(tiles[number, 0]), np.int64(tiles[number, 1])
            count, position = np.int64(tiles[number, 2]), np.int64(tiles[number, 3])
            table = int32s(plan.block_table + 4 * row * plan.table_width, plan.table_width)
            rows = count * group
            gather_queries(a, token, count, kv_head, group, head_dim, width, scaled)
            if tiles_multiply:
                split_rows(scaled, queries, rows, width // 32, row_bytes, q_stride)
            begin_rows(outs, m, l, rows, v_width)
            stop = position + count
            oldest = max(0, position - a.window + 1) if a.window > 0 else 0
            for block in range(oldest // TILE * TILE, stop, KEY_BLOCK):
                num_keys = min(stop - block, KEY_BLOCK)
                for i in range(padded(num_keys, 32) // TILE):
                    here = block + TILE * i
                    k_target = keys + i * k_column
                    v_target = values + i * value_rows * v_row_bytes
                    if here >= stop:  # what makes their number even
                        uint32s(v_target, value_rows * v_width)[:] = 0
                        float32s(v_scales + 64 * i, TILE)[:] = 0
                        continue
                    tile = tile_at(here, table, kv_head, a)
                    key, value = a.k_cache + k_tile * tile, a.v_cache + v_tile * tile
                    if here < oldest or here + TILE > stop:
                        start, end = max(oldest - here, 0), min(stop - here, TILE)
                        copy_live(value, spare, start, end, v_head_dim, kv_bytes)
                        value = spare
                    unpack_tile(key, k_target, head_dim // pack, TILE, 64, kv_bytes, unpacked_bytes)
                    if tiles_multiply and width > head_dim:
                        unused = 64 * (head_dim // 2)
                        uint32s(k_target + unused, 16 * key_rows - unused // 4)[:] = 0
                    unpack_tile(
                        value,
                        v_target,
                        TILE // pack,
                        v_head_dim,
                        v_row_bytes,
                        kv_bytes,
                        unpacked_bytes,
                    )
                    if kv_bytes == 1:
                        copy_scales(key + TILE * head_dim, k_scales + 64 * i)
                        copy_scales(value + TILE * v_head_dim, v_scales + 64 * i)
                for first in range(0, rows, PART):
                    part = min(rows - first, PART)
                    newest = position + (first + part - 1) // group - block
                    columns = padded(min(newest + 1, num_keys), 32) // TILE
                    if columns <= 0:
                        continue
                    multiply_add(
                        queries + first // TILE * (TILE * row_bytes),
                        keys,
                        scores,
                        PART,
                        columns,
                        q_depth,
                        q_stride,
                        k_step,
                        k_column,
                        64,
                        SCORE_STRIDE,
                        1,
                        room,
                    )
                    if kv_bytes == 1:
                        multiply_rows(scores, k_scales, part, columns)
                    if a.soft_cap > 0:
                        cap_rows(scores, part, columns, a.soft_cap)
                    newest = position + first // group - block  # that the first row sees
                    if a.window > 0:
                        for i in range(part):
                            newest = position + (first + i) // group - block
                            hide(scores + i * SCORE_STRIDE, columns, newest, a.window)
                    elif newest < columns * TILE - 1:
                        seen = max(newest + 1, 0) // TILE
                        hide_newer(scores, part, seen, columns, position - block, first, group)
                    weigh_rows(
                        scores,
                        weights if tiles_multiply else scores,
                        v_scales,
                        columns,
                        m + 4 * first,
                        l + 4 * first,
                        outs + first * v_row_bytes,
                        v_width,
                        w_stride,
                        kv_bytes,
                        room,
                    )
                    multiply_add(
                        weights if tiles_multiply else scores,
                        values,
                        outs + first * v_row_bytes,
                        PART,
                        v_width // TILE,
                        columns // 2 if tiles_multiply else columns * TILE,
                        w_stride,
                        v_step,
                        64,
                        v_row_bytes,
                        v_row_bytes,
                        0,
                        room,
                    )
            finish_rows(a, token, count, kv_head, group, v_head_dim, v_width, outs, m, l)

    return prefill


@jit
def gather_queries(a, token, count, kv_head, group, head_dim, width, target):
    """The tile's queries, times the scale, as rows of ``width``: by token, then by head."""
    heads = a.num_kv_heads * group
    rows = float32s(target, (count * group, width))
    for i in range(count):
        first = (token + i) * heads + kv_head * group
        given = float32s(a.q + 4 * first * head_dim, (group, head_dim))
        for g in range(group):
            for d in range(head_dim):
                rows[i * group + g, d] = given[g, d] * a.scale
            rows[i * group + g, head_dim:] = 0


@jit
def begin_rows(outs, m, l, rows, width):
    float32s(outs, rows * width)[:] = 0
    float32s(m, rows)[:] = LOWEST
    float32s(l, rows)[:] = 0


@jit
def tile_at(position, table, kv_head, a):
    """The tile of the pool that holds a sequence's position."""
    tiles_of_block = a.block_size // TILE
    block = np.int64(table[position // a.block_size]) * a.num_kv_heads + kv_head
    return block * tiles_of_block + position % a.block_size // TILE


@jit
def copy_scales(source, target):
    scales, copied = float32s(source, TILE), float32s(target, TILE)
    for i in range(TILE):
        copied[i] = scales[i]


@jit
def hide(score, columns, newest, window):
    """Of a row that sees ``window`` keys up to number ``newest`` of the block, hide the others."""
    if newest < columns * TILE - 1:
        first = max(newest + 1, 0) // TILE
        keep(score + 64 * first, columns - first, 0, newest + 1 - TILE * first)
    if window > 0 and newest >= window:
        oldest = newest - window + 1
        keep(score, min(oldest // TILE + 1, columns), oldest, columns * TILE)


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
                score = b.select(shown, load(b, place, 0, TILE, 4), constant(-math.inf, TILE))
                store_vector(b, score, place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, group), emit


@jit
def finish_rows(a, token, count, kv_head, group, v_head_dim, v_width, outs, m, l):
    """Divide by the sums, a sink being one more key without a value."""
    heads = a.num_kv_heads * group
    rows = float32s(outs, (count * group, v_width))
    tops, sums = float32s(m, count * group), float32s(l, count * group)
    for i in range(count * group):
        place = (token + i // group) * heads + kv_head * group + i % group
        top, total, factor = tops[i], sums[i], np.float32(1)
        if a.sinks != 0:
            sink = float32s(a.sinks, heads)[kv_head * group + i % group]
            top = max(tops[i], sink)
            factor = np.float32(math.exp(tops[i] - top))
            total = sums[i] * factor + np.float32(math.exp(sink - top))
        out = float32s(a.out + 4 * place * v_head_dim, v_head_dim)
        factor /= total
        for d in range(v_head_dim):
            out[d] = rows[i, d] * factor
        if a.lse != 0:
            float32s(a.lse + 4 * place, 1)[0] = top + np.float32(math.log(total))


# Steps in LLVM's vector IR. Addresses and counts are int64; a row's ``columns`` are vectors of 16.


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
            score = b.select(shown, load(b, place, 0, TILE, 4), constant(-math.inf, TILE))
            store_vector(b, score, place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic(prefer_literal=True)
def weigh_rows(
    typing, scores, weights, v_scales, columns, m, l, outs, v_width, weight_stride, kv_bytes, room
):
    """From PART rows of scores to their weights ``exp(score - M)``, where ``M`` is the larger of a
    row's maximum and the running one in ``m``, which it replaces. Discounts the running sums in
    ``l``, to which the weights' are added, and the sums of values in ``outs`` [PART, v_width].

    Weights go where the second product wants them, int8 values' scales multiplied in. The columns
    are even in number."""

    def emit(context, b, signature, arguments):
        scores, weights, v_scales, columns, m, l, outs = arguments[:7]
        width, stride = v_width.literal_value, weight_stride.literal_value
        several = range(ROWS_AT_ONCE)
        with loop(b, I64(0), I64(PART), step=ROWS_AT_ONCE) as i:
            first = b.add(scores, b.mul(i, I64(SCORE_STRIDE)))
            places = [b.add(first, I64(SCORE_STRIDE * r)) for r in several]
            tops, sums = (b.add(x, b.mul(i, I64(4))) for x in (m, l))
            old = [load_scalar(b, tops, r) for r in several]
            highest = [variable(b, broadcast(b, x, TILE)) for x in old]
            with loop(b, I64(0), columns, step=2) as j:
                for place, top in zip(places, highest, strict=True):
                    here = b.add(place, b.mul(j, I64(64)))
                    pair = larger(b, load(b, here, 0, TILE, 4), load(b, here, TILE, TILE, 4))
                    b.store(larger(b, pair, b.load(top)), top)
            top = [reduce_max(b, b.load(x)) for x in highest]
            lanes = [broadcast(b, x, TILE) for x in top]
            totals = [variable(b, zeros(TILE)) for _ in several]
            if room.literal_value == AMX:
                block = b.mul(b.lshr(i, I64(4)), I64(stride))
                target = b.add(weights, b.add(block, b.mul(b.and_(i, I64(15)), I64(64))))
                targets, step = [b.add(target, I64(64 * r)) for r in several], TILE_PAIR
            else:
                targets, step = places, 128
            with loop(b, I64(0), columns, step=2) as j:
                offset = b.mul(j, I64(64))
                scales = [load(b, b.add(v_scales, offset), d, TILE, 4) for d in (0, TILE)]
                for r in several:
                    here = b.add(places[r], offset)
                    found = [b.fsub(load(b, here, d, TILE, 4), lanes[r]) for d in (0, TILE)]
                    pair = [exp_below_88(b, x) for x in found]
                    b.store(b.fadd(b.load(totals[r]), b.fadd(*pair)), totals[r])
                    if kv_bytes.literal_value == 1:
                        pair = [b.fmul(w, scale) for w, scale in zip(pair, scales, strict=True)]
                    there = b.add(targets[r], b.mul(b.lshr(j, I64(1)), I64(step)))
                    if room.literal_value == AMX:
                        store_split(b, pair, there)
                    else:
                        for d, w in zip((0, TILE), pair, strict=True):
                            store_vector(b, w, there, d)
            for r in several:
                factor = exp_below_88(b, broadcast(b, b.fsub(old[r], top[r]), TILE))
                one = b.extract_element(factor, I32(0))
                before = b.fmul(load_scalar(b, sums, r), one)
                total = b.fadd(before, reduce_sum(b, b.load(totals[r])))
                store_scalar(b, top[r], b.add(tops, I64(4 * r)))
                store_scalar(b, total, b.add(sums, I64(4 * r)))
                out = b.add(outs, b.mul(b.add(i, I64(r)), I64(4 * width)))
                with b.if_then(b.fcmp_unordered("!=", one, ir.Constant(F32, 1.0))):
                    for d in range(0, width, TILE):
                        store_vector(b, b.fmul(load(b, out, d, TILE, 4), factor), out, d)
        return context.get_dummy_value()

    kinds = (scores, weights, v_scales, columns, m, l, outs)
    return types.void(*kinds, v_width, weight_stride, kv_bytes, room), emit


@intrinsic
def cap_rows(typing, scores, rows, columns, cap):
    """Replace scores ``s`` by ``cap * tanh(s / cap)``."""

    def emit(context, b, signature, arguments):
        scores, rows, columns, cap = arguments
        with loop(b, I64(0), rows) as i, loop(b, I64(0), columns) as j:
            place = _score(b, scores, i, j)
            store_vector(b, soft_cap(b, load(b, place, 0, TILE, 4), cap), place, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), emit


@intrinsic
def multiply_rows(typing, scores, factors, rows, columns):
    """Multiply every row by the same row of factors, element by element."""

    def emit(context, b, signature, arguments):
        scores, factors, rows, columns = arguments
        with loop(b, I64(0), columns) as j:
            factor = load(b, b.add(factors, b.mul(j, I64(64))), 0, TILE, 4)
            with loop(b, I64(0), rows) as i:
                place = _score(b, scores, i, j)
                store_vector(b, b.fmul(load(b, place, 0, TILE, 4), factor), place, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def _score(b: Builder, scores: Value, row: Value, column: Value) -> Value:
    return b.add(scores, b.add(b.mul(row, I64(SCORE_STRIDE)), b.mul(column, I64(64))))
