"""Loaded models for tests of the public API, and what such tests look at again and again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from octavo.engine.loop import EngineStats


def load_llm(model: Path, **options: Any) -> LLM:
    """``LLM`` on one thread, exact unless a dtype is given: matrices are tiny, a second thread only
    waits, and what rounding costs is another test's."""
    llm = LLM(str(model), **_exact(options))
    torch.set_num_threads(1)
    return llm


def load_async(model: Path, **options: Any) -> AsyncLLM:
    """``AsyncLLM``, likewise."""
    llm = AsyncLLM(str(model), **_exact(options))
    torch.set_num_threads(1)
    return llm


def _exact(options: dict[str, Any]) -> dict[str, Any]:
    rounds = {"dtype", "kv_cache_dtype", "quantization", "exact"} & options.keys()
    return {"threads": 1, **options, **({} if rounds else {"exact": True})}


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def answer(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The output of one prompt, generated at once."""
    [output] = llm.generate(prompt, params)
    return output


def both_ways(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The output of one prompt, streamed: nothing shown is taken back, and the end is what is
    generated at once. ``params`` are greedy or seeded."""
    whole = answer(llm, prompt, params)
    texts = [""]
    for streamed in llm.stream(prompt, params):
        texts.append(streamed.outputs[0].text)
        texts[-1].encode()  # whole characters: no lone surrogate
    assert all(later.startswith(sooner) for sooner, later in pairwise(texts))
    assert streamed.outputs == whole.outputs
    assert is_idle(llm)
    return streamed


def ids(*token_ids: int) -> dict[str, list[int]]:
    """A prompt of token ids."""
    return {"prompt_token_ids": list(token_ids)}


def stats(llm: LLM | AsyncLLM) -> EngineStats:
    """The engine's gauges and counters."""
    return (llm._llm if isinstance(llm, AsyncLLM) else llm)._engine.stats()


def is_idle(llm: LLM | AsyncLLM) -> bool:
    """Whether nothing runs or waits and no KV block is held."""
    now = stats(llm)
    return now.num_running == now.num_waiting == 0 and now.kv_cache_usage == 0.0
