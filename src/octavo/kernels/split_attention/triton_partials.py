"""Partials of split-KV attention on the device: start, add, leave, take, finish.

A partial of G query heads is a maximum [G], a weight sum [G] and a sum of weighted values [G, Dv],
not divided yet; all fp32, in base 2 (``exp2`` is one instruction). ``lse`` is in base e.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


@triton.jit
def empty(G: tl.constexpr, DV: tl.constexpr):
    m = tl.full([G], float("-inf"), tl.float32)
    return m, tl.zeros([G], tl.float32), tl.zeros([G, DV], tl.float32)


@triton.jit
def add(m, l, acc, next_m, next_l, next_acc):
    """Two partials as one. Adding to an empty one, or an empty one, changes no bit; products and
    sums are joined by hand, so that two kernels cannot round them differently."""
    new_m = tl.maximum(m, next_m)
    yardstick = tl.where(new_m == float("-inf"), 0.0, new_m)
    discount = tl.exp2(m - yardstick)
    weight = tl.exp2(next_m - yardstick)
    l = tl.fma(next_l, weight, l * discount)
    return new_m, l, tl.fma(next_acc, weight[:, None], acc * discount[:, None])


@triton.jit
def leave(scratch, part, partial, valid, dv, V_HEAD_DIM: tl.constexpr):
    """Store a partial's heads at ``part``."""
    part_out, part_m, part_l = scratch
    m, l, acc = partial
    tl.store(part_m + part, m, mask=valid)
    tl.store(part_l + part, l, mask=valid)
    tl.store(
        part_out + part.to(tl.int64)[:, None] * V_HEAD_DIM + dv[None, :],
        acc,
        mask=valid[:, None] & (dv < V_HEAD_DIM)[None, :],
    )


@triton.jit
def take(scratch, part, valid, dv, V_HEAD_DIM: tl.constexpr):
    """The partials of one head each at ``part``, columns ``dv`` of their sums; empty ones where
    not ``valid``. All loads are on their way at once."""
    part_out, part_m, part_l = scratch
    acc = tl.load(
        part_out + part.to(tl.int64)[:, None] * V_HEAD_DIM + dv[None, :],
        mask=valid[:, None] & (dv < V_HEAD_DIM)[None, :],
        other=0.0,
    )
    m = tl.load(part_m + part, mask=valid, other=float("-inf"))
    l = tl.load(part_l + part, mask=valid, other=0.0)
    return m, l, acc


@triton.jit
def finish(
    acc,
    m,
    l,
    sinks,
    heads,
    outs,
    lses,
    valid,
    dv,
    V_HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the sink, as one more partial ``(0, sink, 1)``, divide, and write the answers of query
    ``heads`` to the rows at pointers ``outs`` and to pointers ``lses``. ``m`` is in base 2."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        new_m = tl.maximum(m, sink)
        discount = tl.exp2(m - new_m)
        l = tl.fma(l, discount, tl.exp2(sink - new_m))
        acc = acc * discount[:, None]
        m = new_m
    divisor = tl.where(l > 0, l, 1.0)
    tl.store(
        outs[:, None] + dv[None, :],
        (acc / divisor[:, None]).to(outs.dtype.element_ty),
        mask=valid[:, None] & (dv < V_HEAD_DIM)[None, :],
    )
    log_sum = tl.where(l > 0, (m + tl.log2(divisor)) * LN2, float("-inf"))
    tl.store(lses, log_sum, mask=valid)
