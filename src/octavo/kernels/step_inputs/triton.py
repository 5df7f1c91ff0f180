"""Laying out a step's integers on the device, for CUDA through Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.step_inputs.layout import HEADER, StepInputs

BLOCK = 256


def unpack(
    packed: Tensor, row_ids: Tensor, inputs: StepInputs, *, num_tokens: int, num_rows: int
) -> None:
    """Spread ``packed`` (``layout.py``) over the step's inputs, with the ids that only the device
    knows taken from ``row_ids`` (by row of the step before). What is packed says how large the step
    is; as far as it has fewer than ``num_tokens`` and ``num_rows``, padding is written. One launch,
    no waiting."""
    _unpack_kernel[(max(-(-(num_tokens + 1) // BLOCK), num_rows),)](
        packed,
        row_ids,
        inputs.ids,
        inputs.positions,
        inputs.slots,
        inputs.seq_lens,
        inputs.prefill_lens,
        inputs.prefill_starts,
        inputs.logits_rows,
        inputs.tables,
        num_tokens,
        num_rows,
        inputs.slots.stride(0),
        *inputs.tables.stride()[:2],
        GROUPS=len(inputs.slots),
        HEADER=HEADER,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _unpack_kernel(
    packed,
    row_ids,
    ids_out,
    positions_out,
    slots_out,
    lens_out,
    prefill_lens_out,
    starts_out,
    logits_out,
    tables_out,
    num_tokens,
    num_rows,
    stride_slots,
    stride_tables,
    stride_table,
    GROUPS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: enough blocks for the tokens, and one a row. Each takes a stretch of the flat parts and
    one row's block tables."""
    i = tl.program_id(0)
    at = i * BLOCK + tl.arange(0, BLOCK)
    tokens, rows = tl.load(packed), tl.load(packed + 1)
    starts, logits = tl.load(packed + 2), tl.load(packed + 3)
    blocks = tl.load(packed + 4)
    real = at < tokens
    padded = at < num_tokens
    source = packed + HEADER
    ids = tl.load(source + at, mask=real, other=0)
    source += tokens
    id_rows = tl.load(source + at, mask=real, other=-1)
    known = tl.load(row_ids + tl.maximum(id_rows, 0), mask=real & (id_rows >= 0), other=0)
    tl.store(ids_out + at, tl.where(id_rows < 0, ids, known), mask=padded)
    source += tokens
    tl.store(positions_out + at, tl.load(source + at, mask=real, other=0), mask=padded)
    source += tokens
    for group in tl.static_range(GROUPS):
        slots = tl.load(source + at, mask=real, other=-1)
        tl.store(slots_out + group * stride_slots + at, slots, mask=padded)
        source += tokens
    lens = tl.load(source + at, mask=at < rows, other=0)
    tl.store(lens_out + at, lens, mask=at < num_rows)
    first = rows - starts + 1  # prefill row
    prefills = (starts > 0) & (at >= first) & (at < rows)
    tl.store(prefill_lens_out + at - first, lens, mask=prefills)
    source += rows
    tl.store(starts_out + at, tl.load(source + at, mask=at < starts, other=0), mask=at < starts)
    source += starts
    tl.store(logits_out + at, tl.load(source + at, mask=at < logits, other=0), mask=at < logits)
    source += logits
    if i < rows:
        for group in tl.static_range(GROUPS):
            table = source + i * blocks
            to = tables_out + group * stride_tables + i.to(tl.int64) * stride_table
            for first in range(0, blocks, BLOCK):
                j = first + tl.arange(0, BLOCK)
                tl.store(to + j, tl.load(table + j, mask=j < blocks, other=0), mask=j < blocks)
            source += rows * blocks


@triton.jit
def advance_row(row, token, inputs, stride_slots, GROUPS: tl.constexpr):
    """A part of a kernel: :func:`octavo.kernels.step_inputs.reference.advance` of one row.
    ``inputs`` are ids, positions, slots and lengths. Nothing waits for the memory."""
    ids, positions, slots, seq_lens = inputs
    tl.store(ids + row, token)
    tl.atomic_add(positions + row, 1, sem="relaxed")
    tl.atomic_add(seq_lens + row, 1, sem="relaxed")
    for group in tl.static_range(GROUPS):
        tl.atomic_add(slots + group * stride_slots + row, 1, sem="relaxed")
