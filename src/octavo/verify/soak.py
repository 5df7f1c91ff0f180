"""Does it hold out? Rows of random lengths grow, end and begin anew in freed blocks for minutes:
nothing NaN, answers right, memory steady."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention import AttentionBatch, AttentionSpec, Backend
from octavo.verify.checks import MAX_ERROR, MAX_LSE_ERROR, Check, Subject, errors, shape_name
from octavo.verify.problems import Problem, exact, filled_pool, held

COMPARE_EVERY = 16  # steps
MAX_GROWTH = 64 << 20  # bytes from a quarter of the time on


def soak(subject: Subject, minutes: float, progress: Callable[[str], None]) -> Check:
    """Run for so long; stop at the first step that isn't right."""
    on_cpu = subject.spec.device == "cpu"
    rows, longest = (8, 2048) if on_cpu else (32, 16_384)
    pool = Pool(subject, rows, longest)
    rng, most_new = pool.rng, 1 if subject.spec.phase == "decode" else 64
    worst = {"error": 0.0, "LSE error": 0.0}
    steps, ended, bad = 0, 0, 0
    memory: list[int] = []
    began = time.monotonic()
    while (passed := time.monotonic() - began) < minutes * 60 and not bad:
        counts = rng.integers(1, most_new + 1, rows).astype(np.int32)
        for row in range(rows):
            if pool.lens[row] + counts[row] > longest or rng.random() < 0.01:
                pool.clear(row)
                ended += 1
            if pool.lens[row] == 0:
                pool.append(row, int(rng.integers(1, longest // 2)))
            pool.append(row, int(counts[row]))
        asked, out, lse = pool.step(counts)
        bad += int((~out.isfinite()).sum() + (~lse.isfinite()).sum())
        if steps % COMPARE_EVERY == 0:
            found = pool.row_errors(int(rng.integers(rows)), asked, out, lse)
            worst = {name: max(figure, found[name]) for name, figure in worst.items()}
            if passed > minutes * 15 or not memory:
                memory.append(_memory(subject.spec.device))
            progress(f"soak, {passed / 60:.1f} of {minutes:g} minutes, {steps:,} steps")
        steps += 1
    growth = memory[-1] - memory[min(1, len(memory) - 1)]
    limit = MAX_ERROR[subject.spec.dtype]
    return Check(
        f"soak, {minutes:g} minutes · {subject.spec.phase} {shape_name(subject.spec)}",
        {"steps": steps, "rows ended": ended, "not finite": bad, "memory growth": growth, **worst},
        f"all finite, error <= {limit:g}, LSE <= {MAX_LSE_ERROR:g}, growth <= {MAX_GROWTH:,} bytes",
        not bad
        and worst["error"] <= limit
        and worst["LSE error"] <= MAX_LSE_ERROR
        and growth <= MAX_GROWTH,
    )


class Pool:
    """A few growing rows. What a row has written it also keeps, to know the right answer."""

    def __init__(self, subject: Subject, rows: int, longest: int) -> None:
        self.spec: AttentionSpec
        self.backend: Backend
        self.spec, self.backend = subject.open()
        self.longest = longest
        spec, per_row = self.spec, -(-longest // self.spec.block_size)
        num_blocks = rows * per_row + 1
        self.k_cache, self.v_cache = filled_pool(subject.candidate, spec, num_blocks)
        self.rng = np.random.default_rng(0)
        self.free = list(range(1, num_blocks))
        self.table = np.full((rows, per_row), -1, np.int32)
        self.lens = np.zeros(rows, np.int32)
        tokens = (rows, longest, spec.num_kv_heads)
        self.keys = torch.zeros(*tokens, spec.head_dim, device=spec.device)
        self.values = torch.zeros(*tokens, spec.v_head_dim, device=spec.device)

    def append(self, row: int, count: int) -> None:
        """New tokens at a row's end, in blocks that anyone may have had before."""
        spec, start = self.spec, int(self.lens[row])
        stop = start + count
        for i in range(-(-start // spec.block_size), -(-stop // spec.block_size)):
            self.table[row, i] = self.free.pop(int(self.rng.integers(len(self.free))))
        for kept in (self.keys, self.values):
            kept[row, start:stop] = held(torch.randn_like(kept[row, start:stop]), spec)
        self.lens[row] = stop
        self._write(row, start, stop, self.keys[row, start:stop], self.values[row, start:stop])

    def clear(self, row: int) -> None:
        """Give the row's blocks back, full of NaN."""
        stop = int(self.lens[row])
        nan = self.keys[row, :stop] * math.nan, self.values[row, :stop] * math.nan
        self._write(row, 0, stop, *nan)
        used = -(-stop // self.spec.block_size)
        self.free += self.table[row, :used].tolist()
        self.table[row] = -1
        self.lens[row] = 0

    def _write(self, row: int, start: int, stop: int, k: Tensor, v: Tensor) -> None:
        position = np.arange(start, stop)
        block_size, dtype = self.spec.block_size, getattr(torch, self.spec.dtype)
        slots = self.table[row, position // block_size] * block_size + position % block_size
        on_device = torch.from_numpy(slots.astype(np.int32)).to(self.spec.device)
        self.backend.write(k.to(dtype), v.to(dtype), self.k_cache, self.v_cache, on_device)

    def step(self, counts: NDArray[np.int32]) -> tuple[Problem, Tensor, Tensor]:
        """Attention of every row's newest ``counts`` tokens: the question (without its keys and
        values) and the answer."""
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = AttentionBatch(starts, self.lens.copy(), self.table.copy())
        shape = (int(starts[-1]), self.spec.num_heads, self.spec.head_dim)
        q = torch.randn(shape, device=self.spec.device).to(getattr(torch, self.spec.dtype))
        out, lse = self.backend.run(q, self.k_cache, self.v_cache, self.backend.plan(batch))
        return Problem(self.spec, batch, q, [], [], None, 0), out, lse

    def row_errors(self, row: int, asked: Problem, out: Tensor, lse: Tensor) -> dict[str, float]:
        """How far one row's answer is from the exact one."""
        first, stop = asked.batch.query_start_loc[row : row + 2].tolist()
        dtype, n = getattr(torch, self.spec.dtype), int(self.lens[row])
        alone = Problem(
            self.spec,
            AttentionBatch(
                np.array([0, stop - first], np.int32),
                asked.batch.seq_lens[row : row + 1],
                asked.batch.block_table[row : row + 1],
            ),
            asked.q[first:stop],
            [self.keys[row, :n].to(dtype)],
            [self.values[row, :n].to(dtype)],
            None,
            0,
        )
        return errors(out[first:stop], lse[first:stop], *exact(alone))


def _memory(device: str) -> int:
    """Bytes in use: on the device, or by this process."""
    if device != "cpu":
        return int(getattr(torch, device.partition(":")[0]).memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: nothing to tell
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
