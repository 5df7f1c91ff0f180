"""One model, a table with a row for every case, and one server that most tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import EOS, REST, chain, markov, tiny
from helpers.server import Server, serving

NAME = "book"

ROWS = {
    # Prompt "A" is answered "🌶!", "B" "ď", "C" "龜", "D" by half a character and "?", "E" by a
    # byte that is no character and "z", "a" "bcdefgh"; a chat by "abcdefgh".
    **chain("A", 240, 159, 140, 182, "!", EOS),
    **chain("B", 196, 143, EOS),
    **chain("C", 233, 190, 156, EOS),
    **chain("D", 241, 152, "?", EOS),
    **chain("E", 255, "z", EOS),
    **chain("\n", *"abcdefgh", EOS),
    **chain("t", "u"),
    ord("u"): {ord("u"): 4.0, ord("v"): 3.0},
    ord("q"): {ord("a"): 12.0, ord("b"): 11.0},
    ord("r"): {REST: -100.0, **{ord(c): float(3 - i) for i, c in enumerate("abcd")}},
    ord("w"): {REST: -100.0, **dict.fromkeys(b"wxyz", 0.0), ord("w"): 0.0},
    ord("l"): {ord("l"): 30.0},  # goes on for ever
    ord('"'): {ord('"'): 20.0},  # a string in JSON is empty
}


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markov(tmp_path_factory.mktemp("book"), ROWS)


@pytest.fixture(scope="session")
def server(book: Path) -> Iterator[Server]:
    with serving(book, "--served-model-name", NAME, "--served-model-name", "other") as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def soaking(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Any]:
    """The soak's process: if its test is to run, it begins with the first test of the server, and
    at a rate that leaves the others most of the machine."""
    if not any(item.path.name == "test_soak.py" for item in request.session.items):
        yield None
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.soak", str(tiny_model), "60", "64", "6"],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    with suppress(ProcessLookupError):  # where a test before it ended the run
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"), add_bos=False)
