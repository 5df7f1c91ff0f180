"""Split-KV decode attention on a CPU: the steps of a chunk, written in LLVM's vector IR.

LLVM makes of a 16-lane vector what the CPU has: one register of AVX-512, two of AVX2, four of
NEON. In plain numba loops the compiler can't know that scores and keys don't overlap, so it keeps
no sum in a register. Nor does it with more sums than registers: a sum that goes through memory
waits some 12 cycles for itself where an FMA takes 4, so ``_fit`` says how many there may be.

Addresses are int64; ``group``, ``head_dim``, ``v_head_dim``, ``kv_bytes`` and ``room``, the number
of 16-lane sums that fit the registers, are known when compiling. ``tiles`` lists the addresses of
tiles in the order in which they are read, token by token (16 at a time) and within it head by head;
what is ``ahead`` of one in the list is fetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.kernels.kv_store.cpu import TILE
from octavo.kernels.late import intrinsic, types
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
                        total = b.fmul(total, load(b, tile, TILE * width // 4, TILE))
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
        lanes = [load(b, scores, i, TILE) for i in offsets]
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
            store_vector(b, soft_cap(b, load(b, scores, i, TILE), cap), scores, i)
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
                scales = load(b, tile, TILE * width // 4, TILE)
                for g in range(heads_of_group):
                    scaled = b.fmul(load(b, row, g * CHUNK, TILE), scales)
                    store_vector(b, scaled, row, g * CHUNK)
            for heads in _runs(range(heads_of_group), heads_at_once):
                passes = -(-len(heads) * len(vectors) // sums_at_once)
                for columns in _runs(vectors, -(-len(vectors) // passes)):
                    sums = {
                        (g, d): variable(b, load(b, target, g * width + d, n))
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
