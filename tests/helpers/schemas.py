"""JSON Schemas for tests of structured output, and random answers to them."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import numpy as np
from helpers.checkpoints import EOS, byte_tokenizer

from octavo.engine.grammar import GrammarCompiler, GrammarMatcher
from octavo.sampling_params import StructuredOutputs
from octavo.text import Tokenizer

Schema = dict[str, Any]

VOCAB = 300  # BYTE's 261 tokens and padding


def _object(required: list[str] | None = None, **properties: Any) -> Schema:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


INT, STR, BOOL, NULL = ({"type": name} for name in ("integer", "string", "boolean", "null"))
SHORT = {"type": "string", "maxLength": 6}
LINKED_LIST = {
    "$ref": "#/definitions/n",
    "definitions": {
        "n": _object(v=INT, next={"anyOf": [{"$ref": "#/definitions/n"}, NULL]}),
    },
}

SCHEMAS: dict[str, Schema] = {
    "anything": {},
    "null": NULL,
    "boolean": BOOL,
    "string": STR,
    "number": {"type": "number"},
    "object": {"type": "object"},
    "two types": {"type": ["string", "null"], "maxLength": 3},
    "enum of all kinds": {
        "enum": ["在线", "é", "🌶", 'a"b', "", None, 3, True, -0.5, [1], {"k": []}]
    },
    "enum with sibling pattern": {"enum": ["ab", "cd", 7], "pattern": "^a"},
    "const object": {"const": {"b": 1, "a": [None, {"x": "y"}]}},
    "integer from -5 to 12": {"type": "integer", "minimum": -5, "maximum": 12},
    "integer from 2": {"type": "integer", "minimum": 2},
    "integer from -5": {"type": "integer", "minimum": -5},
    "integer above 0": {"type": "integer", "exclusiveMinimum": 0},
    "integer below 100": {"type": "integer", "exclusiveMaximum": 100, "minimum": -1000},
    "multiple of 3": {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 999},
    "number from -4 to 4": {"type": "number", "minimum": -4, "maximum": 4},
    "number above 0": {"type": "number", "exclusiveMinimum": 0},
    "number between": {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.3},
    "multiple of 0.5": {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 2},
    "string of 2 or 3": {"type": "string", "minLength": 2, "maxLength": 3},
    "anchored pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,3}$"},
    "pattern anywhere": {"type": "string", "pattern": "b+c", "maxLength": 8},
    "pattern with alternatives": {"type": "string", "pattern": "^a|b$", "maxLength": 5},
    "pattern without quotes": {"type": "string", "pattern": '^[^"]{1,4}$'},
    "pattern without backslash": {"type": "string", "pattern": "^[^\\\\]{1,4}$"},
    "pattern from NUL": {"type": "string", "pattern": "^[\\x00-!]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "date in February": {"type": "string", "format": "date", "pattern": "-02-29$"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "any of": {"anyOf": [INT, SHORT, {"type": "array", "items": BOOL, "maxItems": 2}]},
    "any of with siblings": {
        "type": "object",
        "properties": {"a": INT},
        "required": ["a"],
        "anyOf": [
            {"properties": {"b": SHORT}, "required": ["b"]},
            {"properties": {"c": NULL}, "required": ["c"]},
        ],
    },
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": INT}, "required": ["a"]},
            {"type": "object", "properties": {"b": SHORT}, "required": ["b"]},
        ]
    },
    "all of bounds": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 40}]},
    "all of patterns": {
        "type": "string",
        "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}],
    },
    "one of tagged": {
        "oneOf": [
            _object(kind={"const": "a"}, x=INT),
            _object(kind={"const": "b"}, y=BOOL),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "one of types": {"oneOf": [INT, NULL, {"type": "array", "items": INT, "maxItems": 2}]},
    "linked list": LINKED_LIST,
    "tree by #": _object(required=["v"], v=INT, children={"type": "array", "items": {"$ref": "#"}}),
    "ref with sibling": {"$ref": "#/$defs/n", "maximum": 9, "$defs": {"n": {"type": "integer"}}},
    "mutual refs": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": _object(required=[], b={"$ref": "#/$defs/b"}),
            "b": _object(required=[], a={"$ref": "#/$defs/a"}),
        },
    },
    "unicode keys": _object(**{"é": INT, "名前": SHORT, 'a"b\\': BOOL, "\n": NULL, "$ref": INT}),
    "optional properties": _object(required=["b"], a=INT, b=BOOL, c=NULL),
    "property that can't be": _object(
        required=[], a={"type": "integer", "minimum": 5, "maximum": 3}
    ),
    "open object": {"type": "object", "properties": {"a": INT}, "required": ["a", "z"]},
    "map of integers": {"type": "object", "additionalProperties": INT, "minProperties": 1},
    "map beside a property": {
        "type": "object",
        "properties": {"a": INT, "a/b": INT},
        "additionalProperties": STR,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^a": INT, "^[b-d]+$": BOOL},
        "properties": {"ab": {"maximum": 5}},
        "additionalProperties": False,
    },
    "at least one property": _object(required=[], a=INT, b=BOOL) | {"minProperties": 1},
    "array of 1 to 3": {"type": "array", "items": INT, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [INT, SHORT], "items": False, "minItems": 1},
    "old tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INT, SHORT],
        "additionalItems": BOOL,
        "maxItems": 4,
    },
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "array", "items": INT, "maxItems": 2}},
        "maxItems": 2,
    },
    "false items": {"type": "array", "items": False},
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/s",
        "title": "T",
        "description": "d",
        "type": "integer",
        "default": "anything",
        "examples": [{"not": 1}],
        "deprecated": True,
        "x-order": 3,
    },
}


@lru_cache(maxsize=1)
def byte_compiler() -> GrammarCompiler:
    """For the BYTE tokenizer, whose ids up to 255 are that byte, and ``VOCAB`` tokens in all."""
    return GrammarCompiler(Tokenizer(byte_tokenizer(), eos_ids=frozenset({EOS})), VOCAB)


def byte_matcher(**structure: Any) -> GrammarMatcher:
    """A matcher at its start; ``structure`` is that of :class:`StructuredOutputs`."""
    return byte_compiler().compile(StructuredOutputs(**structure)).result()


def allowed(matcher: GrammarMatcher, banned_ids: tuple[int, ...] = ()) -> list[int]:
    """The ids that the mask allows."""
    mask = matcher.mask(banned_ids)
    assert mask is not None, matcher.error
    assert mask.shape == (-(-VOCAB // 32),)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(text: str | bytes, **structure: Any) -> bool:
    """Whether a text is a whole answer, taken byte by byte."""
    matcher = byte_matcher(**structure)
    for byte in text.encode() if isinstance(text, str) else text:
        if byte not in allowed(matcher):
            return False
        matcher.accept(byte)
    return EOS in allowed(matcher)


def random_answer(rng: random.Random, longest: int, **structure: Any) -> bytes | None:
    """A text that follows the mask at random, None where it isn't over after ``longest`` bytes.
    It leans to ends and to brackets, so that most are over."""
    matcher = byte_matcher(**structure)
    text = bytearray()
    while len(text) < longest:
        ids = allowed(matcher)
        choice = rng.choice(ids)
        for favourite in (EOS, *b'"}]'):
            if favourite in ids and rng.random() < 0.25:
                choice = favourite
                break
        if choice == EOS:
            return bytes(text)
        text.append(choice)
        matcher.accept(choice)
    return None
