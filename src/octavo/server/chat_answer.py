"""A chat's answer: whole, or chunk by chunk with what is new since the last one."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.answers import (
    AnswerOptions,
    ChoiceReader,
    ChunkedAnswer,
    Json,
    TextEvent,
    usage,
)
from octavo.server.logprobs import chat_logprobs
from octavo.server.parsers import Arguments, CallStart, Content, Piece, Reasoning
from octavo.server.parsers.think import CLOSE
from octavo.text import Tokenizer


@dataclass(slots=True)
class _Choice:
    """A choice on its way out: how much of it was sent."""

    reader: ChoiceReader
    begun: bool = False
    ended: bool = False
    tokens: int = 0
    text_event: TextEvent | None = None  # once it has begun, where text comes alone


class ChatAnswer(ChunkedAnswer):
    """A chat's answer, its text read by one of ``readers`` for each choice. ``named``: the call
    asks for one tool by name, which ends with "stop"."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        params: SamplingParams,
        readers: Sequence[ChoiceReader],
        *,
        named: bool = False,
    ) -> None:
        super().__init__(options)
        self._tokenizer = tokenizer
        self._top = params.logprobs
        self._named = named
        self._only_text = params.logprobs is None and options.only_text
        self._choices = [_Choice(reader) for reader in readers]
        self._close_id = tokenizer.backend.token_to_id(CLOSE)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        [output] = outputs
        choices = []
        for answer, state in zip(output.outputs, self._choices, strict=True):
            choice = {
                "index": answer.index,
                "message": _message(state.reader.pieces(answer)),
                "logprobs": self._logprobs(answer),
                "finish_reason": self._finish_reason(answer, state),
                "stop_reason": answer.stop_reason,
            }
            if self.options.return_token_ids:
                choice["token_ids"] = answer.token_ids
            choices.append(choice)
        response = self._envelope(self.kind, choices) | {"usage": self._usage(outputs)}
        if self.options.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        return response

    def chunks(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        [output] = outputs
        for answer, state in zip(output.outputs, self._choices, strict=True):
            text_event = state.text_event
            if text_event and state.reader.parser is None and answer.finish_reason is None:
                if text := state.reader.text(answer):
                    yield text_event(text)
                continue
            if state.ended or not (answer.token_ids or answer.finish_reason):
                continue
            if not state.begun:
                state.begun = True
                if self._only_text:
                    sample = _delta(answer, {"content": TextEvent.MARK})
                    text_event = state.text_event = TextEvent(self._chunk(sample, outputs))
                choice = _delta(answer, {"role": "assistant", "content": ""})
                prompt = output.prompt_token_ids if self.options.return_token_ids else None
                yield self._chunk(choice, outputs, prompt)
            for piece in state.reader.pieces(answer):
                if text_event and isinstance(piece, Content):
                    yield text_event(piece.text)
                    continue
                choice = _delta(answer, _piece_delta(piece))
                self._add_tokens(choice, answer, state)
                yield self._chunk(choice, outputs)
            if answer.finish_reason is not None:
                state.ended = True
                choice = _delta(answer, {}, self._finish_reason(answer, state))
                choice["stop_reason"] = answer.stop_reason
                self._add_tokens(choice, answer, state)
                yield self._chunk(choice, outputs)

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        readers = [state.reader for state in self._choices]
        reasons = readers[0].parser is not None and readers[0].parser.reasons
        if self._close_id is None or not reasons:
            return usage(outputs)
        tokens = [
            reader.reasoning_tokens(answer, self._close_id)
            for answer, reader in zip(outputs[0].outputs, readers, strict=True)
        ]
        return usage(outputs, sum(tokens))

    def _add_tokens(self, choice: Json, answer: CompletionOutput, state: _Choice) -> None:
        """The ids and log probabilities that came since the last chunk of this choice."""
        new = slice(state.tokens, len(answer.token_ids))
        state.tokens = new.stop
        if self.options.return_token_ids:
            choice["token_ids"] = answer.token_ids[new]
        if answer.logprobs is not None and new.start < new.stop:
            choice["logprobs"] = chat_logprobs(
                self._tokenizer, answer.token_ids[new], answer.logprobs[new], self._top or 0
            )

    def _logprobs(self, answer: CompletionOutput) -> Json | None:
        if answer.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, answer.token_ids, answer.logprobs, self._top or 0)

    def _finish_reason(self, answer: CompletionOutput, state: _Choice) -> str | None:
        if answer.finish_reason == "stop" and state.reader.num_calls and not self._named:
            return "tool_calls"
        return answer.finish_reason


def _message(pieces: Iterable[Piece]) -> Json:
    content, reasoning, calls = "", "", []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, name):
                calls.append(_call(name))
            case Arguments(index, text):
                calls[index]["function"]["arguments"] += text
    bare = not content and (calls or reasoning)
    message: Json = {"role": "assistant", "content": None if bare else content}
    message |= {"refusal": None, "annotations": []}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message


def _piece_delta(piece: Piece) -> Json:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **_call(name)}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _delta(answer: CompletionOutput, delta: Json, finish_reason: str | None = None) -> Json:
    return {
        "index": answer.index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def _call(name: str) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
