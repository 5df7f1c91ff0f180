"""Products of some ten to some hundred rows, for CUDA through Gluon.

Of so few rows a product is bound by its weights' way through memory. A block asks for the first of
them before the kernel in front has ended, which the library's don't, so that memory doesn't stand
idle while norms run; and the FFN's gate is applied where gate and up are. Where there are too few
tiles for all multiprocessors, K is cut into parts, which whoever reads the result adds up.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.gluon import (
    TensorDescriptor,
    constexpr_function,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from octavo.kernels.linear_batch.tiles import Tile, WideTile
from octavo.kernels.linear_batch.wide import launch_wide
from octavo.kernels.triton_launch import dependent_launches, with_room


def linear_batch(x: Tensor, weight: Tensor, tile: Tile | WideTile) -> Tensor:
    """``x @ weight.T``, or what each part of K adds to it: [P, T, N], rounded to bf16.

    ``x`` [T, K], best ``with_room``, and ``weight`` [N, K] bf16, contiguous; N is a multiple of the
    tile's rows, K of its step in each part. One launch; ``weight`` may not be written by the kernel
    in front.
    """
    out = x.new_empty(tile.parts, len(x), len(weight))
    _launch(x, weight, out, tile, activation="")
    return out


def gated_batch(x: Tensor, weight: Tensor, activation: str, tile: Tile | WideTile) -> Tensor:
    """``act(x @ gate.T) * (x @ up.T)`` [T, N]: as ``linear_batch`` of ``weight`` [2 N, K], gate
    first, in one part. ``activation`` is "silu" or "gelu_tanh"."""
    assert tile.parts == 1
    out = with_room(x, len(x), len(weight) // 2)
    _launch(x, weight, out[None], tile, activation=activation)
    return out


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, tile: Tile | WideTile, *, activation: str
) -> None:
    if isinstance(tile, WideTile):
        launch_wide(x, weight, out, tile, activation=activation)
        return
    (num_rows, k), n = x.shape, out.shape[2]
    dependent = dependent_launches()
    grid = triton.cdiv(num_rows, tile.tokens), n // tile.rows, tile.parts
    _kernel[grid](
        _described(all_rows(x, tile.tokens), tile.tokens, tile.step),
        _described(weight, tile.rows, tile.step),
        out,
        num_rows,
        N=n,
        K=k,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        PARTS=tile.parts,
        STAGES=min(tile.stages, k // tile.parts // tile.step),
        STEP=tile.step,
        GATED=activation != "",
        GELU=activation == "gelu_tanh",
        NUM_WARPS=tile.num_warps,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        launch_pdl=dependent,
    )


def all_rows(x: Tensor, tokens: int) -> Tensor:
    """``x`` [T, K] with the rows behind it up to whole tiles, if there is memory for all of them;
    whatever lies there, of a row only its own result depends on it."""
    (rows, k), padded = x.shape, -(-len(x) // tokens) * tokens
    there = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.as_strided((padded if padded * k <= there else rows, k), x.stride())


def _described(matrix: Tensor, rows: int, step: int):
    return TensorDescriptor.from_tensor(matrix, [rows, step], step_memory(rows, step))


@jit(do_not_specialize=["num_rows"])
def _kernel(
    x,
    weight,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of tokens, tiles of rows, parts): neighbours share weights."""
    if DEPENDENT:
        gdc_launch_dependents()
    WEIGHTS: tl.constexpr = 2 if GATED else 1
    STEPS: tl.constexpr = K // PARTS // STEP
    first_token = gl.program_id(0) * TOKENS
    first_row = gl.program_id(1) * ROWS
    part = gl.program_id(2)
    first_step = part * STEPS
    ws = gl.allocate_shared_memory(
        weight.dtype, [STAGES * WEIGHTS, ROWS, STEP], step_memory(ROWS, STEP)
    )
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, STEP], step_memory(TOKENS, STEP))
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        _copy_weights(
            ws, barriers, weight, first_row, first_step + i, i, N, ROWS, TOKENS, STEP, WEIGHTS
        )
    if DEPENDENT:
        gdc_wait()
    for i in gl.static_range(STAGES):
        _copy_tokens(xs, barriers, x, first_token, first_step + i, i, STEP)

    ACC: tl.constexpr = sum_layout(ROWS, NUM_WARPS)
    acc = gl.zeros([TOKENS, ROWS], gl.float32, layout=ACC)
    if GATED:
        up = gl.zeros([TOKENS, ROWS], gl.float32, layout=ACC)
    slot = 0
    phase = 0
    before = STAGES - 1  # the slot of the step before
    for i in range(STEPS):
        mbarrier.wait(barriers.index(slot), phase)
        tokens = xs.index(slot)
        w = ws.index(slot * WEIGHTS).permute((1, 0))
        acc = warpgroup_mma(tokens, w, acc, is_async=True)
        if GATED:
            w_up = ws.index(slot * WEIGHTS + 1).permute((1, 0))
            up = warpgroup_mma(tokens, w_up, up, is_async=True)
            acc, up = warpgroup_mma_wait(num_outstanding=2, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if (i > 0) & (i - 1 + STAGES < STEPS):
            gl.thread_barrier()  # all warps are through with the step that is overwritten
            step = first_step + i - 1 + STAGES
            _copy_weights(
                ws, barriers, weight, first_row, step, before, N, ROWS, TOKENS, STEP, WEIGHTS
            )
            _copy_tokens(xs, barriers, x, first_token, step, before, STEP)
        before = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = 1 - phase
    OUT: tl.constexpr = out_layout(ROWS, NUM_WARPS)
    if GATED:
        acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
        turn = acc
        if GELU:  # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z
            turn = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)
        total = acc / (1.0 + gl.exp(-turn)) * up
    else:
        total = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    total = gl.convert_layout(total.to(out.dtype.element_ty), OUT)
    token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, OUT))
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    places = out + (part * num_rows + token)[:, None] * N + row[None, :]
    gl.store(places, total, mask=(token < num_rows)[:, None] & (row < N)[None, :])


@jit
def _copy_weights(
    ws,
    barriers,
    weight,
    first_row,
    step,
    slot,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Begin to copy a step's weights to ``slot``, whose barrier waits for its activations too."""
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, (ROWS * WEIGHTS + TOKENS) * STEP * 2)
    for i in gl.static_range(WEIGHTS):
        tma.async_copy_global_to_shared(
            weight, [first_row + i * N, step * STEP], barrier, ws.index(slot * WEIGHTS + i)
        )


@jit
def _copy_tokens(xs, barriers, x, first_token, step, slot, STEP: tl.constexpr):
    tma.async_copy_global_to_shared(
        x, [first_token, step * STEP], barriers.index(slot), xs.index(slot)
    )


@constexpr_function
def step_memory(rows, step):
    return gl.NVMMASharedLayout.get_default_for([rows, step], gl.bfloat16)


@constexpr_function
def sum_layout(rows, num_warps):
    """Of sums [tokens, rows]: four warps have 64 tokens."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, rows, 16]
    )


@constexpr_function
def out_layout(rows, num_warps):
    """A thread has 16 bytes side by side."""
    across = min(32, rows // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])
