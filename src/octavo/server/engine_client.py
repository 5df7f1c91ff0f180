"""The engine as the API process sees it: started, watched, stopped, and spoken with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.loop import EngineStats
from octavo.errors import (
    ConfigError,
    EngineDiedError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
)
from octavo.frontend import Frontend, Submission
from octavo.outputs import RequestOutput
from octavo.server import messages
from octavo.server.metrics import Metrics

logger = logging.getLogger(__name__)

_STOP_SECONDS = 2.0
_LAST_WORDS_MS = 200


class EngineProcess:
    """A child process that is loading the model from now on."""

    module = "octavo.server.engine_process"

    def __init__(self, config: EngineConfig, address: str) -> None:
        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal reaches the API process only
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdin is not None
        start = messages.encode(messages.Start(config, address))
        with contextlib.suppress(BrokenPipeError):  # it is dead: wait() tells
            self._process.stdin.write(len(start).to_bytes(4, "little") + start)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> str:
        """Wait for its end and say how it came."""
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def stop(self) -> None:
        """End it: it goes when its standard input closes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Generation:
    """The answers to one call, as they grow: one output for each of its prompts."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self.submissions = list(submissions)
        self.outputs: list[RequestOutput] = [one.output for one in submissions]
        self._error: OctavoError | None = None
        self._news = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    async def changed(self) -> None:
        """Wait for something new since the last call; for one task. Raises what ended the answers
        early."""
        if not self._news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._news = False
        if self._error is not None:
            raise self._error

    def notify(self) -> None:
        self._news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, error: OctavoError) -> None:
        self._error = self._error or error
        self.notify()


class EngineClient:
    """Gives requests to the engine process and its updates to their calls; event loop only."""

    ready: messages.Ready | None = None
    stats: EngineStats | None = None
    draining = False

    def __init__(
        self,
        config: EngineConfig,
        frontend: Frontend,
        metrics: Metrics,
        process: EngineProcess,
        *,
        max_queued: int | None = None,
        restarts: int = 0,
    ) -> None:
        self.frontend = frontend
        self.metrics = metrics
        self._config = config
        self._process = process
        self._max_queued = max_queued
        self._restarts = restarts
        self._generations: dict[str, Generation] = {}  # by id of their submissions
        self._answers: set[str] = set()  # engine requests that are not finished
        self._socket: zmq.asyncio.Socket | None = None

    # ---- requests

    @property
    def num_answers(self) -> int:
        """Answers that run or wait."""
        return len(self._answers)

    def check_open(self, num_answers: int = 1) -> messages.Ready:
        """What the engine said when it was ready. Raises :class:`OverloadedError` where it can't
        take ``num_answers`` more."""
        if self.draining:
            raise OverloadedError("the server is shutting down; send the request to another")
        if self.ready is None:
            raise OverloadedError("the model is still loading; try again in a few seconds")
        if self._max_queued is not None:
            limit = self.ready.max_num_seqs + self._max_queued
            if self.num_answers + num_answers > limit:
                raise OverloadedError(
                    f"{self.num_answers} answers run or wait and this call asks for {num_answers}, "
                    f"but the limit is {limit} (max_num_seqs + max_num_queued_reqs); try again "
                    "later"
                )
        return self.ready

    def start(self, submissions: Sequence[Submission]) -> Generation:
        """Give checked requests to the engine. Whoever calls this must call :meth:`drop`."""
        self.check_open(sum(len(one.requests) for one in submissions))
        generation = Generation(submissions)
        for submission in submissions:
            self.frontend.register(submission)
            self._generations[submission.output.request_id] = generation
            self.metrics.request_started(submission)
            for request in submission.requests:
                self._answers.add(request.request_id)
                self._send(messages.Add.of(request))
        return generation

    def drop(self, generation: Generation) -> None:
        """The call is over; what is still running is aborted."""
        aborted = []
        for submission in generation.submissions:
            self._generations.pop(submission.output.request_id, None)
            aborted += self.frontend.drop(submission)
        for request_id in aborted:
            self._answer_ended(request_id, "abort")
        if aborted:
            self._send(messages.Abort(aborted))

    def fail_all(self, error: OctavoError) -> None:
        """End every call with an error."""
        for generation in set(self._generations.values()):
            generation.fail(error)

    def _send(self, message: messages.ToEngine) -> None:
        if self._socket is not None:
            self._socket.send(messages.encode(message))  # never blocks: its queue has no limit

    def _answer_ended(self, request_id: str, reason: str) -> None:
        if request_id in self._answers:  # else it was aborted a moment before
            self._answers.remove(request_id)
            self.metrics.answer_ended(request_id, reason)

    # ---- the engine's life

    async def run(self) -> None:
        """Follow the engine until it has died once too often. Raises :class:`ConfigError` where the
        model can't be loaded, else :class:`EngineDiedError`."""
        try:
            while True:
                end = await self._follow(self._process)
                error = EngineDiedError(f"the engine process {end}; its answers are lost")
                was_ready, self.ready = self.ready is not None, None
                self.fail_all(error)
                if not was_ready or not self._restarts:
                    raise error
                self._restarts -= 1
                logger.error("%s; starting it again, %d restarts left", error, self._restarts)
                self._process = EngineProcess(self._config, self._process.address + "+")
        finally:
            self._process.stop()

    async def _follow(self, process: EngineProcess) -> str:
        """Take the engine's messages until it ends; how it ended."""
        context = zmq.asyncio.Context.instance()
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(process.address)
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        try:
            while not ended.done():
                receiving = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({receiving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    self._take(messages.decode_from_engine(receiving.result()))
                else:
                    receiving.cancel()
            while await self._socket.poll(_LAST_WORDS_MS):
                self._take(messages.decode_from_engine(await self._socket.recv()))
            return ended.result()
        finally:
            process.stop()
            self._socket.close(linger=0)
            self._socket = None

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Step():
                self._take_step(message)
            case messages.Refused():
                submission_id = message.request_id.partition("#")[0]
                if generation := self._generations.get(submission_id):
                    error = InvalidRequestError(message.message, message.param)
                    error.status, error.code = message.status, message.code
                    generation.fail(error)
            case messages.Ready():
                self.ready = message
                self.metrics.engine_ready(message)
            case messages.Failed():
                raise ConfigError(message.message)

    def _take_step(self, message: messages.Step) -> None:
        self.stats = message.stats
        updates = message.updates
        step = self.frontend.process(updates)
        if step.stopped:
            self._send(messages.Finish(step.stopped))
        self.metrics.step_came(updates, message.stats)
        for request_id, reason in step.ended.items():
            self._answer_ended(request_id, reason)
        for output in step.outputs:
            self._generations[output.request_id].notify()


def socket_address() -> tuple[tempfile.TemporaryDirectory[str], str]:
    """A folder that only this user can enter, and a ZeroMQ address in it."""
    folder = tempfile.TemporaryDirectory(prefix="octavo-")
    return folder, f"ipc://{Path(folder.name) / 'engine'}"
