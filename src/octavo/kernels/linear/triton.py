"""The product of a few activation rows with a tile of weight rows, for CUDA through Gluon.

A block has ``ROWS`` rows of the weight, over all of K. It asks for the first ``AHEAD`` chunks of
them before it waits for the kernel in front (they are constant), so that memory is read while that
kernel still works: :func:`ask_for_weights`, :func:`load_early`, then the wait, then
:func:`take_activations`, :func:`multiply` and :func:`total`. Chunks lie in shared memory, where
blocks of several kernels in a row fit a multiprocessor side by side, and a few of them wait in
registers.

The product is made on tensor cores of m16n8k16: 16 weight rows by 8 activation rows. K is walked in
chunks, and a chunk is cut into ``S`` slices, one for each warp, that are added up through shared
memory: operands are ``[S, rows, CHUNK // S]``. A thread takes eight elements of a row at once and
hands them to two instructions: which of K's columns an instruction takes doesn't matter as long as
both sides agree (``k_width`` of the layouts), so nothing is shuffled between threads.

Weights come in ``PARTS`` tiles: one, or one of gate and one of up.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from octavo.kernels.gluon import (
    TensorDescriptor,
    constexpr_function,
    gl,
    jit,
    mbarrier,
    mma_v2,
    tma,
)
from octavo.kernels.linear.tiles import Tile


@constexpr_function
def product_layout(S):
    """Of a product [S, ROWS, N]: a warp has a slice of K."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8]
    )


@constexpr_function
def weight_layout(S):
    """Of weights [S, ROWS, columns]."""
    return gl.DotOperandLayout(0, product_layout(S), 8)


@constexpr_function
def activation_layout(S):
    """Of activations [S, columns, N]."""
    return gl.DotOperandLayout(1, product_layout(S), 8)


@constexpr_function
def columns_of(M):
    """Activation rows of a product: an instruction has eight."""
    return max(8, M)


@constexpr_function
def num_chunks(K, CHUNK):
    return (K + CHUNK - 1) // CHUNK


@constexpr_function
def chunks_ahead(K, CHUNK, AHEAD):
    return min(AHEAD, num_chunks(K, CHUNK))


def chunks_early(k: int, tile: Tile) -> int:
    """How many chunks wait in registers; where no tile says so, at most 96 of them a thread."""
    count = -(-k // tile.chunk)
    if tile.one_row:
        return min(count, tile.early)
    of_chunk = tile.rows * tile.chunk * 2 // (4 * 32 * tile.num_warps)
    return min(count, tile.ahead, 96 // of_chunk)


@constexpr_function
def tile_memory(ROWS, CHUNK):
    """Of weights [ROWS, CHUNK], as the copy engine lays them out."""
    return gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], gl.bfloat16)


