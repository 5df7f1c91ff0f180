"""The fused decode kernels on a real GPU: full shapes, and captured graphs. Run this folder by
itself: tests/kernels switches Triton to its interpreter for the whole process."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from helpers.decode import (
    attend,
    check_attention,
    error,
    launch_attention,
    make_rows,
    reference_attention,
)

from octavo.kernels.linear.tiles import Tile
from octavo.kernels.linear_add import reference as linear_add_reference
from octavo.kernels.linear_add.triton import linear_add, square_columns
from octavo.kernels.norm_gate_up import reference as norm_gate_up_reference
from octavo.kernels.norm_gate_up.triton import norm_gate_up
from octavo.kernels.norm_linear import reference as norm_linear_reference
from octavo.kernels.norm_linear.triton import norm_linear
from octavo.kernels.rope_attention.triton import Cut, choose_cut, make_scratch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() < (9, 0)
    or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs a CUDA GPU of compute capability 9.0 and compiled kernels",
)
EPS = 1e-6
SHAPES = [
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
    (6144, 1024),
    (6144, 4096),
    (4096, 12_288),
    (49_155, 576),
    (152, 64),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products(n, k, rows):
    h, squares, weight, bias = (
        randn(rows, k),
        torch.rand(rows, 64, device="cuda"),
        randn(n, k),
        randn(n),
    )
    out = nans(rows, n)
    norm_linear(h, squares, weight, out, eps=EPS, bias=bias, soft_cap=1e3)
    want = norm_linear_reference.norm_linear(h, squares, weight, eps=EPS, bias=bias, soft_cap=1e3)
    assert error(out, want) < 1e-5

    inner = n // 2
    out = nans(rows, inner)
    even = weight[: 2 * inner]
    norm_gate_up(h, squares, even, out, eps=EPS)
    assert error(out, norm_gate_up_reference.norm_gate_up(h, squares, even, eps=EPS)) < 1e-4

    x, norm = torch.randn(rows, n, device="cuda"), torch.rand(n, device="cuda")
    want = linear_add_reference.linear_add(h, weight, x, norm, bias=bias)
    scaled, sums = nans(rows, n), nans(rows, square_columns(n, k, rows))
    linear_add(h, weight, x, norm, scaled, sums, bias=bias)
    for found, right in zip((x, scaled, sums.sum(-1, keepdim=True)), want, strict=True):
        assert error(found, right) < 1e-5


@pytest.mark.parametrize(
    "tile",
    [
        Tile(64, 256, 4, ahead=4, one_row=True, early=2),
        Tile(64, 512, 4, ahead=1, one_row=True, early=1),
        Tile(32, 128, 4, ahead=2, one_row=True, early=6),
        Tile(16, 512, 4, ahead=3, one_row=True, early=3),
        Tile(8, 1024, 4, ahead=1, one_row=True, early=1),
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (333, 2088), (152, 64)])
def test_weights_of_a_row_that_wait_in_registers(n, k, tile):
    h, squares, weight = randn(1, k), torch.rand(1, 64, device="cuda"), randn(n, k)
    want = norm_linear_reference.norm_linear(h, squares, weight, eps=EPS)
    out = nans(1, n)
    for _ in range(20):
        norm_linear(h, squares, weight, out.fill_(torch.nan), eps=EPS, tile=tile)
        assert error(out, want) < 1e-5


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
        {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "norms": False},
        {"num_heads": 10, "num_kv_heads": 2, "head_dim": 80, "rotary_dim": 32, "block_size": 48},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256},
        {"num_heads": 28, "num_kv_heads": 2, "head_dim": 96, "soft_cap": 20.0},
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "window": 200},
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": torch.float16},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "lens", [[1], [128], [129], [1, 0, 700, 63, 64, 65, 1500], [3000], [5000], [9000]], ids=str
)
def test_attention(lens, shape):
    rows = make_rows(lens, device="cuda", **shape)
    check_attention(rows, choose_cut(rows.spec, len(lens), max(lens)))


@pytest.mark.parametrize(
    "cut",
    [
        *(Cut(splits, 64, 4, 3) for splits in (1, 2, 7, 32, 33, 64)),
        *(Cut(splits, 256, 8, 1) for splits in (1, 3, 12)),
        Cut(24, 128, 4, 1),
        Cut(16, 128, 8, 2),
    ],
    ids=str,
)
def test_any_cut_repeats_bitwise(cut):
    """A moving result would be a race between the blocks."""
    rows = make_rows([3000, 1, 0, 500], num_heads=16, num_kv_heads=8, head_dim=128, device="cuda")
    check_attention(rows, cut)
    first, _ = attend(rows, cut)
    for _ in range(50):
        assert torch.equal(attend(rows, cut)[0], first)


def test_one_capture_serves_every_length():
    """What is captured reads exact lengths on the device; scratch is poisoned before a replay."""
    longest = make_rows([4096] * 3, num_heads=16, num_kv_heads=8, head_dim=128, device="cuda")
    cut = choose_cut(longest.spec, 3, 4096)
    scratch = make_scratch(longest.spec, 3, cut.splits)
    out = nans(3, 16 * 128, dtype=torch.bfloat16)

    launch_attention(longest, out, cut, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_attention(longest, out, cut, scratch)
    for lens in ([1, 1, 1], [4096, 4095, 0], [64, 65, 129], [2049, 1, 3000]):
        blocks = [longest.block_table[i, max(n - 1, 0) // 16].item() for i, n in enumerate(lens)]
        slots = [
            -1 if n == 0 else block * 16 + (n - 1) % 16
            for n, block in zip(lens, blocks, strict=True)
        ]
        longest.seq_lens.copy_(torch.tensor(lens))
        longest.slot_mapping.copy_(torch.tensor(slots))
        for part in (scratch.out, scratch.m, scratch.l, out):
            part.fill_(torch.nan)
        rows = replace(longest, k_cache=longest.k_cache.clone(), v_cache=longest.v_cache.clone())
        graph.replay()
        assert error(out, reference_attention(rows)) < 8e-3
        assert not scratch.counters.any()
