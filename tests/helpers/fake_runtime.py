"""A runtime without a model: the next id is a hash of exactly what attention would read.

Every layer writes one 64-bit number per token into the slot that the batch names, reads the numbers
of its window back through the block table, and mixes their sum into the token's state. So a wrong
slot, a stale or doubly used block, a lost block or a false prefix hit changes the ids that follow.
Numbers of deeper layers depend on the whole prefix, as real KV does.

Deterministic, a token's number hangs on whether it came in a decode row: only what was sampled may.

Launches are carried out as late as allowed, when something waits for them, and unwritten memory
holds rubbish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.cache import KVGroup
from octavo.engine.batch import StepBatch
from octavo.engine.request import Request
from octavo.engine.sampling import (
    SampleOutput,
    SamplingBatch,
    SamplingRow,
    make_sampling_batch,
    sample,
)

_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(*values: np.ndarray | int) -> np.ndarray:
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = (state ^ np.asarray(value).astype(np.uint64)) * _ODD
            state = state ^ (state >> np.uint64(29))
    return state


def _logits(states: np.ndarray, vocab_size: int) -> np.ndarray:
    noise = _mix(states[:, None], np.arange(vocab_size))
    return (noise >> np.uint64(40)).astype(np.float32) / np.float32(1 << 21)


class DeviceError(Exception):
    """What a broken device raises."""


class FakeRuntime:
    """``num_blocks`` and windows as in the KV groups; ids below ``vocab_size``."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        vocab_size: int = 32,
        deterministic: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.deterministic = deterministic
        self.block_size = block_size
        self.groups = list(groups)
        self.num_steps = self.num_going_on = 0
        self.batches: list[StepBatch] = []
        self.fail_next: str | None = None  # "forward", "sample" or "wait": raises there, once
        rubbish = np.random.default_rng(0)
        self._store = {
            layer: rubbish.integers(0, 2**63, count * block_size).astype(np.uint64)
            for group, count in zip(groups, num_blocks, strict=True)
            for layer in group.layers
        }
        self._queue: list[Callable[[], None]] = []
        self._in_flight: list[StepBatch] = []
        self._logits = np.empty((0, vocab_size), np.float32)
        self._sample_rows = np.empty(0, np.int32)
        self._sampled: dict[int, int] = {}

    def forward(self, batch: StepBatch) -> None:
        self._fail_if_told("forward")
        check_batch(batch, self.block_size, self.deterministic)
        for earlier in self._in_flight:
            check_no_overlap(earlier, batch, self.block_size)
        self.num_steps += 1
        self.batches.append(batch)
        self._in_flight.append(batch)
        self._queue.append(lambda: self._run(batch))

    def sample(self, batch: SamplingBatch) -> list[SampleOutput]:
        self._fail_if_told("sample")
        result: list[SampleOutput] = []

        def run() -> None:
            output = sample(self._logits, batch)
            result.append(output)
            self._sampled = dict(
                zip(self._sample_rows.tolist(), output.token_ids.tolist(), strict=True)
            )

        self._queue.append(run)
        return result

    def decode(
        self, batch: StepBatch, sampling: SamplingBatch, *, goes_on: bool
    ) -> list[SampleOutput]:
        if goes_on:  # a runtime may count up itself
            check_goes_on(self.batches[-1], batch)
            self.num_going_on += 1
            own = np.arange(batch.num_rows, dtype=np.int32)
            batch = replace(batch, input_ids=np.full_like(own, -1), id_rows=own)
        self.forward(batch)
        return self.sample(sampling)

    def wait(self, handle: list[SampleOutput]) -> SampleOutput:
        self._fail_if_told("wait")
        while not handle:
            self._queue.pop(0)()
        self._in_flight.pop(0)
        return handle[0]

    def _fail_if_told(self, where: str) -> None:
        if self.fail_next == where:
            self.fail_next = None
            self._queue.clear()
            self._in_flight.clear()
            raise DeviceError(where)

    def _run(self, batch: StepBatch) -> None:
        ids = batch.input_ids.copy()
        for token in np.flatnonzero(ids < 0):
            ids[token] = self._sampled[int(batch.id_rows[token])]
        states = _mix(ids, batch.positions)
        if self.deterministic:
            states = _mix(states, np.arange(len(ids)) < batch.num_decodes)
        layers = sorted((layer, g) for g, group in enumerate(self.groups) for layer in group.layers)
        for layer, g in layers:
            store = self._store[layer]
            store[batch.slot_mapping[g]] = _mix(states, layer)
            for r in range(batch.num_rows):
                own = slice(batch.query_start_loc[r], batch.query_start_loc[r + 1])
                first = self.groups[g].first_key(int(batch.positions[own][0]))
                read = np.arange(first, batch.seq_lens[r])
                blocks = batch.block_table[g][r, read // self.block_size]
                assert (blocks >= 0).all(), "a block inside the window is gone"
                values = store[blocks * self.block_size + read % self.block_size]
                states[own] = _attend(
                    states[own], values, batch.positions[own], first, self.groups[g]
                )
        self._logits = _logits(states[batch.logits_indices], self.vocab_size)
        self._sample_rows = batch.sample_rows


def _attend(
    states: np.ndarray, values: np.ndarray, positions: np.ndarray, first: int, group: KVGroup
) -> np.ndarray:
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values)])
    starts = np.array([group.first_key(int(p)) for p in positions]) - first
    return _mix(states, sums[positions - first + 1] - sums[starts])


