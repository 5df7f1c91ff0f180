"""The ``cuda`` runtime in the interpreter: its logits against transformers, and the engine's
answers on it against those of the eager runtime."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.checkpoints import family, reference_logits
from helpers.cuda_runtime import load
from helpers.driver import Driver, Float32, relative_error

from octavo import LLM, SamplingParams
from octavo.cache import kv_groups
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.engine.batch import StepBatch
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.engine.request import Request
from octavo.models.families import spec_from_config
from octavo.models.weights import check_weights
from octavo.runtime import cuda
from octavo.runtime.candidates import Model, choose_attention
from octavo.runtime.capture_ahead import CaptureAhead
from octavo.runtime.cuda import CudaRuntime, batch_buckets
from octavo.runtime.cuda_fused import fused_ways
from octavo.runtime.cuda_linears import LIBRARY
from octavo.runtime.cuda_load import run_largest_steps, shortened, warm_up
from octavo.runtime.graphs import Graphs

torch.set_num_threads(1)
IDS = np.random.default_rng(1).integers(0, 320, 80).tolist()


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Between them: QK-norm, windows, post-norms, a scaled and tied embedding."""
    return family(tmp_path_factory.mktemp(request.param), request.param)


def close(logits: Float32, reference: Float32) -> None:
    assert logits.shape == reference.shape
    assert relative_error(logits, reference) < 1e-4


