"""One request as the engine sees it: ids in, ids out, and how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from octavo.cache import RequestBlocks
from octavo.outputs import RequestMetrics, TokenLogprobs
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.grammar import GrammarMatcher


class RequestStatus(Enum):
    WAITING = auto()  # new or preempted: holds no blocks
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """One answer to one prompt. ``params.n`` is expanded before: choice ``choice`` of ``n``.

    ``seed`` is always drawn already. A lower ``priority`` runs first, then the earlier arrival.
    Only requests of equal ``cache_salt`` share cached prefixes. The fields after ``arrival_time``
    are the engine's own.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    seed: int
    choice: int = 0
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.monotonic)

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    token_ids: list[int] = field(init=False)  # all that are known: the prompt's, then the output's
    num_computed_tokens: int = field(default=0, init=False)  # launched, maybe still in flight
    num_pending_ids: int = field(default=0, init=False)  # sampled or about to be, not known here
    num_cached_tokens: int = field(default=0, init=False)  # found in the cache when first admitted
    num_scored_tokens: int = field(default=0, init=False)  # positions asked for prompt_logprobs
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    matcher: GrammarMatcher | None = field(default=None, init=False)  # of structured outputs
    row: int = field(default=-1, init=False)  # its row in the last step that it was part of
    metrics: RequestMetrics = field(init=False)

    # Set on arrival, by the scheduler.
    order: tuple[int, int] = field(default=(0, 0), init=False)  # priority, arrival
    max_total_tokens: int = field(default=0, init=False)  # it is finished with as many tokens
    blocks: RequestBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.metrics = RequestMetrics(self.arrival_time)
        stops = set(self.params.stop_token_ids)
        if self.ends_at_eos:
            stops |= self.eos_token_ids
        self.stop_ids = frozenset(stops)

    @property
    def ends_at_eos(self) -> bool:
        """Nothing can follow the end of a grammar, so that ``ignore_eos`` only puts it off there
        for as long as the grammar can go on."""
        return not self.params.ignore_eos or self.params.structured_outputs is not None

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with the ids that only the device knows yet."""
        return len(self.token_ids) + self.num_pending_ids

    @property
    def generates(self) -> bool:
        """False where only the prompt is scored (``max_tokens`` 0)."""
        return self.max_total_tokens > len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before the next id can be sampled. The last token that fits is never
        computed: nothing follows it."""
        last = max(self.max_total_tokens - 1, len(self.prompt_token_ids))
        return min(self.num_tokens, last) - self.num_computed_tokens

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """What the next id must not be: the stops, until ``min_tokens`` are there."""
        if len(self.output_token_ids) < self.params.min_tokens:
            return tuple(sorted(self.stop_ids))
        if self.params.ignore_eos and self.ends_at_eos:
            return tuple(sorted(self.eos_token_ids))
        return ()

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
