"""Rotary position embedding: frequencies, and the cos/sin rows of a step's positions.

Su et al. 2021 (arXiv:2104.09864), in Hugging Face's half-split layout. The rules that stretch it
past the trained length follow transformers' ``modeling_rope_utils``, whose arithmetic is float32;
so is this, since at position 100,000 the rounding of a frequency is seen in the angle.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from octavo.models.spec import RopeSpec

Float32 = NDArray[np.float32]


@cache
def inverse_frequencies(rope: RopeSpec) -> Float32:
    """Radians per position of each rotated pair, float32 ``[rotary_dim / 2]``, read-only."""
    frequencies = _inverse_frequencies(rope)
    frequencies.flags.writeable = False
    return frequencies


def _inverse_frequencies(rope: RopeSpec) -> Float32:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    wavelengths = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)  # over 2 pi
    frequencies = np.float32(1) / wavelengths
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths)
    return frequencies


def cos_sin(rope: RopeSpec, positions: NDArray[np.int32]) -> tuple[Float32, Float32]:
    """Cosine and sine rows, float32 ``[T, rotary_dim / 2]``, of positions ``[T]``.

    Both are scaled by ``attention_factor``, as transformers does, which scales every score by its
    square. Rows are computed as they are needed, so no table ends before the context does.
    """
    angles = positions.astype(np.float32)[:, None] * inverse_frequencies(rope)
    scale = np.float32(rope.attention_factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's magnitude correction (arXiv:2309.00071, eq. 22), by transformers' rule: with both
    ``mscale`` the ratio of theirs, else ``0.1 ln(factor) + 1``."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _llama3(rope: RopeSpec, frequencies: Float32) -> Float32:
    """Llama 3.1: slow pairs are slowed by ``factor``, fast ones kept, those between blended."""
    original = rope.original_max_position
    wavelengths = np.float32(2 * math.pi) / frequencies
    kept = (np.float32(original) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    slowed = frequencies / np.float32(rope.factor)
    blended = (np.float32(1) - kept) * slowed + kept * frequencies
    result = np.where(wavelengths > original / rope.low_freq_factor, slowed, blended)
    return np.where(wavelengths < original / rope.high_freq_factor, frequencies, result)


def _yarn(rope: RopeSpec, wavelengths: Float32) -> Float32:
    """YaRN: pairs that turn more than ``beta_fast`` times within the trained length are kept,
    those below ``beta_slow`` turns are slowed by ``factor``, with a linear ramp between."""
    original = rope.original_max_position

    def pair_that_turns(times: float) -> float:
        turns = math.log(original / (times * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp: Float32 = (pairs - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    slowed: Float32 = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    return slowed * (np.float32(1) - kept) + (np.float32(1) / wavelengths) * kept
