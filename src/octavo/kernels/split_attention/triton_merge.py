"""Split-KV decode attention, device side: the merge of what the split kernel left in parts."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.split_attention.triton_lines import (
    is_cut,
    line_of,
    share_of,
    units_of_leaf,
    units_of_rows,
)
from octavo.kernels.split_attention.triton_partials import add, empty, finish, take


@triton.jit(do_not_specialize=["max_shares", "num_slots", "num_rows", "line_places"])
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
    line_places,
    stride_or,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    LEAF_TOKENS: tl.constexpr,
    MAX_LEAVES: tl.constexpr,
    FOLD: tl.constexpr,
    UNCUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTIALS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (R, H, blocks). The merge of ``attention/merge.py`` for a query head whose line no
    block has finished: its partials, or in ``fixed`` mode its groups, in the order of their keys,
    ``PARTIALS`` of them at a time, ``COLUMNS`` columns at a time. The blocks of a head share out
    its columns."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    row_ids = tl.arange(0, BLOCK_ROWS)
    units = units_of_rows(seq_lens, row_ids, num_rows, UNIT, WINDOW)
    total = tl.sum(units, 0) * NUM_KV_HEADS
    shares = tl.minimum(max_shares, total)
    seq_len = tl.load(seq_lens + row)
    _, first_unit, line_units = line_of(seq_len, UNIT, WINDOW)
    line = row * NUM_KV_HEADS + query_head // GROUP
    line_start = tl.sum(tl.where(row_ids < row, units, 0), 0) * NUM_KV_HEADS
    line_start += query_head // GROUP * line_units
    if FIXED:
        leaf_units = units_of_leaf(seq_len, UNIT, WINDOW, LEAF_TOKENS, MAX_LEAVES)
        group_units = leaf_units * FOLD
        first_group = first_unit // group_units
        count = (first_unit + line_units - 1) // group_units - first_group + 1
        cuts = (line_start, first_unit, line_units, leaf_units, total, shares)
        left = (count > 1) | is_cut(0, line_units, *cuts)
    else:
        first_share = share_of(line_start, total, shares)
        count = share_of(line_start + line_units - 1, total, shares) - first_share + 1
        left = (count > 1) & (line_units > total // (num_slots * UNCUT))
    if left:
        parts = (part_out, part_m, part_l)
        outs = out + row.to(tl.int64) * stride_or
        lses = lse + row.to(tl.int64) * (NUM_KV_HEADS * GROUP)
        for column in range(tl.program_id(2) * COLUMNS, V_HEAD_DIM, tl.num_programs(2) * COLUMNS):
            dv = column + tl.arange(0, COLUMNS)
            m, l, acc = empty(1, COLUMNS)
            for i in range(0, count, PARTIALS):
                s = i + tl.arange(0, PARTIALS)
                if FIXED:
                    group = (first_group + s) * group_units - first_unit
                    start = tl.maximum(group, 0)
                    stop = tl.minimum(group + group_units, line_units)
                    cut = is_cut(start, stop, *cuts)
                    part = (line * line_places + s * FOLD) * GROUP + query_head % GROUP
                    if EARLY:
                        gdc_wait()
                    # All loads are on their way before the first sum waits for one. A group that
                    # was added up lies at the place of its first leaf.
                    leaves = ()
                    for n in tl.static_range(FOLD):
                        leaf = group + n * leaf_units
                        there = cut & (leaf + leaf_units > 0) & (leaf < line_units)
                        if n == 0:
                            there |= cut == 0
                        there &= s < count
                        leaves += (take(parts, part + n * GROUP, there, dv, V_HEAD_DIM),)
                    part_max, part_sum, values = leaves[0]
                    for n in tl.static_range(1, FOLD):
                        part_max, part_sum, values = add(part_max, part_sum, values, *leaves[n])
                else:
                    # See the split kernel for the places.
                    part = (2 * (first_share + s) + (s == 0)) * GROUP + query_head % GROUP
                    if EARLY:
                        gdc_wait()
                    part_max, part_sum, values = take(parts, part, s < count, dv, V_HEAD_DIM)
                new_m = tl.maximum(m, tl.max(part_max, 0))
                yardstick = tl.where(new_m == float("-inf"), 0.0, new_m)
                weights = tl.exp2(part_max - yardstick)
                discount = tl.exp2(m - yardstick)
                l = tl.fma(l, discount, tl.sum(part_sum * weights, 0))
                acc = tl.fma(acc, discount[:, None], tl.sum(values * weights[:, None], 0)[None, :])
                m = new_m
            heads = query_head + tl.arange(0, 1)
            # Every block of a head writes the same ``lse``.
            finish(
                acc,
                m,
                l,
                sinks,
                heads,
                outs + heads * stride_oh,
                lses + heads,
                heads >= 0,
                dv,
                V_HEAD_DIM,
                SINKS,
            )
    if EARLY:  # noqa: SIM102 (known when compiled)
        # One block that waits is enough, or this kernel could end before the one it follows. The
        # others of a batch where nothing was cut need no room beside it.
        if row + query_head + tl.program_id(2) == 0:
            gdc_wait()
