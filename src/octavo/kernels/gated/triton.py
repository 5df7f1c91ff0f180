"""The FFN's gate, for CUDA through Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton_launch import dependent_launches, with_room

BLOCK = 1024


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` [T, size] of ``gate_up`` [T, 2 * size], contiguous, the gate first;
    ``activation`` is "silu" or "gelu_tanh". One launch, no waiting."""
    count, size = len(gate_up), gate_up.shape[1] // 2
    out = with_room(gate_up, count, size)
    if count:
        dependent = dependent_launches()
        _gated_kernel[(-(-size // BLOCK), count)](
            gate_up,
            out,
            SIZE=size,
            GELU=activation != "silu",
            BLOCK=BLOCK,
            DEPENDENT=dependent,
            launch_pdl=dependent,
            num_warps=4,
        )
    return out


@triton.jit
def _gated_kernel(
    gate_up,
    out,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of columns, rows)."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    place = gate_up + row * (2 * SIZE) + cols
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=mask, other=0.0).to(tl.float32)
    turn = gate
    if GELU:  # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z
        turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    dtype = out.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-turn))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + cols, (active * up).to(dtype), mask=mask)
