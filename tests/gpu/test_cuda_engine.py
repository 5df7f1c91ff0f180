"""The ``cuda`` runtime on a real GPU, by itself and through the public API.

The truth is transformers in float32 on the CPU; for bfloat16 the yardstick is transformers' own
error in bfloat16 on the same GPU. Run this folder by itself.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.checkpoints import FAMILIES, family, reference_logits
from helpers.driver import Driver, Float32, relative_error

from octavo import LLM, SamplingParams
from octavo.cache.groups import kv_groups
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.engine.sampling import SamplingRow, make_sampling_batch, sample
from octavo.models.families import spec_from_config
from octavo.models.weights import check_weights
from octavo.runtime.candidates import Model, choose_runtime
from octavo.runtime.device_sampling import DeviceSampler
from octavo.runtime.graphs import Graphs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs a CUDA GPU and compiled kernels",
)
IDS = np.random.default_rng(1).integers(0, 320, 300).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(tmp_path_factory.mktemp(request.param), request.param)


def load(folder: Path, **options) -> Driver:
    """The chosen runtime, every slot of its KV pools NaN."""
    checkpoint = open_checkpoint(folder)
    spec = check_weights(spec_from_config(checkpoint.config), checkpoint)
    groups = kv_groups(spec)
    sizes = {"max_model_len": 512, "max_num_seqs": 20, "num_gpu_blocks_override": 128}
    config = EngineConfig(**sizes | options)
    described = Model(spec, checkpoint, groups, config, "cuda")
    choice = choose_runtime(described)
    blocks = (config.num_gpu_blocks_override,) * len(groups)
    runtime, _ = choice.runtime.load(described, choice.selections, blocks, lambda part: None)
    for layer in runtime.layers:
        layer.k_cache.fill_(float("nan"))
        layer.v_cache.fill_(float("nan"))
    driver = Driver(runtime, groups, config.block_size, blocks[0])
    assert choice.runtime.name == ("eager" if config.enforce_eager else "cuda")
    return driver


def logits_of(driver: Driver, ids: list[int]) -> Float32:
    """Prefill in chunks, then single tokens, from a graph."""
    return driver.run(ids, chunk=100, decode_from=len(ids) - 8)


def test_float32_logits(model: Path) -> None:
    reference = reference_logits(model, IDS)
    assert relative_error(logits_of(load(model, exact=True), IDS), reference) < 1e-4
    assert relative_error(load(model, exact=True).run(IDS, chunk=33), reference) < 1e-4


def test_eager_float32_logits(model: Path) -> None:
    driver = load(model, exact=True, enforce_eager=True)
    assert relative_error(eager_logits(driver, IDS), reference_logits(model, IDS)) < 1e-4


def eager_logits(driver: Driver, ids: list[int]) -> Float32:
    """As :func:`logits_of`; the eager runtime leaves its logits on the device."""
    parts, sequence = [], driver.sequence()
    cuts = [0, 100, 200, *range(len(ids) - 8, len(ids) + 1)]
    for a, b in pairwise(cuts):
        batch, _ = driver.batch([(sequence, ids[a:b])], "all")
        driver.runtime.forward(batch)
        parts.append(driver.runtime.logits.float().cpu().numpy())
    return np.concatenate(parts)


def test_bfloat16_is_no_worse_than_transformers(model: Path) -> None:
    """Root mean square of the logits' errors."""
    from transformers import AutoModelForCausalLM

    reference = reference_logits(model, IDS)
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="eager"
    ).cuda()
    with torch.inference_mode():
        logits = theirs(torch.tensor([IDS]).cuda(), use_cache=False).logits[0].float().cpu().numpy()

    def error(logits: Float32) -> float:
        return float(np.sqrt(np.mean((logits - reference) ** 2)))

    ours = error(logits_of(load(model, dtype="bfloat16"), IDS))
    print(f"bf16 error, ours / transformers': {ours / error(logits):.3f}")
    assert ours < 1.1 * error(logits)


