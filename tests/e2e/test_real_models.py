"""Real models end to end, against transformers in float32 on the same weights, dequantised.

A float32 answer must be the reference's, id by id. A path that rounds may choose another id where
the reference's two best logits are closer than the path's tolerance, and nowhere else; the
tolerances are stated in docs/precision.md, and ``pytest -rP`` prints what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.checkpoints import family, gemma3_path, reference_logits, smollm2_path
from helpers.llm import greedy, ids
from helpers.reference import (
    TOLERANCE,
    Choices,
    Judgement,
    check_greedy,
    check_logprobs,
    choices,
    gguf_model,
)
from helpers.tokenizers import qwen3_tokenizer_folder, smollm2
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from octavo import LLM, RequestOutput
from octavo.checkpoint import open_checkpoint

DATA = Path(__file__).parents[1] / "data"
PATHS = {"smollm2": smollm2_path, "gemma3": gemma3_path}
SIZES = {"max_num_seqs": 10, "max_model_len": 512, "max_num_batched_tokens": 256}
PROMPTS = (
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 2, 4, 8, 16, 32, 64,",
    "Le chat est assis sur",
    "東京は日本の首都であり、",
    "Привет, как дела? Меня зовут",
    "SELECT name, COUNT(*) FROM",
    "3.14159 * 2.71828 = ",
    "- first\n- second\n",
    (DATA / "gettysburg.txt").read_text(encoding="utf-8").rstrip(),
)

CPU_TOLERANCE = 0.11

# How far a path may move the distance of the two best logits, and so the gap above which it must
# choose as the reference does; in units of the largest logit. 1.5 times the most that was measured
# on these prompts, rounded up; docs/precision.md has the measurements and how they held elsewhere.
EAGER = {"enforce_eager": True}
LOSSY = {
    "bfloat16": ({"dtype": "bfloat16", **EAGER}, 0.035),
    "KV bfloat16": ({"kv_cache_dtype": "bfloat16", **EAGER}, 0.011),
    "float16": ({"dtype": "float16", **EAGER}, 0.005),
    "KV float16": ({"kv_cache_dtype": "float16", **EAGER}, 0.0013),
    "cpu, KV bfloat16": ({}, CPU_TOLERANCE),
    "cpu, KV int8": ({"kv_cache_dtype": "int8"}, CPU_TOLERANCE),
}


@dataclass(frozen=True)
class Answered:
    """A model's exact answers to all prompts, and the reference's choices along each of them."""

    outputs: list[RequestOutput]
    found: list[Choices]


@cache
def answered(name: str) -> Answered:
    path = PATHS[name]()
    llm = LLM(str(path), exact=True, **SIZES)
    params = greedy(max_tokens=64, ignore_eos=True, logprobs=20)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    del llm  # not beside the reference: together they'd take 2 GB
    model = gguf_model(open_checkpoint(path))
    return Answered(outputs, [choices(model, sequence(output)) for output in outputs])


def sequence(output: RequestOutput) -> list[int]:
    return output.prompt_token_ids + output.outputs[0].token_ids


@pytest.mark.parametrize("name", PATHS)
def test_exact_answers_are_the_reference_s(name: str) -> None:
    exact, judgement, closest = answered(name), Judgement(), []
    assert len(exact.outputs[-1].prompt_token_ids) > 280
    for output, found in zip(exact.outputs, exact.found, strict=True):
        assert len(output.outputs[0].token_ids) == 64
        check_greedy(output, found)
        after = found[len(output.prompt_token_ids) - 1 :]
        judgement.add(output.outputs[0].logprobs, after)
        closest.append(float(after.gap.min()))
    print(f"{judgement}; the closest choice led by {min(closest):.5f}")
    assert judgement.moved <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *(("smollm2", path) for path in LOSSY),
        *(("gemma3", path) for path in LOSSY if "float16" not in path.replace("bfloat16", "")),
    ],
)
def test_lossy_path(name: str, path: str) -> None:
    """Prompts and exact answers are scored; then the path answers for itself, and is judged up to
    the first id that differs: the sequences are the reference's so far."""
    exact, (options, tolerance) = answered(name), LOSSY[path]
    llm = LLM(str(PATHS[name]()), **options, **SIZES)
    *rounds_only_kv, dtype = path.split()
    if path.startswith("cpu"):
        assert llm.report.precision.endswith(f" weights, 8-bit activations, {dtype} KV")
    else:
        assert f"KV rounded to {dtype}" in llm.report.precision
        assert ("activations rounded" in llm.report.precision) != bool(rounds_only_kv)
    judgement = Judgement()

    known = [ids(*sequence(output)) for output in exact.outputs]
    scored = llm.generate(known, greedy(max_tokens=0, prompt_logprobs=20), use_tqdm=False)
    for output, found in zip(scored, exact.found, strict=True):
        judgement.add(output.prompt_logprobs[1:], found)

    params = greedy(max_tokens=12, ignore_eos=True, logprobs=20)
    for own, output, found in zip(
        llm.generate(PROMPTS, params, use_tqdm=False), exact.outputs, exact.found, strict=True
    ):
        [answer] = own.outputs
        pairs = zip(answer.token_ids, output.outputs[0].token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids) - 1)
        judgement.add(answer.logprobs[: same + 1], found[len(own.prompt_token_ids) - 1 :])

    print(judgement)
    assert max(judgement.flips, default=0.0) <= tolerance
    assert judgement.moved <= tolerance


