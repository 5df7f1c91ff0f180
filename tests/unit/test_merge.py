"""The merge on numpy: the source's worked examples, empty partials, sinks, order and nesting."""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import merge_lse, merge_partials
from octavo.attention.merge import log_sum_exp, natural_lse


def partial(scores, values):
    """One segment by chapter 2 of the source: scores [S], values [S, Dv] -> (out, m, l)."""
    m = np.max(scores)
    weights = np.exp(scores - m)
    return weights @ values / weights.sum(), m, weights.sum()


def stacked(*partials):
    return tuple(
        np.stack([np.asarray(x) for x in column]) for column in zip(*partials, strict=True)
    )


SEGMENT_1 = (np.array([1.0, 2.0]), np.array([[1.0, 0.0], [0.0, 1.0]]))
SEGMENT_2 = (np.array([0.0, 3.0]), np.array([[1.0, 1.0], [2.0, 0.0]]))


def test_source_2_7_partials():
    out, m, l = partial(*SEGMENT_1)
    assert (m, l) == (2, pytest.approx(1.368, abs=1e-3))
    np.testing.assert_allclose(out, [0.269, 0.731], atol=1e-3)
    out, m, l = partial(*SEGMENT_2)
    assert (m, l) == (3, pytest.approx(1.050, abs=1e-3))
    np.testing.assert_allclose(out, [1.952, 0.0476], atol=1e-3)


def test_source_5_2_four_steps():
    out, m, l = merge_partials(
        np.array([[0.269, 0.731], [1.952, 0.0476]]), np.array([2.0, 3.0]), np.array([1.368, 1.050])
    )
    assert np.round(out, 3).tolist() == [1.407, 0.269]
    assert m == 3
    assert round(float(l), 3) == 1.553


def test_source_5_3_denominator_is_the_unsplit_one():
    out, m, l = merge_partials(*stacked(partial(*SEGMENT_1), partial(*SEGMENT_2)))
    whole = partial(*(np.concatenate(parts) for parts in zip(SEGMENT_1, SEGMENT_2, strict=True)))
    np.testing.assert_allclose(out, whole[0], rtol=1e-15)
    assert (m, l) == (whole[1], pytest.approx(whole[2], rel=1e-15))
    assert np.round(out, 3).tolist() == [1.407, 0.269]
    assert round(float(l), 3) == 1.553


def test_source_5_5_round_numbers():
    out, m, _ = merge_partials(
        np.array([[0.25, 0.75], [1.0, 0.0]]), np.array([2.0, 5.0]), np.array([4.0, 2.0])
    )
    assert m == 5
    # The source rounds exp(-3) to 0.05, so its last digit is one of rounding.
    np.testing.assert_allclose(out, [0.932, 0.068], atol=5e-4)


def test_a_concatenation_is_not_a_merge():
    """Chapter 5.1: the answer keeps its shape however many drafts there are."""
    out, m, l = merge_partials(np.ones((7, 3, 4)), np.zeros((7, 3)), np.ones((7, 3)))
    assert (out.shape, m.shape, l.shape) == ((3, 4), (3,), (3,))


EMPTY = (np.zeros((3, 4), np.float32), np.full(3, -np.inf, np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_t1_nothing_but_empty_segments(count):
    parts = tuple(np.stack([x] * count) if count else x[None][:0] for x in EMPTY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, m, l = merge_partials(*parts)
        lse = log_sum_exp(m, l)
    for got, wanted in zip((out, m, l, lse), (*EMPTY, EMPTY[1]), strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == np.float32


def test_t1_two_empty_states_1_1_64():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = merge_lse(np.zeros((2, 1, 1, 64)), np.full((2, 1, 1), -np.inf))
    np.testing.assert_array_equal(out, np.zeros((1, 1, 64)))
    np.testing.assert_array_equal(lse, [[-np.inf]])


def test_t2_empty_on_both_sides_in_either_convention():
    rng = np.random.default_rng(2)
    out = rng.standard_normal((2, 32, 8, 64)).astype(np.float32)
    lse = rng.standard_normal((2, 32, 8)).astype(np.float32)
    lse[:, :8] = -np.inf  # a quarter both empty, as ours
    lse[:, 8:11] = np.inf  # a tenth both empty, as FlashAttention 2's
    lse[0, 11:16] = -np.inf  # some empty on one side
    out[np.isinf(lse)] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged, total = merge_lse(out, natural_lse(lse))
    np.testing.assert_array_equal(merged[:11], 0)
    np.testing.assert_array_equal(total[:11], -np.inf)
    np.testing.assert_array_equal(merged[11:16], out[1, 11:16])
    np.testing.assert_array_equal(total[11:16], lse[1, 11:16])
    assert np.isfinite(merged).all()


def test_t14_base_2_is_converted_before_merging():
    """A prefix of 3,072 tokens and a suffix of 64, the lse of both in base 2."""
    rng = np.random.default_rng(14)
    scores, values = rng.standard_normal(3136), rng.standard_normal((3136, 16))
    prefix, suffix = partial(scores[:3072], values[:3072]), partial(scores[3072:], values[3072:])
    out, m, l = stacked(prefix, suffix)
    base_2 = (m + np.log(l)) / math.log(2)
    merged, lse = merge_lse(out, natural_lse(base_2, base=2))
    whole = partial(scores, values)
    np.testing.assert_allclose(merged, whole[0], rtol=1e-12)
    np.testing.assert_allclose(lse, whole[1] + np.log(whole[2]), rtol=1e-12)
    wrong, _ = merge_lse(out, base_2)
    assert np.abs(wrong - whole[0]).max() > 0.01 * np.abs(whole[0]).max()


def test_t15_inputs_are_left_alone():
    rng = np.random.default_rng(15)
    parts = tuple(rng.standard_normal(s) for s in ((3, 5, 192), (3, 5), (3, 5)))
    before = [x.copy() for x in parts]
    merge_partials(*parts)
    for x, y in zip(parts, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_sink_is_one_more_partial():
    scores, values = SEGMENT_1
    sink = 1.5
    out, m, l = merge_partials(*stacked(partial(scores, values), (np.zeros(2), sink, 1.0)))
    weights = np.exp(np.append(scores, sink) - m)
    np.testing.assert_allclose(out, weights[:2] @ values / weights.sum(), rtol=1e-15)
    assert l == pytest.approx(weights.sum(), rel=1e-15)


def test_nan_is_not_swallowed():
    out, _, _ = merge_partials(np.array([[1.0], [np.nan]]), np.zeros(2), np.ones(2))
    assert np.isnan(out).all()


@given(
    scores=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_any_cuts_in_any_order_and_nesting_give_the_unsplit_answer(scores, cuts, seed, data):
    scores = np.array(scores)
    values = np.random.default_rng(seed).standard_normal((len(scores), 3))
    edges = [0, *sorted(min(c, len(scores)) for c in cuts), len(scores)]
    parts = [
        partial(scores[a:b], values[a:b]) if a < b else (np.zeros(3), -np.inf, 0.0)
        for a, b in pairwise(edges)
    ]
    parts = data.draw(st.permutations(parts))
    middle = data.draw(st.integers(0, len(parts)))
    whole = partial(scores, values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat = merge_partials(*stacked(*parts))
        halves = [
            merge_partials(*stacked(*half)) for half in (parts[:middle], parts[middle:]) if half
        ]
        nested = merge_partials(*stacked(*halves))
    for got in (flat, nested):
        np.testing.assert_allclose(got[0], whole[0], rtol=1e-12, atol=1e-12)
        assert got[1] == whole[1]
        assert got[2] == pytest.approx(whole[2], rel=1e-12)
