"""Text to ids: llama.cpp's ids for real GGUF files, Hugging Face's for real folders."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.checkpoints import BOS, IM_END, save_byte_tokenizer, smollm2_path
from helpers.tokenizers import (
    byte_level,
    checkpoint,
    gemma3,
    gguf_checkpoint,
    qwen3,
    qwen3_tokenizer_folder,
    reference_cases,
    sentencepiece_metadata,
    smollm2,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.checkpoint import open_checkpoint
from octavo.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from octavo.text import Tokenizer, load_tokenizer

ODD_TEXT = "I'll pay 12345 dollars\n\n\n  in   Caf\u00e9s \u2014 \u4f60\u597d \U0001f336 don't"

# ---- real tokenizers


@pytest.mark.parametrize(("text", "ids"), reference_cases("smollm2"))
def test_smollm2_equals_llama_cpp(text: str, ids: list[int]) -> None:
    assert smollm2().encode(text) == ids


@pytest.mark.parametrize(("text", "ids"), reference_cases("gemma3_270m"))
def test_gemma3_equals_llama_cpp(text: str, ids: list[int]) -> None:
    if text == "\u2581\u2581 literal \u2581":
        # llama.cpp keeps a typed U+2581 apart from a space. Gemma's own tokenizer.json doesn't:
        # it respells spaces as U+2581 first, and is what the model was trained with.
        ids = [2, 139, 82951, 138]
    assert gemma3().encode(text) == ids


def test_real_files_are_read_whole() -> None:
    assert (smollm2().vocab_size, smollm2().bos_id, smollm2().eos_ids) == (49152, 1, {2})
    assert smollm2().special_tokens["eos_token"] == "<|im_end|>"
    assert len(smollm2().special_ids) == 17
    assert (gemma3().vocab_size, gemma3().bos_id, gemma3().eos_ids) == (262144, 2, {1})
    assert gemma3().chat_template is None
    assert (qwen3().vocab_size, qwen3().bos_id, qwen3().eos_ids) == (151669, None, {151645})


def test_qwen3_known_ids() -> None:
    assert qwen3().encode("Hello, world! 123") == [9707, 11, 1879, 0, 220, 16, 17, 18]
    assert qwen3().encode("<|im_start|>user\n<think>") == [151644, 872, 198, 151667]
    assert qwen3().decode([151644, 872, 198, 151667]) == "user\n<think>"
    assert qwen3().encode("e\u0301") == qwen3().encode("\u00e9")  # Qwen composes characters


@given(text=st.text(max_size=80))
@settings(deadline=None, max_examples=50)
def test_encoding_is_the_library_s(text: str) -> None:
    for tokenizer in (smollm2(), qwen3(), gemma3()):
        assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids


@given(text=st.text(max_size=60))
@settings(deadline=None, max_examples=100)
def test_qwen3_round_trip(text: str) -> None:
    ids = qwen3().encode(text, parse_special=False)
    assert qwen3().decode(ids) == unicodedata.normalize("NFC", text)


# SmolLM2's vocabulary lacks some bytes that only rare characters have; they get lost.
@given(text=st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=0xFFFF)))
@settings(deadline=None, max_examples=100)
def test_smollm2_round_trip(text: str) -> None:
    assert smollm2().decode(smollm2().encode(text, parse_special=False)) == text


def test_qwen3_rebuilt_from_gguf_metadata(tmp_path: Path) -> None:
    """The same tokens, merges and types as a GGUF file lists them give the same ids."""
    folder = qwen3_tokenizer_folder(tmp_path)
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {index: token for token, index in stored["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, 1)
    for token in stored["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = 3 if token["special"] else 4
    count = len(tokens)
    rebuilt = load_tokenizer(
        gguf_checkpoint(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.tokens": [tokens[index] for index in range(count)],
                "tokenizer.ggml.token_type": [types[index] for index in range(count)],
                "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
                "tokenizer.ggml.eos_token_id": 151645,
            }
        )
    )
    assert rebuilt.special_ids == qwen3().special_ids
    for text, _ in reference_cases("smollm2") + reference_cases("gemma3_270m"):
        assert rebuilt.encode(text) == qwen3().encode(text), text


# ---- BOS (O05), special tokens, several ends (O07)


def test_bos_is_added_once(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.encode("hi") == [BOS, 104, 105]
    assert tokenizer.encode("<s>hi") == [BOS, 104, 105]
    assert tokenizer.encode("<s><s>hi") == [BOS, BOS, 104, 105]  # as written, none added
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert tokenizer.encode("<s>hi", add_special_tokens=False) == [BOS, 104, 105]


def test_no_bos_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, add_bos=False)
    assert tokenizer.encode("hi") == [104, 105]
    assert tokenizer.encode("<s><s>hi") == [BOS, BOS, 104, 105]
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("stored", [True, False])
def test_a_contradicting_flag_is_named(
    tmp_path: Path, stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_byte_tokenizer(tmp_path, add_bos=stored)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": not stored}))
    tokenizer = load_tokenizer(checkpoint(tmp_path))
    assert tokenizer.encode("A") == ([BOS, 65] if stored else [65])  # as tokenizer.json says
    assert f"add_bos_token {not stored}" in caplog.text


def test_special_tokens_in_raw_text(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, add_bos=False)
    assert tokenizer.encode("a<|im_end|>") == [97, IM_END]
    assert tokenizer.encode("a<|im_end|>", parse_special=False) == list(b"a<|im_end|>")


def test_end_ids_come_from_everywhere(tmp_path: Path) -> None:
    tokenizer = byte_level(
        tmp_path, config={"eos_token_id": 258}, generation_config={"eos_token_id": [257, 259]}
    )
    assert tokenizer.eos_ids == {257, 258, 259}
    metadata = sentencepiece_metadata(["a"], eot_token_id=259, eom_token_id=260)
    assert load_tokenizer(gguf_checkpoint(metadata)).eos_ids == {2, 259, 260}


def test_end_of_turn_of_an_old_gguf() -> None:
    """A chat model's file that names no eot_token_id, as the first Llama 3 files didn't."""
    metadata = sentencepiece_metadata(["a", "<|eot_id|>"], chat_template="{{ messages }}")
    metadata["tokenizer.ggml.token_type"][-1] = 3
    assert load_tokenizer(gguf_checkpoint(metadata)).eos_ids == {2, 260}
    del metadata["tokenizer.chat_template"]
    assert load_tokenizer(gguf_checkpoint(metadata)).eos_ids == {2}


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D at character 1"):
        smollm2().encode("a\ud83d")


# ---- some special tokens' texts stay text


def without(tokenizer: Tokenizer, token: str) -> tokenizers.Tokenizer:
    """The same tokenizer that doesn't know one of its added tokens."""
    stored = json.loads(tokenizer.backend.to_str())
    stored["added_tokens"] = [t for t in stored["added_tokens"] if t["content"] != token]
    return tokenizers.Tokenizer.from_str(json.dumps(stored))


