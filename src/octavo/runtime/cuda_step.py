"""What the stages of a step of the ``cuda`` runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from octavo.attention.spec import Backend
from octavo.runtime.cuda_linears import Products


@dataclass(frozen=True)
class GroupStep:
    """A KV group's part of a step; a phase without rows has no plan."""

    slots: Tensor  # [T]
    decode_plan: Any | None
    prefill: Backend | None
    prefill_plan: Any | None


@dataclass
class Step:
    """What the stages of one step read, and what they hand on.

    Of the T tokens the first ``num_decodes`` are rows of a single one: decode attention's part.
    """

    x: Tensor  # [T, hidden], the residual stream
    products: Products
    positions: Tensor  # [T]
    num_decodes: int
    groups: Sequence[GroupStep]
    logits_rows: Tensor | None  # [L], tokens whose logits are wanted; None: all
    delta: Tensor | None = None  # [T, hidden], or in parts [P, T, hidden], to be added to x
    post_norm: Tensor | None = None  # its post-norm
    qkv: Tensor = field(init=False)  # [T, q + 2 kv], or in parts [P, T, q + 2 kv]
    q: Tensor = field(init=False)  # [T, heads, head_dim]
    attention: Tensor = field(init=False)  # [T, heads, head_dim]
    ffn: Tensor = field(init=False)  # [T, intermediate]
    hidden: Tensor = field(init=False)  # [L, hidden], normed: the head's input

    def keep_wanted(self, products: Products) -> None:
        """Go on with the tokens alone whose logits are wanted, and with products for them: behind
        the last layer's attention no token reads another."""
        if self.logits_rows is not None:
            self.products = products
            self.x = self.x.index_select(0, self.logits_rows)
            self.attention = self.attention.index_select(0, self.logits_rows)
