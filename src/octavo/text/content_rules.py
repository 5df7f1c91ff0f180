r"""Content rules: regular expressions that no prompt and no answer may match.

A rule has a greatest width and looks no further than one character beyond its match (``\b``). So
whether one matches at a character is known for good once ``width`` more characters have come: until
then the character is withheld. Of the whole text, what may be shown is what comes before the first
match, however the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from octavo.errors import ConfigError

MAX_WIDTH = 1000  # characters


@dataclass(frozen=True)
class ContentRules:
    """Rules, and the most characters that one of them can match."""

    patterns: tuple[re.Pattern[str], ...] = ()
    width: int = 0

    def first_match(self, text: str, begin: int = 0) -> int | None:
        """Where the first match at or after ``begin`` starts, None where there is no match."""
        matches = (pattern.search(text, begin) for pattern in self.patterns)
        return min((match.start() for match in matches if match is not None), default=None)


class ContentChecker:
    """Watches one answer for content that the rules forbid."""

    def __init__(self, rules: ContentRules) -> None:
        self.matched = False
        self._rules = rules
        self._text = ""  # the last character shown, where there is one, and what is withheld
        self._shown = 0  # 1 where there is one

    def feed(self, text: str) -> str:
        """Take the next piece of text, return what is safe to show: ``""`` once a rule matched."""
        if not self._rules.patterns:
            return text
        if self.matched:
            return ""
        self._text += text
        return self._show(max(self._shown, len(self._text) - self._rules.width))

    def finish(self) -> str:
        """The text ends here: what of the withheld text no rule forbids."""
        return "" if self.matched else self._show(len(self._text))

    def _show(self, end: int) -> str:
        """Show the text up to ``end``; whether a match starts before it is known for good."""
        match = self._rules.first_match(self._text, self._shown) if end > self._shown else None
        if match is not None and match < end:
            self.matched, end = True, match
        safe = self._text[self._shown : end]
        kept = max(end - 1, 0)  # the character before may be asked for by \b
        self._text, self._shown = self._text[kept:], end - kept
        return safe


def read_content_rules(path: str) -> ContentRules:
    """The rules of a file: one regular expression of Python's a line, ``#`` begins a comment line.

    Raises :class:`ConfigError` for a file that can't be read or has no rules, and for an expression
    that is wrong, can match nothing or more than :data:`MAX_WIDTH` characters, or depends on more
    of the text around its match than whether a word ends there.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"content_rules is {path!r}, which can't be read ({error})") from error
    patterns, widths = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            widths.append(_width(line))
            patterns.append(re.compile(line))
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"line {number} of the content rules {path!r} can't be used: {error}"
            ) from error
    if not patterns:
        raise ConfigError(f"the file of content rules {path!r} has no rules; leave it out for none")
    return ContentRules(tuple(patterns), max(widths))


def _width(expression: str) -> int:
    """The most characters that an expression can match. Raises ValueError where that can't do."""
    tree = _parser.parse(expression)
    least, most = tree.getwidth()
    if least == 0:
        raise ValueError(f"{expression!r} matches the empty text, so it would refuse every text")
    if most > MAX_WIDTH:
        raise ValueError(
            f"{expression!r} can match more than {MAX_WIDTH} characters, which would all have to "
            "be withheld; bound its repetitions, such as .{0,20} for .*"
        )
    for operation, value in _operations(tree):
        looks = operation in (_constants.ASSERT, _constants.ASSERT_NOT)
        if operation is _constants.AT:
            looks = value not in (_constants.AT_BOUNDARY, _constants.AT_NON_BOUNDARY)
        if looks:
            raise ValueError(
                f"{expression!r} looks at the text around its match, of which a stream has only a "
                r"part; only \b and \B may"
            )
    return int(most)


def _operations(tree: Any) -> Iterator[tuple[Any, Any]]:
    """All operations of a parsed expression with their arguments, those inside others as well."""
    for part in tree:
        if isinstance(part, tuple) and isinstance(part[0], type(_constants.AT)):
            yield part
        if isinstance(part, tuple | list | _parser.SubPattern):
            yield from _operations(part)