def word_marks(prepend_scheme: str) -> Tokenizer:
    """SentencePiece's spelling by a pre-tokenizer, as newer Llama files have it; its special
    token ``<s>`` swallows the space after it."""
    pieces = ["<unk>", "\u2581", *"abs<>/", "\u2581a", "ab"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("\u2581", "a"), ("a", "b")],
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    backend.add_special_tokens(
        [AddedToken("<s>", rstrip=True, special=True), AddedToken("</s>", special=True)]
    )
    return Tokenizer(backend)


def llama_like() -> Tokenizer:
    pieces = ["\u2581", *"abs<>/", "\u2581a", "ab"]
    return load_tokenizer(gguf_checkpoint(sentencepiece_metadata(pieces, add_bos_token=False)))


LITERALS: dict[str, tuple[Callable[[], Tokenizer], str, str]] = {
    "smollm2": (smollm2, "<|im_start|>", "<|im_end|>"),
    "llama": (llama_like, "<s>", "</s>"),
    "first": (lambda: word_marks("first"), "<s>", "</s>"),
    "always": (lambda: word_marks("always"), "<s>", "</s>"),
    "never": (lambda: word_marks("never"), "<s>", "</s>"),
}


@lru_cache
def literal_case(name: str) -> tuple[Tokenizer, tokenizers.Tokenizer, str, str]:
    load, real, literal = LITERALS[name]
    return load(), without(load(), literal), real, literal


