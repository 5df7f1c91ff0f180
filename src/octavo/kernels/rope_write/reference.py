"""QK-norm, rotation, and the write to the paged cache, said in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.norm.reference import rms_norm


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
    """See :func:`octavo.kernels.rope_write.triton.rope_write`."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.view(len(qkv), -1, head_dim)
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    qk = rotate(qk, cos[positions.long()][:, None], sin[positions.long()][:, None])
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    place = slots // block_size, slots % block_size
    k_cache[place] = qk[stored, num_heads:].to(k_cache.dtype)
    v_cache[place] = v[stored].to(v_cache.dtype)
    return qk[:, :num_heads].contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head of ``x`` [T, heads, head_dim]: element
    ``i`` with element ``i + rotary_dim / 2``. ``cos`` and ``sin`` are [T, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), -1)
