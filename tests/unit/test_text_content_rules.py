"""Content rules: every cut of random texts against the rule spelled out, and files of rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.text import ContentChecker, ContentRules, read_content_rules

# Each with the most characters it can match.
PLAIN = {"ab": 2, "a[bc]?a": 3, "(?i)CA{0,3}c": 5, "bb|cca": 3, "(a|bc)\\1": 4, "(?>a{1,2})b": 3}
WORDS = {r"\bab\b": 2, r"a\B": 1, r"\bc{1,2}": 2, r"b\b ?a": 3}


def rules_of(expressions: Sequence[str]) -> ContentRules:
    widths = {**PLAIN, **WORDS}
    return ContentRules(
        tuple(re.compile(one) for one in expressions),
        max((widths[one] for one in expressions), default=0),
    )


def run(rules: ContentRules, pieces: Sequence[str]) -> tuple[str, bool]:
    checker = ContentChecker(rules)
    shown = ""
    for piece in pieces:
        shown += checker.feed(piece)
        if checker.matched:
            break
    return shown + checker.finish(), checker.matched


PIECES = st.lists(st.text("abc ", max_size=5), max_size=10)


@given(PIECES, st.lists(st.sampled_from([*PLAIN, *WORDS]), max_size=3))
@settings(deadline=None, max_examples=300)
def test_any_cut_shows_what_is_before_the_first_match(
    pieces: list[str], expressions: list[str]
) -> None:
    text = "".join(pieces)
    starts = [m.start() for e in expressions for m in re.finditer(e, text)]
    right = text[: min(starts)] if starts else text
    assert run(rules_of(expressions), pieces) == (right, bool(starts))
    assert run(rules_of(expressions), list(text)) == (right, bool(starts))


@given(PIECES, st.lists(st.sampled_from([*PLAIN]), min_size=1, max_size=3))
@settings(deadline=None)
def test_nothing_shown_matches(pieces: list[str], expressions: list[str]) -> None:
    shown, _ = run(rules_of(expressions), pieces)
    assert not any(re.search(one, shown) for one in expressions)


def test_withholds_as_many_characters_as_the_widest_rule(tmp_path: Path) -> None:
    file = tmp_path / "rules"
    file.write_text("# people\n\nsecret\n(?i)\\bbob\\b\n")
    rules = read_content_rules(str(file))
    assert rules.width == 6
    checker = ContentChecker(rules)
    assert [checker.feed(piece) for piece in ("a bobbin", " for Bo", "b", " and more")] == [
        "a ",
        "bobbin ",
        "f",
        "or ",
    ]
    assert checker.matched
    assert checker.feed("more") + checker.finish() == ""


@pytest.mark.parametrize("expression", [*PLAIN, *WORDS])
def test_widths(tmp_path: Path, expression: str) -> None:
    file = tmp_path / "rules"
    file.write_text(expression)
    assert read_content_rules(str(file)).width == {**PLAIN, **WORDS}[expression]


@pytest.mark.parametrize("expression", ["[\x03-\x09]x", r"a(?#note)b", r"(?i:ß)", "\ufeff a"])
def test_a_file_may_have(tmp_path: Path, expression: str) -> None:
    file = tmp_path / "rules"
    file.write_text(f"{expression}\r\n", "utf-8", newline="")
    assert not re.search(read_content_rules(str(file)).patterns[0], "\r")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"ok\n(", "line 2 .* unterminated subpattern"),
        (b"a.*b", r"more than 1000 characters.*\.\{0,20\}"),
        (b"x{1001}", "more than 1000 characters"),
        (b"(a|b{2,})c", "more than 1000 characters"),
        (b"a?", "matches the empty text"),
        (rb"\b", "matches the empty text"),
        (b"a(?=b)", "looks at the text around"),
        (b"(x|(?<!b)a)", "looks at the text around"),
        (b"(?:^a){1,2}", "looks at the text around"),
        (b"(?>b|a$)", "looks at the text around"),
        (b"a{99999999999999}", "line 1"),
        (b"\n# nothing\n", "has no rules"),
        (b"\xff\xfe", "can't be read"),
        (None, "can't be read"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "rules"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        read_content_rules(str(file))
