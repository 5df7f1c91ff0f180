"""``octavo backends``: who computes here, and why. No weights are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.options import ENGINE, Model, Switch
from octavo.cli.tables import print_table
from octavo.config import EngineConfig

# Those that choosing depends on ("engine" is the parameter that they are fields of).
_NAMES = re.compile(
    "^(engine|revision|device|dtype|quantization|kv_cache_dtype|exact|block_size|enforce_eager"
    "|attention_backend|disable_attention_backend|deterministic|split_kv|split_kv_tokens)$"
)
Flags = Annotated[EngineConfig, Parameter(name="*", group=ENGINE, parse=_NAMES)]
_STYLES = {"chosen": "bold green", "possible": "default", "off": "yellow", "refused": "dim"}


def backends(
    model: Model = None,
    /,
    *,
    as_json: Annotated[Switch, Parameter(name="--json")] = False,
    engine: Flags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """List the runtimes for a model on this machine and the attention candidates of the one that
    serves, with the reason for each verdict.

    Give the flags that you would give to run: they decide too.

    Parameters
    ----------
    as_json
        Print one JSON object instead of tables.
    """
    from octavo.engine.build import describe_model, open_model
    from octavo.runtime.candidates import choose_runtime

    checkpoint = open_model(replace(engine, model=model))
    described = describe_model(engine, checkpoint)
    choice = choose_runtime(described)
    runtimes = [asdict(verdict) for verdict in choice.verdicts]
    candidates = [
        {"phase": phase, "layers": len(group.layers), "window": group.window, **asdict(verdict)}
        for group, selection in zip(described.groups, choice.selections, strict=True)
        for phase in ("prefill", "decode")
        for verdict in selection.verdicts[phase]
    ]
    if as_json:
        answer = {"model": checkpoint.name, "device": described.device}
        print(json.dumps({**answer, "runtimes": runtimes, "candidates": candidates}))
        return
    title = f"{checkpoint.name} on {described.device}"
    _print_table(f"{title}: runtimes", [("", "", each) for each in runtimes])
    _print_table(
        f"{title}: attention",
        [(_layers(each), each["phase"], each) for each in candidates],
    )


def _layers(candidate: dict[str, Any]) -> str:
    window = candidate["window"]
    return f"{candidate['layers']}" + ("" if window is None else f", window {window:,}")


def _print_table(title: str, rows: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """Rows of layers, phase and a verdict; what equals the row above it is left out."""
    from rich import box
    from rich.table import Table

    with_places = any(place for place, _, _ in rows)
    table = Table(
        *(("layers", "phase") if with_places else ()),
        "candidate",
        "",
        "why",
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    above: tuple[str, ...] | None = None
    for *place, one in rows:
        if above is not None and tuple(place) != above:
            table.add_section()
        shown = ("", "") if tuple(place) == above else place
        table.add_row(
            *(shown if with_places else ()),
            one["candidate"],
            one["state"],
            one["reason"],
            style=_STYLES[one["state"]],
        )
        above = tuple(place)
    print_table(table)
