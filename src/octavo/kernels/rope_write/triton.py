"""QK-norm, rotation, and the write to the paged cache, for CUDA through Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton_launch import dependent_launches, power_of_2

HEADS = 16  # of a block
MANY = 4096  # tokens, of which a block takes several, one after the other


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate the queries and keys of ``qkv`` [T, (H + 2 Hkv) * D], or [P, T, ...] in parts
    to be added up, contiguous; return the queries [T, H, D] and store keys and values in the pool.

    ``positions`` and ``slot_mapping`` [T] are integers; a token whose slot is negative is padding
    and isn't stored. ``cos`` and ``sin`` [positions, rotary_dim / 2] float32; ``qk_norm``
    [H + Hkv, D] float32. Caches [blocks, block_size, Hkv, D], innermost dimension contiguous.
    One launch, no waiting.
    """
    num_tokens = qkv.shape[-2]
    many = num_tokens >= MANY
    # Where rows are copied ahead, the first copies would come before the wait: there is none then.
    dependent, tokens = dependent_launches() and not many, 8 if many else 1
    parts = 1 if qkv.dim() == 2 else len(qkv)
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens:
        grid = -(-(num_heads + 2 * num_kv_heads) // HEADS), -(-num_tokens // tokens)
        _rope_write_kernel[grid](
            qkv,
            positions,
            cos,
            sin,
            qk_norm,
            q,
            k_cache,
            v_cache,
            slot_mapping,
            eps,
            qkv[0].numel() if parts > 1 else 0,
            num_tokens,
            PARTS=parts,
            K_STRIDES=k_cache.stride()[:3],
            V_STRIDES=v_cache.stride()[:3],
            BLOCK_SIZE=block_size,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=cos.shape[1],
            BLOCK_HALF=power_of_2(cos.shape[1]),
            BLOCK_REST=power_of_2(max(1, head_dim - 2 * cos.shape[1])),
            HEADS=HEADS,
            TOKENS=tokens,
            STAGES=4 if many else 1,
            DEPENDENT=dependent,
            launch_pdl=dependent,
            num_warps=4,
        )
    return q


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_write_kernel(
    qkv,
    positions,
    cos,
    sin,
    qk_norm,
    q,
    k_cache,
    v_cache,
    slot_mapping,
    eps,
    part_size,
    num_tokens,
    PARTS: tl.constexpr,
    K_STRIDES: tl.constexpr,  # of block, token and head
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the elements that are rotated
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,  # tokens whose rows are on their way at once; 1 where DEPENDENT
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of heads, of tokens). The two halves that are rotated are tiles of their own,
    and so is the rest of a head, where there is any. Positions and slots are there before the
    kernel in front begins."""
    if DEPENDENT:
        gdc_launch_dependents()  # the attention kernel finds its share before this one ends
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    in_half, in_rest = half < HALF, rest < HEAD_DIM
    there = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    if qk_norm is not None:
        weights = qk_norm + head[:, None] * HEAD_DIM
        normed = there & (is_value == 0)
        place, mask = weights + half[None, :], normed & in_half[None, :]
        low_weight = tl.load(place, mask=mask, other=0.0)
        high_weight = tl.load(place + HALF, mask=mask, other=0.0)
        if 2 * HALF < HEAD_DIM:
            mask = normed & in_rest[None, :]
            rest_weight = tl.load(weights + rest[None, :], mask=mask, other=0.0)
    first = tl.program_id(1).to(tl.int64) * TOKENS
    for i in tl.range(0, min(TOKENS, num_tokens - first), num_stages=STAGES):
        token = first + i
        turns = tl.load(positions + token).to(tl.int64) * HALF + half
        c = tl.load(cos + turns, mask=in_half, other=1.0)[None, :]
        s = tl.load(sin + turns, mask=in_half, other=0.0)[None, :]
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if DEPENDENT:
            gdc_wait()
        row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM
        low = _load(row, there, half, in_half, part_size, PARTS)
        high = _load(row + HALF, there, half, in_half, part_size, PARTS)
        a, b = low.to(tl.float32), high.to(tl.float32)
        if 2 * HALF < HEAD_DIM:
            still = _load(row, there, rest, in_rest, part_size, PARTS)
        if qk_norm is not None:
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if 2 * HALF < HEAD_DIM:
                e = still.to(tl.float32)
                squares += tl.sum(e * e, 1)
            factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            a = (a * (factor * low_weight)).to(low.dtype).to(tl.float32)
            b = (b * (factor * high_weight)).to(low.dtype).to(tl.float32)
            if 2 * HALF < HEAD_DIM:
                still = tl.where(is_value, still, (e * (factor * rest_weight)).to(still.dtype))
        low = tl.where(is_value, low, (a * c - b * s).to(low.dtype))
        high = tl.where(is_value, high, (b * c + a * s).to(high.dtype))

        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        query = q + (token * NUM_HEADS + head) * HEAD_DIM
        key = k_cache + block * K_STRIDES[0] + offset * K_STRIDES[1]
        key += (head - NUM_HEADS) * K_STRIDES[2]
        value = v_cache + block * V_STRIDES[0] + offset * V_STRIDES[1]
        value += (head - NUM_HEADS - NUM_KV_HEADS) * V_STRIDES[2]
        stored = there & (slot >= 0)
        to_key, to_value = stored & (is_query == 0) & (is_value == 0), stored & is_value
        _store(query, is_query, low, half, in_half)
        _store(query + HALF, is_query, high, half, in_half)
        _store(key, to_key, low, half, in_half)
        _store(key + HALF, to_key, high, half, in_half)
        _store(value, to_value, low, half, in_half)
        _store(value + HALF, to_value, high, half, in_half)
        if 2 * HALF < HEAD_DIM:
            _store(query, is_query, still, rest, in_rest)
            _store(key, to_key, still, rest, in_rest)
            _store(value, to_value, still, rest, in_rest)


@triton.jit
def _load(heads, which, columns, mask, part_size, PARTS: tl.constexpr):
    """The columns of the heads that ``which`` says, zero else; parts are added up and rounded."""
    place, there = heads + columns[None, :], which & mask[None, :]
    numbers = tl.load(place, mask=there, other=0.0)
    if PARTS > 1:
        total = numbers.to(tl.float32)
        for part in tl.static_range(1, PARTS):
            total += tl.load(place + part * part_size, mask=there, other=0.0).to(tl.float32)
        numbers = total.to(numbers.dtype)
    return numbers


@triton.jit
def _store(heads, which, numbers, columns, mask):
    """Store the heads that ``which`` says at their places."""
    place = heads[:, None] + columns[None, :]
    tl.store(place, numbers.to(heads.dtype.element_ty), mask=which & mask[None, :])
