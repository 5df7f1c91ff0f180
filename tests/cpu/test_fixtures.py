"""The fixtures themselves: what every other test takes for granted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import checkpoints
from helpers.checkpoints import BOS, EOS, REST, chain, uniform26
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer


@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_tokenizer_ids_are_bytes(add_bos: bool) -> None:
    tokenizer = checkpoints.byte_tokenizer(add_bos=add_bos)
    text = "A🌶 é\n\x00" + "".join(map(chr, range(256)))
    assert tokenizer.encode(text).ids == [BOS] * add_bos + list(text.encode())
    assert tokenizer.encode("A").ids == [BOS] * add_bos + [65]
    assert tokenizer.get_vocab_size() == 261


def test_byte_tokenizer_decodes_incomplete_characters_as_replacement() -> None:
    tokenizer = checkpoints.byte_tokenizer()
    assert tokenizer.decode([65, 240, 159, 140]).endswith("\ufffd")
    assert tokenizer.decode([65, 240, 159, 140, 182]) == "A🌶"


def test_byte_tokenizer_special_and_extra_tokens(tmp_path: Path) -> None:
    checkpoints.save_byte_tokenizer(tmp_path, ["CDE", "…"], eos=259)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hi<|im_end|></s><pad>").ids == [
        256,
        258,
        104,
        105,
        259,
        257,
        260,
    ]
    assert tokenizer.encode("BCDE…").ids == [256, 66, 261, 262]
    assert tokenizer.decode([256, 66, 261, 262, 259]) == "BCDE…"
    assert tokenizer.decode([66, 259], skip_special_tokens=False) == "B<|im_end|>"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_tokenizer_config_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    checkpoints.tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("A")["input_ids"] == [256, 65]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_markov_logits_are_exactly_the_table(tmp_path: Path, dtype: str) -> None:
    rows = chain("A", 240, 159, EOS) | {
        ord("q"): {97: 12.0, 98: 11.0},
        ord("c"): {98: 50.0, REST: -100.0},
        ord("b"): {97: 4.0, 98: 3.0, 99: -2.0, 100: 3.5, REST: -100.0},
    }
    checkpoints.markov(tmp_path, rows, dtype=dtype, extra=["CDE"])
    table = checkpoints.markov_table(rows, 262)
    assert table[65, 240] == 20
    assert table[65].sum() == 20
    assert table[99, 0] == -100
    ids = [*range(262), 65, 65, 99]
    np.testing.assert_array_equal(
        checkpoints.reference_logits(tmp_path, ids[:200]), table[ids[:200]]
    )
    np.testing.assert_array_equal(
        checkpoints.reference_logits(tmp_path, ids[200:]), table[ids[200:]]
    )


def test_uniform26_and_rest() -> None:
    table = checkpoints.markov_table(uniform26(), 261)
    assert (table == table[0]).all()
    assert set(np.flatnonzero(table[0] == 0)) == set(range(97, 123))
    table = checkpoints.markov_table({5: {1: 3.0}}, 8, rest=-100.0)
    assert table[5].tolist() == [-100, 3, *[-100] * 6]
    assert not table[4].any()


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"head_dim": 32, "num_key_value_heads": 1, "num_hidden_layers": 3},
        {"tie_word_embeddings": True, "vocab_size": 1024},
        {"model_type": "mistral", "sliding_window": 8},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
    ids=str,
)
def test_tiny_loads_in_transformers(tmp_path: Path, overrides: dict[str, object]) -> None:
    folder = checkpoints.tiny(tmp_path, **overrides)
    ids = [256, *range(1, 33)]
    logits = checkpoints.reference_logits(folder, ids)
    assert logits.shape == (33, overrides.get("vocab_size", 261))
    assert logits.std() > 0.3
    again = checkpoints.tiny(tmp_path / "again", **overrides)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    if overrides:
        plain = checkpoints.reference_logits(checkpoints.tiny(tmp_path / "plain"), ids)
        assert plain.shape != logits.shape or np.abs(plain - logits).max() > 0.01


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_family_is_not_degenerate(tmp_path: Path, name: str) -> None:
    folder = checkpoints.family(tmp_path, name)
    ids = [256, *range(64, 100)]
    logits = checkpoints.reference_logits(folder, ids)
    assert logits.shape == (37, 320)
    assert logits.std() > 0.5
    gaps = np.diff(np.sort(logits, axis=1)[:, -2:])
    assert np.median(gaps) > 0.05
    # The context counts: another first token moves the last logits, if no window hides it.
    other = checkpoints.reference_logits(folder, [97, *ids[1:]])
    assert np.abs(other[20] - logits[20]).max() > 0.01
    # Every tensor counts, norms and biases included.
    with safe_open(folder / "model.safetensors", "numpy") as file:
        for tensor in file.keys():  # noqa: SIM118
            assert file.get_tensor(tensor).std() > 0.05, tensor


def test_family_overrides(tmp_path: Path) -> None:
    folder = checkpoints.family(
        tmp_path, "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    )
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["factor"] == 2.0


def test_model_greedy_ignores_eos(tmp_path: Path) -> None:
    folder = checkpoints.markov(tmp_path, chain("A", "B", EOS, "A"))
    model = checkpoints.load_reference(folder)
    assert checkpoints.model_greedy(model, [256, 65], 5) == [66, EOS, 65, 66, EOS]


@dataclass(frozen=True)
class _Weight:
    values: NDArray[np.float32]

    def to_float32(self) -> NDArray[np.float32]:
        return self.values


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_hf_from_checkpoint_rebuilds_the_model(tmp_path: Path, name: str) -> None:
    folder = checkpoints.family(tmp_path, name)
    include_one = name == "gemma3"
    tensors = {}
    with safe_open(folder / "model.safetensors", "numpy") as file:
        for key in file.keys():  # noqa: SIM118
            is_norm = include_one and key.endswith("norm.weight")
            tensors[key] = _Weight(file.get_tensor(key) + (1.0 if is_norm else 0.0))
    config = json.loads((folder / "config.json").read_text())
    if name == "llama":  # as octavo.checkpoint normalises it
        config["rope_parameters"] = {"full_attention": config["rope_parameters"]}
    checkpoint = SimpleNamespace(config=config, tensors=tensors, norms_include_one=include_one)
    ids = [256, *range(64, 100)]
    logits = checkpoints.model_logits(checkpoints.hf_from_checkpoint(checkpoint), ids)
    np.testing.assert_allclose(logits, checkpoints.reference_logits(folder, ids), atol=1e-4)

    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match="up_proj"):
        checkpoints.hf_from_checkpoint(checkpoint)


@pytest.mark.parametrize("path", [checkpoints.smollm2_path, checkpoints.gemma3_path])
def test_real_checkpoints_are_gguf_files(path: object) -> None:
    assert callable(path)
    with path().open("rb") as file:
        assert file.read(4) == b"GGUF"
