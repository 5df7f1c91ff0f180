"""Which products of many rows are ours, and their tiles, as measured on an H200 with the weights of
Qwen3-0.6B and 8B: in a captured chain of a layer's kernels without attention, each product's tile
against the others and the library's, one after another (bench/LOG.md, 2026-12-01)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A block has ``rows`` weight rows (of gate, and as many of up), ``tokens`` activation rows, 64
    for every four warps at least, and one of ``parts`` of K, which it walks ``step`` columns at a
    time; ``stages`` steps are on their way at once."""

    rows: int
    tokens: int
    parts: int
    step: int
    stages: int

    @property
    def num_warps(self) -> int:
        return min(8, self.tokens // 16)


@dataclass(frozen=True)
class WideTile:
    """A block has all activation rows, up to 256, ``groups`` times 64 weight rows (of gate and up
    together), and one of ``parts`` of K: ``wide.cu``."""

    groups: int
    parts: int


# Of a weight [N, K], and whether it is gate and up: for steps of up to so many rows. Of more, and
# of other weights, the library's products are taken.
TABLE: dict[tuple[int, int, bool], dict[int, Tile | WideTile]] = {
    # Qwen3-0.6B
    (4096, 1024, False): {
        64: Tile(64, 64, 2, 64, 8),
        128: Tile(64, 64, 1, 128, 6),
        256: Tile(64, 64, 1, 64, 6),
    },
    (1024, 2048, False): {
        64: Tile(32, 64, 2, 64, 16),
        128: Tile(32, 64, 2, 128, 8),
        256: Tile(64, 64, 4, 64, 6),
    },
    (6144, 1024, True): {
        64: Tile(32, 64, 1, 128, 6),
        128: Tile(32, 64, 1, 64, 6),
        256: Tile(64, 64, 1, 64, 4),
    },
    (1024, 3072, False): {64: Tile(64, 64, 4, 128, 6), 256: Tile(64, 64, 4, 64, 6)},
    # Qwen3-8B
    (6144, 4096, False): {256: WideTile(1, 1)},
    (4096, 4096, False): {64: WideTile(2, 4), 256: WideTile(1, 2)},
    (24576, 4096, True): {256: WideTile(3, 1)},
    (4096, 12288, False): {256: WideTile(2, 4)},
}


def choose_tile(n: int, k: int, num_rows: int, *, gated: bool) -> Tile | WideTile | None:
    """The tile for a ``[n, k]`` weight; None where the library's product is better."""
    tiles = TABLE.get((n, k, gated), {})
    return next((tile for most, tile in tiles.items() if num_rows <= most), None)
