"""Reported faults O20 to O24: KV pool, preemption, prefix cache, clients that leave, windows.

The cases, with what other engines did wrong, are in shared/cases/engine.md. TINY is a random model
whose every answer depends on its whole context, so wrong KV shows in the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import load_reference, model_greedy, reference_logits, tiny
from helpers.llm import answer, greedy, ids, is_idle, load_async, load_llm, stats

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from octavo.errors import ContextLengthError

BLOCK = 16

TmpFactory = pytest.TempPathFactory
both_loops = pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlapped"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TmpFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(folder: Path) -> LLM:
    """An engine that shares nothing and lacks nothing: what it says, one by one, is right."""
    return load_llm(folder, enable_prefix_caching=False, block_size=BLOCK)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def some_ids(length: int, seed: int, vocab: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


# ---- O20: a request larger than the KV pool

SMALL_POOL = {"num_gpu_blocks_override": 8, "max_model_len": 256, "block_size": BLOCK}
PROMPT_C = some_ids(100, seed=20)


@pytest.mark.alone
@both_loops
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_o20_larger_than_the_pool(
    folder: Path, cold: LLM, enable_prefix_caching: bool, async_scheduling: bool
) -> None:
    llm = load_llm(
        folder,
        **SMALL_POOL,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
    )
    began = time.monotonic()
    with pytest.raises(ContextLengthError, match=r"150 tokens.* KV cache holds 128"):
        llm.generate(ids(*some_ids(150, seed=21)), greedy())
    assert time.monotonic() - began < 2
    ten = ids(*some_ids(10, seed=22))
    assert tokens(answer(llm, ten, greedy(max_tokens=5))) == (
        tokens(answer(cold, ten, greedy(max_tokens=5)))
    )
    params = greedy(max_tokens=100, ignore_eos=True)
    alone = answer(llm, ids(*PROMPT_C), params)
    assert len(tokens(alone)) == 28  # prompt and answer together fill the pool's 128 places
    assert alone.outputs[0].finish_reason == "length"
    truth = answer(cold, ids(*PROMPT_C), greedy(max_tokens=28, ignore_eos=True))
    assert tokens(alone) == tokens(truth)
    three = llm.generate([ids(*PROMPT_C), ids(*PROMPT_C[::-1]), ids(*PROMPT_C)], params)
    assert [len(tokens(output)) for output in three] == [28] * 3
    assert tokens(three[0]) == tokens(three[2]) == tokens(alone)
    assert is_idle(llm)


def test_o20_the_reference_itself(folder: Path, cold: LLM) -> None:
    """What the other tests take for right is what transformers says."""
    expected = model_greedy(load_reference(folder), PROMPT_C, 28)
    assert tokens(answer(cold, ids(*PROMPT_C), greedy(max_tokens=28, ignore_eos=True))) == expected


# ---- O21: preemption meets prefix hits; a prompt that is cached whole

COMMON = some_ids(64, seed=23)


@both_loops
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "top_p": 0.9},
    ],
    ids=["greedy", "penalties", "seeded"],
)
def test_o21_preempted_requests_say_the_same(
    folder: Path, cold: LLM, options: dict[str, Any], async_scheduling: bool
) -> None:
    llm = load_llm(
        folder, block_size=BLOCK, num_gpu_blocks_override=24, async_scheduling=async_scheduling
    )
    params = SamplingParams(max_tokens=60, ignore_eos=True, **options)
    prompts = [ids(*COMMON, *some_ids(5, seed=100 + i)) for i in range(8)]
    found = llm.generate(prompts, params)
    assert stats(llm).num_preemptions > 0
    for prompt, output in zip(prompts, found, strict=True):
        expected = answer(cold, prompt, params)
        assert tokens(output) == tokens(expected)
        if params.logprobs is not None:
            for entry, other in zip(
                output.outputs[0].logprobs or [], expected.outputs[0].logprobs or [], strict=True
            ):
                for token, one in entry.items():
                    assert one.logprob == pytest.approx(other[token].logprob, abs=1e-4)
    assert is_idle(llm)


@both_loops
def test_o21_a_prompt_cached_whole(folder: Path, cold: LLM, async_scheduling: bool) -> None:
    llm = load_llm(folder, block_size=BLOCK, async_scheduling=async_scheduling)
    for length, cached in ((64, 48), (16, 0), (17, 16), (48, 32)):
        prompt = ids(*some_ids(length, seed=length))
        first, second = (answer(llm, prompt, greedy(max_tokens=3)) for _ in range(2))
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == cached  # one position at least is computed
        expected = tokens(answer(cold, prompt, greedy(max_tokens=3)))
        assert tokens(first) == tokens(second) == expected


@both_loops
def test_o21_lengths_around_blocks(folder: Path, cold: LLM, async_scheduling: bool) -> None:
    llm = load_llm(
        folder, block_size=BLOCK, num_gpu_blocks_override=40, async_scheduling=async_scheduling
    )
    lengths = [n + d for n in (16, 32, 48, 64, 128, 256) for d in (-1, 0, 1)]
    prompts = [ids(*some_ids(length, seed=1)) for length in lengths]  # each begins the next
    params = greedy(max_tokens=18, ignore_eos=True)
    expected = [tokens(answer(cold, prompt, params)) for prompt in prompts]
    for order in (slice(None), slice(None, None, -1)):
        assert [tokens(one) for one in llm.generate(prompts[order], params)] == expected[order]
    assert is_idle(llm)


# ---- O22: a client that goes away

LONG = greedy(max_tokens=1900, ignore_eos=True)


async def settled(llm: AsyncLLM) -> bool:
    """Whether nothing runs, waits or holds a block any more within a second."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if is_idle(llm) and not llm._llm._engine.has_work:
            return True
        await asyncio.sleep(0.005)
    return False


