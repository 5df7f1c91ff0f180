"""Split-KV decode attention on a CPU: ops around three steps written in LLVM's vector IR.

The reference is ``reference.split_decode``; ``kv_store/cpu.py`` says how keys and values lie. All
query heads of a KV head go together, so each key and value is read once, and all KV heads of a
token are read one after the other, as they lie: that is what memory likes best.

A work item is one segment of one sequence. It goes through its keys in *chunks* of eight tiles:
scores, softmax against the maximum so far, weighted sum of the values. Items write partials, and
``merge`` puts them together in segment order: the result doesn't depend on which thread did what.

LLVM makes of a 16-lane vector what the CPU has: one register of AVX-512, two of AVX2, four of
NEON. In plain numba loops the compiler can't know that scores and keys don't overlap, so it keeps
no sum in a register. Nor does it with more sums than registers: a sum that goes through memory
waits some 12 cycles for itself where an FMA takes 4, so ``_fit`` says how many there may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from octavo.kernels.attention_plan.cpu import plan_at
from octavo.kernels.jit import jit
from octavo.kernels.kv_store.cpu import TILE, tile_bytes
from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.program import Op, fetch_add, float32s, int32s, int64s, op, uint32s
from octavo.kernels.vector_ir import (
    I32,
    I64,
    broadcast,
    exp_below_88,
    fma,
    larger,
    load,
    load_scalar,
    load_vector,
    loop,
    pointer,
    prefetch,
    reduce_max,
    reduce_sum,
    soft_cap,
    store_scalar,
    store_vector,
    tree,
    unpack,
    variable,
    vector,
    zeros,
)

CHUNK = 128  # tokens from one update of the running maximum to the next
PREFETCH_BYTES = 8192  # how far ahead of what is read memory is asked for


# The three steps. Addresses are int64; ``group``, ``head_dim``, ``v_head_dim``, ``kv_bytes`` and
# ``room``, the number of 16-lane sums that fit the registers, are known when compiling.
# ``tiles`` lists the addresses of tiles in the order in which they are read, token by token (16 at
# a time) and within it head by head; what is ``ahead`` of one in the list is fetched meanwhile.


@intrinsic(prefer_literal=True)
def chunk_scores(
    typing, queries, tiles, scores, num_tiles, num_kv_heads, ahead, group, head_dim, kv_bytes, room
):
    """``scores[h, g, 16 i : 16 i + 16] = sum_d queries[h, g, d] * keys[i, h, d, 0:16]``, in rows
    of CHUNK scores."""

    def emit(context, b, signature, arguments):
        queries, tiles, scores, num_tiles, num_kv_heads, ahead = arguments[:6]
        heads_of_group, width = group.literal_value, head_dim.literal_value
        size, sums_at_once = kv_bytes.literal_value, room.literal_value
        pack = 4 // size
        unroll = 4 if width // pack % 4 == 0 else 2
        with loop(b, I64(0), num_tiles) as i, loop(b, I64(0), num_kv_heads) as head:
            entry = _word(b, tiles, b.add(b.mul(i, num_kv_heads), head))
            tile, next_tile = _load_i64(b, entry), _load_i64(b, _word(b, entry, ahead))
            query = b.add(queries, b.mul(head, I64(4 * heads_of_group * width)))
            row = b.add(
                b.add(scores, b.mul(i, I64(4 * TILE))),
                b.mul(head, I64(4 * heads_of_group * CHUNK)),
            )
            for heads in _runs(range(heads_of_group), sums_at_once):
                # One head's sum in several chains: an FMA takes four cycles and two start in each,
                # so eight registers of sums keep both units busy. Of AVX2's a sum takes two.
                chains = -(-8 // (len(heads) * (1 if sums_at_once > 8 else 2)))
                sums = {(g, c): variable(b, zeros(TILE)) for g in heads for c in range(chains)}
                with loop(b, I64(0), I64(width // pack), step=unroll) as word:
                    line = b.mul(word, I64(4 * TILE))
                    element = b.add(query, b.mul(word, I64(4 * pack)))
                    for u in range(unroll):
                        if heads[0] == 0:
                            prefetch(b, b.add(next_tile, b.add(line, I64(4 * TILE * u))), 4 * TILE)
                        keys = unpack(b, _load_words(b, b.add(tile, line), TILE * u, TILE), size)
                        for j, key in enumerate(keys):
                            d = u * pack + j
                            for g in heads:
                                total = sums[g, d % chains]
                                q = broadcast(b, load_scalar(b, element, g * width + d), TILE)
                                b.store(fma(b, q, key, b.load(total)), total)
                for g in heads:
                    total = tree(b.fadd, [b.load(sums[g, c]) for c in range(chains)])
                    if size == 1:
                        total = b.fmul(total, load(b, tile, TILE * width // 4, TILE, 4))
                    store_vector(b, total, row, g * CHUNK)
        return context.get_dummy_value()

    kinds = (queries, tiles, scores, num_tiles, num_kv_heads, ahead)
    return types.void(*kinds, group, head_dim, kv_bytes, room), emit


@intrinsic
def chunk_softmax(typing, scores, m, l):
    """Replace a CHUNK of scores by ``exp(score - M)``, where ``M`` is the larger of their maximum
    and the running one at ``m``, which it replaces, and bring the running sum at ``l`` up to date;
    return by what the sum so far has been multiplied. A score of -inf gets a weight of 1e-38."""

    def emit(context, b, signature, arguments):
        scores, m, l = arguments
        offsets = range(0, CHUNK, TILE)
        lanes = [load(b, scores, i, TILE, 4) for i in offsets]
        old = load_scalar(b, m, 0)
        top = larger(b, old, reduce_max(b, tree(lambda x, y: larger(b, x, y), lanes)))
        top_lanes = broadcast(b, top, TILE)
        weights = [exp_below_88(b, b.fsub(x, top_lanes)) for x in lanes]
        for i, w in zip(offsets, weights, strict=True):
            store_vector(b, w, scores, i)
        discount = exp_below_88(b, broadcast(b, b.fsub(old, top), 4))
        discount = b.extract_element(discount, I32(0))
        total = b.fadd(b.fmul(load_scalar(b, l, 0), discount), reduce_sum(b, tree(b.fadd, weights)))
        store_scalar(b, top, m)
        store_scalar(b, total, l)
        return discount

    return types.float32(scores, m, l), emit


@intrinsic
def chunk_soft_cap(typing, scores, cap):
    """Replace a CHUNK of scores ``s`` by ``cap * tanh(s / cap)``."""

    def emit(context, b, signature, arguments):
        scores, cap = arguments
        for i in range(0, CHUNK, TILE):
            store_vector(b, soft_cap(b, load(b, scores, i, TILE, 4), cap), scores, i)
        return context.get_dummy_value()

    return types.void(scores, types.float32), emit


@intrinsic(prefer_literal=True)
def chunk_output(
    typing, weights, tiles, out, num_tiles, num_kv_heads, ahead, group, v_head_dim, kv_bytes, room
):
    """``out[h, g, :] += sum_t weights[h, g, t] * values[t, h, :]`` over whole tiles. Rows of
    weights, CHUNK apart, begin with the first tile's; int8's scales are multiplied into them."""

    def emit(context, b, signature, arguments):
        weights, tiles, out, num_tiles, num_kv_heads, ahead = arguments[:6]
        heads_of_group, width = group.literal_value, v_head_dim.literal_value
        size = kv_bytes.literal_value
        pack = 4 // size
        lanes, heads_at_once, sums_at_once = _fit(room.literal_value)
        vectors = [(d, min(lanes, width - d)) for d in range(0, width, lanes)]
        with loop(b, I64(0), num_tiles) as i, loop(b, I64(0), num_kv_heads) as head:
            entry = _word(b, tiles, b.add(b.mul(i, num_kv_heads), head))
            tile, next_tile = _load_i64(b, entry), _load_i64(b, _word(b, entry, ahead))
            target = b.add(out, b.mul(head, I64(4 * heads_of_group * width)))
            row = b.add(
                b.add(weights, b.mul(i, I64(4 * TILE))),
                b.mul(head, I64(4 * heads_of_group * CHUNK)),
            )
            if size == 1:
                scales = load(b, tile, TILE * width // 4, TILE, 4)
                for g in range(heads_of_group):
                    scaled = b.fmul(load(b, row, g * CHUNK, TILE, 4), scales)
                    store_vector(b, scaled, row, g * CHUNK)
            for heads in _runs(range(heads_of_group), heads_at_once):
                passes = -(-len(heads) * len(vectors) // sums_at_once)
                for columns in _runs(vectors, -(-len(vectors) // passes)):
                    sums = {
                        (g, d): variable(b, load(b, target, g * width + d, n, 4))
                        for g in heads
                        for d, n in columns
                    }
                    with loop(b, I64(0), I64(TILE // pack)) as word:
                        line = b.mul(word, I64(4 * width))
                        weight = b.add(row, b.mul(word, I64(4 * pack)))
                        values = {}
                        for d, n in columns:
                            if heads[0] == 0 and d % TILE == 0:
                                here = b.add(next_tile, b.add(line, I64(4 * d)))
                                prefetch(b, here, 4 * min(TILE, width - d))
                            words = _load_words(b, b.add(tile, line), d, n)
                            values[d] = unpack(b, words, size)
                        for j in range(pack):
                            by_head = {g: load_scalar(b, weight, g * CHUNK + j) for g in heads}
                            for d, n in columns:
                                for g in heads:
                                    w, total = broadcast(b, by_head[g], n), sums[g, d]
                                    b.store(fma(b, w, values[d][j], b.load(total)), total)
                    for (g, d), total in sums.items():
                        store_vector(b, b.load(total), target, g * width + d)
        return context.get_dummy_value()

    kinds = (weights, tiles, out, num_tiles, num_kv_heads, ahead)
    return types.void(*kinds, group, v_head_dim, kv_bytes, room), emit


def _load_words(b: Any, address: Any, index: int, lanes: int) -> Any:
    return load_vector(b, address, 4 * index, vector(I32, lanes))


def _word(b: Any, addresses: Any, index: Any) -> Any:
    return b.add(addresses, b.mul(index, I64(8)))


def _load_i64(b: Any, address: Any) -> Any:
    return b.load(pointer(b, address, 0, I64))


def _fit(room: int) -> tuple[int, int, int]:
    """Of ``chunk_output``: lanes of a vector, heads and sums at once. AVX2's 16 registers hold 9
    sums of 8 lanes beside 3 weights, the values and what LLVM keeps of their words; with 12 it
    spilled 6 of them."""
    return (TILE, room, room) if room > 8 else (8, 4, 9)


def _runs(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Runs of at most so many, as few and as even as can be."""
    length = -(-len(items) // -(-len(items) // most))
    return [items[i : i + length] for i in range(0, len(items), length)]


# The ops.


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
