"""The merge of a line's pieces by a block of one warp (``triton_warps.py``), device side."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton.language as tl

from octavo.kernels.gluon import constexpr_function, gl, jit, next_power_of_2
from octavo.kernels.split_attention import triton_partials

finish = jit(triton_partials.finish.fn)


@constexpr_function
def merged_at_a_time(heads, D):
    """So many that a thread holds 64 numbers of them."""
    return max(2, min(16, 2048 // (heads * D)))


@constexpr_function
def merge_layout(parts, heads, D):
    """Of partials [parts, heads, D]: a thread has all of them, of a few columns."""
    return gl.BlockedLayout([parts, heads, D // 32], [1, 1, 32], [1, 1, 1], [2, 1, 0])


@jit
def merge_line(
    parts,
    first_piece,
    count,
    sinks,
    first_head,
    outs,
    stride_oh,
    lses,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The merge of ``attention/merge.py`` for a KV head's query heads: their line's ``count``
    partials in the order of their keys, ``MERGED`` at a time."""
    part_out, part_m, part_l = parts
    HEADS: tl.constexpr = next_power_of_2(GROUP)
    MERGED: tl.constexpr = merged_at_a_time(HEADS, D)
    PARTS: tl.constexpr = merge_layout(MERGED, HEADS, D)
    OF_PARTS: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, PARTS))  # of their heads
    OF_HEADS: tl.constexpr = gl.SliceLayout(0, PARTS)  # of what becomes of them
    s = gl.arange(0, MERGED, layout=gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    part_head = gl.arange(0, HEADS, layout=OF_PARTS)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, OF_HEADS))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, OF_HEADS))
    m = gl.full(
        [HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS))
    )
    l = gl.zeros([HEADS], gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    acc = gl.zeros([HEADS, D], gl.float32, layout=OF_HEADS)
    for i in range(0, count, MERGED):
        place = (first_piece + i + s)[:, None] * GROUP + part_head[None, :]
        there = (i + s < count)[:, None] & (part_head < GROUP)[None, :]
        # Read past the L1, where older ones may lie.
        part_max = gl.load(part_m + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part_sum = gl.load(part_l + place, mask=there, other=0.0, cache_modifier=".cg")
        values = gl.load(
            part_out + (place.to(gl.int64)[:, :, None] * D + column[None, None, :]),
            mask=there[:, :, None] & (column >= 0)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = gl.maximum(m, gl.max(part_max, 0))
        yardstick = gl.where(new_m == float("-inf"), 0.0, new_m)  # of heads that only pad
        weights = gl.exp2(part_max - yardstick[None, :])
        discount = gl.exp2(m - yardstick)
        l = l * discount + gl.sum(part_sum * weights, 0)
        scaled = gl.convert_layout(discount, gl.SliceLayout(1, OF_HEADS))
        acc = acc * scaled[:, None] + gl.sum(values * weights[:, :, None], 0)
        m = new_m
    m = gl.convert_layout(m, gl.SliceLayout(1, OF_HEADS))
    l = gl.convert_layout(l, gl.SliceLayout(1, OF_HEADS))
    heads = first_head + h
    places = outs + heads * stride_oh
    finish(acc, m, l, sinks, heads, places, lses + heads, h < GROUP, d, D, SINKS)
