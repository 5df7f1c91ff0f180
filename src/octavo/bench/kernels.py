"""The products of a small decode step, each by itself: the fused kernels beside the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

COLD_BYTES = 256 << 20  # a launch comes back to the same weights after this many others
EPS = 1e-6


@dataclass(frozen=True)
class Product:
    """One measurement: ``us`` of a launch of the fused kernel, whose weights come from memory,
    ``share`` of the read bandwidth of the same run, and ``library_us`` of the bare product."""

    kernel: str
    n: int
    k: int
    rows: int
    tile: str
    us: float
    gb_s: float
    share: float
    library_us: float


def parse_weight(text: str) -> tuple[str, int, int]:
    """``norm_linear:4096x1024``; raises ConfigError for anything else."""
    match = re.fullmatch(r"(norm_linear|norm_gate_up|linear_add):(\d+)x(\d+)", text)
    if match is None or int(match[2]) < 1 or int(match[3]) < 8 or int(match[3]) % 8:
        raise ConfigError(
            f"weight {text!r} isn't a kernel and two sides, the second a multiple of 8, such as "
            "norm_linear:4096x1024; kernels are norm_linear, norm_gate_up and linear_add"
        )
    return match[1], int(match[2]), int(match[3])


def bench_kernels(
    weights: Sequence[tuple[str, int, int]], rows: Sequence[int], *, read_gb_s: float
) -> Iterator[Product]:
    """A measurement for each weight [n, k] and number of activation rows."""
    import torch
    import torch.nn.functional as F

    from octavo.kernels.linear.table import choose_tile

    for kernel, n, k in weights:
        copies = max(2, -(-COLD_BYTES // (2 * n * k)))
        matrices = [
            torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(copies)
        ]
        for m in rows:
            y = torch.randn(m, k, device="cuda").bfloat16()
            us = _launch_us(_fused(kernel, n, k, y), matrices)
            library_us = _launch_us(partial(F.linear, y), matrices)
            gb_s = 2 * n * k / us / 1e3
            tile = choose_tile(n, k, m, 2 if kernel == "norm_gate_up" else 1)
            cut = f"{tile.rows} x {tile.chunk}, {tile.num_warps} warps, {tile.ahead} ahead"
            yield Product(kernel, n, k, m, cut, us, gb_s, gb_s / read_gb_s, library_us)
        del matrices


def _fused(kernel: str, n: int, k: int, y: Tensor) -> Callable[[Tensor], None]:
    """A launch of the kernel on rows ``y`` [M, k], for a weight [n, k]."""
    import torch

    from octavo.kernels.linear_add.triton import linear_add, square_columns
    from octavo.kernels.norm_gate_up.triton import norm_gate_up
    from octavo.kernels.norm_linear.triton import norm_linear

    m = len(y)
    squares, out = torch.ones(m, 64, device="cuda"), y.new_empty(m, n)

    def norm_and_multiply(weight: Tensor) -> None:
        norm_linear(y, squares, weight, out, eps=EPS)

    def norm_and_gate(weight: Tensor) -> None:
        norm_gate_up(y, squares, weight, out[:, : n // 2], eps=EPS)

    if kernel != "linear_add":
        return norm_and_multiply if kernel == "norm_linear" else norm_and_gate
    x, norm = torch.zeros(m, n, device="cuda"), torch.ones(n, device="cuda")
    new_squares = torch.empty(m, square_columns(n, k, m), device="cuda")

    def multiply_and_add(weight: Tensor) -> None:
        linear_add(y, weight, x, norm, out, new_squares)

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
