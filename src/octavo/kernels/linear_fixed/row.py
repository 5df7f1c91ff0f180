"""The product of one row with a large weight in the sums of ``triton.py``; for Hopper, through
Gluon.

A step of one row waits for memory in its head. Here weights are asked for before the kernel in
front has ended, by the copy engine, and multiplied by a warpgroup as in ``linear/triton_row.py``;
but into one sum, column by column: each of an instruction's eight columns has the same activations.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    next_power_of_2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from octavo.kernels.linear.tiles import ROW_WARPS, Tile
from octavo.kernels.linear.triton import (
    ask_for_weights,
    chunks_ahead,
    copy_chunk,
    describe,
    num_chunks,
)
from octavo.kernels.linear.triton_row import BLOCK, block_memory, row_layout, sum_layout
from octavo.kernels.linear_fixed.tiles import num_leaves
from octavo.kernels.triton_launch import dependent_launches, has_warpgroups

ROWS = tl.constexpr(64)  # of the weight in a block: as many as an instruction has
CHUNK = tl.constexpr(256)  # columns
BLOCK_BYTES = 112 << 10  # two blocks to a multiprocessor


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear_row` makes such a product: of one row, in one sum, and with so few
    columns that two chunks of weights fit beside the activations."""
    n, k = weight.shape
    return (
        len(x) == 1
        and x.dtype == torch.bfloat16
        and has_warpgroups()
        and num_leaves(n, k, "decode") == 1
        and _chunks(k) >= 2
        and weight.stride() == (k, 1)
        and (k * 2) % 16 == weight.data_ptr() % 16 == 0
    )


def linear_row(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` [1, N], with the bits of
    :func:`octavo.kernels.linear_fixed.triton.linear_fixed`, whose ``out`` it has; ``x`` [1, K]
    contiguous. What :func:`takes` says. One launch; ``weight`` may not be written by the kernel in
    front."""
    n, k = weight.shape
    if out is None:
        out = x.new_empty(1, n)
    tile = Tile(ROWS.value, CHUNK.value, ROW_WARPS, _chunks(k), one_row=True)
    dependent = dependent_launches()
    row_kernel[(-(-n // tile.rows),)](
        x,
        describe(weight, tile),
        out,
        n,
        K=k,
        AHEAD=chunks_ahead(k, tile.chunk, tile.ahead),
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=ROW_WARPS,
    )
    return out


def _chunks(k: int) -> int:
    """How many are on their way beside a row's activations, which lie there eight times."""
    activations = 8 * 2 * next_power_of_2(k)
    return int((BLOCK_BYTES - activations) // (ROWS.value * CHUNK.value * 2))


@jit
def row_kernel(
    x,
    weight,
    out,
    n,
    K: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS),)."""
    if DEPENDENT:
        gdc_launch_dependents()
    first = gl.program_id(0) * ROWS
    tiles, barriers = ask_for_weights(weight, first, first, ROWS, CHUNK, AHEAD, 1)
    if DEPENDENT:
        gdc_wait()
    row = _repeat_row(x, K)
    gl.thread_barrier()  # all have stored their activations
    PRODUCTS: tl.constexpr = CHUNK // BLOCK
    COUNT: tl.constexpr = num_chunks(K, CHUNK)
    total = gl.zeros([ROWS, 8], gl.float32, layout=sum_layout())
    for i in gl.static_range(COUNT):
        mbarrier.wait(barriers.index(i % AHEAD), i // AHEAD % 2)
        blocks = tiles.index(i % AHEAD)
        blocks = blocks._reinterpret(weight.dtype, [PRODUCTS, ROWS, BLOCK], block_memory())
        for j in gl.static_range(PRODUCTS):
            if (i * PRODUCTS + j) * BLOCK < K:
                activations = row.index(i * PRODUCTS + j).permute((1, 0))
                total = warpgroup_mma(blocks.index(j), activations, total, is_async=True)
        if i + AHEAD < COUNT:
            total = warpgroup_mma_wait(0, deps=(total,))
            gl.thread_barrier()
            copy_chunk(tiles, barriers, weight, first, first, i + AHEAD, i % AHEAD, ROWS, CHUNK, 1)
    total = warpgroup_mma_wait(0, deps=(total,))
    tiles._keep_alive()
    row._keep_alive()
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, sum_layout()))
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sum_layout()))
    places = out + rows[:, None] + column[None, :] * 0
    gl.store(places, total.to(out.dtype.element_ty), mask=(rows < n)[:, None] & (column == 0)[None])


@jit
def _repeat_row(x, K: tl.constexpr):
    """The activations x [K] in shared memory [blocks, 8, 64]: each block in eight rows; zeros
    behind them."""
    COUNT: tl.constexpr = next_power_of_2(K) // BLOCK if K > BLOCK else 1
    L: tl.constexpr = row_layout()
    block = gl.arange(0, COUNT * 8, layout=gl.SliceLayout(1, L)) // 8
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    k = block[:, None] * BLOCK + column[None, :]
    values = gl.load(x + k, mask=k < K, other=0.0)
    memory = gl.allocate_shared_memory(values.dtype, [COUNT * 8, BLOCK], block_memory(), values)
    fence_async_shared()
    return memory._reinterpret(values.dtype, [COUNT, 8, BLOCK], block_memory())
