"""The FFN's gate, said in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See :func:`octavo.kernels.gated.triton.gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up
