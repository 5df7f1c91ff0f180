"""The sampling rules: reported cases O09 to O16, frequencies, and a slow reference for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.engine.philox import BUNCHES, TOKENS, gumbel, philox4x32
from octavo.engine.sampling import (
    BUNCH,
    IMPOSSIBLE_LOGPROB,
    INVALID_TOKEN,
    SampleOutput,
    SamplingRow,
    make_sampling_batch,
    sample,
)
from octavo.sampling_params import SamplingParams

A, B, C, D, Q = (ord(letter) for letter in "abcdq")
VOCAB = 261


def logits_row(entries: Mapping[int, float], rest: float = 0.0) -> NDArray[np.float32]:
    row = np.full(VOCAB, rest, np.float32)
    for token, value in entries.items():
        row[token] = value
    return row


def row(
    prompt: str | list[int] = "",
    output: str | list[int] = "",
    seed: int = 0,
    choice: int = 0,
    banned: tuple[int, ...] = (),
    position: int | None = None,
    **params: Any,
) -> SamplingRow:
    prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    output_ids = list(output.encode()) if isinstance(output, str) else output
    position = len(output_ids) if position is None else position
    settings = SamplingParams(**params)
    return SamplingRow(settings, prompt_ids, output_ids, seed, choice, position, banned)


def run(logits: Any, rows: list[SamplingRow], **prompt: Any) -> SampleOutput:
    matrix = np.atleast_2d(np.asarray(logits, np.float32))
    if len(rows) > 1 and len(matrix) == 1:
        matrix = np.repeat(matrix, len(rows), axis=0)
    before = matrix.copy()
    prompt.setdefault("sample_indices", range(len(rows)))
    batch = make_sampling_batch(rows, vocab_size=matrix.shape[1], **prompt)
    output = sample(matrix, batch)
    np.testing.assert_array_equal(matrix, before)  # the caller's logits are left alone
    assert output.token_ids.dtype == np.int32
    return output


def tokens(logits: Any, rows: list[SamplingRow]) -> list[int]:
    return run(logits, rows).token_ids.tolist()


# ---- O09: temperature


@pytest.mark.parametrize("temperature", [0, 1e-320, 1e-45, 1e-38, 1e-10, 1e-6, 1e-4, 0.01])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tiny_temperatures_are_greedy(temperature: float, dtype: type) -> None:
    logits = logits_row({A: 12, B: 11}).astype(dtype)
    output = run(logits, [row(temperature=temperature, seed=s, logprobs=2) for s in range(50)])
    assert set(output.token_ids.tolist()) == {A}
    first = output.logprobs[0]
    assert first is not None
    assert list(first) == [A, B]
    assert all(math.isfinite(entry.logprob) for entry in first.values())


@pytest.mark.parametrize("temperature", [1e9, 1e38, 1e300])
def test_huge_temperatures_are_uniform(temperature: float) -> None:
    logits = logits_row({A: 12, B: 11})
    drawn = tokens(logits, [row(temperature=temperature, seed=s) for s in range(400)])
    assert len(set(drawn)) > 180  # 261 * (1 - e^(-400/261)) = 205 expected


def test_a_tiny_temperature_disturbs_no_other_row() -> None:
    logits = np.stack([logits_row({A: 12, B: 11})] * 3)
    alone = tokens(logits[0], [row(temperature=2.0, seed=9)])
    mixed = [row(temperature=1e-10), row(temperature=2.0, seed=9), row(temperature=0)]
    assert tokens(logits, mixed) == [A, *alone, A]


# ---- O10: top_k, top_p, min_p

EDGES = logits_row({A: 3, B: 2, C: 1, D: 0}, rest=-100)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 1}, {A}),
        ({"top_k": 2}, {A, B}),
        ({"top_k": 0}, {A, B, C, D}),
        ({"top_k": -1}, {A, B, C, D}),
        ({"top_k": 10**6}, {A, B, C, D}),
        ({"top_p": 1.0}, {A, B, C, D}),
        ({"top_p": 0.8}, {A, B}),
        ({"top_p": 0.64}, {A}),
        ({"top_p": 0.65}, {A, B}),
        ({"top_p": 1e-9}, {A}),
        ({"top_p": 1e-320}, {A}),
        ({"min_p": 0.0}, {A, B, C, D}),
        ({"min_p": 0.2}, {A, B}),
        ({"min_p": 1.0}, {A}),
        # The filters work on what the one before left: of {a, b}, a alone has 0.73.
        ({"top_k": 2, "top_p": 0.73}, {A}),
        ({"min_p": 0.2, "top_p": 0.73}, {A}),
        ({"top_p": 0.73}, {A, B}),
        # The temperature comes first: at 10 all four are near 0.25.
        ({"temperature": 10.0, "min_p": 0.5}, {A, B, C, D}),
    ],
    ids=str,
)
def test_supports_of_the_filters(params: dict[str, Any], support: set[int]) -> None:
    assert set(tokens(EDGES, [row(seed=s, **params) for s in range(400)])) == support


def test_unfiltered_frequencies() -> None:
    drawn = tokens(EDGES, [row(seed=s) for s in range(400)])
    for token, p in {A: 0.6439, B: 0.2369, C: 0.0871, D: 0.0321}.items():
        assert drawn.count(token) / 400 == pytest.approx(p, abs=0.08)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"temperature": 0}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0, 1, 2, 3}),  # exactly half of eight, whatever the rounding
        ({"top_p": 0.51}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, set(range(8))),
    ],
    ids=str,
)
def test_equal_logits_are_taken_by_lower_id_first(
    params: dict[str, Any], support: set[int]
) -> None:
    drawn = tokens(np.zeros(8), [row(seed=s, **params) for s in range(200)])
    assert set(drawn) == support


# ---- frequencies


@pytest.mark.parametrize("vary", ["seed", "position", "choice"])
def test_draws_follow_the_softmax(vary: str) -> None:
    logits = np.random.default_rng(1).standard_normal(16) * 1.5
    count = 8000 if vary != "choice" else 4000
    drawn = tokens(logits, [row(temperature=0.7, **{vary: i}) for i in range(count)])
    weights = np.exp(logits / 0.7)
    expected = count * weights / weights.sum()
    observed = np.bincount(drawn, minlength=16)
    assert ((observed - expected) ** 2 / expected).sum() < 37.7  # chi square, 15 degrees, 0.1 %


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("width", [64, 65, 200, 256])
def test_draws_from_bunches_follow_the_softmax(width: int, temperature: float) -> None:
    """Token by token; a last bunch that isn't whole, and one of which a mask leaves few."""
    logits = np.random.default_rng(width).standard_normal(width).astype(np.float32)
    logits[70:120] = -np.inf
    logits[5] = 3.0
    rows = [row(temperature=temperature, seed=i, choice=i % 3) for i in range(8000)]
    observed = np.bincount(tokens(logits, rows), minlength=width)
    assert not observed[70:120].any()
    weights = np.exp(logits / temperature)
    expected = len(rows) * weights / weights.sum()
    common = expected >= 5  # the rest is one bin
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    bins = np.count_nonzero(expected)
    square = ((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert square < bins + 3.5 * math.sqrt(2 * bins) + 6  # chi square, beyond 0.1 %


def test_a_token_with_all_the_mass_is_drawn() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[299] = -7.0
    assert set(tokens(logits, [row(seed=s, temperature=1e30) for s in range(50)])) == {299}
    logits[:] = 0
    logits[64] = 40
    assert set(tokens(logits, [row(seed=s) for s in range(200)])) == {64}


def test_successive_draws_are_independent() -> None:
    drawn = tokens(np.zeros(4), [row(position=i, seed=3) for i in range(8001)])
    pairs = np.bincount(np.array(drawn[:-1]) * 4 + np.array(drawn[1:]), minlength=16)
    assert ((pairs - 500.0) ** 2 / 500).sum() < 37.7


# ---- O11: seeds

UNIFORM26 = logits_row(dict.fromkeys(range(97, 123), 0.0), rest=-100)


def text(seed: int, neighbours: list[SamplingRow], place: int = 0) -> str:
    letters: list[int] = []
    for _ in range(24):
        rows = list(neighbours)
        rows.insert(place, row("a", letters, seed=seed))
        letters.append(tokens(UNIFORM26, rows)[place])
    return bytes(letters).decode()


def test_a_seed_gives_the_same_text_in_any_batch() -> None:
    alone = text(42, [])
    assert len(set(alone)) > 8
    assert text(42, [row("a", seed=s * 977) for s in range(7)]) == alone
    assert text(42, [row("a", seed=42)] * 7) == alone
    assert text(42, [row("a", seed=5, temperature=0)] * 7, place=7) == alone
    others = [text(seed, []) for seed in (0, 2**63 - 1, 1, 2**64 - 1)]
    assert len({alone, *others}) == 5


# ---- O12: penalties

ROW_B = logits_row({A: 4, B: 3, C: -2, D: 3.5}, rest=-100)
ROW_C = logits_row({B: 50}, rest=-100)
ROW_Q = logits_row({A: -2, D: -2.5}, rest=-100)
PENALTY_CASES = [
    (ROW_C, row("ac", "", temperature=0, repetition_penalty=1.5), B),
    (ROW_B, row("ac", "b", temperature=0, repetition_penalty=1.5), D),  # a is in the prompt
    (ROW_C, row("ac", "", temperature=0, presence_penalty=2.0), B),
    (ROW_B, row("ac", "b", temperature=0, presence_penalty=2.0), A),  # the prompt doesn't count
    (ROW_B, row("ac", "ba", temperature=0, presence_penalty=0.6), D),
    (ROW_B, row("ac", "aaa", temperature=0, presence_penalty=0.4), A),  # once, however often: 3.6
    (ROW_B, row("c", "aad", temperature=0, frequency_penalty=0.6), B),  # a 2.8, d 2.9, b 3
    (ROW_B, row("c", "aad", temperature=0, frequency_penalty=-2.0), A),
    (ROW_Q, row("aq", "", temperature=0, repetition_penalty=1.5), D),  # -2 * 1.5 = -3
    (ROW_Q, row("dq", "", temperature=0, repetition_penalty=0.5), D),  # -2.5 * 0.5 = -1.25
    (ROW_B, row("ac", "b", temperature=0), A),
]


@pytest.mark.parametrize(("logits", "sampled", "right"), PENALTY_CASES)
def test_penalties(logits: NDArray[np.float32], sampled: SamplingRow, right: int) -> None:
    assert tokens(logits, [sampled]) == [right]


@pytest.mark.parametrize("order", [range(11), range(10, -1, -1), [3, 0, 9, 4, 1, 8]])
def test_penalties_in_a_batch_equal_those_alone(order: range | list[int]) -> None:
    chosen = [PENALTY_CASES[i] for i in order]
    got = tokens(np.stack([logits for logits, _, _ in chosen]), [r for _, r, _ in chosen])
    assert got == [right for _, _, right in chosen]


def test_bias_comes_before_penalties() -> None:
    # a: (-1 + 4) / 2 = 1.5 beats b's 1; the other way round it would be -1 * 2 + 4 = 2.
    logits = logits_row({A: -1, B: 1.75}, rest=-100)
    params = {"temperature": 0, "repetition_penalty": 2.0, "logit_bias": {A: 4.0}}
    assert tokens(logits, [row("a", **params)]) == [B]
    assert tokens(logits, [row("c", **params)]) == [A]


# ---- O13: logit_bias, and min_tokens


@pytest.mark.parametrize(
    ("bias", "right"), [({66: -100.0}, 0), ({67: 100.0}, 67), ({66: -19.0, 70: 1.5}, 70), ({}, 66)]
)
@pytest.mark.parametrize("temperature", [0, 1e-3])
def test_logit_bias(bias: dict[int, float], right: int, temperature: float) -> None:
    healthy = row(temperature=0)
    biased = row(temperature=temperature, logit_bias=bias, top_k=1)
    logits = logits_row({66: 20})
    assert tokens(logits, [healthy, biased, healthy]) == [66, right, 66]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_banned_ids_are_never_drawn(temperature: float) -> None:
    logits = logits_row({257: 50, 259: 40, A: 30}, rest=-100)
    banned = row(temperature=temperature, banned=(257, 259, 5000), logit_bias={257: 100.0})
    assert tokens(logits, [banned, row(temperature=0)]) == [A, 257]


# ---- masks of a grammar


def mask_of(*allowed: int) -> NDArray[np.uint32]:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize(("temperature", "right"), [(0.0, {260}), (1.0, {C, 260}), (1e9, {C, 260})])
def test_only_what_the_mask_allows_is_drawn(temperature: float, right: set[int]) -> None:
    logits = logits_row({A: 12, B: 11, C: 4}, rest=5)
    rows = [replace(row(temperature=temperature, seed=s), mask=mask_of(C, 260)) for s in range(60)]
    assert set(tokens(logits, rows)) == right
    assert set(tokens(logits, [replace(one, mask=mask_of(0)) for one in rows])) == {0}


def test_a_mask_goes_with_bans_bias_penalties_and_filters() -> None:
    logits = logits_row({A: 12, B: 5, C: 4, D: 3})
    masked = replace(row(temperature=0), mask=mask_of(B, C, D))
    biased = replace(row(temperature=0, logit_bias={A: 100.0, D: 9.0}), mask=mask_of(B, C, D))
    punished = replace(row(output="b", temperature=0, presence_penalty=1.5), mask=mask_of(B, C, D))
    narrow = replace(row(temperature=5.0, top_k=1), mask=mask_of(C, D))
    banned = replace(masked, banned_ids=(B,))
    assert tokens(logits, [masked, biased, punished, narrow, banned]) == [B, D, C, C, C]


def test_a_mask_leaves_logprobs_raw_and_other_rows_alone() -> None:
    logits = logits_row({A: 12, B: 11})
    plain = row(temperature=1.0, seed=4, logprobs=2)
    masked = replace(plain, mask=mask_of(B))
    output = run(logits, [plain, masked, plain])
    assert output.token_ids[1] == B
    assert output.token_ids[0] == output.token_ids[2] == tokens(logits, [plain])[0]
    entry = output.logprobs[1]
    assert entry is not None
    assert list(entry) == [B, A]
    assert entry[B].rank == 2
    assert entry[A].logprob == pytest.approx(entry[B].logprob + 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_shows_through_a_mask(bad: float) -> None:
    logits = logits_row({A: 12, B: bad})
    assert tokens(logits, [replace(row(), mask=mask_of(A))]) == [INVALID_TOKEN]


# ---- O16: log probabilities


def softmax_log(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    params = {"temperature": 0.5, "top_k": 1, "logit_bias": {D: 100.0}, "repetition_penalty": 1.5}
    output = run(EDGES, [row("ab", logprobs=2, **params)])
    expected = softmax_log(EDGES)
    [entry] = output.logprobs
    assert entry is not None
    assert output.token_ids.tolist() == [D]
    assert [(t, e.rank) for t, e in entry.items()] == [(D, 4), (A, 1), (B, 2)]
    for token, value in entry.items():
        assert value.logprob == pytest.approx(expected[token], abs=1e-5)
        assert value.decoded_token is None


def test_logprobs_of_ties_and_of_few_tokens() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0, -np.inf], np.float32)
    output = run(logits, [row(temperature=0, logprobs=n) for n in (0, 1, 3, 20)])
    ranks = [{t: e.rank for t, e in (entry or {}).items()} for entry in output.logprobs]
    assert ranks == [{1: 1}, {1: 1}, {1: 1, 2: 1, 3: 3}, {1: 1, 2: 1, 3: 3, 0: 4}]
    values = [e.logprob for e in (output.logprobs[3] or {}).values()]
    assert sum(map(math.exp, values)) == pytest.approx(1)


def test_only_rows_that_ask_get_logprobs() -> None:
    output = run(EDGES, [row(), row(logprobs=0), row(temperature=0)])
    assert [entry is not None for entry in output.logprobs] == [False, True, False]


def test_prompt_logprobs_and_sample_indices() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) * 3
    logits[3, 7] = -np.inf
    output = run(
        logits,
        [row(temperature=0), row(temperature=0)],
        sample_indices=[4, 1],
        prompt_indices=[0, 2, 3],
        prompt_targets=[11, 39, 7],
        prompt_top=[0, 3, 1],
    )
    assert output.token_ids.tolist() == logits[[4, 1]].argmax(axis=1).tolist()
    first, second, third = output.prompt_logprobs
    assert list(first) == [11]
    assert first[11].logprob == pytest.approx(softmax_log(logits[0])[11], abs=1e-5)
    assert next(iter(second)) == 39
    assert set(second) == {39, *np.argsort(-logits[2])[:3].tolist()}
    assert second[39].rank == 1 + (logits[2] > logits[2, 39]).sum()
    assert third[7].logprob == IMPOSSIBLE_LOGPROB
    assert third[7].rank == 40
    assert len(third) == 2


# ---- logits that are not numbers


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_without_finite_logits_is_marked_and_alone(bad: float, temperature: float) -> None:
    logits = np.stack([logits_row({A: 9}), logits_row({B: 9}), logits_row({C: 9})])
    logits[1] = bad
    rows = [row(temperature=temperature, top_k=1, logprobs=1) for _ in range(3)]
    output = run(logits, rows, prompt_indices=[1, 2], prompt_targets=[A, C], prompt_top=[1, 1])
    assert output.token_ids.tolist() == [A, INVALID_TOKEN, C]
    assert output.logprobs[1] is None
    assert output.logprobs[2] is not None
    assert output.prompt_logprobs[0] == {}
    assert next(iter(output.prompt_logprobs[1])) == C


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_single_bad_logit_marks_the_row_even_if_it_is_banned(bad: float) -> None:
    logits = logits_row({A: 9, 257: bad})
    assert tokens(logits, [row(temperature=0), row(banned=(257,))]) == [INVALID_TOKEN] * 2


def test_an_empty_step_samples_nothing() -> None:
    output = run(np.zeros((0, 8)), [])
    assert output.token_ids.tolist() == []
    assert output.logprobs == output.prompt_logprobs == []


# ---- a slow reference, written from the rules


def reference_support(logits: NDArray[np.float32], sampled: SamplingRow) -> dict[int, float]:
    """Ids that may be drawn and their scaled logits, in plain Python and float64."""
    p = sampled.params
    x = {i: float(v) for i, v in enumerate(logits) if i not in sampled.banned_ids}
    for i in x:
        x[i] += (p.logit_bias or {}).get(i, 0.0)
        if i in sampled.prompt_token_ids or i in sampled.output_token_ids:
            x[i] *= 1 / p.repetition_penalty if x[i] > 0 else p.repetition_penalty
        x[i] -= p.frequency_penalty * list(sampled.output_token_ids).count(i)
        x[i] -= p.presence_penalty * (i in sampled.output_token_ids)
    order = sorted(x, key=lambda i: (-x[i], i))
    if p.temperature == 0:
        return {order[0]: 0.0}
    scores = {i: (x[i] - x[order[0]]) / p.temperature for i in order}
    if p.min_p > 0:
        order = [i for i in order if math.exp(scores[i]) >= p.min_p]
    if p.top_k > 0:
        order = order[: p.top_k]
    total, mass, kept = sum(math.exp(scores[i]) for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += math.exp(scores[i])
        if mass >= p.top_p * (1 - 1e-6) * total:
            break
    return {i: scores[i] for i in (kept if p.top_p < 1 else order)}


def reference_noise(sampled: SamplingRow, kind: int, number: int) -> float:
    counter = np.array([number // 4], np.uint64)
    words = philox4x32(counter, sampled.position, sampled.choice, kind, sampled.seed)
    return float(gumbel(words[number % 4])[0])


def reference_winners(support: dict[int, float], sampled: SamplingRow, vocab: int) -> set[int]:
    """The token that is drawn, and those that float32 may draw in a near tie."""

    def best(scores: dict[int, float], kind: int) -> list[int]:
        noisy = {i: score + reference_noise(sampled, kind, i) for i, score in scores.items()}
        return [i for i in noisy if noisy[i] >= max(noisy.values()) - 1e-4]

    p, bunches = sampled.params, [support]
    if not 0 < p.top_k < vocab and p.top_p == 1 and p.min_p == 0:
        parts: dict[int, dict[int, float]] = {}
        for i, score in support.items():
            parts.setdefault(i // BUNCH, {})[i] = score
        sums = {b: math.log(sum(map(math.exp, part.values()))) for b, part in parts.items()}
        bunches = [parts[b] for b in best(sums, BUNCHES)]
    return {i for part in bunches for i in best(part, TOKENS)}


N = 24
ids = st.integers(0, N - 1)
# Quarters: sums and products with the values below are exact in float32, and ties are common.
quarters = st.integers(-40, 40).map(lambda q: q / 4)
params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 8.0]),
        "top_k": st.integers(-1, N + 3),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0, 4.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.25, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5]),
        "logit_bias": st.dictionaries(ids, quarters, max_size=4),
        "logprobs": st.none() | st.integers(0, 20),
    },
)
sampling_rows = st.builds(
    lambda p, **fields: SamplingRow(SamplingParams(**p), **fields),
    params,
    prompt_token_ids=st.lists(ids, max_size=8),
    output_token_ids=st.lists(ids, max_size=8),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    position=st.integers(0, 10_000),
    banned_ids=st.frozensets(ids, max_size=3),
)
logit_rows = st.lists(quarters, min_size=N, max_size=N)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(logit_rows, sampling_rows), min_size=1, max_size=5), st.randoms())
def test_sample_equals_the_reference_in_any_batch(
    cases: list[tuple[list[float], SamplingRow]], random: Any
) -> None:
    logits = np.array([values for values, _ in cases], np.float32)
    rows = [sampled for _, sampled in cases]
    output = run(logits, rows)
    for values, sampled, token, entry in zip(
        logits, rows, output.token_ids.tolist(), output.logprobs, strict=True
    ):
        assert token in reference_winners(reference_support(values, sampled), sampled, N)
        wanted = sampled.params.logprobs
        assert (entry is None) == (wanted is None)
        if entry is not None and wanted is not None:
            order = sorted(range(N), key=lambda i: (-values[i], i))
            assert list(entry) == list(dict.fromkeys([token, *order[:wanted]]))
            for i, value in entry.items():
                assert value.logprob == pytest.approx(softmax_log(values)[i], abs=1e-5)
                assert value.rank == 1 + (values > values[i]).sum()

    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = run(logits[order], [rows[i] for i in order])
    assert shuffled.token_ids.tolist() == output.token_ids[order].tolist()
    assert shuffled.logprobs == [output.logprobs[i] for i in order]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.floats(0.05, 1.0) | st.just(1.0),
    st.integers(0, 5000) | st.just(0),
    st.sampled_from([0.0, 0.02]),
)
def test_a_large_vocabulary_gives_what_sorting_it_gives(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = np.random.default_rng(seed).standard_normal(5000).astype(np.float32) * 4
    sampled = row(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    [token] = tokens(logits, [sampled])
    assert token in reference_winners(reference_support(logits, sampled), sampled, 5000)
