"""Which tile a product takes: measured for known shapes within whole decode steps on an H200.

A stage's best tile depends on its neighbours, as blocks of several kernels share a multiprocessor:
so they were chosen one after another within the captured step
(bench/results/2026-11-30-h200-decode-step.md), not each by itself.
"""

from __future__ import annotations

from octavo.kernels.linear.tiles import Tile

CHUNK_BYTES = 96 << 10  # of weights that a block has on their way: two blocks fit a multiprocessor
Tiles = dict[tuple[int, int, int], Tile]  # (n, k, parts)

# For steps of up to so many rows; the first that has the shape counts.
TILES: tuple[tuple[int, Tiles], ...] = (
    (
        1,
        {
            # Qwen3-0.6B: QKV, O, gate and up, down, head
            (4096, 1024, 1): Tile(16, 1024, 8),
            (1024, 2048, 1): Tile(16, 1024, 16),
            (6144, 1024, 2): Tile(32, 1024, 4),
            (1024, 3072, 1): Tile(16, 1024, 8),
            (151_936, 1024, 1): Tile(16, 1024, 4),
            # Qwen3-8B
            (6144, 4096, 1): Tile(16, 1024, 4, ahead=2),
            (4096, 4096, 1): Tile(16, 1024, 4, ahead=2),
            (24_576, 4096, 2): Tile(32, 1024, 8, ahead=2),
            (4096, 12_288, 1): Tile(16, 1024, 4, ahead=3),
            (151_936, 4096, 1): Tile(32, 1024, 8, ahead=2),
        },
    ),
    (
        4,
        {
            (4096, 1024, 1): Tile(16, 1024, 8),
            (1024, 2048, 1): Tile(16, 1024, 8),
            (6144, 1024, 2): Tile(32, 1024, 8),
            (1024, 3072, 1): Tile(16, 1024, 8),
            (151_936, 1024, 1): Tile(32, 1024, 8),
        },
    ),
    (
        16,
        {
            (4096, 1024, 1): Tile(32, 1024, 8),
            (1024, 2048, 1): Tile(16, 1024, 8),
            (6144, 1024, 2): Tile(32, 1024, 4),
            (1024, 3072, 1): Tile(16, 1024, 8),
            (151_936, 1024, 1): Tile(16, 1024, 4),
        },
    ),
)


def choose_tile(n: int, k: int, num_rows: int, parts: int = 1) -> Tile:
    """The measured tile for a ``[n, k]`` weight, of which gate and up are two ``parts``, or a fair
    one."""
    for most_rows, tiles in TILES:
        if num_rows <= most_rows and (n, k, parts) in tiles:
            return tiles[n, k, parts]
    rows = 16 * parts
    chunk = min(1024 // parts, max(64, 1 << (k - 1).bit_length()))
    return Tile(rows, chunk, min(8, chunk // 32), max(1, CHUNK_BYTES // (rows * chunk * 2)))
