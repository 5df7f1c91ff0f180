"""The ``cuda`` runtime made deterministic, in the interpreter: equal bits, however a request is
computed. tests/gpu/test_deterministic_gpu.py is the same of compiled kernels.

What a mistake of rule would change shows here too: decode attention in other kernels than prefill,
a cache of decoded blocks, sums that the size of the step decides.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.checkpoints import family
from helpers.cuda_runtime import load
from triton.runtime import interpreter

from octavo import SamplingParams
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.engine.request import Request

torch.set_num_threads(1)
RNG = np.random.default_rng(3)
SHARED = RNG.integers(0, 256, 8).tolist()
PROMPTS = [
    [5],
    SHARED + RNG.integers(0, 256, 6).tolist(),
    SHARED + RNG.integers(0, 256, 1).tolist(),
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, max_tokens=4, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=4, max_tokens=2, ignore_eos=True, logprobs=0),
]


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose steps are fused; and one of windows, post-norms, a scaled and tied embedding, and
    few heads, as time goes there."""
    if request.param == "qwen3":
        return family(tmp_path_factory.mktemp("qwen3"), "qwen3", intermediate_size=128)
    return family(
        tmp_path_factory.mktemp("gemma3"),
        "gemma3",
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )


@pytest.fixture(autouse=True)
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's BLAS rounds a row by its place in the matrix, which tensor cores don't."""

    def create_dot(self, a, b, d, *options):
        product = np.einsum("...ik,...kj->...ij", a.data, b.data)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def engine_of(model: Path, tokens: int, blocks: int, overlapped: bool) -> Engine:
    driver = load(
        model,
        block_size=2,
        num_blocks=blocks,
        dtype="bfloat16" if "qwen3" in str(model) else "float32",
        max_rows=4,
        deterministic=True,
    )
    assert bool(driver.runtime._fused) == (driver.runtime.dtype is torch.bfloat16)
    limits = EngineLimits(
        max_num_seqs=4,
        max_num_batched_tokens=tokens,
        max_model_len=320,
        block_size=2,
        num_blocks=(blocks,) * len(driver.groups),
        async_scheduling=overlapped,
        deterministic=True,
    )
    return Engine(driver.runtime, driver.groups, limits)


def answers(engine: Engine, which: list[int]) -> dict[int, tuple]:
    """Ids, and log probabilities to the last bit."""
    found: dict[int, tuple[list, list, list]] = {i: ([], [], []) for i in which}
    for i in which:
        params = PARAMS[i]
        engine.add(Request(str(i), PROMPTS[i], params, frozenset([257]), params.seed or 0))
    while engine.has_work:
        for update in engine.step():
            ids, logprobs, prompt_logprobs = found[int(update.request_id)]
            assert update.error is None
            ids += update.new_token_ids
            logprobs += update.logprobs or []
            prompt_logprobs += update.prompt_logprobs or []
    return found


def test_the_same_bits_however_it_is_computed(model: Path) -> None:
    alone = engine_of(model, 64, 40, False)
    wanted = {}
    for i in range(3):
        wanted |= answers(alone, [i])
    # All together, in chunks of few tokens, in a pool too small for all, a prompt in the cache.
    mixed = engine_of(model, 5, 10, True)
    assert answers(mixed, [2, 1, 0]) == wanted
    assert mixed.stats().num_preemptions > 0
    assert mixed.stats().prefix_cache_hits > 0
