"""QK-norm, rotation, cache write, split-KV attention and merge in one launch, for CUDA.

A block has a KV head of a row and an equal share of its history. What doesn't depend on the kernel
in front, the first tile of keys and values among it, is read before that kernel has ended. Behind
the wait, the head's queries, its new key and its new value are rows of one tile, normed and turned
together; the block whose share ends the history writes the new key and value to the cache. The last
block of a KV head to finish merges the partials, in the order of their keys.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.spec import AttentionSpec, Support
from octavo.kernels.gluon import INTERPRETED, async_copy, constexpr_function, gl, jit, mma_v2
from octavo.kernels.rope_attention.limits import NEEDS_HOPPER, refusal
from octavo.kernels.triton_launch import dependent_launches

PARTIALS = 32  # merged at a time, and of them
VALUES = 128  # in a thread: more would be spilled
MOST_SHARES = 32  # of a row, where its share doesn't depend on the others
FEW_SHARES = 4  # are merged faster by themselves
TILE_BYTES = 96 << 10  # of keys and values on their way: two blocks fit a multiprocessor


@dataclass(frozen=True)
class Cut:
    """How a step's history is cut: every row into ``splits`` shares of whole tiles of ``tokens``
    keys, or, with ``share``, after every ``share`` keys (more where its own length would make over
    ``MOST_SHARES`` shares) into up to ``splits`` of them. Right at every length (with ``share`` up
    to ``splits * share``, and at any in ``MOST_SHARES``); a CUDA graph is captured for one."""

    splits: int
    tokens: int
    num_warps: int
    num_stages: int
    share: int = 0


@dataclass(frozen=True)
class Scratch:
    """Where partials wait for their merge; one per stream, shared by all layers."""

    out: Tensor  # [places, D], fp32: sums of weighted values, not divided yet
    m: Tensor  # [places], in base 2
    l: Tensor  # [places]
    counters: Tensor  # [rows * KV heads]: finished blocks, int32; zero between launches


def supports(spec: AttentionSpec) -> Support:
    """Whether :func:`rope_attention` serves such steps."""
    if not INTERPRETED and not dependent_launches():
        return Support(False, NEEDS_HOPPER)
    reason = refusal(spec)
    return Support(not reason, reason)


def choose_cut(spec: AttentionSpec, num_rows: int, longest: int, num_sms: int = 132) -> Cut:
    """The cut for steps of ``num_rows`` rows whose longest has up to ``longest`` keys. Lengths are
    taken in powers of two and halfway between, so that a growing row meets few cuts.

    Measured on an H200 (bench/LOG.md, 2026-11-30): three blocks for two multiprocessors are best as
    long as all rows together have up to 12K keys, as every share more is one more partial to merge;
    above, two for each, as reading counts most.
    """
    if spec.split_mode != "auto":
        return _cut_as_told(spec, num_rows, longest, num_sms)
    longest = max(128, _rounded_up(min(longest, spec.window or longest)))
    lines = num_rows * spec.num_kv_heads
    few = num_rows * longest <= 12288
    splits = max(1, min((3 * num_sms // 2 if few else 2 * num_sms) // lines, -(-longest // 128)))
    if not few and longest < 1 << 16:
        splits = 1 << (splits.bit_length() - 1)  # equal shares of a power of two
    if 1024 < longest <= 1536:
        splits = min(splits, 8)
    share = -(-longest // splits)
    tokens = 128 if longest <= 1536 and share <= 192 and spec.head_dim <= 128 else 64
    stages = min(3, -(-share // tokens), _tiles_in_memory(spec, tokens))
    return Cut(splits, tokens, num_warps=4, num_stages=stages)


def _cut_as_told(spec: AttentionSpec, num_rows: int, longest: int, num_sms: int) -> Cut:
    """In ``off`` mode none; in ``fixed`` mode one that depends on the batch in what changes no bit:
    the number of shares, empty ones among them, and tiles on their way."""
    if spec.split_mode == "off":
        return Cut(1, 64, 4, min(3, _tiles_in_memory(spec, 64)))
    reach = min(longest, spec.window or longest)
    splits = min(MOST_SHARES, _power_of_2(-(-reach // spec.split_tokens)))
    # A window may begin in the middle of a share.
    splits += spec.window is not None
    tokens = 128 if spec.head_dim <= 128 else 64
    # Tiles beside one another are worth more in one block than in two, as long as there is room.
    one_a_multiprocessor = num_rows * spec.num_kv_heads * splits <= num_sms
    stages = min(2 if one_a_multiprocessor else 1, -(-spec.split_tokens // tokens))
    return Cut(splits, tokens, 4, stages, spec.split_tokens)


def most_splits(spec: AttentionSpec, num_sms: int) -> int:
    """What no cut of :func:`choose_cut` has more of."""
    if spec.split_mode == "auto":  # two blocks for each multiprocessor
        return 2 * num_sms
    return 1 if spec.split_mode == "off" else MOST_SHARES + 1


def _tiles_in_memory(spec: AttentionSpec, tokens: int) -> int:
    """How many tiles of keys and values may be on their way."""
    return max(1, TILE_BYTES // (4 * tokens * _power_of_2(spec.head_dim)))


def _rounded_up(length: int) -> int:
    """To a power of two, or one and a half of one."""
    power = _power_of_2(length)
    return power * 3 // 4 if length <= power * 3 // 4 else power


def _power_of_2(n: int) -> int:
    """The next one up. Every step chooses its cut, and Triton's own takes 2 us."""
    return 1 << max(0, n - 1).bit_length()


