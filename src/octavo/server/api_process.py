"""A further API process of ``--api-server-count``: what its parent, the first one, has it do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec
import uvloop

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDiedError
from octavo.server import processes
from octavo.server.config import ServerConfig


class StartApi(msgspec.Struct):
    """The first thing it reads, on its standard input."""

    config: ServerConfig
    engine: EngineConfig
    listener: int  # the file descriptor of a socket that listens
    started: int  # the server's start, seconds since the epoch


class EngineAt(msgspec.Struct, tag=True):
    """An engine is at this address, or will be."""

    address: str


class EngineLost(msgspec.Struct, tag=True):
    """That engine is gone."""

    message: str


class Stop(msgspec.Struct, tag=True):
    """Let running answers finish, for so many seconds at most, and end."""

    seconds: float


ToApi = EngineAt | EngineLost | Stop


def main() -> None:
    """Serve until told to stop; end at once with the parent."""
    start = msgspec.msgpack.decode(processes.begin(), type=StartApi)
    processes.log_to_stderr()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(start))


async def _serve(start: StartApi) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[bytes] = asyncio.Queue()

    def heard(raw: bytes) -> None:
        loop.call_soon_threadsafe(orders.put_nowait, raw)

    processes.listen(heard)
    from octavo.server.api import ApiServer  # a second of imports, during which the parent may die

    listener = socket.socket(fileno=start.listener)
    api = ApiServer(start.config, start.engine, listener, start.started, first=False)
    stop: asyncio.Future[float] = loop.create_future()

    async def follow(address: str) -> None:
        with contextlib.suppress(ConfigError):  # the parent hears and tells it as well
            await api.client.follow(address)

    async def obey() -> None:
        decode = msgspec.msgpack.Decoder(ToApi).decode
        following: asyncio.Task[None] | None = None
        while True:
            match decode(await orders.get()):
                case EngineAt(address):
                    following = asyncio.create_task(follow(address))
                case EngineLost(message):
                    if following is not None:
                        following.cancel()
                    api.client.lost(EngineDiedError(message))
                case Stop(seconds):
                    stop.set_result(seconds)

    obeying = asyncio.create_task(obey())
    serving_http = asyncio.create_task(api.serve_http())
    waited: set[asyncio.Future[Any]] = {serving_http, stop, obeying}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        await api.drain(stop.result())
    await api.end(serving_http)
    if obeying.done():
        obeying.result()  # raises what it died of


if __name__ == "__main__":
    main()
