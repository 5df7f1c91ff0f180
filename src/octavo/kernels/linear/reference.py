"""What the product ops compute, said in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

GROUP = 32


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``x`` [T, K], ``weight`` [N, K] -> [T, N]; with an ``activation`` the first half of the rows
    is the gate and the second half up: act(gate) * up, [T, N / 2]."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
    return y if residual is None else residual + y


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 ``[T, K]`` -> int8 ``[T, K]`` and a float32 scale ``[T, K / 32]``."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(dim=-1)
    factor = torch.where(largest > 1e-30, 127 / largest, 0.0)
    q = (groups * factor[..., None]).round()
    return q.to(torch.int8).flatten(-2), largest / 127


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """float64 ``[T, K]``."""
    groups = q.reshape(*q.shape[:-1], -1, GROUP)
    return (groups.double() * scale[..., None].double()).flatten(-2)
