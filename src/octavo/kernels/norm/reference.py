"""RMSNorm with the residual's addition in front of it, said in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, computed in float32; ``weight`` is float32."""
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    delta: Tensor | None = None,
    post_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """See :func:`octavo.kernels.norm.triton.add_rms_norm`."""
    if delta is not None and delta.dim() == 3:
        delta = delta.float().sum(0)
    if delta is not None:
        if post_weight is not None:
            delta = rms_norm(delta, post_weight, eps)
        x.copy_(x + delta)
    return None if weight is None else rms_norm(x.float(), weight, eps).to(dtype or x.dtype)
