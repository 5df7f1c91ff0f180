"""The second half of RMSNorm and a product in one launch, for CUDA through Gluon: 1 to 16 rows."""
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
    normed_products,
    out_layout,
)
from octavo.kernels.triton_launch import dependent_launches, power_of_2


def norm_linear(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    tile: Tile | None = None,
) -> None:
    """``out = cap(h / rms @ weight.T + bias)``.

    ``h`` [M, K] bf16, ``squares`` [M, parts] fp32, ``weight`` [N, K] bf16, ``bias`` [N], ``out``
    [M, N] fp32 or bf16; M up to 16; innermost dimensions contiguous. One launch; ``weight`` and
    ``bias`` may not be written by the kernel in front.
    """
    (num_rows, k), n, parts = h.shape, len(weight), squares.shape[1]
    tile = tile or few_rows_tile(n, k, num_rows)
    dependent = dependent_launches()
    _norm_linear_kernel[(triton.cdiv(n, tile.rows),)](
        h,
        squares,
        describe(weight, tile),
        bias,
        out,
        n,
        num_rows,
        parts,
        eps,
        soft_cap or 0.0,
        h.stride(0),
        squares.stride(0),
        out.stride(0),
        K=k,
        BIAS=bias is not None,
        SOFT_CAP=soft_cap is not None,
        ROWS=tile.rows,
        CHUNK=tile.chunk,
        AHEAD=tile.ahead,
        EARLY=chunks_early(k, tile),
        S=tile.num_warps,
        M=power_of_2(num_rows),
        ONE=tile.one_row,
        SUMS=power_of_2(parts),
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        launch_pdl=dependent,
        enable_fp_fusion=False,  # the same roundings whatever M is compiled for
    )


@jit(do_not_specialize=["num_rows", "parts", "stride_squares"])
def _norm_linear_kernel(
    h,
    squares,
    weight,
    bias,
    out,
    n,
    num_rows,
    parts,
    eps,
    soft_cap,
    stride_h,
    stride_squares,
    stride_out,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    ONE: tl.constexpr,
    SUMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS),)."""
    if DEPENDENT:
        gdc_launch_dependents()
    first = gl.program_id(0) * ROWS
    FIRST: tl.constexpr = chunks_ahead(K, CHUNK, AHEAD)
    tiles, barriers = ask_for_weights(weight, first, first, ROWS, CHUNK, FIRST, 1)
    OUT: tl.constexpr = out_layout(S, ROWS, M, ONE)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
    early = early_weights(
        tiles, barriers, weight, first, first, ROWS, K, CHUNK, FIRST, EARLY, S, 1, ONE
    )
    if DEPENDENT:
        gdc_wait()
    y = normed_products(
        tiles,
        barriers,
        weight,
        first,
        first,
        early,
        h,
        stride_h,
        num_rows,
        squares,
        stride_squares,
        parts,
        eps,
        ROWS,
        K,
        CHUNK,
        FIRST,
        EARLY,
        S,
        M,
        SUMS,
        1,
        ONE,
    )[0]
    if BIAS:
        y += added[:, None]
    if SOFT_CAP:  # tanh by the exponential; right at both infinities
        y = soft_cap - 2.0 * soft_cap / (gl.exp(2.0 * y / soft_cap) + 1.0)
    gl.store(
        out + m.to(gl.int64)[None, :] * stride_out + rows[:, None],
        y.to(out.dtype.element_ty),
        mask=(m < num_rows)[None, :] & (rows < n)[:, None],
    )