@pytest.mark.parametrize("name", LITERALS)
@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_literals_are_ordinary_text(name: str, data: st.DataObject) -> None:
    """As if the library didn't know the token that is spelled out, and knew all the others."""
    tokenizer, unaware, real, literal = literal_case(name)
    words = st.sampled_from([real, literal, "a", "b", " ", "  ", "\n", "ab a", "<", "s>"])
    text = "".join(data.draw(st.lists(words, max_size=8)))
    starts = [at for at in range(len(text)) if text.startswith(literal, at)]
    ids = tokenizer.encode_with_literals(text, starts)
    assert ids == unaware.encode(text, add_special_tokens=False).ids
    if starts:
        assert tokenizer.backend.token_to_id(literal) not in ids


@pytest.mark.parametrize("load", [smollm2, qwen3, gemma3])
def test_no_special_token_from_its_text(load: Callable[[], Tokenizer]) -> None:
    tokenizer = load()
    for text in sorted(tokenizer.special_texts.texts)[:300]:
        ids = tokenizer.encode(f"a{text} b", add_special_tokens=False, parse_special=False)
        assert not tokenizer.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == f"a{text} b"
        assert tokenizer.encode_with_literals(f"a{text} b", [1]) == ids


# ---- GGUF metadata that is missing or odd (O29)


def gpt2_metadata(pre: str | None) -> dict[str, Any]:
    metadata = open_checkpoint(smollm2_path()).metadata
    assert metadata is not None
    metadata = {key: value for key, value in metadata.items() if "add_bos" not in key}
    metadata["tokenizer.ggml.pre"] = pre
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("pre", [None, "default", "no-such-pre"])
def test_unknown_pre_tokenizer_is_refused(pre: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match=pre or "missing") as refusal:
        load_tokenizer(gguf_checkpoint(gpt2_metadata(pre)))
    assert "tokenizer.json" in str(refusal.value)  # the way out


@pytest.mark.parametrize(
    ("pre", "ids_of_digits"),
    [("smollm", 5), ("llama-bpe", None), ("gpt-2", None), ("tekken", None), ("qwen35", None)],
)
def test_known_pre_tokenizers_round_trip(pre: str, ids_of_digits: int | None) -> None:
    metadata = gpt2_metadata(pre) | {"tokenizer.ggml.add_bos_token": False}
    tokenizer = load_tokenizer(gguf_checkpoint(metadata))
    assert tokenizer.decode(tokenizer.encode(ODD_TEXT)) == ODD_TEXT
    if ids_of_digits is not None:
        assert tokenizer.encode(ODD_TEXT) == smollm2().encode(ODD_TEXT)
        assert len(tokenizer.encode("12345")) == ids_of_digits


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_bos_where_the_file_does_not_say(pre: str, adds: bool) -> None:
    tokenizer = load_tokenizer(gguf_checkpoint(gpt2_metadata(pre)))
    assert (tokenizer.encode("a")[0] == 1) == adds


def test_other_models_and_missing_lists_are_refused() -> None:
    metadata = gpt2_metadata("smollm")
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        load_tokenizer(gguf_checkpoint(metadata | {"tokenizer.ggml.model": "bert"}))
    with pytest.raises(CheckpointError, match="merges is missing"):
        load_tokenizer(gguf_checkpoint(metadata | {"tokenizer.ggml.merges": None}))
    with pytest.raises(CheckpointError, match="'ab'"):
        load_tokenizer(gguf_checkpoint(metadata | {"tokenizer.ggml.merges": ["ab"]}))
    with pytest.raises(CheckpointError, match="contradicts"):
        load_tokenizer(gguf_checkpoint(metadata | {"tokenizer.ggml.merges": ["<no <such"]}))
    with pytest.raises(CheckpointError, match="token_type is 1 long"):
        load_tokenizer(gguf_checkpoint(metadata | {"tokenizer.ggml.token_type": [1]}))
    with pytest.raises(CheckpointError, match="tokens is missing"):
        load_tokenizer(gguf_checkpoint(metadata | {"tokenizer.ggml.tokens": []}))
    with pytest.raises(CheckpointError, match="bos_token_id is 99999999"):
        load_tokenizer(
            gguf_checkpoint(
                metadata
                | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 99999999}
            )
        )


