"""``/v1/responses``, driven by OpenAI's official client: text, streamed, tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from helpers.server import Server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="book", input="hi", instructions="be brief", temperature=0, metadata={"a": "b"}
    )
    assert answer.output_text == "abcdefgh"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 9
    assert answer.metadata == {"a": "b"}


def test_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model="book", input="hi", temperature=0)
    said: Any = [{"role": "user", "content": "hi"}, *(one.model_dump() for one in first.output)]
    said.append({"role": "user", "content": [{"type": "input_text", "text": "more"}]})
    assert client.responses.create(model="book", input=said, temperature=0).output_text


def test_a_cut_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="book", input="hi", temperature=0, max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "ab"


def test_streamed(client: openai.OpenAI) -> None:
    with client.responses.stream(model="book", input="hi", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "abcdefgh"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "abcdefgh"


def test_structured(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": ["on"]}}, "required": ["x"]}
    text: Any = {
        "format": {
            "type": "json_schema",
            "name": "state",
            "schema": {**schema, "additionalProperties": False},
        }
    }
    answer = client.responses.create(model="book", input="hi", temperature=0, text=text)
    assert json.loads(answer.output_text) == {"x": "on"}


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "background": True},
        {"input": "x", "temperature": 9, "foo": 1},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {},
    ],
)
def test_what_is_refused(server: Server, body: dict[str, Any]) -> None:
    assert server.call("POST", "/v1/responses", body).status == 400
