"""What several benchmarks share: flags, progress, the roof, the last line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from octavo.bench.config import DatasetConfig
from octavo.cli.options import ENGINE
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.roof import Roofs

DATASET = Group("Dataset", sort_key=1)
DatasetFlags = Annotated[DatasetConfig, Parameter(name="*", group=DATASET)]

Several = Parameter(consume_multiple=True, negative=())

# The model is an argument, --seed the benchmark's.
_ALL_BUT = re.compile("^(?!(model|seed)$)")
BenchEngineFlags = Annotated[EngineConfig, Parameter(name="*", group=ENGINE, parse=_ALL_BUT)]


def check_counts(**counts: int) -> None:
    """Raise ConfigError for one below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}, it must be at least 1")


def check_length(longest: int, max_model_len: int) -> None:
    """Raise ConfigError where prompt and answer don't fit."""
    if longest > max_model_len:
        raise ConfigError(
            f"prompt and answer take up to {longest} tokens, but the model has room for "
            f"{max_model_len}; ask for less, or raise max_model_len"
        )


def show_progress(doing: str) -> None:
    """Say on a terminal what is being done; an empty text wipes it away."""
    if sys.stderr.isatty():
        print(f"\r\033[K{doing}", end="", file=sys.stderr, flush=True)


def roof_line(
    what: str,
    tokens_per_s: float,
    roofs: Roofs,
    *,
    gb_s: float | None,
    tflops: float,
) -> str:
    """A speed beside the shares of memory's bandwidth (unless ``gb_s`` is None) and of the matrix
    rate that it takes."""
    line = f"{what}: {tokens_per_s:,.1f} tok/s"
    if gb_s is not None:
        line += f", {gb_s / roofs.read_gb_s:.0%} of what this memory can do "
        line += f"({gb_s:,.1f} of {roofs.read_gb_s:,.1f} GB/s)"
    name, unit = ("int8", "TOP/s") if roofs.matmul_dtype == "int8" else ("matrix", "TFLOP/s")
    rate = roofs.matrix_tflops
    return f"{line}, {tflops / rate:.1%} of the {name} rate ({tflops:,.3g} of {rate:,.3g} {unit})"


def print_json(found: dict[str, Any], output_json: Path | None) -> None:
    """The last line; the same into a file, if there is to be one."""
    line = json.dumps(found)
    if output_json is not None:
        try:
            output_json.write_text(line + "\n", encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"{output_json} can't be written: {problem}") from problem
    print(line)
