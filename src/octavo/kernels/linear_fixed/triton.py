"""A product whose bits, row by row, don't depend on what else is in the batch; CUDA through Triton.

A block multiplies some weight rows with some activation rows: weights are on the side of the
tensor core's instruction that always takes 64 rows, activations on the other, so that few of them
cost little. Every element is a sum over K in steps of 16 columns, in order, whatever the tile.
Where K is cut into leaves, each is a block's; the last to be done adds up their sums in order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.linear_fixed.tiles import Kind, Tile, choose_tile, num_leaves
from octavo.kernels.triton_launch import INTERPRETED, dependent_launches

GROUP = 8  # tiles of activations that share a tile of weights while it is in the L2 cache
_MOST_TILES = 1 << 14  # of a product with several leaves
_AHEAD = 1024  # columns of a block's weights to have in the L2 cache before there are activations
_BLOCKS_AHEAD = 1024  # with more blocks than that, weights would be asked for twice: 96 us, not 71


def make_counters(device: torch.device) -> Tensor:
    """How many leaves of each tile are done: zeros before and after every product. One for each
    stream."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def linear_fixed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    kind: Kind,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` [M, N] in x's dtype, accumulated in float32.

    ``x`` [M, K] and ``weight`` [N, K] of one dtype, innermost dimension contiguous; ``bias`` [N];
    ``out`` as the result. A row's bits depend on the row, the weight and ``kind`` only. Launches
    only: nothing waits for the device, so it can be captured. ``weight`` may not be written by the
    kernel in front.
    """
    (num_tokens, k), n = x.shape, len(weight)
    if out is None:
        out = x.new_empty(num_tokens, n)
    if num_tokens == 0:
        return out
    tile = tile or choose_tile(n, num_tokens, kind, wide=x.dtype == torch.float32)
    leaves, dependent = num_leaves(n, k, kind), dependent_launches()
    tiles = triton.cdiv(n, tile.rows) * triton.cdiv(num_tokens, tile.tokens)
    partials = None
    if leaves > 1:
        assert tiles <= len(counters)
        partials = torch.empty(
            tiles, leaves, tile.rows, tile.tokens, dtype=torch.float32, device=x.device
        )
    _kernel[(tiles, leaves)](
        x,
        weight,
        bias,
        out,
        partials,
        counters,
        num_tokens,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        N=n,
        K=k,
        LEAVES=leaves,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        CHUNK=tile.chunk,
        GROUP=GROUP,
        WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
        DEPENDENT=dependent,
        AHEAD=_bytes_ahead(weight, k // leaves)
        if kind == "decode" and dependent and tiles * leaves <= _BLOCKS_AHEAD
        else 0,
        launch_pdl=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.stages,
    )
    return out


def _bytes_ahead(weight: Tensor, leaf: int) -> int:
    """How much of a leaf's rows to ask for early: the copy engine takes multiples of 16 bytes, at
    multiples of 16."""
    size = weight.itemsize
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * size % 16 == 0
    return min(leaf, _AHEAD) * size // 16 * 16 if aligned else 0


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    x,
    weight,
    bias,
    out,
    partials,
    counters,
    num_tokens,
    stride_x,
    stride_weight,
    stride_out,
    N: tl.constexpr,
    K: tl.constexpr,
    LEAVES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid: (tiles, leaves). Neighbours share weights: ``GROUP`` tiles of activations go through
    all weights before the next ``GROUP`` do."""
    if DEPENDENT:
        gdc_launch_dependents()
    LEAF: tl.constexpr = K // LEAVES
    ROW_TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    tile, leaf = tl.program_id(0), tl.program_id(1)
    first = tile // (GROUP * ROW_TILES) * GROUP
    size = tl.minimum(tl.cdiv(num_tokens, TOKENS) - first, GROUP)
    within = tile % (GROUP * ROW_TILES)
    token = (first + within % size) * TOKENS + tl.arange(0, TOKENS)
    row = within // size * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CHUNK)
    there = token < num_tokens

    # Rows past the last are computed again, not stored: cheaper than a mask.
    weights = weight + leaf * LEAF + tl.minimum(row, N - 1).to(tl.int64) * stride_weight
    if AHEAD:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [weights, AHEAD],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    weights = weights[:, None] + column[None, :]
    tokens = x + leaf * LEAF + token.to(tl.int64)[:, None] * stride_x + column[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    if DEPENDENT:
        gdc_wait()
    for done in range(0, LEAF, CHUNK):
        if LEAF % CHUNK == 0:
            w = tl.load(weights + done)
            y = tl.load(tokens + done, mask=there[:, None], other=0.0)
        else:
            inside = (done + column < LEAF)[None, :]
            w = tl.load(weights + done, mask=inside, other=0.0)
            y = tl.load(tokens + done, mask=there[:, None] & inside, other=0.0)
        if WIDEN:
            w, y = w.to(tl.float32), y.to(tl.float32)
        total = tl.dot(w, tl.trans(y), total, input_precision="ieee")

    last = True
    if LEAVES > 1:
        place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        sums = partials + tile.to(tl.int64) * (LEAVES * ROWS * TOKENS) + place
        tl.store(sums + leaf * (ROWS * TOKENS), total)
        tl.debug_barrier()  # all threads have stored before one says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == LEAVES - 1
        if last:
            total = tl.load(sums, cache_modifier=".cg")
            for other in tl.static_range(1, LEAVES):
                total += tl.load(sums + other * (ROWS * TOKENS), cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        if bias is not None:
            total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        places = out + token.to(tl.int64)[:, None] * stride_out + row[None, :]
        tl.store(
            places,
            tl.trans(total).to(out.dtype.element_ty),
            mask=there[:, None] & (row < N)[None, :],
        )
