"""Regular expressions, choices and grammars; the matcher and its masks; real tokenizers."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import EOS, byte_tokenizer
from helpers.schemas import accepts, allowed, byte_compiler, byte_matcher, random_answer
from helpers.tokenizers import gemma3, gguf_checkpoint, qwen3, sentencepiece_metadata, smollm2
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.grammar import GrammarCompiler, GrammarMatcher, check_structure
from octavo.errors import InvalidRequestError
from octavo.sampling_params import StructuredOutputs
from octavo.text import Tokenizer, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "größe": {"type": "integer"}},
    "required": ["name", "größe"],
    "additionalProperties": False,
}
LARK = 'start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= "SELECT " col " FROM " [a-z]+\ncol ::= "a" | "b"'


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-z]+", "(ab|cd)*", "é+|🌶", "a?b?c?", "[^a-y]"])
def test_answers_match_their_regex(pattern: str) -> None:
    for seed in range(20):
        answer = random_answer(random.Random(seed), 300, regex=pattern)
        assert answer is None or re.fullmatch(pattern, answer.decode())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=8).filter(lambda t: "\0" not in t), min_size=1))
def test_choices_are_taken_literally(texts: list[str]) -> None:
    assert all(accepts(text, choice=texts) for text in texts)
    answer = random_answer(random.Random(0), 100, choice=texts)
    assert answer is not None
    assert answer.decode() in texts
    if texts[0][:-1] not in texts:
        assert not accepts(texts[0][:-1], choice=texts)


def test_grammars_in_lark_and_gbnf() -> None:
    assert accepts("1+22+333", grammar=LARK)
    assert not accepts("1+", grammar=LARK)
    assert not accepts("1 + 2", grammar=LARK)
    assert accepts("SELECT b FROM t", grammar=GBNF)
    assert not accepts("SELECT c FROM t", grammar=GBNF)
    assert accepts("%json", grammar='start: "%json"')


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        ({"regex": "(a|b"}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "[^\\s\\S]"}, "nothing can satisfy it"),
        ({"regex": "a\ud800"}, "surrogates"),
        ({"choice": ["a", "\udfff"]}, "surrogates"),
        ({"grammar": 'start: "a" foo'}, '"foo"'),
        ({"grammar": 'a: "b"'}, "start"),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": 'start: %json {"type": "object"}'}, "%json"),
        ({"regex": "a" * 20_000}, "16,384"),
        ({"grammar": "start: <|im_end|>"}, "im_end"),
    ],
)
def test_what_can_not_be_enforced_is_refused(structure: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_structure(StructuredOutputs(**structure))
    assert caught.value.param == "structured_outputs"
    assert named in str(caught.value)


def test_the_end_is_allowed_only_at_the_end() -> None:
    matcher = byte_matcher(json=SCHEMA)
    for byte in '{"name":"é\\n","größe":-3'.encode():
        ids = allowed(matcher)
        assert byte in ids
        assert max(ids) < 256
        matcher.accept(byte)
    assert EOS not in allowed(matcher)
    matcher.accept(ord("}"))
    assert allowed(matcher) == [EOS]
    assert allowed(byte_matcher(regex="a*")) == [ord("a"), EOS]


def test_bans_are_kept_while_anything_else_is_allowed() -> None:
    matcher = byte_matcher(regex="ab?")
    assert allowed(matcher, (EOS, 98, 5000)) == [97]
    assert allowed(matcher, (97, 98)) == [97]
    matcher.accept(97)
    assert allowed(matcher, (EOS,)) == [98]
    matcher.accept(98)
    assert allowed(matcher, (EOS,)) == [EOS]


def test_a_copy_goes_its_own_way() -> None:
    one = byte_matcher(regex="a[bc]d?")
    one.accept(97)
    other = one.copy()
    one.accept(98)
    assert allowed(other) == [98, 99]
    assert allowed(one) == [100, EOS]


def test_a_matcher_that_is_stuck_says_why() -> None:
    matcher = byte_matcher(regex="abc")
    matcher.accept(98)
    assert matcher.mask() is None
    assert matcher.error


def test_every_end_id_ends_and_special_texts_are_no_text() -> None:
    """``</s>`` as text is four bytes; the control token of that name is never part of a string."""
    backend = byte_tokenizer(extra=["<think>"])
    tokenizer = Tokenizer(backend, eos_ids=frozenset({EOS, EOS + 2}))
    matcher = GrammarCompiler(tokenizer, 300).compile(StructuredOutputs(regex=".*")).result()
    ids = allowed(matcher)
    assert {EOS, EOS + 2} <= set(ids)
    assert not {256, 258, 260} & set(ids)
    assert 261 in ids  # <think> is an ordinary token here, its text shows
    assert max(ids) == 261


def test_compiling_is_kept_and_refusals_come_through_the_future() -> None:
    compiler = byte_compiler()
    bad = compiler.compile(StructuredOutputs(json={"not": {}}))
    assert isinstance(bad.exception(), InvalidRequestError)
    structure = StructuredOutputs(json={"enum": list(range(500))})
    first, second = (compiler.compile(structure).result() for _ in range(2))
    first.accept(ord("4"))
    assert ord("5") in allowed(second)


def tokens_by_mask(tokenizer: Tokenizer, matcher: GrammarMatcher, text: str) -> bytes:
    """Take a text's own tokens as far as the mask goes along, then the longest that fit."""
    wanted = text.encode()
    done = b""
    while done != wanted:
        mask = matcher.mask()
        assert mask is not None, matcher.error
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        fitting = [i for i in ids if wanted.startswith(tokenizer.token_bytes(i), len(done))]
        fitting = [i for i in fitting if tokenizer.token_bytes(i)]
        assert fitting, (done, ids[:20])
        chosen = max(fitting, key=lambda i: len(tokenizer.token_bytes(i)))
        done += tokenizer.token_bytes(chosen)
        matcher.accept(chosen)
    return done


def llama2_like() -> Tokenizer:
    """Puts a space before a text, as Llama 2 does."""
    pieces = ["▁", "{", "}", '"', ":", ",", "n", "a", "m", "e", "na", "me", "name", '{"', "▁{"]
    return load_tokenizer(gguf_checkpoint(sentencepiece_metadata(pieces)))


@pytest.mark.parametrize("make", [smollm2, qwen3, gemma3, llama2_like])
def test_real_tokenizers_write_json(make: Any) -> None:
    tokenizer = make()
    vocab_size = -(-tokenizer.vocab_size // 128) * 128 + 128  # padded, as Qwen's is
    compiler = GrammarCompiler(tokenizer, vocab_size)
    matcher = compiler.compile(StructuredOutputs(json=SCHEMA)).result()
    text = json.dumps({"name": "naïve 🌶\n", "größe": 12}, ensure_ascii=False)
    tokens_by_mask(tokenizer, matcher, text)
    mask = matcher.mask()
    assert mask is not None
    end = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert set(end.tolist()) == tokenizer.eos_ids
