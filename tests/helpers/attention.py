"""Paged KV pools with poison wherever a kernel must not look, and attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.attention import AttentionBatch, AttentionSpec, Backend, KVLayout


def make_spec(phase: str = "decode", **changes) -> AttentionSpec:
    """A small spec; the scale follows the head size unless given."""
    fields = {
        "phase": phase,
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "block_size": 16,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
    } | changes
    fields.setdefault("v_head_dim", fields["head_dim"])
    fields.setdefault("scale", fields["head_dim"] ** -0.5)
    return AttentionSpec(**fields)


@dataclass
class Rows:
    """Random rows in a paged pool: the batch to plan, the queries, and the true K and V."""

    batch: AttentionBatch
    q: NDArray[np.float32]  # [T, H, D]
    keys: list[NDArray[np.float32]]  # per row [n, Hkv, D]
    values: list[NDArray[np.float32]]


def make_rows(
    spec: AttentionSpec,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    seed: int = 0,
    spread: float = 1.0,
) -> Rows:
    """Rows with shuffled blocks. Table entries past a row's end, and those that its window has
    left behind, are -1; block 0 belongs to nobody. ``spread`` scales the queries."""
    rng = np.random.default_rng(seed)
    query_lens = [1] * len(seq_lens) if query_lens is None else query_lens
    blocks_of = [-(-n // spec.block_size) for n in seq_lens]
    ids = 1 + rng.permutation(sum(blocks_of))
    table = np.full((len(seq_lens), max([*blocks_of, 1]) + 1), -1, np.int32)
    used = 0
    for row, (n, new, blocks) in enumerate(zip(seq_lens, query_lens, blocks_of, strict=True)):
        table[row, :blocks] = ids[used : used + blocks]
        used += blocks
        if spec.window is not None:
            table[row, : max(0, n - new - spec.window + 1) // spec.block_size] = -1
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = spread * rng.standard_normal((starts[-1], spec.num_heads, spec.head_dim), np.float32)
    keys = [
        rng.standard_normal((n, spec.num_kv_heads, spec.head_dim), np.float32) for n in seq_lens
    ]
    values = [
        rng.standard_normal((n, spec.num_kv_heads, spec.v_head_dim), np.float32) for n in seq_lens
    ]
    return Rows(AttentionBatch(starts, np.array(seq_lens, np.int32), table), q, keys, values)


def fill_pool(spec: AttentionSpec, layout: KVLayout, backend: Backend, rows: Rows):
    """A torch pool, NaN but for the rows' live slots, which ``backend.write`` stores. Of int8s it
    is the scales that are NaN."""
    import torch

    device, dtype = spec.device, getattr(torch, layout.dtype)
    poison = torch.nan if dtype.is_floating_point else -1  # a float32 of four such bytes is NaN
    k_cache = torch.full(layout.k_shape, poison, dtype=dtype, device=device)
    v_cache = torch.full(layout.v_shape, poison, dtype=dtype, device=device)
    table = rows.batch.block_table
    for row, (k, v) in enumerate(zip(rows.keys, rows.values, strict=True)):
        position = np.arange(len(k))
        block = table[row, position // spec.block_size]
        live = block >= 0
        slots = (block * spec.block_size + position % spec.block_size)[live]
        backend.write(
            *(torch.from_numpy(x[live]).to(device, getattr(torch, spec.dtype)) for x in (k, v)),
            k_cache,
            v_cache,
            torch.from_numpy(slots.astype(np.int32)).to(device),
        )
    return k_cache, v_cache


def num_blocks(rows: Rows) -> int:
    return int(rows.batch.block_table.max(initial=0)) + 2  # one more that nobody uses


def run(candidate, spec: AttentionSpec, rows: Rows, *, sinks=None, splits=None):
    """Fill a pool, plan and run: ``out`` and ``lse`` as numpy."""
    import torch

    backend = candidate.open(spec)
    pool = fill_pool(spec, candidate.kv_layout(spec, num_blocks(rows)), backend, rows)
    plan = backend.plan(rows.batch) if splits is None else backend.plan(rows.batch, splits)
    q = torch.from_numpy(rows.q).to(spec.device, getattr(torch, spec.dtype))
    sinks = None if sinks is None else torch.from_numpy(sinks).to(spec.device)
    given = q.new_full((*q.shape[:2], spec.v_head_dim), torch.nan)
    out, lse = backend.run(q, *pool, plan, sinks, given)
    assert out is given
    return out.float().cpu().numpy(), lse.cpu().numpy()


def oracle(spec: AttentionSpec, rows: Rows, sinks=None):
    """``out`` [T, H, Dv] and ``lse`` [T, H] in float64, by the definition."""
    out = np.zeros((len(rows.q), spec.num_heads, spec.v_head_dim))
    lse = np.full((len(rows.q), spec.num_heads), -np.inf)
    group = spec.num_heads // spec.num_kv_heads
    starts = rows.batch.query_start_loc
    for row, (k, v) in enumerate(zip(rows.keys, rows.values, strict=True)):
        n = len(k)
        for token in range(starts[row], starts[row + 1]):
            end = n - int(starts[row + 1]) + token + 1
            start = 0 if spec.window is None else max(0, end - spec.window)
            for head in range(spec.num_heads):
                scores = k[start:end, head // group].astype(np.float64) @ rows.q[token, head]
                scores *= spec.scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
                if sinks is not None:
                    scores = np.append(scores, sinks[head])
                if len(scores) == 0:
                    continue
                weights = np.exp(scores - scores.max())
                out[token, head] = (
                    weights[: end - start] @ v[start:end, head // group] / weights.sum()
                )
                lse[token, head] = scores.max() + np.log(weights.sum())
    return out, lse
