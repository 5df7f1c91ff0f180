"""OpenAI's official Python client, driven against the server."""

from __future__ import annotations

import json

import openai
import pytest
from helpers.server import Server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


HI = [{"role": "user", "content": "hi"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["book", "other"]
    assert client.models.retrieve("book").owned_by == "octavo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="book", messages=HI, temperature=0)
    assert answer.choices[0].message.content == "abcdefgh"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens_details is not None


def test_chat_streamed(client: openai.OpenAI) -> None:
    text, last = "", None
    with client.chat.completions.create(
        model="book",
        messages=HI,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            last = chunk
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
    assert text == "abcdefgh"
    assert last is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == 9


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="book", messages=HI, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "abcdefgh"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="book", messages=HI, temperature=0, logprobs=True, top_logprobs=2, max_tokens=2
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in entries] == ["a", "b"]
    assert entries[0].bytes == [97]
    assert len(entries[0].top_logprobs) == 2


def test_extra_fields(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="book", messages=HI, max_tokens=3, extra_body={"top_k": 1, "stop_token_ids": [98]}
    )
    assert answer.choices[0].message.content == "a"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="book", prompt=["a", "A"], temperature=0, logprobs=1, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["abcdefgh", "A🌶!"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 0, *range(1, 9)]
    chunks = client.completions.create(model="book", prompt="A", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "🌶!"


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": ["on", "off"]}}, "required": ["x"]}
    answer = client.chat.completions.create(
        model="book",
        messages=HI,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "state",
                "schema": {**schema, "additionalProperties": False},
                "strict": True,
            },
        },
    )
    assert json.loads(answer.choices[0].message.content or "")["x"] in ("on", "off")


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="book", messages=HI, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="book", prompt="x" * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="book", messages=[])


@pytest.mark.anyio
async def test_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        stream = await client.chat.completions.create(
            model="book", messages=HI, temperature=0, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "abcdefgh"
