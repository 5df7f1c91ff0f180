"""The fused attention kernel, device side: which rows of a product are queries.

An instruction has sixteen rows, a KV head often eight queries or fewer. What is done row by row is
done for ``ROWS`` of them, the others are zeros; all of it is a renaming of registers.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl

from octavo.kernels.gluon import constexpr_function, gl, jit
from octavo.kernels.rope_attention.triton_layouts import both_layout, half_layout, score_layout


@constexpr_function
def rows_of(HEADS, G, D):
    """``ROWS``: how many of G rows may be queries. (With halves of wide heads more is spilled.)"""
    return 8 if HEADS <= 8 and D <= 128 else G


@jit
def first_rows(
    x, ROWS: tl.constexpr, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr
):
    """The first ROWS of x [W, G, C]."""
    if ROWS < G:
        x, _ = _halves(x, W, P, G, C)
    return x


@jit
def for_both(scores, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Scores of several tiles [W, ROWS, C], of which two warps have half each, in both of them."""
    memories = ()  # each by itself, so that no barrier is put between stores
    for i in gl.static_range(len(scores)):
        memories += (
            gl.allocate_shared_memory(
                gl.float32,
                [W, G // 2, C],
                gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
                scores[i],
            ),
        )
    gl.thread_barrier()
    both = ()
    for i in gl.static_range(len(scores)):
        both += (memories[i].load(both_layout(W, G, C, P)),)
    return both


@jit
def all_rows(x, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """x [W, ROWS, C] and zeros behind: [W, G, C]."""
    if x.shape[1] < G:  # of zeros that it knows the compiler would copy some to every instruction
        x = _whole(x, x * 0.0, W, P, G, C)
    return x


@jit
def scale_rows(
    x, by, ROWS: tl.constexpr, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr
):
    """x [W, G, C], whose first ROWS are multiplied by ``by`` [W, ROWS]."""
    if ROWS < G:
        first, others = _halves(x, W, P, G, C)
        by = gl.convert_layout(by, gl.SliceLayout(2, half_layout(W, G, C, P)))
        x = _whole(first * by[:, :, None], others, W, P, G, C)
        x = gl.convert_layout(x, score_layout(W, P))
    else:
        x = x * by[:, :, None]
    return x


@jit
def _halves(x, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    first, others = gl.split(x.reshape([W, 2, G // 2, C]).permute([0, 2, 3, 1]))
    HALF: tl.constexpr = half_layout(W, G, C, P)
    return gl.convert_layout(first, HALF), gl.convert_layout(others, HALF)


@jit
def _whole(first, others, W: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    return gl.join(first, others).permute([0, 3, 1, 2]).reshape([W, G, C])
