"""The other processes of a server: the engine, and API processes beyond the first.

They are started, watched and stopped together. The engine may be started again; an API process that
dies ends the server, since half of its clients would be refused at random.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import ApiProcessDiedError, EngineDiedError
from octavo.server.api_process import EngineAt, EngineLost, StartApi, Stop, ToApi
from octavo.server.config import ServerConfig
from octavo.server.messages import StartEngine
from octavo.server.processes import ENGINE_MODULE, ChildProcess

if TYPE_CHECKING:
    from octavo.server.engine_client import EngineClient

logger = logging.getLogger(__name__)

_API_MODULE = "octavo.server.api_process"
_WATCH_SECONDS = 1.0


class Supervisor:
    """``process`` is the engine's, which has been told nothing yet. ``folder`` is private to this
    server; each further API process gets one of ``listeners``."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        process: ChildProcess,
        folder: Path,
        listeners: Sequence[socket.socket],
        started: int,
    ) -> None:
        self._config = config
        self._engine_config = engine
        self._folder = folder
        self._num_engines = 0
        self._engine = process
        self._tell_engine()
        self.others: list[ChildProcess] = []
        for listener in listeners:
            other = ChildProcess(_API_MODULE, [listener.fileno()])
            other.tell(StartApi(config, engine, listener.fileno(), started))
            self.others.append(other)
        # asyncio's own threads are few, and needed for work.
        self._waiters = ThreadPoolExecutor(1 + len(self.others), "octavo-wait")

    async def keep_engine(self, client: EngineClient) -> None:
        """Have all API processes follow the engine, ``client`` the first, and start it again as
        often as is allowed. Raises :class:`ConfigError` where the model can't be loaded, else
        :class:`EngineDiedError`."""
        restarts = self._config.restart_engine
        while True:
            self._tell_others(EngineAt(self._address))
            end = await self._follow_engine(client)
            error = EngineDiedError(f"the engine process {end}; its answers are lost")
            was_ready = client.ready is not None
            client.lost(error)
            self._tell_others(EngineLost(str(error)))
            if not was_ready or not restarts:
                raise error
            restarts -= 1
            logger.error("%s; starting it again, %d restarts left", error, restarts)
            self._engine = ChildProcess(ENGINE_MODULE)
            self._tell_engine()

    async def watch(self, other: ChildProcess) -> None:
        """Raise :class:`ApiProcessDiedError` when this API process has ended."""
        end = await self._end_of(other)
        from prometheus_client.multiprocess import mark_process_dead

        # Its answers are no load any more.
        mark_process_dead(other.pid)  # type: ignore[no-untyped-call]
        raise ApiProcessDiedError(f"an API process {end}; the server can't go on without it")

    def stop_others(self, seconds: float) -> None:
        """Tell the other API processes to finish their answers within so many seconds."""
        self._tell_others(Stop(seconds))

    def stop(self) -> None:
        """End all that still runs."""
        for process in (*self.others, self._engine):
            process.stop()

    # ---- the engine

    @property
    def _address(self) -> str:
        return f"ipc://{self._folder}/engine-{self._num_engines}"

    def _tell_engine(self) -> None:
        self._num_engines += 1  # what was meant for the last one is not for this one
        self._engine.tell(
            StartEngine(
                self._engine_config,
                self._address,
                num_peers=self._config.api_server_count,
                max_answers=self._config.max_answers(self._engine_config),
            )
        )

    async def _follow_engine(self, client: EngineClient) -> str:
        """Take the engine's messages until it ends; how it ended."""
        ended = self._end_of(self._engine)
        following = asyncio.create_task(client.follow(self._address))
        watching = asyncio.create_task(self._end_hang(client))
        try:
            waited: set[asyncio.Future[Any]] = {ended, following}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()  # raises why the model can't be loaded
            return await ended
        finally:
            self._engine.stop()
            following.cancel()
            watching.cancel()
            await asyncio.gather(following, watching, return_exceptions=True)

    async def _end_hang(self, client: EngineClient) -> None:
        """Kill the engine if it has work and is silent for too long. What is counted are looks, not
        time, so that a pause of this process, or of the whole machine, is no silence."""
        limit = self._config.watchdog_timeout
        if not limit:
            return
        pause, silent, heard = min(_WATCH_SECONDS, limit / 5), 0.0, 0
        while silent < limit:
            await asyncio.sleep(pause)
            working = client.ready is not None and client.metrics.load() > 0
            silent = silent + pause if working and client.num_messages == heard else 0.0
            heard = client.num_messages
        await asyncio.to_thread(
            self._engine.kill,
            f"had work but finished no step for {limit:g} s, so that it was killed "
            "(watchdog_timeout; a smaller max_num_batched_tokens makes shorter steps)",
        )

    # ---- all of them

    def _tell_others(self, message: ToApi) -> None:
        for process in self.others:
            process.tell(message)

    def _end_of(self, process: ChildProcess) -> asyncio.Future[str]:
        return asyncio.get_running_loop().run_in_executor(self._waiters, process.wait)