async def cancel_while_waiting_for_all(llm: AsyncLLM, n: int) -> None:
    async def whole() -> None:
        async for _ in llm.generate("abc", greedy(max_tokens=1900, ignore_eos=True, n=n)):
            pass

    task = asyncio.create_task(whole())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_after_the_first_piece(llm: AsyncLLM, n: int) -> None:
    outputs = llm.generate("abc", greedy(max_tokens=1900, ignore_eos=True, n=n))
    assert not (await anext(outputs)).finished
    await outputs.aclose()


@pytest.mark.alone
@both_loops
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("leave", [cancel_while_waiting_for_all, leave_after_the_first_piece])
def test_o22_who_leaves_frees_everything(
    folder: Path,
    cold: LLM,
    leave: Callable[[AsyncLLM, int], Any],
    n: int,
    async_scheduling: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> RequestOutput:
        async with load_async(folder, async_scheduling=async_scheduling) as llm:
            for _ in range(25):
                await leave(llm, n)
            assert await settled(llm)
            before = stats(llm)
            assert before.finished == {"abort": 25 * n}
            await asyncio.sleep(0.02)
            assert stats(llm).generation_tokens == before.generation_tokens
            async for output in llm.generate("abc", greedy(max_tokens=6)):
                last = output
            return last

    with caplog.at_level(logging.WARNING):
        output = asyncio.run(run())
    assert tokens(output) == tokens(answer(cold, "abc", greedy(max_tokens=6)))
    assert not caplog.records


@pytest.mark.alone
@both_loops
def test_o22_leaving_the_queue(folder: Path, async_scheduling: bool) -> None:
    async def run() -> None:
        async with load_async(folder, max_num_seqs=2, async_scheduling=async_scheduling) as llm:
            running = [llm.generate("xyz", LONG) for _ in range(2)]
            for one in running:
                await anext(one)
            for _ in range(10):
                task = asyncio.ensure_future(anext(llm.generate("abc", LONG)))
                await asyncio.sleep(0.01)
                assert stats(llm).num_waiting == 1
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for one in running:
                await one.aclose()
            assert await settled(llm)
            assert stats(llm).finished == {"abort": 12}

    asyncio.run(run())


# ---- O23: different tokens, same key

A = list(range(1, 33))
PROMPTS = {
    "A": A,
    "B": [i + 256 for i in A],
    "C": [*A[:15], A[16], A[15], *A[17:]],
    "D": [*A[16:], 5, 6],  # A's second block, first
    "E": A[::-1],
}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: TmpFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("wide"), vocab_size=1024)


