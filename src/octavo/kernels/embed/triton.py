"""Token ids to rows of the embedding, for CUDA through Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from octavo.kernels.triton_launch import dependent_launches

COLUMNS = 1024


def square_columns(hidden: int) -> int:
    """Columns of ``squares``: one for each block."""
    return int(triton.cdiv(hidden, COLUMNS))


def embed(
    ids: Tensor,
    table: Tensor,
    norm: Tensor,
    x: Tensor,
    h: Tensor,
    squares: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """``x = table[ids] * scale``, zeros for a negative id (a padding row's); ``h = x * norm``,
    ``squares`` = sums of squares of x.

    ``ids`` [M] integers, ``table`` [V, hidden], ``norm`` [hidden] fp32: the weight of the norm that
    comes next, ``x`` and ``h`` [M, hidden], ``squares`` [M, :func:`square_columns`] fp32; innermost
    dimensions contiguous. One launch that begins when all in front of it has ended, so that the
    kernels behind it may read early what steps before have written.
    """
    num_rows, hidden = x.shape
    _embed_kernel[(num_rows, square_columns(hidden))](
        ids,
        table,
        norm,
        x,
        h,
        squares,
        scale,
        table.stride(0),
        x.stride(0),
        h.stride(0),
        squares.stride(0),
        HIDDEN=hidden,
        COLUMNS=COLUMNS,
        EARLY=dependent_launches(),
        num_warps=4,
    )


@triton.jit
def _embed_kernel(
    ids,
    table,
    norm,
    x,
    h,
    squares,
    scale,
    stride_table,
    stride_x,
    stride_h,
    stride_squares,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (M, cdiv(hidden, COLUMNS))."""
    if EARLY:
        gdc_launch_dependents()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    there = column < HIDDEN
    token = tl.load(ids + row).to(tl.int64)
    values = tl.load(table + token * stride_table + column, mask=there & (token >= 0), other=0.0)
    values = values.to(tl.float32) * scale
    gains = tl.load(norm + column, mask=there, other=0.0)
    tl.store(x + row * stride_x + column, values.to(x.dtype.element_ty), mask=there)
    tl.store(h + row * stride_h + column, (values * gains).to(h.dtype.element_ty), mask=there)
    tl.store(squares + row * stride_squares + block, tl.sum(values * values, 0))
