"""Which tokens of which requests the next step computes.

Order is priority, then arrival. In a step, rows that decode come first, then prompts under way in
chunks, then new requests, as far as the token budget goes.

- Running requests that lack a block take it from the last running request in the order, which is
  preempted: its blocks are released and it waits, in its old place, to be computed again. So the
  first request always gets on, and with it, in turn, every one.
- Waiting requests are admitted strictly in order. One that is too large for the blocks free now
  holds up those behind it: nobody overtakes, so nobody starves (of equal priority). It waits at
  most until the running ones are finished, because the pool can hold it alone.
- An admission needs blocks for all known tokens of the request and one spare for every running
  row, so that it isn't undone at the next block boundary.
- A waiting request whose next block a running one is about to compute waits to share it: equal
  prompts that arrive together (``n`` choices, one system prompt) are computed once.
- A waiting request never preempts a running one, whatever its priority.

Rows that decode are those of one token. Deterministic, they are those of a token that was sampled,
and only those: a chunk ends where the prompt does, what was sampled before a preemption is computed
again token by token, and cached blocks are looked for within the prompt only. So a token's keys and
values come from the same kernels whenever they are computed.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, insort
from typing import NamedTuple

from octavo.cache import KVCache
from octavo.engine.request import Request, RequestStatus


class ScheduledRow(NamedTuple):
    """The tokens of a request at positions ``start`` to ``stop - 1``. ``samples``: the last of them
    is the last there is, so an id follows. ``scored`` are the positions whose logits are wanted for
    ``prompt_logprobs``. ``decodes``: it is one token, for the kernels of decode."""

    request: Request
    start: int
    stop: int
    samples: bool
    scored: range
    decodes: bool


class Scheduler:
    """Keeps the queues and shares out each step's budget of tokens, rows and blocks."""

    def __init__(
        self,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        deterministic: bool = False,
    ) -> None:
        self.waiting: list[Request] = []  # both in order
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens
        self.prompt_tokens = 0
        self.epoch = 0  # counts admissions and preemptions: what runs is no longer what ran
        self.num_removed = 0  # finished or aborted
        self._kv = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._deterministic = deterministic
        self._arrivals = itertools.count()
        # The head of the queue that found no room, and how often blocks had come back by then.
        self._refused: tuple[Request, int] | None = None

    def add(self, request: Request, max_total_tokens: int) -> None:
        """Queue a request; ``max_total_tokens`` must fit the pool."""
        request.order = (request.priority, next(self._arrivals))
        request.max_total_tokens = max_total_tokens
        request.blocks = self._kv.open(request.cache_salt)
        insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take a finished or aborted request out; its blocks go back."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        _take(queue, request)
        self.num_removed += 1
        request.status = RequestStatus.FINISHED
        self._kv.release(request.blocks)

    @property
    def may_admit(self) -> bool:
        """Whether a waiting request might be admitted now; to be sure, :meth:`schedule` tries."""
        return (
            bool(self.waiting)
            and len(self.running) < self._max_num_seqs
            and self._refused != (self.waiting[0], self._kv.num_returns)
        )

    def schedule(self) -> list[ScheduledRow]:
        """Plan one step and count its tokens as computed. Rows that decode come first, of these the
        longest: a GPU deals them out in order, and had better end with short ones. No rows where
        nothing can run before the steps in flight are done."""
        budget = self._max_num_batched_tokens
        counts: dict[Request, int] = {}
        for request in self.running:
            self._kv.drop_behind(request.blocks, request.num_computed_tokens)
        uncomputed = {request: self._uncomputed(request) for request in self.running}
        for request in sorted(self.running, key=lambda r: uncomputed[r] > 1):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            count = self._chunk(request, min(uncomputed[request], budget))
            if count == 0:
                continue
            while not self._kv.extend(request.blocks, request.num_computed_tokens + count):
                if self._kv.blocks_are_returning:
                    break  # they may be enough: try again when they are here
                victim = self.running[-1]
                budget += counts.pop(victim, 0)
                self._preempt(victim)
                self.num_preemptions += 1
                if victim is request:
                    break
            else:
                counts[request] = count
                budget -= count
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if not self._admit(request):
                break
            counts[request] = self._chunk(request, min(self._uncomputed(request), budget))
            self._kv.extend(request.blocks, request.num_computed_tokens + counts[request])
            budget -= counts[request]
        rows = [self._advance(request, count) for request, count in counts.items()]
        return sorted(rows, key=lambda row: (not row.decodes, -row.stop if row.decodes else 0))

    def requeue_running(self) -> None:
        """Make all running requests wait and compute them again: their step in flight is lost."""
        for request in list(self.running):
            self._preempt(request)

    def _uncomputed(self, request: Request) -> int:
        """The most tokens that one row of the request may have."""
        count = request.num_uncomputed_tokens
        if self._deterministic:
            left = len(request.prompt_token_ids) - request.num_computed_tokens
            count = min(count, max(left, 1))
        return count

    def _chunk(self, request: Request, count: int) -> int:
        """``count``, or less where the blocks free now have no places for as many tokens; but one
        at least, for which others may be preempted."""
        if count > 1:
            room = self._kv.reach(request.blocks) - request.num_computed_tokens
            count = min(count, max(room, 1))
        return count

    def _admit(self, request: Request) -> bool:
        if self._refused == (request, self._kv.num_returns):
            return False  # no block has come back since
        wants_scores = request.params.prompt_logprobs is not None
        scored = request.num_scored_tokens >= len(request.prompt_token_ids) - 1
        num_hits = 0
        others = [other.blocks for other in self.running]
        if scored or not wants_scores:  # a prompt is scored from its own logits
            known = request.prompt_token_ids if self._deterministic else request.token_ids
            num_hits = self._kv.find_prefix(request.blocks, known)
            if self._kv.is_being_computed(request.blocks, num_hits, others):
                return False
        if not self._kv.admit(request.blocks, len(request.token_ids), num_hits, others):
            self._refused = (request, self._kv.num_returns)
            return False
        del self.waiting[0]
        self.epoch += 1
        insort(self.running, request, key=_order)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hits * self._kv.block_size
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.prompt_tokens += len(request.prompt_token_ids)
            if self._kv.enable_prefix_caching:
                self.prefix_cache_queries += len(request.prompt_token_ids)
                self.prefix_cache_hits += request.num_cached_tokens
        return True

    def _advance(self, request: Request, count: int) -> ScheduledRow:
        """Count ``count`` tokens as computed, and the id that they lead to as pending."""
        start, prompt_len = request.num_computed_tokens, len(request.prompt_token_ids)
        stop = start + count
        samples = request.generates and stop == request.num_tokens
        scored = range(0)
        if request.params.prompt_logprobs is not None:
            until = min(stop, prompt_len - 1)
            scored = range(max(start, request.num_scored_tokens), until)
            request.num_scored_tokens = max(until, request.num_scored_tokens)
        request.num_computed_tokens = stop
        request.num_pending_ids += samples
        decodes = start >= prompt_len if self._deterministic else count == 1
        return ScheduledRow(request, start, stop, samples, scored, decodes)

    def _preempt(self, request: Request) -> None:
        self.epoch += 1
        _take(self.running, request)
        self._kv.release(request.blocks)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        insort(self.waiting, request, key=_order)


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _take(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.order, key=_order)]
