"""Deterministic mode: what was sampled is never shared with what was prompted. The fake runtime's
ids tell them apart; test_loop_properties.py has the mixes."""

from __future__ import annotations

import pytest
from helpers.fake_runtime import FakeRuntime, expected_answer

from octavo.cache import KVGroup
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.engine.request import Request
from octavo.sampling_params import SamplingParams

GROUPS = (KVGroup((0, 2), None), KVGroup((1,), 9))
PROMPT = list(range(10))


def engine_of(*, overlapped: bool) -> Engine:
    runtime = FakeRuntime(GROUPS, (40, 40), 2, deterministic=True)
    limits = EngineLimits(4, 30, 100, 2, (40, 40), async_scheduling=overlapped, deterministic=True)
    return Engine(runtime, GROUPS, limits)


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1)
    return Request(name, prompt, params, frozenset(), 0)


def run(engine: Engine, until: str | None = None) -> None:
    """To the end, or to the end of one request."""
    while engine.has_work and not (until is not None and until not in engine._requests):
        engine.step()


def is_right(one: Request) -> bool:
    expected = expected_answer(one, GROUPS, 32, 100, deterministic=True)
    return one.output_token_ids == expected.token_ids


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_answer_is_not_found_as_part_of_a_prompt(overlapped: bool) -> None:
    engine = engine_of(overlapped=overlapped)
    first = request("first", PROMPT, 8)
    engine.add(first)
    run(engine)
    second = request("second", first.token_ids, 8)
    engine.add(second)
    run(engine)
    assert is_right(first)
    assert is_right(second)
    assert second.num_cached_tokens == len(PROMPT)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_prompt_is_not_found_as_part_of_an_answer(overlapped: bool) -> None:
    """By a request that is computed again after a preemption."""
    engine = engine_of(overlapped=overlapped)
    first = request("first", PROMPT, 20)
    engine.add(first)
    while len(first.output_token_ids) < 8:
        engine.step()
    engine.add(request("second", first.token_ids[:18], 1))
    run(engine, until="second")
    engine._scheduler._preempt(first)
    run(engine)
    assert is_right(first)
