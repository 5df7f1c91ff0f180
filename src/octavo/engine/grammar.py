"""Structured output: which tokens may come next, so that an answer keeps to its grammar.

llguidance does the work: it walks the tokenizer's trie with a lexer and an Earley parser (Geng et
al., 2025, *JSONSchemaBench*, describe and measure it). :func:`check_structure` turns what a request
asks for into its grammar, or refuses; :class:`GrammarCompiler` makes a :class:`GrammarMatcher` of
it in a thread of its own, and the engine asks the matcher for a mask before every token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from octavo.engine.schema_check import check_schema
from octavo.engine.schema_refs import refusal
from octavo.sampling_params import StructuredOutputs
from octavo.text import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Mask = NDArray[np.uint32]
T = TypeVar("T")

# Between two tokens of JSON: nothing, one space, or a new line with some indentation. It is matched
# at most once in a place, so that no answer gets lost in white space.
WHITESPACE = r" |\n {0,16}"
_JSON_RULES: JsonCompileOptions = {
    "whitespace_pattern": WHITESPACE,
    # Without \u: llguidance doesn't see that "\u0061" is the same key as "a".
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}
_LIMITS = LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=50_000, verbose_errors=False)
_KEPT_GRAMMARS = 64
MAX_GRAMMAR_LENGTH = 16_384  # characters; llguidance's time grows with the square of some grammars
# llguidance compiles by recursion, up to 10 KB a level, and there may be 10,000 levels.
_STACK_BYTES = 256 * 2**20
_thread_start = threading.Lock()


class GrammarMatcher:
    """How far one answer has come in its grammar. ``error`` says why it can't go on."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self, banned_ids: Collection[int] = ()) -> Mask | None:
        """The tokens that may come next, ``[ceil(vocab_size / 32)]``: bit ``i % 32`` of word
        ``i // 32`` is token ``i``. The end-of-sequence ids are allowed where the grammar may end.

        ``banned_ids`` are left out, unless nothing else is allowed. None: see ``error``.
        """
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            self.error = _message(self._matcher)
            return None
        if banned_ids:
            rest = words.copy()
            for token in banned_ids:
                if token < self._vocab_size:
                    rest[token // 32] &= ~np.uint32(1 << token % 32)
            if rest.any():
                return rest
        return words

    def accept(self, token_id: int) -> None:
        """Go on by a token that the last mask allowed."""
        self._matcher.consume_token(token_id)

    def copy(self) -> GrammarMatcher:
        """A matcher in the same state, to go its own way."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")


@dataclass
class GrammarCompiler:
    """Makes matchers for one model, one at a time in a thread of its own. Matchers of the grammars
    used last are kept, and copied. ``vocab_size`` is the model's, padding included."""

    tokenizer: Tokenizer
    vocab_size: int
    _kept: OrderedDict[str, GrammarMatcher] = field(default_factory=OrderedDict, init=False)
    _thread: ThreadPoolExecutor = field(default_factory=_one_thread, init=False)

    def compile(self, structure: StructuredOutputs) -> Future[GrammarMatcher]:
        """Begin to make a matcher; the result raises what :func:`check_structure` raises."""
        return _submit(self._thread, self._make, structure)

    def _make(self, structure: StructuredOutputs) -> GrammarMatcher:
        grammar = _checked_grammar(structure)
        if grammar not in self._kept:
            self._kept[grammar] = _matcher(self._trie, grammar, self.vocab_size)
            if len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return self._kept[grammar].copy()

    @cached_property
    def _trie(self) -> LLTokenizer:
        tokenizer = self.tokenizer
        known = min(self.vocab_size, tokenizer.vocab_size)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)]
        special_ids = tokenizer.special_ids | tokenizer.eos_ids
        by_bytes = {
            text: token_id for token_id, text in enumerate(tokens) if token_id not in special_ids
        }

        def encode(text: bytes) -> list[int]:
            ids = tokenizer.encode(
                text.decode("utf-8", "replace"), add_special_tokens=False, parse_special=False
            )
            # Some tokenizers put a space in front; and a piece may end within a character.
            if b"".join(tokens[token_id] for token_id in ids) == text:
                return ids
            return _longest_matches(text, by_bytes)

        return _make_trie(
            tokens + [b""] * (self.vocab_size - known),
            special_ids=special_ids,
            eos_ids=tokenizer.eos_ids,
            encode=encode,
        )


def check_structure(structure: StructuredOutputs) -> None:
    """Raise :class:`InvalidRequestError` where llguidance can't enforce what a request asks for, or
    nothing can satisfy it: the message names the JSON Schema keyword or the place in the regular
    expression or grammar. Blocks for some milliseconds mostly, without the GIL.
    """
    _submit(_check_thread(), _checked_grammar, structure).result()


