"""The overlapped loop, faults of the device, and the figures.

The O numbers are those of the list of reported faults. Both loops run every case; the fake
runtime's ids tell whether the right KV was read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers.engine_bench import Bench, ids
from helpers.fake_runtime import DeviceError, FakeRuntime
from helpers.kv_invariants import check_pools

from octavo.engine.loop import Engine


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlapped(request: pytest.FixtureRequest) -> bool:
    return request.param


# The overlapped loop, faults and figures


def test_the_next_forward_is_launched_before_the_ids_are_known() -> None:
    bench = Bench(async_scheduling=True)
    bench.add(ids(5), max_tokens=4)
    assert bench.step() == []
    assert [len(update.new_token_ids) for update in bench.step()] == [1]
    second = bench.runtime.batches[1]
    assert second.input_ids.tolist() == [-1]
    assert second.id_rows.tolist() == [0]
    assert bench.runtime.num_steps == 2


def test_an_unforeseen_end_leaves_one_surplus_row() -> None:
    bench = Bench(async_scheduling=True)
    free = bench.answer(ids(9), max_tokens=12).token_ids
    index = next(i for i in range(3, 12) if free[i] not in free[:i])
    before = bench.runtime.num_steps
    name = bench.add(ids(9), max_tokens=12, stop_token_ids=[free[index]])
    bench.drain()
    assert bench.results[name].token_ids == free[: index + 1]
    assert bench.runtime.num_steps - before == index + 2


def test_what_a_step_only_counts_up(overlapped: bool) -> None:
    """Where no row begins a block, comes or goes; the first step of a run follows one of another
    kind."""
    bench = Bench(async_scheduling=overlapped)
    bench.answer(ids(3), max_tokens=30)  # run steps write positions 4 to 31
    assert bench.runtime.num_going_on == 28 - 1
    names = [bench.add(ids(2, 1), max_tokens=9), bench.add(ids(5, 2), max_tokens=20)]
    bench.drain()
    for name in names:
        bench.check(name)
    # Run steps: positions 6 to 23 of the longer row, whose neighbour is gone from 13 on.
    assert bench.runtime.num_going_on == 27 + 18 - 2


def test_rows_of_one_token_come_first() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add(ids(40), max_tokens=10)
    for _ in range(3):
        bench.step()
    bench.add(ids(40, 1), max_tokens=10)
    bench.step()
    batch = bench.runtime.batches[-1]
    assert batch.num_decodes == 1
    assert np.diff(batch.query_start_loc).tolist() == [1, 15]
    assert batch.seq_lens.tolist() == [41, 15]


@pytest.mark.parametrize("where", ["forward", "sample", "wait"])
def test_after_a_device_error_all_can_be_freed_or_computed_again(
    where: str, overlapped: bool
) -> None:
    bench = Bench(async_scheduling=overlapped, max_num_batched_tokens=32)
    names = [bench.add(ids(20, i), max_tokens=10, prompt_logprobs=0) for i in range(3)]
    for _ in range(3):
        bench.step()
    bench.runtime.fail_next = where
    with pytest.raises(DeviceError):
        bench.step()
    check_pools(bench.engine)
    told = len(bench.results[names[0]].token_ids)
    bench.engine.abort(names[0])
    bench.drain()
    assert len(bench.results[names[0]].token_ids) == told  # not even what was known at the error
    for name in names[1:]:
        bench.check(name)


def test_logits_that_are_not_finite_end_only_their_own_request(overlapped: bool) -> None:
    bench = Bench(async_scheduling=overlapped)
    good = bench.add(ids(9), max_tokens=8)
    bad = bench.add(ids(9, 1), max_tokens=8, logprobs=0)
    run = bench.runtime._run

    def spoil(batch: Any) -> None:
        run(batch)
        for place, row in zip(batch.sample_indices, batch.sample_rows, strict=True):
            if batch.seq_lens[row] == 11 and row == 1:
                bench.runtime._logits[place] = np.nan

    bench.runtime._run = spoil  # type: ignore[method-assign]
    bench.drain()
    bench.check(good)
    last = bench.results[bad].last
    assert last is not None
    assert (last.finish_reason, last.new_token_ids, last.logprobs) == ("abort", [], [])
    assert last.error is not None
    assert "not finite" in last.error
    assert len(bench.results[bad].token_ids) == 2


def test_figures(overlapped: bool) -> None:
    bench = Bench(async_scheduling=overlapped, num_blocks=(10,))
    first = bench.answer(ids(40), max_tokens=5)
    second = bench.answer(ids(40), max_tokens=5)
    bench.add(ids(20, start=1))
    bench.step()
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.kv_cache_usage == pytest.approx(0.2)
    assert (stats.prompt_tokens, stats.generation_tokens) == (100, 10 + (not overlapped))
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (100, 32)
    assert stats.finished == {"length": 2}
    assert stats.num_steps == bench.runtime.num_steps
    for result in (first, second):
        assert result.last is not None
        times = result.last.metrics
        marks = [times.arrival_time, times.first_scheduled_time]
        marks += [times.first_token_time, times.finished_time]
        assert all(mark is not None for mark in marks)
        assert all(early <= late for early, late in pairwise(marks))


def test_idle_time_goes_to_a_runtime_that_has_a_use_for_it() -> None:
    class Capturing(FakeRuntime):
        left = 2

        def capture_ahead(self) -> bool:
            self.left -= 1
            return self.left >= 0

    bench = Bench()
    assert not bench.engine.use_idle_time()
    sizes = bench.limits.num_blocks, bench.limits.block_size, bench.runtime.vocab_size
    bench.runtime = Capturing(bench.groups, *sizes)
    bench.engine = Engine(bench.runtime, bench.groups, bench.limits)
    assert [bench.engine.use_idle_time() for _ in range(3)] == [True, True, False]
    assert bench.answer(ids(5), max_tokens=4).token_ids
