"""How a product whose sums don't depend on the batch is cut.

What decides the bits is :func:`num_leaves`, and how K is walked within a leaf; in fused steps the
tile of one row: they come from the weight's shape alone. Else a tile only says which block computes
what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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

GROUP = 16  # rows of a weight that share a sum of squares: a block's where there is one row


@dataclass(frozen=True)
class Wide:
    """A block has 64 rows of operands: weight rows in ``across`` neighbouring blocks of columns
    (or in fewer, where one row's tile has fewer), and ``tokens`` activation rows, 8 at least, that
    meet them in as many; ``shared_kb`` of a multiprocessor's memory are for steps on their way."""

    across: int
    tokens: int
    shared_kb: int


class Walk(NamedTuple):
    """How a block walks K, which ``fused_products.py`` explains; ``rows`` are those of a part.
    (Triton writes a kernel's constants as JSON where kernels are noted; a dataclass it can't.)"""

    tokens: int
    rows: int
    parts: int
    across: int
    side: int
    sums: int
    steps: int
    depth: int
    stages: int


def choose_wide(kernel: Literal["linear", "gate_up", "add"], num_rows: int, side: int) -> Wide:
    """The tile for so many rows, more than one, where one row's has ``side`` neighbouring blocks of
    columns; measured on an H200 with Qwen3-0.6B's weights (bench/LOG.md, 2026-12-01)."""
    across, shared_kb = 1, 200
    if kernel == "add":
        across, tokens = (4, 16) if num_rows <= 32 else (2, 16) if num_rows <= 64 else (2, 32)
    elif kernel == "gate_up":
        tokens = 16 if num_rows <= 16 else 32 if num_rows <= 64 else 64
        shared_kb = 200 if num_rows <= 32 else 108  # two blocks to a multiprocessor
    else:
        tokens = 16 if num_rows <= 32 else 32 if num_rows <= 128 else 64
        shared_kb = 200 if num_rows <= 64 else 108
    if num_rows <= 8:
        tokens = 8
    if side > 2 and across == 1:
        tokens = min(32, tokens)  # of 64 the sums would be spilled
    return Wide(across, tokens, shared_kb)
