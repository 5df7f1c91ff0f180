"""Logits made ready on a CPU: see ``reference.finish_logits``."""

from __future__ import annotations

import math

import numpy as np

from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.program import fetch_add, float32s, int32s, int64s, op
from octavo.kernels.vector_ir import (
    I32,
    I64,
    call,
    constant,
    fill,
    larger,
    load,
    loop,
    reduce_max,
    variable,
    vector,
)

_LANES = 16


@intrinsic
def _largest_of_whole_vectors(typing, address, count):
    """The largest of float32 numbers, -inf of none, and how many lanes have met a NaN; what is
    left over of 16 isn't looked at."""

    def emit(context, b, signature, arguments):
        address, count = arguments
        words = vector(I32, _LANES)
        top = variable(b, constant(-math.inf, _LANES))
        nans = variable(b, fill(I32, 0, _LANES))
        stop = b.and_(count, I64(-_LANES))
        with loop(b, I64(0), stop, step=_LANES) as i:
            x = load(b, b.add(address, b.mul(i, I64(4))), 0, _LANES)
            b.store(larger(b, x, b.load(top)), top)
            b.store(b.or_(b.load(nans), b.zext(b.fcmp_unordered("uno", x, x), words)), nans)
        bad = call(b, f"llvm.vector.reduce.add.v{_LANES}i32", b.load(nans), returns=I32)
        result = reduce_max(b, b.load(top)), b.zext(bad, I64)
        return context.make_tuple(b, signature.return_type, result)

    return types.Tuple((types.float32, types.int64))(types.int64, types.int64), emit


@op(count="i8", logits="i8", width="i8", cap="f4", best="i8")
def finish_logits(thread, num_threads, counter, args):
    """``count`` is the address of the number of rows L, ``logits`` [L, width] float32 are capped
    in place (``cap`` 0: not), ``best`` [L] int32 gets the index of each row's largest. An item is
    a row."""
    a = carray(args, 1)[0]
    rows = int64s(a.count, 1)[0]
    best = int32s(a.best, rows)
    while True:
        row = fetch_add(counter, 1)
        if row >= rows:
            return
        address = a.logits + 4 * row * a.width
        values = float32s(address, a.width)
        if a.cap > 0:
            for i in range(a.width):
                values[i] = a.cap * math.tanh(values[i] / a.cap)
        top, nans = _largest_of_whole_vectors(address, a.width)
        for i in range(a.width // _LANES * _LANES, a.width):
            nans += np.isnan(values[i])
            top = max(top, values[i])
        best[row] = -1
        if nans == 0 and math.isfinite(top):
            for i in range(a.width):
                if values[i] == top:
                    best[row] = i
                    break
