"""``octavo bench latency``: how long does one batch take?"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from octavo.cli.bench.shared import (
    BenchEngineFlags,
    check_counts,
    check_length,
    print_json,
    roof_line,
    show_progress,
)
from octavo.cli.options import Model, Switch
from octavo.config import EngineConfig
from octavo.errors import ConfigError

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def latency(
    model: Model = None,
    /,
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    disable_detokenize: Switch = False,
    seed: int = 0,
    output_json: Path | None = None,
    engine: BenchEngineFlags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Time one batch of random prompts, from its start to its last token.

    No prompt comes twice, so prefix caching saves nothing. Ends with one line of JSON.

    Parameters
    ----------
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer.
    batch_size
        Prompts in the batch.
    num_iters_warmup
        Batches before the measurement.
    num_iters
        Batches that are measured.
    disable_detokenize
        Leave the answers' text out.
    seed
        Makes prompts and answers repeatable.
    output_json
        Also write the JSON to this file.
    """
    check_counts(
        input_len=input_len, output_len=output_len, batch_size=batch_size, num_iters=num_iters
    )
    if num_iters_warmup < 0 or seed < 0:
        raise ConfigError("num_iters_warmup and seed must be at least 0")
    if batch_size > engine.max_num_seqs:
        raise ConfigError(
            f"batch_size is {batch_size}, but at most {engine.max_num_seqs} requests run at once; "
            "raise max_num_seqs, or make the batch smaller"
        )
    import numpy as np

    from octavo.bench.latency import decode_gb_s, decode_tflops, measure_latency, prefill_tflops
    from octavo.bench.roof import measure_roofs, read_cost
    from octavo.cli.loading import load

    cost = read_cost(replace(engine, model=model))
    llm = load(model, engine)
    check_length(input_len + output_len, llm.report.max_model_len)
    from octavo.verify.report import machine

    roofs = measure_roofs(cost)
    sizes = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    found = measure_latency(
        llm,
        cost.spec.vocab_size,
        **sizes,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        detokenize=not disable_detokenize,
        seed=seed,
        progress=show_progress,
    )
    show_progress("")
    percentiles = np.percentile(found.seconds, PERCENTAGES).tolist()
    average, deviation = float(np.mean(found.seconds)), float(np.std(found.seconds))
    print(f"Avg latency: {average} seconds")
    print(f"Std latency: {deviation} seconds")
    for percentage, percentile in zip(PERCENTAGES, percentiles, strict=True):
        print(f"{percentage}% percentile latency: {percentile} seconds")
    prefill_rate = batch_size * input_len / median(found.prefill_seconds)
    prefill = prefill_tflops(cost.spec, found, input_len=input_len, batch_size=batch_size)
    print(roof_line("Prefill", prefill_rate, roofs, gb_s=None, tflops=prefill))
    gb_s, decode = decode_gb_s(cost, found, **sizes), decode_tflops(cost.spec, found, **sizes)
    tokens_per_s = None
    if found.step_seconds is not None and decode is not None:
        tokens_per_s = batch_size / median(found.step_seconds)
        print(roof_line("Decode", tokens_per_s, roofs, gb_s=gb_s, tflops=decode))
    print_json(
        {
            "bench": "latency",
            "model": llm.report.model,
            "device": cost.device,
            "machine": machine(cost.device),
            **sizes,
            "avg_latency": average,
            "std_latency": deviation,
            "latencies": found.seconds,
            "percentiles": dict(zip(map(str, PERCENTAGES), percentiles, strict=True)),
            "decode_tokens_per_s": tokens_per_s,
            "decode_gb_s": gb_s,
            "decode_tflops": decode,
            "prefill_tokens_per_s": prefill_rate,
            "prefill_tflops": prefill,
            **asdict(roofs),
        },
        output_json,
    )
