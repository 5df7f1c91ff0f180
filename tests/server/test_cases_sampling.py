"""Reported faults O08 to O16 over HTTP: limits, the sampler's edges, seeds, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.server import Server, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--max-model-len", "64") as server:
        yield server


def test_o08_scoring_a_prompt(small: Server) -> None:
    body = {"prompt": "Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = small.post(COMPLETIONS, body)
    [choice] = answer["choices"]
    assert choice["text"] == "Yes"
    assert choice["logprobs"]["tokens"] == ["Y", "e", "s"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    first, *scores = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert all(score < 0 for score in scores)
    assert len(scores) == 2
    assert answer["usage"]["completion_tokens"] == 0


def test_o08_room_for_the_answer(small: Server) -> None:
    body = {"prompt": "x" * 60, "ignore_eos": True}
    for more in ({"max_tokens": 4}, {"max_tokens": None}):
        reply = small.call("POST", COMPLETIONS, body | more)
        assert reply.status == 200
        assert reply.json["usage"]["completion_tokens"] == 4
        assert reply.json["choices"][0]["finish_reason"] == "length"
    over = small.call("POST", COMPLETIONS, body | {"max_tokens": 5})
    assert over.status == 400
    assert over.error["code"] == "context_length_exceeded"
    assert "60" in over.error["message"]
    assert "65" in over.error["message"]
    assert "64" in over.error["message"]


@pytest.mark.parametrize("length", [64, 65, 5000])
def test_o08_a_prompt_too_long(small: Server, length: int) -> None:
    reply = small.call("POST", COMPLETIONS, {"prompt": "x" * length})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert str(length) in reply.error["message"]


def test_o08_a_chat_may_fill_the_context(small: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    usage = small.post(CHAT, body)["usage"]
    assert usage["total_tokens"] == 64
    usage = small.post(CHAT, body | {"max_completion_tokens": 2})["usage"]
    assert usage["completion_tokens"] == 2
    assert small.call("POST", CHAT, body | {"max_completion_tokens": 64}).status == 400


@pytest.mark.parametrize("temperature", [0, 1e-10, 1e-6, 1e-4, 0.01])
def test_o09_small_temperatures(server: Server, temperature: float) -> None:
    body = {"prompt": "q", "max_tokens": 1, "logprobs": 2, "temperature": temperature}
    assert server.post(COMPLETIONS, body)["choices"][0]["text"] == "a"


@pytest.mark.parametrize("temperature", [b"-1", b"NaN", b'"0.5"', b"Infinity", b"{}", b"true"])
def test_o09_no_temperature(server: Server, temperature: bytes) -> None:
    body = b'{"prompt": "q", "max_tokens": 1, "temperature": %b}' % temperature
    reply = server.call("POST", COMPLETIONS, body)
    assert reply.status == 400
    assert reply.error["param"] == "temperature"


@pytest.mark.parametrize(
    ("params", "letters"),
    [
        ({"top_k": 1}, "a"),
        ({"top_k": 2}, "ab"),
        ({"top_k": 0}, "abcd"),
        ({"top_k": -1}, "abcd"),
        ({"top_k": 10**6}, "abcd"),
        ({"top_p": 0.8}, "ab"),
        ({"top_p": 1e-9}, "a"),
        ({"min_p": 0.2}, "ab"),
        ({"min_p": 1.0}, "a"),
    ],
)
def test_o10_filters(server: Server, params: dict[str, Any], letters: str) -> None:
    """128 draws of one call: its choices."""
    body = {"prompt": "r", "max_tokens": 1, "n": 128, "seed": 7, **params}
    choices = server.post(COMPLETIONS, body)["choices"]
    assert {choice["text"] for choice in choices} == set(letters)


@pytest.mark.parametrize(
    "params",
    [
        *({"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"top_k": -2}, {"repetition_penalty": 0}),
        *({"n": 0}, {"n": 129}, {"seed": -1}, {"seed": 2**63}, {"presence_penalty": 2.1}),
        *({"min_tokens": 5, "max_tokens": 2}, {"logprobs": 21}, {"max_tokens": -1}),
    ],
)
def test_o10_out_of_range(server: Server, params: dict[str, Any]) -> None:
    reply = server.call("POST", COMPLETIONS, {"prompt": "r", **params})
    assert reply.status == 400
    assert reply.error["param"] == next(iter(params))


def test_o11_seeds_among_neighbours(server: Server) -> None:
    body = {"prompt": "w", "max_tokens": 24, "ignore_eos": True, "temperature": 1}

    def answer(**params: Any) -> str:
        return server.post(COMPLETIONS, body | params)["choices"][0]["text"]

    alone = answer(seed=42)
    assert answer(seed=43) != alone
    assert answer(seed=0) == answer(seed=0)
    assert answer(seed=2**63 - 1)
    with ThreadPoolExecutor(8) as pool:
        seeded = [pool.submit(answer, seed=42) for _ in range(4)]
        free = [pool.submit(answer, seed=None) for _ in range(4)]
        assert {one.result() for one in seeded} == {alone}
        assert len({one.result() for one in free}) > 1


def test_o12_penalties_count_the_answer(server: Server) -> None:
    body = {"prompt": "t", "max_tokens": 2, "temperature": 0}
    assert server.post(COMPLETIONS, body)["choices"][0]["text"] == "uu"
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert server.post(COMPLETIONS, body | penalty)["choices"][0]["text"] == "uv"


@pytest.mark.parametrize("token", ["99999", "-1", "261", "abc", "", "١", "9" * 40])
def test_o13_no_token_id(server: Server, token: str) -> None:
    reply = server.call("POST", COMPLETIONS, {"prompt": "a", "logit_bias": {token: 5}})
    assert reply.status == 400
    assert reply.error["param"] == "logit_bias"


def test_o13_biases(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "temperature": 0}
    for bias, text in (({"98": -100}, None), ({"99": 100}, "c"), (None, "b"), ({}, "b")):
        answer = server.post(COMPLETIONS, body | {"logit_bias": bias})["choices"][0]["text"]
        assert answer != "b" if text is None else answer == text
    for bias in ({"99": 1000}, {"99": "x"}):
        assert server.call("POST", COMPLETIONS, body | {"logit_bias": bias}).status == 400


def test_o15_prompt_logprobs_and_the_cache(small: Server) -> None:
    prompt = list(range(1, 34))
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    cold, warm = (small.post(COMPLETIONS, body)["choices"][0]["logprobs"] for _ in range(2))
    assert cold["token_logprobs"][0] is None
    assert len(cold["token_logprobs"]) == 34
    assert warm["token_logprobs"][1:] == pytest.approx(cold["token_logprobs"][1:], abs=1e-4)


def test_o16_impossible_tokens_are_json(server: Server) -> None:
    body = {"prompt": "correct horse", "echo": True, "logprobs": 5, "top_k": 1, "max_tokens": 2}
    choice = server.post(COMPLETIONS, body)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len("correct horse") + 3
    shaped = {
        "messages": [{"role": "user", "content": "x"}],
        "structured_outputs": {"choice": ["only"]},
        "logprobs": True,
        "top_logprobs": 20,
    }
    choice = server.post(CHAT, shaped)["choices"][0]
    assert choice["message"]["content"] == "only"
    assert "".join(one["token"] for one in choice["logprobs"]["content"]).startswith("only")


def test_cached_tokens_are_told(small: Server) -> None:
    body = {"prompt": "c" * 40, "max_tokens": 1}
    first, second = (small.post(COMPLETIONS, body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 32}
    salted = small.post(COMPLETIONS, body | {"cache_salt": "mine"})["usage"]
    assert salted["prompt_tokens_details"] == {"cached_tokens": 0}
