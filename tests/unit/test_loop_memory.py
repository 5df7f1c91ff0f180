"""Blocks, windows, shared prefixes and preemption, seen from outside.

The O numbers are those of the list of reported faults. Both loops run every case; the fake
runtime's ids tell whether the right KV was read.
"""

from __future__ import annotations

import pytest
from helpers.engine_bench import FULL, VOCAB_SIZE, Bench, ids
from helpers.kv_invariants import check_pools

from octavo.cache import KVGroup
from octavo.errors import ContextLengthError


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlapped(request: pytest.FixtureRequest) -> bool:
    return request.param


# Memory


@pytest.mark.parametrize("caching", [False, True])
def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody(
    caching: bool, overlapped: bool
) -> None:  # O20: 8 blocks of 16 hold 128 tokens
    limits = {"num_blocks": (8,), "enable_prefix_caching": caching, "async_scheduling": overlapped}
    bench = Bench(**limits)
    with pytest.raises(ContextLengthError, match=r"150 tokens.*151.*KV cache holds 128"):
        bench.add(ids(150))
    bench.answer(ids(10), max_tokens=10)

    alone = bench.answer(ids(100), max_tokens=100)
    assert len(alone.token_ids) == 28
    assert alone.last is not None
    assert alone.last.finish_reason == "length"

    three = [bench.add(ids(100), max_tokens=100) for _ in range(3)]
    bench.drain()
    assert [bench.results[name].token_ids for name in three] == [alone.token_ids] * 3


def test_preemption_prefix_hits_and_penalties_together(overlapped: bool) -> None:  # O21
    def run(num_blocks: int) -> Bench:
        bench = Bench(num_blocks=(num_blocks,), async_scheduling=overlapped)
        for i in range(8):
            bench.add(
                ids(64) + ids(5, start=i),
                max_tokens=60,
                temperature=1.0 if i % 2 else 0.0,
                repetition_penalty=1.3 if i % 3 else 1.0,
                seed=i,
            )
        bench.drain()
        return bench

    small, large = run(24), run(4096)
    assert small.engine.stats().num_preemptions > 0
    assert large.engine.stats().num_preemptions == 0
    for name in small.results:
        small.check(name)
        assert small.results[name].token_ids == large.results[name].token_ids


@pytest.mark.parametrize("length", [15, 16, 17, 48, 64, 65])
def test_a_prompt_that_is_cached_whole_computes_its_last_block(
    length: int, overlapped: bool
) -> None:  # O21
    bench = Bench(async_scheduling=overlapped)
    first, second = (bench.answer(ids(length), max_tokens=4) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.last is not None
    assert second.last is not None
    assert first.last.num_cached_tokens == 0
    assert second.last.num_cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("length", [n + d for n in (16, 32, 240) for d in (-1, 0, 1)])
def test_lengths_around_the_block_size(length: int, overlapped: bool) -> None:
    bench = Bench(max_num_batched_tokens=48, async_scheduling=overlapped)
    name = bench.add(ids(length), max_tokens=18)
    bench.drain()
    bench.check(name)


def test_different_prompts_are_never_taken_for_each_other(overlapped: bool) -> None:  # O23
    bench = Bench(async_scheduling=overlapped)
    a = list(range(1, 33))
    prompts = [a, [i + 31 for i in a], [*a[:15], a[16], a[15], *a[17:]], a[16:], a[::-1]]
    for prompt in prompts:
        result = bench.answer(prompt, max_tokens=16)
        assert result.last is not None
        assert result.last.num_cached_tokens == 0
    salted = bench.answer(a, max_tokens=16, salt="tenant")
    again = bench.answer(a, max_tokens=16)
    assert salted.last is not None
    assert again.last is not None
    assert (salted.last.num_cached_tokens, again.last.num_cached_tokens) == (0, 16)


@pytest.mark.parametrize("window", [1, 7, 8, 9])
@pytest.mark.parametrize("budget", [1, 4, 16, 64])
@pytest.mark.parametrize("length", [7, 8, 9, 40])
def test_a_window_counts_the_query_and_ends_there(
    window: int, budget: int, length: int, overlapped: bool
) -> None:  # O24
    bench = Bench(
        (KVGroup((0,), window),),
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=budget,
        num_blocks=(10,),
        async_scheduling=overlapped,
    )
    for _ in range(2):  # fresh, then from the cache
        name = bench.add(ids(length), max_tokens=20)
        bench.drain()
        bench.check(name)
    far, near = ids(length), ids(length)
    if length > window:
        far[length - 1 - window] += 1
        assert bench.answer(far, max_tokens=1).token_ids == bench.results["0"].token_ids[:1]
    if 1 < window <= length:
        near[length - window] = (near[length - window] + 1) % VOCAB_SIZE
        bench.answer(near, max_tokens=1)


def test_a_long_prompt_runs_through_a_small_window_pool(overlapped: bool) -> None:
    bench = Bench(
        (FULL, KVGroup((2,), 20)),
        num_blocks=(64, 4),
        block_size=8,
        max_num_batched_tokens=100,
        async_scheduling=overlapped,
    )
    names = [bench.add(ids(200, start), max_tokens=20) for start in (0, 1)]
    bench.drain()
    for name in names:
        bench.check(name)


def test_an_aborted_request_gives_everything_back_wherever_it_is(overlapped: bool) -> None:  # O22
    bench = Bench(num_blocks=(12,), max_num_batched_tokens=24, async_scheduling=overlapped)
    for steps in range(12):
        kept = bench.add(ids(30), max_tokens=12)
        names = [bench.add(ids(40, start), max_tokens=100) for start in (1, 2)]  # one has to wait
        for _ in range(steps):
            bench.step()
        for name in names:
            bench.engine.abort(name)
        check_pools(bench.engine)
        bench.drain()
        bench.check(kept)
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.finished == {"length": 12, "abort": 24}
