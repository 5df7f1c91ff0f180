"""Split-KV decode attention on a CPU: the ops.

The reference is ``reference.split_decode``; ``kv_store/cpu.py`` says how keys and values lie. All
query heads of a KV head go together, so each key and value is read once, and all KV heads of a
token are read one after the other, as they lie: that is what memory likes best.

A work item is one segment of one sequence. It goes through its keys in *chunks* of eight tiles:
scores, softmax against the maximum so far, weighted sum of the values (``cpu_chunks.py``). Items
write partials, and ``merge`` puts them together in segment order: the result doesn't depend on
which thread did what.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from octavo.kernels.attention_plan.cpu import plan_at
from octavo.kernels.jit import jit
from octavo.kernels.kv_store.cpu import TILE, tile_bytes
from octavo.kernels.late import carray
from octavo.kernels.program import Op, fetch_add, float32s, int32s, int64s, op, uint32s
from octavo.kernels.split_attention.cpu_chunks import (
    CHUNK,
    chunk_output,
    chunk_scores,
    chunk_soft_cap,
    chunk_softmax,
)

PREFETCH_BYTES = 8192  # how far ahead of what is read memory is asked for


def attend_scratch_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, kv_bytes: int
) -> int:
    """What a thread needs beside the partials: scaled queries, a chunk's scores, copies of the
    tiles at its two ends, and the list of its tiles."""
    ends = 2 * num_kv_heads * tile_bytes(v_head_dim, kv_bytes)
    tiles = 2 * num_kv_heads * CHUNK // TILE + _ahead(head_dim, kv_bytes)
    return 4 * num_heads * (head_dim + CHUNK) + ends + 8 * tiles


def _ahead(head_dim: int, kv_bytes: int) -> int:
    return -(-PREFETCH_BYTES // tile_bytes(head_dim, kv_bytes))


@cache
def attend_op(group: int, head_dim: int, v_head_dim: int, kv_bytes: int, room: int) -> Op:
    """The op for one shape of head; its sizes are constants to the compiler. ``room`` is the number
    of 16-lane sums that the CPU's registers hold beside what else they must."""
    k_tile, v_tile = tile_bytes(head_dim, kv_bytes), tile_bytes(v_head_dim, kv_bytes)
    ahead = _ahead(head_dim, kv_bytes)

    @op(
        plan="i8",
        q="i8",
        k_cache="i8",
        v_cache="i8",
        num_kv_heads="i8",
        block_size="i8",
        scale="f4",
        soft_cap="f4",
    )
    def attend(thread, num_threads, counter, args):
        """The partials of the plan's segments. An item is a segment: ``q`` [T, H, D] float32, the
        caches as ``kv_store/cpu.py`` has them, ``soft_cap`` 0 for none."""
        a = carray(args, 1)[0]
        plan = plan_at(a.plan)
        kv_heads, heads = a.num_kv_heads, a.num_kv_heads * group
        segments = int32s(plan.segments, (plan.num_segments, 4))
        queries = plan.scratch + thread * plan.scratch_bytes
        scores = queries + 4 * heads * head_dim
        ends = scores + 4 * heads * CHUNK
        k_tiles = ends + 2 * kv_heads * v_tile
        while True:
            item = fetch_add(counter, 1)
            if item >= plan.num_segments:
                return
            row, start = np.int64(segments[item, 0]), np.int64(segments[item, 1])
            stop, number = np.int64(segments[item, 2]), np.int64(segments[item, 3])
            table = int32s(plan.block_table + 4 * row * plan.table_width, plan.table_width)
            out = plan.part_out + 4 * number * heads * v_head_dim
            m, l = plan.part_m + 4 * number * heads, plan.part_l + 4 * number * heads
            clear_partial(out, m, l, heads, v_head_dim)
            if start >= stop:
                continue
            multiply(a.q + 4 * row * heads * head_dim, a.scale, queries, heads * head_dim)
            for chunk in range(start // CHUNK * CHUNK, stop, CHUNK):
                first, last = max(start - chunk, 0), min(stop - chunk, CHUNK)
                first_tile = first // TILE
                num_tiles = -(-last // TILE) - first_tile
                count = num_tiles * kv_heads
                v_tiles = k_tiles + 8 * count
                here, then = chunk + first_tile * TILE, chunk + CHUNK
                list_tiles(k_tiles, count, a.k_cache, k_tile, a, table, here, stop)
                list_tiles(v_tiles, count, a.v_cache, v_tile, a, table, here, stop)
                list_tiles(v_tiles + 8 * count, ahead, a.k_cache, k_tile, a, table, then, stop)
                part = scores + 4 * TILE * first_tile
                chunk_scores(
                    queries,
                    k_tiles,
                    part,
                    num_tiles,
                    kv_heads,
                    ahead,
                    group,
                    head_dim,
                    kv_bytes,
                    room,
                )
                weigh(scores, first, last, a.soft_cap, out, m, l, heads, v_head_dim)
                replace_dead(v_tiles, kv_heads, num_tiles, first, last, ends, v_head_dim, kv_bytes)
                chunk_output(
                    part,
                    v_tiles,
                    out,
                    num_tiles,
                    kv_heads,
                    ahead,
                    group,
                    v_head_dim,
                    kv_bytes,
                    room,
                )
            divide(out, l, heads, v_head_dim)

    return attend


@jit
def clear_partial(out, m, l, heads, width):
    """The partial of no keys: ``out`` [heads, width], ``m`` and ``l`` [heads]."""
    float32s(out, heads * width)[:] = 0
    float32s(m, heads)[:] = -np.inf
    float32s(l, heads)[:] = 0


@jit
def multiply(source, factor, target, count):
    numbers, products = float32s(source, count), float32s(target, count)
    for i in range(count):
        products[i] = numbers[i] * factor


@jit
def divide(out, l, heads, width):
    outs, sums = float32s(out, (heads, width)), float32s(l, heads)
    for head in range(heads):
        for d in range(width):
            outs[head, d] /= sums[head]


@jit
def weigh(scores, first, last, soft_cap, out, m, l, heads, width):
    """From a chunk's scores to weights, of tokens ``first : last``; discounts what came before."""
    rows, outs = float32s(scores, (heads, CHUNK)), float32s(out, (heads, width))
    for head in range(heads):
        row = scores + 4 * CHUNK * head
        if soft_cap > 0:
            chunk_soft_cap(row, soft_cap)
        rows[head, :first] = -np.inf
        rows[head, last:] = -np.inf
        discount = chunk_softmax(row, m + 4 * head, l + 4 * head)
        if discount != 1:
            for d in range(width):
                outs[head, d] *= discount


@jit
def list_tiles(tiles, count, cache, nbytes, a, table, position, stop):
    """Write the addresses of ``count`` tiles from a position on, head by head; of those past the
    end, which are only fetched ahead, that of the last."""
    addresses = int64s(tiles, count)
    tiles_of_block = a.block_size // TILE
    i = 0
    while i < count:
        here = min(position, stop - 1)
        block, tile = np.int64(table[here // a.block_size]), here % a.block_size // TILE
        address = cache + nbytes * (block * a.num_kv_heads * tiles_of_block + tile)
        for _ in range(min(a.num_kv_heads, count - i)):
            addresses[i] = address
            address += nbytes * tiles_of_block
            i += 1
        position += TILE


@jit
def replace_dead(tiles, num_kv_heads, num_tiles, first, last, ends, width, kv_bytes):
    """Where a chunk's first or last tile of values has tokens outside ``first : last``, which may
    be NaN, list copies of its heads' tiles in which these tokens are 0."""
    addresses = int64s(tiles, (num_tiles, num_kv_heads))
    position = first // TILE * TILE
    for tile in range(0, num_tiles, max(1, num_tiles - 1)):
        live = max(first - position - TILE * tile, 0), min(last - position - TILE * tile, TILE)
        if live[0] > 0 or live[1] < TILE:
            for head in range(num_kv_heads):
                copy_live(addresses[tile, head], ends, live[0], live[1], width, kv_bytes)
                addresses[tile, head] = ends
                ends += tile_bytes(width, kv_bytes)


@jit
def copy_live(tile, target, start, stop, width, kv_bytes):
    """Copy a tile of values; tokens outside ``start : stop`` become 0."""
    pack = 4 // kv_bytes
    source, copy = uint32s(tile, (TILE // pack, width)), uint32s(target, (TILE // pack, width))
    for i in range(TILE // pack):
        mask = np.uint32(0)
        for j in range(pack):
            if start <= i * pack + j < stop:
                mask |= np.uint32(0xFFFFFFFF >> (32 - 8 * kv_bytes) << (8 * kv_bytes * j))
        for d in range(width):
            copy[i, d] = source[i, d] & mask
    if kv_bytes == 1:
        scales, copied = float32s(tile + TILE * width, TILE), float32s(target + TILE * width, TILE)
        for i in range(TILE):
            copied[i] = scales[i] if start <= i < stop else np.float32(0)


@op(plan="i8", num_heads="i8", v_head_dim="i8", sinks="i8", out="i8", lse="i8")
def merge(thread, num_threads, counter, args):
    """``attention.merge_partials`` of each decode row's segments. An item is a head of a row.

    ``sinks`` [H] (0 for none) join as one more partial ``(0, sink, 1)``. Writes ``out`` [T, H, Dv]
    and, where it isn't 0, ``lse`` [T, H], float32.
    """
    a = carray(args, 1)[0]
    plan = plan_at(a.plan)
    rows, heads, width = plan.num_decodes, a.num_heads, a.v_head_dim
    row_start = int32s(plan.row_start, rows + 1)
    part_out = float32s(plan.part_out, (plan.num_segments, heads, width))
    part_m = float32s(plan.part_m, (plan.num_segments, heads))
    part_l = float32s(plan.part_l, (plan.num_segments, heads))
    outs = float32s(a.out, (rows, heads, width))
    while True:
        item = fetch_add(counter, 1)
        if item >= rows * heads:
            return
        row, head = item // heads, item % heads
        out = outs[row, head]
        out[:] = 0
        sink = float32s(a.sinks, heads)[head] if a.sinks != 0 else np.float32(-np.inf)
        top = sink
        for s in range(row_start[row], row_start[row + 1]):
            top = max(top, part_m[s, head])
        log_sum = top
        if top != -np.inf:
            weight_sum = np.float32(math.exp(sink - top))
            for s in range(row_start[row], row_start[row + 1]):
                weight = np.float32(math.exp(part_m[s, head] - top)) * part_l[s, head]
                weight_sum += weight
                for d in range(width):
                    out[d] += weight * part_out[s, head, d]
            for d in range(width):
                out[d] /= weight_sum
            log_sum = top + np.float32(math.log(weight_sum))
        if a.lse != 0:
            float32s(a.lse, (rows, heads))[row, head] = log_sum
