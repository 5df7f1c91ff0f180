"""How fast a GPU's memory can be read: a kernel that only loads and adds."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_BYTES = 2 << 30  # far more than any L2
BLOCK, UNROLL, WARPS = 4096, 8, 8  # the best of those tried on an H200


def make_reader(device: str) -> tuple[Tensor, Tensor]:
    """What :func:`read_memory` reads, and where its sums go."""
    numbers = torch.zeros(NUM_BYTES // 4, dtype=torch.int32, device=device)
    return numbers, torch.empty(len(numbers) // (BLOCK * UNROLL), dtype=torch.int32, device=device)


def read_memory(numbers: Tensor, sums: Tensor) -> None:
    """Read it all, once."""
    _read_kernel[(len(sums),)](numbers, sums, BLOCK=BLOCK, UNROLL=UNROLL, num_warps=WARPS)


@triton.jit
def _read_kernel(numbers, sums, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL)
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(UNROLL):
        total += tl.load(numbers + first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
