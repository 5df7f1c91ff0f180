"""Weight formats against the ``gguf`` package's dequantiser, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from helpers.gguf_writer import random_k_blocks, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.checkpoint import open_checkpoint, resolve_model
from octavo.checkpoint.gguf_file import read_gguf
from octavo.checkpoint.quants import FORMATS, dequantize, row_nbytes
from octavo.errors import ModelNotFoundError


def bits(values: NDArray[Any]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def reference(data: NDArray[np.uint8], format: str) -> NDArray[Any]:
    return np.asarray(gguf.quants.dequantize(data, GgmlType[format]))


def random_blocks(format: str, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """Every bit random, scales finite."""
    rng = np.random.default_rng(seed)
    layout = FORMATS[format].block
    data = rng.integers(0, 256, (rows, blocks * layout.itemsize), np.uint8)
    view = data.view(layout)
    fields = layout.names or ()
    for field in {"d", "m", "dmin"} & set(fields):
        view[field] = rng.normal(0, 1, view.shape)
    if not fields:  # F32, F16, BF16: any pattern but an infinity or NaN
        plain = rng.normal(0, 1, view.shape).astype(np.float32)
        view[...] = plain.view(np.uint32) >> 16 if format == "BF16" else plain
    return data


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_random_blocks_equal_gguf(format: str, rows: int, blocks: int, seed: int) -> None:
    data = random_blocks(format, rows, blocks, seed)
    widened = dequantize(data, format)
    assert widened.shape == (rows, blocks * FORMATS[format].block_size)
    assert widened.flags.c_contiguous
    np.testing.assert_array_equal(bits(widened), bits(reference(data, format)))


@pytest.mark.parametrize("format", FORMATS)
def test_many_rows_at_an_odd_address(format: str) -> None:
    """More rows than one chunk takes, in memory that isn't aligned (a safetensors file may begin
    its data anywhere)."""
    data = random_blocks(format, 1500, max(1, 256 // FORMATS[format].block_size), seed=1)
    room = np.empty(data.size + 1, np.uint8)
    shifted = room[1:].reshape(data.shape)
    shifted[:] = data
    np.testing.assert_array_equal(bits(dequantize(shifted, format)), bits(reference(data, format)))


@pytest.mark.parametrize("format", ["F16", "Q4_1", "Q6_K"])
def test_row_order_and_out(format: str) -> None:
    data = random_blocks(format, 700, 256 // FORMATS[format].block_size, seed=2)
    order = np.random.default_rng(3).permutation(700)
    out = np.full((700, 256), np.nan, np.float32)
    assert dequantize(data, format, out, row_order=order) is out
    np.testing.assert_array_equal(bits(out), bits(reference(data, format))[order])


def test_float16_extremes_are_kept() -> None:
    values = np.array([[65504, -65504, 6e-8, 0.0, -0.0, np.inf]], np.float16)
    np.testing.assert_array_equal(
        bits(dequantize(values.view(np.uint8), "F16")), bits(values.astype(np.float32))
    )


@pytest.mark.parametrize(
    ("format", "columns", "expected"),
    [("F32", 7, 28), ("BF16", 7, 14), ("Q4_0", 64, 36), ("Q5_1", 32, 24), ("Q6_K", 512, 420)],
)
def test_row_nbytes(format: str, columns: int, expected: int) -> None:
    assert row_nbytes(format, columns) == expected


def test_a_row_must_fill_whole_blocks() -> None:
    with pytest.raises(ValueError, match="300 columns don't fill Q4_K blocks of 256"):
        row_nbytes("Q4_K", 300)


def test_block_sizes_are_ggmls() -> None:
    for format, layout in FORMATS.items():
        stated = gguf.GGML_QUANT_SIZES[GgmlType[format]]
        assert (layout.block_size, layout.block_bytes) == stated, format


@pytest.mark.parametrize("format", ["Q4_K", "Q5_K", "Q6_K"])
def test_writer_makes_sensible_k_blocks(format: str) -> None:
    weights = dequantize(random_k_blocks(format, 400, np.random.default_rng(0), std=0.1), format)
    assert abs(weights.mean()) < 0.01
    assert 0.08 < weights.std() < 0.13


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_come_back(format: str) -> None:
    """A mix-up of nibbles would survive a comparison of two readers with the same fault."""
    weights = np.random.default_rng(4).normal(0, 0.1, (4, 256)).astype(np.float32)
    quantised = np.asarray(gguf.quants.quantize(weights, GgmlType[format]))
    error = np.abs(dequantize(quantised, format) - weights).max()
    assert error < {"Q4": 0.03, "Q5": 0.015, "Q8": 0.002}[format[:2]]


@pytest.mark.parametrize("alias", ["smollm2-135m", "gemma3-270m"])
def test_real_tensors_equal_gguf(alias: str) -> None:
    """One tensor of each format that the real files hold, the largest left out for time."""
    path = _installed(alias)
    raw = read_gguf(path).tensors
    checked: set[str] = set()
    for tensor in raw.values():
        if tensor.format not in checked and tensor.data.size < 2_000_000:
            checked.add(tensor.format)
            np.testing.assert_array_equal(
                bits(dequantize(tensor.data, tensor.format)),
                bits(reference(tensor.data, tensor.format)),
            )
    expected = {tensor.format for tensor in raw.values()}
    if alias == "smollm2-135m":
        expected.remove("Q8_0")  # only the embedding
        rows = raw["token_embd.weight"].data[::997]
        np.testing.assert_array_equal(bits(dequantize(rows, "Q8_0")), bits(reference(rows, "Q8_0")))
    assert checked == expected
    assert set(open_checkpoint(path).metadata or {}) == set(read_gguf(path).metadata)


def _installed(alias: str) -> Path:
    try:
        return resolve_model(alias)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_random_rows_shapes() -> None:
    rng = np.random.default_rng(0)
    for format, layout in FORMATS.items():
        rows = random_rows(format, 3, 512, rng)
        assert rows.nbytes == 3 * 512 // layout.block_size * layout.block_bytes
