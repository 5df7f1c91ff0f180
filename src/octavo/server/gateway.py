"""The gate before every route: API keys, a count of what was answered, and the client's name for
its call."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import UnauthorizedError
from octavo.server.errors import error_body
from octavo.server.metrics import Metrics

_OPEN_PATHS = frozenset({"/health"})
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # what may stand in a log line as it is


def request_id(scope: Scope) -> str | None:
    """What the client calls this call, by its header X-Request-Id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            given: bytes = value
            return given.decode()
    return None


class Gateway:
    """Pure ASGI. Without keys every call passes. With ``tells_request_id`` every response has the
    header X-Request-Id, the client's or a new one."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        metrics: Metrics,
        paths: Collection[str],
        tells_request_id: bool,
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._tells_request_id = tells_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        handler = path if path in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.response_sent(handler, message["status"])
                if self._tells_request_id:
                    name = request_id(scope) or secrets.token_hex(16)
                    headers = [*message["headers"], (b"x-request-id", name.encode())]
                    message = {**message, "headers": headers}
            await send(message)

        if self._digests and path not in _OPEN_PATHS and not self._knows(scope):
            await _refuse(counted)
            self._metrics.failed(UnauthorizedError())
            return
        await self._app(scope, receive, counted)

    def _knows(self, scope: Scope) -> bool:
        """Whether the call has a key. All are compared, each in constant time."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _refuse(send: Send) -> None:
    error = UnauthorizedError("no valid API key; send the header Authorization: Bearer KEY")
    body = msgspec.json.encode(error_body(error)[1])
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
