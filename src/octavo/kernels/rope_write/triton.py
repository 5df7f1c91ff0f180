"""QK-norm, rotation, and the write to the paged cache, for CUDA through Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton_launch import dependent_launches

HEADS = 4  # of a block; a warp each


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
    """Norm and rotate the queries and keys of ``qkv`` [T, (H + 2 Hkv) * D], contiguous; return the
    queries [T, H, D] and store keys and values in the pool.

    ``positions`` and ``slot_mapping`` [T] are integers; a token whose slot is negative is padding
    and isn't stored. ``cos`` and ``sin`` [positions, rotary_dim / 2] float32; ``qk_norm``
    [H + Hkv, D] float32. Caches [blocks, block_size, Hkv, D], innermost dimension contiguous.
    One launch, no waiting.
    """
    num_tokens, dependent = len(qkv), dependent_launches()
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens:
        _kernel[(triton.cdiv(num_heads + 2 * num_kv_heads, HEADS), num_tokens)](
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
            K_STRIDES=k_cache.stride()[:3],
            V_STRIDES=v_cache.stride()[:3],
            BLOCK_SIZE=block_size,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=cos.shape[1],
            BLOCK_D=triton.next_power_of_2(head_dim),
            HEADS=HEADS,
            DEPENDENT=dependent,
            launch_pdl=dependent,
            num_warps=HEADS,
        )
    return q


@triton.jit
def _kernel(
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
    K_STRIDES: tl.constexpr,  # of block, token and head
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the elements that are rotated
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of heads, T). An element is loaded with its partner in the rotation; queries
    go to a place of their own, as in place another warp might still need the partner."""
    if DEPENDENT:
        gdc_launch_dependents()  # the attention kernel finds its share before this one ends
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turning = d < 2 * HALF
    partner = tl.where(turning, partner, d)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    normed = mask & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]

    row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM
    x = tl.load(row + d[None, :], mask=mask, other=0.0)
    y = tl.load(row + partner[None, :], mask=mask, other=0.0)
    a, b = x.to(tl.float32), y.to(tl.float32)
    if qk_norm is not None:
        factor = tl.rsqrt(tl.sum(a * a, 1) / HEAD_DIM + eps)[:, None]
        weights = qk_norm + head[:, None] * HEAD_DIM
        a *= factor * tl.load(weights + d[None, :], mask=normed, other=0.0)
        b *= factor * tl.load(weights + partner[None, :], mask=normed, other=0.0)
        a, b = a.to(x.dtype).to(tl.float32), b.to(x.dtype).to(tl.float32)
    place = tl.load(positions + token).to(tl.int64) * HALF + d % HALF
    c = tl.load(cos + place, mask=turning, other=1.0)
    s = tl.load(sin + place, mask=turning, other=0.0)
    s = tl.where(d < HALF, -s, s)
    turned = (a * c[None, :] + b * s[None, :]).to(x.dtype)

    out = q + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out, turned, mask=mask & (head < NUM_HEADS)[:, None])
    slot = tl.load(slot_mapping + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    stored = mask & (slot >= 0)
    k_head = (head - NUM_HEADS)[:, None]
    keys = k_cache + block * K_STRIDES[0] + offset * K_STRIDES[1] + k_head * K_STRIDES[2]
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    tl.store(keys + d[None, :], turned.to(k_cache.dtype.element_ty), mask=stored & is_key[:, None])
    v_head = k_head - NUM_KV_HEADS
    values = v_cache + block * V_STRIDES[0] + offset * V_STRIDES[1] + v_head * V_STRIDES[2]
    tl.store(values + d[None, :], x.to(v_cache.dtype.element_ty), mask=stored & is_value[:, None])
