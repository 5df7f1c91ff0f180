"""The kernels of :mod:`octavo.kernels.linear_fixed.fused` for more than one row, device side.

Weights are asked for before the kernel in front has ended; ``fused_products.py`` says how they are
multiplied.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.gluon import constexpr_function, gl, jit
from octavo.kernels.linear.tiles import ROW_WARPS
from octavo.kernels.linear.triton import linear_layout, unit_bases
from octavo.kernels.linear_fixed.fused_products import (
    ask_for_activations,
    ask_for_weights,
    multiply,
    out_layout,
)
from octavo.kernels.linear_fixed.tiles import GROUP
from octavo.kernels.norm_gate_up.triton import gated

SQUARES = tl.constexpr(GROUP)


@constexpr_function
def group_layout(R, T):
    """The same of [R // GROUP, GROUP, T]."""
    rows = unit_bases(GROUP, 1, 3) + unit_bases(R // GROUP, 0, 3)
    shape = [R // GROUP, GROUP, T]
    return linear_layout(rows[5:], rows[:5], unit_bases(T, 2, 3), ROW_WARPS, shape)


@constexpr_function
def squares_layout(T, SUMS):
    """Of sums of squares [T, SUMS], in the order in which one row's are added up."""
    parts = unit_bases(SUMS, 1, 2)
    return linear_layout(parts[5:], parts[:5], unit_bases(T, 0, 2), ROW_WARPS, [T, SUMS])


@jit
def take_squares(squares, stride, token, num_rows, parts, T: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums [T, COLUMNS] that the blocks that wrote x have left."""
    L: tl.constexpr = squares_layout(T, COLUMNS)
    m = token + gl.arange(0, T, layout=gl.SliceLayout(1, L))
    p = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    there = (m < num_rows)[:, None] & (p < parts)[None, :]
    return gl.load(squares + m[:, None] * stride + p[None, :], mask=there, other=0.0)


@jit
def inverse_rms(sums, eps, K, R: tl.constexpr, T: tl.constexpr):
    """``1 / sqrt(mean(x ** 2) + eps)`` of each row, [1, T]."""
    scale = gl.rsqrt(gl.sum(sums, 1) / K + eps)
    return gl.convert_layout(scale, gl.SliceLayout(0, out_layout(R, T)))[None, :]


@jit(do_not_specialize=["num_rows", "parts", "stride_squares"])
def wide_linear_kernel(
    h,
    squares,
    weight,
    bias,
    out,
    n,
    num_rows,
    parts,
    eps,
    stride_squares,
    stride_out,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    WALK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of weight rows). ``n`` are the rows of ``out``: with two parts those
    of gate, and of up as many."""
    T: tl.constexpr = WALK.tokens
    R: tl.constexpr = WALK.rows
    if DEPENDENT:
        gdc_launch_dependents()
    token, first = gl.program_id(0) * T, gl.program_id(1) * R
    ws, barriers = ask_for_weights(weight, first, n + first, WALK)
    OUT: tl.constexpr = out_layout(R, T)
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, T, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
        if WALK.parts == 2:
            up_added = gl.load(bias + n + rows, mask=rows < n, other=0.0).to(gl.float32)
    if DEPENDENT:
        gdc_wait()
    xs = ask_for_activations(barriers, h, token, WALK)
    sums = take_squares(squares, stride_squares, token, num_rows, parts, T, COLUMNS)
    scale = inverse_rms(sums, eps, K, R, T)
    products = multiply(ws, xs, barriers, weight, first, n + first, h, token, WALK)
    y = products[0] * scale
    if BIAS:
        y += added[:, None]
    if WALK.parts == 2:
        up = products[1] * scale
        if BIAS:
            up += up_added[:, None]
        y = gated(y, up, SILU)
    gl.store(
        out + m[None, :] * stride_out + rows[:, None],
        y.to(out.dtype.element_ty),
        mask=(m < num_rows)[None, :] & (rows < n)[:, None],
    )


@jit(do_not_specialize=["num_rows", "stride_squares"])
def wide_add_kernel(
    y,
    weight,
    bias,
    x,
    norm,
    h,
    squares,
    n,
    num_rows,
    stride_x,
    stride_h,
    stride_squares,
    BIAS: tl.constexpr,
    WALK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of weight rows)."""
    T: tl.constexpr = WALK.tokens
    R: tl.constexpr = WALK.rows
    if DEPENDENT:
        gdc_launch_dependents()
    token, first = gl.program_id(0) * T, gl.program_id(1) * R
    ws, barriers = ask_for_weights(weight, first, first, WALK)
    OUT: tl.constexpr = out_layout(R, T)
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, T, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    in_x = (m < num_rows)[None, :] & (rows < n)[:, None]
    gains = gl.load(norm + rows, mask=rows < n, other=0.0)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
    if DEPENDENT:
        gdc_wait()
    xs = ask_for_activations(barriers, y, token, WALK)
    places = x + m[None, :] * stride_x + rows[:, None]
    added_up = gl.load(places, mask=in_x, other=0.0).to(gl.float32)
    added_up += multiply(ws, xs, barriers, weight, first, first, y, token, WALK)[0]
    if BIAS:
        added_up += added[:, None]
    gl.store(places, added_up.to(x.dtype.element_ty), mask=in_x)
    scaled = (added_up * gains[:, None]).to(h.dtype.element_ty)
    gl.store(h + m[None, :] * stride_h + rows[:, None], scaled, mask=in_x)
    ALL: tl.constexpr = group_layout(R, T)
    groups = (added_up * added_up).reshape([R // SQUARES, SQUARES, T])
    groups = gl.convert_layout(groups, ALL, assert_trivial=True)
    group = first // SQUARES + gl.arange(
        0, R // SQUARES, layout=gl.SliceLayout(1, gl.SliceLayout(1, ALL))
    )
    m = (token + gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, ALL)))).to(gl.int64)
    gl.store(
        squares + m[None, :] * stride_squares + group[:, None],
        gl.sum(groups, 1),
        mask=(m < num_rows)[None, :] & (group * SQUARES < n)[:, None],
    )
