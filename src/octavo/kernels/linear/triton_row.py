"""The product of one activation row with a tile of weight rows, for Hopper through Gluon.

Behind the wait for the kernel in front, a row's product takes as long as its weights take from
shared memory to the tensor cores. Here the cores take them from there by themselves, by
instructions of a group of four warps, which multiply 64 rows with 8 columns. The 64 rows are the
tile's ``R`` weight rows in ``64 / R`` blocks of 64 of their columns, one below the other, as the
copy engine has laid them out; the 8 columns are 8 blocks of 64 activations. Of the 64 x 8 sums
those count in which a weight's block meets its own activations'; the others are thrown away. Which
ones count goes round with the blocks of K, so a tile has ``R / 8`` sums of 64 x 8, or four, for
those don't wait for one another.

Shared memory gives a multiprocessor 128 bytes a cycle, so some weights are taken to registers
before the wait (:func:`load_early_row`), from where the same instructions multiply them.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl

from octavo.kernels.gluon import (
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    next_power_of_2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from octavo.kernels.linear.tiles import ROW_WARPS
from octavo.kernels.linear.triton import (
    copy_chunk,
    linear_layout,
    num_chunks,
    unit_bases,
)

BLOCK = tl.constexpr(64)  # columns: as many as the copy engine lays side by side


@constexpr_function
def sum_layout():
    """Of an instruction's sums [64, 8]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[ROW_WARPS, 1], instr_shape=[16, 8, 16]
    )


