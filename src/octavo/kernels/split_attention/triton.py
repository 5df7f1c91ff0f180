"""Split-KV decode attention over a paged cache, for CUDA through Triton: tuning, scratch, launch.

One query token a row. ``triton_lines.py`` says how the work is shared out among the blocks: of
four warps each and with a merge kernel behind them, or in full batches of one
(``triton_warps.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.attention.spec import AttentionSpec
from octavo.kernels.split_attention.triton_kernels import split_kernel
from octavo.kernels.split_attention.triton_merge import merge_kernel
from octavo.kernels.split_attention.triton_warps import fits, warps_decode
from octavo.kernels.triton_launch import (
    attention_constants,
    dependent_launches,
    in_base_2,
    outputs,
    padded,
    power_of_2,
)

WHOLE_LINE = 1 << 30  # unit of ``off``: no line is longer
MAX_SHARES = 1 << 15  # the kernel finds its share in 32 bits
MERGE_BLOCKS = 1 << 10  # more of them cost more than they gain
FULL_BATCH = 256  # lines from which on blocks of one warp are faster
ENOUGH_WARPS = 2  # of them for each slot of the other kernel keep the memory busy


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut and compiled. ``tokens`` keys are read at a time. In ``fixed`` mode a
    line has at most ``leaves`` leaves, and ``fold`` leaves are a group. In ``auto`` mode no line
    is cut that is at most 1 / ``uncut`` of a slot's work. ``registers`` a thread at most, where
    Triton would take so many that no block of the merge could wait beside the split kernel's.
    ``dependent`` lets the launch begin before the one in front of it has ended."""

    tokens: int
    num_warps: int
    num_stages: int
    leaves: int = 32
    fold: int = 4
    uncut: int = 4
    registers: int | None = None
    dependent: bool = True


