"""One API process's own part: the text side, the routes and uvicorn on a socket that listens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Iterator

import uvicorn

from octavo.config import EngineConfig
from octavo.engine.build import load_text_side
from octavo.errors import OverloadedError
from octavo.server.app import Api, make_app
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.metrics import Metrics
from octavo.server.parsers import choose_parsers
from octavo.server.prepare import Serving
from octavo.text import read_content_rules

logger = logging.getLogger(__name__)

# A step makes thousands of small objects that all die young. What is there at the start is never
# looked at again, and new objects seldom: it is 4 us a streamed token less.
_GC_THRESHOLDS = (50_000, 20, 100)
_DRAIN_POLL = 0.05
GRACE_SECONDS = 2  # for the last events to leave, after the answers have ended


class ApiServer:
    """Loaded on construction, which raises a subclass of :class:`octavo.errors.OctavoError` where
    it can't be; then :meth:`serve_http` runs until :meth:`end`. ``client`` needs to be told of the
    engine. ``started`` is the server's start in seconds since the epoch; the ``first`` of several
    API processes counts what the engine tells them all."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        listener: socket.socket,
        started: int,
        *,
        first: bool,
    ) -> None:
        text = load_text_side(engine)
        if config.content_rules is not None:
            text.frontend.content_rules = read_content_rules(config.content_rules)
        names = config.served_model_name or (engine.model or text.model,)
        self.name = names[0]
        self.client = EngineClient(
            text.frontend,
            Metrics(names[0], config.goodput_limits, config.metrics_alias_vllm, counts_steps=first),
            max_answers=config.max_answers(engine),
        )
        serving = Serving(
            engine=self.client,
            tokenizer=text.tokenizer,
            name=names[0],
            vocab_size=text.vocab_size,
            defaults=text.defaults,
            parsers=choose_parsers(
                text.tokenizer, config.tool_call_parser, config.reasoning_parser
            ),
            force_usage=config.enable_force_include_usage,
            log_requests=config.enable_log_requests,
        )
        self._listener = listener
        self._server = _Server(_uvicorn_config(config, Api(config, serving, names, started)))
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)

    async def serve_http(self) -> None:
        await self._server.serve([self._listener])

    async def drain(self, seconds: float) -> None:
        """Refuse new calls and let those that run finish, in every API process, as long as they
        may."""
        client = self.client
        client.draining = True
        began = time.monotonic()
        if seconds and client.num_answers:
            logger.info("stopping: %d answers may take %g s more", client.num_answers, seconds)
        while client.metrics.load() and time.monotonic() - began < seconds:
            await asyncio.sleep(_DRAIN_POLL)
        client.fail_all(OverloadedError("the server is shutting down; the answer is cut off"))

    async def end(self, serving: asyncio.Task[None]) -> None:
        """End :meth:`serve_http`, the task ``serving``: clients get some seconds to read what there
        still is for them, then their connections are cut."""
        self._server.should_exit = True
        await asyncio.wait({serving}, timeout=GRACE_SECONDS)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await serving


class _Server(uvicorn.Server):
    """uvicorn's, without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(config: ServerConfig, api: Api) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(api),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
    )
