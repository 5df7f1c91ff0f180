"""Products with packed weights: every format at every level of the CPU that is here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.packed import FILE_FORMATS, dequantized, random_tensor
from numpy.typing import NDArray

from octavo.checkpoint.tensor import WeightTensor
from octavo.kernels.levels import usable_levels
from octavo.kernels.linear import reference
from octavo.kernels.linear.cpu import linear
from octavo.kernels.linear.cpu_q8 import q8_row_bytes, q8_rows, quantize_row
from octavo.kernels.linear.packing import PackedLinear, in_packed_order, pack
from octavo.kernels.program import Program
from octavo.kernels.quantize.cpu import quantize
from octavo.kernels.team import Team

Floats = NDArray[np.float32]
QUANTISED = [*(f for f in FILE_FORMATS if f.startswith("Q")), "INT8"]
FLOATS = ["F32", "F16", "BF16"]
TEAMS = {n: Team(n) for n in (1, 2, 3)}
POISON = np.float32(1e30)


def make(format: str, rows: int, columns: int, seed: int = 0) -> WeightTensor:
    return random_tensor("F32" if format == "INT8" else format, rows, columns, seed)


def packed(format: str, *tensors: WeightTensor, gated: bool = False) -> PackedLinear:
    return pack(tensors, int8=format == "INT8", gated=gated)


def activations(num_tokens: int, columns: int, seed: int = 1) -> Floats:
    """Rows of unequal size, a whole group of zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (num_tokens, columns)).astype(np.float32)
    x *= rng.lognormal(0, 1, (num_tokens, 1)).astype(np.float32)
    x[0, :32] = 0
    return x


def quantized(x: Floats) -> NDArray[np.uint8]:
    rows = q8_rows(*x.shape)
    rows[:] = 0xA5  # what isn't written
    for i, row in enumerate(x):
        quantize_row(row.ctypes.data, x.shape[1], rows[i].ctypes.data)
    return rows


def run(
    weights: PackedLinear,
    x: Floats,
    mode: str,
    level: str,
    *,
    threads: int = 1,
    out: Floats | None = None,
    **options: Any,
) -> Floats:
    """The result, after a look at what must not have been touched."""
    num_tokens = len(x)
    width = weights.rows // 2 if weights.gated else weights.rows
    if out is None:
        out = np.full((num_tokens, width), POISON, np.float32)
    buffer = np.full((num_tokens + 2, width + 3), POISON, np.float32)
    buffer[:num_tokens, :width] = out
    x_rows: NDArray[Any] = quantized(x) if mode == "q8" else x
    call = linear(
        weights,
        num_tokens=np.array([num_tokens], np.int64),
        x=x_rows,
        x_stride=x_rows.strides[0],
        out=buffer,
        out_stride=buffer.strides[0],
        mode=mode,
        level=level,
        **options,
    )
    TEAMS[threads].run(Program([call]))
    assert (buffer[num_tokens:] == POISON).all()
    assert (buffer[:, width:] == POISON).all()
    return buffer[:num_tokens, :width].copy()


def shapes(format: str) -> list[tuple[int, int]]:
    """(N, K)"""
    if format in FLOATS:
        return [(1, 1), (15, 7), (16, 8), (17, 33), (49, 64), (64, 576)]
    if format.endswith("_K"):
        return [(1, 256), (15, 512), (16, 256), (17, 1536), (49, 768)]
    return [(1, 32), (15, 64), (16, 96), (17, 576), (49, 1536)]


@pytest.mark.parametrize("level", usable_levels())
@pytest.mark.parametrize("format", QUANTISED)
def test_q8_is_the_product_of_the_quantised_activations(format, level):
    for rows, columns in shapes(format):
        tensor = make(format, rows, columns)
        weights, w = packed(format, tensor), dequantized(tensor, format)
        x = activations(33, columns)
        y = run(weights, x, "q8", level)
        q, scale = reference.quantize(torch.from_numpy(x))
        x_q8 = reference.dequantize(q, scale).numpy()
        exact = x_q8 @ w.T
        size = np.abs(x_q8) @ np.abs(w).T
        assert (np.abs(y - exact) <= 2e-6 * size + 1e-30).all()
        # And against the activations as they were: half a step of each.
        step = np.repeat(scale.numpy(), 32, axis=1)
        bound = 0.5001 * step @ np.abs(w).T + 2e-6 * size + 1e-30
        assert (np.abs(y - x.astype(np.float64) @ w.T) <= bound).all()


