"""QK-norm, rotation, cache write, split-KV attention and merge in one launch, for CUDA.

A block has a KV head of a row and an equal share of its history. What doesn't depend on the kernel
in front, the first tile of keys and values among it, is read before that kernel has ended. Behind
the wait, the head's queries, its new key and its new value are rows of one tile, normed and turned
together; the block whose share ends the history writes the new key and value to the cache. The last
block of a KV head to finish merges the partials, in the order of their keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.spec import AttentionSpec, Support
from octavo.kernels.rope_attention.limits import NEEDS_HOPPER, refusal
from octavo.kernels.rope_attention.triton_kernel import rope_attention_kernel
from octavo.kernels.triton_launch import INTERPRETED, dependent_launches, power_of_2

PARTIALS = 32  # merged at a time, and of them
VALUES = 128  # in a thread: more would be spilled
MOST_SHARES = 32  # of a row, where its share doesn't depend on the others
SHARE_WARPS = 4  # whose sums a share's are, also where eight make them
FEW_SHARES = 4  # are merged faster by themselves
TILE_BYTES = 96 << 10  # of keys and values on their way: two blocks fit a multiprocessor


@dataclass(frozen=True)
class Cut:
    """How a step's history is cut: every row into ``splits`` shares of whole tiles of ``tokens``
    keys, or, with ``share``, after every ``share`` keys (more where its own length would make over
    ``MOST_SHARES`` shares) into up to ``splits`` of them. Right at every length (with ``share`` up
    to ``splits * share``, and at any in ``MOST_SHARES``); a CUDA graph is captured for one.

    With ``whole``, which changes no bit, a share's tiles are all there at once: ``num_stages`` of
    them, and no row is so long that its shares are longer."""

    splits: int
    tokens: int
    num_warps: int
    num_stages: int
    share: int = 0
    whole: bool = False


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

    Measured on an H200 (bench/LOG.md, 2026-12-01). Shares are whole tiles, all on their way before
    the wait, as long as their blocks find room beside those of the products. Of more keys, three
    blocks for two multiprocessors are best as long as several rows together have up to 12K, as
    every share more is one more partial to merge; else two for each, as reading counts most.
    """
    if spec.split_mode != "auto":
        return _cut_as_told(spec, num_rows, longest, num_sms)
    longest = max(128, _rounded_up(min(longest, spec.window or longest)))
    lines = num_rows * spec.num_kv_heads
    if spec.head_dim <= 128:
        choose = _tiles_of_one if num_rows == 1 else _tiles_of_several
        if cut := choose(longest, lines, num_sms):
            return cut
    few = num_rows > 1 and num_rows * longest <= 12288
    splits = max(1, min((3 * num_sms // 2 if few else 2 * num_sms) // lines, -(-longest // 128)))
    if not few and longest < 1 << 16:
        splits = 1 << (splits.bit_length() - 1)  # equal shares of a power of two
    stages = min(3, -(-longest // (splits * 64)), _tiles_in_memory(spec, 64))
    return Cut(splits, 64, num_warps=4, num_stages=stages)


def _tiles_of_one(longest: int, lines: int, num_sms: int) -> Cut | None:
    """Of one row, up to a few thousand keys: tiles of 256, or else two of 128 at once. Its products
    leave multiprocessors free that have room for such blocks; those of several rows don't."""
    splits = -(-longest // 256)
    if splits > 3:  # six and twelve were faster than four and eight, some of them empty
        splits = 3 * power_of_2(-(-splits // 3))
    if splits * lines <= num_sms:
        return Cut(splits, 256, num_warps=8, num_stages=1)
    splits = 1 << (max(1, num_sms // lines).bit_length() - 1)
    return Cut(splits, 128, num_warps=8, num_stages=2) if longest <= 384 * splits else None


def _tiles_of_several(longest: int, lines: int, num_sms: int) -> Cut | None:
    """A tile of 128 keys a share, if there is room for all of them."""
    splits = -(-longest // 128)
    if splits == 1 and num_sms // lines == 2:  # half of the multiprocessors would have nothing
        return Cut(2, 64, num_warps=4, num_stages=1)
    if 2 * splits * lines > 3 * num_sms:
        return None
    return Cut(splits, 128, num_warps=4, num_stages=1)


def _cut_as_told(spec: AttentionSpec, num_rows: int, longest: int, num_sms: int) -> Cut:
    """In ``off`` mode none; in ``fixed`` mode one that depends on the batch in what changes no bit:
    the number of shares, empty ones among them, and tiles on their way."""
    if spec.split_mode == "off":
        return Cut(1, 64, 4, min(3, _tiles_in_memory(spec, 64)))
    reach = min(longest, spec.window or longest)
    splits = min(MOST_SHARES, power_of_2(-(-reach // spec.split_tokens)))
    # A window may begin in the middle of a share.
    splits += spec.window is not None
    tokens = 64  # of 128 keys a thread has so much that two blocks fill a multiprocessor
    # Tiles beside one another are worth more in one block than in two, as long as there is room.
    one_a_multiprocessor = num_rows * spec.num_kv_heads * splits <= num_sms
    tile_bytes = 4 * tokens * power_of_2(spec.head_dim)
    room = (128 << 10 if one_a_multiprocessor else 64 << 10) // tile_bytes
    tiles = -(-spec.split_tokens // tokens)
    stages = max(1, min(room, 4, tiles))
    equal = -(-reach // (MOST_SHARES * tokens)) * tokens  # what shares would have by the length
    whole = one_a_multiprocessor and tiles == stages and equal <= spec.split_tokens
    pairs = whole and spec.num_heads <= 8 * spec.num_kv_heads and spec.head_dim <= 128
    warps = 2 * SHARE_WARPS if pairs else SHARE_WARPS
    return Cut(splits, tokens, warps, stages, spec.split_tokens, whole)


def most_splits(spec: AttentionSpec, num_sms: int) -> int:
    """What no cut of :func:`choose_cut` has more of."""
    if spec.split_mode == "auto":  # two blocks for each multiprocessor
        return 2 * num_sms
    return 1 if spec.split_mode == "off" else MOST_SHARES + 1


def _tiles_in_memory(spec: AttentionSpec, tokens: int) -> int:
    """How many tiles of keys and values may be on their way."""
    return max(1, TILE_BYTES // (4 * tokens * power_of_2(spec.head_dim)))


def _rounded_up(length: int) -> int:
    """To a power of two, or one and a half of one."""
    power = power_of_2(length)
    return power * 3 // 4 if length <= power * 3 // 4 else power


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
    own = SHARE_WARPS if cut.share else cut.num_warps  # warps with keys of their own
    dependent = dependent_launches()
    rope_attention_kernel[(cut.splits, kv_heads, num_rows)](
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
        WHOLE=cut.whole,
        MOST_SHARES=MOST_SHARES,
        FEW_SHARES=FEW_SHARES,
        LSE=lse is not None,
        W=own,
        P=cut.num_warps,
        KEYS=cut.tokens // own,
        STAGES=cut.num_stages,
        G=max(16, power_of_2(group + 2)),
        D=max(16, power_of_2(spec.head_dim)),
        MERGED=_merged_at_a_time(cut, group, spec.head_dim),
        DEPENDENT=dependent,
        num_warps=cut.num_warps,
        launch_pdl=dependent,
        enable_fp_fusion=not cut.share,  # the same roundings whatever STAGES is compiled for
    )


def _merged_at_a_time(cut: Cut, group: int, head_dim: int) -> int:
    values = power_of_2(group) * power_of_2(head_dim)
    if cut.share:  # a row's sums may not depend on the longest row, nor on how many warps there are
        return min(PARTIALS, max(1, VALUES * 32 * SHARE_WARPS // values))
    most = max(1, VALUES * 32 * cut.num_warps // values)
    return min(PARTIALS, power_of_2(cut.splits), most)