@pytest.mark.parametrize("max_rows", [1, 2, 16, 17, 128, 200, 256, 300])
def test_sizes_of_decode_steps(max_rows: int) -> None:
    sizes = batch_buckets(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_rows
    assert all(b <= max(2 * a, a + 32) for a, b in pairwise(sizes))


def test_prefill_chunks_and_padded_decodes(model: Path) -> None:
    """Steps of rows of all kinds, then decode steps of several sizes."""
    driver = load(model)
    prompts = [IDS[i : i + 40] for i in range(5)]
    truth = cache(lambda i: reference_logits(model, prompts[i]))
    rows = [driver.sequence() for _ in prompts]

    def step(*counts: int) -> None:
        chunks = [
            (row, ids[row.length : row.length + count])
            for row, ids, count in zip(rows, prompts, counts, strict=False)
            if count
        ]
        taken = [i for i, count in enumerate(counts) if count]
        for i, logits in zip(taken, driver.step(chunks), strict=True):
            close(logits, truth(i)[rows[i].length - len(logits) : rows[i].length])

    step(1, 20)
    step(1, 1, 33, 7)
    step(1, 0, 1, 13, 30)
    for count in (5, 3, 1):  # padded to 8, 4 and 1
        step(*[1] * count)


def test_graphs_of_prompts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay makes the launches of the prompt that was captured, on what has been laid out."""
    captured: dict[Hashable, Callable[[], None]] = {}

    def replay(graphs: Graphs, key: Hashable, launch: Callable[[], None]) -> None:
        captured.setdefault(key, launch)()

    driver = load(model, short_prefill=True)
    monkeypatch.setattr(Graphs, "run", replay)
    for start, stops in enumerate([(5,), (3,), (16,), (17, 40), (12, 40), (40, 41, 57), (34, 36)]):
        ids, row = IDS[start:], driver.sequence()
        truth = reference_logits(model, ids[: stops[-1]])
        for stop in stops:
            (logits,) = driver.step([(row, ids[row.length : stop])], "last")
            close(logits, truth[stop - 1 : stop])
    prompts = {key for key in captured if "prompt" in key}
    assert prompts == {("prompt", size) for size in (16, 32, 48)}


def test_steps_that_are_no_graphs_of_prompts(model: Path) -> None:
    """Several prompts, one beside a row that decodes, one whose logits are all wanted, one that is
    longer, and one that is as long as a step may be."""
    driver = load(model, short_prefill=True, max_tokens=20)
    prompts = [IDS[i : i + 20] for i in range(2)]
    truth = [reference_logits(model, ids) for ids in prompts]
    rows = [driver.sequence() for _ in prompts]
    found = driver.step([(row, ids[:9]) for row, ids in zip(rows, prompts, strict=True)])
    for logits, wanted in zip(found, truth, strict=True):
        close(logits, wanted[:9])
    found = driver.step([(rows[0], prompts[0][9:10]), (rows[1], prompts[1][9:19])])
    close(found[0], truth[0][9:10])
    close(found[1], truth[1][9:19])
    found = driver.step([(rows[0], prompts[0][10:])])
    close(found[0], truth[0][10:])
    found = driver.step([(driver.sequence(), prompts[0])], "last")
    close(found[0], truth[0][19:])


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_which_graphs_are_captured_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as the last step had, then of more, then of fewer; prompts at last."""
    captured: list[Any] = []
    monkeypatch.setattr(Graphs, "capture", lambda graphs, key, launch: captured.append(key))
    driver = load(model, max_rows=64, short_prefill=True)
    runtime = driver.runtime
    driver.step([(driver.sequence(), IDS[:9]) for _ in range(17)])
    runtime._ahead = CaptureAhead(runtime.kinds_of_decode(320), [16, 32], 0)
    while runtime.capture_ahead():
        pass
    rows = [key[0] for key in captured if not isinstance(key[0], str)]
    assert list(dict.fromkeys(rows)) == [32, 48, 64, 16, 8, 4, 2, 1]
    assert {("choose", count, False) for count in rows} <= set(captured)
    assert {key[1] for key in captured if key[0] == "whole"} == {16, 8, 4, 2, 1}
    assert captured[-2:] == [("prompt", 16), ("prompt", 32)]


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_memory_is_free_without_a_look_for_cycles(model: Path) -> None:
    """The runtime of the first layers is gone before the pools are allocated."""
    gc.disable()
    try:
        driver = load(model, short_prefill=True)
        driver.step([(driver.sequence(), IDS[:9])], "last")
        driver.step([(driver.sequence(), IDS[:9])])
        driver.step([(driver.sequence(), IDS[:1])])
        logits = weakref.ref(driver.runtime._logits)
        del driver
        assert logits() is None
    finally:
        gc.enable()


def test_other_biases(tmp_path: Path) -> None:
    model = family(tmp_path, "llama", attention_bias=True, mlp_bias=True, head_dim=24)
    close(
        load(model, block_size=5).run(IDS[:24], chunk=15, decode_from=21),
        reference_logits(model, IDS[:24]),
    )


def test_bfloat16(tmp_path: Path) -> None:
    model = family(tmp_path, "qwen3")
    logits = load(model, dtype="bfloat16").run(IDS[:24], decode_from=20)
    assert relative_error(logits, reference_logits(model, IDS[:24])) < 0.05


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=0.9, seed=3, max_tokens=7, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4, max_tokens=5),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias={5: 3.0}, max_tokens=4),
    SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, max_tokens=5, min_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2),
]


