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
    if qkv.dim() == 3:
        qkv = qkv.float().sum(0).to(qkv.dtype)
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


def spread(x: Tensor, size: int) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of every ``size`` elements, a power of two, of the
    last dimension of ``x``; 0: none."""
    if size == 0:
        return x
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    groups = x.double().view(*x.shape[:-1], x.shape[-1] // size, size)
    result: Tensor = (groups @ matrix / size**0.5).view(x.shape).to(x.dtype)
    return result
