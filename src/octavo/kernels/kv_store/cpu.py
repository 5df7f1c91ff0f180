"""How keys and values lie in a CPU's pool, and the functions that put them there.

A block of one KV head is ``block_size / 16`` *tiles* of 16 tokens. A tile is made of 32-bit words,
each of which packs ``pack = 4 / kv_bytes`` neighbours along what a product sums over (1 float32, 2
bfloat16, 4 int8): of keys the head's elements ``[D / pack, 16 tokens, pack]``, of values the tokens
``[16 / pack, Dv, pack]``. So one load of 16 words serves ``pack`` steps of the sum, and a word's
number is had by a shift. After an int8 tile come the float32 scales of its 16 tokens: one for each
token and head, the largest magnitude / 127.
"""

from __future__ import annotations

import numpy as np

from octavo.kernels.jit import jit
from octavo.kernels.kv_store.cpu_round import LANES, put_bfloat16s
from octavo.kernels.late import register_jitable
from octavo.kernels.program import float32s, int8s, uint32s

TILE = 16  # tokens
ROW_BYTES = 4 * TILE  # of a tile of keys: a word of each token
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of one number


@register_jitable
def tile_bytes(width: int, kv_bytes: int) -> int:
    """Size of a tile of keys or values with ``width`` elements a token."""
    return TILE * width * kv_bytes + (4 * TILE if kv_bytes == 1 else 0)


@jit
def tile_of(slot, num_kv_heads, block_size):
    """The tile of a slot's first head, counted in the pool, in 64 bits; the next heads' tiles in
    that block are ``block_size / 16`` apart."""
    block, offset = np.int64(slot) // block_size, slot % block_size
    return block * num_kv_heads * (block_size // TILE) + offset // TILE


@jit
def store_key(key, width, tile, lane, kv_bytes):
    """Write a float32 key (its address) as token ``lane`` of the tile at an address."""
    if kv_bytes == 4:
        numbers, words = uint32s(key, width), uint32s(tile, (width, TILE))
        for d in range(width):
            words[d, lane] = numbers[d]
    elif kv_bytes == 2:
        for d in range(0, width, LANES):
            put_bfloat16s(key + 4 * d, tile + 4 * (TILE * d // 2 + lane), ROW_BYTES, 2)
    else:
        values, quarters = float32s(key, width), int8s(tile, (width // 4, TILE, 4))
        scale, inverse = scale_of(values)
        for d in range(width // 4):
            for i in range(4):
                quarters[d, lane, i] = np.int8(np.rint(values[4 * d + i] * inverse))
        float32s(tile + TILE * width, TILE)[lane] = scale


@jit
def store_value(value, width, tile, lane, kv_bytes):
    """As :func:`store_key`, of a value."""
    if kv_bytes == 4:
        numbers, words = uint32s(value, width), uint32s(tile, (TILE, width))
        for d in range(width):
            words[lane, d] = numbers[d]
    elif kv_bytes == 2:
        row = tile + 4 * width * (lane // 2) + 2 * (lane % 2)
        for d in range(0, width, LANES):
            put_bfloat16s(value + 4 * d, row + 4 * d, 4, 1)
    else:
        values, quarters = float32s(value, width), int8s(tile, (TILE // 4, width, 4))
        scale, inverse = scale_of(values)
        for d in range(width):
            quarters[lane // 4, d, lane % 4] = np.int8(np.rint(values[d] * inverse))
        float32s(tile + TILE * width, TILE)[lane] = scale


@jit
def scale_of(values):
    """What an int8 of these float32s counts, and the factor that makes them int8s. Where one isn't
    finite the scale is NaN, and the int8s are 0."""
    largest, blemish = np.float32(0), np.float32(0)
    for value in values:
        largest = max(largest, abs(value))
        blemish += value * np.float32(0)
    if blemish != 0:
        return np.float32(np.nan), np.float32(0)
    if largest == 0:
        return largest, largest
    return largest / np.float32(127), np.float32(127) / largest


@jit
def store(keys, values, k_cache, v_cache, slot_mapping, block_size, kv_bytes):
    """Write new keys [T, Hkv, D] and values [T, Hkv, Dv], float32, into their slots of the pools at
    two addresses; a negative slot is skipped."""
    num_kv_heads, width, v_width = keys.shape[1], keys.shape[2], values.shape[2]
    for token in range(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot < 0:
            continue
        first = tile_of(slot, num_kv_heads, block_size)
        for head in range(num_kv_heads):
            store_token(
                keys[token, head].ctypes.data,
                values[token, head].ctypes.data,
                width,
                v_width,
                k_cache,
                v_cache,
                first + head * (block_size // TILE),
                slot % TILE,
                kv_bytes,
            )


@jit
def store_token(key, value, width, v_width, k_cache, v_cache, tile, lane, kv_bytes):
    """Write a key and a value of one head into tile number ``tile`` of the two pools."""
    scales = 4 * TILE if kv_bytes == 1 else 0
    k_tile = k_cache + tile * (TILE * width * kv_bytes + scales)
    v_tile = v_cache + tile * (TILE * v_width * kv_bytes + scales)
    store_key(key, width, k_tile, lane, kv_bytes)
    store_value(value, v_width, v_tile, lane, kv_bytes)
