"""Every error that a user can cause.

Each message names the value, the limit and the way out. ``status`` is the HTTP status that the
server answers with, ``code`` OpenAI's machine-readable code where there is one.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that are the user's to mend; anything else that escapes is our bug."""

    status = 500
    code: str | None = None


class InvalidRequestError(OctavoError):
    """A request that can't be carried out as asked. ``param`` names the offending field."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt (with the tokens asked for) is longer than the model or the KV pool can hold."""

    code = "context_length_exceeded"


class ContentRuleError(InvalidRequestError):
    """A prompt that the server's content rules forbid."""

    code = "content_filter"


class ConfigError(OctavoError):
    """An option, or a combination of options, that the engine can't run with."""


class ModelNotFoundError(OctavoError):
    """No checkpoint under the given name, or no network to fetch it."""

    status = 404
    code = "model_not_found"


class CheckpointError(OctavoError):
    """A checkpoint that is damaged, incomplete or contradicts itself."""


class UnsupportedModelError(OctavoError):
    """A checkpoint that is sound but uses something that Octavo can't compute correctly yet."""


class InsufficientMemoryError(OctavoError):
    """Weights and KV cache don't fit. The message states weights, KV and free memory in GB;
    ``fitting_model_len`` is the longest request that would fit, 0 if none does."""

    status = 503

    def __init__(self, message: str, fitting_model_len: int = 0) -> None:
        super().__init__(message)
        self.fitting_model_len = fitting_model_len


class UnauthorizedError(OctavoError):
    """A call without one of the server's API keys."""

    status = 401
    code = "invalid_api_key"


class RequestTooLargeError(OctavoError):
    """A request body beyond the server's limit."""

    status = 413
    code = "request_too_large"


class OverloadedError(OctavoError):
    """The queue is full, or the server is loading or shutting down: the call may be repeated."""

    status = 503
    code = "overloaded"


class EngineDiedError(OctavoError):
    """The engine process ended; the answers that it was working on are lost."""

    status = 500
    code = "engine_died"


class ApiProcessDiedError(OctavoError):
    """One of several API processes ended; the answers of its clients are lost."""


def brief(value: object) -> str:
    """A value as a message shows it: its ``repr``, up to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
