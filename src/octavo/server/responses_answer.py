"""The answer of ``/v1/responses``: items of reasoning, text and calls, whole or event by event.

Both ways go through the same events; the whole answer is what the last of them carries.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.answers import ChoiceReader, Json, encode_json, usage
from octavo.server.errors import error_body
from octavo.server.parsers import Arguments, CallStart, Content, Piece, Reasoning
from octavo.server.parsers.think import CLOSE
from octavo.server.responses import ResponsesRequest
from octavo.text import Tokenizer

# Why an answer is incomplete, by its finish reason.
_CUT: dict[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesAnswer:
    """One answer of one conversation."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        tokenizer: Tokenizer,
        params: SamplingParams,
        reader: ChoiceReader,
    ) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        self._reader = reader
        self._close_id = tokenizer.backend.token_to_id(CLOSE)
        self._items: list[Json] = []
        self._open = False  # the last item still grows
        self._sequence_number = 0
        self._begun = False
        said = request.model_dump(mode="json", by_alias=True)
        self._response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "background": False,
            "frequency_penalty": params.frequency_penalty,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": None,
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": said["text"] or {"format": {"type": "text"}},
            "tool_choice": said["tool_choice"] or "auto",
            "tools": said["tools"] or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        for _ in self._all_events(outputs):
            pass
        return self._response

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        return b"".join(self._encoded(event) for event in self._all_events(outputs))

    def error_events(self, error: Exception) -> bytes:
        told = error_body(error)[1]["error"]
        event = {"type": "error", "code": told["code"], "message": told["message"]}
        return self._encoded({**event, "param": told["param"]})

    def _encoded(self, event: Json) -> bytes:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + encode_json(event) + b"\n\n"

    def _all_events(self, outputs: Sequence[RequestOutput]) -> Iterator[Json]:
        """What is new since the last call, and the end where the output is finished."""
        [output] = outputs
        [answer] = output.outputs
        if not self._begun:
            self._begun = True
            yield {"type": "response.created", "response": self._response}
            yield {"type": "response.in_progress", "response": self._response}
        for piece in self._reader.pieces(answer):
            yield from self._piece(piece)
        if answer.finish_reason is not None:
            cut = _CUT.get(answer.finish_reason)
            yield from self._close("incomplete" if cut else "completed")
            self._response |= {
                "status": "incomplete" if cut else "completed",
                "completed_at": None if cut else int(time.time()),
                "incomplete_details": {"reason": cut} if cut else None,
                "output": self._items,
                "usage": self._usage(output, answer),
            }
            kind = "response.incomplete" if cut else "response.completed"
            yield {"type": kind, "response": self._response}

    def _piece(self, piece: Piece) -> Iterator[Json]:
        match piece:
            case Content(text):
                yield from self._grow_text("message", "output_text", text)
            case Reasoning(text):
                yield from self._grow_text("reasoning", "reasoning_text", text)
            case CallStart(_, name):
                yield from self._close("completed")
                yield from self._begin(
                    {
                        "type": "function_call",
                        "id": f"fc_{secrets.token_hex(12)}",
                        "call_id": f"call_{secrets.token_hex(12)}",
                        "name": name,
                        "arguments": "",
                        "status": "in_progress",
                    }
                )
            case Arguments(_, text):
                self._items[-1]["arguments"] += text
                kind = "response.function_call_arguments.delta"
                yield {"type": kind, **self._place(), "delta": text}

    def _grow_text(self, kind: str, part_kind: str, text: str) -> Iterator[Json]:
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            item: Json = {"type": kind, "id": f"{kind[:3]}_{secrets.token_hex(12)}"}
            item |= {"status": "in_progress", "content": []}
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
            yield from self._begin(item)
            part: Json = {"type": part_kind, "text": ""}
            if part_kind == "output_text":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            added = {"type": "response.content_part.added", **self._place(), "content_index": 0}
            yield {**added, "part": dict(part)}
        self._items[-1]["content"][0]["text"] += text
        delta: Json = {"type": f"response.{part_kind}.delta", **self._place(), "content_index": 0}
        if part_kind == "output_text":
            delta["logprobs"] = []
        yield {**delta, "delta": text}

    def _begin(self, item: Json) -> Iterator[Json]:
        self._items.append(item)
        self._open = True
        bare = {**item, "content": []} if "content" in item else dict(item)
        index = len(self._items) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": bare}

    def _close(self, status: str) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"type": "response.function_call_arguments.done", **self._place()}
            yield {**done, "name": item["name"], "arguments": item["arguments"]}
        else:
            [part] = item["content"]
            place = {**self._place(), "content_index": 0}
            text: Json = {"type": f"response.{part['type']}.done", **place, "text": part["text"]}
            if part["type"] == "output_text":
                text["logprobs"] = []
            yield text
            yield {"type": "response.content_part.done", **place, "part": part}
        index = len(self._items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _usage(self, output: RequestOutput, answer: CompletionOutput) -> Json:
        count = usage([output])
        close_id = self._close_id
        reasoned = 0 if close_id is None else self._reader.reasoning_tokens(answer, close_id)
        return {
            "input_tokens": count["prompt_tokens"],
            "input_tokens_details": count["prompt_tokens_details"],
            "output_tokens": count["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": count["total_tokens"],
        }
