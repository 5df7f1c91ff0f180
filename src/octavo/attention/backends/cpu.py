"""The ``cpu`` candidate: our split-KV decode kernel, shared over the cores.

Takes torch tensors or numpy arrays (of bfloat16 as uint16) and gives the same kind back; torch
isn't imported for the latter. Queries are taken in float32, and so is everything computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support, Tensor
from octavo.attention.splits import SplitCost, SplitPlan, plan_splits

TILE = 16  # tokens of a tile, as in the kernel
KV_BYTES = {"float32": 4, "bfloat16": 2}

# Measured with 4,096 tokens of float32 in 16 to 64 segments (9/3 heads x 64 and 16/8 x 128, one
# thread of a Xeon with AVX-512): another segment costs what 7 to 24 tokens take to read.
COST = SplitCost(min_tokens=128, merge_tokens=16)
# Below this many bytes of keys and values one thread works alone. Measured on two busy cores only:
# a second thread saved nothing on 100 us of work, and on 380 us a third at best, nothing at the
# median. To be measured again on a quiet machine.
SHORT_BYTES = 1 << 20


class CpuCandidate:
    name = "cpu"

    def supports(self, spec: AttentionSpec) -> Support:
        refusals = (
            (spec.phase != "decode", "has no prefill kernel"),
            (spec.device != "cpu", f"runs on the CPU, not on {spec.device}"),
            (spec.graph, "can't be captured in a CUDA graph"),
            (spec.kv_dtype not in KV_BYTES, f"stores no {spec.kv_dtype} keys and values"),
            (spec.num_heads % spec.num_kv_heads != 0, "needs whole groups of query heads"),
            (
                spec.block_size % TILE != 0,
                f"block_size {spec.block_size} isn't a multiple of {TILE}",
            ),
            (spec.head_dim % 8 != 0, f"head_dim {spec.head_dim} isn't a multiple of 8"),
            (spec.v_head_dim % 8 != 0, f"v_head_dim {spec.v_head_dim} isn't a multiple of 8"),
        )
        reason = next((reason for refused, reason in refusals if refused), "")
        return Support(not reason, reason)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        tiles = (num_blocks, spec.num_kv_heads, spec.block_size // TILE)
        return KVLayout(
            (*tiles, spec.head_dim, TILE),
            (*tiles, TILE, spec.v_head_dim),
            "HTDN",
            "HTND",
            spec.kv_dtype,
        )

    def open(self, spec: AttentionSpec) -> CpuBackend:
        return CpuBackend(spec)


@dataclass(frozen=True)
class CpuPlan:
    splits: SplitPlan
    block_table: NDArray[np.int32]  # [R, blocks]
    segments: NDArray[np.int32]  # [S, 3]: row, start, stop
    order: NDArray[np.int64]  # [S]: longest first
    helped: bool  # whether the work is worth waking helpers for
    part_out: NDArray[np.float32]  # [S, H, Dv]
    part_m: NDArray[np.float32]  # [S, H]
    part_l: NDArray[np.float32]  # [S, H]


class CpuBackend:
    """See :class:`octavo.attention.spec.Backend`."""

    def __init__(self, spec: AttentionSpec) -> None:
        from octavo.kernels.split_attention import cpu
        from octavo.kernels.threads import helpers

        self.spec = spec
        self._kernels = cpu
        self._decode = cpu.decode_kernel(
            spec.num_heads // spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            KV_BYTES[spec.kv_dtype],
        )
        self._helpers = helpers()

    def plan(self, batch: AttentionBatch, splits: SplitPlan | None = None) -> CpuPlan:
        """``splits`` cuts elsewhere than the spec's mode would."""
        spec = self.spec
        lens = batch.seq_lens if spec.window is None else np.minimum(batch.seq_lens, spec.window)
        token_bytes = (
            spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * KV_BYTES[spec.kv_dtype]
        )
        helped = int(lens.sum()) * token_bytes > SHORT_BYTES and self._helpers.num_threads > 1
        splits = splits or plan_splits(
            batch.seq_lens,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            num_cores=self._helpers.num_threads if helped else 1,
            mode=spec.split_mode,
            split_tokens=spec.split_tokens,
            window=spec.window,
            cost=COST,
        )
        rows = np.repeat(np.arange(len(lens), dtype=np.int32), splits.num_splits)
        segments = np.stack([rows, splits.starts, splits.stops], axis=1)
        count = len(segments)
        return CpuPlan(
            splits,
            np.ascontiguousarray(batch.block_table),
            segments,
            np.argsort(splits.starts - splits.stops, kind="stable"),
            helped,
            np.empty((count, spec.num_heads, spec.v_head_dim), np.float32),
            np.empty((count, spec.num_heads), np.float32),
            np.empty((count, spec.num_heads), np.float32),
        )

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self._kernels.store(
            _float32(k).view(np.uint32),
            _float32(v).view(np.uint32),
            _bits(k_cache),
            _bits(v_cache),
            _numpy(slot_mapping),
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: CpuPlan,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        next_item = np.zeros(1, np.int64)
        arguments = (
            next_item,
            _float32(q),
            _numpy(k_cache),
            _numpy(v_cache),
            plan.block_table,
            plan.segments,
            plan.order,
            np.float32(spec.scale),
            np.float32(spec.soft_cap or 0.0),
            plan.part_out,
            plan.part_m,
            plan.part_l,
        )
        if plan.helped:
            self._helpers.run(lambda: self._decode(*arguments))
        else:
            self._decode(*arguments)
        out = np.empty((len(q), spec.num_heads, spec.v_head_dim), np.float32)
        lse = np.empty((len(q), spec.num_heads), np.float32)
        sinks_ = np.empty(0, np.float32) if sinks is None else _float32(sinks)
        self._kernels.merge(
            plan.splits.row_start, plan.part_out, plan.part_m, plan.part_l, sinks_, out, lse
        )
        if isinstance(q, np.ndarray):
            return out, lse
        import torch

        return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse)

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        used = _numpy(block_table)[: -(-length // self.spec.block_size)]
        k = _numpy(k_cache)[used].transpose(0, 2, 4, 1, 3)  # block, tile, lane, head, dim
        v = _numpy(v_cache)[used].transpose(0, 2, 3, 1, 4)
        return (
            _kind_of(k_cache, k.reshape(-1, *k.shape[3:])[:length]),
            _kind_of(v_cache, v.reshape(-1, *v.shape[3:])[:length]),
        )


def _numpy(x: Tensor) -> NDArray[Any]:
    """The same memory as a numpy array; bfloat16 as uint16."""
    if isinstance(x, np.ndarray):
        return x
    import torch

    if x.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = x.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[Any] = x.numpy()
    return array


def _kind_of(original: Tensor, array: NDArray[Any]) -> Tensor:
    """The array as what :func:`_numpy` was given."""
    if isinstance(original, np.ndarray):
        return array
    import torch

    if original.dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _float32(x: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(x if isinstance(x, np.ndarray) else x.float().numpy(), np.float32)


def _bits(x: Tensor) -> NDArray[Any]:
    """A cache's memory as unsigned integers of its numbers' size."""
    array = _numpy(x)
    return array.view(np.uint32) if array.dtype == np.float32 else array
