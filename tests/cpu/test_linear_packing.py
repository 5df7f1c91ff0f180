"""Packing: what comes out of packed blocks is what went in, by bits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.packed import FILE_FORMATS, dequantized, random_tensor
from numpy.typing import NDArray

from octavo.checkpoint.mapping import map_file
from octavo.checkpoint.quants import row_nbytes
from octavo.checkpoint.tensor import WeightTensor
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.kernels import levels
from octavo.kernels.levels import usable_levels
from octavo.kernels.linear.cpu import embed
from octavo.kernels.linear.cpu_formats import ROWS
from octavo.kernels.linear.packing import PackedLinear, pack
from octavo.kernels.program import Program
from octavo.kernels.team import Team

CREW = Team(2)


def rows_of(
    weights: PackedLinear, ids: list[int], factor: float = 1.0, level: str | None = None
) -> NDArray[np.float32]:
    out = np.full((len(ids) + 1, weights.columns + 1), np.nan, np.float32)
    call = embed(
        weights,
        num_tokens=np.array([len(ids)], np.int64),
        input_ids=np.array(ids, np.int32),
        out=out,
        out_stride=out.strides[0],
        factor=factor,
        level=level,
    )
    CREW.run(Program([call]))
    assert np.isnan(out[-1]).all()
    assert np.isnan(out[:, -1]).all()
    return out[:-1, :-1].copy()


def columns_of(format: str) -> list[int]:
    if format in ("F32", "F16", "BF16"):
        return [1, 33, 64]
    return [256, 1536] if format.endswith("_K") else [32, 96, 576]


@pytest.mark.parametrize("level", [usable_levels()[0], "plain"])
@pytest.mark.parametrize("format", FILE_FORMATS)
def test_rows_equal_the_dequantised_file_by_bits(format, level):
    for columns in columns_of(format):
        for rows in (1, 16, 49):
            tensor = random_tensor(format, rows, columns)
            weights = pack([tensor])
            assert (weights.rows, weights.columns, weights.format) == (rows, columns, format)
            expected = tensor.to_float32()
            got = rows_of(weights, list(range(rows)), level=level)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("format", FILE_FORMATS)
def test_a_packed_matrix_is_as_large_as_its_file(format):
    weights = pack([random_tensor(format, 33, 768)])
    assert weights.data.ctypes.data % 64 == 0
    blocks = 3  # 33 rows
    bytes_of_rows = blocks * ROWS * row_nbytes(format, 768)
    assert bytes_of_rows <= weights.data.nbytes < bytes_of_rows + 64 * blocks


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
def test_int8_has_a_scale_for_each_row(format):
    tensor = random_tensor(format, 49, 96, seed=3)
    values = tensor.to_float32().copy()
    values[5] = 0
    values[6] *= 1e-30
    if format == "F32":
        tensor = replace(tensor, stored=values.view(np.uint8))
    weights = pack([tensor], int8=True)
    got = rows_of(weights, list(range(49)))
    np.testing.assert_array_equal(got, dequantized(tensor, "INT8").astype(np.float32))
    w = tensor.to_float32()
    step = np.abs(w).max(axis=1, keepdims=True) / 127
    assert (np.abs(got - w) <= 0.5001 * step).all()


def test_stacked_gated_and_reordered_rows():
    order = np.random.default_rng(0).permutation(20)
    one, two = random_tensor("Q4_1", 20, 64, 1), random_tensor("Q4_1", 20, 64, 2)
    one = replace(one, row_order=order)
    stacked = pack([one, two, one])
    expected = np.concatenate([t.to_float32() for t in (one, two, one)])
    np.testing.assert_array_equal(rows_of(stacked, list(range(60))), expected)
    gated = pack([one, two], gated=True)
    assert (gated.rows, gated.num_blocks) == (40, 4)
    # Row i of gate is lane i % 16 of block 2 (i // 16), that of up lies a block further.
    ids = [32 * (i // 16) + i % 16 + 16 * up for up in range(2) for i in range(20)]
    np.testing.assert_array_equal(rows_of(gated, ids), expected[:40])


def test_ids_in_any_order_and_a_factor():
    tensor = random_tensor("Q8_0", 100, 64)
    ids = [99, 0, 16, 0, 15, 47]
    got = rows_of(pack([tensor]), ids, factor=3.5)
    np.testing.assert_array_equal(got, tensor.to_float32()[ids] * np.float32(3.5))


def test_a_mapped_file_is_packed_and_its_pages_given_back(tmp_path: Path):
    tensor = random_tensor("Q8_0", 512, 1024)
    file = tmp_path / "weights"
    file.write_bytes(b"head" + tensor.stored.tobytes() + b"tail")
    mapped = map_file(file)
    stored = mapped[4:-4].reshape(tensor.stored.shape)
    assert int(stored.sum()) == int(tensor.stored.sum())  # every page is here now
    before = resident(mapped)
    weights = pack([WeightTensor("w", tensor.shape, "Q8_0", stored)])
    assert before > 500 * 1024
    assert resident(mapped) < 64 * 1024
    np.testing.assert_array_equal(rows_of(weights, [0, 511]), tensor.to_float32()[[0, 511]])


def resident(mapped: NDArray[np.uint8]) -> int:
    """Bytes of a mapping that are in this process's memory."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs Linux's /proc")
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            start, stop = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
            inside = start <= mapped.ctypes.data < stop
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the mapping isn't there")


def test_what_can_not_be_packed_is_refused_by_name():
    q4, wide = random_tensor("Q4_1", 16, 64), random_tensor("Q4_1", 16, 96)
    with pytest.raises(UnsupportedModelError, match=r"can't be stacked: they are Q4_1 \[16, 64\]"):
        pack([q4, wide])
    with pytest.raises(UnsupportedModelError, match="can't be stacked"):
        pack([q4, random_tensor("Q8_0", 16, 64)])
    with pytest.raises(UnsupportedModelError, match="Q4_1 weights are quantised already"):
        pack([q4], int8=True)
    with pytest.raises(UnsupportedModelError, match="33 columns don't fill groups of 32"):
        pack([random_tensor("F32", 16, 33)], int8=True)
    with pytest.raises(UnsupportedModelError, match="no gate and up"):
        pack([q4, random_tensor("Q4_1", 17, 64)], gated=True)


def test_a_level_is_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in usable_levels():
        monkeypatch.setenv("OCTAVO_CPU", name)
        assert levels.level.__wrapped__() == name
    monkeypatch.setenv("OCTAVO_CPU", "sse9")
    with pytest.raises(ConfigError, match="OCTAVO_CPU=sse9: there is no such level; here it may"):
        levels.level.__wrapped__()
    monkeypatch.delenv("OCTAVO_CPU")
    assert levels.level.__wrapped__() == usable_levels()[0]


PROGRAM = """
import octavo.kernels.linear.cpu as cpu, octavo.kernels.linear.cpu_pack as cpu_pack
from octavo.kernels.levels import level
ops = [
    cpu.linear_op("Q4_1", "q8", level()), cpu.linear_op("Q8_0", "q8", "plain"),
    cpu.linear_op("BF16", "exact", level()), cpu.embed_op("Q8_0", level()),
    cpu_pack.pack_op("Q4_1", "Q4_1"), cpu_pack.pack_op("F32", "INT8"),
]
print(sum(op.compiled.cache_hits for op in ops), len(ops))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path):
    environment: dict[str, Any] = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert [run.stdout.split() for run in runs] == [["0", "6"], ["6", "6"]], runs[1].stderr
