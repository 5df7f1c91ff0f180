"""One call's way from the engine to its client: a whole response, or a stream of events.

Plain ASGI, since a token costs little more than its ``send``: a stream's start goes through all
layers of the application, which add headers, its body straight to the server. The text of an answer
only grows, so a slow client needs no queue: it gets in one chunk what has come since the last.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import fields

from starlette.types import Message, Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.frontend import Submission
from octavo.sampling_params import SamplingParams
from octavo.server.answers import Answer, encode_json
from octavo.server.engine_client import EngineClient, Generation
from octavo.server.gateway import request_id

logger = logging.getLogger(__name__)

BODY_SEND = "octavo.body_send"  # in a scope: the server's own ``send``
_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would gather events
    ],
}


class EngineFault(OctavoError):
    """The engine gave a request up."""


class Respond:
    """An ASGI response that gives checked submissions to the engine and tells their answers.

    The client's leaving ends it, and whatever ends it aborts what is still running.
    """

    def __init__(
        self,
        engine: EngineClient,
        submissions: Sequence[Submission],
        answer: Answer,
        *,
        stream: bool,
        log: bool = False,
    ) -> None:
        self._engine = engine
        self._log = log
        self._submissions = submissions
        self._answer = answer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._engine.start(self._submissions)
        if self._log:
            _log_start(self._submissions, request_id(scope))
        gone = asyncio.ensure_future(_until_gone(receive))
        gone.add_done_callback(lambda _: generation.notify())
        try:
            if self._stream:
                # As a task it is woken through two frames, not through all of the application's.
                tell = self._tell_stream(generation, gone, send, scope.get(BODY_SEND, send))
                await asyncio.create_task(tell)
            else:
                await self._tell_whole(generation, gone, send)
        finally:
            gone.cancel()
            self._engine.drop(generation)
            if self._log:
                _log_end(self._submissions)

    async def _tell_whole(
        self, generation: Generation, gone: asyncio.Future[None], send: Send
    ) -> None:
        while not generation.finished:
            await generation.changed()
            if gone.done():
                return
        _check(generation)
        body = encode_json(self._answer.whole(generation.outputs))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _tell_stream(
        self, generation: Generation, gone: asyncio.Future[None], send: Send, send_body: Send
    ) -> None:
        """Until the first token an error is a response of its own, then an event."""
        began = False
        try:
            while True:
                await generation.changed()
                if gone.done():
                    return
                _check(generation)
                finished = generation.finished
                events = self._answer.events(generation.outputs)
                if not began:
                    began = True
                    await send(_STREAM_START)
                if events:
                    await send_body(
                        {"type": "http.response.body", "body": events, "more_body": not finished}
                    )
                if finished:
                    return
        except Exception as error:
            if not began:
                raise
            if not isinstance(error, OctavoError):
                logger.exception("a stream broke")
            self._engine.metrics.failed(error)
            events = self._answer.error_events(error)
            await send_body({"type": "http.response.body", "body": events})


def _check(generation: Generation) -> None:
    for output in generation.outputs:
        if output.error is not None:
            raise EngineFault(output.error)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _log_start(submissions: Sequence[Submission], name: str | None) -> None:
    called = "" if name is None else f" ({name})"
    for one in submissions:
        defaults = SamplingParams()
        said = ", ".join(
            f"{field.name}={getattr(one.params, field.name)!r}"
            for field in fields(SamplingParams)
            if getattr(one.params, field.name) != getattr(defaults, field.name)
        )
        tokens = len(one.output.prompt_token_ids)
        logger.info("%s%s came: %d prompt tokens, %s", one.output.request_id, called, tokens, said)


def _log_end(submissions: Sequence[Submission]) -> None:
    for one in submissions:
        output, times = one.output, one.output.metrics
        first, ended = times.first_token_time, times.finished_time or time.monotonic()
        logger.info(
            "%s went: %s tokens, TTFT %s, %.3f s",
            output.request_id,
            "; ".join(
                f"{answer.finish_reason}, {len(answer.token_ids)}" for answer in output.outputs
            ),
            "none" if first is None else f"{first - times.arrival_time:.3f} s",
            ended - times.arrival_time,
        )
