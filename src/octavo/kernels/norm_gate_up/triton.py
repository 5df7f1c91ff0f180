"""The second half of RMSNorm, gate and up products and their activation in one launch, for CUDA
through Gluon: 1 to 16 rows."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Literal

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


def norm_gate_up(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    activation: Literal["silu", "gelu_tanh"] = "silu",
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """``out = act(gate) * up``, gate and up being products of ``h / rms``.

    ``h`` [M, K] bf16, ``squares`` [M, parts] fp32, ``weight`` [2 I, K] bf16: the rows of gate, then
    those of up; ``bias`` [2 I], ``out`` [M, I] fp32 or bf16; M up to 16; innermost dimensions
    contiguous. One launch; ``weight`` and ``bias`` may not be written by the kernel in front.
    ``tile.rows`` counts rows of gate and of up, 32 at least.
    """
    (num_rows, k), inner, parts = h.shape, len(weight) // 2, squares.shape[1]
    tile = tile or few_rows_tile(2 * inner, k, num_rows, parts=2)
    dependent = dependent_launches()
    _norm_gate_up_kernel[(triton.cdiv(inner, tile.rows // 2),)](
        h,
        squares,
        describe(weight, tile, parts=2),
        bias,
        out,
        inner,
        num_rows,
        parts,
        eps,
        h.stride(0),
        squares.stride(0),
        out.stride(0),
        K=k,
        BIAS=bias is not None,
        SILU=activation == "silu",
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
def _norm_gate_up_kernel(
    h,
    squares,
    weight,
    bias,
    out,
    inner,
    num_rows,
    parts,
    eps,
    stride_h,
    stride_squares,
    stride_out,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
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
    """Grid: (cdiv(I, ROWS / 2),). A block's tile has rows of gate, then as many of up."""
    if DEPENDENT:
        gdc_launch_dependents()
    HALF: tl.constexpr = ROWS // 2
    first = gl.program_id(0) * HALF
    FIRST: tl.constexpr = chunks_ahead(K, CHUNK, AHEAD)
    tiles, barriers = ask_for_weights(weight, first, inner + first, ROWS, CHUNK, FIRST, 2)
    OUT: tl.constexpr = out_layout(S, HALF, M, ONE)
    rows = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    if BIAS:
        gate_added = gl.load(bias + rows, mask=rows < inner, other=0.0).to(gl.float32)
        up_added = gl.load(bias + inner + rows, mask=rows < inner, other=0.0).to(gl.float32)
    early = early_weights(
        tiles, barriers, weight, first, inner + first, ROWS, K, CHUNK, FIRST, EARLY, S, 2, ONE
    )
    if DEPENDENT:
        gdc_wait()
    gate, up = normed_products(
        tiles,
        barriers,
        weight,
        first,
        inner + first,
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
        2,
        ONE,
    )
    if BIAS:
        gate += gate_added[:, None]
        up += up_added[:, None]
    y = gated(gate, up, SILU)
    gl.store(
        out + m[None, :] * stride_out + rows[:, None],
        y.to(out.dtype.element_ty),
        mask=(m < num_rows)[None, :] & (rows < inner)[:, None],
    )


@jit
def gated(gate, up, SILU: tl.constexpr):
    """``act(gate) * up``: SiLU, or GELU by way of tanh."""
    z = gate
    if not SILU:  # (1 + tanh(z / 2)) / 2 is sigmoid(z)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * up / (1.0 + gl.exp(-z))
