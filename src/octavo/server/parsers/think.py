"""Reasoning between ``<think>`` and ``</think>``, as DeepSeek-R1, Qwen3 and others write it."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.server.parsers.pieces import Content, Piece, Reasoning, held_back

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """``begun``: the prompt has opened the reasoning already. White space just inside and just
    after the markers is left out."""

    def __init__(self, begun: bool) -> None:
        self._state = "reasoning" if begun else "start"
        self._pending = ""
        self._bare = True  # nothing but white space since the state began
        self.has_reasoned = begun

    def feed(self, text: str) -> Iterator[Piece]:
        if self._state == "content" and not self._bare:
            yield Content(text)
            return
        self._pending += text
        if self._state == "start":
            bare = self._pending.lstrip()
            if bare.startswith(OPEN):
                self._state, self._pending = "reasoning", bare[len(OPEN) :]
                self.has_reasoned = True
            elif OPEN.startswith(bare):
                return
            else:
                self._state, self._bare = "content", False
        if self._state == "reasoning":
            yield from self._reason()
        if self._state == "content":
            text = self._pending.lstrip() if self._bare else self._pending
            if text:
                self._bare, self._pending = False, ""
                yield Content(text)

    def finish(self) -> Iterator[Piece]:
        rest, self._pending = self._pending, ""
        if self._state == "start" and rest:
            yield Content(rest)
        elif self._state == "reasoning" and rest:
            yield Reasoning(rest)

    def _reason(self) -> Iterator[Piece]:
        if self._bare:
            self._pending = self._pending.lstrip()
        text, closed, rest = self._pending.partition(CLOSE)
        if closed:
            self._state, self._bare, self._pending = "content", True, rest
            text = text.rstrip()
        else:
            shown = text[: len(text) - held_back(text, CLOSE)].rstrip()
            text, self._pending = shown, text[len(shown) :]
            self._bare = self._bare and not text
        if text:
            yield Reasoning(text)
