"""Products of more than one activation row in the sums of one, device side.

The tensor cores take both sides from shared memory, as in ``triton_row.py``, whose sums these are:
``side * sums`` of them, and a block of 64 columns of K belongs to one by its number modulo that.
Here one sum is made after the other, ``steps`` steps of ``depth`` instructions each. An
instruction's 64 rows are the ``rows`` rows of each part of the weight in ``across`` neighbouring
blocks of columns, one below the other, as the copy engine lays them out; its columns are the
``tokens`` activation rows in these blocks. What meets another block's activations is thrown away in
the end.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl

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
def merges(i):
    """How many sums that wait the ``i``-th of a tree completes: its trailing ones."""
    return 0 if i % 2 == 0 else 1 + merges(i // 2)


@jit
def ask_for_weights(weight, first_row, second_row, WALK: tl.constexpr):
    """Shared memory [stages * depth * parts, rows, columns], into which the first steps of the rows
    from ``first_row`` on, and in a second part those from ``second_row`` on, are being copied; and
    a barrier for each, which waits for activations too. What lies outside becomes zero."""
    COLUMNS: tl.constexpr = WALK.across * BLOCK
    STAGES: tl.constexpr = WALK.stages
    PLACES: tl.constexpr = STAGES * WALK.depth * WALK.parts
    ws = gl.allocate_shared_memory(
        weight.dtype, [PLACES, WALK.rows, COLUMNS], tile_memory(WALK.rows, COLUMNS)
    )
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        copy_weights(ws, barriers, weight, first_row, second_row, i, WALK)
    return ws, barriers


@jit
def column_of(step, d, WALK: tl.constexpr):
    """The first column of the ``d``-th blocks of a step. Sums come in the order in which a tree of
    pairs adds them up as ``triton_row.py`` does."""
    i = step // WALK.steps
    leaf = i % WALK.sums
    SUMS: tl.constexpr = WALK.sums
    q = leaf % 2 * 2 + leaf // 2 if SUMS == 4 else leaf % 2 + leaf // 2 % 2 * 4 + leaf // 4 * 2
    group = q + (step % WALK.steps * WALK.depth + d) * WALK.sums
    return (group * WALK.side + i // WALK.sums * WALK.across) * BLOCK


@jit
def copy_weights(ws, barriers, weight, first_row, second_row, step, WALK: tl.constexpr):
    """Begin to copy a step's weights to its place."""
    DEPTH: tl.constexpr = WALK.depth
    slot = step % WALK.stages
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, (64 + WALK.tokens * WALK.across) * WALK.depth * BLOCK * 2)
    for d in gl.static_range(DEPTH):
        column = column_of(step, d, WALK)
        place = (slot * WALK.depth + d) * WALK.parts
        tma.async_copy_global_to_shared(weight, [first_row, column], barrier, ws.index(place))
        if WALK.parts == 2:
            tma.async_copy_global_to_shared(
                weight, [second_row, column], barrier, ws.index(place + 1)
            )


@jit
def ask_for_activations(barriers, x, token, WALK: tl.constexpr):
    """Shared memory [stages * depth, tokens, columns], into which the first steps' are being
    copied."""
    COLUMNS: tl.constexpr = WALK.across * BLOCK
    STAGES: tl.constexpr = WALK.stages
    PLACES: tl.constexpr = STAGES * WALK.depth
    xs = gl.allocate_shared_memory(
        gl.bfloat16, [PLACES, WALK.tokens, COLUMNS], tile_memory(WALK.tokens, COLUMNS)
    )
    for i in gl.static_range(STAGES):
        copy_activations(xs, barriers, x, token, i, WALK)
    return xs


@jit
def copy_activations(xs, barriers, x, token, step, WALK: tl.constexpr):
    DEPTH: tl.constexpr = WALK.depth
    slot = step % WALK.stages
    for d in gl.static_range(DEPTH):
        column = column_of(step, d, WALK)
        tma.async_copy_global_to_shared(
            x, [token, column], barriers.index(slot), xs.index(slot * WALK.depth + d)
        )


@jit
def refill(ws, xs, barriers, weight, first_row, second_row, x, token, step, WALK: tl.constexpr):
    """Begin to copy a step where one lies that has been multiplied."""
    gl.thread_barrier()  # by all warps
    copy_weights(ws, barriers, weight, first_row, second_row, step, WALK)
    copy_activations(xs, barriers, x, token, step, WALK)


@jit
def multiply_step(ws, xs, barriers, acc, step, GOES_ON: tl.constexpr, WALK: tl.constexpr):
    """``acc`` [64, tokens * across], or nothing, and a step's products, which are on their way."""
    DEPTH: tl.constexpr = WALK.depth
    N: tl.constexpr = WALK.tokens * WALK.across
    PLACES: tl.constexpr = WALK.stages * DEPTH
    slot = step % WALK.stages
    mbarrier.wait(barriers.index(slot), step // WALK.stages % 2)
    for d in gl.static_range(DEPTH):
        place = slot * WALK.depth + d
        w = ws._reinterpret(gl.bfloat16, [PLACES, 64, BLOCK], block_memory()).index(place)
        x = xs._reinterpret(gl.bfloat16, [PLACES, N, BLOCK], block_memory()).index(place)
        acc = warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=GOES_ON or d > 0, is_async=True)
    return acc


@jit
def multiply(ws, xs, barriers, weight, first_row, second_row, x, token, WALK: tl.constexpr):
    """``weights @ activations`` of each part, [rows, tokens] each, fp32."""
    T: tl.constexpr = WALK.tokens
    R: tl.constexpr = WALK.rows
    ACROSS: tl.constexpr = WALK.across
    SUMS: tl.constexpr = WALK.sums
    COUNT: tl.constexpr = WALK.steps
    PARTS: tl.constexpr = WALK.parts
    N: tl.constexpr = T * ACROSS
    TURNS: tl.constexpr = WALK.side // ACROSS
    STEPS: tl.constexpr = TURNS * SUMS * COUNT
    operands = (ws, xs, barriers, weight, first_row, second_row, x, token)
    nothing = gl.zeros([64, N], gl.float32, layout=acc_layout(N))
    turns = ()
    waiting = ()  # sums of a tree that wait for those they are added to
    before = nothing
    for number in gl.static_range(TURNS * SUMS):
        first = number * COUNT
        acc = multiply_step(ws, xs, barriers, nothing, first, False, WALK)
        if number == 0:
            acc = warpgroup_mma_wait(num_outstanding=WALK.depth, deps=(acc,))
        else:  # the sum before has ended behind this one's first step
            acc, before = warpgroup_mma_wait(num_outstanding=WALK.depth, deps=(acc, before))
            waiting = joined(waiting, before, (number - 1) % SUMS)
            if number % SUMS == 0:
                turns = with_turn(turns, waiting[0], ACROSS)
                waiting = ()
            if first - 1 + WALK.stages < STEPS:
                refill(*operands, first - 1 + WALK.stages, WALK)
        for step in range(first + 1, first + COUNT):
            acc = multiply_step(ws, xs, barriers, acc, step, True, WALK)
            acc = warpgroup_mma_wait(num_outstanding=WALK.depth, deps=(acc,))
            if step - 1 + WALK.stages < STEPS:
                refill(*operands, step - 1 + WALK.stages, WALK)
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
