"""The benchmark's client: what is a token, when it came, and which answers are whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.stub_openai import DONE, Timed, case_39, chat_piece, event, usage
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.client import Answer, AnswerReader, Client, Usage
from octavo.errors import ConfigError


def read(script: Timed) -> Answer:
    reader = AnswerReader(sent=50.0)
    for ms, data in script:
        reader.feed(data, 50.0 + ms / 1000)
    return reader.end()


def read_at_once(*events: bytes) -> Answer:
    return read([(100.0, data) for data in events])


@pytest.mark.parametrize("empty_at", [None, 50.0, 110.0, 390.0])
@pytest.mark.parametrize("texts", [None, ["    "] * 7 + ["   "]])
def test_o39_first_and_last_token(empty_at: float | None, texts: list[str] | None) -> None:
    answer = read(case_39(texts, empty_at))
    assert answer.error is None
    assert answer.ttft == pytest.approx(0.100)
    assert answer.latency == pytest.approx(0.380)
    assert len(answer.pieces) == 8
    assert answer.usage == Usage(10, 32)
    assert answer.text == "".join(texts or ["four of them"] * 8)


STREAM = (
    b": a comment\r\n\r\n"
    b'data: {"choices":[{"index":0,"text":"h\xc3\xa9"}]}\r\n\r\n'
    b"event: other\n"
    b'data:{"choices":[{"index":0,"text":"llo","finish_reason":"stop"}]}\n\n' + usage(3, 2) + DONE
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
@settings(deadline=None)
def test_wherever_the_network_cuts_the_stream(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    answer = read_at_once(*(STREAM[a:b] for a, b in pairwise(ends)))
    assert (answer.text, answer.error, answer.usage) == ("héllo", None, Usage(3, 2))
    assert len(answer.pieces) == 2


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    both = chat_piece(reasoning="so", reasoning_content="so")  # two names of the same
    call = chat_piece(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])
    answer = read_at_once(both, chat_piece(content="42"), call, DONE)
    assert answer.text == "so42"
    assert len(answer.pieces) == 3


def test_usage_along_the_way() -> None:
    counted = [
        event([{"text": "a"}], usage={"prompt_tokens": 2, "completion_tokens": 3}),
        event([{"text": "b"}], usage={"prompt_tokens": 2, "completion_tokens": 4}),
    ]
    answer = read_at_once(*counted, DONE)
    assert [piece.num_tokens for piece in answer.pieces] == [3, 4]
    assert answer.usage == Usage(2, 4)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "no token came"),
        ([chat_piece(role="assistant", content=""), DONE], "no token came"),
        ([b'{"choices": [{"text": "not streamed"}]}'], 'no token came: {"choices"'),
        ([chat_piece(content="half")], "the stream broke off"),
        ([chat_piece(content="x"), event([], error={"message": "engine died"}), DONE], "engine di"),
        ([chat_piece(content="x"), b"data: {oops\n\n", DONE], "an event isn't OpenAI's"),
        ([b'data: {"choices": [{"text": 5}]}\n\n', DONE], "an event isn't OpenAI's"),
    ],
)
def test_answers_that_fail(events: list[bytes], why: str) -> None:
    error = read_at_once(*events).error
    assert error is not None
    assert error.startswith(why)


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    end = event([{"index": 0, "delta": {}, "finish_reason": "length"}])
    assert read_at_once(chat_piece(content="x"), end).error is None


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", ""])
def test_base_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="must be like http"):
        Client(url)


def test_a_key_that_would_forge_headers() -> None:
    with pytest.raises(ConfigError, match="can't carry"):
        Client("http://127.0.0.1", api_key="sk\r\nX-Admin: yes")
