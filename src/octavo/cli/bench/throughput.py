"""``octavo bench throughput``: how many requests does an offline batch get through?"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from octavo.bench.config import DatasetConfig
from octavo.cli.bench.shared import (
    BenchEngineFlags,
    DatasetFlags,
    check_length,
    print_json,
    roof_line,
)
from octavo.cli.options import Model, Switch
from octavo.config import EngineConfig


def throughput(
    model: Model = None,
    /,
    *,
    dataset: DatasetFlags = DatasetConfig(),  # noqa: B008 - frozen
    disable_detokenize: Switch = False,
    output_json: Path | None = None,
    engine: BenchEngineFlags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Generate all prompts of a dataset at once, each answer to its full length.

    Random prompts are token ids. Ends with one line of JSON.

    Parameters
    ----------
    disable_detokenize
        Leave the answers' text out.
    output_json
        Also write the JSON to this file.
    """
    from octavo.bench.dataset import make_samples, random_id_samples
    from octavo.bench.roof import measure_roofs, read_cost
    from octavo.bench.throughput import measure_throughput
    from octavo.cli.loading import load

    cost = read_cost(replace(engine, model=model))
    llm = load(model, engine)
    if dataset.dataset_name == "random":
        samples = random_id_samples(dataset, dataset.num_prompts, cost.spec.vocab_size)
    else:
        samples = make_samples(dataset, dataset.num_prompts, llm.get_tokenizer())
    longest = max((sample.input_len or 0) + sample.output_len for sample in samples)
    check_length(longest, llm.report.max_model_len)
    from octavo.verify.report import machine

    roofs = measure_roofs(cost)
    found = measure_throughput(llm, samples, cost, detokenize=not disable_detokenize)
    num_tokens = found.prompt_tokens + found.output_tokens
    output_rate = found.output_tokens / found.seconds
    print(
        f"Throughput: {found.num_requests / found.seconds:.2f} requests/s, "
        f"{num_tokens / found.seconds:.2f} total tokens/s, {output_rate:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {found.prompt_tokens}")
    print(f"Total num output tokens:  {found.output_tokens}")
    print(roof_line("Output", output_rate, roofs, gb_s=found.gb_s, tflops=found.tflops))
    print_json(
        {
            "bench": "throughput",
            "model": llm.report.model,
            "device": cost.device,
            "machine": machine(cost.device),
            "elapsed_time": found.seconds,
            "num_requests": found.num_requests,
            "total_num_tokens": num_tokens,
            "requests_per_second": found.num_requests / found.seconds,
            "tokens_per_second": num_tokens / found.seconds,
            "output_tokens_per_second": output_rate,
            "num_steps": found.num_steps,
            "gb_s": found.gb_s,
            "tflops": found.tflops,
            **asdict(roofs),
        },
        output_json,
    )
