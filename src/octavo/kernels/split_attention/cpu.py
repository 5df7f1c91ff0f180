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
NEON. Plain numba loops don't come near: the compiler can't know that scores and keys don't
overlap, so it keeps no sum in a register.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.kernels.jit import jit

LANES = 16  # tokens of a tile
CHUNK = 64  # tokens from one update of the running maximum to the next
HEADS_AT_ONCE = 12  # query heads whose sums stay in registers together
UNROLL = 8  # head_dim must be a multiple of it

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
Value = Any  # of the IR; llvmlite has no types for mypy
Builder = Any


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
            sums = {(g, c): _variable(b, _zeros(LANES)) for g in heads for c in range(chains)}
            with _loop(b, I64(0), I64(width), step=UNROLL) as d:
                query = b.add(queries, b.mul(d, I64(4)))
                offset = b.mul(d, I64(LANES * size))
                key = b.add(keys, offset)
                if heads[0] == 0:
                    _prefetch(b, b.add(ahead, offset), UNROLL * LANES * size)
                for i in range(UNROLL):
                    key_lanes = _load(b, key, i * LANES, LANES, size)
                    for g in heads:
                        total = sums[g, i % chains]
                        element = _broadcast(b, _load_scalar(b, query, g * width + i), LANES)
                        b.store(_fma(b, element, key_lanes, b.load(total)), total)
            for g in heads:
                total = _tree(b.fadd, [b.load(sums[g, c]) for c in range(chains)])
                _store(b, total, scores, g * CHUNK)
        return context.get_dummy_value()

    return types.void(queries, keys, ahead, scores, group, head_dim, kv_bytes), emit


@intrinsic
def chunk_softmax(typing, scores, running_max):
    """Replace a CHUNK of scores by ``exp(score - M)``, where ``M`` is the larger of their maximum
    and ``running_max``; return ``(M, sum)``. A score of -inf gets a weight below 1e-37."""

    def emit(context, b, signature, arguments):
        scores, running_max = arguments
        offsets = range(0, CHUNK, LANES)
        lanes = [_load(b, scores, i, LANES, 4) for i in offsets]
        top = _larger(b, running_max, _reduce_max(b, _tree(lambda x, y: _larger(b, x, y), lanes)))
        top_lanes = _broadcast(b, top, LANES)
        weights = [_exp(b, b.fsub(x, top_lanes)) for x in lanes]
        for i, w in zip(offsets, weights, strict=True):
            _store(b, w, scores, i)
        total = _reduce_sum(b, _tree(b.fadd, weights))
        return context.make_tuple(b, signature.return_type, (top, total))

    return types.UniTuple(types.float32, 2)(scores, types.float32), emit


@intrinsic
def chunk_soft_cap(typing, scores, cap):
    """Replace a CHUNK of scores ``s`` by ``cap * tanh(s / cap)``."""

    def emit(context, b, signature, arguments):
        scores, cap = arguments
        cap = _broadcast(b, cap, LANES)
        one, two = _constant(1.0, LANES), _constant(2.0, LANES)
        for i in range(0, CHUNK, LANES):
            s = _load(b, scores, i, LANES, 4)
            e = _exp(b, b.fdiv(b.fmul(two, s), cap))  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            _store(b, b.fmul(cap, b.fsub(one, b.fdiv(two, b.fadd(e, one)))), scores, i)
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
                    (g, d): _variable(b, _load(b, out, g * width + d, lanes, 4))
                    for g in heads
                    for d, lanes in columns
                }
                with _loop(b, first, last) as t:
                    weight = b.add(weights, b.mul(t, I64(4)))
                    offset = b.mul(t, I64(width * size))
                    value = b.add(values, offset)
                    if heads[0] == 0 and columns[0] == vectors[0]:
                        _prefetch(b, b.add(ahead, offset), width * size)
                    by_head = {g: _load_scalar(b, weight, g * CHUNK) for g in heads}
                    for d, lanes in columns:
                        value_lanes = _load(b, value, d, lanes, size)
                        for g in heads:
                            w = _broadcast(b, by_head[g], lanes)
                            b.store(_fma(b, w, value_lanes, b.load(sums[g, d])), sums[g, d])
                for (g, d), total in sums.items():
                    _store(b, b.load(total), out, g * width + d)
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


# Vector IR, in the few words that the steps need.


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _constant(value: float, lanes: int) -> Value:
    return ir.Constant(_vector(F32, lanes), [value] * lanes)


def _zeros(lanes: int) -> Value:
    return _constant(0.0, lanes)


def _pointer(b: Builder, address: Value, offset: int, kind: Any) -> Value:
    return b.inttoptr(b.add(address, I64(offset)), kind.as_pointer())


