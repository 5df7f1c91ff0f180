"""Store new keys and values in the paged cache, for CUDA through Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from octavo.kernels.triton_launch import dependent_launches, power_of_2


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``k`` [T, Hkv, D] and ``v`` [T, Hkv, Dv] (each token's heads contiguous) to slots
    ``slot_mapping`` [T] (integers) of caches [blocks, block_size, Hkv, D or Dv], converting to
    their dtype. A negative slot, of a padding token, is skipped. One launch, no waiting."""
    block_size = k_cache.shape[1]
    k_size, v_size = k[0:1].numel(), v[0:1].numel()
    if len(k) == 0:
        return
    _store_kernel[(len(k),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        BLOCK_SIZE=block_size,
        K_SIZE=k_size,
        V_SIZE=v_size,
        K_BLOCK=power_of_2(k_size),
        V_BLOCK=power_of_2(v_size),
        EARLY=dependent_launches(),
        num_warps=4,
    )


@triton.jit
def _store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    stride_k,
    stride_v,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    BLOCK_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # lets the attention kernel find its share before this one ends
):
    """Grid: (T,)."""
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    j = tl.arange(0, V_BLOCK)
    stored = slot >= 0
    block = slot // BLOCK_SIZE
    place = slot % BLOCK_SIZE
    keys = tl.load(k + token * stride_k + i, mask=i < K_SIZE, other=0.0)
    values = tl.load(v + token * stride_v + j, mask=j < V_SIZE, other=0.0)
    tl.store(
        k_cache + block * stride_kb + place * stride_kt + i,
        keys.to(k_cache.dtype.element_ty),
        mask=(i < K_SIZE) & stored,
    )
    tl.store(
        v_cache + block * stride_vb + place * stride_vt + j,
        values.to(v_cache.dtype.element_ty),
        mask=(j < V_SIZE) & stored,
    )
