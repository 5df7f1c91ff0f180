"""Any mix of requests, aborts and faults, in pools too small for it: equal ids, no block lost.

The fake runtime's ids depend on all that attention reads, so every answer is compared with a direct
computation that knows no blocks, batches, cache or preemption.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from helpers.fake_runtime import DeviceError, FakeRuntime, expected_answer
from helpers.kv_invariants import check_idle, check_pools, check_queues
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache import KVGroup
from octavo.engine.delivery import RequestUpdate
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.engine.request import Request
from octavo.errors import ContextLengthError
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 48
EOS, STOP = 3, 5
SHARED = [1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 1]  # prompts begin alike
GROUPS = [
    (KVGroup((0, 1), None),),
    (KVGroup((0, 2), None), KVGroup((1,), 5)),
    (KVGroup((1,), None), KVGroup((0, 3), 7), KVGroup((2,), 1)),
    (KVGroup((0, 1), 4),),
]


@st.composite
def engines(draw: st.DrawFn) -> tuple[tuple[KVGroup, ...], EngineLimits]:
    groups = draw(st.sampled_from(GROUPS))
    max_num_seqs = draw(st.integers(1, 5))
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, max_num_seqs + 20)),
        max_model_len=draw(st.integers(8, 60)),
        block_size=draw(st.integers(1, 5)),
        num_blocks=tuple(draw(st.integers(4, 18)) for _ in groups),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )
    return groups, limits


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    score = draw(st.sampled_from([None, None, None, 0, 2]))
    max_tokens = draw(st.sampled_from([None, None, 1, 4, 24] + [0] * (score is not None)))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 3])) if max_tokens in (None, 4, 24) else 0,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (STOP,), (EOS, STOP)])),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=score,
    )


@dataclass
class Progress:
    request: Request
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] | None = None
    last: RequestUpdate | None = None
    dropped: bool = False


class EngineMachine(RuleBasedStateMachine):
    @initialize(setup=engines())
    def start(self, setup: tuple[tuple[KVGroup, ...], EngineLimits]) -> None:
        self.groups, limits = setup
        self.runtime = FakeRuntime(
            self.groups, limits.num_blocks, limits.block_size, VOCAB_SIZE, limits.deterministic
        )
        self.engine = Engine(self.runtime, self.groups, limits)
        self.all: list[Progress] = []

    @rule(
        shared=st.integers(0, len(SHARED)),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5),
        params=sampling_params(),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, "salt"]),
    )
    def add(
        self, shared: int, own: list[int], params: SamplingParams, priority: int, salt: str | None
    ) -> None:
        name = str(len(self.all))
        request = Request(
            request_id=name,
            prompt_token_ids=SHARED[:shared] + own,
            params=params,
            eos_token_ids=frozenset([EOS]),
            seed=len(self.all) % 3,
            priority=priority,
            cache_salt=salt,
        )
        needed = shared + len(own) + (params.max_tokens != 0)
        if needed > self.engine.max_total_tokens:
            with pytest.raises(ContextLengthError):
                self.engine.add(request)
        else:
            self.engine.add(request)
            self.all.append(Progress(request))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @precondition(lambda self: self.all)
    @rule(data=st.data(), external_stop=st.booleans())
    def drop(self, data: st.DataObject, external_stop: bool) -> None:
        progress = data.draw(st.sampled_from(self.all))
        progress.dropped = True
        end = self.engine.finish if external_stop else self.engine.abort
        end(progress.request.request_id)

    @rule(where=st.sampled_from(["forward", "sample", "wait"]))
    def break_device(self, where: str) -> None:
        self.runtime.fail_next = where
        with contextlib.suppress(DeviceError):  # a step without rows need not come to it
            self.take(self.engine.step())
        self.runtime.fail_next = None

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            progress = self.all[int(update.request_id)]
            assert not progress.dropped
            assert progress.last is None or progress.last.finish_reason is None
            progress.last = update
            progress.new_token_ids += update.new_token_ids
            assert (update.logprobs is None) == (progress.request.params.logprobs is None)
            progress.logprobs += update.logprobs or [None] * len(update.new_token_ids)
            if update.prompt_logprobs is not None:
                assert progress.prompt_logprobs is None
                progress.prompt_logprobs = update.prompt_logprobs

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "engine"):
            check_pools(self.engine)
            check_queues(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        bound = 50 + 20 * sum(60 + len(one.request.prompt_token_ids) for one in self.all)
        while self.engine.has_work:
            self.take(self.engine.step())
            bound -= 1
            assert bound > 0, "no end in sight"
        check_idle(self.engine)
        for progress in self.all:
            self.compare(progress)

    def compare(self, progress: Progress) -> None:
        request = progress.request
        limits = self.engine.limits
        expected = expected_answer(
            request, self.groups, VOCAB_SIZE, self.engine.max_total_tokens, limits.deterministic
        )
        count = len(progress.new_token_ids)
        finished = progress.last is not None and progress.last.finish_reason is not None
        assert finished or progress.dropped
        assert progress.new_token_ids == expected.token_ids[: count if not finished else None]
        assert progress.logprobs == expected.logprobs[:count]
        if finished:
            assert progress.last.finish_reason == expected.finish_reason
            assert progress.last.stop_reason == expected.stop_reason
            assert progress.last.error is None
            assert progress.last.num_cached_tokens < len(request.prompt_token_ids)
        if request.params.prompt_logprobs is None:
            assert progress.prompt_logprobs is None
        elif finished or count:
            assert progress.prompt_logprobs == [None, *expected.prompt_logprobs]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