def test_mixed_batches(model: Path) -> None:
    """Rows of all kinds in one step; then decode steps of every size up to 20 rows."""
    driver = load(model, exact=True)
    prompts = [IDS[i : i + 60] for i in range(20)]
    rows = [driver.sequence() for _ in prompts]
    truth = cache(lambda i: reference_logits(model, prompts[i]))
    driver.step([(rows[0], prompts[0][:1]), (rows[1], prompts[1][:40])])
    cuts = [1, 40, *([17] * 18)]
    found = driver.step(
        [
            (row, ids[cut : cut + 1] if i < 2 else ids[:cut])
            for i, (row, ids, cut) in enumerate(zip(rows, prompts, cuts, strict=True))
        ]
    )
    assert all(np.isfinite(part).all() for part in found)
    for count in [20, 20, 20, 17, 17, 17, 3, 3, 3, 2, 1, 2, 1]:
        chunks = [(rows[i], [prompts[i][rows[i].length]]) for i in range(count)]
        for i, logits in enumerate(driver.step(chunks)):
            at = rows[i].length - 1
            assert relative_error(logits, truth(i)[at : at + 1]) < 1e-4


def test_graphs_captured_ahead(model: Path) -> None:
    """Before any step: then no step captures one, and all say what those captured in time say."""
    driver = load(model, exact=True)
    runtime = driver.runtime
    while runtime.capture_ahead():
        pass
    ahead = set(runtime._graphs._graphs)
    assert len(ahead) >= 2 * len(runtime._buckets)
    assert relative_error(logits_of(driver, IDS), reference_logits(model, IDS)) < 1e-4
    prompts = [IDS[i : i + 60] for i in range(20)]
    rows = [driver.sequence() for _ in prompts]
    driver.step([(row, ids[:40]) for row, ids in zip(rows, prompts, strict=True)])
    for count in (20, 9, 1):
        chunks = [(rows[i], [prompts[i][rows[i].length]]) for i in range(count)]
        for i, logits in enumerate(driver.step(chunks)):
            at = rows[i].length - 1
            truth = reference_logits(model, prompts[i])[at : at + 1]
            assert relative_error(logits, truth) < 1e-4
    assert set(runtime._graphs._graphs) == ahead


def test_graphs_of_prompts(model: Path) -> None:
    """What is captured, and what comes from the graph, is what comes kernel by kernel."""
    driver = load(model, dtype="bfloat16")
    if not driver.runtime._prompt_sizes:
        pytest.skip("there is no attention for short rows apart")
    for start, count in enumerate((5, 16, 40, 17, 40, 5, 100, 41)):
        ids = IDS[start : start + count]
        (alone,) = driver.step([(driver.sequence(), ids)], "last")
        (with_all,) = driver.step([(driver.sequence(), ids)], "all")
        assert relative_error(alone, with_all[-1:]) < 0.02
    captured = {key for key in driver.runtime._graphs._graphs if key[0] == "prompt"}
    assert captured >= {("prompt", size) for size in (16, 32, 48, 128)}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of Qwen3-0.6B's shape."""
    folder = tmp_path_factory.mktemp("wide")
    return family(
        folder,
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )


def test_fused_steps_of_many_rows_are_no_worse_than_the_librarys(wide: Path) -> None:
    """Of 17 to 32 rows, as long as one share of their histories or two: kernel by kernel, captured,
    and from the graph."""
    reference = reference_logits(wide, IDS)
    errors: dict[bool, list[float]] = {}
    for fused in (True, False):
        driver = load(wide, dtype="bfloat16", max_num_seqs=64, num_gpu_blocks_override=1024)
        if not fused:
            driver.runtime._fused = []
        rows = [driver.sequence() for _ in range(32)]
        prompts = [IDS[: 1 + 37 * i % 280] for i in range(32)]
        for first in range(0, 32, 8):
            part = slice(first, first + 8)
            driver.step(list(zip(rows[part], prompts[part], strict=True)), "last")
        errors[fused] = []
        for count in [17, 17, 17, 25, 32, 32, 32]:
            way = driver.runtime._fused_of(count)
            assert (way is not None) == fused
            assert way is None or (way.max_rows == 32 and not way.has_head)
            found = driver.step([(row, [IDS[row.length]]) for row in rows[:count]])
            wanted = [reference[row.length - 1 : row.length] for row in rows[:count]]
            worst = max(relative_error(*pair) for pair in zip(found, wanted, strict=True))
            assert worst < 0.1
            errors[fused].append(float(np.sqrt(np.mean((np.array(found) - np.array(wanted)) ** 2))))
    print("bf16 errors, fused and not:", errors)
    assert max(errors[True]) < 1.1 * max(errors[False])


