"""Special tokens spelled out in a user's text, which must stay text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from octavo.errors import InvalidRequestError

# A lone surrogate: no text that a user can send has one, so it can't be forged.
BREAK = "\udc00"


def check_unicode(text: str, place: str) -> None:
    """Raise :class:`InvalidRequestError` for a string that has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{place} has a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is no Unicode text; send the whole character"
        ) from None


@dataclass(frozen=True)
class SpecialTexts:
    """The texts of a tokenizer's special tokens, none of them empty."""

    texts: frozenset[str]

    def starts_in(self, text: str) -> list[int]:
        """The indices at which ``text`` spells a special token."""
        return [
            start
            for start in (match.start() for match in self._first_characters.finditer(text))
            if any(text[start : start + length] in self.texts for length in self._lengths)
        ]

    def broken(self, text: str) -> str:
        """``text`` with a :data:`BREAK` after the first character of each special token in it."""
        starts = self.starts_in(text)
        cuts = [0, *(start + 1 for start in starts), len(text)]
        return BREAK.join(text[a:b] for a, b in pairwise(cuts))

    @cached_property
    def _first_characters(self) -> re.Pattern[str]:
        # Nothing matches (?!): the pattern for no special tokens at all.
        return re.compile("|".join(sorted({re.escape(text[0]) for text in self.texts})) or "(?!)")

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(text) for text in self.texts})
