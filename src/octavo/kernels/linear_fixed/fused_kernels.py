"""The kernels of :mod:`octavo.kernels.linear_fixed.fused` for more than one row, device side.

The tensor cores take both sides from shared memory, as in ``triton_row.py``, whose sums these are:
``SIDE * SUMS`` of them, and a block of 64 columns of K belongs to one by its number modulo that.
Here one sum is made after the other, ``COUNT`` steps of ``DEPTH`` instructions each. An
instruction's 64 rows are the ``R`` rows of each part of the weight in ``ACROSS`` neighbouring
blocks of columns, one below the other, as the copy engine lays them out; its columns are the ``T``
activation rows in these blocks. What meets another block's activations is thrown away in the end.
Weights are asked for before the kernel in front has ended.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.gluon import (
    add_here,
    constexpr_function,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from octavo.kernels.linear.tiles import ROW_WARPS
from octavo.kernels.linear.triton import linear_layout, tile_memory, unit_bases
from octavo.kernels.linear.triton_row import BLOCK, block_memory
from octavo.kernels.linear_fixed.tiles import GROUP
from octavo.kernels.norm_gate_up.triton import gated

SQUARES = tl.constexpr(GROUP)


@constexpr_function
def acc_layout(N):
    """Of an instruction's sums [64, N]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[ROW_WARPS, 1], instr_shape=[16, N, 16]
    )


@constexpr_function
def acc_memory(N):
    """Rows of N floats, far enough apart that sixteen threads can read a column of them at once."""
    return gl.PaddedSharedLayout.with_identity_for([[N, 2]], [64, N], [1, 0])


@constexpr_function
def out_layout(R, T):
    """Of a part's products [R, T]: lanes have the rows."""
    rows = unit_bases(R, 0, 2)
    return linear_layout(rows[5:], rows[:5], unit_bases(T, 1, 2), ROW_WARPS, [R, T])


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


