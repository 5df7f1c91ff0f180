"""Rows for the fused attention kernel, whose cache is NaN wherever no row sees a key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.attention.spec import AttentionSpec
from octavo.kernels.rope_attention import reference
from octavo.kernels.rope_attention.triton import Cut, Scratch, make_scratch, rope_attention

EPS = 1e-6


@dataclass(frozen=True)
class Rows:
    spec: AttentionSpec
    qkv: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def make_rows(
    lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    rotary_dim: int | None = None,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    norms: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Rows:
    """Rows of ``lens`` tokens, the new one included, in shuffled blocks."""
    name = str(dtype).removeprefix("torch.")
    spec = AttentionSpec(
        phase="decode",
        device=device,
        dtype=name,
        kv_dtype=name,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
    )
    counts = [-(-n // block_size) for n in lens]
    ids = torch.randperm(sum(counts) + 3, device=device)[: sum(counts)].int()
    table = torch.full((len(lens), max([*counts, 1])), -1, dtype=torch.int32, device=device)
    shape = (sum(counts) + 3, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    slots = []
    for row, (length, own) in enumerate(zip(lens, ids.split(counts), strict=True)):
        table[row, : len(own)] = own
        first = 0 if window is None else max(0, length - window)
        position = torch.arange(first, max(first, length - 1), device=device)
        place = own[position // block_size].long(), position % block_size
        for cache in (k_cache, v_cache):
            new = torch.randn(len(position), num_kv_heads, head_dim, device=device)
            cache[place] = new.to(dtype)
        last = length - 1
        slots.append(
            -1 if length == 0 else int(own[last // block_size]) * block_size + last % block_size
        )
    angles = torch.rand(max([*lens, 1]), (rotary_dim or head_dim) // 2, device=device) * 6
    gains = [0.5 + torch.rand(head_dim, device=device) if norms else None for _ in range(2)]
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    return Rows(
        spec,
        torch.randn(len(lens), columns, device=device).to(dtype),
        k_cache,
        v_cache,
        table,
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(slots, device=device),
        angles.cos(),
        angles.sin(),
        *gains,
    )


def launch_attention(
    rows: Rows, out: Tensor, cut: Cut, scratch: Scratch, *, lse: Tensor | None = None
) -> None:
    """The kernel once, into ``out``."""
    norms = {"q_norm": rows.q_norm, "k_norm": rows.k_norm, "eps": EPS}
    rope_attention(*_inputs(rows), out, cut=cut, scratch=scratch, lse=lse, **norms)


def reference_attention(rows: Rows) -> Tensor:
    """The reference's answers; the caches of ``rows`` get the new keys and values."""
    norms = {"q_norm": rows.q_norm, "k_norm": rows.k_norm, "eps": EPS}
    return reference.rope_attention(*_inputs(rows), **norms)


def check_attention(rows: Rows, cut: Cut, tolerance: float = 8e-3) -> None:
    """The answers, the cache with its new keys and values, and the counters left at zero."""
    before = replace(rows, k_cache=rows.k_cache.clone(), v_cache=rows.v_cache.clone())
    out, counters = attend(rows, cut)
    assert error(out, reference_attention(before)) < tolerance
    keys, values = before.k_cache, before.v_cache
    assert error(rows.k_cache.nan_to_num(), keys.nan_to_num()) < 4e-3  # a rounding may differ
    assert torch.equal(rows.v_cache.nan_to_num(), values.nan_to_num())
    assert not counters.any()


def _inputs(rows: Rows) -> tuple[Any, ...]:
    """The first arguments of the kernel and of its reference."""
    return (
        rows.spec,
        rows.qkv,
        rows.k_cache,
        rows.v_cache,
        rows.block_table,
        rows.seq_lens,
        rows.slot_mapping,
        rows.cos,
        rows.sin,
    )


def attend(rows: Rows, cut: Cut) -> tuple[Tensor, Tensor]:
    """The kernel's answers and its counters, which must be zero again. Scratch is NaN before."""
    spec = rows.spec
    scratch = make_scratch(spec, len(rows.qkv), cut.splits)
    for part in (scratch.out, scratch.m, scratch.l):
        part.fill_(torch.nan)
    out = torch.full(
        (len(rows.qkv), spec.num_heads * spec.head_dim),
        torch.nan,
        dtype=rows.qkv.dtype,
        device=spec.device,
    )
    launch_attention(rows, out, cut, scratch)
    return out, scratch.counters


def error(found: Tensor, right: Tensor) -> float:
    """``|found - right| / |right|``; NaN, which passes no comparison, if anything is NaN."""
    found, right = found.double(), right.double()
    return float((found - right).norm() / right.norm().clamp(min=1e-30))