def test_control_and_user_defined_tokens() -> None:
    """Both are parsed; a control token is hidden in output and stays text in messages."""
    metadata = sentencepiece_metadata(["\u2581", "x", "<tool>", "<|end|>"], add_bos_token=False)
    metadata["tokenizer.ggml.token_type"][-2:] = [4, 3]
    tokenizer = load_tokenizer(gguf_checkpoint(metadata))
    assert tokenizer.encode("<tool><|end|>") == [261, 262]
    assert tokenizer.special_ids == {0, 1, 2, 262}
    assert tokenizer.decode([261, 262]) == "<tool>"
    assert 261 in tokenizer.encode("<tool><|end|>", parse_special=False)
    assert 262 not in tokenizer.encode("<tool><|end|>", parse_special=False)


def test_leading_space_of_sentencepiece_once() -> None:
    tokenizer = llama_like()
    assert tokenizer.encode("ab a") == tokenizer.backend.encode("ab a").ids
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"
    assert tokenizer.decode(tokenizer.encode("  ab")) == "  ab"


def test_scores_rank_the_merges() -> None:
    """``ab`` is likelier than ``bc``, so ``abc`` is ``ab`` + ``c``; swapped, ``a`` + ``bc``."""
    texts = []
    for pieces in (["a", "b", "c", "ab", "bc"], ["a", "b", "c", "bc", "ab"]):
        keys = {"add_space_prefix": False, "add_bos_token": False}
        tokenizer = load_tokenizer(gguf_checkpoint(sentencepiece_metadata(pieces, **keys)))
        texts.append([tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("abc")])
    assert texts == [[b"ab", b"c"], [b"a", b"bc"]]


# ---- folders


def test_another_folder_may_supply_the_tokenizer(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(gguf_checkpoint(gpt2_metadata("no-such-pre")), tmp_path)
    assert tokenizer.encode("A") == [BOS, 65]


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(checkpoint(tmp_path))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model and no"):
        load_tokenizer(checkpoint(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(checkpoint(tmp_path))
    save_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(checkpoint(tmp_path))


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, add_bos=False)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(checkpoint(tmp_path))
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == [97]


def test_tokens_listed_in_the_config_only(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, add_bos=False)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {
        "257": {"content": "</s>", "special": True},
        "261": {"content": "<new>", "special": True, "normalized": False},
    }
    path.write_text(json.dumps(config))
    tokenizer = load_tokenizer(checkpoint(tmp_path))
    assert tokenizer.encode("a<new>") == [97, 261]
    assert 261 in tokenizer.special_ids
    config["added_tokens_decoder"]["257"]["content"] = "<new>"
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="257"):
        load_tokenizer(checkpoint(tmp_path))


def test_template_files_and_named_templates(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, chat_template=None)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "default", "template": "old"},
        {"name": "tool_use", "template": "tools"},
    ]
    path.write_text(json.dumps(config))
    assert load_tokenizer(checkpoint(tmp_path)).chat_templates == {
        "default": "old",
        "tool_use": "tools",
    }
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("documents")
    tokenizer = load_tokenizer(checkpoint(tmp_path))
    assert tokenizer.chat_template == "new"
    assert tokenizer.chat_templates["rag"] == "documents"
    metadata = sentencepiece_metadata(["a"], chat_template="plain")
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    assert load_tokenizer(gguf_checkpoint(metadata)).chat_templates == {
        "default": "plain",
        "tool_use": "tools",
    }


def test_no_heavy_imports() -> None:
    code = "import octavo.text, sys; print({'torch', 'transformers', 'gguf'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
