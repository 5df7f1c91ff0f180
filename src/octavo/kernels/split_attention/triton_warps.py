"""Split-KV decode attention by blocks of one warp, for full batches.

In a full batch it isn't the reading that is slow but what stands between two lines: to find the
next one, its block table and its first keys are three loads that wait for one another. A block of
four warps reads nothing meanwhile, and there are two of them to a multiprocessor; of blocks of one
warp there are six, and no barrier between warps stands in their loop.

The history of every (row, KV head), a *line*, is read by one block; one that is longer than its
part of the memory's work by as many blocks as it takes, in *pieces* of equal length. Whoever leaves
a line's last partial merges them. The hardware deals the pieces out in the order of the rows, so
the time is best where long rows come first.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.spec import AttentionSpec
from octavo.kernels.gluon import (
    async_copy,
    constexpr_function,
    gl,
    jit,
    mma_v2,
)
from octavo.kernels.split_attention import triton_kernels, triton_lines, triton_partials
from octavo.kernels.split_attention.triton_warps_merge import finish, merge_line
from octavo.kernels.triton_launch import attention_constants, dependent_launches, in_base_2

if TYPE_CHECKING:
    from octavo.kernels.split_attention.triton import Scratch

line_of = jit(triton_lines.line_of.fn)
leave = jit(triton_partials.leave.fn)
cap_scores = jit(triton_kernels.cap_scores.fn)

PAGE = tl.constexpr(16)  # keys that surely lie side by side: the block size is a multiple
G = tl.constexpr(16)  # rows of a matrix product, of which a KV head's query heads are the first
TILE_BYTES = 8192  # of keys, and as many of values


def fits(spec: AttentionSpec) -> bool:
    """Whether the kernel can do a spec's decode."""
    return (
        spec.split_mode == "auto"
        and spec.dtype == spec.kv_dtype
        and getattr(torch, spec.dtype).itemsize == 2
        and spec.head_dim == spec.v_head_dim
        and spec.head_dim in (64, 128, 256)
        and spec.num_heads // spec.num_kv_heads <= G.value
        and spec.block_size % PAGE.value == 0
    )


