"""What becomes of outputs: the shape that all answers have, and what chunked streams share."""

from __future__ import annotations

import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.errors import error_body
from octavo.server.parsers import AnswerParser, Arguments, CallStart, Content, Piece

Json = dict[str, Any]

encode_json = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerOptions:
    """How a call wants to be answered."""

    model: str
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def only_text(self) -> bool:
        """Whether a piece of text comes without anything beside it."""
        return not (self.return_token_ids or self.continuous_usage)


class Answer(Protocol):
    """Makes what a call is told of its outputs, one for each of its prompts."""

    id: str

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The response, where all outputs are finished."""
        ...

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Server-sent events of what is new since the last call, and the stream's end where all
        outputs are finished."""
        ...

    def error_events(self, error: Exception) -> bytes:
        """The stream's end, where an error ends it."""
        ...


def all_finished(outputs: Sequence[RequestOutput]) -> bool:
    """Whether no answer grows any more."""
    for output in outputs:  # noqa: SIM110 - asked for every token; all() costs four times as much
        if not output.finished:
            return False
    return True


def usage(outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None) -> Json:
    """Tokens so far. A prompt counts once, whatever its number of answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    count: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning_tokens is not None:
        count["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return count


@dataclass(slots=True)
class ChoiceReader:
    """Takes an answer's text apart as it grows. ``one_call``: calls after the first are left
    out."""

    parser: AnswerParser | None
    one_call: bool = False
    num_calls: int = 0
    _read: int = 0  # characters

    def text(self, answer: CompletionOutput) -> str:
        """What came since the last call of this or :meth:`pieces`, as it is."""
        text = answer.text[self._read :]
        self._read += len(text)
        return text

    def pieces(self, answer: CompletionOutput) -> Iterator[Piece]:
        """The pieces of what came since the last call."""
        text = self.text(answer)
        if self.parser is None:
            pieces: Iterable[Piece] = [Content(text)] if text else []
        elif answer.finish_reason is None:
            pieces = self.parser.feed(text)
        else:
            pieces = itertools.chain(self.parser.feed(text), self.parser.finish())
        for piece in pieces:
            if isinstance(piece, CallStart):
                self.num_calls += 1
            if self.one_call and isinstance(piece, CallStart | Arguments) and piece.index > 0:
                continue
            yield piece

    def reasoning_tokens(self, answer: CompletionOutput, close_id: int) -> int:
        """Tokens up to the end of the reasoning, whose end marker is the token ``close_id``."""
        if self.parser is None or not self.parser.has_reasoned:
            return 0
        ids = answer.token_ids
        return ids.index(close_id) + 1 if close_id in ids else len(ids)


class ChunkedAnswer(ABC):
    """What chats and completions share: the envelope, and a stream of chunks."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, options: AnswerOptions) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.options = options
        self._created = int(time.time())

    @abstractmethod
    def chunks(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """What is new since the last call, as events."""

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """What is new since the last call, and the stream's end where all outputs are finished."""
        events = b"".join(self.chunks(outputs))
        if all_finished(outputs):
            if self.options.include_usage:
                last = self._envelope(self.chunk_kind, []) | {"usage": self._usage(outputs)}
                events += event(last)
            events += _DONE
        return events

    def error_events(self, error: Exception) -> bytes:
        """The stream's end, where an error ends it."""
        return event(error_body(error)[1]) + _DONE

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.options.model,
            "choices": choices,
        }

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        return usage(outputs)

    def _chunk(
        self,
        choice: Json,
        outputs: Sequence[RequestOutput],
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        chunk = self._envelope(self.chunk_kind, [choice])
        if self.options.continuous_usage:
            chunk["usage"] = self._usage(outputs)
        if prompt_token_ids is not None:
            chunk["prompt_token_ids"] = prompt_token_ids
        return event(chunk)


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


class TextEvent:
    """The events of one choice that bring nothing but text: all other bytes are the same in each,
    so they are made once, from ``sample``, the event whose text is :attr:`MARK`."""

    MARK = "\0text\0"
    __slots__ = ("_after", "_before")

    def __init__(self, sample: bytes) -> None:
        self._before, self._after = sample.split(encode_json(self.MARK))

    def __call__(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after
