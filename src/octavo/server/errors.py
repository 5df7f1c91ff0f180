"""Errors as OpenAI's JSON."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from octavo.errors import InvalidRequestError, OctavoError

_MAX_NAMED = 4
_OUR_WORDS = {
    "extra_forbidden": "unknown or unsupported field",
    "none_required": "not supported; leave it out",  # a field that may only be null
}


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the JSON of an error. One that is no :class:`OctavoError` is our bug: its
    text is for the log."""
    if not isinstance(error, OctavoError):
        return 500, _body("internal error; the server's log has more", "server_error", None, None)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return error.status, _body(str(error), kind, getattr(error, "param", None), error.code)


def http_error_body(status: int, message: str) -> dict[str, Any]:
    """For a path or a method that there isn't."""
    code = "not_found" if status == 404 else None
    return _body(message, "invalid_request_error", None, code)


def from_validation(error: ValidationError) -> InvalidRequestError:
    """What is wrong with a body, field by field."""
    complaints = error.errors(include_url=False, include_input=False, include_context=False)
    complaints = [one for one in complaints if one["type"] == "no_text"] or complaints
    # Of a union, pydantic says of every branch why it wasn't taken.
    places: dict[str, list[str]] = {}
    for complaint in complaints:
        path = [str(part) for part in complaint["loc"] if _is_field(part)]
        message = _OUR_WORDS.get(complaint["type"], complaint["msg"])
        places.setdefault(".".join(path), []).append(message)
    named = [
        f"{place}: {' or: '.join(dict.fromkeys(messages))}" if place else messages[0]
        for place, messages in places.items()
    ]
    more = f"; and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    param = next(iter(places)) or None
    return InvalidRequestError("; ".join(named[:_MAX_NAMED]) + more, param)


def _is_field(part: int | str) -> bool:
    """Whether a part of pydantic's path is a field's name or a list's index, not a type's."""
    return isinstance(part, int) or (
        part.isidentifier() and not part[0].isupper() and part != "str"
    )


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
