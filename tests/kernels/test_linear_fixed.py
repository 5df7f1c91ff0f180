"""Products whose sums don't depend on the batch, in the interpreter."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime import interpreter

from octavo.kernels.linear_fixed import reference, row
from octavo.kernels.linear_fixed.tiles import Kind, Tile, choose_tile, num_leaves
from octavo.kernels.linear_fixed.triton import linear_fixed, make_counters

KINDS = get_args(Kind)
COUNTERS = make_counters(torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(96, 512), (70, 48)])
def test_against_the_reference(n: int, k: int, dtype: torch.dtype, kind: Kind) -> None:
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    for count in (0, 1, 20):
        x = torch.randn(count, k).to(dtype)
        out = torch.full((count + 1, n), 7, dtype=dtype)
        for given in (None, bias):
            found = linear_fixed(x, weight, given, COUNTERS, kind, out=out[:count])
            wanted = reference.linear_fixed(x, weight, given)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found, wanted, atol=30 * tolerance, rtol=tolerance)
        assert (out[count] == 7).all()  # nothing is written past the last row
        assert not COUNTERS.any()


def test_a_row_is_the_same_in_any_batch_and_tile() -> None:
    """In the interpreter a leaf is numpy's product; leaves are added up as on a GPU."""
    weight, x = torch.randn(96, 1024), torch.randn(40, 1024)
    assert num_leaves(96, 1024, "decode") == 4
    tiles = [Tile(rows, tokens, 64, 4, 2) for rows, tokens in ((64, 16), (128, 32))]
    whole = linear_fixed(x, weight, None, COUNTERS, "decode", tile=tiles[0])
    for tile, some in product(tiles, (slice(0, 1), slice(7, 31), slice(39, 40))):
        found = linear_fixed(x[some], weight, None, COUNTERS, "decode", tile=tile)
        torch.testing.assert_close(found, whole[some], atol=1e-4, rtol=1e-5)
        if tile == tiles[0]:
            assert torch.equal(found, whole[some])


@pytest.mark.parametrize(
    ("n", "k"), [(64, 64), (130, 576), (33, 1000), (70, 8), (300, 2048 + 8), (8200, 256)]
)
def test_a_row_alone_is_the_same(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel for one row, whose products go on column by column as tensor cores' do."""

    def create_dot(self, a, b, d, *options):
        total = d.data.copy()
        for column in range(a.data.shape[-1]):
            total += a.data[..., column, None] * b.data[..., None, column, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    weight, x = torch.randn(n, k).bfloat16(), torch.randn(17, k).bfloat16()
    whole = linear_fixed(x, weight, None, COUNTERS, "decode")
    for one in (0, 16):
        assert row.takes(x[one : one + 1], weight) == (k <= 2048)
        if k <= 2048:
            out = torch.full((2, n), 7, dtype=torch.bfloat16)
            row.linear_row(x[one : one + 1], weight, out=out[:1])
            assert torch.equal(out[0], whole[one])
            assert (out[1] == 7).all()


def test_what_the_kernel_for_one_row_leaves_to_others() -> None:
    weight, x = torch.randn(1024, 1024).bfloat16(), torch.randn(2, 1024).bfloat16()
    assert num_leaves(1024, 1024, "decode") > 1
    assert not row.takes(x[:1], weight)
    assert row.takes(x[:1, :576], weight[:, :576].contiguous())
    assert not row.takes(x[:1, :576], weight[:, :576])  # rows aren't beside one another
    assert not row.takes(x[:, :576], weight[:, :576].contiguous())
    assert not row.takes(x[:1, :576].float(), weight[:, :576].contiguous().float())
    assert not row.takes(x[:1, :60], weight[:, :60].contiguous())  # not whole 16 bytes


SHAPES = [(4096, 1024), (1024, 3072), (1024, 2048), (24576, 4096), (4096, 12288), (151936, 4096)]


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (576, 576), (49152, 576), (1, 256)])
def test_leaves_and_tiles_are_whole(n: int, k: int) -> None:
    for kind in KINDS:
        leaves = num_leaves(n, k, kind)
        assert k % leaves == 0
        assert leaves == 1 or (k // leaves) % 256 == 0
        for count in (1, 16, 17, 64, 200, 8192):
            for wide in (False, True):
                tile = choose_tile(n, count, kind, wide=wide)
                assert tile.tokens >= 16  # fewer would be another instruction
                chunk = (tile.rows + tile.tokens) * tile.chunk * (4 if wide else 2)
                assert chunk * tile.stages <= 200 << 10  # of a multiprocessor's shared memory
                assert leaves == 1 or -(-n // tile.rows) * -(-256 // tile.tokens) < len(COUNTERS)
