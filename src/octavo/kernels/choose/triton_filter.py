"""A draw from what min_p, top_k and top_p leave, without sorting the vocabulary.

1. ``bounds_kernel`` counts and weighs, for a few thresholds, the tokens above each.
2. ``collect_kernel`` copies to the row's list the tokens above the highest threshold that leaves
   enough for top_k or, without one, for top_p. There are rarely more than a thousand.
3. ``short_list_kernel`` sorts such a list and draws from what the filters leave.
4. ``long_list_kernel`` draws from longer ones: each filter finds its threshold by bisection over
   the scores, as integers of the same order, with several pivots a pass.

Of equal scores at a threshold, the tokens of the lowest ids stay, as in ``engine/sampling.py``.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.choose.triton_draw import (
    LOWEST_SCORE,
    NEVER,
    float_setting,
    is_filtered,
    noise_key,
    setting,
    token_noise,
)

LOWEST = tl.constexpr(-0x7FFFFFFF)  # below the key of any number
REACHED = tl.constexpr(1.0 - 1e-6)  # of top_p: float32 can't tell the rest
COUNT, MASS, TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _draws_from_few(settings, stride, row, vocab_size):
    sampled = float_setting(settings, stride, 2, row) > 0
    return sampled & is_filtered(settings, stride, row, vocab_size)


@triton.jit
def _threshold(j, EDGES: tl.constexpr):
    """Thresholds lie closer near the likeliest token; the last one is ``LOWEST_SCORE``."""
    share = (j + 1) / EDGES
    return share * share * LOWEST_SCORE


@triton.jit
def _scores(
    logits, settings, chunk_max, chunks, stride_logits, stride_settings, row, token, vocab_size,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The scores of tokens of a row: their distance to the largest logit over the temperature."""
    chunk = tl.arange(0, CHUNKS)
    m = tl.load(chunk_max + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    source = logits + setting(settings, stride_settings, 0, row).to(tl.int64) * stride_logits
    x = tl.load(source + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    temperature = float_setting(settings, stride_settings, 2, row)
    score = tl.div_rn(x - tl.max(m, 0), temperature)
    return tl.where(score == 0.0, 0.0, score)  # no -0, whose key is another


@triton.jit
def bounds_kernel(
    logits,
    settings,
    chunk_max,
    above,
    lengths,
    vocab_size,
    chunks,
    stride_logits,
    stride_settings,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Grid: (blocks, rows). ``above`` [rows, blocks, 2, EDGES]: how many tokens of the block reach
    each threshold, and what they weigh. Empties the row's list."""
    block, row = tl.program_id(0), tl.program_id(1)
    if _draws_from_few(settings, stride_settings, row, vocab_size):
        token = block * BLOCK + tl.arange(0, BLOCK)
        score = _scores(
            logits, settings, chunk_max, chunks, stride_logits, stride_settings, row, token,
            vocab_size, CHUNKS,
        )  # fmt: skip
        floor = float_setting(settings, stride_settings, 5, row)
        out = above + (row * tl.num_programs(0) + block) * (2 * EDGES)
        weight = tl.exp(score)
        for j in tl.static_range(EDGES):  # all at once, each score would be made EDGES times
            reaches = (score >= _threshold(j, EDGES)) & (score >= floor)
            tl.store(out + j, tl.sum(reaches.to(tl.int32), 0).to(tl.float32))
            tl.store(out + EDGES + j, tl.sum(tl.where(reaches, weight, 0.0), 0))
        if block == 0:
            tl.store(lengths + row, 0)


@triton.jit
def collect_kernel(
    logits,
    settings,
    chunk_max,
    above,
    lengths,
    totals,
    scores,
    tokens,
    vocab_size,
    chunks,
    stride_logits,
    stride_settings,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Grid: (blocks, rows). The list's order is any."""
    block, row = tl.program_id(0), tl.program_id(1)
    if _draws_from_few(settings, stride_settings, row, vocab_size):
        i, j = tl.arange(0, BLOCKS), tl.arange(0, EDGES)
        places = above + (row * tl.num_programs(0) + i[:, None]) * (2 * EDGES) + j[None, :]
        there = (i < tl.num_programs(0))[:, None]
        count = tl.sum(tl.load(places, mask=there, other=0.0), 0)
        mass = tl.sum(tl.load(places + EDGES, mask=there, other=0.0).to(tl.float64), 0)
        total = tl.max(mass, 0)
        if block == 0:
            tl.store(totals + row, total)
        top_k = setting(settings, stride_settings, 3, row)
        top_p = float_setting(settings, stride_settings, 4, row).to(tl.float64)
        enough = tl.where(top_k < vocab_size, count >= top_k, mass >= top_p * total)
        least = tl.max(tl.where(enough, _threshold(j, EDGES), LOWEST_SCORE), 0)

        token = block * BLOCK + tl.arange(0, BLOCK)
        score = _scores(
            logits, settings, chunk_max, chunks, stride_logits, stride_settings, row, token,
            vocab_size, CHUNKS,
        )  # fmt: skip
        kept = (score >= least) & (score >= float_setting(settings, stride_settings, 5, row))
        number = tl.sum(kept.to(tl.int32), 0)
        if number > 0:
            place = tl.atomic_add(lengths + row, number) + tl.cumsum(kept.to(tl.int32), 0) - 1
            place += row.to(tl.int64) * vocab_size
            tl.store(scores + place, score, mask=kept)
            tl.store(tokens + place, token, mask=kept)


@triton.jit
def short_list_kernel(
    settings,
    lengths,
    totals,
    scores,
    tokens,
    ids_out,
    vocab_size,
    stride_settings,
    SHORT: tl.constexpr,
):
    """Grid: (rows,). Lists of up to SHORT tokens."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    if _draws_from_few(settings, stride_settings, row, vocab_size) & (length <= SHORT):
        i = tl.arange(0, SHORT)
        place = row.to(tl.int64) * vocab_size + i
        score = tl.load(scores + place, mask=i < length, other=float("-inf"))
        token = tl.load(tokens + place, mask=i < length, other=0)
        # Descending by score, then ascending by id.
        order = (key_of(score).to(tl.int64) << 32) | (-token + NEVER).to(tl.int64)
        order = tl.sort(order, descending=True)
        score = score_of((order >> 32).to(tl.int32))
        token = -(order & 0xFFFFFFFF).to(tl.int32) + NEVER
        top_k = setting(settings, stride_settings, 3, row)
        kept = (i < length) & (i < top_k)
        top_p = float_setting(settings, stride_settings, 4, row)
        if top_p < 1.0:
            weight = tl.where(kept, tl.exp(score), 0.0).to(tl.float64)
            total = tl.where(top_k < vocab_size, tl.sum(weight, 0), tl.load(totals + row))
            target = top_p.to(tl.float64) * REACHED * total
            kept &= tl.cumsum(weight, 0) - weight < target
        token = tl.where(kept, token, 0)
        noise = token_noise(noise_key(settings, stride_settings, row), token)
        total = tl.where(kept, score + noise, float("-inf"))
        drawn = tl.min(tl.where(total == tl.max(total, 0), token, NEVER), 0)
        tl.store(ids_out + row, drawn)


@triton.jit
def long_list_kernel(
    settings,
    lengths,
    totals,
    scores,
    tokens,
    ids_out,
    vocab_size,
    stride_settings,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Grid: (rows,). Lists of more than SHORT tokens."""
    row = tl.program_id(0)
    count = tl.load(lengths + row)
    if _draws_from_few(settings, stride_settings, row, vocab_size) & (count > SHORT):
        top_k = setting(settings, stride_settings, 3, row)
        top_p = float_setting(settings, stride_settings, 4, row)
        lowest = key_of(float_setting(settings, stride_settings, 5, row))
        scores += row.to(tl.int64) * vocab_size
        tokens += row.to(tl.int64) * vocab_size

        # Of equal scores with this key, tokens up to this id are left.
        threshold = tl.full([], LOWEST, tl.int32)
        last = tl.full([], NEVER, tl.int32)
        if top_k < count:
            k = top_k.to(tl.float64)
            t = _search(scores, tokens, count, threshold, last, k, lowest, COUNT, BLOCK, PIVOTS)
            above, equal, _ = _around(scores, tokens, count, threshold, last, t, BLOCK)
            if top_k - above < equal:
                ties = (top_k - above).to(tl.float64)
                last = -_search(
                    scores, tokens, count, t, last, ties, -vocab_size, TIES, BLOCK, PIVOTS
                )
            threshold = t
        if top_p < 1.0:
            _, _, total = _around(scores, tokens, count, threshold, last, LOWEST, BLOCK)
            total = tl.where(top_k < vocab_size, total, tl.load(totals + row))
            target = top_p.to(tl.float64) * REACHED * total
            t = _search(scores, tokens, count, threshold, last, target, lowest, MASS, BLOCK, PIVOTS)
            _, equal, mass = _around(scores, tokens, count, threshold, last, t, BLOCK)
            weight = tl.exp(score_of(t)).to(tl.float64)
            # As many of the equal ones as the mass above them leaves short of the target.
            ties = tl.maximum(tl.ceil(((target - mass) / weight).to(tl.float32)), 1.0)
            last = tl.where(t == threshold, last, NEVER)
            if ties < equal:
                need = ties.to(tl.float64)
                last = -_search(
                    scores, tokens, count, t, last, need, -vocab_size, TIES, BLOCK, PIVOTS
                )
            threshold = t

        best = tl.full([], float("-inf"), tl.float32)
        drawn = tl.full([], NEVER, tl.int32)
        for first in range(0, count, BLOCK):
            score, token, kept = _load(scores, tokens, count, first, threshold, last, BLOCK)
            noise = token_noise(noise_key(settings, stride_settings, row), token)
            total = tl.where(kept, score + noise, float("-inf"))
            top = tl.max(total, 0)
            candidate = tl.min(tl.where(total == top, token, NEVER), 0)
            drawn = tl.where(
                top > best, candidate, tl.where(top == best, tl.minimum(drawn, candidate), drawn)
            )
            best = tl.maximum(best, top)
        tl.store(ids_out + row, drawn)


@triton.jit
def key_of(score):
    """An integer of the same order as a number that isn't positive."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of(key):
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(scores, tokens, count, first, threshold, last, BLOCK: tl.constexpr):
    """A block of the list, and which of it is left."""
    i = first + tl.arange(0, BLOCK)
    score = tl.load(scores + i, mask=i < count, other=float("-inf"))
    token = tl.load(tokens + i, mask=i < count, other=0)
    key = key_of(score)
    kept = (i < count) & ((key > threshold) | ((key == threshold) & (token <= last)))
    return score, token, kept


@triton.jit
def _weight(score):
    """Rounded to a multiple of 2 ** -34, so that sums over a vocabulary are exact, and the same in
    whatever order a list has come to be."""
    return (tl.exp(score).to(tl.float64) + 262144.0) - 262144.0


@triton.jit
def _around(scores, tokens, count, threshold, last, t, BLOCK: tl.constexpr):
    """How many of what is left are above the key ``t``, how many have it, and the weight of those
    above."""
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        score, _, kept = _load(scores, tokens, count, first, threshold, last, BLOCK)
        key = key_of(score)
        above += (kept & (key > t)).to(tl.int32)
        equal += (kept & (key == t)).to(tl.int32)
        mass += tl.where(kept & (key > t), _weight(score), 0.0)
    return tl.sum(above, 0), tl.sum(equal, 0), tl.sum(mass, 0)


@triton.jit
def _search(
    scores,
    tokens,
    count,
    threshold,
    last,
    need,
    low,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The largest number from ``low`` to 0 that so much of what is left reaches: as many keys
    (COUNT), keys of as much weight (MASS), or as many negated ids of the tokens with the threshold
    itself (TIES). ``low`` is reached by all."""
    high = tl.full([], 0, tl.int32)
    while low < high:
        step = (high - low + PIVOTS + 1) // (PIVOTS + 1)
        pivots = low + (tl.arange(0, PIVOTS) + 1) * step
        found = tl.zeros([BLOCK, PIVOTS], tl.float64)
        for first in range(0, count, BLOCK):
            score, token, kept = _load(scores, tokens, count, first, threshold, last, BLOCK)
            key = key_of(score)
            if KIND == TIES:
                kept &= key == threshold
                key = -token
            weight = tl.full([BLOCK], 1.0, tl.float64)
            if KIND == MASS:
                weight = _weight(score)
            reaches = kept[:, None] & (key[:, None] >= pivots[None, :])
            found += tl.where(reaches, weight[:, None], 0.0)
        passed = tl.sum((tl.sum(found, 0) >= need).to(tl.int32), 0)
        low += passed * step
        high = tl.minimum(high, low + step - 1)
    return low
