"""Stop strings: case O03, and every chunking of random texts against the rule spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text import StopChecker

BYTES = list("BCDEFGH")  # what O03's chain generates, a byte a token
ONE_TOKEN = ["B", "CDE", "F"]  # its case (g): the stop lies inside a token


def run(checker: StopChecker, pieces: Sequence[str]) -> tuple[list[str], str | None]:
    shown = []
    for piece in pieces:
        shown.append(checker.feed(piece))
        if checker.matched is not None:
            break
    return [*shown, checker.finish()], checker.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "text", "matched"),
    [
        pytest.param(BYTES, ["DEF"], False, "BC", "DEF", id="a"),
        pytest.param(BYTES, ["DEF"], True, "BCDEF", "DEF", id="b"),
        pytest.param(BYTES, ["EFX", "CD"], False, "B", "CD", id="c"),
        pytest.param(BYTES, ["BCDEFGHX"], False, "BCDEFGH", None, id="d"),
        pytest.param(BYTES, ["D"], False, "BC", "D", id="e"),
        pytest.param(BYTES, ["CDE", "D"], False, "BC", "D", id="f"),
        pytest.param(["BCDEFGH"], ["CDE", "D"], False, "BC", "D", id="f at once"),
        pytest.param(ONE_TOKEN, ["D"], False, "BC", "D", id="g"),
        pytest.param(BYTES, ["DE", "CDE", "E"], False, "B", "CDE", id="earliest start"),
        pytest.param(["aab"], ["aa", "ab"], True, "aa", "aa", id="overlap"),
        pytest.param(["abab", "abc"], ["ababc"], False, "ab", "ababc", id="restart inside"),
        pytest.param(["a\U0001f336", "b"], ["\U0001f336b"], False, "a", "\U0001f336b", id="emoji"),
    ],
)
def test_reported_cases(
    pieces: list[str], stops: list[str], include: bool, text: str, matched: str | None
) -> None:
    shown, found = run(StopChecker(stops, include), pieces)
    assert ("".join(shown), found) == (text, matched)


def test_withholds_only_what_may_become_a_stop() -> None:
    checker = StopChecker(["</end>"])
    assert [checker.feed(piece) for piece in ("a<", "/e", "x", "</end", "> never")] == [
        "a",
        "",
        "</ex",
        "",
        "",
    ]
    assert checker.matched == "</end>"
    assert checker.feed("more") == ""
    assert checker.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    checker = StopChecker([])
    assert checker.feed("text") + checker.finish() == "text"
    assert checker.matched is None


def expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The rule: the first character at which a stop completes, there the longest of them."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
@settings(deadline=None)
def test_any_chunking_follows_the_rule(pieces: list[str], stops: list[str], include: bool) -> None:
    checker = StopChecker(stops, include)
    shown = ""
    for count in range(1, len(pieces) + 1):
        shown += checker.feed(pieces[count - 1])
        text = "".join(pieces[:count])
        if checker.matched is not None:
            break
        held = text[len(shown) :]
        beginnings = {stop[:cut] for stop in stops for cut in range(1, len(stop))}
        longest = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert (shown + held, len(held)) == (text, longest)
    shown += checker.finish()
    assert (shown, checker.matched) == expected("".join(pieces), stops, include)
