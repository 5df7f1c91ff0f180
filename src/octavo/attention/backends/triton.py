"""The ``triton`` candidate: our split-KV decode and paged prefill on a CUDA GPU.

Keys and values lie as block, token, head, dim. Decode decides its splits on the device, from the
exact lengths, so there is nothing to plan on the host but the upload.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo.attention.backends.nhd import NhdPool, nhd_layout
from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.split_attention.triton import Scratch

DTYPES = ("bfloat16", "float16", "float32")
MAX_HEAD_DIM = 256
MAX_GROUP = 64  # query heads of a KV head: all of them are one tile of the decode kernel
MIN_TILE = 16  # keys the decode kernel reads at a time, at least: no tile reaches over a cut


class TritonCandidate:
    name = "triton"

    def supports(self, spec: AttentionSpec) -> Support:
        group, rest = divmod(spec.num_heads, spec.num_kv_heads)
        if spec.device.partition(":")[0] != "cuda":
            return Support(False, f"runs on CUDA GPUs, not on {spec.device}")
        if find_spec("triton") is None:
            return Support(False, "the package triton isn't installed")
        if spec.dtype not in DTYPES:
            return Support(False, f"{spec.dtype} isn't one of {', '.join(DTYPES)}")
        if spec.kv_dtype != spec.dtype:
            return Support(False, f"stores keys and values as the queries' {spec.dtype}")
        if rest:
            heads = f"{spec.num_heads} query heads aren't a multiple of {spec.num_kv_heads}"
            return Support(False, heads)
        if group > MAX_GROUP:
            return Support(False, f"{group} query heads a KV head are more than {MAX_GROUP}")
        if max(spec.head_dim, spec.v_head_dim) > MAX_HEAD_DIM:
            head_dim = max(spec.head_dim, spec.v_head_dim)
            return Support(False, f"head_dim {head_dim} is more than {MAX_HEAD_DIM}")
        if spec.split_mode == "fixed" and spec.split_tokens % MIN_TILE:
            reason = f"fixed splits of {spec.split_tokens} tokens aren't multiples of {MIN_TILE}"
            return Support(False, reason)
        return Support(True)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        return nhd_layout(spec, num_blocks)

    def open(self, spec: AttentionSpec) -> TritonBackend:
        from octavo.kernels.split_attention.triton import resident_slots

        return TritonBackend(spec, resident_slots(spec) if spec.phase == "decode" else 0)


@dataclass(frozen=True)
class TritonPlan:
    """A step's rows on the device."""

    seq_lens: Tensor  # [R]
    block_table: Tensor  # [R, blocks]
    query_start_loc: Tensor  # [R + 1]
    scratch: Scratch | None  # decode only


class TritonBackend(NhdPool):
    """See :class:`octavo.attention.spec.Backend`. ``num_slots`` is the decode grid's size."""

    def __init__(self, spec: AttentionSpec, num_slots: int) -> None:
        self.spec = spec
        self.num_slots = num_slots
        self._scratch: Scratch | None = None
        self._scratch_for = (0, 0)  # rows, tokens
        self._captured: dict[tuple[int, ...], TritonPlan] = {}

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """Upload the rows. Under ``spec.graph`` batches of equal shape share their buffers, so a
        captured ``run`` sees the rows that were planned last; whoever captures gives the block
        table its full width, and pads with rows of length 0."""
        import torch

        arrays = (batch.seq_lens, batch.block_table, batch.query_start_loc)
        shape = batch.block_table.shape
        plan = self._captured.get(shape)
        if plan is not None:
            buffers = (plan.seq_lens, plan.block_table, plan.query_start_loc)
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer.copy_(torch.as_tensor(array))
            return plan
        scratch = None
        if self.spec.phase == "decode":
            capacity = shape[1] * self.spec.block_size
            longest = capacity if self.spec.graph else int(batch.seq_lens.max(initial=0))
            scratch = self._scratch_of(len(batch.seq_lens), longest)
        lens, table, starts = (
            torch.as_tensor(array).to(self.spec.device, copy=True) for array in arrays
        )
        plan = TritonPlan(lens, table, starts, scratch)
        if self.spec.graph:
            self._captured[shape] = plan
        return plan

    def plan_on_device(
        self, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor
    ) -> TritonPlan:
        """A plan that reads these int32 tensors whenever it runs: nothing is uploaded, and a
        captured ``run`` sees the rows that are in them then. Decode looks at no
        ``query_start_loc``. The block table is as wide as a row may become."""
        scratch = None
        if self.spec.phase == "decode":
            longest = block_table.shape[1] * self.spec.block_size
            scratch = self._scratch_of(len(seq_lens), longest)
        return TritonPlan(seq_lens, block_table, query_start_loc, scratch)

    def _scratch_of(self, num_rows: int, max_tokens: int) -> Scratch:
        """The one scratch of this backend, made anew where it is too small; plans hold on to
        theirs."""
        from octavo.kernels.split_attention.triton import make_scratch

        rows, tokens = self._scratch_for
        if self._scratch is None or num_rows > rows or max_tokens > tokens:
            self._scratch_for = max(num_rows, rows), max(max_tokens, tokens)
            self._scratch = make_scratch(self.spec, *self._scratch_for, self.num_slots)
        return self._scratch

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        from octavo.kernels.kv_store.triton import store_kv

        store_kv(k, v, k_cache, v_cache, slot_mapping)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: TritonPlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        from octavo.kernels.paged_prefill.triton import paged_prefill
        from octavo.kernels.split_attention.triton import split_decode

        table, lens = plan.block_table, plan.seq_lens
        if plan.scratch is None:
            starts = plan.query_start_loc
            return paged_prefill(
                self.spec, q, k_cache, v_cache, table, lens, starts, sinks=sinks, out=out
            )
        return split_decode(
            self.spec,
            q,
            k_cache,
            v_cache,
            table,
            lens,
            num_slots=self.num_slots,
            scratch=plan.scratch,
            sinks=sinks,
            out=out,
        )
