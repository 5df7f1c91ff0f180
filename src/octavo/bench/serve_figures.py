"""What a load measured, under vLLM's labels and JSON keys, which people's scripts look for.

Definitions, where others differ (cases/engine.md O39): a token is what the server's usage counts,
never a chunk and never a re-tokenised text where there is usage; the first token is the first text,
not a chunk that names the role; failed requests are counted and are part of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.bench.client import Answer
from octavo.bench.config import LoadConfig
from octavo.bench.dataset import Sample
from octavo.bench.serve import NO_USAGE, Result

_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}

# Keys with a value for each request, which a saved result has only in detail.
DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
    "latencies",
    "queue_times",
)


def count_tokens(answers: Sequence[Answer], count_text: Callable[[str], int] | None) -> list[int]:
    """Tokens of each answer: by its usage, else by ``count_text``; 0 for one that failed. One that
    can't be counted fails."""
    counts = []
    for answer in answers:
        if answer.error is None and answer.usage is None and count_text is None:
            answer.error = f"the server tells {NO_USAGE}"
        if answer.error is not None:
            counts.append(0)
        elif answer.usage is not None:
            counts.append(max(1, answer.usage.completion_tokens))
        else:
            assert count_text is not None
            counts.append(max(1, count_text(answer.text)))
    return counts


def figures(
    config: LoadConfig, samples: Sequence[Sample], result: Result, output_lens: Sequence[int]
) -> dict[str, Any]:
    """vLLM's JSON of a result; seconds, but for keys that end in ``_ms``."""
    answers, duration = result.answers, result.duration
    input_lens = [
        answer.usage.prompt_tokens if answer.usage else sample.input_len or 0
        for answer, sample in zip(answers, samples, strict=True)
    ]
    good = [i for i, answer in enumerate(answers) if answer.error is None]
    gaps = [token_gaps(answer, count) for answer, count in zip(answers, output_lens, strict=True)]
    tpots = {
        i: (answers[i].latency - answers[i].ttft) / (output_lens[i] - 1)
        for i in good
        if output_lens[i] > 1
    }
    total_input, total_output = sum(input_lens[i] for i in good), sum(output_lens)

    def meets_limits(i: int) -> bool:
        # An answer of one token has no time per token: it can't be too slow at that.
        values = {"ttft": answers[i].ttft, "tpot": tpots.get(i, 0.0), "e2el": answers[i].latency}
        return all(values[metric] <= limit for metric, limit in config.goodput_limits.items())

    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(map(meets_limits, good)) / duration if config.goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "input_lens": input_lens,
        "output_lens": list(output_lens),
        "ttfts": [answer.ttft for answer in answers],
        "itls": gaps,
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.sent for answer in answers],
        "queue_times": result.queue_times,
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
        "max_output_tokens_per_s": _peak_rate(
            [arrival for i in good for arrival in _arrivals(answers[i], output_lens[i])],
            result.began,
            duration,
        ),
        "max_concurrent_requests": _peak_concurrency([answers[i] for i in good]),
    }
    values: Mapping[str, Sequence[float]] = {
        "ttft": [answers[i].ttft for i in good],
        "tpot": list(tpots.values()),
        "itl": [gap for i in good for gap in gaps[i]],
        "e2el": [answers[i].latency for i in good],
        "client_queue_time": [result.queue_times[i] for i in good],
        "e2el_including_client_queue": [answers[i].latency + result.queue_times[i] for i in good],
    }
    for metric in config.metrics:
        seconds = np.asarray(values[metric] or [0.0])
        found[f"mean_{metric}_ms"] = float(seconds.mean()) * 1000
        found[f"median_{metric}_ms"] = float(np.median(seconds)) * 1000
        found[f"std_{metric}_ms"] = float(seconds.std()) * 1000
        for percentile in config.percentiles:
            value = float(np.percentile(seconds, percentile)) * 1000
            found[f"p{percentile:g}_{metric}_ms"] = value
    return found


def result_block(config: LoadConfig, found: Mapping[str, Any]) -> str:
    """The block that vLLM prints: 50 wide, labels padded to 40."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def add(label: str, value: float) -> None:
        number = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
        lines.append(f"{label:<40} {number}")

    add("Successful requests:", found["completed"])
    add("Failed requests:", found["failed"])
    if config.max_concurrency is not None:
        add("Maximum request concurrency:", config.max_concurrency)
    if config.request_rate != math.inf:
        add("Request rate configured (RPS):", float(config.request_rate))
    add("Benchmark duration (s):", found["duration"])
    add("Total input tokens:", found["total_input_tokens"])
    add("Total generated tokens:", found["total_output_tokens"])
    add("Request throughput (req/s):", found["request_throughput"])
    if config.goodput:
        add("Request goodput (req/s):", found["request_goodput"])
    add("Output token throughput (tok/s):", found["output_throughput"])
    add("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"])
    add("Peak concurrent requests:", float(found["max_concurrent_requests"]))
    add("Total token throughput (tok/s):", found["total_token_throughput"])
    for metric, (name, title) in _TITLES.items():
        if metric not in config.metrics:
            continue
        lines.append(f"{title:-^50}")
        add(f"Mean {name} (ms):", found[f"mean_{metric}_ms"])
        add(f"Median {name} (ms):", found[f"median_{metric}_ms"])
        for percentile in config.percentiles:
            add(f"P{percentile:g} {name} (ms):", found[f"p{percentile:g}_{metric}_ms"])
    lines.append("=" * 50)
    return "\n".join(lines)


def token_gaps(answer: Answer, count: int) -> list[float]:
    """Seconds between tokens after those of the first piece. A piece of several tokens is not one
    token: the time before it is shared out among them."""
    if answer.error is not None:
        return []
    gaps: list[float] = []
    waited = 0.0
    for (before, _), (now, tokens) in pairwise(_arrivals(answer, count)):
        waited += now - before
        if tokens > 0:  # else text that an earlier token had left over
            gaps += [waited / tokens] * max(1, round(tokens))
            waited = 0.0
    return gaps


def _arrivals(answer: Answer, count: int) -> Iterator[tuple[float, float]]:
    """When tokens came, on the clock of ``sent``, and how many, ``count`` in all: as the server has
    counted them along the way, or else in equal shares. One without text, such as the last of an
    answer that ended by itself, came with the last piece."""
    counted = [piece.num_tokens for piece in answer.pieces if piece.num_tokens is not None]
    if len(counted) == len(answer.pieces):
        shares = [float(after - before) for before, after in pairwise([0, *counted[:-1], count])]
    else:
        shares = [count / len(answer.pieces)] * len(answer.pieces)
    for piece, share in zip(answer.pieces, shares, strict=True):
        yield answer.sent + piece.time, share


def _peak_rate(arrivals: Sequence[tuple[float, float]], began: float, duration: float) -> float:
    """Tokens per second in the best of equal spans of about a second that fill ``duration``, and so
    never below the mean."""
    if not arrivals:
        return 0.0
    num_spans = max(1, int(duration))
    tokens = np.zeros(num_spans)
    for time, count in arrivals:
        tokens[min(num_spans - 1, int((time - began) / duration * num_spans))] += count
    return float(tokens.max()) * num_spans / duration


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    """Most answers on their way at once; one that ends as another begins isn't beside it."""
    changes = [(answer.sent, 1) for answer in answers]
    changes += [(answer.sent + answer.latency, -1) for answer in answers]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
