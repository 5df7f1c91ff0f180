"""What the split-attention kernels compute, said in torch, for one sequence at a time.

Shapes: ``H`` query heads, ``Hkv`` KV heads, ``G = H / Hkv`` (query head ``h`` reads KV head
``h // G``), ``D`` and ``Dv`` the head sizes of keys and values. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.merge import merge_partials

# Prefill goes through tiles of this many queries and keys: 8 MB of scores with 16 heads.
QUERY_TILE = 128
KEY_TILE = 1024


def split_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query against a history, segment by segment, merged.

    ``q`` [H, D], ``k`` [n, Hkv, D], ``v`` [n, Hkv, Dv]; ``segments`` are ``(start, stop)`` within
    the n keys, empty ones allowed. Returns the partial of the whole: ``out`` [H, Dv], ``m`` and
    ``l`` [H].
    """
    partials = [
        partial_attention(q[None], k[a:b], v[a:b], scale=scale, soft_cap=soft_cap)
        for a, b in segments
    ]
    out, m, l = (torch.stack(part)[:, 0] for part in zip(*partials, strict=True))
    return merge_partials(out, m, l)


def causal_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The newest Q tokens of a sequence against its n keys, each seeing itself and its past.

    ``q`` [Q, H, D], ``k`` [n, Hkv, D], ``v`` [n, Hkv, Dv]; query ``i`` stands at position
    ``n - Q + i`` and sees the last ``window`` keys up to its own. Works tile by tile and merges
    the tiles' partials, so the scores of a long prompt never exist at once. Returns ``out``
    [Q, H, Dv], ``m`` and ``l`` [Q, H].
    """
    prefix = len(k) - len(q)
    # Head by head in memory, once, or the products of each tile would copy it for themselves.
    k, v = (x.float().transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    rows = []
    for i in range(0, len(q), QUERY_TILE):
        j = min(i + QUERY_TILE, len(q))
        oldest, newest = prefix + i, prefix + j - 1  # positions of the tile's queries
        first_key = 0 if window is None else max(0, oldest - window + 1)
        partials = []
        for a in range(first_key, newest + 1, KEY_TILE):
            b = min(a + KEY_TILE, newest + 1)
            mask = None
            if b - 1 > oldest or (window is not None and a <= newest - window):
                position = torch.arange(oldest, newest + 1, device=q.device)[:, None]
                key = torch.arange(a, b, device=q.device)
                mask = key <= position
                if window is not None:
                    mask &= key > position - window
            partials.append(
                partial_attention(q[i:j], k[a:b], v[a:b], scale=scale, soft_cap=soft_cap, mask=mask)
            )
        rows.append(merge_partials(*(torch.stack(part) for part in zip(*partials, strict=True))))
    out, m, l = (torch.cat(part) for part in zip(*rows, strict=True))
    return out, m, l


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q queries against one segment of S keys: its partial output, maximum and weight sum.

    ``q`` [Q, H, D], ``k`` [S, Hkv, D], ``v`` [S, Hkv, Dv], ``mask`` [Q, S] true where a query sees
    a key. Returns ``out`` [Q, H, Dv], ``m`` and ``l`` [Q, H]; ``(0, -inf, 0)`` where none is seen.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, v_head_dim = v.shape
    if num_keys == 0:
        out = q.new_zeros(num_queries, num_heads, v_head_dim, dtype=torch.float32)
        return out, out[..., 0] - torch.inf, out[..., 0]
    # The queries of a KV head, group by group, are the rows of one product: [Hkv, G * Q, ...].
    grouped = q.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = (grouped.flatten(1, 2) * scale) @ k.float().permute(1, 2, 0)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores.view(-1, num_queries, num_keys).masked_fill_(~mask, -torch.inf)
    m = scores.amax(-1)
    weights = scores.sub_(torch.where(m == -torch.inf, 0.0, m)[..., None]).exp_()
    l = weights.sum(-1)
    out = weights @ v.float().transpose(0, 1)
    out /= torch.where(l == 0, 1.0, l)[..., None]
    shape = (num_kv_heads, num_heads // num_kv_heads, num_queries)

    def by_query(x: Tensor) -> Tensor:
        return x.view(*shape, *x.shape[2:]).movedim(2, 0).flatten(1, 2)

    return by_query(out), by_query(m), by_query(l)


def add_sinks(
    out: Tensor,
    m: Tensor,
    l: Tensor,
    sinks: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the sink of each head, ``sinks`` [H], as the partial ``(0, sink, 1)``."""
    return merge_partials(
        torch.stack([out, torch.zeros_like(out)]),
        torch.stack([m, sinks.to(m).expand_as(m)]),
        torch.stack([l, torch.ones_like(l)]),
    )
