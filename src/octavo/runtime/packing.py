"""A step batch as one array of integers, to be uploaded at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.engine.batch import StepBatch
from octavo.kernels.step_inputs.layout import HEADER

_NONE = np.empty(0, np.int32)


def pack(batch: StepBatch, out: NDArray[np.int32]) -> int:
    """Write the step to the front of ``out``, in the order of ``kernels/step_inputs/layout.py``;
    returns the number of integers."""
    first = batch.num_decodes
    starts = batch.query_start_loc[first:] - first if first < batch.num_rows else _NONE
    blocks = batch.block_table[0].shape[1]
    out[:5] = batch.num_tokens, batch.num_rows, len(starts), len(batch.logits_indices), blocks
    place = HEADER
    for part in (
        batch.input_ids,
        batch.id_rows,
        batch.positions,
        *batch.slot_mapping,
        batch.seq_lens,
        starts,
        batch.logits_indices,
        *batch.block_table,
    ):
        out[place : place + part.size] = part.reshape(-1)
        place += part.size
    return place


def most_ints(tokens: int, rows: int, groups: int, blocks: int) -> int:
    """What :func:`pack` may write for a step of up to so many tokens, rows and blocks a row."""
    return HEADER + (4 + groups) * tokens + 2 * rows + 1 + groups * rows * blocks
