"""Whose products of many rows are faster, and with which tiles: kernels/linear_batch/tiles.py.

    python bench/gpu_products.py [--models 0.6b,8b] [--rows 64,128,256]

A stage's time depends on its neighbours, so what is timed is a captured chain of a decode step's
kernels in the models' real shapes, random weights, some layers deep and without attention. In two
rounds each product in turn takes the tile, or the library, with which the chain is shortest. Every
tile's result is compared with a product in float32 first. us a layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F
import triton

import octavo.kernels.linear_batch.triton as linear_batch
from octavo.host import granted_cores
from octavo.kernels.gated.triton import gated
from octavo.kernels.linear_batch.tiles import Tile, WideTile, choose_tile
from octavo.kernels.linear_batch.wide import MOST_ROWS, STEP
from octavo.kernels.norm.triton import add_rms_norm
from octavo.kernels.rope_write.triton import rope_write
from octavo.kernels.triton_launch import with_room
from octavo.runtime.cuda_compile import compile_kernels, note_kernels
from octavo.runtime.cuda_linears import in_parts

HALF = torch.bfloat16
MOST_BYTES = 200 << 10  # of a block that has a multiprocessor for itself; or two fit one
KEPT = 6  # of a product's tiles for the second round
PRODUCTS = ("gate_up", "down", "qkv", "out")
Chosen = dict[str, Tile | WideTile | None]  # None: the library's


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int

    def weight(self, name: str) -> tuple[int, int]:
        """Rows and columns."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * 128, self.hidden),
            "out": (self.hidden, self.heads * 128),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }[name]


SHAPES = {"0.6b": Shape(1024, 16, 8, 3072, 28), "8b": Shape(4096, 32, 8, 12288, 8)}


