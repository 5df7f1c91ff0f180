"""Products of many rows on a real GPU: every tile of the table, and a chain of kernels of which
each begins before the one in front has ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F

from octavo.kernels.linear_batch.tiles import TABLE, Tile, WideTile, choose_tile
from octavo.kernels.linear_batch.triton import gated_batch, linear_batch
from octavo.kernels.norm.triton import add_rms_norm
from octavo.kernels.triton_launch import has_warpgroups, with_room

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or os.environ.get("TRITON_INTERPRET") == "1"
    or not has_warpgroups(),
    reason="needs a Hopper GPU and compiled kernels",
)
HALF = torch.bfloat16
ALL = [(key, rows, tile) for key, tiles in TABLE.items() for rows, tile in tiles.items()]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(HALF)


@pytest.mark.parametrize(("key", "most", "tile"), ALL, ids=str)
def test_every_tile(key: tuple[int, int, bool], most: int, tile: Tile | WideTile) -> None:
    n, k, gated = key
    weight = randn(n, k) / k**0.5
    every_size = range(16, most, 16) if isinstance(tile, WideTile) else ()
    for rows in (1, most - 13, *every_size, most):
        for x in (randn(rows, k), with_room(weight, rows, k).normal_()):
            wanted = x.float() @ weight.float().t()
            if gated:
                gate, up = wanted.chunk(2, 1)
                wanted, found = F.silu(gate) * up, gated_batch(x, weight, "silu", tile)
            else:
                found = linear_batch(x, weight, tile).float().sum(0)
            assert found.shape == wanted.shape
            assert (found - wanted).norm() / wanted.norm() < 5e-3


@pytest.mark.parametrize("rows", [33, 64, 100, 128, 256])
def test_a_chain_gives_the_same_bits_as_kernel_by_kernel(rows: int) -> None:
    """Of Qwen3-0.6B's FFN, a dozen layers deep, over and over from one graph."""
    hidden, inner = 1024, 3072
    up, down = (
        choose_tile(2 * inner, hidden, rows, gated=True),
        choose_tile(hidden, inner, rows, gated=False),
    )
    assert up is not None
    assert down is not None
    layers = [(randn(2 * inner, hidden) / 32, randn(hidden, inner) / 55) for _ in range(12)]
    gain = torch.ones(hidden, device="cuda")
    start = torch.randn(rows, hidden, device="cuda")
    x = start.clone()

    def chain(between: Callable[[], None]) -> None:
        x.copy_(start)
        delta = None
        for gate_up_weight, down_weight in layers:
            normed = add_rms_norm(x, gain, 1e-6, delta=delta, dtype=HALF)
            between()
            assert normed is not None
            ffn = gated_batch(normed, gate_up_weight, "silu", up)
            between()
            delta = linear_batch(ffn, down_weight, down)
            between()
        add_rms_norm(x, None, 1e-6, delta=delta)

    chain(torch.cuda.synchronize)
    results = [x.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for _ in range(20):
        x.fill_(float("nan"))
        graph.replay()
        results.append(x.clone())
    assert results[0].isfinite().all()
    assert all(torch.equal(one, other) for one, other in pairwise(results))
