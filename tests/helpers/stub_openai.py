"""A server that streams what a script says, at the times it says: what a benchmark's client must
measure is known beforehand."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Timed = list[tuple[float, bytes]]  # milliseconds from the request, and what is sent then
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(choices: list[Any], **rest: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps({"id": "x", "choices": choices, **rest}).encode()


def chat_piece(**delta: Any) -> bytes:
    return event([{"index": 0, "delta": delta, "finish_reason": None}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    total = prompt_tokens + completion_tokens
    return event(
        [],
        usage={
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": total,
        },
    )


def case_39(texts: list[str] | None = None, empty_at: float | None = None) -> Timed:
    """The stream of case O39: a role at 5 ms, 8 chunks of 4 tokens from 100 to 380 ms, usage."""
    texts = texts or ["four of them"] * 8
    script = [(5.0, chat_piece(role="assistant", content=""))]
    script += [(100.0 + 40 * i, chat_piece(content=text)) for i, text in enumerate(texts)]
    if empty_at is not None:
        script.append((empty_at, chat_piece(content="")))
    script.sort(key=lambda timed: timed[0])
    end = [(400.0, event([{"index": 0, "delta": {}, "finish_reason": "stop"}]))]
    return [*script, *end, (400.0, usage(10, 32)), (400.0, DONE)]


@dataclass
class Call:
    """What a client asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class Stub:
    """``script`` chooses the stream for a request's JSON; a number is an HTTP error instead, None a
    connection that is cut. Without keep-alive each response ends its connection, unannounced."""

    script: Callable[[Any], Timed | int | None]
    keep_alive: bool = True
    tls: ssl.SSLContext | None = None
    models: int | None = None  # the status with which /v1/models names none
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
                if not self.keep_alive:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split()
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw) if raw else None
        self.calls.append(Call(method, path, headers, body))
        if method == "GET" and self.models is None:
            _reply(writer, 200, {"data": [{"id": "stub-1b"}, {"id": "other"}]})
            return
        if method == "GET":
            _reply(writer, self.models, {"error": {"message": "no room", "code": None}})
            return
        script = self.script(body)
        if script is None:
            raise ConnectionError
        if isinstance(script, int):
            _reply(writer, script, {"error": {"message": "no room", "code": None}})
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        writer.write(HEAD)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for ms, data in script:
            if (wait := began + ms / 1000 - loop.time()) > 0:
                await asyncio.sleep(wait)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.num_open -= 1  # before the end: the client may be as quick to begin another
        writer.write(b"0\r\n\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    raw = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (status, len(raw), raw)
    )


@contextmanager
def stub_server(script: Callable[[Any], Timed | int | None], **options: Any) -> Iterator[Stub]:
    """The stub, on a free port, in a thread of its own."""
    stub = Stub(script, **options)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(stub.handle, "127.0.0.1", 0, ssl=stub.tls)
    )
    stub.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        server.close()
        loop.close()