@constexpr_function
def block_memory():
    """Of rows of 64 columns, weights or activations, in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([8, 64], gl.bfloat16)


@constexpr_function
def row_layout():
    """Of the activations [COLUMNS // 64, 64]: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [ROW_WARPS, 1], [1, 0])


@constexpr_function
def result_layout(R):
    """Of a tile's sums [64 // R, R, 1]: a thread has all of a row, lanes have the rows."""
    rows = unit_bases(R, 1, 3)
    return linear_layout(
        unit_bases(64 // R, 0, 3) + rows[5:], rows[:5], [], ROW_WARPS, [64 // R, R, 1]
    )


@constexpr_function
def squares_layout(SUMS):
    """Of sums of squares [SUMS]: in lanes, and in registers what is more."""
    parts = unit_bases(SUMS, 0, 1)
    return linear_layout(parts[5:], parts[:5], [], ROW_WARPS, [SUMS])


@constexpr_function
def sums_of(SIDE):
    """How many sums of 64 x 8 a part of a tile has."""
    return max(4, 8 // SIDE)


@constexpr_function
def block_of(i, j, CHUNK, SIDE):
    """The first block of K in the ``j``-th product of chunk ``i``."""
    return i * (CHUNK // 64) + j * SIDE


@constexpr_function
def sum_of(i, j, part, CHUNK, SIDE):
    """The number of the sum that it is added to."""
    return part * sums_of(SIDE) + block_of(i, j, CHUNK, SIDE) // SIDE % sums_of(SIDE)


@jit
def take_row(y, K: tl.constexpr):
    """The activations y [K] in shared memory [blocks // 8, 8, 64]; zeros behind them."""
    COLUMNS: tl.constexpr = max(8 * BLOCK, next_power_of_2(K))
    L: tl.constexpr = row_layout()
    block = gl.arange(0, COLUMNS // BLOCK, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    k = block[:, None] * BLOCK + column[None, :]
    values = gl.load(y + k, mask=k < K, other=0.0)
    memory = gl.allocate_shared_memory(
        values.dtype, [COLUMNS // BLOCK, BLOCK], block_memory(), values
    )
    fence_async_shared()
    return memory._reinterpret(values.dtype, [COLUMNS // (8 * BLOCK), 8, BLOCK], block_memory())


@constexpr_function
def early_layout():
    """Of 64 x 64 weights in registers."""
    return gl.DotOperandLayout(0, sum_layout(), 2)


@jit
def load_early_row(
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
    PARTS: tl.constexpr,
):
    """The first ``EARLY`` chunks of each part, as soon as they have arrived; in their places others
    are asked for."""
    R: tl.constexpr = ROWS // PARTS
    operands = (tiles, barriers, weight, first_row, second_row)
    chunks = ()
    for i in gl.static_range(EARLY):
        mbarrier.wait(barriers.index(i % AHEAD), i // AHEAD % 2)
        for part in gl.static_range(PARTS):
            blocks = _blocks(tiles.index(i % AHEAD * PARTS + part), weight.dtype, R, CHUNK)
            for j in gl.static_range(CHUNK * R // (64 * BLOCK)):
                chunks += (blocks.index(j).load(early_layout()),)
        if i + AHEAD < num_chunks(K, CHUNK):
            gl.thread_barrier()
            copy_chunk(*operands, i + AHEAD, i % AHEAD, ROWS, CHUNK, PARTS)
    return chunks


@jit
def _blocks(tile, dtype: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of a part [R, CHUNK] as blocks of 64 columns one below the other: [any, 64, 64]."""
    return tile._reinterpret(dtype, [CHUNK * R // (64 * BLOCK), 64, BLOCK], block_memory())


@jit
def multiply_row(
    tiles,
    barriers,
    weight,
    first_row,
    second_row,
    early,
    row,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``weights @ activations`` of each part, [ROWS // PARTS, 1] each, fp32, from the weights in
    registers (``early``) and on their way (``ask_for_weights``) and the activations of
    :func:`take_row`."""
    R: tl.constexpr = ROWS // PARTS
    SIDE: tl.constexpr = 64 // R  # blocks of K, one below the other
    SUMS: tl.constexpr = sums_of(SIDE)
    COUNT: tl.constexpr = num_chunks(K, CHUNK)
    operands = (tiles, barriers, weight, first_row, second_row)
    nothing = gl.zeros([64, 8], gl.float32, layout=sum_layout())
    sums = ()
    for _ in gl.static_range(PARTS * SUMS):
        sums += (nothing,)
    gl.thread_barrier()  # all have stored their activations
    PRODUCTS: tl.constexpr = CHUNK // (SIDE * BLOCK)  # of a part of a chunk
    for i in gl.static_range(COUNT):
        if i >= EARLY:
            mbarrier.wait(barriers.index(i % AHEAD), i // AHEAD % 2)
        for part in gl.static_range(PARTS):
            blocks = _blocks(tiles.index(i % AHEAD * PARTS + part), weight.dtype, R, CHUNK)
            for j in gl.static_range(PRODUCTS):
                if block_of(i, j, CHUNK, SIDE) * BLOCK < K:
                    if i < EARLY:
                        weights = early[(i * PARTS + part) * PRODUCTS + j]
                    else:
                        weights = blocks.index(j)
                    product = warpgroup_mma(
                        weights,
                        row.index(block_of(i, j, CHUNK, SIDE) // 8).permute((1, 0)),
                        sums[sum_of(i, j, part, CHUNK, SIDE)],
                        is_async=True,
                    )
                    sums = _replaced(sums, sum_of(i, j, part, CHUNK, SIDE), product)
        if i >= EARLY and i + AHEAD < COUNT:
            sums = warpgroup_mma_wait(0, deps=sums)
            gl.thread_barrier()
            copy_chunk(*operands, i + AHEAD, i % AHEAD, ROWS, CHUNK, PARTS)
    sums = warpgroup_mma_wait(0, deps=sums)
    tiles._keep_alive()
    row._keep_alive()
    memory = gl.allocate_shared_memory(
        gl.float32, [PARTS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    of_row = gl.arange(0, 64, layout=gl.SliceLayout(1, sum_layout())) // R
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, sum_layout()))
    for part in gl.static_range(PARTS):
        own = nothing
        for q in gl.static_range(SUMS):
            meets = of_row[:, None] + q * SIDE % 8 == column[None, :]
            own += gl.where(meets, sums[part * SUMS + q], 0.0)
        memory.index(part).store(gl.sum(own, 1))
    gl.thread_barrier()
    parts = ()
    for part in gl.static_range(PARTS):
        whole = memory.index(part).reshape([SIDE, R, 1]).load(result_layout(R))
        parts += (gl.sum(whole, 0),)
    return parts


@jit
def _replaced(values, i: tl.constexpr, value):
    """The tuple with another value at ``i``."""
    result = ()
    for j in gl.static_range(len(values)):
        result += (value if j == i else values[j],)
    return result


@jit
def take_row_squares(squares, parts, SUMS: tl.constexpr):
    """The sums [SUMS] that the blocks that wrote x have left in ``squares`` [parts]."""
    p = gl.arange(0, SUMS, layout=squares_layout(SUMS))
    return gl.load(squares + p, mask=p < parts, other=0.0)
