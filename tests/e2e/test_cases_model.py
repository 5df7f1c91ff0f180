"""Reported faults O25 to O33 and O40: configs, checkpoints and GGUF files, loaded and answering.

The cases, with what other engines did wrong, are in shared/cases/engine.md. Whatever loads is held
against transformers, through prompt log probabilities and decoded tokens.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import (
    BOS,
    BYTE_VOCAB,
    Float32,
    family,
    load_reference,
    model_logits,
    save_byte_tokenizer,
    smollm2_path,
    tiny,
    write_safetensors,
)
from helpers.gguf_convert import folder_from_gguf, gguf_from_folder
from helpers.gguf_writer import write_tiny_llama_gguf
from helpers.llm import answer, greedy, ids, load_llm
from safetensors.numpy import load_file

from octavo import LLM
from octavo.errors import CheckpointError, OctavoError, UnsupportedModelError

PROMPT = np.random.default_rng(3).integers(0, 256, 64).tolist()
TOLERANCE = 1e-4


def logprobs(
    llm: LLM, prompt: Sequence[int] = PROMPT, num_tokens: int = 4
) -> list[dict[int, float]]:
    """What follows each position of a prompt and of its greedy continuation: the likeliest 20."""
    params = greedy(max_tokens=num_tokens, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    output = answer(llm, ids(*prompt), params)
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return [{token: one.logprob for token, one in (entry or {}).items()} for entry in entries]


def check_against_transformers(llm: LLM, folder: Path, num_tokens: int = 4) -> None:
    found = logprobs(llm, num_tokens=num_tokens)
    known = [*PROMPT, *(next(iter(entry)) for entry in found[len(PROMPT) - 1 :])]
    # In float64, so that what differs is our rounding and not that of two.
    logits = model_logits(deepcopy(load_reference(folder)).double(), known).astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    assert len(found) == len(known) - 1
    for position, entry in enumerate(found):
        assert entry == pytest.approx(
            {token: expected[position, token] for token in entry}, abs=TOLERANCE
        )
    decoded = known[len(PROMPT) :]
    assert decoded == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def same(found: list[dict[int, float]], other: list[dict[int, float]], tolerance: float) -> bool:
    return all(
        abs(value - two[token]) < tolerance
        for one, two in zip(found, other, strict=True)
        for token, value in one.items()
        if token in two
    )


def rewrite_config(folder: Path, *drop: str, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **values}.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- O25: rope settings, wherever they stand

MILLION = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = {"factor": 4.0}
NO_THETA = ("rope_theta",)
SPELLINGS: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "theta a million": [
        ((), {"rope_theta": 1e6}),
        (NO_THETA, {"rope_parameters": MILLION}),
        ((), {"rope_theta": 1e6, "rope_parameters": MILLION}),
        ((), {"rope_theta": 1e6, "rope_scaling": None}),
        (NO_THETA, {"rope_parameters": {"full_attention": MILLION, "sliding_attention": MILLION}}),
    ],
    "linear": [
        ((), {"rope_scaling": {"type": "linear", **LINEAR}}),
        ((), {"rope_scaling": {"rope_type": "linear", **LINEAR}}),
        (NO_THETA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, **LINEAR}}),
    ],
    "half rotated": [
        ((), {"partial_rotary_factor": 0.5}),
        (
            NO_THETA,
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
    ],
}


@pytest.fixture(scope="module")
def plain_logprobs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, float]]:
    return logprobs(load_llm(tiny(tmp_path_factory.mktemp("plain"))))


@pytest.mark.parametrize("meaning", SPELLINGS)
def test_o25_equal_meanings_give_equal_logits(
    tmp_path: Path, plain_logprobs: list[dict[int, float]], meaning: str
) -> None:
    found = []
    for number, (drop, values) in enumerate(SPELLINGS[meaning]):
        folder = rewrite_config(tiny(tmp_path / str(number)), *drop, **values)
        found.append(logprobs(load_llm(folder)))
    assert all(same(found[0], one, 1e-5) for one in found)
    assert not same(found[0], plain_logprobs, 1e-2)


def test_o25_theta_against_transformers(tmp_path: Path) -> None:
    folder = rewrite_config(tiny(tmp_path), *NO_THETA, rope_parameters=MILLION)
    check_against_transformers(load_llm(folder), folder)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_o25_an_unknown_kind_is_named(tmp_path: Path, place: str) -> None:
    tiny(tmp_path, **{place: {"rope_type": "foo", "factor": 2.0, "rope_theta": 1e4}})
    with pytest.raises(UnsupportedModelError, match="foo"):
        LLM(str(tmp_path))


# ---- O26: YaRN

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_factor": 1.0},
        {"factor": 16.0},
        {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"original_max_position_embeddings": 16},  # positions past the trained length
    ],
    ids=str,
)
def test_o26_yarn(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tiny(tmp_path, max_position_embeddings=32768, rope_scaling={**YARN, **change})
    llm = load_llm(folder)
    assert llm.report.max_model_len == 32768  # the factor is in it already
    check_against_transformers(llm, folder)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_o26_other_kinds_are_refused(tmp_path: Path, kind: str) -> None:
    tiny(tmp_path, rope_scaling={"rope_type": kind, "factor": 4.0})
    with pytest.raises(UnsupportedModelError, match=kind):
        LLM(str(tmp_path))


# ---- O27: an output head and shards that are not there

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def change_tensors(folder: Path, change: Any) -> Path:
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    write_safetensors(file, tensors)
    return folder


def tied(folder: Path, head: str) -> Path:
    tiny(folder, tie_word_embeddings=True)

    def add(tensors: dict[str, Float32]) -> None:
        if head != "absent":
            tensors[HEAD] = tensors[EMBED] * (1 if head == "equal" else 3)

    return change_tensors(folder, add)


@pytest.mark.parametrize("head", ["absent", "equal"])
def test_o27_tied(tmp_path: Path, head: str) -> None:
    folder = tied(tmp_path, head)
    check_against_transformers(load_llm(folder), folder)


def test_o27_tied_with_another_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The head that is there is used, as in transformers, and a warning says so."""
    llm = load_llm(tied(tmp_path / "tied", "different"))
    assert "lm_head.weight" in caplog.text
    untied = rewrite_config(tied(tmp_path / "untied", "different"), tie_word_embeddings=False)
    assert same(logprobs(llm), logprobs(load_llm(untied)), 1e-6)


