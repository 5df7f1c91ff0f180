"""Who runs in a step, with how many tokens, and who has to wait."""

from __future__ import annotations

import itertools

import pytest

from octavo.cache import KVCache, KVGroup
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler import ScheduledRow, Scheduler
from octavo.sampling_params import SamplingParams

FULL = KVGroup((0,), None)


class Steps:
    """A scheduler whose steps are done at once, each sampled id being 0."""

    def __init__(
        self,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        windows: list[tuple[int, int]] | None = None,  # window, blocks
        caching: bool = False,
        deterministic: bool = False,
    ) -> None:
        windows = windows or []
        groups = [FULL, *(KVGroup((1 + i,), window) for i, (window, _) in enumerate(windows))]
        sizes = [num_blocks, *(count for _, count in windows)]
        self.kv = KVCache(groups, sizes, block_size=4, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.kv, max_num_seqs, max_num_batched_tokens, deterministic)

    def add(self, name: str, prompt_len: int, max_tokens: int = 20, priority: int = 0) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=[1] * prompt_len,
            params=SamplingParams(max_tokens=max_tokens),
            eos_token_ids=frozenset(),
            seed=0,
            priority=priority,
        )
        self.scheduler.add(request, prompt_len + max_tokens)
        return request

    def step(self) -> dict[str, int]:
        """Tokens per request in the next step, in the order of its rows."""
        rows = self.scheduler.schedule()
        for row in rows:
            self._sample(row)
        return {row.request.request_id: row.stop - row.start for row in rows}

    def _sample(self, row: ScheduledRow) -> None:
        request = row.request
        self.kv.store(request.blocks, request.token_ids, row.stop)
        if row.samples and request.status is not RequestStatus.FINISHED:
            request.num_pending_ids -= 1
            request.append(0)
            if len(request.token_ids) == request.max_total_tokens:
                self.scheduler.remove(request)


def test_decodes_come_first_then_chunks_within_the_budget() -> None:
    steps = Steps()
    steps.add("a", 3)
    steps.add("b", 30)
    assert steps.step() == {"a": 3, "b": 13}
    steps.add("c", 5)
    assert steps.step() == {"a": 1, "b": 15}
    assert steps.step() == {"a": 1, "b": 2, "c": 5}
    assert list(steps.step().items()) == [("b", 1), ("a", 1), ("c", 1)]  # the longest first


def test_a_chunk_of_one_token_counts_as_a_single_token_row() -> None:
    steps = Steps(max_num_batched_tokens=4)
    steps.add("a", 5)
    steps.add("b", 9)
    assert steps.step() == {"a": 4}
    assert list(steps.step().items()) == [("a", 1), ("b", 3)]
    assert list(steps.step().items()) == [("a", 1), ("b", 3)]


def test_deterministic_a_chunk_of_one_token_does_not_decode() -> None:
    steps = Steps(max_num_batched_tokens=4, deterministic=True)
    steps.add("a", 5)
    assert steps.step() == {"a": 4}
    for decodes in (False, True):
        [row] = steps.scheduler.schedule()
        assert (row.stop - row.start, row.decodes) == (1, decodes)
        steps._sample(row)


def test_deterministic_what_was_sampled_is_computed_again_token_by_token() -> None:
    steps = Steps(deterministic=True)
    request = steps.add("a", 5)
    counts = [steps.step()["a"] for _ in range(4)]
    assert counts == [5, 1, 1, 1]
    steps.scheduler.requeue_running()
    assert [steps.step()["a"] for _ in range(4)] == counts
    assert len(request.output_token_ids) == 4  # nothing new yet


def test_decodes_never_starve_a_prompt() -> None:
    steps = Steps(max_num_seqs=3, max_num_batched_tokens=3)
    steps.add("a", 1)
    steps.add("b", 1)
    steps.add("c", 6)
    assert [steps.step().get("c") for _ in range(7)] == [1] * 7


def test_no_more_rows_than_max_num_seqs() -> None:
    steps = Steps(max_num_seqs=2)
    for name in "abc":
        steps.add(name, 2, max_tokens=2)
    assert steps.step() == {"a": 2, "b": 2}
    assert steps.step() == {"a": 1, "b": 1}
    assert steps.step() == {"c": 2}


