"""The ``torch`` candidate: prefill through the SDPA that comes with torch, cuDNN's kernel.

Keys and values lie as block, token, head, dim; a row's are gathered into one piece first. cuDNN
knows causal squares and unmasked rectangles, and needs 50 to 80 ms to prepare for a shape it
hasn't met (H200, torch 2.11). So a row is put together from shapes out of a short list: the cached
prefix in segments whose lengths are powers of two, then a square of what is left and the new
tokens, padded at its end, where causality hides the padding. The partials are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.attention.backends.nhd import NhdPool, nhd_layout
from octavo.attention.merge import merge_lse, merge_sinks
from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support, placed
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MIN_SEGMENT = 128  # tokens of the prefix that are worth a call of their own
SQUARE_STEP = 256  # a square's side is MIN_SEGMENT or a multiple of this


class TorchCandidate:
    name = "torch"

    def supports(self, spec: AttentionSpec) -> Support:
        head_dims = spec.head_dim, spec.v_head_dim
        refusals = (
            (spec.phase != "prefill", "would copy the whole history for each decoded token"),
            (spec.device.partition(":")[0] != "cuda", f"runs on CUDA GPUs, not on {spec.device}"),
            (spec.graph, "loops over the rows on the host, so it can't be captured"),
            (spec.dtype not in DTYPES, f"{spec.dtype} isn't one of {', '.join(DTYPES)}"),
            (spec.kv_dtype != spec.dtype, f"stores keys and values as the queries' {spec.dtype}"),
            (spec.num_heads % spec.num_kv_heads != 0, "needs whole groups of query heads"),
            (
                max(head_dims) > MAX_HEAD_DIM or any(dim % 8 for dim in head_dims),
                f"head sizes {head_dims} aren't multiples of 8 up to {MAX_HEAD_DIM}",
            ),
            (spec.window is not None, "has no sliding windows"),
            (spec.soft_cap is not None, "has no soft cap"),
        )
        reason = next((reason for refused, reason in refusals if refused), "")
        return Support(not reason, reason)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        return nhd_layout(spec, num_blocks)

    def open(self, spec: AttentionSpec) -> TorchBackend:
        """Raises ConfigError where torch was built without cuDNN."""
        import torch

        cudnn: Any = torch.backends.cudnn
        if not cudnn.is_available():
            raise ConfigError(
                "attention backend 'torch' needs cuDNN, which this torch doesn't have; "
                "--disable-attention-backend torch"
            )
        return TorchBackend(spec)


@dataclass(frozen=True)
class TorchPlan:
    """``rows``: those with queries, as (first token, end, history's length)."""

    rows: list[tuple[int, int, int]]
    block_tables: list[Tensor]  # of each of the rows


class TorchBackend(NhdPool):
    """See :class:`octavo.attention.spec.Backend`. A partial is rounded to the queries' dtype by
    the kernel before it is merged in float32."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        import torch

        table = torch.as_tensor(batch.block_table)
        if self.spec.device != "cpu":  # from pinned memory nothing waits
            table = table.pin_memory()
        table = table.to(self.spec.device, non_blocking=True, copy=True)
        edges, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        live = [row for row, n in enumerate(lens) if n > 0 and edges[row] < edges[row + 1]]
        return TorchPlan(
            [(edges[row], edges[row + 1], lens[row]) for row in live], [table[row] for row in live]
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: TorchPlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        spec = self.spec
        if [row[:2] for row in plan.rows] == [(0, len(q))]:  # nothing to put together
            k, v = self.gather(k_cache, v_cache, plan.block_tables[0], plan.rows[0][2])
            result, lse = causal_row(q, k, v, spec.scale)
            out = placed(result.to(q.dtype), out)
        else:
            shape = len(q), spec.num_heads, spec.v_head_dim
            out = q.new_zeros(shape) if out is None else out.zero_()
            lse = torch.full_like(out[..., 0], -torch.inf, dtype=torch.float32)
            for (start, stop, length), table in zip(plan.rows, plan.block_tables, strict=True):
                k, v = self.gather(k_cache, v_cache, table, length)
                row_out, lse[start:stop] = causal_row(q[start:stop], k, v, spec.scale)
                out[start:stop] = row_out.to(q.dtype)
        if sinks is not None:
            merged, lse = merge_sinks(out.float(), lse, sinks)
            out = placed(merged.to(q.dtype), out)
        return out, lse


def causal_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A row's newest Q tokens, ``q`` [Q, H, D], against all its keys, ``k`` [n, Hkv, D] and ``v``
    [n, Hkv, Dv]: ``out`` [Q, H, Dv], in q's dtype or float32, and ``lse`` [Q, H], float32."""
    import torch

    segments = prefix_segments(len(k) - len(q))
    covered = segments[-1][1] if segments else 0
    ahead = len(k) - len(q) - covered  # cached tokens in the square, whose queries are made up
    behind = square_side(len(k) - covered) - (len(k) - covered)
    queries = _padded(q, ahead, behind)
    keys, values = (_padded(x[covered:], 0, behind) for x in (k, v))
    partials = [sdpa(queries, k[a:b], v[a:b], scale, causal=False) for a, b in segments]
    partials.append(sdpa(queries, keys, values, scale, causal=True))
    new = slice(ahead, ahead + len(q))
    outs, lses = zip(*((out[new], lse[new]) for out, lse in partials), strict=True)
    if not segments:
        return outs[0], lses[0]
    if q.is_cuda:
        from octavo.kernels.merge_rows.triton import merge_rows

        return merge_rows([out.contiguous() for out in outs], torch.stack(lses))
    return merge_lse(torch.stack(outs).float(), torch.stack(lses))


def _padded(x: Tensor, ahead: int, behind: int) -> Tensor:
    """``x`` with zeros before and behind; itself where there are none, as torch would copy it."""
    from torch.nn.functional import pad

    return pad(x, (0, 0, 0, 0, ahead, behind)) if ahead or behind else x


def prefix_segments(length: int) -> list[tuple[int, int]]:
    """Segments ``(start, stop)`` of a cached prefix, powers of two, the longest first. What is
    left at the end is shorter than MIN_SEGMENT."""
    segments = []
    start = 0
    while length - start >= MIN_SEGMENT:
        stop = start + (1 << ((length - start).bit_length() - 1))
        segments.append((start, stop))
        start = stop
    return segments


def square_side(tokens: int) -> int:
    """The side of the causal square that takes so many tokens."""
    return MIN_SEGMENT if tokens <= MIN_SEGMENT else -(-tokens // SQUARE_STEP) * SQUARE_STEP


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN on one row: ``q`` [Q, H, D], ``k`` [n, Hkv, D], ``v`` [n, Hkv, Dv] to ``out``
    [Q, H, Dv] and ``lse`` [Q, H]. Causal: query ``i`` sees the first ``i + 1`` keys.

    The operator behind ``scaled_dot_product_attention``, which alone gives the log-sum-exp."""
    import torch

    row = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *row, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].squeeze(-1).transpose(0, 1)
