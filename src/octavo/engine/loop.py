"""The step loop: schedule, forward, sample, wait, deliver.

Plain, a step is delivered before the next is scheduled. Overlapped (``async_scheduling``), the next
step's forward is launched first, with the ids of the step before still on the device, so that the
device never waits for the host. Its sampling is launched after that delivery, when every id before
it is known. The code is the same, and so are the ids:

- A row that turns out to be finished has a surplus row in the step just launched. It is sampled
  and dropped, and its blocks return when that step is done (:class:`~octavo.cache.KVCache` sees to
  it). Ends by length are foreseen and leave no surplus.
- A grammar's mask is made with the sampling, so that it knows every id before, and is a request's
  own: what is computed again after a preemption is not taken twice.
- A request that is preempted or aborted while its id is in flight keeps or drops it on delivery.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.cache import KVCache, KVGroup
from octavo.engine.batch import StepBatch, build_step_batch
from octavo.engine.decode_run import DecodeRun, RunStep, start_run
from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling import (
    INVALID_TOKEN,
    SamplingBatch,
    SamplingRow,
    make_sampling_batch,
)
from octavo.engine.scheduler import ScheduledRow, Scheduler
from octavo.errors import ConfigError, ContextLengthError, InvalidRequestError
from octavo.outputs import FinishReason, RequestMetrics, TokenLogprobs
from octavo.runtime import DecodesAhead, ReportsSplits, Runtime

if TYPE_CHECKING:
    from concurrent import futures

    from octavo.engine.grammar import GrammarCompiler, GrammarMatcher

_NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): the checkpoint is damaged, or its values "
    "exceed the chosen dtype; try another dtype, or exact=True"
)
_NONE = np.empty(0, np.int32)
_COMPILE_POLL = 0.01  # seconds to wait for a grammar when there is nothing else to do


@dataclass(frozen=True)
class EngineLimits:
    """The sizes that the engine works within; ``num_blocks`` is per KV group.

    Raises :class:`ConfigError` where they leave no room to work.
    """

    max_num_seqs: int  # rows of a step
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of a request, prompt and output
    block_size: int
    num_blocks: tuple[int, ...]
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    deterministic: bool = False  # engine/scheduler.py says how

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step must have room for one token of every row"
            )
        if not self.num_blocks or min(self.num_blocks) < 1:
            raise ConfigError(f"num_blocks is {self.num_blocks}, every KV group needs one at least")


class RequestUpdate(NamedTuple):
    """What a step brought a request.

    ``new_token_ids`` include the id that ended it; ``stop_reason`` is that id if it is one of
    ``stop_token_ids``, None for an end-of-sequence id. ``logprobs`` are aligned with the ids.
    ``prompt_logprobs`` come once, for the whole prompt, the first entry None. ``error`` says what
    made the engine give the request up, with ``finish_reason`` "abort". ``metrics`` is the
    request's own and still changes.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    finish_reason: FinishReason | None
    stop_reason: int | None
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None


