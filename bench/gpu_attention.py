#!/usr/bin/env python3
"""Our Triton attention kernels on one CUDA GPU: right at full size, and how fast.

Decode is timed as in shared/probes/attn_peers.py, whose figures for other kernels stand in PEERS:
each launch from a CUDA graph, launch i of it on its own KV copy, so that the copies exceed the L2;
us is graph time over launches, median of the replays. Every cell and variant is first compared
with a float64 softmax. The read ceiling is measured in the same run.

    PYTHONPATH=src python3 bench/gpu_attention.py [--budget-s 300] [--out results.json]

Prints tables a person can read last; every figure is in the JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import octavo.kernels.split_attention.triton as split_attention
from octavo.attention.spec import AttentionSpec
from octavo.kernels.kv_store.triton import store_kv
from octavo.kernels.paged_prefill.triton import PrefillTuning, paged_prefill
from octavo.kernels.split_attention.triton import (
    Tuning,
    default_tuning,
    make_scratch,
    resident_slots,
    split_decode,
)

DEVICE = "cuda"
BF16 = torch.bfloat16
PAGE = 16
PEERS_CEILING = 4702.0  # GB/s in the run that took the figures below
# (query heads, context, batch): best paged kernel and cuDNN on contiguous K/V, microseconds.
PEERS = {
    (16, 2048, 1): (9.8, 8.6),
    (16, 2048, 4): (15.1, 14.3),
    (16, 2048, 16): (41.1, 34.8),
    (16, 2048, 64): (131.8, 122.6),
    (16, 32768, 1): (42.6, 38.6),
    (16, 32768, 4): (130.3, 124.7),
    (16, 32768, 16): (482.9, 463.9),
    (16, 32768, 64): (1884.6, 1874.7),
    (32, 512, 1): (7.8, 8.8),
    (32, 512, 4): (9.5, 9.3),
    (32, 512, 16): (12.8, 11.7),
    (32, 512, 64): (42.6, 37.1),
    (32, 2048, 1): (9.8, 8.8),
    (32, 2048, 4): (15.4, 14.8),
    (32, 2048, 16): (41.4, 35.0),
    (32, 2048, 64): (131.8, 123.0),
    (32, 8192, 1): (16.7, 15.6),
    (32, 8192, 4): (42.4, 38.2),
    (32, 8192, 16): (132.0, 120.6),
    (32, 8192, 64): (483.0, 471.7),
    (32, 32768, 1): (43.1, 38.9),
    (32, 32768, 4): (131.5, 125.1),
    (32, 32768, 16): (484.1, 464.4),
    (32, 32768, 64): (1891.4, 1877.1),
    (32, 131072, 1): (133.1, 125.5),
    (32, 131072, 4): (485.9, 471.2),
    (32, 131072, 16): (1900.2, 1844.2),
    (32, 131072, 64): (7480.5, 7465.7),
    (64, 2048, 1): (9.9, 9.0),
    (64, 2048, 4): (15.3, 15.3),
    (64, 2048, 16): (41.7, 35.1),
    (64, 2048, 64): (132.7, 123.9),
    (64, 32768, 1): (43.5, 39.1),
    (64, 32768, 4): (132.1, 125.7),
    (64, 32768, 16): (484.9, 464.5),
    (64, 32768, 64): (1881.2, 1872.0),
}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


@dataclass(frozen=True)
class Cell:
    shape: Shape
    label: str
    lens: tuple[int, ...]

    @property
    def peers(self) -> tuple[float, float]:
        key = (self.shape.heads, max(self.lens), len(self.lens))
        even = len(set(self.lens)) == 1 and self.shape.head_dim == 128
        return PEERS.get(key, (math.nan, math.nan)) if even else (math.nan, math.nan)


@dataclass(frozen=True)
class Variant:
    """``changes`` of the default tuning; ``slots``: times the resident blocks."""

    mode: str = "auto"
    split_tokens: int = 512
    slots: int = 1
    changes: tuple[tuple[str, int], ...] = ()

    def tuning(self, spec: AttentionSpec) -> Tuning:
        return replace(default_tuning(spec), **dict(self.changes))


LLAMA = Shape(32, 8, 128)
NEVER = 1 << 12  # no line is so short that it is not cut
AUTO = {"auto": Variant()}  # on every cell
FIXED = {  # from 2K on
    "fix256": Variant("fixed", 256),
    "fix512": Variant("fixed", 512),
}
OFF = {"off": Variant("off")}  # up to 2K
MORE = {
    "plain": Variant(changes=(("dependent", 0),)),
    "s3": Variant(changes=(("num_stages", 3),)),  # three blocks an SM
    "cut": Variant(changes=(("uncut", NEVER),)),
    "x2": Variant(slots=2),  # two waves: the hardware balances
    "fix128": Variant("fixed", 128),
    "leaf64": Variant("fixed", 256, changes=(("leaves", 64),)),
    "fold8": Variant("fixed", 256, changes=(("fold", 8),)),
}
MORE_CELLS = [(512, 1), (512, 4), (512, 16), (512, 64), (2048, 1), (2048, 4), (2048, 16)]
MORE_CELLS += [(2048, 64), (8192, 1), (8192, 16), (8192, 18), (8192, 36), (32768, 1)]
MORE_CELLS += [(131072, 1)]


def cells() -> list[Cell]:
    """The most telling first: a run that is out of time leaves out the rest."""
    even = [Cell(Shape(h, 8, 128), str(n), (n,) * b) for h, n, b in PEERS]
    even += [Cell(Shape(16, 8, 128), str(n), (n,) * b) for n in (512, 8192) for b in (1, 16)]
    even += [Cell(Shape(16, 8, 128), "131072", (131072,))]
    even += [Cell(LLAMA, "8192", (8192,) * b) for b in (5, 18, 36)]  # lines fill no whole waves
    even += [Cell(Shape(9, 3, 64), str(n), (n,) * b) for n in (512, 8192, 131072) for b in (1, 16)]
    draw = random.Random(0)
    uneven = [
        Cell(LLAMA, "skewed", (131072,) + (4096,) * 31),
        Cell(LLAMA, "100-2K", tuple(draw.randint(100, 2048) for _ in range(64))),
        Cell(LLAMA, "100-1K", tuple(draw.randint(100, 1024) for _ in range(256))),
        Cell(LLAMA, "skewed", (131072,) + (4096,) * 63),
        Cell(LLAMA, "skewed", (500,) * 255 + (32768,)),
        Cell(LLAMA, "1K-100K", tuple(draw.randint(1000, 100_000) for _ in range(8))),
    ]
    ours = [c for c in even if c.shape == LLAMA]
    others = [c for c in even if c.shape != LLAMA]
    return (
        sorted(ours, key=lambda c: sum(c.lens)) + uneven + sorted(others, key=lambda c: sum(c.lens))
    )


def variants_of(cell: Cell) -> dict[str, Variant]:
    longest = max(cell.lens)
    chosen = AUTO | (FIXED if longest >= 2048 else {}) | (OFF if longest <= 2048 else {})
    if cell.shape == LLAMA and ((longest, len(cell.lens)) in MORE_CELLS or len(set(cell.lens)) > 1):
        chosen |= MORE
    return chosen


PREFILL = {
    "m128t64w8s3": PrefillTuning(128, 64, 8, 3),
    "m128t128w8s2": PrefillTuning(128, 128, 8, 2),
    "m128t32w8s3": PrefillTuning(128, 32, 8, 3, registers=128),
}


def compile_ahead() -> float:
    """Fill Triton's cache from many processes; seconds it took. What fails, fails again later."""
    began = time.time()
    wanted = {}
    for cell in cells():
        for v in variants_of(cell).values():
            spec = spec_of(cell.shape, v)
            wanted[spec, v.tuning(spec), v.slots, len(cell.lens)] = None
    jobs = [(_compile_decode, *key) for key in wanted]
    jobs += [(_compile_prefill, tuning) for tuning in PREFILL.values()]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with suppress(Exception), multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map_async(_compile, jobs, chunksize=1).get(timeout=90)
    return time.time() - began


