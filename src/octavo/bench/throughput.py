"""How many requests an offline batch gets through in a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.dataset import Sample
from octavo.bench.roof import ReadCost, row_flops
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.frontend import Prompt
    from octavo.llm import LLM


@dataclass(frozen=True)
class Throughput:
    """Tokens are counted from the outputs; ``gb_s`` is what the steps had to read, ``tflops`` what
    the tokens that weren't cached had to be multiplied by."""

    seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    num_steps: int
    gb_s: float
    tflops: float


def measure_throughput(
    llm: LLM, samples: Sequence[Sample], cost: ReadCost, *, detokenize: bool
) -> Throughput:
    """Generate all samples at once, each to its length."""
    prompts: list[Prompt] = [
        sample.prompt if isinstance(sample.prompt, str) else {"prompt_token_ids": sample.prompt}
        for sample in samples
    ]
    params = [
        SamplingParams(max_tokens=sample.output_len, ignore_eos=True, detokenize=detokenize)
        for sample in samples
    ]
    steps_before = llm.stats().num_steps
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    num_steps = llm.stats().num_steps - steps_before
    lengths = [(len(out.prompt_token_ids), len(out.outputs[0].token_ids)) for out in outputs]
    history = sum(cost.of_history(prompt + 1, prompt + answer - 1) for prompt, answer in lengths)
    flops = sum(
        row_flops(cost.spec, out.num_cached_tokens + 1, prompt + answer - 1, answer)
        for out, (prompt, answer) in zip(outputs, lengths, strict=True)
    )
    return Throughput(
        seconds=seconds,
        num_requests=len(outputs),
        prompt_tokens=sum(prompt for prompt, _ in lengths),
        output_tokens=sum(answer for _, answer in lengths),
        num_steps=num_steps,
        gb_s=(num_steps * cost.weight_bytes + history) / seconds / 1e9,
        tflops=flops / seconds / 1e12,
    )
