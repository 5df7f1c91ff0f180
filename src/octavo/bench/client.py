"""A client of OpenAI's streaming API for load generation: what came when, and nothing else.

HTTP/1.1 over asyncio protocols, parsed by httptools: a piece of text costs the client some ten
microseconds, so that hundreds of streams are timed and not queued for.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError

_ERROR_CHARS = 300  # of a server's message


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # older name of the same; some servers send both
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Piece(NamedTuple):
    """An event that brought text. ``num_tokens`` is what the server has counted by then, None where
    it counts at the end only."""

    time: float
    num_tokens: int | None


@dataclass
class Answer:
    """One streamed answer. ``sent`` is on the clock of ``time.perf_counter``, the times of its
    pieces are seconds since. ``status`` is HTTP's, 0 where no response came; ``error`` is None
    where the answer is whole."""

    sent: float
    status: int = 0
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""
    usage: Usage | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text. A chunk that only names the role, or is empty, is no text."""
        return self.pieces[0].time if self.pieces else 0.0

    @property
    def latency(self) -> float:
        """Seconds to the last text."""
        return self.pieces[-1].time if self.pieces else 0.0


class AnswerReader:
    """Reads the bytes of an event stream into an :class:`Answer`."""

    def __init__(self, sent: float) -> None:
        self.answer = Answer(sent)
        self._texts: list[str] = []
        self._rest = b""
        self._is_complete = False

    def feed(self, body: bytes, now: float) -> None:
        """Bytes that came at ``now``."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # others are comments, names of events, and empty
                self._read(line[5:].strip(), now - self.answer.sent)

    def end(self) -> Answer:
        """The answer; one that isn't whole has an error."""
        answer = self.answer
        answer.text = "".join(self._texts)
        if answer.error is None and not answer.pieces:
            answer.error = "no token came" + (f": {_start(self._rest)}" if self._rest else "")
        elif answer.error is None and not self._is_complete:
            answer.error = "the stream broke off"
        return answer

    def _read(self, data: bytes, time: float) -> None:
        if data == b"[DONE]":
            self._is_complete = True
            return
        try:
            event = _decode_event(data)
        except msgspec.MsgspecError as problem:
            self.answer.error = f"an event isn't OpenAI's: {problem}: {_start(data)}"
            return
        if event.error is not None:
            self.answer.error = _message(event.error)
        if event.usage is not None:
            self.answer.usage = event.usage
        if not event.choices:
            return
        choice = event.choices[0]
        if choice.finish_reason is not None:
            self._is_complete = True  # not every server sends [DONE]
        text, delta = choice.text or "", choice.delta
        if delta is not None:
            text = (delta.reasoning or delta.reasoning_content or "") + (delta.content or "")
        if text or (delta is not None and delta.tool_calls):
            self._texts.append(text)
            count = None if event.usage is None else event.usage.completion_tokens
            self.answer.pieces.append(Piece(time, count))


class Client:
    """Connections to one server, kept open from request to request.

    ``base_url`` is http or https, with a path or without. Raises :class:`ConfigError` for others.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"base_url is {base_url!r}, it must be like http://127.0.0.1:8000 or https://HOST"
            )
        self.base_url = base_url.rstrip("/")
        self._host = self._address = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        headers = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "octavo-bench"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise ConfigError("the base URL or the API key has characters that HTTP can't carry")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError where the server can't be reached."""
        body = bytearray()
        head = f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n"
        status = await self._exchange(head.encode(), lambda status, data: body.extend(data))
        return status, bytes(body)

    async def stream(self, path: str, request: Mapping[str, Any]) -> Answer:
        """Post a request and read its stream. Whatever goes wrong is the answer's ``error``."""
        body = msgspec.json.encode(request)
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        refusal = bytearray()
        reader = AnswerReader(time.perf_counter())

        def receive(status: int, data: bytes) -> None:
            if status == 200:
                reader.feed(data, time.perf_counter())
            else:
                refusal.extend(data)

        try:
            status = await self._exchange(head.encode() + body, receive)
        except OSError as problem:
            reader.answer.error = f"{self.base_url}: {problem}"
        else:
            reader.answer.status = status
            if status != 200:
                reader.answer.error = f"HTTP {status} from {path}: {refusal_reason(bytes(refusal))}"
        return reader.end()

    def close(self) -> None:
        """Close all connections that carry no request."""
        for connection in self._idle:
            connection.close()

    async def _exchange(self, request: bytes, receive: Callable[[int, bytes], None]) -> int:
        """Send a request, pass the response's body on, return its status."""
        while True:
            connection = self._take_idle()
            is_fresh = connection is None
            if connection is None:
                connection = await self._connect()
            try:
                status = await connection.exchange(request, receive)
            except OSError:
                if is_fresh or connection.has_response:
                    raise
                continue  # the server had closed it meanwhile
            if connection.is_open:
                self._idle.append(connection)
            return status

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        transport, connection = await asyncio.get_running_loop().create_connection(
            _Connection,
            self._address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        # Asking for the name once is enough, and measures the server instead of the resolver.
        self._address = transport.get_extra_info("peername")[0]
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. httptools calls the ``on_`` methods."""

    is_open = False
    has_response = False
    _transport: asyncio.Transport
    _parser: httptools.HttpResponseParser
    _receive: Callable[[int, bytes], None]
    _status = 0
    _ended: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, receive: Callable[[int, bytes], None]) -> int:
        self._parser = httptools.HttpResponseParser(self)
        self._receive = receive
        self._status = 0
        self.has_response = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        return self._status

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self.has_response = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as problem:
            self._end(ConnectionError(f"the answer isn't HTTP: {problem}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._status:
            self._end()  # a body may end with its connection; a stream knows its own end
        else:
            self._end(exc or ConnectionResetError("the server closed the connection"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._receive(self._status, body)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end()

    def _end(self, problem: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if problem is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(problem)


def refusal_reason(body: bytes) -> str:
    """What a response that isn't 200 says."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except msgspec.MsgspecError:
        error = None
    return _start(body) if error is None else _message(error)


def _message(error: Any) -> str:
    found = error.get("message", error) if isinstance(error, Mapping) else error
    return str(found)[:_ERROR_CHARS]


def _start(data: bytes) -> str:
    return data[:_ERROR_CHARS].decode("utf-8", "replace").strip()
