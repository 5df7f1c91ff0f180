"""What the fused kernel computes, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_add(
    y: Tensor, weight: Tensor, x: Tensor, norm: Tensor, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``x + y @ weight.T + bias``, that times ``norm``, and the sum of its squares: ``y [M, K]``,
    ``weight [N, K]``, ``x [M, N]``, ``norm [N]`` -> ``[M, N]``, ``[M, N]``, ``[M, 1]``, in
    float32."""
    x = x.float() + F.linear(y.float(), weight.float(), None if bias is None else bias.float())
    return x, x * norm, (x * x).sum(-1, keepdim=True)
