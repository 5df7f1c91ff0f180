"""Who reads which keys in split-KV decode, as both kernels find out for themselves.

The history of every (row, KV head) is a *line* of *units* of consecutive keys; all lines laid end
to end, row by row and head by head, are the step's work. Share ``i`` of ``n`` is the units from
``i * U // n`` up to ``(i + 1) * U // n``, whatever lines they lie in, so that a 128K row beside
thirty-one short ones leaves no block idle (stream-K, Osama et al. 2023, on the key axis of
FlashDecoding, Dao et al. 2023). Where ``n`` is a multiple of the number of lines and all are
equally long, every share lies in one line. The lengths are read on the device, so that a captured
CUDA graph stays right at every length.

The part of a line that falls into one share is a *segment*. A line that is one segment is
finished where it was read; of any other, each segment leaves a partial in scratch memory for the
merge kernel. A unit is one tile of keys, but in ``off`` mode the whole line. In ``auto`` mode a
line that is short beside what a slot of the GPU has to read is not cut: it is read whole by the
share that it begins in, at little loss of balance.

In ``fixed`` mode a row's bits depend on nothing but the row. Its line consists of *leaves*, cut at
absolute multiples of a length that the row's own length decides: ``split_tokens``, or more where
that would be too many leaves. Each has a softmax of its own. ``FOLD`` leaves at absolute multiples
are a *group*; leaves are added up in order to their group, and groups to the line. A segment ends
with the leaf that is nearest to its share's end. A group that lies in one segment is added up by
the block that read it, any other by the merge kernel, with the same instructions.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def line_of(seq_len, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """The first visible key of a row, the unit it lies in, and the row's number of units: at
    least one, so that an empty row also has a block that writes its zeros."""
    visible_from = tl.maximum(seq_len - WINDOW, 0) if WINDOW else seq_len * 0
    first_unit = visible_from // UNIT
    end_unit = (seq_len + (UNIT - 1)) // UNIT  # no tl.cdiv: a Gluon kernel calls this, too
    return visible_from, first_unit, tl.maximum(end_unit - first_unit, 1)


@triton.jit
def units_of_rows(seq_lens, row_ids, num_rows, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    lens = tl.load(seq_lens + row_ids, mask=row_ids < num_rows, other=0)
    _, _, units = line_of(lens, UNIT, WINDOW)
    return tl.where(row_ids < num_rows, units, 0)


@triton.jit
def start_of_share(i, total, shares):
    """``i * total // shares``, in 32 bits where ``shares`` has 15: a 64-bit division takes
    hundreds of cycles, and no key is on its way before."""
    odd = (i * (total % shares)).to(tl.uint32) // shares.to(tl.uint32)
    return i * (total // shares) + odd.to(tl.int32)


@triton.jit
def share_of(unit, total, shares):
    """The share that holds a unit: the last that starts at it or before. A guess in fp32, taken
    from the middle of the unit, is at most one off."""
    guess = (unit.to(tl.float32) + 0.5) * (shares.to(tl.float32) / total.to(tl.float32))
    share = tl.minimum(guess.to(tl.int32), shares - 1)
    share -= (start_of_share(share, total, shares) > unit).to(tl.int32)
    return share + (start_of_share(share + 1, total, shares) <= unit).to(tl.int32)


@triton.jit
def units_of_leaf(
    seq_len,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAF_TOKENS: tl.constexpr,
    MAX_LEAVES: tl.constexpr,
):
    reach = tl.minimum(seq_len, WINDOW) if WINDOW else seq_len
    return tl.maximum(tl.cdiv(reach, UNIT * MAX_LEAVES), LEAF_TOKENS // UNIT)


@triton.jit
def nearest_leaf(unit, first_unit, line_units, leaf_units):
    """Where a segment ends whose share ends at ``unit`` of a line."""
    nearest = (first_unit + unit + leaf_units // 2) // leaf_units * leaf_units - first_unit
    nearest = tl.minimum(tl.maximum(nearest, 0), line_units)
    return tl.where((unit == 0) | (unit == line_units), unit, nearest)


@triton.jit
def is_cut(start, stop, line_start, first_unit, line_units, leaf_units, total, shares):
    """Whether a segment ends inside the units from ``start`` to ``stop`` of a line: whether a
    share does there, or near enough (see ``nearest_leaf``)."""
    half = leaf_units // 2 + first_unit
    first_inside = ((first_unit + start) // leaf_units + 1) * leaf_units - half
    first_beyond = tl.cdiv(first_unit + stop, leaf_units) * leaf_units - half
    first_inside = tl.maximum(first_inside, 1) + line_start
    first_beyond = tl.minimum(first_beyond, line_units) + line_start
    before = share_of(first_inside - 1, total, shares)
    return before < share_of(tl.maximum(first_beyond, first_inside) - 1, total, shares)
