"""A stand-in for ``LLM`` that answers from a script, for tests of what the commands do with it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams

REPORT = SimpleNamespace(
    model="fake-1b", runtime="eager", attention_backend="reference", precision="", notes=[]
)


@dataclass
class FakeLLM:
    """Streams ``pieces``, one token each; ``asked`` keeps every prompt or conversation."""

    pieces: Sequence[str] = ("Hel", "lo", ".")
    report: Any = field(default_factory=lambda: REPORT)
    error: Exception | None = None
    chat_template: str | None = "{{ messages }}"
    asked: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    aborted: int = 0

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(chat_template=self.chat_template)

    def stream(self, prompt: Any, params: SamplingParams) -> Generator[RequestOutput]:
        self.asked.append(prompt)
        self.params.append(params)
        if self.error is not None:
            raise self.error
        return self._stream()

    def stream_chat(
        self, messages: Sequence[Any], params: SamplingParams
    ) -> Generator[RequestOutput]:
        return self.stream(list(messages), params)

    def _stream(self) -> Generator[RequestOutput]:
        answer = CompletionOutput(0, "", [])
        output = RequestOutput("0", None, [1, 2], [answer], False, metrics=RequestMetrics(10.0))
        try:
            for i, piece in enumerate(self.pieces):
                answer.text += piece
                answer.token_ids.append(7 + i)
                if i == 0:
                    output.metrics.first_token_time = 10.25
                if i == len(self.pieces) - 1:
                    answer.finish_reason = "stop"
                    output.metrics.finished_time = 10.25 + 0.5 * i
                    output.finished = True
                yield output
        finally:
            self.aborted += not output.finished
