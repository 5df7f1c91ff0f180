"""``octavo bench attention``: decode attention by itself."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from octavo.cli.bench.shared import Several
from octavo.cli.tables import print_table
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.attention import Cell
    from octavo.config import SplitMode


def attention(
    *,
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto",
    backend: Annotated[tuple[str, ...], Several] = (),
    batch: Annotated[tuple[int, ...], Several] = (1, 4, 16),
    context: Annotated[tuple[int, ...], Several] = (512, 2048, 8192, 32_768),
    heads: Annotated[tuple[str, ...], Several] = ("16/8x128",),
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    seconds: float = 0.3,
    plot: Path | None = None,
) -> None:
    """Time decode attention: backend by heads, batch and context.

    Keys and values come from memory, never from a cache. Ends with one line of JSON.

    Parameters
    ----------
    device
        Where to measure.
    backend
        Attention candidates to measure; all that can run on the device if left out.
    batch
        Rows in a step.
    context
        Tokens of each row's history.
    heads
        Query heads / KV heads x head size.
    kv_cache_dtype
        What keys and values are stored in; auto is float32 on a CPU and bfloat16 elsewhere.
    seconds
        Time for each measurement.
    plot
        Draw time against context into this .svg file, with splitting and without.
    """
    from octavo.attention.candidates import ORDER
    from octavo.bench.attention import bench_attention, decode_backends, parse_heads
    from octavo.engine.build import choose_device

    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"a plot is an SVG picture, but {plot} doesn't end in .svg")
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"there is no folder {plot.parent} for the plot")
    for name in backend:
        if name not in ORDER["decode"]:
            raise ConfigError(
                f"attention backend {name!r} doesn't decode; those that do are "
                f"{', '.join(ORDER['decode'])}"
            )
    for flag, numbers in (("batch", batch), ("context", context)):
        if min(numbers, default=0) < 1:
            raise ConfigError(f"{flag} is {list(numbers)}, each must be at least 1")
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds is {seconds:g}, it must be above 0 and finite")
    shapes = [parse_heads(text) for text in heads]
    where = device if device == "npu" else choose_device(EngineConfig(device=device))
    from octavo.verify.report import machine
    from octavo.verify.timing import read_bandwidth

    read_gb_s = read_bandwidth(where)
    split_kv: Sequence[SplitMode] = ("auto",) if plot is None else ("auto", "off")
    cells: list[Cell] = []
    for found in bench_attention(
        where,
        backend or decode_backends(where),
        shapes,
        sorted(set(batch)),
        sorted(set(context)),
        split_kv=split_kv,
        kv_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
        seconds=seconds,
        read_gb_s=read_gb_s,
    ):
        if isinstance(found, str):
            print(f"octavo: left out: {found}", file=sys.stderr)
        else:
            cells.append(found)
            _show_progress(found)
    if not cells:
        raise ConfigError("nothing was measured: every combination was left out")
    _print_table(f"decode attention on {where}, read bandwidth {read_gb_s:,.0f} GB/s", cells)
    if plot is not None:
        from octavo.bench.plot import plot_attention

        plot.write_text(plot_attention(cells, f"Decode attention on {where}"), encoding="utf-8")
    print(
        json.dumps(
            {
                "bench": "attention",
                "device": where,
                "machine": machine(where),
                "read_gb_s": round(read_gb_s, 1),
                "cells": [asdict(cell) for cell in cells],
            }
        )
    )


def _show_progress(cell: Cell) -> None:
    if sys.stderr.isatty():
        print(
            f"\r\033[K{cell.backend} {cell.heads} {cell.batch} x {cell.context}",
            end="",
            file=sys.stderr,
        )


def _print_table(title: str, cells: Sequence[Cell]) -> None:
    from rich import box
    from rich.table import Table

    columns = ("backend", "heads", "batch", "context", "splits", "µs", "GB/s", "of read")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    above: tuple[str, int] | None = None
    for cell in cells:
        if above != (cell.heads, cell.batch):
            table.add_section()
        above = cell.heads, cell.batch
        splits = "?" if cell.splits is None else f"{cell.splits}"
        table.add_row(
            cell.backend,
            cell.heads,
            f"{cell.batch}",
            f"{cell.context:,}",
            "off" if cell.split_kv == "off" else splits,
            f"{cell.us:,.1f}",
            f"{cell.gb_s:,.1f}",
            f"{cell.share:.0%}",
        )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print_table(table)
