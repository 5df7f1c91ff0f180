"""``octavo bench attention``: what it refuses, and its plot."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from octavo.bench.attention import Cell, Heads, decode_backends, parse_heads
from octavo.bench.plot import plot_attention
from octavo.cli import main
from octavo.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def cell(context: int, us: float, split_kv: str = "auto", backend: str = "cpu") -> Cell:
    return Cell(backend, "9/3x64", 1, context, split_kv, 2, us, 1.0, 0.5)


def test_heads():
    assert parse_heads("32/8x128") == Heads(32, 8, 128)
    assert str(Heads(9, 3, 64)) == "9/3x64"
    for bad in ("32", "32/8", "32/7x128", "0/1x64", "8/0x64", "8/8x0", "32/8x128x1", "a/bxc"):
        with pytest.raises(ConfigError, match="such as 32/8x128"):
            parse_heads(bad)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plot", "time.png"], "doesn't end in .svg"),
        (["--backend", "torch"], "'torch' doesn't decode"),
        (["--batch", "0"], "batch is [0]"),
        (["--context", "4096", "-1"], "context is [4096, -1]"),
        (["--heads", "9/2x64"], "'9/2x64'"),
        (["--seconds", "0"], "seconds is 0"),
        (["--plot", "no/such/folder/time.svg"], "there is no folder no/such/folder"),
    ],
)
def test_refused_before_anything_runs(arguments, named, capsys):
    assert main(["bench", "attention", *arguments]) == 1
    assert named in capsys.readouterr().err


def test_plot_has_a_line_for_each_series_and_says_what_is_what():
    cells = [cell(n, us) for n, us in ((512, 40.0), (4096, 100.0), (32_768, 700.0))]
    cells += [cell(n, us, "off") for n, us in ((512, 40.0), (4096, 200.0), (32_768, 1500.0))]
    cells += [cell(n, us, backend="<other>") for n, us in ((512, 60.0), (32_768, 900.0))]
    svg = ET.fromstring(plot_attention(cells, "Decode & more"))
    curves = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in svg.iter(f"{SVG}polyline")
    ]
    split, unsplit, other = curves[0], curves[1], curves[3]  # each legend follows its lines
    assert [len(split), len(unsplit), len(other)] == [3, 3, 2]
    assert split[0] == unsplit[0]
    assert split[2][0] == unsplit[2][0] == other[1][0]
    assert unsplit[2][1] < other[1][1] < split[2][1]  # slower is higher up
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    for wanted in (
        "Decode & more",
        "tokens of context",
        "512",
        "4K",
        "32K",
        "100 µs",
        "1 ms",
        "cpu, batch 1",
        "<other>, batch 1",
        "dashed: unsplit",
    ):
        assert wanted in texts


def test_one_cell_is_a_plot_too():
    assert "polyline" in plot_attention([cell(512, 40.0)], "one")


def test_who_decodes_here():
    assert decode_backends("cpu") == ["cpu"]
