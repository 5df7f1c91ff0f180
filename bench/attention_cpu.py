"""Decode attention on this CPU: our kernel against memory's read speed and torch's SDPA.

    python bench/attention_cpu.py [--kv-dtype bfloat16] [--lengths 512,4096,32768]

One query token attends to a history of the given length, in layer after layer of a model whose
keys and values are 256 MB, so that they come from memory. Ours is one program of all layers, as
the cpu runtime makes it: no Python stands between two of them. Blocks lie in the order in which
a fresh pool hands them out (``--shuffled`` for the worst). SDPA gets the best it can have:
contiguous keys and values, repeated for the query heads by ``enable_gqa`` (bfloat16 ones beside
int8, which it doesn't take). Both read numpy's memory, which is in huge pages, as the cpu
runtime's pools are.
Read bandwidth is measured between the cells, by summing 256 MB with the same threads. A repetition
counts as clean when no thread of ours was preempted; the median of the clean ones is shown (of
all, marked with ``*``, where there are none). Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from math import prod
from statistics import median

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.attention import AttentionSpec
from octavo.attention.backends.cpu import KV_BYTES, CpuCandidate
from octavo.attention.cpu_step import CpuPlan, decode_calls
from octavo.kernels.program import Program
from octavo.kernels.read.cpu import Reader
from octavo.kernels.team import team

SHAPES = ((9, 3, 64), (16, 8, 128))
POOL_BYTES = 256 << 20
BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kv-dtype", default="float32", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--lengths", default="512,1024,4096,16384,65536")
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(team().num_threads)
    print(
        f"{cpu_name()}, {team().num_threads} threads, torch {torch.__version__}, "
        f"{arguments.kv_dtype} KV"
    )
    print(
        f"{'heads':>8}{'tokens':>8}{'splits':>8}{'us':>10}{'GB/s':>8}{'read':>8}{'share':>7}",
        end="",
    )
    print(f"{'SDPA us':>10}{'faster':>8}")
    cells = []
    for heads, kv_heads, head_dim in SHAPES:
        for length in map(int, arguments.lengths.split(",")):
            cell = measure(
                (heads, kv_heads, head_dim),
                length,
                arguments.kv_dtype,
                arguments.seconds,
                arguments.shuffled,
            )
            cells.append(cell)
            print(
                f"{f'{heads}/{kv_heads}x{head_dim}':>8}{length:>8}{cell['splits']:>8}"
                f"{cell['us']:>9.0f}{cell['mark']}{cell['gb_s']:>8.1f}{cell['read_gb_s']:>8.1f}"
                f"{cell['share']:>7.0%}{cell['sdpa_us']:>10.0f}{cell['faster']:>7.1f}x",
                flush=True,
            )
    print(json.dumps({"cpu": cpu_name(), "kv_dtype": arguments.kv_dtype, "cells": cells}))


def measure(
    shape: tuple[int, int, int], length: int, kv_dtype: str, seconds: float, shuffled: bool
) -> dict[str, object]:
    """One cell of the table: ``shape`` is query heads, KV heads and head size."""
    heads, kv_heads, head_dim = shape
    spec = AttentionSpec(
        phase="decode",
        device="cpu",
        dtype="float32",
        kv_dtype=kv_dtype,
        block_size=BLOCK,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5,
    )
    blocks = length // BLOCK
    one = CpuCandidate().kv_layout(spec, blocks)
    kv_bytes = (prod(one.k_shape) + prod(one.v_shape)) * KV_BYTES[kv_dtype]
    layers = max(2, POOL_BYTES // kv_bytes)
    layout = CpuCandidate().kv_layout(spec, layers * blocks)
    pools = [
        random_pool(each, kv_dtype).view(torch.uint8).numpy().reshape(layers, -1)
        for each in (layout.k_shape, layout.v_shape)
    ]
    table = np.arange(blocks, dtype=np.int32)
    if shuffled:
        np.random.default_rng(0).shuffle(table)
    plan = CpuPlan(spec, team().num_threads)
    plan.fill(np.array([0, 1], np.int32), np.array([length], np.int32), 1, table[None])
    q = torch.randn(1, heads, head_dim)
    out = np.empty_like(q.numpy())
    program = Program(
        [
            call
            for k, v in zip(*pools, strict=True)
            for call in decode_calls(spec, plan, q=q.numpy(), out=out, k_cache=k, v_cache=v)
        ]
    )
    us, clean = timed(lambda: team().run(program), seconds)
    gb_s = kv_bytes * layers / us / 1e3
    read = read_bandwidth(seconds / 2)
    contiguous = (layers, 1, kv_heads, length, head_dim)
    sdpa_dtype = "bfloat16" if kv_dtype == "int8" else kv_dtype
    keys, values = (random_pool(contiguous, sdpa_dtype) for _ in "kv")
    query = q.to(keys.dtype)[:, :, None]

    def sdpa() -> None:
        for k, v in zip(keys, values, strict=True):
            scaled_dot_product_attention(query, k, v, enable_gqa=True)

    sdpa_us, _ = timed(sdpa, seconds)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "tokens": length,
        "splits": int(plan.splits.num_splits[0]),
        "us": us / layers,
        "mark": " " if clean else "*",
        "gb_s": gb_s,
        "read_gb_s": read,
        "share": gb_s / read,
        "sdpa_us": sdpa_us / layers,
        "faster": sdpa_us / us,
    }


def random_pool(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Random numbers in numpy's memory; of an int8 pool's scales, all are alike."""
    if dtype == "int8":
        numbers = np.random.default_rng(0).integers(-127, 128, prod(shape), np.int8)
        tile = prod(shape[3:])
        numbers.reshape(-1, tile)[:, -64:] = np.full(16, 0.01, np.float32).view(np.int8)
        return torch.from_numpy(numbers.reshape(shape))
    kind = getattr(torch, dtype)
    pool = torch.from_numpy(np.empty(shape, f"V{kind.itemsize}").view(f"i{kind.itemsize}"))
    return pool.view(kind).copy_(torch.randn(shape))


def timed(call: Callable[[], None], seconds: float) -> tuple[float, bool]:
    """Median microseconds of the repetitions in which we weren't preempted, if there are any."""
    call()
    clean: list[float] = []
    every: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(every) < 3:
        preempted = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        start = time.perf_counter()
        call()
        every.append((time.perf_counter() - start) * 1e6)
        if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == preempted:
            clean.append(every[-1])
    return median(clean or every), bool(clean)


def read_bandwidth(seconds: float) -> float:
    """GB/s of reading 256 MB with every thread."""
    reader = Reader()
    us, _ = timed(reader.read, seconds)
    return reader.numbers.nbytes / us / 1e3


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