# ---- sampling


def unused(indices: np.ndarray) -> torch.Tensor:
    raise AssertionError("no prompt is scored")


@pytest.mark.parametrize("vocab_size", [320, 151936])
def test_the_device_chooses_the_same_ids(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_p": 0.9},
        {"min_p": 0.05, "temperature": 1.5},
        {"top_k": 1000, "temperature": 2.0},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logit_bias": {5: 4.0, 9: -100.0}, "temperature": 0.9},
        {"min_tokens": 5, "temperature": 0.8},
    ]
    wrong = total = 0
    for dtype in (torch.bfloat16, torch.float32):
        buffer = torch.empty(64, vocab_size, dtype=dtype, device="cuda")
        sampler = DeviceSampler(buffer, [16, 64], Graphs(False))
        logits = torch.from_numpy(rng.standard_normal((60, vocab_size)).astype(np.float32) * 2.5)
        logits = logits.to(dtype)
        rows = [
            SamplingRow(
                SamplingParams(logprobs=5 if i % 7 == 0 else None, **settings[i % len(settings)]),
                rng.integers(0, vocab_size, 30).tolist(),
                rng.integers(0, vocab_size, 20).tolist(),
                int(rng.integers(0, 2**63)),
                i % 3,
                i,
                (7, 8) if "min_tokens" in settings[i % len(settings)] else (),
            )
            for i in range(60)
        ]
        for few in (rows, [row for row in rows if row.params.temperature in (0.0, 0.6)]):
            numbers = [rows.index(row) for row in few]
            batch = make_sampling_batch(few, sample_indices=range(len(few)), vocab_size=vocab_size)
            expected = sample(logits[numbers].float().numpy(), batch)
            step_rows = np.arange(len(few), dtype=np.int32)
            buffer[: len(few)] = logits[numbers].cuda()
            handle = sampler.launch(batch, step_rows, unused)
            found = sampler.wait(handle)
            wrong += int((found.token_ids != expected.token_ids).sum())
            total += len(few)
            for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    assert list(ours)[1:] == list(theirs)[1:] or ours.keys() == theirs.keys()
                    for token in set(ours) & set(theirs):
                        assert ours[token].rank == theirs[token].rank
                        assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    # Noise is rounded differently in its last bit: two candidates may be that near.
    print(f"{wrong} of {total} ids differ")
    assert wrong <= total // 100


# ---- the public API


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=9, logprobs=3),
    SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, max_tokens=25, min_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2),
]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlapped"])
def test_the_same_answers_as_on_the_cpu(model: Path, async_scheduling: bool) -> None:
    """In float32, greedy and seeded, with everything that sampling knows."""
    rng = np.random.default_rng(2)
    prompts = [
        {"prompt_token_ids": rng.integers(0, 256, int(length)).tolist()}
        for length in rng.integers(1, 90, 18)
    ]
    params = PARAMS * 3
    options = {"exact": True, "max_model_len": 256, "max_num_batched_tokens": 128}
    cpu = LLM(str(model), device="cpu", enforce_eager=True, **options)
    gpu = LLM(
        str(model),
        device="cuda",
        max_num_seqs=12,
        num_gpu_blocks_override=60,
        async_scheduling=async_scheduling,
        **options,
    )
    assert gpu.report.runtime == "cuda"
    wanted = cpu.generate(prompts, params, use_tqdm=False)
    for _ in range(2):  # then with cached prefixes, and graphs
        found = gpu.generate(prompts, params, use_tqdm=False)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.error is None
            assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason
    assert gpu.stats().kv_cache_usage == 0.0


def test_greedy_in_bfloat16_goes_on_as_transformers_does(model: Path) -> None:
    """Teacher-forced: where the two best logits are apart, the first id is the same."""
    llm = LLM(str(model), device="cuda", max_model_len=512, num_gpu_blocks_override=200)
    reference = reference_logits(model, IDS)
    best = np.sort(reference, axis=1)
    gap = best[:, -1] - best[:, -2]
    positions = np.flatnonzero(gap > 0.05 * np.abs(reference).max(axis=1))[-40:]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": IDS[: at + 1]} for at in positions]
    for at, output in zip(positions, llm.generate(prompts, one, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == [int(reference[at].argmax())]