@pytest.mark.parametrize("level", usable_levels())
@pytest.mark.parametrize("format", [*QUANTISED, *FLOATS])
def test_exact_is_the_product_to_float32_rounding(format, level):
    for rows, columns in shapes(format):
        tensor = make(format, rows, columns)
        weights, w = packed(format, tensor), dequantized(tensor, format)
        x = activations(33, columns)
        y = run(weights, x, "exact", level)
        x64 = x.astype(np.float64)
        size = np.abs(x64) @ np.abs(w).T
        assert (np.abs(y - x64 @ w.T) <= 3e-6 * size + 1e-30).all()


@pytest.mark.parametrize("level", usable_levels())
@pytest.mark.parametrize(
    ("format", "mode"), [("Q4_1", "q8"), ("Q8_0", "q8"), ("Q6_K", "q8"), ("BF16", "exact")]
)
def test_a_token_is_the_same_by_bits_in_any_batch_and_on_any_number_of_threads(format, mode, level):
    rows, columns = 145, 512
    weights = packed(format, make(format, rows, columns))
    x = activations(290, columns)
    whole = run(weights, x, mode, level)
    for num_tokens in (1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 129, 290):
        for threads in TEAMS:
            start = 290 - num_tokens
            y = run(weights, x[start:], mode, level, threads=threads)
            np.testing.assert_array_equal(y, whole[start:])


@pytest.mark.parametrize("format", QUANTISED)
def test_q8_is_the_same_by_bits_at_every_level_with_fma(format):
    rows, columns = 33, 512
    weights = packed(format, make(format, rows, columns))
    x = activations(20, columns)
    results = [run(weights, x, "q8", level) for level in usable_levels() if level != "plain"]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("level", usable_levels())
@pytest.mark.parametrize(("format", "mode"), [("Q4_1", "q8"), ("BF16", "exact")])
def test_bias_and_residual(format, mode, level):
    for rows in (15, 49):
        tensor = make(format, rows, 64)
        weights = packed(format, tensor)
        x = activations(9, 64)
        bias = np.random.default_rng(2).normal(0, 1, rows).astype(np.float32)
        residual = np.random.default_rng(3).normal(0, 1, (9, rows)).astype(np.float32)
        y = run(weights, x, mode, level)
        np.testing.assert_array_equal(run(weights, x, mode, level, bias=bias), y + bias)
        np.testing.assert_array_equal(
            run(weights, x, mode, level, bias=bias, accumulate=True, out=residual),
            residual + (y + bias),
        )
        np.testing.assert_array_equal(
            run(weights, x, mode, level, accumulate=True, out=residual), residual + y
        )


@pytest.mark.parametrize("level", usable_levels())
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("format", "mode"), [("Q4_1", "q8"), ("BF16", "exact")])
def test_gate_and_up_in_one(format, mode, activation, level):
    for width in (16, 17, 96):
        gate, up = make(format, width, 64, seed=4), make(format, width, 64, seed=5)
        x = activations(9, 64)
        weights = packed(format, gate, up, gated=True)
        both = run(packed(format, gate, up), x, mode, level)
        eye = torch.eye(2 * width, dtype=torch.float64)
        biases = np.random.default_rng(6).normal(0, 1, (2, width)).astype(np.float32)
        order = in_packed_order(list(biases), gated=True)
        for products, options in ((both, {}), (both + biases.reshape(-1), {"bias": order})):
            y = run(weights, x, mode, level, activation=activation, **options)
            rows = torch.from_numpy(products).double()
            expected = reference.linear(rows, eye, activation=activation).numpy()
            np.testing.assert_allclose(y, expected, rtol=2e-5, atol=1e-11)


