"""What the fused kernel computes, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_linear(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """``cap(h / rms @ weight.T + bias)``: ``h [M, K]``, ``squares [M, parts]``, ``weight [N, K]``
    -> ``[M, N]``, in float32."""
    mean = squares.sum(-1, keepdim=True) / h.shape[-1]
    out = F.linear(h.float(), weight.float()) * torch.rsqrt(mean + eps)
    if bias is not None:
        out = out + bias.float()
    return out if soft_cap is None else soft_cap * torch.tanh(out / soft_cap)
