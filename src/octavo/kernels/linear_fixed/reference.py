"""The product, said in torch."""

from __future__ import annotations

from torch import Tensor


def linear_fixed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float64: what any order of sums comes near to."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)
