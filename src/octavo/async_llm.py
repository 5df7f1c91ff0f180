"""``AsyncLLM`` streams answers to asyncio code; the engine steps in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from octavo.engine.build import LoadReport
from octavo.errors import OctavoError
from octavo.frontend import Prompt
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.text import Tokenizer

_Listener = Callable[[RequestOutput | BaseException], None]


class AsyncLLM:
    """A loaded model for asyncio: the engine steps in a thread of its own.

    Use it as ``async with AsyncLLM(...) as llm`` or call :meth:`shutdown`.
    """

    report: LoadReport

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self.report = self._llm.report
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, _Listener] = {}  # by id of the output object
        self._ended: BaseException | None = None
        self._ending = threading.Lock()  # no caller may come in while the others are told
        self._thread = threading.Thread(target=self._work, name="octavo-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; InvalidRequestError where it was skipped."""
        return self._llm.get_tokenizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output of one prompt as it grows, text cumulative, each a copy of its own.

        A caller that falls behind gets the newest output, not all in between. Leaving the loop, or
        cancelling the task, aborts the request and frees its blocks.
        """
        params = sampling_params or self._llm.get_default_sampling_params()
        prepare = partial(self._llm._prepare, prompt, params, priority, cache_salt)
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            # Checking a schema may take long enough to hold other streams up.
            submission = await asyncio.to_thread(prepare)
        else:
            submission = prepare()
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        newest: list[RequestOutput | BaseException] = []

        def receive(item: RequestOutput | BaseException) -> None:
            newest[:] = [item]
            arrived.set()

        def listen(item: RequestOutput | BaseException) -> None:
            try:
                loop.call_soon_threadsafe(receive, item)
            except RuntimeError:  # the event loop is closed: nobody waits any more
                self._calls.put(stop)

        def start() -> None:
            self._llm._start(submission)

        def stop() -> None:
            self._listeners.pop(id(submission.output), None)
            self._llm._abort(submission)

        with self._ending:
            if self._ended is not None:
                raise self._ended
            self._listeners[id(submission.output)] = listen
            self._calls.put(start)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                [item] = newest
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._calls.put(stop)

    def shutdown(self) -> None:
        """Stop the engine's thread; whoever still waits for an answer gets an OctavoError."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        error: BaseException = OctavoError("the engine was shut down; make a new AsyncLLM")
        try:
            while self._take_calls(wait=not self._llm._engine.has_work):
                for output in self._llm._step():
                    listen = self._listeners.get(id(output))
                    if output.finished:
                        self._listeners.pop(id(output), None)
                    if listen is not None:
                        listen(_snapshot(output))
        except Exception as problem:  # the engine is broken: every caller has to hear of it
            error = problem
        with self._ending:
            self._ended = error
            listeners = list(self._listeners.values())
            self._listeners.clear()
        for listen in listeners:
            listen(error)

    def _take_calls(self, wait: bool) -> bool:
        """Carry out the calls that have come, at least one if ``wait``; False: to stop now."""
        while True:
            try:
                call = self._calls.get(block=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that another thread may read while the engine writes on."""
    return replace(
        output,
        outputs=[
            replace(
                one,
                token_ids=one.token_ids[:],
                logprobs=None if one.logprobs is None else one.logprobs[:],
            )
            for one in output.outputs
        ],
        metrics=replace(output.metrics),
    )
