"""The largest logit, or the largest sum of scaled logit and noise.

A block finds its chunk's winner, and the last block of a row to end compares the chunks' winners
exactly as ``engine/sampling.py`` does; rows that may be drawn from few tokens
(``triton_filter.py``) have another launch for that. Noise doesn't hang on the logits: it is made
while the kernel in front still writes them.

Within a chunk ``score + noise`` is compared as ``exp(-score) * E``, where ``noise = -ln E``: that
takes one logarithm less for each token of the vocabulary, and a short one. It is right to 1e-6 of a
nat, so only candidates as near as that could change places.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from octavo.kernels.step_inputs.triton import advance_row

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
def noise_key(settings, stride, row):
    """What a row's noise hangs on: seed, choice and position."""
    low = setting(settings, stride, 6, row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = setting(settings, stride, 7, row).to(tl.uint32, bitcast=True).to(tl.uint64)
    choice = setting(settings, stride, 8, row)
    position = setting(settings, stride, 9, row)
    return (high << 32) | low, choice, position


@triton.jit
def uniform(word):
    """``engine/philox.py``'s number between 0 and 1 of a 32-bit word."""
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(v, 0.9999999403953552)


@triton.jit
def token_noise(key, token):
    """``engine/philox.py``'s noise of a few tokens."""
    seed, choice, position = key
    w0, w1, w2, w3 = tl.philox(seed, token // 4, position, choice, 0)
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
def choose_kernel(
    logits,
    settings,
    values,
    ids,
    filtered,
    counters,
    ids_out,
    row_ids,
    inputs,
    vocab_size,
    stride_logits,
    stride_settings,
    stride_partials,
    stride_ids_out,
    stride_slots,
    TURNS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FINISH: tl.constexpr,
    APPROX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (chunks, rows). ``FINISH``: the last block of a row chooses, none has a filter."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(0)
    out = row * chunks + chunk
    source = logits + setting(settings, stride_settings, 0, row).to(tl.int64) * stride_logits
    temperature = float_setting(settings, stride_settings, 2, row)
    key = noise_key(settings, stride_settings, row)
    address = _address(settings, stride_settings, row)
    draws = temperature > 0
    if not FINISH:
        draws &= is_filtered(settings, stride_settings, row, vocab_size) == 0
    race = tl.zeros([CHUNK], tl.float32)
    if draws:
        # Four tokens share a counter, one word each.
        counter = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        seed, choice, position = key
        w0, w1, w2, w3 = tl.philox(seed, counter, position, choice, 0)
        v = uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
        race = _exponential(v, APPROX)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    if DEPENDENT:
        gdc_wait()
    x = tl.load(source + token, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)  # the row isn't finite, the one way or the other
    m, first = tl.max(x, 0, return_indices=True)
    tl.store(values + out, m)
    tl.store(ids + out, chunk * CHUNK + first)
    if draws:
        base = tl.where(m == float("-inf"), 0.0, m)
        # A division for each token would be a tenth of the kernel.
        race *= tl.exp2((base - x) * (LOG2E / temperature))
        drawn = tl.min(tl.where(mask, race, float("inf")), 0, return_indices=True)[1]
        drawn += chunk * CHUNK
        # None is drawn where logits are infinite.
        chosen = tl.load(source + drawn, mask=drawn < vocab_size, other=0.0).to(tl.float32)
        tl.store(values + stride_partials + out, chosen)
        tl.store(ids + stride_partials + out, drawn)
    if FINISH:
        tl.debug_barrier()  # all of the partial is stored before one thread says so
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
            tl.store(counters + row, 0)
            winner = _winner(
                values, ids, row, chunks, temperature, draws, key, stride_partials, CHUNKS
            )
            _hand_over(
                winner, row, address, settings, ids_out, row_ids, inputs, stride_settings,
                stride_ids_out, stride_slots, TURNS, GROUPS,
            )  # fmt: skip


@triton.jit
def finish_kernel(
    settings,
    values,
    ids,
    filtered,
    ids_out,
    row_ids,
    inputs,
    chunks,
    vocab_size,
    stride_settings,
    stride_partials,
    stride_ids_out,
    stride_slots,
    TURNS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid: (rows,). ``filtered`` has the tokens of the rows that were drawn from few."""
    row = tl.program_id(0)
    temperature = float_setting(settings, stride_settings, 2, row)
    is_few = is_filtered(settings, stride_settings, row, vocab_size)
    draws = (temperature > 0) & (is_few == 0)
    key = noise_key(settings, stride_settings, row)
    address = _address(settings, stride_settings, row)
    token = _winner(values, ids, row, chunks, temperature, draws, key, stride_partials, CHUNKS)
    if (temperature > 0) & is_few & (token >= 0):
        token = tl.load(filtered + row)
    _hand_over(
        token, row, address, settings, ids_out, row_ids, inputs, stride_settings, stride_ids_out,
        stride_slots, TURNS, GROUPS,
    )  # fmt: skip


@triton.jit
def _winner(
    values, ids, row, chunks, temperature, draws, key, stride_partials, CHUNKS: tl.constexpr
):
    """The best of a row's chunks' winners, -1 where its logits are not finite."""
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < chunks
    place = row * chunks + chunk
    own = place + tl.where(draws, stride_partials, 0)
    # Read past the L1, where older ones may lie; all at once, as each wait is as long as all.
    m = tl.load(values + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
    score = tl.load(values + own, mask=mask, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(ids + own, mask=mask, other=NEVER, cache_modifier=".cg")
    largest = tl.max(m, 0)
    if draws:
        score = tl.div_rn(score - largest, temperature) + token_noise(key, token)
    token = tl.min(tl.where(score == tl.max(score, 0), token, NEVER), 0)
    return tl.where(tl.abs(largest) < float("inf"), token, -1)


@triton.jit
def _address(settings, stride, row):
    """Where a row's token goes: its row of the step, its position and its turn."""
    step_row = setting(settings, stride, 1, row)
    position = setting(settings, stride, 9, row)
    turn = setting(settings, stride, 10, row)
    return step_row, position, turn


@triton.jit
def _hand_over(
    token,
    row,
    address,
    settings,
    ids_out,
    row_ids,
    inputs,
    stride_settings,
    stride_ids_out,
    stride_slots,
    TURNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Give a row's token to all who want it, and count up what counts tokens."""
    step_row, position, turn = address
    tl.store(ids_out + (turn % TURNS) * stride_ids_out + row, token)
    tl.store(row_ids + step_row, tl.maximum(token, 0))
    if inputs is not None and step_row == row:
        advance_row(row, tl.maximum(token, 0), inputs, stride_slots, GROUPS)
    # Every thread has read both: all have met since, to find the winner.
    tl.store(settings + 9 * stride_settings + row, position + 1)
    tl.store(settings + 10 * stride_settings + row, turn + 1)
