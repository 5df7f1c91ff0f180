"""Where to cut each sequence's history, decided from plain numbers: no device is asked.

Decode attention has one work item for each (sequence, KV head, segment). Splitting pays where the
items would otherwise leave cores idle, or where one long sequence would outlast all the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.config import DEFAULT_SPLIT_TOKENS, SplitMode
from octavo.errors import ConfigError

MAX_SPLITS = 256


@dataclass(frozen=True)
class SplitCost:
    """Constants of a device and its kernel, in tokens of one KV head: what could have been read
    in the same time.

    ``min_tokens``: a segment shorter than this isn't worth an item of its own. ``merge_tokens``:
    what a segment of a split sequence costs over its reading (start, partial, its share of the
    merge). The defaults are estimates for an H200, where 64 tokens a segment still pay while slots
    are idle, and where one slot reads some 64 tokens in the 2 us of a merge; a backend passes
    what it measured.
    """

    min_tokens: int = 64
    merge_tokens: int = 64


@dataclass(frozen=True)
class SplitPlan:
    """The cuts of R sequences, as flat arrays for kernels and as lists for people.

    Sequence ``i`` owns segments ``row_start[i] : row_start[i + 1]``; segment ``s`` is the keys at
    positions ``starts[s] : stops[s]``. A sequence without keys has no segment.
    """

    row_start: NDArray[np.int32]  # [R + 1]
    starts: NDArray[np.int32]  # [S]
    stops: NDArray[np.int32]  # [S]
    seq_lens: NDArray[np.int64]  # [R]
    num_kv_heads: int
    num_cores: int
    mode: SplitMode
    segment_tokens: int  # the length aimed at: of ``fixed``, or what ``auto`` chose; else 0
    min_tokens: int

    @property
    def num_splits(self) -> NDArray[np.int32]:
        """Segments of each sequence [R]."""
        return np.diff(self.row_start)

    @cached_property
    def boundaries(self) -> list[list[tuple[int, int]]]:
        """For each sequence its segments ``(start, stop)`` in order, covering its keys exactly."""
        cuts = list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))
        edges = self.row_start.tolist()
        return [cuts[a:b] for a, b in pairwise(edges)]

    @cached_property
    def reasons(self) -> list[str]:
        """For each sequence the number of its segments and why, as a sentence."""
        keys = self._keys_per_row()
        return [
            f"{splits}: {self._why(splits, tokens)}"
            for splits, tokens in zip(self.num_splits.tolist(), keys.tolist(), strict=True)
        ]

    def _keys_per_row(self) -> NDArray[np.int64]:
        ends = np.concatenate([[0], np.cumsum(self.stops - self.starts, dtype=np.int64)])
        keys: NDArray[np.int64] = np.diff(ends[self.row_start])
        return keys

    def _why(self, splits: int, tokens: int) -> str:
        heads, rows, cores = self.num_kv_heads, len(self.seq_lens), self.num_cores
        if tokens == 0:
            return "no tokens"
        if self.mode == "off":
            return "splitting is off"
        if self.mode == "fixed":
            return f"{tokens:,} tokens in fixed segments of {self.segment_tokens:,}"
        idle = cores - heads * rows
        if splits > 1:
            if idle > 0:
                return f"{tokens:,} tokens, {_count(idle, 'idle core')}"
            share = math.ceil(self._keys_per_row().sum() * heads / cores)
            return f"{tokens:,} tokens, a core's fair share is {share:,}"
        if tokens < 2 * self.min_tokens:
            return f"{tokens:,} tokens are too few to split"
        if self.segment_tokens:
            return f"{tokens:,} tokens fit one segment of {self.segment_tokens:,}"
        if idle <= 0:
            return (
                f"{_count(heads, 'head')} x {_count(rows, 'sequence')} already fill "
                f"{_count(cores, 'core')}"
            )
        return f"{tokens:,} tokens: a merge would cost more than it saves"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plan_splits(
    seq_lens: Sequence[int] | NDArray[np.integer],
    *,
    num_kv_heads: int,
    block_size: int,
    num_cores: int,
    mode: SplitMode = "auto",
    split_tokens: int = DEFAULT_SPLIT_TOKENS,
    window: int | None = None,
    cost: SplitCost | None = None,
) -> SplitPlan:
    """Cut ``[max(0, n - window), n)`` of each sequence of ``n`` keys into segments.

    ``num_cores`` is how many work items can be resident at once: SMs x resident blocks on a GPU,
    threads on a CPU. Modes: ``off`` never cuts. ``fixed`` cuts at absolute multiples of
    ``split_tokens``, so that a row's result depends on nothing but the row.
    ``auto`` takes the segment length that lets the batch end soonest, counting whole waves of
    cores and the cost of merging, and cuts at block multiples (of a divisor of the block where a
    block is longer than a segment may be). ``cost`` defaults to :class:`SplitCost`.

    O(sequences + segments); ``auto`` adds a search over a few dozen lengths.

    Raises ConfigError if a number isn't positive or ``mode`` is unknown.
    """
    for name, number in (
        ("num_kv_heads", num_kv_heads),
        ("block_size", block_size),
        ("num_cores", num_cores),
        ("split_tokens", split_tokens),
        ("window", window),
    ):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; it must be at least 1")
    cost = cost or SplitCost()
    lens = np.asarray(seq_lens, np.int64).reshape(-1)
    keys = lens if window is None else np.minimum(lens, window)
    first = lens - keys
    segment_tokens = 0
    if mode == "off":
        counts = np.minimum(keys, 1)
    elif mode == "fixed":
        segment_tokens = split_tokens
        counts = -(-lens // segment_tokens) - first // segment_tokens
    elif mode == "auto":
        step = _alignment(block_size, cost.min_tokens)
        counts, segment_tokens = _auto_counts(keys, num_kv_heads, num_cores, step, cost)
    else:
        raise ConfigError(f"split mode {mode!r} is unknown; the modes are off, auto and fixed")

    row_start = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=row_start[1:])
    row = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(row_start[-1]) - row_start[row]
    if mode == "fixed":
        starts = (first[row] // segment_tokens + nth) * segment_tokens
    elif mode == "auto":
        starts = (first[row] + nth * keys[row] // counts[row]) // step * step
    else:
        starts = first[row]
    starts = np.where(nth == 0, first[row], starts)
    stops = np.append(starts, 0)[1:]
    stops[row_start[1:][counts > 0] - 1] = lens[counts > 0]
    return SplitPlan(
        row_start=row_start,
        starts=starts.astype(np.int32),
        stops=stops.astype(np.int32),
        seq_lens=lens,
        num_kv_heads=num_kv_heads,
        num_cores=num_cores,
        mode=mode,
        segment_tokens=segment_tokens,
        min_tokens=cost.min_tokens,
    )


def _alignment(block_size: int, min_tokens: int) -> int:
    """What ``auto`` cuts at multiples of: the block, or the part of it that a segment can hold."""
    return block_size if block_size <= min_tokens else math.gcd(block_size, min_tokens)


def _auto_counts(
    keys: NDArray[np.int64], heads: int, cores: int, step: int, cost: SplitCost
) -> tuple[NDArray[np.int64], int]:
    """Segments of each row and the segment length aimed at (0 if nothing is worth a cut)."""
    unsplit = np.minimum(keys, 1)
    longest = int(keys.max(initial=0))
    shortest_segment = max(step, cost.min_tokens)
    most = min(longest // shortest_segment, MAX_SPLITS)
    fair_share = heads * keys.sum() / cores
    if most < 2 or _makespan(keys, unsplit[None], heads, cores, cost)[0] <= 1.02 * fair_share:
        return unsplit, 0
    # How often to cut the longest row: few ways finely, many ways coarsely, and the counts that
    # fill one to four waves of cores.
    waves = np.arange(1, 5) * cores // max(1, heads * int(unsplit.sum()))
    tries = np.concatenate([np.arange(1, 17), np.geomspace(18, MAX_SPLITS, 16).astype(int), waves])
    tries = np.unique(np.clip(tries, 1, most))
    lengths = -(-longest // tries)
    counts = np.minimum(-(-keys // lengths[:, None]), np.maximum(keys // shortest_segment, unsplit))
    ends = _makespan(keys, counts, heads, cores, cost)
    best = int(np.argmax(ends <= 1.03 * ends.min()))  # the fewest: the estimate is no finer
    return counts[best], int(lengths[best]) if tries[best] > 1 else 0


def _makespan(
    keys: NDArray[np.int64], counts: NDArray[np.int64], heads: int, cores: int, cost: SplitCost
) -> NDArray[np.float64]:
    """About when the last core ends, in tokens, for each row of ``counts`` [tries, R].

    Items start longest first. Long ones, of which no core takes two while another has none, run
    in waves; short ones fill the gaps, and the last of them may stick out by its whole length.
    """
    overhead = np.where(counts > 1, cost.merge_tokens, 0)
    item = keys / np.maximum(counts, 1) + overhead
    mean = heads * (item * counts).sum(1) / cores
    longest = item.max(1)
    is_long = item > longest[:, None] / 2
    waves = np.ceil(heads * np.where(is_long, counts, 0).sum(1) / cores)
    makespan: NDArray[np.float64] = np.maximum(
        mean + np.where(is_long, 0, item).max(1), waves * longest
    )
    return makespan