def describe(weight: Tensor, tile: Tile, parts: int = 1) -> Any:
    """What the copy engine must know of a weight [N, K] to copy chunks of a tile's ``parts``."""
    block = [tile.rows // parts, tile.chunk]
    return TensorDescriptor.from_tensor(weight, block, tile_memory(*block))


@constexpr_function
def partial_layout(S, R, M):
    """Of [S, R, M], to add up the slices: a thread has all of them; the lanes of a warp have the
    rows, so that sums over rows stay in a warp; columns are in what lanes are left and in warps."""
    rows, columns = unit_bases(R, 1, 3), unit_bases(M, 2, 3)
    lanes, regs = rows[:5], unit_bases(S, 0, 3) + rows[5:]
    return linear_layout(regs, lanes, columns, S, [S, R, M])


@constexpr_function
def squares_layout(S, R, M, SUMS):
    """Of squares [M, SUMS], with the columns of ``partial_layout`` where they are there."""
    parts, columns = unit_bases(SUMS, 1, 2), unit_bases(M, 0, 2)
    num_lanes = min(5, len(unit_bases(R, 0, 1)))
    lanes = parts[2 : 2 + num_lanes]
    lanes += [[0, 0]] * (num_lanes - len(lanes))
    return linear_layout(parts[:2] + parts[2 + num_lanes :], lanes, columns, S, [M, SUMS])


@constexpr_function
def unit_bases(size, dim, rank):
    """Of one dimension, a power of two: 1, 2, 4, ..."""
    units = [1 << bit for bit in range(size.bit_length() - 1)]
    return [[unit if axis == dim else 0 for axis in range(rank)] for unit in units]


@constexpr_function
def linear_layout(regs, lanes, columns, num_warps, shape):
    """Columns go to the lanes that are left, then to warps, then to registers."""
    zero = [0] * len(shape)
    free = 5 - len(lanes)
    lanes = lanes + columns[:free]
    columns = columns[free:]
    num_bits = num_warps.bit_length() - 1
    warps = columns[:num_bits]
    regs = regs + columns[num_bits:]
    lanes = lanes + [zero] * (5 - len(lanes))
    warps = warps + [zero] * (num_bits - len(warps))
    return gl.DistributedLinearLayout(regs, lanes, warps, [], shape)


@jit
def ask_for_weights(
    weight,
    first_row,
    second_row,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Shared memory [AHEAD * PARTS, ROWS // PARTS, CHUNK], into which the first chunks of the rows
    from ``first_row`` on, and in a second part those from ``second_row`` on, are being copied; and
    a barrier for each chunk. What lies outside of the weight becomes zero."""
    tiles = gl.allocate_shared_memory(
        weight.dtype, [AHEAD * PARTS, ROWS // PARTS, CHUNK], tile_memory(ROWS // PARTS, CHUNK)
    )
    barriers = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(AHEAD):
        copy_chunk(tiles, barriers, weight, first_row, second_row, i, i, ROWS, CHUNK, PARTS)
    return tiles, barriers


@jit
def copy_chunk(
    tiles,
    barriers,
    weight,
    first_row,
    second_row,
    i,
    slot,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Begin to copy chunk ``i`` to ``slot``. The copy engine does it, asked by one thread: copies
    that all threads issue would hold up what the blocks beside this one have to load."""
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, ROWS * CHUNK * 2)
    tma.async_copy_global_to_shared(
        weight, [first_row, i * CHUNK], barrier, tiles.index(slot * PARTS)
    )
    if PARTS == 2:
        tma.async_copy_global_to_shared(
            weight, [second_row, i * CHUNK], barrier, tiles.index(slot * PARTS + 1)
        )


@jit
def load_chunk(
    tiles,
    slot,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The parts of a chunk that has arrived, from shared memory to registers."""
    parts = ()
    for part in gl.static_range(PARTS):
        tile = tiles.index(slot * PARTS + part)
        tile = tile.reshape([ROWS // PARTS, S, CHUNK // S]).permute([1, 0, 2])
        parts += (tile.load(weight_layout(S)),)  # type: ignore[assignment]
    return parts


@jit
def load_early(
    tiles,
    barriers,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first ``EARLY`` chunks, as soon as they have arrived."""
    chunks = ()
    for i in gl.static_range(EARLY):
        mbarrier.wait(barriers.index(i), 0)
        chunks += (load_chunk(tiles, i, ROWS, CHUNK, S, PARTS),)  # type: ignore[assignment]
    return chunks


@jit
def take_activations(
    y,
    stride,
    num_rows,
    FIRST: tl.constexpr,
    STOP: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
):
    """The chunks ``FIRST`` up to ``STOP`` of the activation rows; those from ``num_rows`` on are
    zero, and there are eight at least."""
    N: tl.constexpr = columns_of(M)
    slices = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, activation_layout(S))))
    columns = gl.arange(
        0, CHUNK // S, layout=gl.SliceLayout(0, gl.SliceLayout(2, activation_layout(S)))
    )
    columns = slices[:, None, None] * (CHUNK // S) + columns[None, :, None]
    m = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, activation_layout(S))))
    rows = y + (m * stride)[None, None, :]
    chunks = ()
    for i in gl.static_range(FIRST, STOP):
        there = (m < num_rows)[None, None, :]
        if i * CHUNK + CHUNK > K:
            there &= i * CHUNK + columns < K
        chunks += (gl.load(rows + (i * CHUNK + columns), mask=there, other=0.0),)  # type: ignore[assignment]
    return chunks


