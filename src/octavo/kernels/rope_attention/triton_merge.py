"""The fused attention kernel, device side: the merge of ``attention/merge.py`` in base 2, of a
block's warps and of a KV head's shares, and the answers."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl

from octavo.kernels.gluon import gl, jit
from octavo.kernels.rope_attention.triton_layouts import acc_memory, merge_layout
from octavo.kernels.rope_attention.triton_rows import first_rows


@jit
def merge_warps(
    m,
    l,
    acc,
    new_scores,
    new_value,
    has_new,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
):
    """Of each warp's partial, ``m`` and ``l`` [W, ROWS] and ``acc`` [W, G, D], and, with
    ``has_new``, of the new key's scores [W, G] and its value in shared memory [1, D], one of the
    block: [HEADS], [HEADS], [HEADS, D]."""
    ROWS: tl.constexpr = 8 if HEADS <= 8 else G
    OF_M: tl.constexpr = m.shape
    accs = gl.allocate_shared_memory(gl.float32, [W, ROWS, D], acc_memory(W, ROWS, D))
    ms = gl.allocate_shared_memory(gl.float32, OF_M, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ls = gl.allocate_shared_memory(gl.float32, OF_M, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    accs.store(first_rows(acc, ROWS, W, P, G, D))
    ms.store(m)
    ls.store(l)
    news = gl.allocate_shared_memory(
        gl.float32, [W, G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), new_scores
    )
    gl.thread_barrier()
    ALL: tl.constexpr = merge_layout(W, HEADS, D, P)
    ANSWER: tl.constexpr = gl.SliceLayout(0, ALL)
    new_m = news.slice(0, 1, dim=0).slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL))
    new_m = gl.convert_layout(gl.sum(new_m, 0), gl.SliceLayout(1, ANSWER))
    value = new_value.load(ANSWER).to(gl.float32)
    top, new_weight, l, acc = merge(
        ms.slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL)),
        ls.slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL)),
        accs.slice(0, HEADS, dim=1).load(ALL),
        gl.where(has_new, new_m, float("-inf")),
        ALL,
    )
    acc += new_weight[:, None] * gl.where(has_new, value, 0.0)
    return top, l + new_weight, acc


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
        m, discount, next_l, next_acc = merge(part_max, part_sum, values, m, PARTS)
        l = l * discount + next_l
        acc = acc * discount[:, None] + next_acc
    write_answers(m, l, acc, heads, dv, outs, lse, first_head, LSE, GROUP, HEAD_DIM)


@jit
def merge(m, l, acc, other_m, layout: tl.constexpr):
    """Of partials ``m``, ``l`` [P, heads] and ``acc`` [P, heads, D], not divided, and another of
    which only ``other_m`` [heads] is given: ``m`` of all, the other's weight, and ``l`` and ``acc``
    of those given as a whole: [heads], [heads], [heads], [heads, D]."""
    OF_HEADS: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    top = gl.maximum(gl.convert_layout(gl.max(m, 0), OF_HEADS), other_m)
    yardstick = gl.where(top == float("-inf"), 0.0, top)
    of_parts = gl.convert_layout(yardstick, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    weights = gl.exp2(m - of_parts[None, :])
    total = gl.convert_layout(gl.sum(l * weights, 0), OF_HEADS)
    return top, gl.exp2(other_m - yardstick), total, gl.sum(acc * weights[:, :, None], 0)


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
