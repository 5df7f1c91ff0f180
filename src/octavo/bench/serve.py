"""Load on a server: requests sent at their times, every answer timed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import random
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.client import Answer, Client, refusal_reason
from octavo.bench.config import LoadConfig
from octavo.bench.dataset import Sample
from octavo.errors import OctavoError

_RETRY_SECONDS = 0.5
NO_USAGE = "no usage; count tokens with --tokenizer"


@dataclass(frozen=True)
class Result:
    """``answers`` are in the samples' order, as are ``queue_times``: the seconds that a request
    waited in the client. ``began`` is on the answers' clock."""

    model: str
    began: float
    duration: float
    answers: list[Answer]
    queue_times: list[float]


class ServerError(OctavoError):
    """The server under test can't be measured."""


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which requests are sent, the last at ``count / rate``.

    The times between are drawn from a gamma distribution with shape ``burstiness`` (1: a Poisson
    process) and then stretched to the rate asked for, as vLLM does: a short run would miss it.
    """
    if rate == math.inf:
        return [0.0] * count
    gaps = [
        1.0 if burstiness == math.inf else rng.gammavariate(burstiness, 1 / burstiness)
        for _ in range(count)
    ]
    stretch = count / rate / sum(gaps)
    times, now = [], 0.0
    for gap in gaps:
        now += gap * stretch
        times.append(now)
    return times


async def run_load(
    config: LoadConfig,
    samples: Sequence[Sample],
    warmups: Sequence[Sample] = (),
    *,
    seed: int = 0,
    ignore_eos: bool = False,
    api_key: str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Result:
    """Wait for the server, warm it up, then send ``samples`` and time what comes.

    Raises :class:`ServerError` where the server doesn't answer the questions before the
    measurement, a warm-up fails, or the first answer's tokens can't be counted. Requests that fail
    later are part of the result.
    """
    _allow_open_files()
    client = Client(config.url, api_key=api_key)
    model = config.model or await _first_model(client, config.ready_check_timeout_sec)
    slots = (
        contextlib.nullcontext()
        if config.max_concurrency is None
        else asyncio.Semaphore(config.max_concurrency)
    )

    async def ask(sample: Sample) -> Answer:
        return await client.stream(config.path, request_body(config, model, sample, ignore_eos))

    if config.ready_check_timeout_sec:
        progress("waiting for the server")
        await _wait_until_ready(ask, config.ready_check_timeout_sec)

    num_ended = 0

    async def ask_in_turn(sample: Sample) -> tuple[Answer, float]:
        nonlocal num_ended
        arrived = time.perf_counter()
        async with slots:
            answer = await ask(sample)
        uncounted = answer.error is None and answer.usage is None and config.tokenizer is None
        if num_ended == 0 and uncounted:  # else it is this one answer that was cut short
            raise ServerError(f"{client.base_url} tells {NO_USAGE}")
        num_ended += 1
        return answer, answer.sent - arrived

    if warmups:
        progress(f"warming up with {len(warmups)} requests")
        for answer, _ in await asyncio.gather(*map(ask_in_turn, warmups)):
            if answer.error is not None:
                raise ServerError(f"a warm-up request failed: {answer.error}")
    num_ended = 0
    rng = random.Random(seed)
    times = arrival_times(len(samples), config.request_rate, config.burstiness, rng)
    tasks = []
    with (
        _no_garbage_collection(),
        _reporting(lambda: progress(f"{num_ended} of {len(samples)} requests")),
    ):
        began = time.perf_counter()
        for sample, at in zip(samples, times, strict=True):
            if (wait := began + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(ask_in_turn(sample)))
        ended = await asyncio.gather(*tasks)
        duration = time.perf_counter() - began
    client.close()
    return Result(
        model=model,
        began=began,
        duration=duration,
        answers=[answer for answer, _ in ended],
        queue_times=[waited for _, waited in ended],
    )


def request_body(
    config: LoadConfig, model: str, sample: Sample, ignore_eos: bool
) -> dict[str, Any]:
    """The JSON of one request."""
    body: dict[str, Any] = {"model": model}
    if config.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": sample.prompt}]
        body["max_completion_tokens"] = sample.output_len
    else:
        body["prompt"] = sample.prompt
        body["max_tokens"] = sample.output_len
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if ignore_eos:
        body["ignore_eos"] = True
    return {**body, **config.extra_fields}


async def _first_model(client: Client, patience: float) -> str:
    give_up = time.monotonic() + patience
    while True:
        try:
            status, body = await client.get("/v1/models")
            break
        except OSError as problem:
            if time.monotonic() >= give_up:
                raise ServerError(
                    f"no server answers at {client.base_url} ({problem}); start one with octavo "
                    "serve, or say with base_url, or host and port, where it is"
                ) from problem
        await asyncio.sleep(_RETRY_SECONDS)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServerError(
            f"{client.base_url}/v1/models names no model (HTTP {status}: {refusal_reason(body)}); "
            "give model, or api_key if the server wants one"
        ) from None


async def _wait_until_ready(ask: Callable[[Sample], Awaitable[Answer]], patience: float) -> None:
    """Ask for one token until it comes. The prompt is none of those measured."""
    give_up = time.monotonic() + patience
    while True:
        answer = await ask(Sample("Are you ready?", None, 1))
        if answer.error is None:
            return
        if 400 <= answer.status < 500:
            raise ServerError(f"the server refuses a first request: {answer.error}")
        if time.monotonic() >= give_up:
            raise ServerError(
                f"the server isn't ready after {patience:g} s: {answer.error}; a longer "
                "ready_check_timeout_sec waits longer"
            )
        await asyncio.sleep(_RETRY_SECONDS)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Looking through a hundred thousand times stops all streams for 0.1 s, and would be measured
    as the server's doing. There are no cycles to collect."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _reporting(report: Callable[[], None]) -> Iterator[None]:
    """Call ``report`` twice a second meanwhile."""

    async def keep_reporting() -> None:
        while True:
            report()
            await asyncio.sleep(0.5)

    task = asyncio.create_task(keep_reporting())
    try:
        yield
    finally:
        task.cancel()


def _allow_open_files() -> None:
    """A stream is a file, and systems begin with a low limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses what it calls unlimited
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
