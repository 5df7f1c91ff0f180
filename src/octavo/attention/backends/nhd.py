"""The pool layout that most CUDA kernels read: block, token, head, dim (``NHD``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.attention.spec import AttentionSpec, KVLayout

if TYPE_CHECKING:
    from torch import Tensor


def nhd_layout(spec: AttentionSpec, num_blocks: int) -> KVLayout:
    tokens = (num_blocks, spec.block_size, spec.num_kv_heads)
    k_shape, v_shape = (*tokens, spec.head_dim), (*tokens, spec.v_head_dim)
    return KVLayout(k_shape, v_shape, "NHD", "NHD", spec.kv_dtype)


class NhdPool:
    """``write`` and ``gather`` of a backend whose pool lies so; see
    :class:`octavo.attention.spec.Backend`."""

    spec: AttentionSpec

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        slots = slot_mapping.long()
        k_cache.view(-1, *k_cache.shape[2:])[slots] = k.to(k_cache.dtype)
        v_cache.view(-1, *v_cache.shape[2:])[slots] = v.to(v_cache.dtype)

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        blocks = block_table[: -(-length // self.spec.block_size)].long()
        return k_cache[blocks].flatten(0, 1)[:length], v_cache[blocks].flatten(0, 1)[:length]
