"""One model, a table with a row for every case, and one server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
}


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markov(tmp_path_factory.mktemp("book"), ROWS)


@pytest.fixture(scope="session")
def server(book: Path) -> Iterator[Server]:
    with serving(book, "--served-model-name", NAME, "--served-model-name", "other") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"), add_bos=False)