def warps_decode(
    spec: AttentionSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    scratch: Scratch,
    enough: int,
) -> None:
    """``split_decode`` (see there) for a spec that fits. ``enough`` blocks keep the memory busy: by
    that number all lines together are the usual length of a piece."""
    dependent = dependent_launches()
    constants = attention_constants(spec, q, k_cache, v_cache, len(q))
    wanted = ("K_STRIDES", "V_STRIDES", "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "BLOCK_SIZE")
    wanted += ("WINDOW", "SOFT_CAP", "SINKS", "BLOCK_ROWS")
    warps_kernel[(len(q) * spec.num_kv_heads + enough,)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        sinks,
        out,
        lse,
        scratch.out,
        scratch.m,
        scratch.l,
        scratch.counters,
        *in_base_2(spec),
        enough,
        len(q),
        *q.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
        **{name: constants[name] for name in wanted},
        DEPENDENT=dependent,
        PAGES=TILE_BYTES // (PAGE.value * spec.head_dim * 2),
        num_warps=1,
        launch_pdl=dependent,
    )


@jit(do_not_specialize=["enough", "num_rows", "stride_table"])
def warps_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    sinks,
    out,
    lse,
    part_out,
    part_m,
    part_l,
    counters,
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    enough,
    num_rows,
    stride_qr,
    stride_qh,
    stride_table,
    stride_or,
    stride_oh,
    K_STRIDES: tl.constexpr,  # of block, token and head
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched before the kernel in front of it has ended
    PAGES: tl.constexpr,  # of a tile
    BLOCK_ROWS: tl.constexpr,
):
    """Grid: (lines + ``enough``,), more than there are pieces. A unit is a tile of pages."""
    if DEPENDENT:
        gdc_launch_dependents()  # what follows has weights to ask for while the last lines are read
    KEYS: tl.constexpr = PAGES * PAGE
    MMA: tl.constexpr = score_layout()
    QUERY: tl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    KEY: tl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: tl.constexpr = copy_layout(HEAD_DIM)
    row_ids = gl.arange(0, BLOCK_ROWS, layout=row_layout(BLOCK_ROWS))
    lens = gl.load(seq_lens + row_ids, mask=row_ids < num_rows, other=0)
    _, _, units = line_of(lens, KEYS, WINDOW)
    units = gl.where(row_ids < num_rows, units, 0)
    usual = (gl.sum(units, 0) * NUM_KV_HEADS + enough - 1) // enough
    row_ends = gl.associative_scan(_pieces(units, usual), 0, _add) * NUM_KV_HEADS
    piece = gl.program_id(0)
    row = gl.sum((row_ends <= piece).to(tl.int32), 0)
    if row >= num_rows:
        return  # others wait, so that this kernel doesn't end before the one it follows
    row_start = gl.max(gl.where(row_ends <= piece, row_ends, 0), 0)
    seq_len = gl.load(seq_lens + row)
    visible_from, first_unit, line_units = line_of(seq_len, KEYS, WINDOW)
    count = _pieces(line_units, usual)
    head = (piece - row_start) // count
    first_piece = row_start + head * count
    begin = (piece - first_piece) * line_units // count
    end = (piece - first_piece + 1) * line_units // count

    # From here on in keys: the piece is [start, stop).
    start = gl.maximum(visible_from, (first_unit + begin) * KEYS)
    stop = gl.minimum(seq_len, (first_unit + end) * KEYS)
    first = (first_unit + begin) * KEYS
    row64 = row.to(gl.int64)
    table = block_table + row64 * stride_table
    k_head = k_cache + head.to(gl.int64) * K_STRIDES[2]
    v_head = v_cache + head.to(gl.int64) * V_STRIDES[2]
    TILE: tl.constexpr = tile_memory(HEAD_DIM)
    k_tiles = gl.allocate_shared_memory(k_cache.dtype.element_ty, [2, KEYS, HEAD_DIM], TILE)
    v_tiles = gl.allocate_shared_memory(v_cache.dtype.element_ty, [2, KEYS, HEAD_DIM], TILE)
    blocks = _blocks(table, first, start, stop, BLOCK_SIZE, PAGES)
    query_g = gl.arange(0, G, layout=gl.SliceLayout(1, COPY))
    query_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    queries = q + row64 * stride_qr + (head * GROUP + query_g)[:, None] * stride_qh
    if DEPENDENT:
        gdc_wait()  # for queries, keys and values
    query = gl.load(queries + query_d[None, :], mask=(query_g < GROUP)[:, None], other=0.0)
    if start < stop:
        _ask_for_tile(
            k_tiles.index(0),
            v_tiles.index(0),
            k_head,
            v_head,
            blocks,
            first,
            start,
            stop,
            K_STRIDES,
            V_STRIDES,
            BLOCK_SIZE,
            PAGES,
            HEAD_DIM,
        )
    # A tile ahead, as no copy can begin without them.
    blocks = _blocks(table, first + KEYS, start, stop, BLOCK_SIZE, PAGES)
    query_tile = k_tiles.index(1).slice(0, G)  # that buffer is still free
    query_tile.store(query)
    gl.thread_barrier()
    query = query_tile.load(QUERY)

    key_of_tile = gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA))
    m = gl.full([G], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MMA))
    # The sum of the weights, still apart for each place in a tile.
    sums = gl.zeros([G, KEYS], gl.float32, layout=MMA)
    acc = gl.zeros([G, HEAD_DIM], gl.float32, layout=MMA)
    here = 0
    for position in range(first, stop, KEYS):
        async_copy.wait_group(0)
        gl.thread_barrier()
        ahead = position + KEYS
        if ahead < stop:
            _ask_for_tile(
                k_tiles.index(1 - here),
                v_tiles.index(1 - here),
                k_head,
                v_head,
                blocks,
                ahead,
                start,
                stop,
                K_STRIDES,
                V_STRIDES,
                BLOCK_SIZE,
                PAGES,
                HEAD_DIM,
            )
            blocks = _blocks(table, ahead + KEYS, start, stop, BLOCK_SIZE, PAGES)
        k = k_tiles.index(here).permute((1, 0)).load(KEY)
        scores = mma_v2(query, k, gl.zeros([G, KEYS], gl.float32, layout=MMA))
        # The scale is applied where the maximum is taken off, in one instruction.
        factor = scale
        if SOFT_CAP:
            scores = cap_scores(scores * scale, soft_cap)
            factor = 1.0
        keys = position + key_of_tile
        valid = keys < stop
        if WINDOW:
            valid &= keys >= start
        scores = gl.where(valid[None, :], scores, float("-inf"))
        new_m = gl.maximum(m, gl.max(scores, 1) * factor)
        discount = gl.exp2(m - new_m)
        weights = gl.exp2(scores * factor - new_m[:, None])
        sums = sums * discount[:, None] + weights
        m = new_m
        v = v_tiles.index(here).load(KEY)
        weights = gl.convert_layout(weights.to(v.dtype), QUERY)
        acc = mma_v2(weights, v, acc * discount[:, None])
        here = 1 - here

    l = gl.sum(sums, 1)
    g = gl.arange(0, G, layout=gl.SliceLayout(1, MMA))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, MMA))
    outs = out + row64 * stride_or
    lses = lse + row64 * (NUM_KV_HEADS * GROUP)
    first_head = head * GROUP
    if count == 1:
        heads = first_head + g
        places = outs + heads * stride_oh
        finish(acc, m, l, sinks, heads, places, lses + heads, g < GROUP, d, HEAD_DIM, SINKS)
    else:
        parts = (part_out, part_m, part_l)
        leave(parts, piece * GROUP + g, (m, l, acc), g < GROUP, d, HEAD_DIM)
        gl.thread_barrier()  # all threads have stored before one of them tells
        counter = counters + row * NUM_KV_HEADS + head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
            gl.thread_barrier()
            merge_line(
                parts,
                first_piece,
                count,
                sinks,
                first_head,
                outs,
                stride_oh,
                lses,
                GROUP,
                HEAD_DIM,
                SINKS,
            )
            gl.store(counter, 0)


