"""RMSNorm on a CPU: see ``reference.add_rms_norm``. A row is one thread's, so that its result
depends on nothing but the row."""

from __future__ import annotations

import math

import numpy as np

from octavo.kernels.jit import jit
from octavo.kernels.late import carray
from octavo.kernels.linear.cpu_q8 import quantize_row
from octavo.kernels.program import float32s, int32s, int64s, next_run, op


@jit(fastmath={"reassoc", "contract"})
def _inverse_rms(values, eps):
    squares = np.float32(0)
    for i in range(len(values)):
        squares += values[i] * values[i]
    return np.float32(1) / np.float32(math.sqrt(squares / np.float32(len(values)) + eps))


@jit(fastmath={"reassoc", "contract"})
def normed_row(a, row, out):
    """Add and norm row ``row``; ``out`` is where the result goes."""
    x = float32s(a.x + 4 * row * a.width, a.width)
    if a.y != 0:
        y = float32s(a.y + 4 * row * a.width, a.width)
        if a.post_weight != 0:
            scale = _inverse_rms(y, a.eps)
            post_weight = float32s(a.post_weight, a.width)
            for i in range(a.width):
                x[i] += y[i] * scale * post_weight[i]
        else:
            for i in range(a.width):
                x[i] += y[i]
    scale = _inverse_rms(x, a.eps)
    weight, normed = float32s(a.weight, a.width), float32s(out, a.width)
    for i in range(a.width):
        normed[i] = x[i] * scale * weight[i]


@op(
    count="i8",
    rows="i8",
    x="i8",
    y="i8",
    post_weight="i8",
    weight="i8",
    width="i8",
    eps="f4",
    out="i8",
    out_q8="i8",
    q8_stride="i8",
)
def add_norm(thread, num_threads, counter, args):
    """Row ``i`` of ``out`` [count, width] is the norm of row ``rows[i]`` (row ``i`` where ``rows``
    is 0) of ``x`` [T, width], to which that row of ``y`` is added first, normed by ``post_weight``
    (neither where they are 0). ``count`` is the address of the number of rows; the arrays are
    float32, ``rows`` int32. ``out_q8``, if not 0, gets the result as q8 rows too, ``q8_stride``
    bytes apart (see ``octavo.kernels.linear``)."""
    a = carray(args, 1)[0]
    count = int64s(a.count, 1)[0]
    first, stop = next_run(-1, thread, num_threads, counter, count)
    while first < count:
        for item in range(first, stop):
            row = item
            if a.rows != 0:
                row = np.int64(int32s(a.rows, count)[item])
            out = a.out + 4 * item * a.width
            normed_row(a, row, out)
            if a.out_q8 != 0:
                quantize_row(out, a.width, a.out_q8 + item * a.q8_stride)
        first, stop = next_run(stop, thread, num_threads, counter, count)