@pytest.mark.parametrize("drop", [(), ("tie_word_embeddings",)], ids=["false", "absent"])
def test_o27_untied_without_a_head(tmp_path: Path, drop: tuple[str, ...]) -> None:
    """Absent means the architecture's own default, for Llama a head of its own."""
    folder = rewrite_config(tiny(tmp_path), *drop)
    check_against_transformers(load_llm(folder), folder, num_tokens=1)
    change_tensors(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=HEAD):
        LLM(str(folder))


def in_two_shards(folder: Path) -> Path:
    """TINY, its second layer in a second file."""
    tiny(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    place = {name: second if ".layers.1." in name else first for name in tensors}
    for file in (first, second):
        write_safetensors(
            folder / file, {name: array for name, array in tensors.items() if place[name] == file}
        )
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_o27_two_shards(tmp_path: Path, plain_logprobs: list[dict[int, float]]) -> None:
    folder = in_two_shards(tmp_path)
    assert same(logprobs(load_llm(folder)), plain_logprobs, 1e-6)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        LLM(str(folder))


def test_o27_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    folder = in_two_shards(tmp_path)
    file = folder / "model-00002-of-00002.safetensors"
    tensors = dict(load_file(file))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(file, tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        LLM(str(folder))


def test_o27_a_wrong_shape_and_an_unknown_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"

    def cut(tensors: dict[str, Float32]) -> None:
        tensors[name] = tensors[name][:-1]

    with pytest.raises(CheckpointError, match=name):
        LLM(str(change_tensors(tiny(tmp_path / "shape"), cut)))

    def add(tensors: dict[str, Float32]) -> None:
        tensors["model.layers.0.self_attn.surprise.weight"] = np.ones((2, 2), np.float32)

    with pytest.raises(CheckpointError, match="surprise"):
        LLM(str(change_tensors(tiny(tmp_path / "extra"), add)))


def test_o27_the_command_ends_with_an_error(tmp_path: Path) -> None:
    folder = in_two_shards(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    command = [sys.executable, "-m", "octavo", "run", str(folder), "--prompt", "hi"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "model-00002-of-00002" in result.stderr
    assert "Traceback" not in result.stderr


# ---- O28: GGUF keeps the rows of q and k in another order


@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_o28_llama_in_every_format(tmp_path: Path, format: str) -> None:
    """A GGUF file and its dequantised weights as a folder say the same."""
    file = tmp_path / "model.gguf"
    write_tiny_llama_gguf(file, format, seed=28)
    folder = folder_from_gguf(file, tmp_path / "folder")
    llm = load_llm(file)
    params = greedy(max_tokens=32, ignore_eos=True)
    found = answer(llm, ids(*PROMPT), params).outputs[0].token_ids
    assert found == answer(load_llm(folder), ids(*PROMPT), params).outputs[0].token_ids
    check_against_transformers(llm, folder)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_o28_biases_and_kv_heads(tmp_path: Path, kv_heads: int) -> None:
    folder = family(
        tmp_path / "folder",
        "llama",
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=kv_heads,
    )
    file = gguf_from_folder(folder, tmp_path / "model.gguf")
    assert same(logprobs(load_llm(file)), logprobs(load_llm(folder)), 1e-6)


@pytest.mark.parametrize("name", ["qwen2"])
def test_o28_others_keep_their_rows(tmp_path: Path, name: str) -> None:
    folder = family(tmp_path / "folder", name)
    file = gguf_from_folder(folder, tmp_path / "model.gguf", arch=name)
    assert same(logprobs(load_llm(file)), logprobs(load_llm(folder)), 1e-6)


def test_o28_smollm2_against_its_dequantised_weights(tmp_path: Path) -> None:
    """The real 135M file, 16 tokens."""
    prompt = ids(504, 3575, 282, 4649, 314)  # The capital of France is
    params = greedy(max_tokens=16, ignore_eos=True)
    output = answer(load_llm(smollm2_path(), max_model_len=64), prompt, params)
    folder = folder_from_gguf(smollm2_path(), tmp_path)
    same_weights = load_llm(folder, max_model_len=64)
    assert answer(same_weights, prompt, params).outputs[0].token_ids == output.outputs[0].token_ids
    shutil.rmtree(folder)  # 540 MB


# ---- O29: tokenizer metadata, missing or odd

ODD_TEXT = "I'll pay 12345 dollars\n\n\n  in   Cafés — 你好 🌶 don't"


def tiny_gguf(file: Path, **keys: Any) -> Path:
    source = tiny(file.with_suffix(""), vocab_size=BYTE_VOCAB + 1)
    return gguf_from_folder(
        source, file, keys={f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    )


@pytest.mark.parametrize("pre", [None, "default", "no-such-pre"])
def test_o29_an_unknown_split_is_refused(tmp_path: Path, pre: str | None) -> None:
    file = tiny_gguf(tmp_path / "model.gguf", pre=pre)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre"):
        LLM(str(file))
    # The ways out: the model's own tokenizer, or none.
    save_byte_tokenizer(tmp_path / "tokenizer")
    llm = load_llm(file, tokenizer=str(tmp_path / "tokenizer"))
    output = answer(llm, ODD_TEXT, greedy(max_tokens=2))
    assert output.prompt_token_ids == [BOS, *ODD_TEXT.encode()]
    bare = load_llm(file, skip_tokenizer_init=True)
    assert answer(bare, ids(*output.prompt_token_ids), greedy(max_tokens=2)).outputs[
        0
    ].token_ids == (output.outputs[0].token_ids)


def test_o29_what_is_right_comes_back(tmp_path: Path) -> None:
    llm = load_llm(tiny_gguf(tmp_path / "model.gguf"))
    output = answer(llm, ODD_TEXT, greedy(max_tokens=1))
    assert output.prompt_token_ids == [BOS, *ODD_TEXT.encode()]
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == ODD_TEXT


def test_o29_no_merges(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges"):
        LLM(str(tiny_gguf(tmp_path / "model.gguf", merges=None)))


# ---- O30: head sizes


@pytest.mark.parametrize(
    ("settings", "drop"),
    [
        ({"head_dim": 32}, ()),
        ({"head_dim": 80}, ()),
        ({"head_dim": 96}, ()),
        ({"head_dim": 192}, ()),
        ({"head_dim": 256}, ()),
        ({"num_key_value_heads": 1}, ()),
        ({"num_key_value_heads": 4}, ()),
        ({"num_key_value_heads": 4}, ("num_key_value_heads",)),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_o30_head_sizes(
    tmp_path: Path, settings: dict[str, Any], drop: tuple[str, ...], backend: str | None
) -> None:
    folder = rewrite_config(tiny(tmp_path, **settings), *drop)
    check_against_transformers(load_llm(folder, attention_backend=backend), folder)


@pytest.mark.parametrize("given", [{"head_dim": None}, {}], ids=["null", "absent"])
def test_o30_head_size_of_the_hidden_size(
    tmp_path: Path, plain_logprobs: list[dict[int, float]], given: dict[str, Any]
) -> None:
    folder = rewrite_config(tiny(tmp_path), *(() if given else ("head_dim",)), **given)
    assert same(logprobs(load_llm(folder)), plain_logprobs, 1e-6)


def test_o30_a_size_that_the_kernel_does_not_take(tmp_path: Path) -> None:
    folder = tiny(tmp_path, head_dim=12)
    llm = load_llm(folder)
    assert llm.report.attention_backend == "reference"
    check_against_transformers(llm, folder)


# ---- O31 to O33 and O40: refused by name, until they work

QUANTIZED = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
]


@pytest.mark.parametrize("quantization", QUANTIZED, ids=lambda config: config["quant_method"])
def test_o32_o33_quantised_folders(tmp_path: Path, quantization: dict[str, Any]) -> None:
    tiny(tmp_path, quantization_config=quantization)
    with pytest.raises(UnsupportedModelError, match=quantization["quant_method"]):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "Qwen2Moe"),
        ({"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_o31_mixtures_of_experts(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    tiny(tmp_path, num_experts_per_tok=2, **settings)
    with pytest.raises(UnsupportedModelError, match=named):
        LLM(str(tmp_path))


def test_o40_several_processes(tmp_path: Path) -> None:
    with pytest.raises((OctavoError, TypeError), match="tensor_parallel_size"):
        LLM(str(tiny(tmp_path)), tensor_parallel_size=2)
