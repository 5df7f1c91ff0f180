"""The fused attention kernel, device side: the merge of ``attention/merge.py`` in base 2, of a
block's warps and of a KV head's shares, and the answers."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl

from octavo.kernels.gluon import gl, jit
from octavo.kernels.rope_attention.triton_layouts import acc_memory, merge_layout


@jit
def merge_warps(m, l, acc, HEADS: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Of each warp's partial, ``m`` and ``l`` [W, G] and ``acc`` [W, G, D], one of the block, by
    way of shared memory: [HEADS], [HEADS], [HEADS, D]."""
    ROWS: tl.constexpr = 8 if HEADS <= 8 else G
    if HEADS <= 8:  # the other half's rows are no queries
        halves = acc.reshape([W, G // 8, 8, D])
        acc, _ = gl.split(halves.permute([0, 2, 3, 1]))
    accs = gl.allocate_shared_memory(gl.float32, [W, ROWS, D], acc_memory(W, ROWS, D))
    ms = gl.allocate_shared_memory(gl.float32, [W, G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ls = gl.allocate_shared_memory(gl.float32, [W, G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    accs.store(acc)
    ms.store(m)
    ls.store(l)
    gl.thread_barrier()
    ALL: tl.constexpr = merge_layout(W, HEADS, D, W)
    return merge(
        ms.slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL)),
        ls.slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL)),
        accs.slice(0, HEADS, dim=1).load(ALL),
        ALL,
    )


@jit
def merge_shares(
    part_out,
    part_m,
    part_l,
    first_head,
    splits,
    count,
    outs,
    lse,
    LSE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge the ``count`` partials of a KV head, ``MERGED`` at a time in the order of their keys,
    and write its answers."""
    PARTS: tl.constexpr = merge_layout(MERGED, HEADS, D, W)
    PARTS_M: tl.constexpr = gl.SliceLayout(2, PARTS)
    ANSWER: tl.constexpr = gl.SliceLayout(0, PARTS)
    part = gl.arange(0, MERGED, layout=gl.SliceLayout(1, PARTS_M))
    part_head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PARTS_M))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, ANSWER))
    dv = gl.arange(0, D, layout=gl.SliceLayout(0, ANSWER))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    m = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, ANSWER))
    l = gl.zeros([HEADS], gl.float32, layout=gl.SliceLayout(1, ANSWER))
    acc = gl.zeros([HEADS, D], gl.float32, layout=ANSWER)
    first_place = first_head * splits
    for i in range(0, count, MERGED):
        # Older ones don't lie in the L1 any more: the atomic that told has emptied it.
        places = first_place + part_head[None, :] * splits + (i + part)[:, None]
        there = (i + part < count)[:, None] & (part_head < GROUP)[None, :]
        part_max = gl.load(part_m + places, mask=there, other=float("-inf"))
        part_sum = gl.load(part_l + places, mask=there, other=0.0)
        values = gl.load(
            part_out + (places[:, :, None] * HEAD_DIM + column[None, None, :]),
            mask=there[:, :, None] & (column < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        next_m, next_l, next_acc = merge(part_max, part_sum, values, PARTS)
        new_m = gl.maximum(m, next_m)
        yardstick = gl.where(new_m == float("-inf"), 0.0, new_m)
        discount, weight = gl.exp2(m - yardstick), gl.exp2(next_m - yardstick)
        l = l * discount + next_l * weight
        acc = acc * discount[:, None] + next_acc * weight[:, None]
        m = new_m
    write_answers(m, l, acc, heads, dv, outs, lse, first_head, LSE, GROUP, HEAD_DIM)


@jit
def merge(m, l, acc, layout: tl.constexpr):
    """Of partials ``m``, ``l`` [P, heads] and ``acc`` [P, heads, D], not divided, one: [heads],
    [heads], [heads, D]."""
    top = gl.max(m, 0)
    yardstick = gl.where(top == float("-inf"), 0.0, top)
    weights = gl.exp2(m - yardstick[None, :])
    OF_HEADS: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    top = gl.convert_layout(top, OF_HEADS)
    total = gl.convert_layout(gl.sum(l * weights, 0), OF_HEADS)
    return top, total, gl.sum(acc * weights[:, :, None], 0)


@jit
def write_answers(
    m,
    l,
    acc,
    heads,
    dv,
    outs,
    lse,
    first_head,
    LSE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """A KV head's answers, elements ``dv`` of its queries ``heads``, from ``outs`` on; and their
    natural log-sum-exp, -inf where there is no key."""
    answer = acc / gl.where(l > 0, l, 1.0)[:, None]
    gl.store(
        outs + (heads[:, None] * HEAD_DIM + dv[None, :]),
        answer.to(outs.dtype.element_ty),
        mask=(heads < GROUP)[:, None] & (dv < HEAD_DIM)[None, :],
    )
    if LSE:
        places = lse + first_head + heads
        natural = (m + gl.log2(gl.where(l > 0, l, 1.0))) * 0.6931471805599453
        gl.store(places, natural, mask=heads < GROUP)