def _load(b: Builder, address: Value, index: int, lanes: int, size: int) -> Value:
    """``lanes`` numbers of ``size`` bytes from element ``index`` on, as float32."""
    if size == 4:
        return b.load(_pointer(b, address, 4 * index, _vector(F32, lanes)), align=4)
    half = b.load(_pointer(b, address, 2 * index, _vector(ir.IntType(16), lanes)), align=2)
    word = _vector(I32, lanes)
    bits = b.shl(b.zext(half, word), ir.Constant(word, [16] * lanes))
    return b.bitcast(bits, _vector(F32, lanes))


def _load_scalar(b: Builder, address: Value, index: int) -> Value:
    return b.load(_pointer(b, address, 4 * index, F32), align=4)


def _store(b: Builder, value: Value, address: Value, index: int) -> None:
    b.store(value, _pointer(b, address, 4 * index, value.type), align=4)


def _prefetch(b: Builder, address: Value, size: int) -> None:
    """Ask for ``size`` bytes to be brought near, a cache line at a time."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    for offset in range(0, size, 64):
        pointer = _pointer(b, address, offset, ir.IntType(8))
        b.call(prefetch, [pointer, I32(0), I32(3), I32(1)])  # to read, to keep, data


def _variable(b: Builder, value: Value) -> Value:
    """A local that LLVM turns into a register."""
    slot = cgutils.alloca_once(b, value.type)
    b.store(value, slot)
    return slot


@contextmanager
def _loop(b: Builder, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
    with cgutils.for_range_slice(b, start, stop, I64(step)) as (index, _):
        yield index


def _broadcast(b: Builder, scalar: Value, lanes: int) -> Value:
    undefined = ir.Constant(_vector(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(_vector(I32, lanes), [0] * lanes))


def _call(b: Builder, name: str, *arguments: Value, returns: Any = None) -> Value:
    kinds = [argument.type for argument in arguments]
    signature = ir.FunctionType(returns or kinds[0], kinds)
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def _fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return _call(b, f"llvm.fma.v{z.type.count}f32", x, y, z)


def _larger(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _reduce_max(b: Builder, x: Value) -> Value:
    return _call(b, f"llvm.vector.reduce.fmax.v{LANES}f32", x, returns=F32)


def _reduce_sum(b: Builder, x: Value) -> Value:
    """The sum of a vector's lanes, halving it each time: a fixed order."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (
            b.shuffle_vector(
                x, x, ir.Constant(_vector(I32, lanes), list(range(start, start + lanes)))
            )
            for start in (0, lanes)
        )
        x = b.fadd(low, high)
    return b.extract_element(x, I32(0))


def _exp(b: Builder, x: Value) -> Value:
    """``exp(x)`` to 2e-7 of its value: 2 to the nearest integer times a polynomial for the rest.

    Clamped to 2**-126 and 2**126; a NaN stays one."""
    lanes = x.type.count
    power = b.fmul(x, _constant(1 / math.log(2), lanes))
    for sign, limit in (("<", -126.0), (">", 126.0)):
        bound = _constant(limit, lanes)
        power = b.select(b.fcmp_ordered(sign, power, bound), bound, power)
    whole = _call(b, f"llvm.rint.v{lanes}f32", power)
    rest = b.fsub(power, whole)
    result = _constant(math.log(2) ** 6 / math.factorial(6), lanes)
    for order in range(5, -1, -1):
        result = _fma(
            b, result, rest, _constant(math.log(2) ** order / math.factorial(order), lanes)
        )
    word = _vector(I32, lanes)
    exponent = b.add(b.fptosi(whole, word), ir.Constant(word, [127] * lanes))
    scale = b.bitcast(b.shl(exponent, ir.Constant(word, [23] * lanes)), _vector(F32, lanes))
    return b.fmul(result, scale)


def _tree(combine: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Combine neighbours, then the results, and so on."""
    while len(values) > 1:
        pairs = [combine(x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = pairs + list(values[len(pairs) * 2 :])
    return values[0]


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
            for chunk in range(start // CHUNK * CHUNK, stop, CHUNK):
                first, last = max(start - chunk, 0), min(stop - chunk, CHUNK)
                lanes = range(first // LANES * LANES, last, LANES)
                for lane in lanes:
                    tile = tile_of(chunk + lane, table, tiles, num_kv_heads, kv_head)
                    after = min(chunk + lane + CHUNK, stop - 1)
                    ahead = tile_of(after, table, tiles, num_kv_heads, kv_head)
                    tile_scores(
                        queries.ctypes.data,
                        k_cache.ctypes.data + tile * k_tile_bytes,
                        k_cache.ctypes.data + ahead * k_tile_bytes,
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
                        out[g] *= discount
                    l[g] += total
                for lane in lanes:
                    tile = tile_of(chunk + lane, table, tiles, num_kv_heads, kv_head)
                    after = min(chunk + lane + CHUNK, stop - 1)
                    ahead = tile_of(after, table, tiles, num_kv_heads, kv_head)
                    tile_output(
                        scores.ctypes.data + 4 * lane,
                        v_cache.ctypes.data + tile * v_tile_bytes,
                        v_cache.ctypes.data + ahead * v_tile_bytes,
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
