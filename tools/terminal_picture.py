"""Runs a command and keeps its terminal as a picture: docs/terminal.svg, shown in the README.

    .venv/bin/python tools/terminal_picture.py

The text is what the command really wrote; nothing is retouched.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "make run",
    ".venv/bin/octavo backends",
)
WIDTH = 100


def main() -> None:
    if subprocess.run(["make", "--question", ".venv/.stamp-warm"], cwd=ROOT).returncode != 0:
        sys.exit("octavo: first run make setup; a picture installs nothing")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in COMMANDS:
        result = subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
            env=os.environ | {"COLUMNS": str(WIDTH)},
        )
        console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
        console.print(Text.from_ansi(result.stdout))
    svg = console.export_svg(title="octavo")
    (ROOT / "docs" / "terminal.svg").write_text(svg)


if __name__ == "__main__":
    main()
