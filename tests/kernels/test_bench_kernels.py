"""``octavo bench kernels`` but for the clock: its launches, interpreted, and the table of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from octavo.bench import kernels
from octavo.bench.kernels import bench_kernels, library_is_faster_from, other_tiles, parse_weight
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.kernels.linear import table
from octavo.kernels.linear.table import choose_tile, read_table, write_table
from octavo.kernels.linear.tiles import Tile


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the launches take, one after the other; each is done once."""
    times: list[float] = []

    def launch_us(launch: Callable[[Tensor], object], matrices: Sequence[Tensor]) -> float:
        launch(matrices[0])
        return times.pop(0)

    monkeypatch.setattr(kernels, "_launch_us", launch_us)
    monkeypatch.setattr(kernels, "COLD_BYTES", 1)
    return times


@pytest.mark.parametrize("weight", ["norm_linear:24x64", "norm_gate_up:48x64", "linear_add:24x64"])
def test_every_kernel_is_launched(weight: str, clock: list[float]) -> None:
    clock += [2.0, 3.0, 4.0, 1.0]
    found = list(bench_kernels([parse_weight(weight)], [1, 3], read_gb_s=100.0, device="cpu"))
    assert [(one.rows, one.us, one.library_us) for one in found] == [(1, 2.0, 3.0), (3, 4.0, 1.0)]
    kernel, n, k = parse_weight(weight)
    assert found[0].gb_s == pytest.approx(2 * n * k / 2e-6 / 1e9)
    assert found[0].share == found[0].gb_s / 100
    assert found[0].tile == choose_tile(n, k, 1, 2 if kernel == "norm_gate_up" else 1)
    assert library_is_faster_from(found) == {weight: 3}
    assert library_is_faster_from(found[:1]) == {weight: None}


def test_a_search_takes_what_is_surely_faster(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, near, better = (
        choose_tile(24, 64, 1),
        Tile(16, 512, 4, one_row=True),
        Tile(32, 512, 4, one_row=True),
    )
    monkeypatch.setattr(kernels, "other_tiles", lambda k, tile, parts: [near, better])
    for best, expected in ((9.8, listed), (9.0, better)):
        clock += [10.0, 9.9, best, 5.0]
        [found] = bench_kernels(
            [("linear_add", 24, 64)], [1], read_gb_s=1.0, search=True, device="cpu"
        )
        assert found.tile == expected
        assert found.us == (10.0 if expected is listed else best)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("k", "parts"), [(1024, 1), (4096, 2), (64, 1)])
def test_other_tiles_fit(k: int, parts: int, rows: int) -> None:
    tile = choose_tile(4096, k, rows, parts)
    others = other_tiles(k, tile, parts)
    assert tile not in others
    for one in others:
        assert one.one_row == (rows == 1)
        if one.one_row:
            assert 8 <= one.rows // parts <= 64
            assert one.rows // parts * one.chunk >= 4096
            assert one.num_warps == 4
        else:
            assert one.rows // parts >= 16
            assert one.chunk // one.num_warps >= 32
        assert one.rows * one.chunk * 2 * min(one.ahead, -(-k // one.chunk)) <= 200 << 10


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = read_table()
    write_table(found.items(), tmp_path / "same.json")
    assert (tmp_path / "same.json").read_text() == table.PATH.read_text()
    assert choose_tile(4096, 1024, 1) == found[4096, 1024, 1, 1]
    assert choose_tile(4096, 1024, 3) == found[4096, 1024, 1, 4]
    assert choose_tile(6144, 4096, 1) == Tile(16, 1024, 4, ahead=2, one_row=True, early=1)
    assert choose_tile(6144, 4096, 4) == Tile(16, 1024, 8, ahead=3)  # not measured: a fair one


@pytest.mark.parametrize("text", ["linear:8x8", "norm_linear:8x9", "norm_gate_up:9x8"])
def test_a_weight_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_weight(text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rows", "17"], "from 1 to 16"),
        (["--output", "x.json"], "add --search"),
        (["--search", "--rows", "3"], "1, 2, 4, 8 and 16"),
    ],
)
def test_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *arguments]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 1
    assert "compute capability 9.0" in capsys.readouterr().err
