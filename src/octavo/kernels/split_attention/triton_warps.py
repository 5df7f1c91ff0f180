"""Split-KV decode attention by blocks of one warp, for full batches.

In a full batch it isn't the reading that is slow but what stands between two lines: to find the
next one, its block table and its first keys are three loads that wait for one another. A block of
four warps reads nothing meanwhile, and there are two of them to a multiprocessor; of blocks of one
warp there are four or six, and no barrier between warps stands in their loop.

The history of every (row, KV head), a *line*, is read by one block; one that is longer than its
part of the memory's work by as many blocks as it takes, in *pieces* of equal length. Whoever leaves
a line's last partial merges them. The hardware deals the pieces out in the order of the rows, so
the time is best where long rows come first.

Of both products keys, or columns of values, are on the side of 16, and the few query heads on that
of 8. The other way round takes twice the instructions, which tells where the products of a large
model draw so much power that the clock falls to 1.4 GHz.
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
    turned,
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
MAX_GROUP = 16  # query heads of a KV head
TILE_BYTES = 8192  # of keys, and as many of values
# Up to so many lines a block has room for three tiles instead of two. Then a multiprocessor holds
# four blocks for six, but those that are left alone in the end read faster.
FEW_LINES = 1024


def fits(spec: AttentionSpec) -> bool:
    """Whether the kernel can do a spec's decode."""
    return (
        spec.split_mode == "auto"
        and spec.dtype == spec.kv_dtype
        and getattr(torch, spec.dtype).itemsize == 2
        and spec.head_dim == spec.v_head_dim
        and spec.head_dim in (64, 128, 256)
        and spec.num_heads // spec.num_kv_heads <= MAX_GROUP
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
    num_lines = len(q) * spec.num_kv_heads
    constants = attention_constants(spec, q, k_cache, v_cache, len(q))
    wanted = ("K_STRIDES", "V_STRIDES", "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "BLOCK_SIZE")
    wanted += ("WINDOW", "SOFT_CAP", "SINKS", "BLOCK_ROWS")
    warps_kernel[(num_lines + enough,)](
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
        STAGES=3 if num_lines <= FEW_LINES else 2,
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
    STAGES: tl.constexpr,  # tiles that there is room for
    BLOCK_ROWS: tl.constexpr,
):
    """Grid: (lines + ``enough``,), more than there are pieces. A unit is a tile of pages."""
    if DEPENDENT:
        gdc_launch_dependents()  # what follows has weights to ask for while the last lines are read
    KEYS: tl.constexpr = PAGES * PAGE
    AHEAD: tl.constexpr = (STAGES - 1) * KEYS
    HEADS: tl.constexpr = padded_group(GROUP)
    MMA: tl.constexpr = score_layout()
    KEY: tl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    QUERY: tl.constexpr = gl.DotOperandLayout(1, MMA, 2)
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
    k_tiles = gl.allocate_shared_memory(k_cache.dtype.element_ty, [STAGES, KEYS, HEAD_DIM], TILE)
    v_tiles = gl.allocate_shared_memory(v_cache.dtype.element_ty, [STAGES, KEYS, HEAD_DIM], TILE)
    if DEPENDENT and first + AHEAD >= seq_len:
        gdc_wait()  # the newest key may be among those asked for at once
    for s in gl.static_range(STAGES - 1):
        position = first + s * KEYS
        blocks = _blocks(table, position, start, stop, BLOCK_SIZE, PAGES)
        if position < stop:
            _ask_for_tile(
                k_tiles.index(s),
                v_tiles.index(s),
                k_head,
                v_head,
                blocks,
                position,
                start,
                stop,
                K_STRIDES,
                V_STRIDES,
                BLOCK_SIZE,
                PAGES,
                HEAD_DIM,
            )
        async_copy.commit_group()
    # A tile ahead, as no copy can begin without them.
    blocks = _blocks(table, first + AHEAD, start, stop, BLOCK_SIZE, PAGES)
    query_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY))
    query_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    queries = q + row64 * stride_qr + (head * GROUP + query_h)[:, None] * stride_qh
    if DEPENDENT:
        gdc_wait()  # for queries and the newest key and value
    query = gl.load(queries + query_d[None, :], mask=(query_h < GROUP)[:, None], other=0.0)
    query_tile = k_tiles.index(STAGES - 1).slice(0, HEADS)  # that buffer is still free
    query_tile.store(query)
    gl.thread_barrier()
    query = query_tile.permute((1, 0)).load(QUERY)
    near = gl.reshape(query, [2, HEAD_DIM // 2, HEADS])
    query_a, query_b = gl.split(gl.permute(near, (1, 2, 0)))
    query_a = gl.convert_layout(query_a, QUERY, assert_trivial=True)
    query_b = gl.convert_layout(query_b, QUERY, assert_trivial=True)

    key_of_tile = gl.arange(0, KEYS, layout=gl.SliceLayout(1, MMA))
    m = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    # The sum of the weights, still apart for each place in a tile.
    sums = gl.zeros([KEYS, HEADS], gl.float32, layout=MMA)
    acc = gl.zeros([HEAD_DIM, HEADS], gl.float32, layout=MMA)
    here = 0
    for position in range(first, stop, KEYS):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        ahead = position + AHEAD
        if ahead < stop:
            free = gl.where(here == 0, STAGES - 1, here - 1)
            _ask_for_tile(
                k_tiles.index(free),
                v_tiles.index(free),
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
        async_copy.commit_group()
        k = k_tiles.index(here).load(KEY)
        k_a, k_b = gl.split(gl.permute(gl.reshape(k, [KEYS, 2, HEAD_DIM // 2]), (0, 2, 1)))
        k_a = gl.convert_layout(k_a, KEY, assert_trivial=True)
        k_b = gl.convert_layout(k_b, KEY, assert_trivial=True)
        scores = mma_v2(k_a, query_a, gl.zeros([KEYS, HEADS], gl.float32, layout=MMA))
        scores += mma_v2(k_b, query_b, gl.zeros([KEYS, HEADS], gl.float32, layout=MMA))
        # The scale is applied where the maximum is taken off, in one instruction.
        factor = scale
        if SOFT_CAP:
            scores = cap_scores(scores * scale, soft_cap)
            factor = 1.0
        keys = position + key_of_tile
        valid = keys < stop
        if WINDOW:
            valid &= keys >= start
        scores = gl.where(valid[:, None], scores, float("-inf"))
        new_m = gl.maximum(m, gl.max(scores, 0) * factor)
        discount = gl.exp2(m - new_m)
        weights = gl.exp2(scores * factor - new_m[None, :])
        sums = sums * discount[None, :] + weights
        m = new_m
        v = v_tiles.index(here).permute((1, 0)).load(KEY)
        weights = turned(weights.to(v.dtype), QUERY)
        acc = mma_v2(v, weights, acc * discount[None, :])
        here = gl.where(here == STAGES - 1, 0, here + 1)

    OUT: tl.constexpr = out_layout(HEADS, HEAD_DIM)
    OF_HEADS: tl.constexpr = gl.SliceLayout(1, OUT)
    l = gl.convert_layout(gl.sum(sums, 0), OF_HEADS)
    m = gl.convert_layout(m, OF_HEADS)
    acc = gl.convert_layout(gl.permute(acc, (1, 0)), OUT)
    g = gl.arange(0, HEADS, layout=OF_HEADS)
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
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
def padded_group(group):
    """Columns of a matrix product, of which a KV head's query heads are the first."""
    return (group + 7) // 8 * 8


@constexpr_function
def score_layout():
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])


@constexpr_function
def copy_layout(D):
    """Of a page [keys, D] on its way to shared memory: 16 bytes a thread."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [1, 1], [1, 0])


@constexpr_function
def out_layout(heads, D):
    """Of answers [heads, D]: a thread has a few neighbouring columns of all of them."""
    return gl.BlockedLayout([heads, D // 32], [1, 32], [1, 1], [1, 0])


@constexpr_function
def tile_memory(D):
    """Rows of D 16-bit elements without bank conflicts for eight rows at a time."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, D // 8), [1, 0])
