"""The largest logit, or a bunch of tokens and a token of it, as ``engine/sampling.py`` says.

A block finds its chunk's largest logit or the bunch that wins there. The last block of a row to end
compares the chunks' winners, and draws the token; rows that may be drawn from few tokens
(``triton_filter.py``) have another launch for that. Noise doesn't hang on the logits: it is made
while the kernel in front still writes them.

Within a chunk ``ln(weight) + noise`` is compared as ``weight / E``, where ``noise = -ln E``, and
only a winner's logarithm is taken. Weights are right to 1e-6, so only candidates as near as that
could change places.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from octavo.kernels.step_inputs.triton import advance_row

NEVER = tl.constexpr(0x7FFFFFFF)
LOWEST_SCORE = tl.constexpr(-30.0)  # engine/sampling.py says why, as of BUNCH
BUNCH = tl.constexpr(64)
TOKENS, BUNCHES = tl.constexpr(0), tl.constexpr(1)  # kinds of noise, as in engine/philox.py
LOG2E = tl.constexpr(1.4426950408889634)


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
def _uniform(kind: tl.constexpr, number, key):
    """The number between 0 and 1 that ``engine/philox.py`` makes noise of."""
    seed, choice, position = key
    w0, w1, w2, w3 = tl.philox(seed, number // 4, position, choice, kind)
    low = tl.where(number % 2 == 0, w0, w1)
    high = tl.where(number % 2 == 0, w2, w3)
    word = tl.where(number % 4 < 2, low, high)
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(v, 0.9999999403953552)


@triton.jit
def token_noise(key, token):
    """``engine/philox.py``'s noise of a few tokens."""
    v = _uniform(TOKENS, token, key)
    return -tl.log(_minus_log1m(v))


@triton.jit
def _minus_log1m(v):
    """``-ln(1 - v)`` without losing a small v's digits (Kahan)."""
    u = 1.0 - v
    return tl.where(u == 1.0, v, tl.log(u) * tl.div_rn(v, u - 1.0))


@triton.jit
def _exp2(x, APPROX: tl.constexpr):
    if APPROX:  # tl.exp2 takes three instructions more, for numbers below 2^-126
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.exp2(x)
    return x


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


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
    bunch = chunk * (CHUNK // BUNCH) + tl.arange(0, CHUNK // BUNCH)
    luck = tl.zeros([CHUNK // BUNCH], tl.float32)
    if draws:
        luck = 1.0 / _minus_log1m(_uniform(BUNCHES, bunch, key))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    if DEPENDENT:
        gdc_wait()
    x = tl.load(source + token, mask=mask, other=float("-inf")).to(tl.float32)
    m = tl.reduce(x, 0, _larger)
    m = tl.where(m != m, float("inf"), m)  # the row isn't finite, the one way or the other
    tl.store(values + out, m)
    if draws:
        base = tl.where(m == float("-inf"), 0.0, m)
        # Bounded, as 0 * inf is no number. A division for each token would be slow.
        scale = tl.minimum(LOG2E / temperature, 1e38)
        weight = tl.reshape(_exp2((x - base) * scale, APPROX), [CHUNK // BUNCH, BUNCH])
        race, best = tl.max(tl.sum(weight, 1) * luck, 0, return_indices=True)
        tl.store(values + stride_partials + out, race)
        tl.store(ids + out, chunk * (CHUNK // BUNCH) + best)
    else:
        tl.store(ids + out, tl.min(tl.where(x == m, token, NEVER), 0))
    if FINISH:
        tl.debug_barrier()  # all of the partial is stored before one thread says so
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
            tl.store(counters + row, 0)
            winner = _winner(
                source, values, ids, row, chunks, temperature, draws, key, vocab_size,
                stride_partials, CHUNKS,
            )  # fmt: skip
            _hand_over(
                winner, row, address, settings, ids_out, row_ids, inputs, stride_settings,
                stride_ids_out, stride_slots, TURNS, GROUPS,
            )  # fmt: skip


@triton.jit
def finish_kernel(
    logits,
    settings,
    values,
    ids,
    filtered,
    ids_out,
    row_ids,
    inputs,
    chunks,
    vocab_size,
    stride_logits,
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
    source = logits + setting(settings, stride_settings, 0, row).to(tl.int64) * stride_logits
    token = _winner(
        source, values, ids, row, chunks, temperature, draws, key, vocab_size, stride_partials,
        CHUNKS,
    )  # fmt: skip
    if (temperature > 0) & is_few & (token >= 0):
        token = tl.load(filtered + row)
    _hand_over(
        token, row, address, settings, ids_out, row_ids, inputs, stride_settings, stride_ids_out,
        stride_slots, TURNS, GROUPS,
    )  # fmt: skip


@triton.jit
def _winner(
    source, values, ids, row, chunks, temperature, draws, key, vocab_size, stride_partials,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest logit's token or the one that is drawn, -1 where a row's logits are not
    finite."""
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < chunks
    place = row * chunks + chunk
    # Read past the L1, where older ones may lie; all at once, as each wait is as long as all.
    m = tl.load(values + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
    race = tl.load(values + stride_partials + place, mask=mask, other=0.0, cache_modifier=".cg")
    number = tl.load(ids + place, mask=mask, other=NEVER, cache_modifier=".cg")
    largest = tl.max(m, 0)
    finite = tl.abs(largest) < float("inf")
    if draws:
        bunch = _first_best(tl.div_rn(m - largest, temperature) + tl.log(race), number)
        token = tl.where(finite, bunch, 0) * BUNCH + tl.arange(0, BUNCH)
        x = tl.load(source + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(x - largest, temperature) + token_noise(key, token)
        winner = _first_best(score, token)
    else:
        winner = _first_best(m, number)
    return tl.where(finite, winner, -1)


@triton.jit
def _first_best(score, number):
    """The number that has the largest score, of several the lowest."""
    return tl.min(tl.where(score == tl.max(score, 0), number, NEVER), 0)


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
