"""``octavo bench startup``: how long from a cold process to the first token?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from octavo.cli.bench.shared import BenchEngineFlags, check_counts, print_json, show_progress
from octavo.cli.options import Model
from octavo.cli.tables import print_table
from octavo.config import EngineConfig


def startup(
    model: Model = None,
    /,
    *,
    num_iters: int = 5,
    output_json: Path | None = None,
    engine: BenchEngineFlags = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Time fresh processes from their start to their first token, phase by phase.

    The first process counts too: it is the one that finds no file in the system's cache. Medians
    are of each phase, so they needn't add up. Ends with one line of JSON.

    Parameters
    ----------
    num_iters
        Processes to start, one after another.
    output_json
        Also write the JSON to this file.
    """
    check_counts(num_iters=num_iters)
    from octavo.bench.startup import measure_startup

    runs = []
    for number in range(1, num_iters + 1):
        show_progress(f"start {number} of {num_iters}")
        runs.append(measure_startup(replace(engine, model=model)))
    show_progress("")
    totals = [sum(run.values()) for run in runs]
    phases = {name: median(run[name] for run in runs) for name in runs[0]}
    _print_table(runs, phases, totals)
    print_json(
        {
            "bench": "startup",
            "model": model,
            "phases": phases,
            "total": median(totals),
            "totals": totals,
        },
        output_json,
    )


def _print_table(
    runs: list[dict[str, float]], phases: dict[str, float], totals: list[float]
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="start to first token, seconds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("phase")
    for column in ("median", "min", "max"):
        table.add_column(column, justify="right")
    for name, middle in phases.items():
        seconds = [run[name] for run in runs]
        table.add_row(name, f"{middle:.3f}", f"{min(seconds):.3f}", f"{max(seconds):.3f}")
    table.add_section()
    table.add_row("total", f"{median(totals):.3f}", f"{min(totals):.3f}", f"{max(totals):.3f}")
    print_table(table)
