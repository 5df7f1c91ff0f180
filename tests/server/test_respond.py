"""What a slow or stuck client gets, without a server: the engine's part is played by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from helpers.checkpoints import byte_tokenizer

from octavo.engine.delivery import RequestUpdate
from octavo.errors import EngineDiedError
from octavo.frontend import Frontend
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams
from octavo.server.answers import AnswerOptions
from octavo.server.completion_answer import CompletionAnswer
from octavo.server.engine_client import Generation
from octavo.server.metrics import Metrics
from octavo.server.respond import Respond
from octavo.text import Tokenizer


class Engine:
    """``give`` plays a step; ``dropped`` counts the calls that are over."""

    def __init__(self) -> None:
        self.metrics = Metrics("model")
        self.tokenizer = Tokenizer(byte_tokenizer())
        self.frontend = Frontend(self.tokenizer, vocab_size=261, eos_token_ids=frozenset())
        self.generation: Generation | None = None
        self.dropped = 0

    def start(self, submissions: Any) -> Generation:
        for submission in submissions:
            self.frontend.register(submission)
        self.generation = Generation(submissions)
        return self.generation

    def drop(self, generation: Generation) -> None:
        self.dropped += 1

    def give(self, text: str, last: bool = False) -> None:
        assert self.generation is not None
        reason: Any = "length" if last else None
        metrics = RequestMetrics(0.0)
        ids = list(text.encode())
        self.frontend.process([RequestUpdate("c", ids, None, None, reason, None, 0, metrics)])
        self.generation.notify()


class Client:
    """Takes a message each time it is let; ``left``: it has closed the connection."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.let = asyncio.Semaphore(0)
        self.left = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.let.acquire()
        self.taken.append(message)

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    def texts(self) -> list[str]:
        """The text of every event, chunk by chunk."""
        found = []
        for message in self.taken:
            for event in message.get("body", b"").decode().split("\n\n"):
                if event.startswith("data: {"):
                    value = json.loads(event.removeprefix("data: "))
                    found.append(value["choices"][0]["text"] if "choices" in value else "error")
        return found


def respond(engine: Engine, stream: bool = True) -> Respond:
    params = SamplingParams(max_tokens=None)
    answer = CompletionAnswer(AnswerOptions("model"), engine.tokenizer, params)
    submission = engine.frontend.prepare("c", "x", params)
    return Respond(engine, [submission], answer, stream=stream)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_slow_client_gets_in_one_chunk_what_has_come() -> None:
    async def run() -> None:
        engine, client = Engine(), Client()
        call = asyncio.create_task(respond(engine)({}, client.receive, client.send))
        await settle()
        engine.give("a")
        client.let.release()
        await settle()
        for text in ("b", "c", "d"):  # while the first chunk is stuck
            engine.give(text)
            await settle()
        client.let.release()
        client.let.release()
        await settle()
        engine.give("e", last=True)
        client.let.release()
        await call
        assert client.texts() == ["a", "bcd", "e"]
        assert client.taken[-1]["body"].endswith(b"data: [DONE]\n\n")
        assert not client.taken[-1]["more_body"]
        assert engine.dropped == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(stream: bool) -> None:
    async def run() -> None:
        engine, client = Engine(), Client()
        call = asyncio.create_task(respond(engine, stream)({}, client.receive, client.send))
        await settle()
        client.left.set()
        await asyncio.wait_for(call, 1)
        assert client.taken == []
        assert engine.dropped == 1

    asyncio.run(run())


def test_an_error_before_the_first_token_is_a_response() -> None:
    async def run() -> None:
        engine, client = Engine(), Client()
        call = asyncio.create_task(respond(engine)({}, client.receive, client.send))
        await settle()
        assert engine.generation is not None
        engine.generation.fail(EngineDiedError("gone"))
        with pytest.raises(EngineDiedError):
            await call
        assert client.taken == []
        assert engine.dropped == 1

    asyncio.run(run())


def test_an_error_after_it_is_an_event() -> None:
    async def run() -> None:
        engine, client = Engine(), Client()
        client.let = asyncio.Semaphore(100)
        call = asyncio.create_task(respond(engine)({}, client.receive, client.send))
        await settle()
        engine.give("a")
        await settle()
        assert engine.generation is not None
        engine.generation.fail(EngineDiedError("gone"))
        await call
        assert client.texts() == ["a", "error"]
        assert client.taken[-1]["body"].endswith(b"data: [DONE]\n\n")

    asyncio.run(run())
