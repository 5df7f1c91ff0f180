"""An engine on the fake runtime, with everything that its requests came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.fake_runtime import FakeRuntime, expected_answer
from helpers.kv_invariants import check_idle

from octavo.cache import KVGroup
from octavo.engine.delivery import RequestUpdate
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.engine.request import Request
from octavo.sampling_params import SamplingParams

FULL = KVGroup((0, 1), None)
VOCAB_SIZE = 64


def ids(count: int, start: int = 0) -> list[int]:
    """A prompt; equal ``start`` gives prompts that begin alike."""
    return [(start + 7 * i) % VOCAB_SIZE for i in range(count)]


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    last: RequestUpdate | None = None


class Bench:
    """An engine on a fake runtime, with everything that its requests came to."""

    def __init__(self, groups: tuple[KVGroup, ...] = (FULL,), **limits: Any) -> None:
        sizes: dict[str, Any] = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "max_model_len": 256,
            "block_size": 16,
            "num_blocks": (64,) * len(groups),
        }
        self.groups = groups
        self.limits = EngineLimits(**sizes | limits)
        self.runtime = FakeRuntime(
            groups, self.limits.num_blocks, self.limits.block_size, VOCAB_SIZE
        )
        self.engine = Engine(self.runtime, groups, self.limits)
        self.results: dict[str, Result] = {}
        self.requests: dict[str, Request] = {}

    def add(
        self, prompt: list[int], *, seed: int = 0, salt: str | None = None, **params: Any
    ) -> str:
        name = str(len(self.results))
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": None} | params
        request = Request(
            name, prompt, SamplingParams(**params), frozenset([2]), seed, cache_salt=salt
        )
        self.engine.add(request)
        self.requests[name] = request
        self.results[name] = Result()
        return name

    def step(self) -> list[RequestUpdate]:
        updates = self.engine.step()
        for update in updates:
            result = self.results[update.request_id]
            result.token_ids += update.new_token_ids
            result.logprobs += update.logprobs or []
            result.prompt_logprobs = update.prompt_logprobs or result.prompt_logprobs
            result.last = update
        return updates

    def drain(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                check_idle(self.engine)
                return
            self.step()
        pytest.fail(f"still at work after {max_steps} steps")

    def answer(self, prompt: list[int], **options: Any) -> Result:
        """Run one request to its end, and check it."""
        name = self.add(prompt, **options)
        self.drain()
        self.check(name)
        return self.results[name]

    def check(self, name: str) -> None:
        """The answer is that of a request alone, computed directly."""
        request, result = self.requests[name], self.results[name]
        expected = expected_answer(request, self.groups, VOCAB_SIZE, self.engine.max_total_tokens)
        assert result.token_ids == expected.token_ids
        if request.params.prompt_logprobs is not None:
            assert result.prompt_logprobs == [None, *expected.prompt_logprobs]
        assert result.last is not None
        assert result.last.finish_reason == expected.finish_reason
        assert result.last.stop_reason == expected.stop_reason
