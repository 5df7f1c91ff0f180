"""The ``flashinfer`` candidate: FlashInfer's paged kernels, where the package is installed.

They split the history and merge it themselves. Keys and values lie as block, token, head, dim
(FlashInfer's ``NHD``). Its log-sum-exp has base 2 and is converted here. Names and meanings of the
arguments are those of FlashInfer 0.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.attention.backends.nhd import NhdPool, nhd_layout
from octavo.attention.merge import merge_sinks, natural_lse
from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support, placed

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 512 << 20  # 64 heads on 132 multiprocessors need 511 MiB (flashinfer#40381)


class FlashinferCandidate:
    name = "flashinfer"

    def supports(self, spec: AttentionSpec) -> Support:
        refusals = (
            (spec.device.partition(":")[0] != "cuda", f"runs on CUDA GPUs, not on {spec.device}"),
            (find_spec("flashinfer") is None, "the package flashinfer isn't installed"),
            (spec.graph, "plans on the host, so a captured call would keep the old plan"),
            (spec.dtype not in DTYPES, f"{spec.dtype} isn't one of {', '.join(DTYPES)}"),
            (spec.kv_dtype != spec.dtype, f"stores keys and values as the queries' {spec.dtype}"),
            (spec.num_heads % spec.num_kv_heads != 0, "needs whole groups of query heads"),
            (
                spec.head_dim not in HEAD_DIMS or spec.v_head_dim != spec.head_dim,
                f"head sizes ({spec.head_dim}, {spec.v_head_dim}) aren't equal and one of "
                f"{', '.join(map(str, HEAD_DIMS))}",
            ),
            (
                spec.split_mode == "fixed" and spec.split_tokens % spec.block_size != 0,
                f"segments of {spec.split_tokens} tokens aren't whole blocks of {spec.block_size}",
            ),
            (
                spec.split_mode == "fixed" and spec.window is not None,
                "cuts a sliding window from its own beginning, not at fixed positions",
            ),
        )
        reason = next((reason for refused, reason in refusals if refused), "")
        return Support(not reason, reason)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        return nhd_layout(spec, num_blocks)

    def open(self, spec: AttentionSpec) -> FlashinferBackend:
        return FlashinferBackend(spec)


@dataclass(frozen=True)
class FlashinferPlan:
    """The wrapper holds the plan itself, so only the newest can run. ``tokens``: the queries of
    rows that have keys, None for all."""

    number: int
    num_tokens: int  # that have keys
    tokens: Tensor | None


class FlashinferBackend(NhdPool):
    """See :class:`octavo.attention.spec.Backend`."""

    def __init__(self, spec: AttentionSpec) -> None:
        flashinfer = import_module("flashinfer")
        self.spec = spec
        self._planned = 0
        workspace = _workspace(spec.device)
        self._wrapper: Any
        if spec.phase == "decode":
            # The kernel on tensor cores takes any group of heads, and segments of a fixed length.
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
        else:
            backend = "fa2" if spec.split_mode == "fixed" else "auto"
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=backend
            )

    def plan(self, batch: AttentionBatch) -> FlashinferPlan:
        import torch

        spec = self.spec
        edges, lens = batch.query_start_loc, batch.seq_lens
        counts = np.diff(edges)
        live = np.flatnonzero((lens > 0) & (counts > 0))
        tokens = None
        if len(live) < len(lens):
            ids = [np.arange(edges[row], edges[row + 1]) for row in live]
            tokens = torch.as_tensor(np.concatenate([*ids, np.empty(0, np.int64)]).astype(np.int64))
            tokens = tokens.to(spec.device)
        self._planned += 1
        plan = FlashinferPlan(self._planned, int(counts[live].sum()), tokens)
        if len(live) == 0:
            return plan
        stops = -(-lens[live] // spec.block_size)
        firsts = np.zeros_like(stops)
        if spec.window is not None:  # all counts from a row's end, so its beginning can be left out
            firsts = np.maximum(lens[live] - counts[live] - spec.window + 1, 0) // spec.block_size
        pages = [
            batch.block_table[row, first:stop]
            for row, first, stop in zip(live, firsts, stops, strict=True)
        ]
        paged = (
            _int32(np.concatenate([[0], np.cumsum(stops - firsts)])),
            _int32(np.concatenate(pages)).to(spec.device),
            _int32((lens[live] - 1) % spec.block_size + 1),
        )
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
        options = {
            "sm_scale": spec.scale,
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": getattr(torch, spec.dtype),
            "kv_data_type": getattr(torch, spec.kv_dtype),
            "disable_split_kv": spec.split_mode == "off",
        }
        if spec.split_mode == "fixed":
            options["fixed_split_size"] = spec.split_tokens // spec.block_size  # in pages
        if spec.phase == "decode":
            self._wrapper.plan(*paged, *shape, **options)
        else:
            starts = _int32(np.concatenate([[0], np.cumsum(counts[live])]))
            self._wrapper.plan(starts, *paged, *shape, causal=True, **options)
        return plan

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: FlashinferPlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Raises RuntimeError for any plan but the last."""
        import torch

        if plan.number != self._planned:
            raise RuntimeError("a FlashInfer wrapper runs only what it planned last")
        spec = self.spec
        if plan.tokens is None:
            out, lse = self._attend(q, k_cache, v_cache, out)
        else:
            shape = len(q), spec.num_heads, spec.v_head_dim
            out = q.new_zeros(shape) if out is None else out.zero_()
            lse = torch.full_like(out[..., 0], -torch.inf, dtype=torch.float32)
            if plan.num_tokens:
                part = self._attend(q[plan.tokens], k_cache, v_cache)
                out[plan.tokens], lse[plan.tokens] = part
        if sinks is not None:
            merged, lse = merge_sinks(out.float(), lse, sinks)
            out = placed(merged.to(q.dtype), out)
        return out, lse

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        pool = k_cache, v_cache
        out, lse = self._wrapper.run(q.contiguous(), pool, out=out, return_lse=True)
        return out, natural_lse(lse, base=2)


@cache
def _workspace(device: str) -> Tensor:
    """Where partials wait for their merge within a call; one for all wrappers on a stream."""
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _int32(values: Any) -> Tensor:
    import torch

    return torch.as_tensor(np.asarray(values, np.int32))
