"""Choosing tokens by Triton's kernels, in the interpreter: the ids of ``engine/sampling.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from octavo.engine.sampling import SamplingRow, make_sampling_batch, sample
from octavo.kernels.choose.triton import choose, make_scratch
from octavo.kernels.step_inputs.layout import StepInputs, make_inputs
from octavo.kernels.step_inputs.reference import advance
from octavo.runtime.device_sampling import pack_settings
from octavo.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Chunks so small that a row has several; short lists so short that long ones come, too:
    sorting takes the interpreter seconds."""
    monkeypatch.setattr("octavo.kernels.choose.triton.CHUNK", 1024)
    monkeypatch.setattr("octavo.kernels.choose.triton.SHORT_LIST", 64)


def ids_of(
    logits: np.ndarray,
    rows: list[SamplingRow],
    dtype: torch.dtype,
    step_rows: Sequence[int] = (),
    inputs: StepInputs | None = None,
) -> np.ndarray:
    """What the kernels choose; logits are those values exactly."""
    vocab_size = logits.shape[1]
    batch = make_sampling_batch(rows, sample_indices=range(len(rows)), vocab_size=vocab_size)
    places = np.array(step_rows or range(len(rows)), np.int32)
    settings = torch.from_numpy(pack_settings(batch, places, 6))
    ids = torch.full((4, len(rows)), -7, dtype=torch.int32)
    row_ids = torch.full((max(places) + 1,), -7, dtype=torch.int32)
    before = settings.clone()
    scratch = make_scratch(len(rows), vocab_size, "cpu")
    choose(
        torch.from_numpy(logits).to(dtype),
        settings,
        len(rows),
        scratch,
        ids,
        row_ids,
        filtered=any(is_filtered(one.params) for one in rows),
        inputs=inputs,
    )
    assert not scratch.counters.any()
    wanted = torch.full_like(row_ids, -7)
    wanted[places] = ids[2].clamp(min=0)
    assert torch.equal(row_ids, wanted)
    before[-2:] += 1
    assert torch.equal(settings, before)
    return ids[2].numpy()  # the turn is 6


def is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def check(logits: np.ndarray, rows: list[SamplingRow], dtype: torch.dtype = torch.float32) -> None:
    logits = torch.from_numpy(logits).to(dtype).float().numpy()
    batch = make_sampling_batch(rows, sample_indices=range(len(rows)), vocab_size=logits.shape[1])
    expected = sample(logits, batch).token_ids
    np.testing.assert_array_equal(ids_of(logits, rows, dtype), expected)


def row(seed: int = 0, position: int = 0, choice: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), [1], [], seed, choice, position)


SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"temperature": 1e-30},
    {"temperature": 1e30},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 200, "temperature": 2.0},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.95, "temperature": 5.0},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 20, "top_p": 0.1, "temperature": 9.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.01, "top_k": 7, "top_p": 0.9, "temperature": 4.0},
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(5, torch.float32), (2048, torch.bfloat16), (2049, torch.float32), (5000, torch.float32)],
)
def test_random_rows(vocab_size, dtype):
    rng = np.random.default_rng(vocab_size)
    rows = [
        row(
            seed=int(rng.integers(0, 2**63)),
            position=int(rng.integers(0, 4000)),
            choice=i % 3,
            **settings,
        )
        for i, settings in enumerate(SETTINGS)
    ]
    logits = rng.standard_normal((len(rows), vocab_size)).astype(np.float32) * 3
    check(logits, rows, dtype)
    whole = [i for i, one in enumerate(rows) if not is_filtered(one.params)]
    check(logits[whole], [rows[i] for i in whole], dtype)  # by one launch


@pytest.mark.parametrize("vocab_size", [70, 4100])
def test_equal_logits(vocab_size):
    """Ties at every threshold: the lower ids stay."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 1, (len(SETTINGS), vocab_size)).astype(np.float32)
    if vocab_size == 70:
        logits[:] = 0
    check(logits, [row(seed=i, **settings) for i, settings in enumerate(SETTINGS)])


def test_far_and_impossible_tokens():
    logits = np.full((6, 1500), -math.inf, np.float32)
    logits[:, 1200] = 4.0
    logits[:, 7] = 3.0
    logits[3:, 9] = -90.0
    settings = [{}, {"top_k": 5}, {"top_p": 0.3}, {"temperature": 80.0}, {"min_p": 0.5}]
    check(logits, [row(seed=3, **one) for one in [*settings, {"temperature": 0.0}]])
    whole = [row(seed=i, temperature=t) for i, t in enumerate([1.0, 1e30, 80.0, 0.1, 1e-45, 0.0])]
    check(logits, whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}], ids=str)
def test_logits_that_are_not_finite(bad, settings):
    """They end their own row alone; -inf does where all are."""
    logits = np.zeros((3, 1100), np.float32)
    logits[1, 1050] = bad
    if bad == -math.inf:
        logits[1] = bad
    rows = [row(seed=1, **settings) for _ in range(3)]
    check(logits, rows)
    assert ids_of(logits, rows, torch.float32)[1] == -1


def test_draws_follow_the_distribution():
    """From four bunches of two chunks."""
    logits = np.full((300, 1100), -np.inf, np.float32)
    logits[:, [63, 64, 130, 1099]] = np.log([0.5, 0.3, 0.15, 0.05])
    rows = [row(seed=5, position=i) for i in range(300)]
    drawn = ids_of(logits, rows, torch.float32)
    shares = [np.mean(drawn == token) for token in (63, 64, 130, 1099)]
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.07)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_inputs_become_those_of_the_next_token(settings, groups):
    """But for padding, whose ids go elsewhere."""
    rng = np.random.default_rng(groups)
    rows = [row(seed=i, **settings) for i in range(5)]
    found, wanted = (make_inputs(9, 7, groups, 4, "cpu") for _ in range(2))
    for field in fields(StepInputs):
        shape = getattr(found, field.name).shape
        for inputs in (found, wanted):
            values = np.random.default_rng(len(shape)).integers(1, 1000, shape)
            getattr(inputs, field.name).copy_(torch.from_numpy(values))
    logits = rng.standard_normal((5, 2100)).astype(np.float32)
    logits[1, 7] = math.nan
    ids = ids_of(logits, rows, torch.float32, [0, 1, 2, 6, 6], found)
    advance(wanted, torch.from_numpy(ids[:3]).clamp(min=0))
    for field in fields(StepInputs):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name
