"""Deterministic mode on a real GPU, through the public API: equal bits, however a request is
computed. Run this folder by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.checkpoints import family
from helpers.decode import attend, make_rows, reference_attention

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kernels.linear_add.reference import linear_add
from octavo.kernels.linear_fixed import fused, reference, row
from octavo.kernels.linear_fixed.tiles import GROUP, Kind, Tile, Wide
from octavo.kernels.linear_fixed.triton import linear_fixed, make_counters
from octavo.kernels.norm_gate_up.reference import norm_gate_up
from octavo.kernels.norm_linear.reference import norm_linear
from octavo.kernels.rope_attention.triton import choose_cut
from octavo.kernels.rope_write.triton import MANY as MANY_TOKENS
from octavo.kernels.rope_write.triton import rope_write
from octavo.kernels.triton_launch import has_warpgroups
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


def test_a_token_is_rotated_the_same_among_few_and_many() -> None:
    """Which are different kernels."""
    torch.manual_seed(0)
    count = MANY_TOKENS + 5
    qkv = torch.randn(count, 32 * 128, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(count, device="cuda", dtype=torch.int32)
    turns = torch.rand(2, count, 64, device="cuda")
    weights = torch.randn(24, 128, device="cuda")
    whole, parts = torch.zeros(2, 2, count // 16 + 1, 16, 8, 128, device="cuda").bfloat16()

    def rotated(caches: torch.Tensor, part: slice) -> torch.Tensor:
        own = positions[part]
        return rope_write(qkv[part], own, *turns, *caches, own, num_heads=16, qk_norm=weights)

    q = rotated(whole, slice(0, count))
    for first in range(0, count, 1500):
        part = slice(first, min(first + 1500, count))
        assert torch.equal(rotated(parts, part), q[part])
    assert torch.equal(parts, whole)


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


needs_warpgroups = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_warpgroups(), reason="needs a Hopper GPU"
)


@needs_warpgroups
@pytest.mark.parametrize(
    ("n", "k"),
    [(151_936, 1024), (49_155, 576), (8193, 2048), (151_669, 1000), (33, 8), (9000, 512)],
)
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_a_row_of_the_head_alone_is_the_same(n: int, k: int, size: float) -> None:
    """By a kernel of its own; numbers of one size, and from tiny to huge."""
    torch.manual_seed(0)
    counters = make_counters(torch.device("cuda"))
    weight, x = (torch.randn(m, k, device="cuda") for m in (n, 200))
    if size > 1:
        weight, x = (part * torch.exp2(size * torch.randn_like(part)) for part in (weight, x))
    weight, x = weight.bfloat16(), x.bfloat16()
    out = torch.full((2, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    whole = linear_fixed(x, weight, None, counters, "decode")
    for count in (1, 2, 17, 64, 200):
        found = linear_fixed(x[:count], weight, None, counters, "decode")
        assert torch.equal(found, whole[:count]), count
    for one in (0, 1, 16, 63, 199):
        alone = x[one : one + 1]
        assert row.takes(alone, weight)
        assert torch.equal(row.linear_row(alone, weight, out=out[:1])[0], whole[one]), one
    assert out[1].isnan().all()
    wanted = x[:1].double() @ weight.double().T
    assert float((whole[:1] - wanted).norm() / wanted.norm()) < 0.01


# ---- fused steps

MANY = [1, 2, 5, 8, 15, 16, 17, 40, 63, 64, 65, 100, 129, 255, 256]


def rows_of(count: int, most: int = 256) -> list[slice]:
    """Places of so many rows among all."""
    return [slice(first, first + count) for first in {0, (most - count) // 2, most - count}]


@needs_warpgroups
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        *((4096, 1024), (1024, 2048), (1024, 3072), (896, 896), (576, 192)),
        *((2048, 6144), (2560, 9728), (136, 1000)),
    ],
)
def test_a_row_of_a_fused_product_is_the_same_in_any_batch(n: int, k: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, y = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in (n, 256))
    weight *= k**-0.5
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if biased else None
    squares, norm = torch.rand(256, 64, device="cuda") * k / 32, torch.rand(n, device="cuda")
    stream = torch.randn(256, n, device="cuda")

    def launch(part: slice) -> list[torch.Tensor]:
        x, own, sums = stream[part].clone(), y[part], squares[part]
        out, h = (torch.full_like(x, torch.nan, dtype=torch.bfloat16) for _ in range(2))
        ffn = out[:, : n // 2].clone()
        left = torch.full((len(x), fused.square_columns(n, k, len(x))), torch.nan, device="cuda")
        fused.norm_linear(own, sums, weight, out, eps=1e-6, bias=bias)
        fused.norm_gate_up(own, sums, weight, ffn, eps=1e-6, bias=bias)
        fused.linear_add(own, weight, x, norm, h, left, bias=bias)
        return [out, ffn, x, h, left]

    names = ("out", "ffn", "x", "h", "squares")
    whole = launch(slice(0, 256))
    for found, wanted in (
        (whole[0], norm_linear(y, squares, weight, eps=1e-6, bias=bias)),
        (whole[1], norm_gate_up(y, squares, weight, eps=1e-6, bias=bias)),
        (whole[2], linear_add(y, weight, stream, norm, bias=bias)[0]),
    ):
        assert float((found.double() - wanted).norm() / wanted.double().norm()) < 0.01
    exact = stream.double() + y.double() @ weight.double().T
    exact = exact if bias is None else exact + bias.double()
    assert float((whole[2] - exact).norm() / exact.norm()) < 1e-5
    for part in (part for count in MANY for part in rows_of(count)):
        for name, found, wanted in zip(names, launch(part), whole, strict=True):
            assert torch.equal(found, wanted[part]), (name, part)


TILES = {"linear": (1, 2, 4), "gate_up": (1, 2), "add": (1, 2, 4)}


@needs_warpgroups
@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_a_row_of_a_fused_product_is_the_same_in_any_tile(tokens: int) -> None:
    """Of few and of many stages, and with blocks of columns below one another or not."""
    torch.manual_seed(0)
    rows, n, k = 70, 1024, 3072
    weight, y = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in (n, rows))
    squares, norm = torch.rand(rows, 64, device="cuda") * k / 32, torch.rand(n, device="cuda")
    stream = torch.randn(rows, n, device="cuda")

    def launch(kernel: str, wide: Wide | None) -> list[torch.Tensor]:
        x = stream.clone()
        out, h = (torch.full_like(x, torch.nan, dtype=torch.bfloat16) for _ in range(2))
        left = torch.full((rows, n // GROUP), torch.nan, device="cuda")
        if kernel == "linear":
            fused.norm_linear(y, squares, weight, out, eps=1e-6, wide=wide)
            return [out]
        if kernel == "gate_up":
            ffn = out[:, : n // 2].clone()
            fused.norm_gate_up(y, squares, weight, ffn, eps=1e-6, wide=wide)
            return [ffn]
        fused.linear_add(y, weight, x, norm, h, left, wide=wide)
        return [x, h, left]

    for kernel, acrosses in TILES.items():
        wanted = launch(kernel, None)
        for across, shared_kb in product(acrosses, (48, 200)):
            wide = Wide(across, min(tokens, 64 // across), shared_kb)
            for found, right in zip(launch(kernel, wide), wanted, strict=True):
                assert torch.equal(found, right), (kernel, wide)


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_of_fused_attention_is_the_same_in_any_batch(window: int | None) -> None:
    """In grids of any number of shares, which the longest row decides."""
    lens = [1, 255, 256, 257, 600, 1024, 1025, 8192, 8193, 20_000, 3, 511]
    rows = make_rows(lens, num_heads=16, num_kv_heads=8, head_dim=128, window=window, device="cuda")
    spec = replace(rows.spec, split_mode="fixed", split_tokens=256)
    rows = replace(rows, spec=spec)
    whole, counters = attend(rows, choose_cut(spec, len(lens), max(lens)))
    assert not counters.any()
    want = reference_attention(rows)
    assert float((whole.double() - want).norm() / want.double().norm()) < 8e-3
    for first, stop in [*((i, i + 1) for i in range(len(lens))), (0, 7), (5, 12)]:
        names = ("qkv", "block_table", "seq_lens", "slot_mapping")
        part = replace(rows, **{name: getattr(rows, name)[first:stop] for name in names})
        cut = choose_cut(spec, stop - first, max(lens[first:stop]))
        assert torch.equal(attend(part, cut)[0], whole[first:stop]), (first, stop)


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((16, 8), 128), ((16, 8), 64), ((14, 2), 128), ((16, 2), 128), ((14, 1), 128)],
)
@pytest.mark.parametrize("window", [None, 300])
def test_shares_that_are_there_at_once_are_the_same(
    heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    lens = [1, 2, 31, 63, 64, 65, 128, 129, 192, 193, 255, 256, 257, 385, 700, 1500, 4096, 0]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    rows = make_rows(lens, window=window, device="cuda", **shape)
    spec = replace(rows.spec, split_mode="fixed", split_tokens=256)
    rows = replace(rows, spec=spec)
    cut = choose_cut(spec, 1, max(lens))
    assert cut.whole
    assert (cut.num_warps == 8) == (heads[0] <= 8 * heads[1])
    whole, counters = attend(rows, cut)
    assert not counters.any()
    want = reference_attention(rows)
    assert float((whole.double() - want).norm() / want.double().norm()) < 8e-3
    for stages in (1, 2, 4):
        one_by_one = replace(cut, whole=False, num_warps=4, num_stages=stages)
        assert torch.equal(attend(rows, one_by_one)[0], whole), stages
    assert torch.equal(attend(rows, replace(cut, num_warps=4))[0], whole)


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
