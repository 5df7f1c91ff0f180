"""Tool calls in an answer: Hermes' format, which Qwen uses, Llama 3's, and those of a grammar."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from octavo.server.parsers.call import CallScanner
from octavo.server.parsers.pieces import Arguments, CallStart, Content, Piece, held_back

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


class _CallParser:
    """What the formats share: one call being read, and the content around the calls.

    White space around calls is left out.
    """

    needs_arguments = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._call: CallScanner | None = None
        self._raw = ""  # of the call being read, from its marker
        self._started = False
        self._sent = 0  # of the call's arguments
        self._space = ""  # white space that is content if content follows
        self._behind_call = False  # nothing but white space since

    def _content(self, text: str) -> Iterator[Piece]:
        text = self._space + text
        if self._behind_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._behind_call = False
            yield Content(shown)

    def _open(self, marker: str) -> None:
        self._call, self._raw, self._started, self._sent = CallScanner(), marker, False, 0

    def _read(self, call: CallScanner, text: str) -> tuple[list[Piece], str]:
        """Give the call more text: the pieces that come of it, and the text behind the call."""
        taken = call.feed(text)
        self._raw += text[:taken]
        pieces: list[Piece] = []
        if call.state == "failed" and not self._started:
            self._call = None
            return list(self._content(self._raw)), text[taken:]
        if call.state == "done" and not self._started and not self._is_call(call):
            self._call = None
            return list(self._content(self._raw)), text[taken:]
        if self._is_call(call) and (call.state == "done" or call.arguments is not None):
            pieces += self._growth(call)
        if call.state != "open":
            self._call = None
        return pieces, text[taken:]

    def _is_call(self, call: CallScanner) -> bool:
        known = call.name is not None and (not self.needs_arguments or call.name in self._names)
        return known and (not self.needs_arguments or call.arguments is not None)

    def _growth(self, call: CallScanner) -> Iterator[Piece]:
        if not self._started:
            assert call.name is not None
            self._started, self._behind_call, self._space = True, True, ""
            self._num_calls += 1
            yield CallStart(self._num_calls - 1, call.name)
        arguments = call.arguments
        if arguments is None:
            arguments = "{}"
        if len(arguments) > self._sent:
            yield Arguments(self._num_calls - 1, arguments[self._sent :])
            self._sent = len(arguments)

    def finish(self) -> Iterator[Piece]:
        if self._call is not None and not self._started:
            yield from self._content(self._raw)
        self._call = None
        if self._space and self._num_calls == 0:
            yield Content(self._space)
        self._space = ""


class HermesParser(_CallParser):
    """Calls between ``<tool_call>`` and ``</tool_call>``, anywhere in the answer."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._pending = ""
        self._closing = False  # behind a call, before its end marker

    def feed(self, text: str) -> Iterator[Piece]:
        self._pending += text
        while self._pending:
            if self._call is not None:
                pieces, self._pending = self._read(self._call, self._pending)
                yield from pieces
                self._closing = self._call is None and self._started
            elif self._closing:
                _, found, rest = self._pending.partition(CALL_CLOSE)
                if not found:
                    return
                self._closing, self._pending = False, rest
            else:
                before, found, rest = self._pending.partition(CALL_OPEN)
                if not found:
                    keep = held_back(before, CALL_OPEN)
                    shown = before[: len(before) - keep]
                    self._pending = before[len(shown) :]
                    yield from self._content(shown)
                    return
                yield from self._content(before)
                self._pending = rest
                self._open(CALL_OPEN)

    def finish(self) -> Iterator[Piece]:
        if self._call is None and not self._closing:
            yield from self._content(self._pending)
        yield from super().finish()


class Llama3Parser(_CallParser):
    """The answer is one JSON object, or several with semicolons between, each with ``name`` (of a
    tool that was offered) and ``parameters``; any other answer is content."""

    needs_arguments = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = "before"  # a call, or else "content"

    def feed(self, text: str) -> Iterator[Piece]:
        while text:
            if self._state == "content":
                yield from self._content(text)
                return
            if self._call is not None:
                pieces, text = self._read(self._call, text)
                yield from pieces
                if self._call is None and not self._started:
                    self._state = "content"
                continue
            bare = text.lstrip(" \t\r\n;" if self._num_calls else None)
            if not bare:
                self._space += text
                return
            if bare.startswith("{"):
                self._open(self._space + text[: len(text) - len(bare)])
                text = bare
            else:
                self._state = "content"


class CallListParser(_CallParser):
    """The answer is a JSON list of calls: the grammar of ``tool_choice`` "required" has it so."""

    def feed(self, text: str) -> Iterator[Piece]:
        while text:
            if self._call is None:
                _, found, rest = text.partition("{")
                if not found:
                    return
                self._open("")
                text = found + rest
            else:
                pieces, text = self._read(self._call, text)
                yield from pieces


class NamedCallParser:
    """The answer is the arguments of a call of one function, as the grammar of a named
    ``tool_choice`` has it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> Iterator[Piece]:
        if not self._started:
            self._started = True
            yield CallStart(0, self._name)
        yield Arguments(0, text)

    def finish(self) -> Iterator[Piece]:
        yield from ()
