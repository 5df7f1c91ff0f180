"""The engine by its public API against transformers in float32: every family, every way to run.

What is compared are greedy ids, the log probabilities of the 20 likeliest tokens at every position
of prompt and answer (they hold the sum over the whole vocabulary), and their ranks. However a
request is computed (whole, in chunks, on a cached prefix, again after a preemption, among others,
one step ahead of the host), the reference is one dense forward of its ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import FAMILIES, family, reference_logits
from helpers.llm import greedy, ids, is_idle, load_llm, stats
from helpers.reference import check_logprobs

from octavo import LLM, RequestOutput

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 300)
NUM_TOKENS = 6

Prompt = dict[str, list[int]]


def prompt(length: int) -> Prompt:
    """Random ids, others for every length: rows that are mixed up show."""
    return ids(*np.random.default_rng(length).integers(0, 256, length).tolist())


PROMPTS = [prompt(length) for length in LENGTHS]
SCORED = greedy(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20, prompt_logprobs=20)


class Model:
    """A random checkpoint of one family; the reference runs once for each sequence of ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logits = cache(lambda ids: reference_logits(folder, ids))

    def load(self, **options: Any) -> LLM:
        return load_llm(self.folder, block_size=BLOCK, max_model_len=512, **options)

    def check(self, outputs: Sequence[RequestOutput]) -> list[list[int]]:
        """Every output is the reference's; returns their ids."""
        for output in outputs:
            assert output.error is None
            sequence = output.prompt_token_ids + output.outputs[0].token_ids
            check_logprobs(output, self.logits(tuple(sequence)))
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(family(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_by_one(llm: LLM, prompts: Sequence[Prompt], params: Any = SCORED) -> list[RequestOutput]:
    return [llm.generate(one, params, use_tqdm=False)[0] for one in prompts]


def at_once(llm: LLM, prompts: Sequence[Prompt], params: Any = SCORED) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    assert is_idle(llm)
    return outputs


def test_plain_and_cached_prefix(model: Model) -> None:
    """Then again, without the prompt's scores (those are always computed anew): the longer prompts
    find their full blocks, and so does one that goes on differently after 40 tokens."""
    llm = model.load()
    plain = model.check(one_by_one(llm, PROMPTS))
    fork = ids(*PROMPTS[-1]["prompt_token_ids"][:40], *[7] * 30)
    again = greedy(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
    outputs = one_by_one(llm, [*PROMPTS, fork], again)
    assert model.check(outputs)[:-1] == plain
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[:5] == [0, 0, 0, 16, 288]
    # A window's blocks are given back as it moves on, so that nothing may be left of token 32 on.
    assert cached == [0, 0, 0, 16, 288, 32]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill(model: Model, chunk: int) -> None:
    """Alone, so that a chunk is as large as its name says."""
    llm = model.load(max_num_batched_tokens=chunk, max_num_seqs=1)
    before = stats(llm).num_steps
    model.check(one_by_one(llm, PROMPTS))
    prefills = sum(-(-length // chunk) for length in LENGTHS)
    assert stats(llm).num_steps - before == prefills + len(LENGTHS) * (NUM_TOKENS - 1)


def test_mixed_batches_in_both_loops(model: Model) -> None:
    """Whole prompts, chunks of the long one and decodes share steps."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6}
    prompts = [PROMPTS[-1], *PROMPTS, prompt(90)]
    llm, overlapped = model.load(**options), model.load(**options, async_scheduling=True)
    plain = model.check(at_once(llm, prompts))
    assert stats(llm).num_steps < 25  # one by one it would be 47
    assert model.check(at_once(overlapped, prompts)) == plain


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlapped"])
def test_preempted(model: Model, async_scheduling: bool) -> None:
    """Four requests of one block grow to five, or to the three that a window straddles."""
    llm = model.load(
        num_gpu_blocks_override=8,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        async_scheduling=async_scheduling,
    )
    prompts = [prompt(length) for length in (10, 11, 12, 13)]
    params = greedy(max_tokens=60, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    model.check(at_once(llm, prompts, params))
    assert stats(llm).num_preemptions > 0