@jit
def multiply(
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
    ROWS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``weights @ activations`` of each slice, in shared memory [PARTS, S, ROWS // PARTS, N], fp32.
    The first ``AHEAD`` chunks are on their way, or, if ``early``, in registers; for every one that
    is used up, the next is asked for.

    Neighbouring chunks are added up apart, as an instruction waits for the one whose sum it adds
    to.
    """
    COUNT: tl.constexpr = num_chunks(K, CHUNK)
    N: tl.constexpr = columns_of(M)
    R: tl.constexpr = ROWS // PARTS
    # The sums begin with zeros that are only there behind a barrier: else the first products would
    # be moved up between the loads, and the loads behind them would wait for the first ones' data.
    nothing = gl.allocate_shared_memory(gl.float32, [S], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    SLICE: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, product_layout(S)))
    nothing.store(gl.zeros([S], gl.float32, layout=SLICE))
    gl.thread_barrier()
    zeros = gl.zeros([S, R, N], gl.float32, layout=product_layout(S))
    zeros = zeros + nothing.load(SLICE)[:, None, None]
    slices = gl.allocate_shared_memory(
        gl.float32, [PARTS, S, R, N], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    even_0, odd_0, even_1, odd_1 = zeros, zeros, zeros, zeros
    operands = (tiles, barriers, weight, first_row, second_row)
    for i in gl.static_range(COUNT):
        if i < len(early):
            chunk = early[i]
        else:
            mbarrier.wait(barriers.index(i % AHEAD), i // AHEAD % 2)
            chunk = load_chunk(tiles, i % AHEAD, ROWS, CHUNK, S, PARTS)
        if i % 2 == 0:
            even_0 = mma_v2(chunk[0], activations[i], even_0)
            if PARTS == 2:
                even_1 = mma_v2(chunk[1], activations[i], even_1)
        else:
            odd_0 = mma_v2(chunk[0], activations[i], odd_0)
            if PARTS == 2:
                odd_1 = mma_v2(chunk[1], activations[i], odd_1)
        if i + AHEAD < COUNT:
            gl.thread_barrier()  # all warps are through with the chunk that is overwritten
            copy_chunk(*operands, i + AHEAD, i % AHEAD, ROWS, CHUNK, PARTS)
            activations += take_activations(
                y, stride, num_rows, i + AHEAD, i + AHEAD + 1, K, CHUNK, S, M
            )
    slices.index(0).store(even_0 + odd_0)
    if PARTS == 2:
        slices.index(1).store(even_1 + odd_1)
    nothing._keep_alive()  # in one of these places, the sums would cost a barrier more
    tiles._keep_alive()
    gl.thread_barrier()
    return slices


@jit
def total(slices, R: tl.constexpr, S: tl.constexpr, M: tl.constexpr):
    """The sum of the slices [S, R, N] of a part: [R, M]."""
    partial = slices.slice(0, M, dim=2).load(partial_layout(S, R, M))
    return gl.sum(partial, 0)


@jit
def take_squares(
    squares,
    stride,
    num_rows,
    parts,
    R: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    SUMS: tl.constexpr,
):
    """The sums [M, SUMS] that the blocks that wrote x have left in ``squares`` [M, parts]."""
    m = gl.arange(0, M, layout=gl.SliceLayout(1, squares_layout(S, R, M, SUMS)))
    p = gl.arange(0, SUMS, layout=gl.SliceLayout(0, squares_layout(S, R, M, SUMS)))
    there = (m < num_rows)[:, None] & (p < parts)[None, :]
    return gl.load(squares + m[:, None] * stride + p[None, :], mask=there, other=0.0)


@jit
def inverse_rms(sums, eps, K, R: tl.constexpr, S: tl.constexpr, M: tl.constexpr):
    """``1 / sqrt(mean(x ** 2) + eps)`` of each row, [1, M]."""
    scale = gl.rsqrt(gl.sum(sums, 1) / K + eps)
    layout: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, partial_layout(S, R, M)))
    return gl.convert_layout(scale, layout)[None, :]