def test_o23_only_equal_tokens_are_equal(wide_folder: Path) -> None:
    params = greedy(max_tokens=16, ignore_eos=True)
    fresh = load_llm(wide_folder, enable_prefix_caching=False)
    right = {name: tokens(answer(fresh, ids(*prompt), params)) for name, prompt in PROMPTS.items()}
    assert len({tuple(one) for one in right.values()}) == 5

    for last in PROMPTS:
        llm = load_llm(wide_folder, block_size=BLOCK)  # a restarted worker
        for name in [*(name for name in PROMPTS if name != last), last]:
            output = answer(llm, ids(*PROMPTS[name]), params)
            assert output.num_cached_tokens == 0, (name, last)
            assert tokens(output) == right[name]
        again = answer(llm, ids(*A), params)
        assert again.num_cached_tokens == 16  # the cache is on
        assert tokens(again) == right["A"]


def test_o23_a_salt_sets_equal_tokens_apart(wide_folder: Path) -> None:
    llm = load_llm(wide_folder, block_size=BLOCK)

    def cached(salt: str | None) -> int:
        [output] = llm.generate(ids(*A), greedy(max_tokens=1), cache_salt=salt)
        return output.num_cached_tokens

    assert [cached(salt) for salt in (None, None, "a", "b", "", "a", "b", "", None)] == [
        *(0, 16, 0, 0, 0, 16, 16, 16, 16),
    ]


# ---- O24: the edge of a sliding window

WINDOW = 8
LENGTHS = (7, 8, 9, 40)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: TmpFactory) -> Path:
    return tiny(
        tmp_path_factory.mktemp("window"),
        model_type="mistral",
        sliding_window=WINDOW,
        num_hidden_layers=1,
    )


def last_logprobs(llm: LLM, prompt: Sequence[int]) -> dict[int, float]:
    """The likeliest tokens after a prompt, bit for bit."""
    [entry] = answer(llm, ids(*prompt), greedy(max_tokens=1, logprobs=20)).outputs[0].logprobs or []
    return {token: one.logprob for token, one in entry.items()}


def check_against_transformers(llm: LLM, folder: Path, length: int, num_tokens: int = 20) -> None:
    """Prompt scores and every decoded step against one dense forward of the whole sequence."""
    prompt = some_ids(length, seed=24)
    params = greedy(max_tokens=num_tokens, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    output = answer(llm, ids(*prompt), params)
    known = [*prompt, *tokens(output)]
    logits = reference_logits(folder, known).astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    assert len(entries) == len(known) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        assert known[position + 1] in entry
        for token, one in entry.items():
            assert one.logprob == pytest.approx(expected[position, token], abs=1e-4)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_o24_window_in_chunks(
    windowed: Path, chunk: int, enable_prefix_caching: bool, backend: str | None
) -> None:
    llm = load_llm(
        windowed,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 8),
        enable_prefix_caching=enable_prefix_caching,
        attention_backend=backend,
        block_size=BLOCK,
    )
    for length in LENGTHS:
        check_against_transformers(llm, windowed, length)
    if enable_prefix_caching:
        plain = greedy(max_tokens=1)
        prompt = ids(*some_ids(40, seed=24), 1)
        first, second = (answer(llm, prompt, plain) for _ in range(2))
        assert second.num_cached_tokens > 0
        assert tokens(first) == tokens(second)


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_o24_what_the_last_token_sees(windowed: Path, chunk: int) -> None:
    llm = load_llm(
        windowed,
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
        enable_prefix_caching=False,
        block_size=BLOCK,
    )
    prompt = some_ids(40, seed=25)
    before = last_logprobs(llm, prompt)
    prompt[31] ^= 1  # 8 before the last: outside
    assert last_logprobs(llm, prompt) == before
    prompt[32] ^= 1
    assert last_logprobs(llm, prompt) != before


def test_o24_two_layers_see_fifteen(tmp_path: Path) -> None:
    folder = tiny(tmp_path, model_type="mistral", sliding_window=WINDOW, num_hidden_layers=2)
    llm = load_llm(folder, enable_prefix_caching=False)
    prompt = some_ids(40, seed=26)
    before = last_logprobs(llm, prompt)
    prompt[24] ^= 1
    assert last_logprobs(llm, prompt) == before
    prompt[25] ^= 1
    assert last_logprobs(llm, prompt) != before


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "llama"},
    ],
    ids=str,
)
def test_o24_without_a_window_all_is_seen(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tiny(tmp_path, num_hidden_layers=1, **settings)
    llm = load_llm(folder)
    check_against_transformers(llm, folder, 40)
    prompt = some_ids(40, seed=27)
    before = last_logprobs(llm, prompt)
    prompt[0] ^= 1
    assert last_logprobs(llm, prompt) != before
