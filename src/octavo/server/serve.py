"""Starting, watching and stopping the server: the API in this process, the engine in a child.

In order: the port is taken, so that a start in vain ends at once; the checkpoint is found; the
engine process begins to load; the text side is loaded meanwhile. Calls get 503 until the engine is
ready. SIGTERM or Ctrl-C lets running answers finish, for ``shutdown_timeout`` seconds; a second
Ctrl-C ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.build import load_text_side, open_model
from octavo.errors import ConfigError, OverloadedError
from octavo.server.config import ServerConfig
from octavo.text import ContentRules, read_content_rules

if TYPE_CHECKING:
    from octavo.server.engine_client import EngineClient, EngineProcess

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_STATS_SECONDS = 10.0
# A step makes thousands of small objects that all die young. What is there at the start is never
# looked at again, and new objects seldom: it is 4 us a streamed token less.
_GC_THRESHOLDS = (50_000, 20, 100)
_GRACE_SECONDS = 2  # for the last events to leave, after the answers have ended
KEY_VARIABLE = "OCTAVO_API_KEY"


def serve(config: ServerConfig, engine: EngineConfig) -> None:
    """Serve until told to stop. Raises a subclass of :class:`octavo.errors.OctavoError` where the
    server can't start, and :class:`EngineDiedError` where the engine has died for good."""
    if key := os.environ.get(KEY_VARIABLE):
        config = replace(config, api_key=(*config.api_key, key))
    _log_to_stderr()
    _check_files(config)
    rules = ContentRules()
    if config.content_rules is not None:
        rules = read_content_rules(config.content_rules)
    listener = _listen(config)
    open_model(engine)  # a model that isn't there is said before anything is started

    from octavo.server.engine_client import EngineProcess, socket_address

    folder, address = socket_address()
    with folder, contextlib.closing(listener):
        process = EngineProcess(engine, address)
        try:
            _serve(config, engine, process, listener, rules)
        finally:
            process.stop()


def _serve(
    config: ServerConfig,
    engine: EngineConfig,
    process: EngineProcess,
    listener: socket.socket,
    rules: ContentRules,
) -> None:
    import uvicorn

    from octavo.server.app import Api, make_app
    from octavo.server.engine_client import EngineClient
    from octavo.server.metrics import Metrics
    from octavo.server.parsers import choose_parsers
    from octavo.server.prepare import Serving

    text = load_text_side(engine)
    text.frontend.content_rules = rules
    names = config.served_model_name or (engine.model or text.model,)
    client = EngineClient(
        engine,
        text.frontend,
        Metrics(names[0], config.goodput_limits, config.metrics_alias_vllm),
        process,
        max_queued=config.max_num_queued_reqs,
        restarts=config.restart_engine,
    )
    parsers = choose_parsers(text.tokenizer, config.tool_call_parser, config.reasoning_parser)
    serving = Serving(
        engine=client,
        tokenizer=text.tokenizer,
        name=names[0],
        vocab_size=text.vocab_size,
        defaults=text.defaults,
        parsers=parsers,
        force_usage=config.enable_force_include_usage,
        log_requests=config.enable_log_requests,
    )
    app = make_app(Api(config, serving, names, int(time.time())))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    options = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    try:
        options.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_keyfile and ssl_certfile can't be used ({error}); give a private key and its "
            "certificate as PEM files"
        ) from error

    class Server(uvicorn.Server):
        """uvicorn's, without its signal handlers."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    async def run() -> None:
        server = Server(options)
        stop = asyncio.Event()
        _on_signals(stop, process)
        serving_http = asyncio.create_task(server.serve([listener]))
        following = asyncio.create_task(client.run())
        announcing = asyncio.create_task(_announce(client, config, names[0], listener))
        stopping = asyncio.create_task(stop.wait())
        logging_stats = asyncio.create_task(_log_stats(client, config))
        try:
            await asyncio.wait(
                {serving_http, following, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            if not following.done() and not serving_http.done():
                await _drain(client, config.shutdown_timeout, following)
            server.should_exit = True
            await serving_http
            if following.done():
                following.result()  # raises what ended the engine
        finally:
            for task in (announcing, stopping, logging_stats, following):
                task.cancel()
            await asyncio.gather(
                announcing, stopping, logging_stats, following, return_exceptions=True
            )

    with asyncio.Runner(loop_factory=options.get_loop_factory()) as runner:
        runner.run(run())


def _on_signals(stop: asyncio.Event, process: EngineProcess) -> None:
    """SIGTERM and SIGINT begin the end; a second SIGINT is the end."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            print("octavo: stopped", file=sys.stderr)
            process.stop()
            os._exit(128 + signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, stop.set)


async def _drain(client: EngineClient, timeout: float, following: asyncio.Task[None]) -> None:
    """Refuse new calls and let those that run finish, as long as they may."""
    client.draining = True
    began = time.monotonic()
    if client.num_answers:
        logger.info("stopping: %d answers may take %g s more", client.num_answers, timeout)
    while client.num_answers and time.monotonic() - began < timeout and not following.done():
        await asyncio.sleep(0.02)
    if client.num_answers:
        client.fail_all(OverloadedError("the server is shutting down; the answer is cut off"))


async def _announce(
    client: EngineClient, config: ServerConfig, name: str, listener: socket.socket
) -> None:
    """Say that the server is ready, and who may use it."""
    began = time.monotonic()
    while client.ready is None:
        await asyncio.sleep(0.01)
    ready = client.ready
    for note in ready.notes:
        logger.info("%s", note)
    logger.info(
        "%s: attention %s, runtime %s, %s, up to %s tokens a request, loaded in %.1f s",
        name,
        ready.attention_backend,
        ready.runtime,
        ready.precision,
        f"{ready.max_total_tokens:,}",
        ready.load_seconds,
    )
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    local = host in ("127.0.0.1", "::1")
    if config.api_key:
        access = "an API key is asked for"
    else:
        access = "open to " + ("this machine only" if local else "EVERYONE who can reach it")
        access += ", no API key is asked for"
    shown = f"[{host}]" if ":" in host else host
    waited = time.monotonic() - began
    logger.info("ready on %s://%s:%d after %.1f s, %s", scheme, shown, port, waited, access)


async def _log_stats(client: EngineClient, config: ServerConfig) -> None:
    """A line of figures now and then, while there is work."""
    before, then = client.stats, time.monotonic()
    while not config.disable_log_stats:
        await asyncio.sleep(_STATS_SECONDS)
        now, stats = time.monotonic(), client.stats
        if stats is not None and before is not None and stats.num_steps > before.num_steps:
            seconds = now - then
            logger.info(
                "%d running, %d waiting, %.1f prompt tok/s, %.1f generated tok/s, KV cache %.1f%%",
                stats.num_running,
                stats.num_waiting,
                (stats.prompt_tokens - before.prompt_tokens) / seconds,
                (stats.generation_tokens - before.generation_tokens) / seconds,
                100 * stats.kv_cache_usage,
            )
        before, then = stats, now


def _listen(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"can't listen on {config.host} port {config.port} ({error.strerror or error}); choose "
            "another with --host and --port, or stop the program that has it"
        ) from error
    listener.setblocking(False)
    return listener


def _check_files(config: ServerConfig) -> None:
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name} is {path!r}, there is no such file")


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
