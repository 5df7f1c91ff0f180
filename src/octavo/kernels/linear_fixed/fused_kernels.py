"""The kernels of :mod:`octavo.kernels.linear_fixed.fused` for more than a few rows, device side.

A block has ``R`` rows of each part of the weight and ``N`` activation rows. K lies in pieces of
``PIECE`` columns, of which ``S`` side by side are a chunk; each of the ``S`` warps has a piece of
every chunk, and a sum for even chunks and one for odd ones. All warps walk through their pieces
``STEP`` columns at a time; ``STAGES`` steps of weights and activations are on their way to shared
memory. Weights are asked for before the kernel in front has ended.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.gluon import constexpr_function, gl, jit, mbarrier, mma_v2, tma
from octavo.kernels.linear.triton import (
    activation_layout,
    inverse_rms,
    partial_layout,
    product_layout,
    take_squares,
    total,
    weight_layout,
)
from octavo.kernels.norm_gate_up.triton import gated


@constexpr_function
def step_memory(S, ROWS):
    """Of [S, ROWS, STEP], in lines of 64 bytes: eight threads that take 16 of them each, of two
    rows, meet no bank twice."""
    return gl.NVMMASharedLayout.get_default_for([S, ROWS, 32], gl.bfloat16)


@constexpr_function
def slices_memory(S, R, N):
    """Rows of N floats, far enough apart that sixteen threads can read a column of them at once."""
    return gl.PaddedSharedLayout.with_identity_for([[N, 2]], [S, R, N], [2, 1, 0])


@constexpr_function
def num_steps(K, S, PIECE, STEP):
    return (K + S * PIECE - 1) // (S * PIECE) * (PIECE // STEP)


@jit
def ask_for_weights(
    weight,
    first_row,
    second_row,
    R: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Shared memory [STAGES * PARTS, S, R, STEP], into which the first steps of the rows from
    ``first_row`` on, and in a second part those from ``second_row`` on, are being copied; and a
    barrier for each, which waits for activations too. What lies outside becomes zero."""
    weights = gl.allocate_shared_memory(
        weight.dtype, [STAGES * PARTS, S, R, STEP], step_memory(S, R)
    )
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        copy_weights(
            weights, barriers, weight, first_row, second_row, i, i, R, N, S, PIECE, STEP, PARTS
        )
    return weights, barriers