@constexpr_function
def merges(i):
    """How many sums that wait the ``i``-th of a tree completes: its trailing ones."""
    return 0 if i % 2 == 0 else 1 + merges(i // 2)


@jit
def ask_for_weights(
    weight,
    first_row,
    second_row,
    T: tl.constexpr,
    R: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Shared memory [STAGES * DEPTH * PARTS, R, columns], into which the first steps of the rows
    from ``first_row`` on, and in a second part those from ``second_row`` on, are being copied; and
    a barrier for each, which waits for activations too. What lies outside becomes zero."""
    ws = gl.allocate_shared_memory(
        weight.dtype, [STAGES * DEPTH * PARTS, R, ACROSS * BLOCK], tile_memory(R, ACROSS * BLOCK)
    )
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        copy_weights(
            ws,
            barriers,
            weight,
            first_row,
            second_row,
            i,
            T,
            R,
            ACROSS,
            DEPTH,
            COUNT,
            SUMS,
            SIDE,
            STAGES,
            PARTS,
        )
    return ws, barriers


@jit
def column_of(
    step,
    d,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The first column of the ``d``-th blocks of a step. Sums come in the order in which a tree of
    pairs adds them up as ``triton_row.py`` does."""
    i = step // COUNT
    leaf = i % SUMS
    q = leaf % 2 * 2 + leaf // 2 if SUMS == 4 else leaf % 2 + leaf // 2 % 2 * 4 + leaf // 4 * 2
    group = q + (step % COUNT * DEPTH + d) * SUMS
    return (group * SIDE + i // SUMS * ACROSS) * BLOCK


@jit
def copy_weights(
    ws,
    barriers,
    weight,
    first_row,
    second_row,
    step,
    T: tl.constexpr,
    R: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Begin to copy a step's weights to its place."""
    slot = step % STAGES
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, (64 + T * ACROSS) * DEPTH * BLOCK * 2)
    for d in gl.static_range(DEPTH):
        column = column_of(step, d, ACROSS, DEPTH, COUNT, SUMS, SIDE)
        place = (slot * DEPTH + d) * PARTS
        tma.async_copy_global_to_shared(weight, [first_row, column], barrier, ws.index(place))
        if PARTS == 2:
            tma.async_copy_global_to_shared(
                weight, [second_row, column], barrier, ws.index(place + 1)
            )


@jit
def copy_activations(
    xs,
    barriers,
    x,
    token,
    step,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    slot = step % STAGES
    for d in gl.static_range(DEPTH):
        column = column_of(step, d, ACROSS, DEPTH, COUNT, SUMS, SIDE)
        tma.async_copy_global_to_shared(
            x, [token, column], barriers.index(slot), xs.index(slot * DEPTH + d)
        )


@jit
def ask_for_activations(
    barriers,
    x,
    token,
    T: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Shared memory [STAGES * DEPTH, T, columns], into which the first steps' are being copied."""
    xs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * DEPTH, T, ACROSS * BLOCK], tile_memory(T, ACROSS * BLOCK)
    )
    for i in gl.static_range(STAGES):
        copy_activations(xs, barriers, x, token, i, ACROSS, DEPTH, COUNT, SUMS, SIDE, STAGES)
    return xs


@jit
def refill(
    ws,
    xs,
    barriers,
    weight,
    first_row,
    second_row,
    x,
    token,
    step,
    T: tl.constexpr,
    R: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Begin to copy a step where one lies that has been multiplied."""
    gl.thread_barrier()  # by all warps
    copy_weights(
        ws,
        barriers,
        weight,
        first_row,
        second_row,
        step,
        T,
        R,
        ACROSS,
        DEPTH,
        COUNT,
        SUMS,
        SIDE,
        STAGES,
        PARTS,
    )
    copy_activations(xs, barriers, x, token, step, ACROSS, DEPTH, COUNT, SUMS, SIDE, STAGES)


@jit
def multiply_step(
    ws,
    xs,
    barriers,
    acc,
    step,
    GOES_ON: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``acc`` [64, N], or nothing, and the step's products, which are on their way."""
    slot = step % STAGES
    mbarrier.wait(barriers.index(slot), step // STAGES % 2)
    for d in gl.static_range(DEPTH):
        place = slot * DEPTH + d
        w = ws._reinterpret(gl.bfloat16, [STAGES * DEPTH, 64, BLOCK], block_memory()).index(place)
        x = xs._reinterpret(gl.bfloat16, [STAGES * DEPTH, N, BLOCK], block_memory()).index(place)
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=GOES_ON or d > 0, is_async=True)
    return acc


@jit
def multiply(
    ws,
    xs,
    barriers,
    weight,
    first_row,
    second_row,
    x,
    token,
    T: tl.constexpr,
    R: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``weights @ activations`` of each part, [R, T] each, fp32."""
    N: tl.constexpr = T * ACROSS
    TURNS: tl.constexpr = SIDE // ACROSS
    STEPS: tl.constexpr = TURNS * SUMS * COUNT
    nothing = gl.zeros([64, N], gl.float32, layout=acc_layout(N))
    turns = ()
    waiting = ()  # sums of a tree that wait for those they are added to
    before = nothing
    for number in gl.static_range(TURNS * SUMS):
        first = number * COUNT
        acc = multiply_step(ws, xs, barriers, nothing, first, False, N, DEPTH, STAGES)
        if number == 0:
            acc = warpgroup_mma_wait(num_outstanding=DEPTH, deps=(acc,))
        else:  # the sum before has ended behind this one's first step
            acc, before = warpgroup_mma_wait(num_outstanding=DEPTH, deps=(acc, before))
            waiting = joined(waiting, before, (number - 1) % SUMS)
            if number % SUMS == 0:
                turns = with_turn(turns, waiting[0], ACROSS)
                waiting = ()
            if first - 1 + STAGES < STEPS:
                refill(
                    ws,
                    xs,
                    barriers,
                    weight,
                    first_row,
                    second_row,
                    x,
                    token,
                    first - 1 + STAGES,
                    T,
                    R,
                    ACROSS,
                    DEPTH,
                    COUNT,
                    SUMS,
                    SIDE,
                    STAGES,
                    PARTS,
                )
        for step in range(first + 1, first + COUNT):
            acc = multiply_step(ws, xs, barriers, acc, step, True, N, DEPTH, STAGES)
            acc = warpgroup_mma_wait(num_outstanding=DEPTH, deps=(acc,))
            if step - 1 + STAGES < STEPS:
                refill(
                    ws,
                    xs,
                    barriers,
                    weight,
                    first_row,
                    second_row,
                    x,
                    token,
                    step - 1 + STAGES,
                    T,
                    R,
                    ACROSS,
                    DEPTH,
                    COUNT,
                    SUMS,
                    SIDE,
                    STAGES,
                    PARTS,
                )
        before = acc
    before = warpgroup_mma_wait(num_outstanding=0, deps=(before,))
    turns = with_turn(turns, joined(waiting, before, SUMS - 1)[0], ACROSS)
    ws._keep_alive()
    xs._keep_alive()
    gl.thread_barrier()
    KEPT: tl.constexpr = len(turns)
    memory = gl.allocate_shared_memory(gl.float32, [KEPT, 64, N], acc_memory(N))
    for turn in gl.static_range(KEPT):
        memory.index(turn).store(turns[turn])
    gl.thread_barrier()
    parts = ()
    for part in gl.static_range(PARTS):
        own = 0.0
        for block in gl.static_range(KEPT * ACROSS):
            tile = memory.index(block // ACROSS)
            tile = tile.slice((part * ACROSS + block % ACROSS) * R, R, dim=0)
            tile = tile.slice(block % ACROSS * T, T, dim=1).load(out_layout(R, T))
            own = tile if block == 0 else own + tile
        parts += (own,)
    return parts


@jit
def with_turn(turns, total, ACROSS: tl.constexpr):
    """The turns' totals: of all in one where they lie in the same rows."""
    if ACROSS == 1 and len(turns) == 1:
        turns = (add_here(turns[0], total),)
    else:
        turns += (total,)
    return turns


@jit
def joined(waiting, value, i: tl.constexpr):
    """The sums that wait, behind the ``i``-th of their tree."""
    for _ in gl.static_range(merges(i)):
        value = add_here(waiting[len(waiting) - 1], value)
        rest = ()
        for j in gl.static_range(len(waiting) - 1):
            rest += (waiting[j],)
        waiting = rest
    waiting += (value,)
    return waiting


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
    T: tl.constexpr,
    R: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of weight rows). ``n`` are the rows of ``out``: with two parts those
    of gate, and of up as many."""
    if DEPENDENT:
        gdc_launch_dependents()
    token, first = gl.program_id(0) * T, gl.program_id(1) * R
    ws, barriers = ask_for_weights(
        weight, first, n + first, T, R, ACROSS, DEPTH, COUNT, SUMS, SIDE, STAGES, PARTS
    )
    OUT: tl.constexpr = out_layout(R, T)
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, T, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
        if PARTS == 2:
            up_added = gl.load(bias + n + rows, mask=rows < n, other=0.0).to(gl.float32)
    if DEPENDENT:
        gdc_wait()
    xs = ask_for_activations(barriers, h, token, T, ACROSS, DEPTH, COUNT, SUMS, SIDE, STAGES)
    sums = take_squares(squares, stride_squares, token, num_rows, parts, T, COLUMNS)
    scale = inverse_rms(sums, eps, K, R, T)
    products = multiply(
        ws,
        xs,
        barriers,
        weight,
        first,
        n + first,
        h,
        token,
        T,
        R,
        ACROSS,
        DEPTH,
        COUNT,
        SUMS,
        SIDE,
        STAGES,
        PARTS,
    )
    y = products[0] * scale
    if BIAS:
        y += added[:, None]
    if PARTS == 2:
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
    T: tl.constexpr,
    R: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, of weight rows)."""
    if DEPENDENT:
        gdc_launch_dependents()
    token, first = gl.program_id(0) * T, gl.program_id(1) * R
    ws, barriers = ask_for_weights(
        weight, first, first, T, R, ACROSS, DEPTH, COUNT, SUMS, SIDE, STAGES, 1
    )
    OUT: tl.constexpr = out_layout(R, T)
    rows = first + gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    m = (token + gl.arange(0, T, layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    in_x = (m < num_rows)[None, :] & (rows < n)[:, None]
    gains = gl.load(norm + rows, mask=rows < n, other=0.0)
    if BIAS:
        added = gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)
    if DEPENDENT:
        gdc_wait()
    xs = ask_for_activations(barriers, y, token, T, ACROSS, DEPTH, COUNT, SUMS, SIDE, STAGES)
    places = x + m[None, :] * stride_x + rows[:, None]
    added_up = gl.load(places, mask=in_x, other=0.0).to(gl.float32)
    added_up += multiply(
        ws,
        xs,
        barriers,
        weight,
        first,
        first,
        y,
        token,
        T,
        R,
        ACROSS,
        DEPTH,
        COUNT,
        SUMS,
        SIDE,
        STAGES,
        1,
    )[0]
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
