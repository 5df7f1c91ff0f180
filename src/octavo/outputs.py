"""What a finished or streaming request looks like to its caller: the shape of vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "content_filter"]


@dataclass(frozen=True)
class Logprob:
    """One token's log probability (natural log, raw distribution) and its rank, 1 the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # token id -> its log probability, at one position


@dataclass
class CompletionOutput:
    """One answer of a request. ``token_ids`` has every generated id, the stop id included."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop_token_id that matched


@dataclass
class RequestMetrics:
    """Seconds on the monotonic clock of the process that made them."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """A request and its ``n`` answers, as far as they have come. ``error`` says why the engine gave
    it up, with ``finish_reason`` "abort" (logits that are not finite)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