def check_batch(batch: StepBatch, block_size: int, deterministic: bool = False) -> None:
    """What every batch must satisfy by itself."""
    counts = np.diff(batch.query_start_loc)
    assert batch.query_start_loc[0] == 0
    assert batch.query_start_loc[-1] == batch.num_tokens
    assert (counts > 0).all()
    assert (counts[: batch.num_decodes] == 1).all()
    assert deterministic or (counts[batch.num_decodes :] > 1).all()
    assert ((batch.input_ids == -1) == (batch.id_rows >= 0)).all()
    for r in range(batch.num_rows):
        own = slice(batch.query_start_loc[r], batch.query_start_loc[r + 1])
        expected = np.arange(batch.seq_lens[r] - counts[r], batch.seq_lens[r])
        assert (batch.positions[own] == expected).all()
        for slots, table in zip(batch.slot_mapping, batch.block_table, strict=True):
            blocks = table[r, expected // block_size]
            assert (blocks >= 0).all()
            assert (slots[own] == blocks * block_size + expected % block_size).all()
            assert (table[r, -(-int(batch.seq_lens[r]) // block_size) :] == -1).all()
            others = np.delete(table, r, axis=0)
            assert not np.isin(blocks, others).any(), "written by one row, held by another"
    assert (np.diff(batch.logits_indices) > 0).all()
    last = batch.query_start_loc[1:][batch.sample_rows] - 1
    assert (batch.logits_indices[batch.sample_indices] == last).all()
    for array in (batch.input_ids, batch.positions, *batch.slot_mapping, *batch.block_table):
        assert array.dtype == np.int32


def check_goes_on(before: StepBatch, batch: StepBatch) -> None:
    """It is the step before with everything counted up, and each row has its own id."""
    for slots, last in zip(batch.slot_mapping, before.slot_mapping, strict=True):
        np.testing.assert_array_equal(slots, last + 1)
    np.testing.assert_array_equal(batch.positions, before.positions + 1)
    np.testing.assert_array_equal(batch.seq_lens, before.seq_lens + 1)
    known = batch.id_rows == -1
    np.testing.assert_array_equal(batch.id_rows[~known], np.flatnonzero(~known))


def check_no_overlap(earlier: StepBatch, batch: StepBatch, block_size: int) -> None:
    """No step writes a block that another request uses in a step still in flight: a row may only go
    on where its own row of the earlier step ended."""
    for slots, table in zip(batch.slot_mapping, earlier.block_table, strict=True):
        for slot, position in zip(slots.tolist(), batch.positions.tolist(), strict=True):
            for r, index in np.argwhere(table == slot // block_size).tolist():
                assert index == position // block_size
                assert position >= earlier.seq_lens[r]


@dataclass
class Expected:
    """What a request must come to, computed alone, without cache, blocks or batches."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None
    logprobs: list[dict[int, object] | None]
    prompt_logprobs: list[dict[int, object]]


def expected_answer(
    request: Request,
    groups: Sequence[KVGroup],
    vocab_size: int,
    max_total_tokens: int,
    deterministic: bool = False,
) -> Expected:
    """The direct computation. ``max_total_tokens``: of model or pool, whichever is less."""
    params, prompt = request.params, request.prompt_token_ids
    decoded_from = len(prompt) if deterministic else None
    limit = max_total_tokens
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    stops = set(params.stop_token_ids)
    eos = set() if params.ignore_eos else set(request.eos_token_ids)
    answer = Expected([], "length", None, [], [])
    if params.prompt_logprobs is not None:
        count = len(prompt) - 1
        answer.prompt_logprobs = sample(
            _logits(_dense_states(prompt, groups, decoded_from), vocab_size),
            make_sampling_batch(
                [],
                sample_indices=[],
                prompt_indices=list(range(count)),
                prompt_targets=prompt[1:],
                prompt_top=[params.prompt_logprobs] * count,
                vocab_size=vocab_size,
            ),
        ).prompt_logprobs
    while len(prompt) + len(answer.token_ids) < limit:
        early = len(answer.token_ids) < params.min_tokens
        row = SamplingRow(
            params,
            prompt,
            list(answer.token_ids),
            request.seed,
            request.choice,
            len(answer.token_ids),
            tuple(stops | eos) if early else (),
        )
        states = _dense_states(prompt + answer.token_ids, groups, decoded_from)[-1:]
        batch = make_sampling_batch([row], sample_indices=[0], vocab_size=vocab_size)
        output = sample(_logits(states, vocab_size), batch)
        token = int(output.token_ids[0])
        answer.token_ids.append(token)
        answer.logprobs.append(output.logprobs[0])
        if not early and token in stops | eos:
            answer.finish_reason = "stop"
            answer.stop_reason = None if token in eos else token
            break
    return answer


def _dense_states(
    token_ids: Sequence[int], groups: Sequence[KVGroup], decoded_from: int | None
) -> np.ndarray:
    positions = np.arange(len(token_ids))
    states = _mix(np.array(token_ids), positions)
    if decoded_from is not None:
        states = _mix(states, positions >= decoded_from)
    for layer, group in _by_layer(groups):
        states = _attend(states, _mix(states, layer), positions, 0, group)
    return states


def _by_layer(groups: Sequence[KVGroup]) -> list[tuple[int, KVGroup]]:
    pairs = [(layer, group) for group in groups for layer in group.layers]
    return sorted(pairs, key=lambda pair: pair[0])
