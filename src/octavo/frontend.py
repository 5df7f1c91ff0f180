"""The text side of requests: prompts in, :class:`RequestOutput` out; the engine knows ids only.

A prompt becomes one engine :class:`Request` per answer (``n`` of them), and the engine's updates
become text, whole characters only, withheld while it may belong to a stop string or to what a
content rule forbids. In a server this side and the engine are two processes; offline both live in
the caller's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from octavo.engine.delivery import RequestUpdate
from octavo.engine.request import Request
from octavo.errors import ContentRuleError, InvalidRequestError, brief
from octavo.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from octavo.sampling_params import MAX_SEED, SamplingParams
from octavo.text import ContentChecker, ContentRules, Detokenizer, StopChecker, Tokenizer

# Text, {"prompt": text} or {"prompt_token_ids": [...]}; a "prompt" beside ids is only shown.
Prompt = str | Mapping[str, Any]


@dataclass
class _Answer:
    """One of a request's ``n`` answers on its way from ids to text."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    stops: StopChecker
    content: ContentChecker  # sees what the stop strings let through

    def add(self, token_id: int, is_stop_id: bool, params: SamplingParams) -> bool:
        """Take one id; whether it has cut the text. A stop string that is complete within
        ``min_tokens`` doesn't count."""
        self.output.token_ids.append(token_id)
        if self.detokenizer is None or (is_stop_id and not params.include_stop_str_in_output):
            return False
        enough = len(self.output.token_ids) > params.min_tokens
        self._show(self.stops.feed(self.detokenizer.feed([token_id]), may_match=enough))
        return self.stops.matched is not None or self.content.matched

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Give out what was withheld and isn't forbidden: half a character as U+FFFD, half a stop
        string as text."""
        if self.detokenizer is not None and self.stops.matched is None:
            self._show(self.stops.feed(self.detokenizer.finish()))
            if self.stops.matched is None:
                self._show(self.stops.finish())
        self.output.text += self.content.finish()
        if self.content.matched:
            reason, stop_reason = "content_filter", None
        elif self.stops.matched is not None:
            reason, stop_reason = "stop", self.stops.matched
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason

    def _show(self, text: str) -> None:
        self.output.text += self.content.feed(text)


@dataclass
class Submission:
    """A checked request: what the engine is given, and what the text side keeps."""

    output: RequestOutput
    params: SamplingParams
    requests: list[Request]
    answers: list[_Answer]
    running: set[str] = field(default_factory=set)  # engine requests that are not finished


@dataclass(frozen=True)
class Step:
    """What one batch of engine updates came to: changed outputs, engine requests that ended and
    why, and those of them that their text ended (the engine still has to be told)."""

    outputs: list[RequestOutput]
    ended: dict[str, FinishReason]
    stopped: list[str]


class Frontend:
    """Prepares requests and turns engine updates into outputs. ``prepare`` may be called from any
    thread, the other methods from one."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.content_rules = ContentRules()  # a server's; for what is prepared from now on
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._submissions: dict[str, Submission] = {}  # by engine request id

    @property
    def is_idle(self) -> bool:
        """Whether no update is expected."""
        return not self._submissions

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Submission:
        """Encode and check one prompt; nothing is remembered yet.

        Raises :class:`InvalidRequestError` for an empty prompt, ids outside the vocabulary,
        parameters that need a tokenizer where there is none, a schema or grammar that can't be
        enforced, or content that a rule forbids. Checking one may take some tens of milliseconds,
        mostly without the GIL.
        """
        text, token_ids = self._encode(prompt)
        params.check_vocabulary(self._vocab_size)
        if self.tokenizer is None and params.stop_strings:
            raise InvalidRequestError("stop strings need the tokenizer, it was skipped", "stop")
        self._check_content(text, token_ids)
        if params.structured_outputs is not None:
            from octavo.engine.grammar import check_structure  # 30 ms

            check_structure(params.structured_outputs)
        arrival = time.monotonic()
        output = RequestOutput(
            request_id, text, token_ids, [], False, metrics=RequestMetrics(arrival)
        )
        submission = Submission(output, params, [], [])
        for index in range(params.n):
            own = params
            if index > 0 and params.max_tokens != 0:
                # One answer's pass over the prompt is enough for its log probabilities.
                own = replace(params, prompt_logprobs=None)
            submission.requests.append(
                Request(
                    request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                    prompt_token_ids=token_ids,
                    params=own,
                    eos_token_ids=self._eos_token_ids,
                    seed=self._random.randint(0, MAX_SEED) if own.seed is None else own.seed,
                    choice=index,
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_time=arrival,
                )
            )
            completion = CompletionOutput(index, "", [])
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            output.outputs.append(completion)
            submission.answers.append(
                _Answer(
                    completion,
                    self._detokenizer(params),
                    StopChecker(params.stop_strings, params.include_stop_str_in_output),
                    ContentChecker(self.content_rules),
                )
            )
        return submission

    def register(self, submission: Submission) -> None:
        """Expect updates for this submission from now on."""
        for request in submission.requests:
            if request.request_id in self._submissions:
                raise InvalidRequestError(
                    f"request id {request.request_id!r} is in use; wait for it or choose another",
                    "request_id",
                )
        for request in submission.requests:
            self._submissions[request.request_id] = submission
            submission.running.add(request.request_id)

    def drop(self, submission: Submission) -> list[str]:
        """Forget a submission that was aborted; returns its engine requests still running."""
        running = sorted(submission.running)
        for request_id in running:
            del self._submissions[request_id]
        submission.running.clear()
        for answer in submission.answers:
            if answer.output.finish_reason is None:
                answer.finish("abort", None)
        submission.output.finished = True
        return running

    def process(self, updates: Iterable[RequestUpdate]) -> Step:
        """Turn one step's updates into outputs. Updates of dropped submissions are ignored: an
        abort may cross them on its way."""
        changed: dict[int, RequestOutput] = {}
        ended: dict[str, FinishReason] = {}
        stopped: list[str] = []
        now = time.monotonic()
        for update in updates:
            submission = self._submissions.get(update.request_id)
            if submission is None:
                continue
            reason = self._apply(submission, update, now)
            if reason is not None:
                ended[update.request_id] = reason
                if update.finish_reason is None:
                    stopped.append(update.request_id)
            changed[id(submission)] = submission.output
        return Step(list(changed.values()), ended, stopped)

    def _apply(
        self, submission: Submission, update: RequestUpdate, now: float
    ) -> FinishReason | None:
        """Apply one update; why the answer has ended, if it has."""
        output, params = submission.output, submission.params
        index = 0 if params.n == 1 else int(update.request_id.rpartition("#")[2])
        answer = submission.answers[index]
        if not answer.output.token_ids:  # the rest comes with the first token, or without any
            self._note_start(output, update, now)
        if update.error is not None:
            output.error = output.error or update.error
        is_cut = False
        last = len(update.new_token_ids) - 1
        for i, token_id in enumerate(update.new_token_ids):
            by_id = update.finish_reason == "stop" and i == last
            is_cut = answer.add(token_id, by_id, params)
            entry = None if update.logprobs is None else update.logprobs[i]
            if entry is not None and answer.output.logprobs is not None:
                answer.output.logprobs.append(self._name(entry))
                total = answer.output.cumulative_logprob or 0.0
                answer.output.cumulative_logprob = total + entry[token_id].logprob
            if is_cut:
                break  # later ids are dropped and not billed
        if is_cut or update.finish_reason is not None:
            answer.finish(update.finish_reason or "stop", update.stop_reason)
            submission.running.discard(update.request_id)
            del self._submissions[update.request_id]
            if not submission.running:
                output.finished = True
                output.metrics.finished_time = now
        return answer.output.finish_reason

    def _note_start(self, output: RequestOutput, update: RequestUpdate, now: float) -> None:
        if output.metrics.first_token_time is None and update.new_token_ids:
            output.metrics.first_token_time = now
        output.metrics.first_scheduled_time = update.metrics.first_scheduled_time
        output.num_cached_tokens = max(output.num_cached_tokens, update.num_cached_tokens)
        if update.prompt_logprobs is not None:
            output.prompt_logprobs = [
                entry and self._name(entry) for entry in update.prompt_logprobs
            ]

    def _name(self, entry: TokenLogprobs) -> TokenLogprobs:
        """The same entry with each token's text."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return entry
        return {
            token: replace(
                value, decoded_token=tokenizer.token_bytes(token).decode("utf-8", "replace")
            )
            for token, value in entry.items()
        }

    def _check_content(self, text: str | None, token_ids: list[int]) -> None:
        if not self.content_rules.patterns or self.tokenizer is None:
            return
        # The ids are what the model reads; the text beside them may be another.
        read = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        if any(self.content_rules.first_match(one) is not None for one in (text or "", read)):
            raise ContentRuleError("a content rule of this server refuses the prompt")

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, where it has one, and its ids, checked."""
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(given, Mapping) or given.keys() - {"prompt", "prompt_token_ids"}:
            raise _malformed(prompt)
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if ids is None and isinstance(text, str):
            ids = self._encode_text(text)
        elif ids is None or not isinstance(text, str | None):
            raise _malformed(prompt)
        token_ids = self._check_ids(ids)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it has no tokens", "prompt")
        return text, token_ids

    def _encode_text(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "a prompt of text needs the tokenizer, it was skipped (skip_tokenizer_init); "
                "give {'prompt_token_ids': [...]}",
                "prompt",
            )
        return self.tokenizer.encode(text)

    def _check_ids(self, ids: object) -> list[int]:
        if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
            raise InvalidRequestError(f"prompt_token_ids is {brief(ids)}, not a list", "prompt")
        # Twice as fast as one by one: a millisecond for 32K ids.
        plain = type(ids) is list and set(map(type, ids)) == {int}
        if plain and min(ids) >= 0 and max(ids) < self._vocab_size:
            return list(ids)
        token_ids = []
        for token in ids:
            if type(token) is not int and (
                isinstance(token, bool) or not isinstance(token, Integral)
            ):
                raise InvalidRequestError(f"token id {brief(token)} is not an integer", "prompt")
            token_ids.append(int(token))
            if not 0 <= token_ids[-1] < self._vocab_size:
                raise InvalidRequestError(
                    f"the prompt has token id {token}, ids go from 0 to {self._vocab_size - 1}",
                    "prompt",
                )
        return token_ids


def _malformed(prompt: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt is {brief(prompt)}; give text, {{'prompt': text}} or "
        "{'prompt_token_ids': [...]}",
        "prompt",
    )
