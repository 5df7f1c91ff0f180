"""What the fused kernel computes, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.spec import AttentionSpec
from octavo.kernels.rope_write.reference import rotate


def rope_attention(
    spec: AttentionSpec,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """``[R, H * D]`` in float32; see ``triton.py`` for the arguments. The caches get the new keys
    and values, in their dtype; attention sees them as they were stored."""
    rows, heads, kv_heads, dim = len(qkv), spec.num_heads, spec.num_kv_heads, spec.head_dim
    split = qkv.float().view(rows, -1, dim)
    qk, v = split[:, :-kv_heads], split[:, -kv_heads:]
    if q_norm is not None and k_norm is not None:
        gains = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
        qk = F.rms_norm(qk, (dim,), eps=eps) * gains
    positions = (seq_lens - 1).clamp(min=0).long()
    qk = rotate(qk, cos[positions][:, None], sin[positions][:, None])
    q, k = qk[:, :heads], qk[:, heads:].to(k_cache.dtype)
    v = v.to(v_cache.dtype)
    out = torch.zeros(rows, heads, dim, device=qkv.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        first = 0 if spec.window is None else max(0, length - spec.window)
        position = torch.arange(first, length - 1, device=qkv.device)
        block = block_table[row, position // spec.block_size].long()
        old = block, position % spec.block_size
        keys = torch.cat((k_cache[old], k[row, None])).float()
        values = torch.cat((v_cache[old], v[row, None])).float()
        groups = q[row].view(kv_heads, -1, dim)
        scores = torch.einsum("hgd,thd->hgt", groups, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        out[row] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).view(heads, dim)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // spec.block_size, slot % spec.block_size] = k[row]
            v_cache[slot // spec.block_size, slot % spec.block_size] = v[row]
    return out.flatten(1)
