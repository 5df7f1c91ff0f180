"""Tables in terminals of any width."""

from __future__ import annotations

import pytest
from rich.table import Table

from octavo.cli.tables import print_table

CELLS = ("backend", "16/8x128", "233,465.4", "runs on CUDA GPUs")


@pytest.mark.parametrize("columns", [20, 40, 60, 200])
def test_no_word_and_no_number_is_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = Table(*"abcd")
    table.add_row(*CELLS)
    print_table(table)
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    assert all(word in shown for cell in CELLS for word in cell.split())
    if columns == 60:  # whole lines, as long as the terminal has room
        assert max(map(len, shown.splitlines())) <= 60


def test_a_log_is_as_wide_as_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    table = Table("a")
    table.add_row("seven words that want some more room")
    print_table(table, width_of_a_log=180)
    assert "seven words that want some more room" in capsys.readouterr().out
