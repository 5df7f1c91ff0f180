"""Which tiles of the deterministic mode's products of more than one row are fastest:
kernels/linear_fixed/tiles.py.

    python bench/gpu_fixed.py [--rows 2,8,16,32,64,128,256] [--context 192] [--budget-s 100]

A captured chain of a decode step's five kernels a layer, in Qwen3-0.6B's shapes, random weights and
histories. In two rounds each product in turn takes the tile with which the chain is shortest. Every
tile's rows must have the bits that the kernel for one row gives them. us a layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median

import torch
import triton
from gpu_decode import BLOCK_SIZE, MODELS, attention_spec

from octavo.attention.spec import DEFAULT_SPLIT_TOKENS
from octavo.host import granted_cores
from octavo.kernels.linear_fixed import fused
from octavo.kernels.linear_fixed.tiles import Wide, choose_wide
from octavo.kernels.rope_attention.triton import choose_cut, make_scratch, rope_attention
from octavo.runtime.cuda_compile import compile_kernels, note_kernels

HALF = torch.bfloat16
SPEC = MODELS["0.6b"]
SHAPES = {  # weight rows and columns
    "linear": (SPEC.q_size + 2 * SPEC.kv_size, SPEC.hidden_size),
    "out": (SPEC.hidden_size, SPEC.q_size),
    "gate_up": (2 * SPEC.intermediate_size, SPEC.hidden_size),
    "add": (SPEC.hidden_size, SPEC.intermediate_size),
}
EPS = 1e-6
Chosen = dict[str, Wide]


def tiles(name: str, num_rows: int) -> list[Wide]:
    """Those that could be good for so many rows."""
    acrosses = {"linear": (1,), "gate_up": (1, 2)}.get(name, (1, 2, 4))
    most = min(64, max(8, 1 << (num_rows - 1).bit_length()))
    found = []
    for across, tokens, shared_kb in product(acrosses, (8, 16, 32, 64), (72, 108, 200)):
        if tokens * across <= 64 and most // 4 <= tokens <= most and -(-num_rows // tokens) <= 8:
            found.append(Wide(across, tokens, shared_kb))
    return found


def random(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * 0.03).to(HALF)


def launch(name: str, x, squares, weight, out, stream, wide: Wide | None) -> None:
    if name == "linear":
        fused.norm_linear(x, squares, weight, out, eps=EPS, wide=wide)
    elif name == "gate_up":
        fused.norm_gate_up(x, squares, weight, out, eps=EPS, wide=wide)
    else:
        fused.linear_add(x, weight, *stream, wide=wide)


class Chain:
    """The chain for so many rows of so many keys."""

    def __init__(self, layers, num_rows: int, context: int) -> None:
        self.layers, self.num_rows = layers, num_rows
        self.spec = replace(
            attention_spec(SPEC), split_mode="fixed", split_tokens=DEFAULT_SPLIT_TOKENS
        )
        self.cut = choose_cut(self.spec, num_rows, context)
        blocks = num_rows * -(-context // BLOCK_SIZE)
        self.caches = [
            [random(blocks, BLOCK_SIZE, SPEC.num_kv_heads, 128) for _ in range(2)] for _ in layers
        ]
        table = torch.randperm(blocks, device="cuda").int().view(num_rows, -1)
        self.tables = (
            table,
            torch.full((num_rows,), context, dtype=torch.int32, device="cuda"),
            (table[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE),
            *torch.rand(2, context + 1, 64, device="cuda"),
        )
        self.scratch = make_scratch(self.spec, num_rows, 33)
        most, hidden = 256, SPEC.hidden_size
        self.x = torch.randn(most, hidden, device="cuda")[:num_rows]
        self.h = random(most, hidden)[:num_rows]
        self.squares = torch.rand(most, fused.square_columns(hidden, 0, 1), device="cuda")[
            :num_rows
        ]
        self.qkv, self.attention, self.ffn = (
            random(most, n)[:num_rows]
            for n in (SHAPES["linear"][0], SPEC.q_size, SPEC.intermediate_size)
        )
        self.norm = torch.ones(hidden, device="cuda")
        self.head_norm = torch.ones(128, device="cuda")

    def run(self, chosen: Chosen, left_out: str = "") -> None:
        stream = (self.x, self.norm, self.h, self.squares)
        for layer, caches in zip(self.layers, self.caches, strict=True):
            for name, y, out in (
                ("linear", self.h, self.qkv),
                ("out", self.attention, None),
                ("gate_up", self.h, self.ffn),
                ("add", self.ffn, None),
            ):
                if name != left_out:
                    launch(name, y, self.squares, layer[name], out, stream, chosen[name])
                if name == "linear" and left_out != "attention":
                    rope_attention(
                        self.spec,
                        self.qkv,
                        *caches,
                        *self.tables,
                        self.attention,
                        cut=self.cut,
                        scratch=self.scratch,
                        q_norm=self.head_norm,
                        k_norm=self.head_norm,
                        eps=EPS,
                    )

    def race(self, runners: Sequence[tuple[Chosen, str]], rounds: int = 5) -> list[float]:
        """us a layer, medians of rounds in which they take turns."""
        graphs = []
        torch.cuda.synchronize()
        for runner in runners:
            with torch.cuda.stream(torch.cuda.Stream()):
                self.run(*runner)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                self.run(*runner)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: list[list[float]] = [[] for _ in runners]
        for _ in range(rounds + 1):
            for graph, found in zip(graphs, times, strict=True):
                graph.replay()  # while it runs, the host gets ahead
                begin.record()
                for _ in range(4):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end) * 1e3 / 4 / len(self.layers))
        return [median(found[1:]) for found in times]

    def search(self, deadline: float) -> Chosen:
        best = {name: default(name, self.num_rows) for name in SHAPES}
        order: dict[str, list[Wide]] = {}
        for turn, one in product(range(2), SHAPES):
            if time.monotonic() > deadline:
                break
            options = order[one] if turn else tiles(one, self.num_rows)
            times = self.race([(best | {one: wide}, "") for wide in options])
            ranks = sorted(range(len(options)), key=times.__getitem__)
            best[one] = options[ranks[0]]
            order[one] = [options[i] for i in ranks[:4]]
            shown = [(tuple(vars(options[i]).values()), round(times[i], 2)) for i in ranks[:7]]
            print(f"{self.num_rows} {one}: {shown}", flush=True)
        return best

    def stages(self, chosen: Chosen) -> dict[str, float]:
        """What is saved without a stage."""
        names = ("", *SHAPES, "attention")
        times = self.race([(chosen, name) for name in names], 7)
        saved = {
            name: round(times[0] - us, 2) for name, us in zip(names[1:], times[1:], strict=True)
        }
        return {"all": round(times[0], 2)} | saved


def default(name: str, num_rows: int) -> Wide:
    side = {"linear": 1, "gate_up": 2}.get(name, 4)
    return choose_wide("add" if name == "out" else name, num_rows, side)


def check(name: str, wide: Wide) -> str:
    """Whether rows have the bits of one row alone, and the error of all."""
    (n, k), rows = SHAPES[name], 2 * wide.tokens + 3
    weight, x = random(n, k), random(rows, k) * 30
    squares = torch.rand(rows, 64, device="cuda") * k / 32
    stream = [torch.randn(rows, n, device="cuda"), torch.rand(n, device="cuda")]
    stream += [random(rows, n), torch.full((rows, n // 16), torch.nan, device="cuda")]

    def results(part: slice, wide: Wide | None) -> list[torch.Tensor]:
        own = [stream[0][part].clone(), stream[1], *(one[part].clone() for one in stream[2:])]
        out = torch.full_like(x[part, :1].expand(-1, n), torch.nan).contiguous()
        out = out[:, : n // 2].contiguous() if name == "gate_up" else out
        launch(name, x[part], squares[part], weight, out, own, wide)
        return [own[0], *own[2:]] if name in ("out", "add") else [out]

    whole = results(slice(0, rows), wide)
    for row in (0, 1, wide.tokens - 1, wide.tokens, rows - 1):
        for number, (a, b) in enumerate(
            zip(results(slice(row, row + 1), None), whole, strict=True)
        ):
            if not torch.equal(a[0], b[row]):
                off = (a[0].double() - b[row].double()).norm() / a[0].double().norm()
                return f"WRONG {name} {wide} row {row}, result {number}: {float(off):.2e}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="64,16,256,32,128,2", type=lambda text: text.split(","))
    parser.add_argument("--context", default=192, type=int)
    parser.add_argument("--budget-s", default=100, type=float)
    parser.add_argument("--no-search", dest="search", action="store_false")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    rows = [int(count) for count in arguments.rows]
    jobs = [
        (name, wide)
        for name in SHAPES
        for wide in {w for count in rows for w in tiles(name, count)}
    ]

    def all_of_them() -> None:
        for name, wide in jobs:
            check(name, wide)

    target = triton.runtime.driver.active.get_current_target()
    compile_kernels(note_kernels(all_of_them), target, granted_cores())
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    with torch.inference_mode():
        torch.manual_seed(0)
        wrong = [found for name, wide in jobs if (found := check(name, wide))]
        print(f"{len(jobs)} tiles, {len(wrong)} wrong", *wrong[:12], sep="\n", flush=True)
        layers = [{name: random(*shape) for name, shape in SHAPES.items()} for _ in range(28)]
        for count in rows:
            if time.monotonic() > deadline:
                break
            chain = Chain(layers, count, arguments.context)
            chosen = {name: default(name, count) for name in SHAPES}
            if arguments.search and count > 1:
                chosen = chain.search(deadline)
            print(f"{count} rows: {chosen}\n  {chain.stages(chosen)}", flush=True)
            del chain


if __name__ == "__main__":
    main()
