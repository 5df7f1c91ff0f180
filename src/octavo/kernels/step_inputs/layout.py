"""What a step's integers are packed as, and the buffers on the device that they go to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Packed lie, one behind the other: HEADER integers, of which the first five are the numbers of
# tokens T, rows R, prefill starts and logits rows, and the blocks W of the longest row; ids [T];
# the rows of the step before whose ids they are, or -1 [T]; positions [T]; slots [groups, T];
# seq_lens [R]; prefill_starts; logits_rows; block tables [groups, R, W].
HEADER = 8


@dataclass(frozen=True)
class StepInputs:
    """int32 on the device, as large as the largest step; what a step doesn't need is stale.

    Padding tokens have id 0, position 0 and slot -1, padding rows length 0. ``prefill_starts`` is
    ``query_start_loc`` of the prefill rows, beginning at 0. Tables are padded to multiples of four
    blocks: Triton compiles another kernel for every pointer that isn't aligned to 16 bytes.
    """

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [groups, tokens]
    seq_lens: Tensor  # [rows]
    prefill_lens: Tensor  # [rows]: those of the prefill rows, from the front
    prefill_starts: Tensor  # [rows + 1]
    logits_rows: Tensor  # [tokens]
    tables: Tensor  # [groups, rows, blocks]


def make_inputs(tokens: int, rows: int, groups: int, blocks: int, device: str) -> StepInputs:
    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return StepInputs(
        ids=ints(tokens),
        positions=ints(tokens),
        slots=ints(groups, tokens),
        seq_lens=ints(rows),
        prefill_lens=ints(rows),
        prefill_starts=ints(rows + 1),
        logits_rows=ints(tokens),
        tables=ints(groups, rows, -(-blocks // 4) * 4),
    )