@pytest.mark.parametrize(
    ("model", "overlapped"), [("qwen3", True), ("gemma3", False)], indirect=["model"]
)
def test_the_engine_answers_as_on_the_eager_runtime(model: Path, overlapped: bool) -> None:
    """Ids that only the device knows, rows that come and go, all that sampling knows."""
    prompts = [IDS[i : i + 4 + 5 * i] for i in range(len(PARAMS))]
    eager = LLM(str(model), device="cpu", enforce_eager=True, exact=True, max_model_len=320)
    wanted = eager.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False)
    driver = load(model, max_rows=4)
    limits = EngineLimits(4, 40, 320, 16, (64,) * len(driver.groups), async_scheduling=overlapped)
    engine = Engine(driver.runtime, driver.groups, limits)
    for i, (ids, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        engine.add(Request(str(i), ids, params, frozenset([257]), params.seed or 0))
    found = answers(engine, len(PARAMS))
    for i, output in enumerate(wanted):
        token_ids, logprobs, prompt_logprobs = found[i]
        assert token_ids == output.outputs[0].token_ids
        check_logprobs(logprobs, output.outputs[0].logprobs)
        check_logprobs(prompt_logprobs, output.prompt_logprobs)


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_the_last_layer_goes_on_with_wanted_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the first chunks of a prompt, one of the last, also beside rows that decode."""
    counts: list[int] = []
    wanted = LIBRARY.wanted

    def gated(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(x))
        return wanted.gated(x, *rest)

    monkeypatch.setattr(cuda, "LIBRARY", replace(LIBRARY, wanted=replace(wanted, gated=gated)))
    prompts = [{"prompt_token_ids": ids} for ids in (IDS[5:75], IDS[:20], IDS[9:49])]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    eager = LLM(str(model), device="cpu", enforce_eager=True, exact=True, max_model_len=320)
    expected = eager.generate(prompts, params, use_tqdm=False)
    driver = load(model, max_rows=4)
    limits = EngineLimits(4, 30, 320, 16, (64,) * len(driver.groups), async_scheduling=False)
    engine = Engine(driver.runtime, driver.groups, limits)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt["prompt_token_ids"], params, frozenset(), 0))
    found = answers(engine, 3)
    assert [found[i][0] for i in range(3)] == [one.outputs[0].token_ids for one in expected]
    assert counts == [0, 0, 2, 2, 3]


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_steps_of_which_nothing_is_uploaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device counts itself, but where a row begins a block; padded and in windows."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, seed=4, max_tokens=40, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": IDS[i : i + 20]} for i in range(3)]
    eager = LLM(str(model), device="cpu", enforce_eager=True, exact=True, max_model_len=320)
    wanted = eager.generate(prompts, params, use_tqdm=False)
    driver = load(model)
    lay_out, laid_out = CudaRuntime._lay_out, []

    def counted(runtime: CudaRuntime, batch: StepBatch, *sizes: int) -> None:
        laid_out.append(batch)
        lay_out(runtime, batch, *sizes)

    monkeypatch.setattr(CudaRuntime, "_lay_out", counted)
    limits = EngineLimits(4, 80, 320, 16, (64,) * len(driver.groups), async_scheduling=True)
    engine = Engine(driver.runtime, driver.groups, limits)
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(str(i), prompt["prompt_token_ids"], one, frozenset(), one.seed or 0))
    found = answers(engine, len(params))
    for (token_ids, logprobs, _), output in zip(found, wanted, strict=True):
        assert token_ids == output.outputs[0].token_ids
        check_logprobs(logprobs, output.outputs[0].logprobs)
    # The prompts, the first decode step and the first of the run; where all begin a block; where
    # a row has ended.
    assert len(laid_out) == 3 + 2 + 1
    assert engine.stats().num_steps == 40


def answers(engine: Engine, count: int) -> list[tuple[list, list | None, list | None]]:
    found: list[tuple[list, list, list]] = [([], [], []) for _ in range(count)]
    while engine.has_work:
        for update in engine.step():
            ids, logprobs, prompt_logprobs = found[int(update.request_id)]
            assert update.error is None
            ids += update.new_token_ids
            logprobs += update.logprobs or []
            prompt_logprobs += update.prompt_logprobs or []
    return [(ids, own or None, prompt or None) for ids, own, prompt in found]


def check_logprobs(ours: list | None, theirs: list | None) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or [], theirs or [], strict=True):
        assert (mine is None) == (other is None)
        for token, entry in (other or {}).items():
            assert mine[token].rank == entry.rank
            assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_damaged_weights_end_rows_alone(model: Path) -> None:
    driver: Driver = load(model, max_rows=4)
    driver.runtime._weights.final_norm.fill_(float("nan"))
    limits = EngineLimits(4, 40, 320, 16, (64,) * len(driver.groups))
    engine = Engine(driver.runtime, driver.groups, limits)
    engine.add(Request("0", IDS[:5], SamplingParams(logprobs=1), frozenset(), 0))
    [update] = engine.step()
    assert update.finish_reason == "abort"
    assert "not finite" in update.error


@pytest.mark.parametrize(("count", "has_head"), [(3, True), (17, False)])
def test_fused_decode(tmp_path: Path, count: int, has_head: bool) -> None:
    """In bfloat16, beside the same steps without fused kernels: few rows, and more."""
    model = family(tmp_path, "qwen3", num_hidden_layers=2, intermediate_size=128)
    reference = reference_logits(model, IDS[:40])
    found = {}
    for fused in (False, True):
        driver = load(model, dtype="bfloat16", fused=fused, max_rows=20)
        way = driver.runtime._fused_of(count)
        assert (way is not None) == fused
        assert way is None or way.has_head == has_head
        rows = [driver.sequence() for _ in range(count)]
        driver.step([(row, IDS[: 1 + i % 4]) for i, row in enumerate(rows)], "last")
        found[fused] = driver.step([(row, [IDS[row.length]]) for row in rows])
        for row, logits in zip(rows, found[fused], strict=True):
            assert relative_error(logits, reference[row.length - 1 : row.length]) < 0.05
    assert any((a != b).any() for a, b in zip(found[False], found[True], strict=True))


@pytest.mark.parametrize(
    ("changes", "fast", "deterministic"),
    [
        ({}, [16, 32], [200]),
        ({"hidden_size": 2048}, [16, 32], [200]),
        ({"hidden_size": 2560}, [16], [200]),
        ({"hidden_size": 4096}, [8], []),
        ({"intermediate_size": 136}, [16, 32], [200]),
        ({"post_norms": True}, [], []),
    ],
)
def test_how_many_rows_are_fused(
    tmp_path: Path, changes: dict[str, Any], fast: list[int], deterministic: list[int]
) -> None:
    folder = open_checkpoint(family(tmp_path, "qwen3", intermediate_size=128))
    spec = replace(spec_from_config(folder.config), **changes)
    for is_fixed, rows in ((False, fast), (True, deterministic)):
        config = EngineConfig(attention_backend="triton", deterministic=is_fixed)
        [selection] = choose_attention(
            config, spec, kv_groups(spec), "cuda", "bfloat16", "bfloat16"
        )
        ways = fused_ways(
            spec, torch.bfloat16, [selection.decode_spec], 200, deterministic=is_fixed
        )
        assert [way.max_rows for way in ways] == rows
        if len(rows) == 2:  # few rows are cut alike, more in shares
            assert [way.attention_specs[0].split_mode for way in ways] == ["auto", "fixed"]


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_steps_that_are_run_at_load(model: Path) -> None:
    """The largest ones, and one of each kind: they leave the runtime as it was."""
    driver = load(model, max_rows=4, max_tokens=12, max_model_len=64)
    folder = open_checkpoint(model)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=64)
    described = Model(driver.runtime.spec, folder, driver.groups, config, "cuda")
    run_largest_steps(driver.runtime, described, 2)
    warm_up(driver.runtime, described, 2)
    for layer in driver.runtime.layers:
        layer.k_cache.fill_(float("nan"))
        layer.v_cache.fill_(float("nan"))
    close(driver.run(IDS[:12], decode_from=10), reference_logits(model, IDS[:12]))


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_that_are_launched_in_vain(
    model: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when kernels are only noted: torch's own operations run on what nobody has uploaded."""
    monkeypatch.setattr(cuda, "unpack", lambda *_, **how: None)
    driver = load(model, max_rows=4, max_tokens=12, max_model_len=64, deterministic=deterministic)
    folder = open_checkpoint(model)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=64)
    warm_up(driver.runtime, Model(driver.runtime.spec, folder, driver.groups, config, "cuda"), 2)


def test_first_layers_stand_for_all(model: Path) -> None:
    """One of each kind and another, in groups as the whole model's: windows in the same order."""
    folder = open_checkpoint(model)
    spec = check_weights(spec_from_config(folder.config), folder)
    repeated = replace(spec, layers=spec.layers * 5)
    whole = Model(repeated, folder, kv_groups(repeated), EngineConfig(), "cuda")
    short = shortened(whole)
    assert set(short.spec.layers) == set(spec.layers)
    assert len(set(spec.layers)) < len(short.spec.layers) < len(repeated.layers)
    assert [group.window for group in short.groups] == [group.window for group in whole.groups]
    one = replace(spec, layers=spec.layers[:1])
    assert shortened(replace(whole, spec=one, groups=kv_groups(one))).spec == one
