"""Causal prefill over a paged cache, for CUDA through Triton.

The newest tokens of each row attend to the row's whole history, their own keys included, which
are in the cache already: whole prompts, chunks after a cached prefix, and single tokens alike. A
block takes ``rows`` consecutive (token, query head) pairs of one row and one KV head, packed
tightly, so that no group size wastes any, and reads the keys they may see. Keys that all of them
see need no mask; only the tiles at the diagonal and at the window's edge have one. Softmax is
the online one of FlashAttention 2 (Dao 2023).

Tiles of keys begin at absolute multiples of their length, and a tile that a query sees nothing of
changes no bit of it: what a query gets hangs on its own history, not on the chunk it comes in.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.spec import AttentionSpec
from octavo.kernels.split_attention.triton_kernels import block_of, cap_scores, slot_of
from octavo.kernels.split_attention.triton_partials import finish
from octavo.kernels.triton_launch import attention_constants, in_base_2, outputs


@dataclass(frozen=True)
class PrefillTuning:
    """``rows`` (token, head) pairs a block, ``tokens`` keys at a time; ``registers`` a thread at
    most, where Triton would take so many that a multiprocessor holds one block less."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    registers: int | None = None


def default_prefill_tuning(spec: AttentionSpec) -> PrefillTuning:
    """The fastest on a Hopper SM (bench/LOG.md), from the spec alone, as the bits depend on it.
    Short rows want two blocks that take turns at waiting, and little that is masked at the
    diagonal."""
    head_dim = max(spec.head_dim, spec.v_head_dim)
    if spec.dtype == "float32":  # multiplied in fp32, without tensor cores
        side = 32 if head_dim <= 64 else 16
        return PrefillTuning(rows=side, tokens=side, num_warps=4, num_stages=2)
    if head_dim <= 64:
        return PrefillTuning(rows=128, tokens=128, num_warps=8, num_stages=2)
    if head_dim <= 128:
        return PrefillTuning(rows=128, tokens=32, num_warps=8, num_stages=3, registers=128)
    return PrefillTuning(rows=128, tokens=32, num_warps=8, num_stages=2)


