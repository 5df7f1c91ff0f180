"""Activations as ``q8`` rows (see the docstring of ``octavo.kernels.linear``)."""

from __future__ import annotations

from octavo.kernels.late import carray
from octavo.kernels.linear.cpu_formats import GROUP
from octavo.kernels.linear.cpu_q8 import quantize_group
from octavo.kernels.program import int64s, next_run, op

_ITEM = 16  # groups of an item: some 100 ns


@op(count="i8", x="i8", columns="i8", out="i8", out_stride="i8")
def quantize(thread, num_threads, counter, args):
    """Rows of ``x`` [T, columns] float32 as q8 rows, ``out_stride`` bytes apart, at ``out``;
    ``count`` is the address of T, ``columns`` a multiple of 32. An item is a part of a row."""
    a = carray(args, 1)[0]
    groups = a.columns // GROUP
    parts = (groups + _ITEM - 1) // _ITEM
    count = int64s(a.count, 1)[0] * parts
    start, stop = next_run(-1, thread, num_threads, counter, count)
    while start < count:
        for item in range(start, stop):
            row, first = item // parts, item % parts * _ITEM
            x, out = a.x + 4 * row * a.columns, a.out + row * a.out_stride
            for group in range(first, min(first + _ITEM, groups)):
                quantize_group(x + 4 * GROUP * group, out, a.columns, group)
        start, stop = next_run(stop, thread, num_threads, counter, count)
