"""Split-KV decode attention, device side: who reads which keys, the split kernel and the merge.

The history of every (row, KV head) is a *line* of *units* of consecutive keys; all lines laid end
to end, row by row and head by head, are the step's work. Share ``i`` of ``n`` is the units from
``i * U // n`` up to ``(i + 1) * U // n``, whatever lines they lie in, so that a 128K row beside
thirty-one short ones leaves no block idle (stream-K, Osama et al. 2023, on the key axis of
FlashDecoding, Dao et al. 2023). Where ``n`` is a multiple of the number of lines and all are
equally long, every share lies in one line. The lengths are read on the device, so that a captured
CUDA graph stays right at every length.

The part of a line that falls into one share is a *segment*. A line that is one segment is
finished where it was read; of any other, each segment leaves a partial in scratch memory for the
merge kernel. In ``auto`` mode a line that is short beside what a slot of the GPU has to read is
not cut: it is read whole by the share that it begins in, at little loss of balance.

Modes differ in the unit: ``auto`` one tile of keys, ``off`` the whole line. In ``fixed`` mode a
unit is a *leaf*, ``split_tokens`` keys at absolute multiples, each with a softmax of its own, and
``FOLD`` leaves at absolute multiples are a *group*. Leaves are added up in order to their group,
and groups to the line, by whoever has them: a group that lies in one share is added up by the
block that read it, any other by the merge kernel, with the same instructions. So a row's bits
depend on nothing but the row.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.split_attention.triton_partials import (
    LOG2E,
    add,
    empty,
    finish,
    leave,
    take,
)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "line_groups", "stride_table"])
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
    line_groups,
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
    """Grid: (shares,). See the module's docstring."""
    if EARLY:
        gdc_launch_dependents()
    row_ids = tl.arange(0, BLOCK_ROWS)
    units = _units_of_rows(seq_lens, row_ids, num_rows, UNIT, WINDOW)
    row_ends = tl.cumsum(units, 0) * NUM_KV_HEADS
    total = tl.sum(units, 0) * NUM_KV_HEADS
    share = tl.program_id(0)
    shares = tl.minimum(tl.num_programs(0), total)
    unit = tl.minimum(_cut(share, total, shares), total)
    share_end = tl.minimum(_cut(share + 1, total, shares), total)
    longest_uncut = total // (num_slots * UNCUT)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    t = tl.arange(0, TOKENS)
    while unit < share_end:
        row = tl.sum((row_ends <= unit).to(tl.int32), 0)
        row_start = tl.max(tl.where(row_ends <= unit, row_ends, 0), 0)
        seq_len = tl.load(seq_lens + row)
        visible_from, first_unit, line_units = _line(seq_len, UNIT, WINDOW)
        head = (unit - row_start) // line_units
        line_start = row_start + head * line_units
        begin = unit - line_start
        end = tl.minimum(line_units, share_end - line_start)
        if not FIXED:
            uncut = line_units <= longest_uncut
            end = tl.where(uncut, line_units, end)
            read_before = uncut & (begin > 0)
        finished_here = (begin == 0) & (end == line_units)
        if FIXED:
            last_unit = first_unit + line_units - 1
            finished_here &= first_unit // FOLD == last_unit // FOLD

        # From here on in keys: the segment is [start, stop).
        start = tl.maximum(visible_from, (first_unit + begin) * UNIT)
        stop = tl.minimum(seq_len, (first_unit + end) * UNIT)
        if not FIXED:
            stop = tl.where(read_before, start, stop)
        heads = head * GROUP + g
        row64 = row.to(tl.int64)
        table = block_table + row64 * stride_table
        k_head = k_cache + head.to(tl.int64) * K_STRIDES[2]
        v_head = v_cache + head.to(tl.int64) * V_STRIDES[2]
        # Block ids are fetched one tile ahead, or no K/V could be in flight while another tile is
        # worked on.
        first_tile = start // TOKENS * TOKENS  # a window begins anywhere
        keys = first_tile + t
        block = tl.load(
            table + block_of(keys, BLOCK_SIZE), mask=(keys >= start) & (keys < stop), other=0
        )
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
        group_m, group_l, group_acc = empty(BLOCK_G, BLOCK_DV)
        for position in range(first_tile, stop, TOKENS):
            keys = position + t
            valid = keys < stop
            if WINDOW:
                valid &= keys >= start
            slot = slot_of(keys, BLOCK_SIZE)
            block64 = block.to(tl.int64)
            k = tl.load(
                k_head + (block64 * K_STRIDES[0] + slot * K_STRIDES[1])[:, None] + d[None, :],
                mask=valid[:, None] & (d < HEAD_DIM)[None, :],
                other=0.0,
            )
            v = tl.load(
                v_head + (block64 * V_STRIDES[0] + slot * V_STRIDES[1])[:, None] + dv[None, :],
                mask=valid[:, None] & (dv < V_HEAD_DIM)[None, :],
                other=0.0,
            )
            ahead = keys + TOKENS
            block = tl.load(table + block_of(ahead, BLOCK_SIZE), mask=ahead < stop, other=0)
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            if SOFT_CAP:
                scores = cap_scores(scores, soft_cap)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_m = tl.maximum(m, tl.max(scores, 1))
            discount = tl.exp2(m - new_m)
            weights = tl.exp2(scores - new_m[:, None])
            l = l * discount + tl.sum(weights, 1)
            acc = acc * discount[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            m = new_m
            if FIXED:  # noqa: SIM102 (known when compiled)
                if ((position + TOKENS) % UNIT == 0) | (position + TOKENS >= stop):
                    group_m, group_l, group_acc = add(group_m, group_l, group_acc, m, l, acc)
                    m, l, acc = empty(BLOCK_G, BLOCK_DV)
                    leaf = position // UNIT
                    first, last = _leaves_of_group(leaf // FOLD, first_unit, line_units, FOLD)
                    whole = (first >= begin) & (last < end)
                    if (leaf == first_unit + last) | (whole == 0):  # noqa: SIM102
                        if finished_here == 0:
                            line = row * NUM_KV_HEADS + head
                            place = line * line_groups + leaf // FOLD
                            place -= first_unit // FOLD
                            if whole == 0:
                                owner = _share_of(line_start + first, total, shares)
                                lines = num_rows * NUM_KV_HEADS
                                place = _place_of_cut_group(owner, lines, line_groups, FOLD)
                                place += leaf % FOLD
                            leave(
                                (part_out, part_m, part_l),
                                place * GROUP + g,
                                (group_m, group_l, group_acc),
                                g < GROUP,
                                dv,
                                V_HEAD_DIM,
                            )
                            group_m, group_l, group_acc = empty(BLOCK_G, BLOCK_DV)

        if FIXED:
            m, l, acc = group_m, group_l, group_acc
        if finished_here:
            outs = out + row64 * stride_or + heads * stride_oh
            lses = lse + row64 * (NUM_KV_HEADS * GROUP) + heads
            finish(acc, m, l, sinks, heads, outs, lses, g < GROUP, dv, V_HEAD_DIM, SINKS)
        elif not FIXED:  # noqa: SIM102 (known when compiled)
            if read_before == 0:
                place = 2 * share + (begin == 0)
                parts = (part_out, part_m, part_l)
                leave(parts, place * GROUP + g, (m, l, acc), g < GROUP, dv, V_HEAD_DIM)
        unit = line_start + end
    if DEPENDENT:
        gdc_wait()  # in every block, or this kernel could end before the one it follows


@triton.jit(do_not_specialize=["max_shares", "num_slots", "num_rows", "line_groups"])
def merge_kernel(
    seq_lens,
    sinks,
    out,
    lse,
    part_out,
    part_m,
    part_l,
    max_shares,
    num_slots,
    num_rows,
    line_groups,
    stride_or,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    FOLD: tl.constexpr,
    UNCUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FEW: tl.constexpr,
    FEW_COLUMNS: tl.constexpr,
    PARTIALS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (R, H, blocks). The merge of ``attention/merge.py`` for a query head whose line no
    block has finished: its partials in the order of their keys, ``PARTIALS`` of them at a time,
    ``COLUMNS`` columns at a time. The blocks of a head share out its columns. Where there are at
    most ``FEW`` partials, ``FEW`` and ``FEW_COLUMNS`` take the place of the other two."""
    if EARLY:
        gdc_launch_dependents()
    row_ids = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    kv_head = query_head // GROUP
    units = _units_of_rows(seq_lens, row_ids, num_rows, UNIT, WINDOW)
    total = tl.sum(units, 0) * NUM_KV_HEADS
    shares = tl.minimum(max_shares, total)
    row_start = tl.sum(tl.where(row_ids < row, units, 0), 0) * NUM_KV_HEADS
    _, first_unit, line_units = _line(tl.load(seq_lens + row), UNIT, WINDOW)
    line_start = row_start + kv_head * line_units
    first_share = _share_of(line_start, total, shares)
    cut = line_start + line_units > _cut(first_share + 1, total, shares)
    if FIXED:
        count = (first_unit + line_units - 1) // FOLD - first_unit // FOLD + 1
        left = cut | (count > 1)
    else:
        count = _share_of(line_start + line_units - 1, total, shares) - first_share + 1
        left = cut & (line_units > total // (num_slots * UNCUT))
    if left:
        parts = (part_out, part_m, part_l)
        outputs = (out, lse, sinks, stride_or, stride_oh)
        line = (row, query_head, line_start, first_unit, line_units, first_share, cut, count)
        step = (num_rows, total, shares, line_groups)
        if FEW:  # noqa: SIM102 (known when compiled)
            if count <= FEW:
                _merge_line(
                    parts,
                    outputs,
                    line,
                    step,
                    NUM_KV_HEADS,
                    GROUP,
                    V_HEAD_DIM,
                    SINKS,
                    FIXED,
                    FOLD,
                    FEW,
                    FEW_COLUMNS,
                    EARLY,
                )
        if count > FEW:
            _merge_line(
                parts,
                outputs,
                line,
                step,
                NUM_KV_HEADS,
                GROUP,
                V_HEAD_DIM,
                SINKS,
                FIXED,
                FOLD,
                PARTIALS,
                COLUMNS,
                EARLY,
            )
    if EARLY:
        gdc_wait()  # in every block, or this kernel could end before the one it follows


@triton.jit
def _merge_line(
    parts,
    outputs,
    line,
    step,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    FOLD: tl.constexpr,
    PARTIALS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge a query head's partials, for this block's part of the columns, and finish."""
    row, query_head, line_start, first_unit, line_units, first_share, cut, count = line
    out, lse, sinks, stride_or, stride_oh = outputs
    head_of_group = query_head % GROUP
    first_column = tl.program_id(2) * COLUMNS
    for column in range(first_column, V_HEAD_DIM, tl.num_programs(2) * COLUMNS):
        dv = column + tl.arange(0, COLUMNS)
        m, l, acc = empty(1, COLUMNS)
        for i in range(0, count, PARTIALS):
            s = i + tl.arange(0, PARTIALS)
            there = s < count
            if FIXED:
                num_rows, total, shares, line_groups = step
                place = (row * NUM_KV_HEADS + query_head // GROUP) * line_groups + s
                if cut:
                    group = first_unit // FOLD + s
                    first, last = _leaves_of_group(group, first_unit, line_units, FOLD)
                    owner = _share_of(line_start + first, total, shares)
                    whole = line_start + last < _cut(owner + 1, total, shares)
                    lines = num_rows * NUM_KV_HEADS
                    leaf_0 = _place_of_cut_group(owner, lines, line_groups, FOLD)
                    place = tl.where(whole, place, leaf_0)
                    if EARLY:
                        gdc_wait()
                    # All loads are on their way before the first sum waits for one.
                    leaves = ()
                    for leaf in tl.static_range(FOLD):
                        nth = group * FOLD + leaf - first_unit
                        wanted = (nth >= first) & (nth <= last) & (whole == 0)
                        if leaf == 0:
                            wanted |= whole
                        part = (place + leaf) * GROUP + head_of_group
                        leaves += (take(parts, part, there & wanted, dv, V_HEAD_DIM),)
                    part_max, part_sum, values = leaves[0]
                    for leaf in tl.static_range(1, FOLD):
                        part_max, part_sum, values = add(part_max, part_sum, values, *leaves[leaf])
                else:
                    if EARLY:
                        gdc_wait()
                    part = place * GROUP + head_of_group
                    part_max, part_sum, values = take(parts, part, there, dv, V_HEAD_DIM)
            else:
                # A share's second place is for the line that it ends in, its first for the line
                # that it begins in.
                place = 2 * (first_share + s) + (s == 0)
                part = place * GROUP + head_of_group
                if EARLY:
                    gdc_wait()
                part_max, part_sum, values = take(parts, part, there, dv, V_HEAD_DIM)
            new_m = tl.maximum(m, tl.max(part_max, 0))
            yardstick = tl.where(new_m == float("-inf"), 0.0, new_m)
            weights = tl.exp2(part_max - yardstick)
            discount = tl.exp2(m - yardstick)
            l = tl.fma(l, discount, tl.sum(part_sum * weights, 0))
            acc = tl.fma(acc, discount[:, None], tl.sum(values * weights[:, None], 0)[None, :])
            m = new_m
        heads = query_head + tl.arange(0, 1)
        outs = out + row.to(tl.int64) * stride_or + heads * stride_oh
        # Every block of a head writes the same ``lse``.
        lses = lse + row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        finish(acc, m, l, sinks, heads, outs, lses, heads >= 0, dv, V_HEAD_DIM, SINKS)


# Who reads what: lines, shares, leaves and groups.


@triton.jit
def _line(seq_len, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """The first visible key of a row, the unit it lies in, and the row's number of units: at
    least one, so that an empty row also has a block that writes its zeros."""
    visible_from = tl.maximum(seq_len - WINDOW, 0) if WINDOW else seq_len * 0
    first_unit = visible_from // UNIT
    return visible_from, first_unit, tl.maximum(tl.cdiv(seq_len, UNIT) - first_unit, 1)


@triton.jit
def _units_of_rows(seq_lens, row_ids, num_rows, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    lens = tl.load(seq_lens + row_ids, mask=row_ids < num_rows, other=0)
    _, _, units = _line(lens, UNIT, WINDOW)
    return tl.where(row_ids < num_rows, units, 0)


@triton.jit
def _cut(i, total, shares):
    """``i * total // shares``, in 32 bits where ``shares`` has 15: a 64-bit division takes
    hundreds of cycles, and no key is on its way before."""
    odd = (i * (total % shares)).to(tl.uint32) // shares.to(tl.uint32)
    return i * (total // shares) + odd.to(tl.int32)


@triton.jit
def _share_of(unit, total, shares):
    """The share that holds a unit: the last ``i`` with ``_cut(i) <= unit``. A guess in fp32, taken
    from the middle of the unit, is at most one off."""
    guess = (unit.to(tl.float32) + 0.5) * (shares.to(tl.float32) / total.to(tl.float32))
    share = tl.minimum(guess.to(tl.int32), shares - 1)
    share -= (_cut(share, total, shares) > unit).to(tl.int32)
    return share + (_cut(share + 1, total, shares) <= unit).to(tl.int32)


@triton.jit
def _leaves_of_group(group, first_leaf, line_leaves, FOLD: tl.constexpr):
    """The first and the last leaf of a line that belong to a group, counted within the line."""
    first = tl.maximum(group * FOLD - first_leaf, 0)
    return first, tl.minimum(group * FOLD + FOLD - first_leaf, line_leaves) - 1


@triton.jit
def _place_of_cut_group(owner, num_lines, line_groups, FOLD: tl.constexpr):
    """The place of leaf 0 of a group that a share's end cuts: behind the places of all whole
    groups, by the share that the group begins in. No other group is cut by that share's end."""
    return num_lines * line_groups + owner * FOLD


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
