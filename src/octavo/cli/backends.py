"""``octavo backends``: who computes attention here, and why. No weights are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.options import ENGINE, Model, Switch
from octavo.config import EngineConfig

# Those that choosing depends on ("engine" is the parameter that they are fields of).
_NAMES = re.compile(
    "^(engine|revision|device|dtype|kv_cache_dtype|exact|block_size|attention_backend"
    "|disable_attention_backend|split_kv|split_kv_tokens)$"
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
    """List the attention candidates for a model on this machine, and the reason for each verdict.

    Give the flags that you would give to run: they decide too.

    Parameters
    ----------
    as_json
        Print one JSON object instead of tables.
    """
    name, device, verdicts = _judge(model, engine)
    if as_json:
        print(json.dumps({"model": name, "device": device, "candidates": verdicts}))
    else:
        _print_table(f"{name} on {device}", verdicts)


def _judge(model: str | None, engine: EngineConfig) -> tuple[str, str, list[dict[str, Any]]]:
    """The model's name, the device, and a row for each candidate, phase and kind of layer."""
    from octavo.cache import kv_groups
    from octavo.engine.build import choose_attention, choose_device, open_model
    from octavo.models.families import spec_from_config

    checkpoint = open_model(replace(engine, model=model))
    spec = spec_from_config(checkpoint.config)
    groups, device = kv_groups(spec), choose_device(engine)
    verdicts = [
        {
            "phase": phase,
            "layers": len(group.layers),
            "window": group.window,
            "candidate": verdict.candidate,
            "state": verdict.state,
            "reason": verdict.reason,
        }
        for group, selection in zip(
            groups, choose_attention(engine, spec, groups, device), strict=True
        )
        for phase in ("prefill", "decode")
        for verdict in selection.verdicts[phase]
    ]
    return checkpoint.name, device, verdicts


def _print_table(title: str, verdicts: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "layers",
        "phase",
        "candidate",
        "",
        "why",
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    above: tuple[str, str] | None = None
    for one in verdicts:
        window = "" if one["window"] is None else f", window {one['window']:,}"
        place = f"{one['layers']}{window}", one["phase"]
        if place != above:
            table.add_section()
        table.add_row(
            *(("", "") if place == above else place),
            one["candidate"],
            one["state"],
            one["reason"],
            style=_STYLES[one["state"]],
        )
        above = place
    Console().print(table)
