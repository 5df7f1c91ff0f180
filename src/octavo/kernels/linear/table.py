"""Which tile a product takes: table.json has what was measured, on an H200.

A stage's best tile depends on its neighbours, as blocks of several kernels share a multiprocessor.
Those of Qwen3-0.6B, and of 8B at one row, were chosen one after another within the captured step
(bench/LOG.md); those of two rows were measured at one, by the instructions that take several rows.
``octavo bench kernels --search`` measures each product by itself and puts what is surely faster
into the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from octavo.kernels.linear.tiles import ROW_WARPS, Tile

PATH = Path(__file__).with_name("table.json")
CHUNK_BYTES = 96 << 10  # of weights that a block has on their way: two blocks fit a multiprocessor
Key = tuple[int, int, int, int]  # n, k, parts; and rows: for steps of up to so many


def choose_tile(n: int, k: int, num_rows: int, parts: int = 1) -> Tile:
    """The measured tile for a ``[n, k]`` weight, of which gate and up are two ``parts``, or a fair
    one."""
    measured = _measured()
    for most_rows in (1, 2, 4, 8, 16):
        if num_rows <= most_rows and (n, k, parts, most_rows) in measured:
            return measured[n, k, parts, most_rows]
    rows = 16 * parts
    if num_rows == 1:
        chunk = min(1024 // parts, max(256, 1 << (k - 1).bit_length()))
        ahead = max(1, CHUNK_BYTES // (rows * chunk * 2))
        return Tile(rows, chunk, ROW_WARPS, ahead, one_row=True)
    chunk = min(1024 // parts, max(64, 1 << (k - 1).bit_length()))
    return Tile(rows, chunk, min(8, chunk // 32), max(1, CHUNK_BYTES // (rows * chunk * 2)))


def read_table(path: Path = PATH) -> dict[Key, Tile]:
    """The tiles of a file."""
    found = {}
    for one in json.loads(path.read_text(encoding="utf-8")):
        rows, chunk, num_warps, ahead, *early = one["tile"]
        tile = Tile(rows, chunk, num_warps, ahead, one["rows"] == 1, *early)
        found[one["n"], one["k"], one["parts"], one["rows"]] = tile
    return found


def write_table(tiles: Iterable[tuple[Key, Tile]], path: Path = PATH) -> None:
    """A file of tiles, one a line, in order of rows, then of parts and sides."""
    lines = [
        json.dumps(
            {
                "rows": rows,
                "n": n,
                "k": k,
                "parts": parts,
                "tile": _numbers(tile),
            }
        )
        for (n, k, parts, rows), tile in sorted(tiles, key=lambda one: (one[0][3], one[0][:3]))
    ]
    path.write_text("[\n " + ",\n ".join(lines) + "\n]\n", encoding="utf-8")


def _numbers(tile: Tile) -> list[int]:
    early = [tile.early] if tile.one_row else []
    return [tile.rows, tile.chunk, tile.num_warps, tile.ahead, *early]


_measured = cache(read_table)