@jit
def _pieces(line_units, usual):
    """Of a line: so many that they come nearest to the usual length, none for no units."""
    return gl.maximum((line_units + usual // 2) // usual, gl.minimum(line_units, 1))


@jit
def _ask_for_tile(
    k_tile,
    v_tile,
    k_head,
    v_head,
    blocks,
    first,
    start,
    stop,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    D: tl.constexpr,
):
    """Ask for the keys and values of the tile at key ``first``; those outside [start, stop) are
    zero."""
    key = gl.arange(0, PAGE, layout=gl.SliceLayout(1, copy_layout(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, copy_layout(D)))
    for page in gl.static_range(PAGES):
        k_page = k_tile.slice(page * PAGE, PAGE)
        v_page = v_tile.slice(page * PAGE, PAGE)
        at = first + page * PAGE
        block = blocks[page].to(gl.int64)
        slot = (at % BLOCK_SIZE).to(gl.int64)
        k = k_head + (block * K_STRIDES[0] + slot * K_STRIDES[1])
        v = v_head + (block * V_STRIDES[0] + slot * V_STRIDES[1])
        k = k + (key[:, None] * K_STRIDES[1] + d[None, :])
        v = v + (key[:, None] * V_STRIDES[1] + d[None, :])
        if (at >= start) & (at + PAGE <= stop):
            async_copy.async_copy_global_to_shared(k_page, k)
            async_copy.async_copy_global_to_shared(v_page, v)
        else:
            keys = (at + key)[:, None] + d[None, :] * 0
            there = (keys >= start) & (keys < stop)
            async_copy.async_copy_global_to_shared(k_page, k, mask=there)
            async_copy.async_copy_global_to_shared(v_page, v, mask=there)
    async_copy.commit_group()


@jit
def _blocks(table, first, start, stop, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """The blocks of the pages of the tile at key ``first``; for a page without keys in [start,
    stop) that of the nearest key there."""
    last_block = gl.maximum(stop - 1, 0) // BLOCK_SIZE
    blocks = ()
    for page in gl.static_range(PAGES):
        entry = gl.minimum((first + page * PAGE) // BLOCK_SIZE, last_block)
        entry = gl.maximum(entry, start // BLOCK_SIZE)
        blocks += (gl.load(table + entry, mask=start < stop, other=0),)
    return blocks


@jit
def _add(a, b):
    return a + b


@constexpr_function
def row_layout(rows):
    return gl.BlockedLayout([max(1, rows // 32)], [32], [1], [0])


@constexpr_function
def score_layout():
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])


@constexpr_function
def copy_layout(D):
    """Of a page [keys, D] on its way to shared memory: 16 bytes a thread."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [1, 1], [1, 0])


@constexpr_function
def tile_memory(D):
    """Rows of D 16-bit elements without bank conflicts for eight rows at a time."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, D // 8), [1, 0])
