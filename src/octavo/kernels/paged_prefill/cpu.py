"""Causal attention of rows with many query tokens, on a CPU: prompts, chunks, mixed batches.

The reference is ``split_attention/reference.causal_prefill``; ``kv_store/cpu.py`` says how keys and
values lie. A work item is a tile of query tokens for one KV head: some 200 rows, a row for each
token and head that reads it. It goes through the keys it sees in blocks: both are unpacked once, a
product makes the scores, softmax against the rows' running maxima the weights, and a second product
adds up the values. What a row gets depends on its sequence and its place in the step, and on
nothing beside it.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from octavo.kernels.attention_plan.cpu import plan_at
from octavo.kernels.jit import jit
from octavo.kernels.kv_store.cpu import TILE, tile_bytes
from octavo.kernels.late import carray, register_jitable
from octavo.kernels.paged_prefill.cpu_products import (
    AMX,
    PAIRS,
    TILE_PAIR,
    multiply_add,
    round_rows,
    split_rows,
)
from octavo.kernels.paged_prefill.cpu_rows import (
    KEY_BLOCK,
    PART,
    SCORE_STRIDE,
    cap_rows,
    hide_newer,
    keep,
    multiply_rows,
    scale_row,
    unpack_tile,
    weigh_rows,
)
from octavo.kernels.program import Op, fetch_add, float32s, int32s, op, uint32s
from octavo.kernels.split_attention.cpu import copy_live

ROWS = 192  # of a tile, about: what is unpacked once serves so many
LOWEST = -2e38  # where maxima begin; finite (times log2(e) too): a row may see nothing of a block


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
    number of 16-lane sums that the registers hold beside what else they must, or AMX or PAIRS, for
    keys and values that are no float32s."""
    rows_at_most, width, v_width = _sizes(group, head_dim, v_head_dim)
    k_tile, v_tile = tile_bytes(head_dim, kv_bytes), tile_bytes(v_head_dim, kv_bytes)
    pack = 4 // kv_bytes
    row_bytes, v_row_bytes = 4 * width, 4 * v_width
    # Unpacked, a word is a float32, or a pair of bfloat16s.
    tiles_multiply, pairs_multiply = room == AMX, room == PAIRS
    in_pairs = tiles_multiply or pairs_multiply
    unpacked_bytes = 2 if in_pairs else 4
    key_rows = width // 2 if tiles_multiply else head_dim * unpacked_bytes // 4
    k_column = 64 * key_rows
    value_rows = TILE * unpacked_bytes // 4
    q_stride, w_stride = row_bytes, SCORE_STRIDE
    q_depth = head_dim * unpacked_bytes // 4
    k_step, v_step = 64, v_row_bytes
    if tiles_multiply:
        q_stride, w_stride = TILE_PAIR // 32 * width, TILE_PAIR // 32 * KEY_BLOCK
        q_depth, k_step, v_step = width // 32, 64 * TILE, TILE * v_row_bytes

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
        gathered = queries + rows_at_most * row_bytes if in_pairs else queries
        outs = gathered + rows_at_most * row_bytes
        scores = outs + rows_at_most * v_row_bytes
        split = scores + PART * SCORE_STRIDE
        weights = split if tiles_multiply else scores
        keys = split + PART * 4 * KEY_BLOCK
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
            gather_queries(a, token, count, kv_head, group, head_dim, width, gathered)
            if tiles_multiply:
                split_rows(gathered, queries, rows, width // 32, row_bytes, q_stride)
            elif pairs_multiply:
                round_rows(gathered, queries, rows, width // 32, row_bytes, q_stride)
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
                    seen = min(newest + 1, num_keys)
                    if seen <= 0:
                        continue
                    columns = padded(seen, 32) // TILE
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
                    factor = a.scale
                    if a.soft_cap > 0:
                        cap_rows(scores, part, columns, a.scale, a.soft_cap)
                        factor = np.float32(1)
                    newest = position + first // group - block  # that the first row sees
                    if a.window > 0:
                        for i in range(part):
                            newest = position + (first + i) // group - block
                            hide(scores + i * SCORE_STRIDE, columns, newest, a.window)
                    elif newest < columns * TILE - 1:
                        whole = max(newest + 1, 0) // TILE
                        hide_newer(scores, part, whole, columns, position - block, first, group)
                    weigh_rows(
                        scores,
                        weights,
                        v_scales,
                        columns,
                        factor,
                        m + 4 * first,
                        l + 4 * first,
                        outs + first * v_row_bytes,
                        v_width,
                        w_stride,
                        kv_bytes,
                        room,
                    )
                    v_depth = seen
                    if tiles_multiply:
                        v_depth = columns // 2
                    elif pairs_multiply:
                        v_depth = (seen + 1) // 2
                    multiply_add(
                        weights,
                        values,
                        outs + first * v_row_bytes,
                        PART,
                        v_width // TILE,
                        v_depth,
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
    """The tile's queries as rows of ``width``: by token, then by head."""
    heads = a.num_kv_heads * group
    for i in range(count):
        given = a.q + 4 * ((token + i) * heads + kv_head * group) * head_dim
        for g in range(group):
            row = target + 4 * (i * group + g) * width
            scale_row(given + 4 * g * head_dim, row, head_dim, np.float32(1))
            float32s(row + 4 * head_dim, width - head_dim)[:] = 0


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


@jit
def finish_rows(a, token, count, kv_head, group, v_head_dim, v_width, outs, m, l):
    """Divide by the sums, a sink being one more key without a value."""
    heads = a.num_kv_heads * group
    tops, sums = float32s(m, count * group), float32s(l, count * group)
    for i in range(count * group):
        place = (token + i // group) * heads + kv_head * group + i % group
        top, total, factor = tops[i], sums[i], np.float32(1)
        if a.sinks != 0:
            sink = float32s(a.sinks, heads)[kv_head * group + i % group]
            top = max(tops[i], sink)
            factor = np.float32(math.exp(tops[i] - top))
            total = sums[i] * factor + np.float32(math.exp(sink - top))
        out = a.out + 4 * place * v_head_dim
        scale_row(outs + 4 * i * v_width, out, v_head_dim, factor / total)
        if a.lse != 0:
            float32s(a.lse + 4 * place, 1)[0] = top + np.float32(math.log(total))
