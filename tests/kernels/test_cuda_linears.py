"""Products in parts of K against the whole."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from octavo.runtime.cuda_linears import in_parts


@pytest.mark.parametrize(
    ("rows", "columns", "k", "parts"),
    [(17, 80, 256, 4), (256, 1024, 768, 4), (33, 1025, 384, 2), (64, 4096, 128, 2)],
)
def test_parts_add_up_to_the_product(rows, columns, k, parts):
    x, weight = torch.randn(rows, k), torch.randn(columns, k)
    found = in_parts(x, weight, None)
    assert found.shape == (parts, rows, columns)
    assert found.is_contiguous()  # as the norm wants it
    torch.testing.assert_close(found.sum(0), x @ weight.t(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(16, 80, 256), (257, 80, 256), (32, 4097, 256), (32, 80, 192)]
)
def test_the_rest_stays_whole(rows, columns, k):
    x, weight = torch.randn(rows, k), torch.randn(columns, k)
    torch.testing.assert_close(in_parts(x, weight, None), x @ weight.t(), atol=1e-3, rtol=1e-4)


def test_a_bias_is_added_once():
    x, weight, bias = torch.randn(32, 256), torch.randn(80, 256), torch.randn(80)
    wanted = x @ weight.t() + bias
    torch.testing.assert_close(in_parts(x, weight, bias), wanted, atol=1e-3, rtol=1e-4)
