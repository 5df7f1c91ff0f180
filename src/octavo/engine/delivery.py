"""What sampled ids make of a request: the update that tells of them, and maybe the request's end.

Only the request changes here. The step loop counts, keeps blocks and lets go of what has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling import INVALID_TOKEN
from octavo.engine.scheduler import ScheduledRow
from octavo.outputs import FinishReason, RequestMetrics, TokenLogprobs

_NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): the checkpoint is damaged, or its values "
    "exceed the chosen dtype; try another dtype, or exact=True"
)


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


def advance(
    row: ScheduledRow,
    new_token_ids: list[int],
    logprobs: list[TokenLogprobs | None],
    prompt_logprobs: list[TokenLogprobs],
    now: float,
) -> RequestUpdate | None:
    """Give a request what one of its rows came to; None where there is nothing to tell yet. Where
    an error ends it, the row's ids are dropped."""
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
    if not new_token_ids and finish_reason is None:
        return None

    first = len(request.output_token_ids) == len(new_token_ids)
    if first and new_token_ids:
        request.metrics.first_token_time = now
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


def advance_run(
    requests: Sequence[Request], token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[list[RequestUpdate | None], list[int]]:
    """What :func:`advance` does, for rows that sample one id each and have no grammar: an update
    for each, None for those that are left to it, because the id ends the request or the request
    has ended before; and the numbers of these."""
    updates: list[RequestUpdate | None] = []
    rest: list[int] = []
    finished = RequestStatus.FINISHED  # looking it up takes 0.2 us
    for i, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
        known = request.token_ids
        if (
            request.status is finished
            or token_id < 0
            or token_id in request.stop_ids
            or len(known) + 1 >= request.max_total_tokens
        ):
            rest.append(i)
            updates.append(None)
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
    return updates, rest


def give_up(request: Request, error: str) -> RequestUpdate:
    """The only update of a request that never ran."""
    return RequestUpdate(
        request.request_id, [], None, None, "abort", None, 0, request.metrics, error
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
