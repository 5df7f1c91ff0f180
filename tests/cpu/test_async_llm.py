"""``AsyncLLM``: many callers of one engine, in one event loop or several, and how each can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from helpers.checkpoints import EOS, chain, markov, tiny, uniform26
from helpers.llm import answer, greedy, is_idle, load_async, load_llm, stats

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from octavo.errors import ContextLengthError, InvalidRequestError, OctavoError

T = TypeVar("T")

TmpFactory = pytest.TempPathFactory
LONG = greedy(max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TmpFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    return load_llm(folder, enable_prefix_caching=False)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[AsyncLLM]:
    llm = load_async(folder, async_scheduling=request.param)
    yield llm
    llm.shutdown()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Carry a coroutine out; a caller that is never answered fails the test."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    return (await collect(llm, prompt, params))[-1]


async def idle(llm: AsyncLLM) -> bool:
    """Whether the engine comes to rest within a second."""
    for _ in range(200):
        if is_idle(llm) and not llm._llm._engine.has_work:
            return True
        await asyncio.sleep(0.005)
    return False


def test_many_streams_at_once(llm: AsyncLLM, offline: LLM) -> None:
    """Each gets what it would get alone, piece by piece, each piece a copy of its own."""
    prompts = [f"story number {i} " * (1 + i % 3) for i in range(16)]
    params = [SamplingParams(seed=i, max_tokens=4 + i % 9, logprobs=1) for i in range(16)]

    async def scenario() -> list[list[RequestOutput]]:
        calls = [collect(llm, *pair) for pair in zip(prompts, params, strict=True)]
        return await asyncio.gather(*calls)

    for prompt, one, pieces in zip(prompts, params, run(scenario()), strict=True):
        expected = answer(offline, prompt, one).outputs[0]
        final = pieces[-1].outputs[0]
        assert final.token_ids == expected.token_ids
        assert (final.text, final.finish_reason) == (expected.text, expected.finish_reason)
        assert [piece.finished for piece in pieces] == [*[False] * (len(pieces) - 1), True]
        counts = [len(piece.outputs[0].token_ids) for piece in pieces]
        assert counts == sorted(set(counts))
        for count, piece in zip(counts, pieces, strict=True):
            assert piece.outputs[0].token_ids == expected.token_ids[:count]
            assert len(piece.outputs[0].logprobs or []) == count
            assert expected.text.startswith(piece.outputs[0].text) or count == counts[-1]
    assert is_idle(llm)


def test_several_answers_of_one_stream(tmp_path: Path) -> None:
    async def scenario() -> list[RequestOutput]:
        async with load_async(markov(tmp_path, uniform26()), max_num_seqs=1) as llm:
            # One row: the answers come one after the other.
            return await collect(llm, "a", SamplingParams(n=3, seed=1, max_tokens=4, logprobs=0))

    pieces = run(scenario())
    assert len({one.text for one in pieces[-1].outputs}) == 3
    for piece in pieces:
        for one in piece.outputs:
            assert len(one.logprobs or []) == len(one.token_ids) == len(one.text)
    assert len(pieces[-1].outputs[2].token_ids) == 4


def test_a_slow_caller_gets_the_newest(llm: AsyncLLM, offline: LLM) -> None:
    params = greedy(max_tokens=200, ignore_eos=True)

    async def scenario() -> list[RequestOutput]:
        pieces = []
        async for output in llm.generate("slow", params):
            pieces.append(output)
            while stats(llm).num_running:
                await asyncio.sleep(0.001)
        return pieces

    pieces = run(scenario())
    assert len(pieces) < 10
    assert pieces[-1].outputs[0].token_ids == answer(offline, "slow", params).outputs[0].token_ids


def test_a_bad_request_hurts_nobody(llm: AsyncLLM, offline: LLM) -> None:
    async def scenario() -> tuple[list[Any], RequestOutput]:
        good = asyncio.create_task(last(llm, "good", greedy(max_tokens=20, ignore_eos=True)))
        bad = [
            last(llm, {"prompt_token_ids": [9999]}, greedy()),
            last(llm, "x" * 3000, greedy()),
            last(llm, "x", greedy(max_tokens=0)),
            last(llm, "x", greedy(logit_bias={9999: 1.0})),
        ]
        return await asyncio.gather(*bad, return_exceptions=True), await good

    errors, good = run(scenario())
    assert [type(error) for error in errors] == [
        InvalidRequestError,
        ContextLengthError,
        InvalidRequestError,
        InvalidRequestError,
    ]
    expected = answer(offline, "good", greedy(max_tokens=20, ignore_eos=True))
    assert good.outputs[0].token_ids == expected.outputs[0].token_ids


def test_default_parameters(tmp_path: Path) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 3}
    folder = markov(tmp_path, chain(*"ABCDEFG", EOS), generation_config=sampling)

    async def scenario() -> list[RequestOutput]:
        async with load_async(folder) as llm:
            assert llm.get_tokenizer().encode("A")
            assert any("temperature 0" in note for note in llm.report.notes)
            return [output async for output in llm.generate("A")]

    assert run(scenario())[-1].outputs[0].text == "BCD"


def test_priority_and_salt(folder: Path) -> None:
    async def scenario() -> None:
        async with load_async(folder, max_num_seqs=1) as llm:
            order: list[str] = []
            first = llm.generate("z", LONG)
            await anext(first)  # it has the only row

            async def wait_for(name: str, priority: int, salt: str | None) -> int:
                outputs = llm.generate(
                    "p" * 40, greedy(max_tokens=1), priority=priority, cache_salt=salt
                )
                [output] = [output async for output in outputs]
                order.append(name)
                return output.num_cached_tokens

            waiting = [
                asyncio.create_task(wait_for(name, priority, salt))
                for name, priority, salt in (("b", 2, None), ("c", 1, "s"), ("a", 0, None))
            ]
            while stats(llm).num_waiting < 3:
                await asyncio.sleep(0.001)
            await first.aclose()
            assert await asyncio.gather(*waiting) == [32, 0, 0]
            assert order == ["a", "c", "b"]

    run(scenario())


# ---- leaving


def test_leaving_the_loop_aborts(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        async for output in llm.generate("abc", LONG):
            if len(output.outputs[0].token_ids) > 2:
                break
        assert await idle(llm)

    run(scenario())


def test_cancelling_a_task_aborts(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        tasks = [asyncio.create_task(last(llm, "abc", LONG)) for _ in range(5)]
        while stats(llm).num_running < 5:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in found)
        assert await idle(llm)

    run(scenario())


def test_a_timeout_aborts(llm: AsyncLLM) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(last(llm, "abc", LONG), 0.05)
        assert await idle(llm)

    run(scenario())


def test_an_event_loop_that_ends_takes_its_requests_with_it(llm: AsyncLLM) -> None:
    async def forget() -> None:
        task = asyncio.create_task(last(llm, "abc", LONG))
        while stats(llm).num_running == 0:
            await asyncio.sleep(0.001)
        assert not task.done()

    run(forget())
    assert run(idle(llm))


def test_an_event_loop_that_is_closed_at_once(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    outputs = llm.generate("abc", LONG)
    loop.run_until_complete(anext(outputs))
    loop.close()  # without a word to its generators
    assert run(idle(llm))


def test_several_event_loops(llm: AsyncLLM, offline: LLM) -> None:
    expected = answer(offline, "loop", greedy(max_tokens=9)).outputs[0].token_ids
    found: list[list[int]] = []

    def ask() -> None:
        output = run(last(llm, "loop", greedy(max_tokens=9)))
        found.append(output.outputs[0].token_ids)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask()
    assert found == [expected] * 5


# ---- the end


class BrokenDevice(Exception):
    pass


def test_an_error_of_the_engine_reaches_every_caller(folder: Path) -> None:
    async def scenario() -> None:
        async with load_async(folder, max_num_seqs=2) as llm:
            running = [llm.generate("abc", LONG) for _ in range(2)]
            for one in running:
                await anext(one)
            waiting = [asyncio.create_task(last(llm, "abc", LONG)) for _ in range(2)]
            while stats(llm).num_waiting < 2:
                await asyncio.sleep(0.001)

            def launch(batch: Any) -> None:
                raise BrokenDevice("the device is gone")

            for name in ("forward", "decode_ahead"):
                setattr(llm._llm._engine._runtime, name, launch)
            calls = [last_of(one) for one in running]
            found = await asyncio.gather(*calls, *waiting, return_exceptions=True)
            assert [type(one) for one in found] == [BrokenDevice] * 4
            with pytest.raises(BrokenDevice, match="the device is gone"):  # and whoever comes late
                await last(llm, "abc", greedy())

    async def last_of(outputs: Any) -> RequestOutput:
        return [output async for output in outputs][-1]

    run(scenario())


def test_shutdown_answers_every_caller(folder: Path) -> None:
    async def scenario() -> None:
        llm = load_async(folder, max_num_seqs=1)
        calls = [asyncio.create_task(last(llm, "abc", LONG)) for _ in range(3)]
        while stats(llm).num_running + stats(llm).num_waiting < 3:
            await asyncio.sleep(0.001)
        await asyncio.gather(*(asyncio.to_thread(llm.shutdown) for _ in range(2)))
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, OctavoError) for one in found)
        assert "shut down" in str(found[0])
        with pytest.raises(OctavoError, match="shut down"):
            await last(llm, "abc", greedy())
        llm.shutdown()  # once more does no harm

    run(scenario())


def test_shutdown_ends_the_thread(folder: Path) -> None:
    before = set(threading.enumerate())

    async def scenario() -> None:
        async with load_async(folder) as llm:
            await last(llm, "abc", greedy(max_tokens=2))

    run(scenario())
    assert set(threading.enumerate()) <= before