@dataclass(frozen=True)
class EngineStats:
    """Gauges, and counters since the engine began. ``kv_cache_usage`` goes from 0 to 1; prefix
    cache queries and hits count the prompt tokens of requests admitted for the first time;
    ``num_splits`` is empty where the runtime doesn't tell."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_steps: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    finished: dict[FinishReason, int]
    num_splits: dict[int, int] = field(default_factory=dict)  # segments: how often a row had them


@dataclass(frozen=True)
class _Step:
    """A step whose forward is launched; ``handle`` is that of its sampling, launched later. A step
    of a run has ``decoding`` instead of ``rows``: requests, a token each."""

    rows: list[ScheduledRow]
    batch: StepBatch
    decoding: list[Request] | None = None
    handle: Any = None


class Engine:
    """Requests in, updates out, one :meth:`step` at a time; not for several threads at once.
    ``grammars`` makes the compiler that the first structured output needs; without a tokenizer it
    is None, and they are refused."""

    def __init__(
        self,
        runtime: Runtime,
        kv_groups: Sequence[KVGroup],
        limits: EngineLimits,
        grammars: Callable[[], GrammarCompiler] | None = None,
    ) -> None:
        if len(kv_groups) != len(limits.num_blocks):
            raise ConfigError(
                f"num_blocks has {len(limits.num_blocks)} entries for {len(kv_groups)} KV groups"
            )
        self.limits = limits
        self._runtime = runtime
        self._kv = KVCache(
            kv_groups, limits.num_blocks, limits.block_size, limits.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            self._kv, limits.max_num_seqs, limits.max_num_batched_tokens, limits.deterministic
        )
        self._make_grammars = grammars
        self._requests: dict[str, Request] = {}
        # Not yet with the scheduler: the grammar being made, and the limit of tokens.
        self._compiling: dict[Request, tuple[futures.Future[GrammarMatcher], int]] = {}
        self._in_flight: _Step | None = None
        self._run: DecodeRun | None = None  # that the next step may belong to
        self._updates: list[RequestUpdate] = []  # not returned yet
        self._num_steps = 0
        self._generation_tokens = 0
        self._finished: Counter[FinishReason] = Counter()
        self._num_splits: Counter[int] = Counter()
        self._reporter = runtime if isinstance(runtime, ReportsSplits) else None
        self._ahead = runtime if isinstance(runtime, DecodesAhead) else None

    @cached_property
    def _grammars(self) -> GrammarCompiler | None:
        return None if self._make_grammars is None else self._make_grammars()

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do, be it only to see a step in flight end."""
        return bool(self._requests or self._in_flight or self._updates)

    @property
    def max_total_tokens(self) -> int:
        """The longest a request may become, prompt and output: generation ends there with
        "length". It is ``max_model_len``, or what the KV pool holds if that is less."""
        return min(self.limits.max_model_len, self._kv.max_tokens or self.limits.max_model_len)

    def check(self, request: Request) -> None:
        """Raise what :meth:`add` would raise: :class:`ContextLengthError` for a prompt that leaves
        no room for a token, :class:`InvalidRequestError` for what can't be carried out."""
        params, prompt = request.params, request.prompt_token_ids
        vocab_size = self._runtime.vocab_size
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; wait for it or choose another",
                "request_id",
            )
        if not prompt:
            raise InvalidRequestError("the prompt is empty: it has no tokens", "prompt")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise InvalidRequestError(
                f"the prompt has token id {wrong}, ids go from 0 to {vocab_size - 1}", "prompt"
            )
        params.check_vocabulary(vocab_size)
        if params.structured_outputs is not None and (
            self._grammars is None or not request.eos_token_ids
        ):
            missing = "an end-of-sequence token, the checkpoint names none"
            if self._grammars is None:
                missing = "the tokenizer, which was skipped (skip_tokenizer_init)"
            raise InvalidRequestError(f"structured_outputs need {missing}", "structured_outputs")
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens 0 asks for nothing: set prompt_logprobs to score the prompt, or "
                "max_tokens to 1 or more",
                "max_tokens",
            )
        room = 0 if params.max_tokens == 0 else 1
        if len(prompt) + room > self.max_total_tokens:
            raise ContextLengthError(self._too_long(len(prompt), room), "prompt")

    def add(self, request: Request) -> None:
        """Queue a request, or raise what :meth:`check` raises. ``max_tokens`` beyond the room left
        is clamped to it. A request with a grammar joins the queue once that is compiled."""
        self.check(request)
        limit = self.max_total_tokens
        if request.params.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + request.params.max_tokens)
        self._requests[request.request_id] = request
        if request.params.structured_outputs is not None and self._grammars is not None:
            made = self._grammars.compile(request.params.structured_outputs)
            self._compiling[request] = made, limit
        else:
            self._scheduler.add(request, limit)

    def abort(self, request_id: str) -> None:
        """Drop a request: no update of it comes after this, and its blocks go back. An unknown id
        is ignored, since the request may have finished a moment before."""
        self._end(request_id, "abort")

    def finish(self, request_id: str) -> None:
        """End a request at a stop found outside (a stop string): like :meth:`abort`, but counted
        as stopped."""
        self._end(request_id, "stop")

    def step(self) -> list[RequestUpdate]:
        """Run one step and return what came of it; overlapped, of the one before. If the runtime
        raises, the ids in flight are lost and the error goes on to the caller: every request can
        then be aborted, or computed again by further steps."""
        try:
            self._queue_compiled()
            if not self._run_several():
                self._run_one()
        except BaseException:
            self._lose_steps()
            raise
        updates, self._updates = self._updates, []
        return updates

    def _run_one(self) -> None:
        """Launch a step, and deliver it or, overlapped, the one before."""
        launched = self._launch_of_run() or self._launch_forward()
        self._deliver()
        if launched is not None:
            if launched.handle is None:
                launched = self._launch_sampling(launched)
            self._in_flight = launched
            if not self.limits.async_scheduling:
                self._deliver()

    def _run_several(self) -> bool:
        """Carry out and deliver several steps of the run in one call, where the runtime offers that
        and nothing can come between them; ids behind one that ends a request are dropped on
        delivery. False where nothing was done."""
        run, runtime = self._run, self._ahead
        if run is None or runtime is None or self._in_flight is not None or not run.is_greedy:
            return False
        count = min(run.steps_left, runtime.steps_ahead(run.next_seq_len))
        if count < 2:
            return False
        steps: list[RunStep] = []
        while len(steps) < count:
            step = run.next(on_device=bool(steps))
            if step is None:
                self._run = None
                break
            steps.append(step)
            self._kv.step_launched()
        if not steps:
            return False
        outputs = runtime.decode_ahead([step.batch for step in steps])
        for step, output in zip(steps, outputs, strict=True):
            before = self._generation_tokens
            self._in_flight = _Step([], step.batch, step.requests, output)
            self._deliver()
            if self._generation_tokens > before:  # else it was all surplus
                self._count_step()
        return True

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            kv_cache_usage=self._kv.usage,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            num_splits=dict(self._num_splits),
        )

    def _queue_compiled(self) -> None:
        """Hand requests whose grammar is ready to the scheduler."""
        scheduler = self._scheduler
        if self._compiling and not (scheduler.running or scheduler.waiting or self._in_flight):
            from concurrent import futures

            makers = [made for made, _ in self._compiling.values()]
            futures.wait(makers, _COMPILE_POLL, return_when=futures.FIRST_COMPLETED)
        ready = [(request, *rest) for request, rest in self._compiling.items() if rest[0].done()]
        for request, made, limit in ready:
            problem = made.exception()
            if problem is None:
                del self._compiling[request]
                request.matcher = made.result()
                scheduler.add(request, limit)
            else:
                self._remove(request, "abort", time.monotonic())
                self._updates.append(_refused(request, f"the grammar doesn't compile: {problem}"))

    def _launch_of_run(self) -> _Step | None:
        """Launch the next step of the run, its sampling too: it hangs on nothing that the step in
        flight may bring."""
        if self._run is None:
            return None
        step = self._run.next(on_device=self._in_flight is not None)
        if step is None:
            self._run = None
            return None
        self._forward(step.batch)
        return _Step([], step.batch, step.requests, self._runtime.sample(step.sampling))

    def _launch_forward(self) -> _Step | None:
        rows = self._scheduler.schedule()
        if not rows:
            return None
        batch = build_step_batch(rows, self.limits.block_size)
        self._forward(batch)
        return _Step(rows, batch)

    def _launch_sampling(self, step: _Step) -> _Step:
        sampling = self._sampling_batch(step)
        handle = self._runtime.sample(sampling)
        self._run = start_run(step.rows, step.batch, sampling, self._scheduler, self._kv)
        return replace(step, handle=handle)

    def _forward(self, batch: StepBatch) -> None:
        self._kv.step_launched()
        self._runtime.forward(batch)
        self._count_step()

    def _count_step(self) -> None:
        self._num_steps += 1
        if self._reporter is not None and self._reporter.num_splits is not None:
            self._num_splits.update(self._reporter.num_splits.tolist())

    def _sampling_batch(self, step: _Step) -> SamplingBatch:
        sampling = [_sampling_row(row.request) for row in step.rows if row.samples]
        scored = [(row.request, position) for row in step.rows for position in row.scored]
        return make_sampling_batch(
            sampling,
            sample_indices=step.batch.sample_indices,
            prompt_indices=_others(step.batch.sample_indices, len(step.batch.logits_indices)),
            prompt_targets=[request.token_ids[position + 1] for request, position in scored],
            prompt_top=[request.params.prompt_logprobs or 0 for request, _ in scored],
            vocab_size=self._runtime.vocab_size,
        )

    def _deliver(self) -> None:
        """Wait for the step in flight, if any, and hand its ids to their requests."""
        step = self._in_flight
        if step is None:
            return
        output = self._runtime.wait(step.handle)
        self._in_flight = None
        self._kv.step_done()
        now = time.monotonic()
        token_ids = output.token_ids.tolist()
        if step.decoding is not None:
            self._deliver_decoded(step.decoding, step.batch, token_ids, output.logprobs, now)
            return
        num_sampled = num_scored = 0
        for row in step.rows:
            chosen = slice(num_sampled, num_sampled + row.samples)
            scores = slice(num_scored, num_scored + len(row.scored))
            num_sampled, num_scored = chosen.stop, scores.stop
            if row.request.status is RequestStatus.FINISHED:
                continue  # dropped meanwhile, or this is its surplus row
            update = self._advance(
                row, token_ids[chosen], output.logprobs[chosen], output.prompt_logprobs[scores], now
            )
            if update is not None:
                self._updates.append(update)

    def _deliver_decoded(
        self,
        requests: list[Request],
        batch: StepBatch,
        token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
        now: float,
    ) -> None:
        """What :meth:`_advance` does, for a step of a run: where an id ends nothing, in short."""
        updates, finished = self._updates, RequestStatus.FINISHED  # looking it up takes 0.2 us
        num_ended = 0
        for i, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            if request.status is finished:
                num_ended += 1
                continue
            known = request.token_ids
            if (
                token_id < 0
                or token_id in request.stop_ids
                or len(known) + 1 >= request.max_total_tokens
            ):
                num_ended += 1
                stop = int(batch.seq_lens[i])
                row = ScheduledRow(request, stop - 1, stop, True, range(0), True)
                update = self._advance(row, [token_id], logprobs[i : i + 1], [], now)
                if update is not None:
                    updates.append(update)
                continue
            request.num_pending_ids -= 1
            request.output_token_ids.append(token_id)
            known.append(token_id)
            updates.append(
                RequestUpdate(
                    request.request_id,
                    [token_id],
                    None if request.params.logprobs is None else [logprobs[i]],
                    None,
                    None,
                    None,
                    request.num_cached_tokens,
                    request.metrics,
                )
            )
        self._generation_tokens += len(requests) - num_ended
        full = np.flatnonzero(batch.seq_lens % self.limits.block_size == 0)
        for i in full.tolist():  # blocks that this step has filled
            if requests[i].status is RequestStatus.RUNNING:
                self._store(requests[i], int(batch.seq_lens[i]))

    def _advance(
        self,
        row: ScheduledRow,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
        prompt_logprobs: list[TokenLogprobs],
        now: float,
    ) -> RequestUpdate | None:
        """Give a request what one of its rows came to; None where there is nothing to tell yet."""
        request, params = row.request, row.request.params
        request.num_pending_ids -= len(new_token_ids)
        request.prompt_logprobs += prompt_logprobs
        finish_reason: FinishReason | None = None
        stop_reason = None
        error: str | None = None
        if request.matcher is not None and request.matcher.error is not None:
            error = f"the grammar can't be followed any further: {request.matcher.error}"
        elif INVALID_TOKEN in new_token_ids or {} in prompt_logprobs:
            error = _NOT_FINITE
        if error is not None:
            finish_reason = "abort"
            new_token_ids, logprobs = [], []
        for token_id in new_token_ids:
            request.append(token_id)
            finish_reason, stop_reason = _finish_reason(request, token_id)
            if finish_reason is None and request.matcher is not None:
                request.matcher.accept(token_id)
        if row.stop == len(request.prompt_token_ids) and not request.generates:
            finish_reason = finish_reason or "length"
        if request.status is RequestStatus.RUNNING and error is None:
            self._store(request, row.stop)
        if not new_token_ids and finish_reason is None:
            return None

        first = len(request.output_token_ids) == len(new_token_ids)
        if first and new_token_ids:
            request.metrics.first_token_time = now
        self._generation_tokens += len(new_token_ids)
        if finish_reason is not None:
            self._remove(request, finish_reason, now)
        return RequestUpdate(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            logprobs=logprobs if params.logprobs is not None else None,
            prompt_logprobs=(
                [None, *request.prompt_logprobs]
                if first and error is None and params.prompt_logprobs is not None
                else None
            ),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
            error=error,
        )

    def _store(self, request: Request, num_computed: int) -> None:
        """Let others share the request's full blocks; deterministic, those of its prompt only: as
        part of another's prompt, what it sampled would come from other kernels."""
        if self.limits.deterministic:
            num_computed = min(num_computed, len(request.prompt_token_ids))
        self._kv.store(request.blocks, request.token_ids, num_computed)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self._updates = [update for update in self._updates if update.request_id != request_id]
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request, reason, time.monotonic())

    def _remove(self, request: Request, reason: FinishReason, now: float) -> None:
        if self._compiling.pop(request, None) is None:
            self._scheduler.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        self._finished[reason] += 1
        request.metrics.finished_time = now

    def _lose_steps(self) -> None:
        """Forget the steps in flight: what ran is computed again, and equal ids come of it."""
        self._in_flight = self._run = None
        self._kv.cancel_steps()
        self._scheduler.requeue_running()
        for request in self._requests.values():
            request.num_pending_ids = 0
            request.num_scored_tokens = len(request.prompt_logprobs)

    def _too_long(self, prompt_len: int, room: int) -> str:
        limit = self.max_total_tokens
        holder = (
            f"max_model_len is {limit}"
            if limit == self.limits.max_model_len
            else f"the KV cache holds {limit} tokens"
        )
        need = f"the prompt has {prompt_len} tokens"
        if room:
            need += f" and needs room for one more ({prompt_len + room})"
        return f"{need}, but {holder}; shorten the prompt or raise the limit"


def _others(indices: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Which of ``count`` are not among ``indices`` (ascending)."""
    if len(indices) == count:
        return _NONE
    return np.delete(np.arange(count, dtype=np.int32), indices)


def _refused(request: Request, error: str) -> RequestUpdate:
    """The only update of a request that never ran."""
    return RequestUpdate(
        request.request_id, [], None, None, "abort", None, 0, request.metrics, error
    )


def _sampling_row(request: Request) -> SamplingRow:
    banned_ids, mask = request.banned_ids, None
    if request.matcher is not None and request.status is not RequestStatus.FINISHED:
        banned_ids, mask = (), request.matcher.mask(banned_ids)
    return SamplingRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        seed=request.seed,
        choice=request.choice,
        position=len(request.output_token_ids),
        banned_ids=banned_ids,
        mask=mask,
    )


def _finish_reason(request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Whether the id just appended ends the request, and the ``stop_token_id`` it ended at."""
    # Never before min_tokens, as they are banned until then; but a grammar may end before.
    if token_id in request.stop_ids:
        by_eos = token_id in request.eos_token_ids and request.ends_at_eos
        return "stop", None if by_eos else token_id
    if len(request.token_ids) >= request.max_total_tokens:
        return "length", None
    return None, None
