"""A product added to the residual stream and the first half of the next RMSNorm in one launch, for
CUDA through Gluon: 1 to 16 rows."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.gluon import gl, jit
from octavo.kernels.linear.tiles import Tile
from octavo.kernels.linear.triton import (
    ask_for_weights,
    chunks_ahead,
    chunks_early,
    describe,
)
from octavo.kernels.linear.triton_products import (
    early_weights,
    few_rows_tile,
    out_layout,
    products,
)
from octavo.kernels.triton_launch import dependent_launches, power_of_2


def square_columns(n: int, k: int, num_rows: int, tile: Tile | None = None) -> int:
    """Columns of ``squares`` for a ``[n, k]`` weight: one for each block."""
    return int(triton.cdiv(n, (tile or few_rows_tile(n, k, num_rows)).rows))


def linear_add(
    y: Tensor,
    weight: Tensor,
    x: Tensor,
    norm: Tensor,
    h: Tensor,
    squares: Tensor,
    *,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """``x += y @ weight.T + bias``, ``h = x * norm``, ``squares`` = sums of squares of x.

    ``y`` [M, K] and ``weight`` [N, K] bf16, ``bias`` [N], ``x`` [M, N] fp32 or bf16, ``norm`` [N]
    fp32: the weight of the norm that comes next, ``h`` [M, N] bf16, ``squares`` [M,
    :func:`square_columns`] fp32; M up to 16; innermost dimensions contiguous. One launch;
    ``weight``, ``bias`` and ``norm`` may not be written by the kernel in front.
    """
    (num_rows, k), n = y.shape, len(weight)
    tile = tile or few_rows_tile(n, k, num_rows)
    dependent = dependent_launches()
    _linear_add_kernel[(square_columns(n, k, num_rows, tile),)](
        y,
        describe(weight, tile),
        bias,
        x,
        norm,
        h,
        squares,
        n,
        num_rows,
        y.stride(0),
        x.stride(0),
        h.stride(0),
        squares.stride(0),
        K=k,
        BIAS=bias is not None,
        ROWS=tile.rows,
        CHUNK=tile.chunk,
        AHEAD=tile.ahead,
        EARLY=chunks_early(k, tile),
        S=tile.num_warps,
        M=power_of_2(num_rows),
        ONE=tile.one_row,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        launch_pdl=dependent,
        enable_fp_fusion=False,  # the same roundings whatever M is compiled for
    )


@jit(do_not_specialize=["num_rows", "stride_squares"])
def _linear_add_kernel(
    y,
    weight,
    bias,
    x,
    norm,
    h,
    squares,
    n,
    num_rows,
    stride_y,
    stride_x,
    stride_h,
    stride_squares,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS),). A block reads and writes the same elements of ``x``."""
    if DEPENDENT:
        gdc_launch_dependents()
    block = gl.program_id(0)
    first = block * ROWS
    FIRST: tl.constexpr = chunks_ahead(K, CHUNK, AHEAD)
    tiles, barriers = ask_for_weights(weight, first, first, ROWS, CHUNK, FIRST, 1)
    OUT: tl.constexpr = out_layout(S, ROWS, M, ONE)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    gains = gl.load(norm + rows, mask=rows < n, other=0.0)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
    in_x = (m < num_rows)[None, :] & (rows < n)[:, None]
    early = early_weights(
        tiles, barriers, weight, first, first, ROWS, K, CHUNK, FIRST, EARLY, S, 1, ONE
    )
    if DEPENDENT:
        gdc_wait()
    places = x + m[None, :] * stride_x + rows[:, None]
    added_up = gl.load(places, mask=in_x, other=0.0).to(gl.float32)
    added_up += products(
        tiles,
        barriers,
        weight,
        first,
        first,
        early,
        y,
        stride_y,
        num_rows,
        ROWS,
        K,
        CHUNK,
        FIRST,
        EARLY,
        S,
        M,
        1,
        ONE,
    )[0]
    if BIAS:
        added_up += added[:, None]
    gl.store(places, added_up.to(x.dtype.element_ty), mask=in_x)
    scaled = (added_up * gains[:, None]).to(h.dtype.element_ty)
    gl.store(h + m[None, :] * stride_h + rows[:, None], scaled, mask=in_x)
    gl.store(
        squares + m * stride_squares + block, gl.sum(added_up * added_up, 0), mask=m < num_rows
    )
