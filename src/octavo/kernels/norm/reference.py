"""What the norm op computes, said in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [T, width]`` by its root mean square and ``weight [width]``, float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_norm(
    x: Tensor, y: Tensor | None, post_weight: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output ``y``, post-normed, to the residual stream, and norm that for the
    next sublayer: ``(x, normed)``. Without ``y`` x stays as it is."""
    if y is not None:
        x = x + (y if post_weight is None else rms_norm(y, post_weight, eps))
    return x, rms_norm(x, weight, eps)
