"""What an answer cost, in numbers and as one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.outputs import RequestOutput

if TYPE_CHECKING:
    from octavo.engine.build import LoadReport


@dataclass(frozen=True)
class Figures:
    """Seconds are None where there is nothing to measure: no token came, or only one.

    ``ttft_s`` runs from the request's arrival, when the model is loaded, to its first token;
    ``tpot_s`` is the mean time of the tokens after the first, ``tokens_per_s`` its inverse.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float | None
    tpot_s: float | None

    @property
    def tokens_per_s(self) -> float | None:
        return 1 / self.tpot_s if self.tpot_s else None


def figures(output: RequestOutput) -> Figures:
    """The figures of a request that has ended."""
    metrics, generated = output.metrics, len(output.outputs[0].token_ids)
    ttft = tpot = None
    if metrics.first_token_time is not None:
        ttft = metrics.first_token_time - metrics.arrival_time
        if metrics.finished_time is not None and generated > 1:
            tpot = (metrics.finished_time - metrics.first_token_time) / (generated - 1)
    return Figures(len(output.prompt_token_ids), output.num_cached_tokens, generated, ttft, tpot)


def figures_line(output: RequestOutput, report: LoadReport) -> str:
    """Tokens, times, and who computed the answer: model, attention candidate, runtime, precision
    given up."""
    numbers = figures(output)
    cached = f" ({numbers.cached_tokens:,} cached)" if numbers.cached_tokens else ""
    parts = [
        f"{numbers.prompt_tokens:,} prompt token{'s' * (numbers.prompt_tokens != 1)}{cached}",
        f"{numbers.generated_tokens:,} generated",
        "" if numbers.ttft_s is None else f"TTFT {numbers.ttft_s:.3f} s",
        "" if numbers.tokens_per_s is None else f"{numbers.tokens_per_s:,.1f} tok/s",
        report.model,
        f"attention {report.attention_backend}",
        f"runtime {report.runtime}",
        report.precision,
    ]
    return " · ".join(part for part in parts if part)
