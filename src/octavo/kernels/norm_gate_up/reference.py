"""What the fused kernel computes, in torch."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.norm_linear.reference import norm_linear


def norm_gate_up(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    *,
    eps: float,
    activation: Literal["silu", "gelu_tanh"] = "silu",
    bias: Tensor | None = None,
) -> Tensor:
    """``act(gate) * up`` of ``h [M, K]``; ``weight [2 I, K]`` has the rows of gate, then those of
    up -> ``[M, I]``, in float32."""
    gate, up = norm_linear(h, squares, weight, eps=eps, bias=bias).chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
