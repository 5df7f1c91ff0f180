"""The gate before every route: API keys, and a count of what was answered."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import UnauthorizedError
from octavo.server.errors import error_body
from octavo.server.metrics import Metrics

_OPEN_PATHS = frozenset({"/health"})


class Gateway:
    """Pure ASGI. Without keys every call passes."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], metrics: Metrics, paths: Collection[str]
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        handler = path if path in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.response_sent(handler, message["status"])
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