def tiles(shape: Shape, name: str, num_rows: int) -> list[Tile | WideTile]:
    """Those that could be good for so many rows."""
    (n, k), weights = shape.weight(name), 2 if name == "gate_up" else 1
    found: list[Tile | WideTile] = []
    for groups, parts in product((1, 2, 3), (1, 2, 4)):
        blocks = n / (groups * 64) * parts
        whole = blocks == int(blocks) and k % (parts * STEP) == 0 and (weights == 1 or parts == 1)
        if whole and 90 <= blocks <= 132 and num_rows <= MOST_ROWS:
            found.append(WideTile(groups, parts))
    rows = (32, 64) if shape.hidden <= 1024 else (64, 128)
    of_tokens = [64] if num_rows <= 64 else [64, 128] if num_rows <= 128 else [64, 128, 256]
    for tokens, height, parts, step in product(of_tokens, rows, (1, 2, 4), (64, 128)):
        blocks = n // weights // height * parts
        sums = height * weights * tokens // (32 * min(8, tokens // 16))  # a thread
        whole = n % (height * weights) == 0 and k % (parts * step) == 0
        if not whole or (weights > 1 and parts > 1) or not 48 <= blocks <= 260 or sums > 128:
            continue
        stage_bytes, steps = (height * weights + tokens) * step * 2, k // parts // step
        for most in (MOST_BYTES, MOST_BYTES // 2 + (8 << 10)):
            tile = Tile(height, tokens, parts, step, min(steps, most // stage_bytes))
            if tile.stages >= min(3, steps) and tile not in found:
                found.append(tile)
    return found


def ours(name: str, x: torch.Tensor, weight: torch.Tensor, tile: Tile | WideTile) -> torch.Tensor:
    if name == "gate_up":
        return linear_batch.gated_batch(x, weight, "silu", tile)
    return linear_batch.linear_batch(x, weight, tile)


class Model:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers = [
            {name: random(*shape.weight(name)) for name in PRODUCTS} for _ in range(shape.layers)
        ]
        self.norm = torch.ones(shape.hidden, device="cuda")
        self.qk_norm = torch.ones(shape.heads + shape.kv_heads, 128, device="cuda")
        self.cos, self.sin = torch.randn(2, 4096, 64, device="cuda")
        self.caches = [random(512, 16, shape.kv_heads, 128) for _ in range(2)]

    def chain(self, x: torch.Tensor, chosen: Chosen) -> None:
        """What attention would give is there from the start."""
        positions = torch.arange(len(x), device="cuda", dtype=torch.int32)
        attention = with_room(x, len(x), self.shape.heads * 128, dtype=HALF).normal_()
        delta = None

        def added(name: str, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            tile = chosen[name]
            return ours(name, y, weight, tile) if tile else in_parts(y, weight, None)

        for layer in self.layers:
            normed = add_rms_norm(x, self.norm, 1e-6, delta=delta, dtype=HALF)
            tile = chosen["qkv"]
            weight = layer["qkv"]
            qkv = ours("qkv", normed, weight, tile) if tile else F.linear(normed, weight)
            tables = (positions, self.cos, self.sin, *self.caches, positions)
            heads = {"num_heads": self.shape.heads, "qk_norm": self.qk_norm, "eps": 1e-6}
            rope_write(qkv, *tables, **heads)
            delta = added("out", attention, layer["out"])
            normed = add_rms_norm(x, self.norm, 1e-6, delta=delta, dtype=HALF)
            tile, weight = chosen["gate_up"], layer["gate_up"]
            if tile:
                ffn = ours("gate_up", normed, weight, tile)
            else:
                ffn = gated(F.linear(normed, weight), "silu")
            delta = added("down", ffn, layer["down"])

    def race(self, num_rows: int, runners: list[Chosen], rounds: int) -> list[float]:
        """us a layer, medians of rounds in which they take turns."""
        x = torch.randn(num_rows, self.shape.hidden, device="cuda")
        graphs = []
        for chosen in runners:
            with torch.cuda.stream(torch.cuda.Stream()):
                self.chain(x, chosen)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                self.chain(x, chosen)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: list[list[float]] = [[] for _ in runners]
        for _ in range(rounds + 1):
            for graph, found in zip(graphs, times, strict=True):
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end) * 1e3 / self.shape.layers)
        return [median(found[1:]) for found in times]

    def check(self, name: str, tile: Tile | WideTile) -> float:
        """Its error, relative."""
        weight = self.layers[0][name]
        rows = MOST_ROWS - 5 if isinstance(tile, WideTile) else tile.tokens + 5
        x = with_room(weight, rows, weight.shape[1]).normal_()
        wanted = x.float() @ weight.float().t()
        if name == "gate_up":
            gate, up = wanted.chunk(2, 1)
            wanted = F.silu(gate) * up
        found = ours(name, x, weight, tile).float()
        found = found.sum(0) if found.dim() == 3 else found
        return float((found - wanted).norm() / wanted.norm())

    def search(self, name: str, num_rows: int) -> Chosen:
        best: Chosen = dict.fromkeys(PRODUCTS)
        order: dict[str, list[Tile | WideTile | None]] = {}
        for turn, one in product(range(2), PRODUCTS):
            options = order[one] if turn else [None, *tiles(self.shape, one, num_rows)]
            times = self.race(num_rows, [best | {one: tile} for tile in options], 6)
            ranks = sorted(range(len(options)), key=times.__getitem__)
            best[one] = options[ranks[0]]
            order[one] = [options[i] for i in ranks[:KEPT]]
            if None not in order[one]:
                order[one].append(None)
            library = times[options.index(None)]
            print(f"{name} {num_rows} {one}: {times[ranks[0]]:.1f} {best[one]}, the library's")
            print(f"    {library:.1f}, next {[(options[i], times[i]) for i in ranks[1:3]]}")
        return best


def random(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * 0.02).to(HALF)


def compile_tiles(jobs: Sequence[tuple[Shape, str, Tile | WideTile]]) -> None:
    """Triton's into its cache, on all cores."""

    def launch() -> None:
        for shape, name, tile in jobs:
            if isinstance(tile, WideTile):
                continue
            n, k = shape.weight(name)
            ours(name, random(tile.tokens, k), torch.empty(n, k, device="cuda", dtype=HALF), tile)

    target = triton.runtime.driver.active.get_current_target()
    compile_kernels(note_kernels(launch), target, granted_cores())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="0.6b,8b", type=lambda text: text.split(","))
    parser.add_argument("--rows", default="64,128,256", type=lambda text: text.split(","))
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows]
    jobs = [
        (SHAPES[name], one, tile)
        for name, one in product(arguments.models, PRODUCTS)
        for tile in {tile for count in rows for tile in tiles(SHAPES[name], one, count)}
    ]
    compile_tiles(jobs)
    with torch.inference_mode():
        for name in arguments.models:
            model = Model(SHAPES[name])
            errors = [model.check(one, tile) for shape, one, tile in jobs if shape is model.shape]
            print(f"{name}: errors of {len(errors)} tiles up to {max(errors):.4f}", flush=True)
            for count in rows:
                print(f"{name} {count}: best {model.search(name, count)}", flush=True)
            for count in (24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256):
                table: Chosen = {
                    one: choose_tile(*model.shape.weight(one), count, gated=one == "gate_up")
                    for one in PRODUCTS
                }
                before, now = model.race(count, [dict.fromkeys(PRODUCTS), table], 12)
                print(f"{name} {count}: the library's {before:.1f}, by the table {now:.1f}")
            del model
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
