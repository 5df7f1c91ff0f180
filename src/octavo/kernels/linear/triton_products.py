"""The products of a block with a few activation rows, one of two ways, for CUDA through Gluon.

On Hopper one row has a way of its own (``triton_row.py``); else there is that of ``triton.py``. The
tile says which. Weights are on their way (``ask_for_weights``), and the wait for the kernel in
front is over.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl

from octavo.kernels.gluon import constexpr_function, gl, jit
from octavo.kernels.linear.table import choose_tile
from octavo.kernels.linear.tiles import Tile
from octavo.kernels.linear.triton import (
    inverse_rms,
    load_early,
    multiply,
    partial_layout,
    take_activations,
    take_squares,
    total,
)
from octavo.kernels.linear.triton_row import (
    load_early_row,
    multiply_row,
    result_layout,
    take_row,
    take_row_squares,
)
from octavo.kernels.triton_launch import has_warpgroups


def few_rows_tile(n: int, k: int, num_rows: int, parts: int = 1) -> Tile:
    """The tile for a ``[n, k]`` weight and so many activation rows, up to 16: that of two for one
    on a device without warpgroups."""
    return choose_tile(n, k, num_rows if has_warpgroups() else max(2, num_rows), parts)


@constexpr_function
def out_layout(S, R, M, ONE):
    """Of a part's products [R, M], of one row or of a few."""
    assert M == 1 or not ONE, "a tile for one activation row can't take several"
    return gl.SliceLayout(0, result_layout(R) if ONE else partial_layout(S, R, M))


@jit
def early_weights(
    tiles,
    barriers,
    weight,
    first_row,
    second_row,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    ONE: tl.constexpr,
):
    """The first ``EARLY`` chunks in registers, as soon as they have arrived."""
    if ONE:
        early = load_early_row(
            tiles, barriers, weight, first_row, second_row, ROWS, K, CHUNK, AHEAD, EARLY, PARTS
        )
    else:
        early = load_early(tiles, barriers, ROWS, CHUNK, EARLY, S, PARTS)
    return early


@jit
def products(
    tiles,
    barriers,
    weight,
    first_row,
    second_row,
    early,
    y,
    stride,
    num_rows,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    ONE: tl.constexpr,
):
    """``weights @ activations`` of each part, [ROWS // PARTS, M] in :func:`out_layout`, fp32, for
    the activation rows y [M, K]."""
    if ONE:
        row = take_row(y, K)
        parts = multiply_row(
            tiles,
            barriers,
            weight,
            first_row,
            second_row,
            early,
            row,
            ROWS,
            K,
            CHUNK,
            AHEAD,
            EARLY,
            PARTS,
        )
    else:
        activations = take_activations(y, stride, num_rows, 0, AHEAD, K, CHUNK, S, M)
        slices = multiply(
            tiles,
            barriers,
            weight,
            first_row,
            second_row,
            early,
            activations,
            y,
            stride,
            num_rows,
            ROWS,
            K,
            CHUNK,
            AHEAD,
            S,
            M,
            PARTS,
        )
        parts = ()
        for part in gl.static_range(PARTS):
            parts += (total(slices.index(part), ROWS // PARTS, S, M),)
    return parts


@jit
def normed_products(
    tiles,
    barriers,
    weight,
    first_row,
    second_row,
    early,
    h,
    stride,
    num_rows,
    squares,
    stride_squares,
    num_squares,
    eps,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    SUMS: tl.constexpr,
    PARTS: tl.constexpr,
    ONE: tl.constexpr,
):
    """:func:`products` of rows ``h / rms(x)``; ``squares`` [M, num_squares], fp32, are what the
    blocks that wrote x have left of its squares."""
    R: tl.constexpr = ROWS // PARTS
    if ONE:
        sums = take_row_squares(squares, num_squares, SUMS)
    else:
        sums = take_squares(squares, stride_squares, num_rows, num_squares, R, S, M, SUMS)
    parts = products(
        tiles,
        barriers,
        weight,
        first_row,
        second_row,
        early,
        h,
        stride,
        num_rows,
        ROWS,
        K,
        CHUNK,
        AHEAD,
        EARLY,
        S,
        M,
        PARTS,
        ONE,
    )
    scale = gl.rsqrt(gl.sum(sums, 0) / K + eps) if ONE else inverse_rms(sums, eps, K, R, S, M)
    normed = ()
    for part in gl.static_range(PARTS):
        normed += (parts[part] * scale,)
    return normed
