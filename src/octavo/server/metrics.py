"""Prometheus metrics: vLLM's names and labels under ``octavo:``.

Times are differences of monotonic clock readings of one process: TTFT, ITL and end-to-end latency
are taken here, in the API process; queue, prefill and decode times in the engine's.

Several API processes count by way of prometheus_client's multiprocess mode: each writes its numbers
into mapped files of one folder, and whoever is asked adds up all files. The engine tells every
process its own figures, which are therefore not added.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from octavo.engine.delivery import RequestUpdate
from octavo.engine.loop import EngineStats
from octavo.frontend import Submission
from octavo.outputs import RequestMetrics
from octavo.server.config import METRICS_FOLDER_VARIABLE
from octavo.server.messages import Ready

PREFIX, ALIAS = "octavo:", "vllm:"

# vLLM's buckets, in seconds, made finer below 10 ms.
# fmt: off
_TTFT = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_ITL = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_LATENCY = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**e) for e in range(15))
_SPLITS = tuple(2**e for e in range(9))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)

_LABELS = ("model_name", "engine")
LOAD = PREFIX + "server_load"


@dataclass
class _Answer:
    """One answer on its way; times on this process's clock."""

    prompt_tokens: int
    arrival: float
    engine: RequestMetrics | None = None
    first: float | None = None
    last: float = 0.0
    longest_gap: float = 0.0
    tokens: int = 0