def test_gemma3_overflows_float16_and_says_so() -> None:
    llm = LLM(str(gemma3_path()), dtype="float16", **SIZES)
    [output] = llm.generate("Hello", greedy(max_tokens=1), use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"
    assert "exceed the chosen dtype" in output.error


# ---- SmolLM2 as a folder


@pytest.fixture
def smollm2_folder(tmp_path: Path) -> Iterator[Path]:
    """The GGUF's weights, widened, and its tokenizer as a Hugging Face checkpoint."""
    checkpoint = open_checkpoint(smollm2_path())
    weights = tmp_path / "model.safetensors"
    save_file({n: tensor.to_float32() for n, tensor in checkpoint.tensors.items()}, weights)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    smollm2().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    yield tmp_path
    weights.unlink()  # 540 MB that pytest would keep


def test_smollm2_as_a_folder(smollm2_folder: Path) -> None:
    expected = answered("smollm2").outputs
    llm = LLM(str(smollm2_folder), exact=True, **SIZES)
    outputs = llm.generate(PROMPTS, greedy(max_tokens=16, ignore_eos=True), use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == other.prompt_token_ids
        assert output.outputs[0].token_ids == other.outputs[0].token_ids[:16]


# ---- Qwen3's shape with its real tokenizer


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    family(
        folder,
        "qwen3",
        vocab_size=151_936,
        bos_token_id=151_643,
        eos_token_id=151_645,
        pad_token_id=151_643,
    )
    return qwen3_tokenizer_folder(folder)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_qwen3_chat(qwen3_folder: Path, enable_thinking: bool) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of 日本?"},
    ]
    options = {"enable_thinking": enable_thinking}
    llm = LLM(str(qwen3_folder), max_model_len=256, exact=True)
    params = greedy(max_tokens=24, logprobs=20, prompt_logprobs=20)
    [whole] = llm.chat(messages, params, chat_template_kwargs=options, use_tqdm=False)

    theirs = AutoTokenizer.from_pretrained(qwen3_folder)
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **options
    )
    assert whole.prompt == expected
    assert whole.prompt.endswith("<think>\n\n</think>\n\n") != enable_thinking
    assert whole.prompt_token_ids == theirs.encode(expected)
    check_logprobs(whole, reference_logits(qwen3_folder, sequence(whole)))
    [answer] = whole.outputs
    assert answer.text == theirs.decode(answer.token_ids, skip_special_tokens=True)

    texts = [""]
    for streamed in llm.stream_chat(messages, params, chat_template_kwargs=options):
        texts.append(streamed.outputs[0].text)
    assert all(later.startswith(sooner) for sooner, later in pairwise(texts))
    assert len(set(texts)) > 10
    assert streamed.outputs == whole.outputs
