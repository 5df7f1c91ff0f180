"""Reported faults O01 to O07 and O34 over HTTP: streamed characters, stops, prompts, usage."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.checkpoints import BOS, EOS, IM_END, IM_START, chain, markov
from helpers.server import Server, serving, texts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def both_ways(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The first choice of a completion; streamed, it says the same."""
    body = {"model": "book", "temperature": 0, **body}
    whole = server.post(COMPLETIONS, body)
    events = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert texts(events) == whole["choices"][0]["text"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    [last] = [c for e in events for c in e["choices"] if c["finish_reason"] is not None]
    for name in ("finish_reason", "stop_reason"):
        assert last[name] == whole["choices"][0][name]
    return whole["choices"][0] | {"usage": whole["usage"]}


@pytest.mark.parametrize(("prompt", "text"), [("A", "🌶!"), ("B", "ď"), ("C", "龜")])
def test_o01_a_character_in_several_tokens(server: Server, prompt: str, text: str) -> None:
    choice = both_ways(server, {"prompt": prompt})
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    assert choice["usage"]["completion_tokens"] == len(text.encode()) + 1  # the end counts


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text", "reason"),
    [("D", 16, "\ufffd?", "stop"), ("D", 2, "\ufffd", "length"), ("E", 16, "\ufffdz", "stop")],
)
def test_o02_bytes_that_are_no_character(
    server: Server, prompt: str, max_tokens: int, text: str, reason: str
) -> None:
    choice = both_ways(server, {"prompt": prompt, "max_tokens": max_tokens})
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    named = both_ways(server, {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 5})
    assert named["text"] == text
    assert named["logprobs"]["tokens"][0] == {"D": "bytes:\\xf1", "E": "bytes:\\xff"}[prompt]


