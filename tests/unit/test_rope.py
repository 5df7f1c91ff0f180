"""Rotary embedding against formulas of its sources, without torch; tests/cpu has transformers'."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.checkpoint.config import normalize_config
from octavo.models.families import spec_from_config
from octavo.models.rope import cos_sin, inverse_frequencies, yarn_attention_factor
from octavo.models.spec import RopeSpec

YARN_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def rope_of(rope_scaling: dict[str, Any] | None, **config: Any) -> RopeSpec:
    """The rotary embedding of a Llama with heads of 64."""
    return spec_of(rope_scaling, **config).layers[0].rope


def spec_of(rope_scaling: dict[str, Any] | None, **config: Any):
    return spec_from_config(
        normalize_config(
            {
                "model_type": "llama",
                "hidden_size": 256,
                "num_attention_heads": 4,
                "num_hidden_layers": 1,
                "max_position_embeddings": 32768,
                "rope_theta": 10000.0,
                "rope_scaling": rope_scaling,
                **config,
            }
        )
    )


def test_default_frequencies() -> None:
    exact = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(inverse_frequencies(rope_of(None)), exact, rtol=2e-7)


def test_rows_are_those_of_their_positions() -> None:
    rope = rope_of(None)
    positions = np.array([0, 1, 500, 31], np.int32)
    cos, sin = cos_sin(rope, positions)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (4, 32)
    angles = positions[:, None] * inverse_frequencies(rope).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=4e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=4e-5)


def test_linear_stretches_positions() -> None:
    """O25: factor 4 puts position 40 where position 10 was."""
    stretched, plain = rope_of({"type": "linear", "factor": 4.0}), rope_of(None)
    at_40 = cos_sin(stretched, np.array([40], np.int32))
    at_10 = cos_sin(plain, np.array([10], np.int32))
    np.testing.assert_allclose(at_40, at_10, atol=1e-6)


def test_llama3_keeps_fast_and_slows_slow_pairs() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = inverse_frequencies(rope_of(None, rope_theta=500000.0))
    scaled = inverse_frequencies(rope_of(scaling, rope_theta=500000.0))
    turns = 8192 * plain / (2 * math.pi)  # within the trained length
    ratio = plain / scaled
    np.testing.assert_allclose(ratio[turns > 4], 1.0)
    np.testing.assert_allclose(ratio[turns < 1], 8.0)
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 1
    assert ((between > 1) & (between < 8)).all()


@pytest.mark.parametrize(
    ("extra", "cos_at_0"),
    [
        ({}, 1.13863),
        ({"attention_factor": 1.0}, 1.0),
        ({"factor": 16.0}, 1.27726),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 0.5}, 1.27726),  # one of the pair alone counts for nothing
        ({"factor": 16.0, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.55452 / 1.27726),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_magnitude(extra: dict[str, Any], cos_at_0: float) -> None:
    """O26."""
    cos, sin = cos_sin(rope_of({**YARN_4, **extra}), np.array([0], np.int32))
    np.testing.assert_allclose(cos, cos_at_0, rtol=1e-5)
    np.testing.assert_array_equal(sin, 0)


def test_yarn_ramp() -> None:
    """Pairs of more than 32 turns are kept, those of less than one slowed by the factor."""
    plain = inverse_frequencies(rope_of(None))
    ratio = plain / inverse_frequencies(rope_of(YARN_4))
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 64], 1.0)
    np.testing.assert_allclose(ratio[turns < 0.5], 4.0)
    assert (np.diff(ratio) >= -1e-6).all()


@pytest.mark.parametrize("change", [{"beta_fast": 16.0}, {"beta_slow": 4.0}, {"truncate": False}])
def test_yarn_settings_matter(change: dict[str, Any]) -> None:
    before = inverse_frequencies(rope_of(YARN_4))
    assert (inverse_frequencies(rope_of({**YARN_4, **change})) != before).any()


def test_yarn_doesnt_lengthen_twice() -> None:
    """O26: max_position_embeddings is the stretched length already."""
    assert spec_of(YARN_4).max_position == 32768


def test_yarn_without_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    assert rope_of(scaling) == rope_of(YARN_4)


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_partial_rotation(place: str) -> None:
    """O25: partial_rotary_factor is honoured in both places."""
    if place == "top":
        rope = rope_of(None, partial_rotary_factor=0.5)
    else:
        rope = rope_of(None, rope_parameters={"partial_rotary_factor": 0.5})
    assert rope.rotary_dim == 32
    assert cos_sin(rope, np.zeros(3, np.int32))[0].shape == (3, 16)
    exact = 10000.0 ** (-np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(inverse_frequencies(rope), exact, rtol=2e-7)


@given(
    factor=st.floats(1, 64),
    mscale=st.floats(0.1, 4),
)
@settings(deadline=None)
def test_equal_mscales_cancel(factor: float, mscale: float) -> None:
    assert yarn_attention_factor(factor, mscale, mscale) == pytest.approx(1.0)
    assert yarn_attention_factor(factor) >= 1.0


@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    theta=st.floats(100, 1e7),
    pairs=st.integers(1, 128),
    factor=st.floats(1, 40),
    original=st.integers(64, 131072),
)
@settings(deadline=None)
def test_scaling_only_slows(
    kind: Any, theta: float, pairs: int, factor: float, original: int
) -> None:
    """No rule makes a pair faster than it was, or slower than by the factor."""
    plain = inverse_frequencies(RopeSpec(theta, 2 * pairs))
    scaled = inverse_frequencies(
        RopeSpec(theta, 2 * pairs, kind, factor=factor, original_max_position=original)
    )
    assert (scaled <= plain * (1 + 1e-6)).all()
    assert (scaled >= plain / factor * (1 - 1e-6)).all()
