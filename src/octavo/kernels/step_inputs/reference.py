"""Laying out a step's integers, said in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.step_inputs.layout import HEADER, StepInputs


def unpack(
    packed: Tensor, row_ids: Tensor, inputs: StepInputs, *, num_tokens: int, num_rows: int
) -> None:
    """See :func:`octavo.kernels.step_inputs.triton.unpack`."""
    n, rows, num_starts, num_logits, blocks = packed[:5].tolist()
    groups = len(inputs.slots)
    counts = [n, n, n, groups * n, rows, num_starts, num_logits, groups * rows * blocks]
    ids, id_rows, positions, slots, lens, starts, logits, tables = torch.split(
        packed[HEADER : HEADER + sum(counts)], counts
    )
    known = row_ids[id_rows.long().clamp(min=0)]
    inputs.ids[:num_tokens] = 0
    inputs.ids[:n] = torch.where(id_rows < 0, ids, known)
    inputs.positions[:num_tokens] = 0
    inputs.positions[:n] = positions
    inputs.slots[:, :num_tokens] = -1
    inputs.slots[:, :n] = slots.view(groups, n)
    inputs.seq_lens[:num_rows] = 0
    inputs.seq_lens[:rows] = lens
    if num_starts:
        inputs.prefill_lens[: num_starts - 1] = lens[rows - num_starts + 1 :]
    inputs.prefill_starts[:num_starts] = starts
    inputs.logits_rows[:num_logits] = logits
    inputs.tables[:, :rows, :blocks] = tables.view(groups, rows, blocks)


def advance(inputs: StepInputs, ids: Tensor) -> None:
    """Make the inputs of a step in which each row decodes those of the next, whose ids [rows] these
    are: a token further on, in the block of the token before. Where that was a block's last, the
    slot is wrong, and the inputs must be laid out anew. Padding stays."""
    rows = len(ids)
    inputs.ids[:rows] = ids
    inputs.positions[:rows] += 1
    inputs.slots[:, :rows] += 1
    inputs.seq_lens[:rows] += 1
