"""Reported fault O35 over HTTP: tool calls, streamed and whole, and reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.checkpoints import CHATML, EOS, chain, markov
from helpers.server import Server, serving

CHAT = "/v1/chat/completions"

# Pieces of answers, each a token of its own. A letter at the prompt's end says which is given.
PIECES = (
    *("Let me see.\n", "<tool", '_call>{"na', 'me":"sum","argum', 'ents":{"n1":2,"s":"\\u00'),
    *(
        'e9"}}</tool',
        "_call>\n<to",
        'ol_call>{"name": "mul", "arguments": ',
        '{"n1":3}}</tool_call>',
    ),
    *("see <to", "ol box", "<think>hm", ", so</thi", "nk>\n\nYes.", "<think>", "</think>"),
    *('[{"name": "sum", "arguments": ', '{"n1', '": 4}', "}]"),
)
P = {piece: 261 + i for i, piece in enumerate(PIECES)}
TEMPLATE = CHATML + "{% if tools %}{# <tool_call> and <think> #}{% endif %}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "n1 and more",
            "parameters": {"type": "object", "properties": {"n1": {"type": "integer"}}},
        },
    }
    for name in ("sum", "mul")
]
CALLS = [("sum", '{"n1":2,"s":"\\u00e9"}'), ("mul", '{"n1":3}')]


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    two_calls = [P[piece] for piece in PIECES[1:9]]
    rows = {
        **chain("A", *two_calls, EOS),
        **chain("B", P["Let me see.\n"], two_calls[0]),
        **chain("C", P["see <to"], P["ol box"], EOS),
        **chain("D", *(P[piece] for piece in PIECES[11:14]), EOS),
        **chain("E", *(P[piece] for piece in PIECES[16:20]), EOS),
        **chain("\n", P[PIECES[16]]),
        **chain("F", P['{"n1']),
    }
    folder = markov(
        tmp_path_factory.mktemp("tools"),
        rows,
        extra=PIECES,
        chat_template=TEMPLATE,
        max_position_embeddings=512,
    )
    with serving(folder) as server:
        yield server


def ask(letter: str, **more: Any) -> dict[str, Any]:
    """A chat whose prompt ends in ``letter``."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": letter}]
    body = {"messages": messages, "continue_final_message": True, "tools": TOOLS}
    return {**body, "temperature": 0, **more}


def joined(events: list[Any]) -> dict[str, Any]:
    """A stream's deltas as one message, the shape of each delta checked."""
    message: dict[str, Any] = {"content": None, "tool_calls": [], "reasoning": None}
    reason = None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            reason = choice["finish_reason"] or reason
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = (message[name] or "") + delta[name]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    message["tool_calls"].append(call)
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return {**message, "finish_reason": reason}


def both_ways(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    whole = server.post(CHAT, body)["choices"][0]
    streamed = joined(server.stream(CHAT, body))
    message = whole["message"]
    assert streamed["finish_reason"] == whole["finish_reason"]
    assert streamed["content"] == message["content"]
    assert streamed["reasoning"] == message.get("reasoning") == message.get("reasoning_content")
    calls = [functions(message.get("tool_calls", ())), functions(streamed["tool_calls"])]
    assert calls[0] == calls[1]
    return {**message, "finish_reason": whole["finish_reason"], "calls": calls[0]}


def functions(calls: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_two_calls(tools_server: Server) -> None:
    answer = both_ways(tools_server, ask("A"))
    assert answer["calls"] == CALLS
    assert answer["content"] is None
    assert answer["finish_reason"] == "tool_calls"


def test_text_before_the_calls(tools_server: Server) -> None:
    answer = both_ways(tools_server, ask("B", tool_choice="auto"))
    assert answer["calls"] == CALLS
    assert answer["content"] == "Let me see."


def test_one_call_at_most(tools_server: Server) -> None:
    answer = both_ways(tools_server, ask("A", parallel_tool_calls=False))
    assert answer["calls"] == CALLS[:1]


def test_text_that_looks_like_a_call(tools_server: Server) -> None:
    answer = both_ways(tools_server, ask("C"))
    assert (answer["content"], answer["calls"]) == ("see <tool box", [])
    assert answer["finish_reason"] == "stop"


def test_no_call_wanted(tools_server: Server) -> None:
    answer = both_ways(tools_server, ask("A", tool_choice="none"))
    assert answer["calls"] == []
    assert answer["content"].startswith('<tool_call>{"name":"sum"')
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(("tokens", "arguments"), [(4, '{"n1":2,"s":"\\u00'), (3, None)])
def test_a_call_that_is_cut(tools_server: Server, tokens: int, arguments: str | None) -> None:
    answer = both_ways(tools_server, ask("A", max_tokens=tokens))
    assert answer["finish_reason"] == "length"
    if arguments is None:  # cut within the head: nothing that could be called
        assert answer["calls"] == []
    else:
        assert answer["calls"] == [("sum", arguments)]


def test_reasoning(tools_server: Server) -> None:
    answer = both_ways(tools_server, ask("D"))
    assert answer["reasoning"] == "hm, so"
    assert answer["content"] == "Yes."


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "sum"}}, "stop"),
        ({"type": "function", "function": {"name": "mul"}}, "stop"),
    ],
)
@pytest.mark.parametrize("letter", "CEF")
def test_a_call_is_asked_for(tools_server: Server, letter: str, choice: Any, reason: str) -> None:
    """Whatever the model would say: a tool box, a list of calls, or arguments."""
    answer = both_ways(tools_server, ask(letter, tool_choice=choice, max_tokens=200))
    assert answer["content"] is None
    [(name, arguments), *_] = answer["calls"]
    if isinstance(choice, dict):
        assert name == choice["function"]["name"]
    if answer["finish_reason"] != "length":  # a model that is a table may never close a string
        assert answer["finish_reason"] == reason
        assert isinstance(json.loads(arguments), dict)
    if (letter, choice) == ("E", "required"):
        assert answer["calls"] == [("sum", '{"n1": 4}')]
    if letter == "F" and isinstance(choice, dict):
        assert arguments.startswith('{"n1": 4}')


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required", "tools": None},
        {"tool_choice": {"type": "function", "function": {"name": "div"}}},
        {"tool_choice": "sometimes"},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "retrieval", "function": {"name": "x"}}]},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_what_cannot_be_asked(tools_server: Server, more: dict[str, Any]) -> None:
    assert tools_server.call("POST", CHAT, ask("A", **more)).status == 400


def test_a_model_without_tools(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    reply = server.call("POST", CHAT, body)
    assert reply.status == 400
    assert "--tool-call-parser" in reply.error["message"]


def test_the_answer_goes_back(tools_server: Server) -> None:
    """An answer with calls, and a tool's result, as the next turn's messages."""
    message = tools_server.post(CHAT, ask("A"))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    body = {"messages": [{"role": "user", "content": "?"}, message, result], "max_tokens": 1}
    assert tools_server.post(CHAT, body)["choices"]


def test_calls_by_way_of_responses(tools_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="any", max_retries=0)
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    body: dict[str, Any] = {"tools": flat, "temperature": 0, "tool_choice": "required"}
    body |= {"input": "?", "model": client.models.list().data[0].id}
    [call] = client.responses.create(**body).output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("sum", '{"n1": 4}')
    with client.responses.stream(**body) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        [streamed] = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert "".join(pieces) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    body["input"] = [{"role": "user", "content": "?"}, call.model_dump(exclude_none=True), result]
    assert client.responses.create(**body).output
