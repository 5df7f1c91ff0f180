"""``octavo bench attention`` measures: its grid, and its last line."""

from __future__ import annotations

import json

import pytest

from octavo.bench.attention import Heads, bench_attention
from octavo.cli import main


def test_what_cannot_be_measured_is_said():
    grid = ([Heads(4, 1, 20)], [1], [64])
    (why,) = bench_attention("cpu", ["cpu"], *grid, read_gb_s=10.0)
    assert why == "cpu 4/1x20 1 x 64, splitting auto: head_dim 20 isn't a multiple of 8"
    huge = ([Heads(9, 3, 64)], [1000], [1 << 20])
    (why,) = bench_attention("cpu", ["cpu"], *huge, read_gb_s=10.0)
    assert why.endswith("its keys and values don't fit the memory that is free")


def test_nothing_measured_is_an_error(capsys):
    grid = ["--batch", "1", "--context", "64", "--heads", "4/1x20"]
    assert main(["bench", "attention", "--device", "cpu", *grid]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("octavo: nothing was measured")


def test_from_the_command_to_the_last_line(tmp_path, capsys):
    plot = tmp_path / "time.svg"
    grid = ["--batch", "1", "--context", "256", "1024", "--heads", "3/1x64", "--seconds", "0.02"]
    arguments = ["bench", "attention", "--device", "cpu", *grid, "--plot", str(plot)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["read_gb_s"] > 0
    assert found["machine"]["cpu"]
    assert [(one["context"], one["split_kv"]) for one in found["cells"]] == [
        (256, "auto"),
        (256, "off"),
        (1024, "auto"),
        (1024, "off"),
    ]
    for one in found["cells"]:
        assert one["us"] > 0
        num_bytes = 2 * 64 * 4 * one["context"] + 2 * 3 * 64 * 4
        assert one["gb_s"] == pytest.approx(num_bytes / one["us"] / 1e3)
        assert one["share"] == pytest.approx(one["gb_s"] / found["read_gb_s"], rel=0.02)
    assert any("1,024" in line for line in lines)
    assert plot.read_text().startswith("<svg")