def make_scratch(spec: AttentionSpec, num_rows: int, splits: int) -> Scratch:
    """Scratch for up to ``num_rows`` rows in up to ``splits`` shares."""
    places = num_rows * spec.num_heads * splits
    device = spec.device
    return Scratch(
        torch.empty(places, spec.head_dim, dtype=torch.float32, device=device),
        torch.empty(places, dtype=torch.float32, device=device),
        torch.empty(places, dtype=torch.float32, device=device),
        torch.zeros(num_rows * spec.num_kv_heads, dtype=torch.int32, device=device),
    )


def rope_attention(
    spec: AttentionSpec,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    cut: Cut,
    scratch: Scratch,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    lse: Tensor | None = None,
) -> None:
    """Attention of one new token a row, from its projections.

    ``qkv`` [R, (H + 2 Hkv) D]: heads of q, then k, then v, fp32 or the cache's dtype; ``k_cache``,
    ``v_cache`` [blocks, block_size, Hkv, D]; ``block_table`` [R, any] int32, of which only entries
    of blocks that hold visible keys are read; ``seq_lens`` [R] int32, the new token included, whose
    position is ``seq_lens - 1``; ``slot_mapping`` [R] integers: where the new key and value are
    stored, nowhere if negative; ``cos``, ``sin`` [positions, rotary_dim / 2] fp32, contiguous;
    ``q_norm``, ``k_norm`` [D] fp32, both or neither; ``out`` [R, H D]; ``lse`` [R, H] fp32,
    contiguous, where it is wanted. A row of length 0 gets zeros, and ``lse`` -inf. Innermost
    dimensions are contiguous.

    One launch. Only ``qkv`` may be written by the kernel in front: history, ``block_table``,
    ``seq_lens`` and ``slot_mapping`` are read before that has ended.
    """
    num_rows, kv_heads = len(qkv), spec.num_kv_heads
    group = spec.num_heads // kv_heads
    dependent = dependent_launches()
    _rope_attention_kernel[(cut.splits, kv_heads, num_rows)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        slot_mapping,
        out,
        lse,
        scratch.out,
        scratch.m,
        scratch.l,
        scratch.counters,
        eps,
        spec.scale * math.log2(math.e),
        (spec.soft_cap or 0.0) * math.log2(math.e),
        qkv.stride(0),
        block_table.stride(0),
        out.stride(0),
        K_STRIDES=k_cache.stride()[:3],
        V_STRIDES=v_cache.stride()[:3],
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=spec.head_dim,
        ROTARY=2 * cos.shape[-1],
        BLOCK_SIZE=spec.block_size,
        WINDOW=spec.window or 0,
        SOFT_CAP=spec.soft_cap is not None,
        QK_NORM=q_norm is not None,
        SINGLE=cut.splits == 1 and not cut.share,
        SHARE=cut.share,
        MOST_SHARES=MOST_SHARES,
        FEW_SHARES=FEW_SHARES,
        LSE=lse is not None,
        W=cut.num_warps,
        KEYS=cut.tokens // cut.num_warps,
        STAGES=cut.num_stages,
        G=max(16, triton.next_power_of_2(group + 2)),
        D=max(16, triton.next_power_of_2(spec.head_dim)),
        MERGED=_merged_at_a_time(cut, group, spec.head_dim),
        DEPENDENT=dependent,
        num_warps=cut.num_warps,
        launch_pdl=dependent,
        enable_fp_fusion=not cut.share,  # the same roundings whatever STAGES is compiled for
    )


