"""Does the fused attention operator of an Ascend NPU split a long history by itself?

    python bench/ascend_split_probe.py [--heads 8/1x128] [--lengths 512,1024,...]

For each layout one query attends to histories of growing length, twice: the history as one row,
which the operator may cut or not, and cut by us into sixteenths, given as rows of one call and
merged. An operator that doesn't cut leaves most of the device idle in the first case, and the
second is much faster. The time for each 1,024 tokens tells the same: it falls at the length from
which the operator cuts, and stays where it doesn't.

Few heads make the difference plain: rows x KV heads are what the device has to share out. Calls
take turns over a pool larger than the device's cache. Needs torch_npu; ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import get_args

import numpy as np
import torch

from octavo.attention import AttentionBatch, AttentionSpec, plan_splits
from octavo.attention.backends.ascend_fia import (
    AscendFiaBackend,
    AscendFiaCandidate,
    FiaPlan,
    Layout,
)

BLOCK = 128
SEGMENTS = 16
POOL_TOKENS = 1 << 18
LENGTHS = "512,1024,2048,4096,8192,16384,32768,65536,131072"
# Cutting a history of the longest length into rows gains this much at least where the operator
# doesn't cut, and no more than this where it does.
GAIN_IF_UNSPLIT, GAIN_IF_SPLIT = 1.5, 1.2

Run = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """Microseconds of a call for a history of ``tokens``: as one row, and cut into rows by us."""

    tokens: int
    whole_us: float
    cut_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--heads", default="8/1x128", help="query heads / KV heads x head size")
    parser.add_argument("--lengths", default=LENGTHS)
    arguments = parser.parse_args()
    if find_spec("torch_npu") is None:
        sys.exit("ascend_split_probe: torch_npu isn't installed; run this on a machine with an NPU")
    heads, kv_heads, head_dim = map(int, re.split("[/x]", arguments.heads))
    lengths = [int(length) for length in arguments.lengths.split(",")]
    found = {}
    for layout in get_args(Layout):
        spec = probe_spec("npu", heads, kv_heads, head_dim)
        support = AscendFiaCandidate(layout).supports(spec)
        print(f"\n{layout}, heads {arguments.heads}")
        if not support.ok:
            print(f"refused: {support.reason}")
            continue
        cells = probe(layout, spec, lengths, microseconds)
        print(f"{'tokens':>8}{'whole us':>10}{'us/1024':>9}{'cut us':>9}{'gain':>7}")
        for cell in cells:
            print(
                f"{cell.tokens:>8}{cell.whole_us:>10.1f}{cell.whole_us / cell.tokens * 1024:>9.2f}"
                f"{cell.cut_us:>9.1f}{cell.whole_us / cell.cut_us:>7.2f}"
            )
        print(verdict(cells))
        found[layout] = {"verdict": verdict(cells), "cells": [asdict(cell) for cell in cells]}
    device = import_module("torch_npu").npu.get_device_name()
    print(json.dumps({"device": device, "heads": arguments.heads, "layouts": found}))


def probe_spec(device: str, heads: int, kv_heads: int, head_dim: int) -> AttentionSpec:
    return AttentionSpec(
        phase="decode",
        device=device,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=BLOCK,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5,
    )


def probe(
    layout: Layout,
    spec: AttentionSpec,
    lengths: Sequence[int],
    measure: Callable[[Sequence[Run]], float],
    pool_tokens: int = POOL_TOKENS,
) -> list[Cell]:
    """``measure`` gets calls that differ in the part of the pool alone, and returns the
    microseconds of one."""
    candidate = AscendFiaCandidate(layout)
    backend = candidate.open(spec)
    num_blocks = max(pool_tokens, *lengths) // BLOCK
    shapes = candidate.kv_layout(spec, num_blocks)
    k_cache, v_cache = (
        torch.randn(shape, device=spec.device, dtype=torch.bfloat16)
        for shape in (shapes.k_shape, shapes.v_shape)
    )
    q = torch.randn(1, spec.num_heads, spec.head_dim, device=spec.device, dtype=torch.bfloat16)

    def call(plan: FiaPlan) -> Run:
        return lambda: backend.run(q, k_cache, v_cache, plan)

    cells = []
    for length in lengths:
        segment = -(-length // (SEGMENTS * BLOCK)) * BLOCK
        whole, cut = (
            measure([call(plan) for plan in _plans(backend, length, tokens, num_blocks)])
            for tokens in (length, segment)
        )
        cells.append(Cell(length, whole, cut))
    return cells


def _plans(backend: AscendFiaBackend, length: int, segment: int, num_blocks: int) -> list[FiaPlan]:
    """One row of ``length`` keys in segments of ``segment``, at each place of the pool in turn."""
    splits = plan_splits(
        [length],
        num_kv_heads=backend.spec.num_kv_heads,
        block_size=BLOCK,
        num_cores=1,
        mode="fixed",
        split_tokens=segment,
    )
    used = -(-length // BLOCK)
    starts, lens = np.array([0, 1], np.int32), np.array([length], np.int32)
    tables = np.arange(num_blocks // used * used, dtype=np.int32).reshape(-1, 1, used)
    return [backend.plan(AttentionBatch(starts, lens, table), splits) for table in tables[:64]]


def verdict(cells: Sequence[Cell]) -> str:
    """The answer, from the longest history."""
    longest = max(cells, key=lambda cell: cell.tokens)
    gain = longest.whole_us / longest.cut_us
    fact = f"at {longest.tokens:,} tokens, cutting by hand makes it {gain:.2f} x as fast"
    if gain >= GAIN_IF_UNSPLIT:
        return f"does not split by itself: {fact}"
    if gain <= GAIN_IF_SPLIT:
        return f"splits by itself: {fact}"
    return f"unclear: {fact}; try longer histories or fewer heads"


def microseconds(runs: Sequence[Run]) -> float:
    """Of one run, the median of seven rounds over all of them, some 50 in each."""
    synchronize = import_module("torch_npu").npu.synchronize
    repeats = range(-(-50 // len(runs)))
    rounds = []
    for _ in range(8):
        synchronize()
        began = time.perf_counter()
        for _ in repeats:
            for run in runs:
                run()
        synchronize()
        rounds.append((time.perf_counter() - began) / (len(repeats) * len(runs)))
    return 1e6 * float(np.median(rounds[1:]))  # the first one warms up


if __name__ == "__main__":
    main()