def default_tuning(spec: AttentionSpec) -> Tuning:
    """A tile of K (or V) takes at most 16 KB, so that three of each fit twice in an SM of Hopper:
    two blocks with three buffers beat three with two; tiles of 8 KB and less fit four times. In
    ``fixed`` mode no tile may reach over the end of a leaf, and leaves, of which 32 for each of
    8 KV heads fill an H200, are more where KV heads are few."""
    itemsize = getattr(torch, spec.kv_dtype).itemsize
    token_bytes = padded(max(spec.head_dim, spec.v_head_dim)) * itemsize
    tokens = min(64, max(16, 16384 // token_bytes))
    registers = 112 if tokens * token_bytes <= 8192 else None
    leaves = 32
    if spec.split_mode == "fixed":
        tokens = min(tokens, spec.split_tokens & -spec.split_tokens)
        leaves = max(leaves, power_of_2(-(-256 // spec.num_kv_heads)))
    return Tuning(tokens, num_warps=4, num_stages=4, leaves=leaves, registers=registers)


@dataclass(frozen=True)
class Scratch:
    """Where partials wait for their merge; one per stream, shared by all layers. In ``fixed``
    mode the first ``line_places`` places are for the leaves of the first line, and so on."""

    out: Tensor  # [places, G, Dv], fp32: sums of weighted values, not divided yet
    m: Tensor  # [places, G], in base 2
    l: Tensor  # [places, G]
    counters: Tensor  # [lines] int32: partials of a line that are there, where blocks merge; zeros
    line_places: int


def make_scratch(
    spec: AttentionSpec,
    num_rows: int,
    max_tokens: int,
    num_slots: int,
    tuning: Tuning | None = None,
) -> Scratch:
    """Scratch for up to ``num_rows`` rows of up to ``max_tokens`` keys.

    In ``auto`` mode a block leaves at most two partials, whatever the lengths; in ``fixed`` mode
    there is one for each leaf at most.
    """
    tuning = tuning or default_tuning(spec)
    lines = num_rows * spec.num_kv_heads
    line_places = 0
    if spec.split_mode == "fixed":
        reach = max_tokens if spec.window is None else min(max_tokens, spec.window)
        leaves = min(tuning.leaves, -(-max(reach, 1) // spec.split_tokens))
        # A window may begin and end in the middle of a group.
        groups = -(-leaves // tuning.fold) + (spec.window is not None)
        line_places = groups * tuning.fold
        places = lines * line_places
    else:
        most = 2 * (lines + num_slots)  # of either kernel
        places = most if spec.split_mode == "auto" else 1
    shape = (places, spec.num_heads // spec.num_kv_heads)
    out, m, l = (
        torch.empty(*shape, *rest, dtype=torch.float32, device=spec.device)
        for rest in ((spec.v_head_dim,), (), ())
    )
    counters = torch.zeros(lines, dtype=torch.int32, device=spec.device)
    return Scratch(out, m, l, counters, line_places)


def num_shares(spec: AttentionSpec, num_rows: int, num_slots: int) -> int:
    """Size of the grid: as many shares for each line as for any other, so that in a batch of
    equal lengths no block has to work in two lines; or, where that would leave more than an eighth
    of the slots idle, as many as there are slots."""
    lines = num_rows * spec.num_kv_heads
    if spec.split_mode == "off":
        return min(lines, MAX_SHARES)
    shares = lines * max(1, num_slots // lines)
    waves = -(-shares // num_slots)
    return min(shares if 8 * shares >= 7 * waves * num_slots else num_slots, MAX_SHARES)


def resident_slots(spec: AttentionSpec, tuning: Tuning | None = None) -> int:
    """How many blocks of the kernel for ``spec`` the current GPU holds at once. Compiles it."""
    tuning = tuning or default_tuning(spec)
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
        make_scratch(spec, 1, 1, 1, tuning),
        1,
        tuning,
    )
    kernel = split_kernel.warmup(*arguments, **constants, grid=(1,))
    kernel._init_handles()
    gpu = torch.cuda.get_device_properties(spec.device)
    warps = kernel.metadata.num_warps
    # Registers are given to a warp in units of 256; each block takes 1 KB of shared memory over
    # its own.
    registers = getattr(gpu, "regs_per_multiprocessor", 65536)
    by_registers = registers // (warps * -(-kernel.n_regs * 32 // 256) * 256)
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
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token a row over its paged history.

    ``q`` [R, H, D]; ``k_cache`` [blocks, block_size, Hkv, D] and ``v_cache`` [blocks, block_size,
    Hkv, Dv], innermost dimension contiguous; ``block_table`` [R, any] int32, of which only entries
    of blocks that hold visible keys are read; ``seq_lens`` [R] int32, the new token included;
    neither of these two written by the kernel launched just before, nor any key or value but a
    row's newest; ``sinks`` [H]. ``num_slots`` is about how many blocks to use
    (:func:`resident_slots`). A row of length 0 gets zeros and ``lse`` -inf (its sink, where there
    is one). A ``tuning`` is one of the kernel of four warps, which then takes full batches, too.

    Returns ``out`` [R, H, Dv] in q's dtype and ``lse`` [R, H] fp32. Launches only: nothing waits
    for the device, so it can be captured.
    """
    out, lse = outputs(spec, q, out, lse)
    num_rows, num_heads = q.shape[:2]
    if num_rows == 0:
        return out, lse
    lines = num_rows * spec.num_kv_heads
    if tuning is None and lines >= FULL_BATCH and fits(spec):
        enough = ENOUGH_WARPS * num_slots
        if lines <= enough:  # a line gets half a piece more at most: so all pieces begin at once
            enough -= lines // 2
        warps_decode(
            spec,
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            sinks,
            out,
            lse,
            scratch=scratch,
            enough=enough,
        )
        return out, lse
    tuning = tuning or default_tuning(spec)
    shares = num_shares(spec, num_rows, num_slots)
    arguments, constants = _split_arguments(
        spec,
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        sinks,
        out,
        lse,
        scratch,
        num_slots,
        tuning,
    )
    split_kernel[(shares,)](*arguments, **constants)
    if spec.split_mode != "off":
        merge = _merge_constants(spec, tuning, -(-shares // lines))
        # A block costs a nanosecond, so where heads are many, one block has all columns of a head.
        blocks = max(1, MERGE_BLOCKS // (num_rows * num_heads))
        blocks = min(blocks, -(-spec.v_head_dim // merge["COLUMNS"]))
        shared = ("NUM_KV_HEADS", "GROUP", "V_HEAD_DIM", "WINDOW", "SINKS", "BLOCK_ROWS", "EARLY")
        merge_kernel[(num_rows, num_heads, blocks)](
            seq_lens,
            sinks,
            out,
            lse,
            scratch.out,
            scratch.m,
            scratch.l,
            shares,
            num_slots,
            num_rows,
            scratch.line_places,
            *out.stride()[:2],
            **{name: constants[name] for name in shared},
            **_cut_constants(spec, tuning),
            **merge,
            launch_pdl=dependent_launches(),
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
    num_slots: int,
    tuning: Tuning,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the split kernel is launched with, and what it is compiled for."""
    dependent = tuning.dependent and dependent_launches()
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
        *in_base_2(spec),
        num_slots,
        len(q),
        scratch.line_places,
        *q.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
    )
    constants = attention_constants(spec, q, k_cache, v_cache, len(q))
    constants |= _cut_constants(spec, tuning)
    constants |= {
        "DEPENDENT": dependent,
        "EARLY": spec.split_mode != "off" and dependent_launches(),
        "TOKENS": tuning.tokens,
        "BLOCK_G": padded(constants["GROUP"]),
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
        "launch_pdl": dependent,
    }
    if tuning.registers is not None:
        constants["maxnreg"] = tuning.registers
    return arguments, constants


def _cut_constants(spec: AttentionSpec, tuning: Tuning) -> dict[str, Any]:
    """What the split kernel and the merge kernel must agree on to find the same partials."""
    return {
        "UNIT": WHOLE_LINE if spec.split_mode == "off" else tuning.tokens,
        "FIXED": spec.split_mode == "fixed",
        "LEAF_TOKENS": spec.split_tokens,
        "MAX_LEAVES": tuning.leaves,
        "FOLD": tuning.fold,
        "UNCUT": tuning.uncut,
    }


def _merge_constants(spec: AttentionSpec, tuning: Tuning, shares_a_line: int) -> dict[str, int]:
    """The tiles of the merge, so small that its blocks can wait in an SM beside those of the split
    kernel. In ``fixed`` mode from the spec alone, as the bits depend on it."""
    columns = padded(spec.v_head_dim)
    if spec.split_mode == "fixed":
        groups = power_of_2(-(-tuning.leaves // tuning.fold))
        columns = min(max(16, 512 // groups), columns)
        return {
            "PARTIALS": groups,
            "COLUMNS": columns,
            "num_warps": max(1, groups * columns // 256),
        }
    # A line that is cut unevenly lies in one share more.
    partials = min(64, max(8, power_of_2(shares_a_line + 1)))
    columns = min(2048 // partials, columns)
    return {
        "PARTIALS": partials,
        "COLUMNS": columns,
        "num_warps": max(1, partials * columns // 512),
    }
