"""Several decode steps in one call: the op between them, and the ids that single steps give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import family

from octavo import LLM, SamplingParams
from octavo.kernels.next_tokens.cpu import next_tokens
from octavo.kernels.next_tokens.reference import next_tokens as reference
from octavo.kernels.program import Program
from octavo.kernels.team import Team
from octavo.runtime import cpu

LENGTHS = (1, 2, 3, 9, 17, 40)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_next_tokens(num_rows: int, num_threads: int, steps: int) -> None:
    rng = np.random.default_rng(num_rows)
    best = rng.integers(-1, 100, num_rows).astype(np.int32)
    shapes = [(num_rows,), (3, 4), (num_rows, 5)]
    values = [rng.integers(0, 9, (steps - 1, *shape)).astype(np.int32) for shape in shapes]
    ids, expected_ids = (np.full(num_rows + 1, 7, np.int32) for _ in range(2))
    chosen, expected = (np.zeros((steps, num_rows), np.int32) for _ in range(2))
    targets, expected_targets = ([np.zeros(s, np.int32) for s in shapes] for _ in range(2))
    copies = np.array(
        [(to.ctypes.data, v.ctypes.data, to.nbytes) for to, v in zip(targets, values, strict=True)],
        np.int64,
    )
    state = np.array([0, steps], np.int64)
    call = next_tokens.bind(
        num_rows=np.array([num_rows], np.int64),
        best=best,
        ids=ids,
        chosen=chosen,
        state=state,
        copies=copies,
        num_copies=len(copies),
    )
    team = Team(num_threads)
    for step in range(steps):
        best[:] = rng.integers(-1, 100, num_rows)
        team.run(Program([call]))
        follows = [
            (to, v[step]) for to, v in zip(expected_targets, values, strict=True) if step < len(v)
        ]
        reference(best, expected_ids, expected[step], follows)
        np.testing.assert_array_equal(ids, expected_ids)
        for found, right in zip(targets, expected_targets, strict=True):
            np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(chosen, expected)
    assert state[0] == steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(tmp_path_factory.mktemp("llama"), "llama")


def answers(
    model: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, stops: list[int], **options: Any
) -> tuple[list[Any], int]:
    """What becomes of prompts of all lengths, and how often several steps were one call."""
    monkeypatch.setattr(cpu, "AHEAD_SECONDS", 1e9 if ahead else 0.0)
    calls = 0
    inner = cpu.CpuRuntime.decode_ahead

    def counted(self: cpu.CpuRuntime, batches: Any) -> Any:
        nonlocal calls
        calls += 1
        return inner(self, batches)

    monkeypatch.setattr(cpu.CpuRuntime, "decode_ahead", counted)
    llm = LLM(
        str(model), skip_tokenizer_init=True, quantization="int8", max_model_len=192, **options
    )
    assert llm.report.runtime == "cpu"
    rng = np.random.default_rng(3)
    prompts = [{"prompt_token_ids": rng.integers(3, 300, 3 * n).tolist()} for n in LENGTHS * 2]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, stop_token_ids=stops)
        for n in [*LENGTHS, *reversed(LENGTHS)]
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [
        (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason)
        for o in outputs
    ]
    return found, calls


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_ids_of_single_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, kv_dtype: str
) -> None:
    options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "kv_cache_dtype": kv_dtype}
    single, none = answers(model, monkeypatch, False, [], **options)
    several, some = answers(model, monkeypatch, True, [], **options)
    assert none == 0
    assert some > 3
    assert several == single
    # Ends in the midst of a call, at ids that some of the answers contain.
    stops = [single[5][0][21], single[7][0][8]]
    single, _ = answers(model, monkeypatch, False, stops, **options)
    several, _ = answers(model, monkeypatch, True, stops, **options)
    assert any(reason == "stop" for _, reason, _ in single)
    assert several == single


def test_few_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks run out in the midst of a call's planning, the steps planned are run."""
    options: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 13}
    single, _ = answers(model, monkeypatch, False, [], **options)
    several, some = answers(model, monkeypatch, True, [], **options)
    assert some > 0
    assert several == single


def test_not_in_a_window(tmp_path: Path) -> None:
    llm = LLM(str(family(tmp_path, "gemma3")), skip_tokenizer_init=True, quantization="int8")
    runtime = llm._engine._runtime
    assert isinstance(runtime, cpu.CpuRuntime)
    runtime._step_seconds = 1e-6
    assert runtime.steps_ahead(17) == 1
