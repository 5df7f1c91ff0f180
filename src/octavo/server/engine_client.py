"""The engine as an API process sees it: spoken with over a socket, ready, silent or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from octavo.engine.loop import EngineStats
from octavo.errors import ConfigError, InvalidRequestError, OctavoError, OverloadedError
from octavo.frontend import Frontend, Submission
from octavo.outputs import RequestOutput
from octavo.server import messages
from octavo.server.answers import all_finished
from octavo.server.limits import check_room
from octavo.server.metrics import Metrics


class Generation:
    """The answers to one call, as they grow: one output for each of its prompts."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self.submissions = list(submissions)
        self.outputs: list[RequestOutput] = [one.output for one in submissions]
        self._error: OctavoError | None = None
        self._news = False
        self._loop = asyncio.get_running_loop()  # asked for at each wait it is a system call
        self._waiting: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        return all_finished(self.outputs)

    async def changed(self) -> None:
        """Wait for something new since the last call; for one task. Raises what ended the answers
        early."""
        if not self._news:
            self._waiting = self._loop.create_future()
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
    """Gives requests to the engine process and its updates to their calls; event loop only.
    ``max_answers`` is as in :func:`check_room`."""

    ready: messages.Ready | None = None
    stats: EngineStats | None = None
    draining = False
    num_messages = 0  # that the engine has sent

    def __init__(
        self, frontend: Frontend, metrics: Metrics, *, max_answers: int | None = None
    ) -> None:
        self.frontend = frontend
        self.metrics = metrics
        self._max_answers = max_answers
        self._generations: dict[str, Generation] = {}  # by id of their submissions
        self._answers: set[str] = set()  # engine requests that are not finished
        self._socket: zmq.asyncio.Socket | None = None

    # ---- requests

    @property
    def num_answers(self) -> int:
        """Answers of this process that run or wait."""
        return len(self._answers)

    def check_open(self, num_answers: int = 1) -> messages.Ready:
        """What the engine said when it was ready. Raises :class:`OverloadedError` where it can't
        take ``num_answers`` more."""
        if self.draining:
            raise OverloadedError("the server is shutting down; send the request to another")
        if self.ready is None:
            raise OverloadedError("the model is still loading; try again in a few seconds")
        told = 0 if self.stats is None else self.stats.num_running + self.stats.num_waiting
        check_room(max(self.num_answers, told), num_answers, self._max_answers)
        return self.ready

    def start(self, submissions: Sequence[Submission]) -> Generation:
        """Give a call's checked requests to the engine. Whoever calls this must call
        :meth:`drop`."""
        self.check_open(sum(len(one.requests) for one in submissions))
        generation = Generation(submissions)
        requests = []
        for submission in submissions:
            self.frontend.register(submission)
            self._generations[submission.output.request_id] = generation
            self.metrics.request_started(submission)
            requests += submission.requests
        self._answers.update(request.request_id for request in requests)
        self.metrics.load_changed(self.num_answers)
        self._send(messages.Add([messages.NewRequest.of(request) for request in requests]))
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
            self.metrics.load_changed(self.num_answers)
            self.metrics.answer_ended(request_id, reason)

    # ---- the engine's life

    async def follow(self, address: str) -> None:
        """Take what the engine at this address says, until cancelled. Raises :class:`ConfigError`
        where it can't load the model."""
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.set_hwm(0)
            socket.linger = 0
            socket.connect(address)
            self._socket = socket
            try:
                self._send(messages.Hello())
                while True:
                    self._take(messages.decode_from_engine(await socket.recv()))
            finally:
                if self._socket is socket:  # else another engine is followed already
                    self._socket = None

    def lost(self, error: OctavoError) -> None:
        """The engine is gone, and the answers that it was working on with it."""
        self.ready = self.stats = None
        self.fail_all(error)

    def _take(self, message: messages.FromEngine) -> None:
        self.num_messages += 1
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
