"""Which parsers a model needs, and the parser of one answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from octavo.server.parsers.pieces import Content, Parser, Piece
from octavo.server.parsers.think import OPEN, ThinkParser
from octavo.server.parsers.tools import CALL_CLOSE, CALL_OPEN, HermesParser, Llama3Parser
from octavo.text import Tokenizer

ToolFormat = Literal["hermes", "llama3_json"]


@dataclass(frozen=True)
class ParserChoice:
    """How a model writes tool calls and reasoning; ``shows_markers``: its markers are special
    tokens, which must not be hidden."""

    tools: ToolFormat | None
    reasoning: Literal["think"] | None
    shows_markers: bool = False


def choose_parsers(tokenizer: Tokenizer, tools: str, reasoning: str) -> ParserChoice:
    """The flags ``--tool-call-parser`` and ``--reasoning-parser`` with "auto" read off the chat
    template and "none" turned to None."""
    templates = "".join(tokenizer.chat_templates.values())
    if tools == "auto":
        tools = "none"
        if CALL_OPEN in templates and "<function=" not in templates:
            tools = "hermes"
        elif "<|start_header_id|>" in templates and "parameters" in templates:
            tools = "llama3_json"
    if reasoning == "auto":
        reasoning = "think" if OPEN in templates or "</think>" in templates else "none"
    specials = tokenizer.special_texts.texts
    markers = {CALL_OPEN, CALL_CLOSE} if tools == "hermes" else set()
    return ParserChoice(
        tools=None if tools == "none" else tools,  # type: ignore[arg-type]
        reasoning=None if reasoning == "none" else reasoning,  # type: ignore[arg-type]
        shows_markers=bool(markers & specials),
    )


def call_parser(style: ToolFormat, names: Collection[str]) -> Parser:
    """The parser of the calls that a model writes by itself; ``names`` are the tools offered."""
    return HermesParser(names) if style == "hermes" else Llama3Parser(names)


class AnswerParser:
    """One answer through the reasoning parser, and its content through that of calls."""

    def __init__(
        self, *, reasoning: bool = False, begun: bool = False, calls: Parser | None = None
    ) -> None:
        self._think = ThinkParser(begun) if reasoning else None
        self._calls = calls

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart."""
        return self._think is not None

    @property
    def has_reasoned(self) -> bool:
        """Whether the answer has reasoning."""
        return self._think is not None and self._think.has_reasoned

    def feed(self, text: str) -> Iterator[Piece]:
        """The pieces that this text completes."""
        yield from self._on([Content(text)] if self._think is None else self._think.feed(text))

    def finish(self) -> Iterator[Piece]:
        """The answer ends: what was held back."""
        if self._think is not None:
            yield from self._on(self._think.finish())
        if self._calls is not None:
            yield from self._calls.finish()

    def _on(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self._calls is not None and isinstance(piece, Content):
                yield from self._calls.feed(piece.text)
            elif piece != Content(""):
                yield piece
