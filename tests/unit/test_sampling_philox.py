"""The noise: Philox against its published vectors, Gumbel's shape, draws that don't overlap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.philox import BUNCHES, TOKENS, gumbel, noise_of, philox4x32


# Random123's tests/kat_vectors, the lines "philox4x32 10": counter, key, result.
@pytest.mark.parametrize(
    "vector",
    [
        "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
    ],
)
def test_philox_gives_the_published_words(vector: str) -> None:
    c0, c1, c2, c3, k0, k1, *result = (int(word, 16) for word in vector.split())
    words = philox4x32(np.array([c0, 1], np.uint64), c1, c2, c3, k0 | k1 << 32)
    assert words[:, 0].tolist() == result
    assert words.dtype == np.uint32
    assert words.shape == (4, 2)


def test_gumbel_is_finite_at_both_ends_and_follows_its_formula() -> None:
    words = np.array([0, 1, 2**16, 2**31, 2**32 - 2**12, 2**32 - 1], np.uint32)
    noise = gumbel(words)
    assert noise.dtype == np.float32
    expected = [-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in words.tolist()]
    np.testing.assert_allclose(noise[:-1], expected[:-1], rtol=1e-4, atol=1e-6)
    assert noise[0] == pytest.approx(22.87, abs=0.01)
    assert noise[-1] == pytest.approx(
        -2.81, abs=0.01
    )  # the smallest: 1 - 2^-24 is the last float32
    assert (np.diff(noise) < 0).all()


def test_gumbel_noise_has_gumbels_distribution() -> None:
    noise = noise_of(TOKENS, np.arange(100_000), seed=7, choice=0, position=0)
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    # Kolmogorov-Smirnov distance to exp(-exp(-x)); 1.63 / sqrt(N) is the 1 % point.
    theory = np.exp(-np.exp(-np.sort(noise).astype(np.float64)))
    assert np.abs(theory - np.linspace(0, 1, len(noise))).max() < 1.63 / math.sqrt(len(noise))


@settings(deadline=None, max_examples=50)
@given(
    kind=st.sampled_from([TOKENS, BUNCHES]),
    ids=st.sets(st.integers(0, 300_000), min_size=1, max_size=40)
    | st.tuples(st.integers(0, 1000), st.integers(1, 300)).map(lambda s: set(range(s[0], sum(s)))),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 127),
    position=st.integers(0, 2**31 - 1),
)
def test_noise_of_a_token_does_not_depend_on_the_other_tokens(
    kind: int, ids: set[int], seed: int, choice: int, position: int
) -> None:
    ordered = np.array(sorted(ids))
    noise = noise_of(kind, ordered, seed, choice, position)
    for token, value in list(zip(ordered, noise, strict=True))[:10]:
        words = philox4x32(np.array([token // 4], np.uint64), position, choice, kind, seed)
        assert gumbel(words[token % 4])[0] == value


def test_every_part_of_the_key_changes_the_noise() -> None:
    ids = np.arange(64)
    draws = [
        noise_of(kind, ids, seed, choice, position)
        for kind in (TOKENS, BUNCHES)
        for seed in (0, 1, 1 << 32, 2**63 - 1, 2**64 - 1)
        for choice in (0, 1)
        for position in (0, 1, 2)
    ]
    matrix = np.corrcoef(np.stack(draws))
    assert np.abs(matrix - np.eye(len(draws))).max() < 0.55  # 4.4 standard deviations of 1 / 8
