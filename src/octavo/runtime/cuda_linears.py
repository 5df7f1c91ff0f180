"""Whose products the steps of the ``cuda`` runtime are made of: the library's, or, deterministic,
ours, whose sums don't depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.gated.triton import gated
from octavo.kernels.linear_batch.tiles import Tile, WideTile, choose_tile
from octavo.kernels.linear_batch.triton import gated_batch, linear_batch
from octavo.kernels.linear_batch.wide import can_compile
from octavo.kernels.linear_fixed import row
from octavo.kernels.linear_fixed.triton import linear_fixed, make_counters
from octavo.kernels.triton_launch import has_warpgroups

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of activations, weight and bias

# Of a result of so many rows and no more columns the library has too few tiles for all
# multiprocessors, or cuts K and adds up in a kernel of its own. Measured of 1,024 and 4,096.
ROWS_IN_PARTS = range(17, 257)
MOST_COLUMNS = 4096
FEW_COLUMNS = 1024  # take more parts
PART_STEP = 64  # columns of K that a part is a multiple of


@dataclass(frozen=True)
class Products:
    """Those of a layer. ``qkv``'s result, and ``added``'s, which is only added to the residual
    stream, are [T, N], or in parts [P, T, N] that are yet to be added up; ``gated`` of activations,
    weight and bias of gate and up, and the activation's name is [T, N / 2]."""

    qkv: Linear
    added: Linear
    gated: Callable[[Tensor, Tensor, Tensor | None, str], Tensor]


@dataclass(frozen=True)
class Linears:
    """``decode`` is for steps, or parts of a step, of decode rows only, ``others`` for all others,
    and ``wanted`` for what those do with the tokens alone whose logits are wanted;
    ``head(hidden, weight, out=...)``."""

    decode: Products
    others: Products
    wanted: Products
    head: Callable[..., Tensor]


def of_linear(linear: Linear) -> Products:
    """All by one function."""
    return Products(linear, linear, lambda x, w, b, activation: gated(linear(x, w, b), activation))


def _mm(x: Tensor, weight: Tensor, *, out: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


def in_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of ``x`` [T, K], ``weight`` [N, K] and ``bias`` [N]: [T, N]; or,
    where that is faster, what P parts of K add to it, [P, T, N]. Each is rounded to x's dtype:
    smaller numbers, so that together they err about as much as the whole would."""
    (rows, k), columns = x.shape, len(weight)
    parts = 4 if columns <= FEW_COLUMNS else 2
    pays = rows in ROWS_IN_PARTS and columns <= MOST_COLUMNS
    if bias is not None or not pays or k % (parts * PART_STEP):
        return F.linear(x, weight, bias)
    of_rows = x.view(rows, parts, k // parts).transpose(0, 1)
    return torch.bmm(of_rows, weight.view(columns, parts, k // parts).permute(1, 2, 0))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` [T, N], or, where it is ours, in parts [P, T, N]."""
    tile = _tile(x, weight, bias)
    return linear_batch(x, weight, tile) if tile else F.linear(x, weight, bias)


def added_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same, the library's in parts, too."""
    tile = _tile(x, weight, bias)
    return linear_batch(x, weight, tile) if tile else in_parts(x, weight, bias)


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``act(gate) * up`` [T, N] of ``x @ weight.T + bias`` [T, 2 N], the gate first."""
    if tile := _tile(x, weight, bias, gated=True):
        return gated_batch(x, weight, activation, tile)
    return gated(F.linear(x, weight, bias), activation)


def _tile(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False
) -> Tile | WideTile | None:
    """What a product of ours takes, where it is the better one."""
    usual = bias is None and x.dtype == torch.bfloat16 and len(x) > 0
    if not usual or not has_warpgroups():
        return None
    n, k = weight.shape
    tile = choose_tile(n, k, len(x), gated=gated)
    return None if isinstance(tile, WideTile) and not can_compile() else tile


FEW_ROWS = Products(product, added_product, gated_product)
LIBRARY = Linears(decode=FEW_ROWS, others=of_linear(F.linear), wanted=FEW_ROWS, head=_mm)


def fixed_linears(device: torch.device) -> Linears:
    """For one stream, the current one."""
    counters = make_counters(device)
    decode = partial(linear_fixed, counters=counters, kind="decode")
    prefill = of_linear(partial(linear_fixed, counters=counters, kind="prefill"))

    def head(hidden: Tensor, weight: Tensor, *, out: Tensor | None) -> Tensor:
        if row.takes(hidden, weight):  # the same bits, earlier
            return row.linear_row(hidden, weight, out=out)
        return decode(hidden, weight, None, out=out)

    return Linears(decode=of_linear(decode), others=prefill, wanted=prefill, head=head)
