"""Starting, watching and stopping the server: the first API process is this one.

In order: the engine process begins to import; the port is taken and the model planned for, so that
a start in vain ends at once; the engine is told what to load, and API processes beyond the first
begin; the text side is loaded meanwhile. Calls get 503 until the engine is ready. SIGTERM or Ctrl-C
lets running answers finish, for ``shutdown_timeout`` seconds; a second Ctrl-C ends everything at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.build import check_plan
from octavo.errors import ConfigError
from octavo.server.config import METRICS_FOLDER_VARIABLE, ServerConfig
from octavo.server.processes import ChildProcess, log_to_stderr
from octavo.text import read_content_rules

if TYPE_CHECKING:
    from octavo.server.api import ApiServer
    from octavo.server.engine_client import EngineClient
    from octavo.server.supervisor import Supervisor

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_STATS_SECONDS = 10.0
KEY_VARIABLE = "OCTAVO_API_KEY"


def serve(config: ServerConfig, engine: EngineConfig, process: ChildProcess) -> None:
    """Serve until told to stop, with an engine process that has just begun; it is ended here.
    Raises a subclass of :class:`octavo.errors.OctavoError` where the server can't start, and
    :class:`EngineDiedError` or :class:`ApiProcessDiedError` where it can't go on."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(process.stop, 0.0)
        _serve_with(config, engine, process, stack, began)


def _serve_with(
    config: ServerConfig,
    engine: EngineConfig,
    process: ChildProcess,
    stack: contextlib.ExitStack,
    began: float,
) -> None:
    if key := os.environ.get(KEY_VARIABLE):
        config = replace(config, api_key=(*config.api_key, key))
    log_to_stderr()
    _check_files(config)
    listeners = _listen(config)
    for listener in listeners:
        stack.enter_context(contextlib.closing(listener))
    check_plan(engine)  # what can't be served is said before anything is loaded
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
    _share_metrics(folder, config.api_server_count)

    from octavo.server.supervisor import Supervisor

    started = int(time.time())
    supervisor = Supervisor(config, engine, process, folder, listeners[1:], started)
    stack.callback(supervisor.stop)
    for listener in listeners[1:]:
        listener.close()  # theirs alone: what comes in there is for them to accept
    _serve(config, engine, supervisor, listeners[0], started, began)


def _share_metrics(folder: Path, num_processes: int) -> None:
    """Say whether several processes count; prometheus_client reads that once it is imported."""
    os.environ.pop(METRICS_FOLDER_VARIABLE, None)
    if num_processes > 1:
        metrics = folder / "metrics"
        metrics.mkdir()
        os.environ[METRICS_FOLDER_VARIABLE] = str(metrics)


def _serve(
    config: ServerConfig,
    engine: EngineConfig,
    supervisor: Supervisor,
    listener: socket.socket,
    started: int,
    began: float,
) -> None:
    import uvloop

    from octavo.server.api import GRACE_SECONDS, ApiServer

    api = ApiServer(config, engine, listener, started, first=True)

    async def run() -> None:
        stop = asyncio.Event()
        _on_signals(stop, supervisor)
        stopping = asyncio.create_task(stop.wait())
        serving_http = asyncio.create_task(api.serve_http())
        keeping = asyncio.create_task(supervisor.keep_engine(api.client))
        watching = [asyncio.create_task(supervisor.watch(other)) for other in supervisor.others]
        reporting = [
            asyncio.create_task(_announce(api, config, listener, began)),
            asyncio.create_task(_log_stats(api.client, config)),
        ]
        waited: set[asyncio.Task[Any]] = {stopping, serving_http, keeping, *watching}
        ended, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        grace = 0.0 if keeping.done() else config.shutdown_timeout
        supervisor.stop_others(grace)
        await api.drain(grace)
        await api.end(serving_http)
        await asyncio.wait({serving_http, *watching}, timeout=GRACE_SECONDS)
        if keeping.done():
            ended.add(keeping)
        tasks = [keeping, *watching, *reporting, stopping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended - {stopping}:
            task.result()  # raises why the server can't go on

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _on_signals(stop: asyncio.Event, supervisor: Supervisor) -> None:
    """SIGTERM and SIGINT begin the end; a second SIGINT is the end."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            print("octavo: stopped", file=sys.stderr)
            supervisor.stop()
            os._exit(128 + signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, stop.set)


async def _announce(
    api: ApiServer, config: ServerConfig, listener: socket.socket, began: float
) -> None:
    """Say that the server is ready, how long after the command began, and who may use it."""
    while api.client.ready is None:
        await asyncio.sleep(0.01)
    ready = api.client.ready
    for note in ready.notes:
        logger.info("%s", note)
    logger.info(
        "%s: attention %s, runtime %s, %s, up to %s tokens a request, loaded in %.1f s (%s)",
        api.name,
        ready.attention_backend,
        ready.runtime,
        ready.precision,
        f"{ready.max_total_tokens:,}",
        sum(ready.load_phases.values()),
        ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in ready.load_phases.items()),
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


def _listen(config: ServerConfig) -> list[socket.socket]:
    """A socket for each API process. Of several on one port the kernel deals out connections
    evenly; one socket that they all accept from would let the first to wake take them all."""
    count = config.api_server_count
    listeners: list[socket.socket] = []
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if count > 1:
            # Another server's port could be joined unnoticed: it must be free for one alone.
            with socket.socket(family, kind, protocol) as only:
                only.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                only.bind(address)
                address = only.getsockname()
        for _ in range(count):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if count > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(
            f"can't listen on {config.host} port {config.port} ({error.strerror or error}); choose "
            "another with --host and --port, or stop the program that has it"
        ) from error
    return listeners


def _check_files(config: ServerConfig) -> None:
    """Raise :class:`ConfigError` where a file that every API process will read can't be."""
    if config.content_rules is not None:
        read_content_rules(config.content_rules)
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name} is {path!r}, there is no such file")
    if config.ssl_certfile is not None:
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                config.ssl_certfile, config.ssl_keyfile
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"ssl_keyfile and ssl_certfile can't be used ({error}); give a private key and its "
                "certificate as PEM files"
            ) from error
