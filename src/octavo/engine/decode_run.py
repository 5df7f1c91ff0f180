"""A stretch of steps in which the same rows decode: what the next one needs is what the last one
had, a token further on.

So it is advanced as arrays, where the scheduler and ``engine/batch.py`` go from row to row. A row
that ends leaves the run. Everything else that changes the schedule (an admission, a lack of blocks)
ends the run, and the scheduler plans the next step; nothing is lost, as requests are up to date
after every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.cache import KVCache
from octavo.engine.batch import StepBatch
from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling import SamplingBatch
from octavo.engine.scheduler import ScheduledRow, Scheduler

Int32 = NDArray[np.int32]

_ROW_FIELDS = (  # of a SamplingBatch, besides those that count
    "temperature",
    "top_k",
    "top_p",
    "floor",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "choice",
    "num_logprobs",
)


@dataclass(frozen=True)
class RunStep:
    """One step of a run: a token of each request, and an id sampled for each. ``goes_on``: all rows
    of the step before are there, in the same order, and none has begun a block."""

    requests: list[Request]
    batch: StepBatch
    sampling: SamplingBatch
    goes_on: bool


def start_run(
    rows: Sequence[ScheduledRow],
    batch: StepBatch,
    sampling: SamplingBatch,
    scheduler: Scheduler,
    kv: KVCache,
) -> DecodeRun | None:
    """The run that may follow a step, None where its rows are not alike: each must be a single
    token that samples, by rules that don't hang on the tokens before."""
    num_rows = len(rows)
    alike = (
        num_rows == batch.num_tokens == len(batch.sample_rows) == len(batch.logits_indices)
        and not len(sampling.ban_rows)
        and not len(sampling.mask_rows)
        and bool((sampling.repetition_penalty == 1).all())
        and not sampling.frequency_penalty.any()
        and not sampling.presence_penalty.any()
    )
    return (
        DecodeRun([row.request for row in rows], batch, sampling, scheduler, kv) if alike else None
    )


class DecodeRun:
    """The module's stretch of steps: made by :func:`start_run`, advanced a step at a time."""

    def __init__(
        self,
        requests: list[Request],
        batch: StepBatch,
        sampling: SamplingBatch,
        scheduler: Scheduler,
        kv: KVCache,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._kv = kv
        self._epoch = scheduler.epoch
        self._num_removed = -1  # how many requests were gone when we looked last
        self._sampling = sampling
        self._positions = batch.positions  # of the last step's tokens
        self._last = np.array([r.max_total_tokens - 2 for r in requests], np.int32)
        self._prompt_lens = np.array([len(r.prompt_token_ids) for r in requests], np.int32)
        self._tables = [table.copy() for table in batch.block_table]
        self._counting = np.arange(len(requests) + 1, dtype=np.int32)

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its likeliest id, and nothing besides is asked for."""
        sampling = self._sampling
        return not (
            sampling.temperature.any()
            or sampling.num_logprobs.max(initial=-1) >= 0
            or sampling.edits_logits
        )

    @property
    def next_seq_len(self) -> int:
        """Tokens of the longest row in the next step."""
        return int(self._positions.max()) + 2

    @property
    def steps_left(self) -> int:
        """Steps before a row ends by its length."""
        return int((self._last - self._positions).min())

    def next(self, *, on_device: bool) -> RunStep | None:
        """Plan the next step and count its tokens as computed, or None: the run is over.
        ``on_device``: the ids of the step before are not known here yet."""
        if self._epoch != self._scheduler.epoch or self._scheduler.may_admit:
            return None
        positions = self._positions + np.int32(1)
        kept = self._kept(positions)
        if kept is not None:
            if not len(kept) or len(self._sampling.bias_rows):
                return None
            self._keep(kept)
            positions = positions[kept]
        begun = positions % self._kv.block_size == 0
        if not self._extend(positions, begun):
            return None
        self._positions = positions
        requests = self._requests
        for request in requests:
            request.num_computed_tokens += 1
            request.num_pending_ids += 1

        num_rows, counting = len(requests), self._counting
        none = np.full(num_rows, -1, np.int32)
        if on_device:
            input_ids, id_rows = none, counting[:num_rows] if kept is None else kept
        else:
            ids = (request.token_ids[-1] for request in requests)
            input_ids, id_rows = np.fromiter(ids, np.int32, num_rows), none
        seq_lens = positions + np.int32(1)
        size = self._kv.block_size
        used = -(-int(seq_lens.max()) // size)
        rows = counting[:num_rows]
        batch = StepBatch(
            input_ids=input_ids,
            id_rows=id_rows,
            positions=positions,
            query_start_loc=counting,
            seq_lens=seq_lens,
            num_decodes=num_rows,
            slot_mapping=tuple(
                table[rows, positions // size] * np.int32(size) + positions % size
                for table in self._tables
            ),
            block_table=tuple(table[:, :used].copy() for table in self._tables),
            logits_indices=rows,
            sample_indices=rows,
            sample_rows=rows,
        )
        counted = {"sample_indices": rows, "position": seq_lens - self._prompt_lens}
        sampling = SamplingBatch(**vars(self._sampling) | counted)  # half the time of replace
        return RunStep(requests, batch, sampling, goes_on=kept is None and not begun.any())

    def _kept(self, positions: Int32) -> Int32 | None:
        """The rows that go on to these positions; None: all."""
        gone = positions > self._last
        if self._num_removed != self._scheduler.num_removed:
            self._num_removed = self._scheduler.num_removed
            gone |= [request.status is not RequestStatus.RUNNING for request in self._requests]
        return np.flatnonzero(~gone).astype(np.int32) if gone.any() else None

    def _keep(self, rows: Int32) -> None:
        self._requests = [self._requests[row] for row in rows.tolist()]
        for row, request in enumerate(self._requests):
            request.row = row
        self._last, self._prompt_lens = self._last[rows], self._prompt_lens[rows]
        self._tables = [table[rows] for table in self._tables]
        self._counting = self._counting[: len(rows) + 1]
        fields = {name: getattr(self._sampling, name)[rows] for name in _ROW_FIELDS}
        self._sampling = replace(self._sampling, **fields)

    def _extend(self, positions: Int32, begun: NDArray[np.bool_]) -> bool:
        """Make a place for every row's token, where it has ``begun`` a block, and give back what
        windows have left behind; False where blocks lack."""
        kv, size = self._kv, self._kv.block_size
        changed = begun.copy()
        for group in kv.groups:
            if group.window is not None:
                changed |= (positions - group.window + 1) % size == 0
        for row in np.flatnonzero(changed).tolist():
            request, position = self._requests[row], int(positions[row])
            kv.drop_behind(request.blocks, position)
            if not kv.extend(request.blocks, position + 1):
                return False
            used = position // size + 1
            for index, blocks in enumerate(request.blocks.tables):
                self._widen(index, used)
                self._tables[index][row, :used] = blocks.entries[:used]
        return True

    def _widen(self, index: int, num_blocks: int) -> None:
        table = self._tables[index]
        if num_blocks > table.shape[1]:
            wider = np.full((len(table), num_blocks + 8), -1, np.int32)
            wider[:, : table.shape[1]] = table
            self._tables[index] = wider