def _merged_at_a_time(cut: Cut, group: int, head_dim: int) -> int:
    values = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    most = max(1, VALUES * 32 * cut.num_warps // values)
    if cut.share:  # a row's sums may not depend on the longest row
        return int(min(PARTIALS, most))
    return int(min(PARTIALS, triton.next_power_of_2(cut.splits), most))


@jit(do_not_specialize=["stride_table"])
def _rope_attention_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    slot_mapping,
    out,
    lse,
    part_out,
    part_m,
    part_l,
    counters,
    eps,
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    stride_qkv,
    stride_table,
    stride_out,
    K_STRIDES: tl.constexpr,  # of block, token and head
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QK_NORM: tl.constexpr,
    SINGLE: tl.constexpr,
    SHARE: tl.constexpr,
    MOST_SHARES: tl.constexpr,
    FEW_SHARES: tl.constexpr,
    LSE: tl.constexpr,
    W: tl.constexpr,  # warps
    KEYS: tl.constexpr,  # of a tile, for each warp
    STAGES: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (splits, Hkv, R)."""
    if DEPENDENT:
        gdc_launch_dependents()
    split, splits = gl.program_id(0), gl.num_programs(0)
    head, row = gl.program_id(1), gl.program_id(2)
    row64 = row.to(gl.int64)
    TOKENS: tl.constexpr = W * KEYS
    MMA: tl.constexpr = score_layout(W)

    # The share: history keys [start, stop), and the new key where the share ends the row.
    seq_len = gl.load(seq_lens + row)
    newest = seq_len - 1
    visible_from = gl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    if SHARE:
        reach = gl.minimum(seq_len, WINDOW) if WINDOW else seq_len
        share = gl.maximum(
            (reach + TOKENS * MOST_SHARES - 1) // (TOKENS * MOST_SHARES) * TOKENS, SHARE
        )
        first_share = visible_from // share
        count = gl.maximum((seq_len + share - 1) // share - first_share, 1)
        if split >= count:
            return  # a row's first block waits, so that this kernel doesn't end before the last
        begin = (first_share + split) * share
        start = gl.maximum(begin, visible_from)
        stop = gl.minimum(begin + share, newest)
        ends_row = (begin < seq_len) & (seq_len <= begin + share)
        first = start
    else:
        count = splits
        first_tile = visible_from // TOKENS
        num_tiles = (seq_len + TOKENS - 1) // TOKENS - first_tile
        begin = split * num_tiles // splits
        end = (split + 1) * num_tiles // splits
        start = gl.maximum((first_tile + begin) * TOKENS, visible_from)
        stop = gl.minimum((first_tile + end) * TOKENS, newest)
        ends_row = (begin < end) & (end == num_tiles)
        first = (first_tile + begin) * TOKENS

    # What is read before the wait: the first tiles, ...
    table = block_table + row64 * stride_table
    k_head = k_cache + head.to(gl.int64) * K_STRIDES[2]
    v_head = v_cache + head.to(gl.int64) * V_STRIDES[2]
    TILE: tl.constexpr = tile_memory(D)
    k_tiles = gl.allocate_shared_memory(k_cache.dtype.element_ty, [STAGES, W, KEYS, D], TILE)
    v_tiles = gl.allocate_shared_memory(v_cache.dtype.element_ty, [STAGES, W, KEYS, D], TILE)
    blocks = _blocks(table, first, start, stop, BLOCK_SIZE, W, KEYS, D)
    for i in gl.static_range(STAGES):
        _copy_tile(
            k_tiles.index(i),
            v_tiles.index(i),
            k_head,
            v_head,
            blocks,
            first + i * TOKENS,
            start,
            stop,
            K_STRIDES,
            V_STRIDES,
            HEAD_DIM,
            BLOCK_SIZE,
            W,
            KEYS,
            D,
        )
        async_copy.commit_group()
        # One tile ahead, as no copy can begin without them.
        ahead = first + (i + 1) * TOKENS
        blocks = _blocks(table, ahead, start, stop, BLOCK_SIZE, W, KEYS, D)
    # ... what the rows of the new tile (the group's queries, the key, the value) are multiplied by,
    NEW: tl.constexpr = new_layout(W, D)
    g = gl.arange(0, G, layout=gl.SliceLayout(1, NEW))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, NEW))
    in_head = d < HEAD_DIM
    is_query, is_key, is_value = g < GROUP, g == GROUP, g == GROUP + 1
    HALF: tl.constexpr = ROTARY // 2
    turned = d < ROTARY
    partner = gl.where(d < HALF, d + HALF, gl.where(turned, d - HALF, d))
    angle = gl.maximum(newest, 0) * HALF + gl.where(d < HALF, d, d - HALF)
    ALIGNED: tl.constexpr = aligned(HALF)
    partner = gl.max_contiguous(gl.multiple_of(partner, ALIGNED), ALIGNED)
    angle = gl.max_contiguous(gl.multiple_of(angle, ALIGNED), ALIGNED)
    cosine = gl.load(cos + angle, mask=turned, other=1.0)
    sine = gl.load(sin + angle, mask=turned, other=0.0)
    by = cosine[None, :]
    by_partner = gl.where(d < HALF, -sine, sine)[None, :]
    if QK_NORM:
        q_gain = gl.load(q_norm + d, mask=in_head, other=0.0)[None, :]
        q_gain_partner = gl.load(q_norm + partner, mask=in_head, other=0.0)[None, :]
        k_gain = gl.load(k_norm + d, mask=in_head, other=0.0)[None, :]
        k_gain_partner = gl.load(k_norm + partner, mask=in_head, other=0.0)[None, :]
        by = gl.where(is_query[:, None], q_gain * by, k_gain * by)
        by_partner = gl.where(
            is_query[:, None], q_gain_partner * by_partner, k_gain_partner * by_partner
        )
    by = gl.where(is_value[:, None], 1.0, by)
    by_partner = gl.where(is_value[:, None], 0.0, by_partner)
    # ... and where they lie and the new ones go.
    new_qkv = qkv + row64 * stride_qkv
    source = gl.where(is_query, head * GROUP + g, NUM_KV_HEADS * GROUP + head)
    source = (source + gl.where(is_value, NUM_KV_HEADS, 0)) * HEAD_DIM
    in_new = (g < GROUP + 2)[:, None] & in_head[None, :]
    new_slot = gl.load(slot_mapping + row).to(gl.int64)
    is_stored = (is_key | is_value) & ends_row & (new_slot >= 0)
    new_block = new_slot // BLOCK_SIZE
    new_slot = new_slot % BLOCK_SIZE
    k_place = k_head + new_block * K_STRIDES[0] + new_slot * K_STRIDES[1]
    v_place = v_head + new_block * V_STRIDES[0] + new_slot * V_STRIDES[1]
    if DEPENDENT:
        gdc_wait()

    new = gl.load(new_qkv + (source[:, None] + d[None, :]), mask=in_new, other=0.0)
    new_partner = gl.load(new_qkv + (source[:, None] + partner[None, :]), mask=in_new, other=0.0)
    new = new.to(gl.float32)
    rotated = new * by + new_partner.to(gl.float32) * by_partner
    if QK_NORM:
        norm = gl.rsqrt(gl.sum(new * new, 1) / HEAD_DIM + eps)
        rotated *= gl.where(is_value, 1.0, norm)[:, None]
    rotated = rotated.to(k_cache.dtype.element_ty)
    new_tile = gl.allocate_shared_memory(k_cache.dtype.element_ty, [G, D], new_memory(D))
    new_tile.store(rotated)
    gl.store(
        k_place + d[None, :] + g[:, None] * 0,
        rotated,
        mask=(is_key & is_stored)[:, None] & in_head[None, :],
    )
    gl.store(
        v_place + d[None, :] + g[:, None] * 0,
        rotated,
        mask=(is_value & is_stored)[:, None] & in_head[None, :],
    )
    gl.thread_barrier()
    QUERY: tl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    query = new_tile.load(gl.SliceLayout(0, QUERY))
    query = _for_every_warp(query, [W, G, D], QUERY)

    # The new key and value begin the softmax of the first warp.
    NEW_KEYS: tl.constexpr = 8 if GROUP < 8 else G
    KEY: tl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    new_key = new_tile.slice(0, NEW_KEYS, dim=0).permute((1, 0)).load(gl.SliceLayout(0, KEY))
    new_key = _for_every_warp(new_key, [W, D, NEW_KEYS], KEY)
    new_scores = mma_v2(query, new_key, gl.zeros([W, G, NEW_KEYS], gl.float32, layout=MMA)) * scale
    if SOFT_CAP:
        new_scores = _cap(new_scores, soft_cap)
    key_of_new = gl.arange(0, NEW_KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    m = gl.sum(gl.where((key_of_new == GROUP)[None, None, :], new_scores, 0.0), 2)
    has_new = ((warp == 0) & ends_row)[:, None]
    m = gl.where(has_new, m, float("-inf"))
    l = gl.where(has_new & (m == m), 1.0, 0.0)
    # Its value is a row of the new tile: a product with weights of 1 and 0 brings it in its place.
    warp_of_one = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))
    row_of_one = gl.arange(0, G, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))
    one = ((warp_of_one == 0) & ends_row)[:, None, None] & (row_of_one == GROUP + 1)[None, None, :]
    one = gl.where(one, 1.0, 0.0) + gl.zeros([W, G, G], gl.float32, layout=QUERY)
    new_rows = _for_every_warp(new_tile.load(gl.SliceLayout(0, KEY)), [W, G, D], KEY)
    acc = gl.zeros([W, G, D], gl.float32, layout=MMA)
    acc = mma_v2(one.to(new_rows.dtype), new_rows, acc)

    key_of_warp = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
    key_of_tile = warp[:, None, None] * KEYS + key_of_warp[None, None, :]
    tiles = (stop - first + TOKENS - 1) // TOKENS
    for i in range(tiles):
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()
        k = k_tiles.index(i % STAGES).permute((0, 2, 1)).load(KEY)
        scores = mma_v2(query, k, gl.zeros([W, G, KEYS], gl.float32, layout=MMA)) * scale
        if SOFT_CAP:
            scores = _cap(scores, soft_cap)
        key = first + i * TOKENS + key_of_tile
        valid = key < stop
        if WINDOW:
            valid &= key >= start
        scores = gl.where(valid, scores, float("-inf"))
        new_m = gl.maximum(m, gl.max(scores, 2))
        yardstick = gl.where(new_m == float("-inf"), 0.0, new_m)
        discount = gl.exp2(m - yardstick)
        weights = gl.exp2(scores - yardstick[:, :, None])
        l = l * discount + gl.sum(weights, 2)
        m = new_m
        v = v_tiles.index(i % STAGES).load(KEY)
        weights = gl.convert_layout(weights.to(v.dtype), QUERY)
        acc = mma_v2(weights, v, acc * discount[:, :, None])
        ahead = first + (i + STAGES) * TOKENS
        if ahead < stop:
            gl.thread_barrier()  # all warps are through with the tile that is overwritten
            _copy_tile(
                k_tiles.index(i % STAGES),
                v_tiles.index(i % STAGES),
                k_head,
                v_head,
                blocks,
                ahead,
                start,
                stop,
                K_STRIDES,
                V_STRIDES,
                HEAD_DIM,
                BLOCK_SIZE,
                W,
                KEYS,
                D,
            )
            blocks = _blocks(table, ahead + TOKENS, start, stop, BLOCK_SIZE, W, KEYS, D)
        async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()

    # The partials of the warps: [W, heads, D].
    accs = gl.allocate_shared_memory(gl.float32, [W, G, D], acc_memory(W, G, D))
    ms = gl.allocate_shared_memory(gl.float32, [W, G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ls = gl.allocate_shared_memory(gl.float32, [W, G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    accs.store(acc)
    ms.store(m)
    ls.store(l)
    gl.thread_barrier()
    HEADS: tl.constexpr = next_power_of_2(GROUP)
    ALL: tl.constexpr = merge_layout(W, HEADS, D, W)
    m, l, acc = _merge(
        ms.slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL)),
        ls.slice(0, HEADS, dim=1).load(gl.SliceLayout(2, ALL)),
        accs.slice(0, HEADS, dim=1).load(ALL),
        ALL,
    )
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, ALL)))
    dv = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, ALL)))
    of_head = (heads < GROUP)[:, None] & (dv < HEAD_DIM)[None, :]
    first_head = (row * NUM_KV_HEADS + head) * GROUP
    outs = out + row64 * stride_out + head * (GROUP * HEAD_DIM)
    if SINGLE or (SHARE and count == 1):
        answer = acc / gl.where(l > 0, l, 1.0)[:, None]
        answers = outs + (heads[:, None] * HEAD_DIM + dv[None, :])
        gl.store(answers, answer.to(out.dtype.element_ty), mask=of_head)
        if LSE:
            gl.store(lse + first_head + heads, _natural(m, l), mask=heads < GROUP)
    else:
        places = (first_head + heads) * splits + split
        gl.store(part_m + places, m, mask=heads < GROUP)
        gl.store(part_l + places, l, mask=heads < GROUP)
        gl.store(part_out + (places[:, None] * HEAD_DIM + dv[None, :]), acc, mask=of_head)
        gl.thread_barrier()  # all threads have stored before one of them tells
        counter = counters + row * NUM_KV_HEADS + head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
            gl.thread_barrier()
            if SHARE and count <= FEW_SHARES:
                _merge_splits(
                    part_out,
                    part_m,
                    part_l,
                    outs,
                    lse,
                    first_head,
                    splits,
                    count,
                    LSE,
                    GROUP,
                    HEADS,
                    HEAD_DIM,
                    W,
                    D,
                    FEW_SHARES,
                )
            else:
                _merge_splits(
                    part_out,
                    part_m,
                    part_l,
                    outs,
                    lse,
                    first_head,
                    splits,
                    count,
                    LSE,
                    GROUP,
                    HEADS,
                    HEAD_DIM,
                    W,
                    D,
                    MERGED,
                )
            gl.store(counter, 0)


@jit
def _merge_splits(
    part_out,
    part_m,
    part_l,
    outs,
    lse,
    first_head,
    splits,
    count,
    LSE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge the partials of a KV head, ``MERGED`` at a time in the order of their keys, and write
    its answers."""
    PARTS: tl.constexpr = merge_layout(MERGED, HEADS, D, W)
    PARTS_M: tl.constexpr = gl.SliceLayout(2, PARTS)
    ANSWER: tl.constexpr = gl.SliceLayout(0, PARTS)
    part = gl.arange(0, MERGED, layout=gl.SliceLayout(1, PARTS_M))
    part_head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PARTS_M))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, ANSWER))
    dv = gl.arange(0, D, layout=gl.SliceLayout(0, ANSWER))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    m = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, ANSWER))
    l = gl.zeros([HEADS], gl.float32, layout=gl.SliceLayout(1, ANSWER))
    acc = gl.zeros([HEADS, D], gl.float32, layout=ANSWER)
    first_place = first_head * splits
    for i in range(0, count, MERGED):
        # Read past the L1, where older ones may lie.
        places = first_place + part_head[None, :] * splits + (i + part)[:, None]
        there = (i + part < count)[:, None] & (part_head < GROUP)[None, :]
        part_max = gl.load(part_m + places, mask=there, other=float("-inf"), cache_modifier=".cg")
        part_sum = gl.load(part_l + places, mask=there, other=0.0, cache_modifier=".cg")
        values = gl.load(
            part_out + (places[:, :, None] * HEAD_DIM + column[None, None, :]),
            mask=there[:, :, None] & (column < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        next_m, next_l, next_acc = _merge(part_max, part_sum, values, PARTS)
        new_m = gl.maximum(m, next_m)
        yardstick = gl.where(new_m == float("-inf"), 0.0, new_m)
        discount, weight = gl.exp2(m - yardstick), gl.exp2(next_m - yardstick)
        l = l * discount + next_l * weight
        acc = acc * discount[:, None] + next_acc * weight[:, None]
        m = new_m
    answer = acc / gl.where(l > 0, l, 1.0)[:, None]
    gl.store(
        outs + (heads[:, None] * HEAD_DIM + dv[None, :]),
        answer.to(outs.dtype.element_ty),
        mask=(heads < GROUP)[:, None] & (dv < HEAD_DIM)[None, :],
    )
    if LSE:
        gl.store(lse + first_head + heads, _natural(m, l), mask=heads < GROUP)


@jit
def _natural(m, l):
    """The natural log-sum-exp of a largest score and a sum in base 2; -inf where there is none."""
    return (m + gl.log2(gl.where(l > 0, l, 1.0))) * 0.6931471805599453


@jit
def _keys(first, W: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    """The keys [W, KEYS] of the tile from ``first`` on, as they are copied."""
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy_layout(W, D))))
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy_layout(W, D))))
    return first + warp[:, None] * KEYS + key[None, :]


