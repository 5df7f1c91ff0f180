"""Merging a few partials of many rows, for CUDA through Triton: each number is read once.

``attention/merge.py`` (``merge_lse``) is the reference.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton_launch import power_of_2

ROWS = 8  # of a block


def merge_rows(outs: Sequence[Tensor], lse: Tensor) -> tuple[Tensor, Tensor]:
    """P tensors ``outs`` [T, H, Dv] and ``lse`` [P, T, H], natural log, -inf for an empty partial,
    all contiguous: the merged ``out`` [T, H, Dv] in the same dtype and ``lse`` [T, H]. One
    launch."""
    merged, merged_lse = torch.empty_like(outs[0]), torch.empty_like(lse[0])
    rows, size = merged_lse.numel(), merged.shape[-1]
    if rows:
        _merge_rows_kernel[(triton.cdiv(rows, ROWS),)](
            tuple(outs),
            lse,
            merged,
            merged_lse,
            rows,
            PARTIALS=len(outs),
            SIZE=size,
            BLOCK=power_of_2(size),
            ROWS=ROWS,
            num_warps=4,
        )
    return merged, merged_lse


@triton.jit(do_not_specialize=["rows"])
def _merge_rows_kernel(
    outs,
    lse,
    merged,
    merged_lse,
    rows,
    PARTIALS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: (blocks of rows,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    row64, rows64 = row.to(tl.int64), rows.to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = there[:, None] & (d < SIZE)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for p in tl.static_range(PARTIALS):
        m = tl.maximum(m, tl.load(lse + p * rows64 + row64, mask=there, other=float("-inf")))
    base = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    for p in tl.static_range(PARTIALS):
        weight = tl.exp(tl.load(lse + p * rows64 + row64, mask=there, other=float("-inf")) - base)
        part = tl.load(outs[p] + row64[:, None] * SIZE + d[None, :], mask=mask, other=0.0)
        total += weight
        mean += weight[:, None] * part.to(tl.float32)
    mean /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        merged + row64[:, None] * SIZE + d[None, :], mean.to(merged.dtype.element_ty), mask=mask
    )
    tl.store(merged_lse + row64, m + tl.log(tl.where(total == 0.0, 1.0, total)), mask=there)
