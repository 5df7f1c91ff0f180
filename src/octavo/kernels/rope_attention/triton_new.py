"""The fused attention kernel, device side: the new token's query, key and value.

A KV head's group of queries, its new key and its new value are rows of one tile [G, D], normed and
turned together: queries first, then the key, then the value.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from octavo.kernels.gluon import async_copy, gl, jit, mma_v2
from octavo.kernels.rope_attention.triton_layouts import (
    aligned,
    new_layout,
    new_memory,
    score_layout,
)


@jit
def new_tile(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    k_head,
    v_head,
    slot_mapping,
    row,
    head,
    newest,
    ends_row,
    eps,
    stride_qkv,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QK_NORM: tl.constexpr,
    LATE: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Shared memory [G, D] with the new rows in the cache's dtype, and [1, D] with the value; key
    and value are stored in the cache too, by the block whose share ends the row. Waits for the
    kernel in front, before ``qkv`` is read and after all else is. Behind the barrier at its end,
    all tiles that are on their way are there as well, but for the last ``LATE``."""
    NEW: tl.constexpr = new_layout(W, D)
    g = gl.arange(0, G, layout=gl.SliceLayout(1, NEW))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, NEW))
    in_head = d < HEAD_DIM
    is_query, is_key, is_value = g < GROUP, g == GROUP, g == GROUP + 1
    by, by_partner, partner = _turn(
        q_norm, k_norm, cos, sin, newest, d, is_query, is_value, HEAD_DIM, ROTARY, QK_NORM
    )
    new_qkv = qkv + row.to(gl.int64) * stride_qkv
    source = gl.where(is_query, head * GROUP + g, NUM_KV_HEADS * GROUP + head)
    source = (source + gl.where(is_value, NUM_KV_HEADS, 0)) * HEAD_DIM
    in_new = (g < GROUP + 2)[:, None] & in_head[None, :]
    new_slot = gl.load(slot_mapping + row).to(gl.int64)
    is_stored = (is_key | is_value) & ends_row & (new_slot >= 0)
    new_block = new_slot // BLOCK_SIZE
    new_slot = new_slot % BLOCK_SIZE
    k_place = k_head + new_block * K_STRIDES[0] + new_slot * K_STRIDES[1]
    v_place = v_head + new_block * V_STRIDES[0] + new_slot * V_STRIDES[1]
    if DEPENDENT:
        gdc_wait()

    new = gl.load(new_qkv + (source[:, None] + d[None, :]), mask=in_new, other=0.0)
    new_partner = gl.load(new_qkv + (source[:, None] + partner[None, :]), mask=in_new, other=0.0)
    new = new.to(gl.float32)
    rotated = new * by + new_partner.to(gl.float32) * by_partner
    if QK_NORM:
        norm = gl.rsqrt(gl.sum(new * new, 1) / HEAD_DIM + eps)
        rotated *= gl.where(is_value, 1.0, norm)[:, None]
    rotated = rotated.to(k_head.dtype.element_ty)
    rows = gl.allocate_shared_memory(k_head.dtype.element_ty, [G, D], new_memory(D))
    rows.store(rotated)
    # Where rows are swizzled, none can be taken by itself.
    unswizzled = gl.allocate_shared_memory(
        k_head.dtype.element_ty, [G, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), rotated
    )
    gl.store(
        k_place + d[None, :] + g[:, None] * 0,
        rotated,
        mask=(is_key & is_stored)[:, None] & in_head[None, :],
    )
    gl.store(
        v_place + d[None, :] + g[:, None] * 0,
        rotated,
        mask=(is_value & is_stored)[:, None] & in_head[None, :],
    )
    async_copy.wait_group(LATE)
    gl.thread_barrier()
    return rows, unswizzled.slice(GROUP + 1, 1, dim=0)


@jit
def _turn(
    q_norm,
    k_norm,
    cos,
    sin,
    newest,
    d,
    is_query,
    is_value,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """What the new rows' elements ``d`` are multiplied by, what the elements they are turned with,
    and which these are. The gains of the norms are among the factors; a value stays as it is."""
    in_head = d < HEAD_DIM
    HALF: tl.constexpr = ROTARY // 2
    turned = d < ROTARY
    partner = gl.where(d < HALF, d + HALF, gl.where(turned, d - HALF, d))
    angle = gl.maximum(newest, 0) * HALF + gl.where(d < HALF, d, d - HALF)
    ALIGNED: tl.constexpr = aligned(HALF)
    partner = gl.max_contiguous(gl.multiple_of(partner, ALIGNED), ALIGNED)
    angle = gl.max_contiguous(gl.multiple_of(angle, ALIGNED), ALIGNED)
    cosine = gl.load(cos + angle, mask=turned, other=1.0)
    sine = gl.load(sin + angle, mask=turned, other=0.0)
    by = cosine[None, :]
    by_partner = gl.where(d < HALF, -sine, sine)[None, :]
    if QK_NORM:
        gains = gl.where(is_query, q_norm, k_norm)[:, None]
        by = gl.load(gains + d[None, :], mask=in_head[None, :], other=0.0) * by
        of_partner = gl.load(gains + partner[None, :], mask=in_head[None, :], other=0.0)
        by_partner = of_partner * by_partner
    by = gl.where(is_value[:, None], 1.0, by)
    by_partner = gl.where(is_value[:, None], 0.0, by_partner)
    return by, by_partner, partner


@jit
def query_of(new_rows, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The new rows as the left operand [W, G, D] of scores; only the queries' scores count."""
    QUERY: tl.constexpr = gl.DotOperandLayout(0, score_layout(W, P), 2)
    return _for_every_warp(new_rows.load(gl.SliceLayout(0, QUERY)), [W, G, D], QUERY)


@jit
def score_new(
    new_rows,
    query,
    scale,
    soft_cap,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """The queries' scores of the new key, [W, G], the same in every warp."""
    MMA: tl.constexpr = score_layout(W, P)
    KEY: tl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    KEYS: tl.constexpr = 8 if GROUP < 8 else G
    new_key = new_rows.slice(0, KEYS, dim=0).permute((1, 0)).load(gl.SliceLayout(0, KEY))
    new_key = _for_every_warp(new_key, [W, D, KEYS], KEY)
    scores = mma_v2(query, new_key, gl.zeros([W, G, KEYS], gl.float32, layout=MMA)) * scale
    if SOFT_CAP:
        scores = cap(scores, soft_cap)
    of_key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA))) == GROUP
    return gl.sum(gl.where(of_key[None, None, :], scores, 0.0), 2)


@jit
def cap(scores, soft_cap):
    """``soft_cap * tanh(scores / soft_cap)``, both in base 2; right at both infinities."""
    return soft_cap - 2.0 * soft_cap / (
        gl.exp2(scores * (2.0 * 1.4426950408889634 / soft_cap)) + 1.0
    )


@jit
def _for_every_warp(x, shape: tl.constexpr, layout: tl.constexpr):
    """``x`` [rows, columns] as an operand ``shape`` [W, rows, columns]."""
    every, _ = gl.broadcast(gl.expand_dims(x, 0), gl.zeros(shape, x.dtype, layout=layout))
    return every
