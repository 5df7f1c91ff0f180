"""What the launching functions of our Triton kernels share: what the device can do, and what
kernels of paged attention are compiled for."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.attention.spec import AttentionSpec

ROOM = 128  # rows, to a multiple of which tensors have memory where copies of tiles read them
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def dependent_launches() -> bool:
    """Whether a kernel can start before the one in front of it has ended: on NVIDIA GPUs from
    Hopper on."""
    return (
        not INTERPRETED
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability() >= (9, 0)
    )


@cache
def has_warpgroups() -> bool:
    """Whether four warps multiply together, as on Hopper alone; the interpreter does as if."""
    return INTERPRETED or (dependent_launches() and torch.cuda.get_device_capability()[0] == 9)


def with_room(like: Tensor, rows: int, *rest: int, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor [rows, ...] on the device of another, behind whose last row there is memory up
    to a multiple of ``ROOM`` rows: what copies tiles of rows is slow where they don't exist."""
    return like.new_empty(-(-rows // ROOM) * ROOM, *rest, dtype=dtype or like.dtype)[:rows]


def padded(side: int) -> int:
    """Blocks are powers of two, and a dot's sides at least 16."""
    return max(16, power_of_2(side))


def power_of_2(n: int) -> int:
    """The smallest that is no less than ``n``. Triton's own takes 2 us, of which a step without a
    graph has hundreds."""
    return 1 << max(0, n - 1).bit_length()


def outputs(
    spec: AttentionSpec, q: Tensor, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``out`` [T, H, Dv] in q's dtype and ``lse`` [T, H] fp32, made where they are not given."""
    if out is None:
        out = with_room(q, *q.shape[:2], spec.v_head_dim)
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return out, lse


def in_base_2(spec: AttentionSpec) -> tuple[float, float]:
    """The scale and the soft cap (0 for none) of scores that ``exp2`` is taken of."""
    return spec.scale * math.log2(math.e), (spec.soft_cap or 0.0) * math.log2(math.e)


def attention_constants(
    spec: AttentionSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, num_rows: int
) -> dict[str, Any]:
    """What decode and prefill are both compiled for."""
    return {
        "K_STRIDES": k_cache.stride()[:3],
        "V_STRIDES": v_cache.stride()[:3],
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "V_HEAD_DIM": spec.v_head_dim,
        "BLOCK_SIZE": spec.block_size,
        "WINDOW": spec.window or 0,
        "SOFT_CAP": spec.soft_cap is not None,
        "SINKS": spec.has_sinks,
        "BLOCK_D": padded(spec.head_dim),
        "BLOCK_DV": padded(spec.v_head_dim),
        "BLOCK_ROWS": padded(num_rows),
        # Triton's interpreter multiplies the raw bits of bf16 operands (3.6 to 3.9).
        "WIDEN": INTERPRETED and q.dtype == torch.bfloat16,
    }
