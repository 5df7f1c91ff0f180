"""The fused products in fixed sums, in the interpreter: what they compute, and in which order."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from helpers.decode import error
from triton.runtime import interpreter

from octavo.kernels.linear.tiles import MAX_ROWS
from octavo.kernels.linear_add import reference as linear_add_reference
from octavo.kernels.linear_fixed.fused import (
    linear_add,
    norm_gate_up,
    norm_linear,
    square_columns,
)
from octavo.kernels.linear_fixed.tiles import Wide
from octavo.kernels.norm_gate_up import reference as norm_gate_up_reference
from octavo.kernels.norm_linear import reference as norm_linear_reference

torch.set_num_threads(1)
EPS = 1e-6
SHAPES = [(40, 192), (33, 1000), (64, 2048), (24, 5120)]  # N, K
ROWS = [1, 3, MAX_ROWS, MAX_ROWS + 1, 70]


@pytest.fixture(autouse=True)
def products_column_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensor cores do, a product goes on from a sum; numpy's would begin anew."""

    def create_dot(self, a, b, d, *options):
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None] * b.data[..., None, k, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def nans(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def same(parts: dict[int, torch.Tensor]) -> None:
    """Of any number of rows the first are the same."""
    most = parts[ROWS[-1]]
    for count, part in parts.items():
        assert torch.equal(part, most[:count]), count


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_norm_linear(n: int, k: int, biased: bool) -> None:
    h, squares, weight = randn(ROWS[-1], k), torch.rand(ROWS[-1], 5) * k, randn(n, k)
    bias = randn(n) if biased else None
    found = {}
    for count in ROWS:
        out = nans(count, n, dtype=torch.float32)
        norm_linear(h[:count], squares[:count], weight, out, eps=EPS, bias=bias)
        found[count] = out
    want = norm_linear_reference.norm_linear(h, squares, weight, eps=EPS, bias=bias)
    assert error(found[ROWS[-1]], want) < 1e-5
    same(found)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_gate_up(n: int, k: int, activation: str) -> None:
    h, squares, weight = randn(ROWS[-1], k), torch.rand(ROWS[-1], 5) * k, randn(2 * n, k)
    how = {"eps": EPS, "activation": activation, "bias": randn(2 * n)}
    found = {}
    for count in ROWS:
        found[count] = nans(count, n, dtype=torch.float32)
        norm_gate_up(h[:count], squares[:count], weight, found[count], **how)
    want = norm_gate_up_reference.norm_gate_up(h, squares, weight, **how)
    assert error(found[ROWS[-1]], want) < 1e-5
    same(found)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_add(n: int, k: int, biased: bool) -> None:
    y, weight, norm = randn(ROWS[-1], k), randn(n, k), torch.rand(n)
    x, bias = torch.randn(ROWS[-1], n), randn(n) if biased else None
    found: dict[str, dict[int, torch.Tensor]] = {"x": {}, "h": {}, "squares": {}}
    for count in ROWS:
        stream, h = x[:count].clone(), nans(count, n, dtype=torch.float32)
        squares = nans(count, square_columns(n, k, count), dtype=torch.float32)
        linear_add(y[:count], weight, stream, norm, h, squares, bias=bias)
        for name, part in (("x", stream), ("h", h), ("squares", squares)):
            found[name][count] = part
    want = linear_add_reference.linear_add(y, weight, x, norm, bias=bias)
    last = {name: parts[ROWS[-1]] for name, parts in found.items()}
    last["squares"] = last["squares"].sum(-1, keepdim=True)
    for part, right in zip(last.values(), want, strict=True):
        assert error(part, right) < 1e-5
    same(found["x"])  # numpy adds up squares in an order of its own
    same(found["h"])


WIDES = [Wide(1, 32, 40), Wide(2, 16, 9), Wide(4, 8, 200), Wide(2, 64, 100)]


@pytest.mark.parametrize("wide", WIDES)
def test_a_row_is_the_same_in_any_tile(wide: Wide) -> None:
    h, squares, weight = randn(50, 2048), torch.rand(50, 3) * 2048, randn(70, 2048)
    outs = [nans(50, 70) for _ in range(2)]
    norm_linear(h, squares, weight, outs[0], eps=EPS)
    norm_linear(h, squares, weight, outs[1], eps=EPS, wide=wide)
    assert torch.equal(*outs)
    outs = [nans(50, 35) for _ in range(2)]
    norm_gate_up(h, squares, weight, outs[0], eps=EPS)
    norm_gate_up(h, squares, weight, outs[1], eps=EPS, wide=wide)
    assert torch.equal(*outs)
