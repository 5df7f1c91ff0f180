"""The ``reference`` candidate: torch, any shape, any KV layout, float32 accumulation.

It is what the others are compared with, last in every order and never off. Its decode really
splits and merges, by the plan. It stores keys and values as block, token, head, dim unless it
shares the pool of another candidate, whose ``write`` and ``gather`` it then uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.attention.backends.nhd import NhdPool, nhd_layout
from octavo.attention.merge import log_sum_exp
from octavo.attention.spec import (
    AttentionBatch,
    AttentionSpec,
    Backend,
    KVLayout,
    Support,
    placed,
)
from octavo.attention.splits import SplitCost, SplitPlan, plan_splits

if TYPE_CHECKING:
    from torch import Tensor

# Not a device's measure: enough cores that a long row alone is split, and a cost that keeps a
# short one whole, as each segment is a dozen torch calls.
CORES = 16
COST = SplitCost(min_tokens=512, merge_tokens=512)


class ReferenceCandidate:
    name = "reference"

    def supports(self, spec: AttentionSpec) -> Support:
        if spec.graph:
            return Support(False, "loops over the rows on the host, so it can't be captured")
        return Support(True)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        return nhd_layout(spec, num_blocks)

    def open(self, spec: AttentionSpec, owner: Backend | None = None) -> ReferenceBackend:
        """``owner`` is the backend whose layout the pool has; without one it is our own."""
        return ReferenceBackend(spec, owner)


@dataclass(frozen=True)
class ReferencePlan:
    batch: AttentionBatch
    splits: SplitPlan | None  # None for prefill
    block_table: Tensor  # [R, blocks], on the device


class ReferenceBackend(NhdPool):
    """See :class:`octavo.attention.spec.Backend`."""

    def __init__(self, spec: AttentionSpec, owner: Backend | None = None) -> None:
        self.spec = spec
        self.owner = owner

    def plan(self, batch: AttentionBatch, splits: SplitPlan | None = None) -> ReferencePlan:
        """``splits`` cuts a decode step elsewhere than its spec's mode would."""
        import torch

        spec = self.spec
        if spec.phase == "decode" and splits is None:
            splits = plan_splits(
                batch.seq_lens,
                num_kv_heads=spec.num_kv_heads,
                block_size=spec.block_size,
                num_cores=CORES,
                mode=spec.split_mode,
                split_tokens=spec.split_tokens,
                window=spec.window,
                cost=COST,
            )
        table = torch.as_tensor(batch.block_table, device=spec.device)
        return ReferencePlan(batch, splits, table)

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.owner is not None:
            self.owner.write(k, v, k_cache, v_cache, slot_mapping)
            return
        real = slot_mapping >= 0
        slots = slot_mapping[real].long()
        blocks, offsets = slots // self.spec.block_size, slots % self.spec.block_size
        k_cache[blocks, offsets] = k[real].to(k_cache.dtype)
        v_cache[blocks, offsets] = v[real].to(v_cache.dtype)

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        if self.owner is not None:
            return self.owner.gather(k_cache, v_cache, block_table, length)
        return super().gather(k_cache, v_cache, block_table, length)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: ReferencePlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        from octavo.kernels.split_attention.reference import add_sinks, causal_prefill, split_decode

        spec = self.spec
        result = q.new_zeros(len(q), spec.num_heads, spec.v_head_dim, dtype=torch.float32)
        m = result[..., 0] - torch.inf
        l = torch.zeros_like(m)
        edges = plan.batch.query_start_loc.tolist()
        for row, length in enumerate(plan.batch.seq_lens.tolist()):
            tokens = slice(edges[row], edges[row + 1])
            num_queries = tokens.stop - tokens.start
            if num_queries == 0 or length == 0:
                continue
            # Blocks that the window has left behind are never touched: their ids may be stale.
            oldest = 0
            if spec.window is not None:
                oldest = max(0, length - num_queries - spec.window + 1)
            first_block = oldest // spec.block_size
            base = first_block * spec.block_size
            k, v = self.gather(k_cache, v_cache, plan.block_table[row, first_block:], length - base)
            if plan.splits is not None:
                segments = [(a - base, b - base) for a, b in plan.splits.boundaries[row]]
                result[tokens.start], m[tokens.start], l[tokens.start] = split_decode(
                    q[tokens.start], k, v, segments, scale=spec.scale, soft_cap=spec.soft_cap
                )
            else:
                result[tokens], m[tokens], l[tokens] = causal_prefill(
                    q[tokens],
                    k,
                    v,
                    scale=spec.scale,
                    window=spec.window,
                    soft_cap=spec.soft_cap,
                )
        if sinks is not None:
            result, m, l = add_sinks(result, m, l, sinks)
        return placed(result.to(q.dtype), out), log_sum_exp(m, l)