@jit
def copy_weights(
    weights,
    barriers,
    weight,
    first_row,
    second_row,
    i,
    slot,
    R: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Begin to copy step ``i`` to ``slot``."""
    barrier = barriers.index(slot)
    slices, column = i * STEP // PIECE * S, i * STEP % PIECE
    mbarrier.expect(barrier, (R * PARTS + N) * S * STEP * 2)
    tma.async_copy_global_to_shared(
        weight, [slices, first_row, column], barrier, weights.index(slot * PARTS)
    )
    if PARTS == 2:
        tma.async_copy_global_to_shared(
            weight, [slices, second_row, column], barrier, weights.index(slot * PARTS + 1)
        )


@jit
def copy_activations(
    activations,
    barriers,
    y,
    token,
    i,
    slot,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
):
    slices, column = i * STEP // PIECE * S, i * STEP % PIECE
    tma.async_copy_global_to_shared(
        y, [slices, token, column], barriers.index(slot), activations.index(slot)
    )


@jit
def multiply(
    weights,
    barriers,
    weight,
    first_row,
    second_row,
    y,
    token,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``weights @ activations`` of each slice, in shared memory [PARTS, S, R, N], fp32."""
    STEPS: tl.constexpr = num_steps(K, S, PIECE, STEP)
    activations = gl.allocate_shared_memory(weight.dtype, [STAGES, S, N, STEP], step_memory(S, N))
    for i in gl.static_range(STAGES):
        copy_activations(activations, barriers, y, token, i, i, S, PIECE, STEP)
    zeros = gl.zeros([S, R, N], gl.float32, layout=product_layout(S))
    even_0, odd_0, even_1, odd_1 = zeros, zeros, zeros, zeros
    for i in gl.static_range(STEPS):
        mbarrier.wait(barriers.index(i % STAGES), i // STAGES % 2)
        w_0 = weights.index(i % STAGES * PARTS).load(weight_layout(S))
        x = activations.index(i % STAGES).permute((0, 2, 1)).load(activation_layout(S))
        if i * STEP // PIECE % 2 == 0:
            even_0 = mma_v2(w_0, x, even_0)
        else:
            odd_0 = mma_v2(w_0, x, odd_0)
        if PARTS == 2:
            w_1 = weights.index(i % STAGES * PARTS + 1).load(weight_layout(S))
            if i * STEP // PIECE % 2 == 0:
                even_1 = mma_v2(w_1, x, even_1)
            else:
                odd_1 = mma_v2(w_1, x, odd_1)
        if i + STAGES < STEPS:
            gl.thread_barrier()  # all warps are through with the step that is overwritten
            copy_weights(
                weights,
                barriers,
                weight,
                first_row,
                second_row,
                i + STAGES,
                i % STAGES,
                R,
                N,
                S,
                PIECE,
                STEP,
                PARTS,
            )
            copy_activations(
                activations, barriers, y, token, i + STAGES, i % STAGES, S, PIECE, STEP
            )
    slices = gl.allocate_shared_memory(gl.float32, [PARTS, S, R, N], slices_memory(S, R, N))
    slices.index(0).store(even_0 + odd_0)
    if PARTS == 2:
        slices.index(1).store(even_1 + odd_1)
    gl.thread_barrier()
    return slices


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
    R: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    SUMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of weight rows)."""
    if DEPENDENT:
        gdc_launch_dependents()
    token, first = gl.program_id(0) * N, gl.program_id(1) * R
    weights, barriers = ask_for_weights(weight, first, first, R, N, S, PIECE, STEP, STAGES, 1)
    OUT: tl.constexpr = gl.SliceLayout(0, partial_layout(S, R, N))
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, N, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
    if DEPENDENT:
        gdc_wait()
    sums = take_squares(
        squares + token * stride_squares, stride_squares, num_rows - token, parts, 16, S, N, SUMS
    )
    slices = multiply(
        weights, barriers, weight, first, first, h, token, R, N, K, S, PIECE, STEP, STAGES, 1
    )
    scale = inverse_rms(sums, eps, K, R, S, N)
    y = total(slices.index(0), R, S, N) * scale
    if BIAS:
        y += added[:, None]
    gl.store(
        out + m[None, :] * stride_out + rows[:, None],
        y.to(out.dtype.element_ty),
        mask=(m < num_rows)[None, :] & (rows < n)[:, None],
    )


@jit(do_not_specialize=["num_rows", "parts", "stride_squares"])
def wide_gate_up_kernel(
    h,
    squares,
    weight,
    bias,
    out,
    inner,
    num_rows,
    parts,
    eps,
    stride_squares,
    stride_out,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    SUMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of rows of gate and of up)."""
    if DEPENDENT:
        gdc_launch_dependents()
    token, first = gl.program_id(0) * N, gl.program_id(1) * R
    weights, barriers = ask_for_weights(
        weight, first, inner + first, R, N, S, PIECE, STEP, STAGES, 2
    )
    OUT: tl.constexpr = gl.SliceLayout(0, partial_layout(S, R, N))
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, N, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    if BIAS:
        gate_added = gl.load(bias + rows, mask=rows < inner, other=0.0).to(gl.float32)
        up_added = gl.load(bias + inner + rows, mask=rows < inner, other=0.0).to(gl.float32)
    if DEPENDENT:
        gdc_wait()
    sums = take_squares(
        squares + token * stride_squares, stride_squares, num_rows - token, parts, 16, S, N, SUMS
    )
    slices = multiply(
        weights,
        barriers,
        weight,
        first,
        inner + first,
        h,
        token,
        R,
        N,
        K,
        S,
        PIECE,
        STEP,
        STAGES,
        2,
    )
    scale = inverse_rms(sums, eps, K, R, S, N)
    gate = total(slices.index(0), R, S, N) * scale
    up = total(slices.index(1), R, S, N) * scale
    if BIAS:
        gate += gate_added[:, None]
        up += up_added[:, None]
    y = gated(gate, up, SILU)
    gl.store(
        out + m[None, :] * stride_out + rows[:, None],
        y.to(out.dtype.element_ty),
        mask=(m < num_rows)[None, :] & (rows < inner)[:, None],
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
    K: tl.constexpr,
    BIAS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of weight rows). A block reads and writes the same elements of x."""
    if DEPENDENT:
        gdc_launch_dependents()
    token, block = gl.program_id(0) * N, gl.program_id(1)
    first = block * R
    weights, barriers = ask_for_weights(weight, first, first, R, N, S, PIECE, STEP, STAGES, 1)
    OUT: tl.constexpr = gl.SliceLayout(0, partial_layout(S, R, N))
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, N, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    gains = gl.load(norm + rows, mask=rows < n, other=0.0)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
    in_x = (m < num_rows)[None, :] & (rows < n)[:, None]
    places = x + m[None, :] * stride_x + rows[:, None]
    if DEPENDENT:
        gdc_wait()
    residual = gl.load(places, mask=in_x, other=0.0).to(gl.float32)
    slices = multiply(
        weights, barriers, weight, first, first, y, token, R, N, K, S, PIECE, STEP, STAGES, 1
    )
    added_up = residual + total(slices.index(0), R, S, N)
    if BIAS:
        added_up += added[:, None]
    gl.store(places, added_up.to(x.dtype.element_ty), mask=in_x)
    scaled = (added_up * gains[:, None]).to(h.dtype.element_ty)
    gl.store(h + m[None, :] * stride_h + rows[:, None], scaled, mask=in_x)
    gl.store(
        squares + m * stride_squares + block, gl.sum(added_up * added_up, 0), mask=m < num_rows
    )
