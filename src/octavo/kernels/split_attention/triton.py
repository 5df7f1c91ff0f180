"""Split-KV decode attention over a paged cache, for CUDA through Triton.

One query token a row. The history of every (row, KV head) is a line of *units* of consecutive
keys; all lines laid end to end, row by row and head by head, are the step's work. A grid of fixed
size shares it out: block ``i`` of ``n`` takes units ``i * U // n`` up to ``(i + 1) * U // n``, so
that a 128K row beside thirty-one short ones leaves no block idle, and the lengths are read on the
device, so that a captured CUDA graph stays right at every length (stream-K, Osama et al. 2023, on
the key axis of FlashDecoding, Dao et al. 2023).

The part of one line that falls into one block's share is a *segment*. A line that is one segment
is finished where it was read. Of any other, each segment leaves its partial (output, maximum,
weight sum) in scratch memory, and whichever block comes last merges them, in the order of their
keys. Modes differ in the unit: ``auto`` one tile of keys; ``off`` the whole line; ``fixed``
``split_tokens`` keys at absolute multiples, each unit a segment, so that a row's result depends
on nothing but the row.

Inside, scores are in base 2 (``exp2`` is one instruction); partials and ``lse`` are in base e.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.spec import AttentionSpec

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
WHOLE_LINE = 1 << 30  # unit of ``off``: no line is longer
# Triton's interpreter multiplies the raw bits of bf16 operands (3.6 to 3.9).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut and compiled. ``tokens`` keys are read at a time; a block isn't set to
    work for fewer than ``min_tiles`` of that; ``merge_kernel`` merges by a second launch instead
    of by the block that comes last."""

    tokens: int
    num_warps: int
    num_stages: int
    min_tiles: int = 1
    merge_kernel: bool = False


