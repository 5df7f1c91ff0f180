"""One tool call written as a JSON object, read character by character."""

from __future__ import annotations

import json
from typing import Any, Literal

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallScanner:
    """Reads ``{"name": ..., "arguments": {...}}``, keys in any order.

    ``name`` appears once it is known, ``arguments`` grows with the text of its value. ``state``
    becomes ``"done"`` after the closing brace, ``"failed"`` where the text is no such object.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "done", "failed"] = "open"
        self.name: str | None = None
        self.arguments: str | None = None
        self._depth = 0
        self._in_string = self._escaped = False
        self._expected: Literal["key", "colon", "value", "comma"] = "key"
        self._key: Any = None
        self._token = ""  # the key or value being read, without the newest characters
        self._newest: list[str] = []

    def feed(self, text: str) -> int:
        """Take characters up to the object's end; how many were taken."""
        taken = 0
        while taken < len(text) and self.state == "open":
            self._take(text[taken])
            taken += 1
        self._gather()
        return taken

    def _take(self, character: str) -> None:
        if self._in_string:
            self._take_in_string(character)
        elif self._depth == 0:
            if character == "{":
                self._depth = 1
            elif character not in _SPACE:
                self.state = "failed"
        elif self._depth > 1:
            self._extend(character)
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth == 1:
                self._value_ends()
        else:
            self._take_at_top(character)

    def _take_in_string(self, character: str) -> None:
        self._extend(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._expected == "key":
                self._gather()
                self._key, self._token, self._expected = self._parse(), "", "colon"
            elif self._depth == 1:
                self._value_ends()

    def _take_at_top(self, character: str) -> None:
        started = bool(self._token or self._newest)
        if character in ",}" and self._expected == "value" and started:
            self._value_ends()  # a number, true, false or null
            started = False
        if character in _SPACE:
            if self._expected == "value" and started:
                self._value_ends()
        elif character == '"' and self._expected in ("key", "value") and not started:
            self._in_string = True
            self._extend(character)
        elif character == ":" and self._expected == "colon":
            self._expected = "value"
        elif character == "," and self._expected == "comma":
            self._expected = "key"
        elif character == "}" and self._expected in ("comma", "key") and not started:
            self.state = "done" if self.name is not None else "failed"
        elif self._expected == "value" and character not in ",}]:":
            if started and character in "{[":
                self.state = "failed"
            self._extend(character)
            self._depth += character in "{["
        else:
            self.state = "failed"

    def _extend(self, character: str) -> None:
        self._newest.append(character)

    def _gather(self) -> None:
        """Once for many characters: arguments may be long."""
        self._token += "".join(self._newest)
        self._newest.clear()
        in_arguments = self._key in _ARGUMENT_KEYS and self._expected == "value"
        if in_arguments and self._token.startswith("{"):
            self.arguments = self._token

    def _value_ends(self) -> None:
        self._gather()
        value, text = self._parse(), self._token
        if self._key == "name":
            self.name = value if isinstance(value, str) else None
            if self.name is None:
                self.state = "failed"
        elif self._key in _ARGUMENT_KEYS:
            # Some models write the object as a string.
            self.arguments = value if isinstance(value, str) else text
        self._token, self._expected = "", "comma"

    def _parse(self) -> Any:
        try:
            return json.loads(self._token)
        except (ValueError, RecursionError):
            if self._key not in _ARGUMENT_KEYS:
                self.state = "failed"
            return None