def paged_prefill(
    spec: AttentionSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tuning: PrefillTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of T query tokens in R rows.

    ``q`` [T, H, D]; ``k_cache`` [blocks, block_size, Hkv, D] and ``v_cache`` [blocks, block_size,
    Hkv, Dv], innermost dimension contiguous; ``block_table`` [R, any] int32, of which only entries
    of blocks that hold visible keys are read; ``seq_lens`` [R] and ``query_start_loc`` [R + 1]
    int32, on the device: row ``r`` owns tokens ``query_start_loc[r] : query_start_loc[r + 1]``,
    the newest of its ``seq_lens[r]``. Tokens past ``query_start_loc[R]`` are padding and stay
    unwritten. ``sinks`` [H].

    Returns ``out`` [T, H, Dv] in q's dtype and ``lse`` [T, H] fp32. Launches only.
    """
    out, lse = outputs(spec, q, out, lse)
    num_tokens, num_rows = len(q), len(seq_lens)
    if num_tokens == 0:
        return out, lse
    tuning = tuning or default_prefill_tuning(spec)
    group = spec.num_heads // spec.num_kv_heads
    # Each row may end in a tile that isn't full; the blocks that are too many end at once.
    most_tiles = num_tokens * group // tuning.rows + min(num_rows, num_tokens)
    limit = {} if tuning.registers is None else {"maxnreg": tuning.registers}
    _prefill_kernel[(most_tiles * spec.num_kv_heads,)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        sinks,
        out,
        lse,
        *in_base_2(spec),
        num_rows,
        *q.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
        **attention_constants(spec, q, k_cache, v_cache, num_rows),
        ROWS=tuning.rows,
        TOKENS=tuning.tokens,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **limit,
    )
    return out, lse


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start_loc,
    sinks,
    out,
    lse,
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    num_rows,
    stride_qt,
    stride_qh,
    stride_table,
    stride_ot,
    stride_oh,
    K_STRIDES: tl.constexpr,  # of block, token and head
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid: (upper bound of tiles of queries * Hkv,), a tile's heads beside one another."""
    row_ids = tl.arange(0, BLOCK_ROWS)
    starts = tl.load(query_start_loc + row_ids, mask=row_ids < num_rows, other=0)
    ends = tl.load(query_start_loc + row_ids + 1, mask=row_ids < num_rows, other=0)
    tiles = tl.cdiv((ends - starts) * GROUP, ROWS)
    tile_ends = tl.cumsum(tiles, 0)
    # The last tiles have the longest histories, so they go first, of all heads: the short ones fill
    # up what is left.
    tile = tl.sum(tiles, 0) - 1 - tl.program_id(0) // NUM_KV_HEADS
    if tile >= 0:
        row = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        tile -= tl.sum(tl.where(row_ids < row, tiles, 0), 0)
        head = tl.program_id(0) % NUM_KV_HEADS
        first_token = tl.load(query_start_loc + row)
        num_queries = tl.load(query_start_loc + row + 1) - first_token
        prefix = tl.load(seq_lens + row) - num_queries

        pair = tile * ROWS + tl.arange(0, ROWS)
        query = pair // GROUP
        heads = head * GROUP + pair % GROUP
        valid = query < num_queries
        positions = prefix + query
        oldest_query = prefix + tile * ROWS // GROUP
        newest_query = prefix + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, num_queries - 1)
        stop = tl.maximum(newest_query + 1, 0)
        oldest_key = tl.maximum(oldest_query - WINDOW + 1, 0) if WINDOW else 0
        start = oldest_key // TOKENS * TOKENS
        # All queries of the tile see the keys from plain_start up to plain_stop.
        plain_start = start
        if WINDOW:
            plain_start += (
                tl.cdiv(tl.maximum(newest_query - WINDOW + 1 - start, 0), TOKENS) * TOKENS
            )
        plain_stop = start + tl.maximum(oldest_query + 1 - start, 0) // TOKENS * TOKENS
        plain_start = tl.minimum(plain_start, start + tl.cdiv(stop - start, TOKENS) * TOKENS)
        plain_stop = tl.maximum(plain_start, plain_stop)

        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        tokens = (first_token + query).to(tl.int64)
        queries = tl.load(
            q + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :],
            mask=valid[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            queries = queries.to(tl.float32)
        table = block_table + row.to(tl.int64) * stride_table
        k_head = k_cache + head.to(tl.int64) * K_STRIDES[2]
        v_head = v_cache + head.to(tl.int64) * V_STRIDES[2]
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        for part in tl.static_range(0 if WINDOW else 1, 3):
            if part == 0:
                a, b = start, plain_start
            elif part == 1:
                a, b = plain_start, plain_stop
            else:
                a, b = plain_stop, stop
            acc, m, l = _attend(
                acc,
                m,
                l,
                queries,
                positions,
                a,
                b,
                oldest_key,
                stop,
                table,
                k_head,
                v_head,
                scale,
                soft_cap,
                K_STRIDES,
                V_STRIDES,
                HEAD_DIM,
                V_HEAD_DIM,
                BLOCK_SIZE,
                WINDOW,
                SOFT_CAP,
                TOKENS,
                BLOCK_D,
                BLOCK_DV,
                part != 1,
                WIDEN,
            )
        outs = out + tokens * stride_ot + heads * stride_oh
        lses = lse + tokens * (NUM_KV_HEADS * GROUP) + heads
        finish(acc, m, l, sinks, heads, outs, lses, valid, dv, V_HEAD_DIM, SINKS)


@triton.jit
def _attend(
    acc,
    m,
    l,
    queries,
    positions,
    start,
    stop,
    first,
    last,
    table,
    k_head,
    v_head,
    scale,
    soft_cap,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Online softmax over keys ``start`` to ``stop``, whole tiles of them unless ``MASKED``; no
    key before ``first`` or from ``last`` on is touched. Products and sums are joined by hand, so
    that tiles with a mask and without are rounded alike."""
    t = tl.arange(0, TOKENS)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    keys = start + t
    block = tl.load(
        table + block_of(keys, BLOCK_SIZE), mask=_held(keys, first, last, WINDOW), other=0
    )
    for position in range(start, stop, TOKENS):
        keys = position + t
        slot = slot_of(keys, BLOCK_SIZE)
        block64 = block.to(tl.int64)
        k_mask = (d < HEAD_DIM)[None, :]
        v_mask = (dv < V_HEAD_DIM)[None, :]
        if MASKED:
            k_mask &= _held(keys, first, last, WINDOW)[:, None]
            v_mask &= _held(keys, first, last, WINDOW)[:, None]
        k = tl.load(
            k_head + (block64 * K_STRIDES[0] + slot * K_STRIDES[1])[:, None] + d[None, :],
            mask=k_mask,
            other=0.0,
        )
        v = tl.load(
            v_head + (block64 * V_STRIDES[0] + slot * V_STRIDES[1])[:, None] + dv[None, :],
            mask=v_mask,
            other=0.0,
        )
        ahead = keys + TOKENS
        block = tl.load(table + block_of(ahead, BLOCK_SIZE), mask=ahead < last, other=0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        # The scale is applied where the maximum is taken off, in one instruction.
        factor = scale
        if SOFT_CAP:
            scores = cap_scores(scores * scale, soft_cap)
            factor = 1.0
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys < last)[None, :]
            if WINDOW:
                seen &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1) * factor)
        # A row that has seen no key yet: any finite yardstick will do; -inf - (-inf) is NaN.
        yardstick = tl.where(new_m == float("-inf"), 0.0, new_m) if MASKED else new_m
        discount = tl.exp2(m - yardstick)
        weights = tl.exp2(tl.fma(scores, factor, -yardstick[:, None]))
        l = tl.fma(l, discount, tl.sum(weights, 1))
        acc = acc * discount[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        m = new_m
    return acc, m, l


@triton.jit
def _held(keys, first, last, WINDOW: tl.constexpr):
    """Which keys are there to be read: the window has left behind those before ``first``."""
    return (keys >= first) & (keys < last) if WINDOW else keys < last
