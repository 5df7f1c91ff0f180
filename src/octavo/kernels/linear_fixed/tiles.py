"""How a product whose sums don't depend on the batch is cut.

What decides the bits is :func:`num_leaves`, and how K is walked within a leaf; in fused steps
:func:`fixed_tile`: they come from the weight's shape alone. Else a tile only says which block
computes what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from octavo.kernels.linear.table import choose_tile as choose_few_tile
from octavo.kernels.linear.tiles import Tile as FewTile

Kind = Literal["decode", "prefill"]

_LEAF = 256  # columns of the shortest leaf
_BLOCKS = 128  # as many as an H200 has multiprocessors, about
_ROWS = 64  # of a weight: what one instruction takes


@dataclass(frozen=True)
class Tile:
    """A block has ``rows`` weight rows and ``tokens`` activation rows, walks K ``chunk`` columns at
    a time, and has ``stages`` chunks on their way."""

    rows: int
    tokens: int
    chunk: int
    num_warps: int
    stages: int


def num_leaves(n: int, k: int, kind: Kind) -> int:
    """Into how many equal parts the K columns of a ``[n, k]`` weight are cut, each with a sum of
    its own; the sums are added up in order. In decode so many that a few weight rows fill a GPU,
    else one."""
    if kind == "prefill" or k % _LEAF:
        return 1
    most = k // _LEAF
    return next((c for c in range(1, most) if n * c >= _BLOCKS * _ROWS and most % c == 0), most)


def choose_tile(n: int, num_tokens: int, kind: Kind, *, wide: bool) -> Tile:
    """The tile for so many activation rows; ``wide``: they are in float32."""
    if wide:  # multiplied without tensor cores
        return Tile(rows=64, tokens=16, chunk=32, num_warps=4, stages=2)
    if kind == "decode":
        tokens = min(128, max(16, 1 << (num_tokens - 1).bit_length()))
        rows = 128 if tokens > 32 and n >= 2 * _BLOCKS * _ROWS else 64
        chunk = 128 if tokens <= 32 else 64
        return Tile(rows, tokens, chunk, num_warps=4 if rows == 64 else 8, stages=4)
    if -(-n // 128) * -(-num_tokens // 256) >= _BLOCKS:
        return Tile(rows=128, tokens=256, chunk=64, num_warps=8, stages=3)
    return Tile(rows=64, tokens=64 if num_tokens <= 64 else 128, chunk=64, num_warps=4, stages=4)


# ---- fused steps

GROUP = 16  # rows of a weight that share a block where rows are few, and a sum of squares
STEP = 64  # with 32 the compiler hands columns to instructions in another order: other bits


@dataclass(frozen=True)
class Wide:
    """A block has ``rows`` rows of each part of the weight and ``tokens`` activation rows, walks K
    ``STEP`` columns of every slice at a time, and has ``stages`` such steps on their way."""

    rows: int
    tokens: int
    stages: int


def fixed_tile(n: int, k: int, parts: int = 1) -> FewTile:
    """The tile of few rows for a ``[n, k]`` weight, from which the order of its sums follows: what
    is best for two, in pieces of which K has a whole number. ``k`` is a multiple of 64."""
    best = choose_few_tile(n, k, 2, parts)
    piece = max(STEP, best.chunk // best.num_warps)
    while k % piece:
        piece //= 2
    slices = min(best.num_warps, max(1, best.chunk // piece))
    return replace(best, rows=GROUP * parts, chunk=piece * slices, num_warps=slices)


def choose_wide(kernel: Literal["linear", "gate_up", "add"], num_rows: int) -> Wide:
    """The tile for so many rows, more than a few; measured on an H200 with Qwen3-0.6B's weights
    (bench/LOG.md, 2026-11-30). Small tiles leave room beside them for blocks of the next kernel."""
    if kernel == "linear":
        return Wide(rows=32, tokens=32 if num_rows <= 64 else 64, stages=2)
    if kernel == "gate_up":
        return Wide(rows=16 if num_rows <= 128 else 32, tokens=32, stages=2)
    if num_rows <= 64:
        return Wide(rows=GROUP, tokens=32, stages=4)
    return Wide(rows=GROUP, tokens=64, stages=2)