class Metrics:
    """Counts what the calls and the engine's updates tell it. Of several API processes only one
    ``counts_steps``, since the engine tells them all of each."""

    def __init__(
        self,
        model_name: str,
        goodput: Mapping[str, float] | None = None,
        alias: bool = False,
        *,
        counts_steps: bool = True,
    ) -> None:
        self._model_name = model_name
        self._goodput = dict(goodput or {})
        self._alias = alias
        self._answers: dict[str, _Answer] = {}  # by engine request id
        self._counts_steps = counts_steps
        self._registry = CollectorRegistry()  # what this process counts
        self._exported = self._registry  # what is told of all
        if folder := os.environ.get(METRICS_FOLDER_VARIABLE):
            self._exported = CollectorRegistry()
            MultiProcessCollector(self._exported, folder)  # type: ignore[no-untyped-call]
        self._stats: EngineStats | None = None
        self._ready: Ready | None = None
        self._exported.register(_EngineCollector(self))
        self._counted_tokens = 0  # prompt and generated, up to the last step
        self._counted_steps = 0

        self._load = Gauge(
            LOAD,
            "Answers that run or wait, as /load tells.",
            _LABELS,
            registry=self._registry,
            multiprocess_mode="livesum",
        ).labels(*self._labels())
        self._success = self._counter(
            "request_success", "Answers that ended, by reason.", "finished_reason"
        )
        self._errors = self._counter("request_errors", "Calls refused or failed.", "kind")
        self._http = self._counter("http_requests", "HTTP responses.", "handler", "status")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        self._goodput_count = self._counter(
            "request_goodput", "Answers that met every limit of --goodput."
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of an answer.", _ITL
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of tokens after the first.", _ITL
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Waiting to be scheduled.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From schedule to the first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From schedule to the last token.", _LATENCY
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Prompt and generated tokens of a step.", _STEP_TOKENS
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self._generated_tokens = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", _TOKENS
        )
        self._most_generated = self._histogram(
            "request_max_num_generation_tokens", "Tokens that a request may generate.", _TOKENS
        )
        self._params_n = self._histogram("request_params_n", "Answers asked for.", _COUNTS)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens asked for.", _TOKENS
        )

    # ---- what happens

    def engine_ready(self, ready: Ready) -> None:
        self._ready, self._counted_tokens, self._counted_steps = ready, 0, 0

    def request_started(self, submission: Submission) -> None:
        params, prompt = submission.params, submission.output.prompt_token_ids
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)
            self._most_generated.observe(params.max_tokens)
        for request in submission.requests:
            self._answers[request.request_id] = _Answer(
                len(prompt), submission.output.metrics.arrival_time
            )

    def step_came(self, updates: Sequence[RequestUpdate], stats: EngineStats) -> None:
        """The updates of a step, or of several in one call, before :meth:`answer_ended` is told of
        those that ended."""
        self._stats = stats
        now = time.monotonic()
        gaps: dict[float, int] = {}  # how often each; in a batch they are mostly the same
        for update in updates:
            answer = self._answers.get(update.request_id)
            if answer is None:
                continue
            answer.engine = update.metrics
            if not update.new_token_ids:
                continue
            if answer.first is None:
                answer.first = now
                self._ttft.observe(now - answer.arrival)
                self._cached.inc(update.num_cached_tokens)
            else:
                gap = now - answer.last
                gaps[gap] = gaps.get(gap, 0) + 1
                if gap > answer.longest_gap:
                    answer.longest_gap = gap
            answer.last = now
            answer.tokens += len(update.new_token_ids)
        for gap, count in gaps.items():
            _observe(self._itl, gap, count)
        total = stats.prompt_tokens + stats.generation_tokens
        if self._counts_steps and total > self._counted_tokens:
            steps = max(1, stats.num_steps - self._counted_steps)
            _observe(self._step_tokens, (total - self._counted_tokens) / steps, steps)
            self._counted_tokens = total
        self._counted_steps = stats.num_steps

    def answer_ended(self, request_id: str, reason: str) -> None:
        self._success.labels(*self._labels(), reason).inc()
        answer = self._answers.pop(request_id)
        if reason == "abort":
            return
        end = time.monotonic()
        self._e2e.observe(end - answer.arrival)
        self._prompt_tokens.observe(answer.prompt_tokens)
        self._generated_tokens.observe(answer.tokens)
        if answer.engine is not None:
            self._observe_engine_times(answer.engine, end)
        measured = {"e2el": end - answer.arrival, "itl": answer.longest_gap, "tpot": 0.0}
        if answer.first is not None:
            measured["ttft"] = answer.first - answer.arrival
            if answer.tokens > 1:
                measured["tpot"] = (answer.last - answer.first) / (answer.tokens - 1)
                self._tpot.observe(measured["tpot"])
        if self._goodput and all(
            measured.get(name, 0.0) <= limit for name, limit in self._goodput.items()
        ):
            self._goodput_count.inc()

    def load_changed(self, num_answers: int) -> None:
        self._load.set(num_answers)

    def response_sent(self, handler: str, status: int) -> None:
        self._http.labels(*self._labels(), handler, str(status)).inc()

    def failed(self, error: Exception) -> None:
        """A call was refused or failed; its kind is the error's code, or else its class."""
        kind = getattr(error, "code", None) or type(error).__name__
        self._errors.labels(*self._labels(), kind).inc()

    def _observe_engine_times(self, times: RequestMetrics, end: float) -> None:
        if times.first_scheduled_time is None:
            return
        self._queue.observe(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None:
            return
        finished = times.finished_time or end
        self._prefill.observe(times.first_token_time - times.first_scheduled_time)
        self._decode.observe(finished - times.first_token_time)
        self._inference.observe(finished - times.first_scheduled_time)

    # ---- what is exported

    def load(self) -> int:
        """Answers that run or wait, in all API processes."""
        labels = dict(zip(_LABELS, self._labels(), strict=True))
        return int(self._exported.get_sample_value(LOAD, labels) or 0)

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        if not self._alias:
            return generate_latest(self._exported)
        aliases = CollectorRegistry()
        aliases.register(_Alias(self._exported))
        return generate_latest(self._exported) + generate_latest(aliases)

    def engine_families(self) -> Iterator[Metric]:
        """Gauges and counters as the engine last told them."""
        stats = self._stats
        if stats is None:
            return
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
            gauge.add_metric(self._labels(), value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
            ("num_preemptions", "Requests preempted.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
            counter.add_metric(self._labels(), value)
            yield counter
        splits = HistogramMetricFamily(
            PREFIX + "attention_num_splits",
            "Segments of a sequence's history in decode attention, once a step.",
            labels=_LABELS,
        )
        splits.add_metric(self._labels(), *_histogram_of(stats.num_splits))
        yield splits
        if self._ready is not None:
            info = {
                "block_size": str(self._ready.block_size),
                "num_gpu_blocks": str(self._ready.num_blocks),
            }
            config = GaugeMetricFamily(
                PREFIX + "cache_config_info", "The KV cache.", labels=(*_LABELS, *info)
            )
            config.add_metric([*self._labels(), *info.values()], 1)
            yield config

    def _labels(self) -> tuple[str, str]:
        return self._model_name, "0"

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(PREFIX + name, text, (*_LABELS, *labels), registry=self._registry)
        return counter if labels else counter.labels(*self._labels())

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, _LABELS, registry=self._registry, buckets=buckets
        )
        return histogram.labels(*self._labels())


def _observe(histogram: Histogram, value: float, count: int) -> None:
    """``count`` times ``histogram.observe(value)``, which would cost 1 us for each token."""
    histogram._sum.inc(value * count)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(count)


def _histogram_of(counts: Mapping[int, int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum, of how often each number of splits was there."""
    below = {str(float(edge)): edge for edge in _SPLITS} | {"+Inf": math.inf}
    buckets = [
        (name, float(sum(n for splits, n in counts.items() if splits <= edge)))
        for name, edge in below.items()
    ]
    return buckets, float(sum(splits * n for splits, n in counts.items()))


class _EngineCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.engine_families()


class _Alias(Collector):
    """The same metrics under vLLM's prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.name = family.name.replace(PREFIX, ALIAS)
            family.samples = [
                sample._replace(name=sample.name.replace(PREFIX, ALIAS))
                for sample in family.samples
            ]
            yield family
