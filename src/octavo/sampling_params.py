"""What a request may ask of the sampler: vLLM's names and defaults."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequestError, brief

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20

_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What an answer must look like; exactly one is given, under vLLM's names.

    ``json`` is a JSON Schema, a mapping or its text (kept as text); ``regex`` a regular expression
    that the whole answer matches; ``choice`` a list of texts, one of which is the answer;
    ``grammar`` a Lark grammar; ``json_object`` asks for any JSON object. Raises
    :class:`InvalidRequestError` where the shape is wrong; whether it can be enforced is checked
    when the request is prepared.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _malformed(f"json_object is {self.json_object!r}, it must be true or false")
        given = [name for name in _STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _malformed(
                f"exactly one of {', '.join(_STRUCTURES)} must be given, "
                f"but it has {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise _malformed(f"{name} is {text!r}, it must be a non-empty string")
        if self.choice is not None:
            choice = _tuple("structured_outputs", self.choice)
            if not choice or not all(isinstance(text, str) and text for text in choice):
                raise _malformed(
                    f"choice is {self.choice!r}, it must be a list of non-empty strings"
                )
            object.__setattr__(self, "choice", choice)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens of one request, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch their filter
    off. Presence and frequency penalties count generated tokens only, the repetition penalty the
    prompt's too. ``seed`` goes from 0, a seed like any other, to 2^63 - 1; None draws one.
    ``max_tokens`` None means: as many as the context has room for. Until ``min_tokens`` are there,
    ids that would end the answer can't be chosen and stop strings don't count. Log probabilities
    are those of the model's own distribution, before penalties, temperature and filters;
    ``logprobs`` and ``prompt_logprobs`` say how many of the likeliest tokens are reported besides
    the one taken.
    Any value out of range raises :class:`InvalidRequestError` on construction; token ids are
    checked against the vocabulary by :meth:`check_vocabulary`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _check_int("n", self.n, 1, 128)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p is 0, it must be above 0 (1 switches it off)", "top_p")
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise InvalidRequestError(
                "repetition_penalty is 0, it must be above 0 (1 switches it off)",
                "repetition_penalty",
            )
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop {text!r} is not a non-empty string", "stop")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None)
        self._check_logit_bias()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r}, it must be true or false", name
                )
        if stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are looked for in the text, which detokenize=False leaves out; "
                "use stop_token_ids",
                "stop",
            )
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _malformed(f"it is {self.structured_outputs!r}, not a StructuredOutputs")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias is {self.logit_bias!r}, it must map token ids to biases", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, None, "logit_bias token id")
            _check_float("logit_bias", bias, -100.0, 100.0, f"logit_bias of token {token}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever way it was given."""
        return tuple(self.stop)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`InvalidRequestError` where a token id lies outside the vocabulary."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} has token id {token}, ids go from 0 to {vocab_size - 1}", name
                    )


def _schema_text(schema: object) -> str:
    """The text of a JSON Schema given either way. Its order of keys is kept: an answer has its
    properties in the same order."""
    try:
        if isinstance(schema, str):
            parsed = json.loads(
                schema, object_pairs_hook=_no_duplicates, parse_constant=_no_constant
            )
        else:
            parsed = schema
        if not isinstance(parsed, Mapping | bool):
            raise _malformed(f"the json schema is {brief(parsed)}, it must be an object")
        return json.dumps(parsed, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as problem:
        raise _malformed(f"the json schema {brief(schema)} is no JSON: {problem}") from problem


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return seen


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _as_dict(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{brief(value)} is not a JSON value")
    return dict(value)


def _malformed(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", "structured_outputs")


def _tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} is {value!r}, it must be a list", name)
    return tuple(value)


def _check_int(
    name: str, value: object, low: int, high: int | None, label: str | None = None
) -> None:
    label = label or name
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{label} is {value!r}, it must be a whole number", name)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{label} is {value}, it must be {limits}", name)


def _check_float(
    name: str, value: object, low: float, high: float, label: str | None = None
) -> None:
    label = label or name
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{label} is {value!r}, it must be a number", name)
    # Compared first: a whole number may be too large for isfinite.
    if not low <= value <= min(high, sys.float_info.max):
        limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{label} is {value}, it must be {limits} and finite", name)
