"""How long one batch takes, and how near it comes to memory's bandwidth and to the matrix rate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from octavo.bench.dataset import random_ids
from octavo.bench.roof import ReadCost, row_flops
from octavo.models.spec import DecoderSpec
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass(frozen=True)
class Latencies:
    """Of each iteration: ``seconds`` for the whole batch, ``prefill_seconds`` until all rows have a
    token, and ``step_seconds`` for one decode step, which is None where only one token is
    generated."""

    seconds: list[float]
    prefill_seconds: list[float]
    step_seconds: list[float] | None


def measure_latency(
    llm: LLM,
    vocab_size: int,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int,
    detokenize: bool,
    seed: int,
    progress: Callable[[str], None],
) -> Latencies:
    """Generate a batch again and again. Its prompts are new each time, so no prefix is cached."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=detokenize)
    seconds, prefills, steps = [], [], []
    for number in range(-num_iters_warmup, num_iters):
        name = "warm-up" if number < 0 else f"iteration {number + 1} of {num_iters}"
        progress(name)
        prompts = [
            {"prompt_token_ids": random_ids(rng, input_len, vocab_size)} for _ in range(batch_size)
        ]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - began
        if number < 0:
            continue
        seconds.append(elapsed)
        # Once all rows decode, a step of the batch is what each of them waits for.
        started = max(output.metrics.first_token_time or 0.0 for output in outputs)
        ended = max(output.metrics.finished_time or 0.0 for output in outputs)
        prefills.append(elapsed - (ended - started))
        steps.append((ended - started) / max(1, output_len - 1))
    return Latencies(seconds, prefills, steps if output_len > 1 else None)


def decode_gb_s(
    cost: ReadCost, latencies: Latencies, *, input_len: int, output_len: int, batch_size: int
) -> float | None:
    """GB/s that the decode steps of the median iteration had to read."""
    if latencies.step_seconds is None:
        return None
    num_steps = output_len - 1
    history = batch_size * cost.of_history(input_len + 1, input_len + num_steps)
    read = cost.weight_bytes + history / num_steps
    return read / median(latencies.step_seconds) / 1e9


def decode_tflops(
    spec: DecoderSpec, latencies: Latencies, *, input_len: int, output_len: int, batch_size: int
) -> float | None:
    """TFLOP/s of the decode steps of the median iteration."""
    if latencies.step_seconds is None:
        return None
    num_steps = output_len - 1
    flops = batch_size * row_flops(spec, input_len + 1, input_len + num_steps, num_steps)
    return flops / num_steps / median(latencies.step_seconds) / 1e12


def prefill_tflops(
    spec: DecoderSpec, latencies: Latencies, *, input_len: int, batch_size: int
) -> float:
    """TFLOP/s of the median iteration's prefill."""
    flops = batch_size * row_flops(spec, 1, input_len, 1)
    return flops / median(latencies.prefill_seconds) / 1e12
