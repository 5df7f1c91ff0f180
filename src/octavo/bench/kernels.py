"""The products of a small decode step, each by itself: the fused kernels beside the library, and
which tile is best."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.kernels.linear.table import Key
from octavo.kernels.linear.tiles import ROW_WARPS, Tile

if TYPE_CHECKING:
    from torch import Tensor

COLD_BYTES = 256 << 20  # a launch comes back to the same weights after this many others
EPS = 1e-6
SHARED_BYTES = 200 << 10  # of weights that a block may have on their way, of 227 KiB in all
SURELY = 0.97  # of the listed tile's time: what comes nearer is noise


@dataclass(frozen=True)
class Product:
    """One measurement: ``us`` of a launch of the fused kernel with ``tile``, whose weights come
    from memory; ``share`` of the read bandwidth of the same run; ``library_us`` of the bare
    product, to which the library would need a norm or a sum more."""

    kernel: str
    n: int
    k: int
    rows: int
    tile: Tile
    us: float
    gb_s: float
    share: float
    library_us: float

    @property
    def key(self) -> Key:
        """Its place in the table of tiles."""
        return self.n, self.k, _parts(self.kernel), self.rows


def parse_weight(text: str) -> tuple[str, int, int]:
    """``norm_linear:4096x1024``; raises ConfigError for anything else."""
    match = re.fullmatch(r"(norm_linear|norm_gate_up|linear_add):(\d+)x(\d+)", text)
    if match is None or int(match[2]) < 1 or int(match[3]) < 8 or int(match[3]) % 8:
        raise ConfigError(
            f"weight {text!r} isn't a kernel and two sides, the second a multiple of 8, such as "
            "norm_linear:4096x1024; kernels are norm_linear, norm_gate_up and linear_add"
        )
    if int(match[2]) % _parts(match[1]):
        raise ConfigError(f"weight {text!r} can't have as many rows of gate as of up: make it even")
    return match[1], int(match[2]), int(match[3])


def bench_kernels(
    weights: Sequence[tuple[str, int, int]],
    rows: Sequence[int],
    *,
    read_gb_s: float,
    search: bool = False,
    device: str = "cuda",
) -> Iterator[Product]:
    """A measurement for each weight [n, k] and number of activation rows, with the tile that the
    table has, or with ``search`` one that is surely faster."""
    import torch
    import torch.nn.functional as F

    from octavo.kernels.linear.triton_products import few_rows_tile

    for kernel, n, k in weights:
        copies = max(2, -(-COLD_BYTES // (2 * n * k)))
        matrices = [
            torch.empty(n, k, device=device, dtype=torch.bfloat16).normal_() for _ in range(copies)
        ]
        for m in rows:
            y = torch.randn(m, k, device=device).bfloat16()
            tile = few_rows_tile(n, k, m, _parts(kernel))
            us = _launch_us(_fused(kernel, n, k, y, tile), matrices)
            limit = SURELY * us
            for other in other_tiles(k, tile, _parts(kernel)) if search else ():
                other_us = _launch_us(_fused(kernel, n, k, y, other), matrices)
                if other_us < min(limit, us):
                    tile, us = other, other_us
            library_us = _launch_us(partial(F.linear, y), matrices)
            gb_s = 2 * n * k / us / 1e3
            yield Product(kernel, n, k, m, tile, us, gb_s, gb_s / read_gb_s, library_us)
        del matrices


def library_is_faster_from(products: Sequence[Product]) -> dict[str, int | None]:
    """For each weight the fewest rows from which on the library's product alone is faster; None:
    at none of those measured."""
    found: dict[str, int | None] = {}
    for product in sorted(products, key=lambda one: one.rows):
        name = f"{product.kernel}:{product.n}x{product.k}"
        if product.us <= product.library_us:
            found[name] = None
        elif found.get(name) is None:
            found[name] = product.rows
    return found


def other_tiles(k: int, tile: Tile, parts: int) -> list[Tile]:
    """Tiles to try beside one: of few or twice as many rows (for one activation row of up to 64),
    half or whole chunks, 4 or 8 warps, and 2 or 4 chunks ahead, as far as they fit."""
    one = tile.one_row
    found = dict.fromkeys(
        Tile(rows, chunk, num_warps, ahead, one)
        for rows in ((8 * parts, 16 * parts, 32, 64) if one else (16 * parts, 32 * parts))
        for chunk in (512, 1024)
        if chunk < 2 * k
        for num_warps in ((ROW_WARPS,) if one else (4, 8))
        for ahead in (2, 4)
        if rows * chunk * 2 * min(ahead, -(-k // chunk)) <= SHARED_BYTES
    )
    return [other for other in found if other != tile]


def _parts(kernel: str) -> int:
    return 2 if kernel == "norm_gate_up" else 1


def _fused(kernel: str, n: int, k: int, y: Tensor, tile: Tile) -> Callable[[Tensor], None]:
    """A launch of the kernel on rows ``y`` [M, k], for a weight [n, k]."""
    import torch

    from octavo.kernels.linear_add.triton import linear_add, square_columns
    from octavo.kernels.norm_gate_up.triton import norm_gate_up
    from octavo.kernels.norm_linear.triton import norm_linear

    m = len(y)
    squares, out = torch.ones(m, 64, device=y.device), y.new_empty(m, n)

    def norm_and_multiply(weight: Tensor) -> None:
        norm_linear(y, squares, weight, out, eps=EPS, tile=tile)

    def norm_and_gate(weight: Tensor) -> None:
        norm_gate_up(y, squares, weight, out[:, : n // 2], eps=EPS, tile=tile)

    if kernel != "linear_add":
        return norm_and_multiply if kernel == "norm_linear" else norm_and_gate
    x, norm = torch.zeros(m, n, device=y.device), torch.ones(n, device=y.device)
    new_squares = torch.empty(m, square_columns(n, k, m, tile), device=y.device)

    def multiply_and_add(weight: Tensor) -> None:
        linear_add(y, weight, x, norm, out, new_squares, tile=tile)

    return multiply_and_add


def _launch_us(launch: Callable[[Tensor], object], matrices: Sequence[Tensor]) -> float:
    """Microseconds of a launch, in a captured graph that goes through all matrices."""
    import torch

    launch(matrices[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for matrix in matrices:
            launch(matrix)
    graph.replay()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(matrices))
    return float(median(times))
