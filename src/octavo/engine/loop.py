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
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.cache import KVCache, KVGroup
from octavo.engine.batch import StepBatch, build_sampling_batch, build_step_batch
from octavo.engine.decode_run import DecodeRun, RunStep, start_run
from octavo.engine.delivery import RequestUpdate, advance, advance_run, give_up
from octavo.engine.limits import EngineLimits, check_request
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler import ScheduledRow, Scheduler
from octavo.errors import ConfigError, InvalidRequestError
from octavo.outputs import FinishReason, TokenLogprobs
from octavo.runtime import CapturesAhead, DecodesAhead, DecodesWhole, ReportsSplits, Runtime

if TYPE_CHECKING:
    from concurrent import futures

    from octavo.engine.grammar import GrammarCompiler, GrammarMatcher

_COMPILE_POLL = 0.01  # seconds to wait for a grammar when there is nothing else to do


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
        self._whole = runtime if isinstance(runtime, DecodesWhole) else None
        self._captures = runtime if isinstance(runtime, CapturesAhead) else None

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
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; wait for it or choose another",
                "request_id",
            )
        check_request(
            request,
            self.limits,
            vocab_size=self._runtime.vocab_size,
            max_total_tokens=self.max_total_tokens,
            grammars=lambda: self._grammars,
        )

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

    def use_idle_time(self) -> bool:
        """Do a little, some 20 ms, of what later steps will need, while there is no work; False:
        nothing is left to do."""
        return self._captures is not None and self._captures.capture_ahead()

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
                self._updates.append(give_up(request, f"the grammar doesn't compile: {problem}"))

    def _launch_of_run(self) -> _Step | None:
        """Launch the next step of the run, its sampling too: it hangs on nothing that the step in
        flight may bring."""
        if self._run is None:
            return None
        step = self._run.next(on_device=self._in_flight is not None)
        if step is None:
            self._run = None
            return None
        if self._whole is None:
            self._forward(step.batch)
            handle = self._runtime.sample(step.sampling)
        else:
            self._kv.step_launched()
            handle = self._whole.decode(step.batch, step.sampling, goes_on=step.goes_on)
            self._count_step()
        return _Step([], step.batch, step.requests, handle)

    def _launch_forward(self) -> _Step | None:
        rows = self._scheduler.schedule()
        if not rows:
            return None
        batch = build_step_batch(rows, self.limits.block_size)
        self._forward(batch)
        return _Step(rows, batch)

    def _launch_sampling(self, step: _Step) -> _Step:
        sampling = build_sampling_batch(step.rows, step.batch, self._runtime.vocab_size)
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
            self._deliver_run(step.decoding, step.batch, token_ids, output.logprobs, now)
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

    def _deliver_run(
        self,
        requests: list[Request],
        batch: StepBatch,
        token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
        now: float,
    ) -> None:
        """:meth:`_deliver` for a step of a run, in short where an id ends nothing."""
        updates, rest = advance_run(requests, token_ids, logprobs)
        self._generation_tokens += len(requests) - len(rest)
        for i in rest:
            if requests[i].status is not RequestStatus.FINISHED:  # else as in _deliver
                stop = int(batch.seq_lens[i])
                row = ScheduledRow(requests[i], stop - 1, stop, True, range(0), True)
                updates[i] = self._advance(row, token_ids[i : i + 1], logprobs[i : i + 1], [], now)
        self._updates += [update for update in updates if update is not None]
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
        """Give a request what one of its rows came to, let others share what that has computed, and
        let go of it if it has ended; None where there is nothing to tell yet."""
        request = row.request
        update = advance(row, new_token_ids, logprobs, prompt_logprobs, now)
        if request.status is RequestStatus.RUNNING and (update is None or update.error is None):
            self._store(request, row.stop)
        if update is not None:
            self._generation_tokens += len(update.new_token_ids)
            if update.finish_reason is not None:
                self._remove(request, update.finish_reason, now)
        return update

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
