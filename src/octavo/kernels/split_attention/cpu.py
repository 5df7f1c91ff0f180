"""Split-KV decode attention on a CPU: numba around three steps written in LLVM's vector IR.

The reference is ``reference.split_decode``. The history lies in *tiles* of 16 tokens, the lanes of
one vector: keys ``[tile, D, 16]``, so that one query element times 16 keys is one instruction, and
values ``[tile, 16, Dv]``. A block of one KV head is ``block_size / 16`` tiles. All query heads of
a KV head go together, so each key and value is read once.

A work item is one segment of one sequence for one KV head. It goes through its keys in *chunks* of
four tiles: scores, softmax against the maximum so far, weighted sum of the values. Items write
partials, and ``merge`` puts them together in segment order: the result doesn't depend on which
thread did what.

LLVM makes of a 16-lane vector what the CPU has: one register of AVX-512, two of AVX2, four of
NEON. In plain numba loops the compiler can't know that scores and keys don't overlap, so it keeps
no sum in a register.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from octavo.kernels.jit import jit
from octavo.kernels.vector_ir import (
    I64,
    broadcast,
    constant,
    exp,
    fma,
    larger,
    load,
    load_scalar,
    loop,
    prefetch,
    reduce_max,
    reduce_sum,
    store_vector,
    tree,
    variable,
    zeros,
)

LANES = 16  # tokens of a tile
CHUNK = 64  # tokens from one update of the running maximum to the next
HEADS_AT_ONCE = 12  # query heads whose sums stay in registers together
UNROLL = 8  # head_dim must be a multiple of it


# The three steps. Addresses are int64; ``group``, ``head_dim``, ``v_head_dim`` and ``kv_bytes``
# (4: float32, 2: bfloat16) are known when compiling.


@intrinsic(prefer_literal=True)
def tile_scores(typing, queries, keys, ahead, scores, group, head_dim, kv_bytes):
    """``scores[g, 0:16] = sum_d queries[g, d] * keys[d, 0:16]``, in rows of CHUNK scores.

    Meanwhile the tile of keys at ``ahead`` is fetched."""

    def emit(context, b, signature, arguments):
        queries, keys, ahead, scores = arguments[:4]
        width, size = head_dim.literal_value, kv_bytes.literal_value
        for heads in _runs(range(group.literal_value), HEADS_AT_ONCE):
            # One head's sum in several chains: an FMA takes four cycles, and two start in each.
            chains = max(1, 8 // len(heads))
            sums = {(g, c): variable(b, zeros(LANES)) for g in heads for c in range(chains)}
            with loop(b, I64(0), I64(width), step=UNROLL) as d:
                query = b.add(queries, b.mul(d, I64(4)))
                offset = b.mul(d, I64(LANES * size))
                key = b.add(keys, offset)
                if heads[0] == 0:
                    prefetch(b, b.add(ahead, offset), UNROLL * LANES * size)
                for i in range(UNROLL):
                    key_lanes = load(b, key, i * LANES, LANES, size)
                    for g in heads:
                        total = sums[g, i % chains]
                        element = broadcast(b, load_scalar(b, query, g * width + i), LANES)
                        b.store(fma(b, element, key_lanes, b.load(total)), total)
            for g in heads:
                total = tree(b.fadd, [b.load(sums[g, c]) for c in range(chains)])
                store_vector(b, total, scores, g * CHUNK)
        return context.get_dummy_value()

    return types.void(queries, keys, ahead, scores, group, head_dim, kv_bytes), emit


@intrinsic
def chunk_softmax(typing, scores, running_max):
    """Replace a CHUNK of scores by ``exp(score - M)``, where ``M`` is the larger of their maximum
    and ``running_max``; return ``(M, sum)``. A score of -inf gets a weight below 1e-37."""

    def emit(context, b, signature, arguments):
        scores, running_max = arguments
        offsets = range(0, CHUNK, LANES)
        lanes = [load(b, scores, i, LANES, 4) for i in offsets]
        top = larger(b, running_max, reduce_max(b, tree(lambda x, y: larger(b, x, y), lanes)))
        top_lanes = broadcast(b, top, LANES)
        weights = [exp(b, b.fsub(x, top_lanes)) for x in lanes]
        for i, w in zip(offsets, weights, strict=True):
            store_vector(b, w, scores, i)
        total = reduce_sum(b, tree(b.fadd, weights))
        return context.make_tuple(b, signature.return_type, (top, total))

    return types.UniTuple(types.float32, 2)(scores, types.float32), emit


@intrinsic
def chunk_soft_cap(typing, scores, cap):
    """Replace a CHUNK of scores ``s`` by ``cap * tanh(s / cap)``."""

    def emit(context, b, signature, arguments):
        scores, cap = arguments
        cap = broadcast(b, cap, LANES)
        one, two = constant(1.0, LANES), constant(2.0, LANES)
        for i in range(0, CHUNK, LANES):
            s = load(b, scores, i, LANES, 4)
            e = exp(b, b.fdiv(b.fmul(two, s), cap))  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            store_vector(b, b.fmul(cap, b.fsub(one, b.fdiv(two, b.fadd(e, one)))), scores, i)
        return context.get_dummy_value()

    return types.void(scores, types.float32), emit


@intrinsic(prefer_literal=True)
def tile_output(typing, weights, values, ahead, out, first, last, group, v_head_dim, kv_bytes):
    """``out[g, :] += sum_t weights[g, t] * values[t, :]`` over the tile's tokens ``first : last``.

    Other tokens aren't read: what lies there may be NaN, and no weight makes that vanish.
    Meanwhile the tile of values at ``ahead`` is fetched."""

    def emit(context, b, signature, arguments):
        weights, values, ahead, out, first, last = arguments[:6]
        width, size = v_head_dim.literal_value, kv_bytes.literal_value
        vectors = [(d, min(LANES, width - d)) for d in range(0, width, LANES)]
        for heads in _runs(range(group.literal_value), HEADS_AT_ONCE):
            for columns in _runs(vectors, max(1, 2 * HEADS_AT_ONCE // len(heads))):
                sums = {
                    (g, d): variable(b, load(b, out, g * width + d, lanes, 4))
                    for g in heads
                    for d, lanes in columns
                }
                with loop(b, first, last) as t:
                    weight = b.add(weights, b.mul(t, I64(4)))
                    offset = b.mul(t, I64(width * size))
                    value = b.add(values, offset)
                    if heads[0] == 0 and columns[0] == vectors[0]:
                        prefetch(b, b.add(ahead, offset), width * size)
                    by_head = {g: load_scalar(b, weight, g * CHUNK) for g in heads}
                    for d, lanes in columns:
                        value_lanes = load(b, value, d, lanes, size)
                        for g in heads:
                            w = broadcast(b, by_head[g], lanes)
                            b.store(fma(b, w, value_lanes, b.load(sums[g, d])), sums[g, d])
                for (g, d), total in sums.items():
                    store_vector(b, b.load(total), out, g * width + d)
        return context.get_dummy_value()

    arguments = (weights, values, ahead, out, first, last, group, v_head_dim, kv_bytes)
    return types.void(*arguments), emit


@intrinsic
def fetch_add(typing, counter):
    """Add one to the int64 at an address, for all threads to see; return what it was."""

    def emit(context, b, signature, arguments):
        pointer = b.inttoptr(arguments[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, I64(1), "monotonic")

    return types.int64(counter), emit


def _runs(items: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [items[i : i + length] for i in range(0, len(items), length)]


# The kernels.


@cache
def decode_kernel(group: int, head_dim: int, v_head_dim: int, kv_bytes: int) -> Callable[..., None]:
    """The kernel for one shape of head; its sizes are constants to the compiler."""

    @jit
    def decode(
        next_item,  # int64 [1]: shared by all threads, 0 at the start
        q,  # float32 [R, H, D]
        k_cache,  # float32 or bfloat16 as uint16 [blocks, Hkv, block_size / 16, D, 16]
        v_cache,  # [blocks, Hkv, block_size / 16, 16, Dv]
        block_table,  # int32 [R, blocks]
        segments,  # int32 [S, 3]: row, start, stop
        order,  # int64 [S]: segments, longest first
        scale,
        soft_cap,  # 0 for none
        part_out,  # float32 [S, H, Dv]; written
        part_m,  # float32 [S, H]; written
        part_l,  # float32 [S, H]; written
    ):
        """Work on items until none is left: the partials of every (segment, KV head)."""
        num_kv_heads, tiles = k_cache.shape[1], k_cache.shape[2]
        k_tile_bytes, v_tile_bytes = LANES * head_dim * kv_bytes, LANES * v_head_dim * kv_bytes
        queries = np.empty((group, head_dim), np.float32)
        scores = np.empty((group, CHUNK), np.float32)
        here, ahead = np.empty(CHUNK // LANES, np.int64), np.empty(CHUNK // LANES, np.int64)
        while True:
            item = fetch_add(next_item.ctypes.data)
            if item >= len(order) * num_kv_heads:
                return
            segment, kv_head = order[item // num_kv_heads], item % num_kv_heads
            row, start, stop = segments[segment, 0], segments[segment, 1], segments[segment, 2]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            out, m, l = part_out[segment, heads], part_m[segment, heads], part_l[segment, heads]
            out[:] = 0
            m[:] = -np.inf
            l[:] = 0
            if start >= stop:
                continue
            queries[:] = q[row, heads] * scale
            table = block_table[row]
            for i in range(CHUNK // LANES):
                position = min(start // CHUNK * CHUNK + i * LANES, stop - 1)
                ahead[i] = tile_of(position, table, tiles, num_kv_heads, kv_head)
            for chunk in range(start // CHUNK * CHUNK, stop, CHUNK):
                first, last = max(start - chunk, 0), min(stop - chunk, CHUNK)
                lanes = range(first // LANES * LANES, last, LANES)
                for i in range(CHUNK // LANES):
                    here[i] = ahead[i]
                    position = min(chunk + CHUNK + i * LANES, stop - 1)
                    ahead[i] = tile_of(position, table, tiles, num_kv_heads, kv_head)
                for lane in lanes:
                    tile_scores(
                        queries.ctypes.data,
                        k_cache.ctypes.data + here[lane // LANES] * k_tile_bytes,
                        k_cache.ctypes.data + ahead[lane // LANES] * k_tile_bytes,
                        scores.ctypes.data + 4 * lane,
                        group,
                        head_dim,
                        kv_bytes,
                    )
                for g in range(group):
                    row_scores = scores.ctypes.data + 4 * CHUNK * g
                    if soft_cap > 0:
                        chunk_soft_cap(row_scores, soft_cap)
                    scores[g, :first] = -np.inf
                    scores[g, last:] = -np.inf
                    top, total = chunk_softmax(row_scores, m[g])
                    if top != m[g]:
                        discount = np.float32(math.exp(m[g] - top))
                        m[g] = top
                        l[g] *= discount
                        for d in range(v_head_dim):
                            out[g, d] *= discount
                    l[g] += total
                for lane in lanes:
                    tile_output(
                        scores.ctypes.data + 4 * lane,
                        v_cache.ctypes.data + here[lane // LANES] * v_tile_bytes,
                        v_cache.ctypes.data + ahead[lane // LANES] * v_tile_bytes,
                        out.ctypes.data,
                        max(first - lane, 0),
                        min(last - lane, LANES),
                        group,
                        v_head_dim,
                        kv_bytes,
                    )
            for g in range(group):
                out[g] /= l[g]

    return decode


@jit
def tile_of(position, table, tiles, num_kv_heads, kv_head):
    """The number of the tile in the pool that holds a position of a sequence, in 64 bits."""
    block, tile = position // LANES // tiles, position // LANES % tiles
    return (np.int64(table[block]) * num_kv_heads + kv_head) * tiles + tile


@jit
def merge(row_start, part_out, part_m, part_l, sinks, out, lse):
    """``attention.merge_partials`` for each row's segments ``row_start[r] : row_start[r + 1]``.

    ``sinks`` [H] (or [0] for none) join as one more partial ``(0, sink, 1)``. Writes ``out``
    [R, H, Dv] and ``lse`` [R, H], float32.
    """
    for row in range(len(out)):
        segments = range(row_start[row], row_start[row + 1])
        for head in range(out.shape[1]):
            sink = sinks[head] if len(sinks) > 0 else np.float32(-np.inf)
            top = sink
            for s in segments:
                top = max(top, part_m[s, head])
            out[row, head] = 0
            if top == -np.inf:
                lse[row, head] = -np.inf
                continue
            weight_sum = np.float32(math.exp(sink - top))
            for s in segments:
                weight = np.float32(math.exp(part_m[s, head] - top)) * part_l[s, head]
                weight_sum += weight
                out[row, head] += weight * part_out[s, head]
            out[row, head] /= weight_sum
            lse[row, head] = top + math.log(weight_sum)


@jit
def store(k, v, k_cache, v_cache, slot_mapping):
    """Write new keys and values into their slots; a negative slot is skipped.

    ``k`` [T, Hkv, D] and ``v`` [T, Hkv, Dv] are float32 as uint32, the caches uint32 (float32) or
    uint16 (bfloat16, rounded to nearest even).
    """
    block_size = k_cache.shape[2] * LANES
    for token in range(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        tile, lane = offset // LANES, offset % LANES
        for head in range(k.shape[1]):
            for d in range(k.shape[2]):
                k_cache[block, head, tile, d, lane] = _narrow(k[token, head, d], k_cache)
            for d in range(v.shape[2]):
                v_cache[block, head, tile, lane, d] = _narrow(v[token, head, d], v_cache)


@jit
def _narrow(bits, like):
    """The bits of a float32 as those of the cache's type."""
    if like.itemsize == 4:
        return bits
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)  # rounding could turn a NaN into an infinity
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
