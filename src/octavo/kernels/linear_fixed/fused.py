"""The products of a fused decode step for any number of rows, in sums that don't depend on it; for
Hopper through Gluon.

One row goes through ``norm_linear``, ``norm_gate_up`` and ``linear_add`` as ever: its tile, which
follows from the weight's shape, decides which columns of K are added up with which. More rows go
through kernels of their own (``fused_kernels.py``), that add up the same products in the same
order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import triton
from torch import Tensor

from octavo.kernels.gluon import TensorDescriptor
from octavo.kernels.linear.table import choose_tile
from octavo.kernels.linear.tiles import ROW_WARPS, Tile
from octavo.kernels.linear.triton import tile_memory
from octavo.kernels.linear.triton_row import BLOCK, sums_of
from octavo.kernels.linear_add import triton as row_add
from octavo.kernels.linear_batch.triton import all_rows
from octavo.kernels.linear_fixed.fused_kernels import wide_add_kernel, wide_linear_kernel
from octavo.kernels.linear_fixed.tiles import GROUP, Walk, Wide, choose_wide
from octavo.kernels.norm_gate_up import triton as row_gate_up
from octavo.kernels.norm_linear import triton as row_linear
from octavo.kernels.triton_launch import dependent_launches, power_of_2

WIDTH = int(BLOCK.value)  # columns of K that belong to one sum


def row_tile(weight: Tensor, parts: int = 1) -> Tile:
    """One row's tile, from which the order of the sums follows."""
    n, k = weight.shape
    return choose_tile(n, k, 1, parts)


def add_tile(weight: Tensor) -> Tile:
    """The same where each block leaves a sum of squares."""
    return replace(row_tile(weight), rows=GROUP)


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
    :func:`octavo.kernels.norm_linear.triton.norm_linear`, without a cap."""
    if len(h) == 1 and wide is None:
        tile = row_tile(weight)
        row_linear.norm_linear(h, squares, weight, out, eps=eps, bias=bias, tile=tile)
        return
    _launch_linear(h, squares, weight, out, len(weight), eps, bias, 1, wide)


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
    if len(h) == 1 and wide is None:
        tile = row_tile(weight, parts=2)
        row_gate_up.norm_gate_up(
            h, squares, weight, out, eps=eps, activation=activation, bias=bias, tile=tile
        )
        return
    silu = activation == "silu"
    _launch_linear(h, squares, weight, out, len(weight) // 2, eps, bias, 2, wide, silu=silu)


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
    num_rows, n = len(y), len(weight)
    if num_rows == 1 and wide is None:
        tile = add_tile(weight)
        row_add.linear_add(y, weight, x, norm, h, squares, bias=bias, tile=tile)
        return
    side = _side(add_tile(weight), 1)
    wide = wide or choose_wide("add", num_rows, side)
    walk = _walk(side, weight.shape[1], 1, wide)
    wide_add_kernel[(triton.cdiv(num_rows, walk.tokens), triton.cdiv(n, walk.rows))](
        _describe(all_rows(y, walk.tokens), walk.tokens, walk.across),
        _describe(weight, walk.rows, walk.across),
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
        WALK=walk,
        **_options(),
    )


def _launch_linear(
    h: Tensor,
    squares: Tensor,
    weight: Tensor,
    out: Tensor,
    n: int,
    eps: float,
    bias: Tensor | None,
    parts: int,
    wide: Wide | None,
    *,
    silu: bool = False,
) -> None:
    num_rows, num_squares = squares.shape
    side = _side(row_tile(weight, parts), parts)
    wide = wide or choose_wide("linear" if parts == 1 else "gate_up", num_rows, side)
    walk = _walk(side, weight.shape[1], parts, wide)
    wide_linear_kernel[(triton.cdiv(num_rows, walk.tokens), triton.cdiv(n, walk.rows))](
        _describe(all_rows(h, walk.tokens), walk.tokens, walk.across),
        squares,
        _describe(weight, walk.rows, walk.across),
        bias,
        out,
        n,
        num_rows,
        num_squares,
        eps,
        squares.stride(0),
        out.stride(0),
        K=weight.shape[1],
        BIAS=bias is not None,
        SILU=silu,
        WALK=walk,
        COLUMNS=power_of_2(num_squares),
        **_options(),
    )


def _side(tile: Tile, parts: int) -> int:
    """How many blocks of columns lie below one another in an instruction for one row."""
    return 64 * parts // tile.rows


def _walk(side: int, k: int, parts: int, wide: Wide) -> Walk:
    sums = sums_of(side)
    across = min(side, wide.across)
    blocks = triton.cdiv(k, WIDTH * side * sums)  # of a sum
    depth = next(d for d in (3, 2, 1) if blocks % d == 0)
    steps = side // across * sums * blocks // depth
    step_bytes = (64 + wide.tokens * across) * depth * WIDTH * 2
    return Walk(
        tokens=wide.tokens,
        rows=64 // (across * parts),
        parts=parts,
        across=across,
        side=side,
        sums=sums,
        steps=blocks // depth,
        depth=depth,
        stages=max(2, min(steps, wide.shared_kb * 1024 // step_bytes)),
    )


def _options() -> dict[str, Any]:
    dependent = dependent_launches()
    return {
        "DEPENDENT": dependent,
        "num_warps": ROW_WARPS,
        "launch_pdl": dependent,
        "enable_fp_fusion": False,  # the same roundings as in the kernels for one row
    }


def _describe(matrix: Tensor, rows: int, across: int) -> Any:
    """What the copy engine must know of a matrix [N, K] to copy so many rows of ``across``
    neighbouring blocks."""
    block = [rows, across * WIDTH]
    return TensorDescriptor.from_tensor(matrix, block, tile_memory(*block))
