"""Draws on a CPU. An id is exactly the one that ``engine/sampling.py`` draws, or ``UNSURE``.

Sums and logarithms are rounded otherwise here than in numpy. So where two tokens, or a sum and the
``top_p`` that it is held against, are closer than rounding can tell, the op says so and leaves the
row to numpy: about one in 10,000. What saves the time: scores are gathered in bunches of which most
are passed over, and only what may be kept is sorted.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.kernels.jit import jit
from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.program import fetch_add, float32s, int32s, int64s, op
from octavo.kernels.vector_ir import I64, exp, load, loop, reduce_sum, variable, zeros

UNSURE = -2
LOWEST_SCORE = np.float32(-30.0)  # as in engine/sampling.py, like BUNCH
BUNCH = 64

_LANES = 16
_TOKENS, _BUNCHES = np.uint64(0), np.uint64(1)  # as in engine/philox.py
_MOST_SORTED = 8192
_SURE_SHARE = 4e-7  # of a sum of weights
_SURE_NOISE = 2e-5
_CUTS = tuple(-2.0 * i for i in range(2, 16))  # scores down to which is gathered, if need be
_FLOAT = 4

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_K0, _K1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def scratch_bytes(vocab_size: int) -> int:
    """Memory that a thread needs: scores, the ids gathered, and sort keys."""
    return 4 * vocab_size + 4 * vocab_size + 8 * _MOST_SORTED


@intrinsic
def _sum_of_exp(typing, address, count):
    """``sum(exp(x))`` over the whole vectors of ``count`` float32."""

    def emit(context, b, signature, arguments):
        address, count = arguments
        total = variable(b, zeros(_LANES))
        stop = b.and_(count, I64(-_LANES))
        with loop(b, I64(0), stop, step=_LANES) as i:
            x = load(b, b.add(address, b.mul(i, I64(_FLOAT))), 0, _LANES)
            b.store(b.fadd(b.load(total), exp(b, x)), total)
        return reduce_sum(b, b.load(total))

    return types.float32(types.int64, types.int64), emit


@jit
def _weight(scores, first, stop):
    """``sum(exp(score))``, float64, by pieces that a float32 sum is good for."""
    total = 0.0
    for start in range(first, stop, 1024):
        end = min(start + 1024, stop)
        whole = (end - start) // _LANES * _LANES
        total += _sum_of_exp(scores.ctypes.data + _FLOAT * start, whole)
        for i in range(start + whole, end):
            total += math.exp(scores[i])
    return total


@jit
def _reaches(scores, start, stop, cut):
    """Whether any of the scores is at least ``cut``."""
    some = False
    for i in range(start, stop):
        some |= scores[i] >= cut
    return some


@jit
def _gather(scores, cut, ids, limit):
    """Ids whose score is at least ``cut``, ascending, into ``ids``; how many, or UNSURE where
    ``limit`` might not hold them."""
    count = 0
    for start in range(0, len(scores), BUNCH):
        stop = min(start + BUNCH, len(scores))
        if _reaches(scores, start, stop, cut):
            if count + stop - start > limit:
                return UNSURE
            for i in range(start, stop):
                if scores[i] >= cut:
                    ids[count] = i
                    count += 1
    return count


@jit
def _words(counter, position, choice, kind, seed):
    """Philox4x32-10: see ``engine/philox.py``."""
    x0, x1, x2, x3 = counter, position, choice, kind
    k0, k1 = seed & _LOW, seed >> _HIGH
    for _ in range(10):
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x1 = (p1 >> _HIGH) ^ x1 ^ k0, p1 & _LOW
        x2, x3 = (p0 >> _HIGH) ^ x3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _K0) & _LOW, (k1 + _K1) & _LOW
    return x0, x1, x2, x3


@jit
def _noise(kind, number, seed, choice, position, needed):
    """``engine.philox.noise_of`` but for rounding, or -inf where it is below ``needed``."""
    words = _words(np.uint64(number // 4), position, choice, kind, seed)
    place = number % 4
    word = words[0]
    if place == 1:
        word = words[1]
    elif place == 2:
        word = words[2]
    elif place == 3:
        word = words[3]
    v = np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)
    v = min(v, np.float32(1 - 2.0**-24))
    # It is below -ln(v), and v at least the power of two in it, whose exponent a float holds.
    if 0.6931472 * (127 - (np.int64(np.float32(v).view(np.int32)) >> 23)) < needed:
        return -np.inf
    return -math.log(-math.log1p(-np.float64(v)))


@jit
def _draw_among(scores, ids, count, seed, choice, position):
    """The winner among ``count`` ascending ids."""
    best, second, winner = -np.inf, -np.inf, -1
    for i in range(count):
        token = ids[i]
        needed = second - scores[token]
        value = scores[token] + _noise(_TOKENS, token, seed, choice, position, needed)
        if value > best:
            best, second, winner = value, best, token
        elif value > second:
            second = value
    return winner if best - second > _SURE_NOISE else UNSURE


@jit
def _draw_bunch(scores, ids, seed, choice, position):
    """The ids of the bunch that is drawn, into ``ids``; how many, or UNSURE."""
    best, second, winner = -np.inf, -np.inf, -1
    for start in range(0, len(scores), BUNCH):
        stop = min(start + BUNCH, len(scores))
        if _reaches(scores, start, stop, LOWEST_SCORE):
            value = math.log(_weight(scores, start, stop))
            value += _noise(_BUNCHES, start // BUNCH, seed, choice, position, second - value)
            if value > best:
                best, second, winner = value, best, start
            elif value > second:
                second = value
    if best - second <= _SURE_NOISE:
        return UNSURE
    count = min(BUNCH, len(scores) - winner)
    for i in range(count):
        ids[i] = winner + i
    return count


@jit
def _keep(scores, lowest, top_k, top_p, ids, keys):
    """The ids that ``top_k`` and ``top_p`` leave, ascending, in ``ids``; how many, or UNSURE."""
    width, count = len(scores), -1
    total = _weight_above(scores, lowest) if top_k >= width else 0.0
    target = top_p * (1 - 1e-6) * total
    for cut in _CUTS:
        cut = max(np.float32(cut), lowest)
        count = _gather(scores, cut, ids, _MOST_SORTED)
        if count < 0:
            return UNSURE
        enough = count >= top_k
        if top_k >= width:
            mass = 0.0
            for i in range(count):
                mass += math.exp(scores[ids[i]])
            enough = mass > target + _SURE_SHARE * total
        if enough or cut == lowest:
            break
    for i in range(count):
        bits = np.uint64(np.float32(scores[ids[i]]).view(np.uint32)) & np.uint64(0x7FFFFFFF)
        keys[i] = bits << _HIGH | np.uint64(ids[i])
    _sort(keys, count)
    count = min(count, top_k)
    if top_p < 1:
        if top_k < width:
            total = 0.0
            for i in range(count):
                total += math.exp(scores[np.int64(keys[i] & _LOW)])
            target = top_p * (1 - 1e-6) * total
        mass = 0.0
        for i in range(count):
            mass += math.exp(scores[np.int64(keys[i] & _LOW)])
            if abs(mass - target) < _SURE_SHARE * total:
                return UNSURE
            if mass > target:
                count = i + 1
                break
    for i in range(count):
        keys[i] &= _LOW
    _sort(keys, count)
    for i in range(count):
        ids[i] = keys[i]
    return count


@jit
def _sort(keys, count):
    """Sort the first ``count`` in place, by a heap: numba's own sort allocates."""
    for place in range(count // 2 - 1, -1, -1):
        _sink(keys, place, count)
    for last in range(count - 1, 0, -1):
        keys[0], keys[last] = keys[last], keys[0]
        _sink(keys, 0, last)


@jit
def _sink(keys, place, count):
    """Move the number at ``place`` down, below those that are larger."""
    key = keys[place]
    while True:
        child = 2 * place + 1
        if child + 1 < count and keys[child + 1] > keys[child]:
            child += 1
        if child >= count or keys[child] <= key:
            break
        keys[place] = keys[child]
        place = child
    keys[place] = key


@jit
def _weight_above(scores, lowest):
    total = _weight(scores, 0, len(scores))
    if lowest > LOWEST_SCORE:
        total = 0.0
        for i in range(len(scores)):
            if scores[i] >= lowest:
                total += math.exp(scores[i])
    return total


@op(
    rows="i8",
    logits="i8",
    width="i8",
    best="i8",
    indices="i8",
    temperature="i8",
    top_k="i8",
    top_p="i8",
    floor="i8",
    seed="i8",
    choice="i8",
    position="i8",
    scratch="i8",
    scratch_bytes="i8",
    ids="i8",
)
def draw(thread, num_threads, counter, args):
    """``ids[r]`` for row ``r`` of ``rows``: drawn from ``logits[indices[r]]`` [width] at
    ``temperature[r]``, at 0 the largest, which is ``best[indices[r]]`` (-1: none is finite).

    All but numbers are addresses of arrays as in ``SamplingBatch``; ``scratch`` has
    ``scratch_bytes`` for each thread. An item is a row."""
    a = carray(args, 1)[0]
    width = a.width
    memory = a.scratch + thread * a.scratch_bytes
    scores = float32s(memory, width)
    ids = int32s(memory + 4 * width, width)
    keys = int64s(memory + 8 * width, _MOST_SORTED).view(np.uint64)
    while True:
        r = fetch_add(counter, 1)
        if r >= a.rows:
            return
        index = np.int64(int32s(a.indices, a.rows)[r])
        best = int32s(a.best, index + 1)[index]
        temperature = float32s(a.temperature, a.rows)[r]
        found = np.int64(best)
        if best >= 0 and temperature > 0:
            values = float32s(a.logits + 4 * index * width, width)
            top = values[best]
            for i in range(width):
                scores[i] = (values[i] - top) / temperature
            top_k = np.int64(int32s(a.top_k, a.rows)[r])
            top_p = np.float64(float32s(a.top_p, a.rows)[r])
            lowest = float32s(a.floor, a.rows)[r]
            seed = np.uint64(int64s(a.seed, a.rows)[r])
            choice = np.uint64(int32s(a.choice, a.rows)[r])
            position = np.uint64(int32s(a.position, a.rows)[r])
            if top_k < width or top_p < 1:
                found = _keep(scores, lowest, top_k, top_p, ids, keys)
            elif lowest > LOWEST_SCORE:
                found = _gather(scores, lowest, ids, width)
            else:
                found = _draw_bunch(scores, ids, seed, choice, position)
            if found >= 0:
                found = _draw_among(scores, ids, found, seed, choice, position)
        int32s(a.ids, a.rows)[r] = found