def default_tuning(spec: AttentionSpec) -> Tuning:
    """A tile of K (or V) takes at most 16 KB, so that two of each fit thrice in an SM of Hopper."""
    row = _padded(max(spec.head_dim, spec.v_head_dim)) * _itemsize(spec.kv_dtype)
    return Tuning(tokens=min(64, max(16, 16384 // row)), num_warps=4, num_stages=3)


@dataclass(frozen=True)
class Scratch:
    """Where partials wait for their merge; one per stream, shared by all layers.

    ``arrived`` counts the segments of each (row, KV head) that are done. It is zero between
    launches: whoever merges puts it back.
    """

    out: Tensor  # [segments, G, Dv], fp32
    m: Tensor  # [segments, G]
    l: Tensor  # [segments, G]
    arrived: Tensor  # [R * Hkv], int32


def make_scratch(spec: AttentionSpec, num_rows: int, max_tokens: int, num_slots: int) -> Scratch:
    """Scratch for up to ``num_rows`` rows of up to ``max_tokens`` keys.

    In ``auto`` mode a block leaves at most two partials, whatever the lengths; in ``fixed`` mode
    there is one for each ``split_tokens`` keys.
    """
    segments = 2 * num_slots
    if spec.split_mode == "fixed":
        reach = max_tokens if spec.window is None else min(max_tokens, spec.window)
        # A window may begin and end in the middle of a unit.
        units = triton.cdiv(max(reach, 1), spec.split_tokens) + (spec.window is not None)
        segments = num_rows * units * spec.num_kv_heads
    group = spec.num_heads // spec.num_kv_heads
    shape = (segments, group)
    return Scratch(
        torch.empty(*shape, spec.v_head_dim, dtype=torch.float32, device=spec.device),
        torch.empty(shape, dtype=torch.float32, device=spec.device),
        torch.empty(shape, dtype=torch.float32, device=spec.device),
        torch.zeros(num_rows * spec.num_kv_heads, dtype=torch.int32, device=spec.device),
    )


def resident_slots(spec: AttentionSpec, tuning: Tuning | None = None) -> int:
    """How many blocks of the kernel for ``spec`` the current GPU holds at once. Compiles it."""
    dtype, kv_dtype = getattr(torch, spec.dtype), getattr(torch, spec.kv_dtype)
    cache = (1, spec.block_size, spec.num_kv_heads)
    q = torch.empty(1, spec.num_heads, spec.head_dim, dtype=dtype, device=spec.device)
    one = torch.empty(1, 1, dtype=torch.int32, device=spec.device)
    arguments, constants = _split_arguments(
        spec,
        q,
        q.new_empty(*cache, spec.head_dim, dtype=kv_dtype),
        q.new_empty(*cache, spec.v_head_dim, dtype=kv_dtype),
        one,
        one[0],
        q.new_empty(spec.num_heads, dtype=torch.float32) if spec.has_sinks else None,
        q.new_empty(1, spec.num_heads, spec.v_head_dim),
        q.new_empty(1, spec.num_heads, dtype=torch.float32),
        make_scratch(spec, 1, 1, 1),
        tuning or default_tuning(spec),
    )
    kernel = _split_kernel.warmup(*arguments, **constants, KEEP_PARTIALS=False, grid=(1,))
    kernel._init_handles()
    gpu = torch.cuda.get_device_properties(spec.device)
    warps = kernel.metadata.num_warps
    # Registers are given to a warp in units of 256; each block takes 1 KB of shared memory over
    # its own.
    registers = getattr(gpu, "regs_per_multiprocessor", 65536)
    by_registers = registers // (warps * triton.cdiv(kernel.n_regs * 32, 256) * 256)
    by_memory = gpu.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024)
    by_threads = gpu.max_threads_per_multi_processor // (warps * 32)
    return int(gpu.multi_processor_count * max(1, min(by_registers, by_memory, by_threads, 32)))


def split_decode(
    spec: AttentionSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_slots: int,
    scratch: Scratch,
    sinks: Tensor | None = None,
    keep_partials: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token a row over its paged history.

    ``q`` [R, H, D]; ``k_cache`` [blocks, block_size, Hkv, D] and ``v_cache`` [blocks, block_size,
    Hkv, Dv], innermost dimension contiguous; ``block_table`` [R, any] int32, of which only entries
    of blocks that hold visible keys are read; ``seq_lens`` [R] int32, the new token included;
    ``sinks`` [H]. ``num_slots`` is the size of the grid (:func:`resident_slots`). A row of length 0
    gets zeros and ``lse`` -inf (its sink, where there is one). With ``keep_partials`` (``fixed``
    mode) every segment leaves its partial in ``scratch``, in the order row, KV head, segment: for
    the trace and the tests.

    Returns ``out`` [R, H, Dv] in q's dtype and ``lse`` [R, H] fp32. Launches only: nothing waits
    for the device, so it can be captured.
    """
    num_rows, num_heads = q.shape[:2]
    out = q.new_empty(num_rows, num_heads, spec.v_head_dim) if out is None else out
    lse = q.new_empty(num_rows, num_heads, dtype=torch.float32) if lse is None else lse
    if num_rows == 0:
        return out, lse
    tuning = tuning or default_tuning(spec)
    arguments, constants = _split_arguments(
        spec, q, k_cache, v_cache, block_table, seq_lens, sinks, out, lse, scratch, tuning
    )
    _split_kernel[(num_slots,)](*arguments, **constants, KEEP_PARTIALS=keep_partials)
    if tuning.merge_kernel and spec.split_mode != "off":
        _merge_kernel[(num_rows, num_heads)](
            seq_lens,
            sinks,
            out,
            lse,
            scratch.out,
            scratch.m,
            scratch.l,
            num_slots,
            num_rows,
            _unit_tokens(spec, tuning),
            *out.stride()[:2],
            **_line_constants(spec, tuning, num_rows),
            MERGE_SEGMENTS=_merge_segments(1, spec.v_head_dim),
            EARLY=not INTERPRETED,
            num_warps=4,
            launch_pdl=not INTERPRETED,
        )
    return out, lse


def _split_arguments(
    spec: AttentionSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scratch: Scratch,
    tuning: Tuning,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the split kernel is launched with, and what it is compiled for."""
    group = triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    arguments = (
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        sinks,
        out,
        lse,
        scratch.out,
        scratch.m,
        scratch.l,
        scratch.arrived,
        spec.scale * math.log2(math.e),
        (spec.soft_cap or 0.0) * math.log2(math.e),
        len(q),
        _unit_tokens(spec, tuning),
        *q.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
    )
    constants = _line_constants(spec, tuning, len(q)) | {
        "K_STRIDES": k_cache.stride()[:3],
        "V_STRIDES": v_cache.stride()[:3],
        "HEAD_DIM": spec.head_dim,
        "BLOCK_SIZE": spec.block_size,
        "SOFT_CAP": spec.soft_cap is not None,
        "MERGE_HERE": not tuning.merge_kernel,
        "EARLY": tuning.merge_kernel and not INTERPRETED,
        "TOKENS": tuning.tokens,
        "BLOCK_G": max(16, group),
        "BLOCK_D": _padded(spec.head_dim),
        "MERGE_G": group,
        "MERGE_SEGMENTS": _merge_segments(group, spec.v_head_dim),
        "WIDEN": INTERPRETED and q.dtype == torch.bfloat16,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
    }
    return arguments, constants


def _line_constants(spec: AttentionSpec, tuning: Tuning, num_rows: int) -> dict[str, Any]:
    """What the split kernel and the merge kernel must agree on to find the same segments."""
    return {
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "V_HEAD_DIM": spec.v_head_dim,
        "WINDOW": spec.window or 0,
        "SINKS": spec.has_sinks,
        "FIXED": spec.split_mode == "fixed",
        "MIN_UNITS": tuning.min_tiles if spec.split_mode == "auto" else 1,
        "BLOCK_DV": _padded(spec.v_head_dim),
        "BLOCK_ROWS": max(16, triton.next_power_of_2(num_rows)),
    }


def _unit_tokens(spec: AttentionSpec, tuning: Tuning) -> int:
    units = {"off": WHOLE_LINE, "auto": tuning.tokens, "fixed": spec.split_tokens}
    return units[spec.split_mode]


def _merge_segments(heads: int, v_head_dim: int) -> int:
    """Partials that a merge holds at once: 4,096 numbers, 32 registers a thread of four warps."""
    return max(1, 4096 // (heads * _padded(v_head_dim)))


def _padded(head_dim: int) -> int:
    """Blocks are powers of two, and a dot's sides at least 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


@triton.jit(do_not_specialize=["num_rows", "unit_tokens", "stride_table"])
def _split_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    sinks,
    out,
    lse,
    part_out,
    part_m,
    part_l,
    arrived,
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    num_rows,
    unit_tokens,
    stride_qr,
    stride_qh,
    stride_table,
    stride_or,
    stride_oh,
    K_STRIDES: tl.constexpr,  # of block, token and head: constants save a third of the loop
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    KEEP_PARTIALS: tl.constexpr,
    MERGE_HERE: tl.constexpr,
    EARLY: tl.constexpr,  # let the merge kernel start, and wait, before this one ends
    MIN_UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MERGE_G: tl.constexpr,
    MERGE_SEGMENTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid: (num_slots,). See the module's docstring."""
    if EARLY:
        gdc_launch_dependents()
    row_ids = tl.arange(0, BLOCK_ROWS)
    units = _units_of_rows(seq_lens, row_ids, num_rows, unit_tokens, WINDOW)
    row_ends = tl.cumsum(units, 0) * NUM_KV_HEADS
    total = tl.sum(units, 0) * NUM_KV_HEADS
    shares = tl.minimum(tl.num_programs(0), tl.maximum(total // MIN_UNITS, 1)).to(tl.int64)
    share = tl.program_id(0).to(tl.int64)
    unit = (share * total // shares).to(tl.int32)
    share_end = tl.where(share < shares, ((share + 1) * total // shares).to(tl.int32), unit)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    t = tl.arange(0, TOKENS)
    while unit < share_end:
        row = tl.sum((row_ends <= unit).to(tl.int32), 0)
        row_start = tl.sum(tl.where(row_ids < row, units, 0), 0) * NUM_KV_HEADS
        seq_len = tl.load(seq_lens + row)
        visible_from, first_unit, line_units = _line(seq_len, unit_tokens, WINDOW)
        head = (unit - row_start) // line_units
        line_start = row_start + head * line_units
        begin = unit - line_start
        end = tl.minimum(line_units, share_end - line_start)
        if FIXED:
            end = begin + 1
        segments = _segments_of_line(line_start, line_units, total, shares, FIXED)

        # From here on in keys: the segment is [position, stop).
        start = tl.maximum(visible_from, (first_unit + begin) * unit_tokens)
        stop = tl.minimum(seq_len, (first_unit + end) * unit_tokens)
        heads = head * GROUP + g
        row64 = row.to(tl.int64)
        query = tl.load(
            q + row64 * stride_qr + heads[:, None] * stride_qh + d[None, :],
            mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            query = query.to(tl.float32)
        table = block_table + row64 * stride_table
        k_head = k_cache + head.to(tl.int64) * K_STRIDES[2]
        v_head = v_cache + head.to(tl.int64) * V_STRIDES[2]
        m = tl.full([BLOCK_G], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
        # Block ids are fetched one tile ahead, or no K/V could be in flight while another tile is
        # worked on.
        keys = start + t
        block = tl.load(table + block_of(keys, BLOCK_SIZE), mask=keys < stop, other=0)
        for position in range(start, stop, TOKENS):
            keys = position + t
            valid = keys < stop
            slot = slot_of(keys, BLOCK_SIZE)
            block64 = block.to(tl.int64)
            k = tl.load(
                k_head + (block64 * K_STRIDES[0] + slot * K_STRIDES[1])[:, None] + d[None, :],
                mask=valid[:, None] & (d < HEAD_DIM)[None, :],
                other=0.0,
            )
            v = tl.load(
                v_head + (block64 * V_STRIDES[0] + slot * V_STRIDES[1])[:, None] + dv[None, :],
                mask=valid[:, None] & (dv < V_HEAD_DIM)[None, :],
                other=0.0,
            )
            ahead = keys + TOKENS
            block = tl.load(table + block_of(ahead, BLOCK_SIZE), mask=ahead < stop, other=0)
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            if SOFT_CAP:
                scores = cap_scores(scores, soft_cap)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_m = tl.maximum(m, tl.max(scores, 1))
            discount = tl.exp2(m - new_m)
            weights = tl.exp2(scores - new_m[:, None])
            l = l * discount + tl.sum(weights, 1)
            acc = acc * discount[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            m = new_m

        out_row = out + row64 * stride_or
        lse_row = lse + row64 * (NUM_KV_HEADS * GROUP)
        if segments == 1:
            outs = out_row + heads * stride_oh
            finish(acc, m, l, sinks, heads, outs, lse_row + heads, g < GROUP, dv, V_HEAD_DIM, SINKS)
        if (segments > 1) | KEEP_PARTIALS:
            place = unit.to(tl.int64) if FIXED else 2 * share + (begin == 0)
            part = place * GROUP + g
            tl.store(part_m + part, m * LN2, mask=g < GROUP)
            tl.store(part_l + part, l, mask=g < GROUP)
            tl.store(
                part_out + part[:, None] * V_HEAD_DIM + dv[None, :],
                acc / tl.where(l > 0, l, 1.0)[:, None],
                mask=(g < GROUP)[:, None] & (dv < V_HEAD_DIM)[None, :],
            )
        if MERGE_HERE:  # noqa: SIM102 (known when compiled)
            if segments > 1:
                # The barrier puts every thread's partial before the count that publishes it.
                tl.debug_barrier()
                before = tl.atomic_add(arrived + row64 * NUM_KV_HEADS + head, 1, sem="acq_rel")
                if before == segments - 1:
                    tl.store(arrived + row64 * NUM_KV_HEADS + head, 0)
                    _merge_line(
                        (part_out, part_m, part_l),
                        (line_start, segments, total, shares),
                        sinks,
                        head * GROUP,
                        tl.arange(0, MERGE_G),
                        out_row,
                        stride_oh,
                        lse_row,
                        dv,
                        GROUP,
                        V_HEAD_DIM,
                        SINKS,
                        FIXED,
                        MERGE_G,
                        BLOCK_DV,
                        MERGE_SEGMENTS,
                    )
        unit = line_start + end


@triton.jit(do_not_specialize=["num_slots", "num_rows", "unit_tokens"])
def _merge_kernel(
    seq_lens,
    sinks,
    out,
    lse,
    part_out,
    part_m,
    part_l,
    num_slots,
    num_rows,
    unit_tokens,
    stride_or,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MERGE_SEGMENTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (R, H). Merges the partials of one query head, where it has more than one."""
    row_ids = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    units = _units_of_rows(seq_lens, row_ids, num_rows, unit_tokens, WINDOW)
    total = tl.sum(units, 0) * NUM_KV_HEADS
    shares = tl.minimum(num_slots, tl.maximum(total // MIN_UNITS, 1)).to(tl.int64)
    row_start = tl.sum(tl.where(row_ids < row, units, 0), 0) * NUM_KV_HEADS
    _, _, line_units = _line(tl.load(seq_lens + row), unit_tokens, WINDOW)
    line_start = row_start + query_head // GROUP * line_units
    segments = _segments_of_line(line_start, line_units, total, shares, FIXED)
    if EARLY:
        gdc_wait()  # in every block, or this kernel could end before the one it follows
    if segments > 1:
        _merge_line(
            (part_out, part_m, part_l),
            (line_start, segments, total, shares),
            sinks,
            query_head // GROUP * GROUP,
            query_head % GROUP + tl.arange(0, 1),
            out + row.to(tl.int64) * stride_or,
            stride_oh,
            lse + row.to(tl.int64) * (NUM_KV_HEADS * GROUP),
            tl.arange(0, BLOCK_DV),
            GROUP,
            V_HEAD_DIM,
            SINKS,
            FIXED,
            1,
            BLOCK_DV,
            MERGE_SEGMENTS,
        )


@triton.jit
def _line(seq_len, unit_tokens, WINDOW: tl.constexpr):
    """The first visible key of a row, the unit it lies in, and the row's number of units: at
    least one, so that an empty row also has a block that writes its zeros."""
    visible_from = tl.maximum(seq_len - WINDOW, 0) if WINDOW else seq_len * 0
    first_unit = visible_from // unit_tokens
    return visible_from, first_unit, tl.maximum(tl.cdiv(seq_len, unit_tokens) - first_unit, 1)


@triton.jit
def _units_of_rows(seq_lens, row_ids, num_rows, unit_tokens, WINDOW: tl.constexpr):
    lens = tl.load(seq_lens + row_ids, mask=row_ids < num_rows, other=0)
    _, _, units = _line(lens, unit_tokens, WINDOW)
    return tl.where(row_ids < num_rows, units, 0)


@triton.jit
def _share_of(unit, total, shares):
    """The block whose share holds a unit: the last ``i`` with ``i * total // shares <= unit``."""
    return ((unit + 1) * shares - 1) // total


@triton.jit
def _segments_of_line(line_start, line_units, total, shares, FIXED: tl.constexpr):
    if FIXED:
        segments = line_units
    else:
        first = _share_of(line_start, total, shares)
        segments = (_share_of(line_start + line_units - 1, total, shares) - first + 1).to(tl.int32)
    return segments


@triton.jit
def _merge_line(
    parts,
    line,
    sinks,
    first_head,
    g,
    out_row,
    stride_oh,
    lse_row,
    dv,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The merge of ``attention/merge.py`` for query heads ``first_head + g``, over one line's
    partials in the order of their keys, a fixed number at a time: the same bits whatever else is
    in the batch."""
    part_out, part_m, part_l = parts
    line_start, segments, total, shares = line
    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    first_share = _share_of(line_start, total, shares)
    for i in range(0, segments, SEGMENTS):
        s = i + tl.arange(0, SEGMENTS)
        # A block's second place is for the line that its share ends in, its first for the line
        # that it begins in.
        place = line_start.to(tl.int64) + s if FIXED else 2 * (first_share + s) + (s == 0)
        part = place[:, None] * GROUP + g[None, :]
        mask = (s < segments)[:, None] & (g < GROUP)[None, :]
        # Past L1: another block of this multiprocessor may have left an older line there.
        part_max = tl.load(part_m + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(part_l + part, mask=mask, other=0.0, cache_modifier=".cg")
        values = tl.load(
            part_out + part[:, :, None] * V_HEAD_DIM + dv[None, None, :],
            mask=mask[:, :, None] & (dv < V_HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        part_max *= LOG2E
        new_m = tl.maximum(m, tl.max(part_max, 0))
        yardstick = tl.where(new_m == float("-inf"), 0.0, new_m)
        weights = tl.exp2(part_max - yardstick[None, :]) * part_sum
        discount = tl.exp2(m - yardstick)
        l = l * discount + tl.sum(weights, 0)
        acc = acc * discount[:, None] + tl.sum(values * weights[:, :, None], 0)
        m = new_m
    heads = first_head + g
    outs = out_row + heads * stride_oh
    finish(acc, m, l, sinks, heads, outs, lse_row + heads, g < GROUP, dv, V_HEAD_DIM, SINKS)


@triton.jit
def finish(
    acc,
    m,
    l,
    sinks,
    heads,
    outs,
    lses,
    valid,
    dv,
    V_HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the sink, as one more partial ``(0, sink, 1)``, divide, and write the answers of query
    ``heads`` to the rows at pointers ``outs`` and to pointers ``lses``. ``m`` is in base 2."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        new_m = tl.maximum(m, sink)
        discount = tl.exp2(m - new_m)
        l = l * discount + tl.exp2(sink - new_m)
        acc = acc * discount[:, None]
        m = new_m
    divisor = tl.where(l > 0, l, 1.0)
    tl.store(
        outs[:, None] + dv[None, :],
        (acc / divisor[:, None]).to(outs.dtype.element_ty),
        mask=valid[:, None] & (dv < V_HEAD_DIM)[None, :],
    )
    log_sum = tl.where(l > 0, (m + tl.log2(divisor)) * LN2, float("-inf"))
    tl.store(lses, log_sum, mask=valid)


@triton.jit
def cap_scores(scores, cap):
    """``cap * tanh(scores / cap)`` of base-2 scores and cap, by exp2 alone; right at both
    infinities."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def block_of(keys, BLOCK_SIZE: tl.constexpr):
    """Unsigned: a shift where the block size is a power of two."""
    return keys.to(tl.uint32) // BLOCK_SIZE


@triton.jit
def slot_of(keys, BLOCK_SIZE: tl.constexpr):
    return (keys.to(tl.uint32) % BLOCK_SIZE).to(tl.int64)
