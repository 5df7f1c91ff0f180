"""The largest logit, or the largest sum of scaled logit and noise, in two launches.

A block finds its chunk's winner, and the second launch compares the chunks' winners exactly as
``engine/sampling.py`` does. Within a chunk ``score + noise`` is compared as ``exp(-score) * E``,
where ``noise = -ln E``: that takes one logarithm less for each token of the vocabulary, and a
short one. It is right to 1e-6 of a nat, so only candidates as near as that could change places.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(0x7FFFFFFF)
LOWEST_SCORE = tl.constexpr(-30.0)  # engine/sampling.py says why
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def setting(settings, stride, index: tl.constexpr, row):
    return tl.load(settings + index * stride + row)


@triton.jit
def float_setting(settings, stride, index: tl.constexpr, row):
    return setting(settings, stride, index, row).to(tl.float32, bitcast=True)


@triton.jit
def is_filtered(settings, stride, row, vocab_size):
    """Whether the row has top_k, top_p or min_p."""
    top_k = setting(settings, stride, 3, row)
    top_p = float_setting(settings, stride, 4, row)
    floor = float_setting(settings, stride, 5, row)
    return (top_k < vocab_size) | (top_p < 1.0) | (floor > LOWEST_SCORE)


@triton.jit
def seed_of(settings, stride, row):
    low = setting(settings, stride, 6, row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = setting(settings, stride, 7, row).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def uniform(word):
    """``engine/philox.py``'s number between 0 and 1 of a 32-bit word."""
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(v, 0.9999999403953552)


@triton.jit
def token_noise(settings, stride, row, token):
    """``engine/philox.py``'s noise of a few tokens."""
    choice = setting(settings, stride, 8, row)
    position = setting(settings, stride, 9, row)
    w0, w1, w2, w3 = tl.philox(seed_of(settings, stride, row), token // 4, position, choice, 0)
    low = tl.where(token % 2 == 0, w0, w1)
    high = tl.where(token % 2 == 0, w2, w3)
    v = uniform(tl.where(token % 4 < 2, low, high))
    # log(1 - v) without losing a small v's digits (Kahan).
    u = 1.0 - v
    log = tl.where(u == 1.0, -v, tl.log(u) * tl.div_rn(-v, u - 1.0))
    return -tl.log(-log)


@triton.jit
def _exponential(v, APPROX: tl.constexpr):
    """``-ln(1 - v)``, right to 1e-6: by its series below 1/4, by the GPU's own log2 above."""
    series = tl.full(v.shape, 1.0 / 9, tl.float32)
    for n in tl.static_range(8, 0, -1):
        series = series * v + 1.0 / n
    u = 1.0 - v
    if APPROX:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log2 = tl.log2(u)
    return tl.where(v < 0.25, series * v, log2 * -LN2)


@triton.jit
def partials_kernel(
    logits,
    settings,
    values,
    ids,
    vocab_size,
    stride_logits,
    stride_settings,
    stride_partials,
    CHUNK: tl.constexpr,
    APPROX: tl.constexpr,
):
    """Grid: (chunks, rows)."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    out = row * tl.num_programs(0) + chunk
    source = logits + setting(settings, stride_settings, 0, row).to(tl.int64) * stride_logits
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    x = tl.load(source + token, mask=mask, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    x = tl.where(is_nan, float("-inf"), x)
    m = tl.max(x, 0)
    tl.store(values + out, m)
    tl.store(ids + 2 * stride_partials + out, tl.max(is_nan.to(tl.int32), 0))
    temperature = float_setting(settings, stride_settings, 2, row)
    if temperature <= 0:
        tl.store(ids + out, tl.min(tl.where(x == m, token, NEVER), 0))
    elif is_filtered(settings, stride_settings, row, vocab_size) == 0:
        choice = setting(settings, stride_settings, 8, row)
        position = setting(settings, stride_settings, 9, row)
        # Four tokens share a counter, one word each.
        counter = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        seed = seed_of(settings, stride_settings, row)
        w0, w1, w2, w3 = tl.philox(seed, counter, position, choice, 0)
        v = uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
        base = tl.where(m == float("-inf"), 0.0, m)
        # A division for each token would be a tenth of the kernel.
        race = tl.exp2((base - x) * (LOG2E / temperature)) * _exponential(v, APPROX)
        race = tl.where(mask, race, float("inf"))
        drawn = tl.min(tl.where(race == tl.min(race, 0), token, NEVER), 0)
        # None is drawn where logits are infinite.
        chosen = tl.load(source + drawn, mask=drawn < vocab_size, other=0.0).to(tl.float32)
        tl.store(values + stride_partials + out, chosen)
        tl.store(ids + stride_partials + out, drawn)


@triton.jit
def finish_kernel(
    settings,
    values,
    ids,
    filtered,
    ids_out,
    row_ids,
    chunks,
    vocab_size,
    stride_settings,
    stride_partials,
    stride_ids_out,
    TURNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < chunks
    place = row * chunks + chunk
    m = tl.load(values + place, mask=mask, other=float("-inf"))
    largest = tl.max(m, 0)
    is_nan = tl.load(ids + 2 * stride_partials + place, mask=mask, other=0)
    finite = (tl.max(is_nan, 0) == 0) & (tl.abs(largest) < float("inf"))
    temperature = float_setting(settings, stride_settings, 2, row)
    if temperature > 0:
        if is_filtered(settings, stride_settings, row, vocab_size):
            token = tl.load(filtered + row)
        else:
            x = tl.load(values + stride_partials + place, mask=mask, other=float("-inf"))
            drawn = tl.load(ids + stride_partials + place, mask=mask, other=NEVER)
            noise = token_noise(settings, stride_settings, row, drawn)
            total = tl.div_rn(x - largest, temperature) + noise
            token = tl.min(tl.where(total == tl.max(total, 0), drawn, NEVER), 0)
    else:
        first = tl.load(ids + place, mask=mask, other=NEVER)
        token = tl.min(tl.where(m == largest, first, NEVER), 0)
    token = tl.where(finite, token, -1)
    turn = setting(settings, stride_settings, 10, row)
    tl.store(ids_out + (turn % TURNS) * stride_ids_out + row, token)
    tl.store(row_ids + setting(settings, stride_settings, 1, row), tl.maximum(token, 0))
    # The next token's.
    position = setting(settings, stride_settings, 9, row)
    tl.debug_barrier()  # every thread has read both
    tl.store(settings + 9 * stride_settings + row, position + 1)
    tl.store(settings + 10 * stride_settings + row, turn + 1)
