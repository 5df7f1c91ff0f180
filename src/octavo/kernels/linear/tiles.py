"""How a product is cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 16  # activation rows of the kernels for few rows
ROW_WARPS = 4  # of the kernels for one row: a warpgroup
MOST_ROWS = 32  # of a fused step: of more, the library's products are faster


@dataclass(frozen=True)
class Tile:
    """A block has ``rows`` rows of the weight, 16 at least of each of its parts, and walks K
    ``chunk`` columns at a time with ``num_warps`` warps, which share out a chunk: at least 32
    columns each. All are powers of two. ``ahead`` chunks are on their way at once.

    A tile of ``one_row`` is for a single activation row and for warpgroups (``triton_row.py``):
    8 to 64 rows of each part, 4,096 elements at least of each in a chunk, ``ROW_WARPS`` warps. Its
    first ``early`` chunks wait in registers, and ``ahead`` others are on their way. (Of other tiles
    as many wait there as fit: ``chunks_early``.)"""

    rows: int
    chunk: int
    num_warps: int
    ahead: int = 4
    one_row: bool = False
    early: int = 0
