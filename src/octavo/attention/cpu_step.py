"""Attention on a CPU as calls of a program: the plan of a step, and the calls that read it.

The cpu runtime binds once, at load, for each layer

    rope_write_call -> decode_calls (rows of one token) -> prefill_call (longer rows)

and fills each KV group's :class:`CpuPlan` at each step, before the program runs. What varies from
step to step is reached through ``CpuPlan.header``, whose address never changes. Each call deals its
items out by itself; a call without rows of its kind returns at once. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.attention.spec import AttentionSpec
from octavo.attention.splits import SplitCost, SplitPlan, plan_splits
from octavo.kernels.attention_plan.cpu import HEADER
from octavo.kernels.kv_store.cpu import KV_BYTES
from octavo.kernels.levels import level, pairs_pay
from octavo.kernels.paged_prefill.cpu import prefill_op, prefill_scratch_bytes, query_tile
from octavo.kernels.paged_prefill.cpu_products import AMX, PAIRS
from octavo.kernels.program import PAIR_OF_LINES, Call, buffer
from octavo.kernels.rope_write.cpu import rope_write, spread_heads
from octavo.kernels.split_attention.cpu import attend_op, attend_scratch_bytes, merge

# Another segment costs what so many tokens take to read. Provisional: measured when an item was one
# KV head, not since it takes all of them.
COST = SplitCost(min_tokens=128, merge_tokens=16)
# 16-lane sums that the registers hold beside what else they must.
_ROOM = {"amx": 20, "vnni": 20, "avxvnni": 6, "avx2": 6, "plain": 6}
REPLAN = 16  # tokens of the longest row for which a plan serves
_NO_TILES = np.empty((0, 4), np.int32)


class CpuPlan:
    """Where one KV group's rows lie and how they are cut, for one step after the other.

    ``spec`` is that of the group's decode layers (its prefill spec differs in ``phase`` alone);
    ``num_threads`` is the number of the team's threads.
    """

    num_splits: NDArray[np.int32]  # [R], segments of each decode row
    part_out: NDArray[np.float32]  # [S, H, Dv], their segments' partials
    part_m: NDArray[np.float32]  # [S, H]
    part_l: NDArray[np.float32]  # [S, H]

    def __init__(self, spec: AttentionSpec, num_threads: int) -> None:
        self.spec = spec
        self.num_threads = num_threads
        self.header = np.zeros(1, HEADER)  # neither moves nor grows
        self._arrays: dict[str, NDArray[Any]] = {}  # that it names, by field
        self._partials = np.empty(0, np.float32)
        self._planned_for: NDArray[np.int32] | None = None  # lengths of the rows that were cut
        scratch_bytes = -(-_scratch_bytes(spec) // PAIR_OF_LINES) * PAIR_OF_LINES
        # Zeros: rows of padding are multiplied too, and denormals would take a CPU a hundred times
        # as long.
        self._scratch = buffer(num_threads * scratch_bytes)
        self.header["scratch"] = self._scratch.ctypes.data
        self.header["scratch_bytes"] = scratch_bytes

    @property
    def splits(self) -> SplitPlan:
        """The cuts of the decode rows of the step that was filled last."""
        row, start, stop, number = self._segments.T
        starts, stops = np.empty_like(start), np.empty_like(stop)
        starts[number], stops[number] = start, stop
        lens = np.zeros(len(self.num_splits), np.int64)
        np.maximum.at(lens, row, stop)
        return replace(self._planned, starts=starts, stops=stops, seq_lens=lens)

    def fill(
        self,
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        num_decodes: int,
        block_table: NDArray[np.int32],
        slot_mapping: NDArray[np.int32] | None = None,
        splits: SplitPlan | None = None,
    ) -> None:
        """Plan a step: the arguments are a StepBatch's fields, the table and the slots those of
        this KV group. The first ``num_decodes`` rows have one token each, the others any number.
        The arrays are read in place until the next step is filled. ``splits`` cuts the decode rows
        elsewhere than the spec's mode would."""
        if splits is None:
            self._cut(seq_lens[:num_decodes])
        else:
            self._planned_for = None
            self._take(splits)
        self._point(
            slot_mapping=np.empty(0, np.int32) if slot_mapping is None else slot_mapping,
            block_table=block_table,
        )
        tiles = _tiles(self.spec, query_start_loc, seq_lens, num_decodes)
        self._point(tiles=tiles)
        self.header["num_tiles"] = len(tiles)
        self.header["num_tokens"] = query_start_loc[-1]
        self.header["num_decodes"] = num_decodes
        self.header["table_width"] = block_table.shape[1]

    def follow(
        self, seq_lens: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """What changes in the steps that follow the one just filled, if the same rows decode on
        under the same plan: arrays that the header names, and their values step by step.
        ``seq_lens`` and ``slots`` int32 [steps, R]. In a window nothing may follow."""
        rows, _, last = self._ends
        segments = np.repeat(self._segments[None], len(seq_lens), axis=0)
        segments[:, last, 2] = seq_lens[:, rows]
        self._point(slot_mapping=self._arrays["slot_mapping"].copy())
        return [(self._segments, segments), (self._arrays["slot_mapping"], slots)]

    def _cut(self, lens: NDArray[np.int32]) -> None:
        """Cut the decode rows. Where to cut is decided every ``REPLAN`` tokens of the longest row;
        in between the last segments grow, and in a window the first ones shrink. So the cuts hang
        on the lengths only, and most steps plan nothing."""
        spec = self.spec
        stretch = spec.split_mode == "auto" and len(lens) > 0
        past = (int(lens.max()) - 1) % REPLAN if stretch else 0
        planned_for = np.maximum(lens - past, np.minimum(lens, 1))
        if self._planned_for is None or not np.array_equal(planned_for, self._planned_for):
            self._planned_for = planned_for
            splits = plan_splits(
                planned_for,
                num_kv_heads=1,  # an item takes all heads of its tokens
                block_size=spec.block_size,
                num_cores=self.num_threads,
                mode=spec.split_mode,
                split_tokens=spec.split_tokens,
                window=spec.window,
                cost=COST,
            )
            self._take(splits)
        rows, first, last = self._ends
        self._segments[last, 2] = lens[rows]
        if spec.window is not None:
            self._segments[first, 1] = np.maximum(lens[rows] - spec.window, 0)

    def _take(self, splits: SplitPlan) -> None:
        self._planned, self.num_splits = splits, splits.num_splits
        self._segments, places = _segments(splits)
        edges = splits.row_start
        rows = np.flatnonzero(self.num_splits)  # those with keys, and their first and last segments
        self._ends = rows, places[edges[rows]], places[edges[rows + 1] - 1]
        self._make_partials(len(splits.starts))
        self._point(
            segments=self._segments,
            row_start=edges,
            part_out=self.part_out,
            part_m=self.part_m,
            part_l=self.part_l,
        )
        self.header["num_segments"] = len(splits.starts)

    def _point(self, **arrays: NDArray[Any]) -> None:
        for field, array in arrays.items():
            array = self._arrays[field] = np.ascontiguousarray(array)
            self.header[field] = array.ctypes.data

    def _make_partials(self, num_segments: int) -> None:
        heads, width = self.spec.num_heads, self.spec.v_head_dim
        count = num_segments * heads
        if len(self._partials) < count * (width + 2):
            self._partials = np.empty(count * (width + 2), np.float32)
        out, m, l = np.split(self._partials[: count * (width + 2)], (count * width, -count))
        self.part_out = out.reshape(num_segments, heads, width)
        self.part_m, self.part_l = (x.reshape(num_segments, heads) for x in (m, l))


def rope_write_call(
    spec: AttentionSpec,
    plan: CpuPlan,
    *,
    qkv: NDArray[np.float32],
    q: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    rotary_dim: int,
    qk_norm: NDArray[np.float32] | None = None,
    norm_eps: float = 0.0,
) -> Call:
    """QK-norm, rotation, and the write to the pool, of all the step's tokens.

    ``qkv`` [T, (H + 2 Hkv) * D]: its keys are rotated in place. ``q`` [T, H, D] gets the rotated
    queries; attention scales them. ``cos`` and ``sin`` [T, rotary_dim / 2] are the rows of the
    tokens' positions, ``qk_norm`` [H + Hkv, D] the norms' weights. Buffers may be longer than T.
    """
    if qk_norm is not None and spec.kv_dtype == "int8":
        qk_norm = balance(qk_norm, spec.num_kv_heads, rotary_dim)
    return rope_write.bind(
        plan=plan.header,
        qkv=qkv,
        q=q,
        cos=cos,
        sin=sin,
        qk_norm=0 if qk_norm is None else qk_norm,
        k_cache=k_cache,
        v_cache=v_cache,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=rotary_dim,
        block_size=spec.block_size,
        kv_bytes=KV_BYTES[spec.kv_dtype],
        spread=_spread(spec, qk_norm is not None),
        spread_values=_spread(spec),
        eps=norm_eps,
    )


def balance(
    qk_norm: NDArray[np.float32], num_kv_heads: int, rotary_dim: int
) -> NDArray[np.float32]:
    """Weights of norms [H + Hkv, D] under which every element of a key is as large as those of its
    queries, and scores are what they were: what keys are multiplied by, queries are divided by.

    A key whose large elements meet small ones of queries would be rounded for their sake, and the
    error meets all of a query. Of all factors these make the error of scores least, where the
    spread makes that of all elements alike. Elements that are rotated together get one factor.
    """
    keys = qk_norm[-num_kv_heads:, None]  # [Hkv, 1, D]
    queries = qk_norm[:-num_kv_heads].reshape(num_kv_heads, -1, qk_norm.shape[1])
    squares = np.stack([np.square(x).mean(1, keepdims=True) for x in (queries, keys)])
    first, second = np.split(squares[..., :rotary_dim], 2, axis=-1)
    first[:] = second[:] = (first + second) / 2
    squares += 1e-6 * squares.mean(-1, keepdims=True) + 1e-30  # a weight may be 0
    factors = (squares[0] / squares[1]) ** 0.25
    shape = -1, qk_norm.shape[1]
    return np.concatenate([(queries / factors).reshape(shape), (keys * factors).reshape(shape)])


def restore_calls(
    spec: AttentionSpec, *, count: NDArray[np.int64], out: NDArray[np.float32]
) -> list[Call]:
    """What is left to do to attention's ``out`` [T, H, D], T at ``count``, where
    :func:`rope_write_call` has spread the values."""
    heads, width, size = spec.num_heads, spec.head_dim, _spread(spec)
    call = spread_heads.bind(count=count, x=out, num_heads=heads, head_dim=width, size=size)
    return [call] if size > 0 else []


def _spread(spec: AttentionSpec, has_norm: bool = False) -> int:
    """Over how many elements of a head large ones are spread before they are rounded, 0: not at
    all. For int8 always, for bfloat16 where the numbers are normed: the norm's weights may be large
    for a few (in Gemma 3 ten times the rest)."""
    rounds = spec.kv_dtype == "int8" or (spec.kv_dtype == "bfloat16" and has_norm)
    return spec.head_dim & -spec.head_dim if rounds else 0  # the largest power of two in it


def decode_calls(
    spec: AttentionSpec,
    plan: CpuPlan,
    *,
    q: NDArray[np.float32],
    out: NDArray[np.float32],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    lse: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> tuple[Call, Call]:
    """attend and merge, for the rows with one token: ``q`` [T, H, D] as rope_write leaves it,
    ``out`` [T, H, Dv], of both the rows ``0 : num_decodes``, ``lse`` [T, H] where it is wanted;
    ``sinks`` [H]. The pools are numpy arrays as ``CpuCandidate.kv_layout`` describes them."""
    attend = attend_op(
        spec.num_heads // spec.num_kv_heads,
        spec.head_dim,
        spec.v_head_dim,
        KV_BYTES[spec.kv_dtype],
        _ROOM[level()],
    )
    return (
        attend.bind(
            plan=plan.header,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
        ),
        merge.bind(
            plan=plan.header,
            num_heads=spec.num_heads,
            v_head_dim=spec.v_head_dim,
            sinks=0 if sinks is None else sinks,
            out=out,
            lse=0 if lse is None else lse,
        ),
    )


def prefill_call(
    spec: AttentionSpec,
    plan: CpuPlan,
    *,
    q: NDArray[np.float32],
    out: NDArray[np.float32],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    lse: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> Call:
    """Causal attention for the tokens of all other rows, from and into the same buffers. These are
    float32 whatever ``spec.dtype``: bfloat16 says that queries may be rounded to it."""
    prefill = prefill_op(
        spec.num_heads // spec.num_kv_heads,
        spec.head_dim,
        spec.v_head_dim,
        KV_BYTES[spec.kv_dtype],
        _prefill_room(spec),
    )
    return prefill.bind(
        plan=plan.header,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        out=out,
        lse=0 if lse is None else lse,
        sinks=0 if sinks is None else sinks,
        num_kv_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        window=spec.window or 0,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
    )


def _prefill_room(spec: AttentionSpec) -> int:
    """How prefill's products are made. Queries that are bfloat16s, or may be rounded to them, leave
    weights no more bits either, which pays on some CPUs."""
    if spec.kv_dtype != "float32" and level() == "amx":
        return AMX
    if spec.kv_dtype != "float32" and spec.dtype == "bfloat16" and pairs_pay():
        return PAIRS
    return _ROOM[level()]


def _scratch_bytes(spec: AttentionSpec) -> int:
    group, kv_bytes = spec.num_heads // spec.num_kv_heads, KV_BYTES[spec.kv_dtype]
    widths = spec.head_dim, spec.v_head_dim
    return max(
        attend_scratch_bytes(spec.num_heads, spec.num_kv_heads, *widths, kv_bytes),
        prefill_scratch_bytes(group, *widths, kv_bytes),
    )


def _tiles(
    spec: AttentionSpec,
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    num_decodes: int,
) -> NDArray[np.int32]:
    """int32 [tiles, 4]: row, first token, number of tokens and position of the first, of the tiles
    of the rows behind those that decode; those with the most to do come first."""
    if num_decodes == len(seq_lens):
        return _NO_TILES
    tile = query_tile(spec.num_heads // spec.num_kv_heads)
    starts = query_start_loc[num_decodes:-1]
    lens = np.diff(query_start_loc[num_decodes:])
    counts = -(-lens // tile)
    rows = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = nth * tile
    positions = (seq_lens[num_decodes:] - lens)[rows] + offsets
    sizes = np.minimum(lens[rows] - offsets, tile)
    order = np.argsort(-positions - sizes, kind="stable")
    columns = rows + num_decodes, starts[rows] + offsets, sizes, positions
    return np.stack(columns, axis=1)[order].astype(np.int32)


def _segments(splits: SplitPlan) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """int32 [S, 4]: row, start, stop and number of each segment, longest first; and where the
    segment of each number is among them."""
    rows = np.repeat(np.arange(len(splits.seq_lens)), splits.num_splits)
    order = np.argsort(splits.starts - splits.stops, kind="stable")
    columns = rows[order], splits.starts[order], splits.stops[order], order
    return np.stack(columns, axis=1).astype(np.int32), np.argsort(order)
