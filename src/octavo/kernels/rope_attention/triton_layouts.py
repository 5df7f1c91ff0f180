"""How the fused attention kernel lays out its tensors in registers and in shared memory.

``W`` is warps, ``G`` the rows of the new tile, ``D`` the head's side, all powers of two.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from octavo.kernels.gluon import constexpr_function, gl
from octavo.kernels.linear.triton import unit_bases


@constexpr_function
def aligned(half):
    """How many elements of a rotated head are surely side by side: a power of two, at most 8."""
    return min(8, half & -half)


@constexpr_function
def score_layout(W, P):
    """Of scores [W, G, keys] and outputs [W, G, D] in P warps: a warp has keys of its own, or two
    share them out, eight columns each in turn."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, P // W], instr_shape=[1, 16, 8]
    )


@constexpr_function
def half_layout(W, G, C, P):
    """Of the upper half of the rows of scores or outputs [W, G, C] in ``score_layout``."""
    columns, rows = unit_bases(C, 2, 3), unit_bases(G // 2, 1, 3)
    shared = columns[3:4] if P > W else []  # by two warps
    regs = columns[:1] + columns[3 + len(shared) :]
    warps = shared + unit_bases(W, 0, 3)
    return gl.DistributedLinearLayout(regs, columns[1:3] + rows, warps, [], [W, G // 2, C])


@constexpr_function
def both_layout(W, G, C, P):
    """The same with all columns in both of two warps."""
    columns, rows = unit_bases(C, 2, 3), unit_bases(G // 2, 1, 3)
    shared = [[0, 0, 0]] if P > W else []
    warps = shared + unit_bases(W, 0, 3)
    regs = columns[:1] + columns[3:]
    return gl.DistributedLinearLayout(regs, columns[1:3] + rows, warps, [], [W, G // 2, C])


@constexpr_function
def copy_layout(W, D, P):
    """Of a tile [W, keys, D] on its way to shared memory: 16 bytes a thread."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [W, P // W, 1], [2, 1, 0])


@constexpr_function
def new_layout(W, D):
    """Of the new tile [G, D] while it is normed and turned."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [W, 1], [1, 0])


@constexpr_function
def tile_memory(D):
    """Rows of D 16-bit elements without bank conflicts for eight rows at a time."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, D // 8), [2, 1, 0])


@constexpr_function
def new_memory(D):
    return gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, D // 8), [1, 0])


@constexpr_function
def acc_memory(W, G, D):
    return gl.PaddedSharedLayout.with_identity_for([[D, 8]], [W, G, D], [2, 1, 0])


@constexpr_function
def merge_layout(P, heads, D, W):
    """Of P partials [P, heads, D]: a thread has all of them, of a few columns."""

    def bases(size, dim):
        return [[1 << bit if axis == dim else 0 for axis in range(3)] for bit in range(size)]

    parts, columns = bases(P.bit_length() - 1, 0), bases(D.bit_length() - 1, 2)
    rows = bases(heads.bit_length() - 1, 1)
    num_warp_bits = W.bit_length() - 1
    # Of heads * D elements a thread has as many side by side as fill the block, up to four.
    spread = columns + rows
    vector = min(2, max(0, len(spread) - 5 - num_warp_bits))
    regs, rest = spread[:vector], spread[vector:]
    zero = [0, 0, 0]
    lanes = rest[:5] + [zero] * (5 - len(rest[:5]))
    warps = rest[5 : 5 + num_warp_bits]
    warps = warps + [zero] * (num_warp_bits - len(warps))
    regs = regs + rest[5 + num_warp_bits :] + parts
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [P, heads, D])
