"""Faults as they were reported of other engines, planted into a candidate: a check that can't fail
is worth nothing.

Each works through the Backend contract alone: it changes what the backend is told, or what it
hands back.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from octavo.attention import (
    AttentionBatch,
    AttentionSpec,
    Backend,
    Candidate,
    KVLayout,
    Support,
)

Fault = Literal[
    "drop-newest", "swap-pages", "skip-split", "base2-lse", "stale-plan", "off-by-one-window"
]


class FaultyCandidate:
    """A candidate whose backends have a fault."""

    def __init__(self, candidate: Candidate, fault: Fault) -> None:
        self.name = candidate.name
        self._candidate = candidate
        self._fault = fault

    def supports(self, spec: AttentionSpec) -> Support:
        return self._candidate.supports(spec)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        return self._candidate.kv_layout(spec, num_blocks)

    def open(self, spec: AttentionSpec) -> Backend:
        opened = spec
        if self._fault == "off-by-one-window" and spec.window is not None:
            opened = replace(spec, window=spec.window + 1)
        return FaultyBackend(self._candidate.open(opened), self._fault, spec.block_size)


class FaultyBackend:
    """See :class:`octavo.attention.spec.Backend`."""

    def __init__(self, backend: Backend, fault: Fault, block_size: int) -> None:
        self._backend = backend
        self._fault = fault
        self._block_size = block_size
        self._plans: dict[tuple[int, int], Any] = {}
        self.write = backend.write
        self.gather = backend.gather

    def plan(self, batch: AttentionBatch) -> Any:
        match self._fault:
            case "drop-newest":
                batch = _drop_newest(batch)
            case "swap-pages":
                batch = _swap_pages(batch, self._block_size)
            case "skip-split":
                batch = _skip_split(batch, self._block_size)
            case "stale-plan":
                shape = len(batch.seq_lens), int(batch.query_start_loc[-1])
                if shape not in self._plans:
                    self._plans[shape] = self._backend.plan(batch)
                return self._plans[shape]
        return self._backend.plan(batch)

    def run(self, *args: Any, **how: Any) -> tuple[Tensor, Tensor]:
        out, lse = self._backend.run(*args, **how)
        return (out, lse / math.log(2)) if self._fault == "base2-lse" else (out, lse)


def _drop_newest(batch: AttentionBatch) -> AttentionBatch:
    """Every row that can spare a token ends one earlier."""
    counts = np.diff(batch.query_start_loc)
    lens = np.where(batch.seq_lens > counts, batch.seq_lens - 1, batch.seq_lens)
    return replace(batch, seq_lens=lens)


def _swap_pages(batch: AttentionBatch, block_size: int) -> AttentionBatch:
    """Rows take each other's newest block, or a row alone exchanges its own first and last."""
    table = batch.block_table.copy()
    rows = np.flatnonzero(batch.seq_lens > 0)
    last = (batch.seq_lens[rows] - 1) // block_size
    if len(rows) > 1:
        table[rows, last] = np.roll(table[rows, last], 1)
    elif len(rows) == 1:
        table[rows[0], [0, last[0]]] = table[rows[0], [last[0], 0]]
    return replace(batch, block_table=table)


def _skip_split(batch: AttentionBatch, block_size: int) -> AttentionBatch:
    """A quarter of the blocks before the newest tokens is left out, in the middle."""
    table, lens = batch.block_table.copy(), batch.seq_lens.copy()
    old_blocks = (lens - np.diff(batch.query_start_loc)) // block_size
    for row in np.flatnonzero(old_blocks >= 4):
        start, count = old_blocks[row] // 2, old_blocks[row] // 4
        table[row, start:-count] = table[row, start + count :]
        lens[row] -= count * block_size
    return replace(batch, block_table=table, seq_lens=lens)
