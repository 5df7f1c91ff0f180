"""``octavo bench serve``: how well does a server answer under load?"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from octavo.bench.config import DatasetConfig, LoadConfig
from octavo.cli.bench.shared import DatasetFlags, show_progress
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.serve import Result
    from octavo.text import Tokenizer

LOAD = Group("Server and load", sort_key=0)
LoadFlags = Annotated[LoadConfig, Parameter(name="*", group=LOAD, consume_multiple=True)]
_FAILURES_SHOWN = 10


def serve(
    *,
    load: LoadFlags = LoadConfig(),  # noqa: B008 - frozen
    dataset: DatasetFlags = DatasetConfig(),  # noqa: B008 - frozen
    api_key: Annotated[
        str | None, Parameter(env_var="OPENAI_API_KEY", show_default=False, show_env_var=True)
    ] = None,
) -> None:
    """Put load on an OpenAI server and print vLLM's figures.

    Any server will do, over http or https. Ends with 1 where every request fails.

    Parameters
    ----------
    api_key
        The server's key.
    """
    import uvloop

    from octavo.bench.dataset import make_samples
    from octavo.bench.serve import ServerError, run_load
    from octavo.bench.serve_figures import count_tokens, figures, result_block

    tokenizer = None if load.tokenizer is None else _open_tokenizer(load.tokenizer)
    samples = make_samples(dataset, dataset.num_prompts + load.num_warmups, tokenizer)
    measured, warmups = samples[: dataset.num_prompts], samples[dataset.num_prompts :]
    ignore_eos = dataset.dataset_name == "random" if load.ignore_eos is None else load.ignore_eos
    result = uvloop.run(
        run_load(
            load,
            measured,
            warmups,
            seed=dataset.seed,
            ignore_eos=ignore_eos,
            api_key=api_key,
            progress=show_progress,
        )
    )
    show_progress("")

    def count_text(text: str) -> int:
        assert tokenizer is not None
        return len(tokenizer.encode(text, add_special_tokens=False))

    output_lens = count_tokens(result.answers, count_text if tokenizer else None)
    found = figures(load, measured, result, output_lens)
    print(result_block(load, found))
    _report_failures(result)
    if load.save_result:
        print(f"octavo: saved {_save(load, dataset, result.model, found)}", file=sys.stderr)
    if not found["completed"]:
        raise ServerError("every request failed")


def _open_tokenizer(name: str) -> Tokenizer:
    from octavo.checkpoint import Checkpoint
    from octavo.config import EngineConfig
    from octavo.engine.build import open_model
    from octavo.text import load_tokenizer

    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").exists():  # its weights, if there are any, don't matter
        return load_tokenizer(Checkpoint(name, folder, "safetensors", {}, {}, {}))
    return load_tokenizer(open_model(EngineConfig(model=name, load_format="dummy")))


def _report_failures(result: Result) -> None:
    failures = Counter(answer.error for answer in result.answers if answer.error is not None)
    for error, count in failures.most_common(_FAILURES_SHOWN):
        print(f"octavo: {count} failed: {error}", file=sys.stderr)
    if len(failures) > _FAILURES_SHOWN:
        print(
            f"octavo: and {len(failures) - _FAILURES_SHOWN} more kinds of failure", file=sys.stderr
        )


def _save(load: LoadConfig, dataset: DatasetConfig, model: str, found: Mapping[str, Any]) -> Path:
    """Write the JSON that vLLM writes; its path."""
    from octavo.bench.serve_figures import DETAILS

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    setup = {
        "date": now,
        "endpoint_type": load.backend,
        "backend": load.backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": load.tokenizer,
        "num_prompts": dataset.num_prompts,
        **load.metadata_items,
        "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
        "burstiness": "inf" if load.burstiness == math.inf else load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    kept = {key: value for key, value in found.items() if load.save_detailed or key not in DETAILS}
    concurrency = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    name = load.result_filename or (
        f"{load.backend}-{load.request_rate}qps{concurrency}-{model.split('/')[-1]}-{now}.json"
    )
    path = Path(load.result_dir or os.curdir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**setup, **kept}), encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"the result can't be written to {path}: {problem}") from problem
    return path
