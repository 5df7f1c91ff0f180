"""Between the QKV product and attention, on a CPU: QK-norm, rotation, and the write to the pool.

The reference is ``reference.rope_write``; ``kv_store/cpu.py`` says how keys and values lie. A head
of a token is one thread's, so that its result depends on nothing else.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir

from octavo.kernels.attention_plan.cpu import plan_at
from octavo.kernels.jit import jit
from octavo.kernels.kv_store.cpu import TILE, store_token, tile_of
from octavo.kernels.kv_store.cpu_round import LANES
from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.program import fetch_add, float32s, int32s, int64s, op
from octavo.kernels.vector_ir import I32, I64, load, store_vector, vector


@jit(fastmath={"reassoc", "contract"})
def mean_square(values):
    total = np.float32(0)
    for value in values:
        total += value * value
    return total / np.float32(len(values))


@jit
def spread(head, width, size):
    """The orthonormal Walsh-Hadamard transform of every ``size`` elements, a power of two, of the
    ``width`` float32s at an address, a multiple of 8."""
    for d in range(0, width, LANES):
        combine_lanes(head + 4 * d, size)
    step = LANES
    while step < size:
        for first in range(0, width, 2 * step):
            for i in range(first, first + step, LANES):
                combine_vectors(head + 4 * i, head + 4 * (i + step))
        step *= 2
    numbers, scale = float32s(head, width), np.float32(1 / math.sqrt(size))
    for i in range(width):
        numbers[i] *= scale


@intrinsic
def combine_lanes(typing, address, size):
    """Of a vector's neighbours 1, 2 and 4 apart, in turn, the sum and the difference, as far as
    these distances are below ``size``."""

    def emit(context, b, signature, arguments):
        address, size = arguments
        x = load(b, address, 0, LANES)
        for step in (1, 2, 4):
            order = [i ^ step for i in range(LANES)]
            other = b.shuffle_vector(x, x, ir.Constant(vector(I32, LANES), order))
            is_high = ir.Constant(
                vector(ir.IntType(1), LANES), [i & step > 0 for i in range(LANES)]
            )
            combined = b.select(is_high, b.fsub(other, x), b.fadd(x, other))
            x = b.select(b.icmp_signed(">", size, I64(step)), combined, x)
        store_vector(b, x, address, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def combine_vectors(typing, first, second):
    """The sum of two vectors, and their difference."""

    def emit(context, b, signature, arguments):
        x, y = (load(b, address, 0, LANES) for address in arguments)
        for address, result in zip(arguments, (b.fadd(x, y), b.fsub(x, y)), strict=True):
            store_vector(b, result, address, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@jit
def turn(source, target, head, cos, sin, a):
    """Norm one head and rotate it: element ``i`` with element ``i + rotary_dim / 2``."""
    x, y = float32s(source, a.head_dim), float32s(target, a.head_dim)
    half = len(cos)
    if a.qk_norm != 0:
        weight = float32s(a.qk_norm + 4 * head * a.head_dim, a.head_dim)
        scale = np.float32(1) / np.float32(math.sqrt(mean_square(x) + a.eps))
        for i in range(a.head_dim):
            y[i] = x[i] * scale * weight[i]
    elif source != target:
        for i in range(a.head_dim):
            y[i] = x[i]
    for i in range(half):
        low, high = y[i], y[i + half]
        y[i] = low * cos[i] - high * sin[i]
        y[i + half] = high * cos[i] + low * sin[i]
    if a.spread > 0:
        spread(target, a.head_dim, a.spread)


@op(
    plan="i8",
    qkv="i8",
    q="i8",
    cos="i8",
    sin="i8",
    qk_norm="i8",
    k_cache="i8",
    v_cache="i8",
    num_heads="i8",
    num_kv_heads="i8",
    head_dim="i8",
    rotary_dim="i8",
    block_size="i8",
    kv_bytes="i8",
    spread="i8",
    spread_values="i8",
    eps="f4",
)
def rope_write(thread, num_threads, counter, args):
    """Norm and rotate the queries of ``qkv`` [T, (H + 2 Hkv) * D] into ``q`` [T, H, D], and the
    keys in place; store keys and values in the slots of the plan (negative: nowhere).

    ``cos`` and ``sin`` [T, rotary_dim / 2]; ``qk_norm`` [H + Hkv, D] or 0. All float32.
    ``spread``: of so many elements of queries and keys each the Walsh-Hadamard transform is taken,
    0 for none. It leaves their products as they are and gives every element its share of a large
    one, so that rounding keys costs less (QuaRot, arXiv:2404.00456). ``spread_values``: the same
    for values, which :data:`spread_heads` undoes in what attention makes of them. An item is some
    KV heads of some tokens, with their queries.
    """
    a = carray(args, 1)[0]
    plan = plan_at(a.plan)
    units = plan.num_tokens * a.num_kv_heads
    slots = int32s(plan.slot_mapping, plan.num_tokens)
    group = a.num_heads // a.num_kv_heads
    width, half = 4 * a.head_dim, a.rotary_dim // 2
    share = max(1, units // (8 * num_threads))
    while True:
        first = fetch_add(counter, 1) * share
        if first >= units:
            return
        for unit in range(first, min(first + share, units)):
            token, kv_head = unit // a.num_kv_heads, unit % a.num_kv_heads
            row = a.qkv + token * (a.num_heads + 2 * a.num_kv_heads) * width
            cos = float32s(a.cos + 4 * half * token, half)
            sin = float32s(a.sin + 4 * half * token, half)
            for head in range(kv_head * group, (kv_head + 1) * group):
                target = a.q + (token * a.num_heads + head) * width
                turn(row + head * width, target, head, cos, sin, a)
            key_head = a.num_heads + kv_head
            key = row + key_head * width
            turn(key, key, key_head, cos, sin, a)
            if a.spread_values > 0:
                spread(key + a.num_kv_heads * width, a.head_dim, a.spread_values)
            slot = np.int64(slots[token])
            if slot >= 0:
                tile = tile_of(slot, a.num_kv_heads, a.block_size)
                tile += kv_head * (a.block_size // TILE)
                store_token(
                    key,
                    key + a.num_kv_heads * width,
                    a.head_dim,
                    a.head_dim,
                    a.k_cache,
                    a.v_cache,
                    tile,
                    slot % TILE,
                    a.kv_bytes,
                )


@op(count="i8", x="i8", num_heads="i8", head_dim="i8", size="i8")
def spread_heads(thread, num_threads, counter, args):
    """The Walsh-Hadamard transform, in place, of every ``size`` elements of the heads of ``x``
    [T, H, D] float32; ``count`` is the address of T. It is its own inverse. An item is a head."""
    a = carray(args, 1)[0]
    heads = int64s(a.count, 1)[0] * a.num_heads
    share = max(1, heads // (8 * num_threads))
    while True:
        first = fetch_add(counter, 1) * share
        if first >= heads:
            return
        for head in range(first, min(first + share, heads)):
            spread(a.x + 4 * head * a.head_dim, a.head_dim, a.size)
