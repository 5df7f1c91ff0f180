"""The products of a fused decode step for any number of rows, in sums that don't depend on it; CUDA
through Gluon.

Few rows go through ``norm_linear``, ``norm_gate_up`` and ``linear_add``, whose sums follow from the
tile: always that of :func:`fixed_tile`. More rows go through kernels of their own in tiles of more
rows (``fused_kernels.py``), that add up the same products in the same order by the same
instructions.
"""

from __future__ import annotations

from typing import Any, Literal

import triton
from torch import Tensor

from octavo.kernels.gluon import TensorDescriptor
from octavo.kernels.linear.tiles import MAX_ROWS, Tile
from octavo.kernels.linear_add import triton as few_add
from octavo.kernels.linear_fixed.fused_kernels import (
    step_memory,
    wide_add_kernel,
    wide_gate_up_kernel,
    wide_linear_kernel,
)
from octavo.kernels.linear_fixed.tiles import GROUP, STEP, Wide, choose_wide, fixed_tile
from octavo.kernels.norm_gate_up import triton as few_gate_up
from octavo.kernels.norm_linear import triton as few_linear
from octavo.kernels.triton_launch import dependent_launches

SHARED_BYTES = 200 << 10  # of a multiprocessor, for steps on their way


def norm_linear(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    wide: Wide | None = None,
) -> None:
    """``out = h / rms @ weight.T + bias``, of any number of rows; else as
    :func:`octavo.kernels.norm_linear.triton.norm_linear`, without a cap. K is whole pieces."""
    (num_rows, k), n, parts = h.shape, len(weight), squares.shape[1]
    tile = fixed_tile(n, k)
    if num_rows <= MAX_ROWS and wide is None:
        few_linear.norm_linear(h, squares, weight, out, eps=eps, bias=bias, tile=tile)
        return
    wide = wide or choose_wide("linear", num_rows)
    wide_linear_kernel[(triton.cdiv(num_rows, wide.tokens), triton.cdiv(n, wide.rows))](
        _describe(h, tile, wide.tokens),
        squares,
        _describe(weight, tile, wide.rows),
        bias,
        out,
        n,
        num_rows,
        parts,
        eps,
        squares.stride(0),
        out.stride(0),
        BIAS=bias is not None,
        SUMS=triton.next_power_of_2(parts),
        **_constants(k, 1, tile, wide),
    )


def norm_gate_up(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    activation: Literal["silu", "gelu_tanh"] = "silu",
    bias: Tensor | None = None,
    wide: Wide | None = None,
) -> None:
    """``out = act(gate) * up``, of any number of rows; else as
    :func:`octavo.kernels.norm_gate_up.triton.norm_gate_up`."""
    (num_rows, k), inner, parts = h.shape, len(weight) // 2, squares.shape[1]
    tile = fixed_tile(2 * inner, k, 2)
    if num_rows <= MAX_ROWS and wide is None:
        few_gate_up.norm_gate_up(
            h, squares, weight, out, eps=eps, activation=activation, bias=bias, tile=tile
        )
        return
    wide = wide or choose_wide("gate_up", num_rows)
    wide_gate_up_kernel[(triton.cdiv(num_rows, wide.tokens), triton.cdiv(inner, wide.rows))](
        _describe(h, tile, wide.tokens),
        squares,
        _describe(weight, tile, wide.rows),
        bias,
        out,
        inner,
        num_rows,
        parts,
        eps,
        squares.stride(0),
        out.stride(0),
        BIAS=bias is not None,
        SILU=activation == "silu",
        SUMS=triton.next_power_of_2(parts),
        **_constants(k, 2, tile, wide),
    )


def square_columns(n: int, k: int, num_rows: int) -> int:
    """Columns of ``squares`` for a weight with ``n`` rows."""
    return int(triton.cdiv(n, GROUP))


def linear_add(
    y: Tensor,
    weight: Tensor,
    x: Tensor,
    norm: Tensor,
    h: Tensor,
    squares: Tensor,
    *,
    bias: Tensor | None = None,
    wide: Wide | None = None,
) -> None:
    """``x += y @ weight.T + bias``, ``h = x * norm`` and sums of squares, of any number of rows;
    else as :func:`octavo.kernels.linear_add.triton.linear_add`."""
    (num_rows, k), n = y.shape, len(weight)
    tile = fixed_tile(n, k)
    if num_rows <= MAX_ROWS and wide is None:
        few_add.linear_add(y, weight, x, norm, h, squares, bias=bias, tile=tile)
        return
    wide = wide or choose_wide("add", num_rows)
    assert wide.rows == GROUP
    wide_add_kernel[(triton.cdiv(num_rows, wide.tokens), triton.cdiv(n, wide.rows))](
        _describe(y, tile, wide.tokens),
        _describe(weight, tile, wide.rows),
        bias,
        x,
        norm,
        h,
        squares,
        n,
        num_rows,
        x.stride(0),
        h.stride(0),
        squares.stride(0),
        BIAS=bias is not None,
        **_constants(k, 1, tile, wide),
    )


def _describe(tensor: Tensor, tile: Tile, rows: int) -> Any:
    """A matrix [rows, K] as its pieces [K / PIECE, rows, PIECE], for the copy engine."""
    pieces = tensor.view(len(tensor), -1, tile.chunk // tile.num_warps).transpose(0, 1)
    block = [tile.num_warps, rows, STEP]
    return TensorDescriptor.from_tensor(pieces, block, step_memory(tile.num_warps, rows))


def _constants(k: int, parts: int, tile: Tile, wide: Wide) -> dict[str, Any]:
    dependent = dependent_launches()
    piece = tile.chunk // tile.num_warps
    steps = triton.cdiv(k, tile.chunk) * piece // STEP
    step_bytes = (parts * wide.rows + wide.tokens) * tile.num_warps * STEP * 2
    return {
        "K": k,
        "R": wide.rows,
        "N": wide.tokens,
        "S": tile.num_warps,
        "PIECE": piece,
        "STEP": STEP,
        "STAGES": max(1, min(wide.stages, steps, SHARED_BYTES // step_bytes)),
        "DEPENDENT": dependent,
        "num_warps": tile.num_warps,
        "launch_pdl": dependent,
        "enable_fp_fusion": False,  # the same roundings as in the kernels for few rows
    }
