"""Reported faults O14, O17 to O21, O23 and O27 over HTTP: batches, grammars, memory, weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import REST, markov, tiny
from helpers.server import Server, serving, texts, wait_for

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
BLOCKS = 24  # of 16 tokens


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny(tmp_path_factory.mktemp("ids"), add_bos=False, vocab_size=1024)
    with serving(model, "--num-gpu-blocks-override", str(BLOCKS)) as server:
        yield server


def text(server: Server, prompt: Any, max_tokens: int = 16, **more: Any) -> str:
    body = GREEDY | {"prompt": prompt, "max_tokens": max_tokens} | more
    answer: str = server.post(COMPLETIONS, body)["choices"][0]["text"]
    return answer


def cached(server: Server, prompt: list[int]) -> tuple[int, str]:
    """How many of the prompt's tokens were found in the cache, and the answer."""
    answer = server.post(COMPLETIONS, GREEDY | {"prompt": prompt, "max_tokens": 16})
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], answer["choices"][0]["text"]


def all_at_once(server: Server, bodies: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = list(pool.map(lambda body: server.post(COMPLETIONS, GREEDY | body), bodies))
    return [reply["choices"][0]["text"] for reply in replies]


def test_o14_the_same_text_in_any_company(small_pool: Server) -> None:
    prompt = "The capital of France is"
    alone = text(small_pool, prompt, 48, cache_salt="alone")
    others = [
        {"prompt": f"{i} others", "max_tokens": 5 * i + 1, "temperature": 0.5} for i in range(31)
    ]
    body = {"prompt": prompt, "max_tokens": 48, "logprobs": 2}
    assert all_at_once(small_pool, [*others[:15], body, *others[15:]])[15] == alone
    assert text(small_pool, prompt, 48) == alone  # its beginning is cached now


@pytest.mark.alone
def test_o20_a_request_larger_than_the_pool(small_pool: Server) -> None:
    began = time.monotonic()
    reply = small_pool.call("POST", COMPLETIONS, {"prompt": [5] * (16 * BLOCKS + 1)})
    assert time.monotonic() - began < 2
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert str(16 * BLOCKS) in reply.error["message"]
    assert text(small_pool, [5] * 10)
    # Each of these needs every block there is: they run one after another.
    room = 16 * BLOCKS - 300
    bodies = [{"prompt": [i] * 300, "max_tokens": room} for i in (5, 6, 7)]
    alone = [text(small_pool, body["prompt"], room) for body in bodies]
    assert all_at_once(small_pool, bodies) == alone
    wait_for(small_pool.is_idle)


def test_o21_preemption_and_cached_prompts(small_pool: Server) -> None:
    common = [i % 251 for i in range(64)]
    bodies = [{"prompt": common + [i] * 5, "max_tokens": 60} for i in range(1, 9)]
    alone = [
        text(small_pool, body["prompt"], 60, cache_salt=str(i)) for i, body in enumerate(bodies)
    ]
    before = small_pool.metric("octavo:num_preemptions_total")
    for _ in range(20):  # on a busy machine they come one by one, and each finds room
        assert all_at_once(small_pool, bodies) == alone
        if small_pool.metric("octavo:num_preemptions_total") > before:
            break
    else:
        raise AssertionError("nothing was preempted")
    for length in (15, 16, 17, 48, 64):
        prompt = [length + i % 7 for i in range(length)]
        _, first = cached(small_pool, prompt)
        found, again = cached(small_pool, prompt)
        assert again == first
        assert found == (length - 1) // 16 * 16  # one position at least is computed
    wait_for(small_pool.is_idle)


def test_o23_other_blocks_are_not_taken_for_these(small_pool: Server) -> None:
    a = list(range(1, 33))
    prompts = [a, [i + 256 for i in a], [*a[:15], a[16], a[15], *a[17:]], a[16:], a[::-1]]
    with_salt = [
        text(small_pool, prompt, cache_salt=f"cold {i}") for i, prompt in enumerate(prompts)
    ]
    found = [cached(small_pool, prompt) for prompt in prompts]
    assert [answer for _, answer in found] == with_salt
    assert [count for count, _ in found] == [0] * 5
    assert cached(small_pool, a) == (16, with_salt[0])


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """O19's model: a space after everything, and "}" comes next after a digit."""
    digits = {ord(digit): {ord(" "): 20.0, ord("}"): 10.0} for digit in "0123456789"}
    model = markov(tmp_path_factory.mktemp("spaces"), {REST: {ord(" "): 20.0}, **digits})
    with serving(model) as server:
        yield server


def structured(schema: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 64, "structured_outputs": {"json": schema}} | more


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),  # O17
        ({"type": "integer", "minimumm": 5}, "minimumm"),
        ({"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]}, "enum"),  # O18
        ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "finite"),
        ({"$ref": "#/definitions/missing"}, "missing"),
    ],
)
def test_o17_o18_schemas_that_cannot_be_kept(spaces: Server, schema: Any, word: str) -> None:
    reply = spaces.call("POST", COMPLETIONS, structured(schema))
    assert reply.status == 400
    assert word in reply.error["message"]


def test_o17_o18_answers_keep_to_their_schemas(spaces: Server) -> None:
    for seed in range(20):
        drawn = {"seed": seed, "temperature": 2.0}
        body = structured({"type": "integer", "minimum": -5, "maximum": 12}, **drawn)
        assert -5 <= json.loads(spaces.post(COMPLETIONS, body)["choices"][0]["text"]) <= 12
        values = ["在线", "é", "🌶", 'a"b', "", None, 3, True]
        body = structured({"enum": values}, **drawn)
        whole = spaces.post(COMPLETIONS, body)["choices"][0]["text"]
        assert json.loads(whole) in values
        assert texts(spaces.stream(COMPLETIONS, body)) == whole


@pytest.mark.alone
def test_o18_a_compilation_holds_up_no_one(spaces: Server) -> None:
    words = [f"word {i} of many" for i in range(20_000)]
    body = structured({"type": "array", "items": {"enum": words}}, max_tokens=5)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(spaces.call, "POST", COMPLETIONS, body)
        gaps = []
        while not compiling.done() or not gaps:
            last = time.monotonic()
            for _ in spaces.events(COMPLETIONS, {"prompt": "x", "max_tokens": 20}):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
        assert compiling.result().status in (200, 400)
    assert max(gaps) < 2


def test_o19_white_space_is_bounded(spaces: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    body = structured(schema, temperature=0)
    [choice] = spaces.post(COMPLETIONS, body)["choices"]
    assert json.loads(choice["text"])["a"] == 0
    assert choice["text"].endswith("}")
    assert choice["finish_reason"] == "stop"
    assert spaces.post(COMPLETIONS, body | {"max_tokens": 3})["choices"][0]["finish_reason"] == (
        "length"
    )


def test_o27_a_damaged_checkpoint_is_never_served(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    server = Server(model)
    assert server.process.wait(30) == 1
    server.stop()
    assert "model.safetensors" in server.log
    assert "ready" not in server.log
    assert server.log.count("\n") == 1
