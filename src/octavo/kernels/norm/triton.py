"""RMSNorm with the residual's addition in front of it, for CUDA through Triton: a block a row."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton_launch import dependent_launches, power_of_2, with_room

# A warp's: 16 bytes of float32 a thread. So all tensors lie in threads alike and none goes through
# shared memory, of which products leave hardly any, and a multiprocessor that they leave free
# takes no more than two of the largest rows.
NUMBERS = 128


def add_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    delta: Tensor | None = None,
    post_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """``x += norm(delta) or delta``, in place, and then ``norm(x)``.

    ``x`` [T, hidden]; ``delta`` [T, hidden], or [P, T, hidden] in parts to be added up, normed by
    itself first where there is a ``post_weight``; weights are float32 [hidden]. Returns
    ``norm(x)`` in ``dtype`` (x's own by default), None without ``weight``. All tensors are
    contiguous. One launch, no waiting.
    """
    count, size = x.shape
    out = None if weight is None else with_room(x, count, size, dtype=dtype)
    if count:
        block, dependent = power_of_2(size), dependent_launches()
        parts = 1 if delta is None or delta.dim() == 2 else len(delta)
        _norm_kernel[(count,)](
            x,
            delta,
            post_weight,
            weight,
            out,
            eps,
            x.numel() if parts > 1 else 0,
            SIZE=size,
            PARTS=parts,
            BLOCK=block,
            DEPENDENT=dependent,
            launch_pdl=dependent,
            num_warps=min(32, max(1, block // NUMBERS)),
        )
    return out


@triton.jit
def _norm_kernel(
    x,
    delta,
    post_weight,
    weight,
    out,
    eps,
    part_size,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (rows,). What isn't given is None."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if DEPENDENT:
        gdc_launch_dependents()
    if weight is not None:
        gain = tl.load(weight + cols, mask=mask, other=0.0)
    if DEPENDENT:
        gdc_wait()
    residual = x + row * SIZE + cols
    value = tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        place = delta + row * SIZE + cols
        added = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(place + part * part_size, mask=mask, other=0.0).to(tl.float32)
        if post_weight is not None:
            post = tl.load(post_weight + cols, mask=mask, other=0.0)
            rounded = _norm(added, post, eps, SIZE).to(delta.dtype.element_ty)
            added = rounded.to(tl.float32)
        value = (value + added).to(x.dtype.element_ty).to(tl.float32)
        tl.store(residual, value.to(x.dtype.element_ty), mask=mask)
    if weight is not None:
        normed = _norm(value, gain, eps, SIZE)
        tl.store(out + row * SIZE + cols, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm(value, weight, eps, SIZE: tl.constexpr):
    return value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * weight
