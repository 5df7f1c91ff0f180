"""The one source of randomness: noise that hangs on a seed, a choice, a position and a number only.

A counter-based generator has no state to carry or share: a draw is a pure function of its key and
counter, so a seeded request gives the same ids alone, in any batch, after a preemption and on any
device. Philox4x32-10 is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011); it is also what CUDA's and PyTorch's generators are built on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]

# What noise is of: single tokens, or bunches of them (``engine/sampling.py``).
TOKENS, BUNCHES = 0, 1

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_LOW = np.uint64(_WORD)
_HIGH = np.uint64(32)


def philox4x32(c0: UInt64, c1: int, c2: int, c3: int, key: int) -> UInt32:
    """Ten rounds of Philox for N counters that differ in their first word.

    ``c0 [N]`` and the ints hold 32 bits each, ``key`` 64. Returns ``[4, N]`` words.
    """
    # Words are kept in 64 bits, which their products need. Those that don't yet depend on c0 stay
    # scalars: the first rounds are half the work.
    words: list[Any] = [c0, np.uint64(c1), np.uint64(c2), np.uint64(c3)]
    x0, x1, x2, x3 = words
    k0, k1 = key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        product0 = x0 * _MULTIPLIERS[0]
        product1 = x2 * _MULTIPLIERS[1]
        x0, x1 = (product1 >> _HIGH) ^ (x1 ^ np.uint64(k0)), product1 & _LOW
        x2, x3 = (product0 >> _HIGH) ^ (x3 ^ np.uint64(k1)), product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    result = np.empty((4, len(c0)), np.uint32)
    result[0], result[1], result[2], result[3] = x0, x1, x2, x3
    return result


def gumbel(words: UInt32) -> NDArray[np.float32]:
    """Standard Gumbel noise from 32-bit words, every step in float32; from -2.82 to 22.88.

    ``v = min(word * 2^-32 + 2^-33, 1 - 2^-24)`` lies strictly between 0 and 1, and the noise is
    ``-ln(-ln(1 - v))``. Small ``v``, where float32 is dense, make the large values that decide an
    argmax; the other way round the top would be a coarse grid, and ties common in a large
    vocabulary.
    """
    v = words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    np.minimum(v, np.float32(1 - 2**-24), out=v)
    noise: NDArray[np.float32] = -np.log(-np.log1p(-v))
    return noise


def noise_of(
    kind: int, numbers: NDArray[np.int64], seed: int, choice: int, position: int
) -> NDArray[np.float32]:
    """Gumbel noise ``[N]`` of one draw, for N (at least one) ascending numbers of ``TOKENS`` or
    ``BUNCHES``.

    Four numbers share a counter: ``n`` takes word ``n % 4`` of the counter ``(n // 4, position,
    choice, kind)`` under the 64-bit key ``seed``.
    """
    counters = numbers // 4
    first, stop = int(counters[0]), int(counters[-1]) + 1
    if stop - first < len(numbers):  # dense: compute every counter of the range once
        span = np.arange(first, stop, dtype=np.uint64)
        words = philox4x32(span, position, choice, kind, seed)
        return gumbel(words.T.reshape(-1)[numbers - 4 * first])
    words = philox4x32(counters.astype(np.uint64), position, choice, kind, seed)
    return gumbel(words[numbers % 4, np.arange(len(numbers))])
