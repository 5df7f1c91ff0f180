#!/usr/bin/env python3
"""Our Triton attention kernels on one CUDA GPU: right at full size, and how fast.

Decode is timed as in shared/probes/attn_peers.py, whose figures for other kernels stand in PEERS:
each launch from a CUDA graph, launch i of it on its own KV copy, so that the copies exceed the L2;
us is graph time over launches, median of the replays. Every cell and variant is first compared
with a float64 softmax. The read ceiling is measured in the same run.

    python3 bench/gpu_attention.py [--quick] [--budget-s 420] [--out results.json]

Prints a table a person can read last; every figure is in the JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from octavo.attention.spec import AttentionSpec
from octavo.kernels.kv_store.triton import store_kv
from octavo.kernels.paged_prefill.triton import PrefillTuning, paged_prefill
from octavo.kernels.split_attention.triton import (
    Tuning,
    make_scratch,
    resident_slots,
    split_decode,
)

DEVICE = "cuda"
BF16 = torch.bfloat16
KV_HEADS, HEAD_DIM, PAGE = 8, 128, 16
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
SKEWED = [131072] + [4096] * 31

# name: (mode, tuning, blocks a multiprocessor or 0 for all that fit, fixed tokens)
MAIN = {
    "t64s3": ("auto", Tuning(64, 4, 3), 0, 0),
    "t64s4": ("auto", Tuning(64, 4, 4), 0, 0),
    "t64s3mk": ("auto", Tuning(64, 4, 3, merge_kernel=True), 0, 0),
    "t128w8": ("auto", Tuning(128, 8, 3), 0, 0),
}
# Timed on few cells: B1 at every length, and where the issue sets an aim.
MORE = {
    "t64s3x2": ("auto", Tuning(64, 4, 3), 2, 0),
    "t64s3m2": ("auto", Tuning(64, 4, 3, min_tiles=2), 0, 0),
    "t64s3m4": ("auto", Tuning(64, 4, 3, min_tiles=4), 0, 0),
    "t32s4": ("auto", Tuning(32, 4, 4), 0, 0),
    "t32s6": ("auto", Tuning(32, 4, 6), 0, 0),
    "t64w8s3": ("auto", Tuning(64, 8, 3), 0, 0),
    "t64w2s4": ("auto", Tuning(64, 2, 4), 0, 0),
    "t64s4mk": ("auto", Tuning(64, 4, 4, merge_kernel=True), 0, 0),
    "off": ("off", Tuning(64, 4, 4), 0, 0),
    "fix512": ("fixed", Tuning(64, 4, 3), 0, 512),
    "fix512mk": ("fixed", Tuning(64, 4, 3, merge_kernel=True), 0, 512),
    "fix256mk": ("fixed", Tuning(64, 4, 3, merge_kernel=True), 0, 256),
    "fix1024mk": ("fixed", Tuning(64, 4, 3, merge_kernel=True), 0, 1024),
}
MORE_CELLS = {
    (32, 512, 1),
    (32, 512, 64),
    (32, 2048, 1),
    (32, 2048, 64),
    (32, 8192, 1),
    (32, 8192, 16),
    (32, 32768, 1),
    (32, 131072, 1),
}
PREFILL = {
    "m128t64w8s3": PrefillTuning(128, 64, 8, 3),
    "m128t64w8s2": PrefillTuning(128, 64, 8, 2),
    "m64t64w4s3": PrefillTuning(64, 64, 4, 3),
    "m128t128w8s2": PrefillTuning(128, 128, 8, 2),
    "m64t128w4s2": PrefillTuning(64, 128, 4, 2),
}


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
        biggest = max(length * batch for _, length, batch in PEERS)
        numbers = max(biggest, 1 << 27) * KV_HEADS * HEAD_DIM
        free = torch.cuda.mem_get_info()[0]
        numbers = min(numbers, int(free * 0.4) // 2) // (1 << 20) * (1 << 20)
        self.k_pool = torch.empty(numbers, dtype=BF16, device=DEVICE).normal_()
        self.v_pool = torch.empty(numbers, dtype=BF16, device=DEVICE).normal_()
        self.ceiling = read_ceiling(self.k_pool)
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
            f"{triton.__version__}, read ceiling {self.ceiling:.0f} GB/s"
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

    def decode_cell(self, heads: int, lens: list[int], label, variants: dict, ms: float) -> None:
        batch, longest = len(lens), max(lens)
        pages = [-(-n // PAGE) for n in lens]
        total = sum(pages)
        numbers = total * PAGE * KV_HEADS * HEAD_DIM
        if numbers > len(self.k_pool):
            return
        copies = max(
            1, min(64, len(self.k_pool) // numbers, math.ceil((256 << 20) / (numbers * 4)))
        )
        shape = (total, PAGE, KV_HEADS, HEAD_DIM)
        ks = [self.k_pool[i * numbers : (i + 1) * numbers].view(shape) for i in range(copies)]
        vs = [self.v_pool[i * numbers : (i + 1) * numbers].view(shape) for i in range(copies)]
        order = torch.randperm(total, device=DEVICE).to(torch.int32)
        table = torch.full((batch, max(pages)), -1, dtype=torch.int32, device=DEVICE)
        for row, ids in enumerate(order.split(pages)):
            table[row, : len(ids)] = ids
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        q = torch.randn(batch, heads, HEAD_DIM, dtype=BF16, device=DEVICE)
        out, lse = torch.empty_like(q), torch.empty(batch, heads, device=DEVICE)
        spec = decode_spec(heads)
        checked = sorted({0, batch - 1})
        wanted = [reference(spec, q[r], ks[0], vs[0], table[r], lens[r]) for r in checked]
        size = 4 * sum(lens) * KV_HEADS * HEAD_DIM + 4 * q.numel()

        for name, (mode, tuning, per_sm, fixed) in variants.items():

            def work(name=name, mode=mode, tuning=tuning, per_sm=per_sm, fixed=fixed) -> None:
                how = replace(spec, split_mode=mode, split_tokens=fixed or 512)
                slots = self.slots_of(how, tuning, per_sm)
                scratch = make_scratch(how, batch, longest, slots)

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

                for part in (scratch.out, scratch.m, scratch.l, out, lse):
                    part.fill_(float("nan"))
                launch(0)
                error, lse_error = errors(out, lse, checked, wanted)
                us = graph_time(launch, max(copies, 2), ms)
                gbs = size / us / 1e3
                self.emit(
                    kind="decode",
                    variant=name,
                    heads=heads,
                    cell=label,
                    batch=batch,
                    us=us,
                    gbs=gbs,
                    share=gbs / self.ceiling,
                    error=error,
                    lse_error=lse_error,
                    slots=slots,
                    copies=copies,
                )
                if not (error < 1e-2 and lse_error < 1e-3):
                    print(
                        f"WRONG {name} {heads}/8 {label}: error {error:.2e} lse {lse_error:.2e}",
                        flush=True,
                    )

            self.guarded(name, work)

    def slots_of(self, spec: AttentionSpec, tuning: Tuning, per_sm: int) -> int:
        key = (spec, tuning)
        if key not in self.slots:
            self.slots[key] = resident_slots(spec, tuning)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return min(self.slots[key], per_sm * sms) if per_sm else self.slots[key]

    def decode(self, quick: bool) -> None:
        cells = sorted(PEERS, key=lambda c: (c[0] != 32, c[1] * c[2]))
        for heads, length, batch in cells:
            more = (heads, length, batch) in MORE_CELLS
            if quick and not more:
                continue
            if self.left() < 60:
                print(f"out of time before {heads}/8 {length} x {batch}", flush=True)
                return
            self.decode_cell(heads, [length] * batch, length, MAIN | (MORE if more else {}), 40)
        self.decode_cell(32, SKEWED, "skewed", MAIN | MORE, 40)

    # Prefill, features, graphs

    def prefill(self) -> None:
        for length in (2048, 8192, 32768):
            if self.left() > 20:
                self.prefill_cell(length)

    def prefill_cell(self, length: int) -> None:
        pages = length // PAGE
        shape = (pages, PAGE, KV_HEADS, HEAD_DIM)
        k, v = (pool[: math.prod(shape)].view(shape) for pool in (self.k_pool, self.v_pool))
        table = torch.randperm(pages, device=DEVICE).to(torch.int32)[None]
        q = torch.randn(length, 32, HEAD_DIM, dtype=BF16, device=DEVICE)
        lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        spec = replace(decode_spec(32), phase="prefill")
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
                tflops = 2 * length * length * 32 * HEAD_DIM / us / 1e6
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
        shape = (batch * pages, PAGE, KV_HEADS, HEAD_DIM)
        k, v = (p[: math.prod(shape)].view(shape) for p in (self.k_pool, self.v_pool))
        table = torch.randperm(batch * pages, device=DEVICE).to(torch.int32).view(batch, pages)
        q = torch.randn(batch, 32, HEAD_DIM, dtype=BF16, device=DEVICE)
        lens = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        for mode in ("off", "auto", "fixed"):

            def work(mode=mode) -> None:
                spec = replace(decode_spec(32), split_mode=mode)
                tuning = Tuning(64, 4, 3, merge_kernel=mode == "fixed")
                slots = self.slots_of(spec, tuning, 0)
                scratch = make_scratch(spec, batch, capacity, slots)
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
                        for row in range(batch):
                            one = split_decode(
                                spec,
                                q[row : row + 1],
                                k,
                                v,
                                table[row : row + 1],
                                lens[row : row + 1],
                                num_slots=slots,
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
            k_new = torch.randn(33, KV_HEADS, HEAD_DIM, dtype=BF16, device=DEVICE)
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
        names = list(dict.fromkeys(r["variant"] for r in rows))
        scale = PEERS_CEILING / self.ceiling
        cells = dict.fromkeys((r["heads"], r["cell"], r["batch"]) for r in rows)
        more = [n for n in names if n not in MAIN]
        for title, columns in (("main", [n for n in names if n in MAIN]), ("more", more)):
            print(
                f"\n{title}: microseconds; peer = best paged kernel / cuDNN contiguous, scaled by "
                "the read ceilings; share of the ceiling and us / peer are the best column's"
            )
            print(
                "heads context batch |"
                + "".join(f"{n:>10}" for n in columns)
                + " |   peer   cudnn | share  /peer"
            )
            for cell in cells:
                got = {
                    r["variant"]: r
                    for r in rows
                    if (r["heads"], r["cell"], r["batch"]) == cell and r["variant"] in columns
                }
                if not got:
                    continue
                best = min(got.values(), key=lambda r: r["us"])
                peer, cudnn = PEERS.get(cell, (math.nan, math.nan))
                print(
                    f"{cell[0]:>3}/8 {cell[1]!s:>7} {cell[2]:>5} |"
                    + "".join(
                        f"{got[n]['us']:>9.1f}{'*' if got[n] is best else ' '}"
                        if n in got
                        else " " * 10
                        for n in columns
                    )
                    + f" | {peer * scale:>6.1f} {cudnn * scale:>7.1f} | {best['share']:>5.0%}"
                    + f" {best['us'] / (peer * scale):>6.2f}"
                )
        fill = [r for r in self.records if r["kind"] == "prefill"]
        if fill:
            print("\nprefill 32/8 x 128, TFLOP/s (FA3 490, 698, 614; cuDNN 401, 605, 575)")
            for name in PREFILL:
                print(
                    f"{name:>14}"
                    + "".join(
                        f"{r['length']:>8}: {r['tflops']:>5.0f}"
                        for r in fill
                        if r["variant"] == name
                    )
                )
        print(f"\nslots: { {r['variant']: r['slots'] for r in rows if r['heads'] == 32} }")
        worst = max((r["error"] for r in rows + fill), default=0)
        lse = max((r["lse_error"] for r in rows + fill), default=0)
        print(
            f"worst relative error {worst:.1e}, lse {lse:.1e}; failed: {sorted(self.failed)}; "
            f"{time.time() - self.began:.0f} s"
        )


def decode_spec(heads: int) -> AttentionSpec:
    return AttentionSpec(
        phase="decode",
        device=DEVICE,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=PAGE,
        num_heads=heads,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
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
    parser.add_argument("--quick", action="store_true", help="only the cells with every variant")
    parser.add_argument("--budget-s", type=float, default=420)
    default = os.environ.get("OUT")
    parser.add_argument("--out", default=f"{default}/gpu_attention.json" if default else "")
    arguments = parser.parse_args()
    bench = Bench(arguments.budget_s, arguments.out)
    bench.guarded("graph lengths", bench.graph_lengths)
    bench.guarded("decode", lambda: bench.decode(arguments.quick))
    bench.guarded("prefill", bench.prefill)
    bench.report()


if __name__ == "__main__":
    main()
