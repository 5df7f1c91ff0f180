"""The ``fused`` candidate: decode steps of few rows in which attention is one launch with QK-norm,
rotation and the cache write, on NVIDIA GPUs from Hopper on.

The ``cuda`` runtime calls the kernel itself (runtime/cuda_fused.py). Here it stands behind the
contract of all candidates, so that it is verified as they are: nothing is normed, the rotation is
by zero, and the newest key and value are those that the cache already has, to be written anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from octavo.attention.backends.nhd import NhdPool, nhd_layout
from octavo.attention.certificates import hardware_of
from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support
from octavo.kernels.linear.tiles import MOST_ROWS
from octavo.kernels.rope_attention.limits import NEEDS_HOPPER, refusal

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.rope_attention.triton import Cut, Scratch


class FusedCandidate:
    name = "fused"

    def supports(self, spec: AttentionSpec) -> Support:
        if spec.device.partition(":")[0] != "cuda":
            return Support(False, f"runs on CUDA GPUs, not on {spec.device}")
        if find_spec("triton") is None:
            return Support(False, "the package triton isn't installed")
        if not _is_hopper_or_later(hardware_of(spec.device)):
            return Support(False, NEEDS_HOPPER)
        reason = refusal(spec)
        return Support(not reason, reason)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        return nhd_layout(spec, num_blocks)

    def open(self, spec: AttentionSpec) -> FusedBackend:
        import torch

        gpu = torch.cuda.get_device_properties(torch.device(spec.device))
        return FusedBackend(spec, gpu.multi_processor_count)


def _is_hopper_or_later(hardware: str) -> bool:
    kind, _, number = hardware.partition("_")
    return kind == "sm" and int(number) >= 90


@dataclass(frozen=True)
class FusedPlan:
    """A step's rows on the device, and how their histories are cut."""

    seq_lens: Tensor  # [R]
    block_table: Tensor  # [R, blocks]
    newest: Tensor  # [R], int64: the slot of each row's newest token; -1 for a row of length 0
    cut: Cut
    scratch: Scratch
    turns: tuple[Tensor, Tensor]  # cosines and sines of at least as many positions: 1 and 0


class FusedBackend(NhdPool):
    """See :class:`octavo.attention.spec.Backend`. More rows than a launch takes are several."""

    def __init__(self, spec: AttentionSpec, num_sms: int) -> None:
        self.spec = spec
        self._num_sms = num_sms
        self._captured: dict[tuple[int, ...], FusedPlan] = {}
        self._scratch: Scratch | None = None
        self._splits = 0  # that scratch is for
        self._turns: tuple[Tensor, Tensor] | None = None

    def plan(self, batch: AttentionBatch) -> FusedPlan:
        """Upload the rows. Under ``spec.graph`` batches of equal shape share their buffers and the
        cut for a full table, so a captured ``run`` sees the rows that were planned last."""
        import torch

        from octavo.kernels.rope_attention.triton import choose_cut

        shape = batch.block_table.shape
        arrays = (batch.seq_lens, batch.block_table, self._newest(batch))
        held = self._captured.get(shape)
        if held is not None:
            buffers = (held.seq_lens, held.block_table, held.newest)
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer.copy_(torch.as_tensor(array))
            return held
        capacity = shape[1] * self.spec.block_size
        longest = capacity if self.spec.graph else int(batch.seq_lens.max(initial=1))
        cut = choose_cut(self.spec, min(max(1, shape[0]), MOST_ROWS), longest, self._num_sms)
        lens, table, newest = (
            torch.as_tensor(array).to(self.spec.device, copy=True) for array in arrays
        )
        scratch, turns = self._scratch_of(cut.splits), self._turns_of(longest)
        plan = FusedPlan(lens, table, newest, cut, scratch, turns)
        if self.spec.graph:
            self._captured[shape] = plan
        return plan

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: FusedPlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        from octavo.kernels.rope_attention.triton import rope_attention

        if sinks is not None:
            raise NotImplementedError("the fused kernel has no attention sinks")
        slots = plan.newest.clamp(min=0)
        k, v = (
            cache.view(-1, *cache.shape[2:]).index_select(0, slots).flatten(1)
            for cache in (k_cache, v_cache)
        )
        qkv = torch.cat((q.flatten(1), k, v), 1)
        qkv.masked_fill_(plan.newest[:, None] < 0, 0.0)  # slot 0 may hold anything
        out = q.new_empty(q.shape) if out is None else out
        rows_out = out.flatten(1)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for first in range(0, len(q), MOST_ROWS):
            rows = slice(first, first + MOST_ROWS)
            rope_attention(
                self.spec,
                qkv[rows],
                k_cache,
                v_cache,
                plan.block_table[rows],
                plan.seq_lens[rows],
                plan.newest[rows],
                *plan.turns,
                rows_out[rows],
                cut=plan.cut,
                scratch=plan.scratch,
                lse=lse[rows],
            )
        return out, lse

    def _newest(self, batch: AttentionBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        size, lens = self.spec.block_size, batch.seq_lens
        last = np.maximum(lens.astype(np.int64) - 1, 0)
        blocks = batch.block_table[np.arange(len(lens)), last // size]
        return np.where(lens > 0, blocks.astype(np.int64) * size + last % size, -1)

    def _scratch_of(self, splits: int) -> Scratch:
        """The one scratch of this backend, made anew where it is too small; plans hold on to
        theirs."""
        from octavo.kernels.rope_attention.triton import make_scratch

        if self._scratch is None or splits > self._splits:
            self._splits = splits
            self._scratch = make_scratch(self.spec, MOST_ROWS, splits)
        return self._scratch

    def _turns_of(self, longest: int) -> tuple[Tensor, Tensor]:
        """A rotation by zero, in the same way."""
        import torch

        if self._turns is None or longest > len(self._turns[0]):
            shape = 1 << (longest - 1).bit_length(), self.spec.head_dim // 2
            device = self.spec.device
            self._turns = torch.ones(shape, device=device), torch.zeros(shape, device=device)
        return self._turns
