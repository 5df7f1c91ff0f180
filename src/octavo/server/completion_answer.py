"""A completion's answer: whole, or chunk by chunk with what is new since the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.server.answers import AnswerOptions, ChunkedAnswer, Json, TextEvent
from octavo.server.logprobs import CompletionLogprobs
from octavo.text import Tokenizer


@dataclass
class _Choice:
    logprobs: CompletionLogprobs
    begun: bool = False
    ended: bool = False
    text: int = 0
    tokens: int = 0
    text_event: TextEvent | None = None


class CompletionAnswer(ChunkedAnswer):
    """``echo``: the prompt's text, and its log probabilities, come before the answer's."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        echo: bool = False,
    ) -> None:
        super().__init__(options)
        self._tokenizer = tokenizer
        self._params = params
        self._echo = echo
        self._only_text = params.logprobs is None and options.only_text
        self._choices: dict[int, _Choice] = {}  # by index in the response

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = []
        for p, output in enumerate(outputs):
            for answer in output.outputs:
                choices.append(self._choice(p, output, answer))
        return self._envelope(self.kind, choices) | {"usage": self._usage(outputs)}

    def chunks(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        for p, output in enumerate(outputs):
            if self._params.prompt_logprobs is not None and output.prompt_logprobs is None:
                continue  # they come first, whichever answer is the fastest
            for answer in output.outputs:
                state = self._state(p, answer)
                if state.text_event is not None and answer.finish_reason is None:
                    if text := answer.text[state.text :]:
                        state.text = len(answer.text)
                        yield state.text_event(text)
                    continue
                grown = len(answer.text) > state.text or (
                    answer.logprobs is not None and len(answer.token_ids) > state.tokens
                )
                grown = grown or (self._echo and not state.begun and bool(answer.token_ids))
                if not state.ended and (grown or answer.finish_reason is not None):
                    choice = self._choice(p, output, answer)
                    yield self._chunk(choice, outputs)
                    if self._only_text and not state.ended:
                        sample = self._chunk(choice | {"text": TextEvent.MARK}, outputs)
                        state.text_event = TextEvent(sample)

    def _state(self, prompt: int, answer: CompletionOutput) -> _Choice:
        index = prompt * self._params.n + answer.index
        if index not in self._choices:
            self._choices[index] = _Choice(
                CompletionLogprobs(self._tokenizer, self._params.skip_special_tokens)
            )
        return self._choices[index]

    def _choice(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> Json:
        """A choice with what came since it was last made."""
        state = self._state(prompt, answer)
        token_ids = answer.token_ids[state.tokens :]
        entries: list[TokenLogprobs | None] = list((answer.logprobs or [])[state.tokens :])
        text = answer.text[state.text :]
        first = not state.begun
        if self._echo and first:
            text = self._prompt_text(output) + text
            if output.prompt_logprobs is not None:
                token_ids = output.prompt_token_ids + token_ids
                entries = output.prompt_logprobs + entries
        choice: Json = {
            "index": prompt * self._params.n + answer.index,
            "text": text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._params.logprobs is not None:
            choice["logprobs"] = state.logprobs.take(token_ids, entries)
        if self.options.return_token_ids:
            choice["token_ids"] = answer.token_ids[state.tokens :]
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        state.begun, state.ended = True, answer.finish_reason is not None
        state.text, state.tokens = len(answer.text), len(answer.token_ids)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        skip = self._params.skip_special_tokens
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)
