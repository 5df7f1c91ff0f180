"""Requests with a grammar in both loops: when they are admitted, what their matcher is told.

The grammar here alternates: after an even id only odd ones may come, and the other way round. It
has no end: 2, the end-of-sequence id, is never allowed.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers.engine_bench import VOCAB_SIZE, Bench, ids
from helpers.fake_runtime import DeviceError

from octavo.engine.request import Request
from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams, StructuredOutputs

SHAPE = StructuredOutputs(regex="as the tests' own compiler has it")


class Alternating:
    """In a :class:`GrammarMatcher`'s place; it breaks after ``breaks_after`` ids."""

    def __init__(self, breaks_after: int = 1000) -> None:
        self.taken: list[int] = []
        self.error: str | None = None
        self.breaks_after = breaks_after

    def mask(self, banned_ids: Any = ()) -> np.ndarray | None:
        if len(self.taken) >= self.breaks_after:
            self.error = "broken"
            return None
        odd = not self.taken or self.taken[-1] % 2 == 0
        words = np.full(VOCAB_SIZE // 32, 0xAAAAAAAA if odd else 0x55555555, np.uint32)
        words[0] &= ~np.uint32(1 << 2)
        return words

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)


class Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.pending: list[Future[Any]] = []

    def compile(self, structure: StructuredOutputs) -> Future[Any]:
        self.pending.append(Future())
        return self.pending[-1]

    def finish(self, **options: Any) -> Alternating:
        matcher = Alternating(**options)
        self.pending.pop(0).set_result(matcher)
        return matcher


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return with_compiler(async_scheduling=request.param)


def with_compiler(**limits: Any) -> Bench:
    bench = Bench(**limits)
    bench.engine._grammars = Compiler()  # type: ignore[assignment]
    return bench


def compiler(bench: Bench) -> Compiler:
    return bench.engine._grammars  # type: ignore[return-value]


def test_the_matcher_is_told_every_id_once_and_masks_by_it(bench: Bench) -> None:
    name = bench.add(ids(9), max_tokens=20, structured_outputs=SHAPE)
    other = bench.add(ids(9), max_tokens=20)
    matcher = compiler(bench).finish()
    bench.drain()
    token_ids = bench.results[name].token_ids
    assert token_ids[0] % 2 == 1
    assert all((a + b) % 2 == 1 for a, b in pairwise(token_ids))
    assert matcher.taken == token_ids[:-1]  # nothing follows the last
    assert bench.results[name].last.finish_reason == "length"
    bench.check(other)  # as if alone


def test_it_waits_for_its_grammar_and_holds_up_nobody(bench: Bench) -> None:
    name = bench.add(ids(9), max_tokens=3, structured_outputs=SHAPE)
    other = bench.add(ids(20, start=3), max_tokens=5)
    assert bench.engine.stats().num_waiting == 2
    while bench.results[other].last is None or bench.results[other].last.finish_reason is None:
        bench.step()
    assert bench.results[name].token_ids == []
    assert bench.engine.stats().num_waiting == 1
    for _ in range(3):
        assert bench.step() == []  # nothing to do: each step waits a moment
    compiler(bench).finish()
    bench.drain()
    assert len(bench.results[name].token_ids) == 3


def test_an_abort_before_the_grammar_is_ready(bench: Bench) -> None:
    name = bench.add(ids(9), structured_outputs=SHAPE)
    bench.step()
    bench.engine.abort(name)
    assert not bench.engine.has_work
    compiler(bench).finish()
    bench.drain()
    assert bench.results[name].last is None


@pytest.mark.parametrize("problem", [InvalidRequestError("'not' can't be"), RuntimeError("panic")])
def test_a_grammar_that_does_not_compile(bench: Bench, problem: Exception) -> None:
    name = bench.add(ids(9), structured_outputs=SHAPE)
    other = bench.add(ids(9), max_tokens=4)
    compiler(bench).pending.pop().set_exception(problem)
    bench.drain()
    update = bench.results[name].last
    assert update.finish_reason == "abort"
    assert str(problem) in update.error
    bench.check(other)


def test_a_grammar_that_breaks_ends_its_request_only(bench: Bench) -> None:
    name = bench.add(ids(9), max_tokens=20, structured_outputs=SHAPE)
    other = bench.add(ids(9), max_tokens=20)
    compiler(bench).finish(breaks_after=3)
    bench.drain()
    result = bench.results[name]
    assert len(result.token_ids) == 3
    assert result.last.finish_reason == "abort"
    assert "broken" in result.last.error
    bench.check(other)


def test_preempted_rows_do_not_go_through_their_grammar_again() -> None:
    answers = []
    for blocks, overlapped in ((64, False), (7, False), (7, True)):
        bench = with_compiler(num_blocks=(blocks,), max_model_len=100, async_scheduling=overlapped)
        names = [
            bench.add(ids(9, start=n), max_tokens=60, structured_outputs=SHAPE) for n in range(3)
        ]
        matchers = [compiler(bench).finish() for _ in names]
        bench.drain()
        answers.append([bench.results[name].token_ids for name in names])
        assert [matcher.taken for matcher in matchers] == [one[:-1] for one in answers[-1]]
        assert (bench.engine.stats().num_preemptions > 0) == (blocks == 7)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("stage", ["forward", "sample", "wait"])
def test_ids_that_a_fault_loses_are_not_taken(bench: Bench, stage: str) -> None:
    name = bench.add(ids(9), max_tokens=12, structured_outputs=SHAPE)
    matcher = compiler(bench).finish()
    for _ in range(4):
        bench.step()
    bench.runtime.fail_next = stage
    with pytest.raises(DeviceError):  # overlapped, a step later
        bench.step(), bench.step()
    bench.drain()
    token_ids = bench.results[name].token_ids
    assert len(token_ids) == 12
    assert matcher.taken == token_ids[:-1]
    assert all((a + b) % 2 == 1 for a, b in pairwise(token_ids))


def test_without_a_tokenizer_or_an_end_it_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        Bench().add(ids(9), structured_outputs=SHAPE)
    endless = Request("0", ids(9), SamplingParams(structured_outputs=SHAPE), frozenset(), seed=0)
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        with_compiler().engine.add(endless)