def test_lower_priority_number_runs_first_then_arrival() -> None:
    steps = Steps(max_num_seqs=1, max_num_batched_tokens=8)
    for name, priority in [("late", 1), ("a", 0), ("b", 0), ("urgent", -1)]:
        steps.add(name, 2, max_tokens=1, priority=priority)
    order = [next(iter(steps.step())) for _ in range(4)]
    assert order == ["urgent", "a", "b", "late"]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    steps = Steps(num_blocks=8, max_num_batched_tokens=64)
    steps.add("running", 8, max_tokens=4)  # 2 blocks, then 3
    steps.step()
    large = steps.add("large", 28)  # 7 blocks
    steps.add("small", 2)
    while large.status is RequestStatus.WAITING:
        assert "small" not in (ran := steps.step())
        assert ran
    assert steps.scheduler.running[0] is large


def test_a_waiting_request_never_preempts_a_running_one() -> None:
    steps = Steps(num_blocks=8, max_num_batched_tokens=64)
    steps.add("a", 20, max_tokens=8)
    steps.step()
    urgent = steps.add("urgent", 20, priority=-5)
    for _ in range(7):
        assert steps.step() == {"a": 1}
    assert steps.step() == {"urgent": 20}
    assert urgent.status is RequestStatus.RUNNING
    assert steps.scheduler.num_preemptions == 0


def test_the_last_of_the_lowest_priority_is_preempted_and_keeps_its_place() -> None:
    steps = Steps(num_blocks=12, max_num_batched_tokens=64)
    a, b, c = (steps.add(name, 7, priority=level) for name, level in [("a", 0), ("b", 1), ("c", 0)])
    assert steps.step() == {"a": 7, "c": 7, "b": 7}
    while steps.scheduler.num_preemptions == 0:
        ran = steps.step()
    assert ran == {"a": 1, "c": 1}
    assert (b.status, b.num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert len(b.output_token_ids) > 0
    later = steps.add("later", 1, priority=1)
    assert steps.scheduler.waiting == [b, later]
    assert steps.scheduler.running == [a, c]


def test_an_admission_leaves_a_spare_block_for_every_running_row() -> None:
    steps = Steps(num_blocks=6, max_num_batched_tokens=64)
    steps.add("a", 4)
    steps.add("b", 4)
    steps.add("c", 12)  # 3 of the 4 blocks left, but a and b are about to take one each
    steps.step()
    assert steps.step() == {"a": 1, "b": 1}
    assert steps.scheduler.num_preemptions == 0


def test_a_window_group_shortens_the_chunk_to_what_fits() -> None:
    steps = Steps(max_num_batched_tokens=64, windows=[(6, 3)])
    steps.add("a", 40)
    chunks = list(itertools.takewhile(lambda n: n > 1, (steps.step()["a"] for _ in range(20))))
    assert chunks[0] == 12  # all three blocks, where one window may straddle three
    assert sum(chunks) == 40
    assert steps.scheduler.num_preemptions == 0


def test_a_window_group_is_shared_by_preemption_when_it_is_full() -> None:
    steps = Steps(max_num_batched_tokens=64, windows=[(6, 5)])
    requests = [steps.add(name, 30, max_tokens=8) for name in "ab"]
    for _ in range(100):
        steps.step()
    assert [request.status for request in requests] == [RequestStatus.FINISHED] * 2
    assert steps.kv.usage == 0


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8])
def test_the_last_token_is_never_computed(prompt_len: int) -> None:
    steps = Steps()
    request = steps.add("a", prompt_len, max_tokens=3)
    assert [steps.step() for _ in range(4)] == [{"a": prompt_len}, {"a": 1}, {"a": 1}, {}]
    assert request.num_computed_tokens == prompt_len + 2


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    steps = Steps(caching=True, max_num_batched_tokens=10)
    requests = [steps.add(name, 17, max_tokens=4) for name in "abc"]
    assert steps.step() == {"a": 10}
    assert steps.step() == {"a": 7}  # b and c wait: their third block is a's in this step
    assert steps.step() == {"a": 1, "b": 1, "c": 1}
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16]


def test_who_waits_to_share_goes_on_alone_where_the_other_is_dropped() -> None:
    steps = Steps(caching=True, max_num_batched_tokens=10)
    a, b = (steps.add(name, 17, max_tokens=4) for name in "ab")
    assert steps.step() == {"a": 10}
    steps.scheduler.remove(a)
    assert steps.step() == {"b": 9}  # two blocks were stored
    assert b.num_cached_tokens == 8