@jit
def _blocks(
    table,
    first,
    start,
    stop,
    BLOCK_SIZE: tl.constexpr,
    W: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """The blocks that hold a tile's keys, of those in [start, stop)."""
    keys = _keys(first, W, KEYS, D)
    return gl.load(table + keys // BLOCK_SIZE, mask=(keys >= start) & (keys < stop), other=0)


@jit
def _copy_tile(
    k_tile,
    v_tile,
    k_head,
    v_head,
    blocks,
    first,
    start,
    stop,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    W: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Ask for the tile of keys and values from ``first`` on; those outside [start, stop) are
    zero."""
    keys = _keys(first, W, KEYS, D)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy_layout(W, D))))
    there = ((keys >= start) & (keys < stop))[:, :, None] & (d < HEAD_DIM)[None, None, :]
    blocks = blocks.to(gl.int64)
    slots = (keys % BLOCK_SIZE).to(gl.int64)
    k = k_head + (blocks * K_STRIDES[0] + slots * K_STRIDES[1])[:, :, None] + d[None, None, :]
    v = v_head + (blocks * V_STRIDES[0] + slots * V_STRIDES[1])[:, :, None] + d[None, None, :]
    async_copy.async_copy_global_to_shared(k_tile, k, mask=there)
    async_copy.async_copy_global_to_shared(v_tile, v, mask=there)


@jit
def _for_every_warp(x, shape: tl.constexpr, layout: tl.constexpr):
    """``x`` [rows, columns] as an operand ``shape`` [W, rows, columns]."""
    every, _ = gl.broadcast(gl.expand_dims(x, 0), gl.zeros(shape, x.dtype, layout=layout))
    return every


@jit
def _merge(m, l, acc, layout: tl.constexpr):
    """The merge of ``attention/merge.py``, in base 2: partials ``m``, ``l`` [P, heads], ``acc`` [P,
    heads, D], not divided -> [heads], [heads], [heads, D]."""
    top = gl.max(m, 0)
    yardstick = gl.where(top == float("-inf"), 0.0, top)
    weights = gl.exp2(m - yardstick[None, :])
    OF_HEADS: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    top = gl.convert_layout(top, OF_HEADS)
    total = gl.convert_layout(gl.sum(l * weights, 0), OF_HEADS)
    return top, total, gl.sum(acc * weights[:, :, None], 0)


@jit
def _cap(scores, cap):
    """``cap * tanh(scores / cap)`` of base-2 scores and cap; right at both infinities."""
    return cap - 2.0 * cap / (gl.exp2(scores * (2.0 * 1.4426950408889634 / cap)) + 1.0)


@constexpr_function
def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


@constexpr_function
def aligned(half):
    """How many elements of a rotated head are surely side by side: a power of two, at most 8."""
    return min(8, half & -half)


@constexpr_function
def score_layout(W):
    """Of scores [W, G, keys] and outputs [W, G, D]: a warp has keys of its own."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )


@constexpr_function
def copy_layout(W, D):
    """Of a tile [W, keys, D] on its way to shared memory: 16 bytes a thread."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [W, 1, 1], [2, 1, 0])


@constexpr_function
def new_layout(W, D):
    """Of the new tile [G, D] while it is normed and turned."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [W, 1], [1, 0])


@constexpr_function
def tile_memory(D):
    """Rows of D 16-bit elements without bank conflicts for eight rows at a time."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, D // 8), [2, 1, 0])


@constexpr_function
def new_memory(D):
    return gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, D // 8), [1, 0])


@constexpr_function
def acc_memory(W, G, D):
    return gl.PaddedSharedLayout.with_identity_for([[D, 8]], [W, G, D], [2, 1, 0])


@constexpr_function
def merge_layout(P, heads, D, W):
    """Of P partials [P, heads, D]: a thread has all of them, of a few columns."""

    def bases(size, dim):
        return [[1 << bit if axis == dim else 0 for axis in range(3)] for bit in range(size)]

    parts, columns = bases(P.bit_length() - 1, 0), bases(D.bit_length() - 1, 2)
    rows = bases(heads.bit_length() - 1, 1)
    num_warp_bits = W.bit_length() - 1
    # Of heads * D elements a thread has as many side by side as fill the block, up to four.
    spread = columns + rows
    vector = min(2, max(0, len(spread) - 5 - num_warp_bits))
    regs, rest = spread[:vector], spread[vector:]
    zero = [0, 0, 0]
    lanes = rest[:5] + [zero] * (5 - len(rest[:5]))
    warps = rest[5 : 5 + num_warp_bits]
    warps = warps + [zero] * (num_warp_bits - len(warps))
    regs = regs + rest[5 + num_warp_bits :] + parts
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [P, heads, D])
