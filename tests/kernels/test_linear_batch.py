"""Products of many rows beside those in float32, and a model whose decode steps use them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from helpers.checkpoints import family, reference_logits
from helpers.cuda_runtime import load
from helpers.driver import relative_error

from octavo.kernels.linear_batch import wide
from octavo.kernels.linear_batch.tiles import TABLE, Tile, WideTile, choose_tile
from octavo.kernels.linear_batch.triton import gated_batch, linear_batch
from octavo.kernels.triton_launch import ROOM, with_room
from octavo.runtime import cuda_linears

CASES = [  # rows, N, K
    (40, 256, 512, Tile(128, 64, 2, 64, 3)),
    (70, 128, 384, Tile(64, 64, 1, 128, 2)),  # more stages than fit, two tiles of tokens
    (130, 64, 256, Tile(64, 128, 4, 64, 4)),  # as many stages as steps
    (1, 96, 320, Tile(32, 64, 5, 64, 8)),
]


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize(("rows", "n", "k", "tile"), CASES)
def test_products(rows: int, n: int, k: int, tile: Tile, room: bool) -> None:
    half = torch.bfloat16
    x, weight = torch.randn(rows, k).to(half), (torch.randn(2 * n, k) / k**0.5).to(half)
    if room:  # whatever lies behind the last row
        x = with_room(x, rows, k).copy_(x)
        x.untyped_storage().resize_(ROOM * 2 * k * 2)
        x.as_strided((ROOM * 2 - rows, k), (k, 1), rows * k).fill_(float("nan"))
    wanted = x.float() @ weight.float().t()
    found = linear_batch(x, weight[:n], tile)
    assert found.shape == (tile.parts, rows, n)
    assert error(found.float().sum(0), wanted[:, :n]) < 5e-3
    for activation, function in (("silu", F.silu), ("gelu_tanh", gelu)):
        gated = gated_batch(x, weight, activation, replace(tile, parts=1))
        assert gated.shape == (rows, n)
        assert error(gated.float(), function(wanted[:, :n]) * wanted[:, n:]) < 5e-3


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_the_table() -> None:
    """Whole tiles, as few sums as a thread has registers for, memory that a block can have; and
    those of most rows last, as they are looked for in order."""
    for (n, k, gated), tiles in TABLE.items():
        assert list(tiles) == sorted(tiles)
        for most, tile in tiles.items():
            weights = 2 if gated else 1
            assert not gated or tile.parts == 1
            if isinstance(tile, WideTile):
                assert most <= wide.MOST_ROWS
                assert n % (64 * tile.groups) == 0
                assert k % (tile.parts * wide.STEP) == 0
                continue
            assert n % (weights * tile.rows) == 0
            assert k % (tile.parts * tile.step) == 0
            assert tile.rows * weights * tile.tokens <= 128 * 32 * tile.num_warps
            stages = min(tile.stages, k // tile.parts // tile.step)
            assert stages * (tile.rows * weights + tile.tokens) * tile.step * 2 <= 200 << 10
    assert choose_tile(4096, 1024, 257, gated=False) is None
    assert choose_tile(4096, 1024, 65, gated=False) == TABLE[4096, 1024, False][128]
    assert choose_tile(4096, 1024, 65, gated=True) is None


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
@pytest.mark.parametrize(
    ("tokens", "groups", "activation"),
    [(16, 1, ""), (112, 2, ""), (192, 3, "silu"), (208, 3, "gelu_tanh"), (256, 3, "")],
)
def test_wide_products_compile(tmp_path: Path, tokens: int, groups: int, activation: str) -> None:
    """With all sums in registers, and instructions that needn't wait for one another."""
    source = tmp_path / "wide.cu"
    source.write_text(wide.kernel_source(tokens, groups, activation))
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v"]
    command += ["-cubin", "-o", str(tmp_path / "wide.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert "Performance Loss" not in done.stderr


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of every product that may be in parts: of decode rows, and in the last layer."""
    chosen = []

    def choose(n: int, k: int, num_rows: int, *, gated: bool) -> Tile:
        chosen.append(num_rows)
        return Tile(16, 64, 1 if gated else 2, 16, 2)

    monkeypatch.setattr(cuda_linears, "choose_tile", choose)
    model = family(tmp_path, "qwen3")
    ids = np.random.default_rng(1).integers(0, 320, 24).tolist()
    logits = load(model, dtype="bfloat16").run(ids, decode_from=20)
    assert relative_error(logits, reference_logits(model, ids)) < 0.05
    assert set(chosen) == {1, 20}
