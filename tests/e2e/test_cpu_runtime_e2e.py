"""The cpu runtime by the public API: real models, what they cost in perplexity, and no torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import family, gemma3_path, save_byte_tokenizer, smollm2_path
from helpers.llm import answer, greedy, ids

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
TOKENS = 1024  # bench/perplexity.py does 8,192

NO_TORCH = """
import sys
from octavo.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "llguidance", "jinja2", "asyncio", "zmq"}
loaded = sorted(heavy & sys.modules.keys())
print("loaded:", loaded, code)
"""


def loaded_by(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert "loaded:" in done.stdout, done.stderr
    return done.stdout


def test_run_needs_no_torch() -> None:
    out = loaded_by("run", "-p", "The capital of France is", "--max-tokens", "3")
    assert "Paris" in out
    assert "loaded: [] 0" in out


def test_sampling_needs_no_torch() -> None:
    out = loaded_by(
        "run", "-p", "Once", "--max-tokens", "3", "--temperature", "1", "--top-p", "0.9"
    )
    assert "loaded: [] 0" in out


@pytest.mark.parametrize("options", [(), ("--quantization", "int8"), ("--exact",)], ids=str)
def test_safetensors_need_no_torch(tmp_path: Path, options: tuple[str, ...]) -> None:
    model = family(tmp_path, "qwen3")
    save_byte_tokenizer(model)
    out = loaded_by("run", str(model), "-p", "Hello", "--max-tokens", "3", *options)
    assert "loaded: [] 0" in out


@pytest.mark.parametrize("level", ["vnni", "avxvnni", "avx2", "plain"])
def test_levels(level: str) -> None:
    from octavo.kernels.levels import usable_levels

    if level not in usable_levels():
        pytest.skip(f"this CPU has no {level}")
    out = loaded_by("run", "-p", "The capital of France is", "--max-tokens", "3", OCTAVO_CPU=level)
    assert "Paris" in out


def test_the_report_says_what_is_computed() -> None:
    llm = LLM(max_model_len=64)
    assert llm.report.runtime == "cpu"
    assert llm.report.precision == "Q4_1 weights, 8-bit activations, bfloat16 KV"
    assert llm.report.attention_backend == "cpu"
    assert llm.report.notes == ()


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    model = str(family(tmp_path, "llama"))
    llm = LLM(model, max_model_len=64, dtype="bfloat16")
    assert llm.report.runtime == "eager"
    assert "runtime eager: cpu computes in float32, not in bfloat16" in llm.report.notes[0]
    with pytest.raises(ConfigError, match=r"doesn't quantise Q4_1 weights again"):
        LLM(quantization="int8")


def test_threads() -> None:
    answers = {
        threads: answer(LLM(threads=threads, max_model_len=64), "Once", greedy(max_tokens=8))
        for threads in (1, 2)
    }
    assert answers[1].outputs == answers[2].outputs


def perplexity(llm: LLM) -> float:
    known = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    [output] = llm.generate(ids(*known), params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    scored = zip(known[1:], output.prompt_logprobs[1:], strict=True)
    return math.exp(-sum(entry[token].logprob for token, entry in scored) / (len(known) - 1))


PATHS = {"smollm2": smollm2_path, "gemma3": gemma3_path}
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "exact": ({"exact": True}, 1e-5),
    "bfloat16 KV": ({}, 0.005),
    "int8 KV": ({"kv_cache_dtype": "int8"}, 0.005),
}


@cache
def expected_perplexity(name: str) -> float:
    return perplexity(load(name, exact=True, enforce_eager=True))


def load(name: str, **options: Any) -> LLM:
    return LLM(str(PATHS[name]()), max_model_len=TOKENS + 1, **options)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", PATHS)
def test_perplexity(name: str, setting: str) -> None:
    options, tolerance = SETTINGS[setting]
    change = perplexity(load(name, **options)) / expected_perplexity(name) - 1
    print(f"{name}, {setting}: {change:+.3%}")
    assert abs(change) < tolerance
