"""Content rules: refused prompts, cut answers, and what would show the withheld text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.server import Server, serving, texts, wait_for

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FILTERED = {"finished_reason": "content_filter"}


@pytest.fixture(scope="module")
def ruled(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("rules") / "rules.txt"
    file.write_text("# What this book must not say.\nde?f\n(?i)\\bforbidden\\b\n🌶!\nl{20}\n")
    with serving(book, "--content-rules", str(file)) as server:
        yield server


def test_a_completion_is_cut(ruled: Server) -> None:
    before = ruled.metric("octavo:request_success_total", **FILTERED)
    body = {"prompt": "a", "temperature": 0, "max_tokens": 50}
    whole = ruled.post(COMPLETIONS, body)
    events = ruled.stream(COMPLETIONS, body)
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("bc", "content_filter")
    assert texts(events) == "bc"
    assert events[-1]["choices"][0]["finish_reason"] == "content_filter"
    # The text ends here by itself, by its length, and by a stop string.
    for more, text, reason in (
        ({"max_tokens": 2}, "bc", "length"),
        ({"max_tokens": 3}, "bcd", "length"),
        ({"max_tokens": 5}, "bc", "content_filter"),
        ({"stop": "f"}, "bcde", "stop"),
        ({"stop": "g"}, "bc", "content_filter"),
        ({"stop": "g", "stream": False, "prompt": "A"}, "", "content_filter"),
        ({"prompt": "B"}, "ď", "stop"),
    ):
        [choice] = ruled.post(COMPLETIONS, body | more)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, reason), more
        assert choice["stop_reason"] in (None, "f")
    assert ruled.metric("octavo:request_success_total", **FILTERED) == before + 5


def test_an_answer_that_goes_on_is_ended(ruled: Server) -> None:
    answer = ruled.post(COMPLETIONS, {"prompt": "l", "temperature": 0, "max_tokens": 200})
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 21
    wait_for(ruled.is_idle)


def test_a_chat_and_a_response_are_cut(ruled: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
    [choice] = ruled.post(CHAT, body)["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert choice["message"]["content"] == "abc"
    assert texts(ruled.stream(CHAT, body)) == "abc"
    body = {"input": "x", "temperature": 0}
    whole = ruled.post(RESPONSES, body)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "content_filter"}
    assert whole["output"][0]["content"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "this is Forbidden."}),
        (COMPLETIONS, {"prompt": ["fine", "this is forbidden"]}),
        (COMPLETIONS, {"prompt": list(b"a forbidden word")}),
        (CHAT, {"messages": [{"role": "user", "content": "forbidden"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "def"}]}]}),
        (RESPONSES, {"input": "forbidden"}),
    ],
)
def test_a_prompt_is_refused(ruled: Server, path: str, body: dict[str, Any], stream: bool) -> None:
    before = ruled.metric("octavo:request_errors_total", kind="content_filter")
    reply = ruled.call("POST", path, body | {"stream": stream})
    assert reply.status == 400
    assert reply.error["code"] == "content_filter"
    assert reply.error["message"] == "a content rule of this server refuses the prompt"
    assert ruled.metric("octavo:request_errors_total", kind="content_filter") == before + 1


def test_words_of_which_a_rule_is_a_part_pass(ruled: Server) -> None:
    assert ruled.post(COMPLETIONS, {"prompt": "unforbidden B", "temperature": 0})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "return_token_ids": True}, "return_token_ids"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs"),
    ],
)
def test_tokens_are_not_shown(ruled: Server, path: str, body: dict[str, Any], param: str) -> None:
    reply = ruled.call("POST", path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("name", "why"), [("rules.txt", "line 1 of the content rules"), ("", "can't be read")]
)
def test_a_bad_file_ends_the_start(book: Path, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "rules.txt").write_text("a.*b")
    file = str(tmp_path / name) if name else ""
    command = [sys.executable, "-m", "octavo", "serve", str(book), "--content-rules", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
