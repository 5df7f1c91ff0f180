"""A stand-in for the package ``flashinfer``, on the CPU: the documented behaviour of its two paged
wrappers (0.7), as far as the adapter uses it. What it must not be given, it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch


def make_standin() -> SimpleNamespace:
    """What ``import flashinfer`` is to find; ``calls`` records the plans."""
    calls: list[dict[str, object]] = []

    class Wrapper:
        def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
            assert workspace.dtype == torch.uint8
            assert kv_layout == "NHD"
            self.use_tensor_cores, self.backend = use_tensor_cores, backend
            self.planned = None

        def _plan(self, starts, indptr, indices, last_page_len, heads, options):
            num_heads, num_kv_heads, _, page_size = heads
            known = {
                "sm_scale",
                "window_left",
                "logits_soft_cap",
                "q_data_type",
                "kv_data_type",
                "disable_split_kv",
                "fixed_split_size",
                "causal",
            }
            if options.keys() - known:
                raise TypeError(f"unexpected keyword arguments {options.keys() - known}")
            for tensor in (starts, indptr, indices, last_page_len):
                assert tensor.dtype == torch.int32
            assert num_heads % num_kv_heads == 0
            assert len(last_page_len) == len(indptr) - 1 == len(starts) - 1
            assert len(indices) == indptr[-1]
            assert (indices >= 0).all()
            assert (indptr.diff() >= 1).all()
            assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
            if options.get("fixed_split_size") is not None:
                assert self.backend == "fa2"
                assert isinstance(self, Prefill) or self.use_tensor_cores
            calls.append({"pages": indices.tolist(), **options})
            self.planned = starts, indptr, indices, last_page_len, heads, options

        def run(self, q, paged_kv_cache, *, out=None, return_lse=False):
            assert self.planned, "plan before run"
            assert return_lse
            assert q.is_contiguous()
            starts, indptr, indices, last_page_len, heads, options = self.planned
            num_heads, num_kv_heads, head_dim, page_size = heads
            assert q.shape == (starts[-1], num_heads, head_dim)
            out = torch.empty_like(q) if out is None else out
            assert out.is_contiguous()
            lse = torch.empty(q.shape[:2])
            for row in range(len(last_page_len)):
                pages = indices[indptr[row] : indptr[row + 1]].long()
                length = (len(pages) - 1) * page_size + int(last_page_len[row])
                k, v = (
                    cache[pages]
                    .flatten(0, 1)[:length]
                    .repeat_interleave(num_heads // num_kv_heads, 1)
                    for cache in paged_kv_cache
                )
                tokens = slice(int(starts[row]), int(starts[row + 1]))
                scores = torch.einsum("qhd,khd->hqk", q[tokens], k) * options["sm_scale"]
                cap = options["logits_soft_cap"]
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                position = torch.arange(length - (tokens.stop - tokens.start), length)[:, None]
                key = torch.arange(length)
                seen = key <= position
                if options["window_left"] >= 0:
                    seen &= key >= position - options["window_left"]
                scores = scores.masked_fill(~seen, -math.inf)
                out[tokens] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
                lse[tokens] = scores.logsumexp(-1).T / math.log(2)
            return out, lse

    class Decode(Wrapper):
        def plan(self, indptr, indices, last_page_len, *heads, **options):
            assert "causal" not in options
            starts = torch.arange(len(indptr), dtype=torch.int32)
            self._plan(starts, indptr, indices, last_page_len, heads, options)

    class Prefill(Wrapper):
        def plan(self, qo_indptr, indptr, indices, last_page_len, *heads, **options):
            assert options["causal"] is True
            self._plan(qo_indptr, indptr, indices, last_page_len, heads, options)

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        calls=calls,
    )
