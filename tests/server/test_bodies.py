"""Reported fault O36: malformed bodies. Nothing is a 500, and the server answers the next call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.server import Server, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from octavo.server.responses import ResponsesRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _lives_on(server: Server) -> Iterator[None]:
    yield
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})["choices"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"{:",
        b"",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt":"\xd6\xd0"}',
        b'{"prompt":"\\ud83d"}',
        b'{"messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"[" * 100_000,
        b'{"prompt":"x"} trailing',
    ],
    ids=range(11),
)
def test_no_object_or_no_unicode(server: Server, path: str, body: bytes) -> None:
    reply = server.call("POST", path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in ("5", 5.5, True)),
        ("temperature", {}),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", {"a": "b"}),
        ("foo", 1),
        ("n", "2"),
        ("suffix", "text"),
        ("best_of", 2),
        ("stream", "yes"),
        ("stream_options", []),
        ("logit_bias", [1]),
        ("seed", 1.5),
        ("priority", "high"),
        *((name, 10**30) for name in ("priority", "top_k", "min_tokens", "n")),
        ("cache_salt", ""),
        ("response_format", {"type": "xml"}),
    ],
)
def test_fields_of_the_wrong_kind(server: Server, field: str, value: Any) -> None:
    reply = server.call("POST", COMPLETIONS, {"prompt": "a", field: value})
    assert reply.status == 400
    assert reply.error["param"].split(".")[0] == field
    assert field in reply.error["message"]
    assert server.call("GET", "/load").json == {"server_load": 0}


def test_several_unknown_fields_are_all_named(server: Server) -> None:
    message = server.call("POST", CHAT, {"messages": [], "foo": 1, "bar": 2}).error["message"]
    assert "foo" in message
    assert "bar" in message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "narrator", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]},
        "hello",
    ],
)
def test_messages_that_are_none(server: Server, message: Any) -> None:
    reply = server.call("POST", CHAT, {"messages": [message]})
    assert reply.status == 400
    assert "messages" in (reply.error["param"] or "")


def test_what_is_allowed(server: Server) -> None:
    """Parts of text, null for a default, OpenAI's fields without effect, NUL, and 100 stops."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "model": None,
        "messages": [
            {"role": "developer", "content": "x", "name": None},
            {"role": "user", "content": parts},
        ],
        "max_tokens": 1,
        **dict.fromkeys(("temperature", "stop", "n", "tools", "tool_choice", "seed", "logprobs")),
        **dict.fromkeys(("response_format", "functions", "stream_options", "logit_bias")),
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    assert server.post(CHAT, body)["choices"]
    stops = [f"stop {i}" for i in range(100)]
    assert server.post(COMPLETIONS, {"prompt": "a\0b", "stop": stops, "max_tokens": 1})["choices"]
    assert server.post(COMPLETIONS, b'{"prompt":"a","max_tokens":9,"max_tokens":1}')["choices"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_does_not_say_it_is_json(server: Server, kind: str) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    reply = server.call("POST", COMPLETIONS, body, headers={"Content-Type": kind})
    assert reply.status == 400
    assert "application/json" in reply.error["message"]


def test_other_paths_methods_and_models(server: Server) -> None:
    for path in ("/v1/nothing", "/", "//v1/completions", "/V1/completions", "/v1/completions/"):
        assert server.call("POST", path, {}).error["code"] == "not_found"
        assert server.call("GET", path).status == 404
    assert server.call("GET", COMPLETIONS).status == 405
    assert server.call("POST", "/health", {}).status == 405
    wrong = server.call("POST", COMPLETIONS, {"model": "gpt-4", "prompt": "a"})
    assert wrong.status == 404
    assert wrong.error["code"] == "model_not_found"
    assert server.call("GET", "/v1/models/gpt-4").status == 404
    assert server.call("GET", "/v1/models/other").json["id"] == "other"
    answer = server.post(COMPLETIONS, {"model": "other", "prompt": "a", "max_tokens": 1})
    assert answer["model"] == "other"


def test_token_ids(server: Server) -> None:
    reply = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert reply == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [256, 104, 195, 169],
        "token_strs": ["<s>", "h", "\ufffd", "\ufffd"],
    }
    assert server.post("/detokenize", {"tokens": [104, 195, 169]}) == {"prompt": "hé"}
    assert server.post("/tokenize", {"prompt": "x", "add_special_tokens": False})["count"] == 1
    for body in ({"tokens": [261]}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": "a"}):
        assert server.call("POST", "/detokenize", body).status == 400
    for body in ({}, {"prompt": "a", "messages": []}):
        assert server.call("POST", "/tokenize", body).status == 400


@pytest.fixture(scope="module")
def capped(book: Path) -> Iterator[Server]:
    flags = ("--max-body-bytes", "2000", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with serving(book, *flags) as server:
        yield server


def test_a_body_too_large(capped: Server) -> None:
    reply = capped.call("POST", COMPLETIONS, {"prompt": "x" * 2000})
    assert reply.status == 413
    assert "2000" in reply.error["message"]
    # Python's own client sends all before it reads.
    assert capped.call("POST", COMPLETIONS, {"prompt": "x" * 20_000_000}).status == 413
    connection = capped.connect()
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(3):
        connection.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
    assert connection.getresponse().status == 413


def test_a_queue_that_is_full(capped: Server) -> None:
    long = {"prompt": "l", "max_tokens": 200, "temperature": 0}
    running = [capped.events(COMPLETIONS, long) for _ in range(1)]
    next(running[0])
    body = {"prompt": "a", "max_tokens": 1, "n": 2}
    reply = capped.call("POST", COMPLETIONS, body)
    assert reply.status == 503
    assert "Retry-After" in {name.title() for name in reply.headers}
    assert len(list(running[0])) > 1
    assert capped.post(COMPLETIONS, body)["choices"]


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": {"not": {"type": "string"}}}},
        {"structured_outputs": {"grammar": "start: ???"}},
        {"structured_outputs": {"choice": []}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_formats_that_cannot_be_kept(server: Server, more: dict[str, Any], stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, **more}
    reply = server.call("POST", CHAT, body)
    assert reply.status == 400, reply.body
    assert reply.error["param"] is not None


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["auto", "required", "user", "text", "json_object", "a", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "name", "json", "choice", "function", "97"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
@pytest.mark.parametrize(
    ("path", "model", "base"),
    [
        (CHAT, ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
        (COMPLETIONS, CompletionRequest, {"prompt": "a"}),
        ("/v1/responses", ResponsesRequest, {"input": "x"}),
        ("/tokenize", TokenizeRequest, {"prompt": "a"}),
    ],
)
def test_no_body_is_a_500(server: Server, path: str, model: Any, base: Any, data: Any) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    short = {} if path == "/tokenize" else {limit: 2}
    names = sorted(set(model.model_fields) - {"stream", limit, "max_completion_tokens"})
    fields = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    reply = server.call("POST", path, base | fields | short)
    assert reply.status in (200, 400, 404), reply.body
    if reply.status != 200:
        assert reply.error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_get_one_sentence(server: Server, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}]
    error = server.call("POST", CHAT, {"messages": [{"role": "user", "content": parts}]}).error
    assert error["message"] == f"messages.0.content.1: only text can be read, not {kind}"
    assert error["param"] == "messages.0.content.1"


def test_a_response_format_without_its_schema_or_with_another_s(server: Server) -> None:
    base = {"messages": [{"role": "user", "content": "a"}]}
    for response_format, named in (
        ({"type": "json_schema"}, "of type json_schema has no json_schema"),
        ({"type": "text", "json_schema": {"name": "x"}}, "of type text can't have a json_schema"),
    ):
        reply = server.call("POST", CHAT, base | {"response_format": response_format})
        assert reply.status == 400
        assert named in reply.error["message"]