def _compile(job: tuple) -> None:
    with suppress(Exception):
        job[0](*job[1:])


def _compile_decode(spec: AttentionSpec, tuning: Tuning, waves: int, rows: int) -> None:
    slots = waves * resident_slots(spec, tuning)
    k = torch.zeros(1, PAGE, spec.num_kv_heads, spec.head_dim, dtype=BF16, device=DEVICE)
    table = torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(rows, spec.num_heads, spec.head_dim, dtype=BF16, device=DEVICE)
    scratch = make_scratch(spec, rows, 1, slots, tuning)
    split_decode(spec, q, k, k, table, lens, num_slots=slots, scratch=scratch, tuning=tuning)


def _compile_prefill(tuning: PrefillTuning) -> None:
    spec = replace(spec_of(LLAMA), phase="prefill")
    k = torch.zeros(1, PAGE, 8, 128, dtype=BF16, device=DEVICE)
    q = torch.zeros(16, 32, 128, dtype=BF16, device=DEVICE)
    table = torch.zeros(1, 16, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)
    paged_prefill(spec, q, k, k, table, starts[1:], starts, tuning=tuning)


@triton.jit
def _read_kernel(x, sums, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL)
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(UNROLL):
        total += tl.load(x + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_ceiling(pool: torch.Tensor) -> float:
    """GB/s of a kernel that only reads 4 GB."""
    x = pool.view(torch.int32)[: 1 << 30]
    best = 0.0
    for block, unroll, warps in ((2048, 8, 4), (4096, 8, 8), (4096, 4, 8)):
        n = x.numel() // (block * unroll)
        sums = torch.empty(n, dtype=torch.int32, device=DEVICE)

        def read(_: int, n=n, sums=sums, block=block, unroll=unroll, warps=warps) -> None:
            _read_kernel[(n,)](x, sums, BLOCK=block, UNROLL=unroll, num_warps=warps)

        best = max(best, x.numel() * 4 / graph_time(read, 2, 60) / 1e3)
    return best


def graph_time(launch, n: int, target_ms: float) -> float:
    """Microseconds a launch: ``launch(i)`` for i < n captured once, median of the replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(0)
        launch(n - 1)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            launch(i)
    graph.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = max(5, min(50, int(target_ms / max(start.elapsed_time(end), 1e-3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2] * 1000 / n


class Bench:
    def __init__(self, budget_s: float, out: str) -> None:
        self.began = time.time()
        self.budget_s = budget_s
        self.out = out
        self.records: list[dict] = []
        self.failed: set[str] = set()
        self.slots: dict = {}
        compiling = compile_ahead()
        numbers = max(sum(c.lens) * c.shape.kv_heads * c.shape.head_dim for c in cells())
        numbers = max(numbers, 1 << 31)  # the read ceiling's 4 GB
        self.k_pool = torch.empty(numbers, dtype=BF16, device=DEVICE).normal_()
        self.v_pool = torch.empty(numbers, dtype=BF16, device=DEVICE).normal_()
        self.ceiling = read_ceiling(self.k_pool)
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
            f"{triton.__version__}, read ceiling {self.ceiling:.0f} GB/s, compiled ahead "
            f"{compiling:.0f} s",
            flush=True,
        )
        self.emit(
            kind="machine",
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            triton=triton.__version__,
            ceiling_gbs=round(self.ceiling, 1),
        )

    def emit(self, **record) -> None:
        self.records.append(record)
        if self.out:
            Path(self.out).write_text(json.dumps(self.records))

    def left(self) -> float:
        return self.budget_s - (time.time() - self.began)

    def guarded(self, name: str, work) -> None:
        """A failing variant prints once and the others go on; a lost device ends the run."""
        try:
            work()
        except Exception as error:
            text = (str(error).strip().splitlines() or [repr(error)])[-1][:200]
            self.emit(kind="failed", variant=name, why=text)
            if name not in self.failed:
                print(f"FAILED {name}: {type(error).__name__} {text}", flush=True)
                print("".join(traceback.format_exc().splitlines(True)[-6:]), flush=True)
            self.failed.add(name)
            try:
                torch.cuda.synchronize()
            except Exception:
                print("the device is lost; stopping", flush=True)
                self.report()
                sys.exit(3)

    # Decode

    def decode_cell(self, cell: Cell) -> None:
        shape, lens = cell.shape, cell.lens
        pages = [-(-n // PAGE) for n in lens]
        total = sum(pages)
        numbers = total * PAGE * shape.kv_heads * shape.head_dim
        copies = max(
            1, min(64, len(self.k_pool) // numbers, math.ceil((256 << 20) / (numbers * 4)))
        )
        size = (total, PAGE, shape.kv_heads, shape.head_dim)
        ks = [self.k_pool[i * numbers : (i + 1) * numbers].view(size) for i in range(copies)]
        vs = [self.v_pool[i * numbers : (i + 1) * numbers].view(size) for i in range(copies)]
        order = torch.randperm(total, device=DEVICE).to(torch.int32)
        table = torch.full((len(lens), max(pages)), -1, dtype=torch.int32, device=DEVICE)
        for row, ids in enumerate(order.split(pages)):
            table[row, : len(ids)] = ids
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        q = torch.randn(len(lens), shape.heads, shape.head_dim, dtype=BF16, device=DEVICE)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
        new = torch.randn(len(lens), shape.kv_heads, shape.head_dim, dtype=BF16, device=DEVICE)
        nowhere = torch.full((len(lens),), -1, dtype=torch.int32, device=DEVICE)
        checked = sorted({0, len(lens) - 1})
        spec = spec_of(shape)
        wanted = [reference(spec, q[r], ks[0], vs[0], table[r], lens[r]) for r in checked]
        moved = 4 * sum(lens) * shape.kv_heads * shape.head_dim + 4 * q.numel()

        for name, variant in variants_of(cell).items():

            def work(name: str = name, variant: Variant = variant) -> None:
                how = spec_of(shape, variant)
                tuning = variant.tuning(how)
                slots = self.slots_of(how, variant)
                scratch = make_scratch(how, len(lens), max(lens), slots, tuning)

                def launch(i: int) -> None:
                    split_decode(
                        how,
                        q,
                        ks[i % copies],
                        vs[i % copies],
                        table,
                        seq_lens,
                        num_slots=slots,
                        scratch=scratch,
                        out=out,
                        lse=lse,
                        tuning=tuning,
                    )

                def stored(i: int) -> None:  # as in the engine: the newest keys, then attention
                    store_kv(new, new, ks[i % copies], vs[i % copies], nowhere)
                    launch(i)

                for part in (scratch.out, scratch.m, scratch.l, out, lse):
                    part.fill_(float("nan"))
                launch(0)
                error, lse_error = errors(out, lse, checked, wanted)
                us = graph_time(launch, max(copies, 2), 25)
                gbs = moved / us / 1e3
                record = {
                    "kind": "decode",
                    "shape": str(shape),
                    "cell": cell.label,
                    "batch": len(lens),
                }
                self.emit(
                    **record,
                    variant=name,
                    us=us,
                    gbs=gbs,
                    share=gbs / self.ceiling,
                    error=error,
                    lse_error=lse_error,
                    slots=slots,
                    copies=copies,
                    peers=cell.peers,
                )
                if not (error < 1e-2 and lse_error < 1e-3):
                    print(f"WRONG {name} {cell}: error {error:.2e} lse {lse_error:.2e}"[:200])
                if name in ("auto", "fix256") and "cut" in variants_of(cell):
                    pieces = {}
                    with without_merge():
                        pieces["no merge"] = graph_time(launch, max(copies, 2), 15)
                    pieces["stored"] = graph_time(stored, max(copies, 2), 15)
                    seq_lens.fill_(0)  # launches, shares, zeros
                    pieces["empty"] = graph_time(launch, max(copies, 2), 15)
                    seq_lens.fill_(1)  # and one tile
                    pieces["one key"] = graph_time(launch, max(copies, 2), 15)
                    seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
                    self.emit(**record | {"kind": "pieces"}, variant=name, whole=us, **pieces)

            self.guarded(name, work)

    def slots_of(self, spec: AttentionSpec, variant: Variant) -> int:
        key = (spec, variant.changes)
        if key not in self.slots:
            self.slots[key] = resident_slots(spec, variant.tuning(spec))
        return self.slots[key] * variant.slots

    def decode(self) -> None:
        for cell in cells():
            if self.left() < 25:
                print(f"out of time before {cell.shape} {cell.label} x {len(cell.lens)}")
                return
            self.guarded("cell", lambda cell=cell: self.decode_cell(cell))

    # Prefill, features, graphs

    def prefill(self) -> None:
        for length in (2048, 8192, 32768):
            self.prefill_cell(length)

    def prefill_cell(self, length: int) -> None:
        pages = length // PAGE
        shape = (pages, PAGE, 8, 128)
        k, v = (pool[: math.prod(shape)].view(shape) for pool in (self.k_pool, self.v_pool))
        table = torch.randperm(pages, device=DEVICE).to(torch.int32)[None]
        q = torch.randn(length, 32, 128, dtype=BF16, device=DEVICE)
        lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        spec = replace(spec_of(LLAMA), phase="prefill")
        checked = [0, 1, 511, length // 2 + 5, length - 1]
        wanted = [reference(spec, q[t], k, v, table[0], t + 1) for t in checked]
        for name, tuning in PREFILL.items():

            def work(name: str = name, tuning: PrefillTuning = tuning) -> None:
                out = torch.full_like(q, float("nan"))
                lse = torch.empty(length, 32, device=DEVICE)

                def launch(_: int) -> None:
                    paged_prefill(
                        spec, q, k, v, table, lens, starts, out=out, lse=lse, tuning=tuning
                    )

                launch(0)
                error, lse_error = errors(out, lse, checked, wanted)
                us = graph_time(launch, 2, 60)
                tflops = 2 * length * length * 32 * 128 / us / 1e6
                self.emit(
                    kind="prefill",
                    variant=name,
                    length=length,
                    us=us,
                    tflops=tflops,
                    error=error,
                    lse_error=lse_error,
                )
                if not (error < 1e-2 and lse_error < 1e-3):
                    print(f"WRONG prefill {name} {length}: {error:.2e} {lse_error:.2e}")

            self.guarded("prefill " + name, work)

    def graph_lengths(self) -> None:
        """One capture, replayed at many lengths; ``fixed`` rows bitwise alone and in a batch."""
        capacity, batch = 32768, 4
        pages = capacity // PAGE
        shape = (batch * pages, PAGE, 8, 128)
        k, v = (p[: math.prod(shape)].view(shape) for p in (self.k_pool, self.v_pool))
        table = torch.randperm(batch * pages, device=DEVICE).to(torch.int32).view(batch, pages)
        q = torch.randn(batch, 32, 128, dtype=BF16, device=DEVICE)
        lens = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        for mode in ("off", "auto", "fixed"):

            def work(mode=mode) -> None:
                variant = Variant(mode, 256)
                spec = spec_of(LLAMA, variant)
                tuning = variant.tuning(spec)
                slots = self.slots_of(spec, variant)
                scratch = make_scratch(spec, batch, capacity, 1000, tuning)
                out, lse = torch.empty_like(q), torch.empty(batch, 32, device=DEVICE)

                def launch() -> None:
                    split_decode(
                        spec,
                        q,
                        k,
                        v,
                        table,
                        lens,
                        num_slots=slots,
                        scratch=scratch,
                        out=out,
                        lse=lse,
                        tuning=tuning,
                    )

                launch()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    launch()
                worst, same = 0.0, True
                for new in (
                    [1, 1, 1, 1],
                    [0, 5, 0, 17],
                    [32768, 1, 100, 4097],
                    [512, 513, 0, 511],
                    [32768] * 4,
                    [3, 20000, 64, 65],
                ):
                    lens.copy_(torch.tensor(new, dtype=torch.int32))
                    out.fill_(float("nan"))
                    graph.replay()
                    torch.cuda.synchronize()
                    for row, n in enumerate(new):
                        if n == 0:
                            bad = bool(out[row].abs().sum() != 0) or bool(
                                (lse[row] != -math.inf).any()
                            )
                            worst = math.inf if bad else worst
                            continue
                        want = reference(spec, q[row], k, v, table[row], n)
                        worst = max(worst, *errors(out, lse, [row], [want]))
                    if mode == "fixed":
                        for row, other in itertools.product(range(batch), (1, 33, slots, 1000)):
                            one = split_decode(
                                spec,
                                q[row : row + 1],
                                k,
                                v,
                                table[row : row + 1],
                                lens[row : row + 1],
                                num_slots=other,
                                scratch=scratch,
                                tuning=tuning,
                            )
                            same &= torch.equal(one[0][0], out[row]) and torch.equal(
                                one[1][0], lse[row]
                            )
                ok = worst < 1e-2 and same
                self.emit(kind="graph", mode=mode, worst=worst, same=same, ok=ok)
                print(
                    f"graph replays, {mode}: {'ok' if ok else 'WRONG'}, worst error {worst:.1e}"
                    + (f", rows bitwise alone and in a batch: {same}" if mode == "fixed" else "")
                )

            self.guarded("graph " + mode, work)

        def stores() -> None:
            k_new = torch.randn(33, 8, 128, dtype=BF16, device=DEVICE)
            v_new = torch.randn_like(k_new)
            slots = torch.randperm(len(k) * PAGE, device=DEVICE)[:33].to(torch.int32)
            slots[7] = -1
            before = k.clone()
            store_kv(k_new, v_new, k, v, slots)
            kept = slots >= 0
            before.flatten(0, 1)[slots[kept].long()] = k_new[kept]
            ok = torch.equal(before, k) and torch.equal(
                v.flatten(0, 1)[slots[kept].long()], v_new[kept]
            )
            print(f"store_kv: {'ok' if ok else 'WRONG'}")

        self.guarded("store_kv", stores)

    def report(self) -> None:
        rows = [r for r in self.records if r["kind"] == "decode"]
        fill = [r for r in self.records if r["kind"] == "prefill"]
        keys = dict.fromkeys((r["shape"], r["cell"], r["batch"]) for r in rows)
        of = {k: {r["variant"]: r for r in rows if cell_of(r) == k} for k in keys}
        self.print_more(of)
        self.print_pieces()
        if fill:
            print("\nprefill 32/8x128, TFLOP/s (FA3 490, 698, 614; cuDNN 401, 605, 575)")
            for name in PREFILL:
                speeds = [r for r in fill if r["variant"] == name]
                print(f"{name:>14}" + "".join(f"{r['tflops']:>6.0f}" for r in speeds))
        scale = PEERS_CEILING / self.ceiling
        names = [*AUTO, *OFF, *FIXED]
        print(
            "\nus; peer: best paged kernel, cuDNN contiguous, scaled by the read ceilings; share "
            "of the ceiling, /peer: auto; fix: best of fixed over auto"
        )
        print(
            f"{'shape':>9}{'context':>8} batch|"
            + "".join(f"{n:>7}" for n in names)
            + "|  peer  cudnn|share /peer  fix"
        )
        for key, got in of.items():
            if "auto" not in got:
                continue
            auto = got["auto"]
            fixed = min((got[n]["us"] for n in FIXED if n in got), default=math.nan)
            peer, cudnn = (x * scale for x in auto["peers"])
            print(
                f"{key[0]:>9}{key[1]:>8}{key[2]:>6}|"
                + "".join(f"{got[n]['us']:>7.1f}" if n in got else " " * 7 for n in names)
                + f"|{peer:>6.1f}{cudnn:>7.1f}|{auto['share']:>4.0%}"
                + f"{auto['us'] / peer:>6.2f}{fixed / auto['us']:>6.2f}"
            )
        worst = max((r["error"] for r in rows + fill), default=0)
        lse = max((r["lse_error"] for r in rows + fill), default=0)
        print(
            f"worst relative error {worst:.1e}, lse {lse:.1e}; failed: {sorted(self.failed)}; "
            f"{time.time() - self.began:.0f} s"
        )

    def print_more(self, of: dict) -> None:
        print("\nmore variants, us\n" + " " * 15 + "".join(f"{n:>7}" for n in MORE))
        for key, got in of.items():
            if "cut" in got:
                print(
                    f"{key[1]:>8} x{key[2]:>4} |"
                    + "".join(f"{got[n]['us']:>7.1f}" if n in got else " " * 7 for n in MORE)
                )

    def print_pieces(self) -> None:
        print("\npieces, us: whole, no merge, behind store_kv, empty, one key")
        pieces = [r for r in self.records if r["kind"] == "pieces"]
        for key in dict.fromkeys(cell_of(r) for r in pieces):
            print(
                f"{key[1]:>8} x{key[2]:>4} |"
                + " |".join(
                    f"{r['variant']:>7}"
                    + "".join(
                        f"{r[n]:>7.1f}" for n in ("whole", "no merge", "stored", "empty", "one key")
                    )
                    for r in pieces
                    if cell_of(r) == key
                )
            )


def cell_of(record: dict) -> tuple[str, str, int]:
    return record["shape"], record["cell"], record["batch"]


@contextmanager
def without_merge() -> Iterator[None]:
    """Leave the second launch out, to see what it costs."""

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **constants: None

    kernel = split_attention.merge_kernel
    split_attention.merge_kernel = Nothing()
    try:
        yield
    finally:
        split_attention.merge_kernel = kernel


def spec_of(shape: Shape, variant: Variant | None = None) -> AttentionSpec:
    return AttentionSpec(
        phase="decode",
        device=DEVICE,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=PAGE,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        split_mode=variant.mode if variant else "auto",
        split_tokens=variant.split_tokens if variant else 512,
        graph=True,
    )


def reference(spec, q, k, v, table, length):
    """One query's ``out`` [H, D] and ``lse`` [H] in float64, a KV head at a time."""
    blocks = table[: -(-length // PAGE)].long()
    keys, values = (x[blocks].flatten(0, 1)[:length] for x in (k, v))
    group = spec.num_heads // spec.num_kv_heads
    outs, lses = [], []
    for head in range(spec.num_kv_heads):
        queries = q[head * group : (head + 1) * group].double()
        scores = queries @ keys[:, head].double().T * spec.scale
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ values[:, head].double())
    return torch.cat(outs), torch.cat(lses)


def errors(out, lse, places, wanted) -> tuple[float, float]:
    """Worst relative error of ``out`` by norm, and worst absolute one of ``lse``; NaN is inf."""
    worst, worst_lse = 0.0, 0.0
    for place, (want, want_lse) in zip(places, wanted, strict=True):
        error = ((out[place].double() - want).norm() / want.norm()).item()
        lse_error = (lse[place].double() - want_lse).abs().max().item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
        worst_lse = max(worst_lse, lse_error if math.isfinite(lse_error) else math.inf)
    return worst, worst_lse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=300)
    default = os.environ.get("OUT")
    parser.add_argument("--out", default=f"{default}/gpu_attention.json" if default else "")
    arguments = parser.parse_args()
    bench = Bench(arguments.budget_s, arguments.out)
    bench.guarded("graph lengths", bench.graph_lengths)
    bench.guarded("prefill", bench.prefill)
    bench.decode()
    bench.report()


if __name__ == "__main__":
    main()