@pytest.mark.parametrize("level", usable_levels())
@pytest.mark.parametrize("gated", [False, True])
def test_the_result_is_quantised_for_the_next_product(gated, level):
    width = 160
    tensors = [make("Q4_1", width, 64, seed=s) for s in range(1 + gated)]
    weights = packed("Q4_1", *tensors, gated=gated)
    for num_tokens in (1, 3, 65, 130):
        x = activations(num_tokens, 64)
        options: dict[str, Any] = {"activation": "silu"} if gated else {}
        rows = q8_rows(num_tokens, width)
        y = run(
            weights, x, "q8", level, threads=2,
            out_q8=rows, out_q8_stride=rows.strides[0], **options,
        )  # fmt: skip
        used = width + width // 32 * 16
        np.testing.assert_array_equal(rows[:, :used], quantized(y)[:, :used])
        only = q8_rows(num_tokens, width)
        x_rows = quantized(x)
        call = linear(
            weights, num_tokens=np.array([num_tokens]), x=x_rows, x_stride=x_rows.strides[0],
            out_q8=only, out_q8_stride=only.strides[0], level=level, **options,
        )  # fmt: skip
        TEAMS[2].run(Program([call]))
        np.testing.assert_array_equal(only[:, :used], rows[:, :used])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_with_its_token(bad):
    weights = packed("Q4_1", make("Q4_1", 16, 64))
    x = activations(3, 64)
    whole = run(weights, x, "q8", usable_levels()[0])
    x[1, 40] = bad
    y = run(weights, x, "q8", usable_levels()[0])
    assert not np.isfinite(y[1]).any()
    np.testing.assert_array_equal(y[[0, 2]], whole[[0, 2]])


def test_quantised_rows():
    x = activations(7, 576)
    x[3, 64:96] = 1e-38
    x[4, 64:96] = 0
    rows = quantized(x)
    assert rows.strides[0] == q8_row_bytes(576)
    assert rows.strides[0] // 64 % 2 == 1
    q, scale = reference.quantize(torch.from_numpy(x))
    np.testing.assert_array_equal(rows[:, :576].view(np.int8), q.numpy())
    numbers = rows[:, 576 : 576 + 18 * 16].copy().view(np.float32).reshape(7, 18, 4)
    np.testing.assert_array_equal(numbers[..., 0], scale.numpy())
    halves = q.numpy().reshape(7, 18, 2, 16).sum(-1)
    np.testing.assert_array_equal(numbers[..., 2:], halves)
    np.testing.assert_array_equal(numbers[..., 1], halves.sum(-1))


def test_what_does_not_go_together_is_refused():
    floats = packed("BF16", make("BF16", 16, 64))
    rows = np.zeros((1, 64), np.float32)
    common: dict[str, Any] = {"num_tokens": 0, "x": rows, "x_stride": 256, "out": rows}
    common["out_stride"] = 256
    with pytest.raises(ValueError, match="BF16 weights have no q8 mode"):
        linear(floats, mode="q8", **common)
    with pytest.raises(ValueError, match="activation silu"):
        linear(floats, mode="exact", activation="silu", **common)
    with pytest.raises(ValueError, match="result of 16 numbers"):
        linear(floats, mode="exact", out_q8=rows, **common)
    with pytest.raises(ValueError, match="level mmx: this CPU has"):
        linear(floats, mode="exact", level="mmx", **common)
    with pytest.raises(ValueError, match="nowhere to put the result"):
        linear(floats, mode="exact", **{**common, "out": 0})


@pytest.mark.parametrize("columns", [32, 576, 1536])
def test_the_op_quantises_every_row_and_no_more(columns):
    """Shared out by parts of rows to any number of threads."""
    x = activations(131, columns)
    whole = quantized(x)
    for count in (0, 1, 2, 17, 130):
        for threads, team in TEAMS.items():
            rows = q8_rows(*x.shape)
            rows[:] = 0xA5
            call = quantize.bind(
                count=np.array([count]),
                x=x,
                columns=columns,
                out=rows,
                out_stride=rows.strides[0],
            )
            team.run(Program([call]))
            np.testing.assert_array_equal(rows[:count], whole[:count], f"{threads} threads")
            assert (rows[count:] == 0xA5).all()
