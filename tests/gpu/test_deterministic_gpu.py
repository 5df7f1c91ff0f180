"""Deterministic mode on a real GPU, through the public API: equal bits, however a request is
computed. Run this folder by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.checkpoints import family

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kernels.linear_fixed import reference
from octavo.kernels.linear_fixed.tiles import Kind, Tile
from octavo.kernels.linear_fixed.triton import linear_fixed, make_counters
from octavo.outputs import RequestOutput

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs a CUDA GPU and compiled kernels",
)
QWEN = Path(__file__).parents[2] / "bench/models/qwen3-0.6b/config.json"
RNG = np.random.default_rng(5)
SHARED = RNG.integers(0, 256, 700).tolist()
VARIED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {7: 2.0}},
]


# ---- products

SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 12288), (576, 576)]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_of_a_product_is_the_same_in_any_batch(n: int, k: int, kind: Kind) -> None:
    counters = make_counters(torch.device("cuda"))
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, k, device="cuda", dtype=torch.bfloat16)
    whole = linear_fixed(x, weight, None, counters, kind)
    wanted = reference.linear_fixed(x, weight, None)
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 0.01
    for first, count in [(0, 1), (7, 1), (5, 16), (100, 31), (1, 64), (3, 120), (299, 1), (0, 300)]:
        part = slice(first, first + count)
        assert torch.equal(linear_fixed(x[part], weight, None, counters, kind), whole[part]), part
    assert not counters.any()


@pytest.mark.parametrize(("n", "k", "kind"), [(1024, 3072, "decode"), (4096, 4096, "prefill")])
def test_a_row_of_a_product_is_the_same_in_any_tile(n: int, k: int, kind: Kind) -> None:
    """Instructions differ by the tile's activation rows; their sums must not."""
    counters = make_counters(torch.device("cuda"))
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, k, device="cuda", dtype=torch.bfloat16)
    whole = linear_fixed(x, weight, None, counters, kind)
    for rows, tokens, chunk in [*product((64, 128), (16, 32, 64, 128), (64,)), (64, 64, 128)]:
        tile = Tile(rows, tokens, chunk, 4 if rows == 64 else 8, 3)
        found = linear_fixed(x, weight, None, counters, kind, tile=tile)
        assert torch.equal(found, whole), tile
    assert not counters.any()


# ---- requests


def dummy(folder: Path) -> Path:
    """Qwen3-0.6B's shapes, a few layers of them."""
    config = json.loads(QWEN.read_text()) | {"num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["qwen3-0.6b", "qwen2", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real shapes, biases, windows with post-norms."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3-0.6b":
        return dummy(folder)
    return family(folder, request.param, max_position_embeddings=2048)


def load(model: Path, **options: Any) -> LLM:
    real = (model / "model.safetensors").exists()
    options = {"max_num_seqs": 24, "num_gpu_blocks_override": 4096} | options
    return LLM(
        str(model),
        load_format="auto" if real else "dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        dtype="bfloat16",
        deterministic=True,
        **options,
    )


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts of all lengths, some of which begin alike or are as long as whole blocks."""
    lengths = [1, 2, 15, 16, 17, 255, 256, 257, 1500, *RNG.integers(1, 700, 27).tolist()]
    prompts, params = [], []
    for i, length in enumerate(lengths):
        shared = int(RNG.integers(length // 2, length)) if i % 2 == 0 and length <= 700 else 0
        ids = SHARED[:shared] + RNG.integers(0, 256, length - shared).tolist()
        prompts.append({"prompt_token_ids": ids})
        params.append(
            SamplingParams(
                max_tokens=int(RNG.integers(1, 60)) if i % 2 else 200,
                ignore_eos=True,
                seed=i,
                logprobs=i % 4,
                prompt_logprobs=1 if i % 11 == 0 else None,
                **VARIED[i % len(VARIED)],
            )
        )
    return prompts, params


REQUESTS = requests()


def run(llm: LLM, which: Sequence[int]) -> dict[int, tuple]:
    prompts, params = REQUESTS
    outputs = llm.generate([prompts[i] for i in which], [params[i] for i in which], use_tqdm=False)
    return {i: bits(output) for i, output in zip(which, outputs, strict=True)}


def bits(output: RequestOutput) -> tuple:
    assert output.error is None
    [answer] = output.outputs
    return answer.token_ids, answer.logprobs, output.prompt_logprobs


def check(found: dict[int, tuple], wanted: dict[int, tuple], how: str) -> None:
    """Short, whatever differs: how many requests, and of one of them where."""
    different = [i for i in found if found[i] != wanted[i]]
    place = None
    if different:
        ours, theirs = found[different[0]], wanted[different[0]]
        steps = [a != b for a, b in zip(ours[1], theirs[1], strict=True)]
        place = steps.index(True) if any(steps) else "prompt"
    assert not different, f"{how}: {len(different)} of {len(found)}, {different[:5]} from {place}"


def test_the_same_bits_however_it_is_computed(model: Path) -> None:
    everyone = range(len(REQUESTS[0]))
    alone = load(model, enable_prefix_caching=False, max_num_batched_tokens=2048)
    assert alone.report.runtime == "cuda"
    wanted: dict[int, tuple] = {}
    for i in everyone:
        wanted |= run(alone, [i])
    assert len({str(tokens) for tokens, _, _ in wanted.values()}) > 10
    for turn in range(2):  # the first time kernel by kernel, then from graphs
        check(run(alone, everyone), wanted, f"together, turn {turn}")
    del alone

    for how, options in {
        "chunks of few tokens": {"max_num_batched_tokens": 48},
        "chunks, not overlapped": {"max_num_batched_tokens": 300, "async_scheduling": False},
        "preempted": {"num_gpu_blocks_override": 130, "max_num_batched_tokens": 512},
        "no graphs": {"enforce_eager": True, "max_num_batched_tokens": 1024},
    }.items():
        llm = load(model, **options)
        for turn in range(2):  # then with cached prefixes
            order = RNG.permutation(len(everyone)).tolist()
            check(run(llm, order), wanted, f"{how}, turn {turn}")
        stats = llm.stats()
        assert (stats.num_preemptions > 0) == (how == "preempted")
        assert stats.prefix_cache_hits > 0 or how == "preempted"
        assert stats.kv_cache_usage == 0
        del llm


def test_an_answer_as_part_of_a_prompt_is_computed_as_a_prompt(model: Path) -> None:
    """A second turn of a conversation: the first answer's blocks aren't found again."""
    llm = load(model)
    prompt = RNG.integers(0, 256, 100).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=1)
    [first] = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
    longer = {"prompt_token_ids": prompt + first.outputs[0].token_ids}
    [cached] = llm.generate(longer, greedy, use_tqdm=False)
    assert cached.num_cached_tokens == 96
    [fresh] = load(model).generate(longer, greedy, use_tqdm=False)
    assert bits(cached) == bits(fresh)


def test_other_attention_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        load(model, attention_backend="flashinfer")
