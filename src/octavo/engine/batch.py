"""One step's work as plain numpy arrays, built once per step and readable by any process: what is
computed, and how its logits are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling import SamplingBatch, SamplingRow, make_sampling_batch

if TYPE_CHECKING:
    from octavo.engine.scheduler import ScheduledRow

Int32 = NDArray[np.int32]

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class StepBatch:
    """T tokens of R rows (one row a request); rows that decode, a single token each, come first.

    Row ``r`` owns tokens ``query_start_loc[r] : query_start_loc[r + 1]``, the newest of its
    ``seq_lens[r]`` tokens. ``input_ids`` is -1 where the id is still on the device; it is then the
    id that the step before sampled for its row ``id_rows`` (-1 elsewhere). ``slot_mapping`` and
    ``block_table`` have one entry per KV group: ``slot = block * block_size + offset``, and
    ``block_table[g][r, i]`` holds positions ``i * block_size`` and on. Table entries past the
    row's last block, and those that its sliding window has left behind, are -1 and never read.

    The step's logits are wanted for tokens ``logits_indices`` [L] (ascending). The rows that
    sample are those with their last prompt or output token in the step: ``sample_indices`` [S] are
    their places in the L logits and ``sample_rows`` [S] their rows; the other logits serve
    ``prompt_logprobs``.
    """

    input_ids: Int32  # [T]
    id_rows: Int32  # [T]
    positions: Int32  # [T]
    query_start_loc: Int32  # [R + 1]
    seq_lens: Int32  # [R]
    num_decodes: int  # rows for decode's kernels
    slot_mapping: tuple[Int32, ...]  # per group [T]
    block_table: tuple[Int32, ...]  # per group [R, blocks of the longest row]
    logits_indices: Int32  # [L]
    sample_indices: Int32  # [S]
    sample_rows: Int32  # [S]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


def build_step_batch(rows: Sequence[ScheduledRow], block_size: int) -> StepBatch:
    """Turn a schedule into arrays; each request notes its row, for the step that follows."""
    input_ids: list[int] = []
    on_device: list[tuple[int, int]] = []  # token, and its row in the step before
    logits_indices: list[int] = []
    sample_indices: list[int] = []
    sample_rows: list[int] = []
    for r, row in enumerate(rows):
        request, first = row.request, len(input_ids)
        input_ids += request.token_ids[row.start : row.stop]
        if len(input_ids) < first + row.stop - row.start:  # its last id is still on the device
            on_device.append((len(input_ids), request.row))
            input_ids.append(-1)
        request.row = r
        if row.scored:
            logits_indices += [first + position - row.start for position in row.scored]
        if row.samples:
            sample_indices.append(len(logits_indices))
            sample_rows.append(r)
            logits_indices.append(len(input_ids) - 1)

    starts = np.array([row.start for row in rows], np.int32)
    seq_lens = np.array([row.stop for row in rows], np.int32)
    counts = seq_lens - starts
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    row_of_token = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions = np.arange(len(input_ids), dtype=np.int32)
    positions += (starts - query_start_loc[:-1])[row_of_token]
    id_rows = np.full(len(input_ids), -1, np.int32)
    for token, row_before in on_device:
        id_rows[token] = row_before

    num_blocks = (-(-seq_lens // block_size)).tolist()
    block_tables = []
    slot_mappings = []
    for group in range(len(rows[0].request.blocks.tables)):
        table = np.full((len(rows), max(num_blocks)), -1, np.int32)
        for r, (row, used) in enumerate(zip(rows, num_blocks, strict=True)):
            table[r, :used] = row.request.blocks.tables[group].entries[:used]
        block_tables.append(table)
        blocks = table[row_of_token, positions // block_size]
        slot_mappings.append(blocks * np.int32(block_size) + positions % block_size)

    return StepBatch(
        input_ids=np.array(input_ids, np.int32),
        id_rows=id_rows,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_decodes=sum(row.decodes for row in rows),
        slot_mapping=tuple(slot_mappings),
        block_table=tuple(block_tables),
        logits_indices=np.array(logits_indices, np.int32),
        sample_indices=np.array(sample_indices, np.int32),
        sample_rows=np.array(sample_rows, np.int32),
    )


def build_sampling_batch(
    rows: Sequence[ScheduledRow], batch: StepBatch, vocab_size: int
) -> SamplingBatch:
    """What the rows of ``batch`` ask of the sampler. Every id before it must be known: a grammar's
    mask follows from them."""
    scored = [(row.request, position) for row in rows for position in row.scored]
    return make_sampling_batch(
        [_sampling_row(row.request) for row in rows if row.samples],
        sample_indices=batch.sample_indices,
        prompt_indices=_others(batch.sample_indices, len(batch.logits_indices)),
        prompt_targets=[request.token_ids[position + 1] for request, position in scored],
        prompt_top=[request.params.prompt_logprobs or 0 for request, _ in scored],
        vocab_size=vocab_size,
    )


def _others(indices: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Which of ``count`` are not among ``indices`` (ascending)."""
    if len(indices) == count:
        return _NONE
    return np.delete(np.arange(count, dtype=np.int32), indices)


def _sampling_row(request: Request) -> SamplingRow:
    banned_ids, mask = request.banned_ids, None
    if request.matcher is not None and request.status is not RequestStatus.FINISHED:
        banned_ids, mask = (), request.matcher.mask(banned_ids)
    return SamplingRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        seed=request.seed,
        choice=request.choice,
        position=len(request.output_token_ids),
        banned_ids=banned_ids,
        mask=mask,
    )
