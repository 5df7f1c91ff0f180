"""Split-KV decode attention, device side: the kernel that reads keys and values.

``triton_lines.py`` says which of them, ``triton_merge.py`` puts together what is left in parts.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.split_attention.triton_lines import (
    line_of,
    nearest_leaf,
    start_of_share,
    units_of_leaf,
    units_of_rows,
)
from octavo.kernels.split_attention.triton_partials import LOG2E, add, empty, finish, leave


@triton.jit(do_not_specialize=["num_slots", "num_rows", "line_places", "stride_table"])
def split_kernel(
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
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    num_slots,
    num_rows,
    line_places,
    stride_qr,
    stride_qh,
    stride_table,
    stride_or,
    stride_oh,
    K_STRIDES: tl.constexpr,  # of block, token and head: constants save a third of the loop
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    LEAF_TOKENS: tl.constexpr,
    MAX_LEAVES: tl.constexpr,
    FOLD: tl.constexpr,
    UNCUT: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched before the kernel in front of it has ended
    EARLY: tl.constexpr,  # lets the merge kernel start, and wait, before this one ends
    TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid: (shares,). A block walks through the segments of its share."""
    if EARLY:
        gdc_launch_dependents()
    row_ids = tl.arange(0, BLOCK_ROWS)
    units = units_of_rows(seq_lens, row_ids, num_rows, UNIT, WINDOW)
    row_ends = tl.cumsum(units, 0) * NUM_KV_HEADS
    total = tl.sum(units, 0) * NUM_KV_HEADS
    share = tl.program_id(0)
    shares = tl.minimum(tl.num_programs(0), total)
    unit = tl.minimum(start_of_share(share, total, shares), total)
    share_end = tl.minimum(start_of_share(share + 1, total, shares), total)
    longest_uncut = total // (num_slots * UNCUT)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    t = tl.arange(0, TOKENS)
    while unit < share_end:
        row = tl.sum((row_ends <= unit).to(tl.int32), 0)
        row_start = tl.max(tl.where(row_ends <= unit, row_ends, 0), 0)
        seq_len = tl.load(seq_lens + row)
        visible_from, first_unit, line_units = line_of(seq_len, UNIT, WINDOW)
        head = (unit - row_start) // line_units
        line_start = row_start + head * line_units
        begin = unit - line_start
        end = tl.minimum(line_units, share_end - line_start)
        if FIXED:
            unit = line_start + end
            leaf_units = units_of_leaf(seq_len, UNIT, WINDOW, LEAF_TOKENS, MAX_LEAVES)
            begin = nearest_leaf(begin, first_unit, line_units, leaf_units)
            end = nearest_leaf(end, first_unit, line_units, leaf_units)
            first_group = first_unit // leaf_units // FOLD
            last_group = (first_unit + line_units - 1) // leaf_units // FOLD
            finished_here = (begin == 0) & (end == line_units) & (first_group == last_group)
            line_place = (row * NUM_KV_HEADS + head) * line_places - first_group * FOLD
            leaf = (first_unit + begin) // leaf_units
            leaf_end = (leaf + 1) * leaf_units * UNIT
        else:
            # A share's second place is for the line that it ends in, its first for the line that
            # it begins in.
            place = 2 * share + (begin == 0)
            uncut = line_units <= longest_uncut
            end = tl.where(uncut, line_units, end)
            unit = line_start + end
            finished_here = (begin == 0) & (end == line_units)
            end = tl.where(uncut & (begin > 0), begin, end)  # read before

        # From here on in keys: the segment is [start, stop).
        start = tl.maximum(visible_from, (first_unit + begin) * UNIT)
        stop = tl.minimum(seq_len, (first_unit + end) * UNIT)
        heads = head * GROUP + g
        row64 = row.to(tl.int64)
        table = block_table + row64 * stride_table
        k_head = k_cache + head.to(tl.int64) * K_STRIDES[2]
        v_head = v_cache + head.to(tl.int64) * V_STRIDES[2]
        # Block ids are fetched one tile ahead, or no K/V could be in flight while another tile is
        # worked on. Past its ends the segment's first and last key are read again: cheaper than a
        # mask for each row, and as safe.
        first_tile = start // TOKENS * TOKENS  # a window begins anywhere
        last_block = block_of(stop - 1, BLOCK_SIZE)
        entry = tl.minimum(block_of(first_tile + t, BLOCK_SIZE), last_block)
        if WINDOW:
            entry = tl.maximum(entry, block_of(start, BLOCK_SIZE))
        block = tl.load(table + entry, mask=start < stop, other=0)
        if DEPENDENT:
            gdc_wait()  # for queries, keys and values; there is no waiting after the first time
        query = tl.load(
            q + row64 * stride_qr + heads[:, None] * stride_qh + d[None, :],
            mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            query = query.to(tl.float32)
        m, l, acc = empty(BLOCK_G, BLOCK_DV)
        # The sum of the weights, still apart for each place in a tile: to add them up takes all
        # warps, and once is enough.
        sums = tl.zeros([BLOCK_G, TOKENS], tl.float32)
        if FIXED:
            group_m, group_l, group_acc = empty(BLOCK_G, BLOCK_DV)
        for position in range(first_tile, stop, TOKENS):
            keys = position + t
            valid = keys < stop
            nearest = tl.minimum(keys, stop - 1)
            if WINDOW:
                valid &= keys >= start
                nearest = tl.maximum(nearest, start)
            slot = slot_of(nearest, BLOCK_SIZE)
            block64 = block.to(tl.int64)
            k = tl.load(
                k_head + (block64 * K_STRIDES[0] + slot * K_STRIDES[1])[:, None] + d[None, :],
                mask=(d < HEAD_DIM)[None, :],
                other=0.0,
            )
            v = tl.load(
                v_head + (block64 * V_STRIDES[0] + slot * V_STRIDES[1])[:, None] + dv[None, :],
                mask=(dv < V_HEAD_DIM)[None, :],
                other=0.0,
            )
            ahead = keys + TOKENS
            block = tl.load(table + tl.minimum(block_of(ahead, BLOCK_SIZE), last_block))
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee")
            # The scale is applied where the maximum is taken off, in one instruction.
            factor = scale
            if SOFT_CAP:
                scores = cap_scores(scores * scale, soft_cap)
                factor = 1.0
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_m = tl.maximum(m, tl.max(scores, 1) * factor)
            discount = tl.exp2(m - new_m)
            weights = tl.exp2(scores * factor - new_m[:, None])
            sums = sums * discount[:, None] + weights
            acc = acc * discount[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            m = new_m
            if FIXED:  # noqa: SIM102 (known when compiled)
                if (position + TOKENS == leaf_end) & (leaf_end < stop):
                    l = tl.sum(sums, 1)
                    sums = tl.zeros([BLOCK_G, TOKENS], tl.float32)
                    group_m, group_l, group_acc = add(group_m, group_l, group_acc, m, l, acc)
                    m, l, acc = empty(BLOCK_G, BLOCK_DV)
                    whole = _is_whole(
                        leaf // FOLD, begin, end, first_unit, line_units, leaf_units, FOLD
                    )
                    if ((leaf + 1) % FOLD == 0) | (whole == 0):
                        place = line_place + tl.where(whole, leaf // FOLD * FOLD, leaf)
                        parts = (part_out, part_m, part_l)
                        partial = (group_m, group_l, group_acc)
                        leave(parts, place * GROUP + g, partial, g < GROUP, dv, V_HEAD_DIM)
                        group_m, group_l, group_acc = empty(BLOCK_G, BLOCK_DV)
                    leaf += 1
                    leaf_end += leaf_units * UNIT

        l = tl.sum(sums, 1)
        if FIXED:
            m, l, acc = add(group_m, group_l, group_acc, m, l, acc)
            whole = _is_whole(leaf // FOLD, begin, end, first_unit, line_units, leaf_units, FOLD)
            place = line_place + tl.where(whole, leaf // FOLD * FOLD, leaf)
        if finished_here:
            outs = out + row64 * stride_or + heads * stride_oh
            lses = lse + row64 * (NUM_KV_HEADS * GROUP) + heads
            finish(acc, m, l, sinks, heads, outs, lses, g < GROUP, dv, V_HEAD_DIM, SINKS)
        elif begin < end:
            parts = (part_out, part_m, part_l)
            leave(parts, place * GROUP + g, (m, l, acc), g < GROUP, dv, V_HEAD_DIM)
    if DEPENDENT:
        gdc_wait()  # in every block, or this kernel could end before the one it follows


@triton.jit
def _is_whole(group, begin, end, first_unit, line_units, leaf_units, FOLD: tl.constexpr):
    """Whether all of a group's part of the line lies in the segment [begin, end)."""
    group_units = leaf_units * FOLD
    start = tl.maximum(group * group_units - first_unit, 0)
    stop = tl.minimum((group + 1) * group_units - first_unit, line_units)
    return (begin <= start) & (stop <= end)


# Scores and keys.


@triton.jit
def cap_scores(scores, cap):
    """``cap * tanh(scores / cap)`` of base-2 scores and cap, by exp2 alone; right at both
    infinities."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def block_of(keys, BLOCK_SIZE: tl.constexpr):
    """Unsigned: a shift where the block size is a power of two."""
    return keys.to(tl.uint32) // BLOCK_SIZE


@triton.jit
def slot_of(keys, BLOCK_SIZE: tl.constexpr):
    return (keys.to(tl.uint32) % BLOCK_SIZE).to(tl.int64)
