"""Ids to text: whole characters only, and the same text streamed or not (O01, O02)."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from helpers.tokenizers import (
    byte_level,
    gemma3,
    gguf_checkpoint,
    qwen3,
    sentencepiece_metadata,
    smollm2,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import UnsupportedModelError
from octavo.text import Detokenizer, Tokenizer, load_tokenizer

REAL = {"smollm2": smollm2, "qwen3": qwen3, "gemma3": gemma3}


def stream(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize(
    ("ids", "deltas"),
    [
        pytest.param([240, 159, 140, 182, 33, 257], ["", "", "", "\U0001f336", "!", "", ""]),
        pytest.param([196, 143, 257], ["", "\u010f", "", ""]),
        pytest.param([233, 190, 156], ["", "", "\u9f9c", ""]),
        pytest.param([240, 159, 33], ["", "", "\ufffd!", ""], id="broken, then !"),
        pytest.param([240, 159], ["", "", "\ufffd"], id="cut by length"),
        pytest.param([255, 66], ["\ufffd", "B", ""], id="never UTF-8"),
        pytest.param([65, 9999, 66], ["A", "", "B", ""], id="beyond the vocabulary"),
    ],
)
def test_bytes_become_whole_characters(tmp_path: Path, ids: list[int], deltas: list[str]) -> None:
    tokenizer = byte_level(tmp_path)
    assert stream(tokenizer, ids) == deltas
    assert tokenizer.decode(ids) == "".join(deltas)


def test_token_bytes_are_exact(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, extra=["CDE", "caf\u00e9 x"])
    assert [tokenizer.token_bytes(token_id) for token_id in (240, 159, 255, 32)] == [
        b"\xf0",
        b"\x9f",
        b"\xff",
        b" ",
    ]
    assert tokenizer.token_bytes(257) == b"</s>"
    assert tokenizer.token_bytes(261) == b"CDE"
    assert tokenizer.token_bytes(262) == "caf\u00e9 x".encode()
    for unknown in (999, -1, 2**40):
        assert tokenizer.token_bytes(unknown) == b""


def test_special_tokens_are_hidden_on_request(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = [256, 72, 105, 259]
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>Hi<|im_end|>"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "<s>Hi<|im_end|>"


@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_streamed_equals_whole(name: str, data: st.DataObject) -> None:
    tokenizer = REAL[name]()
    padded = tokenizer.vocab_size + 300  # a model's vocabulary goes beyond its tokenizer's
    ids = data.draw(st.lists(st.integers(0, padded), max_size=40))
    skip = data.draw(st.booleans())
    streamed = "".join(stream(tokenizer, ids, skip_special_tokens=skip, whole_text=True))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)
    raw = b"".join(
        tokenizer.token_bytes(token_id)
        for token_id in ids
        if not (skip and token_id in tokenizer.special_ids)
    )
    assert streamed == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("name", REAL)
@given(text=st.text(max_size=60))
@settings(deadline=None, max_examples=60)
def test_equals_the_library_on_text(name: str, text: str) -> None:
    tokenizer = REAL[name]()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    whole = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole


@pytest.mark.parametrize("name", REAL)
def test_equals_the_library_on_every_token(name: str) -> None:
    tokenizer = REAL[name]()
    ids = range(tokenizer.vocab_size)
    for token_id in random.Random(0).sample(ids, 20_000):
        whole = tokenizer.backend.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in whole:
            assert tokenizer.decode([token_id], skip_special_tokens=False) == whole, token_id


def test_an_answer_keeps_its_first_space() -> None:
    """SentencePiece puts a space before a text; after a prompt a leading space is a space."""
    tokenizer = load_tokenizer(gguf_checkpoint(sentencepiece_metadata(["\u2581", "a", "\u2581a"])))
    ids = tokenizer.encode("a a", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" a", b" a"]
    assert tokenizer.decode(ids) == "a a"
    assert tokenizer.decode([1, *ids]) == "a a"
    assert tokenizer.decode([1, *ids], skip_special_tokens=False) == "<s> a a"
    assert stream(tokenizer, ids) == [" a", " a", ""]
    assert stream(tokenizer, ids, whole_text=True) == ["a", " a", ""]


@given(text=st.text(st.sampled_from(" a\u2581\u9f9c\n"), max_size=12))
@settings(deadline=None)
def test_sentencepiece_round_trip(text: str) -> None:
    tokenizer = load_tokenizer(gguf_checkpoint(sentencepiece_metadata(["\u2581", "a", "\u2581a"])))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("\u2581", " ") == tokenizer.backend.decode(ids)


def test_unknown_decoder_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer(backend).decode([1])
    with pytest.raises(UnsupportedModelError, match="null"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())).decode([1])


@given(data=st.binary(max_size=12), cuts=st.lists(st.integers(0, 12)))
@settings(deadline=None)
def test_python_decodes_bytes_the_same_in_any_chunks(data: bytes, cuts: list[int]) -> None:
    """What the detokenizer relies on."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    pieces = [decoder.decode(data[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + decoder.decode(b"", True) == data.decode("utf-8", "replace")
