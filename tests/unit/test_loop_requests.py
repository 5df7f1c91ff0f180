"""What requests may ask, and where their answers end.

The O numbers are those of the list of reported faults. Both loops run every case; the fake
runtime's ids tell whether the right KV was read.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.engine_bench import Bench, Result, ids

from octavo.engine.request import Request
from octavo.errors import ConfigError, ContextLengthError, InvalidRequestError
from octavo.sampling_params import SamplingParams


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlapped(request: pytest.FixtureRequest) -> bool:
    return request.param


# What is refused, and what is allowed


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ([], {}, InvalidRequestError, "empty"),  # O04
        ([1, 64], {}, InvalidRequestError, "64.*0 to 63"),
        ([-1], {}, InvalidRequestError, "-1"),
        ([1], {"stop_token_ids": [64]}, InvalidRequestError, "64"),
        ([1], {"max_tokens": 0}, InvalidRequestError, "prompt_logprobs"),
        (ids(64), {}, ContextLengthError, "64 tokens.*65.*max_model_len is 64"),  # O08 e
        (ids(65), {}, ContextLengthError, "65 tokens.*66.*64"),  # O08 f
        (ids(65), {"max_tokens": 0, "prompt_logprobs": 1}, ContextLengthError, "65 tokens.*64"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_and_leaves_no_trace(
    prompt: list[int], params: dict[str, Any], error: type[Exception], says: str
) -> None:
    bench = Bench(max_model_len=64)
    with pytest.raises(error, match=says):
        bench.add(prompt, **params)
    assert not bench.engine.has_work
    bench.answer(ids(60))


def test_the_error_codes_are_openais() -> None:
    with pytest.raises(ContextLengthError) as caught:
        Bench(max_model_len=64).add(ids(65))
    assert (caught.value.code, caught.value.status, caught.value.param) == (
        "context_length_exceeded",
        400,
        "prompt",
    )


@pytest.mark.parametrize(
    ("max_tokens", "count"), [(None, 4), (4, 4), (5, 4), (3, 3)]
)  # O08 b, c, d: what is beyond the room left is clamped
def test_generation_ends_at_the_models_length(
    max_tokens: int | None, count: int, overlapped: bool
) -> None:
    bench = Bench(max_model_len=64, async_scheduling=overlapped)
    result = bench.answer(ids(60), max_tokens=max_tokens)
    assert len(result.token_ids) == count
    assert result.last is not None
    assert result.last.finish_reason == "length"
    assert bench.runtime.num_steps == count  # ends by length are foreseen


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_max_tokens_0_scores_the_prompt(length: int, overlapped: bool) -> None:  # O08 a
    bench = Bench(max_model_len=64, max_num_batched_tokens=20, async_scheduling=overlapped)
    result = bench.answer(ids(length), max_tokens=0, prompt_logprobs=1)
    assert result.token_ids == []
    assert result.last is not None
    assert result.last.finish_reason == "length"
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == length
    assert result.prompt_logprobs[0] is None
    for token, entry in zip(ids(length)[1:], result.prompt_logprobs[1:], strict=True):
        assert token in entry
    assert bench.engine.stats().generation_tokens == 0


def test_a_live_request_id_is_not_taken_twice() -> None:
    bench = Bench()
    request = Request("same", [1], SamplingParams(), frozenset(), 0)
    bench.engine.add(request)
    with pytest.raises(InvalidRequestError, match="'same' is in use"):
        bench.engine.add(Request("same", [1], SamplingParams(), frozenset(), 0))
    bench.engine.abort("same")
    bench.engine.add(Request("same", [1], SamplingParams(), frozenset(), 0))


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 15}, "15 is below max_num_seqs 16"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": (0,)}, "needs one at least"),
        ({"num_blocks": ()}, "needs one at least"),
    ],
)
def test_limits_without_room_to_work_are_refused(limits: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Bench(**limits)


# Where generation stops


def test_an_eos_id_ends_the_answer_and_is_part_of_it(overlapped: bool) -> None:
    bench = Bench(async_scheduling=overlapped)
    free = bench.answer(ids(9), max_tokens=12).token_ids
    index = next(i for i in range(3, 12) if free[i] not in free[:i])
    for eos, params, reason in [
        (free[index], {}, None),
        (63 if free[index] != 63 else 62, {"stop_token_ids": [free[index]]}, free[index]),
    ]:
        request = Request(
            f"eos {reason}",
            ids(9),
            SamplingParams(temperature=0.0, max_tokens=12, **params),
            frozenset([eos]),
            0,
        )
        bench.results[request.request_id] = result = Result()
        bench.engine.add(request)
        bench.drain()
        assert result.token_ids == free[: index + 1]
        assert result.last is not None
        assert (result.last.finish_reason, result.last.stop_reason) == ("stop", reason)


def test_nothing_stops_before_min_tokens(overlapped: bool) -> None:
    bench = Bench(async_scheduling=overlapped)
    free = bench.answer(ids(9), max_tokens=12).token_ids
    stops = free[:3]
    name = bench.add(ids(9), max_tokens=30, min_tokens=5, stop_token_ids=stops)
    bench.drain()
    bench.check(name)
    assert not set(bench.results[name].token_ids[:5]) & set(stops)
    assert len(bench.results[name].token_ids) > 5


def test_a_stop_found_outside_ends_the_request_and_later_ids_are_dropped(overlapped: bool) -> None:
    bench = Bench(async_scheduling=overlapped)
    name, other = bench.add(ids(20)), bench.add(ids(30), max_tokens=20)
    while len(bench.results[name].token_ids) < 5:
        bench.step()
    bench.engine.finish(name)
    bench.engine.finish(name)  # twice, and unknown ids, do no harm
    bench.engine.finish("unknown")
    assert all(update.request_id != name for update in bench.step())
    bench.drain()
    bench.check(other)
    assert len(bench.results[name].token_ids) == 5
    assert bench.engine.stats().finished == {"stop": 1, "length": 1}


# Sampling and scoring


def test_a_seed_gives_the_same_ids_in_any_company(overlapped: bool) -> None:  # O11
    def run(others: list[int], first: bool, **limits: Any) -> list[int]:
        bench = Bench(async_scheduling=overlapped, **limits)
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
        name = bench.add(ids(20), seed=42, **options) if first else ""
        for i, seed in enumerate(others):
            bench.add(ids(20, start=i % 2), seed=seed, **options)
        name = name or bench.add(ids(20), seed=42, **options)
        bench.drain()
        return bench.results[name].token_ids

    alone = run([], True)
    assert run(list(range(7)), True) == alone
    assert run([42] * 7, False) == alone
    assert run([1] * 7, False, num_blocks=(12,)) == alone  # with preemption
    assert run([], True, max_num_batched_tokens=16, enable_prefix_caching=False) == alone
    bench = Bench(async_scheduling=overlapped)
    other = bench.answer(ids(20), seed=43, temperature=1.0, max_tokens=24)
    assert other.token_ids != alone


@pytest.mark.parametrize("budget", [16, 256])
def test_prompt_logprobs_do_not_come_from_the_cache(budget: int, overlapped: bool) -> None:  # O15
    def cold(prompt: list[int]) -> list[Any]:
        result = Bench().answer(prompt, prompt_logprobs=1, max_tokens=1)
        assert result.prompt_logprobs is not None
        return result.prompt_logprobs

    bench = Bench(async_scheduling=overlapped, max_num_batched_tokens=budget)
    prompt = ids(33)
    bench.answer(prompt, max_tokens=1)
    for again in [prompt, prompt, prompt[:16] + ids(17, 5), ids(15), ids(16), ids(17), ids(32)]:
        result = bench.answer(again, prompt_logprobs=1, max_tokens=1)
        assert result.prompt_logprobs == cold(again)
        assert result.last is not None
        assert result.last.num_cached_tokens == 0
        assert all(t in e for t, e in zip(again[1:], result.prompt_logprobs[1:], strict=True))


def test_prompt_logprobs_survive_preemption_and_come_once(overlapped: bool) -> None:
    bench = Bench(num_blocks=(8,), max_num_batched_tokens=20, async_scheduling=overlapped)
    names = [bench.add(ids(30, i), prompt_logprobs=1, logprobs=0, max_tokens=50) for i in range(3)]
    arrivals = []
    while bench.engine.has_work:
        arrivals += [u.request_id for u in bench.step() if u.prompt_logprobs is not None]
    assert sorted(arrivals) == names
    assert bench.engine.stats().num_preemptions > 0
    for name in names:
        bench.check(name)
        result = bench.results[name]
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == 30
        assert [next(iter(entry)) for entry in result.logprobs] == result.token_ids
