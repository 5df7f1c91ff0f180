"""Whose products the steps of the ``cuda`` runtime are made of: the library's, or, deterministic,
ours, whose sums don't depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.linear_fixed.triton import linear_fixed, make_counters

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of activations, weight and bias


@dataclass(frozen=True)
class Linears:
    """``decode`` is for steps, or parts of a step, of decode rows only, ``others`` for all others;
    ``head(hidden, weight, out=...)``."""

    decode: Linear
    others: Linear
    head: Callable[..., Tensor]


def _mm(x: Tensor, weight: Tensor, *, out: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


LIBRARY = Linears(F.linear, F.linear, _mm)


def fixed_linears(device: torch.device) -> Linears:
    """For one stream, the current one."""
    counters = make_counters(device)
    decode = partial(linear_fixed, counters=counters, kind="decode")
    prefill = partial(linear_fixed, counters=counters, kind="prefill")
    return Linears(decode, prefill, partial(decode, bias=None))