def test_o02_bytes_of_tokens_in_a_chat(server: Server) -> None:
    body = {"messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body |= {"logit_bias": {"241": 100}, "max_tokens": 1}
    [entry] = server.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "\ufffd"
    assert entry["bytes"] == [241]
    assert len(entry["top_logprobs"]) == 2
    assert entry["top_logprobs"][0] | {"logprob": 0} == {"token": "a", "bytes": [97], "logprob": 0}


@pytest.mark.parametrize(
    ("stop", "more", "text", "stop_reason"),
    [
        (["def"], {}, "bc", "def"),
        (["def"], {"include_stop_str_in_output": True}, "bcdef", "def"),
        (["efX", "cd"], {}, "b", "cd"),
        (["bcdefghX"], {}, "bcdefgh", None),
        ("d", {}, "bc", "d"),
        (["cde", "d"], {}, "bc", "d"),
    ],
)
def test_o03_stop_strings(
    server: Server, stop: Any, more: dict[str, Any], text: str, stop_reason: str | None
) -> None:
    choice = both_ways(server, {"prompt": "a", "stop": stop, **more})
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop_reason


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """No BOS; a template that refuses a system message; two ends of an answer."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = markov(
        tmp_path_factory.mktemp("other"),
        chain("A", "B", IM_END, "C", EOS),
        add_bos=False,
        chat_template=template,
        eos=[EOS, IM_END],
    )
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["hi", ""]])
def test_o04_an_empty_prompt(other: Server, prompt: Any) -> None:
    reply = other.call("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 4})
    assert reply.status == 400
    assert reply.error["param"] == "prompt"
    assert other.post(COMPLETIONS, {"prompt": "A", "max_tokens": 1})["choices"][0]["text"]


def test_o04_no_messages(other: Server) -> None:
    assert other.call("POST", CHAT, {"messages": []}).error["param"] == "messages"


def test_o04_an_empty_prompt_with_bos(server: Server) -> None:
    assert server.post(COMPLETIONS, {"prompt": "", "max_tokens": 1})["usage"]["prompt_tokens"] == 1


def test_o05_bos_once(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    ids = server.post(CHAT, body)["prompt_token_ids"]
    head = [BOS, IM_START, *b"user\nhi", IM_END, *b"\n", IM_START]
    assert ids[: len(head)] == head
    assert ids.count(BOS) == 1
    assert server.post("/tokenize", {"messages": HELLO})["tokens"] == ids
    for prompt in ("hi", "<s>hi"):
        assert server.post("/tokenize", {"prompt": prompt})["tokens"] == [BOS, *b"hi"]


def test_o06_a_template_that_refuses(other: Server) -> None:
    refused = other.call("POST", CHAT, {"messages": [{"role": "system", "content": "x"}, *HELLO]})
    assert refused.status == 400
    assert "no system here" in refused.error["message"]
    other.post(CHAT, {"messages": HELLO, "max_tokens": 1})


def test_o06_a_prefilled_turn(other: Server) -> None:
    turns = [("user", "q"), ("assistant", "ok"), ("user", "q2"), ("assistant", "ok ")]
    messages = [{"role": role, "content": content} for role, content in turns]
    body = {"messages": messages, "continue_final_message": True}
    ids = other.post("/tokenize", {**body, "add_generation_prompt": False})["tokens"]
    assert bytes(id for id in ids if id < 256).endswith(b"assistant\nok")
    assert ids.count(IM_END) == 3
    assert other.post("/tokenize", body)["tokens"] == ids
    both = other.call("POST", CHAT, {**body, "add_generation_prompt": True})
    assert both.status == 400


def test_o07_several_ends(other: Server) -> None:
    body = {"prompt": "A", "temperature": 0}
    choice = other.post(COMPLETIONS, body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("B", "stop")
    choice = other.post(COMPLETIONS, {**body, "ignore_eos": True, "max_tokens": 4})["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("BC", "length")
    choice = other.post(COMPLETIONS, {**body, "stop_token_ids": [66]})["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", 66)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include", [None, True, False])
@pytest.mark.parametrize("more", [{}, {"stop": "d"}, {"max_tokens": 1}, {"n": 2}])
def test_o34_the_shape_of_a_stream(
    server: Server, path: str, include: bool | None, more: dict[str, Any]
) -> None:
    ask: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    body = {**ask, "temperature": 0, **more}
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    events = server.stream(path, body | options)
    whole = server.post(path, body)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    if include:
        assert events[-1]["choices"] == []
        usage = events.pop()["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == whole["usage"][name]
    assert all("usage" not in event for event in events)
    for index, choice in enumerate(whole["choices"]):
        own = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert texts(events, index) == text
        if path == CHAT:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in c["delta"] for c in own[1:])


def test_o34_stream_options_without_a_stream(server: Server) -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    for stream in (False, None):
        reply = server.call("POST", COMPLETIONS, {**body, "stream": stream})
        assert reply.status == 400
        assert reply.error["param"] == "stream_options"


def test_continuous_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(
        COMPLETIONS, {"prompt": "a", "temperature": 0, "stream_options": options}
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_logprobs_streamed_and_whole(server: Server) -> None:
    body = {"messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = server.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    events = server.stream(CHAT, body)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole
    assert "".join(entry["token"] for entry in whole) == "abcdefgh</s>"
    assert all(len(entry["top_logprobs"]) == 3 for entry in whole)


def test_token_ids_on_request(server: Server) -> None:
    body = {"prompt": "a", "temperature": 0, "return_token_ids": True}
    whole = server.post(COMPLETIONS, body)["choices"][0]
    assert whole["token_ids"] == [*b"bcdefgh", EOS]
    assert whole["prompt_token_ids"] == [BOS, ord("a")]
    events = server.stream(COMPLETIONS, body)
    assert [id for e in events for c in e["choices"] for id in c["token_ids"]] == whole["token_ids"]
    assert events[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]


@pytest.mark.parametrize("prompt", [["a", "A"], [[BOS, ord("a")], [BOS, ord("A")]]])
def test_several_prompts_and_answers(server: Server, prompt: Any) -> None:
    body = {"prompt": prompt, "temperature": 0, "n": 2}
    whole = server.post(COMPLETIONS, body)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in whole["choices"]] == ["bcdefgh", "bcdefgh", "🌶!", "🌶!"]
    assert whole["usage"]["prompt_tokens"] == 4
    events = server.stream(COMPLETIONS, body)
    assert [texts(events, i) for i in range(4)] == [c["text"] for c in whole["choices"]]
