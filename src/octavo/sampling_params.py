"""What a request may ask of the sampler: vLLM's names and defaults."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20

_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens of one request, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch their filter
    off. Presence and frequency penalties count generated tokens only, the repetition penalty the
    prompt's too. ``seed`` goes from 0, a seed like any other, to 2^63 - 1; None draws one.
    ``max_tokens`` None means: as many as the context has room for. Log probabilities are those of
    the model's own distribution, before penalties, temperature and filters; ``logprobs`` and
    ``prompt_logprobs`` say how many of the likeliest tokens are reported besides the one taken.
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
