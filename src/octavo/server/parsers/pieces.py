"""What parsers give out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """Call ``index`` of the answer begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the JSON text of call ``index``'s arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | Arguments


class Parser(Protocol):
    """Text in, pieces out; ``finish`` gives out what was held back."""

    def feed(self, text: str) -> Iterable[Piece]: ...

    def finish(self) -> Iterable[Piece]: ...


def held_back(text: str, marker: str) -> int:
    """The length of the longest end of ``text`` that may be the beginning of ``marker``."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
