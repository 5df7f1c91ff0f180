"""Tables that lose nothing, however narrow the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_table(table: Table, width_of_a_log: int | None = None) -> None:
    """Print it to stdout, as wide as the terminal (or as a log, where stdout is none), and wider
    where a word or a number would be cut."""
    from rich.cells import cell_len
    from rich.console import Console

    console = Console()
    if width_of_a_log is not None and not console.is_terminal:
        console.width = width_of_a_log
    for column in table.columns:  # else the widest is narrowed first, whatever is in it
        words = " ".join(map(str, (column.header, *column.cells))).split()
        column.min_width = max(map(cell_len, words), default=0)
    console.print(table, crop=False)