@lru_cache(maxsize=256)
def _checked_grammar(structure: StructuredOutputs) -> str:
    """The grammar, in llguidance's own JSON; raises what :func:`check_structure` raises."""
    for name in ("regex", "grammar"):
        if len(getattr(structure, name) or "") > MAX_GRAMMAR_LENGTH:
            raise refusal(f"the {name} is longer than {MAX_GRAMMAR_LENGTH:,} characters")
    schema = None
    if structure.json is not None:
        schema = check_schema(str(structure.json))
    elif structure.json_object:
        schema = {"type": "object"}
    try:
        if schema is not None:
            text = json.dumps(schema, ensure_ascii=False)
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON_RULES)
        elif structure.regex is not None:
            grammar = LLMatcher.grammar_from_regex(structure.regex)
        elif structure.choice is not None:
            grammar = LLMatcher.grammar_from_regex("|".join(map(_literal, structure.choice)))
        else:
            grammar = LLMatcher.grammar_from_lark(_to_lark(str(structure.grammar)))
    except ValueError as problem:  # bad numbers, bad GBNF, or text that is no Unicode
        raise refusal(str(problem)) from problem
    _matcher(_byte_trie(), grammar, 257)
    return grammar


def _to_lark(grammar: str) -> str:
    """A grammar in Lark's syntax; llama.cpp's (GBNF) is known by its ``::=``."""
    if re.search(r"%\s*(json|llguidance)\b", re.sub(r'"(?:\\.|[^"\\])*"', "", grammar)):
        raise refusal("a grammar can't hold %json or %llguidance; give a schema as json")
    if not re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE):
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as problem:  # the converter raises nothing more exact
        raise refusal(f"the grammar, taken for GBNF, is wrong: {problem}") from problem


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


def _longest_matches(text: bytes, by_bytes: Mapping[bytes, int]) -> list[int]:
    """The text in tokens, each the longest that fits. ValueError where none does: to llguidance
    that is the end of this answer, and its error."""
    ids: list[int] = []
    while text:
        length = next((n for n in range(len(text), 0, -1) if text[:n] in by_bytes), None)
        if length is None:
            raise ValueError(f"the tokenizer has no token for {text!r}")
        ids.append(by_bytes[text[:length]])
        text = text[length:]
    return ids


def _matcher(trie: LLTokenizer, grammar: str, vocab_size: int) -> GrammarMatcher:
    """A matcher at its start, which has shown that something can follow."""
    inner = LLMatcher(trie, grammar, log_level=0, limits=_LIMITS)
    if inner.is_error():
        raise refusal(_message(inner))
    matcher = GrammarMatcher(inner, vocab_size)
    if matcher.mask() is None:
        raise refusal(f"nothing can satisfy it: {matcher.error}")
    return matcher


def _message(matcher: LLMatcher) -> str:
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if text in ("", "NoExtensionBias"):
        return "no text can follow"
    return text if len(text) <= 300 else text[:297] + "..."


@cache
def _check_thread() -> ThreadPoolExecutor:
    return _one_thread()


def _submit(
    executor: ThreadPoolExecutor, function: Callable[[StructuredOutputs], T], one: StructuredOutputs
) -> Future[T]:
    """Let a thread with a large stack do it."""
    with _thread_start:  # the size is that of whichever thread starts next
        before = threading.stack_size(_STACK_BYTES)
        try:
            return executor.submit(function, one)
        finally:
            threading.stack_size(before)


@cache
def _byte_trie() -> LLTokenizer:
    """Every byte as a token: checks a grammar without a model's tokenizer."""
    tokens = [bytes([byte]) for byte in range(256)]
    end = frozenset([256])
    return _make_trie([*tokens, b"</s>"], special_ids=end, eos_ids=end, encode=list)


def _make_trie(
    tokens: list[bytes],
    *,
    special_ids: frozenset[int],
    eos_ids: frozenset[int],
    encode: Callable[[bytes], list[int]],
) -> LLTokenizer:
    """llguidance's tokenizer. ``tokens`` are each id's bytes, none for padding; special ids are
    never part of a text. Where the grammar leaves one text only, ``encode`` says in which tokens
    the model would have it; llguidance trusts it to cover that text from its beginning."""
    vocabulary = _Vocabulary(tokens, sorted(special_ids), min(eos_ids), encode)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=sorted(eos_ids))


@dataclass(frozen=True)
class _Vocabulary:
    """The attributes by which llguidance knows a tokenizer."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[bytes], list[int]]
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text)
