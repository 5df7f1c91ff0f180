"""What the kernel computes, in torch."""

from __future__ import annotations

from torch import Tensor


def embed(
    ids: Tensor, table: Tensor, norm: Tensor, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``x = table[ids] * scale``, zeros for a negative id; ``x * norm``, and the sum of the squares
    of x: ``ids [M]``, ``table [V, hidden]``, ``norm [hidden]`` -> ``[M, hidden]``, ``[M, hidden]``,
    ``[M, 1]``, in float32."""
    x = table[ids.clamp(min=0).long()].float() * scale * (ids >= 0)[:, None]
    return x, x * norm, (x * x).sum(-1, keepdim=True)
