"""``octavo bench kernels``: the products of a small decode step, each by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from octavo.cli.bench.shared import Several
from octavo.cli.options import Switch
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.kernels import Product

QWEN3 = (  # 0.6B, then 8B: QKV, O, gate and up, down, head
    "norm_linear:4096x1024",
    "linear_add:1024x2048",
    "norm_gate_up:6144x1024",
    "linear_add:1024x3072",
    "norm_linear:151936x1024",
    "norm_linear:6144x4096",
    "linear_add:4096x4096",
    "norm_gate_up:24576x4096",
    "linear_add:4096x12288",
    "norm_linear:151936x4096",
)


def kernels(
    *,
    weight: Annotated[tuple[str, ...], Several] = QWEN3,
    rows: Annotated[tuple[int, ...], Several] = (1, 2, 4, 8, 16),
    search: Switch = False,
    output: Path | None = None,
) -> None:
    """Time the fused products of decode steps beside the library's: kernel by weight and rows.

    Weights come from memory, never from a cache. Ends with one line of JSON. Needs an NVIDIA GPU of
    compute capability 9.0 or more.

    Parameters
    ----------
    weight
        Kernel (norm_linear, norm_gate_up, linear_add), then rows x columns of its weight.
    rows
        Activation rows, 1 to 16.
    search
        Try other tiles too; takes a dozen times as long.
    output
        With search: write the tiles that serve now, with the better ones in their places, to this
        file: in the repository src/octavo/kernels/linear/table.json.
    """
    from octavo.bench.kernels import bench_kernels, library_is_faster_from, parse_weight
    from octavo.kernels.linear.table import read_table, write_table

    if min(rows, default=0) < 1 or max(rows) > 16:
        raise ConfigError(f"rows is {list(rows)}, each must be from 1 to 16")
    weights = [parse_weight(text) for text in weight]
    if output is not None and not search:
        raise ConfigError("output takes the tiles that a search finds: add --search")
    if search and not {1, 2, 4, 8, 16}.issuperset(rows):
        raise ConfigError(f"rows is {list(rows)}, but tiles are listed for 1, 2, 4, 8 and 16 rows")
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise ConfigError(
            "bench kernels needs an NVIDIA GPU of compute capability 9.0 or more, and there is none"
        )
    from octavo.verify.report import machine
    from octavo.verify.timing import read_bandwidth

    read_gb_s = read_bandwidth("cuda")
    products = list(bench_kernels(weights, sorted(set(rows)), read_gb_s=read_gb_s, search=search))
    _print_table(f"products of a decode step, read bandwidth {read_gb_s:,.0f} GB/s", products)
    crossover = library_is_faster_from(products)
    for name, fewest in crossover.items():
        where = "at none of these rows" if fewest is None else f"from {fewest} rows on"
        print(f"{name}: the library's product alone is faster {where}")
    if output is not None:
        found = {product.key: product.tile for product in products}
        write_table((read_table() | found).items(), output)
    print(
        json.dumps(
            {
                "bench": "kernels",
                "machine": machine("cuda"),
                "read_gb_s": round(read_gb_s, 1),
                "library_faster_from": crossover,
                "products": [asdict(product) for product in products],
            }
        )
    )


def _print_table(title: str, products: Sequence[Product]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = ("kernel", "weight", "rows", "tile", "µs", "GB/s", "of read", "library", "ratio")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in ("kernel", "tile") else "right")
    for product in products:
        tile = product.tile
        early = f"{tile.early}+" if tile.early else ""
        table.add_row(
            product.kernel,
            f"{product.n:,} x {product.k:,}",
            f"{product.rows}",
            f"{tile.rows} x {tile.chunk}, {tile.num_warps} warps, {early}{tile.ahead} ahead",
            f"{product.us:,.1f}",
            f"{product.gb_s:,.0f}",
            f"{product.share:.0%}",
            f"{product.library_us:,.1f}",
            f"{product.library_us / product.us:.2f}",
        )
    Console(width=120).print(table)
