"""Synthetic rows in a paged pool, poisoned wherever nobody may look, and their exact answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention import AttentionBatch, AttentionSpec, Backend, Candidate

NEEDLE_MARGIN = 20.0  # a needle's score lies so far above that all others weigh e^-20 together


@dataclass(frozen=True)
class Problem:
    """R rows of known keys and values, and the queries to ask. Dtypes are the spec's, but float32
    for keys and values that int8 will hold. These are numbers that the KV dtype holds exactly, so
    that no check has to allow for what it rounds (``checks.round_trip`` asks that of int8)."""

    spec: AttentionSpec
    batch: AttentionBatch
    q: Tensor  # [T, H, D]
    keys: list[Tensor]  # of each row [n, Hkv, D]
    values: list[Tensor]  # of each row [n, Hkv, Dv]
    sinks: Tensor | None  # [H], float32
    num_blocks: int


def make_problem(
    spec: AttentionSpec,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    seed: int = 0,
) -> Problem:
    """Normal numbers in shuffled blocks. The first and the last block of the pool belong to nobody.

    Table entries past a row's end name these two or none (-1); those that the window has left
    behind are -1. ``query_lens`` are 1 unless given.
    """
    rng = np.random.default_rng(seed)
    lens = np.asarray(seq_lens, np.int32)
    counts = np.ones_like(lens) if query_lens is None else np.asarray(query_lens, np.int32)
    used = -(-lens // spec.block_size)
    ids = 1 + rng.permutation(int(used.sum())).astype(np.int32)
    num_blocks = len(ids) + 2
    table = rng.choice(
        np.array([-1, 0, num_blocks - 1], np.int32), (len(lens), int(used.max(initial=0)) + 2)
    )
    first = 0
    for row, blocks in enumerate(used):
        table[row, :blocks] = ids[first : first + blocks]
        first += blocks
        if spec.window is not None:
            left_behind = max(0, lens[row] - counts[row] - spec.window + 1) // spec.block_size
            table[row, :left_behind] = -1
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    generator = torch.Generator(spec.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=spec.device)

    # In int8 a number is its token's scale times a whole number: bfloat16 would round it before.
    stored_dtype = torch.float32 if spec.kv_dtype == "int8" else getattr(torch, spec.dtype)

    def stored(*shape: int) -> Tensor:
        return held(normal(*shape), spec).to(stored_dtype)

    return Problem(
        spec,
        AttentionBatch(starts, lens, table),
        normal(int(starts[-1]), spec.num_heads, spec.head_dim).to(getattr(torch, spec.dtype)),
        [stored(n, spec.num_kv_heads, spec.head_dim) for n in lens.tolist()],
        [stored(n, spec.num_kv_heads, spec.v_head_dim) for n in lens.tolist()],
        normal(spec.num_heads) if spec.has_sinks else None,
        num_blocks,
    )


def held(numbers: Tensor, spec: AttentionSpec) -> Tensor:
    """Numbers that the KV dtype holds exactly, close to normal ones. For int8 whole multiples of
    1 / 32, of which the largest of each token and head becomes 127: its scale is 1 / 32."""
    if spec.kv_dtype != "int8":
        return numbers.to(getattr(torch, spec.kv_dtype))
    counts = (32 * numbers).round().clamp(-127, 127)
    largest = counts.abs().argmax(-1, keepdim=True)
    counts.scatter_(-1, largest, 127 * counts.gather(-1, largest).sign())
    return counts / 32


def hide_needles(problem: Problem, places: Sequence[int]) -> None:
    """Give the key at ``places[row]`` nearly all the weight, for whichever query can see it."""
    spec = problem.spec
    edges = problem.batch.query_start_loc.tolist()
    group = spec.num_heads // spec.num_kv_heads
    for row, place in enumerate(places):
        keys = problem.keys[row]
        direction = torch.nn.functional.normalize(keys[place].float(), dim=-1)
        direction *= math.sqrt(spec.head_dim)  # so that other keys score as usual
        score = math.log(len(keys)) + NEEDLE_MARGIN
        needle = direction * (score / (spec.scale * spec.head_dim))
        if spec.kv_dtype != "int8":  # whose scales take on any factor
            needle = held(needle, spec)
        keys[place] = needle.to(keys.dtype)
        problem.q[edges[row] : edges[row + 1]] = direction.repeat_interleave(group, 0).to(
            problem.q.dtype
        )


def rows_of(problem: Problem, rows: Sequence[int]) -> Problem:
    """The same rows in another batch, out of the same pool."""
    edges = problem.batch.query_start_loc
    parts = [problem.q[edges[row] : edges[row + 1]] for row in rows]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    batch = AttentionBatch(
        starts, problem.batch.seq_lens[list(rows)], problem.batch.block_table[list(rows)]
    )
    return replace(
        problem,
        batch=batch,
        q=torch.cat(parts),
        keys=[problem.keys[row] for row in rows],
        values=[problem.values[row] for row in rows],
    )


def cut_to(problem: Problem, seq_lens: NDArray[np.int32]) -> Problem:
    """The same rows when they were shorter, out of the same pool."""
    return replace(
        problem,
        batch=replace(problem.batch, seq_lens=seq_lens),
        keys=[k[:n] for k, n in zip(problem.keys, seq_lens.tolist(), strict=True)],
        values=[v[:n] for v, n in zip(problem.values, seq_lens.tolist(), strict=True)],
    )


def make_pool(
    candidate: Candidate, backend: Backend, problem: Problem, *, fill: float = math.nan
) -> tuple[Tensor, Tensor]:
    """A pool in the candidate's layout: ``fill`` but for the rows' keys and values."""
    k_cache, v_cache = filled_pool(candidate, problem.spec, problem.num_blocks, fill)
    for row, n in enumerate(problem.batch.seq_lens.tolist()):
        write_tokens(backend, problem, (k_cache, v_cache), row, 0, n)
    return k_cache, v_cache


def filled_pool(
    candidate: Candidate, spec: AttentionSpec, num_blocks: int, fill: float = math.nan
) -> tuple[Tensor, Tensor]:
    """A pool of one number, NaN or 0. Of int8s the scales among them are NaN: a float32 of four
    bytes of -1 is one."""
    layout = candidate.kv_layout(spec, num_blocks)
    if layout.dtype == "int8" and math.isnan(fill):
        fill = -1
    k_cache, v_cache = (
        torch.full(shape, fill, dtype=getattr(torch, layout.dtype), device=spec.device)
        for shape in (layout.k_shape, layout.v_shape)
    )
    return k_cache, v_cache


def write_tokens(
    backend: Backend,
    problem: Problem,
    pool: tuple[Tensor, Tensor],
    row: int,
    start: int,
    stop: int,
) -> None:
    """Store a row's tokens ``start : stop``, but for those that the window has left behind."""
    position = np.arange(start, stop)
    block = problem.batch.block_table[row, position // problem.spec.block_size]
    live = block >= 0
    slots = (block * problem.spec.block_size + position % problem.spec.block_size)[live]
    first = stop - len(slots)
    if first < stop:
        k, v = problem.keys[row][first:stop], problem.values[row][first:stop]
        backend.write(k, v, *pool, torch.from_numpy(slots).to(problem.spec.device))


def solve(backend: Backend, problem: Problem, pool: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Plan and run."""
    return backend.run(problem.q, *pool, backend.plan(problem.batch), problem.sinks)


def exact(problem: Problem) -> tuple[Tensor, Tensor]:
    """``out`` [T, H, Dv] and ``lse`` [T, H] in float64, by the definition."""
    spec = problem.spec
    group = spec.num_heads // spec.num_kv_heads
    edges = problem.batch.query_start_loc.tolist()
    out = problem.q.new_zeros(len(problem.q), spec.num_heads, spec.v_head_dim, dtype=torch.float64)
    lse = torch.full_like(out[..., 0], -math.inf)
    for row, (k, v) in enumerate(zip(problem.keys, problem.values, strict=True)):
        tokens = slice(edges[row], edges[row + 1])
        ends = torch.arange(tokens.stop - tokens.start, device=k.device)[:, None]
        ends = ends + 1 + len(k) - len(ends)  # of what each query sees
        key = torch.arange(len(k), device=k.device)
        hidden = key >= ends
        if spec.window is not None:
            hidden |= key < ends - spec.window
        hidden = hidden.repeat_interleave(group, 0)
        for kv_head in range(spec.num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            queries = problem.q[tokens, heads].flatten(0, 1).double()
            scores = queries @ k[:, kv_head].double().T * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores.masked_fill_(hidden, -math.inf)
            values = v[:, kv_head].double()
            if problem.sinks is not None:  # one more key, whose value is zero
                sink = problem.sinks[heads].double().repeat(len(scores) // group)[:, None]
                scores = torch.cat((scores, sink), 1)
                values = torch.cat((values, values.new_zeros(1, spec.v_head_dim)))
            if scores.shape[1]:
                rows_out = scores.softmax(-1) @ values
                out[tokens, heads] = rows_out.view(-1, group, spec.v_head_dim)
                lse[tokens, heads] = scores.logsumexp(-1).view(-1, group)
    return out, lse
