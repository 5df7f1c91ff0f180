"""What the logits op computes, said in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def finish_logits(logits: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Capped logits ``[L, V]``, and the index of each row's largest: of equal ones the first, -1
    where a row holds a NaN or its largest is infinite."""
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    best = logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    values, _ = best.max(dim=1)
    first = (best == values[:, None]).int().argmax(dim=1)
    return logits, torch.where(values.isfinite(), first, -1)
